"""Ops on read-only tables in a file.

The index is mapped, rows are read when they are asked for, and a cache in memory keeps those that
are used most. Every piece is compared with its checksum: blocks of the index at their first use,
rows at each read.

A tensor names the file, so copies of it, in exported programs and in packages, name the same file.
A process opens a file once, and all its models share the cache. Any number of threads may look up.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.block_reads import IoPath
from torch_dynemb.ops.lookup import check_weights, lookup_output
from torch_dynemb.ops.serving import Served
from torch_dynemb.ops.tensors import LookupBatch

ROW_FILE_MAGIC = 0x31656C6966776F72  # kRowFileMagic of csrc/core/serving/row_file.h
_NAMED_WORDS = 6  # before the path: RowFileName of csrc/cpu/serving/row_files.h
_PATH_BYTES = 4096
_CACHE_BYTES = 3


class RowFileStats(NamedTuple):
    """Counts of a file since it was opened.

    Attributes:
        hits: rows of lookups that the cache had, each occurrence.
        misses: rows of lookups that it did not have, each occurrence.
        reads: blocks of the file.
        bytes_read: of these blocks.
        cached_rows: rows that the cache has places for.
        index_bytes: of the mapped index.
    """

    hits: int
    misses: int
    reads: int
    bytes_read: int
    cached_rows: int
    index_bytes: int


def uuid_words(name: uuid.UUID) -> tuple[int, int]:
    """Return an id as two words of int64."""
    first, second = name.int >> 64, name.int & (1 << 64) - 1
    return first - (1 << 64 if first >> 63 else 0), second - (1 << 64 if second >> 63 else 0)


def name_file(
    path: str | os.PathLike[str], words: Sequence[int], *, cache_bytes: int, io: int = IoPath.AUTO
) -> Tensor:
    """Return the tensor that names a file.

    Args:
        path: of the file, up to 4096 bytes.
        words: its id, two words of int64.
        cache_bytes: of rows in memory.
        io: how blocks are read, an :class:`IoPath`.

    Returns:
        int64 [518].

    Raises:
        ValueError: the path is longer.
    """
    text = os.fsencode(os.path.abspath(path))
    if len(text) > _PATH_BYTES:
        raise ValueError(f"the path of a file of rows has {len(text)} bytes, at most {_PATH_BYTES}")
    head = [ROW_FILE_MAGIC, *words, cache_bytes, int(io), len(text)]
    result = torch.zeros(_NAMED_WORDS + _PATH_BYTES // 8, dtype=torch.int64, device="cpu")
    result[:_NAMED_WORDS] = torch.tensor(head, dtype=torch.int64, device="cpu")
    bytes_of = result[_NAMED_WORDS:].view(torch.uint8)
    bytes_of[: len(text)] = torch.tensor(list(text), dtype=torch.uint8, device="cpu")
    return result


def renamed_file(
    file: Tensor, path: str | os.PathLike[str], cache_bytes: int | None = None
) -> Tensor:
    """Return the tensor of a file that lies elsewhere now, or gets another cache.

    Args:
        file: the tensor of :func:`name_file`.
        path: of the file.
        cache_bytes: of rows in memory; None: as before.
    """
    words = file.tolist()
    cache = words[_CACHE_BYTES] if cache_bytes is None else cache_bytes
    return name_file(path, words[1:3], cache_bytes=cache, io=words[4])


def path_of_file(file: Tensor) -> str:
    """Return the path in the tensor of a file."""
    size = int(file[_NAMED_WORDS - 1])
    return os.fsdecode(bytes(file[_NAMED_WORDS:].view(torch.uint8)[:size].tolist()))


@raises_typed_errors
def file_open(file: Tensor) -> None:
    """Open a file of rows, or note one more user of it. Call :func:`file_close` as often.

    Args:
        file: int64 [518], the tensor of :func:`name_file`.

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
        file: int64 [518], the tensor of :func:`name_file`; the file is opened if it is not open.
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
def file_ids(file: Tensor, *, table: int) -> Tensor:
    """Return all ids of a table, int64 [n], in the order of its index.

    Args:
        file: as in :func:`file_lookup`.
        table: number of the table.

    Raises:
        DamagedStoreError: the index is damaged.
    """
    ids: Tensor = torch.ops.dynemb.file_ids(file, table)
    return ids


@raises_typed_errors
def file_stats(file: Tensor) -> RowFileStats:
    """Return counts of a file.

    Args:
        file: as in :func:`file_lookup`.
    """
    return RowFileStats(*torch.ops.dynemb.file_stats(file).tolist())


@raises_typed_errors
def file_pages(ids: Tensor, rows: Tensor) -> Tensor:
    """Return pages of a file with rows and their checksums.

    Args:
        ids: int64 [n].
        rows: uint8 [n, bytes], their rows, as they are stored.

    Returns:
        uint8 [bytes], whole pages of 4096. Rows follow each other, as many in a page as fit.
    """
    pages: Tensor = torch.ops.dynemb.file_pages(ids, rows)
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


@register_fake("file_stats")
def _file_stats_fake(file: Tensor) -> Tensor:
    return file.new_empty((len(RowFileStats._fields),))


@register_fake("file_pages")
def _file_pages_fake(ids: Tensor, rows: Tensor) -> Tensor:
    per_page = max(1, 4096 // (rows.shape[1] + 4))
    pages = -(-(rows.shape[1] + 4) // 4096)
    return rows.new_empty((-(-rows.shape[0] // per_page) * pages * 4096,))


__all__ = [
    "ROW_FILE_MAGIC",
    "RowFileStats",
    "file_close",
    "file_ids",
    "file_lookup",
    "file_open",
    "file_pages",
    "file_stats",
    "name_file",
    "path_of_file",
    "renamed_file",
    "uuid_words",
]
