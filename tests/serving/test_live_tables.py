"""Live tables against a dict: what they hold after any updates, and what is refused."""

from __future__ import annotations

import copy
import functools
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from seeding import seeded
from torch import Tensor, nn
from torch.export import Dim

import torch_dynemb as td
from torch_dynemb import ops, serving
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    GENERATION_BITS,
    LiveTable,
    Meta,
    RowFormat,
)

pytestmark = pytest.mark.cpu_only("live tables are in the memory of the CPU")

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTIZED = {"int8": RowFormat.INT8, "int4": RowFormat.INT4, "fp8": RowFormat.FLOAT8}
NAMES = ["a", "b", "c"]


@functools.cache
def empty_bag(dim: int, padding_idx: int | None) -> td.DynamicEmbeddingBag:
    return td.freeze(
        td.DynamicEmbeddingBag(
            dim,
            mode="sum",
            optimizer=td.SGD(lr=0.1),
            name="t",
            padding_idx=padding_idx,
            eval_default="zeros",
        )
    )


def live_bag(
    dim: int, headroom: int, rows: str | None = None, *, padding_idx: int | None = None
) -> Any:
    """An empty live copy of a bag."""
    return serving.live(empty_bag(dim, padding_idx), headroom=headroom, rows=rows)


def rows_of(tables: serving.LiveTables, ids: Tensor, table: int = 0) -> ops.Served:
    dim = int(tables.tensors().meta[table, Meta.DIM])
    return ops.serve_lookup(
        tables.tensors(), ops.LookupBatch.of_rows(ids, ids.new_empty(0), [table], dim)
    )


def random_rows(count: int, dim: int, seed: int) -> Tensor:
    return torch.randn(count, dim, generator=seeded(seed))


def stored(rows: Tensor, form: str) -> Tensor:
    """What rows give back that have been stored in a format, [n, dim]."""
    if form in DTYPES:
        return rows.to(DTYPES[form]).float()
    packed = ops.quantize_rows(rows, QUANTIZED[form])
    return ops.dequantize_rows(packed, QUANTIZED[form], rows.shape[1])


# -- any updates ---------------------------------------------------------------------------------

ids_of_updates = st.lists(
    st.one_of(st.integers(0, 40), st.sampled_from([-1, 2**62, -(2**63), 2**63 - 1])), max_size=24
)
updates = st.lists(st.tuples(ids_of_updates, ids_of_updates), max_size=12)


@pytest.mark.parametrize("dim", [1, 8, 16, 64, 100])
@pytest.mark.parametrize("form", list(ops.LIVE_FORMATS))
@settings(max_examples=8, deadline=None)
@given(updates=updates, headroom=st.integers(20, 44), seed=st.integers(0, 1000))
def test_tables_hold_what_a_dict_holds(
    dim: int, form: str, updates: list[tuple[list[int], list[int]]], headroom: int, seed: int
) -> None:
    if form == "int4" and dim == 1:
        dim = 2  # an odd number of columns is refused
    tables = live_bag(dim, headroom, form).frozen_tables
    expected: dict[int, Tensor] = {}
    for number, (ids, erased) in enumerate(updates):
        rows = random_rows(len(ids), dim, seed + number)
        after = {key: row for key, row in expected.items() if key not in set(erased)}
        after |= {key: rows[i] for i, key in enumerate(ids)}
        gone = len((set(erased) - set(ids)) & set(expected))
        new = len(set(ids) - set(expected))
        if len(after) > headroom:
            with pytest.raises(serving.NoHeadroomError) as refusal:
                tables.update("t", tensor_of(ids), rows, erased=tensor_of(erased))
            free = headroom - len(expected) + gone
            assert (refusal.value.wanted, refusal.value.free) == (new, free)
        else:
            done = tables.update("t", tensor_of(ids), rows, erased=tensor_of(erased))
            assert done == (new, len(ids) - new, gone)
            expected = after
        assert_holds(tables, expected, form)


def tensor_of(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int64)


def assert_holds(tables: serving.LiveTables, expected: dict[int, Tensor], form: str) -> None:
    known = list(expected)
    others = [key for key in (*range(45), -1, 2**62, -(2**63)) if key not in expected]
    served = rows_of(tables, tensor_of(known + others))
    for row, key in zip(served.output, known, strict=False):
        assert torch.equal(row, stored(expected[key][None], form)[0])
    assert not served.output[len(known) :].any()
    assert served.missing.tolist() == [len(others)]
    assert tables.sizes() == {"t": len(expected)}


