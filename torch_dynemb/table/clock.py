"""The time of a group: its own, or agreed on by the ranks that share tables.

A group on one rank reads the machine's clock when a step ends, until a program sets the time.

Ranks that share tables agree on a time:

1. A rank only proposes the time that it has read (``HostState.proposed_now``).
2. Proposals travel with the ids of a lookup.
3. The lookup takes the latest proposal of all ranks.

Why: clocks of machines differ, so shards of one table would give an id different times and evict
different ids.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from torch_dynemb.argument_checks import integer
from torch_dynemb.ops.columns import MAX_COUNT, MOST_HALF_LIVES, Clock
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.tables import Tables


class TableClock:
    """The time of a group: ``group.clock``.

    Args:
        tables: of the group.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def set_now(self, seconds: int | None) -> None:
        """Set the time that lookups give their ids, for events of another time than now.

        It stays there: from now on ``optimizer.step()`` without ``now=`` keeps the time, in place
        of reading the machine's clock, and ``step(now=)`` sets it. Saved states do not record that
        a program sets the time. If ranks share the group, all of them call it.

        Args:
            seconds: from 0 to 2^62, such as Unix time; None: steps read the machine's clock again.

        Raises:
            TypeError, ValueError: ``seconds`` is not an int, or out of its range.
            RuntimeError: no table keeps times. After an error, the time is unchanged.
        """
        if seconds is not None:
            set_time(self._tables, seconds)
        self._tables.host.time_is_given = seconds is not None

    def share(self, now: int) -> None:
        """Take the time from :meth:`agree_on` from now on, instead of the machine's clock.

        Args:
            now: seconds to begin with, equal on all ranks.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`set_now`.
        """
        check_now(self._tables, now)
        propose(self._tables, now)
        set_time(self._tables, now)

    def agree_on(self, proposals: Tensor) -> None:
        """Set the time to the latest proposal of all ranks; it never goes back.

        Waits for no device, so it can be compiled and captured.

        Args:
            proposals: int64 [ranks], :attr:`proposed` of each rank.
        """
        now = self._tables.index.clock[Clock.NOW]
        now.copy_(torch.maximum(now, proposals.max()))

    @property
    def proposed(self) -> Tensor | None:
        """int64 [1], seconds that this rank proposes; None: the group is on one rank.

        It is the tensor itself, which compiled lookups send: read it only.
        """
        return self._tables.host.proposed_now


def check_now(tables: Tables, seconds: int) -> None:
    """Raise TypeError, ValueError or RuntimeError for a time that cannot be set."""
    seconds = integer("clock.set_now: seconds", seconds, least=0)
    if seconds > MAX_COUNT:
        raise ValueError(f"clock.set_now: seconds is {seconds}, expected at most 2^62")
    half_lives = [
        (table, ticks)
        for table in tables.config.tables
        for ticks in (table.policy.half_life_ticks, table.policy.admission_ticks)
    ]
    for table, ticks in half_lives:
        if ticks > 0 and seconds // ticks >= MOST_HALF_LIVES:
            raise ValueError(
                f"clock.set_now: seconds is {seconds}, 2^32 half-lives of table {table.name!r} or "
                f"more: give it a half_life of more than {seconds >> 32} seconds"
            )
    if not tables.config.keeps_time:
        raise RuntimeError(
            "clock.set_now: no table keeps times: create one with policy=Policy(score='timestamp') "
            "or a ttl"
        )


def set_time(tables: Tables, seconds: int) -> None:
    """Set the time, which stays until the next step or longer: see :meth:`TableClock.set_now`."""
    check_now(tables, seconds)
    tables.check_own()
    tables.index.clock[Clock.NOW] = seconds
    if tables.host.proposed_now is not None:
        tables.host.proposed_now.fill_(seconds)


def propose(tables: Tables, now: int) -> None:
    """Set the time that this rank proposes to the others."""
    host = tables.host
    if host.proposed_now is None:
        host.proposed_now = torch.zeros(1, dtype=torch.int64, device=tables.device)
        mark_static([host.proposed_now])
    host.proposed_now.fill_(now)


def share_time_as(tables: Tables, other: Tables) -> None:
    """Copy the proposed time of other tables, if they have one, and what sets the time."""
    tables.host.time_is_given = other.host.time_is_given
    if other.host.proposed_now is not None:
        propose(tables, int(other.host.proposed_now))
        tables.host.last_reading = other.host.last_reading


def now_of_step(tables: Tables, now: int | None) -> int | None:
    """Return the time from the end of a step on; None: it stays, or a lookup sets it."""
    host = tables.host
    if now is not None:
        check_now(tables, now)
    elif tables.config.keeps_time:
        # the machine's clock may have been set back
        now = host.last_reading = max(host.last_reading, int(time.time()))
        if host.time_is_given:
            return None
        if host.proposed_now is not None:
            propose(tables, now)
            return None
    if now is not None and host.proposed_now is not None:
        propose(tables, now)
    return now


def next_now(tables: Tables) -> int:
    """Return the seconds of the next lookups, as far as this rank knows.

    Args:
        tables: tables of the group.
    """
    proposed = tables.host.proposed_now
    return max(int(tables.index.clock[Clock.NOW]), 0 if proposed is None else int(proposed))


__all__ = [
    "TableClock",
    "check_now",
    "next_now",
    "now_of_step",
    "propose",
    "set_time",
    "share_time_as",
]
