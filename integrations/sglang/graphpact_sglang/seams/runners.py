"""What SGLang's graph runners hold: attention backends, metadata, static inputs, and the names of graphs.

Does not: change a runner.
"""

from collections.abc import Iterator
from typing import Any

from graphpact_guard import GraphKey

METADATA = ("forward_metadata", "forward_decode_metadata")
"""Attributes of attention backends that hold the metadata of a step. TensorRT-LLM's use the second."""
PER_REQUEST = "_prefill_static_buffers"
"""The attribute of a prefill runner that holds the static inputs of its requests."""


def key_of(runner: Any, shape_key: Any) -> GraphKey:
    """Return the name of a graph: the runner, and the parts of its key that are set."""
    role = "draft " if runner.model_runner.is_draft_worker else ""
    parts = [shape_key.size, shape_key.stream_idx, shape_key.variant_label, shape_key.attention_variant]
    return GraphKey(
        runner=f"{role}{type(runner).__name__}",
        shape=", ".join(str(part) for part in parts if part is not None),
    )


def counts_tokens(runner: Any) -> bool:
    """Return whether the sizes of a runner's graphs count tokens, as prefill's do, instead of requests."""
    return hasattr(runner, "max_num_tokens")


def is_a(runner: Any, path: str) -> bool:
    """Return whether a runner has the class at a dotted path, which is not imported here."""
    kind = type(runner)
    return f"{kind.__module__}.{kind.__qualname__}" == path


def static_inputs(runner: Any) -> Iterator[tuple[str, object]]:
    """Yield the objects with static inputs of a runner, by name."""
    yield type(runner.buffers).__name__, runner.buffers
    per_request = getattr(runner, PER_REQUEST, None)
    if per_request:
        yield f"{type(runner).__name__}.{PER_REQUEST}", per_request


def named_backends(runner: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attention backends of a runner by name, those inside of others too."""
    found: list[Any] = []
    waiting = [getattr(runner, "attn_backend", None) or runner.model_runner.attn_backend]
    while waiting:
        backend = waiting.pop(0)
        if any(backend is each for each in found):
            continue
        found.append(backend)
        for value in vars(backend).values():
            inner = value if isinstance(value, (list, tuple)) else [value]
            waiting += [
                each
                for each in inner
                if hasattr(each, "init_forward_metadata_out_graph") and not isinstance(each, type)
            ]
    classes = [type(backend).__name__ for backend in found]
    for at, (name, backend) in enumerate(zip(classes, found, strict=True)):
        yield (name if classes.count(name) == 1 else f"{name}[{classes[:at].count(name)}]"), backend


def metadata_of(backend: Any) -> dict[str, Any]:
    """Return the metadata of a step that a backend holds, by attribute; it may hold none."""
    return {name: getattr(backend, name) for name in METADATA if hasattr(backend, name)}


def step_metadata(runner: Any) -> dict[str, Any]:
    """Return the metadata of a step that each backend of a runner has now, by the backend's name."""
    return {name: getattr(backend, METADATA[0], None) for name, backend in named_backends(runner)}
