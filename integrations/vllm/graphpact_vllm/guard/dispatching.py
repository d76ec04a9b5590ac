"""`choices`: the graph that vLLM's own dispatcher takes for each batch up to the largest graph, and one more.

A graph for fewer tokens than the batch has computes a part of it, and one of another kind reads lengths that
the batch does not have. vLLM's dispatchers are functions of few numbers, so all of them are asked before it
serves:

    model runner V2     ``CudaGraphManager.dispatch``, that of drafts too
    model runner V1     ``CudagraphDispatcher.dispatch``

The kinds of batches are decodes whose requests all have one token, or one and their drafts; decodes of
different lengths, where graphs for these are captured; and batches with a prefill, of one request and of as
many as fit. With LoRAs there are none, one, and as many as are captured.

Does not: import vLLM; dispatch micro-batches or encoders.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from graphpact_guard import GraphKey, ReplayFault, describe_ranks
from graphpact_vllm.seams.shapes import query_len_of, shape_of

_EAGER, _FULL = "NONE", "FULL"  # vLLM's names of modes
DISPATCH_ADVICE = (
    "fix what the dispatcher returns: a batch replays a graph that holds it, captured for its kind, or none"
)
"""What to do if a graph is taken for a batch that it does not serve."""

Table = list[dict[str, Any]]
"""The choices of a dispatcher, ready for JSON: what `rows` returns."""


@dataclass(frozen=True, slots=True)
class BatchKind:
    """A batch, as dispatchers see it.

    Args:
        tokens: Its tokens.
        requests: Its requests.
        query_len: The tokens of each request of a decode, or the most of them; 0 with a prefill.
        is_uniform: Whether all requests have as many.
        loras: Active LoRAs.
    """

    tokens: int
    requests: int
    query_len: int = 1
    is_uniform: bool = True
    loras: int = 0

    def __str__(self) -> str:
        length = f" of {self.query_len}" if self.is_uniform else f" of up to {self.query_len}"
        kind = f"decode{length}" if self.query_len else "with a prefill"
        loras = f", {self.loras} LoRAs" if self.loras else ""
        return f"{self.tokens} tokens, {self.requests} requests, {kind}{loras}"


@dataclass(frozen=True, slots=True)
class Choice:
    """What a dispatcher takes for a batch.

    Args:
        batch: The batch.
        mode: ``FULL``, ``PIECEWISE``, or ``NONE`` for an eager step.
        desc: vLLM's descriptor of the graph.
        is_captured: Whether there is such a graph.
    """

    batch: BatchKind
    mode: str
    desc: Any
    is_captured: bool

    @property
    def graph(self) -> str:
        """The graph in words, such as ``FULL[8]``; ``eager``."""
        return "eager" if self.mode == _EAGER else f"{self.mode}[{shape_of(self.desc)}]"

    def wrong(self) -> str | None:
        """Return why the graph does not serve the batch, or None."""
        return next(self._faults(), None)

    def _faults(self) -> Iterator[str]:
        batch, desc = self.batch, self.desc
        if desc.num_tokens < batch.tokens:
            yield f"it holds {desc.num_tokens} tokens, and the batch has {batch.tokens}"
        if self.mode == _EAGER:
            return
        if not self.is_captured:
            yield "it was not captured"
        if desc.num_reqs is not None and desc.num_reqs < batch.requests:
            yield f"it holds {desc.num_reqs} requests, and the batch has {batch.requests}"
        length, most = query_len_of(desc), getattr(desc, "max_query_len", None)
        if length is not None and (not batch.is_uniform or length != batch.query_len):
            yield f"it is for requests of {length} tokens each, and the batch is {batch}"
        if most is not None and not 0 < batch.query_len <= most:
            yield f"it is for requests of at most {most} tokens, and the batch is {batch}"
        if desc.num_active_loras < batch.loras:
            yield f"it holds {desc.num_active_loras} LoRAs, and the batch has {batch.loras}"


def choices(dispatcher: Any, graphs: Any = None) -> list[Choice]:
    """Return what a dispatcher takes for each batch.

    Args:
        dispatcher: A ``CudaGraphManager`` or a ``CudagraphDispatcher``, after its graphs are captured.
        graphs: Those of the model runner V1, a collection of descriptors; None if unknown.
    """
    if hasattr(dispatcher, "cudagraph_keys"):
        return [*_choices_of_keys(dispatcher, graphs)]
    return [*_choices_of_manager(dispatcher)]


def faults(found: list[Choice], owner: str) -> Iterator[ReplayFault]:
    """Yield a fault for each choice that is wrong; ``owner`` names the dispatcher."""
    for choice in found:
        wrong = choice.wrong()
        if wrong is not None:
            yield ReplayFault(
                rule="GP12",
                owner=owner,
                field="dispatch",
                key=GraphKey(runner=choice.mode, shape=shape_of(choice.desc)),
                text=f"is taken for {choice.batch}; {wrong}",
                advice=DISPATCH_ADVICE,
            )


def rows(found: list[Choice]) -> Table:
    """Return the choices, ready for JSON."""
    return [
        {
            "batch": f"{each.batch}",
            "tokens": each.batch.tokens,
            "requests": each.batch.requests,
            "query_len": each.batch.query_len,
            "is_uniform": each.batch.is_uniform,
            "loras": each.batch.loras,
            "graph": each.graph,
            "graph_tokens": each.desc.num_tokens,
            "wrong": each.wrong(),
        }
        for each in found
    ]


def difference_of_ranks(said: Mapping[str, Mapping[str, Table]]) -> ReplayFault:
    """Return the fault of the first batch for which ranks would take different graphs.

    Args:
        said: The tables of each rank, by the name of the rank and that of the dispatcher. They differ.
    """
    first: Mapping[str, Table] = next(iter(said.values()))
    for name, table in first.items():
        for at, row in enumerate(table):
            its = {rank: _graph_at(tables.get(name, []), at) for rank, tables in said.items()}
            if len({*its.values()}) > 1:
                return ReplayFault(
                    rule="GP17",
                    owner=name,
                    field="dispatch",
                    key=GraphKey(runner=name, shape=f"{row['tokens']}"),
                    text=f"ranks would take different graphs for {row['batch']}: {describe_ranks(its)}",
                    advice="capture the same graphs on all ranks: memory of one rank must not decide",
                )
    lengths = {rank: f"{sorted(tables)}" for rank, tables in said.items()}
    return ReplayFault(
        rule="GP17",
        owner="ranks",
        field="dispatch",
        key=GraphKey(runner="ranks", shape="all"),
        text=f"ranks have different dispatchers: {describe_ranks(lengths)}",
        advice="start all ranks with the same arguments",
    )


def _graph_at(table: Table, at: int) -> str:
    return str(table[at]["graph"]) if at < len(table) else "has no such batch"


def _choices_of_manager(manager: Any) -> Iterator[Choice]:
    descs = [desc for its in manager._capture_descs.values() for desc in its]  # noqa: SLF001  no public name
    if not descs:
        return
    lengths = {desc.uniform_token_count for desc in descs} - {None} | {manager.decode_query_len}
    is_varlen = any(desc.max_query_len is not None for desc in descs)
    batches = _batches(
        max(desc.num_tokens for desc in descs),
        manager.max_num_reqs,
        sorted(lengths),
        manager.decode_query_len if is_varlen else 0,
        [desc.num_active_loras for desc in descs],
    )
    for batch in batches:
        desc = manager.dispatch(
            batch.requests,
            batch.tokens,
            batch.query_len if batch.is_uniform else None,
            num_active_loras=batch.loras,
            max_query_len=batch.query_len or None,
        )
        is_captured = desc.cg_mode.name != _FULL or desc in manager.graphs
        yield Choice(batch, desc.cg_mode.name, desc, is_captured)


def _choices_of_keys(dispatcher: Any, graphs: Any) -> Iterator[Choice]:
    keys = [desc for its in dispatcher.cudagraph_keys.values() for desc in its]
    if not keys:
        return
    batches = _batches(
        max(desc.num_tokens for desc in keys),
        dispatcher.vllm_config.scheduler_config.max_num_seqs,
        [dispatcher.uniform_decode_query_len],
        0,
        [desc.num_active_loras for desc in keys],
    )
    for batch in batches:
        mode, desc = dispatcher.dispatch(
            batch.tokens,
            uniform_decode=batch.is_uniform,
            has_lora=batch.loras > 0,
            num_active_loras=batch.loras,
        )
        is_captured = mode.name != _FULL or graphs is None or desc in graphs
        yield Choice(batch, mode.name, desc, is_captured)


def _batches(
    largest: int, max_requests: int, lengths: list[int], most_varying: int, captured_loras: list[int]
) -> Iterator[BatchKind]:
    """Yield the batches of up to ``largest + 1`` tokens; see the module."""
    most_loras = max(captured_loras)
    for tokens in range(1, largest + 2):
        for loras in sorted({0, min(1, most_loras), most_loras}):
            for length in lengths:
                requests, rest = divmod(tokens, length)
                if not rest and requests <= max_requests:
                    yield BatchKind(tokens, requests, length, loras=loras)
            most = min(tokens, max_requests)
            if most_varying > 1 and tokens <= most_varying * max_requests:
                fewest = -(-tokens // most_varying)
                for requests in sorted({fewest, most}):
                    yield BatchKind(tokens, requests, most_varying, is_uniform=False, loras=loras)
            for requests in sorted({1, most}):
                yield BatchKind(tokens, requests, 0, is_uniform=False, loras=loras)
