"""The rules of capture/replay alignment: one for each class of real bug. `EVERY_RULE`, with other contracts'.

A rule's requirement is one sentence. It has the same words here, in errors, in reports and in
`graphpact explain`. Ids are never reused.

Does not: check anything (see `graphpact_conformance.experiments`), or describe real bugs
(see `graphpact_conformance.real_bugs`).
"""

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from graphpact.errors import UsageError, did_you_mean
from graphpact_conformance.contract_rules import ALGORITHM_RULES, OBSERVER_RULES
from graphpact_conformance.rule import Hook, Rule

_RUNNER: tuple[Hook, ...] = ("populate", "prepare_replay")
_REPLAY: tuple[Hook, ...] = ("populate", "prepare_replay", "init_metadata_replay")
_BACKEND: tuple[Hook, ...] = ("init_metadata_capture", "init_metadata_replay")
_ALL: tuple[Hook, ...] = (*_RUNNER, *_BACKEND)

_RULES = (
    Rule(
        "GP01",
        "rebound-tensor",
        "MUST",
        "A graph reads its inputs from the memory that capture bound: every replay copies into that memory"
        " and never replaces it by a new tensor.",
        _ALL,
    ),
    Rule(
        "GP02",
        "missed-refresh",
        "MUST",
        "Every replay writes all data of this step that the graph reads for live rows, with the values that"
        " a capture of the same batch would write.",
        _REPLAY,
    ),
    Rule(
        "GP03",
        "stale-pad-tail",
        "MUST",
        "A padding row that a graph reads is reset in every step and holds no value of an earlier batch.",
        _REPLAY,
    ),
    Rule(
        "GP04",
        "bad-pad-sentinel",
        "MUST",
        "Padding rows hold the values that their consumer reads as empty. They read and write only scratch:"
        " request row 0 and the page of KV slot 0.",
        _REPLAY,
    ),
    Rule(
        "GP05",
        "pad-extent",
        "MUST",
        "All sizes, offsets and counts of one step agree on its rows: they include padding rows where the"
        " graph has them, and only live rows where a count is declared to count live rows.",
        _ALL,
    ),
    Rule(
        "GP06",
        "pad-leak",
        "MUST",
        "Padding rows, by their contents or by their results, change no bit of the results of live rows.",
        _REPLAY,
    ),
    Rule(
        "GP07",
        "layout-drift",
        "MUST",
        "Every field has the same layout at replay as at capture: shape, stride, dtype, packing and offsets.",
        _BACKEND,
    ),
    Rule(
        "GP08",
        "baked-host-value",
        "MUST",
        "A host number that is frozen in a graph is valid for every batch of its shape: it is equal at"
        " replay, or it is a declared bound that no replay exceeds.",
        _BACKEND,
    ),
    Rule(
        "GP09",
        "stale-plan",
        "MUST",
        "A new host plan is made before every replay, from that batch only and for the kernels that read it.",
        ("init_metadata_replay",),
    ),
    Rule(
        "GP10",
        "wrong-recorded-path",
        "MUST",
        "A graph records the work that every batch of its shape needs, independent of what ran before"
        " capture. Metadata has the same type and fields at capture and at replay.",
        _BACKEND,
    ),
    Rule(
        "GP11",
        "bad-capture-inputs",
        "MUST",
        "Capture runs the same path as replay: its dummy batch is a possible live batch, and the hooks"
        " write for it what they write for it at replay.",
        _ALL,
    ),
    Rule(
        "GP12",
        "wrong-graph",
        "MUST",
        "A batch replays the smallest captured graph that holds it and was recorded for its kind, or it"
        " runs eagerly with a counted reason.",
        _RUNNER,
    ),
    Rule(
        "GP13",
        "undersized-buffer",
        "MUST",
        "Every buffer holds the largest step that the limits allow.",
        _ALL,
    ),
    Rule(
        "GP14",
        "freed-storage",
        "MUST",
        "Memory that a graph uses stays allocated, at the same address and of the same size, for the"
        " lifetime of the graph.",
        _ALL,
    ),
    Rule(
        "GP15",
        "pool-aliasing",
        "MUST",
        "A graph uses no memory that the capture of another graph allocated. Outputs of a graph are read"
        " before another graph replays, and results of an eager call before another call writes there.",
        _ALL,
    ),
    Rule(
        "GP16",
        "staging-race",
        "MUST",
        "Host memory is rewritten only after the copy from it has finished, and used only after the copy to"
        " it; streams that share memory wait for each other.",
        _REPLAY,
    ),
    Rule(
        "GP17",
        "collective-mismatch",
        "MUST",
        "All ranks of a group capture and replay the same collectives in the same order, including idle,"
        " uneven and padded ranks.",
        _ALL,
    ),
    Rule(
        "GP18",
        "unarmed-state",
        "MUST",
        "Every replay starts from the same counters, flags and random state as the previous replay: two"
        " replays on the same inputs give the same results.",
        _BACKEND,
    ),
    Rule(
        "GP19",
        "capture-side-effect",
        "MUST",
        "A capture changes no memory that live requests own, and none that a later step reads. No call of a"
        " plugin changes the state of the whole process, such as torch's default dtype or generator.",
        _ALL,
    ),
    Rule(
        "GP20",
        "illegal-work-in-capture",
        "MUST",
        "While a graph is recorded or a replay is prepared, no device value is read on the host, and no"
        " other work runs that a graph cannot hold.",
        _ALL,
    ),
    Rule(
        "GP21",
        "missed-task-update",
        "MUST",
        "Before each replay every task of its graph is updated once, in captured order, under its own key,"
        " with the arguments of this step and of its own layer, and only after the previous replay. The host"
        " reads nothing of a launched replay that still waits for an update.",
        ("prepare_replay", "init_metadata_replay"),
    ),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in _RULES}
