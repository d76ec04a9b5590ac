"""The drivers of devices with graphs like torch's CUDA graphs, tested with a stand-in for a device.

The stand-in is a graph class on host memory. It keeps the operations that torch dispatches between
``capture_begin`` and ``capture_end``, and repeats them. A read on the host is an error there, as on a device.
"""

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graphpact.errors import CaptureError, ConfigError
from graphpact.graphs import Graph
from graphpact.plugins import PluginCatalog
from graphpact_conformance.drivers.promises import CHECKS
from graphpact_cuda_graph.driver import DEVICES, Device, DeviceDriver
from graphpact_tape.nodes import RunAndCopy
from graphpact_tape.operators import is_work, python_implementation
from graphpact_tape.trees import tensors_of

CPU = torch.device("cpu")
_EMPTY = "The stand-in is empty"


class _Calls(TorchDispatchMode):
    """A dispatch mode that adds operations to the graph that is being captured."""

    graph: "StandIn | None" = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.graph is None:
            return func(*args, **kwargs)
        if torch.Tag.data_dependent_output in func.tags:
            raise RuntimeError("operation not permitted while the stream is capturing")
        implementation = python_implementation(func, tensors_of((args, kwargs)))
        if implementation is not None:  # such an operation launches kernels, one by one
            with self:
                return implementation(*args, **kwargs)
        result = func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in tensors_of((args, kwargs))}
        made = tuple(t if t.untyped_storage()._cdata not in known else None for t in tensors_of(result))
        if is_work(func, allocates=any(t is not None for t in made)):
            args, kwargs = self.graph.by_value((args, kwargs))
            self.graph.work.append((RunAndCopy(func, made, str(func)), args, kwargs))
        return result


_CALLS = _Calls()


class _Pool:
    """A memory pool with the number of its graphs; None before the first."""

    graphs: int | None = None


class StandIn:
    """A graph class with the methods of ``torch.cuda.CUDAGraph`` that a driver calls.

    As torch's, it refuses a pool whose graphs were all freed.
    """

    def __init__(self) -> None:
        self.work: list[Any] = []
        self.pool: _Pool | None = None

    def by_value(self, tree: Any) -> Any:
        """Return the arguments with copies of host numbers, which a kernel takes by value."""
        return torch.utils._pytree.tree_map_only(
            torch.Tensor,
            lambda t: t.clone() if not t.dim() and t.untyped_storage().nbytes() == 4 else t,
            tree,
        )

    def capture_begin(self, pool: Any = None) -> None:
        """Begin a capture; the pool must be the driver's."""
        assert isinstance(pool, _Pool)
        assert _CALLS.graph is None
        if pool.graphs == 0:
            raise RuntimeError("use_count > 0 INTERNAL ASSERT FAILED")
        pool.graphs = (pool.graphs or 0) + 1
        self.pool = pool
        _CALLS.graph = self

    def capture_end(self) -> None:
        """End."""
        _CALLS.graph = None
        if not self.work:
            warnings.warn(_EMPTY, stacklevel=2)

    def replay(self) -> None:
        """Repeat the work."""
        for op, args, kwargs in self.work:
            op(*args, **kwargs)

    def reset(self) -> None:
        """Discard the work, and leave the pool."""
        self.work = []
        if self.pool is not None:
            assert self.pool.graphs
            self.pool.graphs -= 1
            self.pool = None


class _Stream:
    """A stream of a device that does all work at once."""

    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Wait for nothing."""

    def wait_event(self, event: Any) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""


class _Event:
    """An event of such a device."""

    def record(self, stream: Any = None) -> None:
        """Mark nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""


class StandInDriver(DeviceDriver):
    """The driver of the stand-in, which only consists of an entry of the table."""

    kind = Device("cpu", "StandIn", "stand-in", empty=_EMPTY)


