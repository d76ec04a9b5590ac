"""Kernel providers: where a backend's kernels come from.

A backend has one body of metadata and, as a rule, two sets of kernels that read it: ``native``, the
vendor's library on the hardware that it supports, and ``portable``, torch only, on every device. Which one
a backend uses is chosen once, when it is built: the one that was named, or with ``auto`` the first of
`AttentionBackend.providers` that can run here, and why those before it cannot is kept and told. One that
was named is never replaced.

Does not: hold kernels; plugins and `graphpact_kernels` do.
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import torch

from graphpact.attention.capabilities import Capabilities
from graphpact.attention.context import BackendContext, ProviderName
from graphpact.errors import ConfigError


class KernelProvider:
    """Base class of a backend's sets of kernels; a subclass adds the kernels themselves.

    Args:
        context: What the backend is built with.
    """

    name: ClassVar[Literal["native", "portable"]]
    capabilities: ClassVar[Capabilities | None] = None
    """What these kernels can do, where it is less than what the backend declares; None where it is all."""

    def __init__(self, context: BackendContext) -> None:
        self.context = context

    @classmethod
    def unavailable(cls, device: torch.device) -> str | None:
        """Return why these kernels cannot run on ``device``, or None where they can.

        May look for libraries and at the device; imports nothing heavy and runs no kernel.
        """
        del device
        return None

    @classmethod
    def refusal(cls, context: BackendContext) -> str | None:
        """Return why these kernels cannot do what ``context`` asks, or None where they can."""
        reason = why_unavailable(cls.unavailable, context.device)
        if reason is not None or cls.capabilities is None:
            return reason
        missing = lacking(cls.capabilities, context)
        return "they lack " + "; ".join(missing) if missing else None


def why_unavailable(
    unavailable: Callable[[torch.device], str | None], device: torch.device
) -> str | None:
    """Return in one line what ``unavailable`` says of ``device``: a reason, or None.

    What it raises is its reason: it may be anybody's.
    """
    try:
        reason = unavailable(device)
    except Exception as error:  # noqa: BLE001  anybody's code
        reason = f"{type(error).__name__}: {error}"
    return None if reason is None else " ".join(reason.split())


def lacking(capabilities: Capabilities, context: BackendContext) -> list[str]:
    """Return what ``context`` asks for that is not declared, one phrase each."""
    return capabilities.missing(
        context.layers,
        mode=context.mode,
        dtype=context.dtype,
        device=context.device,
        page_size=context.limits.page_size,
        topk=context.limits.draft.topk,
    )


def choose_provider(
    owner: str, providers: Sequence[type[KernelProvider]], context: BackendContext
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
    return _choose(
        owner, providers, context.provider, context.device, lambda each: each.refusal(context)
    )


def require_provider(
    owner: str,
    providers: Sequence[type[KernelProvider]],
    asked: ProviderName,
    device: torch.device,
) -> None:
    """Refuse what `choose_provider` will refuse for any model, before there is one.

    Raises:
        ConfigError: What was named is not there or cannot run on ``device``, or nothing can.
    """
    _choose(owner, providers, asked, device, lambda each: why_unavailable(each.unavailable, device))


def _choose(
    owner: str,
    providers: Sequence[type[KernelProvider]],
    asked: ProviderName,
    device: torch.device,
    refusal: Callable[[type[KernelProvider]], str | None],
) -> tuple[type[KernelProvider] | None, dict[str, str]]:
    if not providers and asked == "auto":
        return None, {}
    reasons: dict[str, str] = {}
    for provider in providers:
        if asked in ("auto", provider.name):
            reason = refusal(provider)
            if reason is None:
                return provider, reasons
            reasons[provider.name] = reason
    if asked == "auto":
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
        raise ConfigError(
            f"{owner} has no kernels that can be used on {device}: {why}",
            hint="select another attention backend; `graphpact plugins` lists what can run here",
        )
    if asked in reasons:
        what = f"has no {asked} kernels that can be used on {device}: {reasons[asked]}"
    else:
        have = ", ".join(provider.name for provider in providers)
        what = f"has no {asked} kernels: " + (f"it has {have}" if have else "it offers no choice")
    raise ConfigError(
        f"{owner} {what}",
        hint='kernel_provider = "auto" takes what can run here; `graphpact plugins` lists the kernels of'
        " each attention backend",
    )
