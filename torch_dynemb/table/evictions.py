"""Who has been evicted."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import flag, integer
from torch_dynemb.ops.columns import EVICTED_COLUMNS, Evicted
from torch_dynemb.process.forked import check_own
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.group_parts import GroupParts


class EvictedIds(NamedTuple):
    """Ids that a table has evicted, in the order of the ids that took their rows.

    Attributes:
        ids: int64 [n].
        scores: int64 [n], what they were evicted for.
        rows: float32 [n, dim], their last values; None if they were not asked for.
    """

    ids: Tensor
    scores: Tensor
    rows: Tensor | None


EvictionCallback = Callable[[str, EvictedIds], object]


class Evictions(GroupParts):
    """The part of a table group that says who has been evicted."""

    _eviction_callback: EvictionCallback | None
    _evicted_rows: list[list[Tensor]] | None

    def record_evicted(self, records: int, *, rows: bool = False) -> None:
        """Keeps the ids that are evicted from now on, until :meth:`take_evicted`.

        Replaces a tensor: compiled code is compiled again, graphs must be captured again.

        Args:
            records: how many to keep room for; more are counted and lost.
            rows: keep their rows, too. Every lookup then waits for the device, and cannot be
                compiled.
        """
        self.__dict__.update(self._empty_records(records, rows=rows))

    def _empty_records(self, records: int, *, rows: bool) -> dict[str, object]:
        records = integer("record_evicted: records", records, least=1)
        flag("record_evicted: rows", rows)
        evicted = torch.zeros(1 + records, EVICTED_COLUMNS, dtype=torch.int64, device=self.device)
        mark_static([evicted])
        kept: list[list[Tensor]] | None = [[] for _ in self.tables_config] if rows else None
        return {"evicted": evicted, "_evicted_rows": kept}

    def on_evicted(
        self, callback: EvictionCallback, *, records: int = 1 << 16, rows: bool = False
    ) -> None:
        """Has ``optimizer.step()`` call ``callback(table name, EvictedIds)``; waits for the device.

        Args:
            records, rows: as in :meth:`record_evicted`; records of one step.
        """
        if not callable(callback):
            raise TypeError(f"on_evicted: callback is {callback!r}, expected a function")
        empty = self._empty_records(records, rows=rows)
        self.__dict__.update(empty, _eviction_callback=callback)

    def take_evicted(self) -> dict[str, EvictedIds]:
        """What has been recorded since the last call, by table; waits for the device.

        Raises:
            RuntimeError: more ids were evicted than there was room to record.
        """
        check_own(self)
        count, lost = self.evicted[0, :2].tolist()
        records = self.evicted[1 : 1 + count].clone()
        kept = self._evicted_rows
        result = {}
        for t, name in enumerate(self.names) if lost == 0 else ():
            own = records[records[:, Evicted.TABLE] == t]
            if own.shape[0] > 0:
                rows = None if kept is None else torch.cat(kept[t])
                result[name] = EvictedIds(
                    own[:, Evicted.ID].contiguous(), own[:, Evicted.SCORE].contiguous(), rows
                )
        with held_back():
            self.evicted[0].zero_()
            if kept is not None:
                self._evicted_rows = [[] for _ in self.tables_config]
        if lost > 0:
            raise RuntimeError(
                f"take_evicted: {lost} evicted ids were not recorded: there was room for "
                f"{self.evicted.shape[0] - 1}: call record_evicted with more, or take_evicted more "
                "often"
            )
        return result

    def _evicted_before(self) -> int:
        return 0 if self._evicted_rows is None else int(self.evicted[0, 0])

    def _keep_evicted_rows(self, before: int) -> None:
        """The new owners have not been written yet: the rows are still those of the old ones."""
        if self._evicted_rows is None:
            return
        records = self.evicted[1 + before : 1 + int(self.evicted[0, 0])]
        for t, table in enumerate(self.tables_config):
            own = records[records[:, Evicted.TABLE] == t]
            if own.shape[0] > 0:
                self._evicted_rows[t].append(
                    ops.embedding_inference(
                        self.rows,
                        own[:, Evicted.ID].contiguous(),
                        own[:, Evicted.HANDLE].contiguous(),
                        self.one_bag,
                        feature_tables=[t],
                        dim=table.embedding_dim,
                    )
                )


__all__ = ["EvictedIds", "EvictionCallback", "Evictions"]
