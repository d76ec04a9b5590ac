"""`Decoding`: a small engine for one speculation algorithm: requests, memory, steps and verification.

It gives the algorithm what an engine gives it: the tensors of a step, lanes, the request state and `verify`.
Memory that no request owns is poisoned: rows of the state and of the page table, and KV slots, which are new
ones for each step's drafts. After a step its tensors are overwritten.

Verification is that of `DecodeStep.verify`, written again: the target reads its tokens from the KV cache.

Does not: schedule (see `schedules`), or judge; it notes faults by rule.
"""

import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from graphpact.attention import DraftLimits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.runners import GraphRunner
from graphpact.speculation import (
    DecodeStep,
    ExtendStep,
    SpeculationAlgorithm,
    SpeculationContext,
    Verified,
)
from graphpact.step import StepOutputs
from graphpact.tensors import same
from graphpact_conformance.algorithms.draft_lanes import DraftLanes
from graphpact_conformance.algorithms.lane_batches import StepMemory, batch_faults, slot_faults, verify_faults
from graphpact_conformance.algorithms.random_models import (
    DTYPE,
    TARGET_WIDTH,
    VOCAB,
    WIDTH,
    RandomDraft,
    RandomTarget,
    Skill,
    Text,
    hidden_states,
)
from graphpact_conformance.contracts.host_reads import host_reads_refused
from graphpact_tape.poison import poison, poison_of

ROWS = 5
"""Request rows, besides scratch."""
MAX_MODEL_LEN = 40

Drafts = tuple[tuple[int, ...], tuple[int, ...] | None]
"""The drafts of one request, and their parents."""


class RefusedCallError(Exception):
    """The algorithm called `verify` or a lane in a way that no engine accepts."""


