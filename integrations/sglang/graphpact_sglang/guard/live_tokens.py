"""The count of live tokens that layers of experts read, ``num_token_non_padded``: what it must be.

Experts take no padding token, so their layers read how many tokens are live. Where the ranks of attention
tensor parallelism share the tokens, each has the count of its own share, and padding moves the shares: they
are those of the padded tokens. The rule is the same at capture and at replay.

Does not: know the count under context parallelism of prompts, on HIP (where SGLang masks the padding of data
parallelism by other rules), or in releases before 0.5.21.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.runtime_context import get_parallel

from graphpact_guard import Expected
from graphpact_sglang.seams.runners import counts_tokens

NAME = "num_token_non_padded"


def expected_count(runner: Any, live: int, padded: int, rule: str | None = None) -> Iterator[Expected]:
    """Yield what the count in the static inputs of ``runner`` must be, if the runner has one.

    Args:
        runner: A runner of graphs.
        live: Live tokens of the step, on all ranks that share them.
        padded: The same with padding.
        rule: See `Expected`.
    """
    registry = getattr(runner, "buffer_registry", None)
    is_shared = getattr(runner.model_runner, "attn_tp_sequence_sharded", None)
    if registry is None or is_shared is None or not registry.has_slot(NAME) or torch.version.hip:
        return
    parallel = get_parallel()
    if parallel.enable_prefill_cp:
        return
    if is_shared(padded):
        share = padded // parallel.attn_tp_size
        live = min(max(live - share * parallel.attn_tp_rank, 0), share)
    memory = registry.get_slot(NAME).buffer
    yield Expected(
        owner=type(runner.buffers).__name__,
        field=NAME,
        actual=memory,
        expected=torch.full_like(memory, live),
        live=1,
        rule=rule,
    )


def expected_count_of_capture(runner: Any, size: int) -> Iterator[Expected]:
    """Yield what the count must be when a graph is captured: all tokens are live.

    Args:
        runner: A runner of graphs.
        size: The graph's size: tokens of a prefill graph, requests of others.
    """
    if getattr(runner, "ragged_verify_mode", False):  # its sizes count tokens of verified drafts
        return
    tokens = size if counts_tokens(runner) else size * runner.captured_req_width
    yield from expected_count(runner, tokens, tokens, rule="GP11")
