"""TorchRec's quantization for inference, of models with dynamic tables."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchrec
from frozen_steps import VOCABULARY, batch, quantized_by_torchrec, trained
from ranks import Ranks
from seeding import seeded
from test_frozen_models import any_sizes, first_samples, pooled, unpooled
from torch import Tensor, nn
from torchrec.inference.modules import (
    PredictModule,
    quantize_dense,
    quantize_embeddings,
    quantize_inference_model,
    shard_quant_model,
)
from torchrec.pt2.utils import deregister_fake_classes, register_fake_classes

import torch_dynemb as td
from torch_dynemb import serving
from torch_dynemb.serving.row_formats import RowKind
from torch_dynemb.torchrec import quantization_mapping

pytestmark = [
    pytest.mark.cpu_only("TorchRec over gloo"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]

SGD = td.SGD(lr=0.5)
KINDS: list[tuple[torch.dtype, RowKind]] = [
    (torch.int8, "int8"),
    (torch.quint4x2, "int4"),
    (torch.float16, "fp16"),
]


class Unsharded(nn.Module):
    """Modules with dynamic tables beside TorchRec's own."""

    def __init__(self) -> None:
        super().__init__()
        tables = [td.TableConfig(name, 8) for name in "abc"]
        self.bags = td.DynamicEmbeddingBagCollection(tables, optimizer=SGD)
        self.row = td.DynamicEmbedding(4, optimizer=SGD, name="row")
        static = torchrec.EmbeddingBagConfig(
            num_embeddings=50, embedding_dim=8, name="static", feature_names=["a"]
        )
        self.static = torchrec.EmbeddingBagCollection([static])
        self.dense = nn.Linear(24, 1)

    def forward(self, features: Any) -> dict[str, Tensor]:
        bags = self.bags(features)
        return {
            "bags": bags,
            "dense": self.dense(bags),
            "row": self.row(features.values()),
            "static": self.static(features).values(),
        }


def features(step: int) -> torchrec.KeyedJaggedTensor:
    lengths = torch.randint(0, 4, (12,), generator=seeded(step))
    ids = torch.randint(0, 40, (int(lengths.sum()),), generator=seeded(step + 50))
    return torchrec.KeyedJaggedTensor(list("abc"), ids, lengths=lengths)


def unsharded() -> Unsharded:
    torch.manual_seed(2)
    model = Unsharded()
    for step in range(2):
        outputs = model(features(step))
        (outputs["dense"].sum() + outputs["row"].square().sum()).backward()
    return model.eval()


def check_quantized(model: Any, quantized: Any, kind: RowKind) -> None:
    given = features(7)
    with torch.no_grad():
        expected, outputs = td.freeze(model, rows=kind)(given), quantized(given)
    for name in ("bags", "dense", "row"):
        assert torch.equal(outputs[name], expected[name]), name
    static = quantized.static
    assert type(static).__module__ == "torchrec.quant.embedding_modules"
    assert not torch.equal(outputs["static"], expected["static"])


@pytest.mark.parametrize(("dtype", "kind"), KINDS)
def test_unsharded_tables(dtype: torch.dtype, kind: RowKind) -> None:
    model = unsharded()
    quantized = quantize_inference_model(copy.deepcopy(model), quantization_dtype=dtype)
    check_quantized(model, quantized, kind)
    mapping = quantization_mapping()
    quantized = quantize_embeddings(
        model,
        dtype,
        inplace=False,
        additional_qconfig_spec_keys=list(mapping),
        additional_mapping=mapping,
    )
    check_quantized(model, quantized, kind)


def test_dtypes_by_table_and_of_outputs() -> None:
    model = unsharded()
    by_name = {"b": torch.quint4x2, "row": torch.float16}
    quantized = quantize_inference_model(
        copy.deepcopy(model), per_table_weight_dtype=by_name, output_dtype=torch.bfloat16
    )
    given = features(7)
    columns = {"a": slice(0, 8), "b": slice(8, 16), "c": slice(16, 24)}
    outputs = quantized.bags(given)
    assert outputs.dtype == torch.bfloat16
    for name, part in columns.items():
        expected = td.freeze(model, rows="int4" if name == "b" else "int8").bags(given)
        assert torch.equal(outputs[:, part], expected[:, part].bfloat16()), name
    expected = td.freeze(model, rows="fp16").row(given.values())
    assert torch.equal(quantized.row(given.values()), expected.bfloat16())
    before = model(given)
    with pytest.raises(ValueError, match=r"weight dtype of table 'c' is torch.quint2x4, but rows"):
        quantize_inference_model(model, per_table_weight_dtype={"c": torch.quint2x4})
    assert all(torch.equal(of, before[name]) for name, of in model(given).items())


def check_collections(frozen: Any, quantized: Any, given: Any) -> None:
    """Dynamic tables as freeze() has them, static ones as TorchRec quantizes them alone."""
    with torch.no_grad():
        expected, outputs = frozen(given), quantized(given)
    assert list(outputs) == list(expected)
    of_static = set(outputs)
    for name in ("b", "c@b", "e", "c@e"):
        if name in outputs:
            assert torch.equal(outputs[name], expected[name]), name
            of_static.discard(name)
    for path in ("bags", "sequences"):
        part = getattr(frozen, path, None)
        if part is None:
            continue
        alone = quantize_inference_model(nn.Sequential(copy.deepcopy(part.static)))[0]
        found = alone(given)
        rows = found.to_dict() if path == "bags" else {n: of.values() for n, of in found.items()}
        for name in of_static:
            other = rows[name.partition("@")[0]]
            assert torch.equal(outputs[name], quantized.over(other)), name


