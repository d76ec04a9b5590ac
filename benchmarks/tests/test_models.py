"""The models have the sizes that are asked for."""

from pathlib import Path

import pytest
import transformers

from graphpact.errors import UsageError
from graphpact_bench.models import PRESETS, ModelShape, parse_shape, save_model

SMALL = ModelShape(width=64, layers=2, heads=4, kv_heads=2, intermediate=96, vocab=32)


def test_a_shape_is_read_as_it_is_written() -> None:
    """A preset's name gives the preset; other sizes follow from the width, unless they are given."""
    assert all(str(shape) == name and parse_shape(name) == shape for name, shape in PRESETS.items())
    assert parse_shape("768x12") == ModelShape(768, 12, heads=12, kv_heads=12, intermediate=2048)
    assert parse_shape("576x30:vocab=1000").vocab == 1000
    assert parse_shape("64x1:heads=4,intermediate=96") == ModelShape(64, 1, 4, 4, 96)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("large", "not a shape of a model"),
        ("64x", "not a shape of a model"),
        ("64x1:head=2", "the fields are width"),
        ("64x1:heads=two", "not FIELD=NUMBER"),
        ("64x1:heads=3", "do not divide a width"),
        ("64x1:heads=4,kv_heads=3", "do not divide a width"),
        ("0x1", "do not divide a width"),
    ],
)
def test_a_shape_that_no_llama_has_is_refused(text: str, why: str) -> None:
    """Unreadable shapes, and heads that do not divide the width, are errors of the user."""
    with pytest.raises(UsageError, match=why):
        parse_shape(text)


def test_a_checkpoint_has_the_sizes_of_its_shape(tmp_path: Path) -> None:
    """The weights that are saved are those of a Llama with the sizes of the shape."""
    save_model(tmp_path, SMALL, max_position_embeddings=16)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    shapes = {name.removeprefix("model.layers.1."): tuple(w.shape) for name, w in model.named_parameters()}
    assert shapes["self_attn.q_proj.weight"] == (64, 64)
    assert shapes["self_attn.k_proj.weight"] == (32, 64)
    assert shapes["mlp.down_proj.weight"] == (64, 96)
    assert shapes["lm_head.weight"] == (32, 64)
