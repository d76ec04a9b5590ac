"""The lanes of an observer: the kinds of steps around which it is checked.

Does not: define requirements; see `graphpact_conformance.observers.observing`.
"""

import gc
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.batch import ForwardMode
from graphpact.graphs import GraphDriver
from graphpact_conformance.contracts.examine import Contract, ContractLane
from graphpact_conformance.contracts.requirement import Requirement
from graphpact_conformance.observers.observed import ObservedLanes, observed_config
from graphpact_conformance.observers.observing import CHECKS
from graphpact_conformance.targets import Options, Size

_MODES: dict[Size, tuple[ForwardMode, ...]] = {
    "quick": (ForwardMode.DECODE,),
    "normal": (ForwardMode.DECODE, ForwardMode.EXTEND),
    "thorough": (
        ForwardMode.DECODE,
        ForwardMode.EXTEND,
        ForwardMode.TARGET_VERIFY,
        ForwardMode.DRAFT_DECODE,
        ForwardMode.DRAFT_EXTEND,
    ),
}
"""The kinds of steps of a run, by its size."""


@dataclass(frozen=True, slots=True)
class ObserverLane(ContractLane[ObservedLanes]):
    """The steps of one mode.

    Args:
        observer: The class of the observer.
        mode: The mode.
        device: The device that was asked for.
    """

    observer: type[Any]
    mode: ForwardMode
    device: torch.device = torch.device("cpu")  # noqa: RUF009  a constant

    def __str__(self) -> str:
        return self.mode.value

    def requirements(self) -> list[Requirement[ObservedLanes]]:
        """Return all requirements."""
        return [*CHECKS.values()]

    def subject(self, options: Options) -> ObservedLanes:
        """Return new lanes for one requirement."""
        return ObservedLanes(self.observer, observed_config(self.mode), options.seed, options.examples)

    def recover(self) -> None:
        """Enable the garbage collector, and end a capture that did not end."""
        gc.enable()
        GraphDriver._capturing, GraphDriver._calling = None, False  # noqa: SLF001


def _lanes(observer: type[Any], options: Options) -> list[ObserverLane]:
    device = torch.device(options.device)
    return [ObserverLane(observer, mode, device) for mode in _MODES[options.size]]


def _not_shown(_: type[Any]) -> list[str]:
    return [
        "what the observer prints, measures or sends: the suite sees what it does to steps",
        "calls from several threads: the contract has one thread for each engine",
    ]


OF_OBSERVERS = Contract(_lanes, _not_shown, lambda _: ["tape"])
"""The contract of observers."""
