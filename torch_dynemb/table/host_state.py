"""What the host knows of a group of tables, beside their tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from torch_dynemb.table.background import BackgroundWork
from torch_dynemb.table.change_reader import ChangeReader


class EvictedIds(NamedTuple):
    """Ids that a table has evicted, in the order of the ids that took their rows.

    Attributes:
        ids: int64 [n].
        scores: int64 [n], what they were evicted for.
        rows: float32 [n, dim], their last values; None if they were not asked for.
    """

    ids: Tensor
    scores: Tensor
    rows: Tensor | None


EvictionCallback = Callable[[str, EvictedIds], object]


@dataclass(eq=False)
class EvictionRecords:
    """What is done about evicted ids.

    Attributes:
        callback: is called at the end of a step.
        rows: by table, rows of the ids in ``index.evicted``; None: they are not kept.
    """

    callback: EvictionCallback | None = None
    rows: list[list[Tensor]] | None = None


@dataclass(eq=False)
class HostState:
    """What changes in the course of training, and no kernel needs.

    Attributes:
        rejected: by table, the new ids without room at the end of the last step.
        steps: training steps that have ended.
        batch_scored: the tables whose lookups have a custom score.
        proposed_now: int64 [1], seconds that this rank proposes; None: the group is on its own.
        last_reading: of this machine's clock, seconds.
        forked: whether this process got the tables from its parent.
        background: what a thread does for the tables, or has done last; the next step raises its
            error.
        readers: who reads the changes of the tables, by name.
        rows_read: is set when the save in the background that reads the rows, if there is one, has
            read them.
    """

    rejected: list[int]
    steps: int = 0
    batch_scored: set[int] = field(default_factory=set)
    proposed_now: Tensor | None = None
    last_reading: int = 0
    forked: bool = False
    background: BackgroundWork | None = None
    readers: dict[str, ChangeReader] = field(default_factory=dict)
    rows_read: threading.Event | None = None


__all__ = ["EvictedIds", "EvictionCallback", "EvictionRecords", "HostState"]
