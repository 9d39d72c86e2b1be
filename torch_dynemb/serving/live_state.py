"""Live tables for updates and counts, of a model or of a package."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb._library.error_names import name_tables
from torch_dynemb.argument_checks import described, table_number
from torch_dynemb.errors import NoHeadroomError
from torch_dynemb.files.tensor_file import rows_as_bytes
from torch_dynemb.ops.columns import LiveTable, Meta, RowFormat
from torch_dynemb.ops.quantized import row_bytes

# dtypes of rows of an update, and the format in which live tables store them
ROW_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
QUANTIZED = {
    ops.LIVE_FORMATS["int8"]: RowFormat.INT8,
    ops.LIVE_FORMATS["int4"]: RowFormat.INT4,
    ops.LIVE_FORMATS["fp8"]: RowFormat.FLOAT8,
}


def no_headroom(table: str, *, wanted: int, free: int) -> NoHeadroomError:
    """Return the error of an update with more new ids than free rows.

    Args:
        table: name or number of the table.
        wanted: rows that new ids need.
        free: free rows.
    """
    return NoHeadroomError(
        f"table {table!r} has {free} rows free, but new ids of this update need "
        f"{wanted}: nothing has changed, and the earlier rows stay in service. "
        "Erase ids, or make the tables again with more headroom and serve those",
        table=table,
        wanted=wanted,
        free=free,
    )


class LiveUpdate(NamedTuple):
    """Result of an update of a table.

    Attributes:
        inserted: new ids.
        updated: rows of known ids, and of ids that occur earlier in the update.
        erased: ids that have been removed.
    """

    inserted: int
    updated: int
    erased: int


class LiveVersion(NamedTuple):
    """The served version.

    Attributes:
        dense: version of the dense state, passed to :func:`live`. Updates of rows do not change it.
        updates: by table name, the number of updates since it was made.
    """

    dense: str
    updates: dict[str, int]


class LiveState:
    """Tables of a group with rows that are updated.

    Args:
        names: of the tables.
        meta: int64 [T, 16], their constants.
    """

    def __init__(self, names: list[str], meta: Tensor) -> None:
        self.names, self.meta = names, meta

    def format_of(self, number: int) -> int:
        """Return the format of a table's rows, of ``LIVE_FORMATS``."""
        raise NotImplementedError

    def sizes(self) -> dict[str, int]:
        """Return the number of ids by table name."""
        raise NotImplementedError

    def free_rows(self) -> dict[str, int]:
        """Return by table name how many new ids it has rows for."""
        raise NotImplementedError

    def updates(self) -> dict[str, int]:
        """Return by table name the number of its updates."""
        raise NotImplementedError

    def check_room(self, number: int, ids: Tensor, removed: Tensor, *, make: bool = False) -> None:
        """Raise NoHeadroomError if the rows of an update do not fit.

        Args:
            number: of the table.
            ids: int64 [n], with rows.
            removed: int64 [m].
            make: the update follows, which must not fail: make room for it.

        Raises:
            DiskFullError, RuntimeError: rows in a file have to be written anew, which failed.
        """
        raise NotImplementedError

    def _apply(self, table: int, ids: Tensor, values: Tensor, erased: Tensor) -> ops.Applied:
        raise NotImplementedError

    def no_room(self, number: int, *, wanted: int, free: int) -> NoHeadroomError:
        """Return the error of an update that needs more than a table has."""
        return no_headroom(self.names[number], wanted=wanted, free=free)

    def dim_of(self, number: int) -> int:
        """Return the columns of a table."""
        return int(self.meta[number, Meta.DIM])

    def padding_of(self, number: int) -> int | None:
        """Return the padding id of a table."""
        meta = self.meta[number]
        return int(meta[Meta.PADDING_ID]) if int(meta[Meta.HAS_PADDING]) else None

    def update(
        self, owner: str, table: int | str, ids: object, rows: object, erased: object
    ) -> LiveUpdate:
        """Check an update and apply it.

        Args:
            owner: method named by errors.
            table: name or number of the table.
            ids: int64 [n].
            rows: float32, bfloat16 or float16 [n, dim].
            erased: int64 [m], or None.

        Raises:
            TypeError, ValueError: an argument.
            NoHeadroomError, RuntimeError: as :meth:`apply`.
        """
        number = table_number(owner, self.names, table)
        dim = self.dim_of(number)
        new_ids = _checked_ids(owner, "ids", ids)
        old_ids = new_ids[:0] if erased is None else _checked_ids(owner, "erased", erased)
        if not isinstance(rows, Tensor) or rows.dtype not in ROW_DTYPES:
            raise TypeError(
                f"{owner}: rows is {described(rows)}, expected a tensor of float32, bfloat16 or "
                "float16"
            )
        if rows.shape != (new_ids.shape[0], dim):
            raise ValueError(
                f"{owner}: rows has shape {tuple(rows.shape)}, expected "
                f"{(new_ids.shape[0], dim)}, a row of table {self.names[number]!r} for each id"
            )
        return self.apply(number, new_ids, rows.detach().float().contiguous(), old_ids)

    def erase(self, owner: str, table: int | str, ids: object) -> int:
        """Remove ids from a table and return their number; raise what update raises."""
        number = table_number(owner, self.names, table)
        old_ids = _checked_ids(owner, "ids", ids)
        none = torch.empty(0, self.dim_of(number), device="cpu")
        return self.apply(number, old_ids[:0], none, old_ids).erased

    def apply(self, table: int, ids: Tensor, values: Tensor, erased: Tensor) -> LiveUpdate:
        """Remove ids from a table and write rows of others. All of it is applied, or nothing.

        Args:
            table: number of the table.
            ids: int64 [n].
            values: float32 [n, dim], or uint8 [n, bytes] as tables of 8 bits and less store them.
            erased: int64 [m]; ids that are also in ``ids`` stay.

        Raises:
            NoHeadroomError: new ids need more rows than are free.
            RuntimeError: a padding id, a row that the format cannot hold, damaged tables, or
                another thread is updating these tables.
        """
        try:
            done = self._apply(table, ids, values, erased)
        except RuntimeError as error:
            name_tables(error, self.names)
            raise
        if done.wanted > done.free:
            raise self.no_room(table, wanted=done.wanted, free=done.free)
        return LiveUpdate(done.inserted, done.updated, done.erased)


