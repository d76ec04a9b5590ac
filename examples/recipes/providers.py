"""`AcmeWithProviders`: a backend with one metadata code path, and two sets of kernels that read it.

Does not: need a library. A vendor's provider checks in `unavailable` whether its library is installed, and
imports it in its constructor.
"""

from dataclasses import replace

import torch
from recipes.backend import AcmeBackend
from torch.nn.functional import scaled_dot_product_attention

from graphpact.attention import KernelProvider


class NativeKernels(KernelProvider):
    """Torch's fused kernel, on CUDA devices."""

    name = "native"
    # only if these kernels support less than the backend declares
    capabilities = replace(AcmeBackend.capabilities, dtypes=frozenset({torch.bfloat16}))

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why it cannot run on ``device``, in one line, or None; imports nothing heavy."""
        return None if device.type == "cuda" else "the fused kernel runs on CUDA devices"

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Return the attention of each request; see `AcmeBackend.attend`."""
        mask = seen[:, None, None]
        out = scaled_dot_product_attention(
            q[:, :, None], keys, values, attn_mask=mask, scale=scaling, enable_gqa=True
        )
        return out[:, :, 0]


class PortableKernels(KernelProvider):
    """Plain torch operations, on every device."""

    name = "portable"

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Return the attention of each request; see `AcmeBackend.attend`."""
        q = q.unflatten(1, (keys.shape[1], -1))  # the query heads of each key head
        scores = (q @ keys.transpose(2, 3)).float() * scaling
        scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
        weights = torch.softmax(scores, dim=-1).masked_fill(~seen[:, None, None], 0)  # NaN without keys
        return (weights.to(q.dtype) @ values).flatten(1, 2)


class AcmeWithProviders(AcmeBackend):
    """`AcmeBackend` with a choice of kernels."""

    capabilities = replace(AcmeBackend.capabilities, devices=frozenset({"cpu", "cuda"}))
    providers = (NativeKernels, PortableKernels)  # the best first

    def attend(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        seen: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        """Return the attention of each request, computed by the chosen kernels."""
        out: torch.Tensor = self.kernels.attend(q, keys, values, seen, scaling)
        return out
