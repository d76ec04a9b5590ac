"""Tests of the pact: every kind of difference between capture and replay is found and named."""

import copy
import dataclasses
import json
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graphpact.batch import ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot
from graphpact.errors import Breach, EngineError, PactBreach
from graphpact.pact import ANY, Pact, Terms, bounded, updated, walk
from graphpact.shapes import GraphShape
from metadata_trees import NUMBERS, PROPERTY, TREES, Kind, Pair, Plan, mutations, replace_leaf

SHAPE = GraphShape(ForwardMode.DECODE, 2, 2)


@dataclasses.dataclass(slots=True)
class Inner:
    """Metadata inside metadata."""

    indptr: torch.Tensor
    window: int | None


@dataclasses.dataclass
class Meta:
    """Metadata with every kind of leaf and container that a walk can find."""

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


def _registry(*more: str) -> CudaGraphBufferRegistry:
    registry = CudaGraphBufferRegistry(max_bs=8, max_num_tokens=8, device=torch.device("cpu"))
    for name in ("fi.lengths", *more):
        registry.register_slot(
            GraphSlot(
                name=name,
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
    """Return a function that sets the attribute at ``path`` of a metadata object."""
    *outer, last = path.split(".")

    def change(meta: Meta) -> None:
        target: Any = meta
        for name in outer:
            target = getattr(target, name)
        setattr(target, last, value(meta))

    return change


def _change(path: str, key: Any, value: Callable[[Meta], Any]) -> Callable[[Meta], None]:
    return lambda meta: getattr(meta, path).__setitem__(key, value(meta))


# The change, the path that the breach names, and more words in the error.
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
        "metadata.per_layer",
        ["type captured list, got tuple", "help: the graph was recorded with the captured type"],
    ),
    "a longer list": (
        lambda meta: meta.per_layer.append(torch.zeros(1)),
        "metadata.per_layer",
        ["length captured 2, got 3", "help: keep one entry"],
    ),
    "a shorter list": (
        lambda meta: meta.per_layer.clear(),
        "metadata.per_layer",
        ["length captured 2, got 0", "help: keep one entry"],
    ),
    "a new key": (
        _change("named", "extra", lambda m: 1),
        "metadata.named",
        ["fields: missing none, new 'extra'"],
    ),
    "a lost key": (
        lambda meta: meta.named.pop("n"),
        "metadata.named",
        ["fields: missing 'n', new none"],
    ),
}


@pytest.mark.parametrize("name", _BREACHES)
def test_every_difference_is_found_and_named(name: str) -> None:
    """A difference raises an error with shape, path, values, the owner if there is one, and a help."""
    change, path, words = _BREACHES[name]
    registry = _registry()
    meta = _meta(registry)
    held = copy.copy(meta), [*meta.per_layer], {**meta.named}  # so that no address is reused
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
    """Contents may change, and a rebuilt container of the same leaves keeps the pact."""
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
    """Every root is compared under its own name, and a missing or a new root is a breach."""
    view, meta = torch.zeros(2), torch.zeros(3)
    pact = Pact.of(SHAPE, None, view=view, metadata=meta)
    with pytest.raises(PactBreach, match="view: address"):
        pact.check(view=torch.zeros(2), metadata=meta)
    with pytest.raises(PactBreach, match="metadata: fields: missing metadata, new none"):
        pact.check(view=view)
    with pytest.raises(PactBreach, match="more: fields: missing none, new more"):
        pact.check(view=view, metadata=meta, more=1)


@pytest.mark.parametrize("meta", [None, 3, {}, [], ()])
def test_small_metadata(meta: Any) -> None:
    """No metadata, a bare number and empty containers can be promised and are compared."""
    pact = Pact.of(SHAPE, None, metadata=meta)
    pact.check(metadata=meta)
    with pytest.raises(PactBreach):
        pact.check(metadata=[1, 2])


def test_the_type_of_metadata_is_exact() -> None:
    """A subclass with the same fields is another type, and therefore a breach."""

    @dataclasses.dataclass
    class Other(Inner):
        pass

    meta = Inner(torch.zeros(1), 1)
    pact = Pact.of(SHAPE, None, metadata=meta)
    with pytest.raises(PactBreach, match="type"):
        pact.check(metadata=Other(meta.indptr, 1))


def test_nothing_is_read() -> None:
    """Building and checking a pact reads no contents: both work with tensors without memory."""
    ghost = torch.zeros(4, device="meta")
    Pact.of(SHAPE, None, metadata=ghost).check(metadata=ghost)


