"""Served tables that take updates."""

from __future__ import annotations

from torch import Tensor

from torch_dynemb.serving.live_state import LiveState, LiveUpdate, LiveVersion
from torch_dynemb.serving.missing import CountedTables


class UpdatedTables(CountedTables):
    """Base of served tables with rows that one thread updates while others read them.

    Attributes:
        dense_version: version of the dense state for :meth:`version`.
    """

    dense_version: str

    def state(self) -> LiveState:
        """Return the tables in the form that updates take."""
        raise NotImplementedError

    def update(
        self, table: int | str, ids: Tensor, rows: Tensor, *, erased: Tensor | None = None
    ) -> LiveUpdate:
        """Write rows of ids and remove other ids, while threads read.

        All of the update is applied, or nothing. Other threads see its rows one after another. An
        id in both ``erased`` and ``ids`` gets its row and is not removed, so no reader misses it.

        Args:
            table: name or number of the table.
            ids: int64 [n]; missing ids are inserted. The last row counts if an id occurs several
                times.
            rows: float32, bfloat16 or float16 [n, dim].
            erased: int64 [m], ids to remove; missing ids and those in ``ids`` are skipped.

        Returns:
            The number of ids inserted, updated and erased.

        Raises:
            TypeError, ValueError: an unknown table; dtype or shape of a tensor.
            NoHeadroomError: new ids need more rows than the table has; nothing has changed.
            RuntimeError: a padding id, a row that the format cannot hold, or another thread is
                updating tables of this group; nothing has changed.

        Example:
            >>> import torch, torch_dynemb as td
            >>> from torch_dynemb import serving
            >>> bag = td.DynamicEmbeddingBag(2, mode="sum", optimizer=td.SGD(lr=0.1), name="ads")
            >>> model = serving.live(bag, headroom=100)
            >>> ads = model.frozen_tables
            >>> ads.update("ads", torch.tensor([7, 8]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
            LiveUpdate(inserted=2, updated=0, erased=0)
            >>> model(torch.tensor([[7, 8]]))
            tensor([[4., 6.]])
        """
        return self.state().update("LiveTables.update", table, ids, rows, erased)

    def erase(self, table: int | str, ids: Tensor) -> int:
        """Remove ids from a table while threads read; their rows become free.

        Args:
            table: name or number of the table.
            ids: int64 [n]; missing ids are skipped.

        Returns:
            The number of ids removed.

        Raises:
            TypeError, ValueError: an unknown table; dtype or shape of ids.
            RuntimeError: another thread is updating tables of this group; nothing has changed.
        """
        return self.state().erase("LiveTables.erase", table, ids)

    def sizes(self) -> dict[str, int]:
        """Return the number of ids by table name."""
        return self.state().sizes()

    def free_rows(self) -> dict[str, int]:
        """Return by table name how many new ids it has rows for."""
        return self.state().free_rows()

    def version(self) -> LiveVersion:
        """Return the served version of the dense state, and the number of updates."""
        return LiveVersion(self.dense_version, self.state().updates())


__all__ = ["UpdatedTables"]
