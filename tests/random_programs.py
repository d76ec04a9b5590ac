"""Random programs of torch code: replays of a captured program are compared with eager runs.

A program is text: inputs of many layouts, one line for each operation, and the values that it returns. It
is written line by line while it runs, and lines that torch refuses are dropped. So programs are valid, and
a program that fails is printed as code after lines that do not matter were removed.

The same seed and mode give the same program. ``pytest FILE -k "NAME" --program SEED`` runs one again.

Does not: define the operations; `program_operations` does.
"""

import contextlib
import math
import random
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, TypeAlias

import torch

from graphpact.errors import GraphpactError
from graphpact.graphs import DeclaredMemory, GraphDriver
from graphpact.tensors import storage_id
from graphpact_tape.host_guard import DispatchMode
from graphpact_tape.operators import written_by
from graphpact_tape.trees import tensors_of
from graphpact_tape.writes import repeats
from program_operations import KINDS, NAMESPACE, OPERATIONS, NoFitError, Picker
from support import leaves

_NAME = re.compile(r"\b[xt]\d+\b")
_SHARE_OF_EAGER_CALLS = 0.08
_LARGEST, _MOST_ELEMENTS, _MOST_DIMS = 1e4, 200, 5
"""Limits of values in programs: larger ones would overflow, or take long."""


@dataclass(frozen=True)
class Step:
    """A line of a program: ``left = text``, or only ``text``.

    Args:
        operation: Its name in `OPERATIONS`.
        left: The names of its results: ``t5``, ``[t5, t6]``, or nothing.
        text: The code.
        is_eager: Whether it is an eager call between two segments.
    """

    operation: str
    left: str
    text: str
    is_eager: bool = False

    @property
    def targets(self) -> list[str]:
        """The names of its results."""
        return _NAME.findall(self.left)

    @property
    def uses(self) -> list[str]:
        """The names of the values that it takes, each once."""
        return list(dict.fromkeys(_NAME.findall(self.text)))

    @property
    def line(self) -> str:
        """The line of code."""
        text, names = self.text, ", ".join(self.uses)
        if self.is_eager:
            text = f"eager(lambda {names}: ({text}), {names})"
        return f"{self.left} = {text}" if self.left else text


@dataclass(frozen=True)
class Program:
    """A program: the code that makes its inputs, its steps, and the names of the returned values."""

    seed: int
    inputs: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]

    def __str__(self) -> str:
        made = [f"{name} = {text}" for name, text in self.inputs]
        names = ", ".join(name for name, _ in self.inputs)
        body = [step.line for step in self.steps]
        region = [f"def region({names}):", *(f"    {line}" for line in body)]
        return "\n".join([*made, "", *region, f"    return [{', '.join(self.outputs)}]"])

    def bind(self, eager: Callable[..., Any]) -> tuple[list[torch.Tensor], Callable[..., list[torch.Tensor]]]:
        """Return new inputs, and a function that runs the program on them.

        Args:
            eager: Calls a function of an eager call, with its arguments.
        """
        names: dict[str, Any] = {**NAMESPACE, "eager": eager}
        exec(compile(str(self), f"<program {self.seed}>", "exec"), names)  # noqa: S102  the text is made here
        return [names[name] for name, _ in self.inputs], names["region"]


# -- generation ------------------------------------------------------------------------------------

_DTYPES = ("float32",) * 4 + ("float64", "bfloat16", "int32", "int64", "bool", "complex64")
_DENSE, _EVERY_SECOND_ROW = "torch.zeros({shape}, dtype={dtype})", "torch.zeros({twice}, dtype={dtype})[::2]"
_LAYOUTS = (
    _DENSE,
    _EVERY_SECOND_ROW,
    "torch.zeros({reverse}, dtype={dtype}).permute({axes})",
    "torch.zeros({wider}, dtype={dtype})[..., 1:-1]",
    "torch.zeros({wider}, dtype={dtype})[..., :{last}]",
    "torch.zeros({longer}, dtype={dtype})[1:]",
    "torch.zeros({row}, dtype={dtype}).expand({shape})",
    "torch.zeros({sum}, dtype={dtype}).as_strided({shape}, {ones})",
)