def test_a_device_counts_by_itself() -> None:
    """Empty tensors have the same address on all devices, and another device is still a breach."""
    pact = Pact.of(SHAPE, None, metadata=torch.empty(0))
    with pytest.raises(PactBreach, match="metadata: device captured cpu, got meta"):
        pact.check(metadata=torch.empty(0, device="meta"))


def test_plain_objects_are_walked() -> None:
    """A tensor that is rebound in metadata of a plain class is found too."""

    class Plain:
        def __init__(self) -> None:
            self.indptr = torch.zeros(3)

    meta = Plain()
    kept = meta.indptr
    pact = Pact.of(SHAPE, None, metadata=meta)
    meta.indptr = torch.zeros(3)
    with pytest.raises(PactBreach, match=r"metadata\.indptr: address"):
        pact.check(metadata=meta)
    assert kept.shape == (3,)


class Slotted:
    """Plain metadata that keeps its attributes in slots, one of them private."""

    __slots__ = ("__hidden", "indptr", "late")

    def __init__(self) -> None:
        self.indptr = torch.zeros(3)
        self.__hidden = 1

    def hide(self, value: int) -> None:
        """Set the private attribute."""
        self.__hidden = value


def test_slots_of_plain_objects_are_walked() -> None:
    """Attributes in ``__slots__`` are fields too: one that is changed or newly set is a breach."""
    meta = Slotted()
    pact = Pact.of(SHAPE, None, metadata=meta)
    pact.check(metadata=meta)
    meta.hide(2)
    with pytest.raises(PactBreach, match=r"metadata\._Slotted__hidden: value captured 1, got 2"):
        pact.check(metadata=meta)
    meta.hide(1)
    meta.late = 0
    with pytest.raises(PactBreach, match="metadata: fields: missing none, new late"):
        pact.check(metadata=meta)


def test_a_field_that_is_not_set_at_capture_must_stay_so() -> None:
    """If a replay sets a declared field that had no value at capture, or the reverse, the breach names it."""
    meta = Inner(torch.zeros(1), 1)
    del meta.window
    unset = Pact.of(SHAPE, None, metadata=meta)
    unset.check(metadata=meta)
    meta.window = 1
    with pytest.raises(PactBreach, match="fields: missing none, new window"):
        unset.check(metadata=meta)
    pact = Pact.of(SHAPE, None, metadata=meta)
    del meta.window
    with pytest.raises(PactBreach, match="fields: missing window, new none"):
        pact.check(metadata=meta)


def test_names_that_are_no_identifiers_are_held_as_well() -> None:
    """Attributes, keys and roots with any spelling are compared, and never executed."""

    class Plain:
        pass

    meta = Plain()
    names = ["two words", "class", "x); raise SystemExit #", "\ufb01"]
    for name in names:
        setattr(meta, name, {name: 1})
    pact = Pact.of(SHAPE, None, **{"a root; exit()": meta})
    pact.check(**{"a root; exit()": meta})
    for name in names:
        getattr(meta, name)[name] = 2
        (breach,) = pact.breaches(**{"a root; exit()": meta})
        assert breach.path == f"a root; exit().{name}[{name!r}]"
        getattr(meta, name)[name] = 1


@pytest.mark.parametrize(
    "value",
    [math.nan, complex(0, math.nan), np.int64(3), np.float32(0.5), slice(0, 4), range(3), b"x"],
    ids=repr,
)
def test_values_are_compared_as_values(value: Any) -> None:
    """A host value is compared by value, not by identity, and NaN equals NaN."""
    pact = Pact.of(SHAPE, None, metadata=[value])
    again = copy.deepcopy(value) if not isinstance(value, float) else type(value)(str(value))
    pact.check(metadata=[again])
    with pytest.raises(PactBreach, match="type"):
        pact.check(metadata=["another"])


def test_order_of_keys_is_no_promise() -> None:
    """Entries of a mapping or an object in another order keep the pact; exchanged values do not."""
    first, second = torch.zeros(1), torch.zeros(1)
    for make, names in (
        (dict, ["metadata['a']", "metadata['b']"]),
        (SimpleNamespace, ["metadata.a", "metadata.b"]),
    ):
        pact = Pact.of(SHAPE, None, metadata=make(a=first, b=second))
        pact.check(metadata=make(b=second, a=first))
        with pytest.raises(PactBreach) as error:
            pact.check(metadata=make(b=first, a=second))
        assert [b.path for b in error.value.breaches] == names


