"""Tests of `AttentionBackend.forward` with frozen KV, and of layers that use another layer's cache."""

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from graphpact.attention import AttentionBackend, DraftMetadata, LayerSpec, kv_tensors, new_kv
from graphpact.batch import ForwardMode
from graphpact.errors import EngineError
from graphpact.graphs import GraphDriver
from graphpact.step import Attend, StepOutputs
from graphpact_conformance.draws.batches import draw
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.rig import Rig
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import TapeDriver
from graphpact_trtllm_mla import TRTLLMMLABackend
from support import ROOT


def load_example() -> type[AttentionBackend]:
    """Return the backend of ``examples/third_party``."""
    file = ROOT / "examples/third_party/my_attention/backend.py"
    spec = importlib.util.spec_from_file_location("my_attention_backend", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    backend: type[AttentionBackend] = module.MyAttentionBackend
    return backend


BACKENDS = (FlashInferBackend, FA3Backend, TRTLLMMLABackend, ReferenceBackend, load_example())
LANES = [
    pytest.param(backend, config, id=f"{backend.__name__}-{config}")
    for backend in BACKENDS
    for config in configs_of(backend.capabilities)
    if config.dtype is torch.float32
    and (config.page_size, config.heads.name) in ((16, "gqa"), (64, "mla"), (16, "mla"))
]


class SharedConfig(Config):
    """A lane whose second layer reads the KV cache of the first."""

    @property
    def layers(self) -> list[LayerSpec]:
        """The layers of the suite, of which the second uses the cache of the first."""
        plain, special = super().layers
        return [plain, replace(special, kv_layer=0)]


class SharedCacheRig(Rig):
    """A rig whose model writes KV in its first layer and only attends in the second."""

    def model(self, batch: Any, metadata: Any, attend: Attend) -> StepOutputs:
        """Return the outputs of both layers as ``rows``, ``[T, columns]``."""
        part = metadata.steps[0] if isinstance(metadata, DraftMetadata) else metadata
        first, second = self.layers
        q, k, v = self.net.project(0, batch.input_ids, batch.positions, batch)
        given = [
            attend(q, k, v, first, part),
            attend(q, None, None, second, part),
        ]
        rows = torch.cat([out.flatten(1) for out in given], dim=1)
        return StepOutputs(rows=(rows, "tokens"))


def shared(config: Config) -> SharedConfig:
    """Return a copy of ``config`` whose second layer shares the cache of the first."""
    return SharedConfig(**{name: getattr(config, name) for name in Config.__dataclass_fields__})


def bits(rig: Rig) -> list[torch.Tensor]:
    """Return a copy of the KV cache as integers, so that equal NaNs compare equal."""
    return [t.clone().view(torch.int32) for t in kv_tensors(rig.cache.kv).values()]


def same(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[bool]:
    """Return for each tensor whether it is unchanged."""
    return [torch.equal(a, b) for a, b in zip(before, after, strict=True)]


def each_problem(rig: Rig, check: Callable[[Any, Any], None]) -> None:
    """Load drawn problems into the rig; call ``check`` with the batch and eager metadata of each."""
    with torch.inference_mode():
        for steps in draw(rig.config, 2, 0):
            for problem in steps:
                rig.load(problem)
                batch = rig.batch_of(problem)
                metadata = rig.backend.init_metadata_eager(batch)
                is_draft = isinstance(metadata, DraftMetadata)
                check(batch, metadata.steps[0] if is_draft else metadata)


@pytest.mark.parametrize(("backend", "config"), LANES)
def test_attending_alone_repeats_a_writing_forward(backend: type[AttentionBackend], config: Config) -> None:
    """Without keys and values, `forward` repeats the output of the one that wrote; the cache is unchanged."""
    rig = Rig(config, backend=backend, capture=False)
    seen = []

    def check(batch: Any, metadata: Any) -> None:
        for layer in rig.layers:
            q, k, v = rig.net.project(layer.layer_id, batch.input_ids, batch.positions, batch)
            wrote = rig.backend.forward(q, k, v, layer, metadata)
            before = bits(rig)
            assert torch.equal(rig.backend.forward(q, None, None, layer, metadata), wrote)
            assert all(same(before, bits(rig)))
            seen.append(bool(wrote.any()))

    each_problem(rig, check)
    assert any(seen) or config.case.mode is ForwardMode.IDLE


@pytest.mark.parametrize(("backend", "config"), LANES)
def test_a_layer_uses_the_cache_that_it_names(backend: type[AttentionBackend], config: Config) -> None:
    """A layer with ``kv_layer`` reads and writes that cache, and neither reads nor writes its own."""
    rig = Rig(shared(config), backend=backend, capture=False)
    first, second = rig.layers
    own = replace(second, kv_layer=None)
    assert (first.cache_layer, second.cache_layer, own.cache_layer) == (0, 0, 1)
    half = len(bits(rig)) // 2

    def check(batch: Any, metadata: Any) -> None:
        q, k, v = rig.net.project(0, batch.input_ids, batch.positions, batch)
        rig.backend.forward(q, k, v, first, metadata)
        for caches in (rig.cache.kv.k, rig.cache.kv.v):
            caches[1].copy_(caches[0])
        expected = rig.backend.forward(q, None, None, own, metadata)
        for caches in (rig.cache.kv.k, rig.cache.kv.v):
            caches[1].fill_(float("nan"))
        before = bits(rig)
        assert torch.equal(rig.backend.forward(q, None, None, second, metadata), expected)
        rig.backend.forward(q, k + 1, v + 1, second, metadata)
        kept = same(before, bits(rig))
        at = range(len(kept))  # in the list, keys and values of a layer are adjacent
        assert all(kept[i] for i in at if i >= half)
        assert not all(kept[i] for i in at if i < half) or batch.num_tokens == 0

    each_problem(rig, check)


@pytest.mark.sweep
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("backend", "config"), LANES)
def test_a_graph_attends_to_a_shared_cache(
    backend: type[AttentionBackend], config: Config, *, strict: bool
) -> None:
    """A replay of a model with a layer that writes no KV gives the same outputs as an eager step."""

    def driver(device: torch.device) -> GraphDriver:
        return TapeDriver(device, strict=strict)

    rig = SharedCacheRig(shared(config), backend=backend, driver=driver, strict=strict)
    with torch.inference_mode():
        for steps in draw(rig.config, 2, 0):
            for problem in steps:
                rig.load(problem)
                replayed = rig.lane.run(rig.batch_of(problem)).clone()
                rig.load(problem)
                eager = rig.lane.run_eager(rig.batch_of(problem))
                torch.testing.assert_close(replayed["rows"], eager["rows"])
    assert rig.lane.stats.replays


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_without_values_are_refused(backend: type[AttentionBackend]) -> None:
    """Keys without values, or the reverse, are an error that names the layer; nothing is written."""
    (_, config), *_ = [param.values for param in LANES if param.values[0] is backend]
    rig = Rig(config, backend=backend, capture=False)
    before = bits(rig)

    def check(batch: Any, metadata: Any) -> None:
        q, k, v = rig.net.project(0, batch.input_ids, batch.positions, batch)
        before[:] = bits(rig)
        with pytest.raises(EngineError, match="layer 0: forward got keys and no values"):
            rig.backend.forward(q, k, None, rig.layers[0], metadata)
        with pytest.raises(EngineError, match="layer 0: forward got values and no keys"):
            rig.backend.forward(q, None, v, rig.layers[0], metadata)
        assert all(same(before, bits(rig)))

    each_problem(rig, check)
    assert new_kv(None, None, rig.layers[0]) is None


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"kv_layer": 7}, "the cache of layer 7 does not exist"),
        ({"kv_layer": -1}, "the cache of layer -1 does not exist"),
        (
            {"kv_layer": 0, "num_kv_heads": 1},
            r"the cache of layer 0 has keys and values \[\(2, 8\)",
        ),
        ({"kv_layer": 0, "v_head_dim": 4}, r"needs keys and values \[\(2, 8\), \(2, 4\)\]"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(changes: dict[str, Any], says: str) -> None:
    """Building a backend fails if a layer names a cache with different widths, or one that does not exist."""
    (_, config), *_ = [param.values for param in LANES if param.values[0] is FA3Backend]
    context = Rig(config, backend=FA3Backend, capture=False).backend.context
    plain, special = context.layers
    layers = [plain, replace(special, **changes)]
    with pytest.raises(EngineError, match=says):
        FA3Backend(replace(context, layers=layers))
