"""State of the whole process that a plugin must leave as it is: `StateWatch`.

Torch, Python and numpy have settings and generators that all code of a process shares. A plugin that changes
one changes the results of the engine, of the model and of every other plugin. `StateWatch` charges each
change to the call in which it happens, and undoes it. The next call then begins as in an engine.

    settings     grad and inference mode, autocast, default dtype and device, modes left pushed, threads,
                 deterministic algorithms, precision of float32, attention kernels, denormals, anomaly mode
    generators   torch's default generator of the CPU with its seed, Python's `random`, numpy's legacy one
    process      the working directory, the handlers of SIGINT and SIGTERM

Does not: hold the environment, the import path, warning filters and the locale, which the import of a library
may change; or the generators of a GPU.
"""

import ctypes
import importlib
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

DRAWS = "torch's default generator"
"""Name of the state that draws advance. The region of a runner may draw, for example to sample drafts."""

Read = Callable[[], Any]
Write = Callable[[Any], object]


class Setting(NamedTuple):
    """One setting of the process.

    Args:
        name: Its name for users: the function that sets it, or words.
        read: Returns its value, which ``==`` compares.
        write: Sets it; None for state that is not restored.
        shows: Whether its values are printed. The states of generators are not.
    """

    name: str
    read: Read
    write: Write | None
    shows: bool = True


# -- settings that take less than a microsecond to read; held around each call -----------------------


def _default_device() -> torch.device | None:
    """Return the default device; None while no mode is pushed, which a default device is."""
    if not torch._C._len_torch_function_stack():  # noqa: SLF001
        return None
    with torch._C.DisableTorchFunction():  # noqa: SLF001  a mode that a plugin left may raise
        return torch.get_default_device()


def _write_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the settings of the backends contradict each other
        return "mixed"


def _write_matmul_precision(value: str) -> None:
    if value != "mixed":
        torch.set_float32_matmul_precision(value)


def _generator_state() -> bytes:
    state = torch.default_generator.get_state()
    return ctypes.string_at(state.data_ptr(), state.nbytes)  # a numpy view would be a read on the host


def _flushes_denormals() -> bool:
    return sys.float_info.min / 2 == 0.0  # the flag of the thread holds for Python's floats too


def _autocast(device: str) -> tuple[Setting, Setting]:
    return (
        Setting(
            f"torch.set_autocast_enabled({device!r}, ...)",
            partial(torch.is_autocast_enabled, device),
            lambda value: torch.set_autocast_enabled(device, value),
        ),
        Setting(
            f"torch.set_autocast_dtype({device!r}, ...)",
            partial(torch.get_autocast_dtype, device),
            lambda value: torch.set_autocast_dtype(device, value),
        ),
    )


def _popping(depth: Callable[[], int], pop: Callable[[], object]) -> Write:
    def write(value: int) -> None:
        while depth() > value:
            pop()

    return write


_MODES: tuple[Setting, ...] = (
    Setting("torch.set_default_device", _default_device, torch.set_default_device),
    Setting(
        "modes of torch.overrides",
        torch._C._len_torch_function_stack,  # noqa: SLF001
        _popping(torch._C._len_torch_function_stack, torch._C._pop_torch_function_stack),  # noqa: SLF001
    ),
    Setting(
        "modes of torch.utils._python_dispatch",
        torch._C._len_torch_dispatch_stack,  # noqa: SLF001
        _popping(torch._C._len_torch_dispatch_stack, torch._C._pop_torch_dispatch_stack),  # noqa: SLF001
    ),
)
"""The modes that are pushed. Drivers push some around calls, so they are compared within each call alone."""

