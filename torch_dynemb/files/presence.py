"""Tests of paths that raise an error if the file system cannot answer.

In some Python versions, ``Path.exists`` returns False for a folder without read permission, or if
no file descriptor is left. A caller that replaces or removes files must not rely on that.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from torch_dynemb.files.locations import Location, Url


def is_file(path: Location) -> bool:
    """Return whether a path is a regular file, or a URL that of a file.

    Args:
        path: the path.

    Raises:
        OSError: the file system cannot answer.
    """
    if isinstance(path, Url):
        return path.store.is_file(str(path))
    return stat.S_ISREG(_mode(path))


def is_folder(path: Location) -> bool:
    """Return whether a path is a folder; see :func:`is_file`.

    Args:
        path: the path.
    """
    if isinstance(path, Url):
        return path.store.exists(str(path)) and not is_file(path)
    return stat.S_ISDIR(_mode(path))


def is_there(path: Location) -> bool:
    """Return whether a path exists, as a dangling link too; see :func:`is_file`.

    Args:
        path: the path.
    """
    if isinstance(path, Url):
        return path.store.exists(str(path))
    try:
        os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def names_in(folder: Location) -> set[str]:
    """Return the names in a folder; empty if it does not exist.

    Args:
        folder: the folder.

    Raises:
        OSError: the file system cannot answer.
    """
    if isinstance(folder, Url):
        return folder.store.names(str(folder))
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def _mode(path: Path) -> int:
    try:
        return os.stat(path).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return 0


__all__ = ["is_file", "is_folder", "is_there", "names_in"]
