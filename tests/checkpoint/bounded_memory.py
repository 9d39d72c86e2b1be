"""Saves and loads a table that fills 0.7 of the memory that the process may still take.

Run as a program: its limit (RLIMIT_DATA) holds for the whole process. What a table reserves counts
as memory there, so the table reserves no more rows than it has.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from pathlib import Path

import torch

import torch_dynemb as td

ROWS, DIM = 400_000, 64
SHARE = 0.7


def data_bytes() -> int:
    """Private memory that the process may write: what the limit is about."""
    pages = Path("/proc/self/statm").read_text().split()[5]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def table(seed: int, policy: td.Policy | None = None) -> td.DynamicEmbedding:
    torch.manual_seed(seed)
    return td.DynamicEmbedding(DIM, optimizer=td.Adagrad(lr=0.1), max_rows=ROWS, policy=policy)


def check(items: td.DynamicEmbedding) -> None:
    """Whether all rows are there."""
    for begin in range(0, ROWS, 20_000):
        rows = items.group.read(0, ids_of(begin))
        assert torch.equal(rows, ids_of(begin)[:, None].expand(-1, DIM).float())


def ids_of(begin: int) -> torch.Tensor:
    return torch.arange(begin, min(begin + 20_000, ROWS)) * 7919


def main(path: str) -> None:
    torch.set_num_threads(1)
    warm = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), max_rows=64)
    warm(torch.arange(9)).sum().backward()
    td.checkpoint.save(path + "-warm", warm)  # what is imported late is there before the limit
    before = data_bytes()
    items = table(0)
    for begin in range(0, ROWS, 20_000):
        rows = ids_of(begin)[:, None].expand(-1, DIM).float()
        items.group.insert_or_assign(0, ids_of(begin), rows)
    held = items.group.usage.memory()["total"]
    limit = before + int(max(held, data_bytes() - before) / SHARE)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    with contextlib.suppress(RuntimeError):
        torch.empty(held, dtype=torch.uint8)
        raise AssertionError("the limit does not hold")
    td.checkpoint.save(path, items)
    del items
    twin = table(1)
    assert td.checkpoint.load(path, twin).tables["embedding"].exact
    check(twin)
    del twin
    other = table(2, td.Policy(score="step"))  # has scores, so nothing keeps its place
    assert not td.checkpoint.load(path, other).tables["embedding"].exact
    check(other)
    print("saved and loaded", held, "bytes")


if __name__ == "__main__":
    main(sys.argv[1])
