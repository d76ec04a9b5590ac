"""`run_start`: synthetic steps of every captured shape before SGLang serves; the guard compares each.

Requests of random tokens are prefilled and decoded as SGLang's own benchmark of one batch does it, by its
batches and its memory pools. A prefill graph gets prompts that fill its tokens, and fewer. A decode graph
gets steps of all of its requests, and of fewer, so that padding rows follow live ones. All ranks run the same
steps, because they draw the same numbers.

The pools are empty before the engine serves. After the steps they are cleared, and compared with what they
were. KV slots keep what was written: they are free, and a step writes a slot before it reads it.

Does not: compare; the guard does, in the hook around the runners.
"""

import random
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner, PrefillCudaGraphRunner
from sglang.srt.runtime_context import get_parallel
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.utils.common import require_mlp_sync

from graphpact.errors import ConfigError, EngineError

_LONGEST = 64
"""The most tokens of a synthetic prompt for a decode step."""


def run_start(model_runner: Any, steps: int) -> int:
    """Run synthetic steps of each captured shape, and return the number of shapes.

    Args:
        model_runner: SGLang's model runner, with its graphs.
        steps: Steps of each shape.

    Raises:
        ConfigError: There are no synthetic steps for this configuration; the message says why.
        EngineError: A memory pool is not as it was before.
    """
    _require_possible(model_runner)
    synthetic = _Synthetic(model_runner)
    shapes = 0
    for _, counts in _shapes(model_runner.prefill_cuda_graph_runner, PrefillCudaGraphRunner, steps):
        shapes += 1
        for tokens in counts:
            lengths = synthetic.split(tokens)
            with _borrowed(model_runner, lengths):
                synthetic.prefill(lengths)
    for size, counts in _shapes(model_runner.decode_cuda_graph_runner, DecodeCudaGraphRunner, steps):
        shapes += 1
        lengths = synthetic.lengths(size, steps)
        with _borrowed(model_runner, [length + steps for length in lengths]):
            batch = synthetic.prefill(lengths)
            for live in counts:
                synthetic.decode(batch, live)
    return shapes


def _require_possible(model_runner: Any) -> None:
    runner = model_runner.decode_cuda_graph_runner
    mode = getattr(runner, "capture_forward_mode", ForwardMode.DECODE)
    for is_so, what in (
        (mode is not ForwardMode.DECODE, "drafts or diffusion"),
        (require_mlp_sync(), "data parallel attention"),
        (get_parallel().pp_size > 1, "pipeline parallelism"),
        (model_runner.model_config.is_encoder_decoder, "an encoder"),
        (isinstance(model_runner.req_to_token_pool, HybridReqToTokenPool), "a recurrent state"),
    ):
        if is_so:
            raise ConfigError(
                f"GRAPHPACT asks for synthetic steps before serving, and there are none with {what}",
                hint="leave out the word start; verify:N compares steps of the real load",
            )


