"""What the time is: of one group, or agreed on by the ranks that share tables.

On its own, a group reads the machine's clock when a step ends. Clocks of several machines differ,
so shards of one table would give one id different times and evict different ids. There, a rank only
proposes what it has read (``HostState.proposed_now``); proposals travel with the ids, and a lookup
takes the latest one of all ranks.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from torch_dynemb.ops.columns import MAX_COUNT, Clock
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.tables import Tables


def set_now(tables: Tables, seconds: int) -> None:
    """See :meth:`torch_dynemb.TableGroup.set_now`."""
    check_now(tables, seconds)
    tables.check_own()
    tables.index.clock[Clock.NOW] = seconds
    if tables.host.proposed_now is not None:
        tables.host.proposed_now.fill_(seconds)


def check_now(tables: Tables, seconds: int) -> None:
    """Raises TypeError, ValueError or RuntimeError for a time that cannot be set."""
    if isinstance(seconds, bool) or not isinstance(seconds, int):
        raise TypeError(f"set_now: seconds is {seconds!r}, expected int")
    if seconds < 0:
        raise ValueError(f"set_now: seconds is {seconds}, expected at least 0")
    if seconds > MAX_COUNT:
        raise ValueError(f"set_now: seconds is {seconds}, expected at most 2^62")
    if not tables.config.keeps_time:
        raise RuntimeError(
            "set_now: no table keeps times: create one with policy=Policy(score='timestamp') "
            "or a ttl"
        )


def share_time(tables: Tables, now: int) -> None:
    """See :meth:`torch_dynemb.TableGroup.share_time`."""
    check_now(tables, now)
    propose(tables, now)
    set_now(tables, now)


def agree_on_now(tables: Tables, proposals: Tensor) -> None:
    """See :meth:`torch_dynemb.TableGroup.agree_on_now`."""
    now = tables.index.clock[Clock.NOW]
    now.copy_(torch.maximum(now, proposals.max()))


def propose(tables: Tables, now: int) -> None:
    """Proposes a time to the other ranks, from now on."""
    host = tables.host
    if host.proposed_now is None:
        host.proposed_now = torch.zeros(1, dtype=torch.int64, device=tables.device)
        mark_static([host.proposed_now])
    host.proposed_now.fill_(now)


def share_time_as(tables: Tables, other: Tables) -> None:
    """Proposes what other tables propose, if they do."""
    if other.host.proposed_now is not None:
        propose(tables, int(other.host.proposed_now))
        tables.host.last_reading = other.host.last_reading


def now_of_step(tables: Tables, now: int | None) -> int | None:
    """The time from the end of a step on; None: it stays until a lookup sets it."""
    host = tables.host
    if now is not None:
        check_now(tables, now)
    elif tables.config.keeps_time:
        now = int(time.time())
        if host.proposed_now is not None:
            # the machine's clock may have been set back meanwhile
            host.last_reading = max(host.last_reading, now)
            propose(tables, host.last_reading)
            return None
    if now is not None and host.proposed_now is not None:
        propose(tables, now)
    return now


__all__ = [
    "agree_on_now",
    "check_now",
    "now_of_step",
    "propose",
    "set_now",
    "share_time",
    "share_time_as",
]
