"""Fills against a model of plain lists: any slots, any history, both groupings of copies."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.buffers import (
    CudaGraphBufferRegistry,
    FillContext,
    GraphSlot,
    PaddingPolicy,
    SharedBuffers,
    fills,
)
from graphpact.buffers.arenas import Arena
from graphpact.errors import SlotError

MAX_BS = 4
LANES = ("decode", "draft")
HELD = 3  # value of adopted memory when it is bound
POISON = -77
NARROWER = {
    torch.int64: torch.int32,
    torch.int32: torch.int16,
    torch.float32: torch.int16,
    torch.bool: torch.bool,
}
PADS: dict[torch.dtype, list[int | float | bool]] = {
    torch.int64: [0, 5, -1],
    torch.int32: [0, 5, -1],
    torch.float32: [0.0, -1.5],
    torch.bool: [False, True],
}

Axis = Literal["bs", "tokens", "none"]
Grouping = Literal["host", "device"]
Rows = list[list[Any]]
both_groupings = pytest.mark.parametrize("grouping", ["host", "device"])


# -- declarations and fills ------------------------------------------------------------------------


@dataclass(frozen=True)
class Spec:
    """One slot: ``how`` is the source of its live rows, ``memory`` its kind of memory."""

    name: str
    policy: PaddingPolicy = PaddingPolicy.ZERO
    pad: int | float | bool | None = None
    dtype: torch.dtype = torch.int64
    axis: Axis = "bs"
    layout: Literal["flat", "one more", "last axis", "wide"] = "flat"
    height: int = 3  # width of a slot whose rows are its last axis
    how: Literal["copied", "negated", "computed", "sourced", "owner"] = "copied"
    memory: Literal["own", "adopted", "strided"] = "own"
    optional: bool = False
    in_both: bool = False

    @property
    def initial(self) -> int | float | bool:
        """The value of new memory."""
        has = (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)
        return self.pad if self.policy in has and self.pad is not None else 0

    @property
    def poison(self) -> int | bool:
        """A value that no fill writes."""
        return not self.initial if self.dtype is torch.bool else POISON

    @property
    def is_shared(self) -> bool:
        """Whether lanes with one pool share its memory."""
        refreshed = self.how in ("negated", "computed")
        copied = self.how in ("copied", "sourced") and not self.optional
        return self.in_both and self.memory == "own" and (refreshed or copied)

    def rows_of(self, bs: int, tokens: int, whole: int) -> int:
        """Return the number of rows for these numbers of requests and tokens."""
        n = {"bs": bs, "tokens": tokens, "none": whole}[self.axis]
        return n + (self.layout == "one more")


@dataclass(frozen=True)
class FillStep:
    """One fill. Sets hold the numbers of slots that are absent from the batch, or narrower than declared."""

    counts: tuple[int, int, int, int]
    lane: int = 0
    poison: Literal["nothing", "beyond", "tail and beyond"] = "beyond"
    absent: frozenset[int] = frozenset()
    narrow: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Case:
    """Slots, and a sequence of fills."""

    specs: tuple[Spec, ...]
    history: tuple[FillStep, ...]
    max_tokens: int = 4
    pool: bool = False
    strict: bool = False


@st.composite
def specs(draw: st.DrawFn, name: str) -> Spec:
    """Draw one slot of any policy, axis, dtype and layout."""
    resets = (
        PaddingPolicy.ZERO,
        PaddingPolicy.FILL_SENTINEL,
    )  # drawn more often, because most errors are possible with them
    policy = draw(st.sampled_from((*PaddingPolicy, *resets)))
    dtype = draw(st.sampled_from((torch.int64, torch.int64, torch.int64, *PADS)))
    axes: tuple[Axis, ...] = ("bs", "tokens", "none")
    axis = draw(st.sampled_from(axes))
    layouts: tuple[Any, ...] = ("flat", "wide")
    if axis != "none":
        layouts = ("flat", "one more", "last axis", "wide")
    return Spec(
        name,
        policy,
        draw(st.sampled_from(PADS[dtype])) if policy.has_pad_value else None,
        dtype,
        axis,
        draw(st.sampled_from(layouts)),
        draw(st.sampled_from((3, 5))),
        draw(st.sampled_from(("copied", "copied", "negated", "computed", "sourced", "owner"))),
        draw(st.sampled_from(("own", "own", "adopted", "strided"))),
        draw(st.booleans()),
        draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Draw one to six slots, and one to seven fills of them."""
    declared = tuple(draw(specs(f"slot{i}")) for i in range(draw(st.integers(1, 6))))
    max_tokens = draw(st.sampled_from((4, 6)))
    some = st.frozensets(st.integers(0, len(declared) - 1), max_size=3)
    pairs = [
        st.lists(st.integers(0, most), min_size=2, max_size=2).map(sorted) for most in (MAX_BS, max_tokens)
    ]
    steps = st.builds(
        FillStep,
        st.tuples(*pairs).map(lambda p: (*p[0], *p[1])),
        st.integers(0, 1),
        st.sampled_from(("nothing", "beyond", "tail and beyond")),
        some,
        some,
    )
    history = draw(st.lists(steps, min_size=1, max_size=7))
    return Case(declared, tuple(history), max_tokens, draw(st.booleans()), draw(st.booleans()))


