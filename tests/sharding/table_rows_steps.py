"""What the ranks of test_table_rows do: they train tables, and stream their rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
import torchrec
from jagged_batches import batches_of_ranks, keyed_jagged
from planner_cases import machine, nothing_reserved
from sharded_models import Table, sharded
from torch import Tensor, nn
from torchrec.distributed.model_parallel import DistributedModelParallel

import torch_dynemb as td
from torch_dynemb.rows import read
from torch_dynemb.table.content import read_content
from torch_dynemb.torchrec import (
    DynamicEmbeddingCollectionSharder,
    DynamicEmbeddingShardingPlanner,
    TableOptions,
    local_shards,
    table_rows,
)

BATCH_ROWS = 7
FREQUENCY = td.Policy(score=("step", "frequency"))
OPTIMIZERS = {
    "adam": td.Adam(lr=0.1, row_steps=True),
    "rowwise": td.RowWiseAdagrad(lr=0.1),
    "8 bits": td.Adam(lr=0.1, state_dtype=torch.uint8),
}


class Shard(NamedTuple):
    """What a rank has of a table, read shard by shard."""

    table: str
    first_column: int
    ids: Tensor
    rows: Tensor
    state: dict[str, Tensor]
    scores: dict[str, Tensor]


class Streamed(NamedTuple):
    """What a rank has read.

    Attributes:
        whole: batches of all ranks, by table.
        own: batches without another rank, by table.
        shards: what this rank has.
    """

    whole: dict[str, list[td.RowBatch]]
    own: dict[str, list[td.RowBatch]]
    shards: list[Shard]


def trained(
    rank: int, tables: Sequence[Table], optimizer: str, policy: td.Policy = FREQUENCY
) -> DistributedModelParallel:
    options = {
        table.name: TableOptions(initializer=td.Normal(), policy=policy)
        for table in tables
        if table.dynamic
    }
    model = sharded(tables, optimizer=OPTIMIZERS[optimizer], options=options)
    train(rank, model, tables, range(3))
    return model


def train(rank: int, model: nn.Module, tables: Sequence[Table], steps: range) -> None:
    features = list(dict.fromkeys(name for table in tables for name in table.features))
    for step in steps:
        batches = batches_of_ranks("plain", features, dist.get_world_size(), step)
        outputs = model(keyed_jagged(batches[rank], "plain"))
        torch.stack([of.square().sum() for of in outputs.values()]).sum().backward()
        model.fused_optimizer.step()


def shards_of(model: nn.Module) -> Iterator[Shard]:
    for local in local_shards(model):
        tables = local.group.tables
        content = read_content(tables, local.number)
        yield Shard(
            local.table,
            local.shard.first_column,
            content.ids,
            content.rows,
            content.state,
            content.scores,
        )


def streamed(rank: int, tables: Sequence[Table], optimizer: str) -> Streamed:
    model = trained(rank, tables, optimizer)
    names = [
        f"{'sequences' if table.pooling == 'none' else 'bags'}.{table.name}" for table in tables
    ]
    return Streamed(
        {name: list(table_rows(model, name, batch_rows=BATCH_ROWS)) for name in names},
        {
            name: list(table_rows(model, name, gather=False, batch_rows=BATCH_ROWS))
            for name in names
        },
        list(shards_of(model)),
    )


def shared_by_ids(rank: int) -> tuple[list[td.RowBatch], list[td.RowBatch]]:
    """What a rank gets of a table that ranks share without TorchRec: all of it, and its own."""
    users = td.DynamicEmbedding(
        4, name="users", optimizer=td.Adagrad(lr=0.1), process_group=dist.group.WORLD
    )
    users(torch.arange(40 * rank, 40 * rank + 50)).sum().backward()
    users.optimizer.step()
    model = nn.ModuleDict({"users": users})
    return list(table_rows(model, "users")), list(table_rows(model, "users", gather=False))


# -- errors ----------------------------------------------------------------------------------------


def error_of(work: Callable[[], object]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


BAGS = (Table("users", 8, ("a",)), Table("days", 8, ("b",), dynamic=False))
COLUMNS = (Table("users", 8, ("a",), sharding="column_wise"),)


def refused(rank: int) -> dict[str, str]:
    """What all ranks raise where both or only one has a wrong argument."""
    model = trained(rank, BAGS, "adam")
    arguments: dict[str, list[tuple[str, dict[str, Any]]]] = {
        "unknown": [("usres", {})] * 2,
        "unknown alone": [("usres", {"gather": False})] * 2,
        "unknown on a rank": [("users", {}), ("usres", {})],
        "static": [("bags.days", {})] * 2,
        "different": [("users", {"batch_rows": 3}), ("users", {"batch_rows": 4})],
        "batch_rows on a rank": [("users", {"batch_rows": 0}), ("users", {})],
        "no name": [(3, {})] * 2,  # type: ignore[list-item]
    }
    return {
        case: error_of(lambda of=of: table_rows(model, of[rank][0], **of[rank][1]))  # type: ignore[misc]
        for case, of in arguments.items()
    }


def failures(rank: int) -> dict[str, str]:
    """What all ranks raise where an iteration fails, or the tables change meanwhile."""
    raised = {}
    model = trained(rank, BAGS, "adam")

    def rest(batches: Iterator[td.RowBatch]) -> int:
        return sum(batch.ids.numel() for batch in batches)

    batches = table_rows(model, "users", batch_rows=4)
    next(batches)
    with mock.patch.object(read, "read_rows", _failing if rank == 1 else _unchanged):
        raised["read"] = error_of(lambda: rest(batches))
    batches = table_rows(model, "users", batch_rows=4)
    next(batches)
    train(rank, model, BAGS, range(3, 4))
    raised["trained"] = error_of(lambda: rest(batches))

    model = trained(rank, COLUMNS, "adam")
    batches = table_rows(model, "users", batch_rows=4)
    first = next(batches)
    (local,) = local_shards(model)
    if rank == 1:
        kept = torch.cat([batch.ids for batch in table_rows(model, "users", gather=False)])
        gone = kept[~torch.isin(kept, first.ids)][:1]
        local.group.erase(local.number, gone)
    raised["other ids"] = error_of(lambda: rest(batches))
    raised["other sizes"] = error_of(lambda: rest(table_rows(model, "users")))
    return raised


_unchanged = read.read_rows


def _failing(*arguments: Any, **options: Any) -> Any:
    raise OSError("read_rows: the disk has failed")


# -- an index of items -----------------------------------------------------------------------------

ITEMS = 300
DIM = 8


class TwoTowers(nn.Module):
    """Queries and items that are retrieved by the inner product of their embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = torchrec.EmbeddingCollection(
            device=torch.device("meta"),
            tables=[
                torchrec.EmbeddingConfig(
                    name=f"{name}_table",
                    embedding_dim=DIM,
                    num_embeddings=1000,
                    feature_names=[name],
                )
                for name in ("query", "item")
            ],
        )

    def forward(self, features: torchrec.KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        found = self.embeddings(features)
        return found["query"].values(), found["item"].values()


class Index:
    """The interface of an index for nearest neighbours that is filled by batches."""

    def __init__(self) -> None:
        self._ids: list[Tensor] = []
        self._vectors: list[Tensor] = []

    def add_with_ids(self, vectors: Tensor, ids: Tensor) -> None:
        self._ids.append(ids)
        self._vectors.append(vectors)

    def search(self, queries: Tensor, k: int) -> Tensor:
        scores = queries @ torch.cat(self._vectors).T
        return torch.cat(self._ids)[scores.topk(k).indices]


def retrieved(rank: int) -> tuple[Tensor, Tensor, float]:
    """Ids that an index of all items finds, their true order, and how often a pair was found.

    Queries and items with the same number belong together. Ids of items are their hashes.
    """
    torch.manual_seed(5)
    sharder = DynamicEmbeddingCollectionSharder(
        tables="all",
        options=TableOptions(initializer=td.Normal(std=0.3)),
        optimizer=td.Adam(lr=0.05),
    )
    model = TwoTowers()
    planner = DynamicEmbeddingShardingPlanner(
        topology=machine(), storage_reservation=nothing_reserved(), debug=False
    )
    plan = planner.collective_plan(model, [sharder])
    towers = DistributedModelParallel(
        model, device=torch.device("cpu"), plan=plan, sharders=[sharder]
    )
    numbers = torch.arange(ITEMS)
    ids = numbers * 2**53 - 12345
    for step in range(100):
        torch.manual_seed(10 * step + rank)
        drawn = torch.randperm(ITEMS)[:100]
        queries, items = towers(features_of(drawn, ids[drawn]))
        nn.functional.cross_entropy(queries @ items.T, torch.arange(100)).backward()
        towers.fused_optimizer.step()

    index = Index()
    for batch in table_rows(towers, "item_table", batch_rows=32):
        index.add_with_ids(batch.rows, batch.ids)

    towers.eval()
    with torch.no_grad():
        queries, items = towers(features_of(numbers, ids))
    found = index.search(queries, 3)
    expected = ids[(queries @ items.T).topk(3).indices]
    return found, expected, (found[:, 0] == ids).float().mean().item()


def features_of(queries: Tensor, items: Tensor) -> torchrec.KeyedJaggedTensor:
    return torchrec.KeyedJaggedTensor(
        ["query", "item"],
        torch.cat([queries, items]),
        lengths=torch.ones(2 * queries.numel(), dtype=torch.int64),
    )
