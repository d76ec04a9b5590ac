"""The strict namespaces with the sizes of a lane that vLLM builders get."""

import copy
import dataclasses
import subprocess
import sys
from typing import Any

import pytest
import torch

from graphpact.errors import ConfigError
from graphpact_adapters.vllm.plain_values import (
    GraphMode,
    Kind,
    Namespace,
    NotGivenError,
    Sizes,
    kv_cache_spec,
    vllm_config,
)

SIZES = Sizes(
    num_layers=2,
    num_q_heads=8,
    num_kv_heads=2,
    head_size=64,
    head_size_v=32,
    dtype=torch.bfloat16,
    block_size=16,
    max_model_len=100,
    max_num_seqs=4,
    max_num_tokens=64,
    capture_sizes=(1, 2, 4),
)
MLA = dataclasses.replace(SIZES, kind="mla", num_kv_heads=1, head_size=576, head_size_v=0)
MAMBA = dataclasses.replace(SIZES, kind="mamba", num_speculative_tokens=3)
WINDOW = dataclasses.replace(SIZES, kind="sliding_window", sliding_window=32)


def _namespaces(at: Namespace) -> list[Namespace]:
    found = [at]
    for value in vars(at).values():
        for each in value.values() if isinstance(value, dict) else [value]:
            found += _namespaces(each) if isinstance(each, Namespace) else []
    return found


@pytest.mark.parametrize("sizes", [SIZES, MLA, MAMBA, WINDOW], ids=lambda sizes: sizes.kind)
def test_an_unknown_attribute_raises_with_its_path(sizes: Sizes) -> None:
    """In every namespace, to read an unknown name raises an error with its whole path and what to do."""
    for root in (kv_cache_spec(sizes), vllm_config(sizes)):
        for namespace in _namespaces(root):
            path = repr(namespace).removeprefix("Namespace(").removesuffix(")")
            with pytest.raises(NotGivenError) as caught:
                namespace.foo  # noqa: B018  it is read
            assert str(caught.value).startswith(f"{path}.foo: the suite has no value for it")
            assert f"`{path}.foo = ...`" in str(caught.value)


def test_paths_are_those_by_which_a_builder_reads() -> None:
    """The path in the message, evaluated, reaches the namespace that lacks the attribute."""
    given: dict[str, Any] = {"vllm_config": vllm_config(MAMBA), "kv_cache_spec": kv_cache_spec(MAMBA)}
    for namespace in [each for root in given.values() for each in _namespaces(root)]:
        path = repr(namespace).removeprefix("Namespace(").removesuffix(")")
        assert eval(path, given) is namespace  # noqa: S307  a path of ours


def test_a_missing_attribute_is_missing_to_getattr_and_hasattr() -> None:
    """A builder that reads with a default gets it, because the error is also an ``AttributeError``."""
    config = vllm_config(SIZES)
    assert getattr(config.cache_config, "foo", 7) == 7
    assert not hasattr(config, "foo")
    assert issubclass(NotGivenError, ConfigError)


def test_a_factory_may_set_attributes() -> None:
    """An attribute that was set can be read, also from a copy, and belongs only to that configuration."""
    config = vllm_config(SIZES)
    config.cache_config.foo = 3
    assert config.cache_config.foo == 3
    assert copy.deepcopy(config).cache_config.foo == 3
    assert not hasattr(vllm_config(SIZES).cache_config, "foo")


@pytest.mark.parametrize("kind", ["full", "mla", "mamba"])
def test_a_window_belongs_to_its_kind(kind: Kind) -> None:
    """Sizes with a window but not its kind, and with the kind but no window, are refused."""
    with pytest.raises(ConfigError, match="sliding_window=32"):
        dataclasses.replace(SIZES, kind=kind, sliding_window=32)
    with pytest.raises(ConfigError, match="sliding_window=None"):
        dataclasses.replace(SIZES, kind="sliding_window")


def test_the_sizes_of_a_lane_arrive_where_builders_read_them() -> None:
    """Heads, lengths and capture sizes are the same in the spec, the configuration and the layers."""
    spec, config = kv_cache_spec(SIZES), vllm_config(SIZES)
    model, parallel = config.model_config, config.parallel_config
    assert (spec.num_kv_heads, spec.head_size, spec.head_size_v, spec.block_size) == (2, 64, 32, 16)
    assert (model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)) == (8, 2)
    assert spec.dtype is model.dtype is torch.bfloat16
    assert config.cache_config.num_gpu_blocks == 1 + 4 * 7  # block 0, and 7 blocks of 16 for 100 tokens
    assert config.compilation_config.max_cudagraph_capture_size == 4
    assert list(config.compilation_config.static_forward_context) == SIZES.layer_names
    assert config.speculative_config is None
    assert kv_cache_spec(WINDOW).sliding_window == 32


def test_mla_splits_a_key_into_its_latent_and_its_rotary_part() -> None:
    """An MLA layer's latent vector and rotary part make up the cached key; the cache has no values."""
    (layer, *_) = vllm_config(MLA).compilation_config.static_forward_context.values()
    assert (layer.kv_lora_rank, layer.qk_rope_head_dim) == (512, 64)
    assert layer.kv_lora_rank + layer.qk_rope_head_dim == kv_cache_spec(MLA).head_size
    assert kv_cache_spec(MLA).head_size_v == 0


def test_a_state_has_a_block_for_each_draft() -> None:
    """With K drafts, a request's recurrent states take 1 + K blocks, and the configuration speculates."""
    spec, config = kv_cache_spec(MAMBA), vllm_config(MAMBA)
    assert spec.num_speculative_blocks == 3
    assert len(spec.shapes) == len(spec.dtypes) == 2
    assert config.num_speculative_tokens == config.speculative_config.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("mode", "decode", "any_full"),
    [
        (GraphMode.NONE, GraphMode.NONE, False),
        (GraphMode.FULL, GraphMode.FULL, True),
        (GraphMode.FULL_DECODE_ONLY, GraphMode.FULL, True),
    ],
)
def test_a_graph_mode_says_how_decode_steps_run(
    mode: GraphMode, decode: GraphMode, *, any_full: bool
) -> None:
    """Decode steps replay full graphs in both full modes; they are not three names of one mode."""
    assert mode.decode_mode() is decode
    assert mode.has_full_cudagraphs() is any_full
    assert len(GraphMode) == 3


def test_no_engine_is_imported() -> None:
    """Importing what is given imports neither vLLM nor Triton."""
    told = subprocess.run(
        [sys.executable, "-c", "import graphpact_adapters.vllm.plain_values, sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not {"vllm", "triton", "sglang"} & set(told.stdout.split())
    assert "graphpact_adapters.vllm.plain_values" in told.stdout.split()
