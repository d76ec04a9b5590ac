"""Checkpoints that are broken, odd or malicious: each is refused by name, or runs; no other file is opened.

Does not: test prompts, plugins or configurations; the other files of this folder do.
"""

import copy as copies
import ctypes
import json
import os
import shutil
import struct
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import dynamic_module_utils

from graphpact import ForwardBatch, Lane, StepOutputs, hookimpl
from graphpact.errors import ConfigError, UsageError
from graphpact_cli import main
from graphpact_engine import models
from graphpact_engine.config import EngineConfig
from graphpact_engine.engine import Engine
from graphpact_engine.errors import CheckpointError, UnsupportedModelError
from graphpact_engine.request import SamplingParams
from rigs.command import Ended, command, refused

CPU = torch.device("cpu")
UP = "model.layers.0.mlp.up_proj.weight"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

Refuses = Callable[..., None]


@pytest.fixture
def model(checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    """Return a copy of a whole Llama checkpoint without a tokenizer, to be damaged."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "model"))


@pytest.fixture
def refuses(capsys: pytest.CaptureFixture[str]) -> Refuses:
    """Return a function that asserts that ``generate`` refuses a directory in one error with these words."""

    def run(path: Path, *words: str) -> None:
        capsys.readouterr()
        status = main(["generate", "--quiet", "--model", str(path), "Hello"])
        out, err = capsys.readouterr()
        refused(Ended(status, out, err), *words)

    return run


REMOTE = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

class Config(LlamaConfig):
    model_type = "buffered"
    def __getattribute__(self, name):  # all but a number of positions
        return None if name == "max_position_embeddings" else super().__getattribute__(name)

class Model(LlamaForCausalLM):
    config_class = Config
    _keys_to_ignore_on_load_unexpected = [r"old_mask"]
    def __init__(self, config):
        super().__init__(config)
        self.register_buffer("order", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(3))
"""


@pytest.fixture
def remote(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a Llama whose own code adds two buffers, and whose config has no number of positions."""
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds its cache of modules
    (model / "buffered.py").write_text(REMOTE)
    auto = {"AutoConfig": "buffered.Config", "AutoModelForCausalLM": "buffered.Model"}
    configure(model, model_type="buffered", auto_map=auto)
    store(model, lambda tensors: tensors.update(order=torch.arange(3), mask=torch.zeros(3)))
    return model


def load(path: Path, **more: Any) -> models.Checkpoint:
    """Load a checkpoint as the engine does."""
    return models.load_checkpoint(
        path, **{"dtype": None, "device": CPU, "attention": models.ATTENTION_NAME, **more}
    )


class Finite:
    """An observer that asserts that every step gives finite logits."""

    @hookimpl(wrapper=True)
    def run_step(self, lane: Lane, batch: ForwardBatch) -> Generator[None, StepOutputs, StepOutputs]:
        """Look at the logits of a step."""
        del lane, batch
        outputs = yield
        assert outputs.logits.isfinite().all()
        return outputs


def engine(path: Path, *more: str) -> Engine:
    """Return a small engine without graphs on a checkpoint; its logits are finite."""
    sets = [
        "engine.device=cpu",
        "engine.max_num_seqs=1",
        "engine.max_num_batched_tokens=16",
        "engine.num_pages=8",
        "lanes.decode.runner=eager",
        "lanes.prefill.runner=eager",
    ]
    config = EngineConfig.load(env={}, overrides=[f"model.path={path}", *sets, *more])
    return Engine(config, observers=[Finite()])


def config_of(path: Path) -> dict[str, Any]:
    """Return the content of ``config.json``."""
    content: dict[str, Any] = json.loads((path / "config.json").read_text())
    return content


def configure(path: Path, **changes: Any) -> None:
    """Change ``config.json``: keys take these values."""
    (path / "config.json").write_text(json.dumps(config_of(path) | changes))


def store(path: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the stored tensors."""
    tensors = {name: tensor.clone() for name, tensor in load_file(path / SINGLE).items()}
    change(tensors)
    save_file(tensors, path / SINGLE, {"format": "pt"})


def split(path: Path, first: str = "a.safetensors", second: str = "b.safetensors") -> dict[str, str]:
    """Replace the single file by two and an index; return the map of the index."""
    tensors = load_file(path / SINGLE)
    names = sorted(tensors)
    placed = {name: (first if i % 2 else second) for i, name in enumerate(names)}
    for file in (first, second):
        (path / file).parent.mkdir(parents=True, exist_ok=True)
        held = {name: tensors[name].clone() for name in names if placed[name] == file}
        save_file(held, path / file, {"format": "pt"})
    (path / SINGLE).unlink()
    write_index(path, placed)
    return placed


def write_index(path: Path, placed: Any) -> None:
    """Write an index with this map."""
    (path / INDEX).write_text(json.dumps({"weight_map": placed}))


# -- config.json -----------------------------------------------------------------------------------

ROPE = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}

CONFIGS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "quantised by GPTQ": ({"quantization_config": {"quant_method": "gptq"}}, ["quantised", "gptq"]),
    "quantised, without a method": ({"quantization_config": {}}, ["quantised"]),
    "quantised, in an inner config": (
        {"text_config": {"quantization_config": {"quant_method": "awq"}}},
        ["text_config.quantization_config", "awq"],
    ),
    "a million layers": (
        {"num_hidden_layers": 10**6},
        ["num_hidden_layers is 1000000", "21 tensors"],
    ),
    "10**18 layers": ({"num_hidden_layers": 10**18}, ["num_hidden_layers"]),
    "a million layers inside": (
        {"vision_config": {"num_layers": 10**6}},
        ["vision_config.num_layers"],
    ),
    "a vocabulary of 10**12": (
        {"vocab_size": 10**12},
        ["a model of 128,000,000,", "the weights have 87,232"],
    ),
    "a vocabulary of 10**30": ({"vocab_size": 10**30}, ["config.json"]),
    "a width of 10**9": ({"intermediate_size": 10**9}, ["a model of"]),
    "no layers": ({"num_hidden_layers": 0}, ["do not match config.json"]),
    "minus one layer": ({"num_hidden_layers": -1}, ["config.json"]),
    "rope factor 0": ({"rope_parameters": ROPE | {"factor": 0}}, ["rope_parameters.factor is 0"]),
    "rope factor -2": (
        {"rope_parameters": ROPE | {"factor": -2.0}},
        ["factor is -2.0", "positive"],
    ),
    "rope factor NaN": ({"rope_parameters": ROPE | {"factor": float("nan")}}, ["factor is nan"]),
    "rope factor in words": ({"rope_parameters": ROPE | {"factor": "two"}}, ["config.json"]),
    "rope theta 0": ({"rope_parameters": ROPE | {"rope_theta": 0.0}}, ["rope_theta is 0.0"]),
    "old rope theta 0": ({"rope_parameters": None, "rope_theta": 0.0}, ["rope_theta is 0.0"]),
    "old rope factor 0": (
        {"rope_parameters": None, "rope_scaling": {"rope_type": "linear", "factor": 0.0}},
        ["factor is 0.0"],
    ),
    "rope theta infinite": (
        {"rope_parameters": ROPE | {"rope_theta": float("inf")}},
        ["rope_theta is inf"],
    ),
    "rope theta all but 0": ({"rope_parameters": ROPE | {"rope_theta": 1e-300}}, ["inv_freq"]),
    "unknown rope": (
        {"rope_parameters": ROPE | {"rope_type": "spiral"}},
        ["config.json", "spiral"],
    ),
    "negative epsilon": ({"rms_norm_eps": -1.0}, ["rms_norm_eps is -1.0"]),
    "NaN epsilon": ({"rms_norm_eps": float("nan")}, ["rms_norm_eps is nan"]),
    "NaN, as transformers writes it": ({"rms_norm_eps": {"__float__": "NaN"}}, ["rms_norm_eps"]),
    "no positions": ({"max_position_embeddings": 0}, ["max_position_embeddings is 0"]),
    "minus one position": ({"max_position_embeddings": -1}, ["max_position_embeddings is -1"]),
    "10**30 positions": ({"max_position_embeddings": 10**30}, ["max_position_embeddings is 1000"]),
    "half a position": ({"max_position_embeddings": 0.5}, ["max_position_embeddings"]),
    "half a character as model type": ({"model_type": "\ud800"}, ["config.json"]),
    "lines as model type": ({"model_type": "x\nerror: y\x1b[31m"}, ["config.json"]),
    "a zero byte as activation": ({"hidden_act": "\0"}, ["config.json"]),
    "no model type": ({"model_type": None}, ["model_type"]),
    "a list as model type": ({"model_type": ["llama"]}, ["model_type is ['llama']"]),
    "unknown model type": ({"model_type": "llamma"}, ["llamma"]),
    "config elsewhere": ({"configuration_files": ["config.9.json"]}, ["configuration_files"]),
    "weights elsewhere": (
        {"transformers_weights": "../w.safetensors"},
        ["'../w.safetensors'", "outside"],
    ),
    "weights in a pickle": ({"transformers_weights": "adapter_model.bin"}, ["'adapter_model.bin'"]),
    "weights in a list": ({"transformers_weights": [1]}, ["transformers_weights is [1]"]),
    "remote code, not asked for": (
        {"model_type": "x", "auto_map": {"AutoConfig": "x.Config"}},
        ["model.trust_remote_code"],
    ),
}


