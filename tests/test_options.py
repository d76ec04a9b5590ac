"""Tests that a misspelt keyword argument is an error with the nearest name, wherever users give options."""

import dataclasses
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, get_args

import pytest
from pydantic import BaseModel

import graphpact
import graphpact.buffers
import graphpact_adapters.sglang
import graphpact_adapters.vllm
import graphpact_engine
from graphpact import attention
from graphpact.errors import UnknownOptionError, UsageError, named_options
from graphpact_conformance import targets
from graphpact_conformance.cli import check
from graphpact_engine import SamplingParams, config
from graphpact_engine.config import EngineConfig

DOORS: tuple[ModuleType, ...] = (
    graphpact,
    graphpact.buffers,
    graphpact.attention,
    graphpact_engine,
    config,
    graphpact_adapters.sglang,
    graphpact_adapters.vllm,
)
MADE_BY_ENGINES = {
    *("BackendContext", "BoundSlot", "CommonAttentionMetadata", "ConfigKey", "FillContext", "ForwardBatch"),
    *("GraphShape", "Request", "RegionContext"),
}
"""Data classes without this check: they are made in each step, or users only read them."""


def _classes() -> Iterator[type[Any]]:
    """Yield the public classes of data with options: fields with defaults."""
    for door in DOORS:
        for name in getattr(door, "__all__", dir(door)):
            cls = getattr(door, name)
            if name.startswith("_") or not inspect.isclass(cls) or not cls.__module__.startswith("graphpact"):
                continue
            if dataclasses.is_dataclass(cls):
                missing = dataclasses.MISSING
                given = [f for f in dataclasses.fields(cls) if f.init]
                if any(f.default is not missing or f.default_factory is not missing for f in given):
                    yield cls
            elif issubclass(cls, BaseModel) and "root" not in cls.model_fields:
                yield cls


FUNCTIONS: tuple[Callable[..., Any], ...] = (graphpact.conformance, graphpact.buffers.metadata_slot)
TAKING_OPTIONS = [
    *sorted({c for c in _classes() if c.__name__ not in MADE_BY_ENGINES}, key=lambda c: c.__name__),
    *FUNCTIONS,
]


@pytest.mark.parametrize("target", TAKING_OPTIONS, ids=lambda t: t.__qualname__)
def test_a_misspelt_option_is_answered_with_the_nearest(target: Callable[..., Any]) -> None:
    """For each option of each public class, a misspelt name is an error with the right name."""
    parameters = inspect.signature(target).parameters.values()
    if target is graphpact.conformance:
        from graphpact_conformance import testing

        parameters = inspect.signature(testing.conformance_decorator).parameters.values()
    names = [p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    assert names
    for name in names:
        with pytest.raises(UnknownOptionError, match=f"'{name}_'") as refused:
            target(**{f"{name}_": 1})
        assert isinstance(refused.value, TypeError)  # the error that Python itself raises
        assert isinstance(refused.value, UsageError)
        assert refused.value.hint == f"did you mean {name!r}?"


def test_names_of_other_engines_are_answered() -> None:
    """The name in vLLM and OpenAI of `max_new_tokens` is recognised; for a dissimilar name all are listed."""
    with pytest.raises(UnknownOptionError, match="did you mean 'max_new_tokens'"):
        SamplingParams(max_tokens=4)  # type: ignore[call-arg]
    with pytest.raises(UnknownOptionError, match="it takes max_new_tokens, min_new_tokens, "):
        SamplingParams(zzz=4)  # type: ignore[call-arg]


def test_what_is_decorated_stays_what_it_was() -> None:
    """A decorated class keeps its signature, equality and replace(), and a decorated function its result."""
    assert next(iter(inspect.signature(SamplingParams).parameters)) == "max_new_tokens"
    assert dataclasses.replace(SamplingParams(top_k=3), top_k=4) == SamplingParams(top_k=4)
    assert EngineConfig.load(None, env={}, overrides=["engine.page_size=16"]).engine.page_size == 16

    @named_options
    def add(a: int, *, b: int = 1) -> int:
        """Return a sum."""
        return a + b

    assert (add(1), add(1, b=2), add.__doc__) == (2, 3, "Return a sum.")
    with pytest.raises(UnknownOptionError, match="did you mean 'b'"):
        add(1, bb=2)  # type: ignore[call-arg]


def test_the_names_of_providers_are_the_same_everywhere() -> None:
    """Core, engine, suite and command accept the same names; only the core imports torch for them."""
    names = {"auto", "native", "compiled", "portable"}
    assert {*get_args(attention.ProviderName)} == names
    assert {*get_args(config.ProviderName)} == {*get_args(targets.Kernels)} == names
    assert {*check.KernelsOption} == names
