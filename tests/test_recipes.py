"""Tests of the documentation's code: `examples/recipes`, the third party's plugins, every block of a page.

The recipes that are plugins run under the conformance suite, in this process.
"""

import contextlib
import dataclasses
import importlib
import re
import shlex
import shutil
import sys
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pages import PAGES, blocks_of
from plugin_examples import EXAMPLES, example

import graphpact
import graphpact.attention
from fake_site import installed
from graphpact import (
    AttentionBackend,
    CudaGraphBufferRegistry,
    EagerReason,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    GraphSlot,
    Lane,
    StepOutputs,
)
from graphpact.attention import DraftLimits
from graphpact.buffers import input_slots
from graphpact.errors import ConfigError
from graphpact.graphs import DeclaredMemory
from graphpact.plugin_checks import observer_fault
from graphpact.plugins import CONTRACT_GROUP, GROUPS, PluginCatalog, PluginInfo
from graphpact.speculation import DecodeStep, ExtendStep, SpeculationContext, Verified
from graphpact_cli import main
from graphpact_conformance.draws.batches import draw
from graphpact_conformance.draws.choice import configs_of
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.driver_contract import CHECKS, DriverCheck
from graphpact_conformance.experiments.comparison import differences
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_conformance.lane.reference_runner import ReferenceRunner
from graphpact_conformance.lane.rig import Rig
from graphpact_conformance.results import Outcome
from graphpact_conformance.suite import examine_lane, planned_lanes
from graphpact_conformance.targets import Options
from graphpact_conformance.xfails import _entry
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_guard import Settings
from graphpact_tape.tape import TapeDriver
from support import OF_ENGINES, ROOT

RECIPES = sorted(f"recipes.{path.stem}" for path in (ROOT / "examples/recipes").glob("*.py"))
THIRD_PARTY = ["my_attention.prefill"]  # `tests/conformance/test_third_party.py` has the backend


@pytest.fixture(scope="module", autouse=True)
def _examples_on_the_path() -> Iterator[None]:
    """Make the recipes importable by their names, and remove them from `sys.modules` afterwards."""
    before, path = (
        set(sys.modules),
        [str(ROOT / "examples" / folder) for folder in ("", "third_party", "vllm", "sglang")],
    )
    sys.path[:0] = path
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("recipes", "my_attention", *(file.stem for file in OF_ENGINES)):
            del sys.modules[name]
    sys.path[:] = [entry for entry in sys.path if entry not in path]


def _classes(module: ModuleType, base: type[Any] = object) -> list[type[Any]]:
    """Return the classes that a module defines and that derive from ``base``."""
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, base)
    ]


LONG = (
    "recipes.prefill_grid",
    "my_attention.prefill",
    "recipes.draft_loop",
    "recipes.short_context",
    "recipes.length_tiers",
    "recipes.providers",
)
"""The slowest recipes; `engine/tests/test_prefill_graphs.py` runs the first two in engines."""


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name",
    [n for n in [*RECIPES, *THIRD_PARTY] if n not in LONG]
    + [pytest.param(n, marks=pytest.mark.sweep) for n in LONG],
)
def test_every_plugin_of_the_recipes_is_conformant(name: str) -> None:
    """Backends and runners of the documentation fail no rule, and every rule of their lanes has run."""
    module = importlib.import_module(name)
    options = Options(size="quick", examples=1)
    for cls in [*_classes(module, AttentionBackend), *_classes(module, GraphRunner)]:
        if issubclass(cls, GraphRunner):
            plans = planned_lanes(ReferenceBackend, cls, options, kind="runner")
        else:
            plans = planned_lanes(cls, ReferenceRunner, options)
        assert plans
        results = [result for plan in plans for result in examine_lane(plan, options)]
        assert [r for r in results if r.outcome is not Outcome.PASS] == []


@pytest.mark.sweep
@pytest.mark.parametrize("lacks", ["its share", "the count"])
def test_a_list_of_slots_of_ones_own_breaks_the_rules_that_the_page_names(lacks: str) -> None:
    """A runner without the slot of live tokens, or of a rank's share, breaks the rule that the page names."""

    class OwnList(CudaGraphRunner):
        def slots(self) -> Sequence[GraphSlot]:
            at = self.context
            return input_slots(
                at.mode,
                seq_len_fill_value=at.padded_seq_len,
                num_token_non_padded=at.num_token_non_padded and lacks != "the count",
            )

    options = Options(size="quick", examples=1, lanes=("decode-page16-gqa-float32",), shrink=False)
    (plan,) = planned_lanes(ReferenceBackend, OwnList, options, kind="runner")
    failed = {r.rule for r in examine_lane(plan, options) if r.outcome is Outcome.FAIL}
    page = (ROOT / "docs/how-to/recorded-regions.md").read_text(encoding="utf-8")
    (named,) = re.findall(rf"breaks ([GP\d, and]+) where it lacks {lacks}", page.replace("\n", " "))
    assert failed == set(re.findall(r"GP\d\d", named))


