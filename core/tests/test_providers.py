"""Tests of kernel providers: which one a backend uses, and why it does not use another."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graphpact.attention import BackendContext, KernelProvider, LayerSpec, Limits
from graphpact.attention.providers import choose_provider
from graphpact.errors import ConfigError
from graphpact.plugin_calls import why_unavailable
from graphpact_flashinfer import FlashInferBackend

CPU = torch.device("cpu")
LAYER = LayerSpec(0, 4, 2, 16, 16, 0.25)


def chosen(
    providers: Sequence[type[KernelProvider]], asked: BackendContext
) -> tuple[type[KernelProvider] | None, dict[str, str]]:
    """Return the choice of a backend that is built with a context."""
    return choose_provider("it", providers, asked.provider, asked.device, asked)


def context(provider: str = "auto", dtype: torch.dtype = torch.float32) -> BackendContext:
    """Return the context of a backend of one layer."""
    kv = SimpleNamespace(k=[], v=[])
    limits = Limits(2, 2, 16, 1)
    table = torch.zeros(3, 16, dtype=torch.int32)
    return BackendContext(
        CPU,
        dtype,
        [LAYER],
        limits,
        table,
        kv,
        provider=provider,  # type: ignore[arg-type]
    )


REASON = st.sampled_from([None, "no library", "not\n  on this device", OSError("lib.so\nis gone")])
SAID = {
    "no library": "no library",
    "not\n  on this device": "not on this device",
    "lib.so\nis gone": "OSError: lib.so is gone",
}


@settings(derandomize=True)
@given(
    reasons=st.dictionaries(st.sampled_from(["native", "portable"]), REASON),
    asked=st.sampled_from(["auto", "native", "portable"]),
)
def test_the_first_that_can_run_is_chosen_and_a_named_one_never_replaced(
    reasons: dict[str, str | Exception | None], asked: str
) -> None:
    """``auto`` chooses the first that can run, with reasons against earlier ones; a name chooses itself."""

    def provider(name: str, reason: str | Exception | None) -> type[KernelProvider]:
        def unavailable(cls: type[KernelProvider], device: torch.device) -> str | None:
            if isinstance(reason, Exception):
                raise reason
            return reason

        return type(name, (KernelProvider,), {"name": name, "unavailable": classmethod(unavailable)})

    providers = [provider(name, reason) for name, reason in reasons.items()]
    passed_over, taken = {}, None
    for name, reason in reasons.items():
        if asked in ("auto", name):
            if reason is None:
                taken = name
                break
            passed_over[name] = SAID[str(reason)]
    if taken is not None or (asked == "auto" and not reasons):
        cls, why = chosen(providers, context(asked))
        assert (cls and cls.name, why) == (taken, passed_over)
        choose_provider("it", providers, asked, CPU)  # type: ignore[arg-type]
        return
    texts = []
    for refuse in (
        lambda: chosen(providers, context(asked)),
        lambda: choose_provider("it", providers, asked, CPU),  # type: ignore[arg-type]
    ):
        with pytest.raises(ConfigError) as refused:
            refuse()
        texts.append(str(refused.value))
    assert texts[0] == texts[1]
    assert texts[0].startswith("it has no " + ("kernels" if asked == "auto" else f"{asked} kernels"))
    assert all(reason in texts[0] for reason in passed_over.values())
    assert refused.value.message.count("\n") == 0
    assert ('"auto" takes' in texts[0]) is (asked != "auto")


def test_kernels_that_do_less_than_their_backend_say_what_they_lack() -> None:
    """The capabilities of a provider must fit the model; otherwise ``auto`` chooses the next provider."""

    class All(KernelProvider):
        name = "portable"

    class Half(KernelProvider):
        name = "native"
        capabilities = replace(FlashInferBackend.capabilities, dtypes=frozenset({torch.float16}))

    half, why = chosen([Half, All], context())
    assert half is All
    assert why == {"native": "they lack dtype torch.float32 (has torch.float16)"}
    assert chosen([Half, All], context(dtype=torch.float16)) == (Half, {})
    with pytest.raises(ConfigError, match=r"no native kernels .* cpu: they lack dtype"):
        chosen([Half, All], context("native"))


@pytest.mark.parametrize("value", [False, True, 0, 1, [], b"no"])
def test_a_reason_is_a_line_of_text_or_none(value: Any) -> None:
    """If `unavailable` returns neither text nor None, the reason describes what it returned."""
    said = why_unavailable(lambda _: value, CPU)
    assert said == f"unavailable() returned {value!r}, not a line of text or None"
    assert why_unavailable(lambda _: None, CPU) is None
    assert why_unavailable(lambda _: "no\n device", CPU) == "no device"
