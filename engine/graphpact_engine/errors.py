"""The errors of an engine, in the tree of `graphpact.errors`.

    UsageError                 2      the caller can fix it
    ├── CheckpointError               a missing, broken or unsafe checkpoint
    ├── UnsupportedModelError         the model needs what the selected backend lacks
    └── RequestError                  a prompt or a limit that can never be served
    ContractError              1      a rule of the contract was broken
    ├── CaptureError
    │   └── ModelCaptureError         the model's own code does what a graph cannot hold
    └── VerificationError             a replay and its eager run differ

Does not: print, exit or translate anything; the command line does that in one place.
"""

from collections.abc import Sequence

from graphpact.errors import CaptureError, ContractError, UsageError


class CheckpointError(UsageError):
    """A model directory that is missing, broken, incomplete or unsafe."""


class UnsupportedModelError(UsageError):
    """A model that needs what the selected attention backend does not declare."""


class RequestError(UsageError):
    """A request that this engine can never serve, refused before it is queued."""


class ModelCaptureError(CaptureError):
    """The model's own code does work that a graph cannot hold; the message names the model and the line."""


class VerificationError(ContractError):
    """A replay and the eager run of the same batch gave different results.

    Args:
        message: What differs, by how much, and the first cause if it is known.
        hint: What to do next.
        lane: Name of the lane.
        shape: The `graphpact.GraphShape` that was replayed.
        field: The first field whose live rows differ, such as ``"metadata.kv_indptr"``; None if all agree.
        suspects: If all live rows agree: fields whose padding rows differ from those at capture, and host
            numbers that differ from those of the batch.
        largest_difference: Largest difference in the logits or cached keys and values of the message.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str | None = None,
        lane: str | None = None,
        shape: object | None = None,
        field: str | None = None,
        suspects: Sequence[str] = (),
        largest_difference: float = 0.0,
    ) -> None:
        super().__init__(message, hint=hint)
        self.lane = lane
        self.shape = shape
        self.field = field
        self.suspects = tuple(suspects)
        self.largest_difference = largest_difference
