"""The errors of graphpact. Every message says what was requested, what was found, and what to do next.

    GraphpactError                     .code: the exit status of the command line
    ├── UsageError              2      the caller can fix it
    │   ├── ConfigError                unknown key, value out of range, unreadable file
    │   ├── UnknownOptionError         a class or a function has no keyword argument of that name
    │   ├── PluginError                a plugin cannot be provided under the requested name
    │   │   ├── UnknownPluginError     no distribution offers the name
    │   │   ├── RejectedPluginError    the plugin was refused, with a reason
    │   │   └── AmbiguousPluginError   two distributions offer the name
    │   └── SlotError                  a slot is declared or filled against the registry's rules
    │       ├── UnknownSlotError       no slot of that name
    │       └── UnallocatedSlotError   the slot has no memory
    ├── ContractError           1      a promise of the contract was broken
    │   ├── PactBreach                 the replay does not agree with the capture
    │   ├── CaptureError               the region does work that a graph cannot record
    │   ├── RankError                  ranks that step together do different things, or one is missing
    │   └── ReplayError                a replay read, wrote or kept wrong memory (strict lanes)
    │       ├── CollectiveError        a collective failed in it, for instance because a peer has ended
    │       └── PoisonError            it read memory not written in this step, or unowned memory
    └── EngineError             3      a defect in the engine or a plugin

Does not: print or exit; the command line does.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

C = TypeVar("C", bound=Callable[..., Any])


class GraphpactError(Exception):
    """Base of every error that graphpact raises on purpose.

    Args:
        message: What was requested and what was found, in one sentence.
        hint: What to do next. It is printed on a separate line after ``help:``.
    """

    code: ClassVar[int] = 3

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  help: {self.hint}"


class UsageError(GraphpactError):
    """The request is invalid; nothing was done."""

    code = 2


class ConfigError(UsageError):
    """A configuration key or value is not valid."""


class UnknownOptionError(UsageError, TypeError):
    """A keyword argument has an unknown name; the message gives the nearest known name."""


class PluginError(UsageError):
    """A plugin cannot be provided under the requested name."""


class UnknownPluginError(PluginError):
    """No installed distribution offers the name.

    Args:
        message: As for every error.
        hint: As for every error.
        kind: The kind of plugin that was requested, such as ``"runner"``; None if it was not given.
        name: The name that was requested, or None.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, kind: str | None = None, name: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.kind = kind
        self.name = name


class RejectedPluginError(PluginError):
    """The plugin of that name was refused; the message gives the reason."""


class AmbiguousPluginError(PluginError):
    """Two distributions offer one name; the message names both."""


class SlotError(UsageError, ValueError):
    """A slot was declared, bound or filled against the registry's rules; nothing was written.

    It is also a `ValueError`. Its two subclasses derive from the exceptions that the original registry raises
    too (PR 26742), so that programs written for the original catch these errors.
    """


class UnknownSlotError(SlotError, KeyError):
    """No slot has that name; the message gives the nearest name."""

    __str__ = UsageError.__str__  # KeyError quotes the message


class UnallocatedSlotError(SlotError, RuntimeError):
    """A slot has no buffer, because it is not registered or not enabled."""