# -- the program under test ------------------------------------------------------------------------


def _slice(spec: Spec, buffer: torch.Tensor, n: int) -> torch.Tensor:
    if spec.layout == "one more":
        return buffer[: n + 1]
    return buffer[:, :n] if spec.layout == "last axis" else buffer[:n]


def _shape(spec: Spec, max_bs: int, max_tokens: int) -> tuple[int, ...]:
    rows = spec.rows_of(max_bs, max_tokens, 3)
    return {
        "flat": (rows,),
        "one more": (rows,),
        "last axis": (spec.height, rows),
        "wide": (rows, 3),
    }[spec.layout]


def _source(spec: Spec) -> Callable[[Any, FillContext], torch.Tensor | None]:
    return lambda batch, _: getattr(batch, spec.name, None)


def _post_fill(spec: Spec) -> Callable[[torch.Tensor, Any, FillContext], None]:
    def negate(buffer: torch.Tensor, _: Any, context: FillContext) -> None:
        head = buffer
        if spec.axis != "none":
            raw = context.raw_bs if spec.axis == "bs" else context.raw_num_tokens
            head = _slice(spec, buffer, raw)
        head.copy_(~head if head.dtype is torch.bool else -head)

    def compute(buffer: torch.Tensor, batch: Any, context: FillContext) -> None:
        head = buffer
        if spec.axis != "none":
            raw = context.raw_bs if spec.axis == "bs" else context.raw_num_tokens
            head = _slice(spec, buffer, raw)
        head.copy_(batch.computed[spec.name])

    return compute if spec.how == "computed" else negate


def _declare(spec: Spec) -> GraphSlot:
    sliced = spec.layout in ("one more", "last axis")
    return GraphSlot(
        spec.name,
        lambda max_bs, max_tokens: _shape(spec, max_bs, max_tokens),
        spec.dtype,
        axis=spec.axis,
        padding_policy=spec.policy,
        pad_value=spec.pad,
        copy_from_fb=spec.how in ("copied", "negated", "sourced"),
        post_fill=_post_fill(spec) if spec.how in ("negated", "computed") else None,
        slice_fn=(lambda buffer, n: _slice(spec, buffer, n)) if sliced else None,
        source_fn=_source(spec) if spec.how == "sourced" else None,
        owner="a test",
        reason="a model knows what is there",
        optional=spec.optional,
    )


