"""The cache of compiled libraries: incomplete entries, unused entries, two processes at once, other users.

Another user may have put files there to have code loaded, to make the owner wait forever, or to block a path.
"""

import contextlib
import functools
import grp
import json
import logging
import os
import pwd
import signal
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphpact.errors import GraphpactError
from graphpact_kernels.compiled import LibraryCache, cache, cache_folder, own_folder

LIBRARIES = LibraryCache("kind", "the library")
KEY = "0123abcd"
CONTENT = b"code" * 1000
OTHER = 54321
"""The id of another user."""

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the entry of a library in an otherwise empty cache."""
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", str(tmp_path / "cache"))
    assert found() is None
    assert keep(built(tmp_path)) == CONTENT
    return tmp_path / "cache" / "kind" / KEY


def built(folder: Path, content: bytes = CONTENT) -> Path:
    """Return a library that was just built."""
    (folder / "built.so").write_bytes(content)
    return folder / "built.so"


def found(key: str = KEY) -> bytes | None:
    """Return the content that would be loaded for a key, or None if nothing is found."""
    library = LIBRARIES.find(key)
    return None if library is None else library.read_bytes()


def keep(library: Path, key: str = KEY) -> bytes:
    """Keep a library, and return the content that would be loaded."""
    kept = LIBRARIES.keep(key, library)
    assert kept == LIBRARIES.folder / key / "library.so"
    return kept.read_bytes()


@contextmanager
def no_wait(seconds: int = 20) -> Iterator[None]:
    """Fail if the context takes longer, such as a wait for a pipe without a writer."""

    def late(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_kept_library_is_found_as_it_was_built(entry: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kept library is found only under its key, and nothing else remains in the folder."""
    assert found() == CONTENT
    assert found(KEY + "0") is None
    assert [each.name for each in entry.parent.iterdir()] == [KEY]
    assert not caplog.records


def _rewrite(entry: Path, **facts: Any) -> None:
    file = entry / "library.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | facts))


