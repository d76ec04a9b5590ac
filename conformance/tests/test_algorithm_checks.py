"""Speculation algorithms under ``graphpact check``: ours pass, and each planted bug is caught by its rule."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from recipes.prompt_lookup import PromptLookupAlgorithm

from graphpact import ForwardBatch, ForwardMode, StepOutputs
from graphpact.attention import DraftLimits
from graphpact.errors import ConfigError
from graphpact.plugins import PluginCatalog
from graphpact.speculation import (
    HIDDEN_STATES,
    DecodeStep,
    ExtendStep,
    LaneRole,
    SpeculationAlgorithm,
    SpeculationContext,
    Verified,
)
from graphpact_conformance.algorithms.algorithm_lanes import OF_ALGORITHMS, AlgorithmLane
from graphpact_conformance.algorithms.decoding import Decoding, DecodingSetup
from graphpact_conformance.algorithms.random_models import VOCAB, RandomTarget
from graphpact_conformance.contract_rules import ALGORITHM_RULES
from graphpact_conformance.contracts.examine import examine_contract_lane
from graphpact_conformance.results import Outcome, Result
from graphpact_conformance.targets import Options
from graphpact_speculative import Eagle, FrozenKvMtp

CHAIN, TREE = DraftLimits(3, 1, 4), DraftLimits(3, 2, 6)
ONCE = Options(examples=1)
VERIFY = LaneRole(ForwardMode.TARGET_VERIFY, "target", "cuda_graph")


class SmallModel(SpeculationAlgorithm):
    """A small language model drafts by plain decode steps, without hidden states and without a state.

    It reads the last draft too, so that its keys are complete if all drafts are accepted.
    """

    lanes: ClassVar[Mapping[str, LaneRole]] = {
        "draft_prefill": LaneRole(ForwardMode.EXTEND, "draft", "eager"),
        "draft": LaneRole(ForwardMode.DECODE, "draft", "cuda_graph"),
        "verify": VERIFY,
    }

    def __init__(self, context: SpeculationContext) -> None:
        super().__init__(context)
        if context.draft.topk > 1:
            raise ConfigError(f"speculative.topk = {context.draft.topk}, but it drafts chains")

    def state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return no state."""
        return {}

    def extend(self, step: ExtendStep) -> None:
        """Let the small model read the tokens."""
        step.run("draft_prefill", step.batch)

    def decode(self, step: DecodeStep) -> None:
        """Decode the drafts, and read the last one."""
        tokens = [step.token_ids]
        for ahead in range(self.context.draft.num_draft_tokens):
            batch = ForwardBatch(
                forward_mode=ForwardMode.DECODE,
                batch_size=len(step.token_ids),
                input_ids=tokens[-1],
                positions=step.seq_lens + ahead,
                out_cache_loc=step.cache_loc[:, ahead],
                req_pool_indices=step.req_pool_indices,
                seq_lens=step.seq_lens + ahead + 1,
                seq_lens_cpu=step.seq_lens_cpu + ahead + 1,
            )
            tokens.append(step.run("draft", batch).logits.argmax(dim=1))
        step.verify(torch.stack(tokens[1:-1], dim=1), None)


RIGHT = (Eagle, FrozenKvMtp, PromptLookupAlgorithm, SmallModel)


def results(
    algorithm: type[SpeculationAlgorithm], draft: DraftLimits, options: Options = ONCE
) -> dict[str | None, Result]:
    """Return the result of each rule in one lane."""
    return {r.rule: r for r in examine_contract_lane(AlgorithmLane(algorithm, draft), options)}


def outcomes(algorithm: type[SpeculationAlgorithm], draft: DraftLimits, *rules: str) -> dict[str, Outcome]:
    """Return the outcomes of rules in one lane."""
    found = results(algorithm, draft, replace(ONCE, only=frozenset(rules)))
    return {str(rule): result.outcome for rule, result in found.items()}


# -- right algorithms --------------------------------------------------------------------------------


