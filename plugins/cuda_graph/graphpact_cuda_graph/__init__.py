"""The ``cuda_graph`` runner: one full graph for each decode bucket, on whatever driver the lane has.

The name is the field's; on a CPU the lane's driver is the tape.

Does not: serve prefill, or capture a part of a step.
"""

import torch

from graphpact import (
    BucketLadder,
    CudaGraphBufferRegistry,
    ForwardBatch,
    ForwardMode,
    GraphRunner,
    GraphShape,
)
from graphpact.attention import GraphSupport
from graphpact.buffers import build_decode_registry
from graphpact.errors import ConfigError
from graphpact.shapes import default_decode_batch_sizes


class CudaGraphRunner(GraphRunner):
    """Captures the whole forward pass of decode for every bucket of a ladder of request counts."""

    modes = frozenset({ForwardMode.DECODE})
    needs = GraphSupport.UNIFORM_DECODE
    ladder: BucketLadder  # never None: this runner always captures

    def make_ladder(self) -> BucketLadder:
        """Return the configured buckets, or the default ladder up to the largest step.

        Raises:
            ConfigError: A bucket that no step can fill.
        """
        sizes = self.context.batch_sizes
        if sizes is None:
            sizes = default_decode_batch_sizes(self.context.max_bs)
        if max(sizes, default=0) > self.context.max_bs:
            raise ConfigError(
                f"lanes.decode.batch_sizes has {max(sizes)}, but a step has at most"
                f" engine.max_num_seqs = {self.context.max_bs} requests",
                hint="leave the larger buckets out, or raise engine.max_num_seqs",
            )
        return BucketLadder(ForwardMode.DECODE, sizes)

    def make_registry(self) -> CudaGraphBufferRegistry:
        """Return the inputs of decode, padded with the length that the backend reads as empty."""
        largest = self.ladder.largest
        return build_decode_registry(
            max_bs=largest.batch_size,
            max_num_token=largest.num_tokens,
            device=self.context.device,
            seq_len_fill_value=self.context.backend.seq_len_fill_value,
            register_global_num_tokens=False,
            enable_mrope=False,
            zero_input_ids=True,
            share_pool=self.context.share_pool,
            lane=self.context.lane,
        )

    def dummy_batch(self, shape: GraphShape) -> ForwardBatch:
        """Return requests of the backend's fill length on row 0 and slot 0: padding, every row."""
        length = self.context.backend.seq_len_fill_value
        size, device = shape.batch_size, self.context.device

        def full(value: int, where: torch.device = device) -> torch.Tensor:
            return torch.full((size,), value, dtype=torch.int64, device=where)

        return ForwardBatch(
            forward_mode=shape.mode,
            batch_size=size,
            input_ids=full(0),
            positions=full(max(length - 1, 0)),
            out_cache_loc=full(0),
            req_pool_indices=full(0),
            seq_lens=full(length),
            seq_lens_cpu=full(length, torch.device("cpu")),
        )
