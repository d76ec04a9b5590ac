"""The contract: four hooks between lane, runner and attention backend, and one for observers.

Two belong to the runner (`populate`, `prepare_replay`), two to the backend (`init_metadata_capture`,
`init_metadata_replay`). All four are ``firstresult``. Observers (verification, tracing, metrics) implement
the same hooks with ``wrapper=True``. For observers alone there is a fifth, `run_step`, around every step.

The contract has one version, `CONTRACT_VERSION`. A plugin's distribution names the version that it
was written for by an entry point in the group ``graphpact.contract``, so that it can be read before
anything of the plugin is imported. Arguments are only ever added to a hook.

Does not: call the hooks (`graphpact.lane` does) or find their implementers (`graphpact.plugins` does).
"""

from typing import Any

import pluggy

from graphpact.batch import ForwardBatch
from graphpact.buffers import CudaGraphBufferRegistry
from graphpact.shapes import GraphShape

PROJECT = "graphpact"
CONTRACT_VERSION = 1

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec(firstresult=True)
def populate(registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
    """Copy ``batch`` into the registry's slots and pad it to ``shape``. A runner's hook.

    The heads of the slots receive the batch, the tails what each slot's padding policy says. The batch
    itself is not written. The slots' addresses do not change.
    """


@hookspec(firstresult=True)
def prepare_replay(
    registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
) -> ForwardBatch | None:
    """Make the view that the graph reads, and return it. A runner's hook, called after ``populate``.

    The view is a `ForwardBatch` whose every tensor is a slice of a slot, padded to ``shape``. For one
    shape it is the same memory every time.
    """


@hookspec(firstresult=True)
def init_metadata_capture(view: ForwardBatch, shape: GraphShape) -> Any:
    """Bind graph-resident metadata for ``shape``, filled from the dummy ``view``. A backend's hook.

    What is returned is what the recorded kernels read: every tensor in it must be a slot's, every
    host number in it is frozen into the graph.
    """


@hookspec(firstresult=True)
def init_metadata_replay(view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
    """Refresh ``captured`` in place from ``view`` and return it. A backend's hook.

    The result has the type, fields, addresses, shapes, strides, dtypes and host numbers of what was
    captured; only the contents of its tensors change. No device value is read on the host.
    """


@hookspec(firstresult=True)
def run_step(lane: Any, batch: ForwardBatch) -> Any:
    """Run ``batch`` through ``lane`` and return its `StepOutputs`. The lane's own; observers wrap it.

    Args:
        lane: The `graphpact.Lane` whose step it is.
        batch: The live batch. Its host tensors may be rewritten once the step has returned.
    """
