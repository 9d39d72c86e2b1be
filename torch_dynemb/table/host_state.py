"""State of a group of tables on the host, beside the tensors."""

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
        scores: int64 [n], the scores at their eviction.
        rows: float32 [n, dim], their last values; None if they were not recorded.
    """

    ids: Tensor
    scores: Tensor
    rows: Tensor | None


class ListedCounts(NamedTuple):
    """Ids of a table with the sums of a power of their counts.

    Attributes:
        ids: int64 [n]; empty where only the counts are summed.
        sums: float64 [n], of ``count ** power`` up to and with each id; or [1], of all counts.
        step: training steps that had ended when they were listed.
    """

    ids: Tensor
    sums: Tensor
    step: int


EvictionCallback = Callable[[str, EvictedIds], object]


@dataclass(eq=False)
class EvictionRecords:
    """Settings and rows of the records of evicted ids.

    Attributes:
        callback: called at the end of a step.
        rows: by table, rows of the ids in ``index.evicted``; None: they are not recorded.
        replaced: earlier ``index.evicted`` of a GPU, into which graphs that were captured before
            still write.
    """

    callback: EvictionCallback | None = None
    rows: list[list[Tensor]] | None = None
    replaced: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class ExpiryFloors:
    """Times below which ids of tables may expire.

    Attributes:
        values: int64 [tables], on the device.
        seen: ended steps and sizes of the tables when they were computed.
        second: of the last step that computed them.
    """

    values: Tensor
    seen: tuple[int, ...] = ()
    second: int = -1


@dataclass(eq=False)
class HostState:
    """State that changes during training and that kernels do not read.

    Attributes:
        rejected: by table, the new ids without room at the end of the last step.
        steps: training steps that have ended.
        batch_scored: the tables that have a custom score from their lookups.
        proposed_now: int64 [1], seconds that this rank proposes; None: the group is on one rank.
        last_reading: of this machine's clock, seconds.
        time_is_given: whether the program sets the time; else steps read the machine's clock.
        forked: whether this process inherited the tables by a fork.
        background: current or last work of a thread for the tables; the next step raises its error.
        readers: readers of the changes of the tables, by name.
        expiry_floors: of tables with ``Policy(keep_at_least=)``; None: there are none.
        counted: by table and power, ids to sample by their counts; 0: the sum of the counts.
        rows_read: set as soon as a save in the background has read the rows; None: no such save.
    """

    rejected: list[int]
    steps: int = 0
    batch_scored: set[int] = field(default_factory=set)
    proposed_now: Tensor | None = None
    last_reading: int = 0
    time_is_given: bool = False
    forked: bool = False
    background: BackgroundWork | None = None
    readers: dict[str, ChangeReader] = field(default_factory=dict)
    expiry_floors: ExpiryFloors | None = None
    rows_read: threading.Event | None = None
    counted: dict[tuple[int, float], ListedCounts] = field(default_factory=dict)


__all__ = [
    "EvictedIds",
    "EvictionCallback",
    "EvictionRecords",
    "ExpiryFloors",
    "HostState",
    "ListedCounts",
]
