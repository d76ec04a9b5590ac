"""Padding tokens reach no expert of a served model, whatever they contain; real tokens keep theirs."""

import random
from collections.abc import Callable, Generator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_sweep.page import PAGE, is_of_this_version, rows
from model_sweep.small_models import small_config
from transformers import AutoModelForCausalLM

from checkpoints import save_random_draft
from compiling import compiler  # noqa: F401  a fixture
from graphpact import (
    BackendContext,
    ForwardBatch,
    ForwardMode,
    GraphShape,
    Lane,
    Limits,
    StepOutputs,
    hookimpl,
)
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.graphs import GraphDriver
from graphpact.runners import GraphRunner, RunnerContext
from graphpact.step import Attend
from graphpact_cpu_graph import CpuGraphRunner
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_cuda_graph.breakable import BreakableCudaGraphRunner
from graphpact_cuda_graph.piecewise import PiecewiseCudaGraphRunner
from graphpact_engine import Engine, SamplingParams, models
from graphpact_engine.config import EngineConfig
from graphpact_engine.models.experts import mask_experts
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import TapeDriver
from support import ROOT, Catalog, reference_tokens

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3"]
CPU = torch.device("cpu")
SIZE, CONTEXT, EXPERTS = 8, 16, 4  # rows of the graph, positions of a request, experts of a layer
NAN_TOKEN, INF_TOKEN = 0, 1
"""Tokens whose embeddings are NaN and infinite."""


