"""What the ranks of test_live_resharding do."""

from __future__ import annotations

import gc
import itertools
import pkgutil
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoint_models import (
    Kind,
    equal_shards,
    plan_of_side,
    sharded_model,
    shards_of,
    train,
)
from checkpoint_steps import names_of, raised_by, same
from held_disk import held_disk
from jagged_batches import batches_of_ranks, keyed_jagged
from pipeline_steps import batches, model_of, optimizer_of
from record_dict import RecordDict
from sharded_models import Table, kernels, plan_of, sharded
from torch import Tensor, nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

import torch_dynemb as td
from torch_dynemb.delta_log.log import DeltaLog
from torch_dynemb.torchrec import TableOptions, reshard
from torch_dynemb.torchrec.planning.options import TableParams
from torch_dynemb.torchrec.resharding.moves import ReshardedTable

BEFORE, AFTER = range(3), range(3, 5)


class Moved(NamedTuple):
    """A model after its tables have moved, beside one that a checkpoint was loaded into.

    Attributes:
        tables: results of the move.
        loaded: ids that the load found, by table, and those it left out.
        unequal: tables with shards that differ between the two, after the move and after more
            training; and tensors of groups, for groups that were not loaded in place.
        first: ids of the shards of this rank.
        evicted: ids that these shards have evicted, at the end.
        plan: sharding types in the model's plan.
        entries: of the state dict, that differ between the two.
    """

    tables: dict[str, ReshardedTable]
    loaded: dict[str, tuple[int, int]]
    unequal: list[str]
    first: list[int]
    evicted: int
    plan: dict[str, str]
    entries: list[str]


def _types(model: Any) -> dict[str, str]:
    return {
        name: of.sharding_type for part in model.plan.plan.values() for name, of in part.items()
    }


def _types_of(plan: Any) -> dict[str, str]:
    return {name: of.sharding_type for part in plan.values() for name, of in part.items()}


def _raw(model: Any) -> list[dict[str, Tensor]]:
    return [kernel.tables.group.state.tensors() for kernel in kernels(model)]


def _unequal(model: Any, other: Any, when: str) -> list[str]:
    """What two models hold that is not the same bit for bit."""
    found = [
        f"{when}: {one.table} from column {one.first_column}"
        for one, two in zip(shards_of(model), shards_of(other), strict=True)
        if not equal_shards(one, two) or one.proposed != two.proposed
    ]
    for one, two in zip(_raw(model), _raw(other), strict=True):
        # its counts of calls are those of another life
        found += [
            f"{when}: {n}" for n in one if n != "row_clock" and not torch.equal(one[n], two[n])
        ]
    return found


def _local(model: Any) -> dict[str, list[Tensor]]:
    return {
        name: [of.tensor for of in value.local_shards()]
        if hasattr(value, "local_shards")
        else [value]
        for name, value in model.state_dict().items()
    }


class Bare:
    """A model without DistributedDataParallel, the sums of which depend on its age."""

    def __init__(self, model: Any) -> None:
        self.module, self.fused_optimizer = model.module, model.fused_optimizer

    def __call__(self, features: Any) -> Any:
        return self.module(features)


def moved_and_loaded(
    rank: int, kinds: Sequence[Kind], optimizer: str, path: str, ahead: Sequence[int] = (0, 7)
) -> Moved:
    """Moves a model's tables, and loads what it had saved before into one with the other plan."""
    names = names_of(kinds)
    model, other = (sharded_model(kinds, side, optimizer) for side in (0, 1))
    for of in (model, other):  # its gradients are sums in the order of outputs, which may differ
        of.module.over.requires_grad_(False)
    train(Bare(model), rank, names, BEFORE, ahead[rank % 2])
    td.checkpoint.save(path, model)
    report = td.checkpoint.load(path, other)
    tables = reshard(model, ShardingPlan(plan_of_side(kinds, 1)))
    unequal = _unequal(model, other, "moved")
    first = [shard.ids.numel() for shard in shards_of(model)]
    mine, theirs = _local(model), _local(other)
    entries = [
        name
        for name in mine.keys() | theirs.keys()
        if len(mine[name]) != len(theirs[name])
        or not all(map(torch.equal, mine[name], theirs[name]))
    ]
    for of in (model, other):
        train(Bare(of), rank, names, AFTER, ahead[rank % 2])
    unequal += _unequal(model, other, "trained")
    return Moved(
        tables,
        {name: (of.ids, of.evicted) for name, of in report.tables.items()},
        unequal,
        first,
        sum(
            of.evicted
            for k in kernels(model)
            for of in k.tables.group.usage.tables(wait=True).values()
        ),
        _types(model),
        sorted(entries),
    )


