"""The results of a run of the suite, as data: `Report` and its parts.

These models are the format of ``results.json``. Its schema is checked in
(``graphpact_conformance/results.schema.json``). Two runs with the same seed differ only in times, which
`Report.timeless` leaves out.

Does not: run anything, or render a report (see `graphpact_conformance.report`).
"""

import enum
import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from graphpact_conformance.rule import Level
from graphpact_conformance.rules import EVERY_RULE, Evidence
from graphpact_conformance.tier_rules import TierName

SCHEMA_VERSION = 1


class Outcome(enum.StrEnum):
    """The result of one requirement in one lane.

    Attributes:
        PASS: The requirement held in all drawn batches.
        FAIL: It was broken.
        XFAIL: It failed, and the plugin's ``xfails.toml`` lists the failure.
        XPASS: It passed although ``xfails.toml`` lists a failure; this counts as a failure.
        UNSUPPORTED: It needs a capability that the plugin does not declare, or a batch that the runner
            leaves to eager steps.
        NOT_RUN: It needs another machine, or a lane that could not be captured.
        ERROR: The suite itself has a fault, or could not continue.
    """

    PASS = "pass"  # noqa: S105  no secret
    FAIL = "fail"
    XFAIL = "xfail"
    XPASS = "xpass"
    UNSUPPORTED = "unsupported"
    NOT_RUN = "not_run"
    ERROR = "error"

    @property
    def ran(self) -> bool:
        """Whether the requirement was checked."""
        return self not in (Outcome.UNSUPPORTED, Outcome.NOT_RUN)

    @property
    def is_failure(self) -> bool:
        """Whether something must be fixed: the plugin, its ``xfails.toml`` or the suite."""
        return self in (Outcome.FAIL, Outcome.XPASS, Outcome.ERROR)


WORST_FIRST = (
    Outcome.FAIL,
    Outcome.XPASS,
    Outcome.ERROR,
    Outcome.XFAIL,
    Outcome.PASS,
    Outcome.NOT_RUN,
    Outcome.UNSUPPORTED,
)
"""Outcomes from the worst to the best; the worst one stands for several. An error hides no failure."""


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return one outcome for all: the worst that ran, otherwise the worst; unsupported if there are none."""
    return min(outcomes, key=WORST_FIRST.index, default=Outcome.UNSUPPORTED)


class ExitCode(enum.IntEnum):
    """Exit codes of ``graphpact check``.

    Attributes:
        CONFORMANT: No MUST failed, and something passed.
        NOT_CONFORMANT: A MUST failed, or with ``--strict`` something was not shown.
        USAGE: An unknown plugin or option, or a list of known failures that cannot be read.
        SUITE_ERROR: The suite or its environment has a fault, and no MUST failed: no verdict.
        NOTHING_RAN: No verdict either.
    """

    CONFORMANT = 0
    NOT_CONFORMANT = 1
    USAGE = 2
    SUITE_ERROR = 3
    NOTHING_RAN = 5


def _storable(text: str) -> str:
    """Return text without characters that UTF-8 lacks: messages may contain undecodable bytes of a path."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _as_read_back(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as read back from a file: tuples become lists, undecodable characters are replaced."""
    read: dict[str, Any] = json.loads(json.dumps(options, ensure_ascii=False).encode(errors="replace"))
    return read


def _known(rule: str) -> str:
    if rule not in EVERY_RULE:
        raise ValueError(f"unknown rule {rule!r} in this version")
    return rule


Text: TypeAlias = Annotated[str, AfterValidator(_storable)]
Options: TypeAlias = Annotated[
    dict[str, Any],
    AfterValidator(_as_read_back),
    # the default of pydantic 2.11 and later
    WithJsonSchema({"additionalProperties": True, "type": "object"}),
]
RuleId: TypeAlias = Annotated[str, AfterValidator(_known)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, json_schema_serialization_defaults_required=True)


INVARIANT = "this invariant is true after every right fill"
"""What a finding about an invariant of a plan expects."""


class Finding(_Model):
    """One breach of a requirement, and its evidence."""

    rule: RuleId | None = Field(description="Id of the rule, such as GP03; null for findings without a rule.")
    hook: Text | None = Field(description="The hook at fault, where it is known.")
    field: Text | None = Field(description="The field that differs, such as view.req_pool_indices[3:4].")
    expected: Text = Field(description="The expected value or behaviour.")
    actual: Text = Field(description="The actual value or behaviour.")
    batch: Text | None = Field(default=None, description="The smallest failing batch that was found.")
    shape: Text | None = Field(default=None, description="The replayed shape.")
    raised_at: Text | None = Field(
        default=None,
        description="File, line and function of the plugin that raised the error; null if it raised none.",
    )
    experiment: Text | None = Field(default=None, description="The experiment that found it.")
    help: Text | None = Field(default=None, description="How to fix it.")
    reproduce: Text | None = Field(default=None, description="The command that reproduces it.")

    @property
    def evidence(self) -> Evidence:
        """What it says about the fault: hook, field, and where in the step the field is written.

        What the code of a region does comes before all fields, because it decides what is written. An
        invariant that is false is an effect of a field.
        """
        field = self.field or ""
        stage = next((at for at, root in enumerate(("view.", "metadata.")) if field.startswith(root)), 2)
        if stage == 2 and self.hook in ("forward", "compose"):
            stage = 0
        is_exact = bool(self.hook and field) and self.expected != INVARIANT
        is_named = self.hook is not None or field.startswith("slot ")
        return Evidence(0 if is_exact else 1 if is_named else 2, stage)


