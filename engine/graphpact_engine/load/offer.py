"""`GraphpactOffer` and `GraphpactLoad`: this engine, found in the group ``graphpact.engines``.

Does not: import torch, before an engine is started.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from graphpact.engines import EngineOffer, EngineStart, Feature, LoadedEngine, LoadOffer
from graphpact.errors import UsageError
from graphpact_engine.config import EngineConfig

_MAX_LEN = 256
_STARVED = 112  # tokens of a cache that holds one long request, or a few short ones
_STEPS = 3  # tokens of a draft


class GraphpactOffer(EngineOffer):
    """The engine of graphpact."""

    name: ClassVar[str] = "graphpact"

    def unavailable(self) -> str | None:
        """Return None: it runs wherever it is installed."""
        return None

    def under_load(self) -> LoadOffer:
        """Return how it runs under generated load."""
        return GraphpactLoad()


class GraphpactLoad(LoadOffer):
    """Features of this engine's configuration."""

    draft_models: ClassVar[tuple[str, ...]] = ("eagle", "eagle_tree", "frozen_kv_mtp")

    def features(self) -> Sequence[Feature]:
        """Return the features."""
        return (
            Feature(name="capture_sizes", values=((1, 2, 4, 8), (2, 4), (1, 8), (3, 7, 12))),
            Feature(name="prefill", values=("eager", "breakable_cuda_graph", "piecewise_cuda_graph")),
            Feature(name="token_counts", values=((16, 32, 64, 128), (8, 24, 40), (64,))),
            Feature(name="page_size", values=(16, 1, 4, 32)),
            Feature(name="chunk", values=(256, 16, 24, 40)),
            Feature(name="mixed", values=(False, True)),
            Feature(name="async_scheduling", values=(False, True)),
            Feature(name="backend", values=("flashinfer", "fa3")),
            Feature(name="kernels", values=("portable", "compiled")),
            Feature(name="max_requests", values=(8, 3, 12)),
            Feature(name="cache", values=("plenty", "starved")),
            Feature(name="drafts", values=("none", *self.draft_models)),
        )

    def refused(self, how: EngineStart) -> str | None:
        """Return why the engine refuses a combination, or None."""
        choice = how.choice
        if choice["drafts"] != "none":
            if choice["mixed"]:
                return "drafts exclude mixed steps"
            if choice["async_scheduling"]:
                return "drafts exclude asynchronous scheduling"
        if choice["prefill"] != "eager" and not _token_counts(choice):
            return "no captured number of tokens fits into a step of prompts"
        return None

    def prepare(self) -> None:
        """Import the engine."""
        import graphpact_engine.load.engine  # noqa: F401, PLC0415  seconds

    def start(self, how: EngineStart) -> LoadedEngine:
        """Start the engine in this process."""
        from graphpact_engine.load.engine import StartedEngine  # noqa: PLC0415  seconds

        return StartedEngine(config_of(how))


def config_of(how: EngineStart) -> EngineConfig:
    """Return the configuration of a start.

    Raises:
        UsageError: A key of ``how.settings`` or a value is invalid, or the folder of a draft model is
            missing.
    """
    choice, drafts = how.choice, "none" if how.is_eager else how.choice["drafts"]
    page, most, tokens = choice["page_size"], choice["max_requests"], _most_tokens(choice)
    graphs = [] if how.is_eager else ["decode"] if drafts == "none" else ["draft", "verify"]
    captured = graphs if how.is_eager or choice["prefill"] == "eager" else ["prefill", *graphs]
    keys: dict[str, Any] = {
        "model.path": str(how.model),
        "model.dtype": "float32",
        "engine.device": "cpu",
        "engine.attention_backend": choice["backend"],
        "engine.kernel_provider": choice["kernels"],
        "engine.max_num_seqs": most,
        "engine.max_num_batched_tokens": tokens,
        "engine.max_prefill_chunk": choice["chunk"],
        "engine.max_model_len": _MAX_LEN,
        "engine.page_size": page,
        "engine.mixed": choice["mixed"] and not how.is_eager,
        "engine.async_scheduling": choice["async_scheduling"] and not how.is_eager,
        "engine.num_threads": 1,
        "verify.replay_against_eager": 1.0 if graphs else 0.0,
        "lanes.prefill.runner": choice["prefill"] if "prefill" in captured else "eager",
        **{f"lanes.{name}.strict": how.is_strict for name in captured},
        **{
            f"lanes.{name}.batch_sizes": [size for size in choice["capture_sizes"] if size <= most]
            for name in graphs
        },
    }
    if how.is_eager:
        keys["lanes.decode.runner"] = "eager"
    elif choice["cache"] == "starved":
        keys["engine.num_pages"] = -(-_STARVED // page)
    if "prefill" in captured:
        keys["lanes.prefill.token_counts"] = _token_counts(choice)
    if drafts != "none":
        if drafts not in how.drafts:
            raise UsageError(
                f"drafts of {drafts} need a draft model", hint=f"give its folder: --draft {drafts}=DIR"
            )
        keys |= {
            "speculative.algorithm": drafts.removesuffix("_tree"),
            "speculative.draft_model": str(how.drafts[drafts]),
            "speculative.num_steps": _STEPS,
            "speculative.topk": 2 if drafts == "eagle_tree" else 1,
        }
    keys |= how.settings
    return EngineConfig.load(env={}, overrides=[f"{key}={json.dumps(value)}" for key, value in keys.items()])


def _most_tokens(choice: Mapping[str, Any]) -> int:
    """Return the most tokens of a step: a chunk, and a decode or a verification of each request."""
    drafts = choice["drafts"]
    width = 1 if drafts == "none" else _STEPS * (2 if drafts == "eagle_tree" else 1) + 1
    most: int = choice["chunk"] + choice["max_requests"] * width
    return most


def _token_counts(choice: Mapping[str, Any]) -> list[int]:
    """Return the captured numbers of tokens that fit into a step with prompt tokens."""
    # Such a step has one prompt at least, which does not decode.
    most = choice["chunk"] + (choice["max_requests"] - 1 if choice["mixed"] else 0)
    return [count for count in choice["token_counts"] if count <= most]
