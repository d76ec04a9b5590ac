"""``graphpact vllm``: vLLM's engine on a laptop, eagerly and on a tape, and what differs.

    run         continue prompts, and compare both runs
    dispatch    the graph that vLLM's dispatcher takes for each batch
    diff        what two releases changed for those who build on them

Does not: import vLLM; each run is a process of its own, and releases are only read.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from graphpact.engines import EngineJob
from graphpact_cli.console import data, note
from graphpact_cli.engine_runs import LaptopEngine, engine_app, parse_setting, require_ready
from graphpact_cli.releases.command import add_diff
from graphpact_vllm.arguments import EAGER, GRAPHS, LAPTOP
from graphpact_vllm.runs.choices_report import judge_choices, print_choices
from graphpact_vllm.runs.offer import VllmDispatchers, VllmOffer
from graphpact_vllm.runs.surface import RELEASES

vllm = engine_app(
    LaptopEngine(
        offer=VllmOffer(),
        checkpoint="model",
        laptop=LAPTOP,
        graphs=GRAPHS,
        eager=EAGER,
        left_out=("compilation_config", "attention_backend", "speculative"),
    )
)


@vllm.command("dispatch")
def dispatch(
    *,
    model: Annotated[Path, typer.Option(help="The folder of a checkpoint.", show_default=False)],
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An argument of vLLM's engine, with a value in JSON or a text; repeatable.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Write every choice of every rank as JSON to stdout.")
    ] = False,
) -> None:
    """Write which graph vLLM's dispatcher takes for each batch.

    Batches are decodes and batches with a prefill, of all numbers of tokens up to the largest captured graph
    and one more. The engine captures on a tape. The exit status is 1 if a graph is too small for its batch,
    is of another kind, or differs between ranks.
    """
    offer = VllmDispatchers()
    require_ready(offer, model)
    arguments = {**LAPTOP, "model": str(model.resolve()), **GRAPHS, **dict(map(parse_setting, sets or []))}
    note("starting vLLM on a tape")
    ranks = offer.run("tape", EngineJob(engine=arguments, prompts=[], max_new_tokens=0)).states
    tables = [table for table in ranks if table is not None]
    if as_json:
        data().print(json.dumps(tables), soft_wrap=True)
    else:
        print_choices(tables[0])
    judge_choices(tables)


add_diff(vllm, RELEASES)
