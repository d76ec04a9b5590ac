"""Saved pacts: files keep the promises of a pact, and two files are compared field by field."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.batch import ForwardMode
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot
from graphpact.errors import UsageError
from graphpact.pact import Pact, bounded, walk
from graphpact.shapes import GraphShape
from graphpact_engine.saved_pacts import Change, SavedPact, SavedPacts, diff
from metadata_trees import PROPERTY, TREES, Kind, Plan, mutations, replace_leaf

SHAPE = GraphShape(ForwardMode.DECODE, 2, 2)


@dataclasses.dataclass
class RecordedLimits:
    """RecordedLimits of recorded kernels."""

    most: int = bounded(default=512)
    share: float = bounded(default=math.inf)


@dataclasses.dataclass
class SavedMetadata:
    """Metadata with every kind of leaf that is saved in its own way."""

    lengths: torch.Tensor
    foreign: torch.Tensor
    count: int = 3
    text: str = "paged"
    kind: Kind = Kind.A
    dtype: torch.dtype = torch.float32
    plan: Plan = dataclasses.field(default_factory=Plan)
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


def _meta(registry: CudaGraphBufferRegistry) -> SavedMetadata:
    return SavedMetadata(registry.get_slot("fi.lengths").slice_for(4, 4), torch.zeros(4, 4))


def _saved(tree: Any) -> SavedPacts:
    return SavedPacts.of([("decode", Pact.of(SHAPE, None, metadata=tree))])


def _document() -> dict[str, Any]:
    registry = _registry()
    parts = {"view": RecordedLimits(), "metadata": _meta(registry)}
    pacts = [Pact.of(dataclasses.replace(SHAPE, variant=v), registry, **parts) for v in ("", "b")]
    return SavedPacts.of([("decode", pacts[0]), ("decode", pacts[1]), ("verify", pacts[0])]).to_dict()


def test_a_saved_pact_has_what_can_be_compared_and_no_address() -> None:
    """Tensors by slot and offset, numbers with their bound, other values in words, objects by type."""
    registry = _registry()
    meta = _meta(registry)
    meta.lengths = registry.get_slot("fi.lengths").slice_for(4, 4)[1:]
    pact = Pact.of(SHAPE, registry, view=RecordedLimits(), metadata=meta)
    (saved,) = SavedPacts.of([("decode", pact)]).pacts
    assert (saved.lane, saved.shape) == ("decode", SHAPE)
    found = {promise.path: promise for promise in saved.promises}
    lengths = found["metadata.lengths"].tensor
    assert lengths is not None
    assert dataclasses.astuple(lengths) == (
        (3,),
        (1,),
        "int32",
        "cpu",
        "slot 'fi.lengths' of flashinfer",
        4,
    )
    foreign = found["metadata.foreign"].tensor
    assert foreign is not None
    assert (foreign.slot, foreign.offset) == (None, None)
    assert (found["view.most"].value, found["view.most"].bounded) == (512, True)
    assert (found["metadata.count"].value, found["metadata.count"].bounded) == (3, False)
    assert found["view.share"].value == "inf"
    words = {
        "text": "'paged'",
        "kind": "A",
        "dtype": "torch.float32",
        "nothing": None,
        "plan": None,
    }
    assert {name: found[f"metadata.{name}"].value for name in words} == words
    assert found["metadata.plan"].type.endswith(".Plan")
    assert found["metadata"].value is None
    assert str(meta.foreign.data_ptr()) not in json.dumps(dataclasses.asdict(saved), default=str)


def test_a_file_is_not_overwritten_unasked(tmp_path: Path) -> None:
    """Saving twice is refused and leaves the file, unless overwriting was asked for."""
    file, saved = tmp_path / "pacts.json", _saved([1])
    saved.save(file)
    with pytest.raises(UsageError, match="already exists"):
        _saved([2]).save(file)
    assert SavedPacts.load(file) == saved
    _saved([2]).save(file, overwrite=True)
    assert SavedPacts.load(file) == _saved([2])
    with pytest.raises(UsageError, match="cannot be written"):
        saved.save(tmp_path / "missing" / "pacts.json")
    with pytest.raises(UsageError, match="cannot be read"):
        SavedPacts.load(tmp_path)


def test_a_file_says_how_much_of_external_memory_is_known() -> None:
    """``externals`` survives a file, and a value that does not exist is refused."""
    pact = Pact.of(SHAPE, None, metadata=[1])
    for externals in ("all", "dispatched", "unknown", None):
        saved = SavedPacts(pacts=(SavedPact.of("decode", pact, externals),))
        document = saved.to_dict()
        assert document["pacts"][0]["externals"] == externals
        assert SavedPacts.from_json(json.dumps(document)) == saved
    document["pacts"][0]["externals"] = "some"
    with pytest.raises(UsageError, match=r"pacts\.0\.externals: "):
        SavedPacts.from_json(json.dumps(document))


def test_a_file_of_format_1_is_read() -> None:
    """Format 1 lacks ``externals``: the pacts are the same, and that entry is None."""
    document = _document()
    document["format"] = 1
    for pact in document["pacts"]:
        del pact["externals"]
    assert SavedPacts.from_json(json.dumps(document)).to_dict() == _document()


def _edit(change: Callable[[dict[str, Any]], object]) -> str:
    document = _document()
    change(document)
    return json.dumps(document)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is not JSON"),
        ("PK\x03\x04", "is not JSON"),
        ('{"a": NaN}', "NaN is not a JSON number"),
        ("[" * 100_000, "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        ("[]", "not a document of pacts"),
        ('{"format": 1}', "not a document of pacts"),
        (_edit(lambda d: d.update(format=3)), "format 3; this graphpact reads formats up to 2"),
        (_edit(lambda d: d.update(format=True)), "format: True is not a version"),
        (_edit(lambda d: d.pop("format")), "format: None is not a version"),
        (_edit(lambda d: d.pop("pacts")), "pacts: "),
        (_edit(lambda d: d.update(more=1)), "more: "),
        (_edit(lambda d: d["pacts"][0].update(mode="dream")), "pacts.0.mode: "),
        (_edit(lambda d: d["pacts"][0].update(batch_size="2")), "pacts.0.batch_size: "),
        (
            _edit(lambda d: d["pacts"][1]["promises"][0].pop("bounded")),
            "pacts.1.promises.0.bounded",
        ),
        (_edit(lambda d: d["pacts"].append(d["pacts"][0])), "occurs twice"),
        (_edit(lambda d: d["pacts"][0]["promises"].append(d["pacts"][0]["promises"][0])), "twice"),
    ],
)
def test_a_file_that_is_no_document_of_pacts_is_refused(content: str | bytes, says: str) -> None:
    """A foreign, invalid or newer file is a usage error that names the file, the place and what to do."""
    with pytest.raises(UsageError) as error:
        SavedPacts.from_json(content, "some.json")
    assert str(error.value).startswith("some.json ")
    assert says in str(error.value)
    assert "help: " in str(error.value)


@settings(derandomize=True, max_examples=60)
@given(st.data())
def test_a_damaged_document_is_refused_or_read(data: st.DataObject) -> None:
    """Loading a damaged file gives pacts or a UsageError, and no other exception."""
    text = json.dumps(_saved([1, "a", None]).to_dict())
    first = data.draw(st.integers(0, len(text)))
    last = data.draw(st.integers(first, min(len(text), first + 20)))
    junk = data.draw(st.one_of(st.text(max_size=3), st.sampled_from(["null", "[]", "1e999", "-1"])))
    damaged = (text[:first] + junk + text[last:]).encode("utf-8", "surrogatepass")
    try:
        SavedPacts.from_json(damaged)
    except UsageError as error:
        assert error.hint  # noqa: PT017  both outcomes are right


def test_a_difference_names_lane_shape_field_and_both_values() -> None:
    """Added and removed lanes, shapes and fields are changes, and so is every attribute that differs."""
    old = SavedPacts.from_json(json.dumps(_document()))
    edited = _document()
    first, second, third = edited["pacts"]
    promises = {p["path"]: p for p in first["promises"]}
    promises["metadata.lengths"]["tensor"].update(shape=[3], offset=4, slot=None)
    promises["view.most"].update(value=256, bounded=False)
    first["promises"] = [p for p in first["promises"] if p["path"] != "metadata.count"]
    second["variant"], third["lane"] = "c", "draft"
    new = SavedPacts.from_json(json.dumps(edited))
    shape, size = str(SHAPE), f"{len(old.pacts[1].promises)} fields"
    slot = "slot 'fi.lengths' of flashinfer"
    other = [str(dataclasses.replace(SHAPE, variant=v)) for v in ("b", "c")]
    assert diff(old, new) == (
        Change("decode", shape, "view.most", "value", 512, 256),
        Change("decode", shape, "view.most", "bounded", True, False),  # noqa: FBT003  old, new
        Change("decode", shape, "metadata.lengths", "shape", (4,), (3,)),
        Change("decode", shape, "metadata.lengths", "slot", slot, None),
        Change("decode", shape, "metadata.lengths", "offset", 0, 4),
        Change("decode", shape, "metadata.count", "field", "int", None),
        Change("decode", other[0], None, "shape", size, None),
        Change("decode", other[1], None, "shape", None, size),
        Change("verify", None, None, "lane", "1 shape", None),
        Change("draft", None, None, "lane", None, "1 shape"),
    )
    assert len(diff(new, old)) == len(diff(old, new))


def test_one_and_true_are_two_values() -> None:
    """A number and a bool that Python calls equal differ in a comparison of documents."""
    assert [c.what for c in diff(_saved([1]), _saved([True]))] == ["type", "value"]


@PROPERTY
@given(TREES)
def test_a_difference_names_the_leaf_that_changed(tree: Any) -> None:
    """A changed leaf is the only one that is named, except where only its address or an opaque object did."""
    saved = _saved(tree)
    assert diff(saved, _saved(replace_leaf(tree, "metadata", "nowhere", Plan))) == ()
    for path, leaf in walk({"metadata": tree}):
        for change, rules in mutations(leaf):
            other = _saved(replace_leaf(tree, "metadata", path, change))
            visible = rules != "address" and not isinstance(leaf, Plan)
            expected = {("decode", str(SHAPE), path)} if visible else set()
            assert {(c.lane, c.shape, c.path) for c in diff(saved, other)} == expected


@PROPERTY
@given(TREES)
def test_what_is_saved_is_loaded(tree: Any) -> None:
    """A saved document is read back unchanged, through JSON without NaN."""
    saved = _saved(tree)
    assert SavedPacts.from_json(json.dumps(saved.to_dict(), allow_nan=False)) == saved
