"""Read-only collections and batches with a batch size per feature: samples share bags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from frozen_steps import VOCABULARY, batch, frozen, trained
from jagged_batches import batches_of_ranks, keyed_jagged
from ranks import Ranks
from sharded_models import Table
from test_frozen_models import any_sizes, check, pooled, unpooled
from torchrec import KeyedJaggedTensor
from torchrec.inference.modules import quantize_inference_model

import torch_dynemb as td

pytestmark = [
    pytest.mark.cpu_only("TorchRec over gloo"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]


def beside_static(sharding: str, pooling: str) -> tuple[Table, ...]:
    """TorchRec trains no static tables of other shardings over gloo on such batches."""
    return tuple(
        table
        if table.dynamic
        else Table(table.name, 8, table.features, pooling, "table_wise", dynamic=False)
        for table in pooled(sharding, pooling)
    )


@pytest.mark.parametrize(
    ("sharding", "pooling", "kind"),
    [
        ("table_wise", "mean", "vbe"),
        ("row_wise", "sum", "weighted_vbe"),
        pytest.param("row_wise", "mean", "vbe", marks=pytest.mark.long),
        pytest.param("column_wise", "sum", "vbe", marks=pytest.mark.long),
    ],
)
def test_bags(two_ranks: Ranks, sharding: str, pooling: str, kind: str) -> None:
    check(two_ranks.run(frozen, beside_static(sharding, pooling), kind, "all"), exact=False)


def test_sequences(two_ranks: Ranks) -> None:
    check(two_ranks.run(frozen, unpooled("row_wise"), "vbe", "all"), exact=True)


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("kind", ["vbe", "weighted_vbe", "sequences"])
def test_a_bag_for_each_sample_gives_the_same(one_rank: None, kind: str, quantized: bool) -> None:
    tables = unpooled("table_wise") if kind == "sequences" else pooled("table_wise")
    weighted = kind == "weighted_vbe"
    model: Any = td.freeze(trained(0, tables, "weighted" if weighted else "plain"))
    if quantized:
        model = quantize_inference_model(model)
    features = ["a", "b", "c", "d", "e", "other"]
    (shared,) = batches_of_ranks("weighted_vbe" if weighted else "vbe", features, 1, 3, VOCABULARY)
    apart = shared.expanded()
    assert {len(bags) for bags in shared.ids.values()} != {shared.samples()}
    with torch.no_grad():
        expected, outputs = (model(keyed_jagged(of, "")) for of in (apart, shared))
    assert list(outputs) == list(expected)
    for name, of in expected.items():
        assert torch.equal(outputs[name], of), name


def test_lengths_and_ids_are_those_of_samples(one_rank: None) -> None:
    model: Any = td.freeze(trained(0, unpooled("table_wise"), "plain"))
    (shared,) = batches_of_ranks("vbe", ["a", "b", "c"], 1, 3, VOCABULARY)
    given = keyed_jagged(shared, "vbe")
    of_feature = model.sequences(given)["b"]
    bags = shared.expanded().ids["b"]
    assert of_feature.lengths().tolist() == [len(bag) for bag in bags]
    assert of_feature.values().shape[0] == sum(len(bag) for bag in bags)


def of_sizes(*bags: int, inverse: Any = None) -> KeyedJaggedTensor:
    """Features a to d with so many bags of one id each."""
    return KeyedJaggedTensor(
        list("abcde"),
        torch.arange(sum(bags)) % VOCABULARY,
        lengths=torch.ones(sum(bags), dtype=torch.int64),
        stride_per_key_per_rank=[[count] for count in bags],
        inverse_indices=inverse,
    )


def test_batches_without_the_bags_of_samples_are_refused(one_rank: None) -> None:
    for tables in (pooled("table_wise"), unpooled("table_wise")):
        model: Any = td.freeze(trained(0, tables, "plain"))
        given = of_sizes(1, 2, 3, 1, 2)
        with pytest.raises(ValueError, match=r"\[1, 2, 3, 1, 2\], but no inverse_indices: give"):
            model(given)
        inverse = (list("abcd"), torch.zeros(4, 3, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"inverse_indices of features lacks \['e'\]; it has"):
            model(of_sizes(1, 2, 3, 1, 2, inverse=inverse))
        alike = of_sizes(2, 2, 2, 2, 2)
        plain = KeyedJaggedTensor(alike.keys(), alike.values(), lengths=alike.lengths())
        expected = model(plain)
        assert all(torch.equal(of, expected[name]) for name, of in model(alike).items())


def test_exporting_with_such_a_batch_is_refused(one_rank: None) -> None:
    tables = [table for table in pooled("table_wise") if table.dynamic]
    model = td.freeze(trained(0, tables, "plain"))
    given = batch(0, tables, "vbe", 1, VOCABULARY)
    with pytest.raises(
        ValueError, match="a batch size per feature, which exported programs cannot"
    ):
        torch.export.export(model, (given,), dynamic_shapes=(any_sizes(given),), strict=False)
