"""The prefill runners with every backend on the suite's lanes, compared with the oracle and eager runs.

Does not: check the rules; `graphpact check` does.
"""

import gc
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from compiling import compiler  # noqa: F401  a fixture
from graphpact import ForwardMode, GraphRunner, GraphShape
from graphpact.attention import AttentionBackend, GraphSupport, kv_tensors
from graphpact.errors import CaptureError, ConfigError, EngineError
from graphpact.graphs import GraphDriver
from graphpact_conformance.draws.batches import draw, sequences
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.experiments.comparison import differences
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.rig import CPU, Rig
from graphpact_conformance.lane.runners import runner_context
from graphpact_cuda_graph.breakable import BreakableCudaGraphRunner
from graphpact_cuda_graph.pieces import Tracer
from graphpact_cuda_graph.piecewise import PiecewiseCudaGraphRunner
from graphpact_cuda_graph.prefill import TOO_MUCH_PADDING, default_token_counts
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import TapeDriver
from graphpact_trtllm_mla import TRTLLMMLABackend
from support import pairwise

Driver = Callable[[torch.device], GraphDriver]
RUNNERS: dict[str, type[GraphRunner]] = {
    "breakable": BreakableCudaGraphRunner,
    "piecewise": PiecewiseCudaGraphRunner,
}
BACKENDS: dict[str, type[AttentionBackend]] = {
    "reference": ReferenceBackend,
    "flashinfer": FlashInferBackend,
    "fa3": FA3Backend,
    "trtllm_mla": TRTLLMMLABackend,
}
COUNTS = (1, 2, 4, 8, 13, 24)
"""The captured token counts, for at most 4 requests."""


def _config(backend: type[AttentionBackend], mode: str, counts: tuple[int, ...] = COUNTS) -> Config:
    """Return the configuration of a backend's first lane of a mode, with these token counts."""
    first = next(c for c in configs_of(backend.capabilities) if str(c.case) == mode)
    shapes = tuple(GraphShape(first.case.mode, min(4, count), count) for count in counts)
    return replace(first, capture_shapes=shapes)


def _rig(runner: str, backend: str, mode: str, *, strict: bool, **more: Any) -> Rig:
    kind = BACKENDS[backend]
    return Rig(
        _config(kind, mode),
        backend=kind,
        runner=RUNNERS[runner],
        driver=partial(TapeDriver, strict=strict),
        strict=strict,
        pact="always",
        **more,
    )


@st.composite
def _problems(draw: st.DrawFn, config: Config) -> Problem:
    """Draw a batch of one to four requests for which any of the configured shapes is the smallest."""
    shapes = config.shapes[: draw(st.integers(1, len(config.shapes)))]
    drawn = draw(sequences(replace(config, capture_shapes=tuple(shapes))))
    return draw(st.sampled_from([drawn.exact, drawn.padded]))


DIMENSIONS = {
    "runner": list(RUNNERS),
    "backend": list(BACKENDS),
    "mode": ["extend", "mixed"],
    "strict": [False, True],
}


