"""Tests of the table of other wheels that need no wheel."""

from types import SimpleNamespace

import pytest
import torch

from graphpact.errors import ConfigError
from graphpact_adapters.sglang import Backends
from graphpact_adapters.vllm import Builders
from peers import ascend, other_builders, other_checks, other_sglang
from peers.job import cut


def test_each_name_has_an_adapter() -> None:
    """A row of the table is an adapter of its engine's kind; an unknown name is an error."""
    for name in other_builders.OTHERS:
        assert isinstance(getattr(other_checks, name), Builders)
    for name in other_sglang.OTHERS:
        assert isinstance(getattr(other_checks, name), Backends)
    assert other_sglang.OTHERS.keys() == other_sglang.WHEELS.keys()
    with pytest.raises(AttributeError, match="no attribute 'paged'"):
        other_checks.paged  # noqa: B018  it is read


def test_a_call_of_the_engine_updates_the_task_that_it_began() -> None:
    """A kernel call between begin and end updates the arguments of the task."""
    given: dict[str, object] = {}
    task = SimpleNamespace(update=lambda **arguments: given.update(arguments))
    updating, table = ascend.Updating(), torch.zeros(2, 3)
    updating.begin(None, task)  # type: ignore[arg-type]
    updating.attention(actual_seq_lengths=[1, 2], actual_seq_lengths_kv=[5, 6], block_table=table, out=[])
    updating.end(None)
    assert given.pop("block_tables") is table
    assert given == {"actual_seq_lengths_q": (0, 1, 2), "seq_lens_list": [5, 6]}
    assert updating.task is None


def test_a_reader_of_decodes_refuses_prefills() -> None:
    """Kunlun's decode kernel takes lengths on the device and pages; prefills have another kernel."""
    decode = SimpleNamespace(seq_lens_tensor=torch.tensor([3, 4]), block_tables=torch.zeros(2, 5))
    metadata = SimpleNamespace(
        decode_metadata=decode, num_prefills=0, num_decodes=2, num_decode_tokens=8, num_actual_tokens=8
    )
    reads = other_builders.OTHERS["kunlun"].read(metadata, torch.zeros(8))
    (part,) = reads.parts  # type: ignore[attr-defined]
    assert (part.query_len, part.num_tokens) == (4, 8)
    assert part.seq_lens is decode.seq_lens_tensor
    metadata.num_prefills = 1
    with pytest.raises(ConfigError, match="has 1 prefills"):
        other_builders.OTHERS["kunlun"].read(metadata, torch.zeros(8))


def test_the_page_has_no_folders_of_a_machine() -> None:
    """A file in a message keeps only its last folder; other text stays."""
    assert cut("recorded at /home/me/src/pkg/backend.py:3: x, 1/2") == "recorded at pkg/backend.py:3: x, 1/2"