@pytest.mark.parametrize("path", EXAMPLES)
def test_an_example_that_the_template_has_is_written_from_it(path: str) -> None:
    """The file is what `graphpact new` writes: `python docs/tools/reference.py` would change nothing."""
    assert (ROOT / path).read_text(encoding="utf-8") == example(path)


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_on_a_page(name: str) -> None:
    """A page of the documentation includes each recipe whole."""
    include = f"<!-- include file examples/{name.replace('.', '/')}.py -->"
    assert any(include in page.read_text(encoding="utf-8") for page in PAGES)


# -- recipes that the suite cannot check -----------------------------------------------------------


def _lane_of(mode: str) -> Config:
    name = f"{mode}-page16-gqa-float32"
    return next(c for c in configs_of(ReferenceBackend.capabilities) if str(c) == name)


def test_the_runner_with_a_forward_pass_for_each_draft_step_runs() -> None:
    """Replays of `DraftLoop` draft the same tokens as an eager run."""
    config, runner = (
        _lane_of("draft_decode"),
        importlib.import_module("recipes.draft_loop").DraftLoop,
    )
    rig = Rig(config, backend=ReferenceBackend, runner=runner, pact="always")
    (steps,) = draw(config, 1, 0)
    for problem in steps:
        rig.load(problem)
        batch = rig.batch_of(problem)
        drafted = rig.lane.run(batch).clone()
        assert drafted.axes["draft_tokens"] == "tokens"
        assert drafted["draft_tokens"].shape == (batch.num_tokens, batch.num_draft_steps)
        assert drafted["draft_tokens"].equal(rig.lane.run_eager(batch)["draft_tokens"])
    assert rig.lane.stats.replays == len(steps)


def test_the_runner_with_attention_outside_of_the_graph_has_a_segment_for_each_layer() -> None:
    """Graphs of `AttentionOutside` have one more segment than the model has layers."""
    runner = importlib.import_module("recipes.runner").AttentionOutside
    rig = Rig(_lane_of("decode"), backend=ReferenceBackend, runner=runner)
    assert {c.graph.num_segments for c in rig.lane.captured.values()} == {len(rig.layers) + 1}


def test_the_runner_with_an_input_of_its_own_takes_it_from_the_batch() -> None:
    """Replays of `WithHidden` read the batch's field in live rows, zeros in padding or without it."""
    module = importlib.import_module("recipes.extra_input")
    config = _lane_of("decode")
    rig = Rig(config, backend=ReferenceBackend, runner=module.WithHidden)
    (steps,) = draw(config, 1, 0)
    slot = rig.registry.get_slot("acme.hidden")
    for problem, given in ((steps.padded, True), (steps.padded, False)):
        batch = rig.batch_of(problem)
        hidden = batch.extra["acme.hidden"]
        if not given:
            batch.extra = {}
        assert rig.step(problem, batch=batch).replays == 1
        rows = slot.slice_for(batch.batch_size + 1, batch.num_tokens + 1)
        assert rows[:-1].equal(hidden if given else torch.zeros_like(hidden))
        assert not rows[-1].any()


