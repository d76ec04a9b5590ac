"""The errors of an engine, in the tree of `graphpact.errors`.

    UsageError                 2      the caller can mend it
    ├── CheckpointError               no checkpoint, a broken one, an unsafe one
    ├── UnsupportedModelError         the model asks for what the selected backend lacks
    └── RequestError                  a prompt or a limit that can never be served
    ContractError              1      a promise of the contract was broken
    └── VerificationError             a replay and its eager re-run differ

Does not: print, exit or translate anything; the command line does that in one place.
"""

from collections.abc import Sequence

from graphpact.errors import ContractError, UsageError


class CheckpointError(UsageError):
    """A model directory that is missing, broken, incomplete or unsafe."""


class UnsupportedModelError(UsageError):
    """A model asks of attention what the selected backend does not declare."""


class RequestError(UsageError):
    """A request that this engine can never serve, refused before anything is done for it."""


class VerificationError(ContractError):
    """A replay and the eager run of the same batch gave different results.

    Args:
        message: What differs, by how much, and what first made it so, where that is known.
        hint: What to do next.
        lane: Whose replay it was.
        shape: The `graphpact.GraphShape` that was replayed.
        field: The first field whose real rows differ, such as ``"metadata.kv_indptr"``; None where all
            agree.
        suspects: Where all real rows agree, fields whose padded rows are not what capture had, and host
            numbers that are not the batch's.
        largest_difference: Of the logits or the cached keys and values that the message is about.
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
