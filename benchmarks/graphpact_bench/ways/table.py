"""The names of the ways, and how each is built.

Does not: import transformers; the module of a way does, when it is built.
"""

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graphpact.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from graphpact_bench.report import Skipped
    from graphpact_bench.ways.base import Way, WaySetting
    from graphpact_bench.ways.ties import TieJudge


@dataclass(frozen=True)
class WayKind:
    """One way by its name.

    Args:
        about: What it is, in a few words.
        target: The function that builds it, as ``module:name``.
        compiles: Whether building it, or its first run, compiles for many seconds.
        devices: The types of devices that it runs on.
        is_apart: Whether it runs in an environment of its own, whose Python has to be named.
    """

    about: str
    target: str
    compiles: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    is_apart: bool = False


_CPU, _CUDA = ("cpu",), ("cuda",)
WAYS = {
    "eager": WayKind("the engine without graphs", "engines:eager"),
    "tape": WayKind("the engine, graphs of the tape", "engines:tape", devices=_CPU),
    "tape-strict": WayKind("the engine, graphs of the strict tape", "engines:tape_strict", devices=_CPU),
    "cpu_graph": WayKind(
        "the engine, compiled decode steps", "engines:cpu_graph", compiles=True, devices=_CPU
    ),
    "cuda": WayKind("the engine, CUDA graphs", "engines:cuda", devices=_CUDA),
    "compile": WayKind(
        "torch.compile, no engine: transformers, growing cache", "generate:growing_compiled", compiles=True
    ),
    "generate": WayKind("generate of transformers", "generate:dynamic"),
    "generate-static": WayKind("generate, static cache", "generate:static"),
    "generate-compiled": WayKind(
        "generate, static cache, compiled", "generate:static_compiled", compiles=True
    ),
    "continuous": WayKind("continuous batching of transformers", "continuous_batching:continuous"),
    "vllm-cpu": WayKind(
        "vLLM, in an environment of its own",
        "other_process:vllm_cpu",
        compiles=True,
        devices=_CPU,
        is_apart=True,
    ),
    "llama.cpp": WayKind(
        "llama.cpp, in an environment of its own", "other_process:llama_cpp", devices=_CPU, is_apart=True
    ),
}
"""Every way, in the order of tables; the first is the one whose tokens the others must write."""


def choose_ways(given: Iterable[str], device: str, *, compiling: bool) -> list[str]:
    """Return the names of the ways to measure, in the order of tables; `eager` is always one of them.

    Args:
        given: Names; empty: every way for ``device``.
        device: The type of the device.
        compiling: Whether ways that compile are taken if none is given.

    Raises:
        UsageError: A name is unknown, or its way does not run on ``device``.
    """
    names = set(given)
    for name in names:
        if name not in WAYS:
            near = did_you_mean(name, WAYS)
            raise UsageError(
                f"no way is called {name!r}; the ways are {', '.join(WAYS)}",
                hint=f"did you mean {near!r}?" if near else None,
            )
        if device not in WAYS[name].devices:
            raise UsageError(f"the way {name!r} does not run on {device}", hint="choose another device")
    if not names:
        names = {n for n, k in WAYS.items() if device in k.devices and (compiling or not k.compiles)}
    return [name for name in WAYS if name in names | {"eager"}]


def make_ways(
    names: Iterable[str], setting: "WaySetting", say: Callable[[str], None] = lambda _: None
) -> tuple[list["Way"], list["Skipped"]]:
    """Build ways; return them, and why others are skipped.

    Args:
        names: The names.
        setting: What they are built for.
        say: Called with a line before each is built.
    """
    from graphpact_bench.report import Skipped  # noqa: PLC0415  rich
    from graphpact_bench.timing import UnavailableWayError  # noqa: PLC0415  beside it

    ways, skipped = [], []
    for name in names:
        say(f"{setting.shape}: building {name}")
        module, _, function = WAYS[name].target.partition(":")
        make = getattr(importlib.import_module(f"graphpact_bench.ways.{module}"), function)
        try:
            ways.append(make(name, setting))
        except UnavailableWayError as error:
            skipped.append(Skipped(what=name, reason=error.message))
    return ways, skipped


def tie_judge(setting: "WaySetting") -> "TieJudge | None":
    """Return what judges the first difference between two ways in bfloat16; None in float32."""
    if setting.dtype != "bfloat16":
        return None
    from graphpact_bench.ways.ties import TieJudge  # noqa: PLC0415  loads a model

    return TieJudge(setting)
