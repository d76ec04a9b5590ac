"""Builders of other wheels as the suite's adapters take them: `peers.other_checks:NAME`.

    PYTHONPATH=tests graphpact check --adapter vllm peers.other_checks:ascend
    PYTHONPATH=tests graphpact check --adapter sglang peers.other_checks:sglang_ascend

Does not: run anything; see `peers.__main__`.
"""

from collections.abc import Iterator
from typing import Any

from graphpact_adapters.vllm import Builders
from graphpact_adapters.vllm.values import STAND_INS
from peers import other_builders, other_sglang, sglang_checks
from peers.job import Known, Row
from peers.wheels import TRITON, unpack

PART = "other wheels"
"""The part of ``docs/reference/peers.md`` that lists these builders."""
_SEQ_LENS = Known(
    "GP19",
    "seq_lens",
    "Real: `build_for_cudagraph_capture` fills `seq_lens` with 1, and the tensor is the runner's own."
    " Builders of later KV-cache groups then capture requests with fewer keys than queries.",
)
KNOWN: dict[str, tuple[Known, ...]] = {
    "ascend_missing_a_layer": (
        Known(
            "GP21",
            "the tasks of the graph",
            "Planted by this job: the metadata of a step lacks one layer, and the engine's own loop, a `zip`"
            " of metadata and tasks, then leaves a task out without a word.",
        ),
    ),
    "kunlun": (_SEQ_LENS,),
    "sglang_ascend": (
        Known(
            "GP19",
            "seq_lens",
            "Real: a capture makes the runner's own `seq_lens` the metadata's, and each refresh then copies"
            " lengths plus the drafts of a verify into it. All captures together add up, and whatever else"
            " reads the lengths of the runner in this step sees the sum.",
        ),
    ),
    "sglang_fa3_0_5_10": (Known("GP13", "page_table", sglang_checks.TOO_NARROW),),
    "triton_0_11": (_SEQ_LENS,),
    "triton_0_23": (_SEQ_LENS,),
}
"""The known findings."""
_HEAD_SIZES = {"mla": (576,)}


def __getattr__(name: str) -> Any:
    """Return the adapter of a builder in the table."""
    if name in other_sglang.OTHERS:
        return other_sglang.OTHERS[name]
    if name not in other_builders.OTHERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    row = other_builders.OTHERS[name]
    return Builders(
        row.make,
        read=row.read,
        kind=row.kind,
        block_sizes=(row.block_size,),
        head_sizes=_HEAD_SIZES.get(row.kind, (64,)),
        modes=row.modes,
        pads_replays=row.pads_replays,
        tasks=row.tasks,
        values=STAND_INS,
    )


def rows() -> Iterator[Row]:
    """Yield the rows of the job; download missing wheels.

    Raises:
        RuntimeError: A wheel is not available.
    """
    wheels = [wheel for row in other_builders.OTHERS.values() for wheel in row.wheels]
    for wheel in (TRITON, sglang_checks.MSGSPEC, *wheels, *other_sglang.WHEELS.values()):
        unpack(wheel)  # before two workers download the same one
    for name, row in other_builders.OTHERS.items():
        target = f"adapter:vllm:{__name__}:{name}"
        yield Row(row.engine, name, target, known=KNOWN.get(name, ()), part=PART)
    for name, wheel in other_sglang.WHEELS.items():
        target = f"adapter:sglang:{__name__}:{name}"
        yield Row(f"SGLang {wheel.version}", name, target, known=KNOWN.get(name, ()), part=PART)
