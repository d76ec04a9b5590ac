"""`Speculator`: runs the steps of a speculation algorithm, and verifies its drafts.

    extend    the target reads prompt tokens; the algorithm prepares the first draft
    decode    the algorithm drafts; `_Round.verify` runs the target over the drafts, lets the sampler choose
              a token after each of them, and accepts the path on which drafts and chosen tokens agree

A draft is accepted if it equals the token that the request would get without it. That token follows from the
target's logits after the path to the draft, and from the request's sampling parameters and random number. So
every token is drawn from the target's distribution, and a request gets the same tokens with and without
speculation, up to the rounding of logits. For drafts that are not drawn at random this is rejection sampling
(Leviathan et al. 2023, Chen et al. 2023): a draft ``x`` is accepted with the target's probability ``p(x)``;
otherwise the token is drawn from the rest of ``p``.

Does not: schedule, commit tokens, depend on one algorithm, or keep anything if a step fails.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from graphpact.attention import DraftLimits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.errors import EngineError
from graphpact.speculation import (
    DecodeStep,
    ExtendStep,
    RunLane,
    SpeculationAlgorithm,
    Verified,
)
from graphpact.step import StepOutputs
from graphpact_engine.batches import int64_tensor
from graphpact_engine.request import Request
from graphpact_engine.scheduled import ScheduledBatch

SampleAfter: TypeAlias = Callable[[torch.Tensor, Sequence[Request], Sequence[Sequence[int]]], list[int]]
"""`Sampler.sample_after`."""


@dataclass(slots=True)
class SpeculationStats:
    """Counts of a run.

    Args:
        verifications: Verified drafts, one for each request and decode step.
        accepted: How many drafts had their first, second, .. token accepted, by position from 1.
        seconds: Time in steps of lanes, by their mode; ``prefill`` is the target's.
    """

    verifications: int = 0
    accepted: Counter[int] = field(default_factory=Counter)
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_verification(self) -> float:
        """Mean tokens that a request gets in a decode step, including the one after the accepted drafts."""
        return 1 + self.accepted.total() / self.verifications if self.verifications else 0.0


class Speculator:
    """The steps of one algorithm. They run in `torch.inference_mode`, as all steps of an engine.

    Args:
        algorithm: The algorithm.
        run: Runs steps of lanes.
        sample: Chooses tokens: `Sampler.sample_after`.
        draft: The largest draft.
        state: The request state of the algorithm.
        target_cache: The keys and values of every layer of the target, ``[slots, ...]`` each.
        max_position: The last position of the models. Drafts beyond it can never be accepted.

    Attributes:
        stats: The counts.
    """

    def __init__(
        self,
        algorithm: SpeculationAlgorithm,
        *,
        run: RunLane,
        sample: SampleAfter,
        draft: DraftLimits,
        state: dict[str, torch.Tensor],
        target_cache: Sequence[torch.Tensor],
        max_position: int,
    ) -> None:
        self.stats = SpeculationStats()
        self.algorithm = algorithm
        self.sample = sample
        self.draft = draft
        self.state = state
        self.target_cache = target_cache
        self.max_position = max_position
        self.depths = torch.arange(draft.num_draft_tokens, device=target_cache[0].device)
        """``[num_draft_tokens]`` int64: 0, 1, ..; the depths of the tokens of a chain."""
        self._run = run
        (self.verify_mode,) = (
            name for name, role in algorithm.lanes.items() if role.mode is ForwardMode.TARGET_VERIFY
        )

    def run(self, mode: str, batch: ForwardBatch) -> StepOutputs:
        """Run a step of the lanes of ``mode``, and count its time."""
        start = time.perf_counter()
        try:
            return self._run(mode, batch)
        finally:
            spent = self.stats.seconds.get(mode, 0.0)
            self.stats.seconds[mode] = spent + time.perf_counter() - start

    def extend(self, scheduled: ScheduledBatch) -> list[list[int]]:
        """Run a step of prompt tokens; return the tokens of each request: one, or none in a prompt.

        The target's outputs are read before the algorithm runs another lane.
        """
        batch, requests = scheduled.batch, scheduled.requests
        outputs = self.run("prefill", batch)
        rows = scheduled.sampled_indices
        sampled = self.sample(outputs.logits[rows], scheduled.sampled_requests, [()] * len(rows))
        tokens = scheduled.tokens_of(sampled)
        following: list[int] = []
        ends = batch.seq_lens_cpu.tolist()
        lengths = batch.required_extend_lens()[1].tolist()
        for request, end, length, own in zip(requests, ends, lengths, tokens, strict=True):
            following += request.token_ids(end - length + 1, end + 1) + own
        self.algorithm.extend(
            ExtendStep(
                batch=batch,
                hidden_states=_hidden_states(outputs, batch),
                next_token_ids=torch.tensor(following, dtype=torch.int64, device=batch.device),
                state=self.state,
                run=self.run,
            )
        )
        return self._used(requests, tokens)

    def decode(self, scheduled: ScheduledBatch) -> list[list[int]]:
        """Run a decode step; return the tokens of each request, one or more."""
        batch, cache_loc = scheduled.batch, scheduled.cache_loc
        if cache_loc is None:
            raise EngineError("a decode step has no reserved KV slots")
        seq_lens, seq_lens_cpu = batch.positions, batch.seq_lens_cpu - 1  # the tokens before the newest
        verification = _Round(self, scheduled.requests, batch, seq_lens, seq_lens_cpu, cache_loc)
        self.algorithm.decode(
            DecodeStep(
                token_ids=batch.input_ids,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=seq_lens,
                seq_lens_cpu=seq_lens_cpu,
                cache_loc=cache_loc,
                state=self.state,
                run=self.run,
                verify=verification.verify,
            )
        )
        if not verification.is_done:
            raise EngineError(
                f"{type(self.algorithm).__name__} ended a decode step without a verification",
                hint="a defect of that algorithm: call step.verify once in a step",
            )
        accepted = self.stats.accepted
        for tokens in verification.tokens:
            self.stats.verifications += 1
            for position in range(1, len(tokens)):
                accepted[position] += 1
        return self._used(scheduled.requests, verification.tokens)

    @staticmethod
    def _used(requests: Sequence[Request], tokens: list[list[int]]) -> list[list[int]]:
        """Return the tokens of each request; use up their random numbers, since nothing fails now."""
        for request, its_tokens in zip(requests, tokens, strict=True):
            request.use_uniforms(len(its_tokens))
        return tokens


@dataclass(slots=True)
class _Round:
    """One verification.

    Args:
        owner: The speculator.
        requests: The requests.
        batch: The decode batch of their newest tokens.
        seq_lens: ``[bs]`` int64: tokens in the cache.
        seq_lens_cpu: The same on the host.
        cache_loc: ``[bs, n]`` int64: their reserved KV slots.
        tokens: The tokens of each request.
        is_done: Whether `verify` was called.
    """

    owner: Speculator
    requests: Sequence[Request]
    batch: ForwardBatch
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    cache_loc: torch.Tensor
    tokens: list[list[int]] = field(default_factory=list)
    is_done: bool = False

    def verify(self, drafts: torch.Tensor, parents: torch.Tensor | None) -> Verified:
        """See `DecodeStep.verify`.

        Raises:
            EngineError: Drafts or parents have another shape than ``num_draft_tokens`` says, or the drafts
                of this step were verified already.
        """
        owner, width = self.owner, self.owner.draft.num_draft_tokens
        expected = [len(self.requests), width - 1]
        given = [list(each.shape) for each in (drafts, parents) if each is not None]
        if self.is_done or any(shape != expected for shape in given):
            what = "a second time" if self.is_done else f"drafts and parents {given}; expected {expected}"
            raise EngineError(
                f"{type(owner.algorithm).__name__} verifies {what}",
                hint="a defect of that algorithm: verify num_draft_tokens - 1 drafts of each request, once",
            )
        self.is_done = True
        # Copies: outputs of the draft's lane are valid until its next step.
        ids = torch.cat([self.batch.input_ids.unsqueeze(1), drafts], dim=1)
        mask = None if parents is None else _tree_mask(parents, owner.draft.num_steps)
        batch = self._batch_of(ids, mask)
        outputs = owner.run(owner.verify_mode, batch)
        paths = self._accept(outputs.logits, ids, parents)
        if parents is not None:
            self._follow(paths, batch.out_cache_loc)
        count = batch.num_tokens
        numbers: list[int] = []  # one copy to the device
        for begin, path in zip(range(0, count, width), paths, strict=True):
            numbers.extend([begin + at for at in _padded(path, width)])
        for tokens in self.tokens:
            numbers.extend(_padded(tokens, width))
        numbers.extend([len(path) - 1 for path in paths])
        table = int64_tensor(numbers).to(ids.device)
        return Verified(
            hidden_states=_hidden_states(outputs, batch).index_select(0, table[:count]),
            next_token_ids=table[count : 2 * count],
            num_correct_drafts=table[2 * count :].to(torch.int32),
        )

    def _batch_of(self, ids: torch.Tensor, mask: torch.Tensor | None) -> ForwardBatch:
        """Return the batch of the target: the tokens ``ids`` ``[bs, width]`` of each request."""
        bs, width = ids.shape
        depth = self.owner.depths if mask is None else mask.sum(dim=2) - 1
        positions = (self.seq_lens.unsqueeze(1) + depth).clamp_(max=self.owner.max_position)
        return ForwardBatch(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=bs,
            input_ids=ids.flatten(),
            positions=positions.flatten(),
            out_cache_loc=self.cache_loc[:, :width].flatten(),
            req_pool_indices=self.batch.req_pool_indices,
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.seq_lens_cpu,
            tree_mask=None if mask is None else mask.flatten(0, 1),
        )

    def _accept(
        self, logits: torch.Tensor, ids: torch.Tensor, parents: torch.Tensor | None
    ) -> list[list[int]]:
        """Set `tokens`, and return the accepted path of each request: indices into its row of ``ids``."""
        drafted: list[list[int]] = ids.tolist()
        width = ids.shape[1]
        chain = [list(range(width - 1))] * len(drafted)
        parent_of: list[list[int]] = chain if parents is None else parents.tolist()
        each = [request for request in self.requests for _ in range(width)]
        chosen = self.owner.sample(logits, each, _Drafts(drafted, parent_of))
        paths = []
        for begin, row, parent in zip(range(0, len(chosen), width), drafted, parent_of, strict=True):
            path, tokens = accepted_path(row, parent, chosen[begin : begin + width])
            paths.append(path)
            self.tokens.append(tokens)
        return paths

    def _follow(self, paths: Sequence[Sequence[int]], slots: torch.Tensor) -> None:
        """Move the target's keys and values of each path to the slots that follow the sequence.

        Args:
            paths: The accepted path of each request: indices into its drafts.
            slots: ``[bs * width]`` int64: the slot of each draft.
        """
        width = self.owner.draft.num_draft_tokens
        moves = [
            (begin + at, begin + to)
            for begin, path in zip(range(0, len(slots), width), paths, strict=True)
            for to, at in enumerate(path)
            if to != at
        ]
        if not moves:
            return
        numbers = int64_tensor([move[side] for side in (0, 1) for move in moves])
        source, to = slots.index_select(0, numbers.to(slots.device)).view(2, -1)
        for cache in self.owner.target_cache:
            cache.index_copy_(0, to, cache.index_select(0, source))


class _Drafts(Sequence[Sequence[int]]):
    """The drafts before each row of the target's logits, made where they are read: only by some sampling.

    Args:
        drafted: The newest token of each request, then its drafts.
        parents: For each draft of each request the index of the token that it follows.
    """

    def __init__(self, drafted: Sequence[Sequence[int]], parents: Sequence[Sequence[int]]) -> None:
        self._drafted = drafted
        self._parents = parents

    def __len__(self) -> int:
        return sum(map(len, self._drafted))

    def __getitem__(self, row: Any) -> Any:
        request, at = divmod(row, len(self._drafted[0]))
        drafts = []
        while at:
            drafts.append(self._drafted[request][at])
            at = self._parents[request][at - 1]
        return drafts[::-1]


def accepted_path(
    drafted: Sequence[int], parents: Sequence[int], chosen: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the path on which drafts equal the chosen tokens, and the request's tokens along it.

    Args:
        drafted: The newest token, then the drafts.
        parents: For each draft the index of the token that it follows.
        chosen: The token that the request would get after each of ``drafted``.

    Returns:
        Indices into ``drafted``, the newest token first; and as many tokens, the last of which is no draft.
    """
    path, tokens = [0], [chosen[0]]
    for at in range(1, len(drafted)):  # a draft has a higher index than the token that it follows
        if parents[at - 1] == path[-1] and drafted[at] == tokens[-1]:
            path.append(at)
            tokens.append(chosen[at])
    return path, tokens


def _hidden_states(outputs: StepOutputs, batch: ForwardBatch) -> torch.Tensor:
    """Return the target's hidden states ``[T, width]``; without a draft model the width is 0."""
    if "hidden_states" in outputs:
        return outputs["hidden_states"]
    return outputs.logits.new_empty((batch.num_tokens, 0))


def _tree_mask(parents: torch.Tensor, num_steps: int) -> torch.Tensor:
    """Return ``[bs, width, width]`` bool: whether each token sees each token of its request.

    Args:
        parents: ``[bs, width - 1]`` int64: the token that each draft follows.
        num_steps: The longest path of drafts.
    """
    bs, drafts = parents.shape
    itself = torch.eye(drafts + 1, dtype=torch.bool, device=parents.device).expand(bs, -1, -1)
    root = parents.new_zeros(bs, 1)
    above = torch.cat([root, parents], dim=1)[:, :, None].expand(-1, -1, drafts + 1)
    mask = itself
    for _ in range(num_steps):
        mask = itself | mask.gather(1, above)
    return mask


def _padded(numbers: list[int], width: int) -> list[int]:
    """Return ``width`` numbers: the given ones, and the last one again, which then has no meaning."""
    return numbers + numbers[-1:] * (width - len(numbers))
