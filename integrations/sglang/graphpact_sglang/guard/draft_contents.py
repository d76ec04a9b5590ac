"""What the graphs of a draft of SGLang must find in their memory before a replay.

A draft's runner pads its batch in place, so `live_draft` keeps the live tensors before. Padding rows are what
SGLang reserves. The offsets of a draft extend have one stride, whatever was accepted.

Does not: check the metadata of a draft's steps, or a draft of several layers.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from graphpact_guard import Expected
from graphpact_sglang.guard.contents import (
    QUERY_OFFSETS,
    DecodeRows,
    expected_metadata,
    expected_rows,
    request_fields,
)

Live = Mapping[str, torch.Tensor | None]


def live_draft(batch: Any) -> Live:
    """Return the tensors of a live batch that a draft's runner copies, by the names of its static inputs."""
    names = ("seq_lens", "seq_lens_cpu", "req_pool_indices", "out_cache_loc", "positions")
    of_draft = ("topk_p", "topk_index", "hidden_states")
    return {name: getattr(batch, name) for name in names} | {
        name: getattr(batch.spec_info, name, None) for name in of_draft
    }


def expected_draft(runner: Any, live: Live) -> Iterator[Expected]:
    """Yield what the static inputs of SGLang's ``EAGLEDraftCudaGraphRunner`` must be."""
    width = runner.captured_req_width
    fields = (
        *request_fields(runner),
        ("out_cache_loc", width * runner.speculative_num_steps, 0),
        ("positions", width, 0),
        ("topk_p", 1, 0),
        ("topk_index", 1, 0),
        ("hidden_states", 1, 0),
    )
    yield from expected_rows(runner, live, fields)


def expected_extend(
    runner: Any, batch: Any, leaves: Mapping[tuple[str, str], torch.Tensor]
) -> Iterator[Expected]:
    """Yield what SGLang's ``EAGLEDraftExtendCudaGraphRunner`` must find for the live ``batch``.

    Args:
        runner: The runner.
        batch: The live batch.
        leaves: See `graphpact_sglang.guard.contents.expected_metadata`.
    """
    width = runner.captured_req_width
    of_batch = (
        *request_fields(runner),
        ("extend_seq_lens", 1, width),
        ("out_cache_loc", width, 0),
        ("positions", width, 0),
        ("input_ids", width, None),
    )
    of_draft = (
        ("num_correct_drafts", 1, width),
        ("num_accept_tokens", 1, width),
        ("hidden_states", width, None),
    )
    live = {name: getattr(batch, name, None) for name, _, _ in of_batch}
    live |= {name: getattr(batch.spec_info, name, None) for name, _, _ in of_draft}
    yield from expected_rows(runner, live, (*of_batch, *of_draft))
    yield from expected_metadata(DecodeRows.of(runner), leaves, only=QUERY_OFFSETS)
