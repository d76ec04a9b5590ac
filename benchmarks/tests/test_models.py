"""The models have the sizes that are asked for, and the limit has their matrix products."""

from pathlib import Path

import pytest
import torch
import transformers

from graphpact.errors import UsageError
from graphpact_bench import machine, widths
from graphpact_bench.models import PRESETS, ModelShape, parse_shape, save_model
from graphpact_bench.ways.gguf_file import gguf_name, in_pairs

SMALL = ModelShape(width=64, layers=2, heads=4, kv_heads=2, intermediate=96, vocab=32)


def test_a_shape_is_read_as_it_is_written() -> None:
    """A preset's name is the preset; other sizes follow from the width, unless they are written."""
    assert all(str(shape) == name and parse_shape(name) == shape for name, shape in PRESETS.items())
    assert parse_shape("768x12") == ModelShape(768, 12, heads=12, kv_heads=12, intermediate=2048)
    assert parse_shape("576x30:vocab=1000").vocab == 1000
    assert parse_shape("64x1:heads=4,intermediate=96") == ModelShape(64, 1, 4, 4, 96)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("large", "no shape of a model"),
        ("64x", "no shape of a model"),
        ("64x1:head=2", "the fields are width"),
        ("64x1:heads=two", "not FIELD=NUMBER"),
        ("64x1:heads=3", "do not divide a width"),
        ("64x1:heads=4,kv_heads=3", "do not divide a width"),
        ("0x1", "do not divide a width"),
    ],
)
def test_a_shape_that_no_llama_has_is_refused(text: str, why: str) -> None:
    """What cannot be read, and heads that do not divide the width, are errors of the user."""
    with pytest.raises(UsageError, match=why):
        parse_shape(text)


def test_the_matrices_of_a_shape_are_those_of_its_model(tmp_path: Path) -> None:
    """A step multiplies by every weight matrix of the checkpoint but the embedding, in its shape."""
    save_model(tmp_path, SMALL, max_position_embeddings=16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    own = [tuple(w.shape) for n, w in model.named_parameters() if w.dim() == 2 and "embed" not in n]
    assert sorted(own) == sorted(SMALL.matrices)
    assert SMALL.num_weights == sum(rows * columns for rows, columns in own)


def test_cold_weights_are_more_than_the_caches_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix of a step is multiplied once per copy, and the copies exceed the cache several times."""
    monkeypatch.setattr(machine, "cache_bytes", lambda: 3 * SMALL.num_weights)
    cpu = torch.device("cpu")
    multiplied: list[int] = []
    mm = torch.mm
    monkeypatch.setattr(
        torch, "mm", lambda a, b, *, out: (multiplied.append(b.data_ptr()), mm(a, b, out=out))
    )
    cold = widths.MatrixProducts(SMALL, 2, torch.float32, cpu, is_cold=True)
    times = cold.multiply()
    assert len(times) == len(cold.copies) == 3  # 4 caches of 3 bytes a weight, by 4 bytes
    assert len(set(multiplied)) == len(multiplied) == 3 * len(SMALL.matrices)
    multiplied.clear()
    warm = widths.MatrixProducts(SMALL, 2, torch.float32, cpu, is_cold=False, repeats=5)
    assert len(warm.multiply()) == 5
    assert len(set(multiplied)) == len(SMALL.matrices)


def test_rotated_rows_become_neighbours() -> None:
    """Row i of a head and row i + head_dim / 2 follow each other in llama.cpp's order, head by head."""
    rows = torch.arange(8)[:, None].expand(8, 3)
    assert in_pairs(rows, heads=2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def test_every_weight_of_a_llama_has_a_name_in_gguf(tmp_path: Path) -> None:
    """No two weights share a name, and names of layers have their number."""
    save_model(tmp_path, SMALL, max_position_embeddings=16)
    names = [*transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()]
    told = [gguf_name(name) for name in names]
    assert len(set(told)) == len(told)
    assert gguf_name("model.layers.1.self_attn.k_proj.weight") == "blk.1.attn_k.weight"
    assert gguf_name("lm_head.weight") == "output.weight"
