"""What experiments know of what is tested: `UnderTest`, and `Subject`, one instance of it.

A lane of a backend and a runner is one: see `graphpact_conformance.lane`, whose subjects are rigs.
Any other code that prepares replays of recorded work can be one: this module asks for no backend, runner,
registry or driver.

Does not: implement a subject, or judge one.
"""

import re
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal, Protocol

import torch

from graphpact.attention import GraphSupport
from graphpact.batch import ForwardBatch
from graphpact.buffers import BoundSlot
from graphpact.errors import GraphpactError
from graphpact.pact import Promise
from graphpact.shapes import EagerReason, GraphShape
from graphpact_conformance.oracle import Answer
from graphpact_conformance.results import Finding
from graphpact_conformance.rules import RULES
from graphpact_conformance.subject.global_state import DRAWS, StateWatch
from graphpact_conformance.subject.kv_memory import KvMemory
from graphpact_conformance.subject.raised import causes, message_of, rule_of
from graphpact_conformance.subject.records import Ready, StepRecord
from graphpact_conformance.world.lanes import Config
from graphpact_conformance.world.problems import Problem
from graphpact_tape.poison import poison
from graphpact_tape.trace import TracedCall

Way = Literal["graph", "hook"]
"""The producer of metadata: the graph, where the backend supports it, or the replay hook."""

_HOOKS = frozenset(hook for rule in RULES.values() for hook in rule.hooks)
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
"""Addresses, which differ from run to run."""