# -- errors of one rank ---------------------------------------------------------------------------

STAGES = {
    "lookups": ("torch_dynemb.torchrec.sharding.kernels.ShardTables", 0),
    "ids": ("torch_dynemb.torchrec.resharding.old_shards.read_entries", 1),
    "facts": ("torch_dynemb.torchrec.resharding.moves.facts_of", 0),
    "counts": ("torch_dynemb.torchrec.resharding.moved_table.counts_in_order", 0),
    "choice": ("torch_dynemb.torchrec.resharding.moved_table.check_ids", 0),
    "room": ("torch_dynemb.rows.loader.RowLoader.begin", 0),
    "reads": ("torch_dynemb.torchrec.resharding.old_shards.read_rows", 1),
    "writes": ("torch_dynemb.rows.loader.RowLoader.write", 1),
    "ids of rows": ("torch_dynemb.rows.loader.RowLoader.publish", 1),
    "clocks": ("torch_dynemb.torchrec.resharding.moves.set_optimizer_steps", 0),
}


@contextmanager
def _failing(target: str, calls: int) -> Iterator[list[int]]:
    """A function raises after some calls. Yields how often it was called."""
    module, _, name = target.rpartition(".")
    owner = pkgutil.resolve_name(module)
    real, counter, called = getattr(owner, name), itertools.count(), [0]

    def failing_call(*arguments: Any, **more: Any) -> Any:
        called[0] += 1
        if next(counter) >= calls:
            raise MemoryError(f"no memory for {name}")
        return real(*arguments, **more)

    with mock.patch.object(owner, name, failing_call):
        yield called


def failed_moves(rank: int, kinds: Sequence[Kind], path: str) -> dict[str, tuple[str, bool]]:
    """What all ranks raise where rank 1 fails at a stage, and whether tables are as before."""
    names = names_of(kinds)
    model = sharded_model(kinds, 0, "adam")
    train(model, rank, names, BEFORE)
    old, plan = [kernel.tables for kernel in kernels(model)], plan_of_side(kinds, 1)
    result = {}
    for stage, (target, calls) in STAGES.items():
        before, types = _raw(model), _types(model)
        if rank == 1:
            with _failing(target, calls) as called:
                raised = raised_by(lambda: reshard(model, plan))
            unreached = "" if called[0] > calls else f"{target} was not reached"
        else:
            raised, unreached = raised_by(lambda: reshard(model, plan)), ""
        now = [kernel.tables for kernel in kernels(model)]
        unchanged = len(now) == len(old) and all(map(lambda a, b: a is b, now, old))
        unchanged &= same(before, _raw(model)) and types == _types(model)
        result[stage] = unreached or raised, unchanged
    td.checkpoint.save(path, model)
    other = sharded_model(kinds, 0, "adam")
    td.checkpoint.load(path, other)
    for of in (model, other):
        train(of, rank, names, AFTER)
    result["training goes on"] = str(_unequal(model, other, "trained")), True
    reshard(model, plan)
    result["the next move"] = str(_types(model) == _types_of(plan)), True
    return result


# -- handles --------------------------------------------------------------------------------------

TABLES = (
    Table("rows", 8, ("a", "b"), sharding="row_wise"),
    Table("whole", 8, ("c",), sharding="table_wise"),
    Table("fixed", 8, ("d",), sharding="row_wise", dynamic=False),
    Table("copied", 8, ("e",), sharding="data_parallel", dynamic=False),
)
# rank 0 had no dynamic table of its own, and gets one
WHOLE_TABLES = (Table("first", 8, ("a",), sharding="table_wise"), TABLES[1])


def _model(tables: Sequence[Table]) -> Any:
    def prepare(model: nn.Module) -> None:
        torch.manual_seed(0)
        model.over = nn.Linear(8, 1)

    torch.manual_seed(0)
    return sharded(
        tables, optimizer=td.SGD(lr=0.1), fused_params={"learning_rate": 0.1}, prepare=prepare
    )


def _with(tables: Sequence[Table], **shardings: str) -> list[Table]:
    return [replace(of, sharding=shardings.get(of.name, of.sharding)) for of in tables]


