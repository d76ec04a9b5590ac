"""The acts of ``graph_acts.toml``: legal and illegal work in and around graphs, performed on a driver.

    act       `Act`, the memory that acts use, and functions that perform a region
    regions   acts that are one region
    host      Python, host values and other threads
    memory    memory that is freed, moved, written and copied
    streams   streams and events
    state     random numbers, shapes, and nested captures

The name of an act is the id of its row. The act is a region in `regions`, or a function with this name and a
leading underscore in another module.

Does not: define the allowed outcomes of an act; see `graphpact_conformance.drivers.strictness`.
"""

from graphpact_conformance.drivers.acts import host, memory, regions, state, streams
from graphpact_conformance.drivers.acts.act import Act, ActMemory, lines_of

ACTS: dict[str, Act] = {
    name: act
    for module in (regions, host, memory, streams, state)  # the order of the results
    for name, act in module.ACTS.items()
}
"""Every act that can be performed without the CUDA runtime, by its name."""


def lines_of_act(name: str) -> set[tuple[str, int]]:
    """Return the files and numbers of the lines that may perform an act."""
    return ACTS[name].lines() | lines_of(regions.put_at, memory.after, host.elsewhere)


__all__ = ["ACTS", "Act", "ActMemory", "lines_of_act"]
