"""Lookups of quantized rows, against lookups of what the rows give back."""

from __future__ import annotations

import pytest
import torch
from execution import simd, simd_levels, threads
from group_calls import Call, same_bits
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling

pytestmark = pytest.mark.any_device

FORMATS = {  # of the slabs of 5, 6 and 16 columns
    "int8": [1, 1, 1],
    "int4": [0, 2, 2],
    "fp8": [3, 3, 3],
    "mixed": [1, 3, 2],
    "some of floats": [0, 1, 0],
}
EVERY_FORMAT = pytest.mark.parametrize("formats", FORMATS.values(), ids=FORMATS)


def trained_group() -> td.TableGroup:
    """Dims 16, 6 and 5; some ids have no row, some rows are unwritten, some stale."""
    tables = [
        td.TableConfig("a", 16, padding_idx=3),
        td.TableConfig("b", 6, initializer=td.Uniform()),
        td.TableConfig("c", 5, eval_default=torch.arange(5.0)),
        td.TableConfig("d", 16, eval_default="zeros"),
    ]
    group = td.TableGroup(tables, optimizer=td.SGD(lr=1.0), max_rows=500, seed=8)
    for table in range(4):
        group.insert(table, torch.arange(40))
    group.materialize()
    group.insert(0, torch.arange(40, 50))  # unwritten
    return group


def call_of_all(batch: int = 30) -> Call:
    generator = seeded(3)
    lengths = torch.randint(9, (5 * batch,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(60, (int(offsets[-1]),), generator=generator)
    return Call(ids, offsets, [0, 1, 2, 3, 0], [16, 6, 5, 16, 16])


def both(group: td.TableGroup, formats: list[int]) -> tuple[ops.RowTensors, ops.RowTensors]:
    """Quantized rows, and the floats that they give back."""
    used = [group.index.used_rows(slab) for slab in range(len(formats))]
    weights = [slab[:rows] for slab, rows in zip(group.rows.weights, used, strict=True)]
    generations = [slab[:rows] for slab, rows in zip(group.rows.generations, used, strict=True)]
    packed = [
        slab if form == 0 else ops.quantize_rows(slab, form)
        for slab, form in zip(weights, formats, strict=True)
    ]
    plain = [
        slab if form == 0 else ops.dequantize_rows(slab, form, old.shape[1])
        for slab, form, old in zip(packed, formats, weights, strict=True)
    ]
    rows = group.rows._replace(generations=generations)
    return rows._replace(weights=packed), rows._replace(weights=plain)


def found(group: td.TableGroup, call: Call) -> Tensor:
    handles = group.find(call.ids, call.offsets, call.tables).handles
    handles[::17] = -3  # refused ids
    group.erase(1, torch.arange(5))
    group.insert(1, torch.arange(100, 105))
    group.materialize()  # the handles of what was erased are stale now
    return handles


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN], ids=["sum", "mean"])
@EVERY_FORMAT
def test_bags_are_those_of_the_rows_that_are_given_back(
    formats: list[int], pooling: Pooling, weighted: bool
) -> None:
    group, call = trained_group(), call_of_all()
    handles = found(group, call)
    packed, plain = both(group, formats)
    weights = torch.rand(len(call.ids), generator=seeded(1)) if weighted else None
    batch = call.batch(pooling, weights)
    read = ops.embedding_inference(packed, batch, handles, formats=formats)
    assert same_bits(read, ops.embedding_inference(plain, batch, handles))
    assert bool((read != 0).any())


@EVERY_FORMAT
def test_rows_are_those_that_are_given_back(formats: list[int]) -> None:
    group, call = trained_group(), call_of_all()
    handles = found(group, call)
    packed, plain = both(group, formats)
    for table, dim in ((0, 16), (1, 6), (2, 5)):
        begin, end = call.offsets[table * 30], call.offsets[table * 30 + 30]
        of_table = handles[begin:end].contiguous()
        batch = ops.LookupBatch.of_rows(call.ids[begin:end], call.ids[:0], [table], dim)
        read = ops.embedding_inference(packed, batch, of_table, formats=formats)
        assert same_bits(read, ops.embedding_inference(plain, batch, of_table))


@pytest.mark.parametrize("dim", [2, 8, 14, 64, 136, 260])
@pytest.mark.parametrize("form", [1, 2, 3])
def test_bits_do_not_depend_on_dim_threads_and_instruction_set(form: int, dim: int) -> None:
    group = td.TableGroup([td.TableConfig("a", dim)], optimizer=td.SGD(lr=1.0), max_rows=3000)
    group.insert(0, torch.arange(2000))
    group.materialize()
    packed, plain = both(group, [form])
    ids = torch.randint(2000, (6000,), generator=seeded(dim))
    offsets = torch.arange(0, 6001, 20)
    handles = group.find(ids, offsets, [0]).handles
    batch = Call(ids, offsets, [0], [dim]).batch()
    expected = ops.embedding_inference(plain, batch, handles)
    for level in simd_levels():
        with threads(2), simd(level):
            read = ops.embedding_inference(packed, batch, handles, formats=[form])
            assert same_bits(read, expected)


def test_formats_that_do_not_fit_are_refused() -> None:
    group, call = trained_group(), call_of_all()
    handles = group.find(call.ids, call.offsets, call.tables).handles
    formats = [1, 1, 1]
    packed, plain = both(group, formats)

    def look_up(rows: ops.RowTensors, formats: list[int]) -> Tensor:
        return ops.embedding_inference(rows, call.batch(), handles, formats=formats)

    with pytest.raises(RuntimeError, match="formats has 2 entries, expected as many as weights, 3"):
        look_up(packed, [1, 1])
    with pytest.raises(RuntimeError, match=r"formats has 7, expected 0 \(rows of floats\), 1"):
        look_up(packed, [1, 1, 7])
    with pytest.raises(RuntimeError, match="weights has dtype float32, expected uint8"):
        look_up(plain, formats)
    with pytest.raises(RuntimeError, match="weights has dtype uint8, expected float32, bfloat16"):
        look_up(packed, [1, 0, 1])
    narrow = packed._replace(weights=[packed.weights[0], packed.weights[1], torch.zeros(9, 8)])
    narrow.weights[2] = narrow.weights[2].to(torch.uint8)
    with pytest.raises(RuntimeError, match=r"weights.size\(1\) is 8, expected more than 8"):
        look_up(narrow, formats)
    # int4 of these bytes would be rows of 40 columns
    with pytest.raises(RuntimeError, match=r"dim"):
        look_up(packed, [1, 1, 2])
