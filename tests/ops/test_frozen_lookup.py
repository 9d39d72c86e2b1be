"""Lookups of frozen tables in one op, against find and a lookup of the handles that it gives."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from execution import simd, simd_levels, threads
from group_calls import Call, same_bits
from seeding import seeded

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops import serving
from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, Pooling, RowFormat
from torch_dynemb.serving import FrozenTables

pytestmark = pytest.mark.cpu_only("a GPU finds ids by one op and reads their rows by another")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FORMATS = [RowFormat.FLOATS, RowFormat.INT8, RowFormat.INT4, RowFormat.FLOAT8]
POOLINGS = [Pooling.SUM, Pooling.MEAN]


def frozen_tables(dim: int, dtype: torch.dtype = torch.float32, ids: int = 4000) -> FrozenTables:
    """Two tables, as full as they get: one id in ten is not in its first bucket."""
    tables = [
        td.TableConfig("a", dim, padding_idx=3, dtype=dtype),
        td.TableConfig("b", dim, eval_default=torch.arange(float(dim)), dtype=dtype),
    ]
    group = td.TableGroup(tables, optimizer=td.SGD(lr=1.0), seed=8)
    for table in range(2):
        known = torch.arange(ids) * 7
        values = torch.randn(ids, dim, generator=seeded(table))
        group.insert_or_assign(table, known[known != 3], values[known != 3])
    return FrozenTables(group)


def tensors_of(frozen: FrozenTables, form: RowFormat = RowFormat.FLOATS) -> ops.ServedTensors:
    tensors = frozen.tensors()
    if form == RowFormat.FLOATS:
        return tensors
    return tensors._replace(weights=[ops.quantize_rows(tensors.weights[0], form)], formats=[form])


def by_two_ops(tensors: ops.ServedTensors, batch: ops.LookupBatch) -> ops.Served:
    """As a GPU looks ids up."""
    with patch.object(serving, "in_host_memory", lambda tensor: False):
        return ops.serve_lookup(tensors, batch)


def call_of_all(dim: int, ids: int = 4000, *, known: bool) -> Call:
    """Bags of 0 to 40 ids of tables a, b and a, some of them empty; a fifth of the ids is unknown
    unless all are known."""
    generator = seeded(5)
    lengths = torch.randint(41, (3 * 60,), generator=generator)
    lengths[::7] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    drawn = torch.randint(ids, (int(offsets[-1]),), generator=generator) * 7
    if not known:
        drawn[::5] += 1
        drawn[::11] = 3  # padding of table a
    return Call(drawn, offsets, [0, 1, 0], [dim] * 3)


@pytest.mark.parametrize("known", [False, True], ids=["some missing", "all known"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@pytest.mark.parametrize("pooling", POOLINGS, ids=["sum", "mean"])
@pytest.mark.parametrize("dim", [2, 8, 16, 20, 46, 64, 136])
def test_bags_are_those_of_two_ops(
    dim: int, pooling: Pooling, *, weighted: bool, known: bool
) -> None:
    frozen, call = frozen_tables(dim), call_of_all(dim, known=known)
    weights = torch.randn(len(call.ids), generator=seeded(1)) if weighted else None
    batch = call.batch(pooling, weights)
    for form in FORMATS:
        tensors = tensors_of(frozen, form)
        expected = by_two_ops(tensors, batch)
        read = ops.serve_lookup(tensors, batch)
        assert same_bits(read.output, expected.output)
        assert torch.equal(read.missing, expected.missing)
        assert bool((read.missing > 0).all()) != known


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_each_dtype_are_those_of_two_ops(dtype: torch.dtype) -> None:
    frozen, call = frozen_tables(16, dtype), call_of_all(16, known=False)
    for batch in (call.batch(Pooling.NONE), call.batch(Pooling.MEAN)):
        expected = by_two_ops(frozen.tensors(), batch)
        read = ops.serve_lookup(frozen.tensors(), batch)
        assert same_bits(read.output, expected.output)
        assert torch.equal(read.missing, expected.missing)


@pytest.mark.parametrize("form", FORMATS[1:])
def test_quantized_rows_are_those_that_are_given_back(form: RowFormat) -> None:
    frozen, call = frozen_tables(12), call_of_all(12, known=True)
    tensors = tensors_of(frozen, form)
    floats = ops.dequantize_rows(tensors.weights[0], form, 12)
    plain = tensors._replace(weights=[floats], formats=[0])
    read, expected = (ops.serve_lookup(of, call.batch(Pooling.NONE)) for of in (tensors, plain))
    assert same_bits(read.output, expected.output)


@pytest.mark.parametrize("known", [False, True], ids=["some missing", "all known"])
def test_bits_do_not_depend_on_threads_and_instruction_set(*, known: bool) -> None:
    """Of bags so long and so many that threads share them."""
    frozen, call = frozen_tables(16), call_of_all(16, known=known)
    ids, ends = call.ids.repeat(9), call.offsets[-1]
    offsets = torch.cat([call.offsets[:-1] + ends * part for part in range(9)] + [ends[None] * 9])
    batch = Call(ids, offsets, [0, 1, 0] * 9, [16] * 27).batch(Pooling.MEAN)
    tensors = tensors_of(frozen)
    read = []
    for level in simd_levels():
        for count in (1, 2):
            with threads(count), simd(level):
                read.append(ops.serve_lookup(tensors, batch))
    assert len(ids) > 4096
    for other in read[1:]:
        assert same_bits(other.output, read[0].output)
        assert torch.equal(other.missing, read[0].missing)


def test_ids_are_found_wherever_their_probes_end() -> None:
    """In an index without an empty slot and with all ids outside of their own two buckets."""
    group = td.TableGroup([td.TableConfig("a", 4)], optimizer=td.SGD(lr=1.0))
    known = torch.arange(40) * 3
    values = torch.arange(160.0).reshape(40, 4)
    group.insert_or_assign(0, known, values)
    tensors = tensors_of(FrozenTables(group))
    buckets = tensors.buckets.clone()
    empty = buckets[:, BUCKET_WIDTH:] == 0
    buckets[:, :BUCKET_WIDTH][empty] = 1  # tombstones
    ids = torch.arange(130)
    batch = ops.LookupBatch.of_rows(ids, ids[:0], [0], 4)
    for shift in range(len(buckets)):
        moved = tensors._replace(buckets=buckets.roll(shift, 0))
        read = ops.serve_lookup(moved, batch)
        assert torch.equal(read.output[known], values)
        assert int(read.missing) == 90


def test_damaged_tables_are_refused() -> None:
    frozen, call = frozen_tables(16, ids=400), call_of_all(16, 400, known=True)
    tensors = tensors_of(frozen)
    rows = tensors.weights[0].shape[0]
    rows_of_ids = ops.LookupBatch.of_rows(call.ids, call.ids[:0], [0], 16)
    for stored in (((rows << GENERATION_BITS) | 1) + 1, -5):
        buckets = tensors.buckets.clone()
        slots = buckets[:, BUCKET_WIDTH:]
        slots[slots > 0] = stored
        damaged = tensors._replace(buckets=buckets)
        message = rf"serve_lookup: table 0 is damaged: its index leads to a row beyond the {rows} "
        with pytest.raises(RuntimeError, match=message):
            ops.serve_lookup(damaged, call.batch())
        with pytest.raises(RuntimeError, match=r"serve_lookup: table 0 is damaged"):
            ops.serve_lookup(damaged, rows_of_ids)


def test_arguments_that_do_not_fit_are_refused() -> None:
    frozen, call = frozen_tables(16, ids=100), call_of_all(16, 100, known=True)
    tensors = tensors_of(frozen)
    with pytest.raises(RuntimeError, match=r"feature_dims\[1\] is 8, but its table has dim 16"):
        ops.serve_lookup(tensors, call._replace(dims=[16, 8, 16]).batch())
    with pytest.raises(RuntimeError, match=r"weights has dtype float32, expected uint8"):
        ops.serve_lookup(tensors._replace(formats=[1]), call.batch())
    with pytest.raises(RuntimeError, match=r"weights is empty, expected a"):
        ops.serve_lookup(tensors._replace(weights=[], formats=[]), call.batch())
    with pytest.raises(TypeError, match=r"serve_lookup: per_sample_weights has dtype torch.int64"):
        ops.serve_lookup(tensors, call.batch(weights=call.ids))
