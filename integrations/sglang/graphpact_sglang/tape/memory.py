"""`declared_memory`: the memory around the graph that SGLang captures now, by its use, for the tape.

A strict tape refuses a graph that writes other memory, such as weights and ``req_to_token`` (GP19). It
replays a new graph twice on the same inputs, and refuses one whose second result differs (GP18).

Does not: list what graphs only read; that is any memory.
"""

from typing import Any, ClassVar

from graphpact.graphs import DeclaredMemory
from graphpact.memory_names import MemoryNames, tensors_under
from graphpact_sglang.seams.runners import metadata_of, named_backends, static_inputs


class Capture:
    """The memory around the graph that SGLang's graph backend captures now.

    Args:
        graph_backend: The graph backend. The metadata of its next graph is prepared already.
    """

    now: "ClassVar[Capture | None]" = None
    """The capture of this process; None while no graph backend captures."""

    def __init__(self, graph_backend: Any) -> None:
        runner = graph_backend._cuda_graph_runner  # noqa: SLF001  both backends have it
        model_runner = runner.model_runner
        backends = dict(named_backends(runner))
        inputs = dict(tensors_under(dict(static_inputs(runner))))  # what graphs give out is among them
        host = {path: inputs.pop(path) for path in [*inputs] if path.endswith("_cpu")}
        metadata = {
            f"{owner}.{name}": value
            for owner, backend in backends.items()
            for name, value in metadata_of(backend).items()
        }
        eager = getattr(model_runner, "eager_runner", None)  # made after the first captures
        eager_slots = {} if eager is None else eager._eager_registry._slots  # noqa: SLF001
        of_host = {name: slot for name, slot in eager_slots.items() if name.endswith("_cpu")}
        self._graph_backend = graph_backend
        self._names = names = MemoryNames()
        # Attention backends hold some of these too.
        names.claim(dict(model_runner.model.named_parameters()))
        names.claim({"req_to_token": model_runner.req_to_token_pool.req_to_token})
        self._caches = names.claim(_pools(model_runner))
        self._refreshed = names.claim(inputs | metadata)
        # Eager runs of more requests than any graph has copy there too.
        self._host = names.claim(host | {"EagerRunner": of_host})
        self._workspaces = names.claim(backends | {"EagerRunner": eager_slots})  # drafts copy there

    def memory(self) -> DeclaredMemory:
        """Return what the graph may write, and the memory of the host.

        The graph backend may have allocated memory for outputs since the capture began.
        """
        outputs = self._names.claim({type(self._graph_backend).__name__: self._graph_backend})
        return DeclaredMemory(
            refreshed=self._refreshed,
            caches=self._caches,
            workspaces=[*self._workspaces, *outputs],
            host=self._host,
            name_of=self._names.name_of,
        )


def capture_begins(graph_backend: Any, *args: Any, **kwargs: Any) -> None:
    """Note the memory around the next graph. The guard must not watch, because all metadata is read."""
    del args, kwargs
    Capture.now = Capture(graph_backend)


def capture_ended(*args: Any, **kwargs: Any) -> None:
    """Forget it. A capture that fails ends the process."""
    del args, kwargs
    Capture.now = None


def declared_memory() -> DeclaredMemory:
    """Return the memory around the graph that is captured now.

    Of a graph that no graph backend of SGLang captures nothing is known, so nothing is declared.
    """
    return DeclaredMemory() if Capture.now is None else Capture.now.memory()


def _pools(model_runner: Any) -> dict[str, Any]:
    """Return the pools of keys, values and recurrent states by name, those inside of others too."""
    found: dict[str, Any] = {}
    waiting = {"token_to_kv_pool": model_runner.token_to_kv_pool} | _inner(model_runner.req_to_token_pool)
    while waiting:
        name, pool = waiting.popitem()
        found[name] = pool
        waiting |= {inner: each for inner, each in _inner(pool).items() if inner not in found}
    return found


def _inner(pool: Any) -> dict[str, Any]:
    """Return the pools that ``pool`` has as attributes."""
    return {
        name: each
        for name, each in vars(pool).items()
        if name.endswith("_pool") and hasattr(each, "__dict__")
    }