@pytest.mark.few(13)
@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_cannot_be_right_is_refused(case: str, model: Path, refuses: Refuses) -> None:
    """A config with a value that no model can have is one error that names the key or the mismatch."""
    changes, words = CONFIGS[case]
    configure(model, **changes)
    refuses(model, str(model), *words)


DEEP = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
ODD_JSON = {
    "nothing": b"",
    "no JSON": b"{",
    "a list": b'["model_type", "llama"]',
    "a number": b"1",
    "NaN": b"NaN",
    "deep nesting": DEEP,
    "nested lists": b"[" * 100_000,
    "not UTF-8": b'{"model_type": "\xff\xfe"}',
    "UTF-16": '{"model_type": "llama"}'.encode("utf-16"),
    "a number of 5000 digits": b'{"model_type": "llama", "vocab_size": ' + b"9" * 5000 + b"}",
    "zeros": bytes(4096),
}


@pytest.mark.parametrize("kind", ["nonesuch", "llamma", ""])
def test_an_unknown_model_type_is_reported_before_missing_weights(kind: str, tmp_path: Path) -> None:
    """For a folder with only a config, the error names the unknown model type, not the weights."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    with pytest.raises(UnsupportedModelError, match=f"has model_type '{kind}', which transformers"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CheckpointError, match="weights are missing"):
        load(tmp_path)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("shows", [False, True])
def test_loading_shows_no_progress_bar(
    *, shows: bool, model: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model is loaded without a bar on stderr, whatever the program set, which is as before afterwards."""
    bars = transformers.utils.logging
    monkeypatch.setattr(bars, "_tqdm_active", shows)
    load(model)
    assert capfd.readouterr().err == ""
    assert bars.is_progress_bar_enabled() is shows


