"""The cache of compiled libraries: entries that are not whole, that nobody uses, that two processes keep."""

import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from graphpact_kernels.compiled import LibraryCache, cache, cache_folder

LIBRARIES = LibraryCache("kind", "the library")
KEY = "0123abcd"
CONTENT = b"code" * 1000


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the entry of a library in an otherwise empty cache."""
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", str(tmp_path / "cache"))
    assert LIBRARIES.find(KEY) is None
    LIBRARIES.keep(KEY, built(tmp_path))
    return tmp_path / "cache" / "kind" / KEY


def built(folder: Path, content: bytes = CONTENT) -> Path:
    """Return a library that was just built."""
    (folder / "built.so").write_bytes(content)
    return folder / "built.so"


def test_a_kept_library_is_found_as_it_was_built(entry: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is found under its key and no other, and nothing else stays in the folder."""
    found = LIBRARIES.find(KEY)
    assert found == entry / "library.so"
    assert found.read_bytes() == CONTENT
    assert LIBRARIES.find(KEY + "0") is None
    assert [each.name for each in entry.parent.iterdir()] == [KEY]
    assert not caplog.records


def _rewrite(entry: Path, **facts: Any) -> None:
    file = entry / "library.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def _change_one_bit(entry: Path) -> None:
    content = bytearray(CONTENT)
    content[len(content) // 2] ^= 1
    (entry / "library.so").write_bytes(content)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "cut off": (lambda e: (e / "library.so").write_bytes(CONTENT[:500]), "library was changed"),
    "one bit": (_change_one_bit, "library was changed"),
    "no library": (lambda e: (e / "library.so").unlink(), "No such file"),
    "no facts": (lambda e: (e / "library.json").unlink(), "No such file"),
    "facts cut off": (lambda e: (e / "library.json").write_text('{"key": "'), "Unterminated string"),
    "facts of another form": (lambda e: (e / "library.json").write_text("[]"), "another key"),
    "facts that are no text": (lambda e: (e / "library.json").write_bytes(b"\xff\xfe"), "codec can't decode"),
    "of another key": (lambda e: _rewrite(e, key="0" * 32), "another key"),
    "no hash": (lambda e: _rewrite(e, sha256=None), "library was changed"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_entry_that_is_not_whole_is_removed_with_a_warning(
    fault: str, entry: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not found, the log says why, and a new library takes its place."""
    break_it, reason = FAULTS[fault]
    break_it(entry)
    with caplog.at_level(logging.WARNING):
        assert LIBRARIES.find(KEY) is None
    (record,) = caplog.records
    assert f"the library {entry} is not used" in record.getMessage()
    assert reason in record.getMessage()
    assert not entry.exists()
    again = LIBRARIES.keep(KEY, built(tmp_path, b"new"))
    assert LIBRARIES.find(KEY) == again
    assert again.read_bytes() == b"new"


def test_an_entry_of_another_user_is_not_used(
    entry: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A library that belongs neither to the user nor to root is not found."""
    owner = (entry / "library.so").stat().st_uid
    if owner == 0:
        os.chown(entry / "library.so", 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    assert LIBRARIES.find(KEY) is None
    assert "another user" in caplog.text


def test_the_entry_of_the_first_process_stays(entry: Path, tmp_path: Path) -> None:
    """A process that has built the same library in the meantime takes the one that is there."""
    assert LIBRARIES.keep(KEY, built(tmp_path, b"of the second")) == entry / "library.so"
    assert (entry / "library.so").read_bytes() == CONTENT
    assert [each.name for each in entry.parent.iterdir()] == [KEY]


def test_a_folder_that_cannot_be_written_is_an_error(entry: Path, tmp_path: Path) -> None:
    """The error is the system's, and names the path."""
    entry.parent.rename(tmp_path / "moved")
    entry.parent.write_text("a file where the folder should be")
    with pytest.raises(OSError, match=str(entry.parent)):
        LIBRARIES.keep(KEY, built(tmp_path))


def test_what_nobody_uses_is_removed(entry: Path, tmp_path: Path) -> None:
    """When a library is kept, entries and leftovers not used for `DAYS` days go; a found one was used."""
    folder = entry.parent
    LIBRARIES.keep("used", built(tmp_path))
    (folder / ".new-left-over").mkdir()
    (folder / "unused.lock").touch()
    (folder / "recent.lock").touch()
    before = time.time() - (cache.DAYS + 1) * 24 * 3600
    for name in (KEY, "used", ".new-left-over", "unused.lock"):
        os.utime(folder / name, (before, before))
    assert LIBRARIES.find("used") is not None
    LIBRARIES.keep("new", built(tmp_path))
    assert {each.name for each in folder.iterdir()} == {"used", "new", "recent.lock"}


def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is GRAPHPACT_CACHE_DIR, else graphpact in XDG_CACHE_HOME, else in ~/.cache."""
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", "/a/place")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/a/place")
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", "")
    assert cache_folder() == Path("/xdg/graphpact")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/graphpact"