def _memory(spec: Spec, max_tokens: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the tensor to bind, and the elements between its own elements."""
    shape = _shape(spec, MAX_BS, max_tokens)
    if spec.memory == "own":
        return None, None
    if spec.memory == "adopted":
        return torch.full(shape, HELD, dtype=spec.dtype), None
    pairs = torch.full((*shape, 2), HELD, dtype=spec.dtype)
    return pairs[..., 0], pairs[..., 1]


# -- the model -------------------------------------------------------------------------------------


def _rows(spec: Spec, tensor: torch.Tensor) -> Rows:
    """Return ``tensor`` as a list of rows."""
    if spec.layout == "last axis":
        tensor = tensor.t()
    listed: Any = tensor.tolist()
    return listed if tensor.dim() > 1 else [[value] for value in listed]


def _tensor(spec: Spec, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
    """Return ``rows`` as a tensor of a batch."""
    width = {"last axis": spec.height, "wide": 3}.get(spec.layout, 1)
    tensor = torch.tensor(rows, dtype=dtype).reshape(len(rows), width)
    if spec.layout == "last axis":
        return tensor.t().contiguous()
    return tensor if spec.layout == "wide" else tensor[:, 0].clone()


@dataclass
class Model:
    """The memory of one slot, row by row."""

    spec: Spec
    rows: Rows
    between: torch.Tensor | None = None
    lanes: list[tuple[CudaGraphBufferRegistry, int]] = field(default_factory=list)

    def fill(self, head: Rows | None, raw: int, padded: int) -> None:
        """Apply the expected effect of a fill."""
        spec = self.spec
        if spec.axis != "none" and spec.policy in (
            PaddingPolicy.ZERO,
            PaddingPolicy.FILL_SENTINEL,
        ):
            for row in range(raw, padded):
                self.rows[row] = [spec.initial] * len(self.rows[row])
        if head is not None:
            self.rows[: len(head)] = head
        if spec.how == "negated":
            is_bool = spec.dtype is torch.bool
            self.rows[:raw] = [[not v if is_bool else -v for v in row] for row in self.rows[:raw]]

    def poison(self, first: int) -> None:
        """Write poison from row ``first`` on, both in the model and in the memory."""
        registry, _ = self.lanes[0]
        buffer = registry.get_slot(self.spec.name).buffer
        assert buffer is not None
        part = buffer[:, first:] if self.spec.layout == "last axis" else buffer[first:]
        part.fill_(self.spec.poison)
        for row in range(first, len(self.rows)):
            self.rows[row] = [self.spec.poison] * len(self.rows[row])

    def check(self, when: str) -> None:
        """Compare the memory with the rows, and its address with the first address."""
        for registry, address in self.lanes:
            buffer = registry.get_slot(self.spec.name).buffer
            assert buffer is not None
            assert _rows(self.spec, buffer) == self.rows, f"{self.spec.name} {when}"
            assert buffer.data_ptr() == address, f"{self.spec.name} moved {when}"
        if self.between is not None:
            assert torch.equal(self.between, torch.full_like(self.between, HELD)), f"gaps {when}"


def _build(case: Case) -> tuple[list[CudaGraphBufferRegistry], list[dict[str, Model]]]:
    """Return the registry of each lane, and for each lane the model of every slot in it."""
    pool = SharedBuffers() if case.pool else False
    registries: list[CudaGraphBufferRegistry] = []
    models: list[dict[str, Model]] = []
    for lane in LANES:
        registry = CudaGraphBufferRegistry(
            device="cpu",
            max_bs=MAX_BS,
            max_num_tokens=case.max_tokens,
            share_pool=pool,
            lane=lane if case.strict else None,
        )
        mine: dict[str, Model] = {}
        for spec in case.specs:
            if registries and not spec.in_both:
                continue
            bind, between = _memory(spec, case.max_tokens)
            slot = registry.register_slot(_declare(spec), bind=bind)
            assert slot.buffer is not None
            if models and case.pool and spec.is_shared:
                model = models[0][spec.name]
            else:
                value = spec.initial if spec.memory == "own" else HELD
                if spec.dtype is torch.bool:
                    value = bool(value)
                shape = _shape(spec, MAX_BS, case.max_tokens)
                whole = _rows(spec, torch.empty(shape))
                model = Model(spec, [[value] * len(row) for row in whole], between)
            model.lanes.append((registry, slot.buffer.data_ptr()))
            mine[spec.name] = model
        registries.append(registry)
        models.append(mine)
    return registries, models


def _head(spec: Spec, number: int, step: int, rows: int) -> Rows:
    """Return values that no other slot, step or row has, except for bool."""
    width = {"last axis": spec.height, "wide": 3}.get(spec.layout, 1)
    values = itertools.count(1 + 1000 * (number + 1) + 100 * step)
    return [
        [
            {torch.bool: lambda v: v % 3 == 0, torch.float32: float}.get(spec.dtype, int)(v)
            for v in itertools.islice(values, width)
        ]
        for _ in range(rows)
    ]


def _live(case: Case, number: int, step: FillStep) -> tuple[SimpleNamespace, dict[str, Rows | None]]:
    """Return a batch of this step, and the rows in it by slot."""
    raw_bs, _, raw_tokens, _ = step.counts
    batch = SimpleNamespace(computed={})
    heads: dict[str, Rows | None] = {}
    for i, spec in enumerate(case.specs):
        raw = spec.rows_of(raw_bs, raw_tokens, 3)
        if spec.axis == "none" and spec.how == "sourced":
            raw = number % 4  # any number of rows
        rows = _head(spec, i, number, raw)
        may_lack = spec.optional or not case.strict
        heads[spec.name] = None
        if spec.how == "computed":
            batch.computed[spec.name] = _tensor(spec, rows, spec.dtype)
            heads[spec.name] = rows
        elif spec.how == "owner":
            setattr(batch, spec.name, _tensor(spec, rows, spec.dtype))  # a fill ignores it
        elif i in step.absent and may_lack:
            if number % 2:
                setattr(batch, spec.name, None)
        else:
            dtype = NARROWER[spec.dtype] if i in step.narrow else spec.dtype
            setattr(batch, spec.name, _tensor(spec, rows, dtype))
            heads[spec.name] = rows
    return batch, heads


def _run(case: Case) -> None:
    """Run the fills of a case, and compare all memory of all lanes after every fill."""
    registries, models = _build(case)
    everything = [model for mine in models for model in mine.values()]
    for model in everything:
        model.check("when new")
    for number, step in enumerate(case.history):
        raw_bs, padded_bs, raw_tokens, padded_tokens = step.counts
        batch, heads = _live(case, number, step)
        before = {k: v.clone() for k, v in vars(batch).items() if isinstance(v, torch.Tensor)}
        mine = models[step.lane]
        for model in mine.values():
            spec = model.spec
            if step.poison == "beyond":
                model.poison(spec.rows_of(padded_bs, padded_tokens, 3))
            elif step.poison == "tail and beyond":
                model.poison(spec.rows_of(raw_bs, raw_tokens, 3))
        registries[step.lane].fill_from(
            batch,
            raw_bs=raw_bs,
            padded_bs=padded_bs,
            raw_num_tokens=raw_tokens,
            padded_num_tokens=padded_tokens,
        )
        for name, model in mine.items():
            spec, head = model.spec, heads[name]
            raw = spec.rows_of(raw_bs, raw_tokens, 3)
            if head is None and case.strict and spec.how in ("copied", "negated", "sourced"):
                width = len(model.rows[0]) if model.rows else 1  # in a lane no earlier rows are visible
                head = [[spec.initial] * width for _ in range(raw)]
            model.fill(head, raw, spec.rows_of(padded_bs, padded_tokens, 3))
        for model in everything:
            model.check(f"after fill {number}, {step}")
        for name, tensor in before.items():
            assert torch.equal(getattr(batch, name), tensor), f"the batch's {name} was written"


@contextmanager
def _grouped_as(grouping: Grouping) -> Iterator[None]:
    """Group copies of CPU tensors as for a host, or as for a device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fills, "_takes_any_group", lambda _: grouping == "host")
        yield


