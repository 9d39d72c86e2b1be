"""What the ranks of test_replicas do: two sharding groups of two ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from replica_oracle import Shard, decayed_to_counts, expected, shard_of
from sharded_models import Model, Table, kernels, module_plan
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingPlan

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicDMPCollection,
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    TableOptions,
)

GROUP = 2  # ranks of a sharding group
DEFAULT = TableOptions(initializer=td.Normal())


@dataclass(frozen=True)
class Case:
    """A model and what is trained between syncs.

    Attributes:
        tables: of the model.
        options: by table; default: a normal distribution.
        optimizer: of dynamic tables.
        rounds: what happens before each sync: ``"train"``, ``"one group"`` trains, ``"remove"``
            also removes ids in one group, ``"nothing"``, ``"readmit"`` removes ids that a group
            trains again.
        ids: of a feature.
    """

    tables: tuple[Table, ...]
    options: dict[str, TableOptions] = field(default_factory=dict)
    optimizer: Any = field(default_factory=lambda: td.Adam(lr=0.1))
    rounds: tuple[str, ...] = ("train", "one group", "remove", "nothing", "readmit", "train")
    ids: int = 24


def plan_of(model: Model, tables: Sequence[Table], sharders: Sequence[Any]) -> ShardingPlan:
    """A plan for one sharding group."""
    plan = {}
    for name, sharder in zip(("bags", "sequences"), sharders, strict=True):
        of = [table for table in tables if (table.pooling == "none") == (name == "sequences")]
        if of:
            plan[name] = module_plan(getattr(model, name), of, sharder, ranks=GROUP)
    return ShardingPlan(plan)


def replicated(
    tables: Sequence[Table],
    *,
    options: dict[str, TableOptions] | None = None,
    optimizer: Any = None,
    weighted: bool = False,
    prepare: Callable[[Model], None] | None = None,
    fused_params: dict[str, Any] | None = None,
    **more: Any,
) -> DynamicDMPCollection:
    """A model on two sharding groups."""
    model = Model(tables, weighted)
    if prepare is not None:
        prepare(model)
    given = {of.name: (options or {}).get(of.name, DEFAULT) for of in tables if of.dynamic}
    sharders: list[Any] = [
        kind(options=given, optimizer=optimizer, fused_params=fused_params)
        for kind in (DynamicEmbeddingBagCollectionSharder, DynamicEmbeddingCollectionSharder)
    ]
    arguments: dict[str, Any] = {
        "device": torch.device("cpu"),
        "plan": plan_of(model, tables, sharders),
        "world_size": dist.get_world_size(),
        "sharding_group_size": GROUP,
        "global_pg": dist.group.WORLD,
        "sharders": sharders,
        **more,
    }
    return DynamicDMPCollection(model, **arguments)


def batch_of(tables: Sequence[Table], ids: int, seed: int) -> KeyedJaggedTensor:
    """Some bags of each feature."""
    draw = random.Random(seed)
    features = list(dict.fromkeys(name for table in tables for name in table.features))
    lengths = [draw.randrange(4) for _ in features for _ in range(3)]
    values = [draw.randrange(ids) for _ in range(sum(lengths))]
    return KeyedJaggedTensor(
        features,
        torch.tensor(values, dtype=torch.int64),
        lengths=torch.tensor(lengths, dtype=torch.int64),
    )


def train(model: nn.Module, tables: Sequence[Table], ids: int, seed: int) -> None:
    """A training step; the ranks of a sharding group make it together."""
    outputs = model(batch_of(tables, ids, seed))
    sum((of.square() + of).sum() for of in outputs.values()).backward()
    model.fused_optimizer.step()  # type: ignore[operator, union-attr]


def shards(model: nn.Module) -> Iterator[tuple[Any, int]]:
    """All dynamic tables on this rank: their group and number."""
    for kernel in kernels(model):
        group = kernel.tables.group
        yield from ((group, table) for table in range(len(group.names)))


def replicas_of(model: DynamicDMPCollection, value: Any) -> list[Any]:
    """A value of each sharding group."""
    gathered: list[Any] = [None] * model.replica_group.size()
    dist.all_gather_object(gathered, value, group=model.replica_group)
    return gathered


def check_equal(model: DynamicDMPCollection) -> list[Shard]:
    """Raises AssertionError unless all sharding groups have the same bits; returns the shards."""
    mine = [shard_of(*of) for of in shards(model)]
    for others in replicas_of(model, mine):
        for own, other in zip(mine, others, strict=True):
            assert_same(own, other, "a replica")
    return mine


def assert_same(own: Shard, other: Shard, what: str) -> None:
    """Raises AssertionError unless two shards have the same bits."""
    assert own.entries.keys() == other.entries.keys(), (
        what,
        sorted(own.entries.keys() ^ other.entries.keys()),
    )
    for id, entry in own.entries.items():
        assert entry.same(other.entries[id]), (what, id, entry, other.entries[id])
    assert own.counts == other.counts, (what, own.counts, other.counts)
    assert own.clock == other.clock, (what, own.clock, other.clock)


def syncs_as_expected(rank: int, case: Case) -> list[int]:
    """Raises AssertionError unless each sync gives what the oracle says, in all groups.

    Returns:
        By round, the ids that are in the tables of this rank.
    """
    model = replicated(case.tables, options=case.options, optimizer=case.optimizer)
    number = model.replica_group.rank()
    sizes = []
    before = check_equal(model)
    failures: list[str] = []
    for turn, kind in enumerate(case.rounds):
        change(model, case, kind, number, seed=100 * turn + 10 * rank)
        now = [shard_of(*of, before[k]) for k, of in enumerate(shards(model))]
        groups = replicas_of(model, now)
        wanted = [
            expected(*of, before[k], [group[k] for group in groups])
            for k, of in enumerate(shards(model))
        ]
        model.sync()
        try:
            before = check_equal(model)
            for (group, table), found, want in zip(shards(model), before, wanted, strict=True):
                ticks = group.config.tables[table].policy.half_life_ticks
                name = f"round {turn} ({kind}) of {group.names[table]}"
                _compare(found, want, ticks, name)
        except AssertionError as error:  # the others would wait
            failures.append(f"round {turn} ({kind}): {error}")
        if any(replicas_of(model, bool(failures))):
            break
        sizes.append(sum(group.size(table) for group, table in shards(model)))
    if any(_of_all(failures)):
        raise AssertionError("\n".join(failures) or "another rank failed")
    return sizes


def _of_all(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered


def _compare(found: Shard, wanted: Shard, ticks: int, what: str) -> None:
    if ticks == 0:
        assert_same(found, wanted, what)
        return
    assert found.entries.keys() == wanted.entries.keys(), what
    exact = {id: dict(entry.scores) for id, entry in found.entries.items()}
    decayed_to_counts(found, ticks, wanted.clock)
    for id, entry in wanted.entries.items():
        own = found.entries[id].scores
        near = abs(own["decayed"] - entry.scores.pop("decayed")) <= 10
        assert near, (what, id, own, entry)
        own.pop("decayed")
        assert found.entries[id].same(entry), (what, id)
        found.entries[id].scores = exact[id]


def change(model: DynamicDMPCollection, case: Case, kind: str, number: int, seed: int) -> None:
    """What a rank does between two syncs."""
    trains = {"train": (0, 1), "one group": (1,), "remove": (0, 1), "readmit": (0, 1)}
    if kind == "remove" and number == 0:
        _erase(model, every=3)
    if kind == "readmit" and number == 1:
        _erase(model, every=2)
    for step in range(2 if number in trains.get(kind, ()) else 0):
        train(model, case.tables, case.ids, seed + step)
    if kind == "remove" and number == 1:
        _erase(model, every=4)


def _erase(model: nn.Module, every: int) -> None:
    for group, table in shards(model):
        group.remove(table, predicate=lambda ids, _: ids % every == 0)
