"""The ``piecewise_cuda_graph`` runner: prefill graphs of a model that torch.compile splits into pieces.

The model is traced and split at its attention calls. The driver records the pieces of every shape with the
shape's static token count; attention runs between them. With the driver ``cuda`` the pieces are compiled
first. Other drivers record the operations of the pieces one by one, and ``inductor`` then compiles its
recording.

Does not: run a model that torch.compile cannot trace as one graph; `breakable_cuda_graph` does.
"""

from graphpact import RegionContext
from graphpact.runners import RunnerContext
from graphpact.step import Forward, Region
from graphpact_cuda_graph.bridge import Bridge
from graphpact_cuda_graph.driver import DeviceDriver
from graphpact_cuda_graph.pieces import Tracer
from graphpact_cuda_graph.prefill import PrefillRunner


class PiecewiseCudaGraphRunner(PrefillRunner):
    """The runner whose graphs are the pieces of a model between its attention layers."""

    def __init__(self, context: RunnerContext) -> None:
        super().__init__(context)
        self._tracer: Tracer | None = None

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return the pieces of one forward pass, with attention between them.

        Raises:
            CaptureError: torch.compile cannot trace the model, or cannot compile a piece.
        """
        attend = Bridge(step)
        if step.is_eager:
            return lambda: forward(step.view, step.metadata, attend)
        if self._tracer is None:
            self._tracer = Tracer(compiled=isinstance(step.driver, DeviceDriver))
        layers = {layer.layer_id: layer for layer in step.backend.context.layers}
        return self._tracer.split(
            forward, step.view, lambda q, k, v, layer_id: attend(q, k, v, layers[layer_id], None)
        )
