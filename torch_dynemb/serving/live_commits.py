"""What a commit of a delta log does to a live table, and whether the table can take it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.checkpoint.delta_log.commits import TableDelta
from torch_dynemb.checkpoint.entries import PACKED
from torch_dynemb.ops.columns import Meta
from torch_dynemb.serving.live_state import LiveState, no_headroom
from torch_dynemb.serving.row_formats import RowKind, stored_rows

_QUANTIZED: dict[int, RowKind] = {
    ops.LIVE_FORMATS["int8"]: "int8",
    ops.LIVE_FORMATS["int4"]: "int4",
    ops.LIVE_FORMATS["fp8"]: "fp8",
}


class TableChange(NamedTuple):
    """A live table, and what a commit does to it.

    Attributes:
        state: tables of which it is one.
        table: its name there.
        delta: what the commit changes.
    """

    state: LiveState
    table: str
    delta: TableDelta

    @property
    def empty(self) -> bool:
        """Whether nothing changes."""
        return self.delta.ids.numel() == 0 and self.delta.removed.numel() == 0


def check_room(change: TableChange) -> None:
    """Raises NoHeadroomError where a commit brings more ids than there are rows for."""
    state, table, delta = change
    free = state.free_rows()[table]
    if delta.ids.numel() <= free:
        return
    wanted = _missing(change, delta.ids)
    removed = delta.removed[~torch.isin(delta.removed, delta.ids)]  # others keep their rows
    gone = removed.numel() - _missing(change, removed)
    if wanted - gone > free:
        raise no_headroom(table, wanted=wanted - gone, free=free)


def check_values(change: TableChange) -> None:
    """Raises RuntimeError where rows would be refused when others have been taken."""
    state, table, delta = change
    if delta.dtype == PACKED:
        raise RuntimeError(
            f"follow: table {table!r} is trained with rows of 8 bits, which live tables do not take"
        )
    number = state.names.index(table)
    code = state.tensors.formats[int(state.tensors.meta[number, Meta.SLAB])]
    if code in _QUANTIZED and bool(stored_rows(delta.rows, _QUANTIZED[code]).lost.any()):
        raise RuntimeError(
            f"follow: the commit has rows of table {table!r} with NaN, infinity, or a range that "
            "no scale of quantized rows holds (int4: values up to 65504): nothing of it has been "
            "applied. Make live tables with rows='bf16', or find out why they diverge"
        )


def take(change: TableChange) -> None:
    """Gives a live table what a commit that was checked changes in it."""
    state, table, delta = change
    if not change.empty:
        state.update("follow", table, delta.ids, delta.rows, delta.removed)


def _missing(change: TableChange, ids: Tensor) -> int:
    """How many ids a live table has not got."""
    table = change.state.names.index(change.table)
    batch = ops.LookupBatch.of_rows(ids, ids[:0], [table], change.delta.embedding_dim)
    return int(ops.serve_lookup(change.state.tensors, batch).missing.sum())


__all__ = ["TableChange", "check_room", "check_values", "take"]
