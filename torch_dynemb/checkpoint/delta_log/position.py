"""Where a model is in a delta log, for copies of it that follow the log later, elsewhere."""

from __future__ import annotations

from typing import NamedTuple


class LogPosition(NamedTuple):
    """Where a model is in the log that it is published to; :meth:`DeltaLog.position` tells it.

    Attributes:
        base: uuid of the checkpoint that the log begins with.
        sequence: number of the last commit; None: there is none since the base.
        chain: of the batch of that commit, which no other log has.
        rank: that has written this batch.
        tables: columns of the tables of the model, by the names that they have in the log.
    """

    base: str
    sequence: int | None
    chain: int
    rank: int
    tables: dict[str, int]


__all__ = ["LogPosition"]
