"""Reads and saves rows of a store while the writes of its full buffers wait.

A program that tests start with a file shim. It ends with an error where a row differs, or where a
snapshot is ready before its rows are written.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

from file_shim import Hold
from opened_store import SEGMENT, opened

from torch_dynemb import ops

DIM = 30
ROWS = 2 * SEGMENT // 152  # records of two segments
SECONDS = 60
MOMENT = 0.2  # far longer than an fdatasync takes here


def hold_of(root: Path) -> Hold:
    """The writes that wait."""
    return Hold("pwrite", root / "store" / "rows", root / "hold")


def main(root: Path) -> None:
    hold = hold_of(root)
    with opened(root / "store", [DIM]) as store:
        store.write(0, range(ROWS))
        ops.store_drain(store.clock)
        hold.switch.touch()
        store.write(0, range(0, ROWS, 2), seed=1)
        end = time.monotonic() + SECONDS
        while not hold.reached.exists():
            assert time.monotonic() < end, "no buffer is written"
            time.sleep(0.0005)
        store.check_content()  # rows on their way to files, too
        snapshots: list[ops.StoreSnapshot] = []
        saver = threading.Thread(target=lambda: snapshots.append(ops.store_sync(store.clock)))
        saver.start()
        saver.join(MOMENT)
        waits = saver.is_alive()
        hold.switch.unlink()  # otherwise closing the store would wait
        assert waits, "a snapshot is ready before its rows are written"
        saver.join()
        saved = store.copy_of_content()
        store.check_content()
        store.write(0, range(ROWS // 2), seed=2)
        store.check_content()
        ops.store_load(store.clock, snapshots[0])
        store.written = saved
        store.check_content()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
