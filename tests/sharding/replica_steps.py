"""Steps of test_replicas: syncs against an oracle, refusals and failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from record_dict import RecordDict
from replica_models import (
    COUNTED,
    DEFAULT,
    GROUP,
    ROWS,
    SHARDED,
    assert_same,
    batch_of,
    check_equal,
    of_all,
    replicas_of,
    replicated,
    shards,
    train,
)
from replica_oracle import Shard, decayed_to_counts, expected, shard_of, waiting_count
from sharded_models import Table
from torch import nn
from torchrec.distributed.types import ShardingStrategy

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicDMPCollection,
    TableOptions,
    reshard,
)
from torch_dynemb.torchrec.replicas import table_merge


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
        with mock.patch.object(table_merge, "_BLOCK_BYTES", 512):  # a table has several blocks
            model.sync()
        try:
            before = check_equal(model)
            for (group, table), found, want in zip(shards(model), before, wanted, strict=True):
                name = f"round {turn} ({kind}) of {group.names[table]}"
                _compare(found, want, group.config.tables[table].policy, name)
        except AssertionError as error:  # the others would wait
            failures.append(f"round {turn} ({kind}): {error}")
        if any(replicas_of(model, bool(failures))):
            break
        sizes.append(sum(group.size(table) for group, table in shards(model)))
    if any(of_all(failures)):
        raise AssertionError("\n".join(failures) or "another rank failed")
    return sizes


def _compare(found: Shard, wanted: Shard, policy: td.Policy, what: str) -> None:
    if policy.admission_ticks:
        assert found.counts.keys() == wanted.counts.keys(), (what, found.counts, wanted.counts)
        for id, count in wanted.counts.items():
            own = waiting_count(found.counts[id], policy.admission_ticks, wanted.clock)
            assert abs(own - count) <= 10, (what, id, own, count)
        wanted.counts = found.counts
    ticks = policy.half_life_ticks
    if ticks == 0:
        assert_same(found, wanted, what)
        return
    assert found.entries.keys() == wanted.entries.keys(), what
    exact = {id: dict(entry.scores) for id, entry in found.entries.items()}
    decayed_to_counts(found, ticks, wanted.clock)
    for id, entry in wanted.entries.items():
        scores = found.entries[id].scores
        near = abs(scores["decayed"] - entry.scores.pop("decayed")) <= 10
        assert near, (what, id, scores, entry)
        scores.pop("decayed")
        assert found.entries[id].same(entry), (what, id)
        found.entries[id].scores = exact[id]


def change(model: DynamicDMPCollection, case: Case, kind: str, number: int, seed: int) -> None:
    """What a rank does between two syncs."""
    for group, table in shards(model):
        if group.config.tables[table].policy.custom is not None:
            group.scores.set_batch(table, seed // 10 % 7)  # by sharding group and turn
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


def refused(rank: int, kind: str, path: str) -> str:
    """The error of a construction that all ranks refuse.

    Args:
        path: of files of rows.
    """
    options = {"rows": DEFAULT}
    more: dict[str, Any] = {}
    optimizer: Any = td.SGD(lr=0.1)
    tables = ROWS
    if kind == "size":
        more["sharding_group_size"] = 3
    elif kind == "size of one rank":
        more["sharding_group_size"] = 4 if rank == 1 else GROUP
    elif kind == "world":
        more["world_size"] = 8
    elif kind == "plan":
        more["sharding_group_size"] = 1
    elif kind == "plan of one rank":
        tables = (Table("rows", 8, ("a",), sharding="table_wise" if rank == 2 else "row_wise"),)
    elif kind == "options of one rank":
        options = {"rows": TableOptions(policy=td.Policy(capacity=100 + rank // 3))}
    elif kind == "strategy":
        more["sharding_strategy"] = ShardingStrategy.FULLY_SHARDED
    elif kind == "8-bit":
        optimizer = td.Adam(lr=0.1, state_dtype=torch.uint8)
    elif kind == "sketch":
        rule = td.AdmitFrequentSketch(2, memory=1 << 10)
        options = {"rows": TableOptions(policy=td.Policy(admission=rule))}
    elif kind == "disk":
        options = {"rows": TableOptions(storage=td.SSDStore(path, cache=1 << 16))}
    elif kind == "dict":
        options = {"rows": TableOptions(storage=td.ExternalStore(RecordDict(), cache=1 << 16))}
    elif kind == "modules":
        more["submodule_configs"] = [object()]
    elif kind == "group":
        more["global_pg"] = None
    try:
        replicated(tables, options=options, optimizer=optimizer, **more)
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was refused"


def refused_calls(rank: int) -> list[str]:
    """Errors of calls in a wrong moment; then training goes on and syncs."""
    options = {
        "rows": TableOptions(initializer=td.Normal(), split=True),
        "full": TableOptions(policy=td.Policy(capacity=16, on_full="error", score="step")),
    }
    tables = (*ROWS, Table("full", 8, ("b",), sharding="table_wise"))
    model = replicated(tables, options=options, optimizer=td.SGD(lr=0.1))
    number = model.replica_group.rank()
    errors = []

    def refuses(call: Callable[[], Any]) -> None:
        before = [shard_of(*of) for of in shards(model)]
        try:
            call()
        except (RuntimeError, NotImplementedError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")
        for (group, table), of in zip(shards(model), before, strict=True):
            assert_same(shard_of(group, table), of, group.names[table])

    refuses(lambda: model.sync(include_optimizer_state=False))
    refuses(model.state_dict)
    refuses(lambda: model.load_state_dict({}))
    refuses(lambda: reshard(model, model.plan))
    outputs = model(batch_of(tables, 8, rank))
    sum(of.sum() for of in outputs.values()).backward()
    if number == 1:
        model.fused_optimizer.step()
    refuses(model.sync)  # gradients of group 0 are pending
    model.fused_optimizer.zero_grad() if number == 0 else None
    model.sync()
    check_equal(model)
    for group, table in shards(model):
        if group.names[table] == "full":
            group.insert(table, torch.arange(100 * (number + 1), 100 * (number + 1) + 8))
    refuses(model.sync)  # both groups have room for their ids, but not for those of both
    for group, table in shards(model):
        if group.names[table] == "full":
            group.remove(table, predicate=lambda ids, _: ids >= 200)
    model.sync()
    check_equal(model)
    return errors


def fails_on_one_rank(rank: int, kind: type, method: str) -> tuple[str, int]:
    """A sync that fails on one rank, after a method, changes nothing on any rank."""
    model = replicated(SHARDED, options=COUNTED, optimizer=td.Adam(lr=0.1))
    for turn in range(2):
        train(model, SHARDED, 24, 100 * turn + 10 * rank)
        if turn == 0:
            model.sync()
    before = [shard_of(*of) for of in shards(model)]
    done = getattr(kind, method)

    def failing(*arguments: Any) -> Any:
        result = done(*arguments)
        if rank == 2:
            raise MemoryError("no memory on rank 2")
        return result

    error = ""
    with mock.patch.object(kind, method, failing):
        try:
            model.sync()
        except MemoryError as raised:
            error = str(raised)
    for (group, table), of in zip(shards(model), before, strict=True):
        assert_same(shard_of(group, table), of, group.names[table])
    model.sync()
    return error, sum(len(of.entries) for of in check_equal(model))
