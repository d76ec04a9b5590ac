"""`check_rearmed`: two replays on the same inputs give the same result.

They differ if a counter or a flag is not reset inside the graph. Eager calls between its segments run in both
replays.

Does not: know the right result; verification compares contents.
"""

import torch

from graphpact.errors import CaptureError
from graphpact.graphs.driver import DeclaredMemory
from graphpact.tensors import equal, storage_id
from graphpact_tape.strict import StrictTape
from graphpact_tape.trees import tensors_of
from graphpact_tape.writes import write

__tracebackhide__ = True


def check_rearmed(
    tape: StrictTape,
    memory: DeclaredMemory,
    armed: list[torch.Tensor],
    generator: torch.Generator,
) -> None:
    """Replay twice on the same inputs, with workspaces as before the first run, and undo both replays.

    The inputs are memory that the graph writes and every step refreshes. Eager calls may write all declared
    memory and their arguments. The outputs of a region that is recorded as a block are unknown, so all memory
    of such a graph is compared.

    Raises:
        CaptureError: The results differ, because replays change some state and nothing resets it.
    """
    is_broken = tape.num_segments > 1
    inputs = [t for t in (*memory.refreshed, *memory.caches) if is_broken or tape.writes(t)]
    state = list(memory.workspaces)
    kept = {storage_id(t) for t in state}
    given = [t for t in tape.given() if storage_id(t) not in kept]
    before = [t.clone() for t in (*inputs, *given, *state)]
    random = generator.get_state()
    results = []
    try:
        for tensor, value in zip(state, armed, strict=True):
            write(tensor, value)
        for _ in range(2):
            for tensor, value in zip((*inputs, *given), before, strict=False):
                write(tensor, value)
            generator.set_state(random)
            tape.rehearse()
            outputs = tape.pool.values() if tape.outputs is None else tensors_of(tape.outputs)
            results.append([t.clone() for t in (*outputs, *inputs)])
    finally:
        moved = [
            memory.name_of(t) or "a workspace"
            for t, value in zip(state, armed, strict=True)
            if not equal(t, value)
        ]
        for tensor, value in zip((*inputs, *given, *state), before, strict=True):
            write(tensor, value)
        generator.set_state(random)
        tape.spoil()
    if not all(equal(a, b) for a, b in zip(*results, strict=True)):
        where = f"; a replay leaves changed: {', '.join(moved)}" if moved else ""
        raise CaptureError(
            f"a second replay on the same inputs gives another result{where}",
            hint=(
                "reset counters and flags inside the graph, before their first use: the host set them only "
                "once, and a replay does not repeat host work"
            ),
            rule="GP18",
        )
