"""`TwoBodies`: a backend that prepares a replay with other code than a capture.

The graph is captured for the longest context. In a replay the host knows the number of keys of the longest
request, so only that many columns are gathered, and the rest are cleared.

Does not: override a hook. The base class calls the right method for each, in draft steps too.
"""

from dataclasses import replace

import torch
from recipes.backend import AcmeBackend, AcmeMetadata

from graphpact import ForwardBatch


class TwoBodies(AcmeBackend):
    """`AcmeBackend` with a separate method for replays."""

    capabilities = replace(AcmeBackend.capabilities, needs_host_plan=True)  # it reads seq_lens_cpu
    fill_is_device_only = False  # the width of the gather changes between replays

    def refresh_metadata(self, view: ForwardBatch, metadata: AcmeMetadata) -> None:
        """Write what the graph reads in this replay; `fill_metadata` serves captures and eager steps."""
        longest = int(view.seq_lens_cpu.max())  # in host memory, so this does not wait for the device
        rows = self.context.req_to_token[view.req_pool_indices, :longest]
        position = torch.arange(longest, device=view.device)
        live, rest = metadata.table.split([longest, metadata.table.shape[1] - longest], dim=1)
        live.copy_(torch.where(position < view.seq_lens[:, None], rows, 0))
        rest.zero_()
