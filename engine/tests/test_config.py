"""Configuration: the sources of a setting, their precedence, and the errors for invalid settings."""

import json
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from graphpact.attention import ProviderName
from graphpact.errors import ConfigError
from graphpact.plugins import DISABLE_VARIABLE
from graphpact_engine.config import (
    RESERVED_VARIABLES,
    ConfigKey,
    EngineConfig,
    LaneConfig,
    LanesConfig,
    config_keys,
)
from graphpact_engine.config import ProviderName as ConfiguredProviderName

WORDS = st.from_regex(r"[a-z][a-z0-9_]{0,12}", fullmatch=True).filter(
    lambda word: word not in ("true", "false", "inf", "nan")
)
POSITIVE = st.integers(1, 2**40)
SIZES = st.lists(POSITIVE, min_size=1, max_size=5)
PROVIDERS = st.sampled_from(["auto", "native", "compiled", "portable"])
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "model.path": WORDS,
    "model.dtype": st.sampled_from(["auto", "float32", "float64", "bfloat16", "float16"]),
    "model.trust_remote_code": st.booleans(),
    "engine.attention_backend": WORDS,
    "engine.kernel_provider": PROVIDERS,
    "engine.device": st.sampled_from(["auto", "cpu", "cuda", "cuda:0", "cuda:12"]),
    "engine.max_num_seqs": st.integers(1, 2**16),
    "engine.max_num_batched_tokens": st.integers(1, 2**24),
    "engine.max_prefill_chunk": st.integers(1, 2**24),
    "engine.mixed": st.booleans(),
    "engine.async_scheduling": st.just("auto") | st.booleans(),
    "engine.max_model_len": st.integers(2, 2**40),
    "engine.page_size": st.integers(0, 12).map(lambda exponent: 2**exponent),
    "engine.num_pages": POSITIVE,
    "engine.kv_cache_memory_gib": st.floats(1e-6, 1e6) | POSITIVE,
    "engine.seed": st.integers(0, 2**63 - 1),
    "engine.num_threads": st.integers(1, 2**10),
    "engine.observers": st.lists(WORDS, max_size=3),
    "parallel.tensor": st.integers(1, 2**16),
    "parallel.attention_data": st.integers(1, 2**16),
    "parallel.data": st.integers(1, 2**16),
    "parallel.pipeline": st.integers(1, 2**16),
    "parallel.sequence": st.booleans(),
    "parallel.timeout": st.floats(1e-3, 2**20),
    "parallel.start_timeout": st.floats(1e-3, 2**20),
    "lanes.decode.mode": st.just("decode"),
    "lanes.decode.runner": WORDS,
    "lanes.decode.attention_backend": WORDS,
    "lanes.decode.kernel_provider": PROVIDERS,
    "lanes.decode.graph_driver": WORDS,
    "lanes.decode.batch_sizes": SIZES,
    "lanes.decode.token_counts": SIZES,
    "lanes.decode.max_padding_ratio": st.floats(1, 1e6),
    "lanes.decode.capture": st.booleans(),
    "lanes.decode.strict": st.booleans(),
    "lanes.prefill.mode": st.just("prefill"),
    "lanes.prefill.runner": WORDS,
    "lanes.prefill.attention_backend": WORDS,
    "lanes.prefill.kernel_provider": PROVIDERS,
    "lanes.prefill.graph_driver": WORDS,
    "lanes.prefill.batch_sizes": SIZES,
    "lanes.prefill.token_counts": SIZES,
    "lanes.prefill.max_padding_ratio": st.floats(1, 1e6),
    "lanes.prefill.capture": st.booleans(),
    "lanes.prefill.strict": st.booleans(),
    "speculative.algorithm": WORDS,
    "speculative.draft_model": WORDS,
    "speculative.num_steps": st.integers(1, 64),
    "speculative.topk": st.integers(1, 64),
    "speculative.num_draft_tokens": st.integers(2, 256),
    "verify.pact": st.sampled_from(["always", "sampled", "off"]),
    "verify.replay_against_eager": st.floats(0, 1) | st.sampled_from([0, 1]),
}
KEYS: dict[str, ConfigKey] = {key.name: key for key in config_keys(["decode", "prefill"])}
DEFAULTS = {key.name: key.default for key in KEYS.values()} | {
    "engine.observers": [],
    "lanes.decode.mode": "decode",
    "lanes.prefill.mode": "prefill",
}
SETTINGS = st.fixed_dictionaries({}, optional=VALUES)