# -- the property ----------------------------------------------------------------------------------


@pytest.mark.few(1)
@both_groupings
@settings(derandomize=True, max_examples=400)
@given(case=cases())
def test_every_byte_is_what_the_model_says(grouping: Grouping, case: Case) -> None:
    """After every fill of any history, all memory of all lanes equals a model of plain lists."""
    with _grouped_as(grouping):
        _run(case)


# -- planted errors --------------------------------------------------------------------------------

check_case = test_every_byte_is_what_the_model_says.hypothesis.inner_test

GROWN_AND_SHRUNK = (
    FillStep((1, 3, 1, 3), poison="nothing"),
    FillStep((4, 4, 4, 4), poison="nothing"),
    FillStep((2, 4, 2, 4), poison="nothing"),
    FillStep((2, 3, 2, 3), poison="tail and beyond"),
)
EVERY_LAYOUT = tuple(
    (layout, axis, memory)
    for layout in ("flat", "one more", "last axis", "wide")
    for axis in ("bs", "tokens")
    for memory in ("own", "strided")
)


def _of(policy: PaddingPolicy, **more: Any) -> Case:
    pad = 5 if policy.has_pad_value else None
    return Case((Spec("a", policy, pad, **more), Spec("b", policy, pad, **more)), GROWN_AND_SHRUNK)


