"""Declared capabilities of a backend against the results of the run: `claims_of`.

A capability has one of five values. It is ``full``, or ``since`` a version, if the backend's `Capabilities`
include it; otherwise ``unsupported``, ``not_implemented`` or ``unknown``. The backend's ``claims`` select the
value where `Capabilities` do not.

The class attribute `AttentionBackend.fill_is_device_only` is a capability too, `DEVICE_ONLY`: a graph can
record the preparation of the metadata. Lanes whose graphs record it prove it where it is declared. Where it
is not, and one method prepares captures and replays, a full lane tries it.

Does not: run lanes (see `graphpact_conformance.suite`).
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from graphpact.attention import AttentionBackend, Capabilities, GraphSupport, HeadLayout
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError
from graphpact_conformance.draws.cases import CASES, Case
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.results import Claim

Declared = Literal["unknown", "unsupported", "not_implemented", "since", "full"]
FEATURES = ("sliding_window", "softcap", "sinks", "trees")
DEVICE_ONLY = "fill_is_device_only"
"""The capability of a backend whose `fill_metadata` a graph may record."""
OF_GRAPHS = ("graphs ", f"feature {DEVICE_ONLY}")
"""How the names of capabilities begin that work only if a graph keeps every rule."""
_PAGE_SIZES = (1, 16, 64)
_DTYPES = (torch.float32, torch.bfloat16)
_SINCE = re.compile(r"since (\S+)")


def claims_of(
    cls: type[AttentionBackend],
    shown: Sequence[tuple[Config, bool]],
    probed: Sequence[tuple[str, bool]] = (),
) -> list[Claim]:
    """Return every capability with its declared value and the result of the run.

    Args:
        cls: The backend.
        shown: Each lane's configuration, and whether the lane had no failure.
        probed: Undeclared capabilities, and whether they work.

    Raises:
        ConfigError: The backend's ``claims`` has an unknown capability or value.
    """
    _require_known(cls)
    works = dict(probed)
    found = []
    for capability, is_declared in _capabilities(cls):
        declared, since = _declared(cls, capability, is_declared=is_declared)
        outcomes = [passed for config, passed in shown if capability in _needs(config, cls.capabilities)]
        state: Literal["pass", "fail", "not_run"] = "not_run"
        if is_declared and outcomes:
            state = "pass" if all(outcomes) else "fail"
        elif capability in works:
            state = "pass" if works[capability] else "fail"
        hint = None
        if not is_declared and state == "pass":
            hint = "it works and is not declared: declare it, or give it a value in `claims`"
        found.append(Claim(capability=capability, declared=declared, since=since, shown=state, hint=hint))
    return found


def undeclared(
    cls: type[AttentionBackend],
) -> Iterator[tuple[str, type[AttentionBackend], Config]]:
    """Yield undeclared capabilities of a backend: the backend with each declared, and a simple lane for it.

    Capabilities with an entry in its ``claims`` are left out.
    """
    can = cls.capabilities
    declared = list(configs_of(can))
    if not declared:
        return
    plain = next((c for c in declared if c.dtype is torch.float32), declared[0])
    for capability, is_declared in _capabilities(cls):
        if is_declared or capability in cls.claims:
            continue
        kind, _, value = capability.partition(" ")
        wider = can if value == DEVICE_ONLY else _wider(can, kind, value)
        candidates = [c for c in configs_of(wider) if capability in _needs(c, wider)]
        if value in ("sliding_window", "softcap", "sinks"):
            switched_on: dict[str, Any] = {value: True}
            candidates = [replace(c, **switched_on) for c in declared]
        best = min(candidates, key=lambda c: _distance(c, plain), default=None)
        if best is not None:
            changed = {DEVICE_ONLY: True} if value == DEVICE_ONLY else {"capabilities": wider}
            yield capability, type(cls.__name__, (cls,), {**changed, "__module__": cls.__module__}), best


def _capabilities(cls: type[AttentionBackend]) -> Iterator[tuple[str, bool]]:
    can = cls.capabilities
    for mode in ForwardMode:
        yield f"mode {mode.value}", mode in can.modes
    for size in sorted({*_PAGE_SIZES, *(can.page_sizes or ())}):
        yield f"page_size {size}", can.page_sizes is None or size in can.page_sizes
    for layout in HeadLayout:
        yield f"heads {layout.value}", layout in can.head_layouts
    for dtype in sorted({*_DTYPES, *can.dtypes}, key=str):
        yield f"dtype {_short(dtype)}", dtype in can.dtypes
    for feature in FEATURES:
        yield f"feature {feature}", bool(getattr(can, feature))
    cases = [c for c in CASES if c.mode in can.modes and (can.trees or c.branches == 1)]
    for level in GraphSupport:
        if any(case.needs is level for case in cases):
            yield f"graphs {level.value}", can.graph_support.covers(level)
    if cls.fill_is_device_only or (_has_one_body(cls) and can.graph_support is not GraphSupport.NEVER):
        yield f"feature {DEVICE_ONLY}", cls.fill_is_device_only


def _has_one_body(cls: type[AttentionBackend]) -> bool:
    """Return whether `fill_metadata` prepares replays too. An author of two bodies has made a choice."""
    names = ("init_metadata_replay", "refresh_metadata")
    return all(getattr(cls, name) is getattr(AttentionBackend, name) for name in names)


def _needs(config: Config, can: Capabilities) -> set[str]:
    """Return the capabilities that a lane needs; its graphs record the metadata work where they can."""
    needed = {
        f"mode {config.case.mode.value}",
        f"page_size {config.page_size}",
        f"heads {config.heads.name}",
        f"dtype {_short(config.dtype)}",
        f"graphs {config.case.needs.value}",
    }
    flags = {
        "sliding_window": config.sliding_window,
        "softcap": config.softcap,
        "sinks": config.sinks,
        "trees": config.case.branches > 1,
        DEVICE_ONLY: can.graph_support.covers(config.case.needs) and not config.case.segments,
    }
    return needed | {f"feature {name}" for name, is_on in flags.items() if is_on}


def _declared(
    cls: type[AttentionBackend], capability: str, *, is_declared: bool
) -> tuple[Declared, str | None]:
    said = cls.claims.get(capability)
    if is_declared:
        since = _SINCE.fullmatch(said) if said else None
        return ("since", since[1]) if since else ("full", None)
    if said == "unknown":
        return "unknown", None
    return ("not_implemented" if said == "not_implemented" else "unsupported"), None


def _require_known(cls: type[AttentionBackend]) -> None:
    there = dict(_capabilities(cls))
    for capability, said in cls.claims.items():
        if capability not in there:
            raise ConfigError(
                f"{cls.__name__}.claims: unknown capability {capability!r}",
                hint=f"the capabilities are {', '.join(there)}",
            )
        allowed = ["full", "since VERSION"] if there[capability] else ["unknown", "unsupported"]
        allowed += [] if there[capability] else ["not_implemented"]
        if said not in allowed and not (there[capability] and _SINCE.fullmatch(said)):
            state = "declared" if there[capability] else "not declared"
            raise ConfigError(
                f"{cls.__name__}.claims: {capability!r} is {state} in its capabilities, and its claim is"
                f" {said!r}",
                hint=f"use {' or '.join(allowed)}",
            )


def _wider(can: Capabilities, kind: str, value: str) -> Capabilities:
    """Return the declared capabilities and one more."""
    more: dict[str, Any] = {}
    if kind == "mode":
        more["modes"] = can.modes | {ForwardMode(value)}
    elif kind == "page_size":
        more["page_sizes"] = (can.page_sizes or frozenset()) | {int(value)}
    elif kind == "heads":
        more["head_layouts"] = can.head_layouts | {HeadLayout(value)}
    elif kind == "dtype":
        more["dtypes"] = can.dtypes | {getattr(torch, value)}
    elif kind == "graphs":
        more["graph_support"] = GraphSupport(value)
    else:
        more[value] = True
    return replace(can, **more)


def _distance(config: Config, plain: Config) -> tuple[bool, ...]:
    """Return a sort key: the differences of a lane from a plain one."""
    return (
        config.case not in (Case(ForwardMode.DECODE), plain.case),
        config.dtype is not plain.dtype,
        config.heads != plain.heads,
        config.page_size != plain.page_size,
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
