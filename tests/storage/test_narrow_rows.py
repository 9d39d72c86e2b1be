"""Rows that are narrower than what memory keeps of a stored row go from memory to disk and back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("rows on a disk")

IDS = torch.arange(100)


def table(path: Path | None, dim: int, dtype: torch.dtype) -> td.DynamicEmbedding:
    storage = None if path is None else td.SSDStore(path, cache="100 rows", segment="64KiB")
    return td.DynamicEmbedding(
        dim, name="t", optimizer=td.SGD(lr=0.1), dtype=dtype, storage=storage, max_rows=10_000
    )


@pytest.mark.parametrize(
    ("dim", "dtype"), [(1, torch.bfloat16), (1, torch.float32), (2, torch.float32)]
)
def test_checkpoints_go_both_ways(tmp_path: Path, dim: int, dtype: torch.dtype) -> None:
    first = table(None, dim, dtype)
    first(IDS).sum().backward()
    td.checkpoint.save(tmp_path / "memory", first)
    stored = table(tmp_path / "rows", dim, dtype)
    td.checkpoint.load(tmp_path / "memory", stored)
    td.checkpoint.save(tmp_path / "disk", stored)
    last = table(None, dim, dtype)
    td.checkpoint.load(tmp_path / "disk", last)
    expected = first.eval()(IDS)
    for module in (stored, last):
        assert torch.equal(module.eval()(IDS), expected)


def test_a_load_of_values_that_become_infinite_is_refused(tmp_path: Path) -> None:
    wide, stored = table(None, 4, torch.float32), table(tmp_path / "rows", 4, torch.float16)
    for value, refused in ((-65520.0, True), (-65519.0, False)):
        wide.group.insert_or_assign(0, IDS[8:9], torch.full((1, 4), value))
        td.checkpoint.save(tmp_path / "last", wide)
        if refused:
            with pytest.raises(ValueError, match=r"of id 8 has -65520\.0, but the largest number"):
                td.checkpoint.load(tmp_path / "last", stored)
            assert stored.group.size(0) == 0
    td.checkpoint.load(tmp_path / "last", stored)
    assert stored.group.read(0, IDS[8:9]).tolist() == [[-65504.0] * 4]
