"""Kernel providers: where a backend's kernels come from.

A backend has one body of metadata and, as a rule, two sets of kernels that read it: ``native``, the
vendor's library on the hardware that it supports, and ``portable``, torch only, on every device. Which one
a backend uses is chosen once, when it is built: the one that was named, or with ``auto`` the first of
`AttentionBackend.providers` that can run here, and why those before it cannot is kept and told.

Does not: hold kernels; plugins and `graphpact.kernels` do.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

from graphpact.attention.capabilities import Capabilities
from graphpact.errors import ConfigError

if TYPE_CHECKING:
    from graphpact.attention.backend import BackendContext

ProviderName = Literal["auto", "native", "portable"]
"""What can be asked for."""


class KernelProvider:
    """Base class of a backend's sets of kernels; a subclass adds the kernels themselves.

    Args:
        context: What the backend is built with.
    """

    name: ClassVar[Literal["native", "portable"]]
    capabilities: ClassVar[Capabilities | None] = None
    """What these kernels can do, where it is less than what the backend declares; None where it is all."""

    def __init__(self, context: "BackendContext") -> None:
        self.context = context

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why these kernels cannot run on ``device``, or None where they can.

        May look for libraries and at the device; imports nothing heavy and runs no kernel.
        """
        del device
        return None

    @classmethod
    def refusal(cls, context: "BackendContext") -> str | None:
        """Return why these kernels cannot do what ``context`` asks, or None where they can."""
        reason = cls.unavailable(context.device)
        if reason is not None or cls.capabilities is None:
            return reason
        missing = cls.capabilities.missing(
            context.layers,
            mode=context.mode,
            dtype=context.dtype,
            device=context.device,
            page_size=context.limits.page_size,
            topk=context.limits.draft.topk,
        )
        return "they lack " + "; ".join(missing) if missing else None


def choose_provider(
    owner: str, providers: Sequence[type[KernelProvider]], context: "BackendContext"
) -> tuple[type[KernelProvider] | None, dict[str, str]]:
    """Return the provider that ``context`` asks for, and the reason of each that was passed over.

    Args:
        owner: Whose providers they are, for the message.
        providers: The best first; none for a backend that has no choice.
        context: What the backend is built with; ``context.provider`` is what is asked for.

    Returns:
        The class, None where there is no choice; and by name why the ones before it were not taken, which
        is empty where one was named.

    Raises:
        ConfigError: What was named is not there or cannot run here, or nothing can.
    """
    asked = context.provider
    if not providers and asked == "auto":
        return None, {}
    reasons: dict[str, str] = {}
    for provider in providers:
        if asked in ("auto", provider.name):
            reason = provider.refusal(context)
            if reason is None:
                return provider, reasons
            reasons[provider.name] = reason
    have = ", ".join(provider.name for provider in providers) or "no choice of kernels"
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    raise ConfigError(
        f"{owner}: no {'' if asked == 'auto' else asked + ' '}kernels can be had on {context.device}: "
        + (why or f"it has {have}"),
        hint='kernel_provider = "auto" takes what can run here',
    )
