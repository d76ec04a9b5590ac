"""`DraftLanes`: the lanes of a draft model, with the runners that an algorithm names, without graphs.

Does not: check batches; see `graphpact_conformance.algorithms.lane_batches`.
"""

from collections.abc import Mapping
from types import SimpleNamespace

import torch

from graphpact.attention import BackendContext, DraftLimits, Limits
from graphpact.batch import ForwardBatch, ForwardMode
from graphpact.lane import Lane
from graphpact.runners import GraphRunner, RunnerContext
from graphpact.shapes import EagerReason
from graphpact.speculation import LaneRole
from graphpact.step import StepOutputs
from graphpact_conformance.algorithms.random_models import DTYPE, TARGET_LAYER, TARGET_WIDTH, RandomDraft
from graphpact_conformance.lane.reference_backend import ReferenceBackend
from graphpact_tape.tape import TapeDriver

CPU = torch.device("cpu")


class DraftLanes:
    """The lanes of one draft model.

    Args:
        roles: The lanes of the algorithm.
        runners: The class of each runner by name.
        model: The draft model.
        draft: The largest draft.
        rows: Rows of the request pool, besides scratch.
        table: The page table ``[rows + 1, context]`` int32.
        kv: The KV cache of target and draft.
    """

    def __init__(
        self,
        roles: Mapping[str, LaneRole],
        runners: Mapping[str, type[GraphRunner]],
        model: RandomDraft,
        draft: DraftLimits,
        rows: int,
        table: torch.Tensor,
        kv: SimpleNamespace,
    ) -> None:
        self._lanes: dict[str, Lane] = {}
        for name, role in roles.items():
            if role.model == "target":
                continue
            frozen = runners[role.runner].frozen_kv
            width = draft.topk if frozen else draft.tokens_per_request(role.mode) or table.shape[1]
            most = rows * (draft.topk if frozen else 1)
            limits = Limits(most, rows * width, table.shape[1], 1, draft)
            backend = ReferenceBackend(
                BackendContext(CPU, DTYPE, (TARGET_LAYER, model.layer), limits, table, kv, mode=role.mode)
            )
            context = RunnerContext(
                CPU,
                backend.capabilities,
                limits,
                mode=role.mode,
                lane=name,
                hidden_size=TARGET_WIDTH if frozen or role.mode is not ForwardMode.DRAFT_DECODE else 4,
                dtype=DTYPE,
                layers=(model.layer,),
            )
            self._lanes[name] = Lane(
                name,
                model=model,
                runner=runners[role.runner](context),
                backend=backend,
                driver=TapeDriver(CPU),
                pact="off",
                eager_reason=EagerReason.NO_GRAPHS,
            )
        self._given: dict[str, StepOutputs] = {}

    def run(self, name: str, batch: ForwardBatch) -> StepOutputs:
        """Run a step of a lane, and return its outputs, which are poisoned when the lane runs again."""
        self.expire(name)
        self._given[name] = self._lanes[name].run(batch).clone()
        return self._given[name]

    def expire(self, name: str | None = None) -> None:
        """Overwrite the last outputs of a lane, or of all: another step may have done so."""
        for each in [*self._given] if name is None else [name]:
            for tensor in self._given.pop(each, {}).values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else -1)

    def given(self) -> dict[str, torch.Tensor]:
        """Return the last outputs of each lane that are valid, by name."""
        return {
            f"{output} of lane {lane!r}": tensor
            for lane, outputs in self._given.items()
            for output, tensor in outputs.items()
        }
