"""The memory that the C library keeps between operations of a CPU.

An eager step allocates its intermediates from the C library, megabytes each for a long prompt. glibc gives
such blocks back to the system when they are freed, so each operation waits until its pages are mapped and
cleared again. That was a tenth of a step of 512 tokens of a model with 135 million parameters. It ends when a
larger block is freed: glibc's thresholds grow to the size of that block.

Does not: change a setting of the allocator, or the memory of other devices.
"""

import torch

_LARGE = 31 * 2**20
"""Bytes. glibc's threshold follows blocks of up to 32 MiB; it then keeps up to twice as much free memory."""


def keep_freed_memory() -> None:
    """Let the C library keep freed blocks of up to `_LARGE` bytes for the next operation.

    The pages of the block are never touched, so it takes no memory.
    """
    torch.empty(_LARGE, dtype=torch.uint8, device="cpu")
