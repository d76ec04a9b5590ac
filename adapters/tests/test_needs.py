"""Names that builders read and an adapter lacks are listed before a run, all at once, and are no fault."""

import sys
from pathlib import Path
from typing import Any

import pytest
from adapter_checks import results_of
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_backends import PagedBackend
from vllm_builders import PagedBuilder

import graphpact
from graphpact.batch import ForwardMode
from graphpact_adapters.sglang import Backends
from graphpact_adapters.vllm import Builders
from graphpact_cli import main
from graphpact_conformance.results import Outcome
from graphpact_conformance.targets import Options

QUICK = Options(size="quick")
CALLS = ("__init__", "get_cudagraph_support", "build")
LACKING = (
    "vllm_config.alpha",
    "vllm_config.model_config.beta",
    "kv_cache_spec.gamma",
    "vllm_config.delta.eps",
)
NEEDY = """
from vllm_builders import PagedBuilder


class Needy(PagedBuilder):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.first = vllm_config.alpha + kv_cache_spec.beta

    def build(self, common_prefix_len, common, fast_build=False):
        self.last = common.gamma.sum()
        return super().build(common_prefix_len, common, fast_build)


class Right(PagedBuilder):
    pass
"""


def reading(where: dict[str, list[str]], asks: list[str]) -> type[PagedBuilder]:
    """Return a builder that reads paths in its methods, and reads others with a default."""

    def read(call: str, given: dict[str, Any]) -> None:
        for path in where.get(call, []):
            root, *names = path.split(".")
            value = given[root]
            for name in names:
                value = getattr(value, name)
        for path in asks:
            root, *names = path.split(".")
            value = given[root]
            for name in names:
                value = getattr(value, name, None)

    class Reading(PagedBuilder):
        given: dict[str, Any]

        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self.given = {"vllm_config": vllm_config, "kv_cache_spec": kv_cache_spec}
            read("__init__", self.given)

        @classmethod
        def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
            read("get_cudagraph_support", {"vllm_config": vllm_config, "kv_cache_spec": kv_cache_spec})
            return super().get_cudagraph_support(vllm_config, kv_cache_spec)

        def build(self, *args: Any, **more: Any) -> Any:
            read("build", self.given)
            return super().build(*args, **more)

    return Reading


@settings(max_examples=30)
@given(
    where=st.dictionaries(st.sampled_from(CALLS), st.lists(st.sampled_from(LACKING), max_size=3)),
    asks=st.lists(st.sampled_from(LACKING), max_size=2),
)
def test_one_probe_names_every_missing_value(where: dict[str, list[str]], asks: list[str]) -> None:
    """Each name that is read is listed once for each kind of step, but not names read with a default."""
    read = {path for paths in where.values() for path in paths}
    builders = Builders(reading(where, asks), modes=frozenset({ForwardMode.DECODE}))
    found = [*builders.needs(QUICK)]
    assert all({*each.paths} == read and each.stopped is None for each in found)
    assert bool(found) is bool(read)
    assert len({each.kind for each in found}) == len(found)


def test_a_probe_says_where_it_ended() -> None:
    """If an assumed value stops the code, the names until then and the place are listed."""

    class Stops(PagedBuilder):
        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            raise TypeError(f"{vllm_config.alpha} is no dtype")

    (told, *_) = Builders(Stops).needs(QUICK)
    assert told.paths == ["vllm_config.alpha"]
    assert "is no dtype, at tests/test_needs.py:" in str(told.stopped)
    assert "perhaps more" in str(told)


def test_kinds_of_step_that_lack_nothing_are_checked() -> None:
    """If only speculation reads a missing value, the other kinds of step are still checked."""

    class Speculative(PagedBuilder):
        def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
            super().__init__(kv_cache_spec, layer_names, vllm_config, device)
            self.tree = vllm_config.speculative_config and vllm_config.speculative_config.alpha

    kinds = {each.kind for each in Builders(Speculative).needs(QUICK)}
    assert "target_verify" in kinds
    assert "decode" not in kinds


