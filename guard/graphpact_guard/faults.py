"""`ReplayFault` and `FaultLog`: what the guard found, each fault reported once and then counted.

Does not: find faults, or decide what follows one.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from graphpact.engines import GraphFault
from graphpact_guard.settings import Ignored

logger = logging.getLogger("graphpact.guard")


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphKey:
    """A graph of an engine.

    Args:
        runner: What captured it, such as ``DecodeCudaGraphRunner``.
        shape: Its key there, such as ``8``.
    """

    runner: str
    shape: str

    def __str__(self) -> str:
        return f"{self.runner}[{self.shape}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayFault:
    """A disagreement between a capture and a replay.

    Args:
        rule: The id of the broken rule, such as ``GP01``; see `graphpact explain`.
        owner: Whose field it is, such as the class of an attention backend.
        field: The field, such as ``forward_metadata.kv_indptr``.
        key: The graph.
        text: What was captured and what is there now.
        advice: What to do.
    """

    rule: str
    owner: str
    field: str
    key: GraphKey
    text: str
    advice: str

    @property
    def identity(self) -> tuple[str, str, str, GraphKey]:
        """What makes two faults the same one."""
        return self.rule, self.owner, self.field, self.key

    def __str__(self) -> str:
        return f"{self.rule} {self.owner}.{self.field} in {self.key}: {self.text}\n  help: {self.advice}"


class FaultLog:
    """The faults of one process.

    Args:
        ignored: Faults that are not reported, but counted.
        provenance: What runs here, such as the versions of engine and model, by name. It is a part of each
            report.

    Attributes:
        is_starting: Whether faults are those of synthetic steps, before the engine serves.
    """

    def __init__(self, ignored: tuple[Ignored, ...], provenance: Mapping[str, str]) -> None:
        self.faults: dict[tuple[str, str, str, GraphKey], ReplayFault] = {}
        self.counts: Counter[tuple[str, str, str, GraphKey]] = Counter()
        self.num_ignored = 0
        self.is_starting = False
        self._of_start: set[tuple[str, str, str, GraphKey]] = set()
        self._ignored = ignored
        self._provenance = dict(provenance)

    def report(self, fault: ReplayFault) -> bool:
        """Count a fault, and write it to the log if it is new; return whether it counts as one."""
        path = f"{fault.owner}.{fault.field}"
        if any(each.covers(fault.rule, path) for each in self._ignored):
            self.num_ignored += 1
            return False
        self.counts[fault.identity] += 1
        if self.counts[fault.identity] == 1:
            self.faults[fault.identity] = fault
            where = ", ".join(f"{name} {value}" for name, value in self._provenance.items())
            if self.is_starting:
                self._of_start.add(fault.identity)
                where += ", before serving"
            logger.error("graphpact guard: %s\n  (%s)", fault, where)
        return True

    def found(self) -> list[GraphFault]:
        """Return each fault once, in the order of its discovery, for an engine under generated load."""
        return [
            GraphFault(
                rule=fault.rule, field=f"{fault.owner}.{fault.field}", graph=str(fault.key), text=fault.text
            )
            for fault in self.faults.values()
        ]

    def summary(self) -> dict[str, Any]:
        """Return the faults and their counts, ready for JSON."""
        return {
            "provenance": self._provenance,
            "ignored": self.num_ignored,
            "faults": [
                {
                    "rule": fault.rule,
                    "owner": fault.owner,
                    "field": fault.field,
                    "graph": str(fault.key),
                    "text": fault.text,
                    "count": self.counts[identity],
                    "at_start": identity in self._of_start,
                }
                for identity, fault in self.faults.items()
            ],
        }