@pytest.mark.parametrize("kind", ["bags", "weighted bags", "sequences"])
def test_collections_that_were_sharded(one_rank: None, kind: str) -> None:
    jagged = "weighted" if kind == "weighted bags" else "plain"
    tables = unpooled("table_wise") if kind == "sequences" else pooled("table_wise")
    model = trained(0, tables, jagged)
    given = batch(0, tables, jagged, 9, VOCABULARY)
    frozen = td.freeze(model, rows="int8")
    quantized = quantize_inference_model(td.freeze(model))
    check_collections(frozen, quantized, given)
    # TorchRec's quantized collections remember the order of features that they saw first
    keys = list(given.keys())
    order = list(reversed(range(len(keys))))
    check_collections(frozen, quantized, given.permute(order))
    for samples in (0, 1):
        few = first_samples(given, samples)
        outputs = quantized(few)
        assert [len(of) for of in outputs.values()] == [len(of) for of in frozen(few).values()]
    # rows that are quantized already stay, and static tables follow
    twice = quantize_inference_model(td.freeze(model, rows="int8"))
    check_collections(frozen, twice, given)

    state = {name: of.clone() for name, of in quantized.state_dict().items()}
    expected = quantized(given)
    for buffer in quantized.buffers():
        if buffer.dtype == torch.uint8:
            buffer.zero_()
    quantized.load_state_dict(state)
    assert all(torch.equal(of, expected[name]) for name, of in quantized(given).items())


def test_two_ranks(two_ranks: Ranks) -> None:
    tables = [table for table in pooled("row_wise") if table.dynamic]
    assert two_ranks.run(quantized_by_torchrec, tables) == [True, True]


@pytest.fixture
def fake_classes() -> Iterator[None]:
    """Those of FBGEMM's kernels, without which torch.export does not take them."""
    register_fake_classes()
    yield
    deregister_fake_classes()


def check_exported(model: Any, given: Any, others: list[Any], *, strict: bool) -> None:
    program = torch.export.export(
        model, (given,), dynamic_shapes=(any_sizes(given),), strict=strict
    )
    for other in others:
        with torch.no_grad():
            expected, outputs = model(other), program.module()(other)
        assert all(torch.equal(of, expected[name]) for name, of in outputs.items())


@pytest.mark.parametrize("strict", [True, False])
def test_exported(one_rank: None, strict: bool) -> None:
    tables = [table for table in pooled("table_wise") if table.dynamic]
    model = quantize_inference_model(td.freeze(trained(0, tables, "plain")))
    given = batch(0, tables, "plain", 1, VOCABULARY)
    others = [batch(0, tables, "plain", 2, VOCABULARY), first_samples(given, 0)]
    check_exported(model, given, others, strict=strict)


@pytest.mark.long
def test_exported_with_static_tables(one_rank: None, fake_classes: None) -> None:
    tables = pooled("table_wise")
    model = quantize_inference_model(td.freeze(trained(0, tables, "plain")))
    given = batch(0, tables, "plain", 1, VOCABULARY)
    others = [batch(0, tables, "plain", 2, VOCABULARY)]
    model(given)  # TorchRec's collection notes the order of its features
    check_exported(model, given, others, strict=False)


class Predict(PredictModule):
    def predict_forward(self, batch: dict[str, Tensor]) -> Any:
        return self.predict_module(batch["features"])


def test_dense_part_in_16_bits() -> None:
    model = unsharded()
    quantized = quantize_inference_model(copy.deepcopy(model))
    expected = td.freeze(model, rows="int8").half()
    predict: Any = quantize_dense(Predict(quantized, device="cpu"), torch.half)
    given = features(7)
    with torch.no_grad():
        outputs = predict({"features": given})
        bags = expected.bags(given)
    assert outputs["bags"].dtype == torch.float16
    assert torch.equal(outputs["bags"], bags)
    assert torch.equal(outputs["dense"], expected.dense(bags))


def test_missing_ids_are_still_counted() -> None:
    model = unsharded()
    counted = td.freeze(model, missing=True)
    given = features(7)
    _, expected = counted(given)
    _, missing = quantize_inference_model(counted)(given)
    assert int(expected.sum()) > 0
    assert torch.equal(missing, expected)


def test_sharded_models_are_refused(one_rank: None) -> None:
    for tables in (pooled("table_wise"), unpooled("table_wise")):
        model = trained(0, tables, "plain")
        given = batch(0, tables, "plain", 9, VOCABULARY)
        before = model(given)
        with pytest.raises(TypeError, match=r"is sharded over ranks: quantize the result of tor"):
            quantize_inference_model(model)
        assert all(torch.equal(of, before[name]) for name, of in model(given).items())


def test_live_tables_are_refused() -> None:
    live = serving.live(nn.Sequential(unsharded().row), headroom=3)
    with pytest.raises(TypeError, match="the rows of FrozenEmbedding are updated while they serve"):
        quantize_inference_model(live)


def test_dividing_quantized_tables_is_refused(one_rank: None) -> None:
    models = [
        quantize_inference_model(nn.Sequential(unsharded().bags)),
        quantize_inference_model(td.freeze(trained(0, pooled("table_wise"), "plain"))),
    ]
    for model in models:
        with pytest.raises(TypeError, match=r"are not divided over.* storage=RedisRows"):
            shard_quant_model(model, world_size=2, compute_device="cpu", sharding_device="cpu")
