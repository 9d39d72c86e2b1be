"""Work that ranks do together: where one fails, all fail with its error."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

from torch_dynemb.distributed.agreement import Option, check_agreement, comparable
from torch_dynemb.distributed.ranks import default_group, from_all_ranks

T = TypeVar("T")


class Ranks(NamedTuple):
    """The ranks that save or load together.

    Attributes:
        group: their process group; None: this process is on its own.
        rank, size: of this process, and of how many.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int

    def gather(self, value: T) -> list[T]:
        """What every rank gives, by rank; all of them call it."""
        return [value] if self.group is None else from_all_ranks(value, self.group)

    def run(self, work: Callable[[], T]) -> T:
        """Does work on every rank; all of them call it.

        Returns:
            What it gave here.

        Raises:
            Exception: what it has raised here; else what it has raised on the first rank where it
                has raised something.
        """
        if self.group is None:
            return work()
        failure: Exception | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as error:
            failure = error
        failures = self.gather(None if failure is None else _sendable(failure))
        if failure is not None:
            raise failure
        for rank, told in enumerate(failures):
            if told is not None:
                raise told from RuntimeError(f"raised on rank {rank}")
        return result  # type: ignore[return-value]

    def agree(self, owner: str, **arguments: object) -> None:
        """Checks that all ranks were given the same; all of them call it.

        Args:
            owner: what errors begin with.
            **arguments: by name, of types whose values have one text.

        Raises:
            ValueError: they differ; on all ranks.
        """
        given = {Option("", name): comparable(value) for name, value in arguments.items()}
        check_agreement(owner, given, self.group)

    def on_first(self, work: Callable[[], object]) -> None:
        """Does work on the first rank, while the others wait; all of them call it.

        Raises:
            Exception: what it has raised there; on all ranks.
        """
        self.run(lambda: work() if self.rank == 0 else None)


def ranks_of(process_group: dist.ProcessGroup | None) -> Ranks:
    """The ranks of a process group; default: all, or this process alone.

    Raises:
        ValueError: this process is no member of the group.
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


# By the group of the program, and not by its name: one that is made after another was destroyed may
# have the same.
_background_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
# A rank that is done waits for those that write more. Nobody notices but the program that calls
# wait(); a rank that has died ends the wait at once.
_BACKGROUND_TIMEOUT = timedelta(days=1)


def background_ranks(ranks: Ranks) -> Ranks:
    """The same ranks with a process group for a thread: what it sends meets no other's messages.

    All ranks call it; the group is made once.
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
    """Puts ranks that are in fewer process groups than others into more, of themselves alone.

    torch names a group that only its members make by them and by how many groups this process is
    in. Where that differs, every rank waits for others at a name of its own.
    """
    count = len(distributed_c10d._world.pg_names)
    for _ in range(max(ranks.gather(count)) - count):
        dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


def _sendable(error: Exception) -> Exception:
    """The error itself where it can be sent to other processes, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


__all__ = ["Ranks", "background_ranks", "ranks_of"]