def test_ids_survive_rehashes() -> None:
    """Ids come and go until the index has been rehashed to either range, several times."""
    tables = live_bag(8, 600).frozen_tables
    lasting, rows = torch.arange(500), random_rows(500, 8, 0)
    tables.update("t", lasting, rows)
    for i in range(200):
        passing = 1000 + 100 * i + torch.arange(100)
        tables.update("t", passing, random_rows(100, 8, i))
        assert tables.erase("t", passing) == 100
        if i % 20 == 0:
            served = rows_of(tables, torch.cat([lasting, passing]))
            assert torch.equal(served.output[:500], rows)
            assert served.missing.tolist() == [100]
    assert int(tables.tensors().tables[0, LiveTable.ACTIVE]) >= 4
    assert tables.sizes() == {"t": 500}


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_rows_of_few_bits_are_near_the_values(form: str) -> None:
    """Also rows of one value, of zeros, of tiny, large and mixed values."""
    rows = torch.stack(
        [
            torch.zeros(16),
            torch.full((16,), 3.0),
            torch.linspace(-1, 1, 16),
            torch.linspace(-1e-3, 2e-3, 16),
            torch.linspace(-3e4, 3e4, 16),
            torch.linspace(100, 101, 16),
        ]
    )
    tables = live_bag(16, 10, form).frozen_tables
    tables.update("t", torch.arange(len(rows)), rows)
    output = rows_of(tables, torch.arange(len(rows))).output
    span = rows.amax(1) - rows.amin(1)
    largest = rows.abs().amax(1)
    # half a step; what the dtype of bias and scale makes of them
    step = largest / 16 if form == "fp8" else span / (255 if form == "int8" else 15) / 2
    bound = step + largest * (2.0**-10 if form == "int4" else 2.0**-22) + 2.0**-24
    assert ((output - rows).abs().amax(1) <= bound).all()


def test_rows_of_int8_keep_small_differences_beside_a_large_mean() -> None:
    """Scale and bias are float32: a step is the range of the row divided by 255."""
    rows = 100 + 0.01 * random_rows(50, 64, 0)
    tables = live_bag(64, 60, "int8").frozen_tables
    tables.update("t", torch.arange(50), rows)
    error = (rows_of(tables, torch.arange(50)).output - rows).abs().max()
    assert error < 0.01 / 50


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_quantized_live_copies_give_the_bits_of_frozen_ones(form: Any, mode: str) -> None:
    bags = trained_collection(mode)
    live, frozen = serving.live(bags, headroom=10, rows=form), td.freeze(bags, rows=form)
    assert torch.equal(live(features(1)), frozen(features(1)))


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.4e38, -1e6])
def test_rows_that_a_format_cannot_hold_are_refused(form: str, value: float) -> None:
    tables = live_bag(4, 10, form).frozen_tables
    rows = torch.ones(3, 4)
    rows[1, 1:3] = torch.tensor([-value, value])
    if (value == -1e6 and form != "int4") or (value == 3.4e38 and form == "fp8"):
        tables.update("t", torch.tensor([7, 8, 9]), rows)  # its scale is a float32
        return
    with pytest.raises(RuntimeError, match=r"values\[1\], the row of id 8, has NaN, infinity or a"):
        tables.update("t", torch.tensor([7, 8, 9]), rows)
    assert tables.sizes() == {"t": 0}


def test_formats_refuse_dims_that_they_do_not_have() -> None:
    with pytest.raises(ValueError, match=r"rows is 'int4', but tables \['t'\] have an odd number"):
        live_bag(7, 10, "int4")


# -- models --------------------------------------------------------------------------------------


def trained_collection(mode: str = "mean") -> td.DynamicEmbeddingBagCollection:
    defaults: list[Any] = ["initial", "zeros", torch.arange(4.0)]
    tables = [
        td.TableConfig(name, 4, eval_default=default, padding_idx=3)
        for name, default in zip(NAMES, defaults, strict=True)
    ]
    bags = td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=0.1), mode=mode)  # type: ignore[arg-type]
    bags(features(0)).sum().backward()
    return bags


def features(seed: int, batch: int = 40) -> dict[str, Tensor]:
    ids = torch.randint(0, 200, (batch, 3), generator=seeded(seed))
    return {name: ids + i for i, name in enumerate(NAMES)}


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("batch", [0, 1, 40, 3000])
def test_a_live_copy_gives_the_bits_of_a_frozen_one(mode: str, batch: int) -> None:
    """For known, unknown and padding ids, with the defaults of each table."""
    bags = trained_collection(mode)
    live, frozen = serving.live(bags, headroom=10), td.freeze(bags)
    assert torch.equal(live(features(1, batch)), frozen(features(1, batch)))


