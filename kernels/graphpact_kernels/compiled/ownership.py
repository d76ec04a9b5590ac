"""Open folders and files that other users cannot have changed, and that they cannot change during use.

A folder of code is trusted if only this user and root can change its contents:

- It and every folder above it, up to ``/``, belong to this user or to root. So does every symbolic link on
  the path, which is followed step by step.
- No other user can write to it. A folder above it may be writable for all users if it is sticky, like
  ``/tmp``: other users can add names there, but cannot replace a folder of this user.
- The group may write if it is the user's private group, which has the user's name and no other member. Many
  systems make one for each user, with a umask of 002.

Each step opens one name below the folder that is already open, and checks the opened file or folder. So
nothing can be replaced between the check and the use.

Does not: read access control lists, which only the owner can set; protect from other processes of this user.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from graphpact.errors import GraphpactError

_MOST_LINKS = 40  # on one path, the limit of Linux


@contextlib.contextmanager
def own_folder(path: Path, variable: str, *, create: bool = False) -> Iterator[int]:
    """Open a folder that other users cannot change, and yield its descriptor, to open names below it.

    Args:
        path: The folder.
        variable: The environment variable that names another folder, for the hint of an error.
        create: Whether to make it and the folders above it if they are missing; only the user may enter them.

    Raises:
        OSError: It is missing, is not a folder, or cannot be entered or made.
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
            except OSError as error:  # the system's message has only the last part of the path
                raise OSError(error.errno, error.strerror, str(where / name)) from error
            fault = fault_of(state, is_above=bool(names))
            if fault is not None:
                raise GraphpactError(
                    f"{where / name} {fault}: code from {path} is not used",
                    hint=f"make it yours (chown, chmod go-w), or name a folder that you own in {variable}",
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

    If the name is a pipe, this does not wait for it; if it is a link, it is not followed.

    Args:
        name: The name of the file.
        folder: Descriptor of the folder that contains it.

    Raises:
        OSError: It cannot be opened.
        ValueError: It is not a regular file, or other users can write to it.
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
    """Return why other users can change a folder or file or its contents, as a predicate, or None.

    Args:
        state: Its status from the system.
        is_above: Whether it is a folder above the checked one, so that it may be sticky.
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
    """Return the status of a name without following a link; with ``create``, make a missing folder."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        if not create:
            raise
    with contextlib.suppress(FileExistsError):  # another process makes it too
        os.mkdir(name, 0o700, dir_fd=folder)
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _folder_flags() -> int:
    # O_PATH needs no right to read: many users may not read the folder of all homes, only pass through it.
    return os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", os.O_RDONLY)


def _is_private(group: int) -> bool:
    import grp  # noqa: PLC0415  not on every platform
    import pwd  # noqa: PLC0415

    try:
        user, members = pwd.getpwuid(os.geteuid()), grp.getgrgid(group)
    except KeyError:  # the id has no name
        return False
    return members.gr_name == user.pw_name and group == user.pw_gid and {*members.gr_mem} <= {user.pw_name}
