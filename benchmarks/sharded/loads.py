"""Processes of dcp_load.py: ranks save a table, and load it into new models."""

from __future__ import annotations

import gc
import os
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common.id_streams import spread
from common.timing import Timing
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import torch_dynemb as td
from torch_dynemb.distributed.owners import part_of
from torch_dynemb.table.tables import used_bytes
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    LoadPlanner,
    TableOptions,
    local_shards,
)
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

STATES = {"Adagrad": 1, "Adam": 2}  # numbers that an optimizer keeps of each number of a row
_FILLED_AT_ONCE = 1 << 16


class Load(NamedTuple):
    """A case.

    Attributes:
        ranks: that share the table by rows; as many have saved it.
        dim: columns.
        optimizer: of :data:`STATES`.
        ids: of the table.
    """

    ranks: int
    dim: int
    optimizer: str
    ids: int

    @property
    def table_bytes(self) -> int:
        """Of ids, rows and optimizer state."""
        return self.ids * (8 + 4 * self.dim * (1 + STATES[self.optimizer]))


class Loaded(NamedTuple):
    """Measurement of a rank.

    Attributes:
        whole: times of loads, ``dcp.load`` and ``load_state_dict``.
        reading: of these, ``dcp.load``.
        extra_bytes: resident memory at the peak of the first load, beyond what was resident before
            and what the table has in use: the state dict that is filled, and all that is temporary.
    """

    whole: Timing
    reading: Timing
    extra_bytes: int


def _model(load: Load) -> DistributedModelParallel:
    table = EmbeddingBagConfig(
        name="table", embedding_dim=load.dim, num_embeddings=1, feature_names=["feature"]
    )
    module = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    optimizers = {"Adagrad": td.Adagrad(lr=0.01), "Adam": td.Adam(lr=0.01)}
    sharder = DynamicEmbeddingBagCollectionSharder(
        options={"table": TableOptions()}, optimizer=optimizers[load.optimizer]
    )
    plan = construct_module_sharding_plan(
        module,
        {"table": row_wise(compute_kernel=DYNAMIC_KERNEL)},
        sharder=sharder,
        local_size=load.ranks,
        world_size=load.ranks,
        device_type="cpu",
    )
    return DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": plan}),
        sharders=[sharder],
    )


def _save(load: Load, rank: int, path: str) -> None:
    model = _model(load)
    (shard,) = local_shards(model)
    ids = spread(torch.arange(load.ids))
    mine = ids[part_of(ids, load.ranks) == rank]
    for some in mine.split(_FILLED_AT_ONCE):
        shard.group.insert_or_assign(shard.number, some, torch.randn(some.numel(), load.dim))
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)


def _resident(field: str) -> int:
    """Return ``VmRSS``, or ``VmHWM``, the most of it, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def _measure(load: Load, path: str, rounds: int) -> Loaded:
    whole: list[float] = []
    reading: list[float] = []
    extra: list[int] = []
    for _ in range(1 + rounds):
        model = _model(load)
        gc.collect()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins here
        dist.barrier()
        begin = time.perf_counter()
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path, planner=LoadPlanner())
        dist.barrier()
        read = time.perf_counter()
        model.load_state_dict(state["model"])
        dist.barrier()
        end = time.perf_counter()
        peak = _resident("VmHWM")
        (shard,) = local_shards(model)
        extra.append(peak - before - used_bytes(shard.group.tables)["total"])
        whole.append(1e3 * (end - begin))
        reading.append(1e3 * (read - begin))
        del model, shard, state
    return Loaded(Timing(tuple(whole[1:])), Timing(tuple(reading[1:])), extra[0])


def work(pipe: Connection, rank: int, path: str, load: Load, rounds: int) -> None:
    """Run the process of a rank: it sends its measurement, or a traceback as text.

    Args:
        path: of the checkpoint.
        rounds: of loads; 0: it saves, and sends None.
    """
    os.environ.update(
        LOCAL_WORLD_SIZE=str(load.ranks),
        LOCAL_RANK=str(rank),
        RANK=str(rank),
        WORLD_SIZE=str(load.ranks),
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{path}-store-{rounds}",
            rank=rank,
            world_size=load.ranks,
        )
        if rounds == 0:
            _save(load, rank, path)
        pipe.send(_measure(load, path, rounds) if rounds > 0 else None)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # the parent reports it
        pipe.send(traceback.format_exc())
