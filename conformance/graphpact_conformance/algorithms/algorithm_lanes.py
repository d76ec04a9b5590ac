"""The lanes of a speculation algorithm: chains and trees of several sizes.

Does not: define requirements; see `graphpact_conformance.algorithms.drafting`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from graphpact.attention import DraftLimits
from graphpact.errors import ConfigError
from graphpact.plugins import PluginCatalog
from graphpact.runners import GraphRunner
from graphpact.speculation import SpeculationAlgorithm
from graphpact_conformance.algorithms.decoding import Decoding, DecodingSetup
from graphpact_conformance.algorithms.drafting import CHECKS, DraftedDecoding
from graphpact_conformance.contracts.examine import Contract, ContractLane, Unchecked
from graphpact_conformance.contracts.requirement import Requirement
from graphpact_conformance.results import Outcome
from graphpact_conformance.targets import Options, Size

_QUICK = (DraftLimits(3, 1, 4), DraftLimits(3, 2, 6))
_NORMAL = (*_QUICK, DraftLimits(1, 1, 2))
_DRAFTS: dict[Size, tuple[DraftLimits, ...]] = {
    "quick": _QUICK,
    "normal": _NORMAL,
    "thorough": (
        *_NORMAL,
        DraftLimits(2, 3, 5),
        DraftLimits(4, 1, 3),
        DraftLimits(6, 1, 7),
        DraftLimits(4, 4, 12),
    ),
}
"""The sizes of drafts, by the size of a run, the plain one first."""


def installed_runners() -> dict[str, type[GraphRunner]]:
    """Return the classes of the installed runners by name; those that cannot be loaded are left out."""
    catalog = PluginCatalog.scan()
    found = {}
    for info in catalog.infos("runner"):
        try:
            found[info.name] = catalog.select("runner", info.name)
        except Exception:  # noqa: BLE001, S112  a requirement says which runner of a lane is missing
            continue
    return found


@dataclass(frozen=True, slots=True)
class AlgorithmLane(ContractLane[DraftedDecoding]):
    """One size of drafts.

    Args:
        algorithm: The class of the algorithm.
        draft: Steps, branches and verified tokens.
        is_plain: Whether it has as many random models as the run has examples; others have half.
        runners: The classes of runners by name; those that are installed by default.
        device: The device that was asked for.
    """

    algorithm: type[SpeculationAlgorithm]
    draft: DraftLimits
    is_plain: bool = True
    runners: Mapping[str, type[GraphRunner]] = field(
        default_factory=installed_runners, repr=False, compare=False
    )
    device: torch.device = torch.device("cpu")  # noqa: RUF009  a constant

    def __str__(self) -> str:
        kind = "chain" if self.draft.topk == 1 else f"tree-topk{self.draft.topk}"
        return f"{kind}-steps{self.draft.num_steps}-tokens{self.draft.num_draft_tokens}"

    def requirements(self) -> list[Requirement[DraftedDecoding]]:
        """Return all requirements."""
        return [*CHECKS.values()]

    def subject(self, options: Options) -> DraftedDecoding:
        """Return engines for one requirement."""
        examples = options.examples if self.is_plain else max(options.examples // 2, 1)
        return DraftedDecoding(self._setup(options.seed), examples)

    def unavailable(self) -> Unchecked | None:
        """Return why the algorithm or a runner of its lanes refuses this size; None if none does."""
        try:
            Decoding(self._setup(0))
        except ConfigError as error:
            return Unchecked(Outcome.UNSUPPORTED, error.message)
        except Exception:  # noqa: BLE001  the requirements report it
            return None
        return None

    def leaves_out(self, check: Requirement[DraftedDecoding]) -> Unchecked | None:
        """Return why a requirement does not concern the algorithm."""
        if check.rule == "SP12" and all(role.model == "target" for role in self.algorithm.lanes.values()):
            return Unchecked(Outcome.UNSUPPORTED, "it has no lane of a draft model")
        return None

    def _setup(self, seed: int) -> DecodingSetup:
        return DecodingSetup(self.algorithm, self.runners, self.draft, seed=seed)


def _lanes(algorithm: type[SpeculationAlgorithm], options: Options) -> list[AlgorithmLane]:
    runners = installed_runners()
    drafts = _DRAFTS[options.size]
    device = torch.device(options.device)
    return [AlgorithmLane(algorithm, draft, draft is drafts[0], runners, device) for draft in drafts]


def _not_shown(_: type[SpeculationAlgorithm]) -> list[str]:
    return [
        "graphs of the lanes: check the runners by their own names, in a run of runner:NAME",
        "sampled tokens: verification here is greedy; an algorithm sees no difference",
    ]


OF_ALGORITHMS = Contract(_lanes, _not_shown)
"""The contract of speculation algorithms."""