class MemoryState(LiveState):
    """Live tables with their rows in memory.

    Args:
        names: of the tables.
        tensors: as ops take them.
    """

    def __init__(self, names: list[str], tensors: ops.ServedTensors) -> None:
        super().__init__(names, tensors.meta)
        self._tensors = tensors

    def format_of(self, number: int) -> int:
        return self._tensors.formats[int(self.meta[number, Meta.SLAB])]

    def sizes(self) -> dict[str, int]:
        return self._column(LiveTable.SIZE)

    def free_rows(self) -> dict[str, int]:
        most, sizes = self._column(LiveTable.CAPACITY), self.sizes()
        return {name: most[name] - sizes[name] for name in self.names}

    def updates(self) -> dict[str, int]:
        return self._column(LiveTable.BATCHES)

    def _column(self, column: LiveTable) -> dict[str, int]:
        return dict(zip(self.names, self._tensors.tables[:, column].tolist(), strict=True))

    def check_room(self, number: int, ids: Tensor, removed: Tensor, *, make: bool = False) -> None:
        free = self.free_rows()[self.names[number]]
        if ids.numel() <= free:
            return
        wanted = self._missing(number, ids)
        removed = removed[~torch.isin(removed, ids)]  # others keep their rows
        gone = removed.numel() - self._missing(number, removed)
        if wanted - gone > free:
            raise self.no_room(number, wanted=wanted - gone, free=free)

    def _missing(self, number: int, ids: Tensor) -> int:
        """Count the ids that a table lacks."""
        batch = ops.LookupBatch.of_rows(ids, ids[:0], [number], self.dim_of(number))
        return int(ops.serve_lookup(self._tensors, batch).missing.sum())

    def stored_rows(self, number: int, ids: Tensor) -> ops.LiveRows:
        """Read rows in the form in which :meth:`apply` takes them, to the bit.

        Args:
            number: of the table.
            ids: int64 [n].
        """
        live, dim = self._tensors, self.dim_of(number)
        slab = int(live.meta[number, Meta.SLAB])
        if live.formats[slab] not in QUANTIZED:
            return ops.serve_rows(live, ids, table=number, dim=dim)
        size = row_bytes(QUANTIZED[live.formats[slab]], dim)
        # their words, read as float32, and so are those of all tables of the slab
        meta, formats = live.meta.clone(), list(live.formats)
        words = 2 * live.weights[slab].shape[1]
        meta[meta[:, Meta.SLAB] == slab, Meta.DIM] = words
        formats[slab] = ops.LIVE_FORMATS["fp32"]
        live = live._replace(meta=meta, formats=formats)
        read = ops.serve_rows(live, ids, table=number, dim=words)
        return read._replace(rows=rows_as_bytes(read.rows)[:, :size])

    def _apply(self, table: int, ids: Tensor, values: Tensor, erased: Tensor) -> ops.Applied:
        return ops.serve_apply_(self._tensors, table, ids, values, erased)


