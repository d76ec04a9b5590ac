"""`run_start`: synthetic steps of every captured shape before vLLM serves; the guard compares each.

Requests of random tokens are prefilled and decoded by the model runner, as vLLM's scheduler asks it to. Each
graph gets batches for which the dispatcher takes it: as many requests as it holds, and fewer, so that padding
rows follow live ones. All ranks run the same steps, because they draw the same numbers.

The scheduler has no request yet, so that all blocks of the KV cache are free. They keep what was written: a
step writes a slot before it reads it.

Does not: compare; the guard does, in its hooks.
"""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm import SamplingParams
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput

from graphpact.errors import ConfigError
from graphpact_vllm.guard.dispatching import BatchKind, Choice

_LONGEST = 64
"""The most tokens of a synthetic prompt for a decode step."""


def run_start(runner: Any, found: Iterable[Choice], steps: int) -> int:
    """Run synthetic steps of each captured shape, and return the number of shapes.

    Args:
        runner: vLLM's model runner, V1 or V2, with its graphs.
        found: What its dispatcher takes for each batch.
        steps: Steps of each shape.

    Raises:
        ConfigError: There are no synthetic steps for this configuration; the message says why.
    """
    _require_possible(runner)
    synthetic = _Synthetic(runner)
    shapes = 0
    for batches in _batches_of_graphs(found, steps):
        shapes += 1
        decodes = [batch.requests for batch in batches if batch.query_len]
        if decodes:
            live = synthetic.prefill(synthetic.lengths(decodes[0], len(decodes)), len(decodes))
            for count in decodes:
                synthetic.end(live[count:])
                live = live[:count]
                synthetic.decode(live)
            synthetic.end(live)
        for batch in batches:
            if not batch.query_len:
                fewest = -(-batch.tokens // runner.max_model_len)
                lengths = _split(batch.tokens, max(batch.requests, fewest))
                synthetic.end(synthetic.prefill(lengths, 0))
    synthetic.finish()
    return shapes


def _require_possible(runner: Any) -> None:
    config = runner.vllm_config
    for is_so, what in (
        (config.speculative_config is not None, "drafts"),
        (config.parallel_config.data_parallel_size > 1, "data parallelism"),
        (config.parallel_config.pipeline_parallel_size > 1, "pipeline parallelism"),
        (config.kv_transfer_config is not None, "a KV connector"),
        (config.model_config.is_encoder_decoder, "an encoder"),
        (config.model_config.has_inner_state, "a recurrent state"),
        (config.model_config.runner_type == "pooling", "a pooling model"),
    ):
        if is_so:
            raise ConfigError(
                f"GRAPHPACT asks for synthetic steps before serving, and there are none with {what}",
                hint="leave out the word start; verify:N compares steps of the real load",
            )


def _batches_of_graphs(found: Iterable[Choice], steps: int) -> Iterator[list[BatchKind]]:
    """Yield for each graph some of the batches that it is taken for, the largest first."""
    graphs: dict[str, list[BatchKind]] = {}
    for choice in found:
        if choice.mode != "NONE" and choice.wrong() is None and not choice.batch.loras:
            graphs.setdefault(choice.graph, []).append(choice.batch)
    for batches in reversed(graphs.values()):
        last = len(batches) - 1
        yield [batches[last - last * at // max(steps - 1, 1)] for at in range(steps)]


def _split(tokens: int, requests: int) -> list[int]:
    """Return the lengths of prompts that have ``tokens`` together."""
    return [tokens // requests + (at < tokens % requests) for at in range(requests)]


@dataclass
class _Request:
    """A synthetic request.

    Args:
        name: Its id.
        length: The tokens of its prompt.
        outputs: The tokens that it was given.
    """

    name: str
    length: int
    outputs: int = 1


class _Synthetic:
    """Requests of random tokens, and their steps.

    Args:
        runner: The model runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
        self._budget = runner.vllm_config.scheduler_config.max_num_batched_tokens
        self._draw = random.Random(0)  # noqa: S311  the same on all ranks
        self._count = 0
        self._block = 1  # block 0 is the null block of vLLM
        self._live: set[str] = set()
        self._ended: set[str] = set()

    def lengths(self, requests: int, steps: int) -> list[int]:
        """Return a length for each of ``requests`` prompts that leave room for ``steps`` more tokens.

        Raises:
            ConfigError: The KV cache is too small.
        """
        blocks = (self._runner.kv_cache_config.num_blocks - 1) // (requests * len(self._specs))
        room = min([self._runner.max_model_len, *(blocks * spec.block_size for spec in self._specs)]) - steps
        longest = min(_LONGEST, room, self._budget)
        if longest < 1:
            raise _too_small(f"{requests} requests")
        return [self._draw.randint(1, longest) for _ in range(requests)]

    def prefill(self, lengths: Sequence[int], steps: int) -> list[_Request]:
        """Prefill prompts, which get blocks for ``steps`` more tokens, and return their requests.

        Raises:
            ConfigError: The KV cache is too small.
        """
        requests: list[_Request] = []
        new: list[Any] = []
        tokens = 0
        for length in lengths:
            if tokens + length > self._budget:
                self._run(new, [])
                new, tokens = [], 0
            requests.append(_Request(f"graphpact-{self._count}", length))
            new.append(self._data(requests[-1], length + steps))
            tokens += length
            self._count += 1
        self._run(new, [])
        return requests

    def decode(self, requests: Sequence[_Request]) -> None:
        """Run a decode step of ``requests``."""
        self._run([], requests)
        for request in requests:
            request.outputs += 1

    def end(self, requests: Iterable[_Request]) -> None:
        """End requests with the next step; their blocks are free if all have ended."""
        for request in requests:
            self._ended.add(request.name)
            self._live.remove(request.name)
        if not self._live:
            self._block = 1

    def finish(self) -> None:
        """Tell the model runner which requests ended last."""
        self._run([], [])

    def _data(self, request: _Request, tokens: int) -> Any:
        vocabulary = self._runner.model_config.get_vocab_size()
        ids = [self._draw.randrange(vocabulary) for _ in range(request.length)]
        self._live.add(request.name)
        return NewRequestData(
            req_id=request.name,
            prompt_token_ids=ids,
            mm_features=[],
            sampling_params=SamplingParams(temperature=0, max_tokens=tokens),
            pooling_params=None,
            block_ids=tuple(self._blocks(-(-tokens // spec.block_size)) for spec in self._specs),
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=ids,
        )

    def _blocks(self, count: int) -> list[int]:
        first, self._block = self._block, self._block + count
        if self._block > self._runner.kv_cache_config.num_blocks:
            raise _too_small("prompts that fill a graph")
        return [*range(first, self._block)]

    def _run(self, new: list[Any], decoded: Sequence[_Request]) -> None:
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = new
        cached = output.scheduled_cached_reqs
        cached.req_ids = [each.name for each in decoded]
        cached.num_computed_tokens = [each.length + each.outputs - 1 for each in decoded]
        cached.num_output_tokens = [each.outputs for each in decoded]
        cached.new_block_ids = [None] * len(decoded)
        output.num_scheduled_tokens = {each.req_id: len(each.prompt_token_ids) for each in new}
        output.num_scheduled_tokens |= dict.fromkeys(cached.req_ids, 1)
        output.total_num_scheduled_tokens = sum(output.num_scheduled_tokens.values())
        output.num_common_prefix_blocks = [0] * len(self._specs)
        output.finished_req_ids, self._ended = self._ended, set()
        result = self._runner.execute_model(output)
        if result is None:
            result = self._runner.sample_tokens(None)
        if hasattr(result, "get_output"):  # of an asynchronous scheduler
            result.get_output()


def _too_small(what: str) -> ConfigError:
    return ConfigError(
        f"GRAPHPACT asks for synthetic steps, and {what} do not fit into the KV cache",
        hint="leave out the word start, or enlarge the KV cache",
    )
