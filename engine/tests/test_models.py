"""Tests of loading models and checkpoints, and of those that are refused."""

import json
import pickle
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, dynamic_module_utils

from graphpact import BackendContext, ForwardBatch, Lane, Limits
from graphpact.attention import LayerSpec
from graphpact.batch import ForwardMode
from graphpact.errors import CaptureError
from graphpact.runners import EagerRunner, RunnerContext
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_engine import Engine, SamplingParams, models
from graphpact_engine.capabilities import require_capabilities
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import CheckpointError, UnsupportedModelError
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import TapeDriver
from support import Catalog, reference_tokens

CPU = torch.device("cpu")


def load(path: Path, dtype: torch.dtype | None = None, **more: Any) -> models.Checkpoint:
    """Load a checkpoint as the engine does."""
    return models.load_checkpoint(path, dtype=dtype, device=CPU, attention=models.ATTENTION_NAME, **more)


@pytest.fixture
def copy(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a copy of a whole Llama checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))


def test_layers_are_what_the_model_asks_of_attention(checkpoint: Callable[..., Path]) -> None:
    """The probe finds heads, widths, scaling, windows, soft caps and sinks of every layer."""
    gemma = models.TransformersModel(load(checkpoint("gemma2")).model).layers
    assert [layer.sliding_window for layer in gemma] == [16, None, 16, None]
    assert {layer.softcap for layer in gemma} == {1.0}
    assert {layer.scaling for layer in gemma} == {256**-0.5}
    assert [layer.layer_id for layer in gemma] == [0, 1, 2, 3]
    oss = models.TransformersModel(load(checkpoint("gpt_oss")).model).layers
    assert all(layer.sinks is not None and layer.sinks.shape == (4,) for layer in oss)
    llama = models.TransformersModel(load(checkpoint("llama")).model).layers
    assert llama[0] == LayerSpec(0, 4, 2, 16, 16, 0.25)


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("bloom", "0 use transformers' attention"),
        ("falcon", "does not use transformers' attention"),
        ("llama4", "chunked_attention"),
        ("longrope", "depends on the longest sequence"),
        ("dynamic_rope", "depends on the longest sequence"),
        ("bart", "depend on their neighbours, or on their place"),
        ("phimoe", "a sliding window of 16 that is not passed to its attention"),
        ("mpt", "without masks and caches|0 use transformers' attention"),
        ("lfm2", "state besides keys and values|1 use transformers' attention"),
    ],
)
def test_models_that_need_more_than_attention_are_refused(
    architecture: str, reason: str, checkpoint: Callable[..., Path]
) -> None:
    """A model that does work outside the attention interface is refused at load, with the reason."""
    with pytest.raises(UnsupportedModelError, match=reason):
        models.TransformersModel(load(checkpoint(architecture)).model)


def test_a_line_that_cannot_be_captured_is_named_as_the_models(
    checkpoint: Callable[..., Path],
) -> None:
    """The error for a host read in the model's code names its line, and settings that run the model.

    A setting names the lane as it is called in the configuration.
    """
    path = checkpoint("jetmoe")
    asked = [f"model.path={path}", "engine.device=cpu", "engine.max_num_seqs=2", 'lanes.few.mode="decode"']
    asked += ["lanes.few.batch_sizes=[1]", "lanes.decode.batch_sizes=[2]"]
    settings = []
    for lane in ("few", "decode"):
        with pytest.raises(CaptureError, match=r"model type 'jetmoe'.*modeling_jetmoe\.py:\d+: ") as caught:
            Engine(EngineConfig.load(None, env={}, overrides=[*asked, *settings]))
        assert caught.value.hint is not None
        settings.append(caught.value.hint.partition("--set ")[2])
        assert settings[-1].startswith(f"lanes.{lane}.")
    with Engine(EngineConfig.load(None, env={}, overrides=[*asked, *settings])) as engine:
        [completion] = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=4))
    assert completion.token_ids == reference_tokens(path, [5, 6, 7], 4)


