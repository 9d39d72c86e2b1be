"""Steps of test_replicas: checkpoints and delta logs of two sharding groups."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from replica_models import (
    COUNTED,
    SHARDED,
    assert_same,
    check_equal,
    replicated,
    shards,
    train,
)
from sharded_models import Table
from table_content import content

import torch_dynemb as td
from torch_dynemb.torchrec import (
    DynamicDMPCollection,
)


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
        td.delta_log.DeltaLog(f"{path}/wrong", every_steps=1).attach(model)
    except ValueError as error:
        result["attach"] = str(error)
    log = follower = None
    if model.in_first_group:
        log = td.delta_log.DeltaLog(
            f"{path}/log", every_steps=1, process_group=model.sharding_group
        )
        log.attach(model)
        td.checkpoint.load(f"{path}/log/base", other, process_group=other.sharding_group)
        follower = td.delta_log.follow(f"{path}/log", other)
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
