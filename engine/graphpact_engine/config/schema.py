"""The configuration of an engine: `EngineConfig`, read from TOML, the environment and ``--set``.

Later sources win: defaults, the file, variables ``GRAPHPACT_<TABLE>__<KEY>``, ``--set key=value``.
Types are not guessed: in a file the string ``"8"`` is not a number. A value from the environment or
from ``--set`` is parsed as TOML (``8``, ``[1]``); a value that is not valid TOML is a string (``fa3``).

Lanes have names: every table ``[lanes.NAME]`` is a lane. So the set of keys depends on the lanes that the
configuration names. The reference lists the keys of a lane once, as ``lanes.NAME.*``.

Does not: look up plugins or check devices; the engine does both when it is built.
"""

import functools
import os
import re
import reprlib
import tomllib
from collections.abc import ItemsView, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    Strict,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from graphpact.errors import ConfigError, did_you_mean, named_options
from graphpact_cli.files import read_file

ENV_PREFIX = "GRAPHPACT_"
RESERVED_VARIABLES = frozenset(
    {
        "GRAPHPACT_CACHE_DIR",
        "GRAPHPACT_CHECK_TIMEOUT",
        "GRAPHPACT_DISABLE_PLUGINS",
        "GRAPHPACT_TRACE",
        "GRAPHPACT_TRACEBACK",
    }
)
"""Variables with the prefix that are not configuration keys."""

KeyPath = tuple[str, ...]
ProviderName = Literal["auto", "native", "compiled", "portable"]
"""As `graphpact.attention.ProviderName`, which would import torch when a key is completed."""
LaneMode = Literal["decode", "prefill", "draft_prefill", "draft", "verify", "draft_extend"]
LANE_MODES: tuple[LaneMode, ...] = get_args(LaneMode)
"""The modes of lanes. A lane named after a mode has that mode. All but the first two are of [speculative]."""
_DEFAULT_RUNNERS: dict[LaneMode, str] = {"decode": "cuda_graph", "prefill": "eager"}
_LANE_NAME = r"^[a-z][a-z0-9_]*$"
_ANY_LANE = "NAME"  # placeholder in the reference; not a valid lane name
_TEXT = "a string that is not empty"
_PATHS = {("model", "path"), ("speculative", "draft_model")}


def _power_of_two(value: int) -> int:
    if value & (value - 1):
        raise ValueError("not a power of two")
    return value


Name = Annotated[str, Field(min_length=1)]
Device = Annotated[
    str,
    Field(
        pattern=r"^(auto|cpu|cuda(:[1-9]?[0-9])?)$",
        json_schema_extra={"allowed": "auto, cpu, cuda or cuda:N"},
    ),
]
PageSize = Annotated[
    int,
    Field(ge=1, le=2**16, json_schema_extra={"allowed": "a power of two, from 1 to 65536"}),
    AfterValidator(_power_of_two),
]
BatchSizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Strict(strict=False), Field(min_length=1)]
Names = Annotated[tuple[Name, ...], Strict(strict=False)]
AsyncScheduling = Annotated[
    Literal["auto"] | bool, Field(json_schema_extra={"allowed": "auto, true or false"})
]
LaneName = Annotated[str, Field(pattern=_LANE_NAME)]
Share = Annotated[float, Field(ge=0, le=1)]


class _Section(BaseModel):
    """Base class of one table of the configuration: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Let a section that is made in Python name the key nearest to an unknown one, as `load` does."""
        super().__pydantic_init_subclass__(**options)
        named_options(cls)


class ModelConfig(_Section):
    """``[model]``: the checkpoint and its dtype."""

    path: Name | None = Field(
        default=None,
        description="Directory of the checkpoint. In a file, a relative path is resolved against the file's"
        " folder if it exists there, otherwise against the working directory.",
    )
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = Field(
        default="auto",
        description="Dtype of weights and computation. auto: float32 on a CPU, else the checkpoint's dtype.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Whether to run Python files that the checkpoint contains."
    )


