"""Changes of what waits for admission: counts of ids, and cells of the counting sketch.

Counts live in the index of a counter table, so a comparison of its buckets with a copy finds the
ids with another count. It costs one pass over the buckets, and nothing during lookups.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_dynemb.changes.batch import CHANGED_CELLS, CHANGED_COUNTS, Pieces
from torch_dynemb.changes.changed_parts import admission_records
from torch_dynemb.changes.payloads import of_tensors
from torch_dynemb.ops.columns import BUCKET_WIDTH
from torch_dynemb.parts.sketches import sketch_cells
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.rows.tensor_names import COUNT, ID, PLACE
from torch_dynemb.rows.tensor_names import SKETCH as CELLS


class AdmissionChanges:
    """Recorder of one part's counts of admission, for the commits of a log.

    It takes a copy of the buckets of the counter table, and of the sketch.

    Args:
        part: part of a model, on this rank.
        number: number of the part in batches.
    """

    def __init__(self, part: TablePart, number: int) -> None:
        self._part, self._number = part, number
        self._buckets: Tensor | None = None
        self._cells: Tensor | None = None

    def begin(self) -> None:
        """Count later changes from the present counts, which the base of the log has."""
        self._buckets, self._cells = _copied(self._now_buckets()), _copied(self._now_cells())

    def forget(self) -> None:
        """Make the next records contain all counts: readers of the log may have others."""
        self._buckets, self._cells = None, None

    def records(self) -> list[Pieces]:
        """Make records of the changes since the last call. All counts follow :meth:`forget`."""
        if self._part.first_column > 0:
            return []
        known = self._buckets is not None or self._cells is not None
        if known:
            result = [*self._changed_counts(), *self._changed_cells()]
        else:
            result = [of.read() for of in admission_records(self._part, self._number)]
        self.begin()
        return result

    def _changed_counts(self) -> Iterator[Pieces]:
        before, now = self._buckets, self._now_buckets()
        if before is None or now is None:
            return
        if before.shape == now.shape:
            # of a bucket with a change, all four ids: fewer operations, and no longer records
            places = (before != now).any(1).nonzero()[:, 0]
            before, now = before[places], now[places]
        ids, counts = _counted(now)
        gone, _ = _counted(before)
        gone = gone[~torch.isin(gone, ids)]
        if ids.numel() + gone.numel() > 0:
            tensors = {
                ID: torch.cat([ids, gone]).cpu(),
                COUNT: torch.cat([counts, torch.zeros_like(gone)]).cpu(),
            }
            yield Pieces.of(CHANGED_COUNTS, self._number, of_tensors(tensors))

    def _changed_cells(self) -> Iterator[Pieces]:
        before, now = self._cells, self._now_cells()
        if before is None or now is None:
            return
        places = (before != now).reshape(-1).nonzero()[:, 0]
        if places.numel() > 0:
            tensors = {PLACE: places.cpu(), CELLS: now.reshape(-1)[places].cpu()}
            yield Pieces.of(CHANGED_CELLS, self._number, of_tensors(tensors))

    def _now_buckets(self) -> Tensor | None:
        tables = self._part.group.tables
        counters = tables.config.layout.counters[self._part.table]
        if counters is None:
            return None
        return tables.index.buckets[tables.index.active_buckets(counters)]

    def _now_cells(self) -> Tensor | None:
        tables = self._part.group.tables
        return sketch_cells(tables.config, tables.index.sketch, self._part.table)


def _copied(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _counted(buckets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ids in buckets with their counts, int64 [n] each."""
    counts = buckets[:, BUCKET_WIDTH:].reshape(-1)
    here = counts.nonzero()[:, 0]
    return buckets[:, :BUCKET_WIDTH].reshape(-1)[here], counts[here]


__all__ = ["AdmissionChanges"]
