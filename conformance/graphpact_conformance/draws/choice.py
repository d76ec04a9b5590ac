"""The lanes of a run: the lanes that a backend's capabilities allow, and the choice among them.

`configs_of` yields the lanes with plain values of scale. `covering` chooses lanes that together have every
value of each dimension, or every pair of values of two dimensions.

Does not: draw batches; see `graphpact_conformance.draws.batches`.
"""

import itertools
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from graphpact import Capabilities
from graphpact_conformance.draws.cases import CASES, DRAFTS, Case
from graphpact_conformance.draws.lanes import Config, Heads, Scale

PAGE_SIZES = (1, 16, 64)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VARIATIONS, CANDIDATES = 8, 12
"""How many random lanes are drawn for each plain lane, and how many lanes are compared for a combination."""
CPU = torch.device("cpu")


def can_be_high(device: torch.device) -> bool:
    """Return whether a device's memory is allocated when it is written, as a cache with high slots needs."""
    return device.type == "cpu" and sys.platform == "linux"


def configs_of(
    capabilities: Capabilities, device: torch.device = CPU, cases: Sequence[Case] = CASES
) -> Iterator[Config]:
    """Yield every lane of ``cases`` that a backend's capabilities allow, with plain values of scale."""
    pages = capabilities.page_sizes
    page_sizes = sorted(PAGE_SIZES if pages is None else pages)
    dtypes = [d for d in DTYPES if d in capabilities.dtypes] or [*capabilities.dtypes][:1]
    dims = capabilities.head_dims
    dim = 8 if dims is None or 8 in dims else min(dims)
    latent = 24 if dims is None or 24 in dims else max(dims)
    rotated = 64 if latent > 64 else 8
    layouts = (
        Heads("mha", 4, 4, dim),
        Heads("gqa", 16, 2, dim),  # two key heads, because with one a wrong grouping has no effect
        Heads("mla", 4, 1, latent, latent - rotated),
    )
    for case, page_size, heads, dtype in product(cases, page_sizes, layouts, dtypes):
        config = Config(
            case,
            page_size,
            heads,
            dtype,
            sliding_window=capabilities.sliding_window,
            softcap=capabilities.softcap and page_size > 1,
            sinks=capabilities.sinks and page_size != 16,
        )
        if allows(capabilities, config, device):
            yield config


def allows(capabilities: Capabilities, config: Config, device: torch.device = CPU) -> bool:
    """Return whether a backend declares everything that a lane needs, except graph support."""
    return not capabilities.missing(
        config.layers,
        mode=config.case.mode,
        dtype=config.dtype,
        device=device,
        page_size=config.page_size,
        topk=config.case.branches,
    )


def plainest(configs: Iterable[Config]) -> list[Config]:
    """Return the plainest lane of each kind of step, in the order of the kinds."""
    by_case: dict[Case, list[Config]] = {}
    for config in configs:
        by_case.setdefault(config.case, []).append(config)
    return [min(group, key=_plainness) for group in by_case.values()]


def _plainness(config: Config) -> tuple[bool, bool, int]:
    return config.dtype is not torch.float32, config.heads.name == "mha", abs(config.page_size - 16)


def scaled_up(
    config: Config, capabilities: Capabilities, device: torch.device, *, high: bool = False
) -> Config:
    """Return a lane with the unusual value of every dimension of scale.

    Args:
        config: A lane with plain values.
        capabilities: The capabilities of the backend.
        device: The device of the lane.
        high: Whether the cache also has high slot numbers, if the device supports it. In such a lane only
            experiments without strict drivers run, because these copy all memory that a graph writes.
    """
    scaled = replace(
        config,
        case=config.case.sized("wide"),
        capture_shapes=(),
        scale="middle",
        mixed_dim=other_dim(config, capabilities),
        high=high and can_be_high(device),
        fields=True,
    )
    return scaled if allows(capabilities, scaled, device) else replace(scaled, case=config.case)


def valued(config: Config, capabilities: Capabilities, device: torch.device, names: Iterable[str]) -> Config:
    """Return a lane with some unusual values of scale.

    Args:
        config: A lane with plain values.
        capabilities: The capabilities of the backend.
        device: The device of the lane.
        names: The values, as in names of lanes. ``page1`` is allowed too.
    """
    scaled = scaled_up(config, capabilities, device, high=True)
    values: dict[str, dict[str, Any]] = {
        **{name: {"case": config.case.sized(name), "capture_shapes": ()} for name in DRAFTS},
        "tall": {"capture_shapes": ()},
        "long": {},
        "mixed": {"mixed_dim": scaled.mixed_dim},
        "high": {"high": scaled.high},
        "page1": {"page_size": 1},
        "fields": {"fields": True},
    }
    names = [*names]
    scales: list[Scale] = [name for name in ("tall", "long") if name in names]
    if scales:
        config = replace(config, scale="middle" if len(scales) > 1 else scales[0])
    for name in names:
        config = replace(config, **values[name])
    return config


