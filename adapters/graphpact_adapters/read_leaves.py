"""The leaves of a kernel's reads: tensors and host numbers with their paths, and copies with other values.

Reads are dataclasses that contain tensors, host numbers and tuples of such dataclasses; see
`graphpact_adapters.kernel_reads`.

Does not: know which kernel reads them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch


def leaves(reads: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the tensors and host values of reads, with their paths, such as ``parts[0].seq_lens``.

    A field with ``compare=False`` is a label and not a leaf. A tuple of numbers is one value.
    """
    if is_dataclass(reads) and not isinstance(reads, type):
        for name in _compared(reads):
            yield from leaves(getattr(reads, name), f"{path}.{name}" if path else name)
    elif _has_parts(reads):
        for at, part in enumerate(reads):
            yield from leaves(part, f"{path}[{at}]")
    else:
        yield path, reads


def with_leaves(reads: Any, values: dict[str, Any], path: str = "") -> Any:
    """Return a copy of reads with other values at some paths."""
    if is_dataclass(reads) and not isinstance(reads, type):
        changed = {
            name: with_leaves(getattr(reads, name), values, f"{path}.{name}" if path else name)
            for name in _compared(reads)
        }
        return replace(reads, **changed)
    if _has_parts(reads):
        return tuple(with_leaves(part, values, f"{path}[{at}]") for at, part in enumerate(reads))
    return values.get(path, reads)


def _has_parts(reads: Any) -> bool:
    return isinstance(reads, tuple) and any(is_dataclass(part) for part in reads)


def _compared(reads: Any) -> list[str]:
    return [each.name for each in fields(reads) if each.compare]


def field_name(reads: Any, path: str) -> str:
    """Return the path of a leaf as the author of the metadata knows it, without ``parts[0]``.

    The index of a part without a name is left out if it is the only part.
    """
    parts: Sequence[Any] = getattr(reads, "parts", ())
    for at, part in enumerate(parts):
        prefix = f"parts[{at}]"
        if path.startswith(f"{prefix}."):
            name = part.name or (prefix if len(parts) > 1 else "")
            last = path.removeprefix(f"{prefix}.")
            known: str = part.names.get(last, last)
            return f"{name}.{known}" if name else known
    return path


def copied(reads: Any) -> Any:
    """Return the reads with copies of all tensors, with their present contents."""
    tensors = {path: value.clone() for path, value in leaves(reads) if isinstance(value, torch.Tensor)}
    return with_leaves(reads, tensors)
