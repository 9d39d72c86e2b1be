"""Which ids the tables of a rank have."""

from __future__ import annotations

from dataclasses import replace

import torch
from jagged_batches import Batch, keyed_jagged
from sharded_models import Table, kernels, plan_of, sharded
from torchrec.distributed.model_tracker.model_delta_tracker import ModelDeltaTrackerTrec
from torchrec.distributed.model_tracker.types import TrackingMode
from unsharded_oracle import rows_by_id

from torch_dynemb.torchrec import TableOptions, reshard


def ids_after_training(
    rank: int, sharding: str, ids: list[int]
) -> tuple[dict[int, list[int]], list[int]]:
    """Ids of each shard, by first column, and the ids that TorchRec's tracker has seen.

    Every rank has looked up all ids in a training step.
    """
    model = sharded([Table("users", 8, ("user",), sharding=sharding)])
    tracker = ModelDeltaTrackerTrec(model)
    batch = Batch({"user": [torch.tensor([id]) for id in ids]})
    model(keyed_jagged(batch, "plain"))["user"].sum().backward()
    exported = {
        shard.first_column: list(rows_by_id(kernel.tables.group, t))
        for kernel in kernels(model)
        for t, shard in enumerate(kernel.tables.shards)
    }
    return exported, [id for ids in tracker.get_unique_ids().values() for id in ids.tolist()]


def tracked_rows(rank: int, dedup: bool) -> tuple[list[list[int]], bool, str]:
    """Ids that the tracker of a collection without pooling has seen, and whether their rows fit.

    Its table moves from row_wise to column_wise between the two steps. The last part is what a
    tracker of optimizer state raises.
    """
    tables = [Table("users", 8, ("user",), "none")]
    model = sharded(tables, use_index_dedup=dedup)
    tracker = ModelDeltaTrackerTrec(model, mode=TrackingMode.EMBEDDING)
    seen, fit = [], True
    for step in range(2):
        batch = Batch({"user": [torch.arange(step - 20, step), torch.tensor([7, 7])]})
        model(keyed_jagged(batch, "plain"))
        [kernel] = kernels(model)
        seen.append([])
        for found in tracker.get_unique().values():
            seen[-1] += found.ids.tolist()
            rows = rows_by_id(kernel.tables.group, 0)
            fit &= all(
                torch.equal(rows[id], row)
                for id, row in zip(found.ids.tolist(), found.states, strict=True)
            )
        tracker.step()
        reshard(model, plan_of([replace(tables[0], sharding="column_wise")]))
    try:
        ModelDeltaTrackerTrec(sharded(tables), mode=TrackingMode.MOMENTUM_LAST)
    except NotImplementedError as error:
        return seen, fit, str(error)
    return seen, fit, "nothing"


def initial_rows(rank: int, sharding: str) -> list[float]:
    """Elements of new rows of a table of 16 rows with the default initializer."""
    table = Table("users", 8, ("user",), sharding=sharding, num_embeddings=16)
    model = sharded([table], options={"users": TableOptions()})
    batch = Batch({"user": [torch.arange(100)]})
    model(keyed_jagged(batch, "plain"))
    return [
        x
        for kernel in kernels(model)
        for row in rows_by_id(kernel.tables.group, 0).values()
        for x in row.tolist()
    ]
