"""What sharding refuses, on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from sharded_models import Model, Table, kernels, module_plan, sharded
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import JaggedTensor
from unsharded_oracle import rows_by_id

from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    DynamicEmbeddingCollectionSharder,
    TableOptions,
)


def _raised(call: Callable[[], Any]) -> str:
    """Type and message of what it raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error.args[0]}"
    return "nothing"


def refusal(rank: int, tables: tuple[Table, ...], arguments: dict[str, Any]) -> str:
    """Type and message of what ``sharded`` raises."""
    return _raised(lambda: sharded(tables, **arguments))


ByRank = list[tuple[tuple[Table, ...], dict[str, Any]]]


def refusals(rank: int, cases: dict[str, ByRank]) -> dict[str, str]:
    """What ``sharded`` raises where the ranks are given different things, by case."""
    return {name: refusal(rank, *by_rank[rank]) for name, by_rank in cases.items()}


def sharder_refusals(rank: int) -> dict[str, str]:
    """What a sharder raises that is given something else than a module, a plan and an env."""
    tables = (Table("a", 8, ("f_a",)), Table("b", 8, ("f_b",)))
    sharder = DynamicEmbeddingBagCollectionSharder(options={t.name: TableOptions() for t in tables})
    module = Model(tables, False).bags
    plan = module_plan(module, tables, sharder)
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    cpu = torch.device("cpu")

    def changed(**entries: Any) -> Any:
        result = copy.deepcopy(plan)
        for name, value in entries.items():
            setattr(result["a"], name, value)
        return result

    def shard(of: nn.Module, by: Any, where: Any, device: torch.device = cpu) -> str:
        return _raised(lambda: sharder.shard(of, by, where, device))

    return {
        "env": shard(module, plan, None),
        "local env": shard(module, plan, ShardingEnv.from_local(2, rank)),
        "meta": shard(module, plan, env, torch.device("meta")),
        "module": shard(nn.Linear(2, 2), plan, env),
        "collection": _raised(
            lambda: DynamicEmbeddingCollectionSharder().shard(module, plan, env, cpu)
        ),
        "kernel": shard(module, changed(compute_kernel="dynamic"), env),
        "sharding_spec": shard(module, changed(sharding_spec=None), env),
        "fewer tables": shard(module, {"a": plan["a"]}, env),
        "more tables": shard(module, {**plan, "c": plan["a"]}, env),
        "codecs": _raised(
            lambda: DynamicEmbeddingBagCollectionSharder(qcomm_codecs_registry=QCommsConfig())  # type: ignore[arg-type]
        ),
        "as it was": shard(module, plan, env),
    }


def _jagged(ids: torch.Tensor, **more: Any) -> KeyedJaggedTensor:
    arguments: dict[str, Any] = {"keys": ["f_a", "f_b"], "lengths": torch.tensor([1, 1, 1, 1])}
    return KeyedJaggedTensor(values=ids, **{**arguments, **more})


