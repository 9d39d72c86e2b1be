"""Ops on the index: find, insert, erase, grow, export.

A call covers all tables of a group. ``ids`` is int64 [N], feature after feature. ``offsets`` is
int64 [F * B + 1], non-decreasing from 0 to N: feature f has ids ``offsets[f * B]`` to ``offsets[(f
+ 1) * B]``. ``feature_tables[f]`` is the table that feature f looks up. With one feature,
``offsets`` may be empty: all ids are in one bag.

Errors in arguments are raised before anything changes. On a GPU, wrong values of tensors are
reported by a later op, or by :func:`torch_dynemb.ops.end_step_`. On the CPU an op that changes an
index raises RuntimeError while another thread changes the same index.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.columns import BUCKET_WIDTH
from torch_dynemb.ops.functional_copies import refuse_copies
from torch_dynemb.ops.recomputation import always_saved
from torch_dynemb.ops.tensors import IndexTensors, RowTensors

_FIND = torch.ops.dynemb.find.default
_FIND_OR_INSERT = torch.ops.dynemb.find_or_insert_.default


class FoundIds(NamedTuple):
    """Result of :func:`find`.

    Attributes:
        handles: int64 [N]; -1 for an id that is not in its table, -2 for a padding id.
        missing: int64 [T + C]; how many ids were not in each table, padding ids aside.
    """

    handles: Tensor
    missing: Tensor


class ExportedBatch(NamedTuple):
    """Result of :func:`export_batch`.

    Attributes:
        ids: int64 [n].
        handles: int64 [n].
        scores: int64 [n, words]; as many words as the index keeps for an id.
        next: int64 [1]; first bucket of the next batch, -1 at the end of the table.
    """

    ids: Tensor
    handles: Tensor
    scores: Tensor
    next: Tensor

    def chosen(self, mask: Tensor) -> ExportedBatch:
        """Select some of the ids, with their handles and scores.

        Args:
            mask: bool [n], true for the ids to select.
        """
        return ExportedBatch(self.ids[mask], self.handles[mask], self.scores[mask], self.next)


class ScoredIds(NamedTuple):
    """Result of :func:`torch_dynemb.ops.get_scores`.

    Attributes:
        scores: int64 [N]; 0 for an id that is not in its table.
        found: bool [N].
    """

    scores: Tensor
    found: Tensor


def check_ids(op: str, index: IndexTensors, ids: Tensor, offsets: Tensor) -> None:
    """Raise TypeError or ValueError for errors that show without reading values."""
    if ids.dtype != torch.int64:
        raise TypeError(f"{op}: ids has dtype {ids.dtype}, expected int64: use ids.long()")
    if offsets.dtype != torch.int64:
        raise TypeError(f"{op}: offsets has dtype {offsets.dtype}, expected int64")
    if ids.dim() != 1:
        raise ValueError(f"{op}: ids has shape {tuple(ids.shape)}, expected 1 dimension")
    if offsets.dim() != 1:
        raise ValueError(f"{op}: offsets has shape {tuple(offsets.shape)}, expected 1 dimension")
    device = index.buckets.device
    if not ids.device == offsets.device == device:
        raise ValueError(
            f"{op}: ids is on {ids.device} and offsets on {offsets.device}, but the table is on "
            f"{device}: move them there"
        )


@raises_typed_errors
def find(
    index: IndexTensors,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
) -> FoundIds:
    """Return handles of ids; nothing changes.

    Args:
        index: of the tables; nothing changes.
        ids, offsets, feature_tables: see the module's description.

    Raises:
        TypeError, ValueError: dtype, shape or device of ids or offsets.
        RuntimeError: values of offsets or feature_tables, or tensors of the index that do not fit
            each other.
    """
    check_ids("find", index, ids, offsets)
    handles, missing = _FIND(
        index.buckets, index.tables, index.meta, ids, offsets, list(feature_tables)
    )
    return FoundIds(handles, missing)


@raises_typed_errors
def find_or_insert_(
    index: IndexTensors,
    ids: Tensor,
    offsets: Tensor,
    admit: Tensor | None,
    feature_tables: Sequence[int],
    feature_policies: Sequence[int],
) -> Tensor:
    """Return handles of ids; new ids get a row, in order of first occurrence.

    With policies, an id may be refused a row, or may evict another id. The index grows when it has
    to. Row values are not written here: the lookup computes them from the id until the first
    backward writes them.

    Args:
        index: of the tables; buckets, tables, slabs, sketch and evicted change, and scores of every
            id of the call.
        ids, offsets, feature_tables: see the module's description.
        admit: bool [N]; a new id is refused if it is False at all its occurrences. None: all True.
        feature_policies: the policy of each feature, a row of ``policy``; empty if the group has
            none.

    Returns:
        int64 [N]; -2 for padding ids, -3 for refused ids.

    Raises:
        TypeError, ValueError: dtype, shape or device of ids, offsets or admit.
        RuntimeError: as :func:`find`; admit or feature_policies do not fit the policies; 2^31 ids
            or more; a full table, or too little memory. Then no id has been inserted, but scores of
            known ids may have changed. On a GPU, errors that depend on values are reported later,
            and new ids get handle -1.
    """
    check_ids("find_or_insert_", index, ids, offsets)
    if admit is not None:
        if admit.dtype != torch.bool:
            raise TypeError(f"find_or_insert_: admit has dtype {admit.dtype}, expected bool")
        if admit.shape != ids.shape:
            raise ValueError(
                f"find_or_insert_: admit has shape {tuple(admit.shape)}, expected that of ids, "
                f"{tuple(ids.shape)}"
            )
    handles: Tensor = _FIND_OR_INSERT(
        *index,
        ids,
        offsets,
        admit,
        list(feature_tables),
        list(feature_policies),
    )
    return handles


@raises_typed_errors
def erase_(
    index: IndexTensors,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
) -> Tensor:
    """Remove ids from the index; later ids get their rows. Ids of a table of counts have none.

    Args:
        index: of the tables; buckets, tables, slabs and free_rows change.
        ids, offsets, feature_tables: see the module's description.

    Returns:
        int64 [T + C]; how many ids each table lost.

    Raises:
        TypeError, ValueError: dtype, shape or device of ids or offsets.
        RuntimeError: as :func:`find`; or free_rows is full, because slabs are not those of the
            index. Then ids before the one without a place have been removed.
    """
    check_ids("erase_", index, ids, offsets)
    erased: Tensor = torch.ops.dynemb.erase_(
        index.buckets,
        index.scores,
        index.tables,
        index.slabs,
        index.free_rows,
        index.meta,
        ids,
        offsets,
        list(feature_tables),
    )
    return erased


@raises_typed_errors
def grow_(index: IndexTensors, table: int, ids: int) -> None:
    """Rehash one table's index so that ``ids`` ids fit without another growth; rows stay.

    Args:
        index: of the tables; buckets, scores and tables change.
        table: 0 to ``T + C - 1``.
        ids: at least 0; nothing changes if they fit already.

    Raises:
        RuntimeError: table or ids is out of range, the table has no room for so many, or memory is
            short; nothing has changed.
    """
    torch.ops.dynemb.grow_(index.buckets, index.scores, index.tables, index.meta, table, ids)


@raises_typed_errors
def shrink_(index: IndexTensors, table: int, ids: int) -> None:
    """Rehash one table's index into the fewest buckets for ``ids`` ids, or for those it has.

    Args:
        index: of the tables; buckets, scores and tables change.
        table: 0 to ``T + C - 1``.
        ids: at least 0.

    Raises:
        RuntimeError: table or ids is out of range.
    """
    torch.ops.dynemb.shrink_(index.buckets, index.scores, index.tables, index.meta, table, ids)


@raises_typed_errors
def set_handles_(
    index: IndexTensors,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    handles: Tensor,
) -> Tensor:
    """Replace the rows of ids that are in their tables; the caller has moved the content.

    Args:
        index: of the tables; buckets change.
        ids, offsets, feature_tables: see the module's description; ids are distinct within a table.
        handles: int64 [N], at least 0.

    Returns:
        bool [N]; true for ids that are in their tables.

    Raises:
        TypeError, ValueError: dtype, shape or device of ids or offsets.
        RuntimeError: as :func:`find`, or dtype, shape, device or values of handles.
    """
    check_ids("set_handles_", index, ids, offsets)
    found: Tensor = torch.ops.dynemb.set_handles_(
        index.buckets, index.tables, index.meta, ids, offsets, list(feature_tables), handles
    )
    return found


@raises_typed_errors
def export_batch(
    index: IndexTensors,
    *,
    table: int,
    begin: int,
    max_ids: int,
) -> ExportedBatch:
    """Return ids, handles and scores of one table, from a bucket on.

    Args:
        index: of the tables; nothing changes.
        table: 0 to ``T + C - 1``. For ids of a table of counts, handles are their counts.
        begin: 0 for the first batch, then ``next`` of the preceding one.
        max_ids: at most so many ids; at least 4, a bucket.

    Raises:
        RuntimeError: a number is out of range, or tensors do not fit each other.
    """
    return ExportedBatch(
        *torch.ops.dynemb.export_batch(
            index.buckets, index.scores, index.tables, index.meta, table, begin, max_ids
        )
    )


@raises_typed_errors
def reported_counts(index: IndexTensors, rows: RowTensors) -> tuple[Tensor, Tensor]:
    """Return ``tables`` and ``row_clock`` on the CPU, as far as known without waiting.

    On a GPU they have the values that the last finished :func:`torch_dynemb.ops.end_step_` has
    reported. Before the first one, the host waits for the device.

    Args:
        index: of the tables; nothing changes.
        rows: of the same tables; nothing changes.

    Returns:
        Copies: int64 [T + C, 16] (``columns.Table``) and int64 [T + 4] (``columns.RowClock``).

    Raises:
        RuntimeError: dtype or shape of a tensor, or a group on a GPU that has not been bound.
    """
    counts: tuple[Tensor, Tensor] = torch.ops.dynemb.reported_counts(
        index.buckets, index.tables, rows.row_clock
    )
    return counts


@register_fake("find")
def _find_fake(
    buckets: Tensor,
    tables: Tensor,
    meta: Tensor,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(ids), tables.new_empty((tables.shape[0],))


@register_fake("find_or_insert_")
def _find_or_insert_fake(
    buckets: Tensor,
    scores: Tensor,
    tables: Tensor,
    slabs: Tensor,
    free_rows: Tensor,
    sketch: Tensor,
    evicted: Tensor,
    meta: Tensor,
    policy: Tensor,
    clock: Tensor,
    ids: Tensor,
    offsets: Tensor,
    admit: Tensor | None,
    feature_tables: Sequence[int],
    feature_policies: Sequence[int],
) -> Tensor:
    refuse_copies("find_or_insert_", buckets, scores, free_rows)
    return torch.empty_like(ids)


@register_fake("erase_")
def _erase_fake(
    buckets: Tensor,
    scores: Tensor,
    tables: Tensor,
    slabs: Tensor,
    free_rows: Tensor,
    meta: Tensor,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
) -> Tensor:
    return tables.new_empty((tables.shape[0],))


@register_fake("grow_")
def _grow_fake(
    buckets: Tensor, scores: Tensor, tables: Tensor, meta: Tensor, table: int, ids: int
) -> None:
    return None


@register_fake("shrink_")
def _shrink_fake(
    buckets: Tensor, scores: Tensor, tables: Tensor, meta: Tensor, table: int, ids: int
) -> None:
    return None


@register_fake("set_handles_")
def _set_handles_fake(
    buckets: Tensor,
    tables: Tensor,
    meta: Tensor,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    handles: Tensor,
) -> Tensor:
    return torch.empty_like(ids, dtype=torch.bool)


@register_fake("reported_counts")
def _reported_counts_fake(
    buckets: Tensor, tables: Tensor, row_clock: Tensor
) -> tuple[Tensor, Tensor]:
    host = torch.device("cpu")
    return torch.empty_like(tables, device=host), torch.empty_like(row_clock, device=host)


@register_fake("export_batch")
def _export_batch_fake(
    buckets: Tensor,
    scores: Tensor,
    tables: Tensor,
    meta: Tensor,
    table: int,
    begin: int,
    max_ids: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count = torch.library.get_ctx().new_dynamic_size()
    return (
        tables.new_empty((count,)),
        tables.new_empty((count,)),
        tables.new_empty((count, scores.shape[1] // BUCKET_WIDTH if scores.shape[0] > 0 else 0)),
        tables.new_empty((1,)),
    )


always_saved("find_or_insert_")