def toml(settings: dict[str, Any]) -> str:
    """Return settings as a TOML document with dotted keys."""
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in settings.items())


def look_up(config: EngineConfig, key: str) -> Any:
    """Return the value of a dotted key of a configuration; a tuple as a list."""
    value: Any = config
    for name in key.split("."):
        if isinstance(value, LanesConfig):
            value = value.root.get(name) or LaneConfig.model_validate({"mode": name})
        else:
            value = getattr(value, name)
    return list(value) if isinstance(value, tuple) else value


def refusal(*overrides: str, path: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Return the message of the error that refuses a configuration."""
    with pytest.raises(ConfigError) as refused:
        EngineConfig.load(path, env=env or {}, overrides=overrides)
    return str(refused.value)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the path of a configuration file, which the test writes."""
    return tmp_path / "run.toml"


def test_every_key_is_tested_and_described() -> None:
    """Each key has a description, its allowed values in words, and a strategy in this file."""
    assert list(KEYS) == list(VALUES)
    assert all(key.description.endswith(".") and key.allowed for key in config_keys())
    assert KEYS["engine.max_num_seqs"] == ConfigKey(
        "engine.max_num_seqs",
        "GRAPHPACT_ENGINE__MAX_NUM_SEQS",
        8,
        "a whole number from 1 to 65536",
        "Maximum number of requests in one step.",
        (),
    )


def test_the_defaults_are_those_of_the_design() -> None:
    """Without any source, every key has its default."""
    config = EngineConfig.load(env={})
    assert config == EngineConfig()
    assert {key: look_up(config, key) for key in KEYS} == DEFAULTS
    assert [*config.lanes.items()] == []
    assert (config.engine.attention_backend, config.engine.page_size) == ("flashinfer", 16)
    assert (config.verify.pact, config.verify.replay_against_eager) == ("always", 0.0)


@given(settings=SETTINGS)
def test_every_source_says_the_same(
    settings: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A setting means the same in a file, a variable and --set, and changes no other."""
    file = tmp_path_factory.getbasetemp() / "same.toml"
    file.write_text(toml(settings))
    values = {key: json.dumps(value) for key, value in settings.items()}
    from_file = EngineConfig.load(file, env={})
    assert from_file == EngineConfig.load(env={KEYS[k].variable: v for k, v in values.items()})
    assert from_file == EngineConfig.load(env={}, overrides=[f"{k}={v}" for k, v in values.items()])
    assert from_file == EngineConfig.model_validate(from_file.model_dump())
    for name, default in DEFAULTS.items():
        assert look_up(from_file, name) == settings.get(name, default)


@given(lowest=SETTINGS, middle=SETTINGS, highest=SETTINGS)
def test_later_sources_win_key_by_key(
    lowest: dict[str, Any],
    middle: dict[str, Any],
    highest: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Defaults < file < environment < --set, for each key separately."""
    file = tmp_path_factory.getbasetemp() / "precedence.toml"
    file.write_text(toml(lowest))
    config = EngineConfig.load(
        file,
        env={KEYS[key].variable: json.dumps(value) for key, value in middle.items()},
        overrides=[f"{key}={json.dumps(value)}" for key, value in highest.items()],
    )
    expected = DEFAULTS | lowest | middle | highest
    assert {key: look_up(config, key) for key in KEYS} == expected


@given(word=WORDS, sizes=SIZES)
def test_bare_words_are_text_and_the_rest_is_toml(word: str, sizes: list[int]) -> None:
    """Outside a file a string needs no quotes; numbers, lists and booleans are parsed as TOML."""
    config = EngineConfig.load(
        env={
            "graphpact_Engine__attention_backend": word,
            "GRAPHPACT_MODEL__TRUST_REMOTE_CODE": "true",
        },
        overrides=[
            f"lanes.decode.batch_sizes={sizes}",
            "model.path = /tmp/a b/c=d ",
            "engine.seed = 7",
        ],
    )
    assert config.engine.attention_backend == word
    assert config.model.trust_remote_code is True
    assert config.lanes["decode"].batch_sizes == tuple(sizes)
    assert config.model.path == "/tmp/a b/c=d"  # noqa: S108  a text, nothing is opened
    assert config.engine.seed == 7


def test_of_two_overrides_the_last_wins_and_a_table_sets_its_keys_only() -> None:
    """The last of two equal --set keys wins; an inline table does not change keys that it lacks."""
    config = EngineConfig.load(
        env={},
        overrides=[
            "engine.seed=1",
            "lanes.decode.runner=a",
            'lanes={decode={graph_driver="b"}}',
            "engine.seed=2",
        ],
    )
    assert config.engine.seed == 2
    lane = config.lanes["decode"]
    assert (lane.runner, lane.graph_driver) == ("a", "b")


def test_the_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``env`` the process's variables are read; reserved and foreign ones are skipped."""
    for variable in [v for v in os.environ if v.upper().startswith("GRAPHPACT_")]:
        monkeypatch.delenv(variable)
    assert {DISABLE_VARIABLE, "GRAPHPACT_TRACE"} <= RESERVED_VARIABLES
    for variable in RESERVED_VARIABLES:
        monkeypatch.setenv(variable, "x")
    monkeypatch.setenv("GRAPHPACTED", "1")
    monkeypatch.setenv("GRAPHPACT_ENGINE__SEED", "11")
    assert EngineConfig.load().engine.seed == 11


def test_a_relative_model_path_is_taken_from_the_file_where_it_exists(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a file the path is relative to the file if it is there; otherwise it stays as it is."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    file.write_text('model.path = "models/m"')
    assert EngineConfig.load(file, env={}).model.path == "models/m"
    (tmp_path / "models" / "m").mkdir(parents=True)
    assert EngineConfig.load(file, env={}).model.path == str(tmp_path / "models" / "m")
    assert EngineConfig.load(Path("../run.toml"), env={}).model.path == "../models/m"
    config = EngineConfig.load(file, env={}, overrides=["model.path=models/m"])
    assert config.model.path == "models/m"
    file.write_text(f"model.path = '{elsewhere}'")
    assert EngineConfig.load(file, env={}).model.path == str(elsewhere)


# A setting, its value in the error message, and the allowed values in the message.
INVALID = [
    ('engine.max_num_seqs="8"', "'8'", "expected a whole number from 1 to 65536"),
    ("engine.max_num_seqs=0", "0", "expected a whole number from 1 to 65536"),
    ("engine.max_num_seqs=true", "true", "expected a whole number from 1 to 65536"),
    ("engine.max_num_seqs=8.0", "8.0", "expected a whole number from 1 to 65536"),
    ("engine.max_prefill_chunk=0", "0", "expected a whole number from 1 to 16777216"),
    ("engine.mixed=1", "1", "expected true or false"),
    ("engine.max_model_len=1", "1", "expected a whole number from 2 up"),
    ("engine.page_size=12", "12", "expected a power of two, from 1 to 65536"),
    ("engine.page_size=0", "0", "expected a power of two, from 1 to 65536"),
    ("engine.num_pages=none", "'none'", "expected a whole number from 1 up"),
    ("engine.num_pages={}", "{}", "expected a whole number from 1 up"),
    ("engine.kv_cache_memory_gib=0", "0", "expected a number above 0"),
    ("engine.kv_cache_memory_gib=inf", "inf", "expected a number above 0"),
    ("engine.seed=-1", "-1", "expected a whole number from 0 up, below 9223372036854775808"),
    ("engine.seed=9223372036854775808", "9223372036854775808", "expected a whole number from 0 up"),
    ("engine.seed=0x" + "f" * 9000, "a very large int", "expected a whole number from 0 up"),
    ("engine.seed=1\nx = 2", "'1\\nx = 2'", "expected a whole number from 0 up"),
    ("engine.device=cuda:-1", "'cuda:-1'", "expected auto, cpu, cuda or cuda:N"),
    ("engine.device=cuda:01", "'cuda:01'", "expected auto, cpu, cuda or cuda:N"),
    ("engine.device=gpu", "'gpu'", "expected auto, cpu, cuda or cuda:N"),
    ("engine.attention_backend=", "''", "expected a string that is not empty"),
    ("model.path=2024", "2024", "expected a string that is not empty; put it in quotes"),
    ("model.path=2024-01-01", "datetime.date(2024, 1, 1)", "expected a string that is not empty;"),
    ("model.trust_remote_code=1", "1", "expected true or false"),
    ("model.dtype=bf16", "'bf16'", "bfloat16 or float16; did you mean bfloat16?"),
    ("verify.pact=allways", "'allways'", "always, sampled or off; did you mean always?"),
    ("verify.pact=7", "7", "expected always, sampled or off"),
    ("verify.replay_against_eager=1.01", "1.01", "expected a number from 0 to 1"),
    ("verify.replay_against_eager=nan", "nan", "expected a number from 0 to 1"),
    ("engine.kernel_provider=nativ", "'nativ'", "native, compiled or portable; did you mean native?"),
    (
        "lanes.decode.kernel_provider=flashinfer",
        "'flashinfer'",
        "expected auto, native, compiled or portable",
    ),
    ("lanes.prefill.kernel_provider=portabel", "'portabel'", "portable; did you mean portable?"),
    ("lanes.prefill.batch_sizes=[]", "[]", "expected a list of one or more, each a whole number"),
    ("lanes.prefill.batch_sizes=4", "4", "expected a list of one or more, each a whole number"),
    ("lanes.prefill.token_counts=[]", "[]", "expected a list of one or more, each a whole number"),
    ("lanes.prefill.max_padding_ratio=0.5", "0.5", "expected a number from 1 up"),
]


@pytest.mark.parametrize(("setting", "value", "allowed"), INVALID)
def test_a_value_that_is_not_valid_names_key_value_source_and_what_is_allowed(
    file: Path, setting: str, value: str, allowed: str
) -> None:
    """An invalid value from any source is refused in one line: key, value, source, allowed values."""
    key, _, text = setting.partition("=")
    variable = KEYS[key].variable
    assert f"\n  {key} = {value} (--set): " in refusal(setting)
    assert allowed in refusal(setting)
    message = refusal(env={variable: text})
    assert f"\n  {key} = {value} (environment variable {variable}): " in message
    if re.match(r"[a-z]*$|cuda:|bf16|1\n", text) is None or text in ("true", "inf", "nan"):
        file.write_text(setting)
        assert f"\n  {key} = {value} ({file}): " in refusal(path=file)


def test_the_element_of_a_list_is_named() -> None:
    """The error for a list with one invalid element has that element and its index."""
    message = refusal("lanes.decode.batch_sizes=[1, 0, 4]")
    assert "lanes.decode.batch_sizes[1] = 0 (--set)" in message
    assert "batch_sizes[0]" not in message


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("engine.max_num_seq", "engine.max_num_seqs"),
        ("max_num_seqs", "engine.max_num_seqs"),
        ("engine.path", "model.path"),
        ("decode.batch_sizes", "lanes.decode.batch_sizes"),
        ("engine.seed.x", "engine.seed"),
        ("verify.replay_vs_eager", "verify.replay_against_eager"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest(file: Path, key: str, near: str) -> None:
    """An unknown key is refused with its source and the nearest known key."""
    assert f"\n  {key} (--set): unknown key; did you mean {near}?" in refusal(f"{key}=1")
    if key not in ("engine.seed.x", "decode.batch_sizes"):  # tables in a file
        file.write_text(f"{key} = 1")
        assert f"\n  {key} ({file}): unknown key; did you mean {near}?" in refusal(path=file)


def test_unknown_tables_and_variables_are_answered_in_their_own_words(file: Path) -> None:
    """The error for an unknown table names tables, for a variable variables; a table takes no value."""
    file.write_text("[lanes.decod]\nrunner = 'x'\n[zzz]\na = 1\n")
    message = refusal("engine=5", path=file, env={"GRAPHPACT_ENGINE__MAX_NUM_SEQ": "3"})
    assert f"lanes.decod.mode ({file}): not set; set it to decode, prefill, draft_prefill, draft," in message
    assert f"zzz ({file}): unknown key; the tables are engine, lanes.NAME, model" in message
    assert "GRAPHPACT_ENGINE__MAX_NUM_SEQ): unknown key; did you mean" in message
    assert "did you mean GRAPHPACT_ENGINE__MAX_NUM_SEQS?" in message
    assert "engine (--set): a table, not a key; its keys are engine.attention_ba" in message
    misspelt = refusal(env={"GRAPHPACT_DISABLE_PLUGIN": "x"})
    assert misspelt.endswith(f"did you mean {DISABLE_VARIABLE}?")


def test_all_faults_are_listed_at_once(file: Path) -> None:
    """One message lists the unknown keys, invalid values and malformed overrides of all sources."""
    file.write_text("engine.page_size = 3\nengine.pages = 4\n")
    env = {"GRAPHPACT_ENGINE__SEED": "x", "graphpact_engine__seed": "y"}
    message = refusal("engine.num_pages", "model.dtype=int8", path=file, env=env)
    for text in ("engine.page_size = 3", "engine.pages (", "engine.seed = 'y'", "model.dtype = "):
        assert message.count(f"\n  {text}") == 1
    assert "\n  'engine.num_pages' (--set): not of the form key=value" in message
    assert "graphpact_engine__seed and GRAPHPACT_ENGINE__SEED are both set" in message
    assert message.count("\n") == 6


@pytest.mark.parametrize("key", ["", " ", ".", "engine.", ".seed", "lanes..seed", "engine. .seed"])
def test_a_key_with_an_empty_part_is_named(key: str, file: Path) -> None:
    """An override whose key has an empty part is refused with what was given; so is such a key of a file."""
    assert f"\n  '{key}=3' (--set): not of the form key=value" in refusal(f"{key}=3")
    quoted = ".".join(f'"{part.strip()}"' for part in key.split("."))
    file.write_text(f"{quoted} = 3\n")
    ((_, fault),) = (line.split("  ", 1) for line in refusal(path=file).split("\n")[1:2])
    assert '""' in fault.partition(" (")[0] or "not a valid lane name" in fault


def test_a_value_that_an_earlier_source_got_wrong_may_be_mended_by_a_later_one(file: Path) -> None:
    """Only the value that wins is validated, so --set can override an invalid value in a file."""
    file.write_text("engine.page_size = 3")
    assert EngineConfig.load(file, env={}, overrides=["engine.page_size=4"]).engine.page_size == 4


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"[engine]\nseed = \n", "is not TOML: Invalid value (at line 2"),
        (b"[engine]\nseed = 1\nseed = 2\n", "is not TOML: Cannot overwrite a value (at line 3"),
        (b"[model]\n\npath = '\xff'\n", "is not UTF-8 text (at line 3)"),
        (b"a = " + b"[" * 100_000, "nested too deeply"),
        (b"engine.seed = 1" + b"0" * 5_000, "cannot be read"),
    ],
)
def test_a_file_that_is_not_toml_is_refused_with_its_line(file: Path, data: bytes, says: str) -> None:
    """An ill-formed file raises a ConfigError with the file and the fault, with its line if known."""
    file.write_bytes(data)
    message = refusal(path=file)
    assert str(file) in message
    assert says in message


@pytest.mark.parametrize("name", ["absent.toml", ".", "nul\0.toml"])
def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path, name: str) -> None:
    """A missing file, a folder and an invalid file name raise a ConfigError with the file."""
    message = refusal(path=tmp_path / name)
    assert message.startswith(f"the configuration file {tmp_path / name} cannot be read: ")


