"""Make calls of the attention kernels from flat keyword arguments."""

from dataclasses import fields
from typing import Any

import torch

from graphpact_kernels import AttendCall, PagedRows, PageTableCall, PageTableRows, ScoreOptions


def _taken(kind: type[Any], arguments: dict[str, Any]) -> Any:
    """Construct ``kind`` from its fields in ``arguments``, and remove these."""
    names = [each.name for each in fields(kind) if each.name in arguments]
    return kind(**{name: arguments.pop(name) for name in names})


def score_options(arguments: dict[str, Any]) -> ScoreOptions:
    """Construct the score options from ``arguments``, and remove these; None becomes 0."""
    for name, without in (("sliding_window", 0), ("softcap", 0.0)):
        arguments[name] = arguments.get(name) or without
    made: ScoreOptions = _taken(ScoreOptions, arguments)
    return made


def paged_call(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **arguments: Any
) -> AttendCall[PagedRows]:
    """Return a call of `paged_attention`, made from the fields of `PagedRows` and `ScoreOptions`."""
    call = AttendCall(q, k_cache, v_cache, _taken(PagedRows, arguments), score_options(arguments))
    assert not arguments, arguments
    return call


def page_table_call(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **arguments: Any
) -> PageTableCall[PageTableRows]:
    """Return a call of `page_table_attention`, made from the fields of its parts."""
    rows, options = _taken(PageTableRows, arguments), score_options(arguments)
    return PageTableCall(q, k_cache, v_cache, rows, options, **arguments)
