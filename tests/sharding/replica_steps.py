"""What the ranks of test_replicas do: two sharding groups of two ranks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from record_dict import RecordDict
from replica_oracle import Shard, decayed_to_counts, expected, shard_of, waiting_count
from sharded_models import Model, Table, kernels, module_plan
from table_content import content
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.types import ShardingPlan, ShardingStrategy

import torch_dynemb as td
from torch_dynemb.checkpoint.parts import parts_of
from torch_dynemb.recis import DynamicEmbedding, EmbeddingOption
from torch_dynemb.table.tables import exported
from torch_dynemb.table.waiting_counts import CountUpdate
from torch_dynemb.torchrec import (
    DynamicDMPCollection,
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    TableOptions,
    reshard,
)

GROUP = 2  # ranks of a sharding group
DEFAULT = TableOptions(initializer=td.Normal())


SHARDED = (
    Table("rows", 8, ("a",)),
    Table("whole", 8, ("b",), sharding="table_wise"),
    Table("columns", 8, ("c",), sharding="column_wise"),
)
COUNTED = {
    "rows": TableOptions(
        initializer=td.Normal(),
        policy=td.Policy(score="frequency", admission=td.AdmitFrequent(2)),
    ),
}


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
                name = f"round {turn} ({kind}) of {group.names[table]}"
                _compare(found, want, group.config.tables[table].policy, name)
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


# -- wrong arguments -----------------------------------------------------------------------------

ROWS = (Table("rows", 8, ("a",)),)


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


def fails_on_one_rank(rank: int) -> tuple[str, int]:
    """A sync that fails on one rank, in its last table, changes nothing on any rank."""
    model = replicated(SHARDED, options=COUNTED, optimizer=td.Adam(lr=0.1))
    for turn in range(2):
        train(model, SHARDED, 24, 100 * turn + 10 * rank)
        if turn == 0:
            model.sync()
    before = [shard_of(*of) for of in shards(model)]
    apply = CountUpdate.apply

    def failing(update: CountUpdate) -> None:
        apply(update)
        if rank == 2:
            raise MemoryError("no memory on rank 2")

    error = ""
    with mock.patch.object(CountUpdate, "apply", failing):
        try:
            model.sync()
        except MemoryError as raised:
            error = str(raised)
    for (group, table), of in zip(shards(model), before, strict=True):
        assert_same(shard_of(group, table), of, group.names[table])
    model.sync()
    return error, sum(len(of.entries) for of in check_equal(model))


# -- other tables and the dense part -------------------------------------------------------------


class Scored(nn.Module):
    """A model with a dense part, which DistributedDataParallel averages."""

    def __init__(self, model: Model, width: int) -> None:
        super().__init__()
        self.bags = model.bags
        self.dense = nn.Linear(width, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        scores: torch.Tensor = self.dense(self.bags(features).values()).squeeze(1)
        return scores


def static_beside_dynamic(rank: int) -> list[Any]:
    """Train static tables, dynamic ones and a dense part; return what a sync has made equal."""
    tables = (
        Table("rows", 8, ("a",)),
        Table("static", 8, ("b",), dynamic=False, num_embeddings=24),
    )
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    model = Model(tables, False)
    sharder = DynamicEmbeddingBagCollectionSharder(
        options={"rows": DEFAULT}, optimizer=td.RowWiseAdagrad(lr=0.1), fused_params=fused
    )
    plan = ShardingPlan({"bags": module_plan(model.bags, tables, sharder, ranks=GROUP)})
    torch.manual_seed(0)
    job = DynamicDMPCollection(
        Scored(model, 16),
        device=torch.device("cpu"),
        plan=plan,
        world_size=dist.get_world_size(),
        sharding_group_size=GROUP,
        global_pg=dist.group.WORLD,
        sharders=[sharder],
    )
    optimizer = torch.optim.SGD(job.module.dense.parameters(), lr=0.1)
    (static,) = job._default_ctx.weights_by_dtype.values()
    means = []
    for turn in range(2):
        for step in range(2):
            seed = 100 * turn + 10 * rank + step
            job(batch_of(tables, 24, seed)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            job.fused_optimizer.step()
        of_groups = replicas_of(job, [of.clone() for of in static])
        job.sync()
        check_equal(job)
        means += [
            (sum(of) / 2 - own).abs().max().item()
            for *of, own in zip(*of_groups, static, strict=True)
        ]
    dense = [of.tolist() for of in _of_all(job.module.dense.weight.detach())]
    return [means, dense, [of.tolist() for of in replicas_of(job, static[0].clone())]]


def synced_bytes(rank: int, ids: int, touched: Sequence[int]) -> list[tuple[int, int]]:
    """Bytes that a rank sends to sync a dynamic table, and a static one of the same rows.

    Args:
        ids: of both tables, with a value of state per row.
        touched: ids that each group trains before a sync.
    """
    tables = (Table("rows", 16, ("a",), num_embeddings=ids),)
    static = (replace(tables[0], dynamic=False),)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    ours = replicated(tables, optimizer=td.RowWiseAdagrad(lr=0.1))
    theirs = replicated(static, fused_params=fused, custom_all_reduce=_counted)
    result = []
    for count in (ids, *touched):
        some = torch.arange(count) * (ids // max(count, 1))
        features = KeyedJaggedTensor(["a"], some, lengths=torch.tensor([count]))
        _reduced.clear()
        for model in (ours, theirs):
            model(features)["a"].sum().backward()
            model.fused_optimizer.step()
            model.sync()
        check_equal(ours)
        assert ours.last_sync is not None
        # a ring all-reduce sends each byte 2 (n - 1) / n times
        groups = ours.replica_group.size()
        result.append((ours.last_sync.sent_bytes, sum(_reduced) * 2 * (groups - 1) // groups))
    return result[1:]


_reduced: list[int] = []


def _counted(tensors: list[torch.Tensor]) -> None:
    _reduced.extend(tensor.nbytes for tensor in tensors)


class WithItems(nn.Module):
    """A collection of TorchRec, and a module of RecIS in the same model."""

    def __init__(self, model: Scored, items: nn.Module) -> None:
        super().__init__()
        self.scored, self.items = model, items

    def forward(self, features: KeyedJaggedTensor, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.scored(features)[:2] + self.items(ids).sum(1)
        return scores


def recis_beside(rank: int) -> tuple[str, list[int]]:
    """Train RecIS's module, which all ranks share, beside a table that sharding groups copy.

    Returns:
        The error of a model that has both, and the ids of RecIS's table on this rank.
    """
    sharder = DynamicEmbeddingBagCollectionSharder(
        options={"rows": DEFAULT}, optimizer=td.SGD(lr=0.1)
    )
    assert dist.group.WORLD is not None

    def job_of(model: nn.Module, path: str, bags: Any) -> DynamicDMPCollection:
        assert dist.group.WORLD is not None
        return DynamicDMPCollection(
            model,
            device=torch.device("cpu"),
            plan=ShardingPlan({path: module_plan(bags, ROWS, sharder, ranks=GROUP)}),
            world_size=dist.get_world_size(),
            sharding_group_size=GROUP,
            global_pg=dist.group.WORLD,
            sharders=[sharder],
        )

    items = DynamicEmbedding(EmbeddingOption(embedding_dim=8, shared_name="items", combiner="sum"))
    inside = Scored(Model(ROWS, False), 8)
    together = job_of(WithItems(inside, items), "scored.bags", inside.bags)
    ids = torch.arange(8).view(2, 4) + 4 * rank
    error = ""
    try:
        together(batch_of(ROWS, 24, rank), ids)
    except td.errors.ReplicatedTableError as raised:
        error = str(raised)
    alone = Scored(Model(ROWS, False), 8)
    job = job_of(alone, "bags", alone.bags)
    for step in range(2):
        scores = job(batch_of(ROWS, 24, 10 * rank + step))[:2] + items(ids + step).sum(1)
        scores.square().sum().backward()
        job.fused_optimizer.step()
    job.sync()
    check_equal(job)
    return error, [
        id
        for part in parts_of(items)
        for batch in exported(part.group.tables, part.table, 1 << 20)
        for id in batch.ids.tolist()
    ]


# -- checkpoints ---------------------------------------------------------------------------------


def saves_and_loads(rank: int, path: str) -> dict[str, Any]:
    """Save a model of two groups from the first one, and load it in both, and in a group alone."""

    tables = (*SHARDED, Table("static", 8, ("d",), dynamic=False, num_embeddings=24))
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}

    def job() -> DynamicDMPCollection:
        optimizer = td.Adam(lr=0.1)
        return replicated(tables, options=COUNTED, optimizer=optimizer, fused_params=fused)

    def static_of(model: DynamicDMPCollection) -> list[torch.Tensor]:
        (weights,) = model._default_ctx.weights_by_dtype.values()
        return [weight.clone() for weight in weights]

    model = job()
    for step in range(3):
        train(model, tables, 24, 10 * rank + step)
    model.sync()
    saved = check_equal(model)
    result: dict[str, Any] = {}
    try:
        td.checkpoint.save(f"{path}/wrong", model)
    except ValueError as error:
        result["save"] = str(error)
    if model.in_first_group:
        td.checkpoint.save(f"{path}/right", model, process_group=model.sharding_group)
    dist.barrier()
    loaded = job()
    train(loaded, tables, 24, 7 + rank)  # content that the load replaces
    loaded.sync()
    td.checkpoint.load(f"{path}/right", loaded, process_group=loaded.sharding_group)
    for found, of in zip(check_equal(loaded), saved, strict=True):
        found.clock = of.clock if found.clock[2] == of.clock[2] else found.clock
        assert_same(found, of, "loaded")
    for weight, of in zip(static_of(loaded), static_of(model), strict=True):
        assert torch.equal(weight, of)
    for both in (model, loaded):
        train(both, tables, 24, 1000 + rank)
        both.sync()
    for found, of in zip(check_equal(loaded), check_equal(model), strict=True):
        assert_same(found, of, "trained on")
    # in one group alone
    if model.in_first_group:
        td.checkpoint.load(f"{path}/right", loaded, process_group=loaded.sharding_group)
    train(loaded, tables, 24, 2000 + rank)
    try:
        loaded.sync()
    except ValueError as error:
        result["load"] = str(error)
    result["rows"] = sum(group.size(table) for group, table in shards(model))
    return result


def logs(rank: int, path: str) -> dict[str, Any]:
    """The first group publishes each sync to a delta log, which a model of that group follows."""
    model = replicated(SHARDED, options=COUNTED, optimizer=td.Adam(lr=0.1))
    other = replicated(SHARDED, options=COUNTED, optimizer=td.Adam(lr=0.1))
    result: dict[str, Any] = {"rows": []}
    try:
        td.checkpoint.DeltaLog(f"{path}/wrong", every_steps=1).attach(model)
    except ValueError as error:
        result["attach"] = str(error)
    log = follower = None
    if model.in_first_group:
        log = td.checkpoint.DeltaLog(
            f"{path}/log", every_steps=1, process_group=model.sharding_group
        )
        log.attach(model)
        td.checkpoint.load(f"{path}/log/base", other, process_group=other.sharding_group)
        follower = td.checkpoint.follow(f"{path}/log", other)
    for turn in range(3):
        train(model, SHARDED, 24, 100 * turn + 10 * rank)
        model.sync()
        if log is not None and follower is not None:
            log.step()
            log.flush()
            follower.update()
            assert content(other, state=False) == content(model, state=False)
        result["rows"].append(sum(group.size(table) for group, table in shards(model)))
    if log is not None:
        log.close()
    dist.barrier()
    return result
