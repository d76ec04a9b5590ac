"""Wheels of the job that checks builders of released engines: downloaded once, unpacked in part."""

import zipfile
from pathlib import Path

import pytest

from graphpact.errors import GraphpactError
from peers.wheels import Wheel, cache, unpack

FILES = {
    "thing/__init__.py": "",
    "thing/_C/lib.so": "",
    "thing/kernel.cu": "",
    "thing-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: thing\nVersion: 1.0\n",
    "thing-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    "thing-1.0.dist-info/RECORD": "",
}


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with one wheel, the only place where pip looks; the cache is a folder beside it."""
    folder = tmp_path / "shelf"
    folder.mkdir()
    with zipfile.ZipFile(folder / "thing-1.0-py3-none-any.whl", "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("GRAPHPACT_PEERS_CACHE", str(tmp_path / "cache"))
    return folder


def _unpacked(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_only_what_imports_need_is_unpacked_and_only_once(shelf: Path) -> None:
    """Python files, metadata and the files asked for are unpacked; a second call needs no download."""
    wheel = Wheel("thing", "1.0", ("thing/_C/*.so",))
    folder = unpack(wheel)
    assert _unpacked(folder) == {"thing/__init__.py", "thing/_C/lib.so", "thing-1.0.dist-info/METADATA"}
    (shelf / "thing-1.0-py3-none-any.whl").unlink()
    assert unpack(wheel) == folder


def test_a_failed_download_says_so_and_leaves_nothing(shelf: Path) -> None:
    """A wheel that is not there is named, with pip's answer, and the cache stays empty."""
    with pytest.raises(RuntimeError, match=r"thing==2\.0 cannot be downloaded:\n(.*\n)+.*No matching"):
        unpack(Wheel("thing", "2.0"))
    assert list(cache().iterdir()) == []


def test_code_that_another_user_can_change_is_not_imported(shelf: Path) -> None:
    """A cache or an unpacked wheel in which others can write is refused, with what to do."""
    wheel = Wheel("thing", "1.0")
    folder = unpack(wheel)
    for shared in (folder, cache()):
        shared.chmod(0o777)
        with pytest.raises(GraphpactError, match=f"{shared} can be written by every user") as caught:
            unpack(wheel)
        assert "GRAPHPACT_PEERS_CACHE" in str(caught.value.hint)
        shared.chmod(0o755)
    assert unpack(wheel) == folder


def test_the_cache_is_the_users_unless_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `GRAPHPACT_PEERS_CACHE` the cache is in the user's cache directory."""
    monkeypatch.delenv("GRAPHPACT_PEERS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache() == tmp_path / "graphpact" / "peers"