def test_a_fault_of_the_backend_in_a_capture_is_not_the_models(
    checkpoint: Callable[..., Path],
) -> None:
    """The error for a host read in an attention backend does not name a line of the model."""

    class Reading(FlashInferBackend):
        def forward(self, q: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
            q.sum().item()
            return super().forward(q, *args, **more)

    asked = [f"model.path={checkpoint('llama')}", "engine.device=cpu", "engine.max_num_seqs=2"]
    config = EngineConfig.load(None, env={}, overrides=asked)
    with pytest.raises(CaptureError, match=r"test_models\.py") as caught:
        Engine(config, catalog=Catalog(flashinfer=Reading))
    assert "model type" not in str(caught.value)


def test_pad_tokens_are_tokens(checkpoint: Callable[..., Path]) -> None:
    """A model with a pad token, of which transformers would warn, is captured and continues pad tokens."""
    path = checkpoint("gpt2")
    asked = [f"model.path={path}", "engine.device=cpu", "engine.max_num_seqs=2"]
    with Engine(EngineConfig.load(None, env={}, overrides=asked)) as engine:
        [completion] = engine.generate([[0, 6, 0]], SamplingParams(max_new_tokens=4))
        assert engine.lanes[0].stats.replays or engine.lanes[1].stats.replays
    assert completion.token_ids == reference_tokens(path, [0, 6, 0], 4)


@pytest.mark.parametrize("feature", ["sliding_window", "softcap", "sinks"])
def test_what_a_backend_lacks_is_refused(feature: str) -> None:
    """Every feature that a layer asks for and a backend does not declare is named in the refusal."""
    asked = {"sliding_window": 8, "softcap": 30.0, "sinks": torch.zeros(4)}
    layer = replace(LayerSpec(0, 4, 2, 16, 16, 0.25), **{feature: asked[feature]})
    poor = replace(FlashInferBackend.capabilities, **{feature: False}, page_sizes=frozenset({64}))
    with pytest.raises(UnsupportedModelError, match=feature) as caught:
        require_capabilities(
            "poor",
            poor,
            [layer],
            mode=ForwardMode.DECODE,
            dtype=torch.float32,
            device=CPU,
            page_size=16,
        )
    assert "page size 16 (has 64)" in str(caught.value)


def test_the_checkpoints_dtype_is_float32_on_a_cpu_unless_asked(
    checkpoint: Callable[..., Path],
) -> None:
    """A bfloat16 checkpoint computes in float32 on a CPU, unless another dtype is asked for."""
    path = checkpoint("llama", dtype="bfloat16")
    assert load(path).model.dtype is torch.float32
    assert load(path, torch.bfloat16).model.dtype is torch.bfloat16


def test_no_checkpoint_is_named(tmp_path: Path) -> None:
    """A path that is missing, a file, or without ``config.json`` is refused with the name of that file."""
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "missing", tmp_path / "file", tmp_path):
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load(path)


def test_broken_config_is_named(copy: Path) -> None:
    """A config that is no JSON object is refused with the file's name."""
    for content in ("{", "[]"):
        (copy / "config.json").write_text(content)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            load(copy)


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_weights_are_named(copy: Path, share: float) -> None:
    """Safetensors cut off anywhere, header or data, are refused with the file's name."""
    file = copy / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(copy)


