"""Tests of paths that raise an error if the file system cannot answer.

In some Python versions, ``Path.exists`` returns False for a folder without read permission, or if
no file descriptor is left. A caller that replaces or removes files must not rely on that.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_file(path: Path) -> bool:
    """Return whether a path is a regular file.

    Args:
        path: the path.

    Raises:
        OSError: the file system cannot answer.
    """
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Return whether a path is a folder; see :func:`is_file`.

    Args:
        path: the path.
    """
    return stat.S_ISDIR(_mode(path))


def is_there(path: Path) -> bool:
    """Return whether a path exists, as a dangling link too; see :func:`is_file`.

    Args:
        path: the path.
    """
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def _mode(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


__all__ = ["is_file", "is_folder", "is_there"]
