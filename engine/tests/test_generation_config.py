"""The generation config of a checkpoint: its fields are served, or named in one warning."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.errors import CheckpointError
from graphpact_engine.models import generation_config
from support import reference_tokens

PROMPTS = [[5, 6, 7, 5, 6], [9], list(range(20, 40))]


@pytest.fixture
def write(checkpoint: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a checkpoint with these generation fields; None for no file."""

    def make(fields: dict[str, Any] | None, **config: Any) -> Path:
        path = Path(shutil.copytree(checkpoint("llama"), tmp_path / "model", dirs_exist_ok=True))
        file = path / generation_config.FILE
        file.unlink(missing_ok=True)
        if fields is not None:
            file.write_text(json.dumps(fields))
        if config:
            known = json.loads((path / "config.json").read_text())
            (path / "config.json").write_text(json.dumps(known | config))
        return path

    return make


def build(path: Path) -> Engine:
    """Return an engine on a checkpoint."""
    return Engine(EngineConfig.load(None, env={}, overrides=[f'model.path="{path}"', 'engine.device="cpu"']))


FIELDS: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 0.4},
    {"repetition_penalty": 0.8, "suppress_tokens": [3, 8, 198, 5000]},
    {"min_new_tokens": 6},
    {"min_length": 9},
    {"min_length": 30, "min_new_tokens": 2},
]


@pytest.mark.few(2)
@pytest.mark.parametrize("fields", FIELDS, ids=lambda fields: "+".join(fields) or "nothing")
def test_tokens_follow_the_generation_config_as_in_transformers(
    fields: dict[str, Any], write: Callable[..., Path]
) -> None:
    """Greedy tokens equal transformers', which reads the same generation config; many tokens end a text."""
    ends = list(range(2, 199, 3))  # so that a text ends early, unless a minimum forbids it
    path = write({"eos_token_id": ends, **fields})
    with build(path) as engine:
        done = engine.generate(PROMPTS, SamplingParams(max_new_tokens=12))
        plain = engine.generate(
            PROMPTS,
            SamplingParams(max_new_tokens=12, repetition_penalty=1.0, suppress_tokens=(), min_new_tokens=0),
        )
    tokens = [each.token_ids for each in done]
    assert tokens == [reference_tokens(path, prompt, 12) for prompt in PROMPTS]
    # The parameters of a request override the config: here, nothing changes its logits.
    (path / generation_config.FILE).write_text(json.dumps({"eos_token_id": ends}))
    assert [p.token_ids for p in plain] == [reference_tokens(path, prompt, 12) for prompt in PROMPTS]
    assert (tokens != [p.token_ids for p in plain]) == bool(fields)


def test_fields_of_the_model_config_count_without_a_file(write: Callable[..., Path]) -> None:
    """A checkpoint whose config.json has the generation fields, as old ones do, is served alike."""
    path = write(None, repetition_penalty=1.7, eos_token_id=[2, 3])
    with build(path) as engine:
        assert engine.eos_token_ids == {2, 3}
        old = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True))
    path = write({"repetition_penalty": 1.7, "eos_token_id": [2, 3]})
    with build(path) as engine:
        new = engine.generate(PROMPTS, SamplingParams(max_new_tokens=8, ignore_eos=True))
    assert [each.token_ids for each in old] == [each.token_ids for each in new]


def test_stop_strings_of_the_checkpoint_end_a_text(tmp_path: Path) -> None:
    """Its stop strings hold for requests that have none; a request may have none on purpose."""
    tiny = Path(__file__).parents[2] / "examples/models/tiny-llama"
    path = Path(shutil.copytree(tiny, tmp_path / "model"))
    (path / generation_config.FILE).write_text('{"eos_token_id": 256, "stop_strings": ["e "]}')
    with build(path) as engine:
        params = SamplingParams(max_new_tokens=30)
        cut, whole = engine.generate(["The "] * 2, [params, SamplingParams(max_new_tokens=30, stop=())])
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index("e ")]


@pytest.mark.parametrize(("fields", "ends"), [({}, {1}), ({"eos_token_id": None}, set())])
def test_end_tokens_come_from_the_model_if_the_file_has_none(
    fields: dict[str, Any], ends: set[int], write: Callable[..., Path]
) -> None:
    """A file that does not name an end token leaves that of config.json; null means that there is none."""
    with build(write({"max_length": 20, **fields})) as engine:
        assert engine.eos_token_ids == ends


# -- what is not served ----------------------------------------------------------------------------