def batch_refusals(
    rank: int, pooling: str, weighted: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """What a collection raises if the batch of the last rank is wrong: as the first one, and later.

    Afterwards it does what one does that has seen the good batches only.
    """
    tables = (
        Table("a", 8, ("f_a",), pooling),
        Table("b", 8, ("f_b",), pooling, "table_wise"),
        Table("c", 8, ("f_b",), pooling, "column_wise"),
        Table("static", 8, ("f_a",), pooling, "table_wise", dynamic=False),
    )
    ids = torch.tensor([1, 2, 3, 4])
    given = {"weights": torch.rand(4)} if weighted else {}
    good = _jagged(ids, **given)
    offsets = {"lengths": None, **given}
    wrong: dict[str, Any] = {
        "dict": good.to_dict(),
        "none": None,
        "jagged": JaggedTensor(values=ids, lengths=torch.tensor([2, 2])),
        **{
            str(dtype).removeprefix("torch."): _jagged(ids.to(dtype), **given)
            for dtype in (torch.float32, torch.bool, torch.int8, torch.uint8)
        },
        "missing": _jagged(ids, keys=["f_a", "f_c"], **given),
        "twice": _jagged(torch.arange(6), keys=["f_a", "f_b", "f_a"], lengths=torch.ones(6).int()),
        "too long": _jagged(ids, lengths=torch.tensor([1, 1, 1, 5]), **given),
        "longer": _jagged(ids, lengths=torch.tensor([1, 1, 1, 2]), **given),
        "negative": _jagged(ids, lengths=torch.tensor([2, -1, 1, 2]), **given),
        "decreasing": _jagged(ids, offsets=torch.tensor([0, 3, 2, 3, 4]), **offsets),
        "from 1": _jagged(
            ids[:2], keys=["f_a", "f_b"], lengths=None, offsets=torch.tensor([1, 2, 3])
        ),
        "number": _jagged(ids[:3], lengths=torch.tensor([1, 1, 1])),
        "stride": _jagged(ids, stride=3, **given),
        "int weights": _jagged(ids, weights=ids),
        "few weights": _jagged(ids, weights=torch.rand(3)),
        "no inverse": _jagged(
            ids[:3],
            lengths=torch.ones(3, dtype=torch.int64),
            stride_per_key_per_rank=[[1], [2]],
            **({"weights": torch.rand(3)} if weighted else {}),
        ),
    }
    if weighted:
        wrong["no weights"] = _jagged(ids)
        for name in ("twice", "number", "from 1"):
            del wrong[name]
    ranks = dist.get_world_size()

    def refused(model: Any) -> dict[str, str]:
        batches = {name: batch if rank == ranks - 1 else good for name, batch in wrong.items()}
        return {name: _raised(lambda batch=batch: model(batch)) for name, batch in batches.items()}

    model = sharded(tables, weighted=weighted)
    first = refused(model)
    trained = _step(model, good)
    wrong["other order"] = _jagged(ids, keys=["f_b", "f_a"], **given)
    wrong["other dtype"] = _jagged(ids.to(torch.int32), **given)
    if not weighted:
        wrong["weights here only"] = _jagged(ids, weights=torch.rand(4))
    later = refused(model)
    assert _rows(model) == trained
    # what comes of torch.tensor([])
    none = _jagged(
        torch.tensor([]),
        lengths=torch.zeros(4, dtype=torch.int64),
        **({"weights": torch.empty(0)} if weighted else {}),
    )
    last = _step(model, none if rank == 0 else good)
    alike = sharded(tables, weighted=weighted)
    assert [_step(alike, good), _step(alike, none if rank == 0 else good)] == [trained, last]
    return first, later


def refused_by_the_second(rank: int) -> list[str]:
    """What is raised if the second collection of a model refuses the batch of rank 1.

    The first one has looked its bags up by then, and their sums are on their way.
    """
    tables = (Table("a", 8, ("f_a",)), Table("b", 8, ("f_b",), "none"))
    model, alike = sharded(tables), sharded(tables)
    lengths = torch.tensor([2, 0, 1, 1])
    batches = [_jagged(torch.arange(step, 4 + step), lengths=lengths) for step in range(3)]
    raised = []
    for batch in batches:
        wrong = batch if rank == 0 else _jagged(torch.arange(4), keys=["f_a", "f_c"])
        for _ in range(3):
            pooled = model.module.bags(batch)
            raised.append(_raised(lambda wrong=wrong: model.module.sequences(wrong)))
            del pooled
        assert _step(model, batch) == _step(alike, batch)
    return raised


def in_another_order(rank: int) -> str:
    """What is raised if rank 1 looks up the other collection of a model first; it then trains.

    The order of tables in a plan is of no importance.
    """
    tables = (Table("a", 8, ("f_a",)), Table("b", 8, ("f_b",), "none"), Table("c", 8, ("f_b",)))
    model, alike = sharded(tables, reverses_plan=rank == 1), sharded(tables)
    batch = _jagged(torch.arange(4), lengths=torch.tensor([2, 0, 1, 1]))
    assert _step(model, batch) == _step(alike, batch)
    first = model.module.bags if rank == 0 else model.module.sequences
    raised = _raised(lambda: first(batch))
    assert _step(model, batch) == _step(alike, batch)
    return raised


def _step(model: Any, batch: KeyedJaggedTensor) -> list[dict[int, list[float]]]:
    """Train a batch; return the rows of this rank."""
    sum(of.square().sum() for of in model(batch).values()).backward()
    model.fused_optimizer.step()
    return _rows(model)


def _rows(model: Any) -> list[dict[int, list[float]]]:
    return [
        {id: row.tolist() for id, row in rows_by_id(kernel.tables.group, t).items()}
        for kernel in kernels(model)
        for t in range(len(kernel.tables.shards))
    ]