@pytest.mark.few(3)
@pytest.mark.parametrize("draft", [CHAIN, TREE], ids=str)
@pytest.mark.parametrize("algorithm", RIGHT)
def test_right_algorithms_pass(algorithm: type[SpeculationAlgorithm], draft: DraftLimits) -> None:
    """Ours, the recipe and a small model pass every rule; what does not concern one is unsupported."""
    found = results(algorithm, draft)
    assert list(found) == list(ALGORITHM_RULES)
    unsupported = {rule: r.reason for rule, r in found.items() if r.outcome is Outcome.UNSUPPORTED}
    if algorithm in (PromptLookupAlgorithm, SmallModel) and draft.topk > 1:
        assert all("speculative.topk = 2" in str(reason) for reason in unsupported.values())
        assert len(unsupported) == len(found)
        return
    assert [*unsupported] == (["SP12"] if algorithm is PromptLookupAlgorithm else [])
    assert {r.outcome for rule, r in found.items() if rule not in unsupported} == {Outcome.PASS}


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("algorithm", RIGHT)
def test_right_algorithms_pass_with_other_models(algorithm: type[SpeculationAlgorithm], seed: int) -> None:
    """They pass a thorough run with any seed."""
    options = Options(size="thorough", seed=seed)
    for lane in OF_ALGORITHMS.lanes_of(algorithm, options):
        for result in examine_contract_lane(lane, options):
            assert result.outcome in (Outcome.PASS, Outcome.UNSUPPORTED), result


def test_drafts_are_accepted_unevenly() -> None:
    """The models of the suite accept no, some and all drafts, in one batch too."""
    runners = {
        i.name: PluginCatalog.scan().select("runner", i.name) for i in PluginCatalog.scan().infos("runner")
    }
    counts: set[int] = set()
    uneven = 0
    decoding = Decoding(DecodingSetup(Eagle, runners, CHAIN, text="both"))
    requests = [decoding.join(prompt) for prompt in ([1, 2], [3, 4, 5], [6])]
    decoding.extend(requests)
    for _ in range(6):
        decoding.decode(requests)
        step = {accepted for accepted, _ in decoding.accepted[-3:]}
        counts |= step
        uneven += len(step) > 1
    assert counts == {0, 1, 2, 3}
    assert uneven > 2


def test_plain_decoding_is_a_function_of_all_tokens() -> None:
    """One other token in the prompt changes what follows, in a random text; a repeating one repeats."""
    target = RandomTarget(0, "random", 60)
    prompt = [1, 2, 3, 4, 5, 6]
    plain = target.plain(prompt, 20)
    assert all(target.plain([*prompt[:i], 9, *prompt[i + 1 :]], 20) != plain for i in range(6))
    repeating = RandomTarget(0, "repeating", 200).plain(prompt, 120)
    assert repeating[:40] == repeating[-40:] or any(
        repeating[: 60 - p] == repeating[p:60] for p in range(1, VOCAB + 1)
    )


# -- planted bugs ------------------------------------------------------------------------------------


class SwapsTokens(Eagle):
    """It reverses the newest tokens of the batch in place before the verification."""

    def decode(self, step: DecodeStep) -> None:
        """Reverse, and decode."""
        step.token_ids.copy_(step.token_ids.flip(0))
        super().decode(step)


class ShortensLengths(PromptLookupAlgorithm):
    """It subtracts one of the lengths in place, to find the last key, and forgets to add it again."""

    def decode(self, step: DecodeStep) -> None:
        """Look up at the last key."""
        step.seq_lens.sub_(1)
        super().decode(step)


class HasTwoVerifications(Eagle):
    """It declares two lanes of target verify."""

    lanes: ClassVar[Mapping[str, LaneRole]] = {**Eagle.lanes, "verify_again": VERIFY}


class NamesNoRunner(Eagle):
    """It names a runner that is not installed."""

    lanes: ClassVar[Mapping[str, LaneRole]] = {
        **Eagle.lanes,
        "draft": LaneRole(ForwardMode.DRAFT_DECODE, "draft", "eagle_drafts"),
    }


class TakesAnotherRunner(FrozenKvMtp):
    """It names a runner that does not serve the mode of its lane."""

    lanes: ClassVar[Mapping[str, LaneRole]] = {
        "draft": LaneRole(ForwardMode.DECODE, "draft", "eagle_draft"),
        "verify": VERIFY,
    }


