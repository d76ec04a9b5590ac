"""`V1Decode`: full graphs of decode for powers of two, with hooks of its own.

Does not: serve another mode.
"""

from graphpact import CudaGraphBufferRegistry, ForwardBatch, GraphShape
from graphpact.runners import DecodeRunner


class V1Decode(DecodeRunner):
    """A runner that overrides both hooks of a runner and calls those of the base class."""

    def default_batch_sizes(self) -> list[int]:
        """Return powers of two up to the largest step."""
        most = self.context.limits.max_bs
        return [*(1 << power for power in range(most.bit_length() - 1)), most]

    def populate(self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:
        """Fill the slots."""
        super().populate(registry, batch, shape)

    def prepare_replay(
        self, registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape
    ) -> ForwardBatch:
        """Return the static inputs."""
        return super().prepare_replay(registry, batch, shape)
