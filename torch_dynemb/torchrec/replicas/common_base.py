"""Content that sharding groups had in common at their last sync, and what changed since."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.files.tensor_file import as_bytes
from torch_dynemb.ops.columns import GENERATION_BITS, Slab
from torch_dynemb.table.change_reader import ChangeReader
from torch_dynemb.table.changes import (
    lost_owners,
    owner_tables,
    read_changes,
    reader_of,
    record_changes,
    take_changes,
)
from torch_dynemb.table.content import CountedIds, read_counts
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.lookup import find
from torch_dynemb.table.row_access import read_rows
from torch_dynemb.table.tables import Tables, exported, one_table
from torch_dynemb.table.waiting_counts import counts_among

_READER = "sync of replicas"
_SAMPLED_ROWS = 4096  # of a table, in a digest
_IDS_AT_ONCE = 1 << 20


class Touched(NamedTuple):
    """Ids of a table that changed since the base.

    Attributes:
        ids: int64 [n], new ids, and those with a changed row or score.
        removed: int64 [m].
        waiting: int64 [k], ids with another count of admission; 0 counts, too.
    """

    ids: Tensor
    removed: Tensor
    waiting: Tensor


class BaseScores(NamedTuple):
    """Scores of ids in the base.

    Attributes:
        known: bool [n], whether the base has the id.
        words: int64 [n, words], of the group's score words; 0 for unknown ids.
        restarted: bool [n], whether the id has lost its row since, so that its scores began anew.
    """

    known: Tensor
    words: Tensor
    restarted: Tensor


class CommonBase:
    """The base of a group of tables: ids, scores and counts of admission at the last sync.

    Rows of the base are not kept: dirty bits say which rows changed.

    Args:
        group: the tables, between two training steps.

    Attributes:
        digest: of the content that replaced the tables since the last sync; 0: none did.
    """

    def __init__(self, group: TableGroup) -> None:
        self._group = group
        self._since = f"sync of replicas {id(self)}"
        self.digest = 0
        self.renew()

    @property
    def group(self) -> TableGroup:
        """The tables."""
        return self._group

    def is_current(self) -> bool:
        """Return whether the content was not replaced, as by a load, since the base was taken."""
        reader = reader_of(self._group.tables, _READER)
        return reader is not None and reader.since == self._since

    def renew(self) -> None:
        """Take the present content as the base."""
        tables = self._group.tables
        reader = record_changes(tables, _READER, scores=True)
        take_changes(tables, reader, read_changes(tables, reader), self._since)
        self._counts = self._counts_now()
        self._generations = tables.index.slabs[:, Slab.GENERATION].clone()

    def renew_if_replaced(self) -> None:
        """Take content that a load has brought as the base, before training changes it."""
        if not self.is_current():
            self.renew()
            self.digest = _digest(self._group.tables)

    def touched(self) -> list[Touched]:
        """Return the changes since the base, by table."""
        tables = self._group.tables
        self._changes = read_changes(tables, self._reader())
        self._now = self._counts_now()
        return [
            Touched(changed.ids, changed.removed, _differing(before, now, changed.ids))
            for changed, before, now in zip(
                self._changes.tables, self._counts, self._now, strict=True
            )
        ]

    def scores_of(self, table: int, ids: Tensor, handles: Tensor) -> BaseScores:
        """Return scores of ids in the base; call :meth:`touched` before.

        Args:
            table: number of the table.
            ids: int64 [n].
            handles: int64 [n], of the ids; negative if an id has no row now.
        """
        tables, reader = self._group.tables, self._reader()
        slab = tables.config.slab_of(table)
        before = reader.owners[slab]
        known = torch.zeros_like(ids, dtype=torch.bool)
        words = ids.new_zeros(ids.numel(), before.shape[1] - 2)
        rows = handles >> GENERATION_BITS
        inside = ((handles >= 0) & (rows < before.shape[0])).nonzero()[:, 0]
        of_rows = before[rows[inside]]
        same = (of_rows[:, 0] == ids[inside]) & (owner_tables(of_rows) == table)
        known[inside[same]] = True
        words[inside[same]] = of_rows[same, 2:]
        # the others had another row, which has another owner now, or none
        moved = (~known).nonzero()[:, 0]
        lost = lost_owners(before, self._changes.owners[slab])
        lost = lost[owner_tables(lost) == table]
        order = torch.argsort(lost[:, 0])
        lost = lost[order]
        compacted = int(tables.index.slabs[slab, Slab.GENERATION]) != int(self._generations[slab])
        restarted = torch.zeros_like(known)
        if lost.shape[0] > 0 and moved.numel() > 0:
            places = torch.searchsorted(lost[:, 0].contiguous(), ids[moved])
            places = places.clamp(max=lost.shape[0] - 1)
            found = lost[places, 0] == ids[moved]
            known[moved[found]] = True
            words[moved[found]] = lost[places[found], 2:]
            restarted[moved[found]] = (handles[moved[found]] >= 0) & (not compacted)
        return BaseScores(known, words, restarted)

    def counts_of(self, table: int, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return counts of admission in the base and now, int64 [n] each; 0: not counted.

        Call :meth:`touched` before.

        Args:
            table: number of the table.
            ids: int64 [n].
        """
        before, now = self._counts[table], self._now[table]
        if before is None or now is None:
            return torch.zeros_like(ids), torch.zeros_like(ids)
        return counts_among(before, ids), counts_among(now, ids)

    def _reader(self) -> ChangeReader:
        reader = reader_of(self._group.tables, _READER)
        assert reader is not None
        return reader

    def _counts_now(self) -> list[CountedIds | None]:
        tables = self._group.tables
        return [read_counts(tables, table) for table in range(len(tables.config.tables))]


def _differing(before: CountedIds | None, now: CountedIds | None, ids: Tensor) -> Tensor:
    """Return the ids with different counts, int64 [n].

    Args:
        before, now: counts of a table; None: it counts nothing.
        ids: any ids of the table, for dtype and device.
    """
    if before is None or now is None:
        return ids[:0]
    either = torch.cat([before.ids, now.ids]).unique()
    result: Tensor = either[counts_among(before, either) != counts_among(now, either)]
    return result


def _digest(tables: Tables) -> int:
    """Return a checksum of ids, scores, counts and a sample of rows, above 0."""
    crc = 0
    for table in range(len(tables.config.tables)):
        batches = list(exported(tables, table, _IDS_AT_ONCE))
        counted = read_counts(tables, table)
        parts = [] if counted is None else [counted.ids, counted.counts]
        if batches:
            ids = torch.cat([batch.ids for batch in batches])
            order = torch.argsort(ids)
            parts += [ids[order], torch.cat([batch.scores for batch in batches])[order]]
            step = -(-ids.numel() // _SAMPLED_ROWS)
            some = ids[order][::step].contiguous()
            handles = find(tables, *one_table(tables, table, some)).handles
            values = read_rows(tables, table, some, handles)
            parts += [values.rows, *values.state.values()]
        for part in parts:
            crc = ops.crc32c(as_bytes(part.cpu().contiguous()), crc)
    return crc + 1


__all__ = ["BaseScores", "CommonBase", "Touched"]