class ChangesItsState(PromptLookupAlgorithm):
    """Its state has more columns each time."""

    columns = itertools.count(80)

    def state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return more columns than before."""
        return {"tokens": ((next(self.columns),), torch.int64)}


class VerifiesTwice(PromptLookupAlgorithm):
    """It verifies a second draft if it can."""

    def decode(self, step: DecodeStep) -> None:
        """Verify twice."""
        drafts = torch.zeros_like(step.cache_loc[:, :3])
        step.verify(drafts, None)
        super().decode(step)


class NeverVerifies(PromptLookupAlgorithm):
    """It drafts, and does not verify."""

    def decode(self, step: DecodeStep) -> None:
        """Draft."""
        self._lookup(step.state["tokens"][step.req_pool_indices], step.seq_lens, 3)


class _Verifying(Eagle):
    """An algorithm that gives verify something else."""

    def decode(self, step: DecodeStep) -> None:
        """Decode with a changed verification."""
        super().decode(replace(step, verify=lambda *given: step.verify(*self.changed(*given))))

    def changed(self, drafts: torch.Tensor, parents: torch.Tensor | None) -> tuple[Any, Any]:
        """Return the changed drafts and parents."""
        raise NotImplementedError


class VerifiesInt32(_Verifying):
    """Its drafts are int32."""

    def changed(self, drafts: torch.Tensor, parents: torch.Tensor | None) -> tuple[Any, Any]:
        """Return other drafts."""
        return drafts.int(), parents


class VerifiesTheNewestToo(_Verifying):
    """Its drafts begin with the newest token."""

    def changed(self, drafts: torch.Tensor, parents: torch.Tensor | None) -> tuple[Any, Any]:
        """Return other drafts."""
        return torch.cat([drafts[:, :1], drafts], dim=1), parents


class CountsParentsFromOne(_Verifying):
    """Its parents are one too large."""

    def changed(self, drafts: torch.Tensor, parents: torch.Tensor | None) -> tuple[Any, Any]:
        """Return other parents."""
        return drafts, None if parents is None else parents + 1


class OneTokenOff(_Verifying):
    """Its drafts are one token off. They cost time and change no token."""

    def changed(self, drafts: torch.Tensor, parents: torch.Tensor | None) -> tuple[Any, Any]:
        """Return other drafts."""
        return (drafts + 1) % VOCAB, parents


class RunsTheTarget(Eagle):
    """It runs the lane of the target itself."""

    def decode(self, step: DecodeStep) -> None:
        """Verify by a lane."""
        step.run("verify", self._draft_batch(step))


class _Extending(Eagle):
    """EAGLE with another batch of the draft extend."""

    def _extend_batch(self, step: DecodeStep, verified: Verified) -> ForwardBatch:
        return self.changed(super()._extend_batch(step, verified), step)

    def changed(self, batch: ForwardBatch, step: DecodeStep) -> ForwardBatch:
        """Return the changed batch."""
        raise NotImplementedError


class KeepsHostLengths(_Extending):
    """It forgets to add the drafts to the lengths on the host."""

    def changed(self, batch: ForwardBatch, step: DecodeStep) -> ForwardBatch:
        """Return other lengths on the host."""
        return replace(batch, seq_lens_cpu=step.seq_lens_cpu)


class ExtendsOneLater(_Extending):
    """Its positions are those of the tokens, and not of the hidden states before them."""

    def changed(self, batch: ForwardBatch, step: DecodeStep) -> ForwardBatch:
        """Return other positions."""
        del step
        return replace(batch, positions=batch.positions + 1)


class CountsTheNewest(_Extending):
    """It counts the newest token among the accepted drafts."""

    def changed(self, batch: ForwardBatch, step: DecodeStep) -> ForwardBatch:
        """Return other counts."""
        del step
        assert batch.num_correct_drafts is not None
        return replace(batch, num_correct_drafts=(batch.num_correct_drafts + 1).clamp(max=3))


class WritesTheNeighboursSlots(_Extending):
    """It writes keys into the KV slots of another request of the batch."""

    def changed(self, batch: ForwardBatch, step: DecodeStep) -> ForwardBatch:
        """Return the slots of others."""
        del step
        width = self.context.draft.num_draft_tokens
        return replace(batch, out_cache_loc=batch.out_cache_loc.view(-1, width).roll(1, 0).flatten())


class BranchesShareSlots(Eagle):
    """All branches of a request write the same KV slots."""

    def _draft_batch(self, step: DecodeStep) -> ForwardBatch:
        batch, num_steps = super()._draft_batch(step), self.context.draft.num_steps
        slots = step.cache_loc[:, :num_steps].repeat_interleave(self.context.draft.topk, dim=0)
        return replace(batch, out_cache_loc=slots)


class WritesByBatchIndex(FrozenKvMtp):
    """It writes the state by the index in the batch."""

    def decode(self, step: DecodeStep) -> None:
        """Decode on rows that begin at 1."""
        super().decode(step)
        hidden = step.state["hidden_states"]
        rows = torch.arange(len(step.token_ids), device=hidden.device) + 1
        hidden[rows] = hidden[step.req_pool_indices]


class ReadsByBatchIndex(FrozenKvMtp):
    """It reads the state by the index in the batch."""

    def _draft_batch(self, step: DecodeStep) -> ForwardBatch:
        batch, topk = super()._draft_batch(step), self.context.draft.topk
        rows = torch.arange(len(step.token_ids), device=batch.device) + 1
        hidden = step.state["hidden_states"][rows.repeat_interleave(topk)]
        return replace(batch, extra={HIDDEN_STATES: hidden})


class LooksEverywhere(PromptLookupAlgorithm):
    """It drafts the tokens of the next row, whoever has it."""

    def decode(self, step: DecodeStep) -> None:
        """Look up in other rows."""
        tokens = step.state["tokens"]
        rows = step.req_pool_indices % (len(tokens) - 1) + 1
        drafts = tokens[rows, 1 : self.context.draft.num_draft_tokens]
        super().decode(replace(step, verify=lambda *_: step.verify(drafts.clamp(0, VOCAB - 1), None)))


class ScalesHiddenStates(FrozenKvMtp):
    """It normalises the hidden states of the verification in place."""

    def decode(self, step: DecodeStep) -> None:
        """Decode with scaled hidden states."""

        def verify(drafts: torch.Tensor, parents: torch.Tensor | None) -> Verified:
            verified = step.verify(drafts, parents)
            verified.hidden_states.mul_(2)
            return verified

        super().decode(replace(step, verify=verify))


class MovesLengthsOn(PromptLookupAlgorithm):
    """It adds the drafts to the lengths of the step, after the verification."""

    def decode(self, step: DecodeStep) -> None:
        """Decode, and move on."""
        super().decode(step)
        step.seq_lens.add_(1)


class WritesPrompts(PromptLookupAlgorithm):
    """It replaces token 0 of prompts in place."""

    def extend(self, step: ExtendStep) -> None:
        """Replace, and keep the tokens."""
        step.batch.input_ids.clamp_(min=1)
        super().extend(step)


class KeepsTheLastDraft(PromptLookupAlgorithm):
    """It drafts the tokens that it verified in the step before."""

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.last: torch.Tensor | None = None

    def decode(self, step: DecodeStep) -> None:
        """Draft what was verified before, if the batch has the same size."""

        def verify(drafts: torch.Tensor, parents: torch.Tensor | None) -> Verified:
            kept = self.last if self.last is not None and len(self.last) == len(drafts) else drafts
            verified = step.verify(kept.clone(), parents)
            self.last = verified.next_token_ids.view(len(drafts), -1)[:, 1:].clone()
            return verified

        super().decode(replace(step, verify=verify))


class CountsInTheClass(PromptLookupAlgorithm):
    """It counts steps in the class, and drafts by the count."""

    steps: ClassVar[list[int]] = [0]

    def decode(self, step: DecodeStep) -> None:
        """Count, and draft."""
        self.steps[0] += 1
        drafts = torch.full_like(
            step.cache_loc[:, : self.context.draft.num_draft_tokens - 1], self.steps[0] % VOCAB
        )
        super().decode(replace(step, verify=lambda *_: step.verify(drafts, None)))


class KeepsHiddenStatesByRow(FrozenKvMtp):
    """It keeps hidden states in an attribute, and none in the request state."""

    def state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return no state."""
        self.kept = torch.zeros(9, self.context.target_hidden_size, dtype=self.context.dtype)
        return {}

    def extend(self, step: ExtendStep) -> None:
        """Keep them in the attribute."""
        super().extend(replace(step, state={"hidden_states": self.kept}))

    def decode(self, step: DecodeStep) -> None:
        """Take them from the attribute."""
        super().decode(replace(step, state={"hidden_states": self.kept}))