@pytest.mark.few(11)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
@pytest.mark.parametrize("case", ODD_JSON)
def test_odd_json_is_refused_with_the_name_of_its_file(
    case: str, name: str, model: Path, refuses: Refuses
) -> None:
    """A file that is not a JSON object is one error with the file's name, however deep or long it is."""
    if name == INDEX:
        split(model)
    (model / name).write_bytes(ODD_JSON[case])
    refuses(model, name)


@pytest.mark.parametrize("depth", [50, 200, 400, 800, 2000])
def test_a_nested_config_runs_or_is_refused(
    depth: int, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An unknown key may nest to any depth: there is one error, at the latest for the tokenizer."""
    text = json.dumps(config_of(model))
    nested = '{"a":' * depth + "1" + "}" * depth
    (model / "config.json").write_text(f'{text[:-1]}, "unknown": {nested}}}')
    status = main(["generate", "--quiet", "--model", str(model), "Hello"])
    out, err = capsys.readouterr()
    refused(Ended(status, out, err), str(model))


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    "ids", [[[1]], 1.5, -1, "1", [1, None], [1, "2"], 199, [1, 10**30], {"a": 1}, [True]]
)
def test_end_tokens_are_token_ids(ids: Any, file: str, model: Path, refuses: Refuses) -> None:
    """An end token outside the vocabulary is refused; the error names the key and its file."""
    if file == "config.json":
        (model / "generation_config.json").unlink()
        configure(model, eos_token_id=ids)
    else:
        (model / file).write_text(json.dumps({"eos_token_id": ids}))
    refuses(model, file, "eos_token_id")


@pytest.mark.parametrize(("ids", "expected"), [(None, set()), ([], set()), (3, {3}), ([3, 198], {3, 198})])
def test_end_tokens_are_none_one_or_several(ids: Any, expected: set[int], model: Path) -> None:
    """Null, one id and a list of ids are served."""
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    assert load(model).generation.eos_token_ids == expected


# -- the number of positions -----------------------------------------------------------------------


def test_a_model_has_the_positions_of_its_config(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    """The number is found under the name that the model type uses, and is never made up."""
    assert load(checkpoint("llama")).max_model_len == 128
    small = {
        "vocab_size": 99,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    gpt2 = transformers.GPT2Config(**small, n_positions=96)
    transformers.GPT2LMHeadModel(gpt2).save_pretrained(tmp_path / "gpt2")
    assert load(tmp_path / "gpt2").max_model_len == 96
    config = transformers.WhisperConfig(
        vocab_size=99,
        d_model=32,
        decoder_layers=1,
        encoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        max_target_positions=64,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=1,
        is_encoder_decoder=False,
    )
    transformers.WhisperForCausalLM(config).save_pretrained(tmp_path / "whisper")
    assert load(tmp_path / "whisper").max_model_len == 64


def test_a_model_without_a_number_of_positions_needs_one(remote: Path) -> None:
    """Where the config has no number of positions the error names ``engine.max_model_len``, which serves."""
    with pytest.raises(ConfigError, match=r"(?s)how many positions.*engine\.max_model_len"):
        engine(remote, "model.trust_remote_code=true")
    served = engine(remote, "model.trust_remote_code=true", "engine.max_model_len=32")
    assert served.generate([[5, 9, 3]], SamplingParams(max_new_tokens=2, ignore_eos=True))[0].token_ids
    with pytest.raises(ConfigError, match="there is memory for"):
        engine(remote, "model.trust_remote_code=true", f"engine.max_model_len={10**15}")


# -- which files -----------------------------------------------------------------------------------


@contextmanager
def opened_in(*folders: Path) -> Iterator[set[str]]:
    """Collect the names of the files that any library opens in these folders while the body runs."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK)
    assert watch >= 0
    names: set[str] = set()
    try:
        for folder in folders:
            assert libc.inotify_add_watch(watch, os.fsencode(folder), 0x20) >= 0  # IN_OPEN
        yield names
        with os.fdopen(os.dup(watch), "rb", buffering=0) as events:
            while raw := events.read(65536):
                while raw:
                    length = struct.unpack_from("iIII", raw)[3]
                    names.add(raw[16 : 16 + length].rstrip(b"\0").decode())
                    raw = raw[16 + length :]
    finally:
        os.close(watch)


@pytest.mark.skipif(sys.platform != "linux", reason="inotify tells which files are opened; Linux has it")
@pytest.mark.parametrize("sharded", [False, True])
def test_the_files_of_the_list_are_opened_and_no_others(*, sharded: bool, model: Path) -> None:
    """Loading opens the configs and the weight files of the resolved list; decoys beside them stay closed."""
    wanted = {"config.json", "generation_config.json", SINGLE}
    if sharded:
        split(model, "a.safetensors", "sub/b.safetensors")
        wanted = {"config.json", "generation_config.json", INDEX, "a.safetensors", "b.safetensors"}
    (model / "sub").mkdir(exist_ok=True)
    for decoy in (
        "pytorch_model.bin",
        "sub/weights.bin",
        "adapter_model.bin",
        "other.safetensors",
        "model.fp16.safetensors",
        "consolidated.safetensors",
        "pytorch_model.bin.index.json",
        "sub/model.safetensors",
    ):
        (model / decoy).write_bytes(b"decoy")
    with opened_in(model, model / "sub") as names:
        load(model)
    assert names - {""} == wanted  # "" is the folder itself


def test_shards_give_the_weights_of_the_single_file(model: Path) -> None:
    """A checkpoint split in two files, one of them in a subfolder, has the same weights."""
    whole = load(model).model.state_dict()
    split(model, "a.safetensors", "sub/b.safetensors")
    parts = load(model).model.state_dict()
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def bin_in_subfolder(model: Path) -> None:
    """Let the index name ``sub/weights.bin``, with good weights under its bare name."""
    placed = split(model)
    (model / "sub").mkdir()
    (model / "sub/weights.bin").write_bytes(b"a pickle")
    shutil.copy(model / "a.safetensors", model / "weights.bin")
    write_index(model, dict.fromkeys(placed, "sub/weights.bin"))


def safetensors_that_is_a_pickle(model: Path) -> None:
    """Give a shard the content of a file of ``torch.save``."""
    split(model)
    torch.save({"weight": torch.zeros(1)}, model / "a.safetensors")


def rival_index(model: Path) -> None:
    """Put an index of other files beside the single file."""
    shutil.copy(model / SINGLE, model / "keep")
    split(model)
    (model / "keep").rename(model / SINGLE)


def parent(model: Path) -> None:
    """Let the index name a good file outside."""
    placed = split(model)
    shutil.copy(model / "a.safetensors", model.parent / "a.safetensors")
    write_index(model, {k: f"../{v}" if v == "a.safetensors" else v for k, v in placed.items()})


def absolute(model: Path) -> None:
    """Let the index name a file by its absolute path."""
    placed = split(model)
    write_index(model, {k: str(model / v) for k, v in placed.items()})


def link_out(model: Path) -> None:
    """Replace the weights by a link to a file elsewhere."""
    (model / SINGLE).rename(model.parent / "elsewhere.safetensors")
    (model / SINGLE).symlink_to("../elsewhere.safetensors")


def folder_link_out(model: Path) -> None:
    """Name a file in a subfolder that is a link to a folder elsewhere."""
    split(model, "a.safetensors", "sub/b.safetensors")
    shutil.move(model / "sub", model.parent / "elsewhere")
    (model / "sub").symlink_to(model.parent / "elsewhere")


def moved_tensor(model: Path) -> None:
    """Let the index place a tensor in the other file."""
    placed = split(model)
    other = {"a.safetensors": "b.safetensors", "b.safetensors": "a.safetensors"}
    write_index(model, placed | {UP: other[placed[UP]]})


def twin_tensor(model: Path) -> None:
    """Store one tensor in both files."""
    split(model)
    a, b = (load_file(model / name) for name in ("a.safetensors", "b.safetensors"))
    both = {k: v.clone() for k, v in {**a, **b}.items()}
    save_file({k: both[k] for k in {*b, UP}}, model / "b.safetensors", {"format": "pt"})
    save_file({k: both[k] for k in {*a, UP}}, model / "a.safetensors", {"format": "pt"})


def index_of(weight_map: Any) -> Callable[[Path], None]:
    """Return a damage: an index with this map."""

    def damage(model: Path) -> None:
        split(model)
        write_index(model, weight_map)

    return damage


def adapter(model: Path) -> None:
    """Put an adapter beside the weights, whose base model is elsewhere."""
    (model / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')


def fifo(model: Path) -> None:
    """Replace the weights by a pipe, which blocks any code that opens it."""
    (model / SINGLE).unlink()
    os.mkfifo(model / SINGLE)


def pipe_as(name: str) -> Callable[[Path], None]:
    """Return a function that puts a pipe in the place of a file that transformers or we would read."""

    def damage(model: Path) -> None:
        (model / name).unlink(missing_ok=True)
        os.mkfifo(model / name)

    return damage


def folder(model: Path) -> None:
    """Replace the weights by a folder."""
    (model / SINGLE).unlink()
    (model / SINGLE).mkdir()


def looping_link(model: Path) -> None:
    """Replace the weights by a link to itself."""
    (model / SINGLE).unlink()
    (model / SINGLE).symlink_to(SINGLE)


def huge_header(model: Path) -> None:
    """Let the header of the weights claim 2**62 bytes."""
    data = (model / SINGLE).read_bytes()
    (model / SINGLE).write_bytes(struct.pack("<Q", 2**62) + data[8:])


def overlapping(model: Path) -> None:
    """Let two tensors of the weights share their bytes."""
    header = json.dumps(
        {name: {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} for name in ("a", "b")}
    ).encode()
    (model / SINGLE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))


FILES: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a pickle in a subfolder": (bin_in_subfolder, ["'sub/weights.bin'", "not a .safetensors file"]),
    "a pickle by another name": (safetensors_that_is_a_pickle, ["a.safetensors", "not a complete"]),
    "two sets of weights": (rival_index, ["two sets of weights", SINGLE, INDEX]),
    "a file of the parent": (parent, ["'../a.safetensors'", "outside"]),
    "a file by its absolute path": (absolute, ["outside"]),
    "a link out": (link_out, [SINGLE, "link out of the directory", "elsewhere.safetensors"]),
    "a link of a folder": (folder_link_out, ["'sub/b.safetensors'", "link out of the directory"]),
    "a tensor that is not there": (moved_tensor, [UP, ".safetensors"]),
    "a tensor in two files": (twin_tensor, [UP, "a.safetensors", "b.safetensors"]),
    "an adapter": (adapter, ["adapter_config.json", "merge"]),
    "a pipe": (fifo, [SINGLE]),
    "a pipe as defaults": (pipe_as("generation_config.json"), ["'generation_config.json' is a pipe"]),
    "a pipe as tokenizer": (pipe_as("tokenizer_config.json"), ["'tokenizer_config.json' is a pipe"]),
    "a device": (lambda m: (m / "vocab.txt").symlink_to("/dev/zero"), ["'vocab.txt' is a pipe or a device"]),
    "a folder": (folder, [SINGLE]),
    "a looping link": (looping_link, [SINGLE]),
    "a huge header": (huge_header, [SINGLE, "not a complete"]),
    "tensors that overlap": (overlapping, [SINGLE, "not a complete"]),
    "an empty map": (index_of({}), [INDEX, "weight_map"]),
    "a list as map": (index_of(["a"]), [INDEX, "weight_map"]),
    "a number as file": (index_of({"a": 1}), [INDEX, "'a' has 1"]),
    "null as file": (index_of({"a": None}), [INDEX, "None"]),
    "an empty name": (index_of({"a": ""}), ["''"]),
    "a zero byte": (index_of({"a": "a\0.safetensors"}), ["a\\x00.safetensors"]),
    "half a character": (index_of({"a": "\ud800.safetensors"}), ["\\ud800.safetensors"]),
    "a name of 5000 letters": (index_of({"a": "x" * 5000 + ".safetensors"}), ["missing"]),
    "a drive letter": (index_of({"a": "C:x.safetensors"}), ["outside"]),
    "backslashes": (index_of({"a": "..\\x.safetensors"}), ["outside"]),
}


