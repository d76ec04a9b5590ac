"""Builders whose kernels are tasks: right updates pass, and wrong ones are GP21."""

from typing import Any

import pytest
import sglang_backends
import task_builders as built
import torch
import vllm_builders
from adapter_checks import assert_found, assert_right, findings_of, results_of

from graphpact.errors import ConfigError
from graphpact_adapters.sglang import Backends
from graphpact_adapters.tasks import Tasks, UpdatableGraph, paths_of
from graphpact_adapters.vllm import Builders, PagedReads, Part

VLLM, SGLANG = vllm_builders.LANES, sglang_backends.LANES


@pytest.mark.few(2)
@pytest.mark.parametrize("lane", ["decode", "verify", "extend"])
@pytest.mark.parametrize("update", [None, built.update_graph_params], ids=["provider", "update"])
def test_a_right_builder_with_its_update_passes(update: Any, lane: str) -> None:
    """Lists and tables that are new in each step are right if the tasks are updated with them."""
    assert_right(built.under_test(update), VLLM[lane])


def test_an_update_is_checked_under_its_rule() -> None:
    """A builder with tasks is checked for GP21; for one without, GP21 is not reported as checked."""
    for subject, is_checked in (
        (built.under_test(), True),
        (Builders(built.AscendBuilder, read=built.read), False),
    ):
        assert ("GP21" in {result.rule for result in results_of(subject, VLLM["decode"])}) is is_checked


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("update", "rule", "field"),
    [
        (built.of_the_first_layer_alone, "GP21", "the tasks of the graph"),
        (built.never, "GP21", "the tasks of the graph"),
        (built.backwards, "GP21", "the tasks of the graph"),
        (built.by_an_old_name, "GP21", "the tasks of the graph"),
        (built.by_place, "GP21", "block_tables["),
        (built.one_step_late(), "GP21", "seq_lens_list"),
        (built.with_a_table_of_its_own, "GP14", "the tasks of the graph"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_wrong_update_is_found(update: Any, rule: str, field: str) -> None:
    """A missed update, another order, name or layer, and an old step are GP21; freed memory is GP14."""
    assert_found(findings_of(built.under_test(update), VLLM["decode"]), rule, field)


def test_a_missed_update_is_reported_with_task_and_argument() -> None:
    """The finding has the layer, the key of the graph, and the arguments that the task keeps."""
    (found, *_) = findings_of(built.under_test(built.of_the_first_layer_alone), VLLM["decode"])
    assert "task 'model.layers.1.attn' of decode[bs=" in found.actual
    assert "was not updated before this replay and keeps actual_seq_lengths_q=" in found.actual
    assert found.hook == "build"
    assert "update all tasks" in str(found.help)


@pytest.mark.parametrize(
    ("arguments", "rule", "field"),
    [
        (("actual_seq_lengths_q", "seq_lens_list"), "GP01", "block_tables["),
        (("actual_seq_lengths_q", "block_tables"), "GP08", "seq_lens_list"),
    ],
)
def test_what_is_not_updated_is_judged_as_captured(arguments: tuple[str, ...], rule: str, field: str) -> None:
    """An argument that the engine does not update is one that a graph keeps."""
    assert_found(findings_of(built.under_test(None, arguments), VLLM["decode"]), rule, field)


def test_one_key_in_two_graphs_is_an_error() -> None:
    """If two shapes have one key, as with a number of tokens, the capture of the second is GP21."""
    findings = findings_of(
        built.under_test(built.update_graph_params, key=lambda shape: shape.mode), VLLM["decode"]
    )
    assert {found.rule for found in findings} == {"GP21"}
    assert "have one key, ForwardMode.DECODE" in findings[0].actual


def test_a_key_of_tokens_alone_is_right_where_it_is_one_of_a_graph() -> None:
    """A number of tokens is a valid key if it is different for each graph."""
    assert_right(
        built.under_test(built.update_graph_params, key=lambda shape: shape.num_tokens), VLLM["decode"]
    )


def test_an_argument_that_the_kernel_lacks_is_an_error() -> None:
    """A name that the reads do not have is refused, and the error lists those that they have."""
    reads = PagedReads((Part((1,), torch.zeros(1, 1), num_tokens=1),), torch.zeros(1), 1)
    assert paths_of(reads, ("seq_lens",)) == {"seq_lens": "parts[0].seq_lens"}
    with pytest.raises(
        ConfigError, match=r"has kv_lens, which is no argument of the kernel; its reads have seq_lens"
    ):
        paths_of(reads, ("kv_lens",))


def test_tasks_are_of_attention_alone() -> None:
    """Tasks need at least one argument, and are refused for recurrent states and for drafts in a graph."""
    with pytest.raises(ConfigError, match="recurrent states are not updated"):
        Builders(built.AscendBuilder, kind="mamba", tasks=Tasks(("seq_lens",)))
    with pytest.raises(ConfigError, match="no argument is updated"):
        Tasks(())
    modes = built.under_test()._all_modes
    assert "draft_decode" not in {mode.value for mode in modes}


# -- SGLang ------------------------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.parametrize("lane", ["decode", "verify"])
@pytest.mark.parametrize("update", [None, built.update_input], ids=["provider", "update"])
def test_a_right_backend_with_its_update_passes(update: Any, lane: str) -> None:
    """A list that SGLang's runner updates for all tasks at once is right."""
    assert_right(built.listed_under_test(update), SGLANG[lane])


def test_a_list_that_is_not_updated_is_found() -> None:
    """Without tasks a list is frozen, GP08; an update under another kernel's name is GP21."""
    frozen: Backends = built.listed_under_test(has_tasks=False)
    assert_found(findings_of(frozen, SGLANG["decode"]), "GP08", "actual_seq_lengths_kv")
    wrong = findings_of(built.listed_under_test(built.update_input_of_v1), SGLANG["decode"])
    assert_found(wrong, "GP21", "the tasks of the graph")


def test_an_update_of_a_graph_has_one_mapping_or_one_for_each() -> None:
    """A number of mappings that leaves tasks out is refused."""

    def updates_two(graph: UpdatableGraph, batch: Any) -> None:
        graph.update(cpu_update_input=[{"actual_seq_lengths_kv": batch.seq_lens.tolist()}] * 3)

    (found, *_) = findings_of(built.listed_under_test(updates_two), SGLANG["decode"])
    assert found.rule == "GP21"
    assert "is updated with 3 mappings" in found.actual
    assert "it has 2 tasks" in found.actual