class WritesStateBeforeItExtends(Eagle):
    """It writes a part of the state before the last lane runs."""

    def decode(self, step: DecodeStep) -> None:
        """Write too early."""

        def verify(drafts: torch.Tensor, parents: torch.Tensor | None) -> Verified:
            verified = step.verify(drafts, parents)
            step.state["scores"][step.req_pool_indices] = 0
            return verified

        super().decode(replace(step, verify=verify))


class SwallowsErrors(Eagle):
    """It drafts nothing if its draft lane fails."""

    def decode(self, step: DecodeStep) -> None:
        """Verify zeros after an error."""
        try:
            super().decode(step)
        except RuntimeError:
            raise
        except Exception:  # noqa: BLE001  the bug
            step.verify(torch.zeros_like(step.cache_loc[:, : self.context.draft.num_draft_tokens - 1]), None)


class RefusesChunks(PromptLookupAlgorithm):
    """It takes whole prompts alone."""

    def extend(self, step: ExtendStep) -> None:
        """Keep the tokens of a whole prompt."""
        lens, lens_cpu = step.batch.required_extend_lens()
        del lens
        if not torch.equal(lens_cpu, step.batch.seq_lens_cpu):
            raise ValueError("a prompt begins at 0")
        super().extend(step)


class HasNoRoom(PromptLookupAlgorithm):
    """Its rows have no room after the longest sequence."""

    def state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return rows of the longest sequence."""
        return {"tokens": ((self.context.max_model_len,), torch.int64)}


class NeedsTwoTokens(PromptLookupAlgorithm):
    """It reads the token before the last one of a prompt."""

    def extend(self, step: ExtendStep) -> None:
        """Require two tokens."""
        if int(step.batch.required_extend_lens()[1].min()) < 2 and int(step.batch.seq_lens_cpu.min()) < 2:
            raise IndexError("the prompt has no token before the last one")
        super().extend(step)


class ShiftsHiddenStates(_Extending):
    """It reads each token with its own hidden state, not with the one before it."""

    def changed(self, batch: ForwardBatch, step: DecodeStep) -> ForwardBatch:
        """Return shifted hidden states."""
        del step
        return replace(batch, extra={HIDDEN_STATES: batch.extra[HIDDEN_STATES].roll(-1, 0)})


class KeepsKeysOfDrafts(_Extending):
    """It keeps the draft's own keys of accepted tokens: the keys of the verified ones go to scratch."""

    def changed(self, batch: ForwardBatch, step: DecodeStep) -> ForwardBatch:
        """Return scratch slots."""
        del step
        return replace(batch, out_cache_loc=torch.zeros_like(batch.out_cache_loc))


