"""`Verifier`: runs a share of a lane's batches again, eagerly, on a copy of the KV cache.

The copy matters: an eager run on the live cache would write the right keys over what a wrong replay
wrote, and so hide it. After both runs the logits of the real rows must agree, and so must the whole
KV cache outside the scratch page: a replay that writes to another slot is found there.

Does not: repair anything, or look at batches that ran eagerly anyway.
"""

import random
from collections.abc import Callable
from typing import Protocol

import torch

from graphpact.attention import AttentionBackend, KVBuffers
from graphpact.batch import ForwardBatch
from graphpact.errors import VerificationError
from graphpact.lane import Lane

# Replay and eager run may take other kernels, because their row counts differ: sums in another order.
_TOLERANCE = {
    torch.float64: 1e-9,
    torch.float32: 1e-3,
    torch.float16: 2e-2,
    torch.bfloat16: 1e-1,
}


class RunFn(Protocol):
    """`Lane.run`, or what stands around it."""

    def __call__(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the logits of ``batch``."""


class Verifier:
    """Stands around `Lane.run` and holds a share of its replays to an eager run.

    Args:
        lane: Whose replays are verified.
        make_backend: ``(kv_cache) -> backend``: builds the lane's kind of backend on another cache.
        kv_cache: The live cache.
        shadow: A cache of the same shape; overwritten for each verified step.
        share: Of the replays, 0 to 1.
        page_size: KV slots in a page; page 0 is scratch and not compared.
        seed: Of the choice of steps.
    """

    def __init__(
        self,
        lane: Lane,
        *,
        make_backend: Callable[[KVBuffers], AttentionBackend],
        kv_cache: KVBuffers,
        shadow: KVBuffers,
        share: float,
        page_size: int,
        seed: int = 0,
    ) -> None:
        self.lane = lane
        self.share = share
        self.verified = 0
        self.largest_difference = 0.0
        self._live = [*kv_cache.k, *kv_cache.v]
        self._shadow = [*shadow.k, *shadow.v]
        self._backend = make_backend(shadow)
        self._page_size = page_size
        self._random = random.Random(seed)  # noqa: S311  it picks steps, it keeps no secret

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> torch.Tensor:
        """Return what the lane returns; raise where an eager run of a replayed batch differs.

        Raises:
            VerificationError: Names the request row or the KV slot that differs most, and by how much.
        """
        if self._random.random() >= self.share:
            return self.lane.run(batch)
        torch._foreach_copy_(self._shadow, self._live)
        before = self.lane.stats.replays
        logits = self.lane.run(batch)
        if self.lane.stats.replays == before:
            return logits
        metadata = self._backend.init_metadata_eager(batch)
        expected = self.lane.model(batch, self._backend, metadata)
        self.verified += 1
        at = f"{self.lane.runner.can_run(batch)}: "
        self._compare(f"{at}logits of request", logits, expected, first=0)
        layers = len(self._live) // 2
        for i, (live, shadow) in enumerate(zip(self._live, self._shadow, strict=True)):
            kind = "keys" if i < layers else "values"
            what = f"{at}{kind} of layer {i % layers} in KV slot"
            self._compare(what, live, shadow, first=self._page_size)
        return logits

    def _compare(
        self, what: str, replayed: torch.Tensor, eager: torch.Tensor, *, first: int
    ) -> None:
        # Most rows of a cache are equal to the bit, and only the others are worth a closer look.
        unequal = (replayed[first:] != eager[first:]).flatten(1).any(dim=1)
        rows = unequal.nonzero().squeeze(1) + first
        if not len(rows):
            return
        a, b = replayed[rows].double(), eager[rows].double()
        # A difference to NaN is NaN, which no comparison of the maximum would see.
        same = (a == b) | (a.isnan() & b.isnan())  # poison that neither run touched agrees
        off = torch.where(same, 0.0, (a - b).abs()).flatten(1).amax(dim=1)
        off = off.nan_to_num(nan=float("inf"), posinf=float("inf"))
        scale = b.abs().nan_to_num(nan=0.0, posinf=0.0).amax().item()
        worst = off.amax().item()
        self.largest_difference = max(self.largest_difference, worst)
        if worst <= _TOLERANCE[eager.dtype] * max(1.0, scale):
            return
        raise VerificationError(
            f"lane {self.lane.name!r}: replay and eager run differ:"
            f" {what} {int(rows[off.argmax()])} by {worst:.3g} (values up to {scale:.3g})",
            hint="the graph read something that its replay did not refresh; set verify.pact ="
            ' "always" to learn of moved tensors, and compare the metadata of both runs',
        )
