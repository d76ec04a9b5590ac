"""Capture and replay regions with collectives on every driver; `test_collectives` runs this on two ranks.

    torchrun --nproc-per-node 2 tests/graphs/ranks.py examples/models/tiny-llama /tmp fast strict inductor

Arguments: a checkpoint, a folder, drivers. Each process writes a JSON file named after its rank: "equal" or
the fault, for each case and driver.

Does not: assert; `test_collectives` does.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor

from graphpact.errors import GraphpactError
from graphpact.graphs import DeclaredMemory, GraphDriver
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_tape import TapeDriver
from graphpact_tape.trees import tensors_of

CPU = torch.device("cpu")
SIZE = 2
Region = Callable[[Tensor], Any]


def _empty(n: int = 4) -> Tensor:
    return torch.empty(n, device=CPU)


def _after(call: Callable[[Tensor], object]) -> Region:
    """Return a region in which a collective writes a new tensor in place; the region returns this tensor."""

    def region(x: Tensor) -> Tensor:
        y = x * 1
        call(y)
        return y + 1

    return region


def _asynchronous(x: Tensor) -> tuple[Tensor, Tensor]:
    y, z = x * 2, _empty(8)
    works = [dist.all_reduce(y, async_op=True), dist.all_gather_into_tensor(z, x, async_op=True)]
    for work in works:
        work.wait()
    return y + 1, z * 2


def _gathered(x: Tensor) -> Tensor:
    parts = [_empty() for _ in range(SIZE)]
    dist.all_gather(parts, x)
    return torch.cat(parts)


def _into(call: Callable[[Tensor, Tensor], object], n: int) -> Region:
    def region(x: Tensor) -> Tensor:
        out = _empty(n)
        call(out, x)
        return out * 2

    return region


def _reduce_scattered(x: Tensor) -> Tensor:
    out = _empty(2)
    dist.reduce_scatter(out, [x[:2] * 1, x[2:] * 1])
    return out


def _gathered_at_root(x: Tensor) -> Tensor:
    parts = [_empty() for _ in range(SIZE)] if dist.get_rank() == 0 else None
    dist.gather(x, parts, dst=0)
    return torch.cat(parts) if parts else x * 1


def _scattered(x: Tensor) -> Tensor:
    out = _empty(2)
    dist.scatter(out, [x[:2] * 1, x[2:] * 1] if dist.get_rank() == 0 else None, src=0)
    return out


def _coalesced(x: Tensor) -> list[Tensor]:
    parts = [x * 1, x[:2] * 3]
    with dist._coalescing_manager():
        for part in parts:
            dist.all_reduce(part)
    return parts


def _exchanged(x: Tensor) -> Tensor:
    parts = [_empty(2) for _ in range(SIZE)]
    dist.all_to_all(parts, [x[:2] * 1, x[2:] * 1])
    return torch.cat(parts)


def _all() -> Any:
    return dist.group.WORLD


def _reduced(x: Tensor, how: str = "sum") -> Tensor:
    """Return the result of a functional reduction without waiting for it."""
    return functional.all_reduce(x, how, _all())


CASES: dict[str, Region] = {
    "all_reduce": _after(dist.all_reduce),
    "all_reduce max": _after(lambda y: dist.all_reduce(y, dist.ReduceOp.MAX)),
    "all_reduce of an input": lambda x: (dist.all_reduce(x), x + 1)[1],
    "asynchronous": _asynchronous,
    "broadcast": _after(lambda y: dist.broadcast(y, 1)),
    "reduce": _after(lambda y: dist.reduce(y, 0)),
    "all_gather": _gathered,
    "all_gather_into_tensor": _into(dist.all_gather_into_tensor, 8),
    "reduce_scatter": _reduce_scattered,
    "reduce_scatter_tensor": _into(dist.reduce_scatter_tensor, 2),
    **({"all_to_all": _exchanged} if torch.__version__ >= (2, 12) else {}),  # before, gloo lacks it
    "all_to_all_single": _into(dist.all_to_all_single, 4),
    "gather": _gathered_at_root,
    "scatter": _scattered,
    "coalesced": _coalesced,
    "functional all_reduce": lambda x: _reduced(x * 2) + 1,
    "functional all_gather": lambda x: functional.all_gather_tensor(x * 2, 0, _all()) + 1,
    "functional reduce_scatter": lambda x: functional.reduce_scatter_tensor(x, "sum", 0, _all()) + 1,
    "functional all_to_all": lambda x: functional.all_to_all_single(x, None, None, _all()) + 1,
    "functional broadcast": lambda x: functional.broadcast(x * 2, 1, _all()) + 1,
    "functional coalesced": lambda x: [
        y + 1 for y in functional.all_reduce_coalesced([x * 2, x[:2] * 3], "sum", _all())
    ],
    "functional, returned before a wait": lambda x: _reduced(x * 2),
    "functional, of another's result": lambda x: _reduced(_reduced(x), "max") * 2,
}


def _received(x: Tensor) -> Tensor:
    y = x * 1
    dist.send(y, 1) if dist.get_rank() == 0 else dist.recv(y, 0)
    return y


def _batched(x: Tensor) -> Tensor:
    y, peer = _empty(), 1 - dist.get_rank()
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)]):
        work.wait()
    return y


REFUSED: dict[str, Region] = {
    "send and recv": _received,
    "batch_isend_irecv": _batched,
    "barrier": lambda x: (dist.barrier(), x + 1)[1],
}


COMPILED = ("all_reduce", "asynchronous", "reduce_scatter", "functional all_reduce", "functional coalesced")
"""The cases that run on `inductor` too: a few, because it compiles slowly and calls all collectives alike."""


DRIVERS: dict[str, Callable[[], GraphDriver]] = {
    "fast": lambda: TapeDriver(CPU),
    "strict": lambda: TapeDriver(CPU, strict=True),
    "inductor": lambda: InductorDriver(CPU),
}
"""The drivers that record, by name."""


def _values(result: Any) -> list[Tensor]:
    """Wait for pending collectives, and return copies of the tensors of a result."""
    return [(t.wait() if hasattr(t, "wait") else t).clone() for t in tensors_of(result)]


def _contents(turn: int) -> Tensor:
    return torch.arange(4.0) * (turn + 1) + 10 * dist.get_rank() + turn


def _outcome(region: Region, driver: GraphDriver) -> str:
    """Capture a region, replay it on two other inputs, and compare with eager execution."""
    x = _contents(0).clone()
    driver.declare(DeclaredMemory(refreshed=[x]))
    with torch.inference_mode():
        graph = driver.capture(lambda: region(x))
        for turn in (1, 2):
            wanted = _values(region(_contents(turn)))
            for t in tensors_of(graph.outputs):
                t.fill_(-99)
            x.copy_(_contents(turn))
            graph.replay()
            got = _values(graph.outputs)
            if not all(map(torch.equal, got, wanted)) or len(got) != len(wanted):
                return f"turn {turn}: {[t.tolist() for t in got]} instead of {[t.tolist() for t in wanted]}"
    return "equal"


def _refusal(region: Region, driver: GraphDriver) -> str:
    """Return the error of capturing a region; skip the warm-up, because it would communicate."""
    x = _contents(0)
    try:
        driver.capture(lambda: region(x), warmup=0)
    except GraphpactError as error:
        return str(error)
    return "not refused"


def _trace() -> list[list[str]]:
    """Return the collectives in the trace of a region, with their group and reduction."""
    driver = TapeDriver(CPU, traced=True)
    x = _contents(0)
    graph: Any = driver.capture(lambda: _after(lambda y: dist.all_reduce(y, dist.ReduceOp.MAX))(x))
    return [[call.op, *map(str, call.arguments)] for call in graph.trace if call.op.startswith("c10d")]


def _undeclared() -> str:
    """Return the error of a strict capture in which a collective writes memory that was not declared."""
    driver = TapeDriver(CPU, strict=True)
    x, hidden = _contents(0), torch.zeros(8)
    driver.declare(DeclaredMemory(refreshed=[x]))
    return _refusal(lambda _: (dist.all_gather_into_tensor(hidden, x), x + 1)[1], driver)


def _model(path: str, drivers: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield, by driver, the outcome for a model whose layers transformers splits over the ranks."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, distributed_config=DistributedConfig(tp_size=SIZE)
    ).eval()
    ids = torch.arange(6)[None] + 5
    mask = torch.ones(1, 1, 6, 6).tril().log()  # without it, transformers reads tensors on the host
    places = torch.arange(6)[None]

    def region(of: Any) -> Tensor:
        return of(ids, attention_mask=mask, position_ids=places, use_cache=False).logits

    for name in drivers:
        with torch.inference_mode():
            ids.copy_(torch.arange(6)[None] + 5)
            graph = DRIVERS[name]().capture(lambda: region(model))
            outcome = "equal"
            for turn in (1, 2):
                ids.copy_(torch.arange(6)[None] * turn + 9)
                graph.outputs.fill_(-99)
                graph.replay()
                got, eager = graph.outputs.clone(), region(model)
                if not torch.allclose(got, eager, atol=0 if name != "inductor" else 1e-4, rtol=0):
                    outcome = f"turn {turn}: {(got - eager).abs().max()} off eager"
                elif not torch.allclose(got, region(whole), atol=1e-4, rtol=1e-4):
                    outcome = f"turn {turn}: not the logits of one process"
        yield name, outcome


def main(checkpoint: str, folder: str, *drivers: str) -> None:
    """Run all cases with the given drivers, and write the outcomes to a file in the folder."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    found: dict[str, Any] = {
        "cases": {
            name: {case: _outcome(CASES[case], DRIVERS[name]()) for case in _cases_of(name)}
            for name in drivers
        },
        "refused": {
            name: {case: _refusal(region, DRIVERS[name]()) for case, region in REFUSED.items()}
            for name in drivers
        },
        "trace": _trace(),
        "undeclared": _undeclared(),
        "model": dict(_model(checkpoint, drivers)),
    }
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _cases_of(driver: str) -> Iterable[str]:
    return COMPILED if driver == "inductor" else CASES


if __name__ == "__main__":
    main(*sys.argv[1:])
