"""Helpers shared by several test files: plugins by name, slots and fills, random programs.

Does not: hold fixtures; those are in ``conftest.py``.
"""

import contextlib
import importlib.util
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch.nn import functional
from torch.utils import _pytree as pytree

from graphpact.attention import AttentionBackend
from graphpact.buffers import CudaGraphBufferRegistry, GraphSlot, PaddingPolicy
from graphpact.graphs import GraphDriver
from graphpact.plugins import Kind, PluginCatalog, PluginInfo
from graphpact.runners import EagerRunner, GraphRunner
from graphpact_cli.survey import describe_plugin
from graphpact_cpu_graph import CpuGraphRunner
from graphpact_cpu_graph.inductor import InductorDriver
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_fa3 import FA3Backend
from graphpact_flashinfer import FlashInferBackend
from graphpact_tape.tape import TapeDriver
from graphpact_trtllm_mla import TRTLLMMLABackend

ROOT = Path(__file__).parents[1]
OF_ENGINES = [file for engine in ("sglang", "vllm") for file in (ROOT / "examples" / engine).glob("*.py")]
"""The modules of the pages about backends of other engines."""

RECORDING_DRIVERS: dict[str, Callable[[], GraphDriver]] = {
    "tape": lambda: TapeDriver(torch.device("cpu")),
    "strict": lambda: TapeDriver(torch.device("cpu"), strict=True),
    "inductor": lambda: InductorDriver(torch.device("cpu")),
}
"""Makes each driver that records with a `graphpact_tape.recorder.Recorder`."""


def load_reference(script: str = "tools/reference") -> ModuleType:
    """Import a script of `docs`, by default the one that writes reference pages, as a module."""
    spec = importlib.util.spec_from_file_location(Path(script).name, ROOT / f"docs/{script}.py")
    assert spec is not None
    assert spec.loader is not None
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    return reference


def survey_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``plugins`` and ``doctor`` import plugins in this process, so that patches of a test apply."""

    def survey(catalog: PluginCatalog, kind: Kind | None = None) -> list[dict[str, Any]]:
        with contextlib.redirect_stdout(sys.stderr):
            return [describe_plugin(catalog.load(info)) for info in catalog.infos(kind)]

    monkeypatch.setattr("graphpact_cli.survey.survey", survey)
    monkeypatch.setattr("graphpact_engine.cli.machine.survey", survey)


class Catalog(PluginCatalog):
    """A catalog of the first-party plugins and those of a test, by name.

    Args:
        plugins: Classes by name; a class with the name of one of ours replaces it.
    """

    def __init__(self, **plugins: type[Any]) -> None:
        super().__init__({})
        self._plugins = {
            "eager": EagerRunner,
            "fa3": FA3Backend,
            "cpu_graph": CpuGraphRunner,
            "cuda_graph": CudaGraphRunner,
            "flashinfer": FlashInferBackend,
            "inductor": InductorDriver,
            "tape": TapeDriver,
            "trtllm_mla": TRTLLMMLABackend,
            **plugins,
        }

    def select(self, kind: str, name: str) -> type[Any]:  # type: ignore[override]
        """Return the class of that name."""
        return self._plugins[name]


class ListedCatalog(Catalog):
    """A `Catalog` that can also list its plugins, as installed metadata would."""

    def infos(self, kind: Kind | None = None) -> list[PluginInfo]:
        """Return the `PluginInfo` of each plugin of a kind, or of all kinds."""
        kinds: dict[Kind, type[Any]] = {
            "attention_backend": AttentionBackend,
            "runner": GraphRunner,
            "graph_driver": GraphDriver,
        }
        return [
            PluginInfo(what, name, "a test", "0", f"{cls.__module__}:{cls.__name__}", "1")
            for name, cls in self._plugins.items()
            for what, base in kinds.items()
            if issubclass(cls, base) and kind in (None, what)
        ]


def pairwise(dimensions: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Return cases that have every pair of values of two dimensions; far fewer than the product.

    Each case is the best of several random ones: the one with the most pairs that no earlier case covers.
    """
    rng, names = random.Random(seed), [*dimensions]

    def pairs(case: Mapping[str, Any]) -> set[tuple[str, Any, str, Any]]:
        return {(a, case[a], b, case[b]) for a, b in itertools.combinations(names, 2)}

    left = {
        (a, x, b, y)
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(dimensions[a], dimensions[b])
    }
    cases = []
    while left:
        a, x, b, y = min(left, key=repr)
        drawn = [{n: rng.choice(dimensions[n]) for n in names} | {a: x, b: y} for _ in range(50)]
        cases.append(max(drawn, key=lambda case: len(pairs(case) & left)))
        left -= pairs(cases[-1])
    return cases