def test_the_observer_sees_slow_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`SlowStepsObserver` is a valid observer, logs steps above its limit, and changes no output."""
    module = importlib.import_module("recipes.observer")
    assert observer_fault(module.SlowStepsObserver) is None
    config = _lane_of("decode")
    rig = Rig(config, backend=ReferenceBackend, runner=ReferenceRunner)
    watched = Lane(
        "watched",
        model=rig.model,
        runner=rig.runner,
        backend=rig.lane.backend,
        driver=rig.lane.driver,
        eager_reason=EagerReason.NO_GRAPHS,
        observers=[module.SlowStepsObserver()],
    )
    (steps,) = draw(config, 1, 0)
    rig.load(steps.small)
    batch = rig.batch_of(steps.small)
    monkeypatch.setattr(module, "SECONDS", 60.0)
    outputs = watched.run(batch)
    assert caplog.messages == []
    monkeypatch.setattr(module, "SECONDS", -1.0)
    rig.load(steps.small)
    assert watched.run(batch)["rows"].equal(outputs["rows"])
    (logged,) = caplog.messages
    assert logged.startswith(f"watched: {batch.batch_size} requests")


def test_the_driver_keeps_the_contract_and_runs_a_lane() -> None:
    """`TimedDriver` keeps every driver promise; its lane agrees with the oracle and reports times."""
    driver = importlib.import_module("recipes.driver").TimedDriver
    for name in CHECKS:
        DriverCheck(name, driver, torch.device("cpu"))()
    config = _lane_of("decode")
    rig = Rig(config, backend=ReferenceBackend, runner=ReferenceRunner, driver=driver)
    (steps,) = draw(config, 1, 0)
    for problem in steps:
        step = rig.step(problem)
        assert step.error is None
        assert not differences(rig, step, rig.answer(problem))
    assert rig.lane.stats.replays
    assert any(sum(captured.graph.seconds.values()) > 0 for captured in rig.lane.captured.values())
    assert driver.unavailable(torch.device("cuda")) is not None


LOOKUP_PROMPTS = ["Return a list of all the keys of the list. Return a list of all", "If ab ab ab ab ab"]
"""Repetitive texts; the byte model repeats both."""


@pytest.fixture
def lookup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """Return a function that builds an engine of tiny-llama, with `PromptLookupAlgorithm` as a plugin."""
    with installed(tmp_path / "site", monkeypatch) as site:
        source = "from recipes.prompt_lookup import PromptLookupAlgorithm"
        site.add("lookup", source, offers={"lookup": "PromptLookupAlgorithm"}, group="graphpact.speculation")
        catalog, engines = PluginCatalog.scan(), []

        def build(*overrides: str) -> Engine:
            options = [
                f"model.path='{ROOT}/examples/models/tiny-llama'",
                'engine.attention_backend="flashinfer"',
                "engine.max_num_seqs=2",
                "engine.max_model_len=128",
                *overrides,
            ]
            engines.append(Engine(EngineConfig.load(None, env={}, overrides=options), catalog=catalog))
            return engines[-1]

        yield build
        for engine in engines:
            engine.close()


def _continued(engine: Engine) -> list[list[int]]:
    """Return the tokens of the prompts, up to the last position of the model."""
    sampling = SamplingParams(max_new_tokens=160, ignore_eos=True)
    return [completion.token_ids for completion in engine.generate(LOOKUP_PROMPTS, sampling)]


@pytest.mark.parametrize("num_steps", [pytest.param(1, marks=pytest.mark.sweep), 4])
def test_the_algorithm_without_a_draft_model_is_lossless(
    num_steps: int, lookup: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The recipe generates the tokens of plain decode in fewer steps; wrong lookups cost only steps."""
    expected = _continued(lookup("lanes.decode.batch_sizes=[2]"))
    options = ('speculative.algorithm="lookup"', f"speculative.num_steps={num_steps}")
    tight = ("engine.num_pages=11", "engine.max_num_batched_tokens=40")  # prompts in chunks, preemptions
    found = lookup(*options, *tight, "lanes.verify.strict=true")
    assert _continued(found) == expected
    assert found.scheduler.num_preemptions
    assert found.speculation is not None
    assert found.speculation.stats.tokens_per_verification > (1.3 if num_steps > 1 else 1.2)
    assert found.lanes[-1].stats.replays

    algorithm = importlib.import_module("recipes.prompt_lookup").PromptLookupAlgorithm
    right = algorithm._lookup
    monkeypatch.setattr(algorithm, "_lookup", staticmethod(lambda *args: (right(*args) + 1) % 256))
    wrong = lookup(*options)
    assert _continued(wrong) == expected
    assert wrong.speculation is not None
    assert wrong.speculation.stats.tokens_per_verification < 1.1
    with pytest.raises(ConfigError, match="topk = 2, but prompt lookup drafts chains"):
        lookup(*options, "speculative.topk=2")


def test_a_lookup_is_what_followed_the_last_two_tokens() -> None:
    """A draft continues the last occurrence (cyclically if it is short) and ignores earlier requests."""
    look_up = importlib.import_module("recipes.prompt_lookup").PromptLookupAlgorithm._lookup
    tokens = torch.tensor(
        [
            [1, 2, 3, 1, 2, 4, 5, 1, 2, 9, 9, 9],  # the later of two; an earlier request wrote after column 8
            [7, 1, 1, 1, 0, 0, 1, 1, 8, 8, 8, 8],  # the earlier pair overlaps the last one
            [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0],  # no occurrence: continue from the second token
            [5, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],  # only two tokens
        ]
    )
    drafts = look_up(tokens, torch.tensor([8, 3, 8, 1]), 4)
    assert drafts.tolist() == [[4, 5, 1, 2], [1, 1, 1, 1], [2, 3, 4, 5], [6, 6, 6, 6]]