def _input(rng: random.Random, shape: tuple[int, ...], dtype: str) -> str:
    """Return code that makes an input of some layout."""
    if len(shape) == 4 and rng.random() < 0.5:
        return f"torch.zeros({shape}, dtype=torch.{dtype}).to(memory_format=torch.channels_last)"
    layout = rng.choice(_LAYOUTS) if shape and 0 not in shape else _DENSE
    first, last = (shape[:1] or (0,))[0], (shape[-1:] or (0,))[0]
    return layout.format(
        shape=shape,
        dtype=f"torch.{dtype}",
        reverse=shape[::-1],
        axes=tuple(range(len(shape)))[::-1],
        wider=(*shape[:-1], last + 2),
        last=last,
        longer=(first + 1, *shape[1:]),
        twice=(first * 2, *shape[1:]),
        row=(1, *shape[1:]),
        sum=sum(shape),
        ones=(1,) * len(shape),
    )


def _inputs(rng: random.Random) -> Iterator[str]:
    """Yield code for each input: shapes that go together, in several layouts and dtypes."""
    rows, columns = rng.choice([(4, 6), (3, 4), (2, 8), (5, 5), (4, 2), (1, 6), (3, 1)])
    main = rng.choice(_DTYPES[:6])
    yield _input(rng, (rows, columns), main)
    yield _input(rng, (rows, columns), main)
    shapes = [(rows, columns)] * 2 + [(columns,), (rows,), (2, rows, columns), (rows, 1), (), (0, columns)]
    shapes += [(1, 2, rows, columns)]
    for _ in range(rng.randrange(1, 4)):
        yield _input(rng, rng.choice(shapes), rng.choice((main, *_DTYPES)))
    yield _input(
        rng, rng.choice([(rows,), (columns,), (rows, columns)]), rng.choice(["int64", "int32", main])
    )
    if rng.random() < 0.3:
        yield rng.choice(["x0.t()", "x0[1:]", "x1[:, :1]", "x1[::2]"])


