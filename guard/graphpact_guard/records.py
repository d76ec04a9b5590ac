"""`GraphRecord`: what the guard keeps of one captured graph, and the check of a replay against it.

Does not: report; the guard does.
"""

import operator
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from graphpact.pact import Pact, Promise, Terms, walk
from graphpact_guard.faults import GraphKey, ReplayFault


@dataclass(frozen=True, slots=True)
class CapturedPart:
    """An object of the engine that the capture of a graph read.

    Args:
        owner: Whose it is, such as the class of an attention backend.
        name: Its name there, such as ``forward_metadata``; empty for the owner itself.
        value: The object at capture, which is kept.
        pact: What the capture read of it.
        leaves: The tensors that the capture read, by path.
    """

    owner: str
    name: str
    value: object
    pact: Pact[GraphKey]
    leaves: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls,
        key: GraphKey,
        owner: str,
        name: str,
        value: object,
        *,
        only: Collection[str] | None,
        limits: Collection[str],
    ) -> "CapturedPart":
        """Return the part of the graph ``key`` with the promises for what ``only`` lists; None for all."""
        parts: dict[str, Any] = {f"{owner}.{name}" if name else owner: value}
        pact = Pact.of(key, terms=Terms(only=only, limits=limits, shorter_views=True), **parts)
        read = {promise.path for promise in pact.promises}
        leaves = {at: leaf for at, leaf in walk(parts) if at in read and isinstance(leaf, torch.Tensor)}
        return cls(owner, name, value, pact, leaves)

    @property
    def path(self) -> str:
        """The path of the object in messages."""
        return f"{self.owner}.{self.name}" if self.name else self.owner

    @property
    def has_promises(self) -> bool:
        """Whether the capture read anything of the object."""
        return len(self.pact.promises) > 1

    def faults(self, key: GraphKey, value: object) -> Iterator[ReplayFault]:
        """Yield the disagreements of ``value``, which a replay has in the place of the captured object."""
        now = dict(walk({self.path: value}))
        breaches = self.pact.breaches(**{self.path: value})
        moved = {breach.path for breach in breaches if breach.rule == "address"}
        harmless = {path for path in moved if self._has_the_numbers(path, now.get(path))}
        for breach in breaches:
            if breach.path not in harmless:
                yield ReplayFault(
                    rule=breach.broken,
                    owner=self.owner,
                    field=breach.path.removeprefix(f"{self.owner}."),
                    key=key,
                    text=breach.text,
                    advice=breach.advice,
                )

    def _has_the_numbers(self, path: str, now: object) -> bool:
        """Return whether the captured tensor, which the graph reads, has the numbers of the tensor ``now``.

        Some right engines make new metadata for their own use, and refresh what the graph reads beside it.
        """
        captured = self.leaves.get(path)
        if captured is None or not isinstance(now, torch.Tensor) or now.dtype != captured.dtype:
            return False
        if now.dim() != captured.dim() or any(map(operator.gt, now.shape, captured.shape)):
            return False
        return torch.equal(captured[tuple(map(slice, now.shape))], now)


@dataclass
class GraphRecord:
    """One captured graph.

    Args:
        key: The graph.
        parts: The objects that its capture read.
        replays: How often it was replayed.
        contents: In how many replays contents were checked.
        verified: How many replays were compared with an eager run.
        started: How many synthetic steps were compared with an eager run before the engine served; the other
            counts are without them.
    """

    key: GraphKey
    parts: list[CapturedPart]
    replays: int = 0
    contents: int = 0
    verified: int = 0
    started: int = 0

    def __post_init__(self) -> None:
        roots: dict[str, Promise] = {}
        for part in self.parts:
            roots |= part.pact.roots
        self._pact = Pact(self.key, roots)
        self._captured = {part.path: part.value for part in self.parts}

    def faults(self, prepared: Mapping[str, object], passed: Mapping[str, object]) -> Iterator[ReplayFault]:
        """Yield the disagreements of a replay: one compiled comparison, unless it fails.

        Args:
            prepared: New metadata of the replay, where an owner made a new object, by owner or by path.
            passed: Static inputs that the engine passes anew, by name.
        """
        if not self._pact.keeps(self._captured):
            for part in self.parts:
                yield from part.faults(self.key, part.value)
        for part in self.parts if prepared or passed else ():
            made = prepared.get(part.path, prepared.get(part.owner)) if part.name else passed.get(part.path)
            if made is not None and made is not part.value and not part.pact.keeps({part.path: made}):
                yield from part.faults(self.key, made)

    def end_start(self) -> None:
        """Count the verified replays until now as synthetic steps, and begin the other counts anew."""
        self.started += self.verified
        self.replays = self.contents = self.verified = 0

    def leaves(self) -> dict[tuple[str, str], torch.Tensor]:
        """Return the tensors of metadata that the capture read, by owner and field."""
        return {
            (part.owner, path.removeprefix(f"{part.path}.")): tensor
            for part in self.parts
            if part.name
            for path, tensor in part.leaves.items()
        }
