"""Live tables for updates and counts, of a model or of a package."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb._library.error_names import name_tables
from torch_dynemb.argument_checks import described, table_number
from torch_dynemb.errors import NoHeadroomError
from torch_dynemb.ops.columns import LiveTable, Meta

# dtypes of rows of an update, and the format in which live tables store them
ROW_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


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


class LiveState(NamedTuple):
    """Tables of a group with rows that are updated.

    Attributes:
        names: of the tables.
        tensors: as ops take them.
    """

    names: list[str]
    tensors: ops.ServedTensors

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
        dim = int(self.tensors.meta[number, Meta.DIM])
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
        none = torch.empty(0, int(self.tensors.meta[number, Meta.DIM]), device="cpu")
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
            done = ops.serve_apply_(self.tensors, table, ids, values, erased)
        except RuntimeError as error:
            name_tables(error, self.names)
            raise
        if done.wanted > done.free:
            raise no_headroom(self.names[table], wanted=done.wanted, free=done.free)
        return LiveUpdate(done.inserted, done.updated, done.erased)

    def sizes(self) -> dict[str, int]:
        """Return the number of ids by table name."""
        return self._column(LiveTable.SIZE)

    def free_rows(self) -> dict[str, int]:
        """Return by table name how many new ids it has rows for."""
        most, sizes = self._column(LiveTable.CAPACITY), self.sizes()
        return {name: most[name] - sizes[name] for name in self.names}

    def updates(self) -> dict[str, int]:
        """Return by table name the number of its updates."""
        return self._column(LiveTable.BATCHES)

    def _column(self, column: LiveTable) -> dict[str, int]:
        return dict(zip(self.names, self.tensors.tables[:, column].tolist(), strict=True))


def _checked_ids(owner: str, name: str, ids: object) -> Tensor:
    if not isinstance(ids, Tensor) or ids.dtype != torch.int64:
        raise TypeError(f"{owner}: {name} is {described(ids)}, expected a tensor of int64")
    if ids.dim() != 1:
        raise ValueError(f"{owner}: {name} has shape {tuple(ids.shape)}, expected 1 dimension")
    return ids.contiguous()


__all__ = ["ROW_DTYPES", "LiveState", "LiveUpdate", "LiveVersion", "no_headroom"]