@pytest.fixture
def _device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Add the parts that modules of devices have to the CPU's module in torch."""
    parts: dict[str, Any] = {
        "StandIn": StandIn,
        "Stream": _Stream,
        "Event": _Event,
        "stream": lambda _: contextlib.nullcontext(),
        "current_stream": _Stream,
        "synchronize": lambda _=None: None,
        "graph_pool_handle": _Pool,
        "empty_cache": lambda: None,
        "memory_reserved": lambda _: 0,
        "is_available": lambda: True,
    }
    for name, part in parts.items():
        monkeypatch.setattr(torch.cpu, name, part, raising=False)
    with _CALLS:
        yield
    _CALLS.graph = None


_NOT_OF_THE_STAND_IN = {"it_says_how_much_it_keeps"}  # the stand-in has no pool and reports 0 bytes


@pytest.mark.few(2)
@pytest.mark.usefixtures("_device")
@pytest.mark.parametrize("name", sorted(CHECKS.keys() - _NOT_OF_THE_STAND_IN))
def test_one_class_keeps_the_promises_for_another_graph_class(name: str) -> None:
    """With only a table entry, the driver of the stand-in keeps the promises of the driver contract."""
    CHECKS[name](lambda: StandInDriver(CPU))


@pytest.mark.usefixtures("_device")
def test_a_refused_capture_names_the_device() -> None:
    """An error of the graph class becomes a `CaptureError` that names the device, and says what to do."""
    x = torch.ones(2)
    with pytest.raises(
        CaptureError, match="cannot be captured as a stand-in graph: operation not"
    ) as refused:
        StandInDriver(CPU).capture(lambda: x * x.sum().item())
    assert refused.value.rule == "GP20"
    assert "strict tape" in str(refused.value.hint)


@pytest.mark.usefixtures("_device")
def test_graphs_share_a_pool_while_one_of_them_lives() -> None:
    """A capture uses the pool of graphs that still live; after all were released it uses a new pool."""
    driver, x = StandInDriver(CPU), torch.ones(2)

    def captured() -> tuple[Graph, Any]:
        graph = driver.capture(lambda: x + 1)
        return graph, vars(graph)["_graphs"][0].pool

    first, pool = captured()
    second, shared = captured()
    assert shared is pool
    first.release()
    third, shared = captured()
    assert shared is pool
    second.release()
    third.release()
    fourth, other = captured()
    assert other is not pool
    with torch.inference_mode():
        fourth.replay()
    assert fourth.outputs.tolist() == [2, 2]


def test_a_driver_without_sync_debug_mode_has_no_strict_mode() -> None:
    """Only devices with torch's sync debug mode have a strict mode; the others name the tape."""
    assert [name for name, device in DEVICES.items() if device.has_sync_debug] == ["cuda"]
    with pytest.raises(ConfigError, match="graph driver 'cpu' has no strict mode"):
        StandInDriver(CPU, strict=True)


@pytest.mark.parametrize("name", DEVICES)
def test_every_device_of_the_table_is_a_driver_that_says_why_it_is_unavailable(name: str) -> None:
    """Each is installed under its type; without the device, it says which name is missing in torch."""
    driver = PluginCatalog.scan().select("graph_driver", name)
    assert issubclass(driver, DeviceDriver)
    assert driver.name == name
    kind = driver.kind
    assert driver.unavailable(CPU) == f"{kind.label} graphs record work on a {kind.label} device, not on cpu"


@pytest.mark.parametrize("package", [None, "torch_standin"])
def test_a_torch_without_the_device_says_what_adds_it(package: str | None) -> None:
    """If torch lacks the module or its graph class, the reason has both names and the package, if any."""

    class Missing(DeviceDriver):
        kind = Device("cpu", "NoSuchGraph", "stand-in", package=package)

    said = "this torch has no torch.cpu.NoSuchGraph" + (f": it comes with {package}" if package else "")
    assert Missing.unavailable(CPU) == said


@pytest.mark.usefixtures("_device")
def test_a_device_that_torch_does_not_see_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the module but without a device, the reason is that torch sees none; with a device it is None."""
    assert StandInDriver.unavailable(CPU) is None
    monkeypatch.setattr(torch.cpu, "is_available", lambda: False)
    assert StandInDriver.unavailable(CPU) == "torch sees no stand-in device"
