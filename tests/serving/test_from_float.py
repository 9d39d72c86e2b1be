"""from_float of frozen modules, which torch.ao.quantization and TorchRec call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from group_calls import same_bits
from seeding import seeded
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver, QConfig, quantize_dynamic

import torch_dynemb as td
from torch_dynemb import serving
from torch_dynemb.serving.row_formats import RowKind

pytestmark = [
    pytest.mark.any_device,
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]

SGD = td.SGD(lr=0.5)
DTYPES: list[tuple[torch.dtype, RowKind | None]] = [
    (torch.float32, None),
    (torch.float16, "fp16"),
    (torch.bfloat16, "bf16"),
    (torch.int8, "int8"),
    (torch.quint8, "int8"),
    (torch.quint4x2, "int4"),
    (torch.float8_e4m3fn, "fp8"),
]
MAPPING: dict[type[nn.Module], type[serving.FrozenModule]] = {
    td.DynamicEmbedding: serving.FrozenEmbedding,
    td.DynamicEmbeddingBag: serving.FrozenEmbeddingBag,
    td.DynamicEmbeddingBagCollection: serving.FrozenBagCollection,
    td.DynamicEmbeddingCollection: serving.FrozenCollection,
}


def qconfig(weight: torch.dtype, output: torch.dtype = torch.float32, **tables: torch.dtype) -> Any:
    """As TorchRec's QuantConfig, which torch's QConfig is without dtypes by table."""
    observers = [PlaceholderObserver.with_args(dtype=dtype) for dtype in (output, weight)]
    if not tables:
        return QConfig(*observers)
    return SimpleNamespace(
        activation=observers[0], weight=observers[1], per_table_weight_dtype=tables
    )


class Model(nn.Module):
    """Each module once; three tables of the bags share a slab."""

    def __init__(self) -> None:
        super().__init__()
        tables = [td.TableConfig(name, 6) for name in "abc"] + [td.TableConfig("d", 8)]
        self.bags = td.DynamicEmbeddingBagCollection(tables, optimizer=SGD, mode="mean")
        self.rows = td.DynamicEmbeddingCollection(tables[:2], optimizer=SGD)
        self.bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=SGD, name="bag")
        self.row = td.DynamicEmbedding(4, optimizer=SGD, name="row")

    def forward(self, ids: Tensor) -> list[Tensor]:
        features = {name: ids + number for number, name in enumerate("abcd")}
        rows = self.rows(features)
        return [self.bags(features), rows["a"], rows["b"], self.bag(ids), self.row(ids)]


def trained() -> Model:
    torch.manual_seed(1)
    model = Model()
    for step in range(2):
        ids = torch.randint(20, (6, 3), generator=seeded(step))
        torch.stack([of.square().sum() for of in model(ids)]).sum().backward()
    model.bags.group.erase(2, torch.arange(4, 9))  # rows without an owner between others
    return model.eval()


def some_ids() -> Tensor:
    """Also some that no table has."""
    return torch.randint(30, (5, 4), generator=seeded(9))


@pytest.mark.parametrize(("dtype", "kind"), DTYPES)
def test_it_gives_what_freeze_gives(dtype: torch.dtype, kind: RowKind | None) -> None:
    model, ids = trained(), some_ids()
    before = model(ids)
    expected = td.freeze(model, rows=kind)(ids)
    spec = {of: qconfig(dtype) for of in MAPPING}
    quantized = quantize_dynamic(model, spec, mapping=MAPPING)
    assert [type(part) for part in quantized.children()] == [
        MAPPING[type(part)] for part in model.children()
    ]
    assert all(map(same_bits, quantized(ids), expected))
    assert all(map(same_bits, model(ids), before))
    assert not any(hasattr(part, "qconfig") for part in quantized.modules())
    # what is frozen already has the same outcome
    again = {of: qconfig(dtype) for of in MAPPING.values()}
    frozen = quantize_dynamic(td.freeze(model), again, mapping={of: of for of in again})
    assert all(map(same_bits, frozen(ids), expected))
    twice = quantize_dynamic(frozen, again, mapping={of: of for of in again})
    assert all(map(same_bits, twice(ids), expected))


@pytest.mark.parametrize("frozen", [False, True])
def test_tables_of_one_slab_may_have_rows_of_different_forms(frozen: bool) -> None:
    model, ids = trained(), some_ids()
    features = {name: ids + number for number, name in enumerate("abcd")}
    kinds: dict[str, RowKind | None] = {"a": "int8", "b": "fp16", "c": "int8", "d": "int4"}
    by_kind = {kind: td.freeze(model, rows=kind).bags(features) for kind in kinds.values()}
    columns = {"a": slice(0, 6), "b": slice(6, 12), "c": slice(12, 18), "d": slice(18, 26)}
    source = td.freeze(model).bags if frozen else model.bags
    exact = source(features)
    source.qconfig = qconfig(torch.int8, b=torch.float16, d=torch.quint4x2, other=torch.int32)
    quantized = serving.FrozenBagCollection.from_float(source)
    outputs = quantized(features)
    for name, kind in kinds.items():
        assert same_bits(outputs[:, columns[name]], by_kind[kind][:, columns[name]]), name
    assert same_bits(source(features), exact)
    assert quantized.sizes() == source.group.sizes() if not frozen else source.sizes()

    source.qconfig = qconfig(torch.float32, b=torch.quint4x2)
    some = serving.FrozenBagCollection.from_float(source)
    for name, part in columns.items():
        expected = td.freeze(model, rows="int4").bags(features) if name == "b" else exact
        assert same_bits(some(features)[:, part], expected[:, part]), name

    saved = {name: of.clone() for name, of in quantized.state_dict().items()}
    for buffer in quantized.buffers():
        if buffer.dtype == torch.uint8:
            buffer.zero_()
    assert not torch.equal(quantized(features), outputs)
    quantized.load_state_dict(saved)
    assert same_bits(quantized(features), outputs)


def test_a_table_without_ids_beside_others() -> None:
    tables = [td.TableConfig(name, 4) for name in "ab"]
    source: Any = td.DynamicEmbeddingBagCollection(tables, optimizer=SGD)
    ids = torch.tensor([[1, 2]])
    source.group.insert_or_assign(1, torch.tensor([1]), torch.ones(1, 4))
    expected = source.eval()({"a": ids, "b": ids})
    source.qconfig = qconfig(torch.float32, a=torch.bfloat16)
    outputs = serving.FrozenBagCollection.from_float(source)({"a": ids, "b": ids})
    assert torch.equal(outputs[:, 4:], expected[:, 4:])
    torch.testing.assert_close(outputs, expected, rtol=1e-2, atol=1e-2)


def test_outputs_have_the_dtype_of_the_activation() -> None:
    source: Any = trained().row
    ids = some_ids()
    source.qconfig = qconfig(torch.int8, torch.bfloat16)
    made = serving.FrozenEmbedding.from_float(source)
    assert same_bits(made(ids), td.freeze(source, rows="int8")(ids).bfloat16())


def test_hooks_run_once() -> None:
    calls: list[str] = []
    frozen = td.freeze(nn.Sequential(trained().row))
    frozen[0].register_forward_pre_hook(lambda *_: calls.append("before"))
    frozen[0].register_forward_hook(lambda *_: calls.append("after"))
    spec = {serving.FrozenEmbedding: qconfig(torch.int8)}
    made = quantize_dynamic(frozen, spec, mapping={of: of for of in spec}, inplace=True)
    made(some_ids())
    assert calls == ["before", "after"]
    assert made[0].frozen_tables.get_buffer("weights0").dtype == torch.uint8


def test_a_copy_of_the_same_form_has_rows_of_its_own() -> None:
    source: Any = td.freeze(trained().row)
    source.qconfig = qconfig(torch.float32)
    made = serving.FrozenEmbedding.from_float(source)
    before = source(some_ids())
    made.frozen_tables.get_buffer("weights0").zero_()
    assert torch.equal(source(some_ids()), before)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (qconfig(torch.quint2x4), "weight dtype of table 'row' is torch.quint2x4, but rows of dyn"),
        (qconfig(torch.int8, row=torch.int32), "weight dtype of table 'row' is torch.int32, but"),
        (qconfig(torch.int8, torch.quint8), "dtype of qconfig.activation is torch.quint8, but"),
        (None, "FrozenEmbedding.from_float: DynamicEmbedding has no qconfig with"),
    ],
)
def test_what_rows_and_outputs_cannot_be_is_refused(config: Any, message: str) -> None:
    table: Any = td.DynamicEmbedding(4, name="row", optimizer=SGD)
    if config is not None:
        table.qconfig = config
    with pytest.raises(ValueError, match=message):
        serving.FrozenEmbedding.from_float(table)


def test_other_modules_and_other_forms_are_refused() -> None:
    model: Any = trained()
    model.bag.qconfig = qconfig(torch.int8)
    with pytest.raises(
        TypeError, match="module is a DynamicEmbeddingBag, which FrozenEmbeddingBag"
    ):
        serving.FrozenEmbedding.from_float(model.bag)
    made: Any = serving.FrozenEmbeddingBag.from_float(model.bag)
    made.qconfig = qconfig(torch.quint4x2)
    before = made(some_ids())
    with pytest.raises(ValueError, match=r"rows is {'bag': 'int4'}, but the rows are quantized"):
        serving.FrozenEmbeddingBag.from_float(made)
    assert torch.equal(made(some_ids()), before)
