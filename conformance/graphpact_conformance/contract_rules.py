"""The rules of speculation algorithms, and of observers.

A MUST is about tokens, memory and errors. A SHOULD is about time: it costs accepted drafts, or it makes a
step wait.

Does not: check them; see `graphpact_conformance.algorithms` and `graphpact_conformance.observers`.
"""

from graphpact_conformance.rule import Rule

_ALGORITHM_RULES = (
    Rule(
        "SP01",
        "wrong-tokens",
        "MUST",
        "Every request gets the tokens of plain greedy decoding, whatever is drafted, and however many drafts"
        " of each request are accepted.",
        ("extend", "decode"),
    ),
    Rule(
        "SP02",
        "bad-declaration",
        "MUST",
        "`lanes` has one lane of the mode target verify, which runs the target model; the others run the"
        " draft model, each with an installed runner that serves its mode. `state()` always returns the same"
        " names, shapes and dtypes.",
        ("lanes", "state"),
    ),
    Rule(
        "SP03",
        "bad-verification",
        "MUST",
        "A decode step calls `verify` once, with int64 drafts `[bs, num_draft_tokens - 1]`, and with parents"
        " of the same shape, each before its child, or None for a chain.",
        ("decode",),
    ),
    Rule(
        "SP04",
        "bad-lane-batch",
        "MUST",
        "A step runs only declared lanes of the draft model, each with a batch of the lane's mode, whose"
        " fields agree with each other and with the step.",
        ("extend", "decode"),
    ),
    Rule(
        "SP05",
        "foreign-kv-slot",
        "MUST",
        "The batches of lanes write only KV slots that the step was given: a token that of its position, a"
        " branch of a tree slots of its own. They may write scratch.",
        ("extend", "decode"),
    ),
    Rule(
        "SP06",
        "foreign-state-row",
        "MUST",
        "A step reads and writes the request state only in the rows of its requests. It may write row 0.",
        ("extend", "decode"),
    ),
    Rule(
        "SP07",
        "changed-inputs",
        "MUST",
        "A step modifies no tensor that it gets, from the engine, from a lane or from `verify`, except the"
        " request state.",
        ("extend", "decode"),
    ),
    Rule(
        "SP08",
        "kept-state",
        "MUST",
        "The algorithm keeps nothing from step to step outside the request state, so several instances may"
        " take turns.",
        ("extend", "decode"),
    ),
    Rule(
        "SP09",
        "half-written-state",
        "MUST",
        "A step in which a lane or `verify` raises passes the error on and leaves the request state"
        " unchanged, so that it can be repeated.",
        ("extend", "decode"),
    ),
    Rule(
        "SP10",
        "lost-request",
        "MUST",
        "A prompt may come in chunks, a preempted request may be read again into another row and other KV"
        " slots, and requests may join and leave: every step works, and tokens are those of plain decoding.",
        ("extend", "decode"),
    ),
    Rule(
        "SP11",
        "no-room",
        "MUST",
        "Sequences of every length work, from one token to `max_model_len`, where the KV slots and positions"
        " of the last drafts lie beyond it.",
        ("extend", "decode", "state"),
    ),
    Rule(
        "SP12",
        "rejected-right-draft",
        "SHOULD",
        "With a draft model that predicts the tokens of the target, `num_steps` drafts of each request are"
        " accepted in every step, or all where fewer are verified.",
        ("extend", "decode"),
    ),
    Rule(
        "SP13",
        "history-in-drafts",
        "SHOULD",
        "The drafts of a request depend on its tokens alone, not on chunks, rejected drafts, its row, its KV"
        " slots or other requests.",
        ("extend", "decode"),
    ),
    Rule(
        "SP14",
        "waiting-draft",
        "SHOULD",
        "A step reads no device tensor on the host, so that it does not wait for the device.",
        ("extend", "decode"),
    ),
)

_OBSERVER_RULES = (
    Rule(
        "OB01",
        "unbuilt-observer",
        "MUST",
        "The class builds an observer without arguments, as often as it is asked.",
        ("the constructor",),
    ),
    Rule(
        "OB02",
        "changed-result",
        "MUST",
        "Each wrapped hook runs once, and returns the object that it returned without the observer.",
        ("every hook",),
    ),
    Rule(
        "OB03",
        "changed-step",
        "MUST",
        "Batches, slots, static inputs, metadata, the KV cache and outputs have the same bits with the"
        " observer as without it.",
        ("every hook",),
    ),
    Rule(
        "OB04",
        "changed-settings",
        "MUST",
        "The observer changes no setting of the process, and draws from no default random generator.",
        ("every hook", "the constructor"),
    ),
    Rule(
        "OB05",
        "swallowed-error",
        "MUST",
        "An exception of a hook passes the observer unchanged, whatever its type, and the next step works.",
        ("every hook",),
    ),
    Rule(
        "OB06",
        "failed-observation",
        "MUST",
        "The observer raises no error around any kind of step: replays, eager and idle steps, captures,"
        " steps that are prepared ahead, and the phases of an engine.",
        ("every hook",),
    ),
    Rule(
        "OB07",
        "confused-lanes",
        "MUST",
        "One object can observe several lanes whose steps interleave or lie inside each other.",
        ("every hook",),
    ),
    Rule(
        "OB08",
        "kept-tensors",
        "MUST",
        "After a step the observer keeps no tensor of the step alive: its memory belongs to the engine.",
        ("every hook",),
    ),
    Rule(
        "OB09",
        "waiting-observer",
        "SHOULD",
        "The observer reads no device tensor on the host, so that steps do not wait for the device.",
        ("every hook",),
    ),
)

ALGORITHM_RULES: dict[str, Rule] = {rule.id: rule for rule in _ALGORITHM_RULES}
"""The rules of speculation algorithms by id, in order."""
OBSERVER_RULES: dict[str, Rule] = {rule.id: rule for rule in _OBSERVER_RULES}
"""The rules of observers by id, in order."""