"""Every rule of capture and replay by its id, in order."""
EVERY_RULE: dict[str, Rule] = {**RULES, **ALGORITHM_RULES, **OBSERVER_RULES}
"""These, and the rules of speculation algorithms and observers."""


def rules_of(kind: str) -> dict[str, Rule]:
    """Return the rules of a kind of plugins by id, in order."""
    return {"speculation": ALGORITHM_RULES, "observer": OBSERVER_RULES}.get(kind, RULES)


_CAUSES_FIRST = {
    "the memory that graphs read": ("GP16", "GP15", "GP01", "GP14"),
    "the state before the step and the choice of the graph": ("GP19", "GP18", "GP12"),
    "the contents of the buffers": (
        *("GP03", "GP09", "GP08", "GP10", "GP21"),
        *("GP05", "GP04", "GP07", "GP02"),
    ),
    "the effects of a step": ("GP20", "GP11", "GP13", "GP06", "GP17"),
    "how the plugin is declared and built": ("SP02", "OB01"),
    "what the plugin writes": ("SP07", "SP06", "SP05", "OB03", "OB04"),
    "the calls that the plugin makes": ("SP03", "SP04", "OB06"),
    "what the plugin keeps": ("SP08", "SP09", "OB02", "OB05", "OB07", "OB08"),
    "the tokens of requests": ("SP10", "SP11", "SP01"),
    "the time of a step": ("SP14", "SP13", "SP12", "OB09"),
}
_CONCERNS = {rule: subject for subject, rules in _CAUSES_FIRST.items() for rule in rules}
_FLOWS = frozenset(_CAUSES_FIRST["the contents of the buffers"]) - {"GP03"}
"""Rules whose breaches flow from hook to hook: metadata are wrong because the view is. A stale row is not."""
_WITHOUT_FIELD = frozenset({"GP15", "GP16", "GP18", "GP21"})
"""Rules of time, not of contents: no field is at fault, so a finding that names a hook or slot says all."""


class Evidence(NamedTuple):
    """What a finding says about the fault; less is better.

    Args:
        level: 0 if it names hook and field, 1 if it names the hook or a slot, 2 if it only sees effects.
        stage: Where in the step the field is written: 0 for the view, 1 for metadata, 2 elsewhere.
    """

    level: int = 2
    stage: int = 2


def causes_first(rules: Iterable[str], evidence: Mapping[str, Evidence] | None = None) -> list[str]:
    """Return the ids of broken rules, the most likely cause of the others first.

    One bug breaks several rules: a stale padding row is read, leaks into live rows, and differs between
    ranks. The museum's page says how often the first rule is the rule of the exhibit. What names hook and
    field comes before what names a hook or a slot, and that before what only sees effects; then what is
    earlier in the list of concerns; then, of contents, what is written earlier in the step.

    Args:
        rules: The broken rules.
        evidence: The best evidence of each rule; `Evidence()` by default.
    """
    order, concerns = [*_CONCERNS], [*_CAUSES_FIRST]

    def rank(rule: str) -> tuple[int, int, int, int]:
        level, stage = (evidence or {}).get(rule, Evidence())
        if level == 1 and rule in _WITHOUT_FIELD:
            level = 0
        flow = stage + 1 if rule in _FLOWS else 0
        return level, concerns.index(_CONCERNS[rule]), flow, order.index(rule)

    return sorted(rules, key=rank)


def concern_of(rule: str) -> str:
    """Return in words what a rule is about: earlier subjects of `causes_first` affect later ones."""
    return _CONCERNS[rule]


def find_rule(text: str) -> Rule:
    """Return the rule with the id, number or name ``text``: ``GP03``, ``gp3``, ``3``, ``stale-pad-tail``.

    Case does not matter, nor whether words are joined by hyphens, underscores or spaces.

    Raises:
        UsageError: There is no such rule. The hint names the closest one.
    """
    wanted = re.sub(r"[\s_-]+", "-", text.strip().lower())
    wanted = re.sub(r"^([a-z]*)-?0*(?=\d)", r"\1", wanted)
    for rule in EVERY_RULE.values():
        short = f"{rule.id[:2].lower()}{int(rule.id[2:])}"
        spellings = {short, rule.name, f"{short}-{rule.name}"}
        if short.startswith("gp"):
            spellings |= {short[2:], f"{short[2:]}-{rule.name}"}
        if wanted in spellings:
            return rule
    by_name = {rule.name: rule for rule in EVERY_RULE.values()}
    near = [name for name in by_name if len(wanted) > 2 and wanted in name]
    if not near and (nearest := did_you_mean(wanted, by_name)):
        near = [nearest]
    said = " or ".join(str(by_name[name]) for name in near)
    ranges = " and ".join(
        f"{first} to {last}" for first, *_, last in (RULES, ALGORITHM_RULES, OBSERVER_RULES)
    )
    raise UsageError(
        f"unknown rule {text!r}; the rules are {ranges}",
        hint=f"did you mean {said}? `graphpact check --list` lists all"
        if said
        else "`graphpact check --list` lists all",
    )
