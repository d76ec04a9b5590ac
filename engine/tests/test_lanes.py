"""Named lanes: their order, refused configurations, and the choice of the lane for a batch."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError
from graphpact.shapes import EagerReason, GraphShape
from graphpact_engine.config import LANE_MODES, EngineConfig, LaneConfig, LanesConfig, config_keys
from graphpact_engine.lanes import LaneSet
from graphpact_engine.plans import _planned

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,9}", fullmatch=True).filter(lambda name: name not in LANE_MODES)
TABLES = st.fixed_dictionaries(
    {"mode": st.sampled_from(["decode", "prefill"])},
    optional={"runner": st.sampled_from(["a", "b"]), "batch_sizes": st.just([1, 2])},
)

MODES = "decode, prefill, draft_prefill, draft, verify or draft_extend"


def load(*overrides: str, text: str = "", env: dict[str, str] | None = None) -> EngineConfig:
    """Return the configuration of a file with ``text``, variables and overrides."""
    document = Path("lanes.toml")
    document.write_text(text, encoding="utf-8")
    return EngineConfig.load(document, env=env or {}, overrides=overrides)


def lanes(*overrides: str, text: str = "", env: dict[str, str] | None = None) -> list[str]:
    """Return each lane of an engine of this configuration as ``name mode runner``."""
    planned = _planned(load(*overrides, text=text, env=env), None)
    return [f"{name} {lane.mode} {lane.runner or role.runner}" for name, lane, role in planned]


def refusal(*overrides: str, text: str = "", env: dict[str, str] | None = None) -> str:
    """Return the message of the error that refuses a configuration."""
    with pytest.raises(ConfigError) as refused:
        load(*overrides, text=text, env=env)
    return str(refused.value)


@pytest.fixture(autouse=True)
def empty_folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty folder, for its configuration files."""
    monkeypatch.chdir(tmp_path_factory.mktemp("lanes"))


# -- the lanes of a configuration ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ["decode decode cuda_graph", "prefill prefill eager"]),
        ("[lanes.decode]", ["decode decode cuda_graph", "prefill prefill eager"]),
        ("[lanes]", ["decode decode cuda_graph", "prefill prefill eager"]),
        ('[lanes.long]\nmode="decode"', ["long decode cuda_graph", "prefill prefill eager"]),
        (
            '[lanes.long]\nmode="decode"\n[lanes.decode]',
            ["long decode cuda_graph", "decode decode cuda_graph", "prefill prefill eager"],
        ),
        (
            '[lanes.decode]\n[lanes.long]\nmode="decode"\nrunner="eager"',
            ["decode decode cuda_graph", "long decode eager", "prefill prefill eager"],
        ),
        (
            '[lanes.b]\nmode="prefill"\n[lanes.z]\nmode="decode"\n[lanes.a]\nmode="prefill"',
            ["z decode cuda_graph", "b prefill eager", "a prefill eager"],
        ),
    ],
)
def test_a_mode_has_the_lanes_that_are_written_and_else_its_default(text: str, expected: list[str]) -> None:
    """Lanes of one mode keep their order; a mode without a lane gets a default lane with its name."""
    assert lanes(text=text) == expected


def test_lanes_come_in_the_order_in_which_the_sources_name_them() -> None:
    """Lanes of the file come first, then of the environment, then of --set; later sources move no lane."""
    found = lanes(
        'lanes.late.mode="decode"',
        "lanes.second.batch_sizes=[3]",
        text='[lanes.first]\nmode="decode"\n[lanes.second]\nmode="decode"',
        env={"GRAPHPACT_LANES__MIDDLE__MODE": "decode", "GRAPHPACT_LANES__FIRST__RUNNER": "x"},
    )
    assert [lane.split()[0] for lane in found] == ["first", "second", "middle", "late", "prefill"]
    assert found[0] == "first decode x"


@given(tables=st.dictionaries(NAMES, TABLES, max_size=4))
def test_every_source_makes_the_same_lanes(tables: dict[str, dict[str, Any]]) -> None:
    """Lanes of any names mean the same in a file, in variables, in --set and as inline tables."""
    keys = {(name, key): json.dumps(value) for name, table in tables.items() for key, value in table.items()}
    text = "\n".join(f"lanes.{name}.{key} = {value}" for (name, key), value in keys.items())
    from_file = load(text=text).lanes
    assert [name for name, _ in from_file.items()] == sorted(tables, key=lambda name: tables[name]["mode"])
    assert from_file == load(*(f"lanes.{n}.{k}={value}" for (n, k), value in keys.items())).lanes
    variables = {f"GRAPHPACT_LANES__{n}__{k}".upper(): value for (n, k), value in keys.items()}
    assert dict(from_file.items()) == dict(load(env=variables).lanes.items())
    assert from_file == LanesConfig.model_validate(tables)
    assert from_file == LanesConfig.model_validate(from_file.model_dump())


