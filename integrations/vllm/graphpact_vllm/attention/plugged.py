"""A graphpact attention backend inside vLLM, by name: ``--attention-backend GRAPHPACT_FLASHINFER``.

Each installed plugin of the group ``graphpact.attention_backends`` is an attribute of this module, the class
of a backend in vLLM's shape. Its author writes nothing for vLLM: metadata comes from the plugin's hooks,
attention from its ``forward``, and its capabilities are vLLM's levels of graph support.

Does not: serve latents (MLA), encoders, quantized caches, or biases of positions.
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)
from vllm.v1.kv_cache_layout import KVCacheLayout

from graphpact.attention import AttentionBackend as Plugin
from graphpact.attention import Capabilities, GraphSupport, LayerSpec
from graphpact.batch import ForwardMode
from graphpact.errors import ConfigError
from graphpact.plugins import PluginCatalog
from graphpact_vllm import plugged_names
from graphpact_vllm.attention.paged import slots_of
from graphpact_vllm.attention.plugged_steps import (
    Caches,
    PluggedMetadata,
    PluggedSteps,
    StepSizes,
    mode_of_drafts,
)

_LEVELS = {
    GraphSupport.NEVER: AttentionCGSupport.NEVER,
    GraphSupport.UNIFORM_DECODE: AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE,
    GraphSupport.UNIFORM: AttentionCGSupport.UNIFORM_BATCH,
    GraphSupport.ALWAYS: AttentionCGSupport.ALWAYS,
}


def support_of(capabilities: Capabilities) -> AttentionCGSupport:
    """Return vLLM's level of graph support for what a graphpact backend declares.

    Steps with drafts are captured as steps of their own kind only if the backend serves that kind.
    """
    declared = capabilities.graph_support
    if declared is GraphSupport.UNIFORM and ForwardMode.TARGET_VERIFY not in capabilities.modes:
        declared = GraphSupport.UNIFORM_DECODE
    return _LEVELS[declared]


class PluggedBuilder(AttentionMetadataBuilder[PluggedMetadata]):
    """Makes metadata by the hooks of a graphpact backend; a subclass sets ``plugin``."""

    plugin: ClassVar[type[Plugin]]
    pads_rows_itself = True
    """Padding rows are those of graphpact: a request with one key in scratch, not an empty one."""

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._steps: PluggedSteps | None = None

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Return the level that follows from the plugin's capabilities."""
        del vllm_config, kv_cache_spec
        return support_of(cls.plugin.capabilities)

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> PluggedMetadata:
        """Return the metadata that a graph keeps, from the plugin's capture hook."""
        return self._made().captured(self._required(common_attn_metadata), is_ragged=self._is_ragged)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: Any,
        fast_build: bool = False,  # noqa: FBT001, FBT002  vLLM's own
    ) -> PluggedMetadata:
        """Return the metadata of a step, from the plugin's replay hook if its shape is captured.

        Raises:
            ConfigError: A query may see keys behind its own.
        """
        del common_prefix_len, fast_build
        return self._made().stepped(self._required(common_attn_metadata), is_ragged=self._is_ragged)

    @property
    def _is_ragged(self) -> bool:
        """Whether vLLM captures batches with a prefill as full graphs."""
        return bool(self.vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL)

    def _required(self, common: Any) -> Any:
        if common.causal is not True:
            raise ConfigError(
                f"the attention backend {self.plugin.__name__} serves causal attention only",
                hint="choose another attention backend",
            )
        return common

    def _made(self) -> PluggedSteps:
        """Return the steps. They are made at the first build, when layers have their caches."""
        if self._steps is None:
            config = self.vllm_config
            layers = [config.compilation_config.static_forward_context[name] for name in self.layer_names]
            specs = [layer.impl.placed(at) for at, layer in enumerate(layers)]
            slots = [slots_of(layer.kv_cache, layer.impl.head_size) for layer in layers]
            with torch.inference_mode(mode=False):
                self._steps = PluggedSteps(
                    self.plugin,
                    specs,
                    Caches(k=[k for k, _ in slots], v=[v for _, v in slots]),
                    _sizes(config, self.kv_cache_spec.block_size),
                    self.device,
                )
        return self._steps


def _sizes(vllm_config: Any, page_size: int) -> StepSizes:
    compilation, scheduler = vllm_config.compilation_config, vllm_config.scheduler_config
    is_captured = compilation.cudagraph_mode.has_full_cudagraphs()
    return StepSizes(
        max_num_seqs=scheduler.max_num_seqs,
        max_num_tokens=scheduler.max_num_batched_tokens,
        max_model_len=vllm_config.model_config.max_model_len,
        page_size=page_size,
        max_captured=(compilation.max_cudagraph_capture_size or 0) if is_captured else 0,
        width=1 + (vllm_config.num_speculative_tokens or 0),
    )


