"""Reading of rows of saved parts, with any columns and ids, into rows of a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.checkpoint.loading.table_plan import TablePlan
from torch_dynemb.checkpoint.reading.saved_rows import SavedRows
from torch_dynemb.checkpoint.saving.table_files import Progress
from torch_dynemb.ops.row_copies import put_rows_
from torch_dynemb.parts.saved_tables import SavedPart
from torch_dynemb.rows.column_shards import combined_by_row
from torch_dynemb.rows.tensor_names import WEIGHT, state_entry
from torch_dynemb.table.narrowing import check_narrowed
from torch_dynemb.table.state_check import check_counts


class Chosen(NamedTuple):
    """Ids of a saved part, or of later changes, that are loaded.

    Attributes:
        source: the saved part; None: the later changes.
        places: int64 [n], their rows in the source; None: all rows.
    """

    source: SavedPart | None
    places: Tensor | None


class ReadTarget(NamedTuple):
    """Destination of rows of a saved part.

    Attributes:
        weights: [rows, columns].
        state: optimizer state by name, [rows, columns].
        begin: row of the first chosen one.
        saved: range of rows of the saved part; None: all.
        ids: int64 [n], ids of the chosen rows of the saved part.
    """

    weights: Tensor
    state: dict[str, Tensor]
    begin: int
    saved: range | None
    ids: Tensor


class RowReading:
    """Reader of the rows of a part.

    Args:
        plan: plan of the part.
        progress: called with the number of bytes read.
    """

    def __init__(self, plan: TablePlan, progress: Progress) -> None:
        self._plan, self._progress = plan, progress
        self._columns = plan.part.columns
        self._where = f"table {plan.part.name!r}"

    def read(
        self, opened: Sequence[tuple[SavedPart, SavedRows]], chosen: Chosen, target: ReadTarget
    ) -> None:
        """Read weights and state of chosen rows.

        Args:
            opened: saved parts that together have these rows, and their files.
            chosen: rows to read.
            target: destination.

        Raises:
            ValueError: a finite value is infinite in the dtype of the table.
            DamagedFileError: a file is damaged.
        """
        self._read_columns(opened, WEIGHT, chosen, target, target.weights)
        for tensor in self._plan.state:
            values, name = target.state[tensor.name], state_entry(tensor.name)
            if tensor.per_row:
                shards = _columns_of(opened, self._columns)
                self._combine(shards, name, chosen, target, values)
            elif tensor.dtype == torch.uint8:  # blocks span all columns of a part
                whole = slice(0, values.shape[1])
                for _, rows in opened:
                    self._copy(rows, name, chosen, target, values, whole, whole)
            else:
                self._read_columns(opened, name, chosen, target, values)

    def _read_columns(
        self,
        opened: Sequence[tuple[SavedPart, SavedRows]],
        name: str,
        chosen: Chosen,
        to: ReadTarget,
        values: Tensor,
    ) -> None:
        """Read the part's columns from those of each saved part."""
        own = self._columns
        for source, rows in opened:
            first = max(own.start, source.first_column)
            last = min(own.stop, source.first_column + source.columns)
            saved = slice(first - source.first_column, last - source.first_column)
            columns = slice(first - own.start, last - own.start)
            self._copy(rows, name, chosen, to, values, saved, columns)

    def _copy(
        self,
        rows: SavedRows,
        name: str,
        chosen: Chosen,
        to: ReadTarget,
        target: Tensor,
        saved_columns: slice,
        target_columns: slice,
    ) -> None:
        """Copy some columns of the chosen rows, piece by piece."""
        section, begin = rows.section(name), to.begin
        width = section.shape[1]
        straight = (
            chosen.places is None
            and target.device.type == "cpu"
            and section.dtype == target.dtype
            and saved_columns == slice(0, width)
            and target_columns == slice(0, target.shape[1])
        )
        buffer = torch.empty(0, device="cpu")
        for low, high in rows.ranges(section.row_bytes, to.saved):
            if straight:
                rows.read(name, low, target[begin + low : begin + high])
            else:
                if buffer.numel() == 0:
                    buffer = torch.empty((high - low, width), dtype=section.dtype, device="cpu")
                piece = buffer[: high - low]
                rows.read(name, low, piece)
                at, values = _picked(chosen, low, high, piece)
                out = target[begin + at : begin + at + values.shape[0], target_columns]
                given, ids = values[:, saved_columns], to.ids[at : at + values.shape[0]]
                state = None if name == WEIGHT else name.removeprefix(state_entry(""))
                check_narrowed(self._where, ids, given, target.dtype, state=state)
                put_rows_(out, given)
            self._progress((high - low) * section.row_bytes)

    def _combine(
        self,
        opened: Sequence[tuple[int, SavedRows]],
        name: str,
        chosen: Chosen,
        to: ReadTarget,
        target: Tensor,
    ) -> None:
        """Read one value for each chosen row, piece by piece."""
        section, begin = opened[0][1].section(name), to.begin
        for low, high in opened[0][1].ranges(section.row_bytes, to.saved):
            pieces = []
            for width, rows in opened:
                piece = torch.empty(high - low, 1, dtype=section.dtype, device="cpu")
                rows.read(name, low, piece)
                pieces.append((width, piece))
            values = combined_by_row(pieces)
            if values.dtype == torch.int32:
                check_counts(name, values)
            at, picked = _picked(chosen, low, high, values)
            put_rows_(target[begin + at : begin + at + picked.shape[0]], picked)
            self._progress((high - low) * section.row_bytes)


def _columns_of(
    opened: Sequence[tuple[SavedPart, SavedRows]], own: range
) -> list[tuple[int, SavedRows]]:
    """Return how many of some columns each source has."""
    result = []
    for source, rows in opened:
        first = max(own.start, source.first_column)
        result.append((min(own.stop, source.first_column + source.columns) - first, rows))
    return result


def places_of(chosen: Chosen, low: int, high: int) -> tuple[int, int]:
    """Return how many chosen rows are before a range of a saved part, and how many are in it.

    Args:
        chosen: chosen rows of the part.
        low, high: the range.
    """
    if chosen.places is None:
        return low, high - low
    bounds = torch.tensor([low, high], device="cpu")
    first, last = torch.searchsorted(chosen.places, bounds).tolist()
    return first, last - first


def _picked(chosen: Chosen, low: int, high: int, piece: Tensor) -> tuple[int, Tensor]:
    """Return the chosen rows of a range, and how many chosen rows are before it."""
    first, count = places_of(chosen, low, high)
    if chosen.places is None:
        return first, piece
    return first, piece[chosen.places[first : first + count] - low]


__all__ = ["Chosen", "ReadTarget", "RowReading", "places_of"]
