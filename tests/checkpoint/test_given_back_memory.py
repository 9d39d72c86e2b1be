"""A load that fails gives the memory back that it has read rows into."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_dynemb as td
from torch_dynemb import checkpoint

pytestmark = pytest.mark.cpu_only("looks at what this process has of the machine's memory")


def test_failed_load_gives_the_memory_of_rows_back(tmp_path: Path) -> None:
    def table() -> td.DynamicEmbedding:
        return td.DynamicEmbedding(256, optimizer=td.SGD(lr=0.1), max_rows=100_000, name="table")

    def resident() -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096

    large = table()
    large.group.insert_or_assign(0, torch.arange(60_000), torch.ones(60_000, 256))
    checkpoint.save(tmp_path / "last", large)
    del large
    (file,) = (tmp_path / "last").glob("*/embedding/*")
    with file.open("r+b") as opened:
        opened.seek(-1, 2)
        opened.write(b"x")
    model = table()
    before = resident()
    with pytest.raises(checkpoint.DamagedFileError):
        checkpoint.load(tmp_path / "last", model)
    assert resident() - before < 30 << 20  # of 61 MB
