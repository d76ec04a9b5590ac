"""`Guard`: holds every replay of an engine's graphs to what their captures read.

An integration calls `capturing` where the engine captures, `prepared` where it makes metadata for a replay,
and `replaying` before a replay. One guard serves a process.

Does not: know an engine.
"""

import contextlib
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.errors import ContractError
from graphpact_guard.contents import Expected, compare_outputs
from graphpact_guard.faults import FaultLog, GraphKey, ReplayFault
from graphpact_guard.reads import ReadWatch
from graphpact_guard.recording import StepRecording
from graphpact_guard.records import CapturedPart, GraphRecord
from graphpact_guard.settings import Settings

logger = logging.getLogger("graphpact.guard")


class GuardError(ContractError):
    """A replay disagrees with its capture, and ``raise`` was asked for, or ranks disagree on their graphs."""


@dataclass(slots=True)
class SyntheticSteps:
    """Synthetic steps before an engine serves.

    Args:
        shapes: How many captured shapes had them.
    """

    shapes: int = 0


class Guard:
    """The guard of one process.

    Args:
        settings: What is asked for.
        provenance: What runs here, by name, for reports.
        metadata: Names of the owners' attributes that hold metadata of a step.
        limits: Names of fields whose number may be smaller at replay than at capture.
        unseen: What this guard cannot see in this engine, for the announcement.
        rank: The name of this process if there are several, such as ``tp1``.

    Attributes:
        rank: It.
        recording: The recorded steps; None if none are asked for. An integration gives it each step.

    Raises:
        UsageError: Steps cannot be recorded; see `StepRecording`.
    """

    def __init__(
        self,
        settings: Settings,
        provenance: Mapping[str, str],
        *,
        metadata: Collection[str] = (),
        limits: Collection[str] = (),
        unseen: str = "",
        rank: str = "",
    ) -> None:
        self.settings, self.rank = settings, rank
        self.log = FaultLog(settings.ignore, provenance)
        self.records: dict[GraphKey, GraphRecord] = {}
        self.refused: set[GraphKey] = set()
        self.recording = None if settings.record is None else StepRecording(settings.record, rank)
        self._metadata, self._limits, self._unseen = metadata, limits, unseen
        self._prepared: dict[str, object] = {}
        self._passed: dict[str, object] = {}
        self._watch: ReadWatch | None = None

    # -- capture ---------------------------------------------------------------------------------

    @contextlib.contextmanager
    def capturing(
        self,
        key: GraphKey,
        owners: Mapping[str, object],
        inputs: Mapping[str, object],
        *,
        in_segments: bool = False,
    ) -> Iterator[None]:
        """Watch the capture of a graph.

        Args:
            key: The graph.
            owners: The objects that make and hold metadata, by name: what the capture reads of them is
                promised.
            inputs: Objects with static inputs, by name: everything in them is promised.
            in_segments: Whether `watch_reads` will say where the recorded segments begin and end.
        """
        if not self.records:
            self._announce()
        self._watch = ReadWatch(owners, follow=self._metadata)
        self._watch.is_paused = in_segments
        try:
            with self._watch.watching():
                yield
        finally:
            read, self._watch = self._watch.paths, None
        parts = [self._part(key, name, "", value, None) for name, value in inputs.items()]
        for owner, value in owners.items():
            for name in self._metadata:
                held = getattr(value, name, None)
                if held is not None:
                    parts.append(self._part(key, owner, name, held, read))
            parts.append(self._part(key, owner, "", value, _tensors(owner, value, read, self._metadata)))
        self.records[key] = GraphRecord(key, [part for part in parts if part.has_promises])

    @property
    def is_capturing(self) -> bool:
        """Whether a graph is captured now, warm-ups included."""
        return self._watch is not None

    def _part(
        self, key: GraphKey, owner: str, name: str, value: object, only: Collection[str] | None
    ) -> CapturedPart:
        return CapturedPart.of(key, owner, name, value, only=only, limits=self._limits)

    def watch_reads(self, *, watching: bool) -> None:
        """Begin or stop to note what the current capture reads.

        Warm-ups and eager calls of the region are not part of the graph. A capture begins with noting, unless
        it is said to be in segments.
        """
        if self._watch is not None:
            self._watch.is_paused = not watching

    def _announce(self) -> None:
        asked = [f"contents in every {self.settings.contents}th replay"] if self.settings.contents else []
        asked += [f"an eager run of every {self.settings.verify}th replay"] if self.settings.verify else []
        asked += [f"{self.settings.start} steps of each shape before serving"] if self.settings.start else []
        unseen = f"; not seen: {self._unseen}" if self._unseen else ""
        logger.warning(
            "graphpact guard: on%s; every replay is held to its pact%s%s",
            self.rank and f" for {self.rank}",
            "".join(f", {text}" for text in asked),
            unseen,
        )

    @contextlib.contextmanager
    def starting(self) -> Iterator[SyntheticSteps]:
        """Verify every replay in the context: synthetic steps, before the engine serves.

        Contents are checked too, unless they are never checked. Counts begin anew after the context. What was
        done is written to the log; the context says of how many shapes.
        """
        self.log.is_starting, steps, begun = True, SyntheticSteps(), time.perf_counter()
        try:
            yield steps
        finally:
            self.log.is_starting = False
            for record in self.records.values():
                record.end_start()
        logger.warning(
            "graphpact guard: %d steps of %d shapes before serving: %d faults, %d graphs refused, %.1f s",
            self.settings.start,
            steps.shapes,
            len(self.log.faults),
            len(self.refused),
            time.perf_counter() - begun,
        )

    # -- replay ----------------------------------------------------------------------------------

    def prepared(self, owner: str, metadata: object, name: str | None = None) -> None:
        """Note the metadata that ``owner`` made for the next replay, if it made a new object; None if not.

        Args:
            owner: Whose metadata it is.
            metadata: The new object, or None.
            name: Its attribute, which an owner with several of them needs.
        """
        path = owner if name is None else f"{owner}.{name}"
        if metadata is not None:
            self._prepared[path] = metadata
        else:
            self._prepared.pop(path, None)

    def passed(self, name: str, inputs: object) -> None:
        """Note static inputs that the engine passes anew in the next replay, by the name of the capture's."""
        self._passed[name] = inputs

    def replaying(self, key: GraphKey) -> None:
        """Check the replay of ``key`` that follows.

        Raises:
            GuardError: It disagrees with its capture, and ``raise`` was asked for.
        """
        record = self.records.get(key)
        prepared, self._prepared = self._prepared, {}
        passed, self._passed = self._passed, {}
        if record is None:  # captured before the guard was there
            return
        record.replays += 1
        for fault in record.faults(prepared, passed):
            self.report(fault)

    def is_contents_due(self, key: GraphKey, *, ahead: bool = False) -> bool:
        """Return whether contents are checked before a replay of ``key``: the first and every N-th.

        Args:
            key: The graph.
            ahead: Whether the replay is the one of the next call of `replaying`, instead of the last.
        """
        every = self.settings.contents
        return self._is_due(key, min(every, 1) if self.log.is_starting else every, ahead=ahead)

    def check_contents(self, key: GraphKey, expected: Iterable[Expected]) -> None:
        """Check what the graph reads.

        Raises:
            GuardError: See `replaying`.
        """
        record = self.records[key]
        record.contents += 1
        self.report(*(fault for each in expected if (fault := each.fault(key)) is not None))

    def check_invariants(self, key: GraphKey, owner: str, invariants: Mapping[str, bool]) -> None:
        """Report the invariants that ``owner`` declares of its plan and that do not hold.

        Args:
            key: The graph that is replayed.
            owner: Who declares them.
            invariants: Whether each holds, by name.

        Raises:
            GuardError: See `replaying`.
        """
        self.report(
            *(
                ReplayFault(
                    rule="GP09",
                    owner=owner,
                    field=name,
                    key=key,
                    text="this invariant of the plan does not hold",
                    advice="renew the plan in every replay: the graph runs what it says",
                )
                for name, holds in invariants.items()
                if not holds
            )
        )

    def is_verify_due(self, key: GraphKey) -> bool:
        """Return whether the last replay of ``key`` is compared eagerly: the first and every N-th."""
        return self._is_due(key, 1 if self.log.is_starting else self.settings.verify)

    def verify(
        self, key: GraphKey, replayed: Mapping[str, torch.Tensor], eager: Mapping[str, torch.Tensor]
    ) -> None:
        """Compare the outputs of a replay with those of an eager run of the same batch.

        Raises:
            GuardError: See `replaying`.
        """
        self.records[key].verified += 1
        self.report(*compare_outputs(key, replayed, eager))

    def _is_due(self, key: GraphKey, every: int, *, ahead: bool = False) -> bool:
        record = self.records.get(key)
        return record is not None and every > 0 and (record.replays - 1 + ahead) % every == 0

    def report(self, *faults: ReplayFault) -> None:
        """Report faults, and do what was asked for.

        Raises:
            GuardError: ``raise`` was asked for.
        """
        counted = [fault for fault in faults if self.log.report(fault)]
        if not counted:
            return
        if self.settings.on_fault == "raise":
            raise _error_of(counted[0])
        if self.settings.on_fault == "eager":
            self.refused |= {fault.key for fault in counted}

    def end(self, fault: ReplayFault) -> None:
        """Report a fault after which the step cannot go on, whatever was asked for.

        Raises:
            GuardError: The fault is not ignored.
        """
        if self.log.report(fault):
            raise _error_of(fault)

    # -- state -----------------------------------------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return the state of the guard, ready for JSON."""
        graphs = {
            str(key): {
                "replays": r.replays,
                "contents": r.contents,
                "verified": r.verified,
                "started": r.started,
            }
            for key, r in self.records.items()
        }
        return {
            "graphs": graphs,
            "refused": sorted(map(str, self.refused)),
            "recorded": None if self.recording is None else self.recording.summary(),
            **self.log.summary(),
        }


def _error_of(fault: ReplayFault) -> GuardError:
    where = f"{fault.owner}.{fault.field} in {fault.key}"
    return GuardError(f"{where}: {fault.text}", hint=fault.advice, rule=fault.rule)


def _tensors(owner: str, value: object, read: Collection[str], metadata: Collection[str]) -> set[str]:
    """Return the paths of an owner's own tensors that were read. Its other attributes are its own affair."""
    held = {f"{owner}.{name}" for name in metadata}
    return {
        path
        for path in read
        if path not in held and isinstance(getattr(value, path.removeprefix(f"{owner}."), None), torch.Tensor)
    }
