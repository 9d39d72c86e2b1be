"""Wrong arguments of the typed wrappers, of table configs and of a group's methods."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from group_calls import bag_lookup, differences, flat_call, snapshot, unchanged
from op_cases import make_group
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops

pytestmark = pytest.mark.cpu_only("arguments that are refused before a device sees them")

# -- wrappers ------------------------------------------------------------------------------------


def call_with(group: td.TableGroup, name: str, ids: Tensor, offsets: Tensor) -> object:
    if name == "find":
        return group.find(ids, offsets, [0])
    if name == "find_or_insert_":
        return group.find_or_insert(ids, offsets, [0])
    return ops.erase_(group.index, ids, offsets, [0])


@pytest.mark.parametrize("name", ["find", "find_or_insert_", "erase_"])
@pytest.mark.parametrize(
    ("ids", "offsets", "error", "message"),
    [
        (torch.zeros(2), torch.tensor([0, 2]), TypeError, r"ids has dtype torch\.float32, .*int64"),
        (
            torch.zeros(2, dtype=torch.int32),
            torch.tensor([0, 2]),
            TypeError,
            r"ids has dtype torch\.int32, expected int64: use ids\.long\(\)",
        ),
        (
            torch.zeros(2, dtype=torch.int64),
            torch.tensor([0.0, 2.0]),
            TypeError,
            r"offsets has dtype torch\.float32",
        ),
        (
            torch.zeros(2, 1, dtype=torch.int64),
            torch.tensor([0, 2]),
            ValueError,
            r"ids has shape \(2, 1\), expected 1 dimension",
        ),
        (
            torch.zeros(2, dtype=torch.int64),
            torch.tensor(2),
            ValueError,
            r"offsets has shape \(\), expected 1 dimension",
        ),
        (
            torch.zeros(2, dtype=torch.int64, device="meta"),
            torch.tensor([0, 2]),
            ValueError,
            r"ids is on meta and offsets on cpu, but the table is on cpu",
        ),
        (
            torch.zeros(2, dtype=torch.int64, device="meta"),
            torch.zeros(2, dtype=torch.int64, device="meta"),
            ValueError,
            r"ids is on meta and offsets on meta, but the table is on cpu",
        ),
    ],
    ids=["float", "int32", "offsets", "2-D", "scalar", "meta ids", "meta"],
)
def test_index_wrappers(
    name: str, ids: Tensor, offsets: Tensor, error: type[Exception], message: str
) -> None:
    group = make_group()
    with pytest.raises(error, match=rf"{name}: {message}"):
        call_with(group, name, ids, offsets)
    assert unchanged(group, lambda: call_with(group, name, ids, offsets)) == []


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (
            torch.ones(3, dtype=torch.float64),
            TypeError,
            r"has dtype torch\.float64, expected float32",
        ),
        (torch.ones(2), ValueError, r"has shape \(2,\), expected that of ids, \(3,\)"),
        (torch.ones(3, 1), ValueError, r"has shape \(3, 1\), expected that of ids, \(3,\)"),
        (torch.ones(3, device="meta"), ValueError, r"is on meta, but ids on cpu"),
    ],
    ids=["float64", "short", "2-D", "meta"],
)
def test_lookup_wrappers(weights: Tensor, error: type[Exception], message: str) -> None:
    group = make_group()
    call = flat_call(group, 0, torch.arange(3))
    handles = group.find(call.ids, call.offsets, call.tables).handles
    with pytest.raises(error, match=rf"embedding: per_sample_weights {message}"):
        bag_lookup(group, call, handles=handles, weights=weights)


@pytest.mark.parametrize("optimizer", [-2, len(ops.OPTIMIZER_NAMES)])
def test_unknown_optimizer(optimizer: int) -> None:
    group = make_group()
    call = flat_call(group, 0, torch.arange(3))
    with pytest.raises(ValueError, match=rf"optimizer is {optimizer}, expected a position in"):
        bag_lookup(group, call, optimizer=optimizer)


# -- groups and configs --------------------------------------------------------------------------


def test_group_methods() -> None:
    group = make_group()
    ids, rows = torch.arange(3), torch.zeros(3, 4)
    calls: list[tuple[Callable[[], object], type[Exception], str]] = [
        (lambda: group.insert(3, ids), IndexError, r"table is 3, expected 0 to 2"),
        (lambda: group.clear("user"), ValueError, r"^clear: table is 'user', expected one of \["),
        (lambda: group.size(1.0), TypeError, r"table is 1\.0, expected the name of a table"),
        (lambda: group.erase(-1, ids), IndexError, r"table is -1, expected 0 to 2"),
        (lambda: group.read(5, ids), IndexError, r"table is 5, expected 0 to 2"),
        (lambda: group.insert(0, ids.int()), TypeError, r"ids has dtype torch\.int32"),
        (lambda: group.reserve(0, -1), ValueError, r"reserve: ids is -1, expected at least 0"),
        (lambda: group.reserve(7, 5), IndexError, r"table is 7, expected 0 to 2"),
        (lambda: list(group.export(0, batch_size=1)), ValueError, r"batch_size is 1, expected"),
        (lambda: list(group.export(4)), IndexError, r"table is 4, expected 0 to 2"),
        (lambda: group.size(-1), IndexError, r"table is -1, expected 0 to 2"),
        (
            lambda: group.insert_or_assign(0, ids, rows[:2]),
            ValueError,
            r"rows has shape \(2, 4\), expected",
        ),
        (
            lambda: group.insert_or_assign(0, torch.tensor([90, 91, 90]), rows),
            ValueError,
            r"repeated ids",
        ),
        (
            lambda: group.insert_or_assign(1, torch.tensor([90, 0, 91]), rows[:, :3]),
            ValueError,
            r"has the padding id 0",
        ),
        (lambda: group.insert_or_assign(9, ids, rows), IndexError, r"table is 9, expected 0 to 2"),
    ]
    for call, error, message in calls:
        before = snapshot(group)
        with pytest.raises(error, match=message):
            call()
        assert differences(before, snapshot(group)) == []