def test_the_order_of_lanes_is_part_of_a_configuration() -> None:
    """Two configurations with the same lanes in another order differ; equal ones have one hash."""
    one, other = ({"mode": "decode", "batch_sizes": (size,)} for size in (1, 2))
    ab, ba = (LanesConfig.model_validate(t) for t in ({"a": one, "b": other}, {"b": other, "a": one}))
    assert ab != ba
    assert ab == LanesConfig.model_validate({"a": one, "b": other})
    assert hash(ab) == hash(LanesConfig.model_validate({"a": one, "b": other}))
    assert LanesConfig({"a": LaneConfig(mode="decode", batch_sizes=(1,))})["a"] == ab["a"]


def test_the_reference_lists_the_keys_of_a_lane_once() -> None:
    """Without names of lanes, config_keys has the keys of a lane once, under an invalid lane name."""
    names = [key.name for key in config_keys() if key.name.startswith("lanes.")]
    assert names == [f"lanes.NAME.{key}" for key in LaneConfig.model_fields]
    of_two = [key.name for key in config_keys(["a", "b"]) if key.name.startswith("lanes.")]
    assert of_two == [f"lanes.{lane}.{key}" for lane in "ab" for key in LaneConfig.model_fields]
    assert "lanes.NAME (--set): not a valid lane name" in refusal("lanes.NAME.runner=x")


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("lanes.long.runner=x", "lanes.long.mode (--set): not set; set it to " + MODES),
        ("lanes.long={}", "lanes.long.mode (--set): not set; set it to " + MODES),
        (
            "lanes.decod.strict=true",
            f"not set; set it to {MODES}; or did you mean lanes.decode?",
        ),
        (
            "lanes.long.mode=decoed",
            f"lanes.long.mode = 'decoed' (--set): expected {MODES}; did you",
        ),
        (
            "lanes.decode.mode=decoed",
            f"lanes.decode.mode = 'decoed' (--set): expected {MODES}; did",
        ),
        (
            "lanes.decode.mode=prefill",
            "lanes.decode.mode = 'prefill' (--set): a lane named decode must have",
        ),
        (
            "lanes.long.runer=x",
            "lanes.long.runer (--set): unknown key; did you mean lanes.long.runner?",
        ),
        (
            'lanes.long={mode="decode", strikt=true}',
            "lanes.long.strikt (--set): unknown key; did you",
        ),
        (
            "lanes.long.mode.x=1",
            "lanes.long.mode.x (--set): unknown key; did you mean lanes.long.mode?",
        ),
        (
            "lanes.runner=eager",
            "lanes.runner (--set): unknown key; did you mean lanes.",
        ),
        (
            "lanes.long=5",
            "lanes.long (--set): a table, not a key; its keys are lanes.long.mode, lanes.long.ru",
        ),
        (
            "lanes=5",
            "lanes (--set): a table, not a key; its keys are lanes.NAME.mode, lanes.NAME.runner",
        ),
        (
            "lanes.Long.runner=x",
            "lanes.Long (--set): not a valid lane name; a name begins with a letter",
        ),
        ("lanes.1.runner=x", "lanes.1 (--set): not a valid lane name"),
        ("lanes.a-b={}", "lanes.a-b (--set): not a valid lane name"),
        ("lanes..runner=x", "'lanes..runner=x' (--set): not of the form key=value"),
    ],
)
def test_a_fault_of_a_lane_has_one_line_with_key_source_and_what_to_do(setting: str, says: str) -> None:
    """A fault of a lane gives one line with key, source and fix, also for a lane that only --set names."""
    message = refusal(setting)
    assert says in message
    assert message.count("\n") == 1


def test_a_variable_of_a_lane_is_compared_with_variables() -> None:
    """The error for a misspelt variable names a variable of the same lane; lane names may have ``__``."""
    message = refusal(env={"GRAPHPACT_LANES__MY_LANE__RUNER": "x"})
    assert "did you mean GRAPHPACT_LANES__MY_LANE__RUNNER?" in message
    assert lanes(env={"GRAPHPACT_LANES__A__B___MODE": "decode"})[0] == "a__b_ decode cuda_graph"