class _Writer:
    """Writes a program while it runs."""

    def __init__(self, seed: int, names: Sequence[str]) -> None:
        self._rng = random.Random(seed)
        self._operations = names
        self._namespace: dict[str, Any] = {**NAMESPACE, "eager": lambda fn, *args: fn(*args)}
        self._values: dict[str, torch.Tensor] = {}
        self._picker = Picker(self._rng, self._values)
        self._steps: list[Step] = []
        self._inputs: list[tuple[str, str]] = []
        self._seed = seed

    def write(self) -> Program:
        """Return a program."""
        for at, text in enumerate(_inputs(self._rng)):
            self._inputs.append((f"x{at}", text))
            self._namespace[f"x{at}"] = self._values[f"x{at}"] = eval(text, self._namespace)  # noqa: S307
        fill(self._values.values(), self._seed)
        wanted = self._rng.randrange(3, 13)
        for _ in range(4 * wanted):
            if len(self._steps) == wanted:
                break
            self._try(self._rng.choice(self._operations))
        made = [name for step in self._steps for name in step.targets]
        outputs = self._rng.sample(made, min(len(made), self._rng.randrange(1, 4)))
        last = made[-1:]
        return Program(
            self._seed, tuple(self._inputs), tuple(self._steps), tuple(dict.fromkeys([*outputs, *last]))
        )

    def _try(self, name: str) -> None:
        """Add a line of the operation, if values fit and torch accepts them."""
        operation = OPERATIONS[name]
        try:
            text = operation.text(self._picker)
            result, is_expression = self._run(text)
            if operation.has_out and self._rng.random() < 0.2:
                text = self._with_out(text, result)
                result, _ = self._run(text)
        except (NoFitError, *_TORCH_REFUSES):
            return
        tensors = leaves(result)
        if any(type(t) is not torch.Tensor or not _is_plain(t) for t in tensors):
            return
        names = [f"t{len(self._values) + at}" for at in range(len(tensors))]
        left = names[0] if isinstance(result, torch.Tensor) else f"[{', '.join(names)}]" if names else ""
        step = Step(name, left, text, is_eager=is_expression and self._rng.random() < _SHARE_OF_EAGER_CALLS)
        self._steps.append(step if step.uses else replace(step, is_eager=False))
        for target, t in zip(names, tensors, strict=True):
            self._namespace[target] = self._values[target] = t

    def _run(self, text: str) -> tuple[Any, bool]:
        """Run a line; return its value, and whether it is an expression."""
        try:
            return eval(text, self._namespace), True  # noqa: S307  the text is made here
        except SyntaxError:
            exec(text, self._namespace)  # noqa: S102  the text is made here
            return None, False

    def _with_out(self, text: str, result: torch.Tensor) -> str:
        """Return the call with ``out=``: a value in separate memory, or new memory of any layout."""
        used = {storage_id(self._values[name]) for name in _NAME.findall(text)}
        shape, dtype = tuple(result.shape), result.dtype
        if self._rng.random() < 0.3:
            dtype = {torch.float32: torch.float64, torch.int32: torch.float32}.get(dtype, dtype)
        taken = [
            name
            for name, t in self._values.items()
            if t.shape == shape and t.dtype is dtype and not repeats(t) and storage_id(t) not in used
        ]
        if taken and self._rng.random() < 0.5:
            return f"{text[:-1]}, out={self._rng.choice(taken)})"
        kind = f"{dtype}, device=cpu"
        if shape and self._rng.random() < 0.5:
            made = _EVERY_SECOND_ROW.format(dtype=kind, twice=(2 * shape[0], *shape[1:]))
        else:
            made = f"torch.empty({shape}, dtype={kind})"
        return f"{text[:-1]}, out={made})"


_TORCH_REFUSES = (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError)


def _is_plain(t: torch.Tensor) -> bool:
    """Return whether a value is small, of a known dtype, and finite."""
    if t.dtype not in KINDS or t.numel() > _MOST_ELEMENTS or t.dim() > _MOST_DIMS:
        return False
    return KINDS[t.dtype] not in "fc" or not t.numel() or float(t.abs().max()) <= _LARGEST


def operations_of(mode: str) -> list[str]:
    """Return the names of the operations that a mode does not refuse."""
    return [name for name, operation in OPERATIONS.items() if mode not in operation.refused]


def generate(seed: int, names: Sequence[str]) -> Program:
    """Return the program of a seed, made of the operations ``names``."""
    with torch.inference_mode(), quiet(), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _Writer(seed, names).write()


def repeated(program: Program, count: int) -> Program:
    """Return ``program`` with its steps ``count`` times, as a model repeats its layers. Names get a suffix.

    Each block reads, in place of some inputs, results of the block before with the same layout; in place of
    other inputs, further inputs like them; and the rest of the inputs again. No step is an eager call.
    """
    rng = random.Random(program.seed)
    inputs, region = replace(program, outputs=_targets(program.steps)).bind(lambda fn, *args: fn(*args))
    with torch.inference_mode(), quiet(), torch.random.fork_rng(devices=[]):
        fill(inputs, program.seed)
        results = dict(zip(_targets(program.steps), region(*inputs), strict=True))
    plain = [(name, text) for name, text in program.inputs if not _NAME.findall(text)]
    # Inputs in separate memory stay in separate memory, because some operations need that.
    owner = {storage_id(x): name for (name, _), x in zip(program.inputs, inputs, strict=True)}
    carried: dict[str, str] = {}
    for (name, _), x in zip(program.inputs, inputs, strict=True):
        fitting = [
            target
            for target, t in results.items()
            if _layout(t) == _layout(x) and owner.get(storage_id(t), name) == name
        ]
        if fitting and rng.random() < 0.8:
            carried[name] = fitting[-1]
            owner[storage_id(results[fitting[-1]])] = name
    own = [(name, text) for name, text in plain if name not in carried and rng.random() < 0.5]

    further, steps = [*program.inputs], []
    for block in range(count):
        names = {name: f"{name}{_number(block)}" for name in _targets(program.steps)}
        if block:
            names |= {name: f"{result}{_number(block - 1)}" for name, result in carried.items()}
            names |= {name: f"{name}{_number(block)}" for name, _ in own}
            further += [(names[name], text) for name, text in own]

        def renamed(text: str, names: dict[str, str] = names) -> str:
            return _NAME.sub(lambda found: names.get(found[0], found[0]), text)

        steps += [Step(step.operation, renamed(step.left), renamed(step.text)) for step in program.steps]
    outputs = [f"{name}{_number(block)}" for block in (0, count - 1) for name in program.outputs]
    return Program(program.seed, tuple(further), tuple(steps), tuple(outputs))


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    """Return what operations may depend on: `as_strided` counts from the beginning of the storage."""
    return t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes()


