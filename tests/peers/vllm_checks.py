"""vLLM's builders as the suite's adapter takes them: `peers.vllm_checks:NAME`, a factory with its reader.

    PYTHONPATH=tests graphpact check --adapter vllm peers.vllm_checks:triton

Does not: run anything; see `peers.__main__`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graphpact.batch import ForwardMode
from graphpact_adapters.kernel_reads import Reader
from graphpact_adapters.vllm import Builders
from graphpact_adapters.vllm.readers import read_vllm_metadata
from graphpact_adapters.vllm.values import STAND_INS
from graphpact_conformance.suite import PlannedLane
from graphpact_conformance.targets import Options
from peers import vllm_builders, vllm_readers
from peers.job import Known, Row
from peers.wheels import TRITON, unpack

_DECODE = frozenset({ForwardMode.DECODE})
_VERIFY = _DECODE | {ForwardMode.TARGET_VERIFY}
_UNIFORM = _VERIFY | {ForwardMode.DRAFT_DECODE}


@dataclass(frozen=True)
class Check:
    """How a builder is checked.

    Attributes:
        read: What its kernel reads.
        modes: The kinds of step whose kernel the reader knows; None for those of the adapter.
        of_low_caches: Whether lanes whose cache has a million blocks are left out.
        unread: Why there is no reader and the builder is not run; empty if it is run.
    """

    read: Reader = read_vllm_metadata
    modes: frozenset[ForwardMode] | None = None
    of_low_caches: bool = False
    unread: str = ""


@dataclass(frozen=True)
class Released(Builders):
    """Builders of the wheel.

    Attributes:
        of_low_caches: Whether lanes with a high cache are left out.
    """

    of_low_caches: bool = False

    def lanes(self, options: Options) -> Iterator[PlannedLane]:
        """Yield the lanes of a run."""
        plans = super().lanes(options)
        return (plan for plan in plans if not (self.of_low_caches and plan.lane.config.high))


_NEVER = "it declares no graph support, so no graph keeps its metadata"
_SPARSE = Check(vllm_readers.sparse_mla, _UNIFORM)
# Their update of a draft launches a Triton kernel in the graph, and Triton's interpreter cannot be recorded.
_SPARSE_UNRECORDED = Check(vllm_readers.sparse_mla, _VERIFY)
CHECKS: dict[str, Check] = {
    "turboquant": Check(vllm_readers.turboquant),
    "flashinfer": Check(vllm_readers.flashinfer, _UNIFORM),
    "flex": Check(vllm_readers.flex, of_low_caches=True),  # its table has a column for each block
    "rocm_octave": Check(vllm_readers.rocm_octave),
    "rocm_aiter_flash_attention": Check(vllm_readers.rocm_aiter_flash_attention, _UNIFORM),
    "xpu_flash_attention_mla": Check(modes=_DECODE),
    "amx_mla": Check(unread=_NEVER),
    "flashmla_sparse": _SPARSE,
    "flashinfer_mla_sparse": _SPARSE,
    "flashinfer_mla_sparse_trtllm": _SPARSE_UNRECORDED,
    "flash_attention_mla_sparse": _SPARSE_UNRECORDED,
    "flash_attention_mla_sparse_fa4": _SPARSE_UNRECORDED,
    "xpu_mla_sparse": Check(unread=_NEVER),
    "sparse_swa": Check(vllm_readers.sparse_swa, _VERIFY),  # see _SPARSE_UNRECORDED
    "indexer": Check(vllm_readers.indexer, _UNIFORM),
    "kpool_tail": Check(unread="its kernel pools keys into a cache of tails: no attention reads them"),
    "mamba1": Check(
        modes=_DECODE
    ),  # these three treat verified drafts as prefills, or have no graph for them
    "linear": Check(modes=_DECODE),
    "ple_short_conv": Check(modes=_DECODE),
}
"""Builders that need another reader than the distribution's own, which checks all others."""
_SEQ_LENS = Known(
    "GP19",
    "seq_lens",
    "Real: `build_for_cudagraph_capture` fills `seq_lens` with 1, to make the capture short, and the "
    "tensor is the runner's own: `build_attn_metadata` slices it once, before its loop over KV-cache "
    "groups. The builders of later groups then capture requests with fewer keys than queries.",
)
_STARTS = Known(
    "GP19",
    "query_start_loc",
    "Real: `build_for_cudagraph_capture` sets the runner's `query_start_loc` to zero, because a prefill "
    "kernel would read out of bounds in the capture. The builders of later groups then see requests "
    "without queries: Mamba2's takes the number of accepted tokens from the differences.",
)
KNOWN: dict[str, tuple[Known, ...]] = {
    "triton": (_SEQ_LENS,),
    "triton_diffkv": (_SEQ_LENS,),
    "rocm": (_SEQ_LENS, _STARTS),
    "rocm_segmented": (_SEQ_LENS, _STARTS),
    "rocm_aiter_unified": (_SEQ_LENS,),
    "turboquant": (
        _SEQ_LENS,
        Known(
            "GP08",
            "seq_lens",
            "Real, and public (#52475, #53406): the builder declares graphs for uniform batches, and "
            "takes requests with more than one query for prefills. `_prefill_attention` loops over "
            "`seq_lens_cpu` on the host, so a graph keeps the lengths of the dummy, which are its "
            "queries: each request sees its new tokens alone. A replay makes another list, which the "
            "graph does not read.",
        ),
        Known(
            "GP09",
            "seq_lens_cpu_upper_bound",
            "Real: the same loop takes the runner's upper bounds for lengths, and verified drafts are "
            "decode rows, for which vLLM's own comment on the field rules that out. After asynchronous "
            "speculation the bounds count rejected drafts: queries see keys that are not there.",
        ),
        Known(
            None,
            "an eager run",
            "Real: the fault of GP09 without a graph. The keys past the end were never written, so "
            "outputs are NaN here.",
        ),
    ),
}
"""The known findings."""
_HEAD_SIZES = {"mla": (576,), "mamba": None}
_BLOCK_SIZES = {"mla": (64,)}


def __getattr__(name: str) -> Any:
    """Return the adapter of a builder in the table."""
    if name not in vllm_builders.BUILDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    row, check = vllm_builders.BUILDERS[name], CHECKS.get(name, Check())
    return Released(
        getattr(vllm_builders, name),
        read=check.read,
        kind=row.kind,
        block_sizes=_BLOCK_SIZES.get(row.kind, (16,)),
        head_sizes=_HEAD_SIZES.get(row.kind, (64,)),
        modes=check.modes,
        of_low_caches=check.of_low_caches,
        values=STAND_INS,  # the wheel is on the path, not installed
    )


def rows() -> Iterator[Row]:
    """Yield the rows of the job: one for each builder class of the wheel; download missing wheels.

    Raises:
        RuntimeError: A wheel is not available.
    """
    unpack(TRITON)  # before two workers download it
    engine = f"vLLM {vllm_builders.VLLM.version}"
    for name, builder in vllm_builders.BUILDERS.items():
        check = CHECKS.get(name, Check())
        why = builder.absent and f"not constructed: {builder.absent}"
        yield Row(engine, name, f"adapter:vllm:{__name__}:{name}", why or check.unread, KNOWN.get(name, ()))
    for path in sorted(vllm_builders.unlisted()):
        yield Row(engine, path, "", "a class of this wheel that the table has not")