class PluggedImpl(AttentionImpl[PluggedMetadata]):
    """The attention of one layer by a graphpact backend; a subclass sets ``plugin``.

    Args:
        num_heads: Query heads.
        head_size: Numbers of a key.
        scale: The factor of scores.
        num_kv_heads: Key heads; None for as many as query heads.
        alibi_slopes: None: biases of positions are not served.
        sliding_window: Keys that a query sees, its own included; None for all.
        kv_cache_dtype: The dtype of the cache, which is the model's.
        logits_soft_cap: The bound of scores; None for none.
        attn_type: The kind of attention, which is that of a decoder.
        kv_sharing_target_layer_name: The layer whose cache is used; None for its own.
        sinks: ``[num_heads]`` logits of a virtual key, or None.

    Raises:
        ConfigError: The plugin does not serve the layer.
    """

    plugin: ClassVar[type[Plugin]]

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self._window, self._softcap, self._sinks = sliding_window, logits_soft_cap or None, sinks
        self._specs: dict[int, LayerSpec] = {}
        lacks = []
        if alibi_slopes is not None:
            lacks.append("biases of positions")
        if attn_type != AttentionType.DECODER:
            lacks.append(f"attention of type {attn_type}")
        self._require([*lacks, *self._missing()])
        self._spec = self.placed(0)

    def _missing(self) -> Sequence[str]:
        """Return what the layer and the engine need, and the plugin does not declare."""
        config, capabilities = get_current_vllm_config(), self.plugin.capabilities
        modes = [ForwardMode.DECODE, ForwardMode.MIXED]
        if config.num_speculative_tokens:
            modes.append(mode_of_drafts(capabilities))
        missing = [
            what
            for mode in modes
            for what in capabilities.missing(
                [self.placed(0)],
                mode=mode,
                dtype=config.model_config.dtype,
                device=torch.device(config.device_config.device_type),
                page_size=config.cache_config.block_size,
            )
        ]
        return list(dict.fromkeys(missing))

    def _require(self, missing: Sequence[str]) -> None:
        if missing:
            raise ConfigError(
                f"the graphpact attention backend {self.plugin.__name__} cannot serve this model in vLLM: it"
                f" lacks {'; '.join(missing)}",
                hint="choose another attention backend, or another block_size or dtype; `graphpact plugins`"
                " lists the capabilities of each",
            )

    def placed(self, layer_id: int) -> LayerSpec:
        """Return the layer for graphpact, as the one of this index in its group."""
        self._spec = LayerSpec(
            layer_id=layer_id,
            num_q_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_size,
            v_head_dim=self.head_size,
            scaling=self.scale,
            sliding_window=self._window,
            softcap=self._softcap,
            sinks=self._sinks,
        )
        return self._spec

    def forward(
        self,
        layer: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: PluggedMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write keys and values to the cache and attend, by the plugin. A warm-up has no metadata.

        Args:
            layer: The layer.
            query: ``[tokens, num_heads, head_size]``.
            key: ``[tokens, num_kv_heads, head_size]``; unused if the layer shares another one's cache.
            value: ``[tokens, num_kv_heads, head_size]``, as above.
            kv_cache: The cache, which the plugin has.
            attn_metadata: The metadata of the step.
            output: ``[tokens, num_heads, head_size]``, written.
            output_scale: None: outputs are not quantized.
            output_block_scale: None, as above.
        """
        del layer, kv_cache, output_scale, output_block_scale
        if attn_metadata is None:
            return output
        tokens = attn_metadata.num_actual_tokens  # the rest is padding of an eager step
        is_shared = self.kv_sharing_target_layer_name is not None
        k, v = (None, None) if is_shared else (key[:tokens], value[:tokens])
        attend = attn_metadata.backend.forward
        output[:tokens] = attend(query[:tokens], k, v, self._spec, attn_metadata.step)
        return output


class PluggedBackend(AttentionBackend):
    """A graphpact backend in vLLM's shape; a subclass sets the other attributes.

    Attributes:
        plugin: The graphpact backend.
        name: Its name in vLLM.
        builder: The class that makes metadata.
        impl: The class of a layer's attention.
    """

    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    plugin: ClassVar[type[Plugin]]
    name: ClassVar[str]
    builder: ClassVar[type[PluggedBuilder]]
    impl: ClassVar[type[PluggedImpl]]

    @classmethod
    def get_name(cls) -> str:
        """Return the name by which it is chosen."""
        return cls.name

    @classmethod
    def get_impl_cls(cls) -> type[PluggedImpl]:
        """Return the class of a layer's attention."""
        return cls.impl

    @classmethod
    def get_builder_cls(cls) -> type[PluggedBuilder]:
        """Return the class that makes metadata."""
        return cls.builder

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Return the page sizes of the plugin."""
        del kv_cache_spec
        sizes = cls.plugin.capabilities.page_sizes
        return [MultipleOf(1)] if sizes is None else [*sorted(sizes)]

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """Return the only layout: the heads of a slot lie together."""
        return (KVCacheLayout.LBNHC,)

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return whether the plugin does."""
        return cls.plugin.capabilities.sliding_window

    @classmethod
    def supports_sink(cls) -> bool:
        """Return whether the plugin does."""
        return cls.plugin.capabilities.sinks


def plug(plugin: type[Plugin], name: str) -> type[PluggedBackend]:
    """Return a graphpact backend in vLLM's shape.

    Args:
        plugin: The graphpact backend.
        name: Its name in vLLM.
    """
    own = {"plugin": plugin, "__module__": __name__}
    impl: Any = type(f"{plugin.__name__}Impl", (PluggedImpl,), own)
    builder: Any = type(f"{plugin.__name__}Builder", (PluggedBuilder,), own)
    dtypes = sorted(plugin.capabilities.dtypes, key=str)
    more = {"name": name, "impl": impl, "builder": builder, "supported_dtypes": dtypes}
    backend: type[PluggedBackend] = type(name, (PluggedBackend,), own | more)
    return backend


@functools.cache
def __getattr__(name: str) -> type[PluggedBackend]:
    """Return the backend of a name such as ``GRAPHPACT_FLASHINFER``, by which vLLM's registry finds it.

    Raises:
        AttributeError: No installed plugin has the name.
        RejectedPluginError: The plugin cannot be loaded.
    """
    catalog = PluginCatalog.scan()
    found = plugged_names(catalog).get(name)
    if found is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return plug(catalog.select("attention_backend", found), name)
