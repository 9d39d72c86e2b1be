"""Atomic exchange of the names of two folders: a name always has a folder."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
# errors of kernels, file systems and C libraries without support
_UNSUPPORTED = {errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EXDEV}


@cache
def _renameat2() -> Callable[..., int] | None:
    call: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    return call


def exchange(first: Path, second: Path) -> bool:
    """Exchange the names of two folders.

    Args:
        first, second: the folders.

    Returns:
        True, or False if the file system does not support it. Then nothing has changed.

    Raises:
        OSError: it failed.
    """
    # https://man7.org/linux/man-pages/man2/rename.2.html
    call = _renameat2()
    if call is None:
        return False
    names = os.fsencode(first), os.fsencode(second)
    if call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE) == 0:
        return True
    error = ctypes.get_errno()
    if error in _UNSUPPORTED:
        return False
    raise OSError(error, os.strerror(error), str(first), None, str(second))


__all__ = ["exchange"]
