"""Run in a process with a disk that fails while a file exists: print the store's errors as JSON.

Arguments: a folder with the stores, and the three files.
"""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from opened_store import OpenedStore, handle, opened

from torch_dynemb import ops


def said(call: Callable[[], Any]) -> str:
    """What a call raises; nothing if it does not."""
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return ""


def said_of_writes(store: OpenedStore) -> str:
    """Of the first write of a row each that is refused."""
    for row in range(0, 4000, 50):
        if told := said(lambda: store.write(0, range(row, row + 50))):  # noqa: B023
            return told
    return ""


def full_disk(path: Path, full: Path) -> dict[str, str]:
    with opened(path) as store:
        store.write(0, range(300))
        full.touch()
        told = said_of_writes(store)
        store.check_content()
        again = said(lambda: store.write(0, range(5000, 9000)))
        full.unlink()
        store.write(0, range(5000, 9000))
        store.check_content()
        return {"told": told, "again": again, "later": said(lambda: ops.store_check(store.clock))}


def direct_files(path: Path) -> list[str]:
    """Names of open files below a path that are read and written past the page cache."""
    names = {number: os.path.realpath(f"/proc/self/fd/{number}") for number in range(200)}
    return [
        name
        for number, name in names.items()
        if name.startswith(f"{path}/rows/") and fcntl.fcntl(number, fcntl.F_GETFL) & os.O_DIRECT
    ]


def buffered(path: Path) -> dict[str, str]:
    with opened(path) as store:
        for seed in range(20):
            store.write(0, range(seed * 40, seed * 40 + 400), seed=seed)
        snapshot = ops.store_sync(store.clock)
        store.check_content()
        written = store.copy_of_content()
        direct = direct_files(path)
    with opened(path) as store:
        ops.store_load(store.clock, snapshot)
        store.written = written
        store.check_content()
    return {"direct": ", ".join(direct)}


def failing_writes(path: Path, fails: Path) -> dict[str, str]:
    with opened(path) as store:
        store.write(0, range(100))
        snapshot = ops.store_sync(store.clock)
        written = store.copy_of_content()
        fails.touch()
        told = said_of_writes(store)
        fails.unlink()
        later = said(lambda: store.read(0, [handle(1)]))
    with opened(path) as store:
        ops.store_load(store.clock, snapshot)
        store.written = written
        store.check_content()
    return {"told": told, "later": later}


def main() -> None:
    folder, full, fails = map(Path, sys.argv[1:])
    print(
        json.dumps(
            {
                "full": full_disk(folder / "full", full),
                "buffered": buffered(folder / "buffered"),
                "failing": failing_writes(folder / "failing", fails),
            }
        )
    )


if __name__ == "__main__":
    main()