class EngineSection(_Section):
    """``[engine]``: the limits of the engine, and defaults for all lanes."""

    attention_backend: Name = Field(
        default="flashinfer",
        description="The attention backend of every lane that does not set its own.",
    )
    kernel_provider: ProviderName = Field(
        default="auto",
        description="The kernels of the attention backends, for every lane that does not set its own. native:"
        " the vendor's library; compiled: C++ for a CPU, built once if there is a compiler; portable: torch"
        " only; auto: the first of them that can run here. A named one is never replaced by another.",
    )
    device: Device = Field(
        default="auto",
        description="Device of the model. auto: a GPU if there is one, otherwise the CPU.",
    )
    max_num_seqs: int = Field(
        default=8, ge=1, le=2**16, description="Maximum number of requests in one step."
    )
    max_num_batched_tokens: int = Field(
        default=2048,
        ge=1,
        le=2**24,
        description="Maximum number of new tokens in one step; at least max_num_seqs.",
    )
    max_prefill_chunk: int | None = Field(
        default=None,
        ge=1,
        le=2**24,
        description="Maximum number of prompt tokens in one step: longer prompts are computed in chunks, so"
        " that decoding requests wait for short steps only. At most max_num_batched_tokens, the default.",
    )
    mixed: bool | None = Field(
        default=None,
        description="Whether decoding requests take part in prefill steps, with one token each; false:"
        " prefill and decode steps take turns. Default: true if attention backend and runner of every prefill"
        " lane declare the mode mixed, without [speculative].",
    )
    async_scheduling: AsyncScheduling = Field(
        default="auto",
        description="Whether a decode step is scheduled and launched while the one before runs, from whose"
        " tokens on the device it continues; the host reads tokens one step late. auto: on a GPU, without"
        " [speculative]. The tokens are the same.",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=2,
        description="Maximum sequence length, prompt and output. Default: the model's limit, or what fits in"
        " memory. Needed for a model whose config has no limit.",
    )
    page_size: PageSize = Field(default=16, description="Tokens per page of the KV cache.")
    num_pages: int | None = Field(
        default=None,
        ge=1,
        description="Pages of the KV cache, not counting page 0, which is scratch. Default: enough for"
        " max_num_seqs sequences of max_model_len, or as many as fit in memory.",
    )
    kv_cache_memory_gib: float | None = Field(
        default=None,
        gt=0,
        description="Maximum memory of the KV cache. Default: a share of the free memory.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        lt=2**63,
        description="Seed of every request without its own, and of verification.",
    )
    num_threads: int | None = Field(
        default=None,
        ge=1,
        le=2**10,
        description="CPU threads of the operators of a step. Default: 1 for a model of at most 64 MiB on a"
        " CPU, whose operations are too short to be divided, unless OMP_NUM_THREADS or MKL_NUM_THREADS is"
        " set; otherwise torch's own number.",
    )
    observers: Names = Field(
        default=(),
        description="Plugins that observe the hooks and steps of every lane, such as trace; the first is the"
        " outermost. Verification and the guard of a strict lane wrap all of them.",
    )


class LaneConfig(_Section):
    """``[lanes.NAME]``: one lane."""

    mode: LaneMode = Field(
        description="The batches that the lane runs. decode: one new token per request; prefill: prompts."
        " With [speculative], instead of decode: draft: the draft model continues; verify: the target reads"
        " the drafts; draft_prefill and draft_extend: the draft model reads prompts and accepted tokens. A"
        " lane named after a mode has that mode; any other lane must set it."
    )
    runner: Name | None = Field(
        default_factory=lambda lane: _DEFAULT_RUNNERS.get(lane.get("mode")),
        description="The runner; eager captures nothing. Default: cuda_graph for decode, eager for prefill;"
        " for lanes of [speculative], the algorithm's.",
    )
    attention_backend: Name | None = Field(
        default=None, description="The attention backend. Default: engine.attention_backend."
    )
    kernel_provider: ProviderName | None = Field(
        default=None,
        description="The kernels of the attention backend. Default: engine.kernel_provider.",
    )
    graph_driver: Name = Field(
        default="auto",
        description="The driver that records the graphs. auto: the runner's own choice (cpu_graph: inductor),"
        " otherwise tape on a CPU, and the driver of the device type elsewhere, such as cuda.",
    )
    batch_sizes: BatchSizes | None = Field(
        default=None,
        description="The request counts to capture. Default: the runner's capture sizes.",
    )
    token_counts: BatchSizes | None = Field(
        default=None,
        description="The token counts to capture, for a runner of prefill graphs. Default: the runner's.",
    )
    max_padding_ratio: float | None = Field(
        default=None,
        ge=1,
        description="The most tokens of a prefill graph for each token of a step; a step that would be padded"
        " further runs eagerly. Default: 2.",
    )
    capture: bool = Field(
        default=True,
        description="Whether to capture the runner's graphs; false: every step runs eagerly, for comparison.",
    )
    strict: bool = Field(
        default=False,
        description="Whether to poison memory that a step does not own or did not write, and to refuse wrong"
        " use of graphs. Slow; needs a driver with a strict mode.",
    )


