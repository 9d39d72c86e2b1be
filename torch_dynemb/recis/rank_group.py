"""The ranks that share a table, and what they send each other."""

from __future__ import annotations

import time
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed import distributed_c10d

from torch_dynemb.distributed.agreement import Described, check_agreement


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


class CommonStart(NamedTuple):
    """What tables begin with, equal on all ranks.

    Attributes:
        seed: of initial values; None: torch's.
        now: seconds by the first rank's clock; None: no other rank has rows of the tables.
    """

    seed: int | None
    now: int | None


def common_start(pg: dist.ProcessGroup | None, own_seed: int | None = None) -> CommonStart:
    """What the group's first rank has: ``own_seed``, or else torch's, and its clock."""
    group = rank_group(pg)
    if group is None:
        return CommonStart(own_seed, None)
    start = [torch.initial_seed() if own_seed is None else own_seed, int(time.time())]
    dist.broadcast_object_list(start, group=pg, group_src=0)
    seed, now = start
    return CommonStart(seed, now if group.size > 1 else None)


def check_ranks_agree(owner: str, options: Described, group: RankGroup | None) -> None:
    """Raises ValueError on all ranks of a group unless all were given the same options."""
    if group is not None and group.size > 1:
        c10d: Any = distributed_c10d  # the function is private, and what functional collectives use
        check_agreement(owner, options, c10d._resolve_process_group(group.name))


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


__all__ = [
    "CommonStart",
    "RankGroup",
    "all_to_all",
    "arrived",
    "check_ranks_agree",
    "common_start",
    "rank_group",
]
