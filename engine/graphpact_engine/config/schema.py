"""The tables of a configuration, their keys, types and defaults.

Does not: read a source (`graphpact_engine.config.sources` does), look up plugins or check devices; the engine
does both when it is built.
"""

from collections.abc import ItemsView
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, RootModel, Strict, model_validator
from pydantic_core import PydanticCustomError

from graphpact.errors import named_options

ProviderName = Literal["auto", "native", "compiled", "portable"]
"""As `graphpact.attention.ProviderName`, which would import torch when a key is completed."""
LaneMode = Literal["decode", "prefill", "draft_prefill", "draft", "verify", "draft_extend"]
LANE_MODES: tuple[LaneMode, ...] = get_args(LaneMode)
"""The modes of lanes. A lane named after a mode has that mode. All but the first two are for
[speculative]."""
LANE_NAME = r"^[a-z][a-z0-9_]*$"
"""The pattern of the name of a lane."""


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
LaneName = Annotated[str, Field(pattern=LANE_NAME)]
Share = Annotated[float, Field(ge=0, le=1)]


class Section(BaseModel):
    """Base class of one table of the configuration: frozen, and unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Suggest the nearest key for an unknown one if a section is built in Python, as `load` does."""
        super().__pydantic_init_subclass__(**options)
        named_options(cls)


class ModelConfig(Section):
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


class EngineSection(Section):
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
        description="Whether a decode step is scheduled and launched while the step before it runs. It takes"
        " its input tokens from the device, and the host reads tokens one step late. auto: true on a GPU"
        " without [speculative]. The generated tokens are the same.",
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
        " outermost. Verification and the observer of a strict lane wrap all of them.",
    )


class LaneConfig(Section):
    """``[lanes.NAME]``: one lane."""

    mode: LaneMode = Field(
        description="The batches that the lane runs. decode: one new token per request; prefill: prompts."
        " With [speculative], instead of decode: draft: the draft model continues; verify: the target reads"
        " the drafts; draft_prefill and draft_extend: the draft model reads prompts and accepted tokens. A"
        " lane named after a mode has that mode; any other lane must set it."
    )
    runner: Name | None = Field(
        default=None,
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
    when the engine plans its lanes.
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
        """Set the modes that follow from names, and sort by mode."""
        if not isinstance(tables, dict):
            return tables
        lanes = {
            name: {"mode": name, **lane} if name in LANE_MODES and isinstance(lane, dict) else lane
            for name, lane in tables.items()
        }
        modes = {
            name: lane.get("mode") if isinstance(lane, dict) else getattr(lane, "mode", None)
            for name, lane in lanes.items()
        }
        for name, mode in modes.items():
            if name in LANE_MODES and mode in LANE_MODES and mode != name:
                raise PydanticCustomError(
                    "lane_mode",
                    "a lane named {name} must have the mode {name}; give the lane another name",
                    {"name": name, "path": ("lanes", name, "mode"), "value": mode},
                )
        places = {name: LANE_MODES.index(mode) for name, mode in modes.items() if mode in LANE_MODES}
        return dict(sorted(lanes.items(), key=lambda item: places.get(item[0], -1)))


class VerifyConfig(Section):
    """``[verify]``: the checks of replays."""

    pact: Literal["always", "sampled", "off"] = Field(
        default="always", description="The replays whose pact is checked; sampled: one in 100."
    )
    replay_against_eager: Share = Field(
        default=0.0,
        description="Share of the replays that are also run eagerly and compared.",
    )


class SpeculativeConfig(Section):
    """``[speculative]``: drafts, mostly by a small model; their lanes take the place of the decode lanes."""

    algorithm: Name | None = Field(
        default=None, description="The speculation algorithm, such as eagle. Default: no speculation."
    )
    draft_model: Name | None = Field(
        default=None,
        description="Directory of the draft model; a relative path as that of model.path. Leave it out if the"
        " algorithm drafts without a model.",
    )
    num_steps: int = Field(default=3, ge=1, le=64, description="Length of a draft in tokens.")
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


class ParallelConfig(Section):
    """``[parallel]``: the ranks, one process each, started by ``torchrun``: data * pipeline * tensor."""

    tensor: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Ranks that split the weights of every layer among them, by the plan of transformers.",
    )
    attention_data: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Groups of the tensor ranks that have requests and a KV cache of their own, and split"
        " only attention among their ranks; all other layers gather the tokens of all groups. It divides"
        " parallel.tensor.",
    )
    data: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Copies of the model, each on pipeline * tensor ranks. Requests are dealt out to them in"
        " turn.",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=2**16,
        description="Stages of a copy, on tensor ranks each. Each stage has a part of the layers, and passes"
        " hidden states to the next one.",
    )
    sequence: bool = Field(
        default=False,
        description="Whether each rank keeps only its share of the tokens between the layers, as it does"
        " with attention_data above 1.",
    )
    timeout: float = Field(
        default=60.0,
        gt=0,
        le=2**20,
        description="Seconds after which a rank that waits for another one ends with an error.",
    )
    start_timeout: float = Field(
        default=1800.0,
        gt=0,
        le=2**20,
        description="The same for the start, until all ranks have loaded their weights.",
    )

    @property
    def num_ranks(self) -> int:
        """The number of processes."""
        return self.data * self.pipeline * self.tensor


class ConfigTables(Section):
    """The configuration: ``model``, ``engine``, ``parallel``, ``lanes``, ``speculative`` and ``verify``."""

    model: ModelConfig = ModelConfig()
    engine: EngineSection = EngineSection()
    parallel: ParallelConfig = ParallelConfig()
    lanes: LanesConfig = LanesConfig({})
    speculative: SpeculativeConfig = SpeculativeConfig()
    verify: VerifyConfig = VerifyConfig()