class CannotCaptureError(Exception):
    """A lane could not be captured, so experiments that need its graphs cannot run."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(message_of(error))
        self.error = error


class DeclinedError(Exception):
    """The runner left a batch to an eager step, with a declared reason; an experiment needs a replay."""

    def __init__(self, reason: EagerReason) -> None:
        super().__init__(f"the runner leaves this batch to an eager step: {reason}")


class Subject(Protocol):
    """One instance of what is tested, with a KV cache and a page table of its own.

    Unowned memory of both holds poison after `load`: NaN in free KV slots, slots out of range in free rows.
    """

    # -- what it declares ------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The configuration of its steps."""

    @property
    def device(self) -> torch.device:
        """The device of everything but the oracle."""

    @property
    def planned(self) -> Sequence[GraphShape]:
        """The shapes that it captures, the smallest first."""

    @property
    def declines(self) -> Collection[EagerReason]:
        """The declared reasons with which it leaves a batch that a graph holds to an eager step."""

    @property
    def padded_seq_len(self) -> int:
        """The declared length of a padding row."""

    @property
    def writer(self) -> str:
        """The name of the function that writes the metadata of a replay, for texts."""

    # -- capture ---------------------------------------------------------------------------------

    @property
    def captured(self) -> Sequence[GraphShape]:
        """The captured shapes, in the order of their captures."""

    def capture(
        self,
        shape: GraphShape | None = None,
        batch: ForwardBatch | None = None,
        *,
        ready: Ready | None = None,
    ) -> None:
        """Capture with dummy batches; an earlier capture of a shape is replaced.

        Args:
            shape: The shape; None for every planned one.
            batch: A live batch that is captured in place of the dummy; its memory is loaded.
            ready: Called with view and metadata of each capture.
        """

    def close(self) -> None:
        """Release every graph and its memory; later batches run eagerly until the next capture."""

    def runs_of_capture(self, problem: Problem, shape: GraphShape) -> list[list[TracedCall]]:
        """Capture a live batch, and return the operations of each run: warm-ups, then the recorded one.

        Empty where operations cannot be seen.
        """

    def dummy(self, shape: GraphShape) -> ForwardBatch:
        """Return the batch that a capture of ``shape`` runs."""

    def serve_declined(self, shape: GraphShape) -> None:
        """Replay from now on what it declines, such as its own dummy, in the graph of ``shape``."""

    # -- a step ----------------------------------------------------------------------------------

    def load(self, problem: Problem) -> None:
        """Set page table and KV cache to the state before ``problem``, with poison in unowned memory."""

    def batch_of(self, problem: Problem) -> ForwardBatch:
        """Return the batch of a problem, with every field that batches of its kind have."""

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the captured shape that ``batch`` replays, or the reason why there is none."""

    def step(
        self,
        problem: Problem,
        *,
        eagerly: bool = False,
        fill: Callable[[BoundSlot], None] | None = None,
        ready: Ready | None = None,
        after_load: Callable[[], None] | None = None,
        batch: ForwardBatch | None = None,
        may_decline: bool = False,
    ) -> StepRecord:
        """Run one batch, and return its record, including an error.

        Args:
            problem: The batch, and the memory before it.
            eagerly: Whether to run without a graph.
            fill: Called before the step is prepared, with every slot that the step has to write.
            ready: Called between preparation and replay; see `Ready`.
            after_load: Called after memory is loaded.
            batch: A batch to run instead of the problem's own one.
            may_decline: Whether the batch may be left to an eager step, with a declared reason.

        Raises:
            DeclinedError: It was, and may not.
        """

    def run(self, batch: ForwardBatch, *, eagerly: bool = False) -> Mapping[str, torch.Tensor]:
        """Run a batch on memory as it is, and return its outputs where they lie, valid until the next replay.

        Args:
            batch: The batch, whose memory is loaded.
            eagerly: Whether to run without a graph.
        """

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare the step of a batch, as an engine does while outputs are read, without its replay."""

    def synchronize(self) -> None:
        """Wait for every copy from host memory.

        Raises:
            ReplayError: The host memory of a copy was rewritten before.
        """

    def replay(self, problem: Problem, shape: GraphShape) -> StepRecord:
        """Replay a graph on its inputs as they are, without preparation; the record names ``problem``."""

    # -- what it reads ---------------------------------------------------------------------------

    @property
    def slots(self) -> Sequence[BoundSlot]:
        """Its declared graph-resident buffers."""

    @property
    def cache(self) -> KvMemory:
        """The KV cache."""

    @property
    def table(self) -> torch.Tensor:
        """The page table, ``[rows, positions]`` int32."""

    def states(self) -> dict[str, torch.Tensor]:
        """Return the external memory of graphs by name, without the slots that every step writes."""

    def held(self) -> dict[str, torch.Tensor]:
        """Return copies of what the plugin keeps beyond a step, by name, without scratch rows."""

    def external(self, shape: GraphShape) -> list[torch.Tensor]:
        """Return the tensors that a graph reads outside KV cache and page table, in order of use."""

    def name_of(self, tensor: torch.Tensor, shape: GraphShape) -> str:
        """Return the name of what holds a tensor that a graph reads, or the line that reads it."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a slot, or an attribute of the plugin at any depth, has the memory of ``tensor``."""

    def trace(self, shape: GraphShape) -> list[TracedCall]:
        """Return the recorded calls of a graph; empty where it has no trace."""

    def promises(self, shape: GraphShape) -> Mapping[str, Promise]:
        """Return what the capture of a shape promised, by path; empty if it was not captured."""

    def num_segments(self, shape: GraphShape) -> int:
        """Return the number of segments of a graph; 1 without eager calls in between."""

    @property
    def weights(self) -> Sequence[torch.Tensor]:
        """The weights of its model, sinks among them, that may be written in place between two steps."""

    # -- what it answers -------------------------------------------------------------------------

    def answer(self, problem: Problem) -> Answer:
        """Return the oracle's answer, valid for every subject of the same configuration."""

    def where(self, name: str, column: int) -> str:
        """Return the meaning of a column of an output, in words."""

    @property
    def num_steps(self) -> int:
        """Draft steps of the last pass."""

    @property
    def num_shared(self) -> int:
        """Columns of work across rows, the last ones of ``rows``."""

    @property
    def feeds_itself(self) -> bool:
        """Whether later passes of a step read results of earlier ones, so that rounding reaches keys."""

    def other_weights(self, which: Collection[int], ids: Collection[int]) -> AbstractContextManager[None]:
        """Give tokens of ``ids`` other queries (0), keys (1) or values (2) inside the context."""


