"""vLLM's builders as the suite's adapter takes them: `peers.vllm_checks:NAME`, a factory with its reader.

    PYTHONPATH=tests graphpact check --adapter vllm peers.vllm_checks:triton

Does not: run anything; see `peers.__main__`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from graphpact.batch import ForwardMode
from graphpact_adapters.reads import Reader
from graphpact_adapters.vllm import Builders
from graphpact_adapters.vllm.readers import read as by_fields
from graphpact_conformance.suite import PlannedLane
from graphpact_conformance.targets import Options
from peers import vllm_builders, vllm_readers
from peers.job import Known, Row
from peers.wheels import unpack

_DECODE = frozenset({ForwardMode.DECODE})
_UNIFORM = frozenset({ForwardMode.DECODE, ForwardMode.TARGET_VERIFY})


@dataclass(frozen=True)
class Check:
    """How a builder is checked.

    Attributes:
        read: What its kernel reads.
        modes: The kinds of step whose kernel the reader knows; None for those of the adapter.
        of_low_caches: Whether lanes whose cache has a million blocks are left out.
        unread: Why no reader is given, and the builder not run; empty where it is.
    """

    read: Reader = by_fields
    modes: frozenset[ForwardMode] | None = None
    of_low_caches: bool = False
    unread: str = ""


class _OfLowCaches(Builders):
    """Builders without the lanes of high caches."""

    def lanes(self, options: Options) -> Iterator[PlannedLane]:
        """Yield the other lanes."""
        return (plan for plan in super().lanes(options) if not plan.lane.config.high)


_NEVER = "it declares no graph support, so no graph keeps its metadata"
_SPARSE = Check(vllm_readers.sparse_mla, _UNIFORM)
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
    "flashinfer_mla_sparse_trtllm": _SPARSE,
    "flash_attention_mla_sparse": _SPARSE,
    "flash_attention_mla_sparse_fa4": _SPARSE,
    "xpu_mla_sparse": Check(unread=_NEVER),
    "sparse_swa": Check(vllm_readers.sparse_swa, _UNIFORM),
    "indexer": Check(vllm_readers.indexer, _UNIFORM),
    "kpool_tail": Check(unread="its kernel pools keys into a cache of tails: no attention reads them"),
}
"""Builders that the distribution's own reader does not do for; all others are checked by it."""
KNOWN: dict[str, tuple[Known, ...]] = {}
"""Findings that were looked into."""
_HEAD_SIZES = {"mla": (576,)}
_BLOCK_SIZES = {"mla": (64,)}


def __getattr__(name: str) -> Any:
    """Return the adapter of a builder in the table."""
    if name not in vllm_builders.BUILDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    row, check = vllm_builders.BUILDERS[name], CHECKS.get(name, Check())
    made = _OfLowCaches if check.of_low_caches else Builders
    return made(
        getattr(vllm_builders, name),
        read=check.read,
        kind=row.kind,
        block_sizes=_BLOCK_SIZES.get(row.kind, (16,)),
        head_sizes=_HEAD_SIZES.get(row.kind, (64,)),
        modes=check.modes,
    )


def rows() -> Iterator[Row]:
    """Yield the rows of the job: one for each builder class of the wheel; download missing wheels.

    Raises:
        RuntimeError: A wheel cannot be had.
    """
    unpack(vllm_builders.TRITON)  # before two workers ask for it
    engine = f"vLLM {vllm_builders.VLLM.version}"
    for name, builder in vllm_builders.BUILDERS.items():
        check = CHECKS.get(name, Check())
        why = builder.absent and f"not constructed: {builder.absent}"
        if builder.kind == "mamba":
            why = why or "a recurrent state, for which the adapter has no kernel model"
        yield Row(engine, name, f"adapter:vllm:{__name__}:{name}", why or check.unread, KNOWN.get(name, ()))
    for path in sorted(vllm_builders.unlisted()):
        yield Row(engine, path, "", "a class of this wheel that the table has not")