def test_weighted_bags_and_sequences_give_the_bits_of_frozen_ones() -> None:
    ids = torch.randint(0, 90, (500,), generator=seeded(0))
    offsets, weights = torch.tensor([0, 0, 7, 7, 460]), torch.rand(500, generator=seeded(1))
    for mode in ("sum", "mean"):
        bag = td.DynamicEmbeddingBag(64, mode=mode, optimizer=td.SGD(lr=0.1), padding_idx=5)  # type: ignore[arg-type]
        bag(ids[:200].reshape(20, 10)).sum().backward()
        live, frozen = serving.live(bag, headroom=10), td.freeze(bag)
        assert torch.equal(live(ids, offsets, weights), frozen(ids, offsets, weights))
    sequence = td.DynamicEmbedding(100, optimizer=td.SGD(lr=0.1), eval_default="initial")
    sequence(ids[:200]).sum().backward()
    live, frozen = serving.live(sequence, headroom=10), td.freeze(sequence)
    assert torch.equal(live(ids), frozen(ids))


def test_tables_of_one_model_are_updated_by_name() -> None:
    live = serving.live(trained_collection("sum"), headroom={"a": 5, "b": 0, "c": 7})
    (tables,) = serving.live_tables(live).values()
    assert tables.free_rows() == {"a": 5, "b": 0, "c": 7}
    before = live(features(0))
    known = features(0)["b"].unique()
    tables.update("b", known, torch.full((len(known), 4), 2.0))
    after = live(features(0))
    assert torch.equal(before[:, :4], after[:, :4])
    assert torch.equal(before[:, 8:], after[:, 8:])
    ids = features(0)["b"]
    assert torch.equal(after[:, 4:8], 2.0 * (ids != 3).sum(1, keepdim=True).expand(-1, 4))
    with pytest.raises(serving.NoHeadroomError, match=r"table 'b' has 0 rows free, but .* need 2"):
        tables.update("b", torch.tensor([9000, 9001, 9000]), torch.zeros(3, 4))
    assert torch.equal(live(features(0)), after)


def test_the_version_tells_rows_from_the_dense_part() -> None:
    bag = td.DynamicEmbeddingBag(2, mode="sum", optimizer=td.SGD(lr=0.1), name="ads")
    model = serving.live(
        nn.Sequential(bag, nn.Linear(2, 1)), headroom=3, dense_version="2026-11-22"
    )
    (tables,) = serving.live_tables(model).values()
    assert tables.version() == ("2026-11-22", {"ads": 0})
    tables.update("ads", torch.tensor([1]), torch.ones(1, 2))
    tables.erase("ads", torch.tensor([1]))
    assert tables.version() == ("2026-11-22", {"ads": 2})


def test_a_frozen_model_becomes_a_live_one() -> None:
    frozen = td.freeze(trained_collection())
    live = serving.live(frozen, headroom=5, rows="bf16")
    torch.testing.assert_close(live(features(0)), frozen(features(0)), rtol=0.01, atol=0.01)
    assert not serving.live_tables(frozen)


def test_copies_and_pickles_are_tables_of_their_own() -> None:
    model = live_bag(4, 20)
    model.frozen_tables.update("t", torch.arange(9), torch.ones(9, 4))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        twin.frozen_tables.update("t", torch.arange(9), torch.zeros(9, 4))
        twin.frozen_tables.erase("t", torch.tensor([3]))
        assert twin.frozen_tables.sizes() == {"t": 8}
    assert torch.equal(model(torch.tensor([[1, 3]])), torch.full((1, 4), 2.0))


def test_conversions_leave_the_tables_alone() -> None:
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), name="t")
    model = serving.live(nn.Sequential(bag, nn.Linear(4, 2)), headroom=20)
    (tables,) = serving.live_tables(model).values()
    address = tables.tensors().weights[0].data_ptr()
    model.double()
    assert model[1].weight.dtype == torch.float64
    assert tables.tensors().weights[0].data_ptr() == address
    assert tables.tensors().init_data.dtype == torch.float64
    with pytest.raises(RuntimeError, match="cannot go to meta"):
        model.to("meta")
    with pytest.raises(RuntimeError, match="cannot go to shared memory"):
        model.share_memory()
    assert not [name for name in model.state_dict() if "tables" in name]


