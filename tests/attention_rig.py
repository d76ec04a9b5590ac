"""Lanes over a model of two attention layers, in every mode, and how they are held to the oracle.

`hold_to_oracle` is the whole check of one backend in one configuration; `configs_of` says which there are.

Does not: draw batches, or know what the right answer is.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from hypothesis import Phase, given, seed, settings

from attention_oracle import attend
from attention_problems import CPU, VOCAB, Case, Config, Problem, next_id, sequences
from graphpact import BackendContext, ForwardBatch, ForwardMode, GraphRunner, GraphShape, Lane
from graphpact.attention import (
    AttentionBackend,
    DraftMetadata,
    GraphSupport,
    ProviderName,
    kv_tensors,
)
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy
from graphpact.graphs import GraphDriver
from graphpact.graphs.tape import TapeDriver
from graphpact.runners import RunnerContext
from graphpact.shapes import BucketLadder, EagerReason
from graphpact.strict import StrictGuard

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps}
"""By how much an output may be off, of one more than its size: queries, keys and values are of scale 1."""


@dataclass(frozen=True)
class Answer:
    """What a batch has to leave.

    Args:
        rows: ``[T, columns]`` float64: what the model returns.
        caches: The memory of the KV cache afterwards, by name; the scratch page may hold anything.
    """

    rows: torch.Tensor
    caches: dict[str, torch.Tensor]


@dataclass(frozen=True)
class ShapeLadder(BucketLadder):
    """The shapes of a case, which a batch fits by its requests and its tokens.

    Args:
        case: Whose shapes they are.
    """

    case: Case | None = None

    @property
    def shapes(self) -> list[GraphShape]:
        """Those of the case."""
        assert self.case is not None
        return self.case.shapes

    def fit(self, batch: ForwardBatch) -> GraphShape | EagerReason:
        """Return the smallest shape with as many requests and tokens, or more."""
        for shape in self.shapes:
            if batch.batch_size <= shape.batch_size and batch.num_tokens <= shape.num_tokens:
                return shape
        return EagerReason.OVER_LARGEST


class KitRunner(GraphRunner):
    """Captures the shapes of one case, and pads as every runner of its mode has to.

    A padded request lies on request row 0 with the length that the backend declares, and brings no token
    in a ragged batch; a padded token writes KV slot 0. Of a tree, a padded token sees all draft tokens of
    its request, itself among them: no row of its scores is empty, and all that it sees is scratch.
    """

    modes: ClassVar = frozenset(ForwardMode)
    needs = GraphSupport.UNIFORM_DECODE

    def __init__(self, context: RunnerContext, case: Case) -> None:
        self.case = case
        super().__init__(context)

    def make_ladder(self) -> BucketLadder | None:
        """Return the shapes of the case, or None where the backend cannot be captured in it."""
        case = self.case
        if not self.context.backend.graph_support.covers(case.needs):
            return None
        return ShapeLadder(case.lane_mode, [s.batch_size for s in case.shapes], case=case)

    @property
    def _padded_seq_len(self) -> int:
        return self.context.backend.padded_seq_len(self.case.lane_mode, self.case.width or 1)

    def make_registry(self) -> CudaGraphBufferRegistry | None:
        """Return a slot for every field that a batch of the case has."""
        if self.ladder is None:
            return None
        case, largest = self.case, self.case.shapes[-1]
        registry = CudaGraphBufferRegistry(
            device=self.context.device,
            max_bs=largest.batch_size,
            max_num_tokens=largest.num_tokens,
        )

        def add(
            name: str, *row: int, pad: int | bool = 0, dtype: torch.dtype = torch.int64
        ) -> None:
            by_token = name in ("input_ids", "positions", "out_cache_loc", "tree_mask")
            registry.register_slot(
                GraphSlot(
                    name,
                    lambda bs, tokens: (tokens if by_token else bs, *row),
                    dtype,
                    axis="tokens" if by_token else "bs",
                    device=CPU if name.endswith("_cpu") else None,
                    padding_policy=PaddingPolicy.FILL_SENTINEL,
                    pad_value=pad,
                    owner="the kit",
                )
            )

        add("input_ids")
        add("positions")
        add("out_cache_loc", *[case.num_steps][: case.mode is ForwardMode.DRAFT_DECODE])
        add("req_pool_indices")
        add("seq_lens", pad=self._padded_seq_len)
        add("seq_lens_cpu", pad=self._padded_seq_len)
        if case.width is None:
            add("extend_seq_lens")
            add("extend_seq_lens_cpu")
        if case.tree:
            add("tree_mask", case.width or 0, pad=True, dtype=torch.bool)
        return registry

    def dummy_batch(self, shape: GraphShape) -> ForwardBatch:
        """Return requests on scratch alone: padding, every row; of a ragged batch one has all it can."""
        case, bs, tokens = self.case, shape.batch_size, shape.num_tokens
        lens = torch.full((bs,), self._padded_seq_len)
        extend = None
        if case.width is None:
            extend = torch.ones(bs, dtype=torch.int64)
            extend[0] = tokens - (bs - 1)
            lens = lens.maximum(extend)
        zeros = torch.zeros(tokens, dtype=torch.int64)
        drafts = case.mode is ForwardMode.DRAFT_DECODE
        batch = ForwardBatch(
            forward_mode=shape.mode,
            batch_size=bs,
            input_ids=zeros,
            positions=zeros,
            out_cache_loc=zeros[:, None].expand(-1, case.num_steps).clone() if drafts else zeros,
            req_pool_indices=zeros[:bs],
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            extend_seq_lens=extend,
            extend_seq_lens_cpu=None if extend is None else extend.clone(),
            tree_mask=torch.ones(tokens, case.width or 0, dtype=torch.bool) if case.tree else None,
        )
        return on_device(batch, self.context.device)


def on_device(batch: ForwardBatch, device: torch.device) -> ForwardBatch:
    """Return ``batch`` on ``device``, but for what lies on the host."""
    tensors = batch.tensors().items()
    moved = {name: t.to(device) for name, t in tensors if not name.endswith("_cpu")}
    return replace(batch, **moved)


class Rig:
    """One lane of a backend, and the memory around it.

    Args:
        backend: The class.
        config: What the lane is built for.
        strict: Whether its driver is strict, with a guard around it.
        in_graph: As ``Lane(metadata_in_graph=...)``.
        driver: Of its graphs.
        provider: Of its kernels.
        device: Of all but the oracle.
    """

    def __init__(
        self,
        backend: type[AttentionBackend],
        config: Config,
        *,
        strict: bool = True,
        in_graph: bool | None = None,
        driver: type[GraphDriver] = TapeDriver,
        provider: ProviderName = "auto",
        device: torch.device = CPU,
    ) -> None:
        self.config, self.device = config, device
        self.layers = [
            replace(at, sinks=None if at.sinks is None else at.sinks.to(device))
            for at in config.layers
        ]
        self.name = f"{backend.__name__} {config} strict={strict} in_graph={in_graph}"
        generator = torch.Generator().manual_seed(1)
        heads, dtype = config.heads, config.dtype
        rows = [(heads.num_q_heads, heads.head_dim), (heads.num_kv_heads, heads.head_dim)]
        rows += [(heads.num_kv_heads, heads.v_head_dim)]
        self.weights = [
            [torch.randn(VOCAB, *row, generator=generator).to(device, dtype) for row in rows]
            for _ in self.layers
        ]
        slots = config.num_pages * config.page_size
        k = [torch.full((slots, *rows[1]), NAN, dtype=dtype, device=device) for _ in self.layers]
        v = [torch.full((slots, *rows[2]), NAN, dtype=dtype, device=device) for _ in self.layers]
        if heads.kv_lora_rank is not None:
            v = [cache[..., : heads.kv_lora_rank] for cache in k]
            for q_k_v in self.weights:
                q_k_v[2] = q_k_v[1][..., : heads.kv_lora_rank]
        self.kv = SimpleNamespace(k=k, v=v)
        empty = Problem(config.case, [], 0)
        self.table = empty.page_table(config).to(device)
        self._fill_cache(empty)
        mode = config.case.lane_mode
        self.backend = backend(
            BackendContext(
                *(device, dtype, self.layers, config.limits, self.table, self.kv, mode, provider)
            )
        )
        records = driver(device, strict=strict) if strict else driver(device)
        guard = StrictGuard(records)
        capabilities = self.backend.capabilities
        runner = KitRunner(RunnerContext(device, capabilities, config.limits.max_bs), config.case)
        self.lane = Lane(
            config.case.lane_mode.value,
            model=self.model,
            runner=runner,
            backend=self.backend,
            driver=records,
            metadata_in_graph=in_graph if runner.ladder else None,
            observers=[guard] if strict else [],
        )
        self.run = guard.around(self.lane, self.lane.run) if strict else self.lane.run
        runner.capture(self.lane)

    def model(self, batch: ForwardBatch, backend: Any, metadata: Any) -> torch.Tensor:
        """Return ``[T, columns]``: what every layer gives, and every step of a draft."""
        steps = metadata.steps if isinstance(metadata, DraftMetadata) else [metadata]
        ids, columns = batch.input_ids, []
        for step, part in enumerate(steps):
            if step:
                ids = next_id(ids, step - 1)
            for layer, weights in zip(self.layers, self.weights, strict=True):
                q, k, v = (w[ids] for w in weights)
                columns.append(backend.forward(q, k, v, layer, part).flatten(1))
        return torch.cat(columns, dim=1)

    def answer(self, problem: Problem) -> Answer:
        """Return what the oracle says; it holds for every lane of the same configuration."""
        self.load(problem)
        k_caches = [cache.cpu().clone() for cache in self.kv.k]
        v_caches = [cache.cpu().clone() for cache in self.kv.v]
        ids = [[t.token_id for t in problem.tokens]]
        for step in range(problem.case.num_steps - 1):
            ids.append([next_id(i, step) for i in ids[-1]])
        columns = []
        for layer, weights, k, v in zip(
            self.config.layers, self.weights, k_caches, v_caches, strict=True
        ):
            steps = [tuple(w.cpu()[i] for w in weights) for i in ids]
            columns.append(attend(problem.requests, layer, steps, k, v))
        if self.config.heads.kv_lora_rank is not None:
            v_caches = [
                k[..., : cache.shape[-1]] for k, cache in zip(k_caches, v_caches, strict=True)
            ]
        by_step = [part.flatten(1) for step in zip(*columns, strict=True) for part in step]
        caches = kv_tensors(SimpleNamespace(k=k_caches, v=v_caches))
        return Answer(torch.cat(by_step, dim=1), caches)

    def load(self, problem: Problem) -> None:
        """Set page table and KV cache to what is there before ``problem``; the rest is poison."""
        self.table.copy_(problem.page_table(self.config))
        self._fill_cache(problem)

    def _fill_cache(self, problem: Problem) -> None:
        generator = torch.Generator().manual_seed(problem.seed)
        cached = [slot for r in problem.requests for slot in r.cached]
        live = torch.tensor([*range(self.config.page_size), *cached], device=self.device)
        for cache in kv_tensors(self.kv).values():
            cache.fill_(NAN)
            random = torch.randn(len(live), *cache.shape[1:], generator=generator)
            cache[live] = random.to(self.device, cache.dtype)

    def check(self, problem: Problem, answer: Answer, *, eagerly: bool = False) -> None:
        """Run ``problem`` through its graph, or eagerly, and hold all that it leaves to ``answer``.

        Raises:
            AssertionError: Names the lane, the batch, and what differs.
        """
        what = f"{self.name}: {'an eager run' if eagerly else 'a replay'} of {problem}"
        self.load(problem)
        batch = on_device(problem.batch(), self.device)
        given = {name: t.clone() for name, t in batch.tensors().items()}
        table = self.table.clone()
        if eagerly:
            out = self.lane.run_eager(batch)
        else:
            for _, graph in self.lane.graphs():
                graph.outputs.fill_(NAN)
            before = self.lane.stats.replays
            out = self.run(batch).clone()
            assert self.lane.stats.replays == before + 1, f"{what} ran no graph"
        self._compare(what, out.cpu(), answer.rows)
        for name, cache in kv_tensors(self.kv).items():
            self._compare_cache(f"{what}: {name}", cache.cpu(), answer.caches[name])
        assert torch.equal(self.table, table), f"{what} changes the page table"
        for name, tensor in batch.tensors().items():
            assert torch.equal(tensor, given[name]), f"{what} changes {name} of the batch"

    def _compare(self, what: str, out: torch.Tensor, expected: torch.Tensor) -> None:
        assert out.shape == expected.shape, f"{what} gives {tuple(out.shape)}"
        assert out.dtype is self.config.dtype, f"{what} gives {out.dtype}"
        allowed = TOLERANCE[out.dtype] * (1 + expected.abs())
        excess = ((out.double() - expected).abs() / allowed).nan_to_num(nan=float("inf"))
        if not excess.numel() or excess.max() <= 1:
            return
        token, column = divmod(int(excess.argmax()), excess.shape[1])
        heads = self.config.heads
        part, column = divmod(column, heads.num_q_heads * heads.v_head_dim)
        step, layer = divmod(part, len(self.layers))
        raise AssertionError(
            f"{what}: token {token}, layer {layer}, step {step}, head {column // heads.v_head_dim}:"
            f" the error is {excess.max():.3g} times what is allowed"
        )

    def _compare_cache(self, what: str, cache: torch.Tensor, expected: torch.Tensor) -> None:
        first = self.config.page_size
        bits = torch.int32 if cache.dtype.itemsize == 4 else torch.int16
        differs = (cache.view(bits) != expected.view(bits)).flatten(1).any(dim=1)
        slots = [slot for slot in differs.nonzero().flatten().tolist() if slot >= first]
        assert not slots, f"{what}: slots {slots} hold what they should not"


def hold_to_oracle(
    backend: type[AttentionBackend],
    config: Config,
    *,
    strict: bool = True,
    max_examples: int = 3,
    phases: Sequence[Phase] = (Phase.generate, Phase.shrink),
    **lane: Any,
) -> None:
    """Hold a backend to the oracle in one configuration: every replay, and every batch run eagerly.

    Args:
        backend: The class.
        config: One of `configs_of(backend.capabilities)`.
        strict: Whether the tape driver is strict; see `make_rigs`.
        max_examples: Sequences of batches to draw.
        phases: Of hypothesis.
        lane: More of `Rig`: driver, provider, device.

    Raises:
        AssertionError: An answer, or the memory that a batch leaves, is not the oracle's.
        GraphpactError: The lane refuses.
    """
    rigs: list[Rig] = []

    @seed(zlib.crc32(str(config).encode()))  # else every configuration would get the same draws
    @settings(max_examples=max_examples, derandomize=True, deadline=None, phases=phases)
    @given(steps=sequences(config))
    def check(steps: list[Problem]) -> None:
        with torch.inference_mode():
            try:
                rigs[:] = rigs or make_rigs(backend, config, strict=strict, **lane)
                for problem in steps:
                    _check_all(rigs, problem)
            except BaseException:
                rigs.clear()  # the next example finds lanes without a past
                raise

    check()


def _check_all(rigs: list[Rig], problem: Problem) -> None:
    answer = rigs[0].answer(problem)
    for rig in rigs:
        if rig.lane.graphs():
            rig.check(problem, answer)
    rigs[0].check(problem, answer, eagerly=True)


def make_rigs(
    backend: type[AttentionBackend], config: Config, *, strict: bool, **lane: Any
) -> list[Rig]:
    """Return lanes of a backend: as the lane itself chooses, and strict with all metadata made by hooks."""
    rigs = [Rig(backend, config, strict=strict, **lane)]
    if strict and rigs[0].lane.records_metadata:
        rigs.append(Rig(backend, config, strict=strict, in_graph=False, **lane))
    return rigs