def _shapes(runner: Any, kind: Any, steps: int) -> Iterator[tuple[int, list[int]]]:
    """Yield each captured size of a runner, with the live sizes of its steps; largest first."""
    if not isinstance(runner, kind):
        return
    sizes = sorted(getattr(runner, "capture_num_tokens", None) or runner.capture_bs)
    for smaller, size in reversed(list(zip([0, *sizes], sizes, strict=False))):
        fewest = smaller + 1
        if kind is PrefillCudaGraphRunner:  # SGLang pads to less than twice the tokens
            fewest = max(fewest, size // 2 + 1)
        yield size, [size - (size - fewest) * at // max(steps - 1, 1) for at in range(steps)]


class _Synthetic:
    """Batches of random tokens."""

    def __init__(self, model_runner: Any) -> None:
        self._runner = model_runner
        self._draw = random.Random(0)  # noqa: S311  the same on all ranks
        self._count = 0

    def split(self, tokens: int) -> list[int]:
        """Return the lengths of a few prompts that have ``tokens`` together."""
        fewest = -(-tokens // self._runner.model_config.context_len)
        count = min(max(3, fewest), self._runner.req_to_token_pool.size, tokens)
        return [tokens // count + (at < tokens % count) for at in range(count)]

    def lengths(self, requests: int, steps: int) -> list[int]:
        """Return a length for each of ``requests`` prompts that fit into one prefill and the pools.

        Raises:
            ConfigError: The KV cache is too small.
        """
        args, allocator = self._runner.server_args, self._runner.token_to_kv_pool_allocator
        budget = args.chunked_prefill_size or 0
        if budget <= 0:
            budget = args.max_prefill_tokens
        pages = allocator.available_size() // allocator.page_size // requests
        room = min(self._runner.model_config.context_len, pages * allocator.page_size) - steps
        longest = min(_LONGEST, room, budget // requests)
        if longest < 1:
            raise ConfigError(
                f"GRAPHPACT asks for synthetic steps, and {requests} requests do not fit into the KV cache",
                hint="leave out the word start, or enlarge the KV cache",
            )
        return [self._draw.randint(1, longest) for _ in range(requests)]

    def prefill(self, lengths: Sequence[int]) -> ScheduleBatch:
        """Prefill prompts, and return their batch."""
        runner = self._runner
        batch = ScheduleBatch.init_new(
            reqs=[self._request(length) for length in lengths],
            req_to_token_pool=runner.req_to_token_pool,
            token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            tree_cache=_NoCache(
                page_size=runner.page_size,
                device=runner.device,
                token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
            ),
            model_config=runner.model_config,
            enable_overlap=False,
            spec_algorithm=runner.spec_algorithm,
        )
        batch.prepare_for_extend()
        if batch.input_ids is None:
            batch.input_ids = batch.prefill_input_ids_cpu.to(batch.device)
            batch.prefill_input_ids_cpu = None
        self._forward(batch)
        return batch

    def decode(self, batch: ScheduleBatch, live: int) -> None:
        """Run a decode step of the first ``live`` requests; the others end."""
        batch.filter_batch(keep_indices=list(range(live)))
        batch.input_ids = torch.tensor(self._tokens(live), dtype=torch.int64, device=batch.device)
        batch.prepare_for_decode()
        self._forward(batch)

    def _forward(self, batch: ScheduleBatch) -> None:
        self._runner.forward(
            ForwardBatch.init_new(batch, self._runner, return_hidden_states_before_norm=False)
        )

    def _request(self, length: int) -> Req:
        self._count += 1
        request = Req(
            rid=f"graphpact-{self._count}",
            origin_input_text="",
            origin_input_ids=array("q", self._tokens(length)),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=1),
        )
        request.full_untruncated_fill_ids = request.origin_input_ids
        request.logprob_start_len = -1
        request.extend_end = length
        return request

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(self._runner.model_config.vocab_size) for _ in range(count)]


class _NoCache(SimpleNamespace):
    """A prefix cache that has nothing; memory is allocated through it."""

    def supports_swa(self) -> bool:
        return False

    def supports_mamba(self) -> bool:
        return False

    def supports_prefix_sharing(self) -> bool:
        return True

    def evict(self, params: Any) -> None:
        """Do nothing: there is nothing to evict."""

    def maybe_hand_to_session(self, request: Any) -> None:
        """Do nothing: there is no session."""


@contextmanager
def _borrowed(model_runner: Any, lengths: Sequence[int]) -> Iterator[None]:
    """Lend the empty pools for a batch, and clear them after it.

    Args:
        model_runner: SGLang's model runner.
        lengths: The most tokens of each request.

    Raises:
        EngineError: They are not as they were.
    """
    pool, allocator = model_runner.req_to_token_pool, model_runner.token_to_kv_pool_allocator
    free, num_free, pages = list(pool.free_slots), allocator.available_size(), allocator.get_all_free_pages()
    rows = torch.tensor(free[-len(lengths) :], device=pool.req_to_token.device)  # a pool gives its last ones
    table = pool.req_to_token[rows, : max(lengths)].clone()
    try:
        yield
    finally:
        pool.clear()
        allocator.clear()
        pool.req_to_token[rows, : max(lengths)] = table
    now = allocator.get_all_free_pages()
    is_same = (now is None) if pages is None else torch.equal(pages, now)
    if pool.free_slots != free or allocator.available_size() != num_free or not is_same:
        raise EngineError(
            "the memory pools are not as they were before the synthetic steps",
            hint="leave out the word start, and report which attention backend and cache this was",
        )
