"""``graphpact pact``: what the graphs of an engine promise, as a file to keep, to read and to compare.

    graphpact pact save before.json --config engine.toml
    graphpact pact show before.json
    graphpact pact diff before.json after.json

Does not: replay anything, or import what a file names.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from graphpact.cli.console import clean, data, note, print_table
from graphpact.errors import UsageError
from graphpact_engine.cli.options import (
    ConfigOption,
    ModelOption,
    SetOption,
    build_engine,
    load_settings,
)
from graphpact_engine.saved_pacts import (
    Change,
    SavedPact,
    SavedPacts,
    SavedPromise,
    diff,
    require_target,
)

_DIFFERENT = 1

_PARTIAL = {
    "unknown": "lane {}: its driver does not tell what graphs read, so its pacts cover view and metadata, and"
    " no tensor that the backend holds besides",
    "dispatched": "lane {}: of the tensors that the backend holds its pacts cover those that operations of"
    " torch read, and not those of kernels launched below torch's dispatcher",
}

pact = typer.Typer(
    help="Save, show and compare what the graphs of an engine promise.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
)

JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON object.")]


@pact.command()
def save(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Where to write, in JSON.")],
    *,
    model: ModelOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there already.")
    ] = False,
) -> None:
    """Build an engine, which captures, and write what each captured shape promised to FILE.

    In the file a tensor's place is its slot and the bytes from the slot's start, and no address, so that
    files of two processes can be compared.
    """
    settings = load_settings(config, model, sets)
    require_target(file, overwrite=force)
    with build_engine(settings) as engine:
        saved = SavedPacts.of(
            (lane.name, captured.pact)
            for lane in engine.lanes
            for captured in lane.captured.values()
        )
        partial = [
            _PARTIAL[e].format(lane.name)
            for lane in engine.lanes
            if (e := lane.stats.externals) in _PARTIAL
        ]
    if not saved.pacts:
        raise UsageError(
            "no lane captured a shape, so there is no pact to save",
            hint="select a runner that captures: --set lanes.decode.runner=cuda_graph",
        )
    saved.save(file, overwrite=force)
    note(f"{_how_many(len(saved.pacts), 'pact')} saved in {file}")
    for text in partial:
        note(text)


@pact.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What `graphpact pact save` wrote.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Show the promises of a saved file, one table for each lane and shape.

    `<= 512` is a host number that may be smaller in a replay; `= 512` may not.
    """
    saved = SavedPacts.load(file)
    if as_json:
        sys.stdout.write(json.dumps(saved.to_dict(), indent=2) + "\n")
        return
    if not saved.pacts:
        note(f"{file} has no pact")
    console = data()
    for at, held in enumerate(saved.pacts):
        if at:
            console.print()
        console.print(clean(_heading(held)), soft_wrap=True)
        rows = [
            (promise.path, promise.type, _promised(promise), _place(promise))
            for promise in held.promises
        ]
        print_table(console, ("field", "type", "promises", "memory"), rows)


@pact.command(name="diff")
def compare(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A file of `graphpact pact save`.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="Another one.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Compare two saved files by lane, shape and field.

    Ends with status 0 where both promise the same, with 1 where they differ, and with 2 where a file
    cannot be read.
    """
    changes = diff(SavedPacts.load(old), SavedPacts.load(new))
    if as_json:
        report = {"equal": not changes, "changes": [asdict(change) for change in changes]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print_changes(changes)
    if changes:
        raise typer.Exit(_DIFFERENT)


def _heading(held: SavedPact) -> str:
    return f"lane {held.lane}, {held.shape}: {_how_many(len(held.promises), 'promise')}"


def _promised(promise: SavedPromise) -> str:
    tensor = promise.tensor
    if tensor is not None:
        return (
            f"{tensor.dtype} {list(tensor.shape)}, stride {list(tensor.stride)}, on {tensor.device}"
        )
    if promise.value is None:
        return ""  # the type says all there is
    return f"{'<=' if promise.bounded else '='} {promise.value}"


def _place(promise: SavedPromise) -> str:
    tensor = promise.tensor
    if tensor is None:
        return ""
    return "no slot" if tensor.slot is None else f"{tensor.slot} + {tensor.offset} bytes"


def _print_changes(changes: Sequence[Change]) -> None:
    """Print a row for each change, and how many there are."""
    console = data()
    if not changes:
        console.print("Both promise the same.")
        return
    rows = [
        (c.lane, c.shape or "", c.path or "", c.what, _word(c.old), _word(c.new)) for c in changes
    ]
    print_table(console, ("lane", "shape", "field", "what", "old", "new"), rows)
    console.print()
    where = len({(change.lane, change.shape) for change in changes})
    console.print(f"{_how_many(len(changes), 'difference')} in {_how_many(where, 'shape')}.")


def _word(value: Any) -> str:
    if value is None:
        return "-"
    return str(list(value)) if isinstance(value, tuple) else str(value)


def _how_many(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