class ReversesItsSlots(Eagle):
    """Its draft writes its own KV slots, in the reverse order."""

    def _draft_batch(self, step: DecodeStep) -> ForwardBatch:
        batch = super()._draft_batch(step)
        return replace(batch, out_cache_loc=batch.out_cache_loc.flip(1))


class ForgetsTheAccepted(FrozenKvMtp):
    """It keeps the hidden state of the newest token, as if no draft was accepted."""

    def decode(self, step: DecodeStep) -> None:
        """Decode without the counts."""

        def verify(drafts: torch.Tensor, parents: torch.Tensor | None) -> Verified:
            verified = step.verify(drafts, parents)
            return replace(verified, num_correct_drafts=torch.zeros_like(verified.num_correct_drafts))

        super().decode(replace(step, verify=verify))


class TakesTheLastDraft(FrozenKvMtp):
    """It keeps the hidden state of the last draft, as if all were accepted."""

    def decode(self, step: DecodeStep) -> None:
        """Decode with the largest counts."""

        def verify(drafts: torch.Tensor, parents: torch.Tensor | None) -> Verified:
            verified = step.verify(drafts, parents)
            most = torch.full_like(verified.num_correct_drafts, drafts.shape[1])
            return replace(verified, num_correct_drafts=most)

        super().decode(replace(step, verify=verify))


