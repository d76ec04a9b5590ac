"""`connect`: joins the processes that ``torchrun`` started, and makes their groups.

    world        all processes; gloo on a CPU, NCCL on a GPU
    step         a replica's ranks, always gloo: the exchange before each step
    stage        the ranks of one stage, always gloo: what they compare in strict lanes
    capture      the same ranks: the exchanges of captures, which may take longer
    tensor       the same ranks, on the device: layers other than attention
    attention    the ranks of one attention group, on the device
    pipeline     one rank of each stage, on the device: hidden states, and tokens back

Does not: start processes, or end them.
"""

import contextlib
import os
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from graphpact.errors import ConfigError
from graphpact.parallel import get_parallel
from graphpact.ranks import RankExchange, RankLayout, RankWatch
from graphpact.ranks.exchange import said_by
from graphpact_engine.config import EngineConfig, ParallelConfig

_POLL = 0.02  # seconds between two looks


@dataclass(frozen=True, slots=True)
class EngineRanks:
    """The ranks of this engine, and the place of this process.

    Args:
        layout: Sizes and places.
        exchange: The exchanges of this replica.
        stage: The exchanges of this stage.
        captures: The same, with the time of the start: ranks compile for different times.
        watch: Names a missing rank.
        tensor: The group ``tensor``.
        attention: The group ``attention``.
        pipeline: The group ``pipeline``.
        config: The table of the configuration.
        store: The store by which the processes met.
    """

    layout: RankLayout
    exchange: RankExchange
    stage: RankExchange
    captures: RankExchange
    watch: RankWatch
    tensor: "dist.ProcessGroup"
    attention: "dist.ProcessGroup"
    pipeline: "dist.ProcessGroup"
    config: ParallelConfig
    store: Any

    @property
    def split_model(self) -> bool:
        """Whether a rank has only a part of the model."""
        return self.layout.tensor * self.layout.pipeline > 1

    @property
    def is_sharded(self) -> bool:
        """Whether each rank keeps only its share of the tokens between layers, which gather them."""
        return self.layout.attention_data > 1 or self.config.sequence

    def serves(self, prompt: int) -> bool:
        """Return whether this rank runs the prompt of an index."""
        return prompt % self.layout.request_groups == self.layout.request_group

    def wait_for_all(self) -> None:
        """Wait until every rank of the replica is here; the time is that of the start.

        Raises:
            RuntimeError: A rank did not come; the message of torch names it.
        """
        timeout = timedelta(seconds=self.config.start_timeout)
        dist.monitored_barrier(self.exchange.group, timeout=timeout, wait_all_ranks=True)

    def wait_for_world(self) -> None:
        """Wait until the ranks of all replicas have called it equally often, however long they take.

        Raises:
            RankError: A rank has failed.
        """
        mine = self.store.add(f"graphpact finished {self.layout.rank}", 1)
        others = [rank for rank in range(self.layout.world) if rank != self.layout.rank]
        while any(self.store.add(f"graphpact finished {rank}", 0) < mine for rank in others):
            self.watch.require_no_failure(others)
            time.sleep(_POLL)

    def lowest(self, number: int) -> int:
        """Return the lowest of the numbers that the ranks of the replica give."""
        return int(min(self.exchange.objects(number)))

    def require_equal(self, what: str, mine: str) -> None:
        """Raise `ConfigError`, on all ranks, unless all ranks of the replica give the same text."""
        texts = self.exchange.objects(mine)
        if len({*texts}) > 1:
            raise ConfigError(
                f"the ranks have different {what}: {said_by(self.exchange.ranks, texts)}",
                hint="give all ranks the same command, files and environment",
            )


def connect(config: EngineConfig, device: torch.device) -> EngineRanks | None:
    """Join the processes of ``[parallel]``; return None for a single process.

    Args:
        config: The configuration.
        device: The device of this process.

    Raises:
        ConfigError: Another number of processes was started than the configuration asks for; or they have
            different configurations.
    """
    asked = config.parallel
    needed, started = asked.num_ranks, _world_size()
    rank = int(os.environ.get("RANK", "0")) if not _is_joined() else dist.get_rank()
    sizes = f"parallel.data {asked.data} x pipeline {asked.pipeline} x tensor {asked.tensor}"
    if started != needed:
        raise ConfigError(
            f"{sizes} need {needed} processes; {started} {'was' if started == 1 else 'were'} started",
            hint=f"torchrun --nproc-per-node {needed} --no-python graphpact generate ..."
            if started == 1
            else "set parallel.tensor, pipeline and data so that their product is the number of processes",
        )
    layout = RankLayout(rank, asked.tensor, asked.data, asked.attention_data, asked.pipeline)
    if needed == 1:
        return None
    timeout = timedelta(seconds=asked.timeout)
    store = _meet(device, timeout)

    def groups(
        of_each: list[list[int]], description: str, backend: str | None = None, seconds: float = asked.timeout
    ) -> Any:
        """Return this rank's group; every process makes every group, in the same order."""
        limit = timedelta(seconds=seconds)
        made = [
            dist.new_group(ranks, timeout=limit, backend=backend, group_desc=description) for ranks in of_each
        ]
        return next(group for group, ranks in zip(made, of_each, strict=True) if rank in ranks)

    exchange = RankExchange(groups(layout.replicas, "step", "gloo"))
    parallel = get_parallel()
    parallel.attn_tp_rank, parallel.attn_tp_size = layout.attention_rank, layout.attention_tensor
    ranks = EngineRanks(
        layout,
        exchange,
        exchange if layout.pipeline == 1 else RankExchange(groups(layout.stages, "stage", "gloo")),
        RankExchange(groups(layout.stages, "capture", "gloo", asked.start_timeout)),
        RankWatch(store, rank, exchange.ranks, grace=min(2.0, asked.timeout)),
        groups(layout.stages, "tensor"),
        groups(layout.attention_groups, "attention"),
        groups(layout.pipelines, "pipeline"),
        config=asked,
        store=store,
    )
    ranks.require_equal("configurations", _settings(config))
    return ranks


def explaining(ranks: EngineRanks | None) -> AbstractContextManager[None]:
    """Return a context in which the failure of a collective names the rank that is missing."""
    return contextlib.nullcontext() if ranks is None else ranks.watch.explaining()


def local_device(device: torch.device) -> torch.device:
    """Return the GPU of this process among those of its machine; other devices unchanged."""
    if str(device) != "cuda" or "LOCAL_RANK" not in os.environ:
        return device
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def local_ranks() -> int:
    """Return how many ranks this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _world_size() -> int:
    if _is_joined():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


def _is_joined() -> bool:
    """Return whether the caller has joined a default process group; some builds of torch have none."""
    joined: Any = getattr(dist, "is_initialized", None)
    return joined is not None and bool(joined())


def _meet(device: torch.device, timeout: timedelta) -> Any:
    """Join the default process group unless the caller did, and return its store."""
    if not _is_joined():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timeout)
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001  torch has no public name for it


def _settings(config: EngineConfig) -> str:
    """Return the configuration as text; the paths may differ between machines."""
    tables = config.model_dump(exclude={"model": {"path"}, "speculative": {"draft_model"}})
    return ", ".join(
        f"{table}.{key}={value}"
        for table, keys in tables.items()
        for key, value in (keys.items() if isinstance(keys, dict) else [("", keys)])
    )
