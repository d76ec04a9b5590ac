"""The plain values that a backend of SGLang gets in place of a model runner.

A backend reads a few dozen attributes of its model runner. :class:`Given` holds exactly those that are listed
here. If a new release reads another one, an error names its path, and no default is used.
:func:`model_runner` returns such an object with the sizes of a lane. A factory may add to it before it
constructs a backend.

Does not: import SGLang, or hold objects that only SGLang can make, such as its configuration and pools.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from graphpact_adapters.needs import assume_missing
from graphpact_conformance.records.raised import NeedsValueError

Kind = Literal["mha", "mla"]


@dataclass(frozen=True)
class ModelRunnerSizes:
    """The sizes of a lane of the suite, as SGLang counts them.

    Args:
        kind: What the KV cache holds: keys and values of heads, or latents.
        num_heads: Query heads.
        num_kv_heads: Heads of keys and values.
        head_dim: Size of a key.
        v_head_dim: Size of a value.
        kv_lora_rank: Size of a latent; None for heads.
        dtype: Dtype of queries and KV cache.
        page_size: KV slots in a page.
        context_len: Length of the longest sequence, in tokens. Drafts may follow it, up to the columns of
            ``req_to_token``.
        max_requests: The most requests of a step.
        width: Tokens of a request in a step of the lane's graphs.
        num_draft_tokens: Tokens of a request in target verify and draft extend; None without speculation.
        num_steps: Draft steps in SGLang's count, which includes a last one that does not attend; 0 without
            speculation.
        topk: Branches of a draft.
        is_draft_worker: Whether the backend serves the draft model.
        drafts: Whether the lane runs draft decodes of several steps.
        sliding_window: Keys that a query of the layers with a window sees, its own included; None without
            such layers.
    """

    kind: Kind
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    kv_lora_rank: int | None
    dtype: torch.dtype
    page_size: int
    context_len: int
    max_requests: int
    width: int = 1
    num_draft_tokens: int | None = None
    num_steps: int = 0
    topk: int = 1
    is_draft_worker: bool = False
    drafts: bool = False
    sliding_window: int | None = None

    @property
    def slots_per_token(self) -> int:
        """KV slots per token in ``out_cache_loc``: in a draft decode one for each step."""
        return self.num_steps if self.drafts else 1

    def times(self, room: int) -> "ModelRunnerSizes":
        """Return sizes with ``room`` times as many requests."""
        return replace(self, max_requests=self.max_requests * room)


class NotInModelRunnerError(NeedsValueError):
    """A backend read an attribute that it was not given.

    It is not an ``AttributeError``, so ``getattr(runner, name, default)`` and ``hasattr`` raise it too. A
    default would hide that a backend reads a new attribute.
    """


class Given:
    """A strict namespace over plain values. Values may be set later, as a backend does on its runner.

    Args:
        path: The name of the object in errors, for instance ``model_runner.model_config``.
        absent: Attributes that the engine's own object may lack. Reading one raises ``AttributeError``, so
            that ``getattr`` with a default and ``hasattr`` work as they do there.
        values: The attributes.

    Raises:
        NotInModelRunnerError: when an attribute is read that is neither a value nor in ``absent``.

    """

    def __init__(self, path: str, /, *, absent: Collection[str] = (), **values: Any) -> None:
        self.__dict__.update(values, _path=path, _absent=frozenset(absent))

    def __getattr__(self, name: str) -> Any:
        """Raise, because Python calls this only for a name without a value."""
        if name.startswith("__"):  # Python's protocols, such as copying; the values may not be set yet
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        if name in self._absent:
            raise AttributeError(f"{self._path} has no attribute {name!r}")
        there = ", ".join(sorted(key for key in self.__dict__ if not key.startswith("_"))) or "nothing"
        return assume_missing(
            self._path,
            name,
            f"{self._path}.{name} was read, but is not given; given are {there}",
            hint=f"give {self._path} a value for {name!r}, or list it as absent if an engine may lack it",
            error=NotInModelRunnerError,
        )

    def __repr__(self) -> str:
        return f"Given({self._path!r})"


def model_runner(
    sizes: ModelRunnerSizes, req_to_token: torch.Tensor, full_to_swa: torch.Tensor | None = None
) -> Given:
    """Return a strict model runner over plain values, for the constructor of a backend.

    Args:
        sizes: The sizes of the lane.
        req_to_token: ``[rows, positions]`` int32: KV slots of requests; row 0 is all zeros.
        full_to_swa: ``[slots]`` int64: for each KV slot its slot in the pool of layers with a window; None
            without such a pool.
    """
    is_speculative = sizes.num_draft_tokens is not None
    server_args = Given(
        "model_runner.server_args",
        cuda_graph_max_bs=sizes.max_requests,
        device=str(req_to_token.device),
        kv_cache_dtype="auto",
        max_running_requests=sizes.max_requests,
        page_size=sizes.page_size,
        speculative_algorithm="EAGLE" if is_speculative else None,
        speculative_eagle_topk=sizes.topk if is_speculative else None,
        speculative_num_draft_tokens=sizes.num_draft_tokens,
        speculative_num_steps=sizes.num_steps if is_speculative else None,
    )
    latent = sizes.kv_lora_rank
    config = Given(
        "model_runner.model_config",
        attention_arch=sizes.kind,
        context_len=sizes.context_len,
        get_num_kv_heads=lambda tensor_parallel: max(1, sizes.num_kv_heads // tensor_parallel),
        head_dim=sizes.head_dim,
        is_encoder_decoder=False,
        kv_lora_rank=latent,
        num_attention_heads=sizes.num_heads,
        num_key_value_heads=sizes.num_kv_heads,
        qk_rope_head_dim=None if latent is None else sizes.head_dim - latent,
        scaling=sizes.head_dim**-0.5,
        v_head_dim=sizes.v_head_dim,
    )
    return Given(
        "model_runner",
        attn_cp_size=1,
        attention_chunk_size=None,
        device=str(req_to_token.device),
        dtype=sizes.dtype,
        gpu_id=0,
        is_draft_worker=sizes.is_draft_worker,
        kv_cache_dtype=sizes.dtype,
        max_running_requests=sizes.max_requests,
        model_config=config,
        page_size=sizes.page_size,
        req_to_token_pool=Given(
            "model_runner.req_to_token_pool", req_to_token=req_to_token, size=len(req_to_token) - 1
        ),
        server_args=server_args,
        sizes=sizes,
        sliding_window_size=None if sizes.sliding_window is None else sizes.sliding_window - 1,
        use_mla_backend=sizes.kind == "mla",
        **({} if full_to_swa is None else _window_pool(full_to_swa)),
    )


def _window_pool(full_to_swa: torch.Tensor) -> dict[str, Any]:
    """Return the attributes of a model runner with a pool for layers with a window."""

    def translated(slots: torch.Tensor) -> torch.Tensor:
        """Return the slots of the window pool for KV slots."""
        return full_to_swa[slots.long()].to(torch.int32)

    pool: dict[str, Any] = {
        "full_to_swa_index_mapping": full_to_swa,
        "translate_loc_from_full_to_swa": translated,
    }
    names = ("token_to_kv_pool", "token_to_kv_pool_allocator")
    pools = {name: Given(f"model_runner.{name}", absent=(), **pool) for name in names}
    return {"is_hybrid_swa": True, **pools}