def _cases() -> list[Any]:
    """Return all combinations. Those that pairwise testing would leave out are marked as sweeps."""
    few = [tuple(case.values()) for case in pairwise(DIMENSIONS)]
    return [
        pytest.param(case, marks=() if case in few else pytest.mark.sweep, id="-".join(map(str, case)))
        for case in itertools.product(*DIMENSIONS.values())
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize("case", _cases())
def test_replays_equal_the_oracle_and_the_same_padded_rows_run_eagerly(
    case: tuple[str, str, str, bool],
) -> None:
    """Outputs and KV cache of a replay equal the oracle, and an eager run of the same rows bit for bit."""
    runner, backend, mode, strict = case
    rig = _rig(runner, backend, mode, strict=strict)
    lane, page = rig.lane, rig.config.page_size
    segments = {captured.graph.num_segments for captured in lane.captured.values()}
    assert segments == {len(rig.layers) + 1}
    assert {shape.num_tokens for shape in lane.captured} == set(COUNTS)
    used: set[GraphShape | None] = set()

    @settings(derandomize=True, max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
    @given(problem=_problems(rig.config))
    def replays(problem: Problem) -> None:
        step = rig.step(problem)
        assert (step.error, step.replays) == (None, 1)
        assert differences(rig, step, rig.answer(problem)) == []
        used.add(step.shape)
        if backend == "flashinfer":
            # FlashInfer's own check, at every replay: the fake request owns the padding tokens.
            metadata = rig.observer.metadata
            assert metadata.qo_indptr[-1] == step.shape.num_tokens
            assert len(metadata.qo_indptr) == problem.batch_size + 2
        view = rig.observer.view
        rig.load(problem)
        with torch.inference_mode():
            padded = lane.forward_eager(view, live=rig.batch_of(problem))
            rows = padded.rows(problem.batch_size, len(problem.tokens))
        for name, output in rows.items():
            assert torch.equal(output, step.rows[name])
        for name, cache in kv_tensors(rig.cache.kv).items():
            torch.testing.assert_close(cache[page:], step.caches[name][page:], rtol=0, atol=0, equal_nan=True)

    replays()
    assert len(used) >= 3


# -- which batches replay --------------------------------------------------------------------------


def _runner(name: str, counts: tuple[int, ...] | None = COUNTS, **context: Any) -> GraphRunner:
    config = _config(ReferenceBackend, "extend")
    asked = runner_context(config, ReferenceBackend.capabilities, CPU, RUNNERS[name])
    return RUNNERS[name](replace(asked, token_counts=counts, **context))


@pytest.mark.parametrize("ratio", [1.0, 1.5, 2.0, 24.0])
def test_a_batch_runs_eagerly_if_and_only_if_its_graph_would_be_padded_too_far(ratio: float) -> None:
    """A batch replays its smallest shape unless that has over ``max_padding_ratio`` times its tokens."""
    runner = _runner("breakable", (6, 24), max_padding_ratio=ratio)
    config = _config(ReferenceBackend, "extend", (6, 24))
    for tokens in range(1, 25):
        drawn = Rig(config, backend=ReferenceBackend, capture=False).runner.dummy(
            GraphShape(ForwardMode.EXTEND, 1, tokens)
        )
        shape = 6 if tokens <= 6 else 24
        fit = runner.fit(drawn)
        if shape <= ratio * tokens:
            assert isinstance(fit, GraphShape)
            assert fit.num_tokens == shape
        else:
            assert fit == TOO_MUCH_PADDING
        # Ranks that gather make the same decision, by the rank with most tokens.
        drawn.global_num_tokens_cpu = (tokens, 24)
        assert runner.fit(drawn) == GraphShape(ForwardMode.EXTEND, 4, 24)


def test_eager_steps_are_counted_by_the_waste_of_their_graphs() -> None:
    """A batch that would get too much padding runs eagerly, is correct, and is counted with that reason."""
    rig = _rig("breakable", "flashinfer", "extend", strict=False)
    rig.runner.context = replace(rig.runner.context, max_padding_ratio=1.0)
    (steps,) = draw(rig.config, 1, 0)
    step = rig.step(steps.padded, may_decline=True)
    assert (step.error, step.replays, step.declined) == (None, 0, TOO_MUCH_PADDING)
    assert differences(rig, step, rig.answer(steps.padded)) == []
    assert rig.lane.stats.eager == {(ForwardMode.EXTEND, TOO_MUCH_PADDING): 1}


@given(most=st.integers(1, 5000), tokens=st.integers(4, 5000))
def test_default_token_counts_waste_at_most_half(most: int, tokens: int) -> None:
    """No batch of 4 tokens or more gets padding of over half its tokens; no count is above the largest."""
    counts = default_token_counts(most)
    assert counts == sorted(set(counts))
    assert counts[-1] == most
    if tokens <= most:
        assert next(count for count in counts if count >= tokens) <= max(1.5 * tokens, 4)


@pytest.mark.parametrize("name", RUNNERS)
def test_a_token_count_above_the_largest_step_is_refused(name: str) -> None:
    """A configured count that no step can have is an error that names the key and the limit."""
    most = _runner(name).context.limits.max_num_tokens
    fault = rf"token_counts has {most + 1}, .* at most {most} tokens \(engine.max_num_batched_tokens\)"
    with pytest.raises(ConfigError, match=fault):
        _runner(name, (8, most + 1)).shapes()


# -- attention between segments --------------------------------------------------------------------


class _NoGraphs(ReferenceBackend):
    """A backend whose work cannot be captured."""

    capabilities = replace(ReferenceBackend.capabilities, graph_support=GraphSupport.NEVER)


def test_a_backend_without_graph_support_serves_a_prefill_runner() -> None:
    """No graph contains work of the backend, so the backend needs no support for graphs."""
    config = _config(ReferenceBackend, "extend")
    rig = Rig(config, backend=_NoGraphs, runner=BreakableCudaGraphRunner)
    (steps,) = draw(config, 1, 0)
    step = rig.step(steps.exact)
    assert (step.error, step.replays) == (None, 1)
    assert differences(rig, step, rig.answer(steps.exact)) == []


@pytest.mark.parametrize("name", RUNNERS)
def test_attention_of_other_widths_than_declared_is_refused_at_capture(name: str) -> None:
    """Queries of another dtype or width than declared are refused, and not cut, cast or padded silently."""
    rig = Rig(
        _config(ReferenceBackend, "extend"), backend=ReferenceBackend, runner=RUNNERS[name], capture=False
    )
    right = rig.lane.model

    def wrong(batch: Any, metadata: Any, attend: Any) -> Any:
        return right(batch, metadata, lambda q, *rest: attend(q.double(), *rest))

    rig.lane.model = wrong
    with pytest.raises(
        CaptureError, match=r"layer 0 attends with q .* torch.float64; declared are"
    ) as caught:
        rig.capture()
    assert caught.value.rule == "GP07"


def test_a_context_without_layers_is_refused() -> None:
    """Without the model's layers, the runner is refused: the size of memory between segments is unknown."""
    with pytest.raises(EngineError, match="the runner's context has no layers"):
        _runner("breakable", layers=()).slots()


# -- pieces ----------------------------------------------------------------------------------------


def _piecewise(model: Callable[[Any], Any] | None = None) -> Rig:
    config = _config(ReferenceBackend, "extend", (8, 24))
    rig = Rig(config, backend=ReferenceBackend, runner=PiecewiseCudaGraphRunner, capture=False)
    if model is not None:
        rig.lane.model = model(rig.lane.model)
    return rig


def test_a_model_that_cannot_be_traced_is_refused_by_name() -> None:
    """A host read, which torch.compile cannot trace, is an error that suggests the breakable runner."""

    def reading(right: Any) -> Any:
        def model(batch: Any, metadata: Any, attend: Any) -> Any:
            if batch.input_ids.sum().item() > 10**6:  # a branch that depends on contents
                raise ValueError
            return right(batch, metadata, attend)

        return model

    with pytest.raises(CaptureError, match=r"torch\.compile cannot trace the forward pass") as caught:
        _piecewise(reading).capture()
    assert caught.value.rule == "GP20"
    assert "breakable_cuda_graph" in str(caught.value.hint)


def test_one_trace_serves_all_token_counts() -> None:
    """Most shapes share one trace; only shapes with one token, or with equal counts, need other traces."""
    gc.collect()  # tracers of earlier tests, which share their traces
    rig = _rig("piecewise", "reference", "extend", strict=False)
    assert len(rig.lane.captured) == len(COUNTS)
    others = [shape for shape in rig.lane.captured if shape.batch_size == shape.num_tokens]
    assert len(rig.runner._tracer.traces) <= 1 + len(others) < len(COUNTS)
    nodes = {captured.graph.num_nodes for captured in rig.lane.captured.values()}
    assert len(nodes) <= 2


def test_eager_steps_trace_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch without a shape runs the model directly; torch.compile traces only for captures."""
    rig = _piecewise()
    rig.capture()
    monkeypatch.setattr(torch, "compile", None)
    (steps,) = draw(rig.config, 1, 0)
    step = rig.step(steps.exact, eagerly=True)
    assert step.error is None
    assert differences(rig, step, rig.answer(steps.exact)) == []


def test_equal_models_share_their_traces_but_no_weights() -> None:
    """A lane of an equal model traces nothing anew, and its replays compute with its own weights."""
    gc.collect()
    first, second = (_piecewise() for _ in range(2))
    for weight in second.net.weights[0]:
        weight.mul_(-2)
    first.capture()
    traces = list(first.runner._tracer.traces)
    second.capture()
    assert second.runner._tracer.traces == traces
    (steps,) = draw(first.config, 1, 0)
    seen = []
    for rig in (first, second):
        step = rig.step(steps.padded)
        assert (step.error, step.replays) == (None, 1)
        assert differences(rig, step, rig.answer(steps.padded)) == []
        seen.append(step.rows["rows"])
    assert not torch.equal(*seen)


@pytest.mark.parametrize("stays", [False, True])
def test_what_torch_compiled_is_freed_with_the_lane(*, stays: bool) -> None:
    """Torch keeps compiled code by code object; closing a lane frees the model and its static inputs.

    That holds while another lane of an equal model uses the traces, and this one then replays as before.
    """
    gc.collect()
    rig = _piecewise()
    rig.capture()
    other = _piecewise() if stays else None
    if other is not None:
        other.capture()
    weights = [weakref.ref(tensor) for tensor in rig.net.tensors()]
    traces = [weakref.ref(trace) for trace in rig.runner._tracer.traces]
    rig.lane.close()
    del rig
    gc.collect()
    assert not [ref for ref in weights if ref() is not None]
    assert [ref() is not None for ref in traces] == [stays] * len(traces)
    if other is not None:
        (steps,) = draw(other.config, 1, 0)
        step = other.step(steps.padded)
        assert differences(other, step, other.answer(steps.padded)) == []


@pytest.mark.sweep
@pytest.mark.usefixtures("compiler")
def test_compiled_pieces_equal_the_model() -> None:
    """With pieces compiled by inductor, as for the driver cuda, a region returns the model's outputs.

    The pieces are called here and not captured, because a tape cannot record compiled code.
    """
    config = _config(ReferenceBackend, "extend", (24,))
    rig = Rig(config, backend=ReferenceBackend, runner=BreakableCudaGraphRunner, capture=False)
    (steps,) = draw(config, 1, 0)
    rig.load(steps.exact)
    batch = rig.batch_of(steps.exact)
    with torch.inference_mode():
        metadata = rig.backend.init_metadata_eager(batch)
        layers, calls = rig.layers, []

        def attend(q: Any, k: Any, v: Any, layer_id: int) -> torch.Tensor:
            calls.append(layer_id)
            return rig.backend.forward(q, k, v, layers[layer_id], metadata)

        region = Tracer(compiled=True).split(rig.model, batch, attend)
        del calls[:]
        first = region()["rows"].clone()
        assert calls == [0, 1]
        expected = rig.model(batch, metadata, rig.backend.forward)["rows"]
        torch.testing.assert_close(first, expected)
        batch.input_ids.copy_(batch.input_ids.flip(0))  # the pieces read the static inputs again
        changed = rig.model(batch, metadata, rig.backend.forward)["rows"]
        assert not torch.equal(changed, expected)
        torch.testing.assert_close(region()["rows"], changed)