class Padding(GraphRunner):
    """A mixin of runners whose padding rows contain ``token``."""

    token = NAN_TOKEN

    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill, then write padding tokens."""
        super().populate(registry, batch, shape)
        registry.get_slot("input_ids").slice_for(SIZE, SIZE)[batch.num_tokens :] = self.token
        self.spoil(registry.get_slot("num_token_non_padded").slice_for(SIZE, SIZE))

    def spoil(self, number: torch.Tensor) -> None:
        """Change the number of real tokens that the graph reads; here it stays as it is."""


class Watched(models.TransformersModel):
    """A model that also returns the experts that its tokens are sent to, and what they add to each token."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        for name, module in model.named_modules():
            if name.endswith(".experts"):
                module.register_forward_hook(self._see)

    def _see(self, _: Any, inputs: tuple[torch.Tensor, ...], out: torch.Tensor) -> None:
        self._seen.append((inputs[1], out.clone()))  # shared experts may be added in place

    def __call__(self, batch: ForwardBatch, metadata: Any, attend: Attend) -> StepOutputs:
        """Return ``index`` and ``routed`` of all layers besides the logits, each by token."""
        self._seen.clear()
        logits = super().__call__(batch, metadata, attend).logits
        index, routed = (torch.cat(parts, dim=-1) for parts in zip(*self._seen, strict=True))
        return StepOutputs(logits=(logits, "bs"), index=(index, "tokens"), routed=(routed, "tokens"))


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Load the transformers model of a checkpoint."""
    loaded = models.load_checkpoint(path, dtype=dtype, device=CPU, attention=models.ATTENTION_NAME)
    return loaded.model


@torch.inference_mode()
def _poison(model: models.TransformersModel) -> None:
    embedding = model.model.get_input_embeddings().weight
    embedding[NAN_TOKEN], embedding[INF_TOKEN] = torch.nan, torch.inf


class ExpertLane:
    """A lane of one graph of `SIZE` tokens over a model with experts; extend where attention is eager."""

    def __init__(self, path: Path, runner: type[GraphRunner], driver: GraphDriver) -> None:
        model = Watched(load(path))
        _poison(model)
        self.is_ragged = runner.eager_attention
        mode = ForwardMode.EXTEND if self.is_ragged else ForwardMode.DECODE
        limits, layers = Limits(SIZE, SIZE, CONTEXT, 1), model.layers
        table = torch.zeros(SIZE + 1, CONTEXT, dtype=torch.int32)
        table[1:] = torch.arange(CONTEXT, CONTEXT * (SIZE + 1)).view(SIZE, CONTEXT)
        self.generator = torch.Generator().manual_seed(0)

        def caches(width: str) -> list[torch.Tensor]:
            shapes = [(CONTEXT * (SIZE + 1), s.num_kv_heads, getattr(s, width)) for s in layers]
            return [torch.randn(shape, generator=self.generator) for shape in shapes]

        cache = SimpleNamespace(k=caches("head_dim"), v=caches("v_head_dim"))
        backend = FlashInferBackend(
            BackendContext(CPU, torch.float32, layers, limits, table, cache, mode=mode)
        )
        asked = RunnerContext(
            CPU,
            backend.capabilities,
            limits,
            mode=mode,
            batch_sizes=[SIZE],
            token_counts=[SIZE],
            max_padding_ratio=SIZE,
            lane="experts",
            num_token_non_padded=True,
            layers=layers,
        )
        self.runner, self.table = runner(asked), table
        self.skips = any(hasattr(m, "_is_expert_parallel") for m in model.model.modules())
        self.lane = Lane("decode", model=model, runner=self.runner, backend=backend, driver=driver)
        self.lane.capture_all()

    def batch(self, size: int) -> ForwardBatch:
        """Return a batch of ``size`` tokens after prefixes of any lengths, with their number."""
        new = [1] * size
        if self.is_ragged:
            new = [1 + size // 2, size - size // 2 - 1]
        count = torch.tensor([n for n in new if n])
        before = torch.randint(0, CONTEXT - size, (len(count),), generator=self.generator)
        each, lens = torch.arange(1, len(count) + 1), before + count
        begin = before.repeat_interleave(count) - (count.cumsum(0) - count).repeat_interleave(count)
        positions = begin + torch.arange(size)
        ragged = {"extend_seq_lens": count, "extend_seq_lens_cpu": count.clone()} if self.is_ragged else {}
        return ForwardBatch(
            forward_mode=ForwardMode.EXTEND if self.is_ragged else ForwardMode.DECODE,
            batch_size=len(count),
            input_ids=torch.randint(2, 199, (size,), generator=self.generator),
            positions=positions,
            out_cache_loc=self.table[each.repeat_interleave(count), positions].long(),
            req_pool_indices=each,
            seq_lens=lens,
            seq_lens_cpu=lens.clone(),
            num_token_non_padded=torch.tensor([size], dtype=torch.int32),
            num_token_non_padded_cpu=size,
            **ragged,
        )

    def check(self) -> None:
        """Assert that real rows are those of eager runs without padding, and that padding is not routed."""
        (captured,) = self.lane.captured.values()
        steps = [(5, NAN_TOKEN), (3, 7), (SIZE, 7), (3, NAN_TOKEN), (6, INF_TOKEN)]
        for replays, (size, token) in enumerate(steps, 1):
            self.runner.token = token  # type: ignore[attr-defined]
            batch = self.batch(size)
            got = self.lane.run(batch).clone()
            whole = captured.graph.outputs
            assert captured.stats.replays == replays
            assert torch.equal(whole["routed"][size:], torch.zeros_like(whole["routed"][size:]))
            if self.skips:
                assert (whole["index"][size:] == EXPERTS).all()  # no expert computes the row
            counted = self.lane.run_eager(batch)
            batch.num_token_non_padded = batch.num_token_non_padded_cpu = None
            expected = self.lane.run_eager(batch)
            assert all(torch.equal(counted[name], expected[name]) for name in expected)
            assert torch.equal(got["index"], expected["index"])
            for name in ("routed", "logits"):
                torch.testing.assert_close(got[name], expected[name], rtol=1e-4, atol=1e-4)


class Padded(Padding, CudaGraphRunner):
    """The runner of decode graphs."""


@pytest.mark.few(4)
@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
@pytest.mark.parametrize("architecture", MIXTURES)
def test_padding_reaches_no_expert(
    architecture: str, checkpoint: Callable[..., Path], *, strict: bool
) -> None:
    """Real rows of a replay are those of the unpadded batch, and experts add exactly 0 to padding rows.

    Padding rows are NaN, infinite, or a token with other experts.
    """
    ExpertLane(checkpoint(architecture), Padded, TapeDriver(CPU, strict=strict)).check()


class Broken(Padding, BreakableCudaGraphRunner):
    """The runner of broken prefill graphs."""


class Split(Padding, PiecewiseCudaGraphRunner):
    """The runner of split prefill graphs."""


@pytest.mark.parametrize(
    "runner", [Broken, pytest.param(Split, marks=pytest.mark.sweep)], ids=["breakable", "piecewise"]
)
@pytest.mark.parametrize("strict", [False, True], ids=["fast", "strict"])
@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_padding_of_prompts_reaches_no_expert(
    architecture: str, runner: type[GraphRunner], checkpoint: Callable[..., Path], *, strict: bool
) -> None:
    """The same for prompts in graphs that attention breaks."""
    ExpertLane(checkpoint(architecture), runner, TapeDriver(CPU, strict=strict)).check()


class Compiled(Padding, CpuGraphRunner):
    """The runner of compiled graphs."""


@pytest.mark.sweep
@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe"])
def test_padding_reaches_no_expert_of_a_compiled_graph(
    architecture: str, checkpoint: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    """Compiled graphs route no padding either."""
    request.getfixturevalue("compiler")
    ExpertLane(checkpoint(architecture), Compiled, InductorDriver(CPU)).check()


class Stale(Padded):
    """The number is that of the first replay."""

    first: torch.Tensor | None = None

    def spoil(self, number: torch.Tensor) -> None:
        """Write the number of the first batch that is smaller than the graph."""
        if self.first is None and int(number) < SIZE:
            self.first = number.clone()
        if self.first is not None:
            number.copy_(self.first)


class CountsPadding(Padded):
    """The number is that of the shape, at capture and at replay."""

    def spoil(self, number: torch.Tensor) -> None:
        """Write the padded number."""
        number.fill_(SIZE)


class OneMore(Padded):
    """The first padding row is real."""

    def spoil(self, number: torch.Tensor) -> None:
        """Add one."""
        number.add_(1)


class OneLess(Padded):
    """The last real row is padding."""

    def spoil(self, number: torch.Tensor) -> None:
        """Subtract one."""
        number.sub_(1)


@pytest.mark.parametrize("planted", [Stale, CountsPadding, OneMore, OneLess])
def test_a_wrong_number_is_seen(planted: type[GraphRunner], checkpoint: Callable[..., Path]) -> None:
    """The check above fails for a runner whose graph reads a wrong number."""
    rig = ExpertLane(checkpoint("mixtral"), planted, TapeDriver(CPU))
    with pytest.raises(AssertionError):
        rig.check()


# -- models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("architecture", ["mixtral", "gpt_oss"])
def test_every_implementation_of_experts_gives_padding_nothing(
    architecture: str, implementation: str, checkpoint: Callable[..., Path]
) -> None:
    """Experts of each implementation of transformers add exactly 0 to padding that is NaN."""
    model = load(checkpoint(architecture))
    watched = Watched(model)
    model.set_experts_implementation(implementation)
    real, padded = _run(watched, 5), _run(watched, 5, padding=3)
    assert torch.equal(padded["routed"][5:], torch.zeros(3, padded["routed"].shape[1]))
    for name in ("routed", "logits"):
        torch.testing.assert_close(padded[name][:5], real[name], rtol=1e-4, atol=1e-4)


def _run(model: models.TransformersModel, real: int, *, padding: int = 0) -> StepOutputs:
    """Run ``real`` tokens and then ``padding`` of them with NaN; each token attends only to itself."""
    _poison(model)
    count, total = torch.tensor([real], dtype=torch.int32), real + padding
    ids = torch.arange(2, 2 + total)
    ids[real:] = NAN_TOKEN
    rows = torch.arange(total)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=total,
        input_ids=ids,
        positions=rows,
        out_cache_loc=rows,
        req_pool_indices=rows,
        seq_lens=rows + 1,
        seq_lens_cpu=rows + 1,
        num_token_non_padded=count if padding else None,
    )
    with torch.inference_mode():
        return model(batch, None, lambda q, _, v, *__: v.repeat_interleave(q.shape[1] // v.shape[1], dim=1))


_WRITTEN = PAGE.read_text(encoding="utf-8")
SERVED = [case for case, line in rows(_WRITTEN).items() if " | equal | " in line]


@pytest.mark.skipif(not is_of_this_version(_WRITTEN), reason="the page is of another transformers")
@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=[] if c in {*MIXTURES, "llama", "jetmoe"} else pytest.mark.sweep) for c in SERVED],
)
def test_the_experts_of_every_model_are_found(case: str) -> None:
    """In every served architecture exactly the experts that transformers dispatches are masked, each once."""
    config = small_config(case)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    dispatched = {m for m in model.modules() if hasattr(m, "_is_expert_parallel")}
    if case == "longcat_flash":  # calls them as the others do, and only in a loop
        dispatched = {m for name, m in model.named_modules() if name.endswith(".experts")}
    for _ in range(2):
        assert mask_experts(model) is bool(dispatched)
        assert {m for m in model.modules() if m._forward_pre_hooks} == dispatched
        assert all(len(m._forward_pre_hooks) == 1 for m in dispatched)


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")  # transformers has it
def test_a_forward_pass_with_a_number_is_one_traced_graph(checkpoint: Callable[..., Path]) -> None:
    """Dynamo traces the mask without a break; another number needs no other graph."""
    model, attention = models.TransformersModel(load(checkpoint("mixtral"), torch.bfloat16)), Itself()
    traced: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        traced.append(graph)
        return graph.forward

    def forward(ids: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
        return model._forward(attention, ids, ids, None, (torch.arange(len(ids)) >= count)[:, None])[0]

    compiled = torch.compile(forward, backend=backend, fullgraph=True, dynamic=False)
    ids = torch.arange(2, 10)
    with torch.inference_mode():
        for number in (8, 5, 3):
            count = torch.tensor([number], dtype=torch.int32)
            assert torch.equal(compiled(ids, count), forward(ids, count))
    assert len(traced) == 1


class Itself:
    """An attention implementation in which each token attends only to itself."""

    def attend(self, module: Any, q: torch.Tensor, k: Any, v: Any, asked: Any) -> torch.Tensor:
        """Return the values."""
        del module, k, asked
        values: torch.Tensor = v
        return values.repeat_interleave(q.shape[1] // values.shape[1], dim=1)


# -- the engine --------------------------------------------------------------------------------------


class Numbers:
    """An observer that notes the number in the slot, at capture and at every replay."""

    def __init__(self) -> None:
        self._noted: list[tuple[ForwardMode, torch.Tensor | None, int, int]] = []

    @hookimpl(wrapper=True)
    def prepare_replay(self, batch: ForwardBatch, shape: GraphShape) -> Generator[None, Any, Any]:
        """Note it, with the tokens of the batch and those of the shape."""
        view = yield
        number = view.num_token_non_padded
        copy = None if number is None else number.clone()
        self._noted.append((shape.mode, copy, batch.num_tokens, shape.num_tokens))
        return view

    @property
    def seen(self) -> list[tuple[ForwardMode, int | None, int, int]]:
        """Return mode, number, tokens of the batch and tokens of the shape, of every call."""
        return [(mode, None if n is None else int(n), real, size) for mode, n, real, size in self._noted]


def make_engine(path: Path, numbers: Numbers, *overrides: str, **plugins: type[Any]) -> Engine:
    """Build an engine whose graphs are observed and verified."""
    settings = [
        f'model.path="{path}"',
        'engine.device="cpu"',
        "engine.max_num_seqs=4",
        "engine.max_num_batched_tokens=48",
        "verify.replay_against_eager=1.0",
        *overrides,
    ]
    config = EngineConfig.load(None, env={}, overrides=settings)
    catalog = Catalog(**plugins) if plugins else None
    return Engine(config, catalog=catalog, observers=[numbers])


PROMPT_LENGTHS = (1, 17, 40, 3, 2)


def make_prompts(seed: str) -> list[list[int]]:
    """Return prompts of those lengths."""
    draw = random.Random(seed)
    return [[draw.randrange(2, 199) for _ in range(length)] for length in PROMPT_LENGTHS]


@pytest.mark.few(2)
@pytest.mark.parametrize("architecture", MIXTURES)
def test_greedy_tokens_equal_transformers_and_the_number_is_that_of_the_batch(
    architecture: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In prefill and decode graphs the slot has the real tokens at every replay, and tokens are right."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    from recipes.prefill_grid import PrefillGrid

    path, numbers, prompts = checkpoint(architecture), Numbers(), make_prompts(architecture)
    lanes = [
        "lanes.decode.batch_sizes=[4]",
        'lanes.prefill.runner="grid"',
        "lanes.prefill.batch_sizes=[4]",
        "lanes.prefill.strict=true",
    ]
    with make_engine(path, numbers, *lanes, grid=PrefillGrid) as engine:
        done = engine.generate(prompts, SamplingParams(max_new_tokens=6))
        assert all(lane.stats.replays > 2 and not lane.stats.eager for lane in engine.lanes)
    assert [c.token_ids for c in done] == [reference_tokens(path, prompt, 6) for prompt in prompts]
    assert all(noted == real for _, noted, real, _ in numbers.seen)
    padded = {mode for mode, _, real, size in numbers.seen if real < size}
    assert padded == {ForwardMode.DECODE, ForwardMode.MIXED}


def test_verification_of_drafts_counts_tokens_too(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The graphs of a target with experts read the number of drafts; those of its dense draft model none."""
    path, numbers, prompts = checkpoint("mixtral"), Numbers(), make_prompts("drafts")
    save_random_draft(tmp_path / "draft", path, "LlamaForCausalLMEagle")
    drafting = ['speculative.algorithm="eagle"', f'speculative.draft_model="{tmp_path / "draft"}"']
    with make_engine(path, numbers, *drafting, "lanes.verify.batch_sizes=[4]") as engine:
        done = engine.generate(prompts, SamplingParams(max_new_tokens=6))
    assert [c.token_ids for c in done] == [reference_tokens(path, prompt, 6) for prompt in prompts]
    verify = ForwardMode.TARGET_VERIFY
    verified = [(noted, real, size) for mode, noted, real, size in numbers.seen if mode is verify]
    assert all(noted == real for noted, real, _ in verified)
    assert any(real < size for _, real, size in verified)
    others = {noted for mode, noted, *_ in numbers.seen if mode is not verify}
    assert others == {None}


def test_models_without_experts_have_no_number(checkpoint: Callable[..., Path]) -> None:
    """A dense model has no slot of the number, and its batches do not carry it."""
    numbers = Numbers()
    with make_engine(checkpoint("llama"), numbers) as engine:
        engine.generate(make_prompts("dense"), SamplingParams(max_new_tokens=3))
        (registry,) = [lane.registry for lane in engine.lanes if lane.registry is not None]
        assert not registry.has_slot("num_token_non_padded")
    assert {noted for _, noted, *_ in numbers.seen} == {None}
