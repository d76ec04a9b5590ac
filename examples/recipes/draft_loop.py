"""`DraftLoop`: a draft decode that runs the model once for each draft step, all in one graph.

Does not: choose among branches; each branch continues separately.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphpact import CaptureSizes, ForwardMode, GraphRunner, GraphShape, RegionContext, StepOutputs
from graphpact.attention import GraphSupport, each_step
from graphpact.shapes import default_decode_batch_sizes
from graphpact.step import Forward, Region


class DraftLoop(GraphRunner):
    """A runner of draft decodes, whose output is ``draft_tokens``, ``[T, num_steps]`` int64."""

    modes = frozenset({ForwardMode.DRAFT_DECODE})
    needs = GraphSupport.UNIFORM

    def shapes(self) -> Sequence[GraphShape]:
        """Return a shape for each request count; every request has a token for each branch."""
        default = default_decode_batch_sizes(self.context.limits.max_bs)
        sizes, width = self.context.require_batch_sizes(default), self.context.limits.draft.topk
        return CaptureSizes.uniform(ForwardMode.DRAFT_DECODE, sizes, width).shapes

    def compose(self, forward: Forward, step: RegionContext) -> Region:
        """Return the region of a graph: a forward pass for each step, which feeds the next one."""

        def region() -> StepOutputs:
            ids, drafts = step.view.input_ids, []
            for i, (view, metadata) in enumerate(each_step(step.view, step.metadata)):
                batch = replace(view, input_ids=ids, positions=view.positions + i)
                if view.mrope_positions is not None:  # a model with images
                    batch.mrope_positions = view.mrope_positions + i
                ids = forward(batch, metadata, step.backend.forward).logits.argmax(-1)
                drafts.append(ids)
            return StepOutputs(draft_tokens=(torch.stack(drafts, dim=1), "tokens"))

        return region
