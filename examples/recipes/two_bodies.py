"""`TwoBodies`: a backend that prepares a replay by other code than a capture.

The graph is captured for the longest context. A replay gathers only as many columns as its longest request
has keys, a number that the host knows, and clears the rest.

Does not: override a hook. The base class calls each body where it belongs, in draft steps too.
"""

from dataclasses import replace

import torch
from recipes.backend import AcmeBackend, AcmeMetadata

from graphpact import ForwardBatch


class TwoBodies(AcmeBackend):
    """`AcmeBackend` with a second body."""

    capabilities = replace(AcmeBackend.capabilities, needs_host_plan=True)  # it reads seq_lens_cpu
    fill_is_device_only = False  # the width of the gather changes between replays

    def refresh_metadata(self, view: ForwardBatch, metadata: AcmeMetadata) -> None:
        """Write what the graph reads in this replay; `fill_metadata` serves captures and eager steps."""
        longest = int(view.seq_lens_cpu.max())  # in host memory: no wait for the device
        rows = self.context.req_to_token[view.req_pool_indices, :longest]
        position = torch.arange(longest, device=view.device)
        live, rest = metadata.table.split([longest, metadata.table.shape[1] - longest], dim=1)
        live.copy_(torch.where(position < view.seq_lens[:, None], rows, 0))
        rest.zero_()