def other_dim(config: Config, capabilities: Capabilities) -> int | None:
    """Return the head width of a third layer: the nearest other declared width, or the same if none is."""
    dims, mine = capabilities.head_dims, config.heads.head_dim
    if config.heads.kv_lora_rank is not None:
        return mine  # a latent has the same width in all layers; only window and scale differ
    if dims is None:
        return 2 * mine
    return min((dim for dim in dims if dim != mine), key=lambda dim: abs(dim - mine), default=mine)


def of_another_model(config: Config, capabilities: Capabilities, device: torch.device) -> Config | None:
    """Return the lane of another model, whose layers have the same numbers; None if a backend allows none.

    It has another scale and twice as many query heads. Where the backend allows it, it has another head width
    and another number of layers too.

    Args:
        config: A lane.
        capabilities: The capabilities of the backend.
        device: The device of the lanes.
    """
    heads = replace(config.heads, num_q_heads=2 * config.heads.num_q_heads)
    if heads.name == "mha":
        heads = replace(heads, num_kv_heads=heads.num_q_heads)
    other = replace(config, heads=heads, scale_factor=0.5)
    dim = other_dim(config, capabilities) or heads.head_dim
    wider = heads if heads.kv_lora_rank is not None else replace(heads, head_dim=dim)
    longer = None if config.mixed_dim is not None else heads.head_dim
    likely = (replace(other, heads=wider, mixed_dim=longer), replace(other, mixed_dim=longer), other)
    return next((each for each in likely if allows(capabilities, each, device)), None)


def dimensions(config: Config) -> dict[str, Any]:
    """Return the value of each dimension by name, except the number of ranks, which follows from others."""
    return {
        "kind of step": config.case.plain,
        "page size": config.page_size,
        "heads": config.heads.name,
        "dtype": config.dtype,
        "drafts": config.case.drafts,
        "ladder": config.scale if config.is_tall else "short",
        "context": config.scale if config.is_long else "short",
        "layers": "equal" if config.mixed_dim is None else "mixed",
        "cache": "high" if config.high else "low",
        "fields": "optional" if config.fields else "plain",
    }


def combinations(config: Config, strength: int = 2) -> set[tuple[tuple[str, Any], ...]]:
    """Return the combinations of values of ``strength`` dimensions that a lane has."""
    return {*itertools.combinations(sorted(dimensions(config).items()), strength)}


def covering(
    configs: Sequence[Config],
    capabilities: Capabilities,
    device: torch.device,
    seen: Iterable[Config] = (),
    *,
    strength: int = 2,
) -> list[Config]:
    """Return lanes that together have every combination of values of some dimensions.

    The lanes depend only on the arguments. Each is chosen from some random lanes: the one with the most
    combinations that are not covered yet, and of equal ones a short one, which takes less time.

    Args:
        configs: Lanes with plain values of scale.
        capabilities: The capabilities of the backend.
        device: The device of the lanes.
        seen: Lanes whose combinations are covered already.
        strength: Number of dimensions of a combination: 1 for every value, 2 for every pair of values.
    """
    rng = random.Random(0)  # noqa: S311  test data
    has_trees = any(config.case.tree for config in configs)
    drawn = [
        _drawn(rng, config, capabilities, device, broad=config.case.tree or not has_trees)
        for config in configs
        for _ in range(VARIATIONS)
    ]
    left: dict[tuple[tuple[str, Any], ...], list[Config]] = {}
    for config in drawn:
        for combination in combinations(config, strength):
            left.setdefault(combination, []).append(config)
    for config in seen:
        for combination in combinations(config, strength):
            left.pop(combination, None)
    chosen = []
    while left:
        rarest = min(left.values(), key=len)
        likely = rng.sample(rarest, min(len(rarest), CANDIDATES))
        best = max(likely, key=lambda c: (len(combinations(c, strength) & left.keys()), c.scale == "short"))
        chosen.append(best)
        for combination in combinations(best, strength):
            left.pop(combination, None)
    return chosen


def _drawn(
    rng: random.Random, config: Config, capabilities: Capabilities, device: torch.device, *, broad: bool
) -> Config:
    """Return a lane with random values of the dimensions of scale, with or without optional fields.

    Args:
        rng: The random generator.
        config: A lane with plain values.
        capabilities: The capabilities of the backend.
        device: The device of the lane.
        broad: Whether drafts may have the size ``broad``. It is used only with several branches.
    """
    whole = scaled_up(config, capabilities, device, high=True)
    scale: Scale = rng.choice(("short", "tall", "long"))
    mixed, high, fields = rng.choices((False, True), k=3)
    broad &= config.case.branches > 1 and scale == "short"  # other scales would take too long
    sizes = [size for size in DRAFTS if broad or size != "broad"]
    sized = replace(config, case=config.case.sized(rng.choice(sizes)))
    return replace(
        whole,
        case=sized.case if allows(capabilities, sized, device) else config.case,
        scale=scale,
        mixed_dim=whole.mixed_dim if mixed else None,
        high=whole.high and high,
        fields=whole.fields and fields,
    )