def _step(model: Any, tables: Sequence[Table], rank: int, step: int) -> Tensor:
    features = [feature for table in tables for feature in table.features]
    batch = batches_of_ranks("plain", features, dist.get_world_size(), step, vocabulary=7)[rank]
    outputs = model(keyed_jagged(batch, "plain"))
    loss = torch.stack([of.square().sum() for of in outputs.values()]).sum()
    loss.backward()
    return loss.detach()


def rates_of_schedulers(rank: int, kind: str) -> list[tuple[set[float], set[float]]]:
    """Learning rates of tables and of the model's handle by step, around a move."""
    tables = TABLES[1:2]  # on rank 0 alone
    model = _model(tables)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    optimizer: Any = CombinedOptimizer([("fused", model.fused_optimizer), ("dense", dense)])
    scheduler: Any = None
    if kind == "torch":
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
    else:
        stages = [
            WarmupStage(WarmupPolicy.CONSTANT, max_iters=step + 1, value=0.5**step)
            for step in range(4)
        ]
        optimizer = WarmupOptimizer(optimizer, stages, lr=0.1)
    seen = []
    for step in range(4):
        if step == 2:
            reshard(model, {"bags": plan_of(_with(tables, whole="row_wise"))["bags"]})
        _step(model, tables, rank, step)
        of_tables = {
            float(group["lr"])
            for kernel in kernels(model)
            for group in kernel.tables.optimizer.param_groups
        }
        shown = {float(group["lr"]) for group in model.fused_optimizer.param_groups}
        seen.append((of_tables, shown))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return seen


def _keys(model: Any) -> list[str]:
    features = [feature for table in TABLES for feature in table.features]
    batch = batches_of_ranks("plain", features, dist.get_world_size(), 0, vocabulary=7)[0]
    with torch.no_grad():
        outputs = model.module.bags(keyed_jagged(batch, "plain"))
    return list(outputs.keys())


def beside_static_tables(rank: int) -> dict[str, Any]:
    """A move by TorchRec's own entry, with static tables in the collection."""
    moved, stays = _model(TABLES), _model(TABLES)
    for step in range(2):
        for model in (moved, stays):
            _step(model, TABLES, rank, step)
            model.fused_optimizer.step()
    old = [weakref.ref(kernel.tables.group) for kernel in kernels(moved)]
    keys = _keys(moved)
    listed = td.table_optimizers(moved)
    handle = moved.fused_optimizer
    fixed = moved.module.bags.embedding_bags["fixed"].weight
    copied = moved.module.bags.embedding_bags["copied"].weight.detach().clone()
    plan = plan_of(_with(TABLES, rows="column_wise", whole="row_wise"))["bags"]
    changed = {name: plan[name] for name in ("rows", "whole")}
    volume = moved.reshard({"bags": (1.5, changed)}, "bags")
    refused = raised_by(listed.pop().step)
    listed.clear()
    gc.collect()
    found: dict[str, Any] = {
        "volume": volume,
        "keys": keys == _keys(moved) != moved.module.bags.output_names(),
        "types": _types(moved),
        "freed": [of() is None for of in old],
        "refused": refused,
        "fixed": fixed.data_ptr() == moved.module.bags.embedding_bags["fixed"].weight.data_ptr(),
        "copied": torch.equal(copied, moved.module.bags.embedding_bags["copied"].weight),
        "params": sorted(moved.fused_optimizer.params),
        "losses": [],
    }
    for step in range(2, 5):
        losses = [_step(model, TABLES, rank, step) for model in (moved, stays)]
        found["losses"].append(torch.allclose(*losses, rtol=1e-5))
        handle.step()
        stays.fused_optimizer.step()
    found["static"] = torch.allclose(
        moved.module.bags.embedding_bags["copied"].weight,
        stays.module.bags.embedding_bags["copied"].weight,
        rtol=1e-5,
    )
    return found


# -- wrong calls ----------------------------------------------------------------------------------


