"""`Sharding`: loads a transformers model so that each rank has its part of every layer.

Stages of a pipeline have the layers that transformers gives them; the first one has the embedding, the last
one the language model head. The parts of a layer are those of transformers' own tensor-parallel plan.
Attention, and the language model head if requests are not the same on all ranks, are split among the ranks of
an attention group; all other layers among the ranks of a stage. The embedding is not split. After loading,
weights are plain tensors.

Does not: gather tokens of other ranks; `graphpact_engine.models.gathering` does.
"""

import re
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from graphpact.errors import ConfigError
from graphpact_engine.models.stages import split_stages, stage_of
from graphpact_engine.ranks.processes import EngineRanks

_ATTENTION = re.compile(r"attn|attention")


class Sharding:
    """How the ranks of one engine split a model.

    Args:
        ranks: The ranks.
        device: The device of the weights.

    Raises:
        ConfigError: The installed transformers cannot load a part of a model this way.
    """

    def __init__(self, ranks: EngineRanks, device: torch.device) -> None:
        layout = ranks.layout
        if not (
            hasattr(PreTrainedModel, "maybe_distribute_model")
            and (layout.pipeline == 1 or find_spec("transformers.distributed.pipeline_parallel"))
        ):
            raise ConfigError(
                f"parallel.tensor = {layout.tensor}, parallel.pipeline = {layout.pipeline}: transformers"
                f" {transformers.__version__} cannot split a model this way",
                hint='pip install -U "transformers>=5.23"',
            )
        self._ranks = ranks
        self._attention = _mesh(ranks.attention, device)
        self._tensor = _mesh(ranks.tensor, device)
        self._pipeline = _mesh(ranks.pipeline, device)

    def class_of(self, model_class: type[Any], *, tied: bool) -> type[Any]:
        """Return a subclass of a transformers model whose ``from_pretrained`` loads this rank's part.

        Args:
            model_class: The class of the model.
            tied: Whether the language model head has the weights of the embedding.
        """
        sharding = self

        class Sharded(model_class):  # type: ignore[misc]
            """Loads the part of this rank; instances get the class of the model afterwards."""

            @classmethod
            def prepare_distribute_model(cls, config: Any, device_map: Any = None) -> Any:
                """Return the arguments as they are: the processes are connected already."""
                return config, device_map, None

            @classmethod
            def maybe_distribute_model(cls, model: Any, config: Any, _: Any) -> Any:
                """Split the weights and wrap the forward passes of the layers."""
                sharding.apply(model, config, tied=tied)
                return model

        Sharded.__name__ = model_class.__name__
        return Sharded

    @property
    def arguments(self) -> dict[str, Any]:
        """The argument of ``from_pretrained`` that asks for the plans."""
        from transformers.distributed import DistributedConfig  # noqa: PLC0415  not in older versions

        layout = self._ranks.layout
        return {"distributed_config": DistributedConfig(tp_size=layout.tensor, pp_size=layout.pipeline)}

    def apply(self, model: Any, config: Any, *, tied: bool) -> None:
        """Split a model without weights by the plans of transformers.

        Raises:
            ConfigError: The model has no plan, fewer layers than stages, or heads that cannot be divided.
        """
        model.config.distributed_config = config
        model._is_distributed_loading_by_transformers = True  # noqa: SLF001  see apply of transformers
        if self._ranks.layout.pipeline > 1:
            split_stages(model, self._pipeline)
        if self._ranks.layout.tensor > 1:
            self._split_layers(model, config, tied=tied)

    def _split_layers(self, model: Any, config: Any, *, tied: bool) -> None:
        """Keep this rank's part of each layer."""
        from transformers.distributed.tensor_parallel import (  # noqa: PLC0415  not in older versions
            apply_tensor_parallelism,
        )

        head = _name_of(model, model.get_output_embeddings())
        stage = stage_of(model)
        keeps_head = tied or not (stage is None or stage.is_last)  # other stages have no head
        embedding = _name_of(model, model.get_input_embeddings())
        plan, _, _ = model._resolve_parallel_plans(config)  # noqa: SLF001  transformers has no public one
        of_attention: dict[str, str] = {}
        of_others: dict[str, str] = {}
        layout = self._ranks.layout
        for name, style in plan.items():
            if _is_in(name, embedding) or (keeps_head and _is_in(name, head)):
                continue
            is_attention = _is_in(name, head) or _ATTENTION.search(name)
            (of_attention if is_attention else of_others)[name] = style
        if any(_ATTENTION.search(name) for name in of_attention):
            _require_divisible_heads(model.config.get_text_config(), layout.attention_tensor)
        for mesh, rules in ((self._attention, of_attention), (self._tensor, of_others)):
            if mesh.size() > 1:
                apply_tensor_parallelism(model, mesh, rules)


def make_local(model: Any) -> None:
    """Replace every distributed weight by the plain tensor of this rank's part."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  slow

    for module in model.modules():
        for name, weight in module._parameters.items():  # noqa: SLF001  torch has no other way to keep names
            if isinstance(weight, DTensor):
                module._parameters[name] = torch.nn.Parameter(weight.to_local(), requires_grad=False)  # noqa: SLF001


def _mesh(group: "dist.ProcessGroup", device: torch.device) -> DeviceMesh:
    return DeviceMesh.from_group(group, device.type, mesh_dim_names=("tp",))


def _name_of(model: Any, module: Any) -> str:
    return next((name for name, each in model.named_modules() if each is module), "")


def _is_in(name: str, module: str) -> bool:
    return bool(module) and (name == module or name.startswith(f"{module}."))


def _require_divisible_heads(config: Any, ranks: int) -> None:
    queries = config.num_attention_heads
    for what, heads in (("query", queries), ("key", getattr(config, "num_key_value_heads", None) or queries)):
        if heads % ranks:
            raise ConfigError(
                f"the model has {heads} {what} heads, which {ranks} ranks cannot divide",
                hint="lower parallel.tensor, or raise parallel.attention_data, so that tensor /"
                " attention_data divides the heads",
            )
