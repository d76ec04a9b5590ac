"""`MemoryNames`: which memory a use gets, and what messages call it."""

from dataclasses import dataclass

import torch

from graphpact.memory_names import MemoryNames, tensors_under


@dataclass
class Metadata:
    """Tensors of a step."""

    indptr: torch.Tensor
    kv: torch.Tensor


class Backend:
    """An object of a plain class that holds a cache and a workspace of its own."""

    def __init__(self, cache: torch.Tensor) -> None:
        self.cache, self.partial = cache[2:], torch.zeros(4)
        self.parts = [self.partial[:2], self.partial[2:]]


def test_memory_has_the_first_use_that_claims_it() -> None:
    """A later claim gets only the rest: views of memory that has a name are left out."""
    cache = torch.zeros(8)
    backend, names = Backend(cache), MemoryNames()
    assert names.claim({"kv_cache": cache}) == [cache]
    workspaces = names.claim({"Backend": backend})
    assert [id(each) for each in workspaces] == [id(each) for each in (backend.partial, *backend.parts)]
    assert names.claim({"Backend": backend}) == []
    assert names.name_of(backend.cache) == "kv_cache"
    assert names.name_of(backend.parts[1]) == "Backend.partial"
    assert names.name_of(torch.zeros(1)) is None


def test_empty_tensors_have_no_memory_and_no_name() -> None:
    """Tensors without elements are not claimed; others are found by path in containers."""
    metadata = Metadata(indptr=torch.zeros(2), kv=torch.zeros(0))
    assert [path for path, _ in tensors_under({"a": metadata, "b": {"k": [metadata.indptr, 3]}})] == [
        "a.indptr",
        "b['k'][0]",
    ]
    names = MemoryNames()
    assert names.claim({"metadata": metadata}) == [metadata.indptr]
    assert names.name_of(metadata.kv) is None