OTHER_VALUES: dict[str, Any] = {
    "max_time": 5.0,
    "num_beams": 4,
    "top_h": 0.5,
    "typical_p": 0.9,
    "epsilon_cutoff": 0.1,
    "eta_cutoff": 0.1,
    "encoder_repetition_penalty": 1.5,
    "no_repeat_ngram_size": 3,
    "bad_words_ids": [[5, 6]],
    "forced_bos_token_id": 4,
    "forced_eos_token_id": 5,
    "remove_invalid_values": True,
    "exponential_decay_length_penalty": [5, 1.1],
    "begin_suppress_tokens": [4],
    "sequence_bias": [[[5], -1.0]],
    "token_healing": True,
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
    "num_return_sequences": 2,
    "encoder_no_repeat_ngram_size": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "diversity_penalty": 0.5,
    "num_beam_groups": 2,
    "constraints": [1],
    "force_words_ids": [[3]],
    "a_field_of_tomorrow": "x",
}


def told(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """Return what was logged of generation configs."""
    return [record for record in caplog.records if record.name == generation_config.__name__]


def test_each_field_of_transformers_is_of_one_kind() -> None:
    """Each field of transformers' generation config is served, recommended, without effect, or not served."""
    kinds = [
        generation_config._SERVED,
        generation_config._RECOMMENDED,
        generation_config._NO_EFFECT,
        set(OTHER_VALUES),
    ]
    for field in vars(GenerationConfig()):
        if not field.startswith("_"):
            assert sum(field in kind for kind in kinds) == 1, field


def test_fields_that_are_not_served_are_named_in_one_warning(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Every field that would change tokens and is not served is in one warning, with its value."""
    build(write({"eos_token_id": 1, "max_length": 99, "pad_token_id": 3, **OTHER_VALUES})).close()
    (record,) = told(caplog)
    assert record.levelno == logging.WARNING
    line = record.getMessage()
    assert "\n" not in line
    for field in OTHER_VALUES:
        assert f" {field} = " in line
    assert "max_length" not in line


def test_fields_without_effect_give_no_warning(
    write: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Neutral values of fields that are not served cause no warning; neither do served fields and limits."""
    neutral = {
        **dict.fromkeys(OTHER_VALUES),
        "do_sample": False,
        "num_beams": 1,
        "num_beam_groups": 1,
        "num_return_sequences": 1,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "encoder_repetition_penalty": 1.0,
        "no_repeat_ngram_size": 0,
        "guidance_scale": 1,
        "bad_words_ids": [],
        "remove_invalid_values": False,
        "temperature": 1.0,
        "top_k": 50,
        "max_length": 20,
    }
    build(write({**neutral, "repetition_penalty": 1.2, "use_cache": True, "min_p": 0.1})).close()
    assert told(caplog) == []


# -- odd files -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "not readable as JSON"),
        ("[" * 100_000, "not readable as JSON"),
        ("[]", "expected a JSON object"),
        ('"text"', "expected a JSON object"),
        ("{", "not readable as JSON"),
        (b"\xff\xfe", "not readable as JSON"),
        ('{"repetition_penalty": "1.2"}', "repetition_penalty must be .* got '1.2'"),
        ('{"repetition_penalty": 0}', "repetition_penalty must be .* got 0"),
        ('{"repetition_penalty": NaN}', "repetition_penalty must be .* got nan"),
        ('{"repetition_penalty": true}', "repetition_penalty must be .* got True"),
        ('{"suppress_tokens": 5}', "suppress_tokens must be .* got 5"),
        ('{"suppress_tokens": [[5]]}', "suppress_tokens must be"),
        ('{"suppress_tokens": [-1]}', "suppress_tokens must be"),
        ('{"min_new_tokens": -1}', "min_new_tokens must be .* got -1"),
        ('{"min_length": 2.5}', "min_length must be .* got 2.5"),
        ('{"stop_strings": [1]}', "stop must be .* got"),
        ('{"eos_token_id": "1"}', "eos_token_id"),
        ('{"eos_token_id": [[1]]}', "eos_token_id"),
        ('{"eos_token_id": 1.0}', "eos_token_id"),
        ('{"eos_token_id": true}', "eos_token_id"),
        ('{"eos_token_id": 199}', "eos_token_id must be a token id from 0 to 198"),
        ('{"eos_token_id": -1}', "eos_token_id"),
        ('{"do_sample": true, "temperature": "hot"}', "temperature must be .* got 'hot'"),
        ('{"do_sample": true, "top_p": 7}', "top_p must be"),
    ],
)
def test_an_odd_generation_config_is_refused_by_field(
    content: str | bytes, says: str, write: Callable[..., Path]
) -> None:
    """A broken file, or a served field with an impossible value, is one error that names file and field."""
    path = write(None)
    data = content if isinstance(content, bytes) else content.encode()
    (path / generation_config.FILE).write_bytes(data)
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: (.*){says}"):
        build(path)
