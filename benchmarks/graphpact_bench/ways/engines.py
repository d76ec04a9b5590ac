"""graphpact's engine as a way: with a decode lane that runs eagerly, or through one kind of graph.

Does not: choose kernels; the attention backend is the configuration's default.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import torch

from graphpact.lane import Lane
from graphpact.plugins import PluginCatalog
from graphpact_bench.timing import Tokens, UnavailableWayError, Written
from graphpact_bench.ways.base import Way, WaySetting, intervals
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.request import Request


def make_engine(
    path: Path,
    device: torch.device,
    max_num_seqs: int,
    *overrides: str,
    observers: Sequence[object] = (),
    catalog: PluginCatalog | None = None,
) -> Engine:
    """Return an engine with as many threads as this process uses.

    Args:
        path: The checkpoint.
        device: The device of the model.
        max_num_seqs: Maximum number of requests in a step.
        *overrides: More of the configuration, ``key=value``.
        observers: Hook wrappers of every lane.
        catalog: The plugins to select from; by default the installed ones.
    """
    options = [
        f"model.path='{path}'",
        f'engine.device="{device}"',
        f"engine.max_num_seqs={max_num_seqs}",
        "engine.max_num_batched_tokens=4096",
        f"engine.num_threads={torch.get_num_threads()}",
        *overrides,
    ]
    config = EngineConfig.load(None, env={}, overrides=options)
    return Engine(config, catalog=catalog, observers=observers)


def require_driver(name: str, device: torch.device) -> None:
    """Check that a graph driver can record on ``device``.

    Raises:
        UnavailableWayError: It cannot, with the driver's reason.
    """
    reason = PluginCatalog.scan().select("graph_driver", name).unavailable(device)
    if reason is not None:
        raise UnavailableWayError(reason)


class EngineWay(Way):
    """The engine with a configuration.

    Args:
        name: Its name in the table.
        setting: What it is built for.
        *overrides: More of the configuration, ``key=value``.
    """

    def __init__(self, name: str, setting: WaySetting, *overrides: str) -> None:
        super().__init__(name)
        self.engine = make_engine(
            setting.path,
            setting.device,
            max(setting.batch_sizes),
            f'model.dtype="{setting.dtype}"',
            f"engine.max_model_len={setting.max_tokens}",
            *overrides,
        )

    @property
    def decode_lane(self) -> Lane:
        """The first lane of the engine, which decodes."""
        return self.engine.lanes[0]

    def write(self, prompts: Tokens, count: int) -> Written:
        """Step the engine until all requests finish; the first step reads the prompts.

        Raises:
            EngineError: A request was not part of every step: the steps are not comparable.
        """
        sampling = SamplingParams(max_new_tokens=count, ignore_eos=True)
        requests: list[Request] = [self.engine.add(prompt, sampling) for prompt in prompts]
        times = [time.perf_counter()]
        while self.engine.scheduler.has_work:
            tokened = self.engine.step()
            times.append(time.perf_counter())
            if len(tokened) != len(prompts):
                raise UnavailableWayError(
                    f"{self.name}: a step gave {len(tokened)} of {len(prompts)} requests a token",
                    hint="shorten the prompts: all of them have to fit in one step",
                )
        first, *steps = intervals(times)
        return Written([request.output_token_ids for request in requests], first, steps)

    def close(self) -> None:
        """Release the graphs."""
        self.engine.close()


def eager(name: str, setting: WaySetting) -> Way:
    """Return the engine without graphs."""
    return EngineWay(name, setting, 'lanes.decode.runner="eager"')


def tape(name: str, setting: WaySetting) -> Way:
    """Return the engine with decode graphs of the tape.

    Raises:
        UnavailableWayError: The device is not a CPU.
    """
    return EngineWay(name, setting, *_graphs("cuda_graph", "tape", setting))


def tape_strict(name: str, setting: WaySetting) -> Way:
    """Return the engine with decode graphs of the strict tape, which is timed in one round: it is slow.

    Raises:
        UnavailableWayError: The device is not a CPU.
    """
    way = EngineWay(name, setting, *_graphs("cuda_graph", "tape", setting), "lanes.decode.strict=true")
    way.rounds = 1
    return way


def cpu_graph(name: str, setting: WaySetting) -> Way:
    """Return the engine with decode steps compiled for a CPU.

    Raises:
        UnavailableWayError: There is no compiler, or the device is not a CPU.
    """
    return EngineWay(name, setting, *_graphs("cpu_graph", "inductor", setting))


def cuda(name: str, setting: WaySetting) -> Way:
    """Return the engine with decode graphs of a CUDA device.

    Raises:
        UnavailableWayError: There is no CUDA device.
    """
    return EngineWay(name, setting, *_graphs("cuda_graph", "cuda", setting))


def _graphs(runner: str, driver: str, setting: WaySetting) -> tuple[str, ...]:
    require_driver(driver, setting.device)
    return (
        f'lanes.decode.runner="{runner}"',
        f'lanes.decode.graph_driver="{driver}"',
        f"lanes.decode.batch_sizes={list(setting.batch_sizes)}",
    )
