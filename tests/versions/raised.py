"""Copies of the core with another contract: version 2, or version 1 with deprecations.

Does not: run them; a test puts the folder in front of Python's path and starts a command.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = (ROOT / "core/graphpact", ROOT / "conformance/graphpact_conformance")


@dataclass(frozen=True)
class Edit:
    """A replacement in one file: ``old`` occurs once, and becomes ``new``."""

    file: str
    old: str
    new: str


VERSION_2 = (
    Edit("graphpact/_version.py", "CONTRACT_VERSION = 1", "CONTRACT_VERSION = 2"),
    # Two hooks have an argument more, which the lane passes.
    Edit(
        "graphpact/hookspecs.py",
        "def populate(registry: CudaGraphBufferRegistry, batch: ForwardBatch, shape: GraphShape) -> None:",
        "def populate(registry: Any, batch: ForwardBatch, shape: GraphShape, lane_name: str) -> None:",
    ),
    Edit(
        "graphpact/hookspecs.py",
        "def init_metadata_replay(view: ForwardBatch, shape: GraphShape, captured: Any) -> Any:",
        "def init_metadata_replay(view: Any, shape: GraphShape, captured: Any, live: ForwardBatch) -> Any:",
    ),
    Edit(
        "graphpact/lane.py",
        "self._populate(registry=self.registry, batch=batch, shape=shape)",
        "self._populate(registry=self.registry, batch=batch, shape=shape, lane_name=self.name)",
    ),
    Edit(
        "graphpact/lane.py",
        "self._init_metadata_replay(view=attended, shape=fit, captured=captured.metadata)",
        "self._init_metadata_replay(view=attended, shape=fit, captured=captured.metadata, live=batch)",
    ),
    # A runner may have a method more, which the lane calls.
    Edit(
        "graphpact/runners.py",
        "    # -- hooks -----------------",
        '    def after_capture(self, shape: GraphShape) -> None:\n        """A shape was captured."""\n\n'
        "    # -- hooks -----------------",
    ),
    Edit(
        "graphpact/lane.py",
        "        return captured\n\n    def _record(",
        "        self.runner.after_capture(shape)\n        return captured\n\n    def _record(",
    ),
    # A rule holds for plugins of version 2.
    Edit(
        "graphpact_conformance/rule.py",
        "    since: int = 1\n\n    def __str__",
        "    since: int = 1\n\n    def __post_init__(self) -> None:\n"
        '        object.__setattr__(self, "since", 2 if self.id == "GP16" else 1)\n\n    def __str__',
    ),
)
"""Version 2 of the contract: additions of every kind."""

OLD_HOOK = "populate is deprecated since contract 2: fill the slots in prepare_replay"
OLD_ARGUMENT = "captured is deprecated since contract 2: the metadata is view.metadata"
DEPRECATIONS = (
    Edit(
        "graphpact/hookspecs.py",
        "@hookspec(firstresult=True)\ndef populate(",
        f"@hookspec(firstresult=True, warn_on_impl=FutureWarning({OLD_HOOK!r}))\ndef populate(",
    ),
    Edit(
        "graphpact/hookspecs.py",
        "@hookspec(firstresult=True)\ndef init_metadata_replay(",
        "@hookspec(firstresult=True, warn_on_impl_args={"
        f'"captured": FutureWarning({OLD_ARGUMENT!r})}})\ndef init_metadata_replay(',
    ),
)
"""A deprecated hook and a deprecated argument, by pluggy's own means."""


def edited(folder: Path, edits: Iterable[Edit]) -> Path:
    """Return ``folder`` with copies of the core and of the suite, edited.

    Raises:
        ValueError: A text to replace is not there once: the core changed, and the edit has to follow.
    """
    for package in PACKAGES:
        shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    for edit in edits:
        text = (folder / edit.file).read_text(encoding="utf-8")
        if text.count(edit.old) != 1:
            raise ValueError(f"{edit.file} has {text.count(edit.old)} times {edit.old!r}")
        (folder / edit.file).write_text(text.replace(edit.old, edit.new), encoding="utf-8")
    return folder