class FileState(LiveState):
    """Live tables with their rows in a file.

    Args:
        names: of the tables.
        file: int64 [519], which names the file.
        meta: int64 [T, 16].
        writing: held for an update, and by a commit for all of its updates.
    """

    def __init__(
        self,
        names: list[str],
        file: Tensor,
        meta: Tensor,
        writing: AbstractContextManager[object],
    ) -> None:
        super().__init__(names, meta)
        self._file, self.writing = file, writing
        self._formats = self._counts().formats

    def _counts(self) -> ops.FileCounts:
        return ops.file_counts(self._file, len(self.names))

    def format_of(self, number: int) -> int:
        return self._formats[number]

    def sizes(self) -> dict[str, int]:
        return dict(zip(self.names, self._counts().ids, strict=True))

    def free_rows(self) -> dict[str, int]:
        """Return by table name how many ids an update may change."""
        return dict(zip(self.names, self._counts().headroom, strict=True))

    def updates(self) -> dict[str, int]:
        return dict(zip(self.names, self._counts().updates, strict=True))

    def check_room(self, number: int, ids: Tensor, removed: Tensor, *, make: bool = False) -> None:
        try:
            with self.writing:
                room = ops.file_room(self._file, number, ids, removed, write=make)
        except RuntimeError as error:
            name_tables(error, self.names)
            raise
        if room.wanted > room.free:
            raise self.no_room(number, wanted=room.wanted, free=room.free)

    def no_room(self, number: int, *, wanted: int, free: int) -> NoHeadroomError:
        table = self.names[number]
        return NoHeadroomError(
            f"table {table!r} keeps changes of {free} ids in memory, but this update changes or "
            f"removes {wanted}: nothing has changed, and the earlier rows stay in service. Give "
            "smaller updates, or make the tables again with more headroom and serve those",
            table=table,
            wanted=wanted,
            free=free,
        )

    def _apply(self, table: int, ids: Tensor, values: Tensor, erased: Tensor) -> ops.Applied:
        with self.writing:
            return ops.file_apply(self._file, table, ids, values, erased)


def _checked_ids(owner: str, name: str, ids: object) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        raise TypeError(f"{owner}: {name} is {described(ids)}, expected a tensor of int64")
    if ids.dim() != 1:
        raise ValueError(f"{owner}: {name} has shape {tuple(ids.shape)}, expected 1 dimension")
    return ids.contiguous()


__all__ = [
    "QUANTIZED",
    "ROW_DTYPES",
    "FileState",
    "LiveState",
    "LiveUpdate",
    "LiveVersion",
    "MemoryState",
    "no_headroom",
]