LENGTHS = torch.zeros(2)

# -- arguments of tasks ----------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Updated:
    """Metadata with host arguments of tasks."""

    lengths: torch.Tensor
    ends: list[int] = updated(metadata={"unit": "keys"})  # noqa: RUF009  a field
    most: int = updated(default=7)


@pytest.mark.parametrize("fields", [{}, {"ends": [900, 1]}, {"ends": []}, {"ends": [2, 3], "most": 90}])
def test_an_updated_field_may_have_any_value(fields: dict[str, Any]) -> None:
    """Numbers and lists that are declared updated() keep the pact with any value; it promises the type."""
    captured = {"ends": [1, 2]}
    pact = Pact.of(SHAPE, None, metadata=Updated(LENGTHS, **captured))
    pact.check(metadata=Updated(LENGTHS, **{**captured, **fields}))
    assert [p.path for p in pact.promises if p.value is ANY] == ["metadata.ends", "metadata.most"]
    (unit,) = [f.metadata["unit"] for f in dataclasses.fields(Updated) if f.name == "ends"]
    assert unit == "keys"


@pytest.mark.parametrize(("field", "value"), [("ends", (1, 2)), ("most", 7.0)])
def test_an_updated_field_keeps_its_type(field: str, value: Any) -> None:
    """Another type is a breach, and other fields must still keep their values."""
    pact = Pact.of(SHAPE, None, metadata=Updated(LENGTHS, [1, 2]))
    with pytest.raises(PactBreach) as error:
        pact.check(metadata=dataclasses.replace(Updated(LENGTHS, [1, 2]), **{field: value}))
    assert [(b.path, b.rule) for b in error.value.breaches] == [(f"metadata.{field}", "type")]
    with pytest.raises(PactBreach):
        pact.check(metadata=Updated(LENGTHS.clone(), [1, 2]))


# -- bounded host numbers --------------------------------------------------------------------------


@dataclasses.dataclass(slots=True)
class Limits:
    """Metadata with bounded limits of recorded kernels; the last has a default."""

    lengths: torch.Tensor
    most: int = bounded()
    share: float = bounded()
    per_tier: list[int] = bounded(  # noqa: RUF009  a field, as dataclasses.field is
        default_factory=lambda: [4, 8], metadata={"unit": "tokens"}
    )
    spare: int = bounded(default=7)


def _limits(**fields: Any) -> Limits:
    return Limits(LENGTHS, **{"most": 512, "share": 0.5, **fields})


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"most": 0},
        {"most": -3},
        {"share": 0.25},
        {"per_tier": [4, 7]},
        {"per_tier": [0, 0]},
        {"spare": 1},
    ],
)
def test_a_bounded_number_may_be_smaller(fields: dict[str, Any]) -> None:
    """A number that is at most the captured one keeps the pact, by itself and in a list."""
    Pact.of(SHAPE, None, metadata=_limits()).check(metadata=_limits(**fields))


@pytest.mark.parametrize(
    ("fields", "path", "rule", "captured", "replayed"),
    [
        ({"most": 513}, "most", "bound", "<= 512", "513"),
        ({"share": 0.75}, "share", "bound", "<= 0.5", "0.75"),
        ({"share": math.nan}, "share", "bound", "<= 0.5", "nan"),
        ({"per_tier": [4, 9]}, "per_tier[1]", "bound", "<= 8", "9"),
        ({"per_tier": [4]}, "per_tier", "length", "2", "1"),
        ({"per_tier": [4, 8, 1]}, "per_tier", "length", "2", "3"),
        ({"per_tier": (4, 8)}, "per_tier", "type", "list", "tuple"),
        ({"spare": 8}, "spare", "bound", "<= 7", "8"),
        ({"most": 1.0}, "most", "type", "int", "float"),
        ({"most": True}, "most", "type", "int", "bool"),
        ({"most": None}, "most", "type", "int", "NoneType"),
    ],
)
def test_a_bounded_number_may_not_be_anything_else(
    fields: dict[str, Any], path: str, rule: str, captured: str, replayed: str
) -> None:
    """A larger number, another type and another length are breaches with both values."""
    pact = Pact.of(SHAPE, None, metadata=_limits())
    with pytest.raises(PactBreach) as error:
        pact.check(metadata=_limits(**fields))
    (breach,) = error.value.breaches
    assert (breach.path, breach.rule) == (f"metadata.{path}", rule)
    assert (breach.captured, breach.replayed) == (captured, replayed)