@pytest.mark.few(9)
@pytest.mark.parametrize("case", FILES)
def test_weights_come_from_safetensors_files_of_the_directory(
    case: str, model: Path, refuses: Refuses
) -> None:
    """A weight file of another format, outside the directory, or not as the index says is refused."""
    damage, words = FILES[case]
    damage(model)
    refuses(model, str(model), *words)


def test_a_snapshot_of_the_hub_cache_is_served(model: Path, tmp_path: Path) -> None:
    """Links from a snapshot to the blobs of its cache are followed, also if the path is itself a link."""
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(model.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    (tmp_path / "link").symlink_to(snapshot)
    for path in (snapshot, tmp_path / "link"):
        assert load(path).vocab_size == 199


def test_the_file_that_the_config_names_is_loaded(model: Path) -> None:
    """``transformers_weights`` names the file, and the usual name beside it is not read."""
    shutil.copy(model / SINGLE, model / "mine.safetensors")
    (model / SINGLE).write_bytes(b"decoy")
    configure(model, transformers_weights="mine.safetensors")
    assert load(model).vocab_size == 199


# -- contents of the tensors -----------------------------------------------------------------------


def cast(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change: one weight in this dtype."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP] = tensors[UP].to(dtype)

    return change


def add(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change: one more tensor."""
    return lambda tensors: tensors.update({name: tensor})


def fill(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    """Return a change: one element of a weight has this value."""

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[UP][3, 5] = value

    return change


PREFIX = "model.layers.0.mlp.up_proj."
TENSORS: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], list[str]]] = {
    **{
        f"a weight of {dtype}": (cast(dtype), [UP, "quantised", str(kind)])
        for dtype, kind in {
            torch.int8: "I8",
            torch.uint8: "U8",
            torch.int16: "I16",
            torch.int32: "I32",
            torch.int64: "I64",
            torch.bool: "BOOL",
            torch.float8_e4m3fn: "F8_E4M3",
            torch.float8_e5m2: "F8_E5M2",
        }.items()
    },
    **{
        f"a tensor {name}": (add(PREFIX + name, torch.zeros(2, dtype=dtype)), [name, kind])
        for name, dtype, kind in [
            ("qweight", torch.int32, "GPTQ or AWQ"),
            ("scales", torch.float16, "GPTQ or AWQ"),
            ("g_idx", torch.int32, "GPTQ"),
            ("weight_packed", torch.int32, "compressed-tensors"),
            ("weight_scale", torch.float32, "FP8 or INT8"),
            ("weight_scale_inv", torch.float32, "block-wise FP8"),
            ("SCB", torch.float32, "bitsandbytes"),
            ("absmax", torch.float32, "bitsandbytes"),
        ]
    },
    "NaN": (fill(float("nan")), [UP, "NaN or infinite"]),
    "infinity": (fill(float("inf")), [UP, "NaN or infinite"]),
    "minus infinity": (fill(float("-inf")), [UP, "NaN or infinite"]),
    "a name of two lines": (add("a\nerror: b", torch.zeros(1)), ["unexpected keys a error: b"]),
    "no tensors": (lambda tensors: tensors.clear(), ["num_hidden_layers is 2", "0 tensors"]),
}


@pytest.mark.parametrize("case", TENSORS)
def test_weights_that_are_not_finite_floats_are_refused(case: str, model: Path, refuses: Refuses) -> None:
    """A tensor that is not a float, or contains NaN or infinity, is refused with its name and format."""
    change, words = TENSORS[case]
    store(model, change)
    refuses(model, str(model), *words)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_float_weights_are_served(dtype: torch.dtype, model: Path) -> None:
    """Weights stored in any dtype of 16, 32 or 64 bits are loaded as the dtype that is asked for."""
    store(model, cast(dtype))
    stored = load_file(model / SINGLE)[UP]
    assert torch.equal(load(model).model.state_dict()[UP], stored.float())


def test_large_finite_weights_are_served(model: Path) -> None:
    """Only the elements of a weight must be finite: their sum may overflow."""
    store(model, lambda tensors: tensors[UP].fill_(3e38))
    assert load(model).model.state_dict()[UP].isfinite().all()


def test_weights_that_overflow_the_dtype_asked_for_are_refused(model: Path) -> None:
    """A value that is finite as stored and infinite in ``model.dtype`` is refused with both names."""
    store(model, fill(1e38))
    with pytest.raises(CheckpointError, match=r"up_proj.*torch\.float16"):
        load(model, dtype=torch.float16)
    assert load(model, dtype=torch.bfloat16).vocab_size == 199


@pytest.mark.parametrize(
    ("order", "mask", "fault"),
    [
        (torch.tensor([2, 0, 1]), [0.0, -float("inf"), torch.finfo(torch.float32).min], None),
        (torch.tensor([2, 0, 1], dtype=torch.int8), [0.0] * 3, "order"),
        (torch.tensor([2, 0, 1]), [0.0, float("nan"), 0.0], "mask"),
    ],
)
def test_buffers_of_a_model_keep_their_dtype_and_may_be_infinite(
    order: torch.Tensor, mask: list[float], fault: str | None, remote: Path
) -> None:
    """An integer buffer and a mask of minus infinity are served; another dtype and NaN are refused."""
    store(remote, lambda tensors: tensors.update(order=order, mask=torch.tensor(mask)))
    if fault:
        with pytest.raises(CheckpointError, match=f"'{fault}'"):
            load(remote, trust_remote_code=True)
    else:
        loaded = load(remote, trust_remote_code=True).model
        assert torch.equal(loaded.order, order)
        assert torch.equal(loaded.mask, torch.tensor(mask))


def test_integers_that_a_model_type_ignores_are_left_out(remote: Path) -> None:
    """Integer tensors that transformers skips by name, such as stored masks, change nothing."""
    plain = copies.deepcopy(load(remote, trust_remote_code=True).model.state_dict())  # not mapped
    store(remote, add("old_mask", torch.ones(4, dtype=torch.uint8)))
    loaded = load(remote, trust_remote_code=True).model.state_dict()
    assert loaded.keys() == plain.keys()
    assert [name for name, tensor in loaded.items() if not torch.equal(tensor, plain[name])] == []


def test_code_of_another_repository_is_not_fetched(model: Path) -> None:
    """Remote code is the checkpoint's own: a reference to another repository is refused."""
    configure(model, auto_map={"AutoConfig": "someone/else--x.Config"})
    with pytest.raises(CheckpointError, match="another repository"):
        load(model, trust_remote_code=True)


@pytest.mark.parametrize(
    "key",
    [
        "head_dim",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
        "num_key_value_heads",
        "vocab_size",
    ],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_size_that_no_model_has_is_named(key: str, model: Path) -> None:
    """The error for a size of 0 or below, a size too large, or one of another type names its key."""
    stored = config_of(model)
    for value in (0, -1, 10**12, "8", 1.5, True, []):
        configure(model, **(stored | {key: value}))
        with pytest.raises(UsageError) as refused:
            load(model)
        assert key in refused.value.message, value


@pytest.mark.parametrize("name", ["no_such", "silu "])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_an_unknown_activation_is_named(
    kind: str, name: str, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """A function that transformers does not have is refused with the key that asks for it."""
    model = Path(shutil.copytree(checkpoint(kind), tmp_path / "model"))
    key = {"llama": "hidden_act", "gpt2": "activation_function"}[kind]
    configure(model, **{key: name})
    with pytest.raises(CheckpointError, match=f"{key} is '{name}' in config.json"):
        load(model)


# -- the tokenizer ---------------------------------------------------------------------------------

TINY = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"


@pytest.mark.parametrize("case", ODD_JSON)
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_broken_tokenizer_is_one_error(case: str, name: str, tmp_path: Path) -> None:
    """A tokenizer file that is not a JSON object is an error that names the directory."""
    for file in TINY.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / name).write_bytes(ODD_JSON[case])
    with pytest.raises(CheckpointError, match="tokenizer"):
        models.load_tokenizer(tmp_path)


def test_a_tokenizer_that_loads_and_cannot_encode_is_one_error(tmp_path: Path) -> None:
    """A fault that shows only when a text is encoded is an error of the load."""
    for file in TINY.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(json.loads((TINY / "tokenizer_config.json").read_text()) | {"model_max_length": "long"})
    )
    with pytest.raises(CheckpointError, match="tokenizer"):
        models.load_tokenizer(tmp_path)


# -- in a separate process -------------------------------------------------------------------------


def a_million_layers(model: Path) -> None:
    """Ask for a million layers."""
    configure(model, num_hidden_layers=10**6)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(a_million_layers, ["num_hidden_layers"], marks=pytest.mark.sweep),
        pytest.param(bin_in_subfolder, ["'sub/weights.bin'"], marks=pytest.mark.sweep),
    ],
)
def test_the_command_refuses_a_hostile_checkpoint(
    damage: Callable[[Path], None], words: list[str], model: Path
) -> None:
    """The command itself ends in time, with status 2 and one error."""
    damage(model)
    refused(command("generate", "--model", model, "Hello"), *words)


# -- mutations -------------------------------------------------------------------------------------

BASES = ["llama", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "phi3"]
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 3, 7, 10**6, 10**12, 10**30, 2**31, 2**63]),
    st.sampled_from([0.0, -0.0, -1.0, 0.5, 2.5, 1e-300, 1e300, float("nan"), float("inf")]),
    st.integers(),
    st.floats(),
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.text(max_size=4),
    st.lists(NUMBERS, max_size=3),
    st.dictionaries(st.text(max_size=4), NUMBERS, max_size=2),
)


