"""`PromptLookupAlgorithm`: drafts without a draft model, looked up in the text of the request itself.

A draft repeats the tokens that followed the last earlier occurrence of the newest two tokens. All work is on
the device and has fixed shapes: the host reads no length, no token and no number of accepted drafts.

Does not: draft well for text that does not repeat itself.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch

from graphpact import ForwardMode, SpeculationAlgorithm
from graphpact.errors import ConfigError
from graphpact.speculation import DecodeStep, ExtendStep, LaneRole, SpeculationContext


class PromptLookupAlgorithm(SpeculationAlgorithm):
    """Prompt lookup: one lane, in which the target verifies a chain of ``num_draft_tokens - 1`` tokens.

    Raises:
        ConfigError: ``topk`` is above 1.
    """

    lanes: ClassVar[Mapping[str, LaneRole]] = {
        "verify": LaneRole(ForwardMode.TARGET_VERIFY, "target", "cuda_graph"),
    }

    def __init__(self, context: SpeculationContext) -> None:
        super().__init__(context)
        if context.draft.topk > 1:
            raise ConfigError(
                f"speculative.topk = {context.draft.topk}, but prompt lookup drafts chains",
                hint="remove the key",
            )

    def state(self) -> Mapping[str, tuple[tuple[int, ...], torch.dtype]]:
        """Return the tokens of a request, with room for one verification after the longest sequence."""
        columns = self.context.max_model_len + self.context.draft.num_draft_tokens
        return {"tokens": ((columns,), torch.int64)}

    def extend(self, step: ExtendStep) -> None:
        """Keep the tokens that the target read, and the token that follows each."""
        batch = step.batch
        new_tokens, _ = batch.required_extend_lens()
        rows = batch.req_pool_indices.repeat_interleave(new_tokens, output_size=batch.num_tokens)
        step.state["tokens"][rows, batch.positions] = batch.input_ids
        step.state["tokens"][rows, batch.positions + 1] = step.next_token_ids

    def decode(self, step: DecodeStep) -> None:
        """Look up a draft, verify it, and keep the tokens after it."""
        rows, width = step.req_pool_indices[:, None], self.context.draft.num_draft_tokens
        tokens = step.state["tokens"]
        drafts = self._lookup(tokens[step.req_pool_indices], step.seq_lens, width - 1)
        verified = step.verify(drafts, None)
        # The tokens after the accepted ones are invalid; the next step overwrites them.
        at = step.seq_lens[:, None] + torch.arange(1, width + 1, device=tokens.device)
        tokens[rows, at] = verified.next_token_ids.view(-1, width)

    @staticmethod
    def _lookup(tokens: torch.Tensor, newest: torch.Tensor, count: int) -> torch.Tensor:
        """Return a draft ``[bs, count]`` int64 for each request.

        Args:
            tokens: ``[bs, n]`` int64: the tokens of each request.
            newest: ``[bs]`` int64: the index of its newest token.
            count: Tokens of a draft.
        """
        newest = newest[:, None]
        last, at = tokens.gather(1, newest), torch.arange(1, tokens.shape[1], device=tokens.device)
        before = tokens.gather(1, newest - 1)
        found = (tokens[:, 1:] == last) & (tokens[:, :-1] == before) & (at < newest)
        match = (found * at).amax(dim=1, keepdim=True)  # without a match 0, the first token
        ahead = torch.arange(count, device=tokens.device) % (newest - match)  # a short text is repeated
        return tokens.gather(1, match + 1 + ahead)
