"""Models with another sharding at the load than at the save, and the content of their tables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from loaded_content import score_words
from seeding import seeded
from sharded_models import Table, kernels, plan_of, sharded
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

import torch_dynemb as td
from torch_dynemb.ops.columns import SKETCH_ROWS, Clock, PolicyColumn
from torch_dynemb.table.content import read_content, read_counts
from torch_dynemb.table.group import TableGroup
from torch_dynemb.torchrec import TableOptions

DIM = 16
SAMPLES = 8
VOCABULARY = 32  # of TorchRec's own tables; their names begin with "static"
START = 1_000_000  # what clocks say first
POLICIES = {
    "plain": td.Policy(),
    "times": td.Policy(score=("timestamp", "frequency"), ttl=2**40),
    "counted": td.Policy(admission=td.AdmitFrequent(2)),
    "sketched": td.Policy(admission=td.AdmitFrequentSketch(2, memory="4KiB")),
    "evicting": td.Policy(score="frequency", capacity=40),
}
OPTIMIZERS = {
    "adam": td.Adam(lr=0.05, row_steps=True),
    "adagrad": td.Adagrad(lr=0.05),
    "rowwise": td.RowWiseAdagrad(lr=0.05),
    "adam of 16 bits": td.Adam(lr=0.05, row_steps=True, state_dtype=torch.bfloat16),
    "8 bits": td.Adam(lr=0.05, state_dtype=torch.uint8),
    "sgd": td.SGD(lr=0.05),
}


@dataclass(frozen=True)
class Kind:
    """A table, and how it is sharded where it is saved and where it is loaded.

    Attributes:
        policy: of ``POLICIES``.
        dtypes: of its rows here and there.
        capacity: where it is loaded; None: that of the policy.
        trainable: here and there.
        split: gradients are pending until the optimizer's step.
        dynamic: False: a table of TorchRec's.
    """

    name: str
    shardings: tuple[str, str]
    policy: str = "plain"
    pooling: str = "sum"
    dtypes: tuple[str, str] = ("FP32", "FP32")
    capacity: int | None = None
    trainable: tuple[bool, bool] = (True, True)
    split: bool = False
    dynamic: bool = True


def every_change(pooled: Sequence[str], unpooled: Sequence[str]) -> tuple[Kind, ...]:
    """A table for each change from one sharding to another; they take turns in policies."""
    policies = list(POLICIES)
    pairs = [(a, b, "sum") for a in pooled for b in pooled]
    pairs += [(a, b, "none") for a in unpooled for b in unpooled]
    return tuple(
        Kind(f"{pooling}_{a}_{b}", (a, b), policies[n % len(policies)], pooling)
        for n, (a, b, pooling) in enumerate(pairs)
    )


def _table(kind: Kind, side: int) -> Table:
    return Table(
        kind.name,
        DIM,
        (kind.name,),
        kind.pooling,
        kind.shardings[side],
        dynamic=kind.dynamic,
        data_type=kind.dtypes[side],
        num_embeddings=VOCABULARY,
    )


def plan_of_side(kinds: Sequence[Kind], side: int) -> Any:
    """The plan of :func:`sharded_model`."""
    return plan_of([_table(kind, side) for kind in kinds])


def _policy(kind: Kind, side: int) -> td.Policy:
    policy = POLICIES[kind.policy]
    if side == 1 and kind.capacity is not None:
        return td.Policy(score=policy.score, capacity=kind.capacity, ttl=policy.ttl)
    return policy


def sharded_model(kinds: Sequence[Kind], side: int, optimizer: str, seed: int = 0) -> Any:
    """A DistributedModelParallel with a dense layer; side 0: as it is saved, 1: as it is loaded."""
    torch.manual_seed(seed)

    def prepare(model: nn.Module) -> None:
        model.over = nn.Linear(DIM, DIM)

    with mock.patch("time.time", return_value=float(START)):
        return sharded(
            [_table(kind, side) for kind in kinds],
            options={
                kind.name: TableOptions(
                    initializer=td.Normal(),
                    policy=_policy(kind, side),
                    trainable=kind.trainable[side],
                    split=kind.split,
                )
                for kind in kinds
                if kind.dynamic
            },
            optimizer=OPTIMIZERS[optimizer],
            fused_params={"learning_rate": 0.05},
            prepare=prepare,
        )


class Unsharded(nn.Module):
    """The same on one process, without TorchRec."""

    def __init__(self, kinds: Sequence[Kind], side: int, optimizer: str) -> None:
        super().__init__()
        dtypes = {"FP32": torch.float32, "BF16": torch.bfloat16}

        def configs(pooled: bool) -> list[td.TableConfig]:
            return [
                td.TableConfig(
                    kind.name,
                    DIM,
                    (kind.name,),
                    initializer=td.Normal(),
                    policy=_policy(kind, side),
                    dtype=dtypes[kind.dtypes[side]],
                )
                for kind in kinds
                if (kind.pooling != "none") == pooled
            ]

        shared: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer]}
        with mock.patch("time.time", return_value=float(START)):
            self.bags = td.DynamicEmbeddingBagCollection(configs(True), mode="sum", **shared)
            if configs(False):
                self.sequences = td.DynamicEmbeddingCollection(configs(False), **shared)
        self.over = nn.Linear(DIM, DIM)

    def collections(self) -> Iterator[Any]:
        """Those of tables."""
        yield self.bags
        if hasattr(self, "sequences"):
            yield self.sequences

    def forward(self, ids: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        pooled = list(self.bags.feature_names)
        flat = torch.cat([bag for name in pooled for bag in ids[name]])
        lengths = torch.tensor([len(bag) for name in pooled for bag in ids[name]])
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        outputs = self.bags.split(self.bags(td.KeyedJagged(pooled, flat, offsets, None)))
        if hasattr(self, "sequences"):
            names = self.sequences.feature_names
            outputs |= self.sequences({name: torch.cat(ids[name]) for name in names})
        return {name: self.over(of) for name, of in outputs.items()}


def bags_of(names: Iterable[str], step: int, vocabulary: int = 60) -> dict[str, list[Tensor]]:
    """The bags of all samples of a step; any ids, of any sign, but for tables with a vocabulary."""
    generator = seeded(step)
    result: dict[str, list[Tensor]] = {}
    for name in names:
        lengths = torch.randint(0, 5, (SAMPLES,), generator=generator).tolist()
        ids = [torch.randint(0, vocabulary, (n,), generator=generator) for n in lengths]
        static = name.startswith("static")
        result[name] = [of % VOCABULARY if static else of * 2**57 - 11 for of in ids]
    return result


@contextmanager
def clock_at(step: int, ahead: int = 0) -> Iterator[None]:
    """Clocks say so when a step ends."""
    with mock.patch("time.time", return_value=float(START + 100 * (step + 1) + ahead)):
        yield


def train(
    model: Any,
    rank: int,
    names: Sequence[str],
    steps: range,
    ahead: int = 0,
    *,
    ends_steps: bool = True,
) -> None:
    """Trains a sharded model on its rank's samples of batches that are the same for any ranks."""
    world = dist.get_world_size()
    mine = range(SAMPLES * rank // world, SAMPLES * (rank + 1) // world)
    dense = torch.optim.SGD(model.module.over.parameters(), lr=0.01)
    for step in steps:
        with clock_at(step, ahead):
            bags = [
                bag for of in bags_of(names, step).values() for bag in of[mine.start : mine.stop]
            ]
            features = KeyedJaggedTensor(
                keys=list(names),
                values=torch.cat(bags),
                lengths=torch.tensor([len(bag) for bag in bags]),
            )
            outputs = model(features)
            loss = torch.stack([of.square().sum() for of in outputs.values()]).sum()
            (loss * world / SAMPLES).backward()
            dense.step()
            dense.zero_grad()
            if ends_steps:
                model.fused_optimizer.step()


def train_unsharded(model: Unsharded, names: Sequence[str], steps: range) -> None:
    """The same on one process."""
    dense = torch.optim.SGD(model.over.parameters(), lr=0.01)
    for step in steps:
        with clock_at(step):
            outputs = model(bags_of(names, step))
            loss = torch.stack([of.square().sum() for of in outputs.values()]).sum()
            (loss / SAMPLES).backward()
            dense.step()
            dense.zero_grad()
            for collection in model.collections():
                collection.optimizer.step()


class Shard(NamedTuple):
    """What a shard holds.

    Attributes:
        ids: int64 [n], ascending.
        values: by name, ``rows``, ``state ...`` and ``scores``: [n, columns].
        counts: of ids that wait.
        sketch: int32 [rows, width], or None.
        steps: of its optimizer.
        clock: step and time.
        proposed: the time that this rank proposes, or None.
    """

    table: str
    first_column: int
    columns: int
    ids: Tensor
    values: dict[str, Tensor]
    counts: dict[int, int]
    sketch: Tensor | None
    steps: int
    clock: tuple[int, int]
    proposed: int | None


def equal_shards(one: Shard, other: Shard) -> bool:
    """Whether they hold the same, bit for bit."""
    if (one.table, one.first_column, one.columns) != (
        other.table,
        other.first_column,
        other.columns,
    ):
        return False
    if (one.counts, one.steps, one.clock) != (other.counts, other.steps, other.clock):
        return False
    if (one.sketch is None) != (other.sketch is None):
        return False
    pairs = [(one.ids, other.ids), *((of, other.values[name]) for name, of in one.values.items())]
    if one.sketch is not None and other.sketch is not None:
        pairs.append((one.sketch, other.sketch))
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


def shard_of(group: TableGroup, table: int, name: str, first_column: int = 0) -> Shard:
    """What a table of a group holds."""
    group.materialize()
    content = read_content(group.tables, table)
    waiting = read_counts(group.tables, table)
    layout = group.config.layout
    sketch = None
    if layout.rows and layout.rows[table].get(PolicyColumn.SKETCH_WIDTH, 0):
        begin = layout.rows[table][PolicyColumn.SKETCH_BEGIN]
        width = layout.rows[table][PolicyColumn.SKETCH_WIDTH]
        cells = group.index.sketch[begin : begin + SKETCH_ROWS * width]
        sketch = cells.reshape(SKETCH_ROWS, width).clone()
    return Shard(
        name,
        first_column,
        content.rows.shape[1],
        content.ids,
        {
            "rows": content.rows,
            "scores": score_words(content),
            **{f"state {key}": value for key, value in content.state.items()},
        },
        {}
        if waiting is None
        else dict(zip(waiting.ids.tolist(), waiting.counts.tolist(), strict=True)),
        sketch,
        int(group.rows.row_clock[table]),
        (int(group.index.clock[Clock.STEP]), int(group.index.clock[Clock.NOW])),
        None if group.clock.proposed is None else int(group.clock.proposed),
    )


def shards_of(model: nn.Module) -> list[Shard]:
    """What a sharded model holds on this rank."""
    return [
        shard_of(kernel.tables.group, number, shard.name, shard.first_column)
        for kernel in kernels(model)
        for number, shard in enumerate(kernel.tables.shards)
    ]


def shards_of_unsharded(model: Unsharded) -> list[Shard]:
    """What an unsharded one holds."""
    return [
        shard_of(collection.group, number, name)
        for collection in model.collections()
        for number, name in enumerate(collection.group.names)
    ]


class Whole(NamedTuple):
    """A table, whatever its shards.

    Attributes:
        ids, values: as of a shard, of all columns; a value per row is the mean over columns.
        counts: of ids that wait.
        steps: of its optimizer.
    """

    ids: Tensor
    values: dict[str, Tensor]
    counts: dict[int, int]
    steps: int


def whole_tables(of_ranks: Sequence[Sequence[Shard]]) -> dict[str, Whole]:
    """The tables that shards are of: by ids, then by columns."""
    by_table: dict[str, dict[int, list[Shard]]] = {}
    for shard in (shard for of_rank in of_ranks for shard in of_rank):
        by_table.setdefault(shard.table, {}).setdefault(shard.first_column, []).append(shard)
    return {name: _joined([of[first] for first in sorted(of)]) for name, of in by_table.items()}


def _joined(by_columns: list[list[Shard]]) -> Whole:
    parts = [_by_rows(shards) for shards in by_columns]
    widths = [shards[0].columns for shards in by_columns]
    first = parts[0]
    for part in parts[1:]:
        assert torch.equal(part.ids, first.ids)
        assert torch.equal(part.values["scores"], first.values["scores"])
        assert part.counts == first.counts
    values = {"scores": first.values["scores"]}
    for name in first.values.keys() - {"scores"}:
        of_parts = [part.values[name] for part in parts]
        if name == "rows" or of_parts[0].shape[1] > 1:
            values[name] = torch.cat(of_parts, 1)
        elif of_parts[0].is_floating_point():
            mean = sum(v.double() * w for v, w in zip(of_parts, widths, strict=True)) / sum(widths)
            values[name] = torch.as_tensor(mean).to(of_parts[0].dtype)
        else:
            values[name] = torch.stack(of_parts).amax(0)
    return first._replace(values=values)


def _by_rows(shards: list[Shard]) -> Whole:
    ids = torch.cat([shard.ids for shard in shards])
    order = torch.argsort(ids)
    assert torch.unique(ids).numel() == ids.numel()
    values = {
        name: torch.cat([shard.values[name] for shard in shards])[order]
        for name in shards[0].values
    }
    counts: dict[int, int] = {}
    for shard in shards:
        assert counts.keys().isdisjoint(shard.counts)
        counts |= shard.counts
    return Whole(ids[order], values, counts, max(shard.steps for shard in shards))
