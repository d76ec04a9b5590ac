"""`write_file` writes a file completely or not at all; `read_file` reads one and never blocks on a pipe.

Does not: make directories, or check what is in a file.
"""

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

from graphpact.errors import GraphpactError, UsageError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


def read_file(file: Path, most: int = -1) -> bytes:
    """Return the content of ``file``.

    A path from a user may be a pipe without a writer or an endless device, so both are refused. A pipe that a
    shell passes, as in ``--config <(command)``, is read.

    Args:
        file: The file; a link is followed.
        most: Number of bytes to read; -1 for all.

    Raises:
        OSError: The file cannot be read, or is a pipe or a device.
    """

    def open_at_once(path: str, flags: int) -> int:
        return os.open(path, flags if is_passed else flags | getattr(os, "O_NONBLOCK", 0))

    is_passed = str(file).startswith(("/dev/fd/", "/dev/stdin"))
    with open(file, "rb", opener=open_at_once) as stream:
        if not (is_passed or stat.S_ISREG(os.fstat(stream.fileno()).st_mode)):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(file))
        return stream.read(most)


def write_file(file: Path, text: str) -> None:
    """Write ``text`` to ``file`` as UTF-8; if that fails, an existing file is unchanged.

    The text goes to a new file in the same directory, which then replaces ``file``, or the target of a link.
    A device or a pipe is written directly.

    Raises:
        UsageError: The path cannot be written.
        GraphpactError: The disk is full or broken.
    """
    target = Path(os.path.realpath(file))
    temporary = target.with_name(f".graphpact-{os.urandom(8).hex()}")
    try:
        is_replaced = target.is_file() or not target.exists()
        path = temporary if is_replaced else target
        with path.open("w", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
            stream.flush()
            if is_replaced:
                os.fsync(stream.fileno())
        if is_replaced:
            if target.exists():
                shutil.copymode(target, temporary)
            temporary.replace(target)
    except OSError as error:
        kind = GraphpactError if error.errno in _FULL else UsageError
        hint = "name a path that can be written"
        raise kind(f"{file} cannot be written: {error.strerror or error}", hint=hint) from error
    finally:
        with suppress(OSError):
            temporary.unlink()