def refused(rank: int, folder: str) -> dict[str, tuple[str, bool]]:
    """What wrong calls raise, and whether the model is as before."""
    options = {
        "rows": TableOptions(split=True),
        "whole": TableOptions(storage=td.ExternalStore(RecordDict(), cache="1MB")),
    }
    tables = TABLES[:3]
    model = sharded(tables, options=options, optimizer=td.SGD(lr=0.1))
    plan = plan_of(_with(tables, rows="column_wise", whole="row_wise", fixed="table_wise"))["bags"]
    column_wise = {"bags": {"rows": plan["rows"]}}
    found: dict[str, tuple[str, bool]] = {}

    def content() -> list[dict[str, Tensor]]:
        groups = [kernel.tables.group for kernel in kernels(model)]
        return [of.state.tensors() for of in groups if of.tables.tiers is None]

    def check(name: str, call: Callable[[], object]) -> None:
        before = content()
        raised = raised_by(call)
        found[name] = raised, same(before, content())

    def with_rows(**changes: Any) -> dict[str, Any]:
        rows = deepcopy(plan["rows"])
        for name, value in changes.items():
            setattr(rows, name, value)
        return {"bags": {"rows": rows}}

    check("model", lambda: reshard(nn.Linear(1, 1), plan))  # type: ignore[arg-type]
    check("plan", lambda: reshard(model, 5))  # type: ignore[arg-type]
    check("module plan", lambda: reshard(model, {"bags": 5}))  # type: ignore[dict-item]
    check("module", lambda: reshard(model, {"other": plan}))
    check("table", lambda: reshard(model, {"bags": {"others": plan["rows"]}}))
    check("by rank", lambda: reshard(model, column_wise if rank == 0 else {"bags": {}}))
    check("module by rank", lambda: reshard(model, column_wise if rank == 0 else {}))
    check("type", lambda: reshard(model, with_rows(sharding_type="data_parallel")))
    check("kernel", lambda: reshard(model, with_rows(compute_kernel="fused")))
    check("columns of ranks", lambda: reshard(model, with_rows(ranks=[0, 7])))
    check("static", lambda: reshard(model, {"bags": {"fixed": plan["fixed"]}}))
    check("storage", lambda: reshard(model, {"bags": {"whole": plan["whole"]}}))
    other = TableParams(options=TableOptions(policy=td.Policy(capacity=5)))
    check("options", lambda: reshard(model, with_rows(key_value_params=other)))
    outside = with_rows(ranks=[0, 7])
    outside["bags"]["rows"].sharding_spec.shards[1].placement._rank = 7
    check("rank", lambda: reshard(model, outside))
    cut = with_rows(ranks=[0])
    del cut["bags"]["rows"].sharding_spec.shards[1:]
    check("columns", lambda: reshard(model, cut))
    _step(model, tables, rank, 0)
    check("pending", lambda: reshard(model, column_wise))
    model.fused_optimizer.step()
    kept = [table for table in tables if table.name != "whole"]
    model = sharded(kept, options={"rows": options["rows"]}, optimizer=td.SGD(lr=0.1))
    _step(model, kept, rank, 0)
    model.fused_optimizer.step()
    with pytest.MonkeyPatch.context() as patch, held_disk(patch) as disk:
        handle = td.checkpoint.save(f"{folder}/saved", model, asynchronous=True)
        disk.wait_until_reached()
        check("save", lambda: reshard(model, column_wise))
        disk.let_go()
        handle.wait()
    log = DeltaLog(f"{folder}/log", dense=False)
    log.attach(model)
    check("log", lambda: reshard(model, column_wise))
    log.close()
    check("nothing", lambda: reshard(model, {"bags": {}}))
    check("the same", lambda: reshard(model, ShardingPlan(plan_of(kept))))
    return found


def in_pipeline(rank: int) -> tuple[list[str], list[float], list[float]]:
    """A move between the batches of a pipeline, and after it has detached the model; losses of
    both, and without a move."""
    raised, losses = [], []
    for moves in (True, False):
        model = model_of(dedup=False)
        optimizer = optimizer_of(model)
        plan = {"pooled": {"ads": model_of(dedup=False, by_rows=False).plan.plan["pooled"]["ads"]}}
        here = []
        for steps in (slice(0, 2), slice(2, 5)):
            pipeline = TrainPipelineSparseDist(
                model, optimizer, torch.device("cpu"), execute_all_batches=True
            )
            stream = iter(batches(rank)[steps])
            here += [float(pipeline.progress(stream).square().mean())]
            if moves and steps.start == 0:
                raised.append(raised_by(lambda: reshard(model, plan)))  # noqa: B023
            with suppress(StopIteration):
                while True:
                    here.append(float(pipeline.progress(stream).square().mean()))
            pipeline.detach()
            if moves and steps.start == 0:
                raised.append(raised_by(lambda: reshard(model, plan)))  # noqa: B023
        losses.append(here)
    return raised, losses[0], losses[1]
