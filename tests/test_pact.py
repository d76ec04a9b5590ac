"""The pact: every kind of difference between capture and replay is found and named."""

import copy
import dataclasses
import enum
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch

from graphpact.batch import ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot
from graphpact.errors import PactBreach
from graphpact.pact import Pact
from graphpact.shapes import GraphShape

SHAPE = GraphShape(ForwardMode.DECODE, 2, 2)
Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024  the pact must see plain ones too


class Kind(enum.Enum):
    """A host value that is neither number nor text."""

    A = 1
    B = 2


class Plan:
    """An opaque object that a graph may hold."""


@dataclasses.dataclass(slots=True)
class Inner:
    """Metadata inside metadata."""

    indptr: torch.Tensor
    window: int | None


@dataclasses.dataclass
class Meta:
    """Metadata with every kind of leaf and container that a walk meets."""

    lengths: torch.Tensor
    inner: Inner
    per_layer: list[torch.Tensor]
    named: dict[str, Any]
    pair: Pair
    count: int
    scale: float
    flag: bool
    text: str
    kind: Kind
    dtype: torch.dtype
    plan: Plan
    nothing: None = None


def _registry() -> CudaGraphBufferRegistry:
    registry = CudaGraphBufferRegistry(max_bs=8, max_num_tokens=8, device=torch.device("cpu"))
    registry.register_slot(
        GraphSlot(
            name="fi.lengths",
            shape_fn=lambda bs, _: (bs,),
            dtype=torch.int32,
            owner="flashinfer",
            axis="bs",
            copy_from_fb=False,
        )
    )
    return registry


def _meta(registry: CudaGraphBufferRegistry) -> Meta:
    return Meta(
        lengths=registry.get_slot("fi.lengths").slice_for(4, 4),
        inner=Inner(torch.zeros(4, 4), 8),
        per_layer=[torch.zeros(2), torch.zeros(3)],
        named={"k": torch.zeros(2), "n": 3},
        pair=Pair(torch.zeros(1), 5),
        count=3,
        scale=0.5,
        flag=True,
        text="paged",
        kind=Kind.A,
        dtype=torch.float32,
        plan=Plan(),
    )


def _set(path: str, value: Callable[[Meta], Any]) -> Callable[[Meta], None]:
    """Return what sets the attribute at ``path`` of a metadata object."""
    *outer, last = path.split(".")

    def change(meta: Meta) -> None:
        target: Any = meta
        for name in outer:
            target = getattr(target, name)
        setattr(target, last, value(meta))

    return change


def _change(path: str, key: Any, value: Callable[[Meta], Any]) -> Callable[[Meta], None]:
    return lambda meta: getattr(meta, path).__setitem__(key, value(meta))


# What changed, the path that the breach names, and more words of it.
_BREACHES: dict[str, tuple[Callable[[Meta], None], str, list[str]]] = {
    "a new tensor": (
        _set("lengths", lambda m: m.lengths.clone()),
        "metadata.lengths",
        ["slot 'fi.lengths' of flashinfer", "address captured 0x", "help: copy into the captured"],
    ),
    "another slice": (
        _set("lengths", lambda m: m.lengths[1:]),
        "metadata.lengths",
        ["address", "slot 'fi.lengths'"],
    ),
    "another extent": (
        _set("lengths", lambda m: m.lengths[:3]),
        "metadata.lengths",
        ["shape captured torch.Size([4]), got torch.Size([3])"],
    ),
    "another layout": (
        _set("inner.indptr", lambda m: m.inner.indptr.t()),
        "metadata.inner.indptr",
        ["stride captured (4, 1), got (1, 4)"],
    ),
    "another dtype": (
        _set("inner.indptr", lambda m: m.inner.indptr.view(torch.int32)),
        "metadata.inner.indptr",
        ["dtype captured torch.float32, got torch.int32"],
    ),
    "another device": (
        _set("inner.indptr", lambda m: m.inner.indptr.to("meta")),
        "metadata.inner.indptr",
        ["captured"],
    ),
    "no tensor": (_set("lengths", lambda m: None), "metadata.lengths", ["Tensor, got NoneType"]),
    "a subclass of tensor": (
        _set("lengths", lambda m: torch.nn.Parameter(m.lengths, requires_grad=False)),
        "metadata.lengths",
        ["captured Tensor, got Parameter"],
    ),
    "a tensor of a list": (
        _change("per_layer", 1, lambda m: torch.zeros(3)),
        "metadata.per_layer[1]",
        ["address"],
    ),
    "a tensor of a dictionary": (
        _change("named", "k", lambda m: torch.zeros(2)),
        "metadata.named['k']",
        ["address"],
    ),
    "a number of a dictionary": (_change("named", "n", lambda m: 4), "metadata.named['n']", ["3"]),
    "a tensor of a named tuple": (
        _set("pair", lambda m: m.pair._replace(left=torch.zeros(1))),
        "metadata.pair.left",
        ["address"],
    ),
    "a host number": (
        _set("count", lambda m: 4),
        "metadata.count",
        ["captured 3, got 4", "help: a host number is frozen into the graph"],
    ),
    "a nested host number": (_set("inner.window", lambda m: 9), "metadata.inner.window", ["8"]),
    "a number for none": (_set("nothing", lambda m: 1), "metadata.nothing", ["NoneType, got int"]),
    "an int for a float": (_set("scale", lambda m: 1), "metadata.scale", ["float, got int"]),
    "a float": (_set("scale", lambda m: 0.25), "metadata.scale", ["captured 0.5, got 0.25"]),
    "an int for a bool": (_set("flag", lambda m: 1), "metadata.flag", ["bool, got int"]),
    "a bool": (_set("flag", lambda m: False), "metadata.flag", ["captured True, got False"]),
    "a text": (_set("text", lambda m: "ragged"), "metadata.text", ["'paged', got 'ragged'"]),
    "an enum": (_set("kind", lambda m: Kind.B), "metadata.kind", ["Kind.A"]),
    "a dtype": (_set("dtype", lambda m: torch.int8), "metadata.dtype", ["torch.int8"]),
    "another object": (_set("plan", lambda m: Plan()), "metadata.plan", ["captured"]),
    "another type of container": (
        _set("per_layer", lambda m: tuple(m.per_layer)),
        "metadata.per_layer: type",
        ["help: "],
    ),
    "a longer list": (
        lambda meta: meta.per_layer.append(torch.zeros(1)),
        "metadata.per_layer[2]",
        ["other fields", "missing none"],
    ),
    "a shorter list": (
        lambda meta: meta.per_layer.clear(),
        "metadata.per_layer[0]",
        ["other fields", "new none"],
    ),
    "a new key": (
        _change("named", "extra", lambda m: 1),
        "metadata.named['extra']",
        ["missing none"],
    ),
    "a lost key": (lambda meta: meta.named.pop("n"), "metadata.named['n']", ["new none"]),
}


