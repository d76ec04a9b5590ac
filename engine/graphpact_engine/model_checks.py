"""`check_backends`: refuses a model that the attention backend of a lane cannot run, before any capture.

Does not: look up plugins; `graphpact_engine.plans` does.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from graphpact.attention import AttentionBackend, BackendContext, HeadLayout, LayerSpec, Limits
from graphpact.attention.providers import choose_provider, lacking
from graphpact.batch import ForwardMode
from graphpact.plugins import PluginCatalog
from graphpact.runners import GraphRunner
from graphpact_engine.capabilities import backends_that, require_capabilities
from graphpact_engine.errors import UnsupportedModelError
from graphpact_engine.faults import call_plugin
from graphpact_engine.plans import LanePlan, ModelName

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The properties of the loaded model that lanes and memory depend on.

    Args:
        layers: Its attention layers.
        dtype: Dtype of weights and KV cache.
        device: Device of the weights.
        max_model_len: Number of its positions; None if its config does not say.
        expanded_for: The lane whose backend makes the model's MLA layers run expanded; None if none are
            expanded.
        expanded_layers: Returns ``layers`` in expanded form; None if the model caches no latents.
        hidden_sizes: For a draft model, the widths of the hidden states that its batches carry, by forward
            mode.
        has_experts: Whether it routes tokens to experts, which must not compute padding.
        proxies: Widths of the tensors that its stage gets from the stage before, by name.
    """

    layers: Sequence[LayerSpec]
    dtype: torch.dtype
    device: torch.device
    max_model_len: int | None
    expanded_for: "LanePlan | None" = None
    expanded_layers: Callable[[], Sequence[LayerSpec]] | None = None
    hidden_sizes: Mapping[ForwardMode, int] = field(default_factory=dict)
    has_experts: bool = False
    proxies: Mapping[str, int] = field(default_factory=dict)


def lane_without_latents(plans: Sequence[LanePlan]) -> LanePlan | None:
    """Return the first lane whose backend has no MLA; None if every backend has MLA.

    All lanes share one KV cache: one backend without MLA makes the cache hold keys and values of every head
    instead of latents.
    """
    target = [p for p in plans if p.model == "target"]
    return next((p for p in target if HeadLayout.MLA not in p.backend.capabilities.head_layouts), None)


def check_backends(
    plans: Sequence[LanePlan],
    contexts: Sequence[BackendContext],
    catalog: PluginCatalog,
    specs: Mapping[ModelName, ModelSpec],
) -> None:
    """Refuse a model that the backend of a lane or its kernels cannot run, before any capture.

    Logs one warning for each backend whose preferred kernels cannot run.

    Raises:
        UnsupportedModelError: The model needs what a backend lacks; names the backends that have it.
        ConfigError: The kernel provider of the configuration cannot run the model.
    """
    warnings: dict[str, None] = {}
    for plan, context in zip(plans, contexts, strict=True):
        spec = specs[plan.model]
        fits = functools.partial(_can_run, plan.runner, context, spec)
        others = functools.partial(backends_that, fits, catalog)
        remedy = functools.partial(_another_backend, plan, plans, contexts, specs)
        _require_backend_fits(plan, spec, context.limits, remedy, others)
        choose = functools.partial(choose_provider, plan.provider_setting, plan.backend.providers)
        asked = context.provider, context.device, context
        chosen, passed_over = call_plugin("attention_backend", plan.backend_name, choose, *asked)
        if chosen is not None and passed_over:
            why = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
            line = f"attention backend {plan.backend_name!r} runs {chosen.name} kernels; {why}"
            warnings[line] = None
    for line in warnings:
        _log.warning("%s", line)


def _can_run(
    runner: type[GraphRunner],
    context: BackendContext,
    spec: ModelSpec,
    backend: type[AttentionBackend],
) -> bool:
    """Return whether ``backend`` fits a lane of ``runner`` with this model."""
    can = backend.capabilities
    if spec.expanded_layers is not None and HeadLayout.MLA not in can.head_layouts:
        context = replace(context, layers=spec.expanded_layers())
    choose_provider(backend.__name__, backend.providers, context.provider, context.device, context)
    return can.graph_support.covers(runner.needs) and not lacking(can, context)


def _demands(plan: LanePlan, spec: ModelSpec, limits: Limits) -> dict[str, Any]:
    """Return the requirements of a lane, as arguments of `Capabilities.missing`."""
    return {
        "layers": spec.layers,
        "mode": plan.mode,
        "dtype": spec.dtype,
        "device": spec.device,
        "page_size": limits.page_size,
        "topk": limits.draft.topk,
    }


def _another_backend(
    plan: LanePlan,
    plans: Sequence[LanePlan],
    contexts: Sequence[BackendContext],
    specs: Mapping[ModelName, ModelSpec],
) -> str:
    """Return a hint to select another backend for a lane and keep the current one for other lanes."""
    if plan.config.attention_backend is not None:
        return f"select another lanes.{plan.name}.attention_backend"
    keep = [
        f'lanes.{each.name}.attention_backend = "{plan.backend_name}"'
        for each, context in zip(plans, contexts, strict=True)
        if each.config.attention_backend is None
        and not plan.backend.capabilities.missing(**_demands(each, specs[each.model], context.limits))
    ]
    another = "select another engine.attention_backend"
    return f"set {' and '.join(keep)}, and {another} for the other lanes" if keep else another


def _require_backend_fits(
    plan: LanePlan,
    spec: ModelSpec,
    limits: Limits,
    remedy: Callable[[], str],
    others: Callable[[], list[str]],
) -> None:
    """Refuse a model that needs what the lane's backend lacks; name the lane that made MLA run expanded."""
    try:
        require_capabilities(
            plan.backend_name,
            plan.backend.capabilities,
            **_demands(plan, spec, limits),
            remedy=remedy,
            others=others,
        )
    except UnsupportedModelError as error:
        other, layouts = spec.expanded_for, plan.backend.capabilities.head_layouts
        fits = all(layer.head_layout in layouts for layer in spec.layers)
        if other is None or fits or HeadLayout.MLA not in layouts:
            raise
        raise UnsupportedModelError(
            f"{error.message}; the model has MLA, which runs in expanded form, because all lanes share one KV"
            f" cache and the attention backend of lanes.{other.name}, {other.backend_name!r}, has no MLA",
            hint=f'set lanes.{other.name}.attention_backend = "{plan.backend_name}", or do not select'
            f" {plan.backend_name!r}",
        ) from error
