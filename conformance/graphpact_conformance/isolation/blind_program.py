"""Run a plugin where the suite is not imported, and write what comes out: ``python -P - JOB < THIS_FILE``.

`graphpact_conformance.isolation.blind` starts it and judges the results in another process. Here nothing is
called ``graphpact_conformance``, and no import of that name finds anything. The lane and its memory are those
of the suite, loaded from its sources under a random name, without the oracle: there is no right answer in
this process. Events are written as those of the worker.

    ready                            graphpact is imported
    declares, capabilities, lanes    what the judge needs for the same lanes and batches
    begins, work, printed            a lane
    stepped, lane, rows, axes, caches   the outputs and the KV cache of one step
    failed, lane, text               an exception in a lane
    done, answer, printed, threads   the end

Does not: judge anything.
"""

import faulthandler
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import secrets
import signal
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from graphpact.plugins import PluginCatalog

HIDDEN = "graphpact_" + "conformance"
ALIAS = "lane_" + secrets.token_hex(4)
NOT_HERE = "oracle"
"""Module of the suite that is empty here."""


class Renamed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the sources of a folder under `ALIAS`, with every mention of their own name replaced.

    Args:
        folder: The folder of the package.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of a module of the package."""
        del path, target
        package, _, rest = name.partition(".")
        if package != ALIAS:
            return None
        file = self._folder.joinpath(*rest.split(".")) if rest else self._folder
        return importlib.machinery.ModuleSpec(name, self, is_package=file.is_dir())

    def create_module(self, spec: Any) -> None:
        """Use a module of the usual kind."""

    def exec_module(self, module: types.ModuleType) -> None:
        """Run the source, with the names replaced."""
        rest = module.__name__.partition(".")[2]
        if rest == NOT_HERE:
            module.__getattr__ = lambda _: None  # type: ignore[method-assign]
            return
        file = self._folder.joinpath(*filter(None, rest.split(".")))
        file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        source = file.read_text("utf-8").replace(HIDDEN, ALIAS)
        exec(compile(source, f"{ALIAS}/{file.name}", "exec"), vars(module))  # noqa: S102  our own


class Without(importlib.abc.MetaPathFinder):
    """A finder that does not find the suite.

    Args:
        finder: The finder that might.
    """

    def __init__(self, finder: Any) -> None:
        self._finder = finder

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the spec of the finder, and none for the suite."""
        if name.partition(".")[0] == HIDDEN or not hasattr(self._finder, "find_spec"):
            return None
        return self._finder.find_spec(name, path, target)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._finder, name)  # such as `find_distributions` and `invalidate_caches`


class Events:
    """Writes events into the pipe of the job."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._pipe = job["events"]
        os.set_inheritable(self._pipe, False)  # noqa: FBT003  positional only
        self._key = os.read(job["key"], 64)
        os.close(job["key"])
        self._pid = os.getpid()

    def say(self, event: str, **told: Any) -> None:
        """Write one event; end a child that the plugin forked, which would write them all again."""
        if os.getpid() != self._pid:
            os._exit(os.EX_SOFTWARE)
        data = self._key + b" " + json.dumps({"event": event, **told}).encode() + b"\n"
        while data:
            data = data[os.write(self._pipe, data) :]


class Suite:
    """The modules of the suite that build and step a lane, under another name."""

    def __init__(self) -> None:
        spec = importlib.util.find_spec(HIDDEN)
        assert spec is not None  # noqa: S101  the judge has imported it
        folders = spec.submodule_search_locations or []
        sys.meta_path[:] = [*map(Without, sys.meta_path), Renamed(folders[0])]
        self.wire, self.rig, self.reference = (
            importlib.import_module(f"{ALIAS}.{name}")
            for name in ("isolation.blind_wire", "lane.rig", "lane.reference")
        )


def main() -> None:
    """Run the job."""
    job = json.loads(sys.argv.pop(1))
    torch.set_num_threads(1)
    gc.freeze()  # as the suite's worker does
    faulthandler.register(signal.SIGUSR1, file=job["stack"], all_threads=False)
    events, suite = Events(job), Suite()
    events.say("ready")
    catalog, device = PluginCatalog.scan(), torch.device(job["device"])
    backend, runner = suite.reference.ReferenceBackend, suite.reference.ReferenceRunner
    if job["backend"] is not None:
        backend = catalog.select("attention_backend", job["backend"])
    if job["runner"] is not None:
        runner = catalog.select("runner", job["runner"])
    lanes = list(lanes_of(suite, backend, None if job["runner"] is None else runner, device))
    events.say(
        "declares",
        capabilities=suite.wire.capabilities_to_json(backend.capabilities),
        lanes=[[str(config), [suite.wire.shape_to_json(s) for s in shapes]] for config, shapes in lanes],
    )
    for config, shapes in lanes:
        events.say("begins", work=str(config), printed=0)
        try:
            with torch.inference_mode():
                lane = suite.wire.with_shapes(config, shapes)
                rig = suite.rig.Rig(lane, backend=backend, runner=runner, device=device)
            run(suite, rig, events, job["seed"])
        except (Exception, SystemExit) as error:  # noqa: BLE001  the plugin's code may raise anything
            events.say("failed", lane=str(config), text=f"{type(error).__name__}: {error}"[:500])
    events.say("done", answer=None, printed=0, threads=[])


def lanes_of(
    suite: Suite, backend: Any, runner: Any, device: torch.device
) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield the lanes of a backend below the suite's runner, or of a runner; with the runner's own shapes."""
    can, wire = backend.capabilities, suite.wire
    if runner is None:
        for config in wire.plain_lanes(can, wire.cases_of_backend(can), device):
            yield config, []
        return
    for config in wire.plain_lanes(can, wire.cases_of_runner(runner, can), device):
        asked = runner(suite.rig.runner_context(config, can, device, runner))
        if not suite.rig.fields_of(asked):  # the model would read what only the runner knows
            yield config, suite.rig.planned_shapes(asked)


def run(suite: Suite, rig: Any, events: Events, seed: int) -> None:
    """Run the batches of a lane, and write the outputs and the KV cache of each step."""
    for problem in suite.wire.batches_of(rig.config, seed):
        step = rig.step(problem, may_decline=True)
        if step.error is not None:
            raise step.error
        rows, caches = suite.wire.tensors_to_json(step.rows), suite.wire.tensors_to_json(step.caches)
        events.say("stepped", lane=str(rig.config), rows=rows, axes=dict(step.axes), caches=caches)


if __name__ == "__main__":
    main()
