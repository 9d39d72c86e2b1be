"""Constants of a group that are damaged: ops say so, and neither read nor write elsewhere."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from op_cases import CASES, make_group
from torch import Tensor

from torch_dynemb.ops.columns import (
    INIT_RECORD_COLUMNS,
    Hyper,
    InitKind,
    Meta,
    Pooling,
    RowClock,
    Slab,
)
from torch_dynemb.recis import RaggedTensor

pytestmark = pytest.mark.cpu_only("test_cuda_kernels compares a GPU with it")


def arguments_of(name: str, label: str | None = None) -> dict[str, Any]:
    schema = getattr(torch.ops.dynemb, name).default._schema
    cases = CASES[name]
    case = next(iter(cases.values())) if label is None else cases[label]
    return dict(zip((a.name for a in schema.arguments), case(), strict=True))


def run(name: str, arguments: dict[str, Any]) -> Any:
    return getattr(torch.ops.dynemb, name)(*arguments.values())


def with_entry(tensor: Tensor, row: int, column: int, value: float) -> Tensor:
    tensor = tensor.clone()
    tensor[row, column] = value
    return tensor


@pytest.mark.parametrize("name", ["get_scores", "set_scores_"])
def test_scores_of_a_table_that_keeps_none(name: str) -> None:
    arguments = arguments_of(name)
    arguments["meta"] = with_entry(arguments["meta"], 1, Meta.UNSCORED, 1)
    with pytest.raises(RuntimeError, match=rf"{name}: meta\[1, UNSCORED\] is 1: no scores are"):
        run(name, arguments)


@pytest.mark.parametrize("name", ["erase_", "find_or_insert_"])
@pytest.mark.parametrize("slab", [-1, 2, 2**62])
def test_a_slab_that_does_not_exist(name: str, slab: int) -> None:
    arguments = arguments_of(name)
    arguments["meta"] = with_entry(arguments["meta"], 2, Meta.SLAB, slab)
    with pytest.raises(RuntimeError, match=rf"{name}: meta of table 2 names slab {slab}, exp"):
        run(name, arguments)


@pytest.mark.parametrize("name", ["erase_", "find_or_insert_"])
@pytest.mark.parametrize("column", [Slab.NEXT_ROW, Slab.FREE_COUNT, Slab.ROW_BYTES])
@pytest.mark.parametrize("value", [-1, 2**62])
def test_counts_of_a_slab_that_are_none(name: str, column: Slab, value: int) -> None:
    arguments = arguments_of(name)
    arguments["slabs"] = with_entry(arguments["slabs"], 1, column, value)
    with pytest.raises(RuntimeError, match=rf"{name}: slabs\[1, {column.name}\] is {value}, exp"):
        run(name, arguments)


def test_free_rows_do_not_overflow() -> None:
    arguments = arguments_of("erase_")
    slabs, free_rows = arguments["slabs"].clone(), arguments["free_rows"].clone()
    slabs[:, Slab.FREE_COUNT] = free_rows.shape[1]
    arguments["slabs"], arguments["free_rows"] = slabs, free_rows
    with pytest.raises(RuntimeError, match=r"erase_: free_rows has room for 64 rows of slab 0"):
        run("erase_", arguments)


@pytest.mark.parametrize("row", [64, 2**34, -5])
def test_handles_of_rows_that_do_not_exist_are_not_materialized(row: int) -> None:
    arguments = arguments_of("materialize_", "element state")
    buckets = arguments["buckets"].clone()
    handles = buckets[:, buckets.shape[1] // 2 :]
    handles[handles != 0] = (row << 28 | 1) + 1
    arguments["buckets"] = buckets
    assert run("materialize_", arguments).tolist() == [0]


LISTS = [("INIT_BEGIN", "INIT_COUNT"), ("DEFAULT_BEGIN", "DEFAULT_COUNT")]
LISTS.append(("REFUSED_BEGIN", "REFUSED_COUNT"))


@pytest.mark.parametrize("name", ["embedding_inference", "embedding", "embedding_backward_"])
@pytest.mark.parametrize(("begin", "count"), LISTS)
@pytest.mark.parametrize("value", [-1, 2**62, 2**63 - 1])
def test_records_outside_of_init_data(name: str, begin: str, count: str, value: int) -> None:
    for column in (begin, count):
        arguments = arguments_of(name)
        arguments["meta"] = with_entry(arguments["meta"], 1, Meta[column], value)
        expected = (
            rf"{name}: meta of table 1 names records outside init_data: .*{column} is {value}"
        )
        with pytest.raises(RuntimeError, match=expected):
            run(name, arguments)


@pytest.mark.parametrize("begin", [-5.0, 1e300, math.nan, 2.0**40])
def test_vectors_outside_of_init_data(begin: float) -> None:
    arguments = arguments_of("embedding_inference")
    init_data = arguments["init_data"].clone()
    first = int(arguments["meta"][0, Meta.INIT_BEGIN])
    init_data[first : first + INIT_RECORD_COLUMNS] = 0
    init_data[first + 1], init_data[first + 2] = 4, InitKind.VECTOR
    init_data[first + 3] = begin
    arguments["init_data"] = init_data
    with pytest.raises(RuntimeError, match=r"init_data: the vector of record 0 of INIT_BEGIN of"):
        run("embedding_inference", arguments)


def test_the_number_of_buckets_does_not_overflow() -> None:
    arguments = arguments_of("find")
    arguments["meta"] = with_entry(arguments["meta"], 0, Meta.REGION_BUCKETS, 2**63 - 1)
    with pytest.raises(RuntimeError, match=r"find: the descriptor of table 0 does not fit into"):
        run("find", arguments)


def test_zeroed_limits_are_no_limits() -> None:
    group = make_group(optimizer="sgd")
    group.rows.hyper.zero_()
    group.rows.hyper[:, Hyper.LR] = 1.0
    ids = torch.tensor([5, 6])
    before = group.read(0, ids)
    handles = group.find(ids, torch.tensor([0, 2]), [0]).handles
    output, _ = torch.ops.dynemb.embedding(
        *group.rows,
        ids,
        handles,
        torch.tensor([0, 2]),
        None,
        torch.zeros(1, requires_grad=True),
        [0],
        [4],
        int(Pooling.NONE),
        group.config.optimizer_code,
    )
    output.sum().backward()
    torch.testing.assert_close(group.read(0, ids), before - 1.0)


def test_results_beyond_memory_are_refused_with_their_bytes() -> None:
    arguments = arguments_of("ragged_to_dense", "one feature")
    for length, message in (
        (
            2**40,
            r"ragged_to_dense: lengths\[0\] is 1099511627776, with which the result takes \d+ MiB",
        ),
        (2**62, r"ragged_to_dense: lengths\[0\] is \d+, with which the result is larger than an"),
    ):
        arguments["lengths"] = [length]
        with pytest.raises(RuntimeError, match=message):
            run("ragged_to_dense", arguments)
    ragged = RaggedTensor(torch.arange(3), torch.tensor([0, 1, 3]))
    with pytest.raises(ValueError, match=r"pad: lengths is 1099511627776, with which 2 rows take"):
        ragged.pad(2**40)


def test_pending_gradients_without_columns() -> None:
    arguments = arguments_of("merge_grad_")
    arguments["pending_gradients"] = [
        g.new_zeros((len(g), 0)) for g in arguments["pending_gradients"]
    ]
    with pytest.raises(RuntimeError, match=r"merge_grad_: pending_gradients\[0\] has no columns"):
        run("merge_grad_", arguments)


@pytest.mark.parametrize("table", [-1, 1, 2**40])
def test_pending_gradients_of_a_table_that_does_not_exist(table: int) -> None:
    """Of many entries their tables are counted: a number of one was room for as many."""
    count = 70_000
    arguments = {
        "handles": [torch.arange(count)],
        "ids": [torch.arange(count)],
        "tables": [torch.full((count,), table)],
        "gradients": [torch.ones(count, 1)],
        "counts": torch.tensor([[count, 2]]),
        "row_clock": torch.zeros(1 + len(RowClock), dtype=torch.int64),
    }
    message = rf"merge_grad_: pending_tables: entry 0 is of table {table}, expected 0 to 0"
    with pytest.raises(RuntimeError, match=message):
        run("merge_grad_", arguments)


@pytest.mark.parametrize("shape", [(8,), (), (3, 4, 1)])
def test_tiles_of_what_is_no_matrix(shape: tuple[int, ...]) -> None:
    """The formula of the gradient reads the shape before a kernel does."""
    arguments = arguments_of("ragged_tile")
    arguments["rows"] = torch.zeros(shape, requires_grad=True)
    message = rf"ragged_tile: rows has {len(shape)} dimensions, expected 2"
    with pytest.raises(RuntimeError, match=message):
        run("ragged_tile", arguments)


@pytest.mark.parametrize("label", ["evict", "counted"])
def test_counted_ids_are_not_looked_up(label: str) -> None:
    """They have no scores by which some could be evicted."""
    arguments = arguments_of("find_or_insert_", label)
    arguments["meta"] = with_entry(arguments["meta"], 1, Meta.UNSCORED, 1)
    with pytest.raises(RuntimeError, match=r"find_or_insert_: meta\[1, UNSCORED\] is 1: counted"):
        run("find_or_insert_", arguments)
