"""The contract: four hooks between lane, runner and attention backend, and four hooks for observers.

The runner has two (`populate`, `prepare_replay`), the backend two (`init_metadata_capture`,
`init_metadata_replay`). All are ``firstresult``. Observers (verification, tracing, metrics) wrap them with
``wrapper=True``. For observers there are four more hooks, which lane and engine implement: `run_step`,
`launch`, `capture` and `engine_phase`. There is no other way to observe.

The contract has one version number, `CONTRACT_VERSION`. A plugin's distribution declares the version that it
was written for by an entry point in the group ``graphpact.contract``, which is readable before the plugin is
imported. A new version may add arguments to a hook, but never removes one.

Does not: call the hooks (`graphpact.lane` does) or find their implementers (`graphpact.plugins` does).
"""

import inspect
from collections.abc import Callable
from typing import Any

import pluggy

from graphpact._version import CONTRACT_VERSION as CONTRACT_VERSION  # noqa: PLC0414  of the contract
from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.shapes import GraphShape

PROJECT = "graphpact"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookMethods:
    """Base class of backends and runners. A method with the name of a hook implements it, marked or not."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for hook in (populate, prepare_replay, init_metadata_capture, init_metadata_replay):
            method = getattr(cls, hook.__name__, None)
            if inspect.isfunction(method) and not hasattr(method, f"{PROJECT}_impl"):
                hookimpl(method)


@hookspec(firstresult=True)
def populate(registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
    """Copy ``batch`` into the registry's slots and pad it to ``shape``. A runner's hook.

    Live rows are copied; padding rows are set by each slot's padding policy. The batch is not written, and
    the slots' addresses do not change.
    """


@hookspec(firstresult=True)
def prepare_replay(
    registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> ForwardBatch | None:
    """Return the view that the graph reads. A runner's hook, called after ``populate``.

    Every tensor of the view is a slice of a slot, padded to ``shape``. One shape always has the same memory.
    """


@hookspec(firstresult=True)
def init_metadata_capture(view: ForwardBatch, shape: GraphShape) -> Any:
    """Return graph-resident metadata for ``shape``, filled from the dummy ``view``. A backend's hook.

    The recorded kernels read it. Every tensor in it is in the memory of a slot, and every host number is
    frozen into the graph.
    """


@hookspec(firstresult=True)
def init_metadata_replay(view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
    """Refresh ``captured`` in place from ``view`` and return it. A backend's hook.

    The result has the captured type, fields, addresses, shapes, strides, dtypes and host numbers. Only the
    contents of its tensors change. The hook must not read a device value on the host.
    """


@hookspec(firstresult=True)
def run_step(lane: Any, batch: ForwardBatch) -> Any:
    """Run ``batch`` through ``lane`` and return its `StepOutputs`. Called for every step, eager ones too.

    The host tensors of the live batch may be rewritten once the step has returned.
    """


@hookspec(firstresult=True)
def launch(lane: Any, prepared: Any) -> Any:
    """Replay the graph of a `PreparedStep`, or run it eagerly, and return its `StepOutputs`.

    ``prepared.fit`` is the shape, or the reason of the eager run. Each `run_step` calls it after the hooks
    that prepare a replay.
    """


@hookspec(firstresult=True)
def capture(lane: Any, shape: GraphShape, batch: ForwardBatch | None) -> Any:
    """Capture ``shape`` of ``lane``, add it to ``lane.captured``, and return the `CapturedShape`.

    The captured batch is ``batch``, or the runner's dummy batch if it is None. If an observer raises, the
    shape is not captured.
    """


@hookspec(firstresult=True)
def engine_phase(phase: str, call: Callable[[], Any]) -> Any:
    """Return ``call()``, which runs one phase of an engine.

    Each engine defines its phases; `graphpact_engine.phases` lists those of its engine.
    """