class Reporting(Protocol):
    """Makes findings. Implementations of `UnderTest` inherit it.

    Attributes:
        watch: Charges changes of the process's state to calls of the plugin.
    """

    watch: StateWatch

    @property
    def listed(self) -> frozenset[str] | None:
        """The rules that the current experiment lists; None for every rule."""

    @property
    def eager_attention(self) -> bool:
        """Whether attention is an eager call between segments of a graph."""

    def raised_at(self, error: BaseException) -> str | None:
        """Return file, line and function of the tested code that raised an error or a cause of it.

        None if something else raised it, or if that cannot be told, as here.
        """
        del error
        return None

    def hook_raised(self, step: StepRecord | None) -> bool:
        """Return whether a hook of the plugin raised in a step: then nothing else is known of the step.

        An error of a kernel in a replay is evidence of its inputs.
        """
        if step is None or step.error is None or step.stage not in ("prepare", "metadata"):
            return False
        return self.raised_at(step.error) is not None

    def finding(
        self,
        rule: str | None,
        *,
        expected: str,
        actual: str,
        field: str | None = None,
        hook: str | None = None,
        step: StepRecord | None = None,
        problem: Problem | None = None,
        help: str | None = None,  # noqa: A002  the field of reports
        error: BaseException | None = None,
    ) -> Finding:
        """Return a finding, with the line of the plugin that raised ``error``.

        Where attention leaves the graphs, the hooks of metadata are `AttentionBackend.init_metadata_eager`.
        """
        if self.eager_attention and hook in ("init_metadata_capture", "init_metadata_replay"):
            hook = "init_metadata_eager"
        if step is not None:
            problem = step.problem
        place = None if error is None else self.raised_at(error)
        shape = None if step is None or step.shape is None else str(step.shape)
        return Finding(
            rule=rule,
            hook=hook,
            field=field,
            expected=_ADDRESS.sub("0x…", expected),
            actual=_ADDRESS.sub("0x…", actual),
            batch=None if problem is None else problem.words,
            shape=shape,
            raised_at=place,
            help=help,
        )

    def of_error(
        self,
        error: BaseException,
        *,
        expected: str,
        rule: str | None = None,
        step: StepRecord | None = None,
        problem: Problem | None = None,
        hook: str | None = None,
        help: str | None = None,  # noqa: A002  the field of reports
    ) -> Finding:
        """Return a finding about an error, with the error's own rule and hint, otherwise with the given ones.

        A rule that the current experiment does not list is ignored; other experiments check it. So is the
        given rule if a hook of the plugin raised the error. If a kernel refuses its inputs, its line is in
        the message.
        """
        own = next((e.hint for e in causes(error) if isinstance(e, GraphpactError)), None)
        named = rule_of(error)
        if self.listed is not None and named not in self.listed:
            named = None
        actual, place = message_of(error), self.raised_at(error)
        refuses = isinstance(error, GraphpactError) and not self.hook_raised(step)
        if refuses and place is not None:
            actual += f" ({place})"
        return self.finding(
            named or (None if self.hook_raised(step) else rule),
            expected=expected,
            actual=actual,
            step=step,
            problem=problem,
            hook=hook or _hook_of(error, step),
            help=own
            or help
            or (named and f"`graphpact explain {named}` has the causes of such calls, and fixes"),
            error=None if refuses else error,
        )

    def of_changes(self) -> Iterator[Finding]:
        """Yield a finding for each change of the process's state in a call of the plugin."""
        for change in self.watch.changes.values():
            draws = DRAWS in change.names
            yield self.finding(
                "GP19",
                hook=change.call.hook,
                field=", ".join(change.names),
                expected=f"{change.before}, as before {change.call.where}",
                actual=change.after,
                help=_DRAW_HELP if draws else _SETTING_HELP,
            )


_SETTING_HELP = (
    "set it in the program, not in a plugin; where a call needs another value, restore it in a `finally`"
)
_DRAW_HELP = (
    "draw from a `torch.Generator` of the plugin: the engine samples from the default one, so draws of a"
    " plugin change its tokens"
)


