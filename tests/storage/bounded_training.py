"""Trains a table of four times the memory that it may take.

Run as a program, which prints what it has taken. A limit of the system would count the addresses
that a table reserves, so the most memory that there ever was is read instead (VmHWM).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import torch_dynemb as td

IDS, DIM, BATCH = 120_000, 256, 2_000
ROW_BYTES = 2 * 4 * DIM  # of Adagrad's
LIMIT = IDS * ROW_BYTES // 4


def most_memory() -> int:
    """Bytes of memory that the process has had at most."""
    status = Path("/proc/self/status").read_text()
    (line,) = (of for of in status.splitlines() if of.startswith("VmHWM:"))
    return int(line.split()[1]) << 10


def step(table: td.DynamicEmbedding, ids: torch.Tensor) -> None:
    table(ids).sum().backward()
    table.optimizer.step()


def table_in(path: str) -> td.DynamicEmbedding:
    storage = td.SSDStore(path, cache=LIMIT // 10, segment="4MiB")
    return td.DynamicEmbedding(DIM, name="t", optimizer=td.Adagrad(lr=0.1), storage=storage)


def main(path: str) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    step(table_in(path + "-warm"), torch.arange(BATCH))  # what is imported late is there
    before = most_memory()
    table = table_in(path)
    again = torch.randperm(IDS)[: IDS // 4]
    for order in (torch.arange(IDS), again):
        for ids in order.split(BATCH):
            step(table, ids * 7919)
    taken = most_memory() - before
    assert len(table) == IDS
    # by gradients of ones, Adagrad moves a row by lr, then by lr / sqrt(2)
    table.eval()
    ids = again[:2000] * 7919
    torch.manual_seed(0)
    fresh = td.DynamicEmbedding(DIM, name="t", optimizer=td.SGD(lr=0.1), max_rows=ids.numel())
    moved = fresh(ids) - table(ids)
    assert torch.allclose(moved, torch.full_like(moved, 0.1 + 0.1 / 2**0.5), atol=1e-4), moved
    assert taken < LIMIT, f"{taken} bytes for a table of {IDS * ROW_BYTES}, expected {LIMIT}"
    print(f"{IDS * ROW_BYTES} bytes trained in {taken}, of which {LIMIT // 10} are the cache")


if __name__ == "__main__":
    main(sys.argv[1])