class LanesConfig(RootModel[dict[LaneName, LaneConfig]]):
    """``[lanes]``: the lanes by name.

    Lanes are sorted by mode and keep their order within a mode. A mode without a lane gets a default lane
    with the name of the mode.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    def __getitem__(self, name: str) -> LaneConfig:
        return self.root[name]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LanesConfig) and [*self.items()] == [*other.items()]

    def __hash__(self) -> int:
        return hash(tuple(self.items()))

    def items(self) -> ItemsView[str, LaneConfig]:
        """Return the name and the configuration of every lane."""
        return self.root.items()

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, tables: Any) -> Any:
        """Set the modes that follow from names, add the missing default lanes, and sort by mode."""
        if not isinstance(tables, dict):
            return tables
        lanes = {
            name: {"mode": name, **lane} if name in LANE_MODES and isinstance(lane, dict) else lane
            for name, lane in tables.items()
        }
        modes = {name: _mode_of(lane) for name, lane in lanes.items()}
        for name, mode in modes.items():
            if name in LANE_MODES and mode in LANE_MODES and mode != name:
                raise PydanticCustomError(
                    "lane_mode",
                    "a lane named {name} must have the mode {name}; give the lane another name",
                    {"name": name, "path": ("lanes", name, "mode"), "value": mode},
                )
        for mode in _DEFAULT_RUNNERS:
            if mode not in modes and mode not in modes.values():
                lanes[mode], modes[mode] = {"mode": mode}, mode
        places = {name: LANE_MODES.index(m) for name, m in modes.items() if m in LANE_MODES}
        return dict(sorted(lanes.items(), key=lambda item: places.get(item[0], -1)))


def _mode_of(lane: Any) -> Any:
    return lane.get("mode") if isinstance(lane, dict) else getattr(lane, "mode", None)


class VerifyConfig(_Section):
    """``[verify]``: the checks of replays."""

    pact: Literal["always", "sampled", "off"] = Field(
        default="always", description="The replays whose pact is checked; sampled: one in 100."
    )
    replay_against_eager: Share = Field(
        default=0.0,
        description="Share of the replays that are also run eagerly and compared.",
    )


class SpeculativeConfig(_Section):
    """``[speculative]``: drafts, mostly by a small model; their lanes take the place of the decode lanes."""

    algorithm: Name | None = Field(
        default=None, description="The speculation algorithm, such as eagle. Default: no speculation."
    )
    draft_model: Name | None = Field(
        default=None,
        description="Directory of the draft model; a relative path as that of model.path. Left out if the"
        " algorithm drafts without a model.",
    )
    num_steps: int = Field(default=3, ge=1, le=64, description="Tokens that a draft goes ahead.")
    topk: int = Field(
        default=1, ge=1, le=64, description="Branches of a draft: 1 for a chain, more for a tree."
    )
    num_draft_tokens: int | None = Field(
        default=None,
        ge=2,
        le=256,
        description="Tokens of a request that one verification reads, its newest token included. Default:"
        " num_steps * topk + 1.",
    )


class EngineConfig(_Section):
    """The whole configuration: ``model``, ``engine``, ``lanes``, ``speculative`` and ``verify``."""

    model: ModelConfig = ModelConfig()
    engine: EngineSection = EngineSection()
    lanes: LanesConfig = LanesConfig({})
    speculative: SpeculativeConfig = SpeculativeConfig()
    verify: VerifyConfig = VerifyConfig()

    @classmethod
    def load(
        cls,
        path: Path | None = None,
        *,
        env: Mapping[str, str] | None = None,
        overrides: Sequence[str] = (),
        options: Mapping[str, str] | None = None,
    ) -> "EngineConfig":
        """Read a configuration; later sources win: file, environment, options, overrides.

        A relative ``model.path`` in the file is resolved against the file's folder if it exists there,
        otherwise against the working directory.

        Args:
            path: A TOML file.
            env: Environment variables; by default those of the process.
            overrides: ``key=value`` strings, such as ``engine.max_num_seqs=8``.
            options: More such strings, by the command-line option that they come from.

        Raises:
            ConfigError: Lists every fault with its source and the allowed values.
        """
        faults: list[str] = []
        found = [
            *_from_file(path),
            *_from_env(os.environ if env is None else env, faults),
            *(
                setting
                for option, override in (options or {}).items()
                for setting in _from_overrides([override], option, faults)
            ),
            *_from_overrides(overrides, "--set", faults),
        ]
        keys = _keys_for(found)
        settings: dict[KeyPath, _Setting] = {}
        for setting in found:
            if setting.path in keys or setting.is_empty:
                settings[setting.path] = setting
            else:
                faults.append(_unknown(setting, keys))
        try:
            config = cls.model_validate(_tree(settings))
        except ValidationError as error:
            faults += _render(error, settings, keys)
        if faults:
            raise ConfigError("the configuration is not valid:" + "".join(f"\n  {fault}" for fault in faults))
        return config


# -- the keys ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ConfigKey:
    """One key, for error messages and for the reference.

    Args:
        name: The dotted name, as in ``--set``.
        variable: The environment variable.
        default: The default value.
        allowed: A description of the allowed values.
        description: The meaning of the key.
        choices: The allowed values of an enumerated key; empty for any other.
    """

    name: str
    variable: str
    default: Any
    allowed: str
    description: str
    choices: tuple[str, ...]


def config_keys(lanes: Sequence[str] = (_ANY_LANE,)) -> list[ConfigKey]:
    """Return every key of the configuration, in the order of its tables.

    Args:
        lanes: Names of lanes whose keys to return; by default the keys of a lane are returned once, as
            ``lanes.NAME.*``.
    """
    return [key for path, model in _tables(lanes).items() for key in _keys_of(path, model)]


def _tables(lanes: Sequence[str]) -> dict[KeyPath, type[_Section]]:
    """Return the tables that have keys, by path."""
    tables: dict[KeyPath, type[_Section]] = {}
    for name, field in EngineConfig.model_fields.items():
        model = field.annotation
        if model is LanesConfig:
            tables |= {(name, lane): LaneConfig for lane in lanes}
        elif isinstance(model, type) and issubclass(model, _Section):
            tables[name,] = model
    return tables


def _keys_of(table: KeyPath, model: type[_Section]) -> Iterator[ConfigKey]:
    schemas = _schemas(model)
    for name, field in model.model_fields.items():
        path = (*table, name)
        yield ConfigKey(
            ".".join(path),
            ENV_PREFIX + "__".join(path).upper(),
            None if field.is_required() or field.default_factory is not None else field.default,
            _allowed(schemas[name]),
            field.description or "",
            _choices(field.annotation),
        )


@functools.cache
def _schemas(model: type[_Section]) -> dict[str, Any]:
    schemas: dict[str, Any] = model.model_json_schema()["properties"]
    return schemas


def _keys_for(settings: Sequence["_Setting"]) -> dict[KeyPath, ConfigKey]:
    """Return the keys of a configuration with these settings, including the lanes that they name."""
    lanes = dict.fromkeys((*LANE_MODES, *(s.lane for s in settings if s.lane is not None)))
    return {tuple(key.name.split(".")): key for key in config_keys([*lanes])}


def _is_table(path: KeyPath) -> bool:
    """Return whether ``path`` is a table of the configuration, for ``[lanes.NAME]`` with any valid name."""
    if len(path) == 2 and path[0] == "lanes":
        return re.fullmatch(_LANE_NAME, path[1]) is not None
    return len(path) < 2 and (not path or path[0] in EngineConfig.model_fields)


def _choices(annotation: Any) -> tuple[str, ...]:
    """Return the values of a ``Literal``, also of ``Literal | None``."""
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    return next((get_args(a) for a in get_args(annotation) if get_origin(a) is Literal), ())


def _allowed(schema: Mapping[str, Any]) -> str:
    """Return a description of the values that a JSON schema allows."""
    if "allowed" in schema:
        return str(schema["allowed"])
    if "anyOf" in schema:
        return _allowed(schema["anyOf"][0])  # the other branch is null, the default
    if "enum" in schema:
        return _one_of(schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    if schema["type"] == "array":
        kind = "a list of one or more" if schema.get("minItems") else "a list"
        return f"{kind}, each {_allowed(schema['items'])}"
    words = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
    text = words.get(schema["type"], _TEXT)
    if "minimum" in schema:
        text += f" from {_number(schema['minimum'])}"
        text += f" to {_number(schema['maximum'])}" if "maximum" in schema else " up"
    if "exclusiveMinimum" in schema:
        text += f" above {schema['exclusiveMinimum']:g}"
    if "exclusiveMaximum" in schema:
        text += f", below {schema['exclusiveMaximum']}"
    return text


def _one_of(values: Sequence[str]) -> str:
    return ", ".join(values[:-1]) + f" or {values[-1]}"


def _number(bound: float) -> str:
    """Return a bound as a string; some versions of pydantic give 0 and others 0.0."""
    return str(int(bound)) if bound == int(bound) else str(bound)


# -- the sources ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Setting:
    path: KeyPath
    value: Any
    source: str
    variable: str | None = None

    @property
    def lane(self) -> str | None:
        """The lane that the setting belongs to, by a key or as an empty table; None if there is none."""
        if len(self.path) < 2 or self.path[0] != "lanes" or not _is_table(self.path[:2]):
            return None
        return self.path[1] if len(self.path) > 2 or self.is_empty else None

    @property
    def is_empty(self) -> bool:
        """Whether it is the empty table of a lane, which still declares the lane."""
        return len(self.path) == 2 and _is_table(self.path) and self.value == {}


def _flatten(path: KeyPath, value: Any, source: str, variable: str | None = None) -> Iterator[_Setting]:
    """Yield a setting for every key in ``value``; an unknown table counts as one key."""
    if isinstance(value, dict) and _is_table(path) and (value or len(path) < 2):
        for key, inner in value.items():
            yield from _flatten((*path, key), inner, source, variable)
    else:
        yield _Setting(path, value, source, variable)


def _from_file(path: Path | None) -> Iterator[_Setting]:
    if path is None:
        return
    try:
        data = read_file(path)
        document = tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path} is not UTF-8 text (at line {line})") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"the configuration file {path} cannot be read: {reason}") from None
    for setting in _flatten((), document, str(path)):
        value = setting.value
        if setting.path in _PATHS and isinstance(value, str):
            here = path.parent / value
            if value and os.path.exists(here):  # noqa: PTH110  Path.exists raises without permission
                yield _Setting(setting.path, str(here), setting.source)
                continue
        yield setting


def _from_env(env: Mapping[str, str], faults: list[str]) -> Iterator[_Setting]:
    seen: dict[str, str] = {}
    for variable, text in sorted(env.items()):
        name = variable.upper()
        if not name.startswith(ENV_PREFIX) or name in RESERVED_VARIABLES:
            continue
        if name in seen:
            faults.append(f"{variable} and {seen[name]} are both set (environment): keep one of them")
        seen[name] = variable
        # A lane name may contain "__": the part between the first and the last "__" is the name.
        table, _, key = name.removeprefix(ENV_PREFIX).lower().rpartition("__")
        path = (*table.split("__", 1), key) if table else (key,)
        yield from _flatten(path, _parse(text), f"environment variable {variable}", variable)


def _from_overrides(overrides: Sequence[str], source: str, faults: list[str]) -> Iterator[_Setting]:
    for override in overrides:
        key, _, text = override.partition("=")
        path = tuple(part.strip() for part in key.split("."))
        if "=" in override and all(path):
            yield from _flatten(path, _parse(text), source)
        else:
            faults.append(f"{override!r} ({source}): not of the form key=value")


def _tree(settings: Mapping[KeyPath, _Setting]) -> dict[str, Any]:
    """Return the settings as nested tables, with lanes in the order of their first mention."""
    tree: dict[str, Any] = {}
    for path, setting in settings.items():
        table = tree
        for key in path if setting.is_empty else path[:-1]:
            table = table.setdefault(key, {})
        if not setting.is_empty:
            table[path[-1]] = setting.value
    return tree


def _parse(text: str) -> Any:
    """Return ``text`` parsed as a TOML value, or the stripped text if it is not valid TOML."""
    try:
        document = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):
        return text.strip()
    return document["value"] if document.keys() == {"value"} else text.strip()


# -- the faults ----------------------------------------------------------------------------------


def _unknown(setting: _Setting, keys: Mapping[KeyPath, ConfigKey]) -> str:
    """Return the error line for a setting that is not in ``keys``."""
    path, name = setting.path, ".".join(part or '""' for part in setting.path)
    known = [key.name for key in keys.values()]
    tables = sorted({key.rpartition(".")[0] for key in known})
    same_tail = [key for key in known if key.rpartition(".")[2] == path[-1]]
    if path[0] == "lanes" and len(path) > 1 and not _is_table(path[:2]):
        return (
            f"lanes.{path[1]} ({setting.source}): not a valid lane name; a name begins with a letter and"
            " contains only the letters a to z, digits and underscores"
        )
    is_lane = len(path) == 2 and not same_tail  # lanes.runner has no lane name
    if _is_table(path) and (is_lane or len(path) < 2):
        lanes = path[1:] or (_ANY_LANE,)
        own = ", ".join(k.name for k in config_keys(lanes) if k.name.startswith(f"{name}."))
        return f"{name} ({setting.source}): a table, not a key; its keys are {own}"
    if setting.variable is not None:
        variables = {key.variable for key in keys.values()} | RESERVED_VARIABLES
        near = did_you_mean(setting.variable.upper(), sorted(variables))
    else:
        names = tables if isinstance(setting.value, dict) else known
        near = did_you_mean(name, same_tail or names) or next(iter(same_tail), None)
    all_tables = ", ".join(".".join(table) for table in sorted(_tables([_ANY_LANE])))
    hint = f"did you mean {near}?" if near else f"the tables are {all_tables}"
    return f"{name} ({setting.source}): unknown key; {hint}"


def _render(
    error: ValidationError,
    settings: Mapping[KeyPath, _Setting],
    keys: Mapping[KeyPath, ConfigKey],
) -> Iterator[str]:
    """Yield one line for each error of pydantic: key, value, source, allowed values."""
    for fault in error.errors(include_url=False):
        if fault["type"] == "too_short" and fault["input"]:
            continue  # pydantic does not count invalid items; they have lines of their own
        if fault["type"] == "default_factory_not_called":
            continue  # the fault is in the key that the default depends on
        if fault["type"] == "missing":
            yield _missing_mode(fault["loc"][1], settings)
            continue
        context = fault.get("ctx", {})
        loc = context.get("path", fault["loc"])
        path = next(path for path in keys if path == loc[: len(path)])
        key = keys[path]
        inner = "".join(f"[{index}]" for index in loc[len(path) :])
        value = context.get("value", fault["input"])
        near = did_you_mean(value, key.choices) if isinstance(value, str) else None
        takes = f"expected {key.allowed}" + (f"; did you mean {near}?" if near else "")
        if key.allowed == _TEXT and not isinstance(value, str):
            takes += "; put it in quotes"
        if fault["type"] == "lane_mode":
            takes = fault["msg"]
        yield f"{key.name}{inner} = {_show(value)} ({settings[path].source}): {takes}"


def _missing_mode(lane: Any, settings: Mapping[KeyPath, _Setting]) -> str:
    """Return the error line for a lane without a mode, the only required key."""
    source = next(s.source for path, s in settings.items() if path[:2] == ("lanes", lane))
    near = did_you_mean(lane, LANE_MODES)
    hint = f"; or did you mean lanes.{near}?" if near else ""
    return f"lanes.{lane}.mode ({source}): not set; set it to {_one_of(LANE_MODES)}{hint}"


def _show(value: Any) -> str:
    """Return a value as one short string, with booleans as TOML spells them."""
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value) if isinstance(value, str) else reprlib.repr(value)
    except ValueError:  # an int with more digits than Python converts
        return f"a very large {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."