def _targets(steps: Iterable[Step]) -> tuple[str, ...]:
    return tuple(name for step in steps for name in step.targets)


def _number(block: int) -> str:
    return f"0{block + 1}0" if block else ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Ignore warnings: torch gives some only once, but a program must depend only on its seed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- comparison ------------------------------------------------------------------------------------

_SPECIAL = (0.0, -0.0, float("inf"), float("-inf"), float("nan"), 1e-30)


def fill(tensors: Iterable[torch.Tensor], seed: int, *, special: bool = False) -> None:
    """Write new values to all memory of ``tensors``, including gaps.

    Args:
        tensors: The tensors.
        seed: The seed of the values.
        special: Whether some numbers are zeros of both signs, infinite, or NaN.
    """
    generator = torch.Generator().manual_seed(seed)
    for t in {storage_id(t): t for t in tensors}.values():
        flat = whole(t)
        if KINDS[t.dtype] == "c":
            flat = torch.view_as_real(flat)
        if KINDS[t.dtype] in "ib":
            flat.copy_(
                torch.randint(-3, 6, flat.shape, generator=generator).clamp(
                    0 if flat.dtype is torch.bool else -3
                )
            )
            continue
        flat.normal_(generator=generator)
        if special:
            which = torch.randint(0, 6 * len(_SPECIAL), flat.shape, generator=generator)
            for at, value in enumerate(_SPECIAL):
                flat.masked_fill_(which == at, value)