@pytest.mark.parametrize(
    ("name", "topk"),
    [
        ("recipes.prompt_lookup:PromptLookupAlgorithm", 1),
        *((name, topk) for name in ("eagle", "frozen_kv_mtp") for topk in (1, 2)),
    ],
)
def test_an_algorithm_reads_no_tensor_on_the_host(name: str, topk: int) -> None:
    """The recipe and our own algorithms run on meta tensors, which cannot be read on the host."""
    module, _, attribute = name.partition(":")
    catalog = PluginCatalog.scan()
    algorithm = (
        getattr(importlib.import_module(module), attribute)
        if attribute
        else catalog.select("speculation", module)
    )(SpeculationContext(DraftLimits(3, topk, 5), 32, 6, 6, torch.float32))

    def ids(*size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, device="meta")

    def hidden(rows: int) -> torch.Tensor:
        return torch.zeros(rows, 6, device="meta")

    def run(lane: str, batch: ForwardBatch) -> StepOutputs:
        rows = batch.batch_size
        named = {
            "draft_prefill": {"logits": hidden(rows), "hidden_states": hidden(rows)},
            "draft": {"draft_tokens": ids(rows, 4), "parents": ids(rows, 4)},
            "draft_extend": {
                "next_tokens": ids(rows, topk),
                "scores": hidden(rows)[:, :topk],
                "hidden_states": hidden(rows),
            },
        }
        return StepOutputs(**{key: (tensor, "bs") for key, tensor in named[lane].items()})

    state = {
        key: torch.zeros((3, *shape), dtype=dtype, device="meta")
        for key, (shape, dtype) in algorithm.state().items()
    }
    lens = {"seq_lens": ids(2), "seq_lens_cpu": torch.tensor([2, 3])}
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=2,
        input_ids=ids(5),
        positions=ids(5),
        out_cache_loc=ids(5),
        req_pool_indices=ids(2),
        extend_seq_lens=ids(2),
        extend_seq_lens_cpu=torch.tensor([2, 3]),
        **lens,
    )
    algorithm.extend(
        ExtendStep(batch=batch, hidden_states=hidden(5), next_token_ids=ids(5), state=state, run=run)
    )
    verified = Verified(hidden_states=hidden(10), next_token_ids=ids(10), num_correct_drafts=ids(2))
    given: list[torch.Size] = []

    def verify(drafts: torch.Tensor, parents: torch.Tensor | None) -> Verified:
        given.extend(each.shape for each in (drafts, parents) if each is not None)
        return verified

    algorithm.decode(
        DecodeStep(
            token_ids=ids(2),
            req_pool_indices=ids(2),
            cache_loc=ids(2, 8),
            state=state,
            run=run,
            verify=verify,
            **lens,
        )
    )
    assert set(given) == {torch.Size([2, 4])}


# -- every block of every page ---------------------------------------------------------------------


def _blocks(language: str) -> list[Any]:
    """Return every block of ``language`` in the pages that a test of this module has to run."""
    return [
        pytest.param(f"{page.relative_to(ROOT)}", block.text, id=f"{page.relative_to(ROOT)}-{block.line}")
        for page in PAGES
        for block in blocks_of(page)
        if block.language == language and block.not_run is None and block.run_by is None
        if language == "toml" or block.file is None
    ]


