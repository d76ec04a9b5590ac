"""Drafts of EAGLE and its kin on a tape: `PagedMultiStepBackend`, and the seams through which SGLang drafts.

A draft takes several steps in one graph, and each attends with a backend of its own. SGLang makes them by the
name of an attention backend; `make_step_backends` and `make_extend_backend` add ours. The tree of a draft is
built and verified by SGLang's kernels in Triton, which the interpreter runs: its kernels in CUDA have no CPU
build.

Does not: draft, or verify; SGLang's workers do.
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.runtime_context import attention_backends, get_spec

from graphpact_sglang import ATTENTION_BACKEND
from graphpact_sglang.attention.paged import AttentionRows, PagedAttnBackend

FACTORY = "sglang.srt.speculative.draft_utils.DraftBackendFactory"
"""The class by which SGLang makes the attention backends of a draft."""
TREE = "sglang.kernels.ops.speculative.spec_tree"
"""The module of the kernels that build and verify trees."""


class PagedMultiStepBackend:
    """A `PagedAttnBackend` for each step of a draft but the last, which only samples.

    A row is a branch of a request: the keys of its request, and the drafts of its own branch before it.

    Args:
        model_runner: SGLang's model runner of the draft.
        topk: Branches of a request.
        num_steps: Steps of a draft.
    """

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: Any, topk: int, num_steps: int) -> None:
        self.topk, self.num_steps = topk, num_steps
        self.attn_backends = [PagedAttnBackend(model_runner) for _ in range(num_steps - 1)]
        self.req_to_token = model_runner.req_to_token_pool.req_to_token

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocate what the steps of a graph read."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs * self.topk, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:  # noqa: FBT001, FBT002  SGLang's own
        """Fill the graph's tensors for a padded batch, at capture and at replay alike."""
        del in_capture
        self._for_each(PagedAttnBackend.fill_graph_metadata, forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Record nothing."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Make the metadata of an eager draft, in new memory."""
        self._for_each(PagedAttnBackend.make_metadata, forward_batch)

    def _for_each(
        self, prepare: Callable[[PagedAttnBackend, AttentionRows], None], forward_batch: Any
    ) -> None:
        bs, topk, steps = forward_batch.batch_size, self.topk, self.num_steps
        lens = forward_batch.seq_lens[:bs].to(torch.int64).repeat_interleave(topk)
        index = torch.arange(len(lens), device=lens.device)
        slots = self.req_to_token[forward_batch.req_pool_indices[:bs]].repeat_interleave(topk, dim=0)
        drafts = forward_batch.out_cache_loc.view(-1, steps).to(slots.dtype)
        slots.scatter_(1, lens[:, None] + torch.arange(steps, device=lens.device), drafts)
        for step, backend in enumerate(self.attn_backends):
            rows = AttentionRows(slots=slots, index=index, num_q=1, kv_lens=lens + step + 1, max_q_len=1)
            prepare(backend, rows)


def make_step_backends(original: Callable[[Any], Any], factory: Any) -> Any:
    """Return the backends of a draft's steps, ours if they are asked for; around `create_decode_backend`."""
    if factory.speculative_num_steps <= 1 or not _is_ours(factory, is_decode=True):
        return original(factory)
    backend = PagedMultiStepBackend(factory.draft_model_runner, factory.topk, factory.speculative_num_steps)
    for each in (backend, *backend.attn_backends):
        _stamp(each)
    return backend


def make_extend_backend(original: Callable[[Any], Any], factory: Any) -> Any:
    """Return the backend of a draft extend, ours if it is asked for; around `create_draft_extend_backend`."""
    if not _is_ours(factory, is_decode=get_spec().speculative_attention_mode == "decode"):
        return original(factory)
    return _stamp(PagedAttnBackend(factory.draft_model_runner))


def _is_ours(factory: Any, *, is_decode: bool) -> bool:
    prefill, decode = attention_backends()
    name = factory.draft_attn_backend or (decode if is_decode else prefill)
    return bool(name == ATTENTION_BACKEND)


def _stamp(backend: Any) -> Any:
    """Note the name of a backend on it, as SGLang does."""
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = ATTENTION_BACKEND
    return backend


def build_tree(*args: Any, **kwargs: Any) -> None:
    """Build the trees of drafts; in the place of `build_tree_kernel_efficient_func`."""
    from sglang.kernels.ops.speculative import spec_tree  # noqa: PLC0415  it needs Triton

    spec_tree.sgl_build_tree_kernel_triton(*args, **kwargs)


def verify_tree(*, topk: int = -1, **tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Accept the greedy path of each tree; in the place of `verify_tree_greedy_func`.

    Args:
        topk: Unused, as by SGLang's kernel in Triton.
        tensors: Its tensors.

    Returns:
        ``predicts``, ``accept_index`` and ``accept_token_num``, written.
    """
    from sglang.kernels.ops.speculative import spec_tree  # noqa: PLC0415

    del topk
    spec_tree.verify_tree_greedy_triton(**tensors)
    return tensors["predicts"], tensors["accept_index"], tensors["accept_token_num"]


def extend_slots(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Return the KV slots of the positions from ``start_offset`` to ``end_offset`` of each request.

    SGLang's own kernel finds them: a platform gives the function that launches it.

    Returns:
        ``[batch_size * draft_token_num]`` int64.
    """
    from sglang.kernels.ops.speculative import cache_locs  # noqa: PLC0415

    slots = torch.empty(batch_size * draft_token_num, dtype=torch.int64, device=device)
    power = 1 << (batch_size - 1).bit_length()
    cache_locs.assign_extend_cache_locs[(batch_size,)](
        req_pool_indices, req_to_token, start_offset, end_offset, slots, req_to_token.shape[1], power
    )
    return slots
