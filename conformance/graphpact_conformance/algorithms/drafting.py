"""The requirements on speculation algorithms: `CHECKS`, one function for each rule ``SP``.

Does not: run steps (see `decoding`), or choose the sizes of drafts (see `algorithm_lanes`).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, product
from typing import Any

import torch

from graphpact.batch import ForwardMode
from graphpact.plugin_calls import describe_error
from graphpact.speculation import LaneRole
from graphpact_conformance.algorithms.decoding import (
    DecodedRequest,
    Decoding,
    DecodingSetup,
    Drafts,
)
from graphpact_conformance.algorithms.random_models import Skill, Text
from graphpact_conformance.algorithms.schedules import (
    Schedule,
    of_every_length,
    together,
    with_changes,
)
from graphpact_conformance.contracts.requirement import Requirement, expect_equal, require
from graphpact_conformance.contracts.rule_checks import rule_check_decorator


@dataclass(frozen=True)
class DraftedDecoding:
    """What a requirement uses: engines for one algorithm and one size of drafts.

    Args:
        setup: The setup of the first one.
        examples: Number of random models for each kind of them.
    """

    setup: DecodingSetup
    examples: int = 1

    def setups(self, *texts: Text, skills: tuple[Skill, ...] = ("mixed",)) -> Iterator[DecodingSetup]:
        """Yield setups with models of each kind."""
        for example, text, skill in product(range(self.examples), texts, skills):
            yield replace(self.setup, text=text, skill=skill, seed=self.setup.seed + 1000 * example)


CHECKS: dict[str, Requirement[DraftedDecoding]] = {}
"""The requirements by name, in order."""
_rule_check = rule_check_decorator(CHECKS)
_SKILLS: tuple[Skill, ...] = ("mixed", "right", "wrong")
_ANY_STEP = "extend, decode"


@_rule_check(
    "SP01", _ANY_STEP, "give verify the drafts, and leave choosing and committing tokens to the engine"
)
def _tokens_of_plain_decoding(use: DraftedDecoding) -> None:
    for setup in (*use.setups("random", skills=_SKILLS), *use.setups("repeating", "both")):
        decoding, requests = _run(setup, together)
        _require_plain(decoding, requests)


@_rule_check(
    "SP02", "lanes, state", "declare the lanes in the class, and compute the state from the context alone"
)
def _declares_lanes_and_state(use: DraftedDecoding) -> None:
    lanes: Any = use.setup.algorithm.lanes
    roles = list(dict(lanes).values())
    require("`lanes` maps names to LaneRole", all(isinstance(role, LaneRole) for role in roles))
    verifying = [name for name, role in lanes.items() if role.mode is ForwardMode.TARGET_VERIFY]
    require(f"one lane of the mode target verify, not {verifying}", len(verifying) == 1)
    for name, role in lanes.items():
        model = "target" if name in verifying else "draft"
        require(f"lane {name!r} runs the {model} model, not {role.model!r}", role.model == model)
        runner = use.setup.runners.get(role.runner)
        require(f"the runner {role.runner!r} of lane {name!r} is installed", runner is not None)
        serves = runner is not None and role.mode in runner.modes
        require(f"the runner {role.runner!r} of lane {name!r} serves {role.mode.value}", serves)
    first, second = (Decoding(use.setup).algorithm for _ in range(2))
    expect_equal(dict(first.state()), dict(first.state()))
    expect_equal(dict(first.state()), dict(second.state()))
    for name, row in first.state().items():
        shape, dtype = row
        what = f"state() gives {name!r} a tuple of sizes and a dtype, not {row!r}"
        require(what, all(isinstance(n, int) and n >= 0 for n in shape) and isinstance(dtype, torch.dtype))


@_rule_check("SP03", "DecodeStep.verify", "call step.verify(drafts, parents) once, with fixed shapes")
def _verifies_once(use: DraftedDecoding) -> None:
    _require_no_fault(use, "SP03")


@_rule_check("SP04", "step.run", "make each field as ForwardBatch documents it for the mode of the lane")
def _gives_lanes_valid_batches(use: DraftedDecoding) -> None:
    _require_no_fault(use, "SP04")


@_rule_check("SP05", "out_cache_loc", "take slots from cache_loc in decode, and from the batch in extend")
def _writes_its_own_slots(use: DraftedDecoding) -> None:
    _require_no_fault(use, "SP05")


@_rule_check("SP06", "the request state", "index each tensor of the state by req_pool_indices")
def _uses_its_own_rows(use: DraftedDecoding) -> None:
    _require_no_fault(use, "SP06")
    for setup, schedule in product(use.setups("both"), (together, with_changes)):
        poisoned, _ = _run(setup, schedule)
        filled, _ = _run(replace(setup, unowned="random"), schedule)
        _require_drafts("unowned rows of the state hold other numbers", filled.drafted, poisoned.drafted)


@_rule_check("SP07", _ANY_STEP, "make new tensors, and write only rows of step.state")
def _modifies_no_input(use: DraftedDecoding) -> None:
    _require_no_fault(use, "SP07")


@_rule_check("SP08", _ANY_STEP, "declare it in state(), with a row for each request")
def _keeps_no_state(use: DraftedDecoding) -> None:
    for setup in use.setups("both"):
        expected, _ = _run(setup, with_changes)
        decoding = Decoding(setup)
        instances = [decoding.algorithm, decoding.new_algorithm()]

        def next_instance(decoding: Decoding = decoding, instances: list[Any] = instances) -> None:
            instances.append(instances.pop(0))
            decoding.algorithm = instances[0]

        decoding.before_step = next_instance
        with_changes(decoding, _rng(setup))
        _require_drafts("two instances take turns", decoding.drafted, expected.drafted)
        fresh = Decoding(setup)

        def new_instance(fresh: Decoding = fresh) -> None:
            fresh.algorithm = fresh.new_algorithm()

        fresh.before_step = new_instance
        with_changes(fresh, _rng(setup))
        _require_drafts("each step has a new instance", fresh.drafted, expected.drafted)
        others = _steps_of_another_engine(Decoding(replace(setup, seed=setup.seed + 1)))
        mine = Decoding(setup)
        mine.before_step = partial(next, others, None)
        with_changes(mine, _rng(setup))
        _require_drafts("another engine runs steps in between", mine.drafted, expected.drafted)


def _steps_of_another_engine(decoding: Decoding) -> Iterator[None]:
    """Run steps of another engine, one at each `next`."""
    requests = [decoding.join([1, 2, 3]), decoding.join([4])]
    decoding.extend(requests)
    yield
    while max(len(request.tokens) for request in requests) < 24:
        decoding.decode(requests)
        yield


class PlantedError(Exception):
    """An error that the suite raises in a lane or a verification."""


@_rule_check("SP09", _ANY_STEP, "write the request state last, after all lanes and verify have returned")
def _leaves_the_state_if_a_step_fails(use: DraftedDecoding) -> None:
    for setup in use.setups("both"):
        expected, _ = _run(setup, together)
        decoding = Decoding(setup)
        decoding.around_step = partial(_with_failures, decoding)
        together(decoding, _rng(setup))
        _require_drafts("each call of a step failed once before", decoding.drafted, expected.drafted)


def _with_failures(decoding: Decoding, step: Any) -> None:
    """Let the first, the second, .. call of a step raise, then run the step."""
    for number in range(20):
        calls: list[str] = []

        def fails(name: str, number: int = number, calls: list[str] = calls) -> None:
            calls.append(name)
            if len(calls) == number + 1:
                raise PlantedError(f"planted by the suite in {name!r}")

        before = {name: tensor.clone() for name, tensor in decoding.state.items()}
        drafted, accepted = len(decoding.drafted), len(decoding.accepted)
        decoding.fails = fails
        try:
            step()
        except PlantedError:
            del decoding.drafted[drafted:], decoding.accepted[accepted:]
        except Exception as error:
            raise AssertionError(
                f"expected: the error in {calls[-1]!r} passes unchanged; it became {describe_error(error)}"
            ) from error
        else:
            what = f"the error in {calls[-1] if calls else None!r} passes; the step ended without it"
            require(what, len(calls) <= number)
            return
        finally:
            decoding.fails = lambda _: None
        changed = [
            name
            for name, tensor in decoding.state.items()
            if not torch.equal(tensor[1:].nan_to_num(), before[name][1:].nan_to_num())
        ]
        require(
            f"the request state is unchanged after an error in {calls[-1]!r}, also {changed}", not changed
        )


@_rule_check(
    "SP10", _ANY_STEP, "take positions, lengths and rows from the batch, and write the whole row in extend"
)
def _keeps_every_request(use: DraftedDecoding) -> None:
    for setup in (*use.setups("random", skills=_SKILLS), *use.setups("both")):
        decoding, requests = _run(setup, with_changes)
        _require_plain(decoding, requests)


@_rule_check(
    "SP11", _ANY_STEP, "leave room for num_draft_tokens more than max_model_len in rows of the state"
)
def _serves_every_length(use: DraftedDecoding) -> None:
    for setup in use.setups("random", "both"):
        decoding, requests = _run(setup, of_every_length)
        _require_plain(decoding, requests)


@_rule_check(
    "SP12", "drafts", "read each token with the hidden state before it, at its position, in its KV slot"
)
def _right_drafts_are_accepted(use: DraftedDecoding) -> None:
    draft = use.setup.draft
    expected = min(draft.num_steps, draft.num_draft_tokens - 1)
    for setup, schedule in product(use.setups("random", skills=("right",)), (together, with_changes)):
        decoding, _ = _run(setup, schedule)
        for (tokens, drafts), (accepted, _) in zip(decoding.drafted, decoding.accepted, strict=True):
            what = (
                f"{expected} accepted drafts after {len(tokens)} tokens {list(tokens)}; the drafts were"
                f" {_in_words(drafts)}, the tokens {decoding.target.plain(tokens, expected)}"
            )
            require(f"{what}, and {accepted} were accepted", accepted >= expected)


@_rule_check("SP13", "drafts", "let the state after a step be that of a prompt with the same tokens")
def _drafts_follow_from_tokens(use: DraftedDecoding) -> None:
    for setup, schedule in product(use.setups("both"), (together, with_changes)):
        decoding, _ = _run(setup, schedule)
        again = Decoding(replace(setup, layout=1))
        for tokens, drafts in decoding.drafted[1::2]:
            request = again.join(tokens[:-1])
            again.extend([request])
            again.decode([request])
            again.leave(request)
            read = again.drafted[-1]
            what = f"after {list(tokens)} the drafts of a prompt read at once, {_in_words(read[1])}"
            require(f"{what}, not {_in_words(drafts)}", read == (tokens, drafts))


@_rule_check("SP14", _ANY_STEP, "compute on the device; step.seq_lens_cpu and *_cpu of the batch may be read")
def _reads_no_device_tensor(use: DraftedDecoding) -> None:
    for setup in use.setups("both"):
        decoding = Decoding(setup)
        decoding.refuses_reads = True
        try:
            with_changes(decoding, _rng(setup))
        except Exception:
            if "SP14" not in decoding.faults:
                raise
        _require_none(decoding, "SP14")


# -- runs and comparisons --------------------------------------------------------------------------


def _rng(setup: DecodingSetup) -> random.Random:
    return random.Random(setup.seed)  # noqa: S311  test data


def _run(setup: DecodingSetup, schedule: Schedule) -> tuple[Decoding, list[DecodedRequest]]:
    """Run a schedule on a new engine; return both it and its requests."""
    decoding = Decoding(setup)
    return decoding, schedule(decoding, _rng(setup))


def _require_no_fault(use: DraftedDecoding, rule: str) -> None:
    """Run two schedules, and require that none showed a fault of a rule."""
    runs = zip(
        use.setups("both", skills=("mixed", "right")), cycle((with_changes, of_every_length)), strict=False
    )
    for setup, schedule in runs:
        decoding = Decoding(setup)
        try:
            schedule(decoding, _rng(setup))
        except Exception:
            if rule not in decoding.faults:
                raise
        _require_none(decoding, rule)


def _require_none(decoding: Decoding, rule: str) -> None:
    faults = decoding.faults.get(rule, [])
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise AssertionError(f"{faults[0]}{more}")


def _require_plain(decoding: Decoding, requests: list[DecodedRequest]) -> None:
    for request in requests:
        expected = decoding.target.plain(request.prompt, len(request.generated))
        first = next(
            (i for i, pair in enumerate(zip(request.generated, expected, strict=True)) if len({*pair}) > 1), 0
        )
        what = f"after the prompt {request.prompt} the tokens {expected}, not {request.generated}"
        require(f"{what}; the first difference is token {first}", request.generated == expected)


def _require_drafts(
    what: str, found: list[tuple[tuple[int, ...], Drafts]], expected: list[tuple[tuple[int, ...], Drafts]]
) -> None:
    """Require that two runs of the same schedule drafted the same."""
    for (tokens, drafts), (others, other) in zip(found, expected, strict=False):
        text = f"the same drafts where {what}: after {list(others)} {_in_words(other)}"
        require(
            f"{text}; they are {_in_words(drafts)} after {list(tokens)}", (tokens, drafts) == (others, other)
        )
    require(f"as many drafts where {what}", len(found) == len(expected))


def _in_words(drafts: Drafts) -> str:
    tokens, parents = drafts
    return f"{list(tokens)}" + ("" if parents is None else f" with parents {list(parents)}")
