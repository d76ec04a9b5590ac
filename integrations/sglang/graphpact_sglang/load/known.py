"""`KNOWN`: what generated load finds in SGLang 0.5.23 as it is, with what is wrong in SGLang's code.

Each has a scenario in ``examples/swarm`` that finds it: ``graphpact swarm sglang --scenario FILE``.

Does not: excuse anything else; a finding of another kind, text or configuration is new.
"""

from graphpact.engines import KnownFinding

_STANDALONE = ("standalone", "standalone_tree")
_DRAFTS = (*_STANDALONE, "eagle", "eagle_tree")
_ABORTED = (
    "an abort of a running request ends it by `to_finish`, before its new tokens are cut:"
    " Req.update_finish_state returns at once, so drafts that were accepted after a stop token or after"
    " max_new_tokens are given out; sglang 33758 cuts them for the other ends"
)

KNOWN = (
    KnownFinding(
        kind="start",
        text="*'NoneType' object has no attribute 'is_contiguous'*",
        choice={"model": ("experts",), "drafts": _STANDALONE},
        reason=(
            "a whole Qwen3-MoE as the draft model of STANDALONE: ModelConfig._config_draft_model renames"
            " every Qwen3MoeForCausalLM that drafts to Qwen3MoeForCausalLMMTP, which needs hidden states that"
            " STANDALONE does not give; since sglang 26468"
        ),
    ),
    KnownFinding(
        kind="end",
        text="it has * tokens, and asked for * at most, though it was aborted",
        choice={"drafts": _DRAFTS},
        reason=_ABORTED,
    ),
    KnownFinding(
        kind="end",
        text="token * is a stop token, and * more followed, though it was aborted",
        choice={"drafts": _DRAFTS},
        reason=_ABORTED,
    ),
    KnownFinding(
        kind="tokens",
        choice={"model": ("llama", "windows"), "parallel": ("dp2",)},
        reason=(
            "LlamaAttention and Gemma3Attention split heads over all ranks, and add up over all of them;"
            " with data parallel attention each rank has tokens of its own, and nothing refuses it"
        ),
    ),
)
