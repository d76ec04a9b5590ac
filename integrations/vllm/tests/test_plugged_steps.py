"""What a graphpact backend makes of vLLM's batches. No vLLM is needed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import graphpact_vllm
from graphpact import AttentionBackend
from graphpact.attention import LayerSpec
from graphpact.batch import ForwardMode
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_vllm.attention.plugged_steps import Caches, PluggedMetadata, PluggedSteps, StepSizes

PAGE, PAGES, MOST = 4, 24, 32
LAYER = LayerSpec(layer_id=0, num_q_heads=4, num_kv_heads=2, head_dim=16, v_head_dim=16, scaling=0.25)
HEADS = {"q": 4, "k": 2, "v": 2}


def steps_of(plugin: type[AttentionBackend], width: int = 1) -> PluggedSteps:
    """Return steps over a random cache, with graphs of up to 16 tokens."""
    cache = torch.randn(PAGES * PAGE, 2, 32, generator=torch.Generator().manual_seed(0))
    sizes = StepSizes(
        max_num_seqs=4,
        max_num_tokens=64,
        max_model_len=MOST,
        page_size=PAGE,
        max_captured=16,
        width=width,
    )
    caches = Caches(k=[cache[..., :16]], v=[cache[..., 16:]])
    return PluggedSteps(plugin, [LAYER], caches, sizes, torch.device("cpu"))


def batch_of(counts: list[int], lens: list[int], num_reqs: int, num_tokens: int) -> Any:
    """Return a batch as vLLM's builders get it; requests and tokens are padded as vLLM pads them."""
    starts = [sum(counts[: min(row, len(counts))]) for row in range(num_reqs + 1)]
    rows = [*lens, *[0] * (num_reqs - len(lens))]
    table = torch.zeros(num_reqs, MOST // PAGE, dtype=torch.int32)
    slots = torch.full((num_tokens,), -1)
    for row, (count, length) in enumerate(zip(counts, lens, strict=True)):
        table[row] = torch.arange(MOST // PAGE) * 2 % PAGES + 1 + row % 2
        at = torch.arange(length - count, length)
        slots[starts[row] : starts[row] + count] = table[row][at // PAGE] * PAGE + at % PAGE
    on_host = torch.tensor(rows, dtype=torch.int32)
    return SimpleNamespace(
        num_reqs=num_reqs,
        num_actual_tokens=num_tokens,
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
        seq_lens=on_host.clone(),
        seq_lens_cpu_upper_bound=on_host,
        max_seq_len=max(lens),
        block_table_tensor=table,
        slot_mapping=slots,
    )


def attended(metadata: PluggedMetadata, tokens: int) -> torch.Tensor:
    """Return the attention of the first tokens, for the same queries, keys and values each time."""
    made = torch.Generator().manual_seed(1)
    given = {name: torch.randn(16, heads, 16, generator=made) for name, heads in HEADS.items()}
    size = metadata.num_actual_tokens
    out = metadata.backend.forward(*(given[name][:size] for name in HEADS), LAYER, metadata.step)
    return out[:tokens].clone()


@pytest.mark.parametrize("plugin", [FA3Backend, FlashInferBackend])
@pytest.mark.parametrize(
    ("mode", "width", "counts", "lens", "padded"),
    [
        (ForwardMode.DECODE, 1, [1, 1, 1], [5, 17, 9], (4, 4)),
        (ForwardMode.TARGET_VERIFY, 3, [3, 3], [7, 20], (4, 12)),
        (ForwardMode.MIXED, 1, [5, 1, 2], [5, 12, 30], (4, 16)),
    ],
)
def test_a_replay_attends_as_an_eager_step_does(
    plugin: type[AttentionBackend],
    mode: ForwardMode,
    width: int,
    counts: list[int],
    lens: list[int],
    padded: tuple[int, int],
) -> None:
    """The metadata of a capture, refreshed for a smaller batch, is right for it, in the same object."""
    steps, tokens = steps_of(plugin, width), sum(counts)
    ragged = mode is ForwardMode.MIXED
    dummy_counts = [padded[1] // padded[0]] * padded[0]
    dummy = batch_of(dummy_counts, dummy_counts, *padded)
    captured = steps.captured(dummy, is_ragged=ragged)
    assert list(steps._lanes) == [mode]
    replayed = steps.stepped(batch_of(counts, lens, *padded), is_ragged=ragged)
    assert replayed is captured
    actual = attended(replayed, tokens)
    eager = steps_of(plugin, width).stepped(batch_of(counts, lens, len(counts), tokens), is_ragged=ragged)
    assert eager.num_actual_tokens == tokens
    torch.testing.assert_close(actual, attended(eager, tokens))


def test_a_shape_that_is_captured_again_keeps_its_metadata() -> None:
    """A warm-up and a capture, or two graphs of a shape, share the metadata that replays refresh."""
    steps = steps_of(FA3Backend)
    dummy = batch_of([1] * 4, [1] * 4, 4, 4)
    assert steps.captured(dummy, is_ragged=False) is steps.captured(dummy, is_ragged=False)


def test_names_in_vllm_are_those_of_the_plugins() -> None:
    """Each installed backend has a name, without characters that vLLM's names cannot have."""
    names = ["fa3", "my-attention", "acme.v2"]
    catalog: Any = SimpleNamespace(infos=lambda _: [SimpleNamespace(name=name) for name in names])
    found = graphpact_vllm.plugged_names(catalog)
    assert found == dict(
        zip(("GRAPHPACT_FA3", "GRAPHPACT_MY_ATTENTION", "GRAPHPACT_ACME_V2"), names, strict=True)
    )
