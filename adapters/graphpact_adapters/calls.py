"""`uncalled`: methods of an author's object that its engine calls and that no lane of a run calls.

Does not: know an engine's methods; its adapter lists them.
"""

from collections.abc import Collection, Iterator, Mapping

from graphpact_conformance.suite import Uncalled


def uncalled(
    objects: Collection[object], methods: Mapping[str, str], called: Collection[str], *, base: str
) -> Iterator[Uncalled]:
    """Yield the methods that an author's object defines and that no lane calls.

    Args:
        objects: The author's objects.
        methods: When the engine calls each method.
        called: The methods that the lanes call.
        base: Name of the engine's base class. Its methods are left out: the author did not write them.
    """
    for name, when in methods.items():
        if name not in called and any(_defines(type(each), name, base) for each in objects):
            yield Uncalled(name, f"the engine calls it {when}")


def _defines(cls: type, name: str, base: str) -> bool:
    owner = next((each for each in cls.__mro__ if name in vars(each)), None)
    return owner is not None and owner.__name__ != base
