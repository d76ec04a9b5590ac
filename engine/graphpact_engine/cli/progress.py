"""`capture_progress`: what a terminal shows while an engine is built.

Does not: show anything off a terminal.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
from rich.text import Text

from graphpact.cli.console import clean, talk
from graphpact.shapes import GraphShape
from graphpact_engine.build import OnCapture


@contextmanager
def capture_progress(what: str, *, quiet: bool = False) -> Iterator[OnCapture | None]:
    """Show on a terminal that ``what`` is loaded, then a bar a lane while its shapes are captured.

    Yields None where nobody looks: off a terminal, or ``quiet``.
    """
    console = talk()
    if quiet or not console.is_interactive:
        yield None
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
    )
    loading = console.status(Text(f"loading {clean(what)}"))
    progress = Progress(*columns, console=console, transient=True)
    bars: dict[str, TaskID] = {}

    def on_capture(lane: str, shape: GraphShape, done: int, total: int) -> None:
        if not bars:  # one display at a time
            loading.stop()
            progress.start()
        if lane not in bars:
            bars[lane] = progress.add_task("", total=total)
        description = f"capturing {clean(lane)}: {shape}"
        progress.update(bars[lane], completed=done, description=description)

    loading.start()
    try:
        yield on_capture
    finally:
        loading.stop()
        progress.stop()
