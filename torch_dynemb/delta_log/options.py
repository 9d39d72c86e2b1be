"""Options of a delta log, checked once."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from torch_dynemb.argument_checks import flag, integer, number
from torch_dynemb.changes.row_forms import LOG_ROWS, LogRows
from torch_dynemb.delta_log.published_ids import Filter
from torch_dynemb.policy.keep import Keep


class LogOptions(NamedTuple):
    """Options of a log; see :class:`DeltaLog`.

    Attributes:
        every_steps: steps between commits; None: not by steps.
        every_seconds: seconds between commits; None: not by the clock.
        optimizer_state: whether commits have the optimizer state of rows.
        dense: whether commits have the dense state.
        resume: whether training can resume from commits.
        filter: tables and ids to publish.
        rows: form of the rows; None: that of the tables.
    """

    every_steps: int | None
    every_seconds: float | None
    optimizer_state: bool
    dense: bool
    resume: bool
    filter: Filter
    rows: LogRows | None

    @staticmethod
    def of(
        *,
        every_steps: int | None,
        every_seconds: float | None,
        optimizer_state: bool,
        dense: bool,
        tables: Collection[str] | None,
        keep: Keep | None,
        resume: bool,
        rows: LogRows | None,
    ) -> LogOptions:
        """Check the arguments of a log.

        Raises:
            TypeError, ValueError: one of them is wrong, or two exclude each other.
        """
        chosen = Filter.of(tables, keep)
        if every_steps is not None:
            integer("DeltaLog: every_steps", every_steps, least=1, what="int or None")
        if every_seconds is not None and not number("DeltaLog: every_seconds", every_seconds) > 0:
            raise ValueError(f"DeltaLog: every_seconds is {every_seconds}, expected more than 0")
        flag("DeltaLog: resume", resume)
        state = flag("DeltaLog: optimizer_state", optimizer_state) or resume
        flag("DeltaLog: dense", dense)
        if resume and not dense:
            raise ValueError(
                "DeltaLog: resume is True and dense is False, but training goes on with the dense "
                "state, too: leave dense out"
            )
        if resume and chosen.is_partial:
            partial = f"tables is {tables!r}" if keep is None else f"keep is {keep!r}"
            raise ValueError(
                f"DeltaLog: resume is True and {partial}, but training goes on with all rows: give "
                "followers a log of their own"
            )
        if rows is not None and rows not in LOG_ROWS:
            raise ValueError(f"DeltaLog: rows is {rows!r}, expected None or one of {LOG_ROWS}")
        if resume and rows is not None:
            raise ValueError(
                f"DeltaLog: resume is True and rows is {rows!r}, but training goes on with the "
                "rows as they are: give followers a log of their own"
            )
        return LogOptions(every_steps, every_seconds, state, dense, resume, chosen, rows)


__all__ = ["LogOptions"]