Effect = Callable[[GraphSlot, torch.Tensor, torch.Tensor], None]


@contextmanager
def _after_each_fill(policy: PaddingPolicy, effect: Effect) -> Iterator[None]:
    """Do ``effect(slot, head, tail)`` to the flat slots of ``policy``, as if the fill had done it."""
    fill_from = CudaGraphBufferRegistry.fill_from

    def fill_and_spoil(self: CudaGraphBufferRegistry, batch: Any, **counts: Any) -> None:
        fill_from(self, batch, **counts)
        for slot in self:
            if slot.padding_policy is policy and slot.buffer is not None:
                raw, padded = counts["raw_bs"], counts["padded_bs"]
                effect(slot, slot.buffer[:raw], slot.buffer[raw:padded])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphBufferRegistry, "fill_from", fill_and_spoil)
        yield


def _fails(case: Case, grouping: Grouping) -> None:
    with pytest.raises(AssertionError, match=r"after fill|when new"):
        check_case(grouping, case=case)


@both_groupings
@pytest.mark.parametrize(("layout", "axis", "memory"), EVERY_LAYOUT)
def test_planted_zero_leaves_the_tail(grouping: Grouping, layout: str, axis: str, memory: str) -> None:
    """A ZERO slot whose padding rows are not reset fails the property in every layout."""
    case = _of(PaddingPolicy.ZERO, layout=layout, axis=axis, memory=memory)
    check_case(grouping, case=case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fills, "_tail", lambda *_: None)
        _fails(case, grouping)


@both_groupings
@pytest.mark.parametrize("layout", ["flat", "one more", "last axis", "wide"])
def test_planted_sentinel_writes_zero(grouping: Grouping, layout: str) -> None:
    """A FILL_SENTINEL slot whose padding rows become 0 fails the property, in an arena and outside it."""
    case = _of(PaddingPolicy.FILL_SENTINEL, layout=layout)
    check_case(grouping, case=case)
    take, plan_tails = Arena.take, fills._plan_tails

    def take_without_value(self: Arena, rows: int, pad_value: float) -> torch.Tensor:
        taken = take(self, rows, pad_value)
        self.template.zero_()
        return taken

    def plan_zeros(slots: Any, *rest: Any) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(GraphSlot, "initial_value", 0)
            return plan_tails(slots, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "take", take_without_value)
        patch.setattr(fills, "_plan_tails", plan_zeros)
        _fails(case, grouping)