def whole(t: torch.Tensor) -> torch.Tensor:
    """Return all memory of the storage of ``t`` as one flat tensor of its dtype."""
    storage = t.untyped_storage()
    return torch.empty(0, dtype=t.dtype).set_(storage, 0, (storage.nbytes() // t.itemsize,), (1,))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same layout and the same bits; all NaNs are equal."""
    if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.is_floating_point():
        return torch.equal(a, b)
    return bool((((a == b) & (a.signbit() == b.signbit())) | (a.isnan() & b.isnan())).all())


class MismatchError(Exception):
    """A replay differs from an eager run."""


class UnsteadyError(Exception):
    """Two eager runs of a program on the same inputs differ."""


def alike(got: torch.Tensor, wanted: torch.Tensor, rounded: Sequence[torch.Tensor]) -> bool:
    """Return whether rounding explains the difference between a compiled and an eager result.

    Compiled code may keep intermediates in more bits, add in another order, and use other approximations of
    functions. So each number may differ by a few times what it differs between eager runs whose operations
    round their results in other ways.

    Args:
        got: The result of compiled code.
        wanted: The result of an eager run.
        rounded: Results of eager runs under `_OtherRounding`.
    """
    if (got.shape, got.stride(), got.dtype) != (wanted.shape, wanted.stride(), wanted.dtype):
        return False
    is_float = KINDS[got.dtype] in "fc"
    exactly = (got == wanted) | (got.isnan() & wanted.isnan())
    if not is_float:
        varies = torch.stack([other != wanted for other in rounded]).any(0)
        return bool((exactly | varies).all())
    spread = torch.stack([(other - wanted).abs() for other in rounded]).nan_to_num(math.inf, math.inf).amax(0)
    # The terms of a sum may be larger than the sum; they are about as large as the largest result.
    size = wanted.abs().nan_to_num(0, 0).amax() if wanted.numel() else wanted.abs()
    near = (got - wanted).abs() <= 8 * spread + 8 * torch.finfo(got.dtype).eps * size
    return bool((exactly | near | spread.isinf()).all())


class _OtherRounding(DispatchMode):
    """A dispatch mode that changes the rounding of the floats of every operation."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._generator = torch.Generator().manual_seed(seed)

    def nudge(self, t: torch.Tensor) -> None:
        """Change each number of a float tensor by at most one step of its dtype."""
        if (t.is_floating_point() or t.is_complex()) and t.numel() and not repeats(t):
            steps = torch.randint(-1, 2, t.shape, generator=self._generator)
            t.mul_(1 + steps * torch.finfo(t.dtype).eps)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {storage_id(t) for t in tensors_of((args, kwargs))}
        made = [t for t in tensors_of(result) if storage_id(t) not in given]
        for t in [*made, *written_by(func, args, kwargs or {})]:
            self.nudge(t)
        return result


def _contents(tensors: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies of outputs, with their strides, and of all memory of inputs."""
    kept = [
        t.clone() if repeats(t) else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t)
        for t in tensors
    ]
    return [*kept, *(whole(t).clone() for t in inputs)]


class Captured:
    """Programs in one graph, their inputs, and the eager functions.

    Args:
        programs: The programs.
        driver: It captures them.

    Raises:
        GraphpactError: The driver refuses them.
    """

    def __init__(self, programs: Sequence[Program], driver: GraphDriver) -> None:
        self.programs = programs
        bound = [program.bind(driver.eager_call) for program in programs]
        self.inputs = [inputs for inputs, _ in bound]
        self._eagerly = [program.bind(lambda fn, *args: fn(*args))[1] for program in programs]
        self.fill(0)
        driver.declare(DeclaredMemory(refreshed=[t for inputs in self.inputs for t in inputs]))
        self.graph = driver.capture(lambda: [region(*inputs) for inputs, region in bound])
        self._places = [t.data_ptr() for t in leaves(self.graph.outputs)]

    def fill(self, at: int, *, special: bool = False) -> None:
        """Write the inputs of a round."""
        for program, inputs in zip(self.programs, self.inputs, strict=True):
            fill(inputs, program.seed + at, special=special)
        torch.default_generator.manual_seed(at)  # torch.manual_seed() formats a stack for each other device

    def eager(
        self, at: int, *, special: bool, rounding: _OtherRounding | None = None
    ) -> list[list[torch.Tensor]]:
        """Return outputs and memory of the inputs of each program, after an eager run."""
        self.fill(at, special=special)
        if rounding is not None:
            for t in {storage_id(t): t for inputs in self.inputs for t in inputs}.values():
                rounding.nudge(whole(t))
        with rounding or contextlib.nullcontext():
            outputs = [fn(*inputs) for fn, inputs in zip(self._eagerly, self.inputs, strict=True)]
        return list(map(_contents, outputs, self.inputs))

    def replayed(self, at: int, *, special: bool) -> list[list[torch.Tensor]]:
        """Return outputs and memory of the inputs of each program, after a replay."""
        for t in leaves(self.graph.outputs):
            whole(t).fill_(1)
        self.fill(at, special=special)
        self.graph.replay()
        if self._places != [t.data_ptr() for t in leaves(self.graph.outputs)]:
            raise MismatchError("an output moved")
        return list(map(_contents, self.graph.outputs, self.inputs))


def check(programs: Sequence[Program], driver: GraphDriver, *, is_compiled: bool = False) -> None:
    """Capture programs in one graph, and compare replays on new inputs with eager runs.

    Args:
        programs: The programs.
        driver: The driver.
        is_compiled: Whether its kernels are not those of eager runs. Else bits are compared, and the inputs
            of one round have infinities, NaN, and zeros of both signs.

    Raises:
        GraphpactError: The driver refuses a program.
        MismatchError: A replay differs from an eager run.
        UnsteadyError: An eager run differs from another eager run.
    """
    with torch.inference_mode(), quiet():
        captured = Captured(programs, driver)
        for at, special in ((1, False), (2, False), (3, not is_compiled)):
            got, wanted = captured.replayed(at, special=special), captured.eager(at, special=special)
            if all(map(same_bits, chain(*got), chain(*wanted))):
                continue
            if not all(_is_steady(captured, at, special=special, wanted=wanted) for _ in range(4)):
                raise UnsteadyError
            roundings = map(_OtherRounding, range(6 if is_compiled else 0))
            others = [captured.eager(at, special=special, rounding=each) for each in roundings]
            for n, program in enumerate(programs):
                names = [*program.outputs, *(f"the memory of {name}" for name, _ in program.inputs)]
                for m, (name, a, b) in enumerate(zip(names, got[n], wanted[n], strict=True)):
                    is_right = alike(a, b, [other[n][m] for other in others]) if others else same_bits(a, b)
                    if not is_right:
                        raise MismatchError(f"round {at}: {name} is\n{a}\nand not\n{b}")


def _is_steady(captured: Captured, at: int, *, special: bool, wanted: list[list[torch.Tensor]]) -> bool:
    """Return whether an eager run gives ``wanted`` again, with other contents in memory that was freed."""
    junk = [torch.full((size,), 7.0) for size in (1, 4, 6, 24, 48, 100)]
    del junk
    again = captured.eager(at, special=special)
    return all(map(same_bits, chain(*again), chain(*wanted)))


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Program:
    """Return a minimal program that still fails."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(program):
            if fails(smaller):
                program, is_smaller = smaller, True
                break
    return program


def _smaller(program: Program) -> Iterator[Program]:
    """Yield smaller programs: without one step, one output, one eager call or one input."""
    for at in reversed(range(len(program.steps))):
        gone = set(program.steps[at].targets)
        kept = list(program.steps[:at])
        for step in program.steps[at + 1 :]:
            if gone.intersection(step.uses):
                gone.update(step.targets)
            else:
                kept.append(step)
        outputs = tuple(name for name in program.outputs if name not in gone)
        yield replace(program, steps=tuple(kept), outputs=outputs)
    for at, step in enumerate(program.steps):
        if step.is_eager:
            eagerless = replace(step, is_eager=False)
            yield replace(program, steps=(*program.steps[:at], eagerless, *program.steps[at + 1 :]))
    for name in program.outputs:
        yield replace(program, outputs=tuple(other for other in program.outputs if other != name))
    used = {name for step in program.steps for name in step.uses} | set(program.outputs)
    used |= {name for _, text in program.inputs for name in _NAME.findall(text)}
    for name, _ in program.inputs:
        if name not in used:
            yield replace(program, inputs=tuple(each for each in program.inputs if each[0] != name))


# -- runs ------------------------------------------------------------------------------------------

_SHARE_OF_REFUSALS = 0.01
"""The largest accepted share of refused or unsteady programs. With more, a run would show little."""


@dataclass
class Tally:
    """Counts of a run of programs.

    Attributes:
        ran: How often each operation was in a program whose replays equal eager runs.
        refused: The seeds of refused programs, by message; without programs that hide writes.
        unsteady: The seeds of programs whose eager runs differ.
        programs: How many there were.
    """

    ran: Counter[str] = field(default_factory=Counter)
    refused: dict[str, list[int]] = field(default_factory=dict)
    unsteady: list[int] = field(default_factory=list)
    programs: int = 0

    def add(self, program: Program, error: Exception | None) -> None:
        """Count a program, and the error of its `check` that is not a failure."""
        self.programs += 1
        operations = [step.operation for step in program.steps]
        if error is None:
            self.ran.update(operations)
        elif isinstance(error, UnsteadyError):
            self.unsteady.append(program.seed)
        elif not any(OPERATIONS[name].hides for name in operations):
            self.refused.setdefault(str(error).partition(", at ")[0], []).append(program.seed)

    def assert_few_refusals(self) -> None:
        """Assert that few programs were refused or unsteady."""
        left_out = sum(map(len, self.refused.values())) + len(self.unsteady)
        assert left_out <= 2 + _SHARE_OF_REFUSALS * self.programs, (self.refused, self.unsteady)

    def assert_all_ran(self, names: Iterable[str]) -> None:
        """Assert that each operation was in a captured program whose replays equal eager runs."""
        assert [name for name in names if not self.ran[name] and not OPERATIONS[name].hides] == []


Make: TypeAlias = Callable[[], GraphDriver]


def error_of(programs: Sequence[Program], make: Make, *, is_compiled: bool = False) -> Exception | None:
    """Return the error of `check` with a new driver, or None."""
    try:
        check(programs, make(), is_compiled=is_compiled)
    except Exception as error:  # noqa: BLE001  it is returned
        return error
    return None


def is_failure(error: Exception | None) -> bool:
    """Return whether an error of `check` is a fault of the driver, not a refusal or an unsteady program."""
    return error is not None and not isinstance(error, (GraphpactError, UnsteadyError))


def run(
    make: Make,
    names: Sequence[str],
    seeds: Sequence[int],
    again: str,
    *,
    per_graph: int = 1,
    is_compiled: bool = False,
    blocks: int = 1,
) -> Tally:
    """Check the programs of ``seeds``.

    Args:
        make: Makes a driver.
        names: The operations.
        seeds: The seeds of the programs.
        again: The arguments of pytest that select the test.
        per_graph: How many programs are captured together. If that fails, each is captured separately.
        is_compiled: See `check`.
        blocks: How often the steps of each program are repeated, see `repeated`.

    Raises:
        AssertionError: A program fails; the message has it, shrunk, and how to run it again.
    """
    tally = Tally()
    for first in range(0, len(seeds), per_graph):
        programs = [generate(seed, names) for seed in seeds[first : first + per_graph]]
        if blocks > 1:
            programs = [repeated(program, blocks) for program in programs]
        together = error_of(programs, make, is_compiled=is_compiled) if per_graph > 1 else None
        for program in programs:
            is_alone = per_graph == 1 or together is not None
            error = error_of([program], make, is_compiled=is_compiled) if is_alone else None
            if is_failure(error):
                raise AssertionError(_report(program, make, again, is_compiled=is_compiled)) from error
            tally.add(program, error)
        assert not is_failure(together), (
            f"the programs of {seeds[first]} and the next {per_graph}: {together}"
        )
    return tally


def _report(program: Program, make: Make, again: str, *, is_compiled: bool) -> str:
    """Return a report: the shrunk failing program, its error, and how to run it again."""
    kind = type(error_of([program], make, is_compiled=is_compiled))

    def fails(smaller: Program) -> bool:
        return isinstance(error_of([smaller], make, is_compiled=is_compiled), kind)

    small = shrunk(program, fails)
    error = error_of([small], make, is_compiled=is_compiled)
    names = ", ".join(sorted(NAMESPACE))
    return (
        f"{kind.__name__}: {error}\n\n# {names}: of program_operations; eager: driver.eager_call\n{small}\n\n"
        f"pytest {again} --program {program.seed}"
    )


def first_failure(make: Make, names: Sequence[str], seeds: Iterable[int]) -> Program | None:
    """Return the first program of ``seeds`` that fails, or None."""
    programs = (generate(seed, names) for seed in seeds)
    return next((program for program in programs if is_failure(error_of([program], make))), None)
