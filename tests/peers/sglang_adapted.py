"""SGLang's released backends under the adapter ``sglang``: factories, readers and what only SGLang makes.

Each name of `ADAPTED` is a `Backends` object: its factory is that of `peers.sglang_backends`, given the sizes
and the table of a lane. `install` comes first, once in a process.

A Triton kernel runs under Triton's interpreter. In a graph a launch is one node, with its arguments: see
`record_launches`.

Does not: edit a line of SGLang, or judge; `graphpact_adapters` does.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from graphpact.attention import KVBuffers, LayerSpec
from graphpact.batch import ForwardMode as Mode
from graphpact_adapters.kernel_reads import IndexedReads, PagedReads, Part
from graphpact_adapters.sglang import Backends
from graphpact_adapters.sglang.batch import (
    DraftExtendInput,
    SglangForwardMode,
    Speculation,
    VerifyInput,
)
from graphpact_adapters.sglang.plain_values import Given
from graphpact_adapters.sglang.readers import read_sglang_metadata, widened
from graphpact_kernels import define_kernel
from peers import flashinfer_wrappers, sglang_backends


def install(wheel: Path) -> None:
    """Make SGLang importable, and its Triton launches recordable, for the rest of the process."""
    sglang_backends.install(wheel)
    record_launches()


# -- launches ------------------------------------------------------------------------------------------------

_launches: list[tuple[Callable[..., Any], Any, tuple[Any, ...], dict[str, Any]]] = []


def record_launches() -> None:
    """Make each launch of the interpreter one operator: a recorder keeps it, and none of its inside."""
    executor = importlib.import_module("triton.runtime.interpreter").GridExecutor
    run = executor.__call__

    @functools.wraps(run)
    def launch(self: Any, *args: Any, **kwargs: Any) -> None:
        names = inspect.getfullargspec(self.fn)
        kwargs = {k: v for k, v in kwargs.items() if k in names.args or k in names.kwonlyargs}
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        _launches.append((run, self, args, kwargs))
        _launch(tensors, len(_launches) - 1)

    executor.__call__ = launch


def _run_launch(tensors: list[torch.Tensor], number: int) -> None:
    run, executor, args, kwargs = _launches[number]
    given = iter(tensors)

    def now(value: Any) -> Any:
        return next(given) if isinstance(value, torch.Tensor) else value

    positional = [now(value) for value in args]  # before the keyword arguments, as they were collected
    run(executor, *positional, **{name: now(value) for name, value in kwargs.items()})


_launch = define_kernel("launch(Tensor(a!)[] tensors, int number) -> ()", _run_launch, namespace="peers")


# -- what only SGLang makes ------------------------------------------------------------------------------


def _module(name: str) -> Any:
    return importlib.import_module(f"sglang.srt.{name}")


class SglangEngine:
    """SGLang's own modes and inputs of speculation, and the plan that its runners bind to a batch."""

    def forward_mode(self, mode: SglangForwardMode) -> Any:
        """Return SGLang's mode of the same name."""
        return _module("model_executor.forward_batch_info").ForwardMode[mode.name]

    def spec_info(self, given: Speculation) -> Any:
        """Return SGLang's input of speculation."""
        eagle = _module("speculative.eagle_info")
        if isinstance(given, VerifyInput):
            none = dict.fromkeys(
                (
                    *("draft_token", "positions", "retrieve_index", "retrieve_next_token"),
                    *("retrieve_next_sibling", "retrieve_cum_len", "capture_hidden_mode"),
                    *("seq_lens_sum", "seq_lens_cpu"),
                )
            )
            return eagle.EagleVerifyInput(**vars(given), **none)
        if isinstance(given, DraftExtendInput):
            made = eagle.EagleDraftExtendInput(
                num_correct_drafts=given.num_correct_drafts,
                num_accept_tokens=given.num_accept_tokens,
                num_tokens_per_req=given.num_tokens_per_req,
            )
            if given.extend_seq_lens_tensor is not None:
                made.extend_seq_lens_tensor = given.extend_seq_lens_tensor
                made.extend_seq_lens_cpu = given.extend_seq_lens_cpu
            return made
        return eagle.EagleDraftInput()

    def bind(self, batch: Any, model_runner: Any, *, in_capture: bool) -> None:
        """Bind the plan of KV locations: over the runner's own buffers, or over those of the batch."""
        translator = model_runner.kv_index_translator
        with sglang_backends.on_cpu():
            if in_capture:
                translator.bind_runner_slots(batch)
            else:
                translator.own_plan(batch).bind(batch, translator)

    def running(self) -> AbstractContextManager[None]:
        """Run on a CPU that SGLang takes for a GPU."""
        return sglang_backends.on_cpu()