def _change_one_bit(entry: Path) -> None:
    content = bytearray(CONTENT)
    content[len(content) // 2] ^= 1
    (entry / "library.so").write_bytes(content)


def _replace(path: Path, make: Callable[[Path], object]) -> None:
    path.rename(path.parent.parent.parent / "replaced")  # outside the cache
    make(path)


def _link(path: Path) -> None:
    """Move the file away, and put a link to it in its place."""
    _replace(path, lambda here: here.symlink_to(path.parent.parent.parent / "replaced"))


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
    "facts nested 200,000 deep": (lambda e: (e / "library.json").write_text("[" * 200_000), ""),
    "facts nested 4,000 deep": (lambda e: (e / "library.json").write_text("[" * 4_000), ""),
    "endless facts": (lambda e: _rewrite(e, more="x" * 100_000), "Unterminated string"),
    "a pipe as the library": (lambda e: _replace(e / "library.so", os.mkfifo), "no regular file"),
    "a pipe as the facts": (lambda e: _replace(e / "library.json", os.mkfifo), "no regular file"),
    "a folder as the library": (lambda e: _replace(e / "library.so", os.mkdir), "no regular file"),
    "a link as the library": (lambda e: _link(e / "library.so"), "is a link"),
    "a link as the facts": (lambda e: _link(e / "library.json"), "is a link"),
    "a link as the entry": (_link, "it is no folder"),
    "a link to nowhere": (lambda e: _replace(e, functools.partial(os.symlink, "nowhere")), "it is no folder"),
    "a file as the entry": (lambda e: _replace(e, Path.touch), "it is no folder"),
    "a pipe as the entry": (lambda e: _replace(e, os.mkfifo), "it is no folder"),
    "an entry that all can write": (lambda e: e.chmod(0o777), "can be written by every user"),
    "a library that all can write": (lambda e: (e / "library.so").chmod(0o666), "can be written by every"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_entry_that_is_not_whole_is_removed_with_a_warning(
    fault: str, entry: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An unusable entry is not found, the log says why, and a new library takes its place."""
    break_it, reason = FAULTS[fault]
    break_it(entry)
    with no_wait(), caplog.at_level(logging.WARNING):
        assert found() is None
    (record,) = caplog.records
    assert f"the library {entry} is not used" in record.getMessage()
    assert reason in record.getMessage()
    assert not os.path.lexists(entry)
    assert keep(built(tmp_path, b"new")) == b"new"
    assert found() == b"new"


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_used_does_not_stand_for_a_build(fault: str, entry: Path, tmp_path: Path) -> None:
    """A process that keeps a library gets its own one, even if the place was taken during the build."""
    break_it, _ = FAULTS[fault]
    break_it(entry)
    with no_wait():
        assert keep(built(tmp_path, b"of this process")) == b"of this process"
    assert found() == b"of this process"
    assert [each.name for each in entry.parent.iterdir()] == [KEY]


def test_the_entry_of_the_first_process_stays(entry: Path, tmp_path: Path) -> None:
    """If another process has kept the same library in the meantime, that one is used."""
    assert keep(built(tmp_path, b"of the second")) == CONTENT
    assert (entry / "library.so").read_bytes() == CONTENT
    assert [each.name for each in entry.parent.iterdir()] == [KEY]


def test_a_folder_that_cannot_be_written_is_an_error(entry: Path, tmp_path: Path) -> None:
    """The error is the system's error, with the path."""
    entry.parent.rename(tmp_path / "moved")
    entry.parent.write_text("a file where the folder should be")
    with pytest.raises(OSError, match=str(entry.parent)):
        keep(built(tmp_path))


def test_unused_entries_are_removed(entry: Path, tmp_path: Path) -> None:
    """Keeping a library removes entries and leftovers not used for `DAYS` days; finding one counts as use."""
    folder = entry.parent
    keep(built(tmp_path), "used")
    (folder / ".new-left-over").mkdir()
    (folder / "unused.lock").touch()
    (folder / "recent.lock").touch()
    (folder / "recent link").symlink_to("unused.lock")
    before = time.time() - (cache.DAYS + 1) * 24 * 3600
    for name in (KEY, "used", ".new-left-over", "unused.lock"):
        os.utime(folder / name, (before, before))
    assert found("used") is not None
    keep(built(tmp_path), "new")
    assert {each.name for each in folder.iterdir()} == {"used", "new", "recent.lock", "recent link"}


def test_the_folder_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is GRAPHPACT_CACHE_DIR, else graphpact in XDG_CACHE_HOME, else in ~/.cache."""
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", "/a/place")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/a/place")
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", "")
    assert cache_folder() == Path("/xdg/graphpact")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/graphpact"


# -- other users -----------------------------------------------------------------------------------


@contextmanager
def as_user(user: int) -> Iterator[None]:
    """Run the context with the rights of another user."""
    os.setegid(user)
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@pytest.fixture
def shared() -> Iterator[Path]:
    """Return a sticky folder in which every user can write, as ``/tmp`` is."""
    with tempfile.TemporaryDirectory(prefix="graphpact-test-") as folder:  # pytest's are private
        Path(folder).chmod(0o1777)
        yield Path(folder)


def _give(path: Path, owner: int) -> None:
    for each in (path, *path.rglob("*")):
        os.chown(each, owner, owner, follow_symlinks=False)


@as_root
@pytest.mark.parametrize("what", ["library.so", "library.json", "."])
def test_an_entry_of_another_user_is_not_used(
    what: str, entry: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A file or an entry that belongs neither to the user nor to root is removed, found or kept."""
    os.chown(entry / what, OTHER, OTHER)
    assert found() is None
    assert "another user" in caplog.text
    assert not entry.exists()
    keep(built(tmp_path))
    os.chown(entry / what, OTHER, OTHER)
    assert keep(built(tmp_path, b"own")) == b"own"


@as_root
@pytest.mark.parametrize("mode", [0o777, 0o1777])
def test_a_folder_that_others_can_write_is_refused(mode: int, entry: Path, tmp_path: Path) -> None:
    """Neither ``find`` nor ``keep`` uses a folder where others can create entries or locks, sticky or not."""
    entry.parent.chmod(mode)
    for act in (found, lambda: keep(built(tmp_path)), lambda: LIBRARIES.building(KEY, 1).__enter__()):
        with pytest.raises(GraphpactError, match="can be written by every user") as told:
            act()
        assert str(entry.parent) in str(told.value)
        assert "GRAPHPACT_CACHE_DIR" in str(told.value.hint)


@as_root
def test_a_user_does_not_get_what_another_prepared_in_tmp(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If another user made the cache first in a sticky folder, nothing is found or kept in it."""
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", str(shared / "cache"))
    with as_user(OTHER):
        assert keep(built(shared, b"foreign code")) == found() == b"foreign code"
    for user in (0, OTHER + 1):
        for act in (found, lambda: keep(shared / "built.so")):
            with as_user(user), pytest.raises(GraphpactError, match=f"belongs to another user, {OTHER}"):
                act()


@as_root
@pytest.mark.parametrize("where", ["above", "link"])
def test_folders_above_and_links_on_the_way_belong_to_the_user(
    where: str, entry: Path, tmp_path: Path
) -> None:
    """If another user owns a folder above the cache, or a link to it, the cache is refused."""
    if where == "above":
        os.chown(tmp_path / "cache", OTHER, OTHER)
    else:
        (tmp_path / "cache").rename(tmp_path / "real")
        (tmp_path / "cache").symlink_to(tmp_path / "real")
        assert found() == CONTENT  # the user's own link is followed
        os.chown(tmp_path / "cache", OTHER, OTHER, follow_symlinks=False)
    for act in (found, lambda: keep(built(tmp_path))):
        with pytest.raises(GraphpactError, match=f"{tmp_path}/cache belongs to another user"):
            act()


@as_root
def test_an_entry_that_cannot_be_removed_is_an_error(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If another user's entry in the folder cannot be removed, the error names it and what to do."""
    monkeypatch.setenv("GRAPHPACT_CACHE_DIR", str(shared / "cache"))
    library = built(shared)
    with as_user(OTHER):
        keep(library)
    entry = shared / "cache" / "kind" / KEY
    _give(entry, OTHER + 1)
    with as_user(OTHER):
        for act in (found, lambda: keep(library), lambda: LIBRARIES.discard(KEY, "a fault")):
            with pytest.raises(GraphpactError, match="it cannot be removed: PermissionError") as told:
                act()
            assert str(entry) in str(told.value)
            assert "as its owner or as root" in str(told.value.hint)


@pytest.mark.parametrize("what", ["everybody", "private", "shared"])
def test_who_else_is_in_the_group_decides(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that its group can write is accepted if the group is the user's private group (umask 002)."""
    folder = tmp_path / "folder"
    folder.mkdir()
    folder.chmod(0o770 | (0o007 if what == "everybody" else 0))
    user = SimpleNamespace(pw_name="ann", pw_gid=folder.stat().st_gid)
    group = SimpleNamespace(gr_name="ann", gr_mem=["ann"] if what == "private" else ["ann", "bob"])
    monkeypatch.setattr(pwd, "getpwuid", lambda _: user)
    monkeypatch.setattr(grp, "getgrgid", lambda _: group)
    context = nullcontext() if what == "private" else pytest.raises(GraphpactError, match="can be written by")
    with context, own_folder(folder, "VARIABLE"):
        pass


def test_links_that_go_round_end(tmp_path: Path) -> None:
    """A link to itself raises the system's error, with the path."""
    (tmp_path / "round").symlink_to(tmp_path / "round" / "again")
    with pytest.raises(OSError, match=f"symbolic links: '{tmp_path}"), own_folder(tmp_path / "round", "V"):
        pass


def test_a_folder_is_made_for_the_user_alone(tmp_path: Path) -> None:
    """Missing folders are made for only the user, under any umask, and a kept library is found."""
    before = os.umask(0)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("GRAPHPACT_CACHE_DIR", str(tmp_path / "a" / "b"))
            keep(built(tmp_path))
            assert found() == CONTENT
    finally:
        os.umask(before)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in (tmp_path / "a", tmp_path / "a/b/kind")] == [
        0o700
    ] * 2


# -- the lock --------------------------------------------------------------------------------------


def test_a_wait_for_a_lock_is_logged_and_ends(entry: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The log names the lock and the longest wait; then an error names the lock and what to do."""
    lock = entry.parent / f"{KEY}.lock"
    with LIBRARIES.building(KEY, 1):
        assert not caplog.records
        with pytest.raises(GraphpactError, match=f"{lock} for 0 s") as told, LIBRARIES.building(KEY, 0.2):
            pass
    assert "waiting for another process that builds the library, at most 0 s" in caplog.text
    assert str(lock) in caplog.text
    assert "end that process" in str(told.value.hint)
    with LIBRARIES.building(KEY, 1):
        pass


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, functools.partial(os.symlink, "/dev/null")])
def test_another_file_in_place_of_a_lock_does_not_hang(make: Callable[[Path], object], entry: Path) -> None:
    """A pipe, a folder or a link in place of the lock is locked or refused, at once."""
    make(entry.parent / f"{KEY}.lock")
    with no_wait(), contextlib.suppress(OSError), LIBRARIES.building(KEY, 1):
        pass
