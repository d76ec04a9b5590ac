"""`capture_progress`: progress on a terminal while an engine is built.

Does not: print anything if stderr is not a terminal.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from graphpact_cli.console import clean, talk

if TYPE_CHECKING:
    from rich.progress import TaskID

    from graphpact.shapes import GraphShape
    from graphpact_engine.build_lanes import OnCapture


@contextmanager
def capture_progress(name: str, *, quiet: bool = False) -> Iterator["OnCapture | None"]:
    """Show that ``name`` is loading, then a progress bar per lane while its shapes are captured.

    Yields None, and shows nothing, if ``quiet`` or not on a terminal.
    """
    console = talk()
    if quiet or not console.is_interactive:
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415  unused by help
    from rich.text import Text  # noqa: PLC0415

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
    )
    loading = console.status(Text(f"loading {clean(name)}"))
    progress = Progress(*columns, console=console, transient=True)
    bars: dict[str, TaskID] = {}

    def on_capture(lane: str, shape: "GraphShape", done: int, total: int) -> None:
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
