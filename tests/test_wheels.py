"""Tests that the wheel of each distribution imports with only its declared dependencies.

An environment is a folder of links to the unpacked wheels of the distribution and of our distributions that
it requires, and to their installed third-party requirements, as the metadata of both declares. Python runs
with this folder in place of its own site-packages.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from importlib_metadata import PathDistribution, distribution
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECTS = {
    tomllib.loads(file.read_text())["project"]["name"]: file.parent
    for file in sorted(
        [p for w in ("*", "plugins/*", "integrations/*") for p in ROOT.glob(f"{w}/pyproject.toml")]
    )
}
IMPORT_ALL = """
import importlib, pathlib, sys
site = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(site))
for file in sorted((site / sys.argv[2]).rglob("*.py")):
    name = ".".join(file.relative_to(site).with_suffix("").parts).removesuffix(".__init__")
    if not name.endswith("__main__") and not name.startswith(tuple(sys.argv[3:])):
        importlib.import_module(name)
        print(name)
"""
NEEDS_SGLANG = (  # which its user has, or the extra for the tape
    *("attention.drafts", "attention.fa3", "attention.paged", "hooks"),
    *("guard.contents", "guard.draft_contents", "guard.guarding", "guard.live_tokens"),
    *("guard.prefill_contents", "guard.recording", "guard.start"),
    *("load.engine", "load.in_process", "load.steps"),
    *("runs.cli", "runs.job", "runs.surface"),
    *("seams.hooking", "seams.ranks", "seams.steps"),
    *("tape.experts", "tape.platform", "tape.segments", "tape.taping"),
)
NEEDS_VLLM = (  # the same
    *("attention.latents", "attention.paged", "attention.plugged", "attention.registering"),
    *("guard.after_capture", "guard.contents", "guard.guarding", "guard.rank_steps", "guard.recording"),
    *("guard.start", "hooks"),
    *("load.engine", "load.leaks", "load.ownership", "load.steps"),
    *("runs.builder_values", "runs.choices_report", "runs.cli"),
    *("runs.dispatch_job", "runs.job", "runs.surface"),
    *("seams.builders", "seams.graphs", "seams.ranks", "seams.steps"),
    *("tape.adapters", "tape.memory", "tape.platform", "tape.segments", "tape.uneven", "tape.worker"),
)
NEEDS_AN_EXTRA = {
    "graphpact-engine": ["graphpact_engine.metrics"],  # prometheus-client
    "graphpact-guard": ["graphpact_guard.metrics"],  # prometheus-client
    "graphpact-kernels": ["graphpact_kernels._triton_indices"],  # triton
    "graphpact-sglang": [f"graphpact_sglang.{module}" for module in NEEDS_SGLANG],
    "graphpact-vllm": [f"graphpact_vllm.{module}" for module in NEEDS_VLLM],
}
COMMAND = """
import sys
sys.path.insert(0, sys.argv[1])
from graphpact_cli import main
sys.exit(main(sys.argv[2:]))
"""


@dataclass(frozen=True)
class Wheels:
    """The unpacked wheels of this repository, by name of their distribution."""

    folders: dict[str, Path]

    def needs(self, name: str, extras: frozenset[str]) -> Iterator[Requirement]:
        """Yield the requirements of a distribution, ours or installed, with these extras."""
        if name in self.folders:
            (info,) = self.folders[name].glob("*.dist-info")
            found = PathDistribution(info).requires
        else:
            found = distribution(name).requires
        for text in found or ():
            need = Requirement(text)
            if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras | {""}):
                yield need

    def closure(self, name: str, *extras: str) -> set[str]:
        """Return the names of all direct and indirect requirements of a distribution, and its own name."""
        todo, done = [(name, frozenset(extras))], set[tuple[str, frozenset[str]]]()
        while todo:
            at = todo.pop()
            if at not in done:
                done.add(at)
                todo += [(canonicalize_name(need.name), frozenset(need.extras)) for need in self.needs(*at)]
        return {at for at, _ in done}


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    """Build every distribution of the repository."""
    root = tmp_path_factory.mktemp("wheels")
    folders = {}
    for name, project in PROJECTS.items():
        built = root / f"{name}.built"
        _python("-m", "hatchling", "build", "-t", "wheel", "-d", str(built), cwd=project)
        (wheel,) = built.glob("*.whl")
        folders[name] = root / name
        zipfile.ZipFile(wheel).extractall(folders[name])  # safe, since it is built from our own source
    return Wheels(folders)


@pytest.fixture(scope="module")
def environment(wheels: Wheels, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes the folder of a distribution and of all its requirements."""

    def make(name: str, *extras: str) -> Path:
        site = tmp_path_factory.mktemp("site")
        for each in wheels.closure(name, *extras):
            if each in wheels.folders:
                tops = {path: path.name for path in wheels.folders[each].iterdir()}
            else:
                files = distribution(each).files or ()
                names = {file.parts[0] for file in files if file.parts[0] not in ("..", "__pycache__")}
                tops = {Path(str(distribution(each).locate_file(top))): top for top in names}
            for path, top in tops.items():
                if not (site / top).exists():
                    (site / top).symlink_to(path)
        return site

    return make


