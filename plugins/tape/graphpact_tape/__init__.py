"""The distribution of the driver ``tape``: the rules of CUDA graphs on any device that runs eager torch.

    tape        the driver, fast and strict
    recorder    dispatched operations, kept for replay
    strict      the strict tape: every replay over poison
    order       streams, events and copies, held to their waits
    host        which memory is the host's, and what may read it
    poison      what invalid memory holds
    guard       the strict guard around the hooks and steps of a lane

Does not: import any of these by itself.
"""
