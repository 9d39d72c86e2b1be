"""Position of a model in a delta log, for copies of it that follow the log elsewhere."""

from __future__ import annotations

from typing import NamedTuple


class LogPosition(NamedTuple):
    """Position of a model in the log that it is published to; from :meth:`DeltaLog.position`.

    Attributes:
        base: uuid of the checkpoint that the log begins with.
        sequence: number of the last commit; None if there is none since the base.
        chain: chain after that commit, which is unique to the log.
        rank: rank that wrote its batch.
        tables: columns of the tables of the model, by their names in the log.
    """

    base: str
    sequence: int | None
    chain: int
    rank: int
    tables: dict[str, int]


__all__ = ["LogPosition"]