@both_groupings
@pytest.mark.parametrize(
    ("policy", "effect"),
    [
        (PaddingPolicy.ZERO, lambda slot, head, tail: tail.fill_(1)),
        (PaddingPolicy.KEEP_PAD, lambda slot, head, tail: tail.zero_()),
        (PaddingPolicy.FOREACH_COPY, lambda slot, head, tail: tail.zero_()),
        (PaddingPolicy.FOREACH_COPY, lambda slot, head, tail: head.zero_()),
        (PaddingPolicy.FILL_ONCE, lambda slot, head, tail: tail.fill_(slot.pad_value)),
        (PaddingPolicy.FILL_ONCE, lambda slot, head, tail: head.fill_(slot.pad_value)),
    ],
    ids=[
        "ZERO writes 1",
        "KEEP_PAD zeroes the tail",
        "FOREACH_COPY zeroes the tail",
        "FOREACH_COPY forgets the head",
        "FILL_ONCE fills each time",
        "FILL_ONCE fills the head",
    ],
)
def test_planted_policies(grouping: Grouping, policy: PaddingPolicy, effect: Effect) -> None:
    """A policy with the effect of another one fails the property."""
    case = _of(policy)
    check_case(grouping, case=case)
    with _after_each_fill(policy, effect):
        _fails(case, grouping)


