"""The operations of random programs: each is one line of torch code with suitable arguments.

An entry of `OPERATIONS` makes the text of one call. It asks a `Picker` for arguments with the required
dtypes, dimensions and memory. `random_programs` puts the lines together.

Does not: run programs or compare them with eager runs; `random_programs` does.
"""

import random
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from graphpact.tensors import storage_id
from graphpact_tape.writes import repeats

KINDS = {
    torch.float32: "f",
    torch.float64: "f",
    torch.bfloat16: "f",
    torch.int32: "i",
    torch.int64: "i",
    torch.bool: "b",
    torch.complex64: "c",
}
"""The dtypes of values, as letters: floats, integers, bool, complex."""

_NUMBERS = {
    "f": (2, 0.5, -3, 0.1, True, 1e-6, -0.0, 0, 7.0, 16777217, 2**33),
    "i": (1, 2, -3, 7, True, 0, 0.5, 2.0),
    "b": (True, False, 1),
    "c": (2, 0.5, 2j, -0.0, 1 - 1j),
}


class NoFitError(Exception):
    """The program has no value that an operation can take."""


class Picker:
    """Chooses arguments among the values of a program, recent ones more often.

    Args:
        rng: The source of all choices.
        values: The tensors of the program so far, by name. Only their layouts matter.

    Attributes:
        main: The tensor that `x` chose last. The other methods choose what goes with it.
        main_name: Its name.
    """

    def __init__(self, rng: random.Random, values: dict[str, torch.Tensor]) -> None:
        self.rng = rng
        self.values = values
        self.main = torch.empty(0)
        self.main_name = ""

    def find(self, fits: Callable[[torch.Tensor], bool]) -> str:
        """Return the name of a value that fits.

        Raises:
            NoFitError: There is none.
        """
        found = [name for name, t in self.values.items() if fits(t)]
        if not found:
            raise NoFitError
        return found[-1 - int(self.rng.random() ** 2 * len(found))]

    def x(self, kinds: str = "fic", dims: Collection[int] = range(6), *, written: bool = False) -> str:
        """Return a value of the given kinds and numbers of dimensions, and make it `main`.

        Args:
            kinds: Letters of `KINDS`.
            dims: Numbers of dimensions.
            written: Whether it is written: its elements share no memory.
        """
        name = self.find(
            lambda t: KINDS[t.dtype] in kinds and t.dim() in dims and not (written and repeats(t))
        )
        self.main, self.main_name = self.values[name], name
        return name

    def like(self, kinds: str = "", dims: Collection[int] = range(6)) -> str:
        """Return a value that expands to the shape of `main`, of its dtype or of the given kinds."""
        main = self.main
        return self.find(
            lambda t: (
                _expands(t.shape, main.shape)
                and (KINDS[t.dtype] in kinds if kinds else t.dtype is main.dtype)
                and t.dim() in dims
            )
        )

    def any_like(self) -> str:
        """Return a value of any kind that broadcasts with `main`; operations convert dtypes."""
        return self.find(lambda t: _broadcast(t.shape, self.main.shape))

    def apart(self, kinds: str = "", shape: Iterable[int] | None = None) -> str:
        """Return a value as `like`, or of a shape, that shares no memory with `main`; clone if needed."""
        main = self.main
        name = self.like(kinds) if shape is None else self.of(shape, kinds)
        is_apart = storage_id(self.values[name]) != storage_id(main)
        return name if is_apart else f"{name}.clone()"

    def of(self, shape: Iterable[int], kinds: str = "") -> str:
        """Return a value of exactly this shape, with the dtype of `main` or of the given kinds."""
        wanted, main = tuple(shape), self.main
        return self.find(
            lambda t: t.shape == wanted and (KINDS[t.dtype] in kinds if kinds else t.dtype is main.dtype)
        )

    def number(self) -> str:
        """Return a Python number that an operation on `main` can take."""
        return repr(self.pick(*_NUMBERS[KINDS[self.main.dtype]]))

    def dim(self) -> int:
        """Return an axis of `main`, counted from the front or from the back."""
        if not self.main.dim():
            raise NoFitError
        at = self.rng.randrange(self.main.dim())
        return self.pick(at, at - self.main.dim())

    def at(self, dim: int) -> int:
        """Return an index on an axis of `main`."""
        if not self.main.shape[dim]:
            raise NoFitError
        return self.rng.randrange(self.main.shape[dim])

    def size(self, dim: int) -> int:
        """Return the size of an axis of `main`."""
        return self.main.shape[dim]

    def mask(self, dims: Collection[int] = range(6)) -> str:
        """Return a bool value that expands to the shape of `main`."""
        name = self.like("fib", dims)
        return name if self.values[name].dtype is torch.bool else f"({name} > {self.pick(0, 0.5, -1)})"

    def index(self, count: int, shape: Iterable[int] | None = None) -> str:
        """Return int64 indices below ``count``, of any or a given shape, computed from contents."""
        if not count:
            raise NoFitError
        wanted = None if shape is None else tuple(shape)
        name = self.find(
            lambda t: (
                KINDS[t.dtype] in "fi"
                and 0 < t.numel() <= 12
                and t.dim() in (1, 2)
                and wanted in (None, tuple(t.shape))
            )
        )
        if self.values[name].dtype is torch.int64:
            return f"{name}.remainder({count})"
        if KINDS[self.values[name].dtype] == "i":
            return f"{name}.long().remainder({count})"
        return f"({name} * 3).nan_to_num().clamp(0, {count - 1}).long()"

    def pick(self, *options: Any) -> Any:
        """Return one of the options."""
        return self.rng.choice(options)

    def shape(self) -> str:
        """Return the shape of `main`, as text."""
        return repr(tuple(self.main.shape))

    def part(self) -> str:
        """Return the shape of a leading part of `main`, as text."""
        return repr(tuple(min(size, 2) for size in self.main.shape))

    def dtype(self) -> str:
        """Return the dtype of `main`, as text."""
        return repr(self.main.dtype)


def _broadcast(a: torch.Size, b: torch.Size) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


def _expands(a: torch.Size, b: torch.Size) -> bool:
    return len(a) <= len(b) and all(m in (1, n) for m, n in zip(a[::-1], b[::-1], strict=False))


Text: TypeAlias = Callable[[Picker], str]


@dataclass(frozen=True)
class Operation:
    """One operation.

    Args:
        text: Makes the line: an expression, or an assignment to a part of a tensor.
        has_out: Whether the call takes ``out=``.
        refused: The modes that refuse it.
        hides: Whether it writes or returns memory that its schema does not declare. A mode may refuse it.
    """

    text: Text
    has_out: bool = False
    refused: frozenset[str] = frozenset()
    hides: bool = False


