"""Calls of the attention kernels from flat arguments, by name, as tests have them.

Does not: attend.
"""

from dataclasses import fields
from typing import Any

import torch

from graphpact_kernels import AttendCall, PagedRows, PageTableCall, PageTableRows, ScoreOptions


def _taken(kind: type[Any], arguments: dict[str, Any]) -> Any:
    """Return a ``kind`` of its arguments, which are taken out of ``arguments``."""
    names = [each.name for each in fields(kind) if each.name in arguments]
    return kind(**{name: arguments.pop(name) for name in names})


def score_options(arguments: dict[str, Any]) -> ScoreOptions:
    """Return the options of the scores, which are taken out of ``arguments``; None is 0 for them."""
    for name, without in (("sliding_window", 0), ("softcap", 0.0)):
        arguments[name] = arguments.get(name) or without
    made: ScoreOptions = _taken(ScoreOptions, arguments)
    return made


def paged_call(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **arguments: Any
) -> AttendCall[PagedRows]:
    """Return a call of `paged_attention`, of the fields of `PagedRows` and `ScoreOptions`."""
    call = AttendCall(q, k_cache, v_cache, _taken(PagedRows, arguments), score_options(arguments))
    assert not arguments, arguments
    return call


def page_table_call(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, **arguments: Any
) -> PageTableCall[PageTableRows]:
    """Return a call of `page_table_attention`, of the fields of its parts."""
    rows, options = _taken(PageTableRows, arguments), score_options(arguments)
    return PageTableCall(q, k_cache, v_cache, rows, options, **arguments)
