"""``graphpact pact``: saves, shows and compares the pacts of an engine.

    graphpact pact save before.json --config engine.toml
    graphpact pact show before.json
    graphpact pact diff before.json after.json

Does not: replay anything, or import types that a file names.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphpact.errors import UsageError
from graphpact_cli.console import clean, data, note, print_table
from graphpact_engine.cli.options import (
    ConfigOption,
    ModelOption,
    SetOption,
    build_engine,
    load_settings,
)

if TYPE_CHECKING:
    from graphpact_engine.saved_pacts import Change, SavedPact, SavedPromise

_DIFFERENT = 1
_NONE = "NoneType"

_COVERAGE = {
    "all": "covers view, metadata, and tensors of the backend that the graph reads",
    "dispatched": "covers view, metadata, and tensors of the backend that torch operations read, but not"
    " those that only kernels launched below torch's dispatcher read",
    "unknown": "covers view and metadata, but no tensors of the backend, because the driver does not report"
    " what graphs read",
    None: "the file does not say which tensors of the backend it covers",
}

pact = typer.Typer(
    help="Save, show and compare the pacts of an engine.",
    no_args_is_help=True,
    rich_markup_mode="markdown",  # joins the lines of a paragraph
)

JsonOption = Annotated[bool, typer.Option("--json", help="Write one JSON object.")]


@pact.command("save")
def save_pacts(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON file to write.")],
    *,
    model: ModelOption = None,
    config: ConfigOption = None,
    sets: SetOption = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Build an engine, and write the pact of each captured shape to FILE.

    The location of a tensor in the file is a slot and an offset in bytes, not an address, so that files of
    two processes can be compared.
    """
    from graphpact.shapes import EagerReason  # noqa: PLC0415  torch
    from graphpact_engine.saved_pacts import (  # noqa: PLC0415  torch
        SavedPact,
        SavedPacts,
        require_target,
    )

    settings = load_settings(config, model, sets)
    require_target(file, overwrite=force)
    with build_engine(settings) as engine:
        saved = SavedPacts(
            pacts=tuple(
                SavedPact.of(lane.name, captured.pact, captured.stats.externals)
                for lane in engine.lanes
                for captured in lane.captured.values()
            )
        )
        partial = [
            f"lane {lane.name}: each pact {_COVERAGE[lane.stats.externals]}"
            for lane in engine.lanes
            if lane.stats.externals != "all"
        ]
        reasons = {lane.name: (lane.eager_reason or EagerReason.NO_GRAPHS).text for lane in engine.lanes}
    if not saved.pacts:
        raise UsageError(
            "no lane captured a shape, so there is no pact to save: "
            + "; ".join(f"lanes.{name}: {reason}" for name, reason in reasons.items()),
            hint="give one of these lanes a runner that captures, such as cuda_graph for decode, and leave"
            " its key capture out",
        )
    saved.save(file, overwrite=force)
    note(f"{_how_many(len(saved.pacts), 'pact')} saved in {file}")
    for text in partial:
        note(text)


@pact.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file written by `graphpact pact save`.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Show the pacts of a saved file, one table for each lane and shape; fields that are None follow it.

    `<= 512` is a host number that may be smaller in a replay; `= 512` must be equal.
    """
    from graphpact_engine.saved_pacts import SavedPacts  # noqa: PLC0415  torch

    saved = SavedPacts.load(file)
    if as_json:
        sys.stdout.write(json.dumps(saved.to_dict(), indent=2) + "\n")
        return
    if not saved.pacts:
        note(f"{file} contains no pact")
    console = data()
    for at, held in enumerate(saved.pacts):
        if at:
            console.print()
        console.print(clean(_heading(held)), soft_wrap=True)
        rows = [
            (promise.path, promise.type, _promised(promise), _place(promise))
            for promise in held.promises
            if promise.type != _NONE
        ]
        print_table(console, ("field", "type", "promises", "memory"), rows)
        if absent := [promise.path for promise in held.promises if promise.type == _NONE]:
            console.print(
                f"These fields are None, and must be None in every replay: {clean(', '.join(absent))}",
                soft_wrap=True,
            )


@pact.command(name="diff")
def compare_pacts(
    old: Annotated[Path, typer.Argument(metavar="OLD", help="A file written by `graphpact pact save`.")],
    new: Annotated[Path, typer.Argument(metavar="NEW", help="The file to compare it with.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Compare two saved files by lane, shape and field.

    Exit status: 0 if all promises are equal, 1 if they differ, 2 if a file cannot be read.
    """
    from graphpact_engine.saved_pacts import SavedPacts, diff  # noqa: PLC0415  torch

    changes = diff(SavedPacts.load(old), SavedPacts.load(new))
    if as_json:
        report = {"equal": not changes, "changes": [asdict(change) for change in changes]}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        _print_changes(changes)
    if changes:
        raise typer.Exit(_DIFFERENT)


def _heading(held: "SavedPact") -> str:
    count = _how_many(len(held.promises), "promise")
    return f"lane {held.lane}, {held.shape}: {count}; {_COVERAGE[held.externals]}"


def _promised(promise: "SavedPromise") -> str:
    tensor = promise.tensor
    if tensor is not None:
        return f"{tensor.dtype} {list(tensor.shape)}, stride {list(tensor.stride)}, on {tensor.device}"
    if promise.value is None:
        return ""  # the type is the promise
    return f"{'<=' if promise.bounded else '='} {promise.value}"


def _place(promise: "SavedPromise") -> str:
    tensor = promise.tensor
    if tensor is None:
        return ""
    return "no slot" if tensor.slot is None else f"{tensor.slot} + {tensor.offset} bytes"


def _print_changes(changes: Sequence["Change"]) -> None:
    """Print a row for each change, and their number."""
    console = data()
    if not changes:
        console.print("All promises are equal.")
        return
    rows = [(c.lane, c.shape or "", c.path or "", c.what, _word(c.old), _word(c.new)) for c in changes]
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