def _python(*arguments: str, cwd: Path | None = None, status: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done


@pytest.mark.sweep
@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_imports_with_what_it_declares(name: str, environment: Callable[..., Path]) -> None:
    """Every module that needs no extra imports from the wheel, with only its declared dependencies."""
    package, left_out = name.replace("-", "_"), NEEDS_AN_EXTRA.get(name, [])
    site = environment(name)
    stale = [module for module in left_out if not (site / f"{module.replace('.', '/')}.py").exists()]
    assert not stale, "no such module is left to leave out"
    output = _python("-I", "-S", "-c", IMPORT_ALL, str(site), package, *left_out)
    assert package in output.stdout.split()


@pytest.mark.sweep
def test_the_command_alone_lists_plugins_and_knows_who_has_the_others(
    environment: Callable[..., Path],
) -> None:
    """``graphpact[cli]`` runs ``plugins``; for other first-party commands it names the distribution."""
    site = str(environment("graphpact", "cli"))
    assert "eager" in _python("-I", "-S", "-c", COMMAND, site, "plugins").stdout
    for command, owner in (
        ("generate", "graphpact-engine"),
        ("doctor", "graphpact-engine"),
        ("pact", "graphpact-engine"),
        ("check", "graphpact-conformance"),
        ("explain", "graphpact-conformance"),
        ("report", "graphpact-conformance"),
        ("museum", "graphpact-museum"),
        ("bench", "graphpact-bench"),
    ):
        output = _python("-I", "-S", "-c", COMMAND, site, command, "--anything", status=2).stderr
        assert f"no command is called {command!r}" in output
        assert f"help: pip install {owner}" in output


@pytest.mark.sweep
def test_a_builder_of_vllm_has_its_first_report_within_three_commands(
    environment: Callable[..., Path], tmp_path: Path
) -> None:
    """The commands of the page work from the wheels: installation, a report, and an explained rule."""
    page = (ROOT / "docs/how-to/vllm-backend.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (block,) = (each for each in blocks if "cd examples/vllm\n" in each)
    install, change, check, explain = (shlex.split(line) for line in block.splitlines())
    assert install[:2] == ["pip", "install"]
    assert change == ["cd", "examples/vllm"]
    shutil.copy(ROOT / "examples/vllm/acme_attention.py", tmp_path)
    run = ("-I", "-S", "-c", COMMAND, str(environment("graphpact-adapters")))
    output = _python(*run, *check[1:], cwd=tmp_path)
    assert "conformant: 1 of 1 plugin conformant" in output.stdout
    assert "GP01" in _python(*run, *explain[1:], cwd=tmp_path).stdout


def test_the_core_has_no_command(wheels: Wheels) -> None:
    """Only the wheel of graphpact-cli offers the command; ``graphpact[cli]`` brings it, the core does not."""
    having = [name for name, folder in wheels.folders.items() if any(folder.glob("*/entry_points.txt"))]
    offering = [
        name
        for name in having
        if "console_scripts" in next(wheels.folders[name].glob("*/entry_points.txt")).read_text()
    ]
    assert offering == ["graphpact-cli"]
    assert "graphpact-cli" in wheels.closure("graphpact", "cli")
    assert not {"graphpact-cli", "typer", "rich", "pydantic"} & wheels.closure("graphpact")
