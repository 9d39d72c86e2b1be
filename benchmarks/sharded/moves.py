"""Processes of live_resharding.py: ranks move a table, and save and load it."""

from __future__ import annotations

import gc
import os
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from common.id_streams import spread
from common.timing import Timing
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan

import torch_dynemb as td
from torch_dynemb.table.tables import used_bytes
from torch_dynemb.torchrec import (
    DynamicEmbeddingBagCollectionSharder,
    TableOptions,
    local_shards,
    reshard,
)
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL

RANKS = 2
_FILLED_AT_ONCE = 1 << 16


class Case(NamedTuple):
    """A move.

    Attributes:
        old, new: sharding types.
        dim: columns.
        ids: of the table.
    """

    old: str
    new: str
    dim: int
    ids: int

    @property
    def table_bytes(self) -> int:
        """Of ids, rows and optimizer state."""
        return self.ids * (8 + 3 * 4 * self.dim)


class Moved(NamedTuple):
    """Measurement of a rank.

    Attributes:
        moves: times of moves from the old shards to the new ones.
        loads: times of a save, a new model and a load.
        saves: of these, the save.
        sent_bytes: between ranks, in one move.
        extra_bytes: resident memory at the peak of the first move, beyond what was resident before
            and what the new shards have in use.
    """

    moves: Timing
    loads: Timing
    saves: Timing
    sent_bytes: int
    extra_bytes: int


def _unsharded(case: Case) -> EmbeddingBagCollection:
    table = EmbeddingBagConfig(
        name="table", embedding_dim=case.dim, num_embeddings=1, feature_names=["feature"]
    )
    return EmbeddingBagCollection(tables=[table], device=torch.device("meta"))


def _sharder() -> DynamicEmbeddingBagCollectionSharder:
    return DynamicEmbeddingBagCollectionSharder(
        options={"table": TableOptions()}, optimizer=td.Adam(lr=0.01)
    )


def _plan(case: Case, kind: str) -> Any:
    dynamic = {"compute_kernel": DYNAMIC_KERNEL}
    generators = {
        "table_wise": lambda: table_wise(rank=0, **dynamic),
        "row_wise": lambda: row_wise(**dynamic),
        "column_wise": lambda: column_wise(ranks=list(range(RANKS)), **dynamic),
    }
    return construct_module_sharding_plan(
        _unsharded(case),
        {"table": generators[kind]()},
        sharder=_sharder(),
        local_size=RANKS,
        world_size=RANKS,
        device_type="cpu",
    )


def _model(case: Case, kind: str) -> DistributedModelParallel:
    return DistributedModelParallel(
        _unsharded(case),
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"": _plan(case, kind)}),
        sharders=[_sharder()],
    )


def _fill(case: Case, model: DistributedModelParallel) -> None:
    ids = spread(torch.arange(case.ids))
    for shard in local_shards(model):
        generator = torch.Generator().manual_seed(0)
        columns, mine = shard.shard.columns, ids[shard.shard.ids.owned(ids)]
        for some in mine.split(_FILLED_AT_ONCE):
            rows = torch.randn(some.numel(), case.dim, generator=generator)
            own = rows[:, columns.start : columns.stop].contiguous()
            shard.group.insert_or_assign(shard.number, some, own)


def _resident(field: str) -> int:
    """Return ``VmRSS``, or ``VmHWM``, the most of it, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return 1024 * int(line.split()[1])


def _measure(case: Case, path: str, rounds: int) -> Moved:
    model = _model(case, case.old)
    _fill(case, model)
    moves: list[float] = []
    loads: list[float] = []
    saves: list[float] = []
    sent, extra = 0, 0
    for number in range(1 + rounds):
        dist.barrier()
        begin = time.perf_counter()
        td.checkpoint.save(path, model)
        dist.barrier()
        saved = time.perf_counter()
        other = _model(case, case.new)
        td.checkpoint.load(path, other, progress=False)
        dist.barrier()
        loads.append(1e3 * (time.perf_counter() - begin))
        saves.append(1e3 * (saved - begin))
        del other
        gc.collect()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins here
        dist.barrier()
        begin = time.perf_counter()
        (result,) = reshard(model, {"": _plan(case, case.new)}).values()
        moves.append(1e3 * (time.perf_counter() - begin))
        peak = _resident("VmHWM")
        assert result.ids == case.ids
        if number == 0:
            new = sum(used_bytes(shard.group.tables)["total"] for shard in local_shards(model))
            sent, extra = result.bytes, peak - before - new
        reshard(model, {"": _plan(case, case.old)})
    return Moved(
        Timing(tuple(moves[1:])), Timing(tuple(loads[1:])), Timing(tuple(saves[1:])), sent, extra
    )


def work(pipe: Connection, rank: int, path: str, case: Case, rounds: int) -> None:
    """Run the process of a rank: it sends its measurement, or a traceback as text.

    Args:
        path: of the checkpoint.
        rounds: that count.
    """
    os.environ.update(
        LOCAL_WORLD_SIZE=str(RANKS), LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(RANKS)
    )
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{path}-store", rank=rank, world_size=RANKS
        )
        pipe.send(_measure(case, path, rounds))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:  # the parent reports it
        pipe.send(traceback.format_exc())


__all__ = ["RANKS", "Case", "Moved", "work"]
