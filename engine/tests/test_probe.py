"""The probe refuses models that compute a token from more than its own sequence, and runs all others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from model_sweep import comparison
from model_sweep.small_models import small_config
from transformers import AutoModelForCausalLM

from graphpact_engine import models
from graphpact_engine.errors import UnsupportedModelError
from graphpact_engine.models import probe


def model_of(case: str, **changed: Any) -> Any:
    """Return a small random model that attends through the engine's function."""
    torch.manual_seed(0)
    config = small_config(case, **changed)
    return AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation=models.ATTENTION_NAME
    ).eval()


def planted(change: Callable[[torch.Tensor, Any], torch.Tensor], layer: int) -> Any:
    """Return a Llama with a layer that gets ``change(hidden_states, position_ids)``."""
    model = model_of("llama")

    def before(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return (change(args[0], kwargs["position_ids"]), *args[1:]), kwargs

    model.model.layers[layer].register_forward_pre_hook(before, with_kwargs=True)
    return model


def by_place(x: torch.Tensor, _: Any) -> torch.Tensor:
    """Scale tokens beyond a threshold of the place in the batch, as Llama 4 scales queries."""
    places = torch.arange(x.shape[1], device=x.device)
    return x * (1 + torch.floor((places + 1.0) / 8192))[:, None]


def by_counted_place(x: torch.Tensor, _: Any) -> torch.Tensor:
    """Do the same with places that are counted by a mask of ones."""
    places = torch.ones(x.shape[:2], dtype=torch.int64).cumsum(-1) - 1
    return torch.where((places >= 2048)[..., None], -x, x)


def by_window(x: torch.Tensor, _: Any) -> torch.Tensor:
    """Add the token before, as token shift and convolutions do."""
    return x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1]


def by_batch(x: torch.Tensor, _: Any) -> torch.Tensor:
    """Normalise over all tokens of the batch."""
    return x - x.mean(dim=1, keepdim=True)


def by_longest(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Scale by the longest sequence of the batch, from half of the model's context on."""
    return torch.where(positions.max() >= 64, 2 * x, x)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (by_place, r"place in the batch: .*test_probe\.py:\d+: places = torch\.arange"),
        (by_counted_place, r"place in the batch: .*test_probe\.py:\d+: places = torch\.ones"),
        (by_window, "depend on their neighbours"),
        (by_batch, "depend on other tokens of the batch"),
        (by_longest, "positions of other tokens"),
    ],
)
@pytest.mark.parametrize("layer", [0, 1])
def test_what_depends_on_the_batch_is_refused(
    change: Callable[[torch.Tensor, Any], torch.Tensor], reason: str, layer: int
) -> None:
    """Each dependence of a token on other tokens of a batch is refused with its cause, in any layer."""
    with pytest.raises(UnsupportedModelError, match=reason):
        models.TransformersModel(planted(change, layer))


@pytest.mark.parametrize("floor_scale", [4, 8192, 500_000])
def test_thresholds_are_crossed_however_far(floor_scale: int) -> None:
    """Llama 4 scales queries by their place in the batch from ``floor_scale`` on: refused at every scale."""
    config: dict[str, Any] = {"floor_scale": floor_scale, "max_position_embeddings": 131_072}
    with pytest.raises(UnsupportedModelError, match="place in the batch"):
        models.TransformersModel(model_of("llama4_text, full attention", **config))
    untuned = model_of("llama4_text, full attention, untuned", **config)
    assert len(models.TransformersModel(untuned).layers) == 4


def test_positions_of_its_own_are_refused() -> None:
    """A model whose positions begin elsewhere than at 0, as RoBERTa's do, is refused."""
    with pytest.raises(UnsupportedModelError, match="its own positions"):
        models.TransformersModel(model_of("roberta"))


def test_rows_may_be_numbered_to_select_them() -> None:
    """A model that uses the numbers of its rows as indices runs: experts do."""

    def own_rows(x: torch.Tensor, _: Any) -> torch.Tensor:
        places = torch.arange(x.shape[1])
        order = torch.empty_like(places)
        order[places] = places
        return torch.zeros_like(x).index_add_(1, order, x[:, places])

    assert len(models.TransformersModel(planted(own_rows, 0)).layers) == 2
    assert len(models.TransformersModel(model_of("mixtral")).layers) == 2


@pytest.mark.parametrize("positions", [1, 2, 23, 24])
def test_small_contexts_are_probed_too(positions: int) -> None:
    """A model with a table of few positions is probed within it."""
    assert models.TransformersModel(model_of("gpt2", n_positions=positions)).layers


@pytest.mark.parametrize("case", ["llama4_text, full attention", "roberta"])
def test_the_refused_are_wrong(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the probe's passes such models run and are wrong; the comparison with transformers finds it."""
    monkeypatch.setattr(probe, "_beyond_its_sequence", lambda *_: [])
    monkeypatch.setattr(probe, "_close", lambda *_: True)
    assert comparison.compare(case).verdict == "wrong"
