"""The coverage of a run: the values of each dimension that its lanes had.

Does not: choose lanes; see `graphpact_conformance.draws.choice`.
"""

from collections.abc import Iterable
from typing import Any

import torch

from graphpact_conformance.draws.choice import dimensions
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.merge import Values, joined

HIGH_PAGE = 2**15
"""The first page whose number does not fit into 16 bits."""


def drawn(lanes: Iterable[tuple[Config, Iterable[str]]]) -> dict[str, list[str]]:
    """Return the values that lanes had, in the order in which they were drawn.

    Args:
        lanes: The configuration of each lane, with the names of the experiments that ran in it.
    """
    return joined(_of_lane(config, {*experiments}) for config, experiments in lanes)


def _of_lane(config: Config, experiments: set[str]) -> Values:
    """Return the values of one lane. The mapping is empty if no experiment ran in it."""
    if not experiments:
        return {}
    values = {name: [value] for name, value in dimensions(config).items()} | _of_sizes(config)
    if "ranks_agree" in experiments:
        values["ranks"] = [config.ranks]
    values["experiments"] = sorted(experiments)
    return {name: [*map(_said, some)] for name, some in values.items()}


def _of_sizes(config: Config) -> dict[str, list[Any]]:
    """Return properties that follow from the configuration: sizes of shapes, pages and layers."""
    shapes, page = config.shapes, config.page_size
    tokens = max(shape.num_tokens for shape in shapes)
    pages = max(config.pages, default=0)
    return {
        "shapes captured": [len(shapes)],
        "largest shape, requests": [max(shape.batch_size for shape in shapes)],
        "padding rows": ["more than a page" if tokens - 1 > page else "within a page"],
        "tokens of a step": ["more than a context" if tokens > config.context else "within a context"],
        "pages": ["beyond 16 bits" if pages >= HIGH_PAGE else "within 16 bits"],
        "number of layers": [len(config.layers)],
        "windows": sorted({layer.sliding_window or 0 for layer in config.layers}),
        "head widths": sorted({layer.head_dim for layer in config.layers}),
    }


def _said(value: object) -> str:
    return str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else str(value)
