"""Frozen models with rows in another format than the model's."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from group_calls import same_bits
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import RowFormat
from torch_dynemb.serving.row_formats import RowKind

pytestmark = pytest.mark.any_device

KINDS: dict[RowKind, float] = {"int8": 0.01, "int4": 0.15, "fp8": 0.07, "fp16": 1e-3, "bf16": 8e-3}
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
FORMATS = {"int8": RowFormat.INT8, "int4": RowFormat.INT4, "fp8": RowFormat.FLOAT8}


class Model(nn.Module):
    """Bags of two dims, and sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = td.DynamicEmbeddingBagCollection(
            [
                td.TableConfig("a", 8, ["x", "y"]),
                td.TableConfig("b", 6, ["z"], dtype=torch.bfloat16),
            ],
            optimizer=td.SGD(lr=0.5),
            mode="mean",
        )
        self.rows = td.DynamicEmbedding(
            6, name="rows", optimizer=td.SGD(lr=0.5), eval_default=torch.ones(6)
        )
        self.dense = nn.Linear(22, 1)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.rows(ids[0])
        pooled = self.bags({"x": ids[0], "y": ids[1], "z": ids[2]})
        return self.dense(pooled), rows


def trained() -> Model:
    torch.manual_seed(1)
    model = Model()
    for step in range(2):
        ids = torch.randint(30, (3, 6, 4), generator=seeded(step))
        dense, rows = model(ids)
        (dense.sum() + rows.square().sum()).backward()
    return model.eval()


def some_ids() -> Tensor:
    """Also some that no table has."""
    return torch.randint(45, (3, 4, 4), generator=seeded(9))


@EVERY_KIND
def test_results_are_near_those_of_the_model(kind: RowKind) -> None:
    model, ids = trained(), some_ids()
    expected, exact = model(ids), td.freeze(model)(ids)
    frozen = td.freeze(model, rows=kind)
    for near, given, frozen_exactly in zip(frozen(ids), expected, exact, strict=True):
        torch.testing.assert_close(near, given, rtol=KINDS[kind], atol=KINDS[kind])
        assert not torch.equal(near, given)
        assert torch.equal(frozen_exactly, given)


@pytest.mark.parametrize("kind", FORMATS)
def test_rows_are_those_that_the_op_makes(kind: RowKind) -> None:
    bag = td.DynamicEmbeddingBag(8, optimizer=td.SGD(lr=0.5), mode="sum", initializer=td.Normal())
    ids = torch.arange(20)
    bag(ids[:, None])
    frozen = td.freeze(bag, rows=kind)
    rows = bag.eval()(ids[:, None]).detach()
    row_format = FORMATS[kind]
    expected = ops.dequantize_rows(ops.quantize_rows(rows, row_format), row_format, 8)
    assert same_bits(frozen(ids[:, None]), expected)
    weights = torch.linspace(0.5, 2, 20)
    weighted = frozen(ids[:, None], per_sample_weights=weights[:, None])
    assert same_bits(weighted, weights[:, None] * expected)


@EVERY_KIND
def test_missing_ids_read_what_their_initializer_gives(kind: RowKind) -> None:
    ids = torch.tensor([7, 1000, 1001])
    for default in ("initial", "zeros", torch.arange(4.0), td.Uniform(-1, 1)):
        table = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.5), eval_default=default)
        table(torch.tensor([7]))
        read, expected = td.freeze(table, rows=kind)(ids), table.eval()(ids).detach()
        if kind in ("fp16", "bf16"):
            dtype = torch.float16 if kind == "fp16" else torch.bfloat16
            expected = expected.to(dtype).float()
        assert torch.equal(read[1:], expected[1:])


@EVERY_KIND
def test_copies_and_saved_states_give_the_same_bits(kind: RowKind) -> None:
    model, ids = trained(), some_ids()
    frozen = td.freeze(model, rows=kind)
    expected = frozen(ids)
    saved = io.BytesIO()
    torch.save(frozen.state_dict(), saved)
    saved.seek(0)
    again = td.freeze(model, rows=kind)
    for buffer in again.buffers():
        if buffer.dtype == torch.uint8:
            buffer.zero_()
    again.load_state_dict(torch.load(saved))
    whole = io.BytesIO()
    torch.save(frozen, whole)
    whole.seek(0)
    for other in (copy.deepcopy(frozen), again, torch.load(whole, weights_only=False)):
        assert all(map(same_bits, other(ids), expected))


