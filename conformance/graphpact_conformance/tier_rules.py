"""`TIER_RULES`: the rules of the tiers bronze, silver and gold.

A plugin has a tier if each rule of it, and of the tiers below, is done or exempt with a reason. No rule of
gold concerns observers and speculation algorithms, which reach silver.

Does not: verify a rule; `graphpact_conformance.tiers.proofs` does.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

TierName: TypeAlias = Literal["bronze", "silver", "gold"]
TIERS: tuple[TierName, ...] = get_args(TierName)
"""The tiers of plugins, from the lowest."""


@dataclass(frozen=True, slots=True)
class TierRule:
    """One rule.

    Args:
        name: Its key in ``graphpact.toml``.
        tier: Its tier.
        sentence: The requirement.
        why: The reason for it.
        kinds: The kinds of plugins that it concerns; empty for all.
        takes: The file that ``done`` names as its proof; None if it needs none.
        exempt: Whether a plugin may be exempt from it.
    """

    name: str
    tier: TierName
    sentence: str
    why: str
    kinds: frozenset[str] = frozenset()
    takes: str | None = None
    exempt: bool = True

    @property
    def text(self) -> str:
        """The requirement, its reason, and the file that proves it."""
        proof = f" Its proof is a file: {self.takes}." if self.takes else ""
        return f"{self.sentence} {self.why}{proof}"

    def concerns(self, kind: str) -> bool:
        """Whether plugins of a kind have to state it."""
        return not self.kinds or kind in self.kinds


_BACKENDS = frozenset({"attention_backend"})
_ON_DEVICES = frozenset({"attention_backend", "runner", "graph_driver"})
_IN_STEPS = frozenset({"attention_backend", "runner", "adapter"})

TIER_RULES: dict[str, TierRule] = {
    rule.name: rule
    for rule in (
        TierRule(
            "declared",
            "bronze",
            "Its distribution declares the contract version, and bounds the graphpact that it requires.",
            "A later core can then refuse it with the reason, and pip does not install one that it was not"
            " written for.",
            exempt=False,
        ),
        TierRule(
            "licensed",
            "bronze",
            "Its distribution has a licence and a README.",
            "Without a licence its users may not use it.",
            exempt=False,
        ),
        TierRule(
            "conformant",
            "bronze",
            "No MUST fails in a whole run of the suite, and something passes.",
            "This is what graphpact is for.",
            exempt=False,
        ),
        TierRule(
            "documented",
            "silver",
            "Its README names it, and public modules, classes and functions of its package have docstrings.",
            "Users choose it by its name, and read what it needs.",
        ),
        TierRule(
            "known-failures",
            "silver",
            "Each entry of xfails.toml names an issue; without entries it is done.",
            "A known failure that nobody works on is a failure.",
        ),
        TierRule(
            "proven",
            "silver",
            "Each capability that it declares has a lane of the run in which nothing failed.",
            "An engine selects it by what it declares.",
            _BACKENDS,
        ),
        TierRule(
            "one-body",
            "silver",
            "Captures and replays fill metadata by one body; for two bodies, the exemption says why.",
            "Two bodies can disagree, and every engine has had bugs of this kind.",
            _BACKENDS,
        ),
        TierRule(
            "plan-invariants",
            "silver",
            "What holds of its plan in every step is declared in `plan_invariants`, if it has a plan.",
            "A kernel's plan is opaque: no comparison of tensors shows that it belongs to this step.",
            _BACKENDS,
        ),
        TierRule(
            "gpu-run",
            "gold",
            "A report of the suite on a GPU is in its package, without a failure, for this contract.",
            "A CPU runs other kernels, and no side streams.",
            _ON_DEVICES,
            takes="results.json of `graphpact check NAME --device cuda --report DIR`",
        ),
        TierRule(
            "recordings",
            "gold",
            "A recording of an engine's steps is in its package, as an input of its tests.",
            "Drawn batches do not have the lengths and the order of real ones.",
            _IN_STEPS,
            takes="the file of `graphpact generate --record FILE`, or of the guard's word record:FILE",
        ),
        TierRule(
            "guarded",
            "gold",
            "A report of an engine that served with it under the guard is in its package: replays, no fault.",
            "The suite drives hooks. Only an engine shows that it calls them as the suite does.",
            _IN_STEPS,
            takes="the file of `graphpact sglang run --report FILE` or `graphpact vllm run --report FILE`",
        ),
    )
}
"""The rules by name, from the lowest tier."""
