"""`SglangGuard`: the guard in SGLang, by hooks around the captures and replays of its graph backends.

SGLang's graph backends capture and replay for every runner, so two classes are enough: decode, verify, draft
and prefill runners use them. A graph is named by its runner and its key there.

Does not: see graphs that other code captures by ``torch.cuda.CUDAGraph``, such as SGLang's metadata glue
graph.
"""

import functools
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from graphpact_guard import GraphKey, Guard, Settings

_SRT = "sglang.srt.model_executor"
_FULL = f"{_SRT}.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend"
_BREAKABLE = f"{_SRT}.runner_backend.breakable_cuda_graph_backend.BreakableCudaGraphBackend"
_SEGMENTS = f"{_SRT}.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph.BreakableCUDAGraphCapture"
_UNSEEN = "graphs that other code captures by torch.cuda.CUDAGraph, and memory that kernels reach by pointers"


class SglangGuard:
    """The hooks of the guard. The guard itself is made at the first capture of the process.

    Args:
        settings: What is asked for.

    Attributes:
        guard: The guard; None before the first capture.
    """

    def __init__(self, settings: Settings) -> None:
        self.guard: Guard | None = None
        self._settings = settings

    def register(self) -> None:
        """Register the hooks."""
        full = functools.partial(self._capture_one, in_segments=False)
        in_segments = functools.partial(self._capture_one, in_segments=True)
        for target, hook, kind in (
            (f"{_FULL}.capture_one", full, HookType.AROUND),
            (f"{_FULL}.replay", self._replay, HookType.AROUND),
            (f"{_BREAKABLE}.capture_one", in_segments, HookType.AROUND),
            (f"{_BREAKABLE}.replay", self._replay, HookType.AROUND),
            (f"{_SEGMENTS}._begin_new_segment", self._segment_begun, HookType.AFTER),
            (f"{_SEGMENTS}._end_current_segment", self._segment_ends, HookType.BEFORE),
        ):
            HookRegistry.register(target, hook, kind)

    def _capture_one(
        self,
        original: Callable[..., Any],
        graph_backend: Any,
        shape_key: Any,
        *args: Any,
        in_segments: bool,
        **kwargs: Any,
    ) -> Any:
        runner = graph_backend._cuda_graph_runner  # noqa: SLF001  both backends have it
        if self.guard is None:
            self.guard = Guard(
                self._settings, _provenance(runner), metadata=("forward_metadata",), unseen=_UNSEEN
            )
        owners = dict(_named_backends(runner))
        for name, backend in owners.items():
            _watch_preparation(self.guard, name, backend)
        inputs = {type(runner.buffers).__name__: runner.buffers}
        with self.guard.capturing(_key(runner, shape_key), owners, inputs, in_segments=in_segments):
            return original(graph_backend, shape_key, *args, **kwargs)

    def _replay(
        self, original: Callable[..., Any], graph_backend: Any, shape_key: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if self.guard is not None:
            self.guard.replaying(_key(graph_backend._cuda_graph_runner, shape_key))  # noqa: SLF001
        return original(graph_backend, shape_key, *args, **kwargs)

    def _segment_begun(self, result: None, capture: Any) -> None:
        del result, capture
        if self.guard is not None:
            self.guard.watch_reads(watching=True)

    def _segment_ends(self, capture: Any) -> None:
        del capture
        if self.guard is not None:
            self.guard.watch_reads(watching=False)


def _key(runner: Any, shape_key: Any) -> GraphKey:
    """Return the name of a graph: the runner, and the parts of its key that are set."""
    role = "draft " if runner.model_runner.is_draft_worker else ""
    parts = [shape_key.size, shape_key.stream_idx, shape_key.variant_label, shape_key.attention_variant]
    return GraphKey(
        runner=f"{role}{type(runner).__name__}",
        shape=", ".join(str(part) for part in parts if part is not None),
    )


def _named_backends(runner: Any) -> Iterator[tuple[str, Any]]:
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
            waiting += [each for each in inner if hasattr(each, "init_forward_metadata_out_graph")]
    classes = [type(backend).__name__ for backend in found]
    for at, (name, backend) in enumerate(zip(classes, found, strict=True)):
        yield (name if classes.count(name) == 1 else f"{name}[{classes[:at].count(name)}]"), backend


def _watch_preparation(guard: Guard, name: str, backend: Any) -> None:
    """Tell ``guard`` when ``backend`` binds other metadata for a replay."""
    original = backend.init_forward_metadata_out_graph
    if getattr(original, "is_watched", False):
        return

    @functools.wraps(original)
    def watched(forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(backend, "forward_metadata", None)
        result = original(forward_batch, *args, **kwargs)
        now = getattr(backend, "forward_metadata", None)
        guard.prepared(name, None if now is before else now)
        return result

    watched.is_watched = True  # type: ignore[attr-defined]
    backend.init_forward_metadata_out_graph = watched


def _provenance(runner: Any) -> dict[str, str]:
    """Return what runs here, for reports."""
    model_runner = runner.model_runner
    return {
        "sglang": version("sglang"),
        "model": str(model_runner.server_args.model_path),
        "attention": type(model_runner.attn_backend).__name__,
        "rank": str(getattr(model_runner, "tp_rank", 0)),
    }