@pytest.mark.parametrize(
    "value",
    [None, True, "512", torch.zeros(1), math.nan, Kind.A, [4, True], [[4]], {"a": 1}, Pair(1, 2)],
    ids=repr,
)
def test_what_is_no_number_cannot_be_bounded(value: Any) -> None:
    """A bounded field is refused at capture unless it is a number, or a list or tuple of numbers."""
    with pytest.raises(EngineError, match=r"metadata\.most is declared bounded\(\)") as error:
        Pact.of(SHAPE, None, metadata=_limits(most=value))
    assert str(SHAPE) in str(error.value)
    assert "help: " in str(error.value)


def test_bounded_is_a_field_like_any_other() -> None:
    """`bounded` keeps defaults, factories and the metadata of the field."""
    fields = {field.name: field for field in dataclasses.fields(Limits)}
    assert _limits() == Limits(LENGTHS, 512, 0.5, [4, 8], 7)
    assert fields["per_tier"].metadata["unit"] == "tokens"


# -- metadata of another type or with other fields -------------------------------------------------


@dataclasses.dataclass
class Raw:
    """The raw metadata of a backend."""

    lengths: torch.Tensor
    mask: torch.Tensor | None = None


@dataclasses.dataclass
class Full:
    """The full metadata to which the same backend upgrades it."""

    lengths: torch.Tensor
    indptr: torch.Tensor
    window: int = 4


def test_metadata_that_is_upgraded_on_one_side_is_named() -> None:
    """The first line has both types, the missing and the new fields, whichever side was upgraded."""
    lengths, indptr = torch.zeros(2), torch.zeros(3)
    raw, full = Raw(lengths), Full(lengths, indptr)
    for captured, replayed, words in (
        (raw, full, ["captured Raw, got Full", "missing mask", "new indptr, window"]),
        (full, raw, ["captured Full, got Raw", "missing indptr, window", "new mask"]),
    ):
        pact = Pact.of(SHAPE, None, metadata=captured)
        with pytest.raises(PactBreach) as error:
            pact.check(metadata=replayed)
        first = str(error.value).splitlines()[0]
        assert all(word in first for word in (str(SHAPE), "metadata", *words))
        assert [b.rule for b in error.value.breaches] == ["type", "fields"]


def test_the_fields_that_both_types_have_are_compared_too() -> None:
    """Another type does not hide other differences."""
    pact = Pact.of(SHAPE, None, metadata=Raw(kept := torch.zeros(2)))
    found = pact.breaches(metadata=Full(torch.zeros(2), torch.zeros(3)))
    assert [(b.path, b.rule) for b in found] == [
        ("metadata", "type"),
        ("metadata", "fields"),
        ("metadata.lengths", "address"),
    ]
    assert kept.shape == (2,)


def test_types_of_one_name_are_distinguished() -> None:
    """If two types have the same short name, the breach has their qualified names."""

    def make() -> type:
        @dataclasses.dataclass
        class Raw:
            lengths: int = 1

        return Raw

    (breach,) = Pact.of(SHAPE, None, metadata=make()()).breaches(metadata=make()())
    assert "make.<locals>.Raw" in breach.captured
    assert breach.rule == "type"


def test_plain_metadata_that_gains_or_loses_attributes_is_named() -> None:
    """An attribute that is added or removed between capture and replay is a breach of the fields."""

    class Plain:
        def __init__(self) -> None:
            self.lengths, self.window = LENGTHS, 4

    meta = Plain()
    pact = Pact.of(SHAPE, None, metadata=meta)
    meta.indptr = torch.zeros(3)  # type: ignore[attr-defined]  planted
    del meta.window
    (breach,) = pact.breaches(metadata=meta)
    assert breach.text == "fields: missing window, new indptr"


@pytest.mark.parametrize("captured", [{}, {"window": 4}])
def test_the_check_refuses_a_new_attribute_of_plain_metadata(captured: dict[str, int]) -> None:
    """`Pact.check` refuses plain metadata that gained an attribute, even if it had none at capture."""
    meta = SimpleNamespace(**captured)
    pact = Pact.of(SHAPE, None, metadata=meta)
    pact.check(metadata=meta)
    meta.indptr = LENGTHS
    with pytest.raises(PactBreach, match="new indptr"):
        pact.check(metadata=meta)


