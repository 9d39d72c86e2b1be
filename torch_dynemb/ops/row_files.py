"""Ops on served tables in a file. :mod:`torch_dynemb.ops.live_files` updates them.

The index is mapped, rows are read when they are asked for, and a cache in memory keeps those that
are used most. Every piece is compared with its checksum: blocks of the index at their first use,
rows at each read.

A tensor of 519 words names the file (csrc/cpu/serving/row_files.h), so copies of it, in exported
programs and in packages, name the same file. A process opens a file once, and all its models share
the cache. It closes it with the last :func:`file_close`; of files that only lookups have opened, as
exported programs do, the last four stay open. Any number of threads may look up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.lookup import check_weights, lookup_output
from torch_dynemb.ops.serving import Served
from torch_dynemb.ops.tensors import LookupBatch


class RowFileStats(NamedTuple):
    """Counts of a file since it was opened.

    Attributes:
        hits: rows of lookups that the cache had, each occurrence.
        misses: rows of lookups that it did not have, each occurrence.
        reads: blocks of the file.
        bytes_read: of these blocks.
        cached_rows: rows that the cache has places for.
        index_bytes: of the mapped index.
        files: files that live tables have written since, with their changes.
    """

    hits: int
    misses: int
    reads: int
    bytes_read: int
    cached_rows: int
    index_bytes: int
    files: int


@raises_typed_errors
def file_open(file: Tensor) -> None:
    """Open a file of rows, or note one more user of it. Call :func:`file_close` as often.

    Args:
        file: int64 [519], which names the file.

    Raises:
        RuntimeError: the file is missing, or cannot be read.
        DamagedStoreError: it is damaged, or is another file than the tensor names.
        HostMemoryError: the cache does not fit in memory.
    """
    torch.ops.dynemb.file_open(file)


def file_close(file: Tensor) -> None:
    """Close a file with its last user; lookups that run meanwhile end first.

    Args:
        file: as in :func:`file_open`.
    """
    torch.ops.dynemb.file_close(file)


@raises_typed_errors
def file_lookup(
    file: Tensor, tables: Tensor, meta: Tensor, init_data: Tensor, batch: LookupBatch
) -> Served:
    """Look rows or bags up in the tables of a file; nothing changes but its cache.

    Args:
        file: int64 [519], which names the file; the file is opened if it is not open.
        tables: int64 [T, 16], state of each table (``columns.Table``).
        meta: int64 [T, 16], constants (``columns.Meta``).
        init_data: float64 [numbers], values of ids that are missing.
        batch: ids and settings of the lookup.

    Returns:
        As :func:`torch_dynemb.ops.serve_lookup`.

    Raises:
        TypeError, ValueError: dtype, shape or device of per_sample_weights.
        DamagedStoreError: a row or a part of the index has a wrong checksum; its id is named.
        RuntimeError: another argument does not fit the tables, or the file cannot be read.
    """
    if batch.per_sample_weights is not None:
        check_weights("file_lookup", batch)
    ids, offsets, per_sample_weights, feature_tables, feature_dims, pooling = batch
    asked = (offsets, per_sample_weights, feature_tables, feature_dims, int(pooling))
    return Served(*torch.ops.dynemb.file_lookup(file, tables, meta, init_data, ids, *asked))


@raises_typed_errors
def file_ids(file: Tensor, *, table: int, ids: int) -> Tensor:
    """Return all ids of a table, int64 [n], in the order of its index.

    Args:
        file: as in :func:`file_lookup`.
        table: number of the table.
        ids: number of its ids.

    Raises:
        DamagedStoreError: the index is damaged.
        RuntimeError: an argument is wrong.
    """
    listed: Tensor = torch.ops.dynemb.file_ids(file, table, ids)
    return listed


@raises_typed_errors
def file_stats(file: Tensor) -> RowFileStats:
    """Return counts of a file.

    Args:
        file: as in :func:`file_lookup`.
    """
    return RowFileStats(*torch.ops.dynemb.file_stats(file).tolist())


@raises_typed_errors
def file_pages(ids: Tensor, packed: Tensor, crc: int) -> Tensor:
    """Return pages of a file with rows and their checksums.

    Args:
        ids: int64 [n].
        packed: uint8 [n, bytes], their rows, as they are stored.
        crc: crc32c of the file's id.

    Returns:
        uint8 [bytes], whole pages of 4096. Rows follow each other, as many in a page as fit.
    """
    pages: Tensor = torch.ops.dynemb.file_pages(ids, packed, crc)
    return pages


@register_fake("file_lookup")
def _file_lookup_fake(
    file: Tensor,
    tables: Tensor,
    meta: Tensor,
    init_data: Tensor,
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
) -> tuple[Tensor, Tensor]:
    output = lookup_output("file_lookup", ids, offsets, feature_tables, feature_dims, pooling)
    return output, ids.new_empty((tables.shape[0],))


@register_fake("file_open")
def _file_open_fake(file: Tensor) -> None:
    return None


@register_fake("file_close")
def _file_close_fake(file: Tensor) -> None:
    return None


@register_fake("file_ids")
def _file_ids_fake(file: Tensor, table: int, ids: int) -> Tensor:
    return file.new_empty((ids,))


@register_fake("file_stats")
def _file_stats_fake(file: Tensor) -> Tensor:
    return file.new_empty((len(RowFileStats._fields),))


@register_fake("file_pages")
def _file_pages_fake(ids: Tensor, packed: Tensor, crc: int) -> Tensor:
    record = packed.shape[1] + 4
    pages = -(-record // 4096)
    return packed.new_empty((-(-packed.shape[0] // max(1, 4096 // record)) * pages * 4096,))


__all__ = [
    "RowFileStats",
    "file_close",
    "file_ids",
    "file_lookup",
    "file_open",
    "file_pages",
    "file_stats",
]
