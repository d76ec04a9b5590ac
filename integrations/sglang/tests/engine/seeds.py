"""The pull requests of SGLang from which graphpact began: the fix of each, taken out of the released engine.

Fixes are taken out by changes of running objects, each in a child process. What a fix became in SGLang 0.5.23
is said at its exhibits. The draft extend of TensorRT-LLM (PR 21987) is in `draft_extend`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import torch
from engines import requests
from sglang.srt.model_executor import cuda_graph_buffer_registry, forward_batch_info, input_buffers
from sglang.srt.model_executor.cuda_graph_buffer_registry import PaddingPolicy
from sglang.srt.model_executor.runner import decode_cuda_graph_runner, prefill_cuda_graph_runner

from graphpact.engines import PromptRequest
from graphpact_sglang.load.in_process import InProcessEngine

Answers = Literal["right", "wrong", "refused"]
Plant = Callable[[InProcessEngine], None]
RUNNERS = {"decode": "decode_cuda_graph_runner", "prefill": "prefill_cuda_graph_runner"}


@dataclass(frozen=True, kw_only=True)
class Seed:
    """A fix that is taken out.

    Args:
        pull_request: Its number.
        named: Rule, owner and field under which the guard must name it.
        answers: What the answers are without the fix: right, wrong, or none, because the kernel refuses its
            arguments.
        requests: Makes the requests of a run.
        arguments: Arguments of the engine.
        rounds: How often the requests run: in the second round all prompts are in the prefix cache.
        ranks: Ranks of tensor parallelism, whose engines run each in a process.
        always: Changes the engine with and without the fix.
        before: Takes the fix out before the engine starts.
        plant: Takes the fix out of a started engine.
    """

    pull_request: int
    named: tuple[str, str, str]
    answers: Answers
    requests: Callable[[], Sequence[PromptRequest]]
    arguments: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    ranks: int = 1
    always: Plant | None = None
    before: Callable[[], None] | None = None
    plant: Plant | None = None


# -- requests ------------------------------------------------------------------------------------------------


def shrinking() -> list[PromptRequest]:
    """Return requests that begin together and end one after another: batches shrink below their sizes."""
    given = requests(every=0)
    for at, request in enumerate(given):
        request.max_new_tokens = 4 + 3 * at
    return given


def staggered() -> list[PromptRequest]:
    """Return requests that begin one after another: prompts of several lengths in graphs of one size."""
    return requests(max_new_tokens=6)


def few_after_many() -> list[PromptRequest]:
    """Return five requests that begin together, and three that follow: a prompt batch of fewer requests."""
    given = requests(max_new_tokens=6, every=0)
    for request in given[5:]:
        request.arrives_in = 4
    return given


# -- PR 22404: the count of live tokens ----------------------------------------------------------------------
# In 0.5.23 a slot of the buffer registry computes it in a `post_fill`, and `capture_prepare` by the same
# function. Where ranks share the tokens, experts of one data-parallel rank do not read it in a graph
# (`moe_num_token_non_padded`), so that answers do not show a wrong share; they show a wrong whole count.


def without_pinned_memory(engine: InProcessEngine) -> None:
    """Let SGLang pad shared tokens of eager prompts in plain memory: a CPU has no other.

    It asks ``SGLANG_USE_CPU_ENGINE`` when it is imported.
    """
    del engine
    forward_batch_info._is_cpu = True


def capture_counts_plainly() -> None:
    """Count all tokens of the shape at capture, on each rank."""

    def plain(*, global_num_token_non_padded: torch.Tensor, **shape: Any) -> torch.Tensor:
        del shape
        return global_num_token_non_padded

    decode_cuda_graph_runner.compute_local_num_token_non_padded = plain


def shares_of_live_tokens(engine: InProcessEngine) -> None:
    """Share the live tokens among the ranks, instead of the padded ones."""
    slot = _slot(engine, "decode", "num_token_non_padded")
    right = slot.post_fill

    def post_fill(memory: torch.Tensor, batch: Any, context: Any) -> None:
        right(memory, batch, SimpleNamespace(padded_num_tokens=context.raw_num_tokens))

    slot.post_fill = post_fill


def counts_of_capture(engine: InProcessEngine) -> None:
    """Leave the count as the last capture wrote it; prompts and decode share its memory."""
    for runner in RUNNERS:
        _slot(engine, runner, "num_token_non_padded").post_fill = None


# -- PR 21452: padding tokens of a prefill graph -------------------------------------------------------------
# 0.5.23 has no piecewise graphs, and no request that owns the padding. Attention of a breakable graph is
# given the live tokens alone, as many as the padded batch says. A full graph has empty requests instead.


def padding_tokens_reach_attention() -> None:
    """Let the padded batch say that all of its tokens are live."""
    make = prefill_cuda_graph_runner.ForwardBatch

    def made(**fields: Any) -> Any:
        return make(**fields | {"global_num_token_non_padded_cpu": len(fields["input_ids"])})

    prefill_cuda_graph_runner.ForwardBatch = made


def requests_of_the_batch_before(engine: InProcessEngine) -> None:
    """Leave the requests that a batch lacks as an earlier batch had them."""
    runner = engine.model_runner.prefill_cuda_graph_runner
    memories, prepare = runner._prefill_static_buffers, runner._prepare_forward_metadata_for_replay
    before = {name: memory.clone() for name, memory in memories.items()}

    def prepared(batch: Any, *args: Any) -> Any:
        for name, memory in memories.items():
            memory[batch.batch_size :] = before[name][batch.batch_size :]
            before[name] = memory.clone()
        return prepare(batch, *args)

    runner._prepare_forward_metadata_for_replay = prepared


# -- PRs 26292 and 26742: padding by policy, and shared memory -----------------------------------------------


def _slot(engine: InProcessEngine, runner: str, name: str) -> Any:
    return getattr(engine.model_runner, RUNNERS[runner]).buffer_registry.get_slot(name)


def keeps_padding(runner: str, name: str) -> Plant:
    """Return a plant: a slot keeps its padding rows."""

    def plant(engine: InProcessEngine) -> None:
        _slot(engine, runner, name).padding_policy = PaddingPolicy.KEEP_PAD

    return plant


def not_copied(runner: str, name: str) -> Plant:
    """Return a plant: a slot is not copied from the batch."""

    def plant(engine: InProcessEngine) -> None:
        _slot(engine, runner, name).copy_from_fb = False

    return plant


def registered_again(engine: InProcessEngine) -> None:
    """Register larger memory under every name, as another runner would, and the decode runner's again."""
    runner = engine.model_runner.decode_cuda_graph_runner
    slots = [runner.buffer_registry.get_slot(name) for name in runner.buffer_registry.slot_names()]
    for slot in slots:
        input_buffers.share_input_buffer(slot.name, slot.buffer.new_zeros(1 << 16))
    runner.buffers.share_buffers()
    for slot in slots:
        slot.buffer = getattr(runner.buffers, slot.name)