def test_none_and_an_object_are_distinguished_both_ways() -> None:
    """If a field is None on one side, the breaches name the other side's type and fields, with advice."""
    inner = Inner(torch.zeros(1), 2)
    for captured, replayed, texts, advice in (
        (
            None,
            inner,
            ["type captured NoneType, got Inner", "fields: missing none, new indptr, window"],
            "set it at capture too",
        ),
        (
            inner,
            None,
            ["type captured Inner, got NoneType", "fields: missing indptr, window, new none"],
            "keep the captured one",
        ),
    ):
        found = Pact.of(SHAPE, None, metadata=[captured]).breaches(metadata=[replayed])
        assert [breach.text for breach in found] == texts
        assert advice in found[0].advice


# -- the text of breaches --------------------------------------------------------------------------


def test_a_breach_is_a_line_a_table_and_what_to_do() -> None:
    """The text has a summary of the first field, a table with a row for each breach, and a help."""
    registry = _registry()
    meta = _meta(registry)
    pact = Pact.of(SHAPE, registry, metadata=meta)
    buffer = registry.get_slot("fi.lengths").buffer
    assert buffer is not None
    meta.count, meta.text, meta.lengths = 4, "ragged", buffer[1:4]
    with pytest.raises(PactBreach) as error:
        pact.check(metadata=meta)
    owner, where = "slot 'fi.lengths' of flashinfer", buffer.data_ptr()
    summary, *table, advice = str(error.value).splitlines()
    assert summary == (
        f"{SHAPE}: metadata.lengths ({owner}): address captured {where:#x}, got {where + 4:#x}; "
        "shape captured torch.Size([4]), got torch.Size([3]); and 2 more in other fields"
    )
    assert [line.split()[0] for line in table] == ["field"] + 2 * ["metadata.lengths"] + [
        "metadata.count",
        "metadata.text",
    ]
    columns = [table[0].index(word) for word in ("field", "rule", "captured", "replayed", "owner")]
    assert all(line[at - 1] == " " != line[at] for line in table for at in columns)
    assert table[1].endswith(owner)
    assert table[3].split() == ["metadata.count", "value", "3", "4", "-"]
    assert advice == "  help: copy into the captured tensor instead of making a new one"
    assert [b.rule for b in error.value.breaches] == ["address", "shape", "value", "value"]


def test_a_long_table_is_cut_and_counted() -> None:
    """The text has twelve rows and counts the others; the error has all breaches."""
    pact = Pact.of(SHAPE, None, metadata=[0] * 40)
    with pytest.raises(PactBreach) as error:
        pact.check(metadata=[1] * 40)
    lines = str(error.value).splitlines()
    assert len(error.value.breaches) == 40
    assert len(lines) == 1 + 1 + 12 + 1 + 1
    assert lines[-2] == "  ... and 28 more"


def test_a_tensor_in_the_wrong_slot_says_in_which() -> None:
    """If a replayed tensor is in another slot than the captured one, the breach names that slot."""
    registry = _registry("fi.other")
    right, wrong = (registry.get_slot(n).slice_for(4, 4) for n in ("fi.lengths", "fi.other"))
    (breach,) = Pact.of(SHAPE, registry, metadata=right).breaches(metadata=wrong)
    assert breach.replayed == f"{wrong.data_ptr():#x} in slot 'fi.other' of flashinfer"
    assert breach.owner == "slot 'fi.lengths' of flashinfer"


def test_long_values_are_cut() -> None:
    """A long text in metadata is shortened in the breach."""
    (breach,) = Pact.of(SHAPE, None, metadata="a" * 5000).breaches(metadata="b" * 5000)
    assert max(len(breach.captured), len(breach.replayed)) < 100


# -- random metadata -------------------------------------------------------------------------------


@PROPERTY
@given(TREES)
def test_every_mutation_of_one_leaf_is_named_exactly(tree: Any) -> None:
    """A rebuilt tree passes; with one leaf changed, the breaches have its path and the right rules."""
    pact = Pact.of(SHAPE, None, metadata=tree)
    leaves = dict(walk({"metadata": tree}))
    assert list(leaves) == [p.path for p in pact.promises if p.form is None]
    again = replace_leaf(tree, "metadata", "nowhere", Plan)
    assert pact._holds({"metadata": again})  # the check of every step, without the walk
    assert pact.breaches(metadata=again) == ()
    for path, leaf in leaves.items():
        for change, rules in mutations(leaf):
            other = replace_leaf(tree, "metadata", path, change)
            with pytest.raises(PactBreach) as error:
                pact.check(metadata=other)
            assert [(b.path, b.rule) for b in error.value.breaches] == [
                (path, rule) for rule in rules.split()
            ]