class UnderTest(Reporting, Protocol):
    """What is tested, in one configuration. It makes subjects, and findings about them."""

    # -- what it declares ------------------------------------------------------------------------

    @property
    def config(self) -> Config:
        """The configuration."""

    @property
    def kind(self) -> Literal["attention_backend", "runner"]:
        """The side that is tested: ``attention_backend`` prepares metadata, ``runner`` prepares inputs."""

    @property
    def device(self) -> torch.device:
        """The device."""

    @property
    def ways(self) -> tuple[Way, ...]:
        """The possible producers of metadata."""

    @property
    def graph_support(self) -> GraphSupport:
        """The declared graph support."""

    @property
    def captures_nothing(self) -> bool:
        """Whether it has no shape to capture."""

    @property
    def no_graphs_declared(self) -> str | None:
        """The declaration that excludes graphs; None if graphs are declared."""

    def default_shapes(self, most: int) -> Sequence[GraphShape]:
        """Return the shapes that it captures by default for ``most`` requests, the smallest first."""

    def fit_default(self, most: int, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the one of `default_shapes` that a batch takes, or the reason why it takes none."""

    def declined(self, problem: Problem) -> EagerReason | None:
        """Return the declared reason with which a batch is left to an eager step; None if it is replayed."""

    # -- its subjects ----------------------------------------------------------------------------

    def rig(self, way: Way = "graph") -> Subject:
        """Return the experiment's subject, captured and without checks; made once.

        Raises:
            CannotCaptureError: It cannot be captured.
        """

    def guarded(self, way: Way = "graph") -> Subject:
        """Return the experiment's strict subject, with a pact check of every replay; made once.

        Raises:
            CannotCaptureError: It cannot be captured.
        """

    def build(
        self,
        way: Way = "graph",
        *,
        guarded: bool = False,
        capture: bool = True,
        copies_attention: bool = False,
    ) -> Subject:
        """Return a new subject.

        Args:
            way: The producer of metadata.
            guarded: Whether it is strict, without a pact check.
            capture: Whether it captures its planned shapes.
            copies_attention: Whether its model copies each result of attention at once.
        """

    def build_sharing(self) -> tuple[Subject, Subject]:
        """Return two new subjects that share the memory of their inputs, where that is possible."""

    def of_another_mode(self, *, capture: bool = False) -> tuple[Subject, Problem] | None:
        """Return a subject of another mode, captured or not, and a batch for it; None without any."""

    def with_sinks(self) -> "UnderTest":
        """Return the same with sinks in a layer, if it supports them, otherwise itself."""

    def anew(self, listed: Iterable[str] | None = None) -> "UnderTest":
        """Return the same without subjects, so that an experiment sees no state of another one.

        Args:
            listed: The rules that the next experiment lists; the same by default.
        """

    def like(self, config: Config) -> "UnderTest":
        """Return the same in another configuration, without subjects."""

    def clear_caches(self) -> None:
        """Clear the caches of tensors in the plugin's modules and classes."""

    # -- what it answers -------------------------------------------------------------------------

    def answer(self, rig: Subject, problem: Problem) -> Answer:
        """Return the oracle's answer for a batch, computed once by ``rig``, one of its subjects."""


def poison_slot(slot: BoundSlot) -> None:
    """Fill a slot with poison."""
    if slot.buffer is not None:
        poison(slot.buffer)


def reset_slot(slot: BoundSlot) -> None:
    """Reset a slot to its initial value, so that it holds nothing of earlier steps."""
    if slot.buffer is not None:
        slot.buffer.fill_(slot.initial_value)


def _hook_of(error: BaseException, step: StepRecord | None) -> str | None:
    """Return the hook that raised an error; else the last one of a step, None for an eager step."""
    frames = [frame for each in causes(error) for frame, _ in traceback.walk_tb(each.__traceback__)]
    called = [frame.f_code.co_name for frame in frames if frame.f_code.co_name in _HOOKS]
    if called:
        return called[-1]
    if step is None or step.shape is None:
        return None
    return {
        "prepare": "prepare_replay",
        "metadata": "init_metadata_replay",
        "replay": "init_metadata_replay",
    }.get(step.stage)