def test_faults_of_several_lanes_are_listed_at_once() -> None:
    """One message lists the faults of all lanes, each with its source."""
    message = refusal(
        "lanes.b.mode=x",
        text="[lanes.a]\nrunner = 'x'\n[lanes.decode]\nbatch_sizes = [0]",
        env={"GRAPHPACT_LANES__C": "{}"},
    )
    assert "lanes.a.mode (lanes.toml): not set" in message
    assert "lanes.b.mode = 'x' (--set)" in message
    assert "lanes.c.mode (environment variable GRAPHPACT_LANES__C): not set" in message
    assert "lanes.decode.batch_sizes[0] = 0 (lanes.toml)" in message
    assert message.count("\n") == 4


def test_lanes_that_are_built_directly_are_held_to_the_same_rules() -> None:
    """Invalid names, modes, keys and types of lanes are refused without a file too."""
    for tables in (
        {"Long": {"mode": "decode"}},
        {"decode": {"mode": "prefill"}},
        {"long": {}},
        {"decode": {"runer": "x"}},
        {"decode": 5},
        [],
    ):
        with pytest.raises(ValidationError):
            EngineConfig.model_validate({"lanes": tables})


# -- the choice of a lane ------------------------------------------------------------------------


class FakeLane:
    """A lane with shapes of some sizes that counts the calls of `fit`."""

    def __init__(self, name: str, sizes: Sequence[int]) -> None:
        self.name = name
        self.asked = 0
        self._shapes = [GraphShape(ForwardMode.DECODE, size, size) for size in sizes]
        self.runner = SimpleNamespace(shapes=lambda: self._shapes, declines=())

    def fit(self, batch: Any) -> GraphShape | EagerReason:
        """Return the smallest shape that is large enough."""
        self.asked += 1
        fits = (shape for shape in self._shapes if shape.batch_size >= batch.batch_size)
        return next(fits, EagerReason.OVER_LARGEST)


def lanes_of(*fakes: FakeLane) -> LaneSet:
    """Return a set of these decode lanes only."""
    lanes: Any = list(fakes)
    return LaneSet({"decode": lanes})


def batch(size: int) -> Any:
    """Return a decode batch with the fields that choose a lane."""
    return SimpleNamespace(forward_mode=ForwardMode.DECODE, batch_size=size)


def test_the_first_lane_with_a_shape_runs_and_else_the_first() -> None:
    """The first lane with a shape for a batch runs it; if no lane has one, the first lane does."""
    small, large, other = FakeLane("small", [1, 2]), FakeLane("large", [4]), FakeLane("other", [8])
    lanes = lanes_of(small, large, other)
    chosen = [lanes.choose_target(batch(size)).name for size in (1, 2, 3, 4, 5, 9)]
    assert chosen == ["small", "small", "large", "large", "other", "small"]
    assert (small.asked, large.asked, other.asked) == (6, 4, 2)


def test_the_only_lane_of_a_mode_is_not_asked() -> None:
    """The only lane of a mode is chosen without a call of `fit`."""
    lane = FakeLane("decode", [1])
    assert lanes_of(lane).choose_target(batch(5)) is lane
    assert lane.asked == 0


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        (
            [[1, 2], [1, 2]],
            r"lanes\.b, after lanes\.a of .* never runs: lanes\.a comes first and captures",
        ),
        (
            [[1, 2, 4], [2]],
            r"lanes\.b, after lanes\.a of .* never runs: lanes\.a comes first and captures",
        ),
        ([[1], [2], [2]], r"lanes\.c, after lanes\.b of the same mode, never runs"),
        ([[1], []], r"lanes\.b, after lanes\.a of the same mode, never runs: it captures nothing"),
        ([[], []], r"lanes\.b, after lanes\.a of the same mode, never runs: it captures nothing"),
    ],
)
def test_a_lane_that_never_runs_is_refused(sizes: list[list[int]], says: str) -> None:
    """A later lane is refused if an earlier one has all its shapes, or if it has no shape."""
    fakes = [FakeLane(name, own) for name, own in zip("abc", sizes, strict=False)]
    with pytest.raises(ConfigError, match=says):
        lanes_of(*fakes)


@pytest.mark.parametrize("sizes", [[], [[]], [[1, 2], [1, 2, 4]], [[], [1]], [[2], [1], [4]]])
def test_lanes_that_can_all_run_are_let_in(sizes: list[list[int]]) -> None:
    """A lane with a shape that earlier lanes lack is accepted, and so is a first lane without shapes."""
    lanes_of(*(FakeLane(name, own) for name, own in zip("abc", sizes, strict=False)))