def from_given(factory: Callable[[Given], Any], *, mla: bool) -> Callable[[Given], Any]:
    """Return a factory that takes what the adapter gives."""

    def make(given: Given) -> Any:
        sizes, pool = given.sizes, given.req_to_token_pool
        speculative = {}
        if sizes.num_draft_tokens is not None:
            speculative = {
                "speculative_algorithm": "EAGLE",
                "speculative_num_draft_tokens": sizes.num_draft_tokens,
                "speculative_eagle_topk": sizes.topk,
                "speculative_num_steps": sizes.num_steps,
            }
        runner = sglang_backends.model_runner(
            mla=mla,
            page_size=sizes.page_size,
            max_requests=max(sizes.max_requests, pool.size),
            context_len=sizes.context_len,
            num_heads=sizes.num_heads,
            num_kv_heads=sizes.num_kv_heads,
            head_dim=sizes.head_dim,
            draft=sizes.is_draft_worker,
            **speculative,
        )
        runner.req_to_token_pool.req_to_token = pool.req_to_token
        backend = factory(runner)
        backend.graphpact_wrappers = flashinfer_wrappers.made  # they keep memory that kernels read
        given.kv_index_translator = runner.kv_index_translator
        return backend

    return make


# -- readers ---------------------------------------------------------------------------------------------


class SlotRows(PagedReads):
    """A table of KV slots: pages of one slot, whatever a page of the cache has."""

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: LayerSpec,
        cache: KVBuffers,
        page_size: int,
    ) -> torch.Tensor:
        """Attend with pages of one slot."""
        del page_size
        return super().attend(q, k, v, layer, cache, 1)


def _reads(kind: type[PagedReads], batch: Any, **part: Any) -> PagedReads:
    tokens = len(batch.out_cache_loc)
    return kind((Part(num_tokens=tokens, **part),), batch.out_cache_loc, tokens)


def flashmla(metadata: Any, batch: Any) -> PagedReads:
    """Lengths come from the batch, but for draft extends; the table is wider than the view of a capture."""
    table, width = metadata.block_kv_indices, len(batch.out_cache_loc) // batch.batch_size
    lens = metadata.seq_lens_k
    if lens is None:
        lens = batch.seq_lens.to(torch.int32)
        if batch.forward_mode.is_target_verify():
            lens = lens + width
    whole = table.as_strided((len(lens), table.stride(0)), table.stride())
    return _reads(PagedReads, batch, seq_lens=lens, block_table=whole, query_len=width)


def dsa(metadata: Any, batch: Any) -> PagedReads:
    """A row for each token."""
    lens = metadata.dsa_seqlens_expanded
    return _reads(PagedReads, batch, seq_lens=lens, block_table=metadata.real_page_table, query_len=1)


def deepseek_v4(metadata: Any, batch: Any) -> PagedReads:
    """A row for each token: the slots of its window, newest first."""
    core = metadata.core_attn_metadata
    return _reads(
        SlotRows,
        batch,
        seq_lens=core.swa_topk_lengths,
        block_table=core.swa_page_indices,
        query_len=1,
        names={"seq_lens": "swa_topk_lengths", "block_table": "swa_page_indices"},
    )


def _rows(indptr: torch.Tensor, flat: torch.Tensor, lens: torch.Tensor, columns: int) -> torch.Tensor:
    whole = widened(flat)
    at = indptr[: len(lens), None].long() + torch.arange(columns)
    return whole[at.clamp(min=0, max=len(whole) - 1)].int()