# -- programs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [True, False])
def test_exported_programs_read_updates(strict: bool) -> None:
    model = live_bag(4, 50)
    tables = model.frozen_tables
    tables.update("t", torch.arange(9), torch.ones(9, 4))
    batch, length = Dim("batch", min=0), Dim("length", min=0)
    given_ids = torch.tensor([[1, 2], [3, 70]])
    program = torch.export.export(
        model, (given_ids,), dynamic_shapes=({0: batch, 1: length},), strict=strict
    ).module()
    for ids in (given_ids, torch.arange(12).reshape(3, 4), given_ids[:0]):
        assert torch.equal(program(ids), model(ids))
    tables.update("t", torch.arange(4), torch.full((4, 4), 5.0))
    tables.erase("t", torch.tensor([70]))
    assert torch.equal(program(given_ids), torch.tensor([[10.0] * 4, [5.0] * 4]))


@pytest.mark.long
def test_packages_of_aotinductor_read_updates(tmp_path: Path) -> None:
    """Its constants are the tables themselves, which the user manages."""
    sequence = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), name="t", eval_default="zeros")
    model = serving.live(nn.Sequential(sequence), headroom=50)
    (tables,) = serving.live_tables(model).values()
    tables.update("t", torch.arange(9), torch.ones(9, 4))
    ids = torch.tensor([[1, 2], [3, 70]])
    program = torch.export.export(model, (ids,), dynamic_shapes=({0: Dim("batch")},))
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs={
            "aot_inductor.package_constants_in_so": False,
            "always_keep_tensor_constants": True,
        },
    )
    package = torch._inductor.aoti_load_package(path)
    constants = {name: model.get_buffer(name) for name in package.get_constant_fqns()}
    package.load_constants(constants, check_full_update=True, user_managed=True)
    assert torch.equal(package(ids), model(ids))
    tables.update("t", torch.arange(4), torch.full((4, 4), 5.0))
    tables.erase("t", torch.tensor([2]))
    assert package(ids)[:, :, 0].tolist() == [[5.0, 0.0], [5.0, 0.0]]


def test_compiled_models_read_updates() -> None:
    model = live_bag(4, 50)
    ids = torch.tensor([[1, 2], [3, 4]])
    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True)
        assert not compiled(ids).any()
        model.frozen_tables.update("t", torch.arange(9), torch.ones(9, 4))
        assert torch.equal(compiled(ids), torch.full((2, 4), 2.0))


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("x", [1], 1), ValueError, r"update: table is 'x', expected one of \['t'\]"),
        (("t", [[1]], 1), ValueError, r"update: ids has shape \(1, 1\), expected 1 dimension"),
        (("t", [1.0], 1), TypeError, r"update: ids is a tensor of dtype torch.float32"),
        (("t", [1, 2], 1), ValueError, r"rows has shape \(1, 4\), expected \(2, 4\)"),
        (("t", [1, 5], 2), RuntimeError, r"ids\[1\] is 5, the padding id of table 't'"),
    ],
)
def test_wrong_updates_change_nothing(
    arguments: tuple[str, list[Any], int], error: type[Exception], words: str
) -> None:
    tables = live_bag(4, 20, padding_idx=5).frozen_tables
    tables.update("t", torch.arange(3), torch.ones(3, 4))
    before = [tensor.clone() for tensor in tables.buffers()]
    name, ids, rows = arguments
    with pytest.raises(error, match=words):
        tables.update(name, torch.tensor(ids), torch.zeros(rows, 4))
    assert all(map(torch.equal, tables.buffers(), before))


def test_damaged_tables_are_told() -> None:
    """Not waited for: a reader that finds the same wrong row again and again gives up."""
    tables = live_bag(4, 20).frozen_tables
    tables.update("t", torch.arange(3), torch.ones(3, 4))
    stored = tables.tensors().buckets[:, BUCKET_WIDTH:]
    stored += (stored > 0) * (1000 << GENERATION_BITS)
    with pytest.raises(RuntimeError, match=r"serve_lookup: table 't' is damaged: .* from id 0"):
        tables.lookup(ops.LookupBatch.of_rows(torch.arange(3), torch.arange(0), [0], 4))


def test_tables_of_served_models_are_named_or_numbered() -> None:
    ids = torch.tensor([1, 2, 3])
    tables = [td.TableConfig("ads", 4), td.TableConfig("users", 4)]
    bags = td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=0.1))
    bags.group.insert_or_assign("users", ids, torch.ones(3, 4))
    frozen, live = td.freeze(bags).frozen_tables, td.serving.live(bags, headroom=4).frozen_tables
    assert torch.equal(frozen.ids("users"), frozen.ids(1))
    assert torch.equal(live.list_ids("users").ids, live.list_ids(1).ids)
    assert torch.equal(live.read_ids("users", ids).rows, live.read_ids(1, ids).rows)
    for call in (frozen.ids, live.list_ids, lambda table: live.read_ids(table, ids)):
        with pytest.raises(ValueError, match=r"table is 'ad', expected one of \['ads', 'users'\]"):
            call("ad")
