"""`SglangLoadOffer`: features of SGLang's engine, the combinations that it refuses, and its arguments.

Does not: import SGLang before `prepare`.
"""

import gc
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from graphpact.engines import EngineStart, Feature, KnownFinding, LoadedEngine, LoadOffer
from graphpact.errors import UsageError
from graphpact.files import read_file
from graphpact_sglang.arguments import LAPTOP
from graphpact_sglang.load.known import KNOWN

_STEPS = 3
"""Steps of a draft."""
_CHAIN = {
    "speculative_num_steps": _STEPS,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": _STEPS + 1,
}
_TREE = {"speculative_num_steps": _STEPS, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}

# Requests are retracted where the cache is starved, SGLang expects short answers (`conservativeness`), and
# they arrive one after another.
FEATURES = (
    Feature(name="decode_sizes", values=([1, 2, 4, 8], [2, 4], [1, 8], [3, 5, 7])),
    Feature(name="prefill_graph", values=(None, [16, 32, 64, 128], [8, 24, 40])),
    Feature(name="page_size", values=(1, 4, 16)),
    Feature(name="chunk", values=(None, 16, 24, 40)),
    Feature(name="mixed_chunk", values=(False, True)),
    Feature(name="prefix_cache", values=(False, True)),
    Feature(name="drafts", values=(None, "standalone", "standalone_tree", "eagle", "eagle_tree")),
    Feature(name="overlap", values=(False, True)),
    Feature(name="cache_tokens", values=(4096, 512, 192)),
    Feature(name="conservativeness", values=(1.0, 0.1)),
    Feature(name="max_requests", values=(8, 3, 16)),
    Feature(name="parallel", values=(1, "tp2", "dp2"), plain_share=0.85),  # ranks start for each seed
    Feature(name="backend", values=("graphpact", "fa3")),
)


