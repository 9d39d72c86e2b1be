"""Ops on live tables with rows in a file.

Changes are kept in memory, up to a headroom of ids; then a process writes the file anew with them,
into one without a name that it alone has. Lookups go on meanwhile: each reads one file with its
changes. They are those of :mod:`torch_dynemb.ops.row_files`, on a tensor with an instance.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.serving import Applied


class FileCounts(NamedTuple):
    """Result of :func:`file_counts`, a number for each table.

    Attributes:
        ids: number of ids.
        headroom: how many changed or new ids are kept in memory, and how many removed ones; 0: the
            rows do not change.
        updates: number of updates since the tables were made.
        formats: of the rows, as in ``LIVE_FORMATS``.
    """

    ids: list[int]
    headroom: list[int]
    updates: list[int]
    formats: list[int]


@raises_typed_errors
def file_make_live(file: Tensor, meta: Tensor, headroom: Sequence[int]) -> None:
    """Make live tables of a file, or note one more user. Call :func:`file_close` as often.

    Args:
        file: int64 [519], which names the file and an instance that no other live tables have.
        meta: int64 [T, 16], constants (``columns.Meta``).
        headroom: for each table, how many changed or new ids are kept in memory, and how many
            removed ones.

    Raises:
        RuntimeError: an argument is wrong, or as in :func:`file_open`.
        HostMemoryError: memory for so many ids is short.
    """
    torch.ops.dynemb.file_make_live(file, meta, headroom)


@raises_typed_errors
def file_apply(file: Tensor, table: int, ids: Tensor, values: Tensor, erased: Tensor) -> Applied:
    """Update a live table: remove ids, and write rows of ids. All of it is applied, or nothing.

    Args:
        file: as in :func:`file_make_live`.
        table: number of the table.
        ids, values, erased: as in :func:`torch_dynemb.ops.serve_apply_`.

    Returns:
        Counts of the update. ``wanted`` are the ids that it changes, or removes if these are more;
        where that exceeds ``free``, the headroom, it was refused.

    Raises:
        RuntimeError: an argument does not fit the tables, or has a padding id or a row that the
            format cannot hold; or a file with the changes cannot be written.
        DiskFullError: the disk is full.
        DamagedStoreError: the index is damaged.
        InUseError: another thread is updating these tables. Nothing has changed then.
    """
    return Applied(*torch.ops.dynemb.file_apply(file, table, ids, values, erased).tolist())


@raises_typed_errors
def file_room(file: Tensor, table: int, ids: Tensor, erased: Tensor, *, write: bool) -> Applied:
    """Return what :func:`file_apply` would do; the tables do not change for readers.

    Args:
        file, table, ids, erased: as in :func:`file_apply`.
        write: whether the file is written anew if the changes in memory leave too little room, so
            that the next update writes none.

    Returns, Raises:
        As :func:`file_apply`.
    """
    return Applied(*torch.ops.dynemb.file_room(file, table, ids, erased, write).tolist())


@raises_typed_errors
def file_counts(file: Tensor, tables: int) -> FileCounts:
    """Return counts of the tables of a file.

    Args:
        file: as in :func:`file_lookup`.
        tables: their number.
    """
    return FileCounts(*torch.ops.dynemb.file_counts(file, tables).t().tolist())


@register_fake("file_make_live")
def _file_make_live_fake(file: Tensor, meta: Tensor, headroom: Sequence[int]) -> None:
    return None


@register_fake("file_apply")
def _file_apply_fake(
    file: Tensor, table: int, ids: Tensor, values: Tensor, erased: Tensor
) -> Tensor:
    return ids.new_empty((len(Applied._fields),))


@register_fake("file_room")
def _file_room_fake(file: Tensor, table: int, ids: Tensor, erased: Tensor, write: bool) -> Tensor:
    return ids.new_empty((len(Applied._fields),))


@register_fake("file_counts")
def _file_counts_fake(file: Tensor, tables: int) -> Tensor:
    return file.new_empty((tables, len(FileCounts._fields)))


__all__ = ["FileCounts", "file_apply", "file_counts", "file_make_live", "file_room"]