def shared_by_name() -> None:
    """Share memory by its name alone: what is larger takes the place, as before the registry."""
    pool: dict[str, torch.Tensor] = {}

    def share(name: str, new: torch.Tensor) -> torch.Tensor:
        if name not in pool or new.numel() > pool[name].numel():
            pool[name] = new
        return pool[name].as_strided(new.size(), new.stride())

    input_buffers.share_input_buffer = share
    cuda_graph_buffer_registry.share_input_buffer = share


# -- the table -----------------------------------------------------------------------------------------------

EXPERTS: dict[str, Any] = {"ep_size": 2}
SHARED: dict[str, Any] = EXPERTS | {"moe_dense_tp_size": 1}  # then ranks share the tokens
FA3: dict[str, Any] = {"attention_backend": "fa3"}
FULL: dict[str, Any] = FA3 | {"cuda_graph_backend_prefill": "full"}
_COUNT = ("DecodeInputBuffers", "num_token_non_padded")
_OFFSETS = "forward_metadata"

SEEDS: dict[str, Seed] = {
    "capture-counts-plainly": Seed(
        pull_request=22404,
        named=("GP11", *_COUNT),
        answers="right",
        requests=few_after_many,
        arguments=SHARED,
        ranks=2,
        always=without_pinned_memory,
        before=capture_counts_plainly,
    ),
    "shares-of-live-tokens": Seed(
        pull_request=22404,
        named=("GP02", *_COUNT),
        answers="right",
        requests=few_after_many,
        arguments=SHARED,
        ranks=2,
        always=without_pinned_memory,
        plant=shares_of_live_tokens,
    ),
    "count-of-capture": Seed(
        pull_request=22404,
        named=("GP02", *_COUNT),
        answers="wrong",
        requests=few_after_many,
        arguments=EXPERTS,
        ranks=2,
        plant=counts_of_capture,
    ),
    "padding-tokens-reach-attention": Seed(
        pull_request=21452,
        named=("GP05", "PagedAttnBackend", f"{_OFFSETS}.qo_indptr"),
        answers="refused",
        requests=shrinking,
        before=padding_tokens_reach_attention,
    ),
    "padding-tokens-reach-fa3": Seed(
        pull_request=21452,
        named=("GP05", "FlashAttentionBackend", f"{_OFFSETS}.cu_seqlens_q"),
        answers="right",
        requests=shrinking,
        arguments=FA3,
        before=padding_tokens_reach_attention,
    ),
    "requests-of-the-batch-before": Seed(
        pull_request=21452,
        named=("GP03", "FlashAttentionBackend", "cu_seqlens_q"),
        answers="refused",
        requests=few_after_many,
        arguments=FULL,
        plant=requests_of_the_batch_before,
    ),
    "request-rows-keep-padding": Seed(
        pull_request=26292,
        named=("GP03", "DecodeInputBuffers", "req_pool_indices"),
        answers="right",
        requests=shrinking,
        plant=keeps_padding("decode", "req_pool_indices"),
    ),
    "lengths-keep-padding": Seed(
        pull_request=26742,
        named=("GP03", "DecodeInputBuffers", "seq_lens"),
        answers="right",
        requests=shrinking,
        plant=keeps_padding("decode", "seq_lens"),
    ),
    "positions-keep-padding": Seed(
        pull_request=26742,
        named=("GP03", "DecodeInputBuffers", "positions"),
        answers="right",
        requests=shrinking,
        plant=keeps_padding("decode", "positions"),
    ),
    "slots-keep-padding": Seed(
        pull_request=26742,
        named=("GP03", "DecodeInputBuffers", "out_cache_loc"),
        answers="wrong",
        requests=shrinking,
        plant=keeps_padding("decode", "out_cache_loc"),
    ),
    "slots-of-prompts-keep-padding": Seed(
        pull_request=26742,
        named=("GP03", "PrefillInputBuffers", "out_cache_loc"),
        answers="wrong",
        requests=staggered,
        rounds=2,
        arguments=FULL,
        plant=keeps_padding("prefill", "out_cache_loc"),
    ),
    "lengths-are-not-copied": Seed(
        pull_request=26742,
        named=("GP02", "DecodeInputBuffers", "seq_lens"),
        answers="wrong",
        requests=shrinking,
        plant=not_copied("decode", "seq_lens"),
    ),
    "memory-is-shared-by-name": Seed(
        pull_request=26742,
        named=("GP01", "DecodeInputBuffers", "input_ids"),
        answers="wrong",
        requests=shrinking,
        always=registered_again,
        before=shared_by_name,
    ),
}
"""The exhibits, by name."""