CPU = torch.device("cpu")


def _in_bfloat16(function: Callable[..., torch.Tensor], *args: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return function(*args)


def _fill_parts(t: torch.Tensor) -> torch.Tensor:
    t[:1].fill_(1.5)
    t[1:].fill_(-2)
    return t


# -- custom operators ------------------------------------------------------------------------------

LIBRARY = torch.library.Library("random_programs", "DEF")


def _define(schema: str, function: Callable[..., object]) -> None:
    LIBRARY.define(schema)
    LIBRARY.impl(schema.partition("(")[0], function, "CompositeExplicitAutograd")


def _fake(name: str, function: Callable[..., object]) -> None:
    torch.library.register_fake(f"random_programs::{name}", function, lib=LIBRARY)


_define("plus_one(Tensor x) -> Tensor", lambda x: x + 1)
_define("add_to(Tensor(a!) x, Tensor y) -> ()", lambda x, y: (x.add_(y), None)[1])
_define("scale(Tensor(a!) x, Tensor y) -> Tensor", lambda x, y: (x.mul_(0.5), y * 2)[1])
_define("fill_and_return(Tensor(a!) x, float n) -> Tensor(a!)", lambda x, n: x.fill_(n))
_define("halves(Tensor x) -> (Tensor, Tensor)", lambda x: (x * 0.5, x * 0.25))
_define("doubled(Tensor[] xs) -> Tensor[]", lambda xs: [x * 2 for x in xs])
_define("into(Tensor x, *, Tensor(a!) out) -> ()", lambda x, *, out: (out.copy_(x), None)[1])
_define(
    "add_to_all(Tensor(a!)[] xs, Tensor[] ys) -> ()",
    lambda xs, ys: ([x.add_(y) for x, y in zip(xs, ys, strict=True)], None)[1],
)
for _name, _function in (
    ("plus_one", torch.empty_like),
    ("scale", lambda x, y: torch.empty_like(y)),
    ("halves", lambda x: (torch.empty_like(x), torch.empty_like(x))),
    ("doubled", lambda xs: [torch.empty_like(x) for x in xs]),
):
    _fake(_name, _function)

# Their schemas do not declare what they write, or that their result aliases an argument.
_define("hidden_add(Tensor x, Tensor y) -> ()", lambda x, y: (x.add_(y), None)[1])
_define("hidden_return(Tensor x, Tensor y) -> Tensor", lambda x, y: x.add_(y))
_define("hidden_alias(Tensor x) -> Tensor", lambda x: x[:])
_define("hidden_new(Tensor x, Tensor y) -> Tensor", lambda x, y: (x.mul_(0.5), y * 2)[1])
_define("hidden_list(Tensor[] xs) -> ()", lambda xs: ([x.mul_(0.5) for x in xs], None)[1])


# -- the table -------------------------------------------------------------------------------------

_UNARY = {
    "fic": "neg abs square sgn",
    "fc": "exp sin sigmoid tanh reciprocal",
    "f": "sqrt rsqrt floor round trunc erf log1p relu sign frac",
    "fi": "isnan signbit positive",
    "ib": "bitwise_not",
    "fib": "logical_not",
}
_BINARY = {
    "fic": "add sub mul true_divide eq ne",
    "fi": "maximum minimum fmax lt ge",
    "f": "atan2 copysign hypot heaviside nextafter",
    "ib": "bitwise_and bitwise_or bitwise_xor",
    "fib": "logical_and logical_xor",
}
_ACTIVATIONS = "gelu silu softplus hardswish elu leaky_relu logsigmoid mish relu6 hardtanh"
_WRITES_ONE = "neg_ abs_ exp_ sigmoid_ relu_ floor_ zero_ tanh_ square_ sign_"
_WRITES_OF_TWO = "add_ sub_ mul_ copy_ eq_"
_REDUCTIONS = "sum mean prod amax amin logsumexp std var"
_FOREACH = "neg abs exp sigmoid sqrt"
_FOREACH_TWO = "add sub mul maximum"


def _unary(name: str, kinds: str) -> Operation:
    return Operation(lambda p: f"torch.{name}({p.x(kinds)})", has_out=name != "positive")


def _binary(name: str, kinds: str) -> Operation:
    return Operation(lambda p: f"torch.{name}({p.x(kinds)}, {p.like()})", has_out=True)


def _by_kinds(names: dict[str, str], make: Callable[[str, str], Operation]) -> dict[str, Operation]:
    return {name: make(name, kinds) for kinds, some in names.items() for name in some.split()}


def _each(names: str, text: Callable[[Picker, str], str], label: str, **options: Any) -> dict[str, Operation]:
    return {label.format(name): Operation(partial(_named, text, name), **options) for name in names.split()}


def _named(text: Callable[[Picker, str], str], name: str, p: Picker) -> str:
    return text(p, name)


def _texts(*, has_out: bool = False, **texts: Text) -> dict[str, Operation]:
    return {name: Operation(text, has_out) for name, text in texts.items()}


_ELEMENTWISE = {
    **_by_kinds(_UNARY, _unary),
    **_by_kinds(_BINARY, _binary),
    **_each(_ACTIVATIONS, lambda p, name: f"F.{name}({p.x('f')})", "{}"),
    **_texts(
        has_out=True,
        add_alpha=lambda p: f"torch.add({p.x('fi')}, {p.like()}, alpha={p.pick(2, -1)})",
        add_number=lambda p: f"torch.add({p.x()}, {p.number()})",
        sub_number=lambda p: f"torch.sub({p.x()}, {p.number()})",
        mul_number=lambda p: f"torch.mul({p.x()}, {p.number()})",
        div_number=lambda p: f"torch.div({p.x()}, {p.pick(3, 0.1, 7, -2)})",
        div_floor=lambda p: f"torch.div({p.x('fi')}, {p.pick(3, 7)}, rounding_mode='floor')",
        remainder=lambda p: f"torch.remainder({p.x('fi')}, {p.pick(3, 2, -5)})",
        pow_number=lambda p: f"torch.pow({p.x('fic')}, {p.pick(2, 2.0, 3, 1, 0.5)})",
        pow_of=lambda p: f"torch.pow({p.pick(2, 0.5)}, {p.x('f')})",
        clamp=lambda p: f"torch.clamp({p.x('fi')}, {p.pick(-1, None)}, {p.pick(1, 2.5)})",
        clamp_by=lambda p: f"torch.clamp({p.x('f')}, min={p.like()})",
        lerp=lambda p: f"torch.lerp({p.x('f')}, {p.like()}, {p.pick(0.3, 1)})",
        addcmul=lambda p: f"torch.addcmul({p.x('f')}, {p.like()}, {p.like()}, value={p.pick(2, 0.1)})",
        addcdiv=lambda p: f"torch.addcdiv({p.x('f')}, {p.like()}, {p.like()}.abs() + 1)",
        nan_to_num=lambda p: f"torch.nan_to_num({p.x('f')}, 0.5, 2.0)",
        gt_number=lambda p: f"torch.gt({p.x('fi')}, {p.pick(0, 0.5, 1)})",
        isclose=lambda p: f"torch.eq({p.x('fib')}, {p.any_like()})",
    ),
    **_texts(
        mixed=lambda p: f"{p.x('fic')} {p.pick('+', '-', '*')} {p.any_like()}",
        reversed_number=lambda p: f"{p.pick(1, 2.5)} {p.pick('-', '*', '+')} {p.x('fi')}",
        minus_zero=lambda p: f"{p.x('f')} * -0.0 + {p.pick(0.0, -0.0)}",
        infinite=lambda p: f"({p.x('f')} * float('inf')).clamp(-2, 2)",
        where=lambda p: f"{p.x('fic')}.where({p.mask()}, {p.like()})",
        where_number=lambda p: f"{p.x('fi')}.where({p.mask()}, {p.pick(0.5, 2, -0.0)})",
        masked_fill=lambda p: f"{p.x()}.masked_fill({p.mask()}, {p.number()})",
        half_numbers=lambda p: f"({p.x('f')}.bfloat16() * 0.3 + 1e-3) / {p.pick(3, 0.7)}",
        half_scaled=lambda p: f"{p.x('f')}.to(torch.bfloat16) * {p.pick(0.1, 1.7, -0.3)} - 0.01",
        shifts=lambda p: f"({p.x('i')} << 2) >> 1",
        complex=lambda p: f"torch.complex({p.x('f')}.float(), {p.like()}.float())",
        angle=lambda p: f"torch.angle({p.x('cf')})",
        dropout_off=lambda p: f"F.dropout({p.x('f')}, 0.5, training=False)",
    ),
}

_CASTS = _texts(
    to_dtype=lambda p: f"{p.x('fi')}.to(torch.{p.pick('bfloat16', 'float64', 'float32', 'complex64')})",
    to_integer=lambda p: f"{p.x('f')}.nan_to_num().clamp(-9, 9).to(torch.{p.pick('int32', 'int64')})",
    to_bool=lambda p: f"{p.x('fic')}.resolve_neg().bool()",
    from_bool=lambda p: f"{p.x('b')}.to(torch.{p.pick('float32', 'int64', 'bfloat16')})",
    to_and_back=lambda p: f"{p.x('f')}.to(torch.bfloat16).to({p.dtype()})",
    to_format=lambda p: f"{p.x('fic', [4])}.to(memory_format=torch.channels_last)",
    to_copy=lambda p: f"{p.x('ficb')}.to({p.dtype()}, copy=True)",
    contiguous=lambda p: f"{p.x('ficb')}.contiguous()",
    clone=lambda p: f"{p.x('ficb')}.clone()",
    clone_contiguous=lambda p: f"{p.x('ficb')}.clone(memory_format=torch.contiguous_format)",
    copy_into_float=lambda p: f"{p.x('fc', written=True)}.copy_({p.apart('fib')})",
    copy_into_bool=lambda p: f"{p.x('b', written=True)}.copy_({p.apart('fic')}.resolve_neg())",
    resolve_conj=lambda p: f"{p.x('c')}.resolve_conj()",
    resolve_neg=lambda p: f"{p.x('f')}.resolve_neg()",
    type_as=lambda p: f"{p.x('f')}.type_as({p.x('f')})",
)

_VIEWS = _texts(
    transpose=lambda p: f"{p.x('ficb', [2, 3, 4])}.transpose({p.dim()}, {p.dim()})",
    permute=lambda p: f"{p.x('ficb', [3])}.permute(2, 0, 1)",
    slice=lambda p: f"{p.x('ficb', [1, 2, 3])}[{p.pick('1:', ':-1', '::2', '1:3', ':1')}]",
    slice_last=lambda p: f"{p.x('ficb', [2, 3])}[..., {p.pick('1:', ':-1', '::2', '1:3')}]",
    select=lambda p: f"{p.x('ficb', [1, 2, 3])}[{p.at(0)}]",
    select_last=lambda p: f"{p.x('ficb', [2, 3])}.select(-1, {p.at(-1)})",
    expand=lambda p: f"{p.x('ficb', [1, 2, 3])}[:1].expand({p.shape()})",
    expand_new=lambda p: f"{p.x('ficb', [0, 1, 2])}.expand((2, *{p.shape()}))",
    unfold=lambda p: f"{p.x('fi', [1, 2])}.unfold(-1, 2, 1)",
    as_strided=lambda p: (
        f"{p.x('fi', [2])}.as_strided({p.part()}, {p.main.stride()}, {p.main.storage_offset()})"
    ),
    as_strided_overlap=lambda p: f"{p.x('fi', [1, 2])}.clone().as_strided((2, {p.main.numel() - 1}), (1, 1))",
    as_strided_copy=lambda p: f"torch.as_strided_copy({p.x('fic', [2])} * 1, {p.part()}, (1, 1))",
    flatten=lambda p: f"{p.x('ficb', [2, 3])}.flatten()",
    reshape=lambda p: f"{p.x('ficb', [2, 3])}.reshape({p.size(-1)}, -1)",
    view=lambda p: f"{p.x('ficb', [1, 2])}.view(-1, 2)",
    unsqueeze=lambda p: f"{p.x('ficb', [0, 1, 2])}.unsqueeze({p.pick(0, -1)})",
    squeeze=lambda p: f"{p.x('ficb')}.squeeze()",
    diagonal=lambda p: f"{p.x('fic', [2, 3])}.diagonal({p.pick(0, 1)})",
    movedim=lambda p: f"{p.x('ficb', [3, 4])}.movedim(0, -1)",
    chunk=lambda p: f"{p.x('ficb', [1, 2, 3])}.chunk(2, {p.dim()})",
    split=lambda p: f"{p.x('ficb', [2])}.split([1, {p.size(0) - 1}])",
    unbind=lambda p: f"{p.x('ficb', [2])}.unbind({p.dim()})[:3]",
    unsafe_split=lambda p: f"torch.unsafe_split({p.x('fi', [2])}, 2)",
    split_copy=lambda p: f"torch.split_copy({p.x('fi', [2])}, 2)",
    view_dtype=lambda p: f"{p.x('f')}.view(torch.{p.pick('int32', 'int64')}).bitwise_and(7)",
    view_dtype_written=lambda p: f"{p.x('fi', written=True)}.view(torch.int32).bitwise_and_(-256)",
    real=lambda p: f"{p.x('c')}.{p.pick('real', 'imag')}",
    conj=lambda p: f"{p.x('c')}.conj()",
    conj_transpose=lambda p: f"{p.x('c', [2])}.mH",
    conj_imag=lambda p: f"{p.x('c')}.conj().imag",
    view_as_real=lambda p: f"torch.view_as_real({p.x('c')}.resolve_conj())",
    view_as_complex=lambda p: (
        f"torch.view_as_complex({p.x('f', [1, 2])}.float().clone().unflatten(-1, (-1, 2)))"
    ),
    detach=lambda p: f"{p.x('ficb')}.detach()",
    data=lambda p: f"{p.x('ficb')}.data",
    alias=lambda p: f"{p.x('ficb')}[...]",
    squeeze_=lambda p: f"({p.x('fi', [2])} * 1).unsqueeze_(0).transpose_(0, 1).squeeze_(1)",
    no_rows=lambda p: f"{p.x('ficb', [1, 2])}[:0]",
    no_columns=lambda p: f"{p.x('fi', [2])}[:, :0]",
)

_WRITES = {
    **_each(_WRITES_ONE, lambda p, name: f"{p.x('f', written=True)}.{name}()", "{}"),
    **_each(_WRITES_OF_TWO, lambda p, name: f"{p.x('fi', written=True)}.{name}({p.apart()})", "{}"),
    **_texts(
        add_number_=lambda p: f"{p.x(written=True)}.add_({p.pick(1, 2)})",
        mul_number_=lambda p: f"{p.x('fc', written=True)}.mul_({p.pick(0.5, -0.0, 3)})",
        add_mixed_=lambda p: f"{p.x('f', written=True)}.add_({p.apart('fib')})",
        add_itself_=lambda p: f"{(x := p.x('fi', written=True))}.add_({x})",
        fill_=lambda p: f"{p.x('ficb', written=True)}.fill_({p.pick(1, 'True')})",
        fill_of=lambda p: f"{p.x('fi', written=True)}.fill_({p.apart(shape=())})",
        masked_fill_=lambda p: f"{p.x('fi', written=True)}.masked_fill_({p.mask()}, {p.pick(0, 3)})",
        clamp_=lambda p: f"{p.x('fi', written=True)}.clamp_(-1, 1)",
        pow_=lambda p: f"{p.x('fi', written=True)}.pow_(2)",
        addcmul_=lambda p: f"{p.x('f', written=True)}.addcmul_({p.apart()}, {p.apart()}, value=0.5)",
        lerp_=lambda p: f"{p.x('f', written=True)}.lerp_({p.apart()}, 0.25)",
        cumsum_=lambda p: f"{p.x('f', written=True)}.cumsum_({p.dim()})",
        logical_not_=lambda p: f"{p.x('b', written=True)}.logical_not_()",
        write_row=lambda p: (
            f"{p.x('fi', [1, 2], written=True)}[{p.at(0)}] = {p.apart(shape=p.main.shape[1:])}"
        ),
        write_number=lambda p: f"{p.x('fic', [1, 2], written=True)}[{p.pick('1:', '::2')}] = {p.number()}",
        write_column=lambda p: f"{p.x('f', [2], written=True)}[:, 1:].mul_(0.5)",
        write_transposed=lambda p: f"{p.x('f', [2], written=True)}.t()[1:].add_(1.5)",
        write_diagonal=lambda p: f"{p.x('fic', [2], written=True)}.diagonal().neg_()",
        write_shifted=lambda p: f"{(x := p.x('f', [2], written=True))}[:, 1:].copy_({x}[:, :-1].clone())",
        write_imag=lambda p: f"{p.x('c', written=True)}.conj().imag.mul_(2)",
        write_bytes=lambda p: f"{p.x('f', written=True)}.view(torch.uint8)[..., :1] = 0",
        write_masked=lambda p: (
            f"{p.x('fi', range(1, 5), written=True)}[{p.mask(range(1, 5))}] = {p.pick(1.25, 2)}"
        ),
        silu_=lambda p: f"F.silu({p.x('f', written=True)}, inplace=True)",
        mul_out_itself=lambda p: f"torch.mul({(x := p.x('f', written=True))}, {p.apart()}, out={x})",
        uniform_=lambda p: f"{p.x('f', written=True)}.uniform_()",
        normal_=lambda p: f"{p.x('f', written=True)}.normal_(0.5, 2.0)",
        bernoulli_=lambda p: f"{p.x('f', written=True)}.bernoulli_(0.5)",
        exponential_=lambda p: f"{p.x('f', written=True)}.exponential_()",
    ),
}


def _embedding(p: Picker) -> str:
    x = p.x("f", [2])
    return f"F.embedding({p.index(p.size(0))}, {x})"


def _one_hot(p: Picker) -> str:
    p.x("fi", [1, 2])
    return f"F.one_hot({p.index(5)}, 5)"


_INDICES = {
    **_texts(
        has_out=True,
        index_select=lambda p: (
            f"torch.index_select({p.x('ficb', [1, 2])}, 0, {p.index(p.size(0))}.flatten())"
        ),
        gather=lambda p: f"torch.gather({p.x('fi', [1, 2])}, 0, {p.index(p.size(0), p.main.shape)})",
        take=lambda p: f"torch.take({p.x('fi')}, {p.index(p.main.numel())})",
        scatter=lambda p: f"torch.scatter({p.x('fi', [1, 2])}, 0, {_indices(p)}, {p.of(p.main.shape)})",
        scatter_number=lambda p: f"torch.scatter({p.x('fi', [1, 2])}, 0, {_indices(p)}, 2)",
        scatter_add=lambda p: (
            f"torch.scatter_add({p.x('fi', [1, 2])}, 0, {_indices(p)}, {p.of(p.main.shape)})"
        ),
        scatter_reduce=lambda p: (
            f"torch.scatter_reduce({p.x('f', [1, 2])}, 0, {_indices(p)}, {p.of(p.main.shape)}, {_reduce(p)})"
        ),
        index_add=lambda p: (
            f"torch.index_add({p.x('fi', [1, 2])}, 0, {_rows(p)}, {p.of(p.main.shape)}, alpha=2)"
        ),
        index_copy=lambda p: f"torch.index_copy({p.x('fi', [1, 2])}, 0, {_order(p)}, {p.of(p.main.shape)})",
        searchsorted=lambda p: f"torch.searchsorted({p.x('f', [1])}.sort().values, {p.like()})",
    ),
    **_texts(
        index=lambda p: f"{p.x('ficb', [1, 2, 3])}[{p.index(p.size(0))}]",
        index_last=lambda p: f"{p.x('ficb', [2, 3])}[..., {p.index(p.size(-1))}]",
        index_two=lambda p: f"{p.x('fi', [2])}[{(i := p.index(p.size(0)))}, {i}.clamp(max={p.size(1) - 1})]",
        embedding=_embedding,
        one_hot=_one_hot,
        take_along_dim=lambda p: f"torch.take_along_dim({p.x('fi', [2])}, {_indices(p)}, 0)",
        index_put=lambda p: (
            f"{p.x('fi', [2])}.index_put(({_rows(p)},), {p.of(p.main.shape)}, accumulate=True)"
        ),
        index_put_=lambda p: f"{p.x('fi', [2], written=True)}.index_put_(({_order(p)},), {_rest(p)})",
        index_put_two_=lambda p: (
            f"{p.x('fi', [2], written=True)}.index_put_(({_order(p)}, {_zeros(p)}), {_one(p)})"
        ),
        index_add_=lambda p: f"{p.x('fi', [1, 2], written=True)}.index_add_(0, {_rows(p)}, {_rest(p)})",
        index_copy_=lambda p: f"{p.x('fi', [1, 2], written=True)}.index_copy_(0, {_order(p)}, {_rest(p)})",
        index_fill_=lambda p: f"{p.x('fib', [1, 2], written=True)}.index_fill_(0, {_rows(p)}, 1)",
        scatter_=lambda p: f"{p.x('fi', [1, 2], written=True)}.scatter_(0, {_indices(p)}, {_rest(p)})",
        scatter_add_=lambda p: (
            f"{p.x('fi', [1, 2], written=True)}.scatter_add_(0, {_indices(p)}, {_rest(p)})"
        ),
        scatter_amax_=lambda p: (
            f"{p.x('f', [1, 2], written=True)}.scatter_reduce_(0, {_indices(p)}, {_rest(p)}, 'amax')"
        ),
        put_=lambda p: f"{p.x('fi', written=True)}.put_({_order(p)}, {_one(p)}, accumulate=True)",
        write_indexed=lambda p: f"{p.x('fi', [2], written=True)}[{_order(p)}] = {_rest(p)}",
        masked_scatter=lambda p: f"{p.x('f')}.masked_scatter({p.mask()}, {p.of(p.main.shape)})",
        select_scatter=lambda p: (
            f"torch.select_scatter({p.x('fi', [2])}, {p.of(p.main.shape)}[0], 0, {p.at(0)})"
        ),
        slice_scatter=lambda p: f"torch.slice_scatter({p.x('fi', [2])}, {p.of(p.main.shape)}[1:], 0, 1)",
        diagonal_scatter=lambda p: (
            f"torch.diagonal_scatter({p.x('f', [2])}, {p.of(p.main.shape)}.diagonal())"
        ),
        bucketize=lambda p: f"torch.bucketize({p.x('f')}, torch.arange(-2, 3, device=cpu), right=True)",
    ),
}


def _indices(p: Picker) -> str:
    """Return indices of the shape of ``main`` into its first axis."""
    return p.index(p.size(0), p.main.shape)


def _rows(p: Picker) -> str:
    """Return ``len(main)`` indices into the first axis of ``main``; some may be equal."""
    return p.index(p.size(0), [p.size(0)])


def _order(p: Picker) -> str:
    """Return a permutation of the first axis of ``main`` that depends on contents."""
    return f"{p.of([p.size(0)], 'fi')}.argsort()"


def _zeros(p: Picker) -> str:
    return f"torch.zeros({p.size(0)}, dtype=torch.int64, device=cpu)"


def _rest(p: Picker) -> str:
    """Return values to write: of the shape of ``main``, in separate memory."""
    return p.apart(shape=p.main.shape)


def _one(p: Picker) -> str:
    return p.apart(shape=[p.size(0)])


def _reduce(p: Picker) -> str:
    return f"{p.pick('sum', 'mean', 'amax', 'prod')!r}"


def _two(p: Picker, kinds: str = "fi") -> str:
    """Return two values of one dtype, as arguments."""
    return f"{p.x(kinds, [1, 2, 3])}, {p.of(p.main.shape)}"


_JOINS = {
    **_texts(
        has_out=True,
        cat=lambda p: f"torch.cat(({_two(p, 'ficb')}), {p.dim()})",
        cat_of_computed=lambda p: f"torch.cat((-{(x := p.x('f', [2]))}[:, 1:], {x}[:, :1] * 2), -1)",
        cat_of_products=lambda p: f"torch.cat(({(x := p.x('fi', [2]))}[:1] * 2, {x}[:1] + {x}[1:]))",
        cat_of_one=lambda p: f"torch.cat(({(x := p.x('fic', [1, 2]))}, {x}, {x}[:1]))",
        cat_many=lambda p: f"torch.cat([{(x := p.x('fi', [1, 2]))}, {p.of(p.main.shape)}, {x}, {x}, {x}])",
        cat_empty=lambda p: f"torch.cat([{(x := p.x('fi', [2]))}[:0], {x}, {x}[:, :].abs()])",
        cat_legacy=lambda p: f"torch.cat([torch.empty(0, device=cpu), {p.x('f', [2])}])",
        cat_mixed=lambda p: f"torch.cat([{p.x('fi', [2])}, {p.of(p.main.shape, 'fib')}], 1)",
        stack=lambda p: f"torch.stack([{_two(p, 'ficb')}], {p.pick(0, -1)})",
        hstack=lambda p: f"torch.hstack([{_two(p)}])",
        tril=lambda p: f"torch.tril({p.x('fi', [2, 3])}, {p.pick(0, 1, -1)})",
    ),
    **_texts(
        neg_read_again=lambda p: f"torch.cat([(n := -{p.x('fi', [2])}), {p.of(p.main.shape)}])[:1] + n",
        abs_read_again=lambda p: (
            f"torch.cat([(n := {p.x('fi', [2])}.abs()), {p.of(p.main.shape)}], 1).sum() + n"
        ),
        half_read_again=lambda p: (
            f"torch.cat([(n := {p.x('f', [1, 2])} * 0.5), {p.of(p.main.shape)}])[-1:] * n"
        ),
        sum_read_again=lambda p: f"torch.cat([(n := {p.x('fi', [1, 2])} + {p.like()}), n[:1]]).sum() - n",
        cat_written_again=lambda p: f"torch.cat([(n := {p.x('f', [2])} * 2), n.add_(1)])",
        cat_into=lambda p: (
            f"torch.cat([{p.x('f', [2])}[:1] * 2, {p.of(p.main.shape)}[1:]], out={_zeroed(p)})"
        ),
        cat_into_transposed=lambda p: (
            f"torch.cat([{p.x('f', [2])} + 1, -{p.of(p.main.shape)}], out={_zeroed(p)}.mT.repeat(1, 2).mT)"
        ),
        pad=lambda p: f"F.pad({p.x('fi', [1, 2, 3])}, (1, {p.pick(0, 2, -1)}), value={p.pick(0.5, 2)})",
        meshgrid=lambda p: f"torch.meshgrid({p.x('fi', [1])}, {p.of(p.main.shape)}, indexing='ij')",
        tile=lambda p: f"{p.x('fi', [1, 2])}.tile(2)",
        repeat=lambda p: f"{p.x('ficb', [1, 2])}.repeat(2, 1)",
        flip=lambda p: f"{p.x('ficb', [1, 2, 3])}.flip({p.dim()})",
        roll=lambda p: f"{p.x('ficb', [1, 2, 3])}.roll(1, {p.dim()})",
    ),
}


def _zeroed(p: Picker) -> str:
    return f"torch.zeros({p.shape()}, dtype={p.dtype()}, device=cpu)"


def _square(p: Picker) -> str:
    """Return a square matrix that can be multiplied with ``main``."""
    try:
        return p.of((p.size(-1), p.size(-1)))
    except NoFitError:
        return f"torch.eye({p.size(-1)}, dtype={p.dtype()}, device=cpu).roll(1, 0)"


_PRODUCTS = {
    **_texts(
        has_out=True,
        mm=lambda p: f"torch.mm({p.x('fic', [2])}, {p.of(p.main.shape)}.mT)",
        mm_square=lambda p: f"torch.mm({p.x('fi', [2])}, {_square(p)})",
        addmm=lambda p: (
            f"torch.addmm({p.x('f', [2])}, {p.of(p.main.shape)}, {_square(p)}, beta=0.5, alpha=0.1)"
        ),
        mv=lambda p: f"torch.mv({p.x('f', [2])}, {p.of([p.size(1)])})",
        bmm=lambda p: f"torch.bmm({p.x('f', [3])}, {p.of(p.main.shape)}.mT)",
        baddbmm=lambda p: (
            f"torch.baddbmm({p.x('f', [3])}, {p.of(p.main.shape)}[..., :1], {p.main_name}[:, :1])"
        ),
        dot=lambda p: f"torch.dot({p.x('fi', [1])}, {p.of(p.main.shape)})",
        outer=lambda p: f"torch.outer({p.x('fi', [1])}, {p.of(p.main.shape)})",
    ),
    **_texts(
        matmul=lambda p: f"{p.x('f', [2, 3])} @ {_square(p)}",
        addmm_=lambda p: f"{p.x('f', [2], written=True)}.addmm_({_rest(p)}, {_square(p)}.clone())",
        linear=lambda p: f"F.linear({p.x('f', [1, 2, 3])}, {_square(p)}, {p.of([p.size(-1)])})",
        einsum=lambda p: f"torch.einsum('ij,kj->ik', {p.x('f', [2])}, {p.of(p.main.shape)})",
        empty_product=lambda p: f"{(x := p.x('f', [2]))}[:, :0] @ {x}[:, :0].mT",
        conv1d=lambda p: f"F.conv1d({p.x('f', [3])}, {p.of(p.main.shape)}[:1], padding=1)",
        conv2d=lambda p: f"F.conv2d({p.x('f', [4])}, {p.of(p.main.shape)}[:1], padding=1)",
        # Torch's kernel is not deterministic if rows of its inputs share memory.
        attention=lambda p: (
            f"F.scaled_dot_product_attention({(x := p.x('f', [2]) + '.contiguous()')}[None, None],"
            f" {p.of(p.main.shape)}.contiguous()[None, None], {x}[None, None],"
            f" is_causal={p.pick('True', 'False')})[0, 0]"
        ),
        inverse=lambda p: f"torch.linalg.inv_ex({p.x('f', [2])}.float() @ {p.main_name}.float().mT).inverse",
        autocast=lambda p: f"in_bfloat16(F.linear, {p.x('f', [2])}, {_square(p)})",
    ),
}


def _size(p: Picker) -> str:
    return f"[{p.size(-1)}]"


def _vector(p: Picker, axis: int) -> str:
    """Return one number for each index on an axis of ``main``, of its dtype."""
    return p.of([p.size(axis)])


_REDUCTIONS_AND_NORMS = {
    **_each(
        _REDUCTIONS, lambda p, name: f"torch.{name}({p.x('f')}, {p.dim()}, keepdim=True)", "{}", has_out=True
    ),
    **_texts(
        has_out=True,
        sum_integers=lambda p: f"torch.sum({p.x('ib')}, {p.dim()})",
        sum_as_double=lambda p: f"torch.sum({p.x('f')}, {p.dim()}, dtype=torch.float64)",
        any=lambda p: f"torch.any({p.x('fib')}, {p.dim()})",
        all=lambda p: f"torch.all({p.x('b')}, {p.dim()})",
        argmax=lambda p: f"torch.argmax({p.x('fi')}, {p.dim()}, keepdim=True)",
        cumsum=lambda p: f"torch.cumsum({p.x('fi')}, {p.dim()})",
        cumprod=lambda p: f"torch.cumprod({p.x('f')}, {p.dim()})",
        softmax=lambda p: f"torch.softmax({p.x('f')}, {p.dim()})",
        log_softmax=lambda p: f"torch.log_softmax({p.x('f')}, {p.dim()})",
        renorm=lambda p: f"torch.renorm({p.x('f', [2, 3])}, 2, 0, 1.5)",
        diff=lambda p: f"torch.diff({p.x('fi', [1, 2, 3])})",
    ),
    **_texts(
        sum_all=lambda p: f"{p.x('fic')}.sum()",
        mean_all=lambda p: f"{p.x('f')}.mean()",
        max_all=lambda p: f"{p.x('fi')}.max()",
        max_dim=lambda p: f"torch.max({p.x('fi')}, {p.dim()})",
        max_out=lambda p: f"torch.max({p.x('f', [2])}, 0, out={_pair_for(p, [p.size(1)])})",
        aminmax=lambda p: f"torch.aminmax({p.x('fi')}, dim={p.dim()}, keepdim=True)",
        sort=lambda p: f"torch.sort({p.x('fi', [1, 2, 3])}, dim={p.dim()}, stable=True)",
        sort_out=lambda p: f"torch.sort({p.x('f', [2])}, out={_pair_for(p, p.main.shape)})",
        argsort=lambda p: f"{p.x('fi', [1, 2])}.argsort(dim=-1, descending=True, stable=True)",
        topk=lambda p: f"torch.topk({p.x('f', [1, 2])}, {p.pick(1, 2)})",
        kthvalue=lambda p: f"torch.kthvalue({p.x('f', [1, 2])}, 1)",
        median=lambda p: f"{p.x('f', [1, 2])}.median(-1)",
        mode=lambda p: f"{p.x('i', [1, 2])}.mode(-1).values",
        cummax=lambda p: f"torch.cummax({p.x('f', [1, 2])}, {p.dim()})",
        var_mean=lambda p: f"torch.var_mean({p.x('f', [1, 2, 3])}, {p.dim()}, keepdim=True)",
        norm=lambda p: f"{p.x('f')}.norm()",
        count_nonzero=lambda p: f"torch.count_nonzero({p.x('fib')}, {p.dim()})",
        empty_sum=lambda p: f"{p.x('f', [1, 2])}[:0].sum(0)",
        masked_softmax=lambda p: (
            f"{p.x('f', [2])}.masked_fill({p.mask()}, float('-inf')).softmax(-1).nan_to_num()"
        ),
        layer_norm=lambda p: f"F.layer_norm({p.x('f', [2, 3])}, {_size(p)}, {_vector(p, -1)}, None)",
        rms_norm=lambda p: f"F.rms_norm({p.x('f', [2, 3])}, {_size(p)}, {_vector(p, -1)})",
        rms_by_hand=lambda p: (
            f"{(x := p.x('f', [2]))} * torch.rsqrt({x}.pow(2).mean(-1, keepdim=True) + 1e-6)"
        ),
        batch_norm=lambda p: (
            f"F.batch_norm({p.x('f', [2, 3, 4])}, None, None, {_vector(p, 1)}, training=True)"
        ),
        batch_norm_running=lambda p: (
            f"F.batch_norm({p.x('f', [2, 3])}, (m := {_vector(p, 1)}.clone()), (v := {_vector(p, 1)}.abs()),"
            " training=True), m, v"
        ),
        batch_norm_evaluated=lambda p: (
            f"F.batch_norm({p.x('f', [2, 3])}, {_vector(p, 1)}, {_vector(p, 1)}.abs())"
        ),
        instance_norm=lambda p: f"F.instance_norm({p.x('f', [3, 4])})",
        group_norm=lambda p: f"F.group_norm({p.x('f', [2, 3, 4])}, 1, {_vector(p, 1)})",
        max_pool=lambda p: f"F.max_pool1d({p.x('f', [2, 3])}, 2)",
        max_pool_indices=lambda p: f"F.max_pool2d({p.x('f', [4])}, 2, 1, return_indices=True)",
        avg_pool=lambda p: f"F.avg_pool2d({p.x('f', [3, 4])}, 2, 1)",
        adaptive_pool=lambda p: f"F.adaptive_avg_pool2d({p.x('f', [3, 4])}, 1)",
        interpolate=lambda p: f"F.interpolate({p.x('f', [4])}, scale_factor=2.0, mode='nearest')",
        cdist=lambda p: f"torch.cdist({p.x('f', [2])}, {p.of(p.main.shape)})",
        cosine=lambda p: f"F.cosine_similarity({p.x('f', [2])}, {p.of(p.main.shape)})",
        loss=lambda p: f"F.mse_loss({p.x('f')}, {p.of(p.main.shape)})",
        cross_entropy=lambda p: f"F.cross_entropy({p.x('f', [2])}, {p.index(p.size(1), [p.size(0)])})",
        glu=lambda p: f"F.glu({p.x('f', [1, 2, 3])}, {p.dim()})",
    ),
}


def _pair_for(p: Picker, shape: Iterable[int]) -> str:
    """Return two outputs: one for values of ``main``'s dtype, one for their indices."""
    size = tuple(shape)
    made = [f"torch.empty({size}, dtype={dtype}, device=cpu)" for dtype in (p.dtype(), "torch.int64")]
    return f"({', '.join(made)})"


_NEW = {
    **_texts(
        zeros=lambda p: f"torch.zeros({p.x('f') and p.shape()}, device=cpu)",
        ones_like=lambda p: f"torch.ones_like({p.x('ficb')})",
        full=lambda p: f"torch.full({p.x('fi') and p.shape()}, {p.number()}, dtype={p.dtype()}, device=cpu)",
        full_like=lambda p: f"torch.full_like({p.x('fi')}, {p.pick(2, 3)})",
        arange=lambda p: f"torch.arange({p.x('fi', [1, 2]) and p.size(-1)}, device=cpu)",
        arange_float=lambda p: (
            f"torch.arange(0.5, {p.x('f', [1, 2]) and p.size(-1)}, dtype={p.dtype()}, device=cpu)"
        ),
        linspace=lambda p: f"torch.linspace(0, 1, {p.x('f', [1, 2]) and p.size(-1)}, device=cpu)",
        eye=lambda p: f"torch.eye({p.x('f', [1, 2]) and p.size(-1)}, device=cpu)",
        scalar=lambda p: f"torch.full((), {p.x('f') and p.pick(2.5, -1.0)}, dtype={p.dtype()}, device=cpu)",
        new_ones=lambda p: f"{p.x('fi')}.new_ones({p.shape()}).mul_(3)",
        new_empty=lambda p: f"{p.x('fi')}.new_empty({p.shape()}).fill_(2)",
        empty_copied=lambda p: f"torch.empty_like({(x := p.x('ficb'))}).copy_({x})",
        empty_in_parts=lambda p: (
            f"fill_parts(torch.empty({p.x('f', [2]) and p.shape()}, dtype={p.dtype()}, device=cpu))"
        ),
        zeros_written=lambda p: f"torch.zeros_like({(x := p.x('fi'))}).add_({x})",
        triangle=lambda p: f"torch.ones({p.x('f', [2]) and p.shape()}, dtype=torch.bool, device=cpu).triu(1)",
        rand_like=lambda p: f"torch.rand_like({p.x('f')})",
        randn=lambda p: f"torch.randn({p.x('f') and p.shape()}, dtype={p.dtype()}, device=cpu)",
        randint_like=lambda p: f"torch.randint_like({p.x('fi')}, 0, 9)",
        randperm=lambda p: f"torch.randperm({p.x('fi', [1, 2]) and p.size(0)}, device=cpu)",
        normal=lambda p: f"torch.normal({p.x('f')}, 0.5)",
        bernoulli=lambda p: f"torch.bernoulli({p.x('f')}.nan_to_num().sigmoid())",
        dropout=lambda p: f"F.dropout({p.x('f')}, 0.3, training=True)",
        multinomial=lambda p: f"torch.multinomial({p.x('f', [1, 2])}.nan_to_num().sigmoid() + 0.1, 1)",
        number_constant=lambda p: f"{p.x('fi')} * torch.tensor({p.pick(2, 3)})",
    ),
    "constant": Operation(
        lambda p: f"{p.x('f', [2])} + torch.tensor({[0.5 * n for n in range(p.size(-1))]}, device=cpu)",
        refused=frozenset({"strict"}),
    ),
    "constant_written": Operation(
        lambda p: f"torch.tensor({[n + 0.5 for n in range(len(p.x('f', [1, 2])))]}, device=cpu).mul_(2)",
        refused=frozenset({"strict"}),
    ),
    "random_": Operation(
        lambda p: f"{p.x('fi', written=True)}.random_(0, 5)",
        refused=frozenset({"inductor"}),  # the name of its overload, ``from``, is a Python keyword
    ),
}

_LISTS = {
    **_each(_FOREACH, lambda p, name: f"torch._foreach_{name}([{_two(p, 'f')}])", "foreach_{}"),
    **_each(
        _FOREACH_TWO, lambda p, name: f"torch._foreach_{name}([{_two(p)}], [{_two(p)}])", "foreach_{}_lists"
    ),
    **_texts(
        foreach_number=lambda p: f"torch._foreach_{p.pick('add', 'mul')}([{_two(p)}], {p.number()})",
        foreach_numbers=lambda p: f"torch._foreach_mul([{_two(p, 'f')}], [0.5, 3.0])",
        foreach_addcmul=lambda p: (
            f"torch._foreach_addcmul([{_two(p, 'f')}], [{_two(p, 'f')}], [{_two(p, 'f')}], 0.5)"
        ),
        foreach_lerp=lambda p: f"torch._foreach_lerp([{_two(p, 'f')}], [{_two(p, 'f')}], 0.5)",
        foreach_norm=lambda p: f"torch._foreach_norm([{_two(p, 'f')}])",
        foreach_mul_=lambda p: f"torch._foreach_mul_([{p.x('f', written=True)}, {_rest(p)}], 0.5)",
        foreach_add_=lambda p: f"torch._foreach_add_([{p.x('fi', written=True)}], [{_rest(p)}])",
        foreach_zero_=lambda p: f"torch._foreach_zero_([{p.x('f', written=True)}])",
        foreach_copy_=lambda p: f"torch._foreach_copy_([{p.x('fi', written=True)}], [{_rest(p)}])",
        foreach_copy_across=lambda p: f"torch._foreach_copy_([{p.x('f', written=True)}], [{p.apart('fib')}])",
        broadcast=lambda p: f"torch.broadcast_tensors({p.x('fi')}, {p.like()})",
        atleast=lambda p: f"torch.atleast_2d([{p.x('fi')}, {p.x('fi')}])",
        block_diag=lambda p: f"torch.block_diag({_two(p, 'f')})",
    ),
}

_CUSTOM = _texts(
    plus_one=lambda p: f"ops.plus_one({p.x('fic')})",
    add_to=lambda p: f"ops.add_to({p.x('fi', written=True)}, {p.apart()})",
    scale=lambda p: f"ops.scale({p.x('f', written=True)}, {p.apart()})",
    fill_and_return=lambda p: f"ops.fill_and_return({p.x('fi', written=True)}, 2.0)",
    halves=lambda p: f"ops.halves({p.x('f')})",
    doubled=lambda p: f"ops.doubled([{_two(p, 'fic')}])",
    into=lambda p: f"ops.into({p.x('fi')}, out={_zeroed(p)})",
    into_value=lambda p: f"ops.into({p.x('fi', written=True)} * 2, out={p.main_name})",
    add_to_all=lambda p: f"ops.add_to_all([{p.x('fi', written=True)}], [{_rest(p)}])",
)

_HIDING = {
    name: Operation(text, hides=True)
    for name, text in (
        ("hidden_add", lambda p: f"ops.hidden_add({p.x('fi', written=True)}, {p.apart()})"),
        ("hidden_return", lambda p: f"ops.hidden_return({p.x('fi', written=True)}, {p.apart()})"),
        ("hidden_alias", lambda p: f"ops.hidden_alias({p.x('fi', [1, 2])})"),
        ("hidden_new", lambda p: f"ops.hidden_new({p.x('f', written=True)}, {p.apart()})"),
        ("hidden_list", lambda p: f"ops.hidden_list([{p.x('f', written=True)}])"),
    )
}

OPERATIONS: dict[str, Operation] = {
    **_ELEMENTWISE,
    **_CASTS,
    **_VIEWS,
    **_WRITES,
    **_INDICES,
    **_JOINS,
    **_PRODUCTS,
    **_REDUCTIONS_AND_NORMS,
    **_NEW,
    **_LISTS,
    **_CUSTOM,
    **_HIDING,
}
"""The operations by name."""

DRAWS = frozenset(
    {
        *("bernoulli", "bernoulli_", "dropout", "exponential_", "multinomial", "normal", "normal_"),
        *("rand_like", "randint_like", "randn", "random_", "randperm", "uniform_"),
    }
)
"""The operations that draw random numbers."""

NAMESPACE: dict[str, Any] = {
    "torch": torch,
    "F": functional,
    "ops": torch.ops.random_programs,
    "cpu": CPU,
    "fill_parts": _fill_parts,
    "in_bfloat16": _in_bfloat16,
}
"""The global names that lines of programs may use."""