_QUICK: tuple[Setting, ...] = (
    Setting("inference mode", torch.is_inference_mode_enabled, None),
    Setting("torch.set_grad_enabled", torch.is_grad_enabled, torch.set_grad_enabled),
    Setting("torch.set_default_dtype", torch.get_default_dtype, torch.set_default_dtype),
    Setting("torch.set_num_threads", torch.get_num_threads, torch.set_num_threads),
    Setting(
        "torch.use_deterministic_algorithms",
        lambda: (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        ),
        _write_deterministic,
    ),
    Setting("torch.set_float32_matmul_precision", _matmul_precision, _write_matmul_precision),
    Setting("torch.set_flush_denormal", _flushes_denormals, torch.set_flush_denormal),
    Setting("torch.autograd.set_detect_anomaly", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    *_autocast("cpu"),
    *_autocast("cuda"),
    Setting("torch.manual_seed", torch.initial_seed, None),
    Setting(DRAWS, _generator_state, None, shows=False),
)

# -- the others; held around each piece of work ------------------------------------------------------


def _attribute(name: str) -> Setting:
    """Return the setting of an attribute of `torch.backends`, such as ``cudnn.benchmark``."""
    path, _, last = name.rpartition(".")

    def owner() -> Any:
        found: Any = torch.backends
        for part in path.split("."):
            found = getattr(found, part)
        return found

    return Setting(
        f"torch.backends.{name}",
        lambda: getattr(owner(), last),
        lambda value: setattr(owner(), last, value),
    )


def _kernels(name: str) -> Setting:
    """Return the setting of a kind of attention kernels."""
    cuda = torch.backends.cuda
    return Setting(
        f"torch.backends.cuda.enable_{name}_sdp",
        getattr(cuda, f"{name}_sdp_enabled"),
        getattr(cuda, f"enable_{name}_sdp"),
    )


def _handler(number: signal.Signals) -> Setting:
    return Setting(
        f"the handler of {number.name}",
        lambda: signal.getsignal(number),
        lambda value: signal.signal(number, value),
    )


def _folder() -> str | None:
    with suppress(OSError):  # it was deleted
        return os.getcwd()  # noqa: PTH109  as `os.chdir` takes it
    return None


def _of_numpy() -> Iterator[Setting]:
    """Yield the legacy generator of numpy, if it is installed."""
    try:
        numpy: Any = importlib.import_module("numpy")
    except ImportError:
        return

    def read() -> tuple[object, ...]:
        kind, keys, *rest = numpy.random.get_state()
        return kind, keys.tobytes(), *rest

    def write(value: tuple[Any, ...]) -> None:
        kind, keys, *rest = value
        numpy.random.set_state((kind, numpy.frombuffer(keys, dtype=numpy.uint32), *rest))

    yield Setting("numpy.random", read, write, shows=False)


_SLOW: tuple[Setting, ...] = (
    _attribute("cuda.matmul.fp32_precision"),
    _attribute("cudnn.conv.fp32_precision"),
    _attribute("cudnn.rnn.fp32_precision"),
    _attribute("mkldnn.matmul.fp32_precision"),
    _attribute("cuda.matmul.allow_fp16_reduced_precision_reduction"),
    _attribute("cuda.matmul.allow_bf16_reduced_precision_reduction"),
    _attribute("cudnn.enabled"),
    _attribute("cudnn.benchmark"),
    _attribute("cudnn.deterministic"),
    *map(_kernels, ("flash", "mem_efficient", "math", "cudnn")),
    Setting("os.chdir", _folder, lambda value: os.chdir(value or os.sep)),
    _handler(signal.SIGINT),
    _handler(signal.SIGTERM),
    Setting("Python's random", random.getstate, random.setstate, shows=False),
    *_of_numpy(),
)

# -- the suite's own settings --------------------------------------------------------------------------


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's random numbers of the host and of ``device``, and restore their state afterwards."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with one thread, as the workers of `graphpact check` do: tensors are too small for several."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# -- watching ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """A call of a plugin to which changes are charged.

    Args:
        where: The call, in words.
        hook: The hook, if it is one.
        may_draw: Whether it may draw from torch's default generator.
    """

    where: str
    hook: str | None = None
    may_draw: bool = False


@dataclass(frozen=True)
class SettingChange:
    """Settings that one call changed.

    Args:
        call: The call.
        names: The settings, as users know them.
        before: Their values before the call, in words.
        after: Their values after it.
    """

    call: Call
    names: tuple[str, ...]
    before: str
    after: str


class StateWatch:
    """Charges changes of the process's state to calls.

    Calls may be nested. A change is charged to the innermost call.

    Attributes:
        changes: The changes, the first of each call and its settings.
    """

    def __init__(self) -> None:
        self.changes: dict[tuple[Call, tuple[str, ...]], SettingChange] = {}
        self._calls: list[Call] = []
        self._quick: tuple[Any, ...] = ()
        self._slow: tuple[Any, ...] = ()

    @contextmanager
    def during(self, call: Call) -> Iterator[None]:
        """Charge what changes in the ``with`` block to ``call``, and restore it.

        The outermost block also compares the settings that take longer to read.
        """
        outermost, modes = not self._calls, _values(_MODES)
        if outermost:
            self._quick, self._slow = _values(_QUICK), _values(_SLOW)
        else:
            self._charge(self._calls[-1])
        self._calls.append(call)
        try:
            yield
        finally:
            self._calls.pop()
            self._charge(call, modes, all_settings=outermost)

    def _charge(
        self, call: Call, modes: tuple[Any, ...] | None = None, *, all_settings: bool = False
    ) -> None:
        """Note and undo the changes since the last charge; ``modes`` are those at the start of the call."""
        changed: list[tuple[Setting, Any, Any]] = []
        if modes is not None and (pushed := _values(_MODES)) != modes:
            changed = _restored(_MODES, modes, pushed)  # first: a mode sees how others are read
        quick = _values(_QUICK)
        if quick == self._quick and not changed and not all_settings:
            return
        changed += _restored((*_QUICK, *_SLOW), (*self._quick, *self._slow), (*quick, *_values(_SLOW)))
        self._quick, self._slow = _values(_QUICK), _values(_SLOW)
        charged = [each for each in changed if not (call.may_draw and each[0].name == DRAWS)]
        if not charged:
            return
        names = tuple(setting.name for setting, _, _ in charged)
        shown = [each for each in charged if each[0].shows]
        self.changes.setdefault(
            (call, names),
            SettingChange(
                call,
                names,
                before=", ".join(f"{old}" for _, old, _ in shown) or "the state before the call",
                after=", ".join(f"{new}" for _, _, new in shown) or "another state",
            ),
        )


def _values(settings: tuple[Setting, ...]) -> tuple[Any, ...]:
    return tuple([setting.read() for setting in settings])


def _restored(
    settings: tuple[Setting, ...], before: tuple[Any, ...], now: tuple[Any, ...]
) -> list[tuple[Setting, Any, Any]]:
    """Restore the settings that differ, and return each with its values before and now."""
    changed = [each for each in zip(settings, before, now, strict=True) if each[1] != each[2]]
    for setting, old, _ in changed:
        if setting.write is not None:
            setting.write(old)
    return changed