_COLUMNS = 128
"""Keys of the longest request of a quick lane, and more."""


def flashinfer(metadata: Any, batch: Any) -> PagedReads | IndexedReads:
    """Offsets and slots lie in the wrapper's buffers; the plan bounds how many keys are covered.

    An eager extend plans its prefixes alone: its new keys are attended by another wrapper, and merged.
    """
    if getattr(metadata, "use_ragged", False):
        wrapper = metadata.prefill_wrappers[0]
        return IndexedReads(
            kv_indptr=wrapper._paged_kv_indptr_buf,
            kv_indices=wrapper._paged_kv_indices_buf,
            slot_mapping=batch.out_cache_loc,
            qo_indptr=wrapper._qo_indptr_buf,
            appends_new=True,
        )
    decodes = hasattr(metadata, "decode_wrappers")
    wrapper = (metadata.decode_wrappers if decodes else metadata.prefill_wrappers)[0]
    indptr = wrapper._paged_kv_indptr_buf
    lens = torch.minimum(indptr.diff(), wrapper.planned["kv_indptr"].diff()).int()
    table = _rows(indptr, wrapper._paged_kv_indices_buf, lens, _COLUMNS)
    offsets = {"query_len": 1} if decodes else {"query_start_loc": wrapper._qo_indptr_buf}
    return _reads(SlotRows, batch, seq_lens=lens, block_table=table, **offsets)


def flashinfer_mla(metadata: Any, batch: Any) -> PagedReads:
    """Offsets and lengths come only from the plan, slots from the wrapper's buffer."""
    decodes = hasattr(metadata, "decode_wrapper")
    wrapper = metadata.decode_wrapper if decodes else metadata.prefill_wrapper
    plan = wrapper.planned
    table = _rows(plan["kv_indptr"], wrapper._kv_indices_buf, plan["kv_lens"], _COLUMNS)
    return _reads(
        SlotRows, batch, seq_lens=plan["kv_lens"], block_table=table, query_start_loc=plan["qo_indptr"]
    )


# -- the table -------------------------------------------------------------------------------------------

_DECODES = frozenset({Mode.DECODE, Mode.TARGET_VERIFY, Mode.DRAFT_EXTEND})


def _adapted(
    name: str, reader: Callable[..., Any] = read_sglang_metadata, *, mla: bool = False, **options: Any
) -> Backends:
    make = from_given(getattr(sglang_backends, name), mla=mla)
    make.__qualname__ = name
    kind = {"kind": "mla"} if mla else {}
    return Backends(make, reader, engine=SglangEngine(), **(kind | options))


def _all(name: str, reader: Callable[..., Any] = read_sglang_metadata, **options: Any) -> dict[str, Backends]:
    """Return a backend, and the one of its draft steps."""
    drafts = {key: value for key, value in options.items() if key not in ("modes", "trees")}
    return {
        name: _adapted(name, reader, **options),
        f"{name}_draft": _adapted(f"{name}_draft", reader, modes=frozenset({Mode.DRAFT_DECODE}), **drafts),
    }


ADAPTED: dict[str, Backends] = {
    **_all("triton", page_sizes=(1,), trees=True),
    **_all("fa3", page_sizes=(1, 16), trees=True),
    **_all("trtllm_mha", page_sizes=(16,)),
    **_all("flashinfer", flashinfer, page_sizes=(1,), trees=True),
    **_all(
        "flashinfer_mla",
        flashinfer_mla,
        mla=True,
        page_sizes=(1,),
        modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY}),
    ),
    **_all("trtllm_mla", mla=True, page_sizes=(64,)),
    **_all("cutedsl_mla", mla=True, page_sizes=(64,), modes=frozenset({Mode.DECODE, Mode.TARGET_VERIFY})),
    **_all("flashmla", flashmla, mla=True, page_sizes=(64,)),
    **_all("dsa", dsa, mla=True, page_sizes=(64,)),
    "deepseek_v4": _adapted("deepseek_v4", deepseek_v4, mla=True, page_sizes=(256,), modes=_DECODES),
}
"""The released backends under the adapter."""
