"""Tests of what is published: the archives that `make dist` builds, from two clones of one commit.

Does not: install or import the wheels; tests/test_wheels.py does.
"""

import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = sorted(
    f"{file.parent.relative_to(ROOT)}"
    for pattern in ("*", "plugins/*", "integrations/*")
    for file in ROOT.glob(f"{pattern}/pyproject.toml")
)
AUTHOR = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (("NAME", "a test"), ("EMAIL", "test@localhost"), ("DATE", "2026-01-02T03:04:05Z"))
}
"""The variables of a commit that is the same in every run."""

pytestmark = pytest.mark.sweep


def run(*command: str | Path, cwd: Path, umask: int = 0o022, **variables: str) -> str:
    """Return the output of a command."""
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=os.environ | AUTHOR | variables,
        umask=umask,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def contents(archive: Path) -> dict[str, bytes]:
    """Return the files of a wheel or an sdist by name; an sdist's names lack its first folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return {name: wheel.read(name) for name in wheel.namelist()}
    with tarfile.open(archive) as sdist:
        members = sdist.getmembers()
        assert all(member.isreg() for member in members)  # a link would lead out of the archive
        return {each.name.partition("/")[2]: _read(sdist, each) for each in members}


def _read(sdist: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    opened = sdist.extractfile(member)
    assert opened is not None
    return opened.read()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a repository of one commit, which has the files of this one as they are now."""
    folder = tmp_path_factory.mktemp("repository")
    for name in run("git", "ls-files", "-z", cwd=ROOT).split("\0")[:-1]:
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name, follow_symlinks=False)
    run("git", "init", "-q", cwd=folder)
    run("git", "add", "--force", ".", cwd=folder)
    run("git", "commit", "-q", "-m", "all", cwd=folder)
    return folder


def clone_of(repository: Path, folder: Path, *, umask: int) -> Path:
    """Clone the repository into ``folder``, which does not exist yet, and return it."""
    folder.parent.mkdir(exist_ok=True)
    run("git", "clone", "-q", repository, folder, cwd=repository, umask=umask)
    return folder


def build(clone: Path, *, umask: int, **variables: str) -> Path:
    """Build every distribution in a clone, check the printed sums, and return the folder of archives."""
    command = (sys.executable, "release/build.py", "dist", *FOLDERS)
    (clone / "sums").write_text(run(*command, cwd=clone, umask=umask, **variables), encoding="utf-8")
    run("sha256sum", "--check", "--strict", "../sums", cwd=clone / "dist")
    return clone / "dist"


@pytest.fixture(scope="module")
def built(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of archives that a first clone builds."""
    clone = clone_of(repository, tmp_path_factory.mktemp("first") / "a", umask=0o022)
    return build(clone, umask=0o022, TZ="UTC", PYTHONHASHSEED="1")


def archives(built: Path) -> Iterator[tuple[str, dict[str, bytes], dict[str, bytes]]]:
    """Yield the package of each distribution, and the files of its sdist and of its wheel."""
    for wheel in sorted(built.glob("*.whl")):
        package, version, _ = wheel.name.split("-", 2)
        yield package, contents(built / f"{package}-{version}.tar.gz"), contents(wheel)


def test_two_clones_build_the_same_bytes(repository: Path, built: Path, tmp_path: Path) -> None:
    """Another folder, umask, time zone, hash seed and other file times change no byte of any archive.

    A file that is not committed is in none of them.
    """
    clone = clone_of(repository, tmp_path / "an other" / "clone", umask=0o077)
    for file in clone.glob("*/graphpact*/**/*.py"):
        os.utime(file, (1_000_000_000, 1_000_000_000))
    (clone / "core/graphpact/left_over.py").write_text("left = 'over'\n", encoding="utf-8")
    again = build(clone, umask=0o077, TZ="Asia/Tokyo", PYTHONHASHSEED="2")
    first = {file.name: file.read_bytes() for file in built.iterdir()}
    second = {file.name: file.read_bytes() for file in again.iterdir()}
    assert len(first) == 2 * len(FOLDERS)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] == []


def test_a_wheel_of_the_sources_is_the_wheel_of_the_sdist(
    repository: Path, built: Path, tmp_path: Path
) -> None:
    """The wheel that hatchling builds from the folder equals the published one, built from the sdist."""
    epoch = run("git", "log", "-1", "--format=%ct", cwd=repository).strip()
    for folder in FOLDERS:
        command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path)
        run(*command, cwd=repository / folder, SOURCE_DATE_EPOCH=epoch)
    direct = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert direct == {file.name: file.read_bytes() for file in built.glob("*.whl")}


def test_archives_have_the_package_its_licence_and_no_tests(built: Path) -> None:
    """A wheel and an sdist have every module of the package, py.typed and the licence, and none of its tests.

    The template of new plugins has the tests that they begin with.
    """
    licence = (ROOT / "LICENSE").read_bytes()
    names = {tomllib.loads((ROOT / f"{at}/pyproject.toml").read_text())["project"]["name"] for at in FOLDERS}
    found = {package: files for package, *files in archives(built)}
    assert found.keys() == {name.replace("-", "_") for name in names}
    for package, (sdist, wheel) in found.items():
        modules = {name: content for name, content in wheel.items() if name.startswith(f"{package}/")}
        assert f"{package}/py.typed" in modules
        assert modules == {name: sdist[name] for name in sdist if name.startswith(f"{package}/")}
        (info,) = {name.partition("/")[0] for name in wheel} - {package}
        assert wheel[f"{info}/licenses/LICENSE"] == sdist["LICENSE"] == licence
        others = {name for name in sdist if not name.startswith(f"{package}/")}
        assert others == {".gitignore", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"}
        own = [name for name in modules if not name.startswith("graphpact_scaffold/template/")]
        assert not [name for name in own if "test_" in name or "/tests/" in name]
