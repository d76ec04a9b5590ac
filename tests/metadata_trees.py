"""Random metadata in nested containers, and changes of one leaf with the pact rules that they break."""

import dataclasses
import enum
from collections import namedtuple
from collections.abc import Callable, Mapping
from typing import Any

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  the pact must see plain ones too


class Kind(enum.Enum):
    """A host value that is neither a number nor a text."""

    A = 1
    B = 2


class Plan:
    """An opaque object that a graph may hold."""


_OF_TENSORS: list[tuple[Any, str]] = [  # layouts of a tensor [4, 4]
    (lambda t: t.clone(), "address"),
    (lambda t: t[:3], "shape"),
    (lambda t: t.t(), "stride"),
    (lambda t: t.view(torch.int32), "dtype"),
    (lambda t: t.to("meta"), "address device"),
    (lambda t: None, "type"),
]


def mutations(leaf: Any) -> list[tuple[Any, str]]:
    """Return functions that change a leaf, each with the rules that the change breaks."""
    by_type: dict[Any, list[tuple[Any, str]]] = {
        torch.Tensor: _OF_TENSORS,
        type(None): [(lambda _: 1, "type"), (lambda _: torch.zeros(1), "type")],
        bool: [(lambda v: not v, "value"), (int, "type")],
        int: [(lambda v: v + 1, "value"), (str, "type"), (float, "type"), (bool, "type")],
        float: [(lambda v: v + 1, "value"), (str, "type"), (bool, "type")],
        str: [(lambda v: v + "x", "value"), (str.encode, "type")],
        Kind: [(lambda v: Kind.B if v is Kind.A else Kind.A, "value")],
        torch.dtype: [(lambda v: torch.int8 if v != torch.int8 else torch.int16, "value")],
        Plan: [(lambda _: Plan(), "value")],
    }
    return by_type[type(leaf)]


def _make(names: list[str], values: list[Any], *, slots: bool) -> Any:
    kind = dataclasses.make_dataclass(f"Made{len(names)}", names, slots=slots)
    return kind(*values)


NUMBERS = st.integers(-(2**40), 2**40)
_LEAVES = st.one_of(
    st.builds(lambda: torch.zeros(4, 4)),
    NUMBERS,
    st.floats(-1e6, 1e6),
    st.booleans(),
    st.none(),
    st.text(max_size=5),
    st.sampled_from([*Kind, torch.float32, torch.int8]),
    st.builds(Plan),
)


def _containers(inside: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    many = st.lists(inside, min_size=1, max_size=3)
    return st.one_of(
        many,
        many.map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), inside, min_size=1, max_size=3),
        st.builds(Pair, inside, inside),
        st.builds(
            lambda values, slots: _make([f"f{i}" for i in range(len(values))], values, slots=slots),
            many,
            st.booleans(),
        ),
    )


TREES = _containers(st.recursive(_LEAVES, _containers, max_leaves=8))


def replace_leaf(value: Any, path: str, at: str, change: Callable[[Any], Any]) -> Any:
    """Return a rebuilt ``value`` in which the leaf at path ``at`` is changed."""

    def inside(item: Any, suffix: str) -> Any:
        return replace_leaf(item, path + suffix, at, change)

    if path == at:
        value = change(value)
    elif isinstance(value, Mapping):
        value = {k: inside(v, f"[{k!r}]") for k, v in value.items()}
    elif isinstance(value, Pair):
        value = Pair(*(inside(v, f".{n}") for n, v in value._asdict().items()))
    elif isinstance(value, (list, tuple)):
        value = type(value)(inside(v, f"[{i}]") for i, v in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        value = dataclasses.replace(value, **{n: inside(getattr(value, n), f".{n}") for n in names})
    return value


PROPERTY = settings(
    derandomize=True,
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow],
)