@PROPERTY
@given(st.lists(NUMBERS, max_size=4), st.lists(NUMBERS, max_size=4))
def test_bounded_lists_are_bounds_entry_by_entry(captured: list[int], replayed: list[int]) -> None:
    """A replay passes if its list has the captured length and no larger entry."""
    pact = Pact.of(SHAPE, None, metadata=_limits(per_tier=captured))
    found = pact.breaches(metadata=_limits(per_tier=replayed))
    larger = [i for i, (a, b) in enumerate(zip(captured, replayed, strict=False)) if b > a]
    expected = [("metadata.per_tier", "length")] if len(captured) != len(replayed) else []
    expected += [(f"metadata.per_tier[{i}]", "bound") for i in larger]
    assert [(b.path, b.rule) for b in found] == expected


def test_breaches_are_plain_data() -> None:
    """A breach has only plain values, so it can be compared and written as JSON."""
    (breach,) = Pact.of(SHAPE, None, metadata=[1]).breaches(metadata=[2])
    assert breach == Breach("metadata[0]", "value", "1", "2", None, breach.advice)
    json.dumps(dataclasses.asdict(breach))


# -- terms: objects whose classes declare nothing --------------------------------------------------------


class _Plain:
    """An object of another engine."""

    def __init__(self, table: torch.Tensor, **others: Any) -> None:
        self.table = table
        self.__dict__ |= others


def _pact_of(value: object, **terms: Any) -> Pact[str]:
    return Pact.of("decode[4]", terms=Terms(**terms), metadata=value)


def test_only_chosen_attributes_are_promised() -> None:
    """With a choice, other attributes may change, come and go; what is chosen may not, down to its items."""
    value = _Plain(torch.zeros(4), sizes=[1, 2], step=0)
    pact = _pact_of(value, only={"metadata.table", "metadata.sizes"})
    assert [p.path for p in pact.promises] == [
        "metadata",
        "metadata.table",
        "metadata.sizes",
        "metadata.sizes[0]",
        "metadata.sizes[1]",
    ]
    value.step, value.new = 5, torch.ones(1)  # type: ignore[attr-defined]
    assert pact.keeps({"metadata": value})
    del value.step  # type: ignore[attr-defined]
    assert pact.breaches(metadata=value) == ()
    value.sizes[1] = 3  # type: ignore[attr-defined]
    assert not pact.keeps({"metadata": value})
    assert [(b.path, b.rule) for b in pact.breaches(metadata=value)] == [("metadata.sizes[1]", "value")]


def test_a_chosen_attribute_that_is_gone_is_a_breach() -> None:
    """An attribute that the graph reads has to be there."""
    value = _Plain(torch.zeros(4))
    pact = _pact_of(value, only={"metadata.table"})
    del value.table
    assert not pact.keeps({"metadata": value})


@pytest.mark.parametrize(
    ("view", "rules"),
    [
        (lambda memory: memory[:2], []),
        (lambda memory: memory[:4, :3], []),
        (lambda memory: memory[1:4], ["address"]),
        (lambda memory: memory[:5], ["shape"]),
        (lambda memory: memory[:4].T, ["stride"]),
        (lambda memory: memory[0], ["shape", "stride"]),
    ],
)
def test_a_shorter_view_of_the_captured_memory_is_allowed(
    view: Callable[[torch.Tensor], torch.Tensor], rules: list[str]
) -> None:
    """A view that begins at the same place with the same strides may be shorter, and in no way longer."""
    memory = torch.zeros(5, 4)
    value = _Plain(memory[:4])
    pact = _pact_of(value, shorter_views=True)
    value.table = view(memory)
    found = [breach.rule for breach in pact.breaches(metadata=value)]
    assert found == rules
    assert pact.keeps({"metadata": value}) == (not rules)


def test_limits_are_named_for_classes_that_declare_none() -> None:
    """A number under such a name may be smaller; a flag under it is no limit."""
    value = _Plain(torch.zeros(1), max_len=8, max_flag=True)
    pact = _pact_of(value, limits={"max_len", "max_flag"})
    value.max_len = 3  # type: ignore[attr-defined]
    assert pact.keeps({"metadata": value})
    value.max_len, value.max_flag = 9, False  # type: ignore[attr-defined]
    assert [(b.path, b.rule) for b in pact.breaches(metadata=value)] == [
        ("metadata.max_len", "bound"),
        ("metadata.max_flag", "value"),
    ]
