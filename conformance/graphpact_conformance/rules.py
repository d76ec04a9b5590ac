"""The twenty rules of capture/replay alignment: one for each class of real bug.

A rule's requirement is one sentence, and the same one wherever it is said: here, in errors, in reports and
in `graphpact explain`. Ids are never reused.

Does not: check anything (`graphpact_conformance.experiments` does), or tell stories
(`graphpact_conformance.stories` does).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from graphpact.errors import UsageError, did_you_mean

Level = Literal["MUST", "SHOULD"]
Hook = Literal["populate", "prepare_replay", "init_metadata_capture", "init_metadata_replay"]

_RUNNER: tuple[Hook, ...] = ("populate", "prepare_replay")
_REPLAY: tuple[Hook, ...] = ("populate", "prepare_replay", "init_metadata_replay")
_BACKEND: tuple[Hook, ...] = ("init_metadata_capture", "init_metadata_replay")
_ALL: tuple[Hook, ...] = (*_RUNNER, *_BACKEND)


@dataclass(frozen=True, slots=True)
class Rule:
    """One rule of the contract.

    Args:
        id: ``GP01`` to ``GP20``.
        name: In one or three words.
        level: Whether conformance needs it.
        requirement: What holds, in one sentence.
        hooks: The hooks that it concerns.
        since: The contract version that has it first; plugins of earlier ones are not held to it.
    """

    id: str
    name: str
    level: Level
    requirement: str
    hooks: tuple[Hook, ...]
    since: int = 1

    def __str__(self) -> str:
        return f"{self.id} {self.name}"


_RULES = (
    Rule(
        "GP01",
        "rebound-tensor",
        "MUST",
        "What a graph reads at replay lies in the memory that capture bound: it is copied into, and never"
        " replaced by a new tensor.",
        _ALL,
    ),
    Rule(
        "GP02",
        "missed-refresh",
        "MUST",
        "Every replay writes, for the rows of its batch, all that the graph reads of this step, with what"
        " capture would have written for that batch.",
        _REPLAY,
    ),
    Rule(
        "GP03",
        "stale-pad-tail",
        "MUST",
        "No padded row that a graph reads holds what an earlier batch left there.",
        _REPLAY,
    ),
    Rule(
        "GP04",
        "bad-pad-sentinel",
        "MUST",
        "Padded rows hold what their consumer reads as empty: they read and write scratch alone, request row"
        " 0 and the page of KV slot 0.",
        _REPLAY,
    ),
    Rule(
        "GP05",
        "pad-extent",
        "MUST",
        "All that describes one step counts the same rows: padded ones where the graph has padded rows, real"
        " ones where a count says that it counts real ones.",
        _ALL,
    ),
    Rule(
        "GP06",
        "pad-leak",
        "MUST",
        "What padded rows hold or compute changes no bit of what real rows give.",
        _REPLAY,
    ),
    Rule(
        "GP07",
        "layout-drift",
        "MUST",
        "Replay lays out what capture laid out: the same shape, stride, dtype, packing and offsets of every"
        " field.",
        _BACKEND,
    ),
    Rule(
        "GP08",
        "baked-host-value",
        "MUST",
        "A host number that a graph has frozen holds for every batch of its shape: it is equal at replay, or"
        " declared a bound that replay keeps.",
        _BACKEND,
    ),
    Rule(
        "GP09",
        "stale-plan",
        "MUST",
        "Whatever is planned on the host is planned anew before every replay, from that batch alone and for"
        " the kernels that will read it.",
        ("init_metadata_replay",),
    ),
    Rule(
        "GP10",
        "wrong-recorded-path",
        "MUST",
        "What is recorded is what every batch of the shape needs, whatever ran before capture; metadata has"
        " one type and the same fields at capture and at replay.",
        _BACKEND,
    ),
    Rule(
        "GP11",
        "bad-capture-inputs",
        "MUST",
        "Capture goes the way of a replay: its dummy batch is one that could be live, and the hooks write for"
        " it what they would write at replay.",
        _ALL,
    ),
    Rule(
        "GP12",
        "wrong-graph",
        "MUST",
        "A batch replays the smallest captured graph that holds it and was recorded for its kind, or runs"
        " eagerly for a reason that is counted.",
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
        "Memory that a graph uses lives, and stays where and as large as it was, for as long as the graph.",
        _ALL,
    ),
    Rule(
        "GP15",
        "pool-aliasing",
        "MUST",
        "No graph uses memory that another one's capture allocated, and outputs are read before another"
        " graph replays.",
        _ALL,
    ),
    Rule(
        "GP16",
        "staging-race",
        "MUST",
        "Host memory is rewritten only once the copy from it is done, and streams that share memory wait for"
        " each other.",
        _REPLAY,
    ),
    Rule(
        "GP17",
        "collective-mismatch",
        "MUST",
        "All ranks of a group capture and replay the same collectives in the same order, idle, uneven and"
        " padded ranks too.",
        _ALL,
    ),
    Rule(
        "GP18",
        "unarmed-state",
        "MUST",
        "A replay finds every counter, flag and random state as the one before it did: two on the same inputs"
        " give the same.",
        _BACKEND,
    ),
    Rule(
        "GP19",
        "capture-side-effect",
        "MUST",
        "A capture changes nothing that live requests own, and nothing that a later step reads.",
        _ALL,
    ),
    Rule(
        "GP20",
        "illegal-work-in-capture",
        "MUST",
        "No device value is read on the host, and nothing else that a graph cannot hold is done, while a"
        " graph is recorded or a replay prepared.",
        _ALL,
    ),
)

RULES: dict[str, Rule] = {rule.id: rule for rule in _RULES}
"""Every rule by its id, in order."""


_CAUSES_FIRST = (
    *("GP16", "GP15", "GP14", "GP01"),  # whose memory it is
    *("GP19", "GP12", "GP18"),  # in which state a step finds it, and which graph
    *("GP03", "GP09", "GP08", "GP10", "GP05", "GP04", "GP07", "GP02"),  # what is in it
    *("GP20", "GP11", "GP13", "GP06", "GP17"),  # what comes of that
)


def causes_first(rules: Iterable[str]) -> list[str]:
    """Return ids of broken rules, the likeliest cause of the others first.

    One bug breaks several rules: a padded row that is left stale is read, leaks, and differs between ranks.
    The order is the museum's experience: its page says how often the first is the rule that was broken.
    """
    return sorted(rules, key=_CAUSES_FIRST.index)


def find_rule(text: str) -> Rule:
    """Return the rule that ``text`` names, by id in any case or by name.

    Raises:
        UsageError: None is called so; the message names the nearest.
    """
    wanted = text.strip()
    for rule in _RULES:
        if wanted.upper() == rule.id or wanted.lower() == rule.name:
            return rule
    names = [name for rule in _RULES for name in (rule.id, rule.name)]
    near = did_you_mean(wanted.upper(), names) or did_you_mean(wanted.lower(), names)
    raise UsageError(
        f"no rule is called {text!r}; there are GP01 to GP{len(_RULES):02}",
        hint=f"did you mean {near}? `graphpact check --list` lists all"
        if near
        else "`graphpact check --list` lists all",
    )
