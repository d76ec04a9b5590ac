"""Tests of the sweep over transformers' architectures, and that docs/reference/models.md has its results."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers
from model_sweep import comparison
from model_sweep.__main__ import main
from model_sweep.comparison import Result, compare
from model_sweep.page import PAGE, is_of_this_version, render, row, rows
from model_sweep.processes import run_cases
from model_sweep.small_models import CASES, MAX_POSITIONS, VOCAB, small_config

from compiling import compiler  # noqa: F401  a fixture

SAMPLE = (
    "bert",
    "bloom",
    "deepseek_v3",
    "gemma2",
    "gpt2",
    "gpt_oss",
    "jetmoe",
    "llama4_text, full attention",
    "mllama",
    "opt",
    "phi3, longrope",
    "qwen2_moe",
    "roberta",
)

written = PAGE.read_text(encoding="utf-8")
of_this_version = pytest.mark.skipif(
    not is_of_this_version(written),
    reason=f"docs/reference/models.md was written with another version than {transformers.__version__}",
)


@pytest.fixture
def quiet() -> Iterator[None]:
    """Allow warnings of transformers and torch about models that are not ours."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.few(2)
@of_this_version
@pytest.mark.parametrize("case", SAMPLE)
def test_a_sample_is_as_the_page_says(case: str, quiet: None) -> None:
    """The verdict and the reason of an architecture equal its row, and no verdict is `wrong`."""
    assert row(compare(case)) == rows(written)[case]


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> dict[str, Result]:
    """Return the results of the selected architectures, each from a separate process."""
    params = [getattr(item, "callspec", None) for item in request.session.items]
    cases = [p.params["architecture"] for p in params if p is not None and "architecture" in p.params]
    return {result.case: result for result in run_cases(cases)}


@of_this_version
@pytest.mark.sweep
@pytest.mark.parametrize("architecture", CASES)
def test_an_architecture_is_as_the_page_says(architecture: str, measured: dict[str, Result]) -> None:
    """The verdict and the reason of every architecture equal its row."""
    assert row(measured[architecture]) == rows(written)[architecture]


@of_this_version
def test_the_page_is_what_its_rows_give() -> None:
    """The counts and the order of the page are those that `make models` writes for its rows."""
    results = []
    for line in rows(written).values():
        case, verdict, decode, reason = line.removeprefix("| ").removesuffix(" |\n").split(" | ")
        results.append(Result(case, verdict, decode, reason.replace(r"\|", "|")))
    assert render(results) == written


@pytest.mark.sweep
@pytest.mark.parametrize("case", ["gpt2", "gpt_oss", "mixtral"])
def test_compiled_steps_are_equal_too(case: str, quiet: None, request: pytest.FixtureRequest) -> None:
    """A model with a pad token and mixtures of experts compile, and their logits equal transformers'."""
    request.getfixturevalue("compiler")
    assert compare(case, runner="cpu_graph") == Result(case, "equal", "captured")


@of_this_version
def test_the_page_has_every_architecture() -> None:
    """The table has every architecture of transformers; none is wrong or crashed, and half of them run."""
    table = rows(written)
    assert tuple(table) == CASES
    verdicts = [line.split(" | ")[1] for line in table.values()]
    assert not {"wrong", "crashed"} & set(verdicts)
    assert verdicts.count("equal") > len(verdicts) / 2


def test_a_difference_of_one_step_is_wrong(monkeypatch: pytest.MonkeyPatch, quiet: None) -> None:
    """Wrong or NaN logits in one row of one step make the verdict `wrong`."""
    serve = comparison._serve

    def off_by(amount: float) -> Any:
        def serve_worse(*args: Any) -> Any:
            *steps, (tokens, position, logits) = serve(*args)
            return [*steps, (tokens, position, logits + amount * (torch.arange(VOCAB) == 7))]

        return serve_worse

    for amount in (1e-2, torch.nan):
        monkeypatch.setattr(comparison, "_serve", off_by(amount))
        assert compare("llama", num_hidden_layers=1).verdict == "wrong"


@pytest.mark.sweep
def test_a_crash_costs_one_row() -> None:
    """A case that raises, dies or hangs is `crashed`, with the cause; the other cases have their results."""
    cases = {
        "1 / 0": "ZeroDivisionError: division by zero",
        "__import__('os').abort()": "signal 6 (SIGABRT) ended the process",
        "__import__('time').sleep(600)": "it did not finish within 5 s",
    }
    good = "__import__('model_sweep.comparison').comparison.Result('good', 'equal')"
    found = {r.case: r for r in run_cases([*cases, good], compare="builtins:eval", at_once=4, time_limit=5)}
    assert found.pop("good").verdict == "equal"
    assert {case: result.reason for case, result in found.items()} == cases
    assert {result.verdict for result in found.values()} == {"crashed"}


def test_the_command_fails_if_a_case_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command prints rows; its status is 1 for a wrong or crashed case, 2 for an unknown one, else 0."""
    verdict = ""

    def run(cases: list[str], on_result: Callable[[Result], None]) -> list[Result]:
        results = [Result(case, verdict) for case in cases]
        for result in results:
            on_result(result)
        return results

    monkeypatch.setattr("model_sweep.__main__.run_cases", run)
    for verdict, status in (("equal", 0), ("refused", 0), ("wrong", 1), ("crashed", 1)):
        assert main(["llama"]) == status
        assert f"| llama | {verdict} |" in capsys.readouterr().out
    assert main(["no such case"]) == 2
    assert "no such case" in capsys.readouterr().err


def test_small_models_are_small() -> None:
    """Windows and thresholds of a small model are shorter than the prompts of the comparison."""
    for case in CASES:
        try:
            config = small_config(case).get_text_config(decoder=True)
        except Exception:  # noqa: BLE001, S112  transformers' own defaults are not all valid
            continue
        assert config.vocab_size <= max(VOCAB, 320)
        for name in ("sliding_window", "attention_chunk_size", "floor_scale"):
            assert (getattr(config, name, None) or 0) < max(comparison.PROMPT_LENGTHS) // 2, case
        assert (getattr(config, "max_position_embeddings", None) or 0) <= MAX_POSITIONS
