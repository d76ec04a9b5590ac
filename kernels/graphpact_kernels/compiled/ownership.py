"""Folders and files that other users cannot have changed, opened so that this stays true while they are used.

A folder of code is trusted if nobody but this user and root can change what lies in it:

- it and every folder above it, up to ``/``, belong to this user or to root. So does every symbolic link on
  the path, which is followed step by step;
- nobody else can write to it. A folder above it may be one where everybody can write if it is sticky, as
  ``/tmp`` is: others can add names there, but not replace a folder of this user;
- the group may write if it is the user's private group: the group that is named as the user and has no other
  member, which many systems make for each user, with a umask of 002.

Each step opens one name below the folder that is already open, and checks what it opened. So nothing can be
exchanged between the check and the use.

Does not: read access control lists, which only the owner can set; protect from other processes of this user.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from graphpact.errors import GraphpactError

_MOST_LINKS = 40  # on one path, as for Linux


@contextlib.contextmanager
def own_folder(path: Path, variable: str, *, create: bool = False) -> Iterator[int]:
    """Open a folder that other users cannot change, and give its descriptor, for names below it.

    Args:
        path: The folder.
        variable: The environment variable that names another folder, for the hint of an error.
        create: Whether to make it, and folders above it, if it is missing; only the user may enter them.

    Raises:
        OSError: It is missing, is no folder, or cannot be entered or made.
        GraphpactError: Other users can change it, a folder above it, or a link on the path.
    """
    names = [*reversed(path.absolute().parts)]
    where, links = Path("/"), 0
    at = os.open(where, _folder_flags())
    try:
        while names:
            name = names.pop()
            try:
                state = _state(name, at, create=create)
                target = os.readlink(name, dir_fd=at) if stat.S_ISLNK(state.st_mode) else None
                if target is None:
                    below = os.open(name, _folder_flags(), dir_fd=at)
                    os.close(at)
                    at = below
                    state = os.fstat(at)
            except OSError as error:  # the system names only the last part of the path
                raise OSError(error.errno, error.strerror, str(where / name)) from error
            fault = fault_of(state, is_above=bool(names))
            if fault is not None:
                raise GraphpactError(
                    f"{where / name} {fault}: code from {path} is not used",
                    hint=f"make it yours (chown, chmod go-w), or name a folder of your own in {variable}",
                )
            if target is None:
                where /= name
            else:
                links += 1
                if links > _MOST_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
                names += reversed(Path(target).parts)
        yield at
    finally:
        os.close(at)


def open_own_file(name: str, folder: int) -> int:
    """Open a file that other users cannot have written, for reading, and return its descriptor.

    A pipe in its place is not waited for, and a link is not followed.

    Args:
        name: The name of the file.
        folder: Descriptor of the folder in which it lies.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is no regular file, or other users can write to it.
    """
    if stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        raise ValueError(f"{name} is a link")
    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    state = os.fstat(file)
    fault = fault_of(state) if stat.S_ISREG(state.st_mode) else "is no regular file"
    if fault is not None:
        os.close(file)
        raise ValueError(f"{name} {fault}")
    return file


def fault_of(state: os.stat_result, *, is_above: bool = False) -> str | None:
    """Return why others can change a folder or file, or what is in it, as a predicate; None if they cannot.

    Args:
        state: What the system says of it.
        is_above: Whether it is a folder above that of interest, so that it may be sticky.
    """
    if state.st_uid not in (os.geteuid(), 0):
        return f"belongs to another user, {state.st_uid}"
    if stat.S_ISLNK(state.st_mode) or (is_above and state.st_mode & stat.S_ISVTX):
        return None
    if state.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if state.st_mode & stat.S_IWGRP and not _is_private(state.st_gid):
        return f"can be written by the group {state.st_gid}"
    return None


def _state(name: str, folder: int | None, *, create: bool) -> os.stat_result:
    """Return what the system says of a name, without following it; make the folder if that is asked."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):  # another process makes it too
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _folder_flags() -> int:
    # O_PATH needs no right to read: many users may only pass through the folder of all homes.
    return os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)


def _is_private(group: int) -> bool:
    import grp  # noqa: PLC0415  not on every platform
    import pwd  # noqa: PLC0415

    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:  # an id without a name
        return False
    return members.gr_name == user.pw_name and group == user.pw_gid and {*members.gr_mem} <= {user.pw_name}
