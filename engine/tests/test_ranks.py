"""Engines on several real processes: the tokens of one process, and no rank waits forever.

Each test starts its processes by ``torchrun``; several engines run in them, one after another.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from checkpoints import save_random_draft
from graphpact.errors import ConfigError
from graphpact_cli import main
from graphpact_engine.config import EngineConfig
from graphpact_engine.engine import Engine
from graphpact_engine.request import SamplingParams

SCRIPT = Path(__file__).with_name("rank_engine.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "models" / "tiny-llama"
GRAPHPACT = [sys.executable, "-m", "graphpact_cli"]
PROMPTS = [[*range(2, 2 + length)] for length in (3, 9, 5, 1, 12, 7)]
LENGTHS = [12, 5, 9, 20, 3, 14]
SINGLE = {"prompts": PROMPTS[:1], "lengths": LENGTHS[:1]}
Case = dict[str, Any]

TENSOR = ["parallel.tensor=2"]
ATTENTION = [*TENSOR, "parallel.attention_data=2"]
SEQUENCE = [*TENSOR, "parallel.sequence=true"]
PIPELINE = ["parallel.pipeline=2"]
STRICT = ["lanes.decode.strict=true"]


@contextmanager
def started(folder: Path, ranks: int, cases: Sequence[Case]) -> Iterator["subprocess.Popen[str]"]:
    """Start the ranks; kill what is left of them at the end."""
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),  # any free port
            *(str(SCRIPT), str(file)),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        kill_all_with(file)  # before the pipes are read: a stopped rank keeps them open
        process.communicate()


def kill_all_with(file: Path) -> None:
    """Kill the processes that have ``file`` as an argument: ranks leave the session of their launcher."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if str(file).encode() in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)


def run(folder: Path, ranks: int, cases: Sequence[Case], *, limit: float = 600) -> list[Case]:
    """Run the cases on some ranks and return what each one printed."""
    with started(folder, ranks, cases) as process:
        out, err = process.communicate(timeout=limit)
        assert process.returncode == 0, err[-6000:]
    return [json.loads(line) for line in out.splitlines()]


def alone(sets: Sequence[str], case: Case) -> list[list[int]]:
    """Return the tokens of one process."""
    with Engine(EngineConfig.load(None, overrides=[*sets])) as engine:
        sampling = [
            SamplingParams(max_new_tokens=n, ignore_eos=True, **case.get("sampling", {}))
            for n in case["lengths"]
        ]
        return [answer.token_ids for answer in engine.generate(case["prompts"], sampling)]


def require_equal(
    folder: Path, ranks: int, cases: dict[str, tuple[Path, Sequence[str], Case]]
) -> dict[str, Case]:
    """Run cases on ranks and require the tokens of one process; return what was printed, by name.

    Args:
        folder: For the file of the cases.
        ranks: The number of processes.
        cases: The checkpoint, the settings, and other keys of each case.
    """
    asked = {
        name: {"prompts": PROMPTS, "lengths": LENGTHS, **more, "sets": [f"model.path={path}", *sets]}
        for name, (path, sets, more) in cases.items()
    }
    found = dict(zip(asked, run(folder, ranks, [*asked.values()]), strict=True))
    for name, case in asked.items():
        plain = [each for each in case["sets"] if each.startswith("model.")]
        assert found[name]["tokens"] == alone(plain, case), name
    return found


def eagle(checkpoint: Callable[..., Path]) -> list[str]:
    """Return the settings of drafts for Llama."""
    target = checkpoint("llama")
    path = save_random_draft(target.with_name("draft"), target, "LlamaForCausalLMEagle")
    return ["speculative.algorithm=eagle", f"speculative.draft_model={path}", "speculative.topk=2"]


