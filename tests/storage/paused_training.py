"""Trains while the thread of a store stands still in the middle of its work.

A program that tests start with a file shim, in which calls of the thread wait. It trains a table in
memory, too, and ends with an error where the two differ in a bit. It prints as JSON how often the
thread stood still.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path

import torch
from file_shim import Hold
from group_calls import same_bits
from tiered_pairs import check_cache
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops

DIM = 24
IDS = 600
CACHE = "160 rows"  # more than a step uses: giving memory back would wait for the thread
SEGMENT = 64 << 10
STEPS = 60
SECONDS = 60  # after which a thread that never stands still is an error


def new_table(storage: td.SSDStore | None) -> td.DynamicEmbedding:
    torch.manual_seed(7)
    return td.DynamicEmbedding(
        DIM,
        name="t",
        optimizer=td.Adam(lr=0.05),
        policy=td.Policy(score="frequency"),
        initializer=td.Uniform(-1.0, 1.0),
        max_rows=4096,
        storage=storage,
    )


class Paused:
    """Two tables that get the same batches, and a thread that waits where it is held.

    Args:
        path: of the store.
        hold: what lets its thread wait.
        io: how it reads.
        disk: bytes; 0: without a bound, so that no call waits for the thread to make room.
    """

    def __init__(self, path: Path, hold: Hold, io: str, disk: int) -> None:
        bound = {"disk": disk} if disk > 0 else {}
        storage = td.SSDStore(path, cache=CACHE, segment=SEGMENT, io=io, **bound)  # type: ignore[arg-type]
        self.plain, self.tiered = new_table(None), new_table(storage)
        self.hold = hold
        self.waits_for_room = disk > 0
        # writes have threads of their own: the store's goes on until many buffers are full
        self.thread_waits = hold.call == "pread"
        self.pauses = 0

    def queued(self) -> int:
        stats = self.tiered.group.usage.storage()
        assert stats is not None
        return stats.queued

    def drain(self) -> None:
        tiers = self.tiered.group.tables.tiers
        assert tiers is not None
        tiers.drain()

    def train(self, ids: Tensor) -> None:
        outputs = [module(ids) for module in (self.plain, self.tiered)]
        assert same_bits(*(output.detach() for output in outputs))
        for module, output in zip((self.plain, self.tiered), outputs, strict=True):
            output.sin().sum().backward()
            module.optimizer.step()

    def stands_still(self) -> bool:
        """Whether the thread does; else it has done all its work."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if self.hold.reached.exists():
                return True
            if self.queued() == 0:
                return self.hold.reached.exists()
            time.sleep(0.0005)
        raise AssertionError("the thread neither ends its work nor stands still")

    def cached(self) -> Tensor:
        """Return ids with rows in memory."""
        tiers = self.tiered.group.tables.tiers
        assert tiers is not None
        ids = torch.arange(IDS)
        handles = self.tiered.group.find(ids, torch.tensor([0, IDS]), [0]).handles
        known = handles >= 0
        return ids[known][tiers.tensors.places[0][handles[known] >> 28] > 0]

    def step(self, ids: Tensor, never: Tensor) -> None:
        """A prefetch and its lookup; much happens in between where the thread stands still.

        Args:
            ids: of the lookup.
            never: that are prefetched, and not looked up.
        """
        self.drain()  # of what the step before has left
        self.hold.reached.unlink(missing_ok=True)
        self.hold.switch.touch()
        self.tiered.prefetch(ids)
        if not self.stands_still():
            self.hold.switch.unlink()
            self.train(ids)
            return
        there = self.cached()
        there = there[~torch.isin(there, ids)][:40]
        if len(there) > 0:
            self.train(there)  # rows in memory need not wait
        # a read ahead that waits may not be needed yet
        self.pauses += self.queued() > 0 or not self.thread_waits
        let_go = threading.Thread(target=self.hold.switch.unlink)
        if self.waits_for_room:
            let_go.start()
        self.tiered.prefetch(ids)
        self.tiered.prefetch(never, ahead=2)
        self.tiered.prefetch(never)
        if not self.waits_for_room:
            assert self.hold.switch.exists()
            let_go.start()
        self.train(ids)
        let_go.join()


# By name: the call that waits, how rows are read, and of how many segments the disk is, 0 without a
# bound. The thread stands still between saves and loads, while it collects, or with full buffers.
CASES = {
    "loads": ("pread", "threads", 0),
    "saves": ("pwrite", "threads", 0),
    "saves, io_uring": ("pwrite", "io_uring", 0),
    "collection, io_uring": ("pread", "io_uring", 8),
    "bounded disk": ("pwrite", "threads", 8),
}


def hold_of(root: Path, case: str) -> Hold:
    """The calls that wait; each case has a folder of its own."""
    return Hold(CASES[case][0], root / case / "rows", root / f"{case}.hold")


def pauses(root: Path, case: str) -> int:
    """Trains, and compares; returns how often the thread stood still."""
    _, io, segments = CASES[case]
    paused = Paused(root / case, hold_of(root, case), io, segments * SEGMENT)
    for first in range(0, IDS, 50):
        paused.train(torch.arange(first, first + 50))
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        ids = torch.randint(0, IDS, (50,), generator=draw)
        never = torch.randint(0, IDS, (20,), generator=draw)
        paused.step(ids, never)
    check_cache(paused.tiered.group)
    ids = torch.arange(IDS)
    assert same_bits(paused.plain.eval()(ids), paused.tiered.eval()(ids))
    return paused.pauses


def main(root: Path) -> None:
    torch.set_num_threads(1)
    has_uring = ops.IoPath.URING in ops.store_io_paths()
    cases = [case for case, (_, io, _) in CASES.items() if has_uring or io != "io_uring"]
    print(json.dumps({case: pauses(root, case) for case in cases}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
