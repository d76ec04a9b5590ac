"""What a run of the suite found, as data: `Report`, and what it is made of.

These models are the format of ``results.json``; its schema is checked in
(``graphpact/conformance/results.schema.json``). Two runs with one seed differ in times alone, which
`Report.timeless` leaves out.

Does not: run anything, or draw a report (`graphpact_conformance.report` does).
"""

import enum
import json
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from graphpact_conformance.rules import RULES, Level

SCHEMA_VERSION = 1


class Outcome(enum.StrEnum):
    """How one requirement came out in one lane."""

    PASS = "pass"  # noqa: S105  no secret
    FAIL = "fail"
    XFAIL = "xfail"
    """It failed, as the plugin's ``xfails.toml`` says it does."""
    XPASS = "xpass"
    """It passed, against what ``xfails.toml`` says: strict, so no pass."""
    UNSUPPORTED = "unsupported"
    """The plugin does not declare what it would need."""
    NOT_RUN = "not_run"
    """It needs a machine that this is not, or a lane that could not be captured."""
    ERROR = "error"
    """The suite itself is at fault, or could not go on."""

    @property
    def ran(self) -> bool:
        """Whether the requirement was put to the plugin at all."""
        return self not in (Outcome.UNSUPPORTED, Outcome.NOT_RUN)

    @property
    def is_failure(self) -> bool:
        """Whether something has to be mended: the plugin, its ``xfails.toml`` or the suite."""
        return self in (Outcome.FAIL, Outcome.XPASS, Outcome.ERROR)


WORST_FIRST = (
    Outcome.ERROR,
    Outcome.FAIL,
    Outcome.XPASS,
    Outcome.XFAIL,
    Outcome.PASS,
    Outcome.NOT_RUN,
    Outcome.UNSUPPORTED,
)
"""Outcomes in the order in which one of them stands for several."""


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the outcome that stands for all: the worst that ran, if one did; unsupported where none is."""
    return min(outcomes, key=WORST_FIRST.index, default=Outcome.UNSUPPORTED)


class ExitCode(enum.IntEnum):
    """What ``graphpact check`` ends with."""

    CONFORMANT = 0
    NOT_CONFORMANT = 1
    USAGE = 2
    SUITE_ERROR = 3
    NOTHING_RAN = 5


def _storable(text: str) -> str:
    """Spell out what UTF-8 lacks: messages of plugins may hold undecodable bytes of a path."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _as_read_back(options: dict[str, Any]) -> dict[str, Any]:
    """Return options as a file has them: tuples are lists there, and globs may be undecodable too."""
    read: dict[str, Any] = json.loads(
        json.dumps(options, ensure_ascii=False).encode(errors="replace")
    )
    return read


def _known(rule: str) -> str:
    if rule not in RULES:
        raise ValueError(f"this version knows no rule {rule!r}")
    return rule


Text: TypeAlias = Annotated[str, AfterValidator(_storable)]
Options: TypeAlias = Annotated[
    dict[str, Any],
    AfterValidator(_as_read_back),
    # what pydantic 2.11 and later say by themselves
    WithJsonSchema({"additionalProperties": True, "type": "object"}),
]
RuleId: TypeAlias = Annotated[str, AfterValidator(_known)]


class _Model(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, json_schema_serialization_defaults_required=True
    )


class Finding(_Model):
    """One breach of a requirement, and its evidence."""

    rule: RuleId | None = Field(
        description="Id of the rule, such as GP03; null for what is no rule's."
    )
    hook: Text | None = Field(description="The hook that is at fault, where that is known.")
    field: Text | None = Field(description="What differs, such as view.req_pool_indices[3:4].")
    expected: Text = Field(description="What the requirement asks for.")
    actual: Text = Field(description="What is there.")
    batch: Text | None = Field(
        default=None, description="The smallest failing batch that was found."
    )
    shape: Text | None = Field(default=None, description="The captured shape that was replayed.")
    help: Text | None = Field(default=None, description="What to do next.")
    reproduce: Text | None = Field(default=None, description="The command that shows it again.")


class Result(_Model):
    """One requirement in one lane of one plugin."""

    rule: RuleId | None = Field(description="Id of the rule; null for what is no rule's.")
    check: Text = Field(
        description="What was done: names of experiments, or of a question of the door."
    )
    lane: Text = Field(
        description="Mode, page size, head layout, dtype; or what else was looked at."
    )
    outcome: Outcome
    level: Level = "MUST"
    reason: Text | None = Field(default=None, description="Why it is no plain pass or fail.")
    findings: list[Finding] = Field(default_factory=list)
    examples: int = Field(default=0, description="Sequences of batches that were drawn.")
    seconds: float = Field(default=0.0, description="Wall time; of no meaning to a comparison.")

    @property
    def counts_against(self) -> bool:
        """Whether a plugin with this result is not conformant."""
        level = RULES[self.rule].level if self.rule else self.level
        return self.outcome.is_failure and level == "MUST"


