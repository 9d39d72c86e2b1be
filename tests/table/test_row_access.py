"""Rows that are read and written by their handles, wherever they lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group_calls import train
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.table.row_access import (
    handle_rows,
    read_rows,
    readable,
    state_tensors,
    write_rows,
)

pytestmark = pytest.mark.any_device

DIM = 6
OPTIMIZERS = {
    "SGD": td.SGD(lr=0.1),
    "Adam with steps of rows": td.Adam(lr=0.1, row_steps=True, state_dtype=torch.bfloat16),
    "Adam with 8 bits": td.Adam(lr=0.1, state_dtype=torch.uint8),
    "Adagrad from 0.5": td.Adagrad(lr=0.1, initial_accumulator_value=0.5),
    "RowWiseAdagrad from 0.5": td.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5),
}
by_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def make_group(optimizer: Any, dtype: torch.dtype = torch.float32) -> td.TableGroup:
    """Two tables of one slab and one of another; some rows are trained, some have been erased."""
    tables = [
        td.TableConfig("other", 4),
        td.TableConfig("a", DIM, dtype=dtype, initializer=td.Uniform(-1, 1)),
        td.TableConfig("b", DIM, dtype=dtype),
    ]
    group = td.TableGroup(tables, optimizer=optimizer, max_rows=500, seed=3)
    group.insert(0, torch.arange(5))
    for table in (1, 2):
        train(group, table, torch.arange(20), torch.arange(20 * DIM).reshape(20, DIM) / 7.0)
        group.insert(table, torch.arange(15, 30))
        group.erase(table, torch.arange(4, 9))
        group.insert(table, torch.arange(100, 103))  # on rows of which some had been trained
    return group


def handles_of(group: td.TableGroup, table: int, ids: Tensor) -> Tensor:
    return group.find(ids, torch.tensor([0, ids.numel()]), [table]).handles


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@by_optimizer
def test_rows_that_nobody_has_written_read_as_materialized_ones(
    optimizer: Any, dtype: torch.dtype
) -> None:
    group = make_group(optimizer, dtype)
    ids = torch.cat([torch.arange(100, 103), torch.arange(9, 30), torch.tensor([3, 3])])
    handles = handles_of(group, 1, ids)
    stored = group.rows.generations[1].clone()
    found = read_rows(group.tables, 1, ids, handles)
    assert torch.equal(group.rows.generations[1], stored)  # a read changes nothing
    group.materialize()
    written = read_rows(group.tables, 1, ids, handles)
    assert torch.equal(found.rows, written.rows)
    assert found.rows.dtype == dtype
    assert list(found.state) == [tensor.name for tensor in optimizer.state]
    for name, values in written.state.items():
        assert torch.equal(found.state[name], values)
        tensor = state_tensors(group.tables, 1)[name]
        assert torch.equal(values, tensor[handle_rows(handles)])


def test_what_ops_read_are_the_rows_themselves() -> None:
    group = make_group(td.SGD(lr=0.1))
    ids = torch.tensor([3, 9, 1000])
    handles = handles_of(group, 1, ids)
    rows, same = readable(group.tables, 1, ids, handles)
    assert rows is group.rows
    assert same is handles


@by_optimizer
def test_a_write_gives_new_rows_fresh_state_and_leaves_that_of_others(optimizer: Any) -> None:
    group = make_group(optimizer)
    ids = torch.tensor([102, 12, 29, 28, 3])
    before = read_rows(group.tables, 1, ids, handles_of(group, 1, ids))
    others = torch.arange(9, 12)
    kept = read_rows(group.tables, 1, others, handles_of(group, 1, others))
    weights = torch.randn(5, DIM)
    write_rows(group.tables, 1, td.RowBatch(ids, weights), handles_of(group, 1, ids))
    after = read_rows(group.tables, 1, ids, handles_of(group, 1, ids))
    assert torch.equal(after.rows, weights)
    for name, values in before.state.items():  # of those that were not written: of new rows
        assert torch.equal(after.state[name], values)
    still = read_rows(group.tables, 1, others, handles_of(group, 1, others))
    assert torch.equal(still.rows, kept.rows)


def test_a_write_of_some_columns_leaves_the_others() -> None:
    group = make_group(td.Adam(lr=0.1))
    ids = torch.tensor([12, 29, 9])
    handles = handles_of(group, 1, ids)
    write_rows(group.tables, 1, td.RowBatch(ids[1:2], torch.zeros(1, DIM)), handles[1:2])
    before = read_rows(group.tables, 1, ids, handles)
    columns = torch.randn(3, 2)
    given = {"exp_avg": columns + 1}
    write_rows(group.tables, 1, td.RowBatch(ids, columns, given, first_column=3), handles)
    after = read_rows(group.tables, 1, ids, handles)
    expected, moment = before.rows.clone(), before.state["exp_avg"].clone()
    expected[:, 3:5], moment[:, 3:5] = columns, columns + 1
    assert torch.equal(after.rows, expected)
    assert torch.equal(after.state["exp_avg"], moment)
    assert torch.equal(after.state["exp_avg_sq"], before.state["exp_avg_sq"])


@by_optimizer
def test_a_fill_gives_every_id_the_row_and_leaves_state(optimizer: Any) -> None:
    group, twin = make_group(optimizer), make_group(optimizer)
    twin.materialize()
    ids = torch.cat([torch.arange(4), torch.arange(9, 30), torch.arange(100, 103)])
    other = torch.arange(15, 25)
    unchanged = group.read(2, other)
    group.fill(1, 0.3)
    rows = read_rows(group.tables, 1, ids, handles_of(group, 1, ids))
    assert bool((rows.rows == torch.tensor(0.3)).all())
    expected = read_rows(twin.tables, 1, ids, handles_of(twin, 1, ids))
    for name, values in expected.state.items():
        assert torch.equal(rows.state[name], values)
    assert torch.equal(group.read(2, other), unchanged)


def test_no_rows_are_read_and_written() -> None:
    group = make_group(td.Adam(lr=0.1))
    none = torch.empty(0, dtype=torch.int64)
    rows = read_rows(group.tables, 1, none, none)
    assert rows.rows.shape == (0, DIM)
    assert rows.state["exp_avg"].shape == (0, DIM)
    before = group.read(1, torch.arange(30))
    write_rows(group.tables, 1, rows, none)
    assert torch.equal(group.read(1, torch.arange(30)), before)