def keys_of(config: dict[str, Any], inside: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every key, including keys of inner objects."""
    found = []
    for key, value in config.items():
        found.append((*inside, key))
        if isinstance(value, dict):
            found += keys_of(value, (*inside, key))
    return found


@given(data=st.data())
@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")
def test_a_mutated_config_runs_or_is_refused(
    data: st.DataObject, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """With one or two keys dropped or replaced, every step has finite logits, or there is a `UsageError`."""
    base = checkpoint(data.draw(st.sampled_from(BASES)))
    path = tmp_path / "mutated"
    shutil.rmtree(path, ignore_errors=True)
    path.mkdir()
    os.link(base / SINGLE, path / SINGLE)
    config = config_of(base)
    for _ in range(data.draw(st.integers(1, 2))):
        *inside, key = data.draw(st.sampled_from(keys_of(config)))
        place = config = copies.deepcopy(config)
        for name in inside:
            place = place[name]
        if data.draw(st.booleans()):
            del place[key]
        else:
            place[key] = data.draw(VALUES)
    (path / "config.json").write_text(json.dumps(config))
    try:
        answers = engine(path).generate([[5, 9, 3]], SamplingParams(max_new_tokens=3, ignore_eos=True))
    except UsageError:
        return
    assert len(answers[0].token_ids) == 3