class ForgetsLaterChunks(PromptLookupAlgorithm):
    """It keeps the tokens of the first chunk of a prompt."""

    def extend(self, step: ExtendStep) -> None:
        """Keep the tokens of requests without a prefix."""
        batch = step.batch
        new_tokens, _ = batch.required_extend_lens()
        before = step.state["tokens"].clone()
        super().extend(step)
        later = (batch.seq_lens > new_tokens)[:, None]
        rows = batch.req_pool_indices
        step.state["tokens"][rows] = torch.where(later, before[rows], step.state["tokens"][rows])


class ReadsCounts(FrozenKvMtp):
    """It reads the accepted drafts on the host."""

    def decode(self, step: DecodeStep) -> None:
        """Decode, and count."""
        self.total = 0

        def verify(drafts: torch.Tensor, parents: torch.Tensor | None) -> Verified:
            verified = step.verify(drafts, parents)
            self.total += int(verified.num_correct_drafts.sum())
            return verified

        super().decode(replace(step, verify=verify))


class ReadsNewTokens(PromptLookupAlgorithm):
    """It repeats rows by counts on the device, whose sum torch reads."""

    def extend(self, step: ExtendStep) -> None:
        """Keep the tokens."""
        batch = step.batch
        rows = batch.req_pool_indices.repeat_interleave(batch.required_extend_lens()[0])
        step.state["tokens"][rows, batch.positions] = batch.input_ids
        step.state["tokens"][rows, batch.positions + 1] = step.next_token_ids


class CopiesFromTheHost(PromptLookupAlgorithm):
    """It makes an index on the host in every step, which is copied to the device."""

    def decode(self, step: DecodeStep) -> None:
        """Decode, with an index of the host."""
        offsets = torch.tensor([1, 2, 3])
        drafts = step.state["tokens"][step.req_pool_indices[:, None], offsets]
        super().decode(replace(step, verify=lambda *_: step.verify(drafts, None)))


class ShiftsDraftsInPlace(Eagle):
    """It changes the outputs of its draft lane in place."""

    def decode(self, step: DecodeStep) -> None:
        """Decode with changed outputs."""

        def run(lane: str, batch: ForwardBatch) -> StepOutputs:
            outputs = step.run(lane, batch)
            if lane == "draft":
                outputs["draft_tokens"].add_(1).remainder_(VOCAB)
            return outputs

        super().decode(replace(step, run=run))


class LeavesAGapInItsKeys(SmallModel):
    """It does not read the last draft, whose key is missing if all drafts are accepted."""

    def decode(self, step: DecodeStep) -> None:
        """Decode without the last pass."""
        passes = itertools.count(1)

        def run(lane: str, batch: ForwardBatch) -> StepOutputs:
            if next(passes) < self.context.draft.num_draft_tokens:
                return step.run(lane, batch)
            return StepOutputs(logits=(torch.zeros(batch.batch_size, VOCAB), "bs"))

        super().decode(replace(step, run=run))


