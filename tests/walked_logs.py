"""A trainer and its followers while one call to the storage of their log is lost.

:func:`walk` trains, publishes, writes new bases, drops old commits and follows. One call, the n-th,
fails before it takes effect, or takes effect without an answer. Whatever it was, the trainer goes
on, and every follower ends with the rows that were trained.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

import torch_dynemb as td
from torch_dynemb.delta_log import DeltaLog, Follower, follow, replay
from torch_dynemb.errors import InUseError

# what happens to the call: the last three take effect
FATES = ("fails", "loses its answer", "is interrupted", "ends the process")
Fate = str | Callable[[], object]
Rows = dict[int, float]


class Ended(BaseException):
    """In place of SIGKILL: nothing of the process takes effect any more."""


class Calls:
    """Calls to a storage.

    Args:
        at: number of the call with a fate of its own, from 1.
        fate: one of ``FATES``, or what happens before the call.
        error: error of a call that fails.

    Attributes:
        seen: number of calls so far.
    """

    def __init__(self, at: int, fate: Fate, error: Exception) -> None:
        assert callable(fate) or fate in FATES
        self.seen = 0
        self._at, self._fate, self._error = at, fate, error

    def run(self, call: Callable[[], Any], answered: Callable[[], object] = lambda: None) -> Any:
        """Make a call; ``answered`` waits until a call without an answer has taken effect."""
        if self._fate == "ends the process" and self.seen >= self._at:
            raise Ended
        self.seen += 1
        if self.seen != self._at:
            return call()
        if callable(self._fate):
            self._fate()
            return call()
        if self._fate != "fails":
            call()
            answered()
        if self._fate == "ends the process":
            raise Ended
        if self._fate == "is interrupted" and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        raise self._error


class Place(ABC):
    """A place of a log."""

    @abstractmethod
    def log(self) -> DeltaLog:
        """Make a publisher."""

    @abstractmethod
    def followed(self) -> Any:
        """Return the log for followers."""

    @abstractmethod
    def lost(self, at: int, fate: Fate) -> AbstractContextManager[Calls]:
        """Give a call a fate, see :class:`Calls`."""

    def base(self, number: int) -> str | None:
        """Return the path of a base; None: the log has its own."""
        return None


def new_table() -> td.DynamicEmbedding:
    return td.DynamicEmbedding(2, name="items", optimizer=td.SGD(lr=0.1))


def rows_of(table: td.DynamicEmbedding) -> Rows:
    return {
        id: row[0]
        for batch in table.group.export(0)
        for id, row in zip(batch.ids.tolist(), batch.rows.tolist(), strict=True)
    }


def again(call: Callable[[], Any]) -> Any:
    """Make a call, once more if it fails: one call of the storage is lost, and no other."""
    try:
        return call()
    except (OSError, KeyboardInterrupt):
        return call()


class Job:
    """A trainer, and a follower that reads each commit."""

    def __init__(self, place: Place) -> None:
        self.place, self.table = place, new_table()
        self.rows: Rows = {}
        self.ends: list[Rows] = []  # rows of the last commit
        self.base = place.base(0)
        self.changes = 0
        self.log = place.log()
        self.followed = new_table()
        self.follower: Follower | None = None

    def attach(self) -> None:
        again(lambda: self.log.attach(self.table, base=self.base))

    def change(self) -> None:
        """Give a table new rows, changed rows and fewer of the old ones."""
        self.changes += 1
        ids = torch.arange(self.changes, self.changes + 6)
        self.table.group.insert_or_assign(0, ids, torch.full((6, 2), float(self.changes)))
        self.table.group.erase(0, torch.tensor([self.changes + 1]))
        self.rows.update(dict.fromkeys(ids.tolist(), float(self.changes)))
        del self.rows[self.changes + 1]

    def publish(self) -> None:
        self.change()

        def written() -> None:
            self.log.publish()
            self.log.flush()
            assert self.log.durable_sequence == self.log.sequence

        again(written)

    def save(self) -> None:
        """Write a new base."""
        self.change()

        def written() -> None:
            if self.follower is not None:
                again(self.follower.update)  # each new base drops what followers had before
            path = self.place.base(self.changes)
            self.log.save(path)
            self.base = path

        again(written)

    def follow(self) -> None:
        """Follow from the base that the log has."""

        def begun() -> None:
            self.follower = None
            reached = replay(self.place.followed(), self.followed, base=self.base)
            self.follower = follow(self.place.followed(), self.followed, sequence=reached)

        again(begun)

    def update(self) -> None:
        follower = self.follower
        assert follower is not None
        again(follower.update)
        assert rows_of(self.followed) == self.rows

    def run(self) -> None:
        self.attach()
        self.publish()
        self.follow()
        self.publish()
        self.update()
        self.save()
        self.update()
        self.publish()
        self.save()  # commits and a base are dropped
        self.update()
        self.close()

    def close(self) -> None:
        """Publish a last commit, which is lost if the log says so."""
        self.ends = [dict(self.rows)]
        self.change()
        again(self.log.publish)
        try:
            self.log.close()
            self.ends.clear()
        except (OSError, KeyboardInterrupt):
            self.log.close()
        self.ends.append(self.rows)

    def check(self) -> None:
        """Check that the follower has the last rows, and so has a new one."""
        if self.follower is not None:
            self.follower.update()
            assert rows_of(self.followed) in self.ends
        fresh = new_table()
        replay(self.place.followed(), fresh, base=self.base)
        assert rows_of(fresh) in self.ends
        assert self.follower is None or rows_of(fresh) == rows_of(self.followed)


def walk(place: Place, at: int, fate: str) -> int:
    """Lose the call with a number, and check what follows. Return the number of calls."""
    job = Job(place)
    if job.base is not None:
        td.checkpoint.save(job.base, job.table)
    with place.lost(at, fate) as calls:
        try:
            job.run()
        except Ended:
            ended = True
        else:
            ended = False
    (_restarted(job) if ended else job).check()
    return calls.seen


def overtake(place: Place, at: int, *, publishes: bool) -> bool:
    """Have another trainer attach before the call with a number of a publish.

    One of both trainers goes on, with followers that have its rows, and the other one is refused.

    Args:
        place: of the log.
        at: number of the call.
        publishes: whether the other trainer also publishes then.

    Returns:
        Whether the publish made as many calls.
    """
    first, other = Job(place), Job(place)
    if first.base is not None:
        td.checkpoint.save(first.base, first.table)
    first.attach()
    first.publish()
    other.changes = 10

    def attach() -> None:
        replay(place.followed(), other.table, base=other.base)
        other.rows = rows_of(other.table)
        other.attach()
        if publishes:
            other.publish()

    first.change()
    with place.lost(at, attach) as calls:
        try:
            first.log.publish()
            first.log.flush()
            is_refused = False
        except InUseError:
            is_refused = True
    if calls.seen < at:
        first.log.close()
        return False
    assert is_refused or not publishes
    try:
        first.log.publish()
        first.log.close()
        raise AssertionError("both trainers publish")
    except InUseError:
        first.log.close()
    if not publishes:
        try:
            other.publish()
        except InUseError:  # the first one was just in time
            assert not is_refused
            other.log.close()
            other.attach()
            other.publish()
    other.close()
    other.check()
    return True


def _restarted(job: Job) -> Job:
    """Train on in a new process, from the last commit that is there."""
    place, follower = job.place, job.follower
    next_job = Job(place)
    next_job.base, next_job.changes = job.base, job.changes
    try:
        replay(place.followed(), next_job.table, base=job.base)
    except FileNotFoundError:
        assert follower is None  # the process has ended before its first base
    next_job.rows = rows_of(next_job.table)
    next_job.attach()
    next_job.followed, next_job.follower = job.followed, follower
    next_job.publish()
    next_job.close()
    return next_job
