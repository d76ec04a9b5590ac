"""Kernel providers: the sets of kernels that a backend can use.

A backend has one kind of metadata and usually three sets of kernels that read it: ``native``, the vendor's
library on the hardware that it supports; ``compiled``, C++ for a CPU; ``portable``, torch only. The provider
is chosen once, when the backend is built. With ``auto`` it is the first one in the backend's list that can
run here, and the reasons against earlier ones are kept and reported. A provider that is named is never
replaced.

Does not: contain kernels; plugins and `graphpact_kernels` do.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from graphpact.attention.capabilities import Capabilities
from graphpact.attention.context import BackendContext, KernelName, ProviderName
from graphpact.errors import ConfigError
from graphpact.plugin_calls import why_unavailable


class KernelProvider:
    """Base class of a set of kernels for a backend's ``context``. A subclass adds the kernels."""

    name: ClassVar[KernelName]
    capabilities: ClassVar[Capabilities | None] = None
    """Capabilities of these kernels; None if they are those of the backend."""

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why these kernels cannot run on ``device``, or None if they can.

        It may look for libraries and query the device. It must not import a heavy library or run a kernel.
        """
        del device
        return None

    @classmethod
    def refusal(cls, context: BackendContext) -> str | None:
        """Return why these kernels cannot serve ``context``, or None if they can."""
        reason = why_unavailable(cls.unavailable, context.device)
        if reason is not None or cls.capabilities is None:
            return reason
        missing = lacking(cls.capabilities, context)
        return "they lack " + "; ".join(missing) if missing else None


def lacking(capabilities: Capabilities, context: BackendContext) -> list[str]:
    """Return what ``context`` requires and ``capabilities`` do not declare, one phrase each."""
    return capabilities.missing(
        context.layers,
        mode=context.mode,
        dtype=context.dtype,
        device=context.device,
        page_size=context.limits.page_size,
        topk=context.limits.draft.topk,
    )


def choose_provider(
    owner: str,
    providers: Sequence[type[KernelProvider]],
    asked: ProviderName,
    device: torch.device,
    context: BackendContext | None = None,
) -> tuple[type[KernelProvider] | None, dict[str, str]]:
    """Return the chosen provider, and the reasons against better ones by their names.

    ``providers`` are sorted, the best first; if there are none, the result is None. ``asked`` is ``auto`` or
    a provider's name; for a name there are no reasons. ``owner`` is the backend's name for messages.
    ``context`` is None before a model is loaded.

    Raises:
        ConfigError: The named provider does not exist or cannot run here, or no provider can.
    """
    if not providers and asked == "auto":
        return None, {}
    reasons: dict[str, str] = {}
    for provider in providers:
        if asked in ("auto", provider.name):
            reason = provider.refusal(context) if context else why_unavailable(provider.unavailable, device)
            if reason is None:
                return provider, reasons
            reasons[provider.name] = reason
    if asked == "auto":
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        hint = "select another attention backend; `graphpact plugins` lists what can run here"
        raise ConfigError(f"{owner} has no kernels that can be used on {device}: {why}", hint=hint)
    if asked in reasons:
        what = f"has no {asked} kernels that can be used on {device}: {reasons[asked]}"
    else:
        have = ", ".join(provider.name for provider in providers)
        what = f"has no {asked} kernels: " + (f"it has {have}" if have else "it offers no choice")
    hint = 'kernel_provider = "auto" takes what can run here; `graphpact plugins` lists the kernels'
    raise ConfigError(f"{owner} {what}", hint=hint)
