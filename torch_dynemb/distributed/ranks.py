"""The ranks that share tables: a process group that modules can store, and exchange of objects."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

T = TypeVar("T")


class RankGroup(NamedTuple):
    """A process group in a form that modules can store, copy and compile.

    Attributes:
        name: of the group.
        size: number of ranks.
        rank: of this process.
    """

    name: str
    size: int
    rank: int


def default_group() -> dist.ProcessGroup | None:
    """Return the default process group; None: this process is alone."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.group.WORLD


def rank_group(process_group: dist.ProcessGroup | None) -> RankGroup | None:
    """Return the given group, else the default one, else None: this process is alone.

    Raises:
        ValueError: this process is not a member of the group.
    """
    if process_group is None:
        process_group = default_group()
        if process_group is None:
            return None
    rank = dist.get_rank(process_group)
    if rank < 0:
        raise ValueError("pg does not have this process as a member: construct it on members only")
    return RankGroup(process_group.group_name, dist.get_world_size(process_group), rank)


def process_group_of(ranks: RankGroup | None) -> dist.ProcessGroup | None:
    """Return the process group of ranks; None: this rank is the only one."""
    if ranks is None or ranks.size == 1:
        return None
    c10d: Any = distributed_c10d  # a private function, which functional collectives use, too
    process_group: dist.ProcessGroup = c10d._resolve_process_group(ranks.name)
    return process_group


def from_first_rank(
    value: T, process_group: dist.ProcessGroup | None, *, device: torch.device | None = None
) -> T:
    """Return the value of the group's first rank on all ranks; a collective.

    Args:
        value: picklable on the first rank; ignored on the others.
        process_group: None: all ranks.
        device: to send from; default: torch's choice for the group.
    """
    sent = [value]
    dist.broadcast_object_list(sent, group=process_group, device=device, group_src=0)
    return sent[0]


def from_all_ranks(value: T, process_group: dist.ProcessGroup | None) -> list[T]:
    """Return the values of all ranks, by rank; a collective.

    Args:
        value: picklable.
        process_group: None: all ranks.
    """
    gathered: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(gathered, value, group=process_group)
    return gathered


__all__ = [
    "RankGroup",
    "default_group",
    "from_all_ranks",
    "from_first_rank",
    "process_group_of",
    "rank_group",
]
