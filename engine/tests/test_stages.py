"""Stages of a pipeline compute together what the whole model computes, here one after another."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from graphpact import ForwardBatch, ForwardMode, LayerSpec
from graphpact.errors import ConfigError
from graphpact.plugins import PluginCatalog
from graphpact_engine import models
from graphpact_engine.config import EngineConfig
from graphpact_engine.models.sharding import Sharding
from graphpact_engine.models.stages import split_stages
from graphpact_engine.ranks import EngineRanks, connect
from graphpact_engine.selection import select_algorithm

CPU = torch.device("cpu")


@contextmanager
def joined(monkeypatch: pytest.MonkeyPatch, stage: int, stages: int) -> Iterator[EngineRanks]:
    """Join a process group whose other processes do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=stage, world_size=stages)
    # Process groups of gloo would wait for the others.
    new_group = dist.new_group
    monkeypatch.setattr(dist, "new_group", lambda ranks, **_: new_group(ranks, backend="fake"))
    monkeypatch.setattr(EngineRanks, "require_equal", lambda *_: None)
    try:
        ranks = connect(EngineConfig.load(None, overrides=[f"parallel.pipeline={stages}"]), CPU)
        assert ranks is not None
        yield ranks
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


def load(path: Path, sharding: Sharding | None = None) -> Any:
    """Return the model of a checkpoint, or of a stage."""
    return models.load_checkpoint(
        path, dtype=torch.float32, device=CPU, attention=models.ATTENTION_NAME, sharding=sharding
    ).model


def attend(q: torch.Tensor, k: Any, v: Any, layer: LayerSpec, metadata: None) -> torch.Tensor:
    """Attend causally over one request."""
    del metadata
    keys, values = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for t in (k, v))
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys[None], values[None], is_causal=True, scale=layer.scaling
    )
    return out[0].transpose(0, 1)


def prompt() -> ForwardBatch:
    """Return a batch of one prompt."""
    lens = torch.tensor([7])
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.randint(2, 199, (7,), generator=torch.Generator().manual_seed(0)),
        positions=torch.arange(7),
        out_cache_loc=torch.zeros(7, dtype=torch.int64),
        req_pool_indices=torch.zeros(1, dtype=torch.int64),
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens=lens,
        extend_seq_lens_cpu=lens,
    )


PLANNED = [
    *("llama", "gemma2", "deepseek_v3", "qwen2", "qwen3", "mistral", "phi3", "mixtral", "qwen2_moe"),
    *("qwen3_moe", "gpt_oss", "deepseek_v2"),
]


@pytest.mark.few(3)
@pytest.mark.parametrize("architecture", PLANNED)
def test_stages_compute_what_the_whole_model_computes(
    architecture: str, checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The logits of the last stage have the bits of the whole model's, and each layer is in one stage."""
    path = checkpoint(architecture, num_hidden_layers=5)
    whole = models.TransformersModel(load(path))
    batch = prompt()
    with torch.inference_mode():
        expected = whole(batch, None, attend)
        layers = []
        for stage in range(3):
            with joined(monkeypatch, stage, 3) as ranks:
                model = models.TransformersModel(load(path, Sharding(ranks, CPU)))
            layers += model.layers
            given = model(batch, None, attend)
            assert given.keys() == ({"logits"} if stage == 2 else {"hidden_states"})
            if stage < 2:
                batch.extra = {"pp_proxy_tensors.hidden_states": given["hidden_states"]}
    assert torch.equal(given.logits, expected.logits)
    assert [layer.sliding_window for layer in layers] == [layer.sliding_window for layer in whole.layers]


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_has_only_its_own_weights(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, *, tied: bool
) -> None:
    """Every weight is in one stage, but for a tied embedding, which the first and the last stage have."""
    path = checkpoint("llama", num_hidden_layers=3, tie_word_embeddings=tied)
    held = []
    for stage in range(2):
        with joined(monkeypatch, stage, 2) as ranks:
            held.append({name for name, _ in load(path, Sharding(ranks, CPU)).named_parameters()})
    everything = {name for name, _ in load(path).named_parameters()}
    assert held[0] | held[1] == everything
    assert held[0] & held[1] == ({"model.embed_tokens.weight"} if tied else set())


@pytest.mark.parametrize(
    ("architecture", "stages", "says"),
    [
        ("gpt2", 2, "has no plan that splits a model of type 'gpt2' into stages"),
        ("llama", 3, "parallel.pipeline = 3, but the model has 2 layers"),
    ],
)
def test_models_that_cannot_be_split_are_refused(
    architecture: str,
    stages: int,
    says: str,
    checkpoint: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model without a plan, or with fewer layers than stages, is refused before its weights are read."""
    config = AutoConfig.from_pretrained(checkpoint(architecture))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    with joined(monkeypatch, 0, stages) as ranks:
        mesh = DeviceMesh.from_group(ranks.pipeline, "cpu", mesh_dim_names=("pp",))
        with pytest.raises(ConfigError, match=says):
            split_stages(model, mesh)


def test_drafts_are_refused() -> None:
    """Speculation with stages is refused by name: only the last stage could accept drafts."""
    config = EngineConfig.load(
        None,
        env={},
        overrides=["parallel.pipeline=2", "speculative.algorithm=eagle", "speculative.draft_model=draft"],
    )
    with pytest.raises(ConfigError, match=r"algorithm is 'eagle' and parallel\.pipeline is 2"):
        select_algorithm(config, PluginCatalog.scan())