class Result(_Model):
    """One requirement in one lane of one plugin."""

    rule: RuleId | None = Field(description="Id of the rule; null for results without a rule.")
    check: Text = Field(description="Names of the experiments, or of a general check.")
    lane: Text = Field(
        description="Mode, page size, head layout and dtype; or another name for the checked part."
    )
    outcome: Outcome = Field(description="The result; see Outcome.")
    level: Level = Field(default="MUST", description="The level of the requirement.")
    reason: Text | None = Field(
        default=None,
        description="The reason of the outcome; of a pass, how many steps were declined; of a fail, the error"
        " of the suite in another experiment of the rule.",
    )
    findings: list[Finding] = Field(default_factory=list, description="The evidence of a failure.")
    examples: int = Field(
        default=0,
        description="Number of drawn sequences of batches; of requirements of a contract, of checks.",
    )
    seconds: float = Field(default=0.0, description="Wall time; ignored in comparisons.")

    @property
    def evidence(self) -> Evidence:
        """The best evidence of its findings."""
        return min((finding.evidence for finding in self.findings), default=Evidence())

    @property
    def raised(self) -> bool:
        """Whether one of its findings is an error that the plugin raised."""
        return any(finding.raised_at is not None for finding in self.findings)

    @property
    def breaks_rule(self) -> bool:
        """Whether it is a broken MUST rule, known or not."""
        is_broken = self.outcome in (Outcome.FAIL, Outcome.XFAIL)
        return is_broken and self.rule is not None and EVERY_RULE[self.rule].level == "MUST"

    @property
    def counts_against(self) -> bool:
        """Whether it is a MUST that failed, and is no known failure."""
        level = EVERY_RULE[self.rule].level if self.rule else self.level
        return self.outcome in (Outcome.FAIL, Outcome.XPASS) and level == "MUST"


class Claim(_Model):
    """One capability: its declared value and the result of the run."""

    capability: Text = Field(description="Such as 'mode decode' or 'page size 16'.")
    declared: Literal["unknown", "unsupported", "not_implemented", "since", "full"] = Field(
        description="The declared value."
    )
    since: Text | None = Field(default=None, description="The version, where declared is 'since'.")
    shown: Literal["pass", "fail", "not_run"] = Field(description="The result of its lanes.")
    hint: Text | None = Field(default=None, description="Advice to declare it, where it works.")

    @property
    def is_made(self) -> bool:
        """Whether the plugin declares the capability."""
        return self.declared in ("since", "full")

    @property
    def disagrees(self) -> bool:
        """Whether the declared value and the result contradict each other."""
        return self.shown == ("fail" if self.is_made else "pass")


class TierRuleResult(_Model):
    """What a plugin states of one rule of the tiers, and whether it holds."""

    rule: Text = Field(description="Name of the rule, such as gpu-run.")
    tier: TierName = Field(description="Its tier.")
    status: Literal["done", "exempt", "to do"] = Field(description="What graphpact.toml says of it.")
    text: Text | None = Field(default=None, description="The reason of an exemption, or the file of a proof.")
    wrong: Text | None = Field(default=None, description="Why what is stated as done is not.")
    unjudged: bool = Field(default=False, description="Whether only a whole run could judge it.")

    @property
    def holds(self) -> bool:
        """Whether it is exempt, or done and not found wrong."""
        return self.status != "to do" and self.wrong is None


class TierVerdict(_Model):
    """The tier of a plugin, by its ``graphpact.toml`` and this run."""

    tier: TierName | None = Field(description="The tier; null below bronze.")
    rules: list[TierRuleResult] = Field(description="Every rule that concerns the plugin.")

    @property
    def unjudged(self) -> list[TierRuleResult]:
        """The rules that only a whole run could judge."""
        return [rule for rule in self.rules if rule.unjudged]