def test_pickles_are_never_read(copy: Path, tmp_path: Path) -> None:
    """A pickle checkpoint is refused, and the code that it carries does not run."""
    (copy / "model.safetensors").unlink()
    trap = tmp_path / "it ran"

    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (open, (str(trap), "w"))

    (copy / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(CheckpointError, match="pickle"):
        load(copy)
    assert not trap.exists()


def test_remote_code_does_not_run_unasked(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python files of a checkpoint run with ``trust_remote_code`` only; by default it is refused."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds its cache of modules
    trap = tmp_path / "it ran"
    (copy / "evil.py").write_text(
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        f"open({str(trap)!r}, 'w').close()\n"
        "class Config(LlamaConfig):\n"
        "    model_type = 'evil'\n"
        "class Model(LlamaForCausalLM):\n"
        "    config_class = Config\n"
    )
    config = json.loads((copy / "config.json").read_text())
    config["model_type"] = "evil"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        load(copy)
    assert not trap.exists()
    assert type(load(copy, trust_remote_code=True).model).__name__ == "Model"
    assert trap.exists()


def test_weights_that_do_not_fit_are_refused(copy: Path) -> None:
    """A missing weight, a spare one and one of another shape are each named, never filled in."""
    file = copy / "model.safetensors"
    whole = {name: weight.clone() for name, weight in load_file(file).items()}  # no views of the mapped file
    name = "model.layers.0.mlp.up_proj.weight"
    metadata = {"format": "pt"}
    save_file({k: v for k, v in whole.items() if k != name}, file, metadata)
    with pytest.raises(CheckpointError, match=name):
        load(copy)
    save_file({**whole, "spare.weight": torch.zeros(1)}, file, metadata)
    with pytest.raises(CheckpointError, match=r"spare\.weight"):
        load(copy)
    save_file({**whole, name: torch.zeros(3, 3)}, file, metadata)
    with pytest.raises(CheckpointError, match=name):
        load(copy)


def test_missing_shards_are_named(copy: Path) -> None:
    """An index that lists a missing file, or one outside the directory, is refused."""
    for shard in ("model-00002-of-00002.safetensors", "../../elsewhere.safetensors"):
        index = {"weight_map": {"a": shard}}
        (copy / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(CheckpointError, match=Path(shard).name):
            load(copy)


def test_a_checkpoint_without_tokenizer_takes_token_ids_only(
    checkpoint: Callable[..., Path],
) -> None:
    """Loading a missing tokenizer is an error that advises token ids."""
    with pytest.raises(CheckpointError, match="token ids"):
        models.load_tokenizer(checkpoint("llama"))


@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_hidden_states_through_graphs_are_those_of_transformers(
    checkpoint: Callable[..., Path], architecture: str
) -> None:
    """Hidden states and logits of a replay equal those of transformers' own run of the whole text."""
    path = checkpoint(architecture)
    model = models.TransformersModel(load(path).model, hidden_states=(1, -1))
    lengths, context = [5, 3, 7], 16
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 40, (length,), generator=generator) for length in lengths]
    table = torch.zeros(5, context, dtype=torch.int32)
    table[1:] = torch.arange(context, 5 * context).view(4, context)
    layers = model.layers
    heads, dim = layers[0].num_kv_heads, layers[0].head_dim
    kv = SimpleNamespace(
        k=[torch.zeros(5 * context, heads, dim) for _ in layers],
        v=[torch.zeros(5 * context, heads, dim) for _ in layers],
    )
    limits = Limits(4, 16, context, 1)
    backend_context = BackendContext(CPU, torch.float32, layers, limits, table, kv)
    lanes = {}
    for mode, runner in ((ForwardMode.EXTEND, EagerRunner), (ForwardMode.DECODE, CudaGraphRunner)):
        backend = FlashInferBackend(replace(backend_context, mode=mode))
        asked = RunnerContext(CPU, backend.capabilities, limits, mode=mode, lane=mode.value)
        lanes[mode] = Lane(
            mode.value, model=model, runner=runner(asked), backend=backend, driver=TapeDriver(CPU)
        )
        lanes[mode].capture_all()
    rows = torch.arange(1, 4)
    for mode, lane in lanes.items():
        new = [n - 1 for n in lengths] if mode is ForwardMode.EXTEND else [1] * 3
        lens = torch.tensor([n - (mode is ForwardMode.EXTEND) for n in lengths])
        positions = torch.cat(
            [torch.arange(n - count, n) for n, count in zip(lens.tolist(), new, strict=True)]
        )
        of = rows.repeat_interleave(torch.tensor(new))
        ragged = torch.tensor(new) if mode is ForwardMode.EXTEND else None
        outputs = lane.run(
            ForwardBatch(
                forward_mode=mode,
                batch_size=3,
                input_ids=torch.cat(
                    [p[n - c : n] for p, n, c in zip(prompts, lens.tolist(), new, strict=True)]
                ),
                positions=positions,
                out_cache_loc=table[of, positions].long(),
                req_pool_indices=rows,
                seq_lens=lens,
                seq_lens_cpu=lens.clone(),
                extend_seq_lens=ragged,
                extend_seq_lens_cpu=ragged,
            )
        )
    assert lanes[ForwardMode.DECODE].stats.replays == 1
    assert dict(outputs.axes) == {"logits": "bs", "hidden_states": "tokens"}
    plain = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    for row, prompt in enumerate(prompts):
        with torch.inference_mode():
            expected = plain(prompt[None], output_hidden_states=True)
        hidden = torch.cat([expected.hidden_states[i][0, -1] for i in (1, -1)])
        torch.testing.assert_close(outputs["hidden_states"][row], hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(outputs.logits[row], expected.logits[0, -1], rtol=1e-4, atol=1e-4)
