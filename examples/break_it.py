"""Three real bugs in copies of the shipped plugins, run first without checks and then with a check.

    python examples/break_it.py

Each bug breaks the agreement between capture and replay, as bugs of released engines did. Without checks the
model still generates text, sometimes wrong text. The pact, a strict lane, or verification names the bug.

It needs no GPU, and it does not change the installed plugins.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from graphpact import ForwardBatch, GraphShape, GraphSlot, PaddingPolicy, hookimpl
from graphpact.errors import ContractError
from graphpact.plugins import PluginCatalog
from graphpact_cuda_graph import CudaGraphRunner
from graphpact_engine import Engine, SamplingParams
from graphpact_engine.config import EngineConfig
from graphpact_flashinfer import FlashInferBackend

HERE = Path(__file__).parent
PROMPTS = ["Return the ", "A", "The value of a graph is "]


class RebuildsMetadata(FlashInferBackend):
    """A backend whose replay creates new tensors, while the graph keeps reading the old ones."""

    fill_is_device_only = False

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Return new metadata instead of refreshing the captured metadata."""
        del shape, captured
        return self.init_metadata_eager(view)


class KeepsRequestRows(CudaGraphRunner):
    """A runner whose padding rows keep request rows of an earlier, larger batch (SGLang PR 26292)."""

    def slots(self) -> Sequence[GraphSlot]:
        """Return the slots, one of them with padding rows that are never reset."""
        kept: dict[str, Any] = {
            "padding_policy": PaddingPolicy.KEEP_PAD,
            "reason": "an earlier row is a valid row",
        }
        return [
            replace(slot, **kept) if slot.name == "req_pool_indices" else slot for slot in super().slots()
        ]


class PlansOnce(FlashInferBackend):
    """A backend that plans for the first step only, and reuses that plan in later steps."""

    fill_is_device_only = False
    planned = False

    @hookimpl
    def init_metadata_replay(self, view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:
        """Refresh the metadata in the first step only."""
        if not self.planned:
            self.planned = True
            return super().init_metadata_replay(view, shape, captured)
        return captured


class Replaced(PluginCatalog):
    """The installed plugins, with one class replaced."""

    def __init__(self, name: str, plugin: type[Any]) -> None:
        self._installed = PluginCatalog.scan()
        self._name, self._plugin = name, plugin

    def select(self, kind: Any, name: str) -> Any:
        """Return the class with this name."""
        return self._plugin if name == self._name else self._installed.select(kind, name)


def generate(name: str, plugin: type[Any], *settings: str) -> list[str]:
    """Return the completions of the demo model, with the plugin ``name`` replaced by ``plugin``."""
    config = EngineConfig.load(
        HERE / "demo.toml",
        overrides=[
            "engine.kernel_provider=portable",
            "engine.max_num_seqs=4",
            "lanes.decode.batch_sizes=[4]",
            *settings,
        ],
    )
    sampling = SamplingParams(max_new_tokens=24, temperature=0.0)
    with Engine(config, catalog=Replaced(name, plugin)) as engine:
        engine.generate(PROMPTS[:1] * 4, SamplingParams(max_new_tokens=2))  # a larger batch first
        return [completion.text for completion in engine.generate(PROMPTS, sampling)]


def main() -> None:
    """Run each bug without checks, and then with one check."""
    right = generate("flashinfer", FlashInferBackend)
    for name, plugin, check in (
        ("flashinfer", RebuildsMetadata, "verify.pact=always"),
        ("cuda_graph", KeepsRequestRows, "lanes.decode.strict=true"),
        ("flashinfer", PlansOnce, "verify.replay_against_eager=1"),
    ):
        print(f"\n== {plugin.__name__}: {plugin.__doc__}")
        answers = generate(name, plugin, "verify.pact=off")
        wrong = sum(a != b for a, b in zip(answers, right, strict=True))
        print(f"   unchecked: no error, {wrong} of {len(right)} answers wrong")
        try:
            generate(name, plugin, "verify.pact=off", check)
            print(f"   {check}: NOT CAUGHT")
        except ContractError as error:
            print(f"   {check}:\n      {type(error).__name__}: " + f"{error}".replace("\n", "\n      "))


if __name__ == "__main__":
    main()
