"""Tests that the schemas of graphpact's kernels declare what the kernels write."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from graphpact.tensors import storage_id
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_tape.host_guard import DispatchMode
from graphpact_tape.operators import Contents, written_by
from graphpact_tape.trees import tensors_of

MODELS = Path(__file__).parents[1] / "examples" / "models"


class _ComparesMemory(DispatchMode):
    """A dispatch mode that compares the writes of graphpact's kernels with their schemas."""

    def __init__(self) -> None:
        super().__init__()
        self.checked: set[str] = set()
        self.hidden: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if not func.namespace.startswith("graphpact"):
            return func(*args, **kwargs)
        marked = {storage_id(t) for t in written_by(func, args, kwargs)}
        contents = Contents(tensors_of((args, kwargs)), disturb=False)
        result = func(*args, **kwargs)
        self.checked.add(func.name())
        if contents.written().keys() - marked:
            self.hidden.add(func.name())
        return result


@pytest.mark.few(2)
@pytest.mark.parametrize("kernels", ["portable", "compiled"])
@pytest.mark.parametrize(
    ("backend", "model", "page_size"),
    [("flashinfer", "tiny-llama", 4), ("fa3", "tiny-llama", 4), ("trtllm_mla", "tiny-deepseek", 32)],
)
def test_a_kernel_writes_what_its_schema_marks(
    backend: str, model: str, page_size: int, kernels: str
) -> None:
    """In eager prefill and decode steps, kernels write only arguments that their schemas mark as written."""
    overrides = [
        f'model.path="{MODELS / model}"',
        'engine.device="cpu"',
        f'engine.attention_backend="{backend}"',
        f'engine.kernel_provider="{kernels}"',
        f"engine.page_size={page_size}",
        "lanes.decode.capture=false",
        "lanes.prefill.capture=false",
    ]
    engine = Engine(EngineConfig.load(None, env={}, overrides=overrides))
    with _ComparesMemory() as seen:
        engine.generate(["Once upon", "If"], SamplingParams(max_new_tokens=4))
    assert seen.checked
    assert seen.hidden == set()
