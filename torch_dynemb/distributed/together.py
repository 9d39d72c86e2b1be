"""Work that ranks do together: if one fails, all raise its error."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_dynemb.distributed.agreement import Option, check_agreement, comparable
from torch_dynemb.distributed.failures import sendable
from torch_dynemb.distributed.ranks import default_group, from_all_ranks

T = TypeVar("T")


class Ranks(NamedTuple):
    """Ranks that save or load together.

    Attributes:
        group: their process group; None: a single process.
        rank, size: rank of this process, and number of ranks.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """Gather a value from every rank, by rank. All ranks call it."""
        return [value] if self.group is None else from_all_ranks(value, self.group)

    def run(self, work: Callable[[], T]) -> T:
        """Run a function on every rank. All ranks call it.

        Returns:
            Its result on this rank.

        Raises:
            Exception: the error raised on this rank, or else that of the first rank that raised
                one.
        """
        if self.group is None:
            return work()
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        failures = self.gather(None if failure is None else sendable(failure))
        if failure is not None:
            raise failure
        for rank, of_rank in enumerate(failures):
            if of_rank is not None:
                raise of_rank from RuntimeError(f"raised on rank {rank}")
        return result  # type: ignore[return-value]

    def agree(self, owner: str, **arguments: object) -> None:
        """Check that all ranks were given the same arguments. All ranks call it.

        Args:
            owner: prefix of errors.
            **arguments: values by name; equal values must have equal text.

        Raises:
            ValueError: they differ. Raised on all ranks.
        """
        given = {Option("", name): comparable(value) for name, value in arguments.items()}
        check_agreement(owner, given, self.group)

    def on_first(self, work: Callable[[], object]) -> None:
        """Run a function on the first rank while the others wait. All ranks call it.

        Raises:
            Exception: the error raised there. Raised on all ranks.
        """
        self.run(lambda: work() if self.rank == 0 else None)


def ranks_of(process_group: dist.ProcessGroup | None) -> Ranks:
    """Return the ranks of a process group; default: all ranks, or this process alone.

    Raises:
        ValueError: this process is not a member of the group.
    """
    group = default_group() if process_group is None else process_group
    if group is None:
        return Ranks(None, 0, 1)
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError(
            "checkpoint: process_group does not have this process as a member: call it on members "
            "only"
        )
    size = dist.get_world_size(group)
    return Ranks(group if size > 1 else None, rank, size)


# The key is the process group, not its name: a group created after another was destroyed may reuse
# the name.
_background_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
# A rank that is done waits for slower ranks. Only a call of wait() blocks meanwhile. A rank that
# dies ends the wait at once.
_BACKGROUND_TIMEOUT = timedelta(days=1)


def background_ranks(ranks: Ranks) -> Ranks:
    """Return the same ranks with a process group for a background thread.

    Its messages never mix with those of other groups. All ranks call it; the group is created once.
    """
    if ranks.group is None:
        return ranks
    known = _background_groups.get(ranks.group)
    if known is None:
        _be_in_as_many_groups(ranks)
        known = dist.new_group(
            dist.get_process_group_ranks(ranks.group),
            timeout=_BACKGROUND_TIMEOUT,
            backend="gloo",
            use_local_synchronization=True,
        )
        assert isinstance(known, dist.ProcessGroup)
        _background_groups[ranks.group] = known
    return ranks._replace(group=known)


def _be_in_as_many_groups(ranks: Ranks) -> None:
    """Add groups with only this rank, until all ranks are in the same number of process groups.

    torch names a group that its members create locally after the members and the number of groups
    of this process. If the numbers differ, every rank waits under another name.
    """
    count = len(distributed_c10d._world.pg_names)
    for _ in range(max(ranks.gather(count)) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


__all__ = ["Ranks", "background_ranks", "ranks_of"]
