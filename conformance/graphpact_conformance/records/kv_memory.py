"""`KvMemory`: the KV cache of a rig, and the copies of it that experiments compare.

A low cache is an ordinary tensor for each layer. The last slots of a high cache lie beyond `draws.lanes.HIGH`
elements. Most of it is unallocated: the operating system gives memory only to pages that are written. So only
some slots are filled, copied and compared: scratch, the pages that requests may have, and one unowned page.
The others hold zeros.

Does not: know batches.
"""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace

import torch

from graphpact.attention import kv_tensors
from graphpact.tensors import same
from graphpact_conformance.draws.lanes import Config
from graphpact_conformance.draws.problems import Problem
from graphpact_conformance.records.steps import NAN

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # the module has it since Python 3.13


class KvMemory:
    """The KV cache of one lane.

    Args:
        config: The configuration of the lane.
        device: Its device.

    Attributes:
        kv: The cache as backends get it: ``k`` and ``v``, for each layer ``[slots, heads, width]``.
        slots: ``[n]`` int64 on the host: the slots that are filled, copied and compared, scratch first.
    """

    def __init__(self, config: Config, device: torch.device) -> None:
        self.config, self._device = config, device
        page = config.page_size
        unowned = config.num_pages // 2 if config.high else config.num_pages - 1
        used = [0, *config.pages, unowned]
        in_pages = torch.tensor(sorted({*used}), dtype=torch.int64)[:, None] * page + torch.arange(page)
        self.slots = in_pages.flatten()
        total = config.num_pages * page
        layers, rank = config.layers, config.heads.kv_lora_rank
        k = [_cache(config, device, total, layer.num_kv_heads, layer.head_dim) for layer in layers]
        if rank is None:
            v = [_cache(config, device, total, layer.num_kv_heads, layer.v_head_dim) for layer in layers]
        else:
            v = [each[..., :rank] for each in k]
        self.kv = SimpleNamespace(k=k, v=v)
        self._at = self.slots.to(device)
        self._rows = {slot: row for row, slot in enumerate(self.slots.tolist())} if config.high else None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors by name, whole."""
        return kv_tensors(self.kv)

    def contents(self) -> dict[str, torch.Tensor]:
        """Return copies ``[n, heads, width]`` on the host of the slots `slots`, by tensor."""
        return {
            name: (tensor[self._at] if self.config.high else tensor.clone()).cpu()
            for name, tensor in self.tensors().items()
        }

    def copy(self) -> SimpleNamespace:
        """Return a copy of the cache on the device, with only the slots in `slots`."""
        k = [each[self._at] for each in self.kv.k]
        rank = self.config.heads.kv_lora_rank
        v = [each[self._at] for each in self.kv.v] if rank is None else [each[..., :rank] for each in k]
        return SimpleNamespace(k=k, v=v)

    def load(self, problem: Problem) -> None:
        """Fill scratch and the cached keys of a problem with random numbers, and all other slots with NaN."""
        live = torch.tensor([*range(self.config.page_size), *problem.cached_slots], device=self._device)
        self.fill(NAN)
        caches = [*self.tensors().values()]
        kinds = tuple(((len(live), *cache.shape[1:]), cache.dtype) for cache in caches)
        for cache, random in zip(caches, _random(problem.seed, kinds), strict=True):
            cache[live] = random.to(self._device)

    def fill(self, value: float, *, keep: Sequence[int] | range = ()) -> None:
        """Write a number into all of `slots` except ``keep``."""
        kept = {*keep}
        at = self.slots[[s not in kept for s in self.slots.tolist()]].to(self._device) if kept else self._at
        for cache in self.tensors().values():
            if not kept and not self.config.high:
                cache.fill_(value)
            else:
                cache.index_fill_(0, at, value)

    def spoil_scratch(self, value: float) -> None:
        """Write a number into the scratch page."""
        for cache in self.tensors().values():
            cache[: self.config.page_size] = value

    def scratch_rows(self, name: str) -> int:
        """Return the number of the first rows of a tensor of `contents` that are scratch."""
        del name
        return self.config.page_size

    def slot_at(self, row: int) -> int:
        """Return the KV slot of a row of `contents`."""
        return int(self.slots[row])

    def differs(self, name: str, actual: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Return a mask of the elements outside scratch that are not bitwise those of the right contents.

        Args:
            name: The tensor, as in `contents`.
            actual: Its contents, ``[n, heads, width]``.
            right: The right ones, in the same dtype.
        """
        found = ~same(actual, right)
        found[: self.scratch_rows(name)] = False
        return found

    def place(self, name: str, rows: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Return rows of a tensor of `contents` in words, and the KV slots that they are."""
        slots = tuple(map(self.slot_at, rows))
        return f"{name} in KV slots {[*slots[:8]]}", slots

    def right_beside_kv(
        self, problem: Problem, caches: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Return the right contents of memory besides keys and values after a step; empty in this class.

        Args:
            problem: The step, with rows of ``caches`` in place of KV slots.
            caches: The right keys and values after it, as in `contents`.
        """
        del problem, caches
        return {}

    def compact(self, problem: Problem) -> Problem:
        """Return a problem with the rows of `contents` in place of KV slots, for the oracle."""
        rows = self._rows
        if rows is None:
            return problem
        return replace(
            problem,
            requests=[
                replace(
                    request,
                    cached=[rows[slot] for slot in request.cached],
                    table=[rows[slot] for slot in request.table],
                    tokens=[replace(t, slots=[rows[slot] for slot in t.slots]) for t in request.tokens],
                )
                for request in problem.requests
            ],
        )


@lru_cache(maxsize=64)  # most batches are loaded several times
def _random(seed: int, kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> list[torch.Tensor]:
    """Return normally distributed numbers, a tensor for each shape and dtype; equal seeds give equal ones."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape, dtype in kinds]


def _cache(config: Config, device: torch.device, slots: int, heads: int, width: int) -> torch.Tensor:
    """Return ``[slots, heads, width]``: NaN, or in a high cache holes."""
    if not config.high:
        return torch.full((slots, heads, width), NAN, dtype=config.dtype, device=device)
    size = slots * heads * width * config.dtype.itemsize
    holes = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    return torch.frombuffer(holes, dtype=config.dtype).view(slots, heads, width)
