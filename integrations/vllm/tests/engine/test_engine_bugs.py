"""Public faults of engines, planted in the real vLLM: the guard names them, and is silent without them."""

from collections.abc import Callable
from typing import Any

import pytest
from engines import NGRAMS, requests, run_in_child
from plants import Split, SplitImpl, keep_host_lengths, take_prompts_as_decodes, use

WORDS = "tape,guard,contents:1"


@pytest.mark.parametrize(
    ("before", "fields"),
    [
        (take_prompts_as_decodes, {"metadata.num_prefills", "metadata.num_decodes"}),
        (use(Split, SplitImpl), set()),
    ],
    ids=["planted", "right"],
)
def test_a_prompt_of_the_width_of_drafts_is_no_decode(before: Callable[[], None], fields: set[str]) -> None:
    """A prompt of as many tokens as a request with drafts must not replay the graph of decodes."""
    given = requests(["abab", "x = 1", "a a "], 8, every=3)
    run = run_in_child(WORDS, given, before=before, **NGRAMS)
    assert {fault[2] for fault in run.faults} <= fields
    assert bool(run.faults) is bool(fields)
    assert {fault[:2] for fault in run.faults} <= {("GP08", "Split")}
    assert run.replays() > 2


@pytest.mark.parametrize("runner", [1, 2])
@pytest.mark.parametrize("plant", [keep_host_lengths, None], ids=["planted", "right"])
def test_lengths_on_the_host_are_reset_behind_the_live_requests(runner: int, plant: Any) -> None:
    """A plan for padding rows is made of lengths on the host, which an earlier step may have left."""
    run = run_in_child(WORDS, plant=plant, runner=runner)
    found = {fault[:3] for fault in run.faults}
    assert found == ({("GP03", "CommonAttentionMetadata", "seq_lens_cpu_upper_bound")} if plant else set())