def reference_tokens(path: Path, prompt: list[int], count: int) -> list[int]:
    """Return the tokens that transformers generates greedily after ``prompt``."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(
        path,
        dtype=torch.float32,
        attn_implementation="eager",  # the only implementation that always applies a soft cap
    ).eval()
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


def make_slot(name: str = "lengths", **changes: Any) -> GraphSlot:
    """Return a ``[max_bs]`` int64 slot that is copied and padded with zeros; ``changes`` replace fields."""
    declared: dict[str, Any] = {
        "shape_fn": lambda max_bs, _: (max_bs,),
        "dtype": torch.int64,
        "axis": "bs",
        "padding_policy": PaddingPolicy.ZERO,
        "owner": "somebody",
    }
    return GraphSlot(name, **(declared | changes))


def fill(registry: CudaGraphBufferRegistry, raw: int, padded: int, **fields: Any) -> None:
    """Fill the slots from a batch of ``fields`` with one token per request."""
    registry.fill_from(
        SimpleNamespace(**fields),
        raw_bs=raw,
        padded_bs=padded,
        raw_num_tokens=raw,
        padded_num_tokens=padded,
    )


def leaves(tree: Any) -> list[torch.Tensor]:
    """Return the tensors in a tree of containers."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


# Each step computes one ``[4, 4]`` tensor from two, which are inputs or results of earlier steps.
STEPS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add": lambda a, b: a + b,
    "mul number": lambda a, b: a * 0.5,
    "mm": lambda a, b: a @ b,
    "linear": lambda a, b: functional.linear(a, b, b[0]),
    "transpose": lambda a, b: a.t(),
    "flip halves": lambda a, b: torch.cat([a[2:], b[:2]]),
    "row softmax": lambda a, b: torch.softmax(a, -1),
    "expand": lambda a, b: a[:, :1].expand(4, 4),
    "reshape": lambda a, b: a.t().reshape(2, 8).view(4, 4),
    "where": lambda a, b: torch.where(a > b, a, b),
    "masked_fill_": lambda a, b: a.clone().masked_fill_(b > 0, 0.25),
    "in place": lambda a, b: a.mul_(0.5).add_(b.mean()),
    "write a view": lambda a, b: (a[1:3].copy_(b[:2]), a)[1],
    "index_put_": lambda a, b: a.index_put_((b[:, 0].gt(0).long() + 1,), b[:1]),
    "layer_norm": lambda a, b: functional.layer_norm(a, (4,)),
    "topk": lambda a, b: torch.topk(a, 4).values,
    "max.dim": lambda a, b: torch.max(a, dim=0).values + b,
    "split": lambda a, b: a.split([1, 3], dim=1)[0].expand(4, 4),
    "embedding": lambda a, b: functional.embedding(a.gt(0).long()[:, 0], b),
    "sdpa": lambda a, b: functional.scaled_dot_product_attention(a[None], b[None], a[None])[0],
    "factory": lambda a, b: (
        torch.full((4, 4), 2.0, device=a.device) + torch.arange(4, device=a.device) - torch.ones_like(a)
    ),
    "round trip": lambda a, b: a.to(torch.bfloat16).to(torch.float32),
    "bmm": lambda a, b: torch.bmm(a.view(2, 2, 4), b[None].expand(2, 4, 4)).view(4, 4),
    "foreach": lambda a, b: torch._foreach_add([a, b], 1.0)[1],
}
PROGRAMS = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=9,
)


def run_program(
    program: list[tuple[str, int, int]],
    *inputs: torch.Tensor,
    call: Callable[..., torch.Tensor] = lambda step, a, b: step(a, b),
) -> list[torch.Tensor]:
    """Run a program of `PROGRAMS` on two ``[4, 4]`` tensors, and return the results of all steps.

    Args:
        program: Steps: a name, and the indices of its two operands among inputs and earlier results.
        inputs: The first operands; they are cloned and not written.
        call: Calls a step with its two operands.
    """
    values = [t.clone() for t in inputs]
    for name, i, j in program:
        a, b = values[i % len(values)], values[j % len(values)]
        if name in ("in place", "write a view", "index_put_"):
            a, b = a.clone() if 0 in a.stride() else a, b.clone()  # may write earlier results
        values.append(call(STEPS[name], a.contiguous() if name in ("reshape", "bmm") else a, b))
    return values