@pytest.mark.parametrize("policy", [PaddingPolicy.FILL_ONCE, PaddingPolicy.FILL_SENTINEL])
def test_planted_memory_that_is_not_initialised(policy: PaddingPolicy) -> None:
    """New memory that does not hold the pad value fails the property."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GraphSlot, "initial_value", 0)
        _fails(_of(policy), "host")


@both_groupings
@pytest.mark.parametrize("more", [-1, 1], ids=["a row short", "a row over"])
@pytest.mark.parametrize("layout", ["flat", "one more", "last axis", "wide"])
def test_planted_tail_of_another_extent(grouping: Grouping, layout: str, more: int) -> None:
    """Padding rows that end one row before or after the padded count fail the property."""
    case = Case(
        (Spec("a", layout=layout, how="owner"), Spec("b", layout=layout, how="owner")),  # type: ignore[arg-type]
        (FillStep((2, 3, 2, 3), poison="tail and beyond"),),
    )
    check_case(grouping, case=case)
    tail = fills._tail

    def of_other_counts(slot: GraphSlot, context: FillContext) -> torch.Tensor | None:
        return tail(slot, dataclasses.replace(context, padded_bs=context.padded_bs + more))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fills, "_tail", of_other_counts)
        _fails(case, grouping)


@both_groupings
def test_planted_heads_in_another_slot(grouping: Grouping) -> None:
    """A field that is copied into the live rows of another slot fails the property."""
    case = _of(PaddingPolicy.KEEP_PAD)
    check_case(grouping, case=case)
    compile_ = fills.FillPlan._compile

    def crosswise(self: fills.FillPlan, batch: Any, sources: Any) -> Any:
        compiled = compile_(self, batch, sources)
        copies = tuple((targets[::-1], fields, rest) for targets, fields, rest in compiled.copies)
        return dataclasses.replace(compiled, copies=copies)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fills.FillPlan, "_compile", crosswise)
        _fails(case, grouping)


@contextmanager
def _looking_once() -> Iterator[None]:
    """Treat every batch after the first as if it had the signature of the first."""
    compile_ = fills.FillPlan._compile

    def stale(self: fills.FillPlan, batch: Any, sources: Any) -> Any:
        compiled = compile_(self, batch, sources)
        return dataclasses.replace(compiled, signature_of=lambda _: compiled.signature)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fills.FillPlan, "_compile", stale)
        yield


@both_groupings
def test_planted_field_that_comes_back(grouping: Grouping) -> None:
    """A field that was absent and is present again is copied; a plan that checks only once fails."""
    counts = (2, 4, 2, 4)
    case = Case(
        (Spec("a", PaddingPolicy.KEEP_PAD), Spec("b", PaddingPolicy.KEEP_PAD)),
        (
            FillStep(counts, absent=frozenset({0})),
            FillStep(counts),
            FillStep(counts, absent=frozenset({1})),
        ),
    )
    check_case(grouping, case=case)
    with _looking_once():
        _fails(case, grouping)


def _hundred_good_fills() -> CudaGraphBufferRegistry:
    registry = CudaGraphBufferRegistry(device="cpu", max_bs=4, max_num_tokens=4)
    for name in ("a", "b"):
        registry.register_slot(_declare(Spec(name)))
    for step in range(100):
        _fill(registry, a=torch.tensor([step, 1]), b=torch.tensor([2, step]))
    return registry


def _fill(registry: CudaGraphBufferRegistry, **fields: Any) -> None:
    batch = SimpleNamespace(**fields)
    registry.fill_from(batch, raw_bs=2, padded_bs=4, raw_num_tokens=2, padded_num_tokens=4)


@both_groupings
@pytest.mark.parametrize(
    "changed",
    [
        torch.tensor([1.5, 2.5], dtype=torch.float64),
        torch.tensor([1, 2, 3]),
        torch.tensor([1]),
        torch.tensor([[1], [2]]),
    ],
    ids=["float64", "more rows", "one row", "another rank"],
)
def test_a_field_that_changes_is_checked_again(grouping: Grouping, changed: torch.Tensor) -> None:
    """After a hundred valid fills of the same counts an invalid field is refused, and nothing is written."""
    with _grouped_as(grouping):
        registry = _hundred_good_fills()
        before = [slot.slice_for(4, 4).tolist() for slot in registry]
        with pytest.raises(SlotError, match="slot 'b' of a test takes"):
            _fill(registry, a=torch.tensor([5, 6]), b=changed)
        assert [slot.slice_for(4, 4).tolist() for slot in registry] == before
        _fill(registry, a=torch.tensor([5, 6]), b=torch.tensor([7, 8], dtype=torch.int32))
        assert [slot.slice_for(2, 2).tolist() for slot in registry] == [[5, 6], [7, 8]]


def test_planted_field_that_changes() -> None:
    """A plan that checks only once copies floats into integers, so the refusal above can fail."""
    with _looking_once():
        registry = _hundred_good_fills()
        _fill(registry, a=torch.tensor([5, 6]), b=torch.tensor([1.5, 2.5], dtype=torch.float64))
        assert registry.get_slot("b").slice_for(2, 2).tolist() == [1, 2]


def test_a_batch_may_look_in_more_ways_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of more alternating signatures than are kept are each copied correctly."""
    monkeypatch.setattr(fills, "_MAX_SIGNATURES", 2)
    dtypes = (torch.int64, torch.int32, torch.int16, torch.int8)
    registry = _hundred_good_fills()
    for step, dtype in enumerate(dtypes * 3):
        _fill(registry, a=torch.tensor([step, 1], dtype=dtype), b=torch.tensor([2, step]))
        assert [s.slice_for(4, 4).tolist() for s in registry] == [[step, 1, 0, 0], [2, step, 0, 0]]
        for plan in registry._plans.values():
            assert len(plan._compiled) <= 2


def test_planted_write_to_the_batch() -> None:
    """A fill that writes the live batch fails the property."""
    fill_from = CudaGraphBufferRegistry.fill_from

    def fill_and_write(self: CudaGraphBufferRegistry, batch: Any, **counts: Any) -> None:
        fill_from(self, batch, **counts)
        batch.a[:1] = 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphBufferRegistry, "fill_from", fill_and_write)
        with pytest.raises(AssertionError, match="the batch's a was written"):
            check_case("host", case=_of(PaddingPolicy.ZERO))


def test_planted_move() -> None:
    """A fill that moves a slot to other memory, with the same content, fails the property."""
    fill_from = CudaGraphBufferRegistry.fill_from

    def fill_and_move(self: CudaGraphBufferRegistry, batch: Any, **counts: Any) -> None:
        fill_from(self, batch, **counts)
        for slot in self:
            assert slot.buffer is not None
            object.__setattr__(slot, "buffer", slot.buffer.clone())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CudaGraphBufferRegistry, "fill_from", fill_and_move)
        with pytest.raises(AssertionError, match="moved after fill 0"):
            check_case("host", case=_of(PaddingPolicy.ZERO))