class ContractError(GraphpactError):
    """A promise between capture and replay was broken.

    ``rule`` is the id of the broken rule, such as ``"GP03"``, or None if unknown; see `graphpact explain`.
    """

    code = 1

    def __init__(self, message: str, *, hint: str | None = None, rule: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.rule = rule


class KernelRefusal(RuntimeError):  # noqa: N818  the caller's error, not the kernel's
    """A kernel refuses its arguments, before it reads or writes anything, because the caller broke ``rule``.

    The message gives the arguments, and what the kernel accepts.
    """

    def __init__(self, message: str, *, rule: str) -> None:
        super().__init__(message)
        self.rule = rule


BreachKind = Literal[
    "address", "shape", "stride", "dtype", "device", "value", "bound", "type", "fields", "length"
]
"""The kinds of difference. ``fields`` are those of an object, or the keys of a mapping; ``length`` is that of
a list or tuple.
"""

BREACHES: dict[BreachKind, tuple[str, str]] = {
    "address": ("GP01", "copy into the captured tensor instead of making a new one"),
    "shape": ("GP07", "use the same slice as at capture: recorded kernels read the captured extent"),
    "stride": ("GP07", "copy into the captured tensor: recorded kernels use its strides"),
    "dtype": ("GP07", "copy into the captured tensor: recorded kernels read elements of its dtype"),
    "device": ("GP01", "copy into the captured tensor, on its device"),
    "value": (
        "GP08",
        (
            "a host number is frozen into the graph: keep it constant for the shape, put it in a tensor, or"
            " declare it bounded() if smaller values are valid, or updated() if it is an argument of tasks"
        ),
    ),
    "bound": (
        "GP08",
        "capture with the largest number that a replay may have: the graph is not valid for larger ones",
    ),
    "type": ("GP10", "the graph was recorded with the captured type; refresh it in place"),
    "fields": ("GP10", "return the captured metadata object, refreshed in place, with the same fields"),
    "length": ("GP05", "keep one entry for each captured one"),
}
"""For each kind of difference: the rule of the contract that it breaks, and what to do."""


@dataclass(frozen=True, slots=True)
class Breach:
    """One promise that a replay does not keep.

    Args:
        path: The field, such as ``metadata.kv_indptr``.
        rule: The kind of difference.
        captured: The promised value, as text.
        replayed: The value at replay, as text.
        owner: Label of the slot whose memory contains the captured tensor, or None.
        advice: What to do.
    """

    path: str
    rule: BreachKind
    captured: str
    replayed: str
    owner: str | None
    advice: str

    @property
    def broken(self) -> str:
        """Id of the contract's rule that is broken."""
        return BREACHES[self.rule][0]

    @property
    def text(self) -> str:
        """The difference and both values, as text."""
        if self.rule == "fields":
            return f"fields: {self.captured}, {self.replayed}"
        return f"{self.rule} captured {self.captured}, got {self.replayed}"


class PactBreach(ContractError):  # noqa: N818  a breach of the pact is the established name
    """The view or metadata of a replay does not agree with the capture.

    The message gives the shape and the first field in one line, then a table of all fields that differ.
    ``breaches`` are in the order of the walk. The rule and the hint of the error are those of the first one.
    """

    def __init__(self, message: str, *, hint: str | None = None, breaches: Sequence[Breach] = ()) -> None:
        super().__init__(message, hint=hint, rule=breaches[0].broken if breaches else None)
        self.breaches = tuple(breaches)


class CaptureError(ContractError):
    """A region does work that a graph cannot record; no graph was kept."""


class ReplayError(ContractError):
    """A replay read or wrote memory that it must not use, or outlived it; strict lanes detect this."""


class RankError(ContractError):
    """Ranks that step together are about to do different things, or one of them did not take part in time.

    The message names the rank, its step, and what each rank did.
    """


class CollectiveError(ReplayError):
    """A collective failed in a replay: a peer has ended, did not take part in time, or called another one."""


class PoisonError(ReplayError):
    """A replay or its preparation read poison, that is, memory not written in this step or unowned memory."""


class EngineError(GraphpactError):
    """The engine broke one of its rules, which is a defect of graphpact or of a plugin."""


def did_you_mean(word: str, known: Iterable[str]) -> str | None:
    """Return the known word nearest to ``word``, or None."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return close[0] if close else None


def named_options(target: C) -> C:
    """Decorate a class or function so that an unknown keyword argument raises a helpful error.

    The error names the nearest known argument. A class keeps its constructor's signature. Derived classes
    that define their own constructor are not checked.

    Raises:
        UnknownOptionError: When it is called with such an argument.
    """
    call: Callable[..., Any] = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]
    known = tuple(inspect.signature(target).parameters)

    @functools.wraps(call)
    def checked(*args: Any, **options: Any) -> Any:
        for name in options:
            if name not in known:
                near = did_you_mean(name, known)
                raise UnknownOptionError(
                    f"{target.__qualname__}() has no argument {name!r}",
                    hint=f"did you mean {near!r}?" if near else f"it takes {', '.join(known)}",
                )
        return call(*args, **options)

    if not isinstance(target, type):
        return checked  # type: ignore[return-value]
    target.__init__ = checked  # type: ignore[misc]
    return target