PLANTED: list[tuple[str, type[SpeculationAlgorithm], DraftLimits]] = [
    ("SP01", SwapsTokens, CHAIN),
    ("SP01", ShortensLengths, CHAIN),
    ("SP02", HasTwoVerifications, CHAIN),
    ("SP02", NamesNoRunner, CHAIN),
    ("SP02", TakesAnotherRunner, CHAIN),
    ("SP02", ChangesItsState, CHAIN),
    ("SP03", VerifiesTwice, CHAIN),
    ("SP03", NeverVerifies, CHAIN),
    ("SP03", VerifiesInt32, CHAIN),
    ("SP03", VerifiesTheNewestToo, CHAIN),
    ("SP03", CountsParentsFromOne, TREE),
    ("SP04", RunsTheTarget, CHAIN),
    ("SP04", KeepsHostLengths, TREE),
    ("SP04", ExtendsOneLater, CHAIN),
    ("SP04", CountsTheNewest, CHAIN),
    ("SP05", WritesTheNeighboursSlots, CHAIN),
    ("SP05", ReversesItsSlots, CHAIN),
    ("SP05", BranchesShareSlots, TREE),
    ("SP06", WritesByBatchIndex, CHAIN),
    ("SP06", ReadsByBatchIndex, CHAIN),
    ("SP06", LooksEverywhere, CHAIN),
    ("SP07", SwapsTokens, CHAIN),
    ("SP07", ScalesHiddenStates, TREE),
    ("SP07", MovesLengthsOn, CHAIN),
    ("SP07", ShiftsDraftsInPlace, TREE),
    ("SP07", WritesPrompts, CHAIN),
    ("SP08", KeepsTheLastDraft, CHAIN),
    ("SP08", CountsInTheClass, CHAIN),
    ("SP08", KeepsHiddenStatesByRow, CHAIN),
    ("SP09", WritesStateBeforeItExtends, TREE),
    ("SP09", SwallowsErrors, CHAIN),
    ("SP10", RefusesChunks, CHAIN),
    ("SP11", HasNoRoom, CHAIN),
    ("SP11", NeedsTwoTokens, CHAIN),
    ("SP12", OneTokenOff, CHAIN),
    ("SP12", ShiftsHiddenStates, CHAIN),
    ("SP12", KeepsKeysOfDrafts, CHAIN),
    ("SP12", ForgetsTheAccepted, TREE),
    ("SP12", LeavesAGapInItsKeys, CHAIN),
    ("SP13", TakesTheLastDraft, CHAIN),
    ("SP13", ForgetsLaterChunks, CHAIN),
    ("SP14", ReadsCounts, CHAIN),
    ("SP14", ReadsNewTokens, CHAIN),
    ("SP14", CopiesFromTheHost, CHAIN),
]
"""Bugs, each with the rule that catches it and the size of drafts."""


@pytest.mark.few(14)
@pytest.mark.parametrize(("rule", "algorithm", "draft"), PLANTED)
def test_a_planted_bug_is_caught(
    rule: str, algorithm: type[SpeculationAlgorithm], draft: DraftLimits
) -> None:
    """Each bug fails its own rule, with evidence, a fix and the line that reproduces it."""
    (result,) = results(algorithm, draft, replace(ONCE, only=frozenset({rule}))).values()
    assert result.outcome is Outcome.FAIL, result
    (finding,) = result.findings
    assert finding.actual
    assert finding.expected == ALGORITHM_RULES[rule].requirement
    assert finding.help
    assert f"--only {rule} --lane '{AlgorithmLane(algorithm, draft)}'" in str(finding.reproduce)


def test_every_rule_has_a_planted_bug() -> None:
    """A rule without a bug that breaks it would not be trusted."""
    assert {rule for rule, _, _ in PLANTED} == set(ALGORITHM_RULES)


@pytest.mark.few(1)
@pytest.mark.parametrize("algorithm", [OneTokenOff, ShiftsHiddenStates, TakesTheLastDraft])
def test_wrong_drafts_are_no_loss(algorithm: type[SpeculationAlgorithm]) -> None:
    """An algorithm whose drafts are wrong keeps every MUST: they cost time, and no token."""
    must = [rule.id for rule in ALGORITHM_RULES.values() if rule.level == "MUST"]
    assert {*outcomes(algorithm, CHAIN, *must).values()} == {Outcome.PASS}


def test_bugs_of_the_state_are_no_loss_of_tokens() -> None:
    """Reading another request's row changes drafts, and is caught although all tokens are right."""
    assert outcomes(ReadsByBatchIndex, CHAIN, "SP01", "SP06") == {
        "SP01": Outcome.PASS,
        "SP06": Outcome.FAIL,
    }
