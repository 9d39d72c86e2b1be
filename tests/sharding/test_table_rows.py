"""Rows of whole tables, streamed out of sharded models and others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import Ranks
from sharded_models import Table
from table_rows_steps import (
    BATCH_ROWS,
    ITEMS,
    Shard,
    Streamed,
    failures,
    refused,
    retrieved,
    shared_by_ids,
    streamed,
)
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan
from torchrec.distributed.types import ShardingPlan

import torch_dynemb as td
from torch_dynemb import recis
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    TableOptions,
    table_rows,
)

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

TWO_RANKS = (
    Table("rows", 8, ("a", "b"), "mean", "row_wise"),
    Table("whole", 16, ("b",), "sum", "table_wise"),
    Table("columns", 16, ("a",), "sum", "column_wise", columns_per_rank=(4, 12)),
    Table("fp16_rows", 8, ("b",), "sum", "row_wise", data_type="FP16"),
    Table("row_sequence", 8, ("a",), "none", "row_wise"),
    Table("column_sequence", 8, ("b",), "none", "column_wise"),
)
FOUR_RANKS = (
    Table("node", 8, ("a",), "sum", "table_row_wise"),
    Table("grid", 8, ("b",), "sum", "grid_shard"),
)


def together(batches: Sequence[td.RowBatch]) -> dict[str, Tensor]:
    """The content of some batches, by id."""
    ids = torch.cat([batch.ids for batch in batches])
    order = ids.argsort()
    assert ids.unique().numel() == ids.numel()
    tensors = {
        "rows": [batch.rows for batch in batches],
        **{f"state {name}": [of.state[name] for of in batches] for name in batches[0].state},
        **{f"score {name}": [of.scores[name] for of in batches] for name in batches[0].scores},
    }
    return {"ids": ids[order], **{name: torch.cat(of)[order] for name, of in tensors.items()}}


def of_shards(shards: Sequence[Shard]) -> dict[str, Tensor]:
    """The content of shards by id: parts of ids one after another, columns side by side."""
    by_columns: dict[int, list[Shard]] = {}
    for shard in shards:
        by_columns.setdefault(shard.first_column, []).append(shard)
    columns = []
    for first in sorted(by_columns):
        of = by_columns[first]
        order = torch.cat([shard.ids for shard in of]).argsort()
        tensors = {"ids": [shard.ids for shard in of], "rows": [shard.rows for shard in of]}
        tensors |= {f"state {name}": [s.state[name] for s in of] for name in of[0].state}
        tensors |= {f"score {name}": [s.scores[name] for s in of] for name in of[0].scores}
        columns.append({name: torch.cat(of)[order] for name, of in tensors.items()})
    widths = [of["rows"].shape[1] for of in columns]
    whole = dict(columns[0])
    for name in [name for name in whole if name == "rows" or name.startswith("state ")]:
        values = [of[name] for of in columns]
        if name != "rows" and values[0].shape[1] == 1:
            weighted = [v[:, 0].double() * w for v, w in zip(values, widths, strict=True)]
            mean = torch.stack(weighted).sum(0)[:, None] / sum(widths)
            whole[name] = mean.to(values[0].dtype)
        else:
            whole[name] = torch.cat(values, 1)
    assert all(torch.equal(of["ids"], whole["ids"]) for of in columns)
    return whole


def check(found: Sequence[Streamed], dims: dict[str, int]) -> None:
    first = found[0]
    for name, batches in first.whole.items():
        shards = [s for of in found for s in of.shards if s.table == name]
        whole = together(batches)
        torch.testing.assert_close(whole, of_shards(shards))
        for other in found[1:]:
            torch.testing.assert_close(other.whole[name], batches, rtol=0, atol=0)
        assert whole["ids"].numel() > 2 * BATCH_ROWS
        for batch in batches:
            assert 1 <= batch.ids.numel() <= BATCH_ROWS
            assert batch.columns == range(dims[name.rpartition(".")[2]])
        for of in found:
            by_columns: dict[range, list[td.RowBatch]] = {}
            for batch in of.own[name]:
                by_columns.setdefault(batch.columns, []).append(batch)
            mine = {shard.first_column: shard for shard in of.shards if shard.table == name}
            assert {columns.start for columns in by_columns} == set(mine)
            for columns, own in by_columns.items():
                own_whole = together(own)
                assert torch.equal(own_whole["ids"], mine[columns.start].ids)
                assert torch.equal(own_whole["rows"], mine[columns.start].rows)


@pytest.mark.long
@pytest.mark.parametrize("optimizer", ["adam", "rowwise", "8 bits"])
def test_all_ranks_get_the_whole_table(two_ranks: Ranks, optimizer: str) -> None:
    check(two_ranks.run(streamed, TWO_RANKS, optimizer), {of.name: of.dim for of in TWO_RANKS})


def test_shards_of_nodes(four_ranks: Ranks) -> None:
    check(four_ranks.run(streamed, FOUR_RANKS, "adam"), {of.name: of.dim for of in FOUR_RANKS})


def test_ranks_that_share_a_table_without_torchrec(two_ranks: Ranks) -> None:
    (whole, own), (other_whole, other_own) = two_ranks.run(shared_by_ids)
    torch.testing.assert_close(whole, other_whole, rtol=0, atol=0)
    expected = together(whole)
    assert torch.equal(expected["ids"], torch.arange(90))
    torch.testing.assert_close(together([*own, *other_own]), expected, rtol=0, atol=0)
    assert 0 < sum(len(batch.ids) for batch in own) < 90


def test_column_shards_of_one_rank(one_rank: None) -> None:
    config = EmbeddingBagConfig(
        name="users", embedding_dim=16, num_embeddings=9, feature_names=["user"]
    )
    module = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    sharder: Any = DynamicEmbeddingBagCollectionSharder(
        optimizer=td.SGD(lr=0.1), options=TableOptions()
    )
    kernel = "customized_kernel"
    plan = construct_module_sharding_plan(
        module,
        {"users": column_wise(ranks=[0, 0], compute_kernel=kernel)},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type="cpu",
    )
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=ShardingPlan({"": plan}), sharders=[sharder]
    )
    features = KeyedJaggedTensor(["user"], torch.arange(30), lengths=torch.full((10,), 3))
    model(features).to_dict()["user"].square().sum().backward()
    [batch] = table_rows(model, "users")
    rows = dict(zip(batch.ids.tolist(), batch.rows, strict=True))
    bags = [sum(rows[id] for id in range(3 * bag, 3 * bag + 3)) for bag in range(10)]
    model.eval()
    torch.testing.assert_close(model(features).to_dict()["user"], torch.stack(bags))
    columns = [of.columns for of in table_rows(model, "users", gather=False)]
    assert columns == [range(8), range(8, 16)]


@pytest.mark.long
def test_an_index_of_all_items_finds_what_the_model_ranks_first(two_ranks: Ranks) -> None:
    for found, expected, hits in two_ranks.run(retrieved):
        assert torch.equal(found, expected)
        assert hits > 0.9
        assert found.shape == (ITEMS, 3)


def test_all_ranks_raise_for_arguments(two_ranks: Ranks) -> None:
    unknown = "ValueError: table_rows: table is 'usres', expected one of ['bags.users']. Did you "
    expected = {
        "unknown": unknown + "mean 'users'?",
        "unknown alone": unknown + "mean 'users'?",
        "unknown on a rank": unknown + "mean 'users'?",
        "static": "ValueError: table_rows: table 'bags.days' is static, expected a dynamic one of "
        "['bags.users']: the weight of a static table is in model.state_dict()",
        "different": "ValueError: table_rows: batch_rows differs between ranks: 3 on rank 0; 4 on "
        "rank 1: the ranks share the tables, so give all of them the same",
        "batch_rows on a rank": "ValueError: table_rows: batch_rows is 0, expected at least 1",
        "no name": "TypeError: table_rows: table is 3, expected str",
    }
    assert two_ranks.run(refused) == [expected] * 2


def test_all_ranks_raise_for_failures(two_ranks: Ranks) -> None:
    for raised in two_ranks.run(failures):
        assert raised["read"] == "OSError: read_rows: the disk has failed"
        assert "table 'bags.users' has changed while its rows are read" in raised["trained"]
        assert "evictions have made its column shards differ" in raised["other ids"]
        assert "RuntimeError: table_rows: table 'bags.users' lacks id" in raised["other ids"]
        assert "RuntimeError: table_rows: table 'bags.users' has" in raised["other sizes"]
        assert "ids in its columns on rank 0 and" in raised["other sizes"]


# -- other models ----------------------------------------------------------------------------------


def unsharded(policy: td.Policy | None = None) -> nn.Module:
    """Two collections, both with a table of users."""
    policy = policy or td.Policy()

    def bags(*names: str) -> td.DynamicEmbeddingBagCollection:
        tables = [td.TableConfig(name, 4, [name], policy=policy) for name in names]
        return td.DynamicEmbeddingBagCollection(tables, optimizer=td.Adam(lr=0.1))

    model = nn.ModuleDict({"bags": bags("users", "items"), "more": bags("users")})
    for path, names in (("bags", ("users", "items")), ("more", ("users",))):
        features = {name: torch.arange(50)[:, None] * 7 for name in names}
        model[path](features).sum().backward()
    return model


def test_a_model_that_is_not_sharded() -> None:
    model = unsharded()
    group = model["bags"].group
    for gather in (True, False):
        for rows in (1, 3, 1000):
            batches = list(table_rows(model, "items", gather=gather, batch_rows=rows))
            whole = together(batches)
            assert max(batch.ids.numel() for batch in batches) <= rows
            assert torch.equal(whole["ids"], torch.arange(50) * 7)
            assert torch.equal(whole["rows"], group.read(1, whole["ids"]))
            assert {"state exp_avg", "state exp_avg_sq"} < whole.keys()
    with pytest.raises(ValueError, match=r"'users', which several tables .*\['bags.users', 'more"):
        table_rows(model, "users")
    assert len(list(table_rows(model, "more.users"))) == 1


def test_rows_are_copies_and_expired_ids_are_left_out() -> None:
    model = unsharded(td.Policy(ttl=10, score="timestamp"))
    group = model["more"].group
    now = int(next(table_rows(model, "more.users")).scores["timestamp"][0])
    before = group.read(0, torch.arange(50) * 7)
    [batch] = table_rows(model, "more.users")
    assert set(batch.scores) == {"step", "timestamp", "expiry"}
    batch.rows.zero_()
    batch.state["exp_avg"].zero_()
    batch.ids.zero_()
    assert torch.equal(group.read(0, torch.arange(50) * 7), before)
    group.step(now=now + 9)
    assert len(next(table_rows(model, "more.users")).ids) == 50
    group.step(now=now + 11)
    assert list(table_rows(model, "more.users")) == []


def test_rows_in_a_store(tmp_path: Path) -> None:
    storage = td.SSDStore(tmp_path, cache="64 rows")
    users = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1), storage=storage)
    ids = torch.arange(500)
    for begin in range(0, 500, 50):
        users(ids[begin : begin + 50]).sum().backward()
        users.optimizer.step()
    model = nn.ModuleDict({"users": users})
    whole = together(list(table_rows(model, "users", batch_rows=100)))
    assert torch.equal(whole["ids"], ids)
    assert torch.equal(whole["rows"], users.group.read(0, ids))
    assert whole["state exp_avg"].shape == (500, 4)


def test_a_name_that_ends_another_one() -> None:
    model = nn.ModuleDict({"more": nn.ModuleDict({"users": unsharded()["more"]})})
    model["users"] = td.DynamicEmbedding(8, optimizer=td.SGD(lr=0.1))
    model["users"](torch.arange(3)).sum().backward()
    assert [batch.rows.shape for batch in table_rows(model, "users")] == [(3, 8)]
    assert [batch.rows.shape for batch in table_rows(model, "users.users")] == [(50, 4)]


def test_packed_rows_are_refused() -> None:
    option = recis.EmbeddingOption(embedding_dim=4, shared_name="users", dtype=torch.int8)
    engine = recis.EmbeddingEngine({"users": option})
    with pytest.raises(NotImplementedError, match="table 'users' has packed rows, but columns of"):
        table_rows(engine, "users")


def test_refusals_without_ranks() -> None:
    model = unsharded()
    with pytest.raises(TypeError, match="table_rows: model is 3, expected a torch"):
        table_rows(3, "users")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="table_rows: gather is 'all', expected True or False"):
        table_rows(model, "items", gather="all")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="table_rows: batch_rows is -1, expected at least 1"):
        table_rows(model, "items", batch_rows=-1)
    with pytest.raises(TypeError, match=r"table_rows: batch_rows is 0\.5, expected int"):
        table_rows(model, "items", batch_rows=0.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="model, a Linear, has no dynamic tables: give what Distr"):
        table_rows(nn.Linear(2, 2), "users")
    config = EmbeddingBagConfig(
        name="users", embedding_dim=4, num_embeddings=9, feature_names=["user"]
    )
    static = EmbeddingBagCollection(tables=[config], device=torch.device("meta"))
    with pytest.raises(ValueError, match=r"table 'users' is static, expected a dynamic one"):
        table_rows(static, "users")