@pytest.mark.parametrize("name", _BREACHES)
def test_every_difference_is_found_and_named(name: str) -> None:
    """A difference raises with shape, path, both values, owner where there is one, and what to do."""
    change, path, words = _BREACHES[name]
    registry = _registry()
    meta = _meta(registry)
    held = copy.copy(meta), [*meta.per_layer], {**meta.named}  # so no address is used again
    view = [torch.zeros(1)]
    pact = Pact.of(SHAPE, registry, view=view, metadata=meta)
    pact.check(view=view, metadata=meta)
    change(meta)
    with pytest.raises(PactBreach) as error:
        pact.check(view=view, metadata=meta)
    for word in (str(SHAPE), path, *words):
        assert word in str(error.value)
    del held


def test_equal_walks_pass_whatever_the_contents() -> None:
    """Contents may change at will, and a rebuilt container of the same leaves is the same pact."""
    registry = _registry()
    meta = _meta(registry)
    pact = Pact.of(SHAPE, registry, view=(1, meta.lengths), metadata=meta)
    for value in (3, 4):
        meta.lengths.fill_(value)
        meta.inner.indptr.normal_()
        again = dataclasses.replace(meta, per_layer=[*meta.per_layer], named=dict(meta.named))
        again.lengths = registry.get_slot("fi.lengths").slice_for(4, 4)
        pact.check(view=(1, meta.lengths), metadata=again)


def test_the_view_is_held_to_the_pact_too() -> None:
    """Every root of the walk counts, under its own name."""
    view, meta = torch.zeros(2), torch.zeros(3)
    pact = Pact.of(SHAPE, None, view=view, metadata=meta)
    with pytest.raises(PactBreach, match="view: address"):
        pact.check(view=torch.zeros(2), metadata=meta)
    with pytest.raises(PactBreach, match=r"missing \['metadata'\]"):
        pact.check(view=view)
    with pytest.raises(PactBreach, match=r"new \['more'\]"):
        pact.check(view=view, metadata=meta, more=1)


@pytest.mark.parametrize("meta", [None, 3, {}, [], ()])
def test_small_metadata(meta: Any) -> None:
    """No metadata, a bare number and empty containers are pacts like any other."""
    pact = Pact.of(SHAPE, None, metadata=meta)
    pact.check(metadata=meta)
    with pytest.raises(PactBreach):
        pact.check(metadata=[1, 2])


def test_the_type_of_metadata_is_exact() -> None:
    """A subclass with the same fields is another type."""

    @dataclasses.dataclass
    class Other(Inner):
        pass

    meta = Inner(torch.zeros(1), 1)
    pact = Pact.of(SHAPE, None, metadata=meta)
    with pytest.raises(PactBreach, match="type"):
        pact.check(metadata=Other(meta.indptr, 1))


def test_nothing_is_read() -> None:
    """Building and checking a pact reads no contents: tensors without memory pass through both."""
    ghost = torch.zeros(4, device="meta")
    Pact.of(SHAPE, None, metadata=ghost).check(metadata=ghost)


def test_plain_objects_are_walked() -> None:
    """A tensor rebound inside metadata that is no dataclass is found as well."""

    class Plain:
        def __init__(self) -> None:
            self.indptr = torch.zeros(3)

    meta = Plain()
    kept = meta.indptr
    pact = Pact.of(SHAPE, None, metadata=meta)
    meta.indptr = torch.zeros(3)
    with pytest.raises(PactBreach):
        pact.check(metadata=meta)
    assert kept.shape == (3,)
