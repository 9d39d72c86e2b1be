"""The ranks that share a table, and what they send each other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives


class RankGroup(NamedTuple):
    """A process group in a form that modules can hold, copy and compile.

    Attributes:
        name: of the group.
        size: number of ranks.
        rank: of this process.
    """

    name: str
    size: int
    rank: int


def rank_group(pg: dist.ProcessGroup | None) -> RankGroup | None:
    """The given group, else the default one, else None: one process on its own.

    Raises:
        ValueError: this process is no member of the group.
    """
    if pg is None:
        if not (dist.is_available() and dist.is_initialized()):
            return None
        pg = dist.group.WORLD
    rank = dist.get_rank(pg)
    if rank < 0 or pg is None:
        raise ValueError("pg does not have this process as a member: construct it on members only")
    return RankGroup(pg.group_name, dist.get_world_size(pg), rank)


def common_seed(pg: dist.ProcessGroup | None, own: int | None = None) -> int | None:
    """``own``, or torch's seed, of the group's first rank; ``own`` where there is no group."""
    if rank_group(pg) is None:
        return own
    seed = [torch.initial_seed() if own is None else own]
    dist.broadcast_object_list(seed, group=pg, group_src=0)
    return seed[0]


def all_to_all(tensor: Tensor, received: list[int], sent: list[int], group: RankGroup) -> Tensor:
    """Sends ``sent[r]`` rows to rank r; the result arrives later: :func:`arrived` waits for it.

    Differentiable; the order of rows is that of ranks.
    """
    name: Any = group.name
    return collectives.all_to_all_single_autograd(tensor, received, sent, name)


def arrived(tensor: Tensor) -> Tensor:
    """What :func:`all_to_all` has sent, once it is there."""
    if isinstance(tensor, collectives.AsyncCollectiveTensor):
        return tensor.wait()
    return tensor


__all__ = ["RankGroup", "all_to_all", "arrived", "common_seed", "rank_group"]