@dataclass(eq=False)
class DecodedRequest:
    """One request.

    Args:
        prompt: Its prompt.
        tokens: Its prompt and its tokens so far; the last one has no key yet, unless the prompt is unread.
        row: Its request row; 0 without memory.
        cached: Tokens with a key.
        slots: Its KV slots by position.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    row: int = 0
    cached: int = 0
    slots: list[int] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        """Its tokens after the prompt."""
        return self.tokens[len(self.prompt) :]

    def slots_between(self, begin: int, end: int) -> dict[int, int]:
        """Return its KV slots by position, from ``begin`` up to ``end``."""
        return {at: self.slots[at] for at in range(begin, end)}


@dataclass(frozen=True)
class DecodingSetup:
    """What a `Decoding` is made of.

    Args:
        algorithm: The class.
        runners: The classes of the runners of its lanes, by name.
        draft: The largest draft.
        text: The text of the target.
        skill: The skill of the draft model.
        seed: Seed of models and memory.
        layout: Seed of the order of rows and KV slots.
        unowned: What unowned rows of the state hold: poison, or random valid numbers.
    """

    algorithm: type[SpeculationAlgorithm]
    runners: Mapping[str, type[GraphRunner]]
    draft: DraftLimits
    text: Text = "random"
    skill: Skill = "mixed"
    seed: int = 0
    layout: int = 0
    unowned: str = "poison"


class Decoding:
    """A small engine for one algorithm.

    Args:
        setup: Its parts.

    Attributes:
        faults: What the algorithm did against the contract, in words, by rule.
        drafted: For every decoded request and step, its tokens before the step, and its drafts.
        accepted: For every decoded request and step, the accepted drafts and the longest path.
        algorithm: The instance that runs the next step.
        fails: Called before each lane and each verification with its name; it may raise.
        before_step: Called before each step.
        around_step: Called with each call of the algorithm, which it makes, once or several times.
        refuses_reads: Whether steps refuse host reads.
    """

    def __init__(self, setup: DecodingSetup) -> None:
        self.setup, self.draft = setup, setup.draft
        draft = setup.draft
        self.room = max(draft.num_steps * draft.topk, draft.num_draft_tokens)
        context = MAX_MODEL_LEN + self.room + 1
        self.target = RandomTarget(setup.seed, setup.text, context)
        roles = setup.algorithm.lanes
        self.has_draft = any(role.model == "draft" for role in roles.values())
        self.frozen = any(setup.runners[r.runner].frozen_kv for r in roles.values() if r.model == "draft")
        self.context = SpeculationContext(
            draft,
            MAX_MODEL_LEN,
            TARGET_WIDTH if self.has_draft else 0,
            WIDTH if self.has_draft else 0,
            DTYPE,
        )
        self.algorithm = self.new_algorithm()
        slots = ROWS * context + 1
        self.table = torch.full((ROWS + 1, context), slots + 7, dtype=torch.int32)
        self.table[0] = 0
        caches = [torch.full((slots, 1, WIDTH), float("nan"), dtype=DTYPE) for _ in range(4)]
        for cache in caches:
            cache[0] = 0.0
        self.kv = SimpleNamespace(k=caches[:2], v=caches[2:])
        model = RandomDraft(self.target, setup.seed, setup.skill, frozen=self.frozen)
        self.lanes = DraftLanes(roles, setup.runners, model, draft, ROWS, self.table, self.kv)
        self._rng = random.Random(f"{setup.seed}:{setup.layout}")  # noqa: S311  test data
        self._free_rows = self._rng.sample(range(1, ROWS + 1), ROWS)
        self._free_slots = self._rng.sample(range(1, slots), slots - 1)
        self.state = {
            name: torch.zeros((ROWS + 1, *shape), dtype=dtype)
            for name, (shape, dtype) in self.algorithm.state().items()
        }
        self._forget(range(ROWS + 1))
        self.faults: dict[str, list[str]] = {}
        self.drafted: list[tuple[tuple[int, ...], Drafts]] = []
        self.accepted: list[tuple[int, int]] = []
        self.fails: Callable[[str], None] = lambda _: None
        self.before_step: Callable[[], object] = lambda: None
        self.around_step: Callable[[Callable[[], None]], None] = lambda step: step()
        self.refuses_reads = False
        self._guard: Any = None
        self._memory = StepMemory({}, {})
        self._verified: tuple[Verified, list[list[int]]] | None = None

    def new_algorithm(self) -> SpeculationAlgorithm:
        """Return a new instance of the algorithm."""
        return self.setup.algorithm(self.context)

    # -- requests and memory ---------------------------------------------------------------------

    def join(self, prompt: Sequence[int]) -> DecodedRequest:
        """Return a new request with memory."""
        request = DecodedRequest([*prompt], [*prompt])
        self.admit(request)
        return request

    def admit(self, request: DecodedRequest) -> None:
        """Give a request a row. All of its tokens have to be read."""
        request.row, request.cached = self._free_rows.pop(), 0

    def leave(self, request: DecodedRequest) -> None:
        """Take the memory of a request, which may be admitted again, as after preemption."""
        self._release(request, 0)
        self._forget([request.row])
        self.table[request.row] = len(self.kv.k[0]) + 7
        self._free_rows.insert(0, request.row)
        request.row = request.cached = 0

    def _forget(self, rows: Sequence[int] | range) -> None:
        """Fill unowned rows of the state with poison, or with random valid numbers."""
        rng = torch.Generator().manual_seed(self.setup.layout)
        for tensor in self.state.values():
            for row in rows:
                if self.setup.unowned == "poison" or tensor.dtype is torch.bool:
                    poison(tensor[row])
                elif tensor.is_floating_point():
                    tensor[row] = torch.randn(tensor[row].shape, generator=rng).to(tensor.dtype)
                else:
                    tensor[row] = torch.randint(2, VOCAB, tensor[row].shape, generator=rng).to(tensor.dtype)

    def _reserve(self, request: DecodedRequest, length: int) -> None:
        while len(request.slots) < length:
            slot = self._free_slots.pop()
            self.table[request.row, len(request.slots)] = slot
            request.slots.append(slot)

    def _release(self, request: DecodedRequest, length: int) -> None:
        """Take the KV slots after the first ``length`` positions, and poison them."""
        for at in range(length, len(request.slots)):
            for cache in (*self.kv.k, *self.kv.v):
                cache[request.slots[at]] = float("nan")
            self.table[request.row, at] = len(self.kv.k[0]) + 7
            self._free_slots.insert(self._rng.randrange(len(self._free_slots) + 1), request.slots[at])
        del request.slots[length:]

    # -- the target --------------------------------------------------------------------------------

    def _write(self, slots: torch.Tensor, shares: torch.Tensor) -> None:
        """Write keys of the target."""
        self.kv.k[0][slots] = 0.0
        self.kv.v[0][slots] = shares[:, None, None].to(DTYPE)

    def _sum(self, row: int, length: int) -> int:
        """Return the sum over the first ``length`` keys of a request, from the KV cache."""
        slots = self.table[row, :length].long()
        return int(self.kv.v[0][slots, 0, 0].double().sum().round().nan_to_num(nan=-1.0))

    def _hidden(self, sums: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return the target's hidden states of tokens of some request rows."""
        if not self.has_draft:
            return torch.zeros(len(sums), 0, dtype=DTYPE)
        first = self.kv.v[0][self.table[rows, 0].long(), 0, 0].long()
        return hidden_states(sums, index, first, TARGET_WIDTH)

    # -- a step of prompts -----------------------------------------------------------------------

    def extend(self, requests: Mapping[DecodedRequest, int] | Sequence[DecodedRequest]) -> None:
        """Read tokens of requests: up to a number of tokens of each, or all.

        Raises:
            Exception: The algorithm raised it, or the step was refused; no request has changed.
        """
        self.before_step()
        ends = dict(requests) if isinstance(requests, Mapping) else {r: len(r.tokens) for r in requests}
        self.around_step(lambda: self._extend(ends))

    @torch.inference_mode()
    def _extend(self, ends: Mapping[DecodedRequest, int]) -> None:
        for request, end in ends.items():
            self._reserve(request, end)
        rows = torch.tensor([r.row for r in ends])
        new = torch.tensor([end - r.cached for r, end in ends.items()])
        lens = torch.tensor([*ends.values()])
        at = torch.cat([torch.arange(r.cached, end) for r, end in ends.items()])
        ids = torch.tensor([t for r, end in ends.items() for t in r.tokens[r.cached : end]])
        of_row = rows.repeat_interleave(new)
        slots = self.table[of_row, at].long()
        self._write(slots, self.target.weigh(ids, at))
        totals: list[int] = []
        following: list[int] = []
        sampled: list[int] = []
        for request, end in ends.items():
            its = [self._sum(request.row, stop) for stop in range(request.cached + 1, end + 1)]
            next_id = int(
                self.target.next_of(torch.tensor([its[-1]]), torch.tensor([request.tokens[end - 1]]))[0]
            )
            totals += its
            known = request.tokens[request.cached + 1 : end + 1]
            following += known if end < len(request.tokens) else [*known, next_id]
            sampled.append(next_id)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(ends),
            input_ids=ids,
            positions=at,
            out_cache_loc=slots,
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            extend_seq_lens=new,
            extend_seq_lens_cpu=new.clone(),
        )
        self._memory = StepMemory(
            {r.row: r.slots_between(r.cached, end) for r, end in ends.items()},
            {r.row: end for r, end in ends.items()},
        )
        step = ExtendStep(
            batch=batch,
            hidden_states=self._hidden(torch.tensor(totals), at, of_row),
            next_token_ids=torch.tensor(following),
            state=self.state,
            run=self._run,
        )
        self._call(self.algorithm.extend, step, batch.tensors(), [r.row for r in ends])
        for (request, end), token in zip(ends.items(), sampled, strict=True):
            request.cached = end
            if end == len(request.tokens):
                request.tokens.append(token)

    # -- a step of decoding ----------------------------------------------------------------------

    def decode(self, requests: Sequence[DecodedRequest]) -> None:
        """Let each request draft and verify, and commit its tokens.

        Raises:
            Exception: The algorithm raised it, or a call was refused; no request has changed.
        """
        self.before_step()
        self.around_step(lambda: self._decode(requests))

    @torch.inference_mode()
    def _decode(self, requests: Sequence[DecodedRequest]) -> None:
        for request in requests:
            self._release(request, request.cached)
            self._reserve(request, request.cached + self.room)
        rows = torch.tensor([r.row for r in requests])
        lens = torch.tensor([r.cached for r in requests])
        self._memory = StepMemory(
            {r.row: r.slots_between(r.cached, len(r.slots)) for r in requests},
            {r.row: r.cached for r in requests},
        )
        self._verified = None
        step = DecodeStep(
            token_ids=torch.tensor([r.tokens[-1] for r in requests]),
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            cache_loc=self.table[rows[:, None], lens[:, None] + torch.arange(self.room)].long(),
            state=self.state,
            run=self._run,
            verify=lambda drafts, parents: self._verify(requests, step, drafts, parents),
        )
        self._call(self.algorithm.decode, step, {}, [r.row for r in requests])
        for request, its in zip(requests, self._verified_tokens(), strict=True):
            request.cached += len(its)
            request.tokens += its
            self._release(request, request.cached)

    def _verified_tokens(self) -> list[list[int]]:
        """Return the tokens of each request of this step."""
        if self._verified is None:
            self._fault("SP03", "a decode step ended without a call of verify")
            raise RefusedCallError("a decode step ended without a call of verify")
        return self._verified[1]

    def _verify(
        self,
        requests: Sequence[DecodedRequest],
        step: DecodeStep,
        drafts: torch.Tensor,
        parents: torch.Tensor | None,
    ) -> Verified:
        """See `DecodeStep.verify`."""
        with self._aside():
            self.fails("verify")
            bs, width = len(requests), self.draft.num_draft_tokens
            faults = [*verify_faults((bs, width - 1), drafts, parents)]
            if self._verified is not None:
                faults = ["drafts of this step a second time"]
            if faults:
                self._fault("SP03", f"verify was called with {faults[0]}")
                raise RefusedCallError(f"verify was called with {faults[0]}")
            ids = torch.cat([step.token_ids[:, None], drafts], dim=1)
            ahead = torch.zeros(bs, 1).long()
            chain = torch.arange(width - 1).expand(bs, -1)
            above = torch.cat([ahead, chain if parents is None else parents], dim=1).tolist()
            sums, depths = self._read(step, ids, above)
            chosen = self.target.next_of(sums.flatten(), ids.flatten()).view(bs, width).tolist()
            paths, tokens = [], []
            for number, (row, its_parents) in enumerate(zip(ids.tolist(), above, strict=True)):
                path, its = [0], [chosen[number][0]]
                for at in range(1, width):
                    if its_parents[at] == path[-1] and row[at] == its[-1]:
                        path.append(at)
                        its.append(chosen[number][at])
                paths.append(path)
                tokens.append(its)
                parents_of = None if parents is None else tuple(parents[number].tolist())
                before = tuple(requests[number].tokens)
                self.drafted.append((before, (tuple(row[1:]), parents_of)))
                self.accepted.append((len(path) - 1, max(depths[number])))
            verified = self._answer(step, sums, depths, paths, tokens)
            self._follow(step, paths)
            self._verified = verified, tokens
            correct = {r.row: len(path) - 1 for r, path in zip(requests, paths, strict=True)}
            self._memory = StepMemory(self._memory.slots, self._memory.lengths, correct)
            return verified

    def _read(
        self, step: DecodeStep, ids: torch.Tensor, above: list[list[int]]
    ) -> tuple[torch.Tensor, list[list[int]]]:
        """Let the target read drafts; return the sum after each, and its depth below the newest token."""
        width = ids.shape[1]
        depths = [[0] * width for _ in above]
        for row, its in zip(above, depths, strict=True):
            for place in range(1, width):
                its[place] = its[row[place]] + 1
        at = step.seq_lens[:, None] + torch.tensor(depths)
        shares = self.target.weigh(ids.flatten(), at.flatten()).view_as(ids)
        self._write(step.cache_loc[:, :width].flatten(), shares.flatten())
        sums = torch.zeros_like(ids)
        rows, lens = step.req_pool_indices.tolist(), step.seq_lens.tolist()
        for number, (row, length) in enumerate(zip(rows, lens, strict=True)):
            for place in range(width):
                before = int(sums[number, above[number][place]]) if place else self._sum(row, length)
                sums[number, place] = before + shares[number, place]
        return sums, depths

    def _answer(
        self,
        step: DecodeStep,
        sums: torch.Tensor,
        depths: list[list[int]],
        paths: list[list[int]],
        tokens: list[list[int]],
    ) -> Verified:
        """Return the result of a verification. Rows without meaning have random valid values."""
        width = sums.shape[1]
        order, following = [], []
        for row, length, path, its in zip(
            step.req_pool_indices.tolist(), step.seq_lens.tolist(), paths, tokens, strict=True
        ):
            # The same values if the step is repeated.
            rng = random.Random(f"{self.setup.layout}:{self._sum(row, length)}")  # noqa: S311  test data
            order.append([*path, *(rng.randrange(width) for _ in range(width - len(path)))])
            following.append([*its, *(rng.randrange(VOCAB) for _ in range(width - len(its)))])
        rows_of = torch.tensor(order)
        index = (step.seq_lens[:, None] + torch.tensor(depths)).gather(1, rows_of)
        rows = step.req_pool_indices.repeat_interleave(width)
        return Verified(
            hidden_states=self._hidden(sums.gather(1, rows_of).flatten(), index.flatten(), rows),
            next_token_ids=torch.tensor(following).flatten(),
            num_correct_drafts=torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32),
        )

    def _follow(self, step: DecodeStep, paths: list[list[int]]) -> None:
        """Move the target's keys of each path to the slots after the sequence."""
        for slots, path in zip(step.cache_loc.tolist(), paths, strict=True):
            for cache in (self.kv.k[0], self.kv.v[0]):
                cache[slots[: len(path)]] = cache[[slots[at] for at in path]].clone()

    # -- calls of the algorithm --------------------------------------------------------------------

    def _run(self, name: str, batch: Any) -> StepOutputs:
        """Run a step of a lane; see `RunLane`."""
        with self._aside():
            self.fails(name)
            role = self.setup.algorithm.lanes.get(name)
            if role is None or role.model == "target":
                known = [n for n, r in self.setup.algorithm.lanes.items() if r.model == "draft"]
                what = f"lane {name!r} was run; declared lanes of the draft model: {known}"
                self._fault("SP04", what)
                raise RefusedCallError(what)
            faults = [*batch_faults(role, batch, self.draft, self._memory, frozen=self.frozen)]
            for fault in faults:
                self._fault("SP04", f"the batch of lane {name!r}: {fault}")
            if faults:
                raise RefusedCallError(f"the batch of lane {name!r}: {faults[0]}")
            for fault in slot_faults(batch, self._memory):
                self._fault("SP05", f"the batch of lane {name!r}: {fault}")
                raise RefusedCallError(f"the batch of lane {name!r}: {fault}")
            return self.lanes.run(name, batch)

    def _call(
        self,
        method: Callable[[Any], object],
        step: ExtendStep | DecodeStep,
        more: Mapping[str, torch.Tensor],
        rows: Sequence[int],
    ) -> None:
        """Call the algorithm, note what it wrote, and overwrite the tensors of the step."""
        tensors = {name: getattr(step, name) for name in type(step).__slots__}
        tensors = {**{n: t for n, t in tensors.items() if isinstance(t, torch.Tensor)}, **more}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        state = copy.deepcopy(self.state)
        given: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._noting = given
        host = [tensor for name, tensor in tensors.items() if name.endswith("_cpu")]
        try:
            if self.refuses_reads:
                with host_reads_refused(host, "in a step") as guard:
                    self._guard = guard
                    method(step)
            else:
                method(step)
        finally:
            refused = None if self._guard is None else self._guard.refused
            self._guard = None
            if refused is not None:
                self._fault("SP14", str(refused))
            written = [name for name, old in before.items() if not _is_same(tensors[name], old)]
            written += [name for name, (tensor, old) in given.items() if not _is_same(tensor, old)]
            for name in written:
                self._fault("SP07", f"{type(step).__name__}: {name} was modified")
            others = [row for row in range(1, ROWS + 1) if row not in rows]
            for name, tensor in self.state.items():
                if not _is_same(tensor[others], state[name][others]):
                    changed = [row for row in others if not _is_same(tensor[row], state[name][row])]
                    self._fault("SP06", f"{name!r} was written in rows {changed}; the step has {rows}")
        self.lanes.expire()
        for tensor in tensors.values():
            tensor.fill_(poison_of(tensor.dtype))
        if self._verified is not None:
            for tensor in vars_of(self._verified[0]).values():
                tensor.fill_(poison_of(tensor.dtype))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Let code of the suite read tensors, inside a step of the algorithm; watch what it returns."""
        guard = self._guard
        if guard is not None:
            guard.paused = True
        try:
            yield
        finally:
            for name, tensor in self._now_given().items():
                self._noting.setdefault(name, (tensor, tensor.clone()))
                if self._noting[name][0] is not tensor:
                    self._noting[name] = tensor, tensor.clone()
            if guard is not None:
                guard.paused = False

    def _now_given(self) -> dict[str, torch.Tensor]:
        given = self.lanes.given()
        if self._verified is not None:
            given |= {f"{name} of Verified": t for name, t in vars_of(self._verified[0]).items()}
        return given

    def _fault(self, rule: str, what: str) -> None:
        known = self.faults.setdefault(rule, [])
        if what not in known:
            known.append(what)


def vars_of(verified: Verified) -> dict[str, torch.Tensor]:
    """Return the tensors of a verification by name."""
    return {name: getattr(verified, name) for name in Verified.__slots__}


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(same(a, b).all())
