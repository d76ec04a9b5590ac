"""Build the sdist and the wheel of distributions from the last commit, the same bytes everywhere.

    python release/build.py dist core cli plugins/tape

Git writes the files of the commit into a new folder, so files that are not committed play no part. Times in
the archives are the commit's. Each wheel is built from its sdist, as pip would build it. The output is a line
for each file with its SHA-256, which `sha256sum --check` reads in the output folder.

Does not: check what it built (`make dist` does), or publish it (.github/workflows/release.yml does).
"""

import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path


def build_all(commit: str, folders: Sequence[str], output: Path) -> None:
    """Build the distributions in ``folders`` of a ``commit`` of this folder's repository into ``output``.

    Raises:
        CalledProcessError: git failed.
        SystemExit: The build of a distribution failed; the message is hatchling's.
    """
    epoch = _git("log", "-1", "--format=%ct", commit).decode().strip()
    with tempfile.TemporaryDirectory() as scratch:
        archive = Path(scratch, "commit.tar")
        archive.write_bytes(_git("archive", "--format=tar", commit))
        source = Path(scratch, "source")
        _unpack(archive, source)
        for folder in folders:
            _build(source / folder, Path(scratch, folder), output, epoch)


def _build(source: Path, scratch: Path, output: Path, epoch: str) -> None:
    """Build an sdist of the folder ``source``, and a wheel of this sdist, into ``output``."""
    built = scratch / "built"
    _hatchling(source, "sdist", built, epoch)
    (sdist,) = built.iterdir()
    _unpack(sdist, scratch / "unpacked")
    _hatchling(scratch / "unpacked" / sdist.name.removesuffix(".tar.gz"), "wheel", built, epoch)
    for file in sorted(built.iterdir()):
        print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}", flush=True)
        file.replace(output / file.name)


def _hatchling(source: Path, target: str, output: Path, epoch: str) -> None:
    """Build ``target``, an sdist or a wheel, with the hatchling of this environment."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", f"{output}"]
    environment = os.environ | {"SOURCE_DATE_EPOCH": epoch}
    done = subprocess.run(
        command, cwd=source, env=environment, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    if done.returncode:  # otherwise stderr has only the paths of what was built
        raise SystemExit(f"hatchling cannot build the {target} of {source.name}:\n{done.stderr.decode()}")


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], check=True, stdout=subprocess.PIPE).stdout


if __name__ == "__main__":
    if len(sys.argv) < 3:
        raise SystemExit("usage: build.py OUTPUT FOLDER...")
    if changed := _git("status", "--porcelain").decode():
        print(f"these changes are not committed, and not in the distributions:\n{changed}", file=sys.stderr)
    target = Path(sys.argv[1]).absolute()
    target.mkdir(parents=True, exist_ok=True)
    if any(target.iterdir()):
        raise SystemExit(f"{target} is not empty: remove it, so that only this commit's files are in it")
    build_all("HEAD", sys.argv[2:], target)
