"""A limit on this process's memory and on its share of the page cache: a cgroup of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT = "memory.limit_in_bytes"
NO_LIMIT = "-1"


class MemoryLimit:
    """A cgroup (version 1, controller ``memory``) that this process is in.

    Args:
        folder: of the cgroup.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def anonymous_bytes(self) -> int:
        """Return memory that is not of files."""
        lines = (self._folder / "memory.stat").read_text().splitlines()
        return int(dict(line.split() for line in lines)["rss"])

    def set(self, size: int) -> None:
        """Limit the process, with its pages of files, to ``size`` bytes from now on.

        Raises:
            OSError: it has more, and they are not pages of files that can be written and dropped.
        """
        (self._folder / LIMIT).write_text(str(size))


@contextmanager
def limited_memory(parent: Path) -> Iterator[MemoryLimit]:
    """Move this process into a new cgroup below ``parent``, and back in the end.

    Args:
        parent: a cgroup that this process may write to, as root or because it was delegated.

    Raises:
        ValueError: it is not one of version 1 with the controller ``memory``.
    """
    if not (parent / LIMIT).exists():
        raise ValueError(
            f"{parent} has no {LIMIT}: give the folder of a cgroup of version 1 with the "
            "controller memory, usually below /sys/fs/cgroup/memory"
        )
    before = _own_folder(parent)
    folder = parent / f"dynemb-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        try:
            yield MemoryLimit(folder)
        finally:
            (folder / LIMIT).write_text(NO_LIMIT)
            (before / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        folder.rmdir()


def _own_folder(inside: Path) -> Path:
    """Return the folder of the memory cgroup that this process is in."""
    (own,) = (
        path
        for _, controllers, path in (
            line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
        )
        if "memory" in controllers.split(",")
    )
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mount, _, kind = line.partition(" - ")
        if not kind.startswith("cgroup "):
            continue
        root, point = mount.split()[3], Path(mount.split()[4])
        if inside.is_relative_to(point) and Path(own).is_relative_to(root):
            return point / Path(own).relative_to(root)
    raise ValueError(f"{inside} is not below the mount of the cgroup {own} of this process")
