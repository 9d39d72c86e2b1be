"""Finite values that a narrower dtype of a table would make infinite are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from group_calls import unchanged

import torch_dynemb as td
from torch_dynemb import checkpoint, migrate

pytestmark = pytest.mark.any_device

DIM = 4
LARGE, LEAST_LOST = 65504.0, 65520.0  # float16 rounds what is less than LEAST_LOST to LARGE
MESSAGE = (
    r"table 'embedding': the row of id 8 has -65520\.0, but the largest number of torch\.float16 "
    r"is 65504\.0: give the table dtype=torch\.float32 or torch\.bfloat16"
)
IDS = torch.tensor([5, -2, 8], device="cpu")


def table(dtype: torch.dtype, **arguments: Any) -> td.DynamicEmbedding:
    given: dict[str, Any] = {"optimizer": td.SGD(lr=0.1), **arguments}
    return td.DynamicEmbedding(DIM, dtype=dtype, **given)


def rows(value: float) -> torch.Tensor:
    """Rows of IDS; the last one has the value."""
    values = torch.ones(3, DIM, device="cpu")
    values[0, :3] = torch.tensor([torch.inf, torch.nan, -torch.inf], device="cpu")
    values[2, 1] = value
    return values


def filled(values: torch.Tensor, **arguments: Any) -> td.DynamicEmbedding:
    module = table(torch.float32, **arguments)
    device = module.group.device
    module.group.insert_or_assign(0, IDS.to(device), values.to(device))
    return module


def held(module: td.DynamicEmbedding) -> torch.Tensor:
    return module.group.read(0, IDS.to(module.group.device)).cpu()


def same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool(torch.equal(found.nan_to_num(7.0), expected.to(found.dtype).nan_to_num(7.0)))


def test_assigned_rows() -> None:
    module = table(torch.float16, max_rows=2000)
    group, device = module.group, module.group.device
    ids, wrong = IDS.to(device), rows(-LEAST_LOST).to(device)
    with pytest.raises(ValueError, match="insert_or_assign: " + MESSAGE):
        group.insert_or_assign(0, ids, wrong)
    assert unchanged(group, lambda: group.insert_or_assign(0, ids, wrong)) == []
    group.insert_or_assign(0, ids, rows(-LEAST_LOST + 1).to(device))
    assert held(module)[2, 1] == -LARGE
    assert same(held(module), rows(-LARGE))
    whole = torch.full((3, DIM), 65504, device=device)
    group.insert_or_assign(0, ids, whole)
    with pytest.raises(ValueError, match=r"id 5 has 70000\.0"):
        group.insert_or_assign(0, ids, whole + 4496)


def test_loads_of_checkpoints(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "wrong", filled(rows(-LEAST_LOST)))
    checkpoint.save(tmp_path / "good", filled(rows(-LARGE)))
    module = table(torch.float16)
    with pytest.raises(ValueError, match=MESSAGE):
        checkpoint.load(tmp_path / "wrong", module)
    assert module.group.size(0) == 0
    checkpoint.load(tmp_path / "good", module)
    assert same(held(module), rows(-LARGE))
    with pytest.raises(ValueError, match=MESSAGE):
        checkpoint.load(tmp_path / "wrong", module)
    assert same(held(module), rows(-LARGE))
    wide = table(torch.bfloat16)
    checkpoint.load(tmp_path / "wrong", wide)
    assert same(held(wide), rows(-LEAST_LOST).bfloat16())


class Given(migrate.Source):
    """A source of one batch."""

    def __init__(self, batch: td.RowBatch) -> None:
        super().__init__("given", DIM, state=tuple(batch.state))
        self.batch = batch

    def batches(self, size: int) -> Iterator[migrate.SourceRows]:
        yield migrate.SourceRows(self.batch, "file", 100)


def test_migrated_rows() -> None:
    module = table(torch.float16)
    with pytest.raises(ValueError, match=MESSAGE):
        migrate.load(module, Given(td.RowBatch(IDS[1:], rows(-LEAST_LOST)[1:])))
    assert module.group.size(0) == 0
    migrate.load(module, Given(td.RowBatch(IDS[1:], rows(-LARGE)[1:])))
    assert same(held(module)[1:], rows(-LARGE)[1:])


def test_migrated_state() -> None:
    """Of the largest float32 numbers, bfloat16 makes infinity."""
    module = table(torch.float32, optimizer=td.Adagrad(lr=0.1, state_dtype=torch.bfloat16))
    state = {"sum": torch.full((1, DIM), 3.4e38, device="cpu")}
    batch = td.RowBatch(IDS[2:], rows(1.0)[2:], state)
    with pytest.raises(ValueError, match=r"state 'sum' of id 8 has 3.*optimizer state_dtype="):
        migrate.load(module, Given(batch))
    assert module.group.size(0) == 0
