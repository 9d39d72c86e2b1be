"""Rows by id, of which later ones replace earlier ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from torch_dynemb.table.shards import IdSlots

_LEAST_WAITING = 1 << 16


class LatestRows:
    """The last row of each id, from changes that are added in order.

    Added rows wait until there are as many as folded ones, so that adding n rows takes O(n log n)
    and memory for twice the distinct ids.
    """

    def __init__(self) -> None:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        self._ids, self._places = [none], [none]  # the place of a removed id is -1
        self._columns: dict[str, list[Tensor]] = {}
        self._folded = self._rows = self._waiting = 0

    def add(self, ids: Tensor, columns: Mapping[str, Tensor], removed: Tensor) -> None:
        """Add rows, and remove ids.

        Args:
            ids: int64 [n], unique.
            columns: [n, ...] each, with the same names in every call.
            removed: int64 [m], unique, other ids.
        """
        count = ids.numel()
        if count + removed.numel() == 0:
            return
        self._ids += [ids, removed]
        self._places.append(torch.arange(self._rows, self._rows + count, device="cpu"))
        self._places.append(torch.full_like(removed, -1))
        for name, values in columns.items():
            self._columns.setdefault(name, []).append(values)
        self._rows += count
        self._waiting += count + removed.numel()
        if self._waiting > max(_LEAST_WAITING, self._folded):
            self._fold()

    def remove_owned(self, slots: IdSlots) -> None:
        """Remove all ids of a part.

        Args:
            slots: slots of the part.
        """
        ids = self.ids()
        self.add(ids[:0], {}, ids[slots.owned(ids)])

    def change(self, name: str, change: Callable[[Tensor], Tensor]) -> None:
        """Replace a column.

        Args:
            name: its name.
            change: returns the new values, [n, ...], from the old ones.
        """
        self._fold()
        if name in self._columns:
            self._columns[name] = [change(self._columns[name][0])]

    def touched(self) -> Tensor:
        """Return all ids that were added or removed, int64 [n], ascending."""
        self._fold()
        return self._ids[0]

    def ids(self) -> Tensor:
        """Return the ids with a row, int64 [n], ascending."""
        self._fold()
        return self._ids[0][self._places[0] >= 0]

    def column(self, name: str, empty: Tensor) -> Tensor:
        """Return the values of the ids with a row.

        Args:
            name: name of the column.
            empty: result if no row was ever added.
        """
        self._fold()
        return self._columns[name][0] if name in self._columns else empty

    def _fold(self) -> None:
        if self._waiting == 0:
            return
        ids, of_ids = torch.cat(self._ids).unique(return_inverse=True)
        order = torch.arange(of_ids.numel(), device="cpu")
        last = torch.zeros_like(ids).scatter_reduce_(0, of_ids, order, "amax")
        places = torch.cat(self._places)[last]
        here = places >= 0
        for name, values in self._columns.items():
            self._columns[name] = [torch.cat(values)[places[here]]]
        self._rows = int(here.sum())
        places[here] = torch.arange(self._rows, device="cpu")
        self._ids, self._places = [ids], [places]
        self._folded, self._waiting = ids.numel(), 0


__all__ = ["LatestRows"]