class PluginResults(_Model):
    """All results of one plugin, alone or with a partner."""

    kind: Text = Field(description="The kind of the plugin, such as attention_backend or runner.")
    name: Text = Field(description="Its entry-point name.")
    distribution: Text = Field(description="The distribution that offers it.")
    version: Text = Field(description="The version of that distribution.")
    contract: Text | None = Field(description="Contract version that its distribution declares.")
    partner: Text | None = Field(default=None, description="Runner that a backend was paired with.")
    drivers: list[Text] = Field(default_factory=list, description="Drivers that were exercised.")
    provider: Text | None = Field(default=None, description="Kernel provider that was exercised.")
    device: Text = Field(default="cpu", description="Device of the lanes.")
    claims: list[Claim] = Field(default_factory=list, description="Its capabilities; of backends.")
    hints: list[Text] = Field(default_factory=list, description="Undeclared capabilities that work.")
    not_shown: list[Text] = Field(
        default_factory=list,
        description="Parts that this machine could not exercise, with the reason.",
    )
    drawn: dict[str, list[Text]] = Field(
        default_factory=dict,
        description="The values that the lanes had, by dimension, and the experiments that ran.",
    )
    traits: list[Text] = Field(
        default_factory=list,
        description="Facts of its class that the rules of the tiers ask for; of backends.",
    )
    tier: TierVerdict | None = Field(
        default=None, description="Its tier; null if its package has no graphpact.toml that names it."
    )
    results: list[Result] = Field(default_factory=list, description="Its results, lane by lane.")

    @property
    def label(self) -> str:
        """Its name in reports."""
        return self.name if self.partner is None else f"{self.name} + {self.partner}"

    @property
    def is_conformant(self) -> bool:
        """Whether no MUST failed, at least one requirement passed, and the suite had no error."""
        outcomes = {result.outcome for result in self.results}
        is_whole = Outcome.PASS in outcomes and Outcome.ERROR not in outcomes
        return is_whole and not any(result.counts_against for result in self.results)

    @property
    def shortfalls(self) -> list[str]:
        """The missing parts of a strict pass, besides failed MUSTs; one phrase per kind."""
        not_run = self._rules_with(lambda result: result.outcome is Outcome.NOT_RUN)
        should = self._rules_with(lambda result: result.outcome.is_failure and not result.counts_against)
        claims = [c.capability for c in self.claims if c.is_made and c.shown != "pass"]
        phrases = []
        if not_run:
            phrases.append(f"a run of {', '.join(not_run)} in every lane")
        if should:
            phrases.append(f"the SHOULD of {', '.join(should)}")
        if claims:
            phrases.append(f"proof of {', '.join(claims)}")
        if self.hints:
            number = len(self.hints)
            phrases.append(f"an answer to {number} hint{'' if number == 1 else 's'}")
        return phrases

    def _rules_with(self, holds: Callable[[Result], bool]) -> list[str]:
        return list(dict.fromkeys(r.rule or r.check for r in self.results if holds(r)))


class Environment(_Model):
    """The environment of a run."""

    graphpact: Text = Field(description="Version of graphpact.")
    python: Text = Field(description="Version of Python.")
    torch: Text = Field(description="Version of torch.")
    platform: Text = Field(description="Operating system and architecture.")
    device: Text = Field(description="Device of the run.")
    device_name: Text | None = Field(default=None, description="Name of the GPU.")
    ranks: int | None = Field(
        default=None,
        description="Processes that stepped together, by gloo; null if ranks were only simulated.",
    )


class Report(_Model):
    """One run of the suite."""

    schema_version: Literal[1] = Field(default=1, description="Version of this format.")
    environment: Environment = Field(description="Versions and device of the run.")
    seed: int = Field(description="Seed of all random batches.")
    examples: int = Field(description="Sequences of batches for each experiment and lane.")
    options: Options = Field(default_factory=dict, description="The options of the run.")
    experiments: dict[Text, Text] = Field(
        default_factory=dict, description="What each experiment does, by its name."
    )
    started: Text = Field(description="ISO 8601; ignored in comparisons.")
    seconds: float = Field(description="Wall time; ignored in comparisons.")
    plugins: list[PluginResults] = Field(description="The results of each plugin and pair.")

    @property
    def strict(self) -> bool:
        """Whether the run is strict: requirements that were not shown count as failures."""
        return bool(self.options.get("strict"))

    @property
    def shows_all(self) -> bool:
        """Whether all findings were asked for."""
        return bool(self.options.get("all_findings"))

    @property
    def legend(self) -> dict[str, str]:
        """What the experiments with findings do, by name, in the order of the suite."""
        found = {f.experiment for p in self.plugins for r in p.results for f in r.findings}
        return {name: text for name, text in self.experiments.items() if name in found}

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of the command."""
        results = [result for plugin in self.plugins for result in plugin.results]
        if any(result.counts_against for result in results):
            return ExitCode.NOT_CONFORMANT
        if any(result.outcome is Outcome.ERROR for result in results):
            return ExitCode.SUITE_ERROR
        if not any(result.outcome.ran for result in results):
            return ExitCode.NOTHING_RAN
        if self.strict and any(plugin.shortfalls for plugin in self.plugins):
            return ExitCode.NOT_CONFORMANT
        return ExitCode.CONFORMANT

    @property
    def counts(self) -> Counter[Outcome]:
        """Number of results of each outcome."""
        return Counter(result.outcome for plugin in self.plugins for result in plugin.results)

    def timeless(self) -> dict[str, Any]:
        """Return the report without times, ready for JSON: equal for two runs with the same seed."""
        dumped = self.model_dump(mode="json", exclude={"started", "seconds"})
        for plugin in dumped["plugins"]:
            for result in plugin["results"]:
                del result["seconds"]
        return dumped
