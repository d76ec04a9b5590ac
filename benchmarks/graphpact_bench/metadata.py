"""The host time of each attention backend's metadata hook: its work in the graph, and before the graph.

If the metadata work of a backend runs only on the device, it may be recorded as the first nodes of the graph;
the hook then does the rest, such as a plan. The replays do nothing, so only host work is measured.

Does not: measure kernels, or metadata of other modes than decode.
"""

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import torch

from graphpact.attention import Capabilities, HeadLayout
from graphpact.errors import UsageError
from graphpact.plugins import PluginCatalog, Rejected
from graphpact_bench.models import random_prompts, save_latent_model, save_model
from graphpact_bench.options import BenchOptions
from graphpact_bench.repeated_step import LIVE, SIZE, MetadataByHook, RepeatedStep, doing_nothing
from graphpact_bench.report import Chart, Column, Skipped, Table, spread_columns, spread_values
from graphpact_bench.step import CUDA, FULL, QUICK, TAPE, graphs_of
from graphpact_bench.timing import Spread, take_turns

WHERE = {"in the graph": PluginCatalog, "before the graph": MetadataByHook}
_POSITIONS, _PAGE = 128, 16


@torch.inference_mode()
def measure(options: BenchOptions) -> Iterator[Table]:
    """Yield the table of every installed attention backend."""
    scale = QUICK if options.quick else FULL
    table = Table(
        name="metadata",
        title=f"host time of the metadata hook in a decode step of {LIVE} requests at size {SIZE},"
        f" {options.setting}: {scale.turns} turns",
        columns=[
            Column(key="backend", heading="backend"),
            Column(key="model", heading="model"),
            Column(key="work", heading="metadata work"),
            *spread_columns("us", "us", ".1f"),
            Column(key="nodes", heading="nodes of the graph", format="d"),
        ],
        chart=Chart(value="us", label=["backend", "work"]),
    )
    graphs, _ = graphs_of(options)
    graph = graphs[TAPE if TAPE in graphs else CUDA]
    with tempfile.TemporaryDirectory(prefix="graphpact-bench-") as folder, ExitStack() as stack:
        paths = {"Llama": Path(folder) / "llama", "DeepSeek (MLA)": Path(folder) / "latent"}
        save_model(paths["Llama"], scale.shape, _POSITIONS)
        save_latent_model(paths["DeepSeek (MLA)"], scale.shape.layers, _POSITIONS)
        steps: dict[tuple[str, str, str], RepeatedStep] = {}
        catalog = PluginCatalog.scan()
        for info in catalog.infos("attention_backend"):
            plugin = catalog.load(info)
            if isinstance(plugin, Rejected):
                table.skipped.append(Skipped(what=info.name, reason=plugin.reason))
                continue
            can: Capabilities = plugin.cls.capabilities
            model = _model_for(can.head_layouts, paths)
            page = _PAGE if can.page_sizes is None or _PAGE in can.page_sizes else min(can.page_sizes)
            for work, plugins in WHERE.items():
                options.say(f"metadata: {info.name}, {work}")
                overrides = (
                    *graph,
                    f'engine.attention_backend="{info.name}"',
                    f"engine.page_size={page}",
                )
                prompts = random_prompts(LIVE, scale.prompt, scale.shape.vocab)
                try:
                    step = RepeatedStep(paths[model], prompts, options, *overrides, catalog=plugins.scan())
                except UsageError as error:  # this backend does not declare what is needed
                    table.skipped.append(Skipped(what=f"{info.name}, {work}", reason=error.message))
                    continue
                stack.callback(step.engine.close)
                steps[info.name, model, work] = step
        with doing_nothing([step.graph for step in steps.values()]):
            taken = take_turns(
                {str(key): step.refresh for key, step in steps.items()}, turns=scale.turns, calls=scale.calls
            )
        for (backend, model, work), step in steps.items():
            spread = Spread.of(taken[str((backend, model, work))])
            table.add(
                backend=backend,
                model=model,
                work=work,
                **spread_values("us", spread.times(1e6)),
                nodes=step.graph.num_nodes,
            )
    yield table


def _model_for(layouts: Iterable[HeadLayout], paths: dict[str, Path]) -> str:
    """Return the model that a backend with these head layouts runs."""
    ordinary, latent = paths
    return latent if HeadLayout.MLA in layouts else ordinary
