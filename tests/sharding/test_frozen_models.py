"""td.freeze of sharded models: a whole, unsharded copy on all ranks or on one, or a rank's part."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from frozen_steps import (
    VOCABULARY,
    batch,
    frozen,
    frozen_without_memory,
    packaged,
    refused,
    stored_in_8_bits,
    trained,
    updated_live,
)
from ranks import Ranks
from sharded_models import BAG_SHARDINGS, FOUR_RANKS, SEQUENCE_SHARDINGS, Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.export import Dim
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardedModule

import torch_dynemb as td
from torch_dynemb.torchrec import TableOptions

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

EXACT = ("table_wise", "column_wise", "table_column_wise")  # which add bags up as one process does


def pooled(sharding: str, pooling: str = "sum", **more: Any) -> tuple[Table, ...]:
    """Dynamic tables of a sharding beside static ones; two tables share a feature."""
    return (
        Table("static_a", 8, ("a",), pooling, "row_wise", dynamic=False),
        Table("b", 8, ("b", "c"), pooling, sharding, **more),
        Table("static_d", 8, ("d", "c"), pooling, "column_wise", dynamic=False),
        Table("e", 8, ("e",), "sum", sharding, **more),
    )


def unpooled(sharding: str) -> tuple[Table, ...]:
    return (
        Table("static_a", 8, ("a",), "none", "row_wise", dynamic=False),
        Table("b", 8, ("b", "c"), "none", sharding),
        Table("e", 8, ("c",), "none", sharding),
    )


def check(results: list[Any], *, exact: bool) -> None:
    for result in results:
        assert result.sizes == result.all_sizes
        assert min(result.sizes.values()) > 2
        assert list(result.frozen) == list(result.live)
        for name, live in result.live.items():
            if exact:
                assert torch.equal(result.frozen[name], live), name
            else:
                torch.testing.assert_close(result.frozen[name], live, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("sharding", [kind for kind in BAG_SHARDINGS if kind not in FOUR_RANKS])
@pytest.mark.parametrize(("pooling", "kind"), [("sum", "weighted"), ("mean", "plain")])
def test_bags(two_ranks: Ranks, sharding: str, pooling: str, kind: str) -> None:
    results = two_ranks.run(frozen, pooled(sharding, pooling), kind, "all")
    check(results, exact=False)
    if pooling == "sum":
        dynamic = ("b", "e")
        for result in results:
            assert sharding not in EXACT or all(
                torch.equal(result.frozen[name], result.live[name]) for name in dynamic
            )


@pytest.mark.parametrize("sharding", FOUR_RANKS)
def test_tables_over_nodes(four_ranks: Ranks, sharding: str) -> None:
    """Two nodes of two ranks each; static tables are divided over nodes, too."""
    tables = (
        Table("static", 8, ("a",), "sum", "table_row_wise", dynamic=False),
        Table("b", 8, ("b", "c"), "mean", sharding),
        Table("e", 8, ("e", "c"), "sum", sharding),
    )
    check(four_ranks.run(frozen, tables, "plain", "all"), exact=False)
    results = four_ranks.run(frozen, tables, "weighted", "first")
    check(results[:1], exact=False)
    assert [of.frozen for of in results[1:]] == [None] * 3


@pytest.mark.parametrize("sharding", SEQUENCE_SHARDINGS)
def test_sequences(two_ranks: Ranks, sharding: str) -> None:
    check(two_ranks.run(frozen, unpooled(sharding), "plain", "all"), exact=True)


def test_live_copies(two_ranks: Ranks) -> None:
    assert two_ranks.run(updated_live, pooled("row_wise")) == [(True, True)] * 2


def test_rows_of_8_bits(two_ranks: Ranks) -> None:
    for far, in_bytes in two_ranks.run(stored_in_8_bits, pooled("row_wise")):
        assert far < 0.02
        assert in_bytes


def test_the_first_rank_alone(two_ranks: Ranks) -> None:
    tables = (*pooled("row_wise"), *unpooled("column_wise")[1:])
    tables = tuple(
        Table(f"{table.pooling}_{table.name}", *list(vars(table).values())[1:]) for table in tables
    )
    first, second = two_ranks.run(frozen, tables, "plain", "first")
    check([first], exact=False)
    assert second.frozen is None
    assert second.all_sizes == first.sizes


def test_rows_of_16_bits_and_defaults(two_ranks: Ranks) -> None:
    options = {
        "b": TableOptions(eval_default="zeros", padding_idx=3),
        "e": TableOptions(eval_default=torch.arange(8.0)),
    }
    tables = pooled("row_wise", data_type="BF16")
    check(two_ranks.run(frozen, tables, "plain", "all", options), exact=False)
    tables = pooled("column_wise", data_type="FP16")
    check(two_ranks.run(frozen, tables, "plain", "all", options), exact=False)


def test_a_rank_s_own_rows(two_ranks: Ranks) -> None:
    tables = (
        Table("b", 8, ("b",), "sum", "row_wise"),
        Table("e", 8, ("e",), "sum", "table_wise"),  # of the second rank
    )
    options = {table.name: TableOptions(eval_default="zeros") for table in tables}
    results = two_ranks.run(frozen, tables, "plain", "own", options)
    for name, size in results[0].all_sizes.items():
        assert sum(result.sizes[name] for result in results) == size
    assert [result.sizes["e"] for result in results] == [0, results[1].all_sizes["e"]]
    assert all(result.sizes["b"] > 0 for result in results)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            Table("b", 8, ("b",), "sum", "column_wise"),
            r"ranks is 'own', but this rank has columns \d to \d of table 'b' only, which has 8",
        ),
        (
            Table("b", 8, ("b",), "sum", "row_wise", dynamic=False),
            "ranks is 'own', but this rank has not all of static table 'b'",
        ),
    ],
)
def test_parts_that_are_no_table(two_ranks: Ranks, table: Table, message: str) -> None:
    whole = Table("a", 8, ("a",), "sum", "row_wise")
    for error in two_ranks.errors(refused, (whole, table)):
        assert re.search(message, error)


def any_sizes(features: Any) -> list[Any]:
    """Dynamic shapes of a KeyedJaggedTensor as torch flattens it: of any batch and lengths."""
    parts, _ = pytree.SUPPORTED_NODES[type(features)].flatten_fn(features)
    return [None if part is None else {0: Dim.AUTO} for part in parts]


@pytest.mark.long
def test_packages_of_sharded_models_take_updates(two_ranks: Ranks, tmp_path: Path) -> None:
    folder = str(tmp_path / "package")
    first, second = two_ranks.run(packaged, pooled("row_wise"), folder, any_sizes)
    assert first == (True, True, True)
    assert second is None


def test_rows_on_disks(two_ranks: Ranks, tmp_path: Path) -> None:
    tables = (Table("b", 8, ("b", "c"), "sum", "row_wise"), Table("e", 8, ("e",), "none"))
    options = {
        name: TableOptions(storage=td.SSDStore(tmp_path / name, cache="64 rows")) for name in "be"
    }
    check(two_ranks.run(frozen, tables, "plain", "all", options), exact=False)


@pytest.mark.parametrize("ranks", ["all", "first"])
def test_too_little_memory(two_ranks: Ranks, ranks: str) -> None:
    table = Table("b", 8, ("b",), "sum", "row_wise")
    for error in two_ranks.errors(frozen_without_memory, (table,), ranks):
        assert re.search(
            r"freeze: the rows of all ranks take \d+ bytes while .*, but 10 bytes of memory", error
        )


def test_copies_without_wrappers(one_rank: None) -> None:
    inner = td.DynamicEmbedding(2, optimizer=td.SGD(lr=0.1))
    model = nn.Sequential(inner, DistributedDataParallel(nn.Linear(2, 1)))
    copy = td.freeze(model)
    assert isinstance(copy[1], nn.Linear)
    ids = torch.arange(4)
    assert torch.equal(copy(ids), model.eval()(ids))
    mesh = init_device_mesh("cpu", (1,))
    model[1] = nn.Linear(2, 1)
    model[1].weight = nn.Parameter(distribute_tensor(model[1].weight, mesh, [Shard(0)]))
    with pytest.raises(TypeError, match=r"parameter 'weight' of Linear is a DTensor, of which"):
        td.freeze(model)


def test_sharded_modules_of_other_kinds() -> None:
    other = type("Other", (ShardedModule,), dict.fromkeys(ShardedModule.__abstractmethods__))
    module = other.__new__(other)
    nn.Module.__init__(module)
    with pytest.raises(TypeError, match=r"freeze: Other is not a sharded module that freeze"):
        td.freeze(nn.Sequential(module))


@pytest.mark.long
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("kind", ["bags", "weighted bags", "sequences"])
def test_exported(one_rank: None, kind: str, strict: bool) -> None:
    weighted = "weighted" if kind == "weighted bags" else "plain"
    tables = unpooled("table_wise") if kind == "sequences" else pooled("table_wise")
    model = td.freeze(trained(0, tables, weighted))
    features = batch(0, tables, weighted, 1, VOCABULARY)
    shapes = (any_sizes(features),)
    program = torch.export.export(model, (features,), dynamic_shapes=shapes, strict=strict)
    loaded = program.module()
    batches = [batch(0, tables, weighted, step, VOCABULARY) for step in (2, 3)]
    for given in (*batches, *(first_samples(features, samples) for samples in (0, 1))):
        with torch.no_grad():
            expected, outputs = model(given), loaded(given)
        assert list(outputs) == list(expected)
        for name, of in outputs.items():
            assert torch.equal(of, expected[name])


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traced(one_rank: None) -> None:
    """Bags of any batch; static tables and sequences are refused: a trace would keep sizes."""

    class Keyed(nn.Module):
        def __init__(self, tables: tuple[Table, ...]) -> None:
            super().__init__()
            self.model = td.freeze(trained(0, tables, "plain"))
            self.keys = batch(0, tables, "plain", 1, VOCABULARY).keys()

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> Any:
            features = KeyedJaggedTensor(keys=self.keys, values=ids, lengths=lengths)
            return list(self.model(features).values())

    def arguments(samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.randint(0, 4, (samples * len(model.keys),))
        return torch.randint(0, VOCABULARY, (int(lengths.sum()),)), lengths

    model = Keyed(tuple(table for table in pooled("table_wise") if table.dynamic))
    traced = torch.jit.trace(model, arguments(3), strict=False)
    for samples in (0, 1, 9):
        given = arguments(samples)
        for out, expected in zip(traced(*given), model(*given), strict=True):
            assert torch.equal(out, expected)
    for tables in (pooled("table_wise"), unpooled("table_wise")):
        model = Keyed(tables)
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace would keep the sizes"):
            torch.jit.trace(model, arguments(3))


def first_samples(features: Any, samples: int) -> Any:
    """The first samples of a batch, or none."""
    lengths = features.lengths().view(len(features.keys()), -1)[:, :samples]
    sizes = features.length_per_key()
    chosen = [int(of) for of in lengths.sum(1)]

    def cut(of_ids: torch.Tensor) -> torch.Tensor:
        parts = of_ids.split(sizes)
        return torch.cat([part[:size] for part, size in zip(parts, chosen, strict=True)])

    weights = features.weights_or_none()
    return KeyedJaggedTensor(
        features.keys(),
        cut(features.values()),
        None if weights is None else cut(weights),
        lengths.reshape(-1),
    )