HOSTILE = (
    st.text(max_size=40)
    | st.sampled_from(
        ["0x" + "f" * 9000, "[" * 5000, "a." * 5000, "1\nx = 2", "{a = {b = 1}}", "=", "\ud800"]
    )
    | st.recursive(st.integers() | st.text(max_size=5), st.lists, max_leaves=5).map(json.dumps)
)


@given(key=st.sampled_from([*KEYS, "engine", "lanes", "a", ""]) | HOSTILE, value=HOSTILE)
def test_no_input_gives_anything_but_a_config_error(key: str, value: str) -> None:
    """Any --set string and any variable gives a configuration or a ConfigError."""
    with suppress(ConfigError):
        EngineConfig.load(env={}, overrides=[f"{key}={value}", value])
    with suppress(ConfigError):
        EngineConfig.load(env={f"GRAPHPACT_{key}".replace(".", "__"): value})


@given(text=st.text(max_size=60) | HOSTILE | SETTINGS.map(toml))
def test_no_file_gives_anything_but_a_config_error(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Any contents of a file give a configuration or a ConfigError."""
    file = tmp_path_factory.getbasetemp() / "hostile.toml"
    file.write_bytes(text.encode(errors="surrogatepass"))
    with suppress(ConfigError):
        EngineConfig.load(file, env={})


def test_a_configuration_does_not_change_and_refuses_unknown_keys() -> None:
    """The models are frozen, hashable and closed, also where they are built directly."""
    config = EngineConfig.load(env={}, overrides=["lanes.decode.batch_sizes=[1]"])
    assert hash(config) != hash(EngineConfig())
    with pytest.raises(ValidationError, match="frozen"):
        config.engine.seed = 3
    with pytest.raises(ValidationError, match="Extra inputs"):
        EngineConfig.model_validate({"engine": {"sed": 3}})


def test_one_fault_has_one_line() -> None:
    """A list with an invalid item has one error line, for the item."""
    text = refusal("lanes.decode.batch_sizes=[0]")
    assert text.count("batch_sizes") == 1
    assert "batch_sizes[0] = 0" in text


def test_the_configuration_knows_the_providers_of_the_contract() -> None:
    """The configuration repeats the contract's names of kernel providers, to stay without torch."""
    assert ConfiguredProviderName == ProviderName