def test_two_ranks_generate_the_tokens_of_one(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """Layers and tokens are split; a batch of one rank may be too large for a graph; drafts are on."""
    llama, experts = checkpoint("llama"), checkpoint("qwen2_moe")
    uneven = {"lengths": [12, 3, 9, 3, 5, 3], "told_by": 1}  # one group keeps more requests than the other
    found = require_equal(
        tmp_path,
        2,
        {
            "sequence": (experts, [*SEQUENCE, *STRICT], {}),
            "large": (experts, [*ATTENTION, "lanes.decode.batch_sizes=[1,2]"], uneven),
            "idle drafts": (llama, [*ATTENTION, *eagle(checkpoint)], SINGLE),
        },
    )
    assert found["sequence"]["lanes"]["decode"]["replays"]
    assert found["large"]["lanes"]["decode"]["eager"].keys() == {"over_largest", "other_rank"}
    assert found["idle drafts"]["lanes"]["draft"]["replays"]


@pytest.mark.sweep
def test_two_ranks_generate_the_tokens_of_one_in_other_ways(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Attention is split too; one rank may be idle; drafts are on; tokens are drawn."""
    llama, experts = checkpoint("llama"), checkpoint("qwen2_moe")
    found = require_equal(
        tmp_path,
        2,
        {
            "tensor": (llama, TENSOR, {}),
            "strict": (experts, [*ATTENTION, *STRICT], {}),
            "idle": (experts, [*ATTENTION, "verify.replay_against_eager=1"], SINGLE),
            "drafts": (llama, [*TENSOR, *eagle(checkpoint)], {}),
            "drawn": (llama, ATTENTION, {"sampling": {"temperature": 0.9}}),
        },
    )
    for name in ("tensor", "strict", "idle", "drawn"):
        assert found[name]["lanes"]["decode"]["replays"], name
    assert found["idle"]["verified"] == found["idle"]["lanes"]["decode"]["replays"]
    assert found["drafts"]["lanes"]["verify"]["replays"]


def test_stages_of_a_pipeline_generate_the_tokens_of_one(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Each stage replays graphs of its layers; hidden states are static inputs of the later ones."""
    found = require_equal(
        tmp_path,
        2,
        {
            "stages": (checkpoint("llama"), [*PIPELINE, *STRICT, "verify.replay_against_eager=1"], {}),
            "chunks": (
                checkpoint("qwen2_moe"),
                [*PIPELINE, "engine.max_prefill_chunk=4"],
                {"sampling": {"temperature": 0.9}},
            ),
        },
    )
    assert found["stages"]["verified"] == found["stages"]["lanes"]["decode"]["replays"] > 0


@pytest.mark.sweep
def test_stages_of_a_pipeline_generate_the_tokens_of_one_in_other_ways(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Embeddings may be tied; prefills are replayed; a batch may be too large for a graph."""
    experts = checkpoint("qwen2_moe")
    found = require_equal(
        tmp_path,
        2,
        {
            "tied": (checkpoint("gemma2"), PIPELINE, {}),
            "prefill": (
                experts,
                [*PIPELINE, "lanes.prefill.runner=breakable_cuda_graph", "lanes.prefill.strict=true"],
                {},
            ),
            "large": (experts, [*PIPELINE, "lanes.decode.batch_sizes=[1,2]"], {}),
        },
    )
    assert found["prefill"]["lanes"]["prefill"]["replays"]
    assert found["large"]["lanes"]["decode"]["eager"].keys() == {"over_largest"}


@pytest.mark.sweep
@pytest.mark.parametrize(
    "architecture", ["llama", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2", "deepseek_v3"]
)
def test_ranks_generate_the_tokens_of_one_for_every_architecture(
    checkpoint: Callable[..., Path], tmp_path: Path, architecture: str
) -> None:
    """Two and four ranks; fast and strict tapes, compiled graphs, and prefill graphs."""
    path = checkpoint(architecture)
    compiled = ["lanes.decode.runner=cpu_graph", "lanes.decode.batch_sizes=[2,8]"]
    prefill = ["lanes.prefill.runner=breakable_cuda_graph", "lanes.prefill.strict=true"]
    two = {
        f"{name} {more}": (path, [*ranks, *sets], {})
        for name, ranks in (("tensor", TENSOR), ("attention", ATTENTION), ("sequence", SEQUENCE))
        for more, sets in (("fast", []), ("strict", [*STRICT, *prefill]))
    }
    two["attention compiled"] = (path, [*ATTENTION, *compiled], {})
    require_equal(tmp_path, 2, two)
    tensor4 = ["parallel.tensor=4", "parallel.attention_data=2"]
    four = {
        "tensor and attention": (path, tensor4, {}),
        "tensor and attention, strict": (
            path,
            [*tensor4, *STRICT],
            {"prompts": PROMPTS[:3], "lengths": LENGTHS[:3]},
        ),
        "tensor and data": (path, [*TENSOR, "parallel.data=2"], {}),
        "tensor and stages": (path, [*PIPELINE, *TENSOR, *STRICT, *prefill], {}),
        "attention and stages, idle": (
            path,
            [*PIPELINE, *ATTENTION, "verify.replay_against_eager=1"],
            SINGLE,
        ),
        "data and stages, compiled": (path, [*PIPELINE, "parallel.data=2", *compiled], {}),
    }
    require_equal(tmp_path, 4, four)


@pytest.mark.sweep
def test_padding_tokens_do_not_move_a_bit_of_live_rows(
    checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """Whatever tokens padding rows hold, all logits keep their bits; a wrong count on a rank moves them."""
    sets = [f"model.path={checkpoint('qwen2_moe')}", *ATTENTION, "lanes.decode.batch_sizes=[8]"]
    case = {"sets": sets, "prompts": PROMPTS[:5], "lengths": LENGTHS[:5]}
    zero, other, wrong = run(
        tmp_path,
        2,
        [{**case, "padding": 0}, {**case, "padding": 191}, {**case, "padding": 191, "unmasked": 1}],
    )
    assert zero["lanes"]["decode"]["replays"]
    assert zero["bits"] == other["bits"]
    assert wrong["bits"] != zero["bits"]


def end_of_rank_0(folder: Path, model: Path, ranks: Sequence[str], what: str) -> str:
    """Return the error with which rank 0 ends, in time, after a fault of rank 1 in its fifth decode."""
    timeout = 4
    sets = [f"model.path={model}", *ranks, f"parallel.timeout={timeout}"]
    case = {"sets": sets, "prompts": PROMPTS[:2], "lengths": [200, 200], "fault": [1, "decode", 5, what]}
    with started(folder, 2, [case]) as process:
        assert process.stderr is not None
        seen = time.monotonic()
        for line in process.stderr:
            if "RankError: rank 0" in line:
                break
            seen = time.monotonic()
        else:
            pytest.fail("rank 0 did not end with a RankError")
    assert time.monotonic() - seen < 6 * timeout
    return line


FAULTS = ["raise", *(pytest.param(name, marks=pytest.mark.sweep) for name in ("SIGKILL", "SIGSTOP"))]


@pytest.mark.parametrize("what", FAULTS)
def test_a_rank_that_is_gone_is_named(checkpoint: Callable[..., Path], tmp_path: Path, what: str) -> None:
    """The other rank ends in time, with the rank, the step, the graph and the collective."""
    line = end_of_rank_0(tmp_path, checkpoint("llama"), ATTENTION, what)
    assert "step 6" in line
    assert "replay decode[bs=1, tokens=1]" in line
    assert "allgather" in line
    assert "rank 1" in line
    assert ("a planted fault" if what == "raise" else "no sign") in line


@pytest.mark.sweep
@pytest.mark.parametrize("what", FAULTS)
def test_a_stage_that_is_gone_is_named(checkpoint: Callable[..., Path], tmp_path: Path, what: str) -> None:
    """The stage before it ends in time, with the rank, and with what it waits for."""
    line = end_of_rank_0(tmp_path, checkpoint("llama"), PIPELINE, what)
    assert "rank 1" in line
    assert "the tokens of rank 1" in line
    assert ("a planted fault" if what == "raise" else "no sign") in line


def test_the_number_of_processes_is_the_one_of_the_configuration(checkpoint: Callable[..., Path]) -> None:
    """An engine of two ranks in one process is refused, with the command that starts two."""
    config = EngineConfig.load(None, overrides=[f"model.path={checkpoint('llama')}", *TENSOR])
    with pytest.raises(ConfigError, match="need 2 processes; 1 was started") as error:
        Engine(config)
    assert "torchrun --nproc-per-node 2" in str(error.value)


@pytest.mark.sweep
def test_the_command_writes_every_answer_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``torchrun --no-python graphpact generate``: rank 0 writes, and each rank records its own steps."""
    command = [
        *("generate", "--model", str(EXAMPLE), "--max-new-tokens", "6", "--json", "--quiet"),
        *("def add(a, b):", "The ", "An "),
    ]
    assert main(command) == 0
    alone = capsys.readouterr().out
    steps = tmp_path / "steps.jsonl"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--no-python"]
    together = subprocess.run(
        [
            *(*launcher, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *(*GRAPHPACT, *command, "--record", str(steps)),
            *("--set", "parallel.tensor=2", "--set", "parallel.attention_data=2"),
        ],
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert together.returncode == 0, together.stderr[-4000:]
    assert together.stdout == alone
    recorded = {file.name: file.read_text().count("\n") for file in tmp_path.glob("*.jsonl")}
    assert recorded.keys() == {"steps.jsonl", "steps.rank1.jsonl"}
    assert min(recorded.values()) > 5