class Claim(_Model):
    """One capability, as declared and as shown."""

    capability: Text = Field(description="Such as 'mode decode' or 'page size 16'.")
    declared: Literal["unknown", "unsupported", "not_implemented", "since", "full"]
    since: Text | None = Field(default=None, description="The version, where declared is 'since'.")
    shown: Literal["pass", "fail", "not_run"]
    hint: Text | None = None

    @property
    def is_made(self) -> bool:
        """Whether the plugin says that it can."""
        return self.declared in ("since", "full")

    @property
    def disagrees(self) -> bool:
        """Whether what was declared and what was shown contradict each other, either way."""
        return self.shown == ("fail" if self.is_made else "pass")


class PluginResults(_Model):
    """Everything about one plugin, alone or with a partner."""

    kind: Text
    name: Text
    distribution: Text
    version: Text
    contract: Text | None = Field(description="Contract version that its distribution declares.")
    partner: Text | None = Field(default=None, description="Runner that a backend was paired with.")
    drivers: list[Text] = Field(default_factory=list, description="Drivers that were exercised.")
    provider: Text | None = Field(default=None, description="Kernel provider that was exercised.")
    device: Text = "cpu"
    claims: list[Claim] = Field(default_factory=list)
    hints: list[Text] = Field(default_factory=list)
    not_shown: list[Text] = Field(
        default_factory=list, description="What this machine could not exercise, with the reason."
    )
    results: list[Result] = Field(default_factory=list)

    @property
    def label(self) -> str:
        """What reports call it."""
        return self.name if self.partner is None else f"{self.name} + {self.partner}"

    def of_rule(self, rule: str | None) -> list[Result]:
        """Return the results of one rule; of None, those that are no rule's."""
        return [result for result in self.results if result.rule == rule]

    def outcome_of(self, rule: str | None) -> Outcome:
        """Return one outcome for all lanes: the worst; unsupported only where no lane has another."""
        return worst(result.outcome for result in self.of_rule(rule))

    @property
    def is_conformant(self) -> bool:
        """Whether no MUST failed and something passed."""
        return not any(result.counts_against for result in self.results) and any(
            result.outcome is Outcome.PASS for result in self.results
        )

    @property
    def shortfalls(self) -> list[str]:
        """What keeps a plugin whose MUSTs hold from a strict pass, one phrase for each kind."""
        not_run = self._rules_with(lambda result: result.outcome is Outcome.NOT_RUN)
        should = self._rules_with(
            lambda result: result.outcome.is_failure and not result.counts_against
        )
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
    """Where a run took place."""

    graphpact: Text
    python: Text
    torch: Text
    platform: Text
    device: Text
    device_name: Text | None = None


class Report(_Model):
    """One run of the suite."""

    schema_version: Literal[1] = 1
    environment: Environment
    seed: int
    examples: int
    options: Options = Field(default_factory=dict, description="What was asked for.")
    started: Text = Field(description="ISO 8601; of no meaning to a comparison.")
    seconds: float
    plugins: list[PluginResults]

    @property
    def strict(self) -> bool:
        """Whether a claim is asked for: what was not shown counts as if it had failed."""
        return bool(self.options.get("strict"))

    @property
    def exit_code(self) -> ExitCode:
        """What the command ends with."""
        results = [result for plugin in self.plugins for result in plugin.results]
        if any(result.outcome is Outcome.ERROR for result in results):
            return ExitCode.SUITE_ERROR
        if not any(result.outcome.ran for result in results):
            return ExitCode.NOTHING_RAN
        if any(result.counts_against for result in results):
            return ExitCode.NOT_CONFORMANT
        if self.strict and any(plugin.shortfalls for plugin in self.plugins):
            return ExitCode.NOT_CONFORMANT
        return ExitCode.CONFORMANT

    @property
    def counts(self) -> Counter[Outcome]:
        """How many results of each outcome there are."""
        return Counter(result.outcome for plugin in self.plugins for result in plugin.results)

    def timeless(self) -> dict[str, Any]:
        """Return all of it but times, ready for JSON: the same for two runs with one seed."""
        told = self.model_dump(mode="json", exclude={"started", "seconds"})
        for plugin in told["plugins"]:
            for result in plugin["results"]:
                del result["seconds"]
        return told
