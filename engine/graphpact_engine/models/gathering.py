"""`GatheredTokens`: each rank keeps a share of the tokens; layers gather what they compute together.

    between layers       ``rows / attention ranks`` tokens of this rank's attention group
    attention            gathers the tokens of the group before, and keeps the rank's share after
    all other layers     gather the shares of all ranks of the replica before, and keep the own share after
    outputs of the model gathered in the group

Every rank has the same number of rows: those of the captured shape, or in an eager step those of the rank
with most tokens. Rows beyond a rank's own tokens are padding, which must not reach experts.

Does not: split weights, or choose the number of rows; the engine's exchange does.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from graphpact.batch import ForwardBatch
from graphpact.parallel import local_num_token_non_padded
from graphpact.ranks.collectives import all_gather
from graphpact_engine.ranks.processes import EngineRanks


class GatheredTokens:
    """The gathering layers of one model.

    Args:
        ranks: The ranks.

    Attributes:
        layout: Their layout.
    """

    def __init__(self, ranks: EngineRanks) -> None:
        self._attention = ranks.attention
        self._tensor = ranks.tensor
        self.layout = ranks.layout

    def install(self, model: Any) -> None:
        """Let the layers of a model gather and keep tokens, in all its later forward passes."""
        base = model.base_model
        layers = list(_decoder_layers(base))
        layers[0].register_forward_pre_hook(_before(self._share), with_kwargs=True)
        for layer in layers:
            for child in layer.children():
                is_attention = _is_attention(child)
                if not is_attention and not _has_matrices(child):
                    continue  # a norm, which computes each token by itself
                gather = self.gather_group if is_attention else self._gather_replica
                keep = self._share if is_attention else self._own
                child.register_forward_pre_hook(_before(gather), with_kwargs=True)
                child.register_forward_hook(_after(keep))
        base.register_forward_hook(self._whole_outputs)

    def rows(self, batch: ForwardBatch) -> int:
        """Return the rows of each attention group in a step: its tokens and padding."""
        return self.layout.padded_rows(max(batch.num_tokens, *(batch.global_num_tokens_cpu or (1,))))

    def local_count(self, batch: ForwardBatch, rows: int) -> torch.Tensor:
        """Return ``[1]`` int32: how many of this rank's rows are real tokens.

        A graph has the number in a slot. An eager step knows it on the host.
        """
        if batch.num_token_non_padded is not None and batch.global_num_tokens_cpu is None:
            return batch.num_token_non_padded
        real = batch.num_token_non_padded_cpu
        count = local_num_token_non_padded(batch.num_tokens if real is None else real, rows)
        return torch.full((1,), count, dtype=torch.int32, device=batch.device)

    def padding(self, rows: int, count: torch.Tensor) -> torch.Tensor:
        """Return ``[gathered rows, 1]`` bool: which rows of all ranks are padding.

        Args:
            rows: The rows of an attention group.
            count: ``[1]`` int32: the real tokens among this rank's rows.
        """
        counts = count.new_empty(self._tensor.size())
        all_gather(counts, count, group=self._tensor)
        number = torch.arange(rows // self.layout.attention_tensor, device=count.device)
        return (number >= counts[:, None]).flatten()[:, None]

    # -- inside ----------------------------------------------------------------------------------

    def _share(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of ``[1, rows, H]``."""
        size = self.layout.attention_tensor
        share = hidden.shape[1] // size
        return hidden if size == 1 else hidden.narrow(1, self.layout.attention_rank * share, share)

    def _own(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return this rank's rows of ``[1, gathered rows, H]``."""
        share = hidden.shape[1] // self.layout.tensor
        return hidden.narrow(1, self.layout.tensor_rank * share, share)

    def gather_group(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[1, rows, H]`` from the shares of the attention group's ranks."""
        return hidden if self.layout.attention_tensor == 1 else _gathered(hidden, self._attention)

    def _gather_replica(self, hidden: torch.Tensor) -> torch.Tensor:
        return _gathered(hidden, self._tensor)

    def _whole_outputs(self, _module: Any, _inputs: Any, outputs: Any) -> Any:
        """Gather the input of the language model head."""
        outputs.last_hidden_state = self.gather_group(outputs.last_hidden_state)
        return outputs


def _gathered(hidden: torch.Tensor, group: "dist.ProcessGroup") -> torch.Tensor:
    """Return ``[1, ranks * n, H]`` from ``[1, n, H]`` of every rank."""
    rows = hidden[0].contiguous()
    every = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    all_gather(every, rows, group=group)
    return every[None]


def _before(change: Any) -> Any:
    """Return a hook that changes the hidden states of a call."""

    def hook(
        _module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if "hidden_states" in kwargs:
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}
        return (change(args[0]), *args[1:]), kwargs

    return hook


def _after(keep: Any) -> Any:
    """Return a hook that keeps this rank's rows of a result; other parts of a tuple stay."""

    def hook(_module: Any, _inputs: Any, out: Any) -> Any:
        return (keep(out[0]), *out[1:]) if isinstance(out, tuple) else keep(out)

    return hook


def _decoder_layers(base: Any) -> Iterator[Any]:
    """Yield the modules that have an attention module as a child."""
    for module in base.modules():
        if any(_is_attention(child) for child in module.children()):
            yield module


def _is_attention(module: Any) -> bool:
    """Return whether a module calls the attention function: it has a number, and weights of its own."""
    return hasattr(module, "layer_idx") and hasattr(module, "scaling") and _has_matrices(module)


def _has_matrices(module: Any) -> bool:
    return any(weight.dim() > 1 for weight in module.parameters())
