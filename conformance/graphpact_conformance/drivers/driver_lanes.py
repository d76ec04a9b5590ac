"""The lanes of a graph driver: ``fast`` and, if the driver claims a strict mode, ``strict``.

The promises of the driver contract are requirements of both lanes, the acts only of ``strict``.

Does not: define requirements, or run them; see `graphpact_conformance.contracts.examine`.
"""

import gc
from dataclasses import dataclass

import torch

from graphpact.graphs import GraphDriver
from graphpact_conformance.contracts.examine import Contract, ContractLane, Unchecked
from graphpact_conformance.drivers import promises, strictness
from graphpact_conformance.drivers.acts import ACTS
from graphpact_conformance.drivers.driver_requirement import DriverRequirement, Make
from graphpact_conformance.results import Outcome
from graphpact_conformance.targets import Options

FAST, STRICT = "fast", "strict"
"""The lanes of a driver."""


@dataclass(frozen=True, slots=True)
class DriverLane(ContractLane[Make]):
    """One mode of one driver.

    Args:
        driver: The driver.
        is_strict: Whether the driver is created with ``strict=True``.
        device: The device on which it records.
    """

    runs_on = frozenset({"cpu", "cuda"})

    driver: type[GraphDriver]
    is_strict: bool
    device: torch.device = torch.device("cpu")  # noqa: RUF009  a constant

    def __str__(self) -> str:
        return STRICT if self.is_strict else FAST

    def make(self) -> GraphDriver:
        """Return a new driver."""
        return self.driver(self.device, strict=True) if self.is_strict else self.driver(self.device)

    def subject(self, options: Options) -> Make:
        """Return the function that makes a driver."""
        del options
        return self.make

    def requirements(self) -> list[DriverRequirement]:
        """Return the promises, and the acts of a strict driver."""
        return [*promises.CHECKS.values(), *(strictness.CHECKS.values() if self.is_strict else ())]

    def unavailable(self) -> Unchecked | None:
        """Return why the driver is unavailable on the device.

        Also returns None if ``unavailable`` of the driver raises, because a promise checks that.
        """
        try:
            reason = self.driver.unavailable(self.device)
        except Exception:  # noqa: BLE001  the promise reports it
            return None
        return None if reason is None else Unchecked(Outcome.NOT_RUN, reason)

    def leaves_out(self, check: DriverRequirement) -> Unchecked | None:
        """Return why a check cannot run on the device of this lane, or None."""
        if self.device.type != "cpu" and check.name in ACTS and not ACTS[check.name].gpu:
            reason = f"on {self.device.type} it is not safe, or its outcome is not defined"
            return Unchecked(Outcome.NOT_RUN, reason)
        return None

    def recover(self) -> None:
        """Enable the garbage collector, and end a capture that did not end."""
        gc.enable()
        GraphDriver._capturing, GraphDriver._calling = None, False  # noqa: SLF001


def _lanes(driver: type[GraphDriver], options: Options) -> list[DriverLane]:
    device = torch.device(options.device)
    modes = (False, True) if driver.has_strict_mode else (False,)
    return [DriverLane(driver, is_strict, device) for is_strict in modes]


def _not_shown(driver: type[GraphDriver]) -> list[str]:
    """Return one line with the number of acts that only the CUDA runtime can perform."""
    rows = strictness.ROWS.keys() - strictness.CHECKS.keys()
    return [f"{len(rows)} acts: they need the CUDA runtime"] if driver.has_strict_mode else []


OF_DRIVERS = Contract(_lanes, _not_shown, lambda name: [name])
"""The contract of graph drivers. `size` and `examples` of a run have no effect: drivers get no batches."""
