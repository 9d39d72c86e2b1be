"""Changes of a commit of a delta log to a live table, and checks that the table can take them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.changes.commits import TableDelta
from torch_dynemb.parts.table_parts import PACKED
from torch_dynemb.serving.live_state import LiveState
from torch_dynemb.serving.row_formats import RowKind, stored_rows

_QUANTIZED: dict[int, RowKind] = {
    ops.LIVE_FORMATS["int8"]: "int8",
    ops.LIVE_FORMATS["int4"]: "int4",
    ops.LIVE_FORMATS["fp8"]: "fp8",
}


class TableChange(NamedTuple):
    """A live table, and the changes of a commit to it.

    Attributes:
        state: group of tables that has it.
        table: name of the table in the group.
        delta: changes of the commit.
    """

    state: LiveState
    table: str
    delta: TableDelta

    @property
    def empty(self) -> bool:
        """True if the commit does not change the table."""
        return self.delta.changed.ids.numel() == 0 and self.delta.removed.numel() == 0


def check_room(change: TableChange, *, make: bool = False) -> None:
    """Raise NoHeadroomError if the rows of a commit do not fit.

    Args:
        change: of the commit.
        make: make room for it, as :meth:`LiveState.check_room` does.
    """
    state, table, delta = change
    number = state.names.index(table)
    state.check_room(number, delta.changed.ids, delta.removed, make=make)


def check_values(change: TableChange) -> None:
    """Raise RuntimeError if a row would be refused, before any row is taken."""
    state, table, delta = change
    if delta.dtype == PACKED:
        raise RuntimeError(
            f"follow: table {table!r} is trained with rows of 8 bits, which live tables do not take"
        )
    number = state.names.index(table)
    code = state.format_of(number)
    if _as_published(change) is not None:
        lost = ~delta.changed.rows.isfinite().all(1)
    elif code in _QUANTIZED:
        lost = stored_rows(delta.changed.rows, _QUANTIZED[code]).lost
    else:
        return
    if bool(lost.any()):
        raise RuntimeError(
            f"follow: the commit has rows of table {table!r} with NaN, infinity, or a range that "
            "no scale of quantized rows holds (int4: values up to 65504): nothing has been "
            "applied. Make live tables with rows='bf16', or find out why they diverge"
        )


def take(change: TableChange) -> None:
    """Apply a checked commit to a live table."""
    state, table, delta = change
    quantized = _as_published(change)
    if quantized is not None and not change.empty:
        state.apply(
            state.names.index(table), delta.changed.ids, quantized.contiguous(), delta.removed
        )
    elif not change.empty:
        state.update("follow", table, delta.changed.ids, delta.changed.rows, delta.removed)


def _as_published(change: TableChange) -> Tensor | None:
    """Return the rows of a commit as a live table stores them; None if it stores others."""
    state, table, delta = change
    code = state.format_of(state.names.index(table))
    return delta.quantized if code == ops.LIVE_FORMATS["int8"] else None


__all__ = ["TableChange", "check_room", "check_values", "take"]