def _names_of(page: str) -> dict[str, Any]:
    """Return the names that the blocks of a page use without defining them."""
    names: dict[str, Any] = {name: getattr(graphpact, name) for name in graphpact.__all__}
    names |= vars(graphpact.attention)
    names |= {"graphpact": graphpact, "torch": torch, "dataclass": dataclasses.dataclass}
    if page in ("docs/how-to/graph-driver.md", "docs/reference/driver-contract.md"):
        names["TimedDriver"] = importlib.import_module("recipes.driver").TimedDriver
    if page == "docs/reference/driver-contract.md":
        names |= {
            "DeclaredMemory": DeclaredMemory,
            "driver": TapeDriver(torch.device("cpu"), strict=True),
            "x": torch.zeros(4),
            "staging": torch.zeros(4),
            "model": lambda x: x * 2 + 1,
            "batches": [torch.full((4,), float(n)) for n in range(3)],
            "answers": [],
        }
    elif page == "docs/how-to/npu-backend.md":
        strict = TapeDriver(torch.device("cpu"), strict=True)
        names |= {"driver": strict, "x": torch.ones(2), "out": torch.zeros(2)}
        strict.declare(DeclaredMemory(refreshed=[names["x"], names["out"]]))
    elif page == "docs/explanation/registry.md":
        names["registry"] = CudaGraphBufferRegistry(device=torch.device("cpu"), max_bs=4, max_num_tokens=4)
    elif page == "docs/how-to/generation.md":
        model = shutil.copytree(ROOT / "examples/models/tiny-llama", Path("templated"))
        (model / "chat_template.jinja").write_text("{{ messages[0]['content'] }} ")
        config = EngineConfig.load(None, env={}, overrides=[f'model.path="{model}"'])
        names |= {"engine": Engine(config), "SamplingParams": SamplingParams}
    elif page == "docs/how-to/observability.md":
        config = EngineConfig.load(Path("examples/engine.toml"), env={})
        names |= {"Engine": Engine, "config": config, "prompts": ["If "]}
    elif page in ("docs/how-to/runner.md", "docs/how-to/recorded-regions.md"):
        names |= {"logits": torch.zeros(2, 5), "hidden": torch.zeros(3, 4)}
    return names


BACKEND = PluginInfo("attention_backend", "my_backend", "my-attention", "1", "my:Backend", "1")
"""The plugin that the pages of conformance describe."""

RUN = ("docs/reference/driver-contract.md", "docs/how-to/sglang-backend.md", "docs/how-to/vllm-backend.md")
"""Pages whose tests also run: those of a driver, a builder, and a backend of another engine."""


@pytest.mark.parametrize(("page", "code"), _blocks("python"))
def test_every_block_of_python_runs(
    page: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of Python in a page is included from tested code, or runs as it is."""
    monkeypatch.chdir(tmp_path)
    config = (ROOT / "examples/demo.toml").read_text(encoding="utf-8")
    Path("examples").mkdir()
    Path("examples/engine.toml").write_text(config.replace('"models/', f'"{ROOT}/examples/models/'), "utf-8")
    Path("examples/models").symlink_to(ROOT / "examples/models")
    names = _names_of(page)
    exec(code.replace("my_backend", "flashinfer"), names)  # noqa: S102  our own page
    if page == "docs/how-to/run-a-model.md" and "random-model" in code:
        (command,) = (b.text for b in blocks_of(ROOT / page) if b.run_by == "tests/test_recipes.py")
        assert main(shlex.split(command)[1:]) == 0
    if "answers.append" in code:
        assert [a.tolist() for a in names["answers"]] == [[2.0 * n + 1] * 4 for n in range(3)]
    if page == "docs/how-to/npu-backend.md":
        assert names["first"] == [3, 4]
        says = "task 0 of decode[bs=2] (npu_page.scale.default)"
        assert str(names["refused"]).startswith(says)
        assert "was not updated before this replay and keeps lengths=[3, 4]" in str(names["refused"])
    if page == "docs/how-to/generation.md":
        assert names["request"].output_token_ids
        assert not names["engine"].scheduler.has_work
        names["engine"].close()
    for name in ("test_keeps_the_contract", "test_keeps_the_pact") if page in RUN else ():
        for mark in getattr(names.get(name), "pytestmark", ()):
            for parameters in mark.args[1]:
                with contextlib.suppress(pytest.skip.Exception):
                    names[name](*parameters.values)


@pytest.mark.parametrize(("page", "code"), _blocks("toml"))
def test_every_block_of_toml_is_valid(page: str, code: str, tmp_path: Path) -> None:
    """A block of TOML is valid: entry points, package data, known failures, or settings."""
    table = tomllib.loads(code)
    (tmp_path / "guard.toml").write_text(code)
    if set(table) == {"tool"}:
        assert "xfails.toml" in table["tool"]["setuptools"]["package-data"]["acme_attention"]
    elif "project" in table:
        groups = table["project"]["entry-points"]
        assert set(groups) <= {CONTRACT_GROUP, *GROUPS}
    elif set(table) == {"xfail"}:
        for entry in table["xfail"]:
            assert _entry(Path("xfails.toml"), 1, entry, [BACKEND]).name == "my_backend"
    elif page == "docs/how-to/sglang-guard.md":
        assert Settings.from_environment({"GRAPHPACT_CONFIG": str(tmp_path / "guard.toml")}).ignore
    else:
        EngineConfig.model_validate({"model": {"path": "a"}} | table)
