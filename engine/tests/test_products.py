"""Tests of the products of eager steps on a CPU, and of the memory that is kept between operations."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from compiled_kernels import needs_compiled
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_engine.models.products import ChosenLinear, choose_products, choosing, faster_product

TINY = Path(__file__).parents[2] / "examples/models/tiny-llama"
KERNEL = "graphpact_compiled.linear.default"


class Calls(TorchDispatchMode):
    """Counts the operators that run in the context, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


def lane_calls(runner: str) -> tuple[dict[str, int], int]:
    """Return the operators of a decode step that is run eagerly, and how many linear layers the model has."""
    overrides = [
        f'model.path="{TINY}"',
        'engine.device="cpu"',
        f'lanes.decode.runner="{runner}"',
        "lanes.decode.capture=false",
    ]
    with Engine(EngineConfig.load(None, env={}, overrides=overrides)) as engine:
        engine.add([3, 1, 4], SamplingParams(max_new_tokens=2, ignore_eos=True))
        engine.step()
        model: Any = engine.lanes[0].model
        inner = getattr(model, "forward", model)
        layers = sum(isinstance(each, ChosenLinear) for each in inner.model.modules())
        with Calls() as calls:
            while engine.scheduler.has_work:
                engine.step()
    return calls.counts, layers


@needs_compiled
def test_only_a_lane_without_graphs_calls_the_compiled_product() -> None:
    """An eager lane computes every linear layer by the kernel; a lane with graphs computes torch's products.

    An eager run of a lane with graphs is compared with its replays, so both must run the same operations.
    """
    calls, layers = lane_calls("eager")
    assert calls[KERNEL] == layers > 0
    calls, _ = lane_calls("cuda_graph")
    assert KERNEL not in calls
    assert calls["aten.linear.default"] == layers


@needs_compiled
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 80), (2, 3, 80), (1, 70, 80), (0, 80)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_has_the_value_and_shape_of_torchs(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    has_bias: bool,  # noqa: FBT001  a parameter of the test
) -> None:
    """For any number of rows and dimensions, also none, with dtypes that the kernel has and that it lacks."""
    layer = torch.nn.Linear(80, 60, bias=has_bias).to(dtype)
    choose_products(torch.nn.ModuleList([layer]))
    x = torch.randn(shape).to(dtype)
    with torch.inference_mode():
        expected = layer(x)
        with choosing(faster_product):
            got = layer(x)
    torch.testing.assert_close(got, expected)


def test_a_layer_with_its_own_forward_pass_is_left_alone() -> None:
    """A layer that ranks split keeps its class, and so does a subclass of a linear layer."""

    class Special(torch.nn.Linear):
        pass

    split, special, plain = torch.nn.Linear(2, 2), Special(2, 2), torch.nn.Linear(2, 2)
    split.forward = lambda x: x  # type: ignore[method-assign]
    choose_products(torch.nn.ModuleList([split, special, plain]))
    assert [type(each) for each in (split, special, plain)] == [torch.nn.Linear, Special, ChosenLinear]


@pytest.mark.skipif(sys.platform != "linux", reason="the thresholds are those of glibc")
def test_a_freed_block_is_not_mapped_again() -> None:
    """After `keep_freed_memory`, large tensors that are made and freed in turn fault no pages in again."""
    program = """
import resource, torch
from graphpact_engine.allocator import keep_freed_memory
keep_freed_memory()
def use():
    for _ in range(20):
        first = torch.ones(3 * 2**18)
        second = first * 2
        first = second + 1
        second = None
        third = first * first
        del first, second, third
use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 1000  # 30000 without it