class SglangLoadOffer(LoadOffer):
    """SGLang under generated load, in one process for each rank."""

    draft_models: ClassVar[tuple[str, ...]] = ("eagle", "eagle_tree")

    def features(self) -> Sequence[Feature]:
        """Return the features of configurations."""
        return FEATURES

    def refused(self, how: EngineStart) -> str | None:
        """Return why SGLang refuses a combination of values or switches one off; None if it takes it."""
        choice = how.choice
        drafts, page, is_dp = choice["drafts"] or "", choice["page_size"], choice["parallel"] == "dp2"
        is_paged_tree = drafts.endswith("tree") and page > 1
        is_standalone = drafts.startswith("standalone")
        reasons = {
            "chunked_prefill_size must be divisible by page_size": choice["chunk"] is not None
            and choice["chunk"] % page != 0,
            "trees of drafts with pages above 1 token are only supported on flashinfer, fa3 and"
            " triton": is_paged_tree and choice["backend"] not in ("flashinfer", "fa3", "triton"),
            "fa3 does not support trees of drafts with pages above 1 token and a sliding"
            " window": is_paged_tree and choice["backend"] == "fa3" and _has_window(how.model),
            "STANDALONE drafts do not support mixed steps: SGLang switches them off": is_standalone
            and choice["mixed_chunk"],
            "standalone speculative decoding does not support dp attention": is_standalone and is_dp,
            "some dense models, Llama and Gemma3 among them, are wrong with dp attention, silently": is_dp
            and not _has_experts(how.model),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def ranks(self, choice: Mapping[str, Any]) -> int:
        """Return the number of processes of a configuration."""
        return 1 if choice["parallel"] == 1 else 2

    def shares_requests(self, choice: Mapping[str, Any]) -> bool:
        """Return whether all ranks run all requests; those of data parallel attention have their own."""
        return bool(choice["parallel"] != "dp2")

    def variables(self) -> Mapping[str, str]:
        """Return environment variables that must be set before SGLang is imported."""
        return {
            "GRAPHPACT": "tape",  # read when SGLang chooses its platform; a start chooses its own words
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",  # SGLang counts its pages after every step
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
            "TRITON_INTERPRET": "1",
        }

    def known(self) -> Sequence[KnownFinding]:
        """Return findings of SGLang 0.5.23 that were looked into."""
        return KNOWN

    def prepare(self) -> None:
        """Import SGLang, and keep what is imported out of the collections of garbage around its captures."""
        from graphpact_sglang import stand_ins  # noqa: PLC0415  SGLang is imported here, not before

        os.environ.update({name: value for name, value in self.variables().items() if name not in os.environ})
        stand_ins.install()
        from graphpact_sglang.load import engine  # noqa: PLC0415

        engine.warm_up()
        gc.collect()
        gc.freeze()
        gc.unfreeze = gc.freeze  # SGLang unfreezes after its captures

    def start(self, how: EngineStart) -> LoadedEngine:
        """Start SGLang in this process."""
        from graphpact_sglang.load.engine import SglangLoadedEngine  # noqa: PLC0415  it imports SGLang

        os.environ["GRAPHPACT"] = words_of(how)
        return SglangLoadedEngine(how, arguments_of(how))


def _config(model: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(read_file(model / "config.json"))
    text: dict[str, Any] = config.get("text_config", config)
    return text


def _has_window(model: Path) -> bool:
    """Return whether layers of a checkpoint have a sliding window; SGLang raises in the first step."""
    return bool(_config(model).get("sliding_window"))


def _has_experts(model: Path) -> bool:
    """Return whether a checkpoint has experts: such models of SGLang gather the tokens of all ranks."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(_config(model).get(name) for name in names)


def words_of(how: EngineStart) -> str:
    """Return the value of ``GRAPHPACT`` for a start.

    A strict tape refuses drafts by FlashAttention-3: Triton's interpreter prepares them in the graph, and a
    launch counts as a write of all its tensors, the scheduler's own among them. They run on the fast tape.
    """
    is_refused = how.choice.get("drafts") is not None and how.choice.get("backend") == "fa3"
    tape = "tape:strict" if how.is_strict and (how.is_eager or not is_refused) else "tape"
    return tape if how.is_eager else f"{tape},guard,contents:1,verify:1"


def arguments_of(how: EngineStart) -> dict[str, Any]:
    """Return SGLang's arguments for a start; see ``ServerArgs``."""
    choice = {feature.name: feature.values[0] for feature in FEATURES} | dict(how.choice)
    found: dict[str, Any] = LAPTOP | {
        "model_path": str(how.model),
        "log_level": "error",
        "skip_tokenizer_init": True,
        "disable_hybrid_swa_memory": True,  # our attention backend serves one pool, with windows as masks
        "attention_backend": choice["backend"],
        "page_size": choice["page_size"],
        "chunked_prefill_size": choice["chunk"] or -1,
        "enable_mixed_chunk": choice["mixed_chunk"],
        "disable_radix_cache": not choice["prefix_cache"],
        "disable_overlap_schedule": not choice["overlap"],
        "max_total_tokens": choice["cache_tokens"],
        "max_running_requests": choice["max_requests"],
        "schedule_conservativeness": choice["conservativeness"],
    }
    found |= (
        _graphs(choice)
        if not how.is_eager
        else {
            "cuda_graph_backend_decode": "disabled",
            "cuda_graph_backend_prefill": "disabled",
        }
    )
    if not how.is_eager and choice["drafts"] is not None:
        found |= _drafts(choice["drafts"], how)
    if choice["parallel"] != 1:
        found |= {"tp_size": 2, "nccl_port": how.port}
    if choice["parallel"] == "dp2":
        found |= {"attn_dp_size": 2}
    return found | dict(how.settings)


def _graphs(choice: Mapping[str, Any]) -> dict[str, Any]:
    sizes = choice["prefill_graph"]
    prefill: dict[str, Any] = {"cuda_graph_backend_prefill": "disabled"}
    if sizes is not None:
        prefill = {"cuda_graph_backend_prefill": "breakable", "cuda_graph_bs_prefill": list(sizes)}
    return prefill | {
        "cuda_graph_backend_decode": "full",
        "cuda_graph_bs_decode": list(choice["decode_sizes"]),
    }


def _drafts(name: str, how: EngineStart) -> dict[str, Any]:
    """Return the arguments of drafts: by the model itself, or by a head for it."""
    algorithm = name.partition("_")[0]
    draft = how.drafts.get(name) or how.drafts.get(algorithm)
    if algorithm == "standalone":
        draft = how.model
    if draft is None:
        raise UsageError(f"drafts of {name} need a draft model", hint=f"give its folder: --draft {name}=DIR")
    return {
        "speculative_algorithm": algorithm.upper(),
        "speculative_draft_model_path": str(draft),
        **(_TREE if name.endswith("tree") else _CHAIN),
    }
