"""Whether something has a name: only a file system that says no means no.

``Path.exists`` and its kin answer no, in some versions of Python, where a folder may not be read
or no descriptor is left. A caller that replaces or removes what is not there must not be told so.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path


def is_file(path: Path) -> bool:
    """Return whether a file has this name.

    Args:
        path: of the file.

    Raises:
        OSError: that cannot be found out.
    """
    return stat.S_ISREG(_mode(path))


def is_folder(path: Path) -> bool:
    """Return whether a folder has this name; see :func:`is_file`.

    Args:
        path: of the folder.
    """
    return stat.S_ISDIR(_mode(path))


def is_there(path: Path) -> bool:
    """Return whether anything has this name, a link to nothing too; see :func:`is_file`.

    Args:
        path: of it.
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
