"""Simulated routing: the ids of the fullest rank, without rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torch_dynemb import ops
from torch_dynemb.distributed.owners import part_of
from torch_dynemb.plan.ranks.layouts import Cluster, PlacedColumns


def routed(
    setting: Any, pieces: Sequence[PlacedColumns], cluster: Cluster, *, dedup: bool, steps: int
) -> float:
    """Return the ids of the fullest rank by the mean of all, on average over steps.

    Args:
        setting: sizes of the stream and of a rank's batch.
        pieces: places of the tables.
        cluster: the ranks.
        dedup: whether every rank sends each of its ids once.
        steps: to simulate.
    """
    from sharded.stream import Stream

    stream = Stream(setting.tables, setting.rows, setting.bag)
    fullest = 0.0
    for step in range(steps):
        ids, lengths = stream.lines(setting.batch * cluster.ranks, seed=step)
        loads = torch.zeros(cluster.ranks, dtype=torch.int64)
        for piece in pieces:
            sent = ids[piece.table]
            if dedup:
                of_ranks = lengths[piece.table].view(cluster.ranks, -1).sum(1).cumsum(0)
                offsets = torch.cat([torch.zeros(1, dtype=torch.int64), of_ranks])
                sent = ops.unique_ids(sent, offsets).ids
            owners = part_of(sent, len(piece.ranks)) + piece.ranks.start
            loads += owners.bincount(minlength=cluster.ranks)
        fullest += float(loads.max() / loads.double().mean())
    return fullest / steps
