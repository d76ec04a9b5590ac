"""`lay_out_memory`: the memory that all lanes share, sized by the configuration, the models and the machine.

Does not: allocate the static inputs of a lane; its registry does.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from graphpact.attention import Limits
from graphpact.errors import ConfigError
from graphpact.ranks import RankLayout
from graphpact_engine.config import EngineConfig
from graphpact_engine.model_checks import ModelSpec
from graphpact_engine.plans import ModelName
from graphpact_engine.pools import KVCache, KVLayerShape, PagePool, RequestPool
from graphpact_engine.ranks.processes import EngineRanks, local_ranks
from graphpact_engine.selection import draft_limits

_MEMORY_SHARE = {"cuda": 0.8, "cpu": 0.5}  # default share of free memory for the KV cache


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory that all lanes share.

    Args:
        limits: The largest counts of all lanes. Its context has room for drafts after the longest sequence.
        max_model_len: Tokens of the longest sequence, prompt and output.
        num_reserved: KV slots that a decode step reserves for each request.
        requests: The request rows.
        pages: The pages of KV slots.
        kv_cache: The KV cache.
        shadow: The cache on which verification runs steps again; None without verification.
    """

    limits: Limits
    max_model_len: int
    num_reserved: int
    requests: RequestPool
    pages: PagePool
    kv_cache: KVCache
    shadow: KVCache | None


def lay_out_memory(
    config: EngineConfig, specs: Mapping[ModelName, ModelSpec], ranks: EngineRanks | None = None
) -> Memory:
    """Allocate request rows, KV pages and the KV cache: the draft model's layers after the target's.

    Ranks that step together get equally many pages, as many as the rank with the least memory can have.

    Raises:
        ConfigError: A limit exceeds that of a model, or the KV cache does not fit in memory.
    """
    engine, spec = config.engine, specs["target"]
    device, draft = spec.device, draft_limits(config)
    needed = engine.max_num_seqs * draft.num_draft_tokens
    if engine.max_num_batched_tokens < needed:
        each = "one token per request"
        if draft.num_draft_tokens > 1:
            each = f"{draft.num_draft_tokens} tokens per request (speculative.num_draft_tokens)"
        raise ConfigError(
            f"engine.max_num_batched_tokens is {engine.max_num_batched_tokens}, engine.max_num_seqs is"
            f" {engine.max_num_seqs}; a decode step has {each}",
            hint=f"set engine.max_num_batched_tokens to {needed} or more",
        )
    if engine.max_prefill_chunk is not None and engine.max_prefill_chunk > engine.max_num_batched_tokens:
        raise ConfigError(
            f"engine.max_prefill_chunk is {engine.max_prefill_chunk}; a step has at most"
            f" {engine.max_num_batched_tokens} tokens (engine.max_num_batched_tokens)",
            hint="lower engine.max_prefill_chunk, or raise engine.max_num_batched_tokens",
        )
    cached = {s.cache_layer: s for each in specs.values() for s in each.layers}  # frozen KV adds none
    shapes = [
        KVLayerShape(s.num_kv_heads, s.head_dim, s.v_head_dim, s.kv_lora_rank is not None)
        for _, s in sorted(cached.items())
    ]
    per_slot = spec.dtype.itemsize * sum(s.width for s in shapes)
    budget = _kv_budget(engine.kv_cache_memory_gib, device)
    affordable = budget // (per_slot * engine.page_size) - 1  # page 0 is scratch
    if ranks is not None:  # they may have other layers, and other free memory
        affordable = ranks.lowest(affordable)
        budget = min(budget, (affordable + 1) * per_slot * engine.page_size)
    num_reserved = max(draft.num_draft_tokens, draft.num_steps * draft.topk)
    max_model_len = _context_len(
        engine.max_model_len,
        {name: each.max_model_len for name, each in specs.items() if each.max_model_len is not None},
        max(affordable, 1) * engine.page_size - num_reserved + 1,
    )
    if max_model_len <= num_reserved > 1:
        raise ConfigError(
            f"a draft takes {num_reserved} tokens of a context of {max_model_len}",
            hint="lower speculative.num_steps, topk or num_draft_tokens, or raise engine.max_model_len",
        )
    layout = ranks.layout if ranks is not None and ranks.is_sharded else RankLayout()
    limits = Limits(
        max_bs=layout.padded_rows(engine.max_num_seqs),
        max_num_tokens=layout.padded_rows(engine.max_num_batched_tokens),
        max_context_len=max_model_len + num_reserved - 1,
        page_size=engine.page_size,
    )
    num_pages = engine.num_pages or min(engine.max_num_seqs * limits.max_pages_per_request, affordable)
    if not 1 <= num_pages <= affordable:
        raise ConfigError(
            f"a KV cache of {num_pages} pages of {engine.page_size} tokens needs"
            f" {(num_pages + 1) * per_slot * engine.page_size / 2**30:.2f} GiB;"
            f" {budget / 2**30:.2f} GiB are available for it on {device}",
            hint="lower engine.num_pages, or raise engine.kv_cache_memory_gib",
        )
    pages = PagePool(num_pages, engine.page_size)
    kv_cache = KVCache(pages.num_slots, shapes, spec.dtype, device)
    return Memory(
        limits,
        max_model_len,
        num_reserved,
        RequestPool(engine.max_num_seqs, limits.max_context_len, device),
        pages,
        kv_cache,
        kv_cache.clone() if config.verify.replay_against_eager else None,
    )


def _context_len(asked: int | None, positions: Mapping[ModelName, int], affordable: int) -> int:
    """Return the maximum sequence length: ``asked``, or the models' number of positions if memory allows it.

    Args:
        asked: ``engine.max_model_len``.
        positions: The number of positions of each model for which it is known.
        affordable: The number of tokens that a KV cache has room for in memory.
    """
    if asked is None:
        if "target" not in positions:
            raise ConfigError(
                "the checkpoint's config.json does not say how many positions the model has",
                hint="set engine.max_model_len to the longest sequence that it is made for",
            )
        return min(*positions.values(), affordable)
    for name, most in positions.items():
        if asked > most:
            model = "the model" if name == "target" else "the draft model"
            raise ConfigError(
                f"engine.max_model_len is {asked}; {model} has {most} positions",
                hint=f"set it to {most} or less, or leave it out",
            )
    if asked > affordable:
        raise ConfigError(
            f"engine.max_model_len is {asked}; there is memory for a KV cache of {affordable} tokens",
            hint=f"set it to {affordable} or less, or raise engine.kv_cache_memory_gib",
        )
    return asked


def _kv_budget(gib: float | None, device: torch.device) -> int:
    if gib is not None:
        return int(gib * 2**30)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = _free_host_memory() // local_ranks()
    return int(free * _MEMORY_SHARE[device.type])


def _free_host_memory() -> int:
    """Return the bytes of free host memory; all host memory, or 8 GiB, if the system does not report it."""
    for name in ("SC_AVPHYS_PAGES", "SC_PHYS_PAGES"):  # macOS has only the second
        if name in getattr(os, "sysconf_names", {}):
            return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
    return 8 * 2**30  # Windows has neither