def test_a_state_of_other_rows_is_refused() -> None:
    model = trained()
    states = {kind: td.freeze(model, rows=kind).state_dict() for kind in ("int8", "fp8")}
    frozen = td.freeze(model, rows="int8")
    before, ids = frozen(some_ids()), some_ids()
    with pytest.raises(RuntimeError, match="weights"):
        frozen.load_state_dict(states["fp8"])
    with pytest.raises(RuntimeError, match="weights"):
        frozen.load_state_dict(td.freeze(model).state_dict())
    with pytest.raises(RuntimeError, match="weights"):
        td.freeze(model).load_state_dict(states["int8"])
    assert all(map(torch.equal, frozen(ids), before))


def test_the_model_is_not_changed_and_can_go_on() -> None:
    model, ids = trained(), some_ids()
    before = model(ids)
    td.freeze(model, rows="int4")
    assert all(map(torch.equal, model(ids), before))
    dense, _ = model.train()(ids)
    dense.sum().backward()


def test_bytes_of_rows() -> None:
    model = trained()
    sizes = {}
    for kind in (None, *KINDS):
        tables = td.freeze(model, rows=kind).rows.frozen_tables
        sizes[kind] = int(tables.get_buffer("weights0")[0].nbytes)
    assert sizes == {None: 24, "int8": 14, "int4": 7, "fp8": 10, "fp16": 12, "bf16": 12}


@pytest.mark.traced
@pytest.mark.parametrize("kind", ["int8", "int4", "fp8"])
def test_compiled_and_exported_programs_give_the_same_bits(kind: RowKind) -> None:
    model, ids = trained(), some_ids()
    frozen = td.freeze(model, rows=kind)
    expected = frozen(ids)
    with torch.no_grad():
        compiled = torch.compile(frozen, fullgraph=True, backend="aot_eager")(ids)
        batch = torch.export.Dim("batch")
        program = torch.export.export(frozen, (ids,), dynamic_shapes=({1: batch},), strict=False)
    assert all(map(torch.equal, compiled, expected))
    assert all(map(torch.equal, program.module()(ids), expected))
    other = torch.randint(45, (3, 5, 4), generator=seeded(2))
    assert all(map(torch.equal, program.module()(other), frozen(other)))


@pytest.mark.parametrize(
    ("rows", "value"),
    [("int8", float("nan")), ("int4", -1e5), ("fp8", float("inf")), ("fp16", 1e5)],
)
def test_rows_without_a_place_in_the_form_are_refused(rows: RowKind, value: float) -> None:
    table = td.DynamicEmbedding(4, name="items", optimizer=td.SGD(lr=0.5))
    table.group.insert_or_assign(0, torch.tensor([5, 6, 7]), torch.ones(3, 4))
    table.group.insert_or_assign(0, torch.tensor([6]), torch.tensor([[1.0, value, 2.0, 3.0]]))
    message = f"rows is '{rows}', but 1 rows of table 'items', such as that of id 6, have NaN"
    with pytest.raises(ValueError, match=message):
        td.freeze(table, rows=rows)
    table.group.erase(0, torch.tensor([6]))  # its row has no owner
    frozen = td.freeze(table, rows=rows)
    assert torch.equal(frozen(torch.tensor([5, 7])), torch.ones(2, 4))


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    table = td.DynamicEmbedding(5, name="items", optimizer=td.SGD(lr=0.5))
    with pytest.raises(
        ValueError, match=r"tables \['items'\]: rows of int4 have an even number of"
    ):
        td.freeze(table, rows="int4")
    wrong: Any = "int2"
    with pytest.raises(ValueError, match="rows is 'int2', expected None or one of"):
        td.freeze(table, rows=wrong)
    with pytest.raises(ValueError, match="are quantized already"):
        td.freeze(table, rows="int8").frozen_tables.store_rows("fp8")


def test_frozen_tables_move_between_dtypes_of_the_dense_part() -> None:
    model, ids = trained(), some_ids()
    frozen = td.freeze(model, rows="int8")
    expected = frozen(ids)[1]
    assert torch.equal(frozen.bfloat16()(ids)[1], expected.bfloat16())
