"""Locks beside files and directories that one process writes at a time."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Where a file system has no locks, writers are on their own.
_WITHOUT = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)


@contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Lock `path`, a file or directory to be, for the time within; the lock of a process ends with it.

    Yields False, and locks nothing, if another process has the lock. Raises OSError if no file can be made beside it.
    """
    file = path.with_name(f".{path.name}.lock")
    try:
        opened = file.open("w")
    except OSError as error:
        raise OSError(f"nothing can be written in {path.parent}: {error.strerror}; give another directory") from None
    with opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            if error.errno not in _WITHOUT:
                raise
        try:
            # Its last owner may have removed it after it was opened here.
            yield file.exists() and os.path.samestat(file.stat(), os.fstat(opened.fileno()))
        finally:
            file.unlink(missing_ok=True)