def test_a_probe_looks_at_the_lanes_that_are_asked() -> None:
    """A run of some lanes lists what these read: the other kinds of step are not tried."""
    builders = Builders(reading({"build": ["vllm_config.alpha"]}, []))
    for asked, kinds in (("decode-*", {"decode"}), ("target_verify-*", {"target_verify"})):
        assert {each.kind for each in builders.needs(Options(size="quick", lanes=(asked,)))} == kinds


class ReadsInReplays(PagedBuilder):
    """Reads a missing name in replays, but not at a capture."""

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Any:
        """Read what no batch has."""
        common.alpha  # noqa: B018  it is read
        return super().build(common_prefix_len, common, fast_build)

    def build_for_cudagraph_capture(self, common: Any) -> Any:
        """Return the metadata that a graph keeps."""
        return self.metadata(common)


@pytest.mark.parametrize(
    ("make", "path"),
    [
        (reading({"build": ["vllm_config.alpha"]}, []), "vllm_config.alpha"),
        (ReadsInReplays, "common_attn_metadata.alpha"),
    ],
    ids=["at captures", "in replays"],
)
def test_a_missing_value_is_no_finding_where_no_probe_looked(make: type[PagedBuilder], path: str) -> None:
    """In a lane that reads what the adapter lacks every requirement is not run, with the name."""
    builders = Builders(make)
    results = [*results_of(builders, "decode-page16-gqa-float32")]
    assert {result.outcome for result in results} <= {Outcome.NOT_RUN, Outcome.PASS}
    told = [result for result in results if result.outcome is Outcome.NOT_RUN]
    assert len(told) > 5
    assert {result.reason for result in told} == {f"needs {path}"}


def test_a_backend_of_sglang_is_probed_too() -> None:
    """Missing values of a model runner are named by their paths; without a backend there are no lanes."""

    class Needy(PagedBackend):
        def __init__(self, model_runner: Any) -> None:
            super().__init__(model_runner)
            self.sums = model_runner.alpha + model_runner.server_args.beta

    (told,) = Backends(Needy).needs(QUICK)
    assert told.paths == ["model_runner.alpha", "model_runner.server_args.beta"]
    assert told.kind is None
    assert [*Backends(PagedBackend).needs(QUICK)] == []


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the working directory, with the builders ``Needy`` and ``Right``."""
    (tmp_path / "needy_builders.py").write_text(NEEDY)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=":")
    monkeypatch.setattr(sys, "path", [*sys.path])
    return "needy_builders"


@pytest.mark.parametrize("more", [["--probe"], pytest.param(["--quick"], marks=pytest.mark.sweep)])
def test_a_run_names_all_three_and_has_the_exit_code_of_not_checked(
    module: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A builder that reads three absent names is not checked and gets no failure: exit code 5."""
    names = ["vllm_config.alpha", "kv_cache_spec.beta", "common_attn_metadata.gamma.sum"]
    assert main(["check", "--adapter", "vllm", f"{module}:Needy", *more]) == 5
    told = capsys.readouterr().out
    assert f"needs {', '.join(names)}" in told
    assert "not conformant" not in told


@pytest.mark.sweep
def test_a_probe_without_a_need_says_so(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A builder that reads only existing names passes the probe: exit code 0, and nothing else runs."""
    assert main(["check", "--adapter", "vllm", f"{module}:Right", "--probe"]) == 0
    assert "nothing else was checked" in capsys.readouterr().err


def test_a_probe_needs_an_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    """Without an adapter the option is refused, because the contract gives plugins everything."""
    assert main(["check", "eagle_draft", "--probe"]) == 2
    assert "--adapter" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "probed"), [("Needy", True), ("Right", False)])
def test_a_test_of_code_that_was_not_checked_fails(module: str, name: str, probed: bool) -> None:
    """In pytest a builder of which nothing could be checked fails with the names; no green run hides it."""
    mark = graphpact.conformance(f"{module}:{name}", adapter="vllm", lanes="decode-page16-gqa-float32")
    checks = {parameter.id: parameter.values[0] for parameter in mark.args[1]}
    if probed:
        with pytest.raises(AssertionError, match=r"nothing of .*Needy was checked: needs vllm_config\.alpha"):
            checks["answers"]()
    else:
        checks["answers"]()
