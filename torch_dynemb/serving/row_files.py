"""Files of read-only tables: their index, and a record for each row.

csrc/core/serving/row_file.h has the layout. The header is written last, so a file that is not
complete has none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import DiskFullError
from torch_dynemb.files.checksummed_files import space_errors
from torch_dynemb.files.disk import UNFINISHED
from torch_dynemb.files.tensor_file import as_bytes, raw
from torch_dynemb.ops.columns import BUCKET_WIDTH, Meta, Table
from torch_dynemb.ops.serving import LIVE_FORMATS
from torch_dynemb.rows.read import occupied_slots
from torch_dynemb.serving.file_names import MAGIC, new_identity
from torch_dynemb.serving.row_formats import RowKind, stored_rows
from torch_dynemb.storage.tiers.configs import SSDStore
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.row_access import read_rows

_PAGE = 4096
_WORDS, _TABLE_WORDS = 8, 8
_INDEX_BLOCK = 1 << 16
_BATCH_BYTES = 8 << 20
_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class CopiedIndex(NamedTuple):
    """A copy of a group's index.

    Attributes:
        buckets: int64 [buckets, 8].
        tables: int64 [T, 16], ``columns.Table``.
        meta: int64 [T, 16], ``columns.Meta``.
    """

    buckets: Tensor
    tables: Tensor
    meta: Tensor

    def lines(self, table: int) -> Tensor:
        """Return the buckets of a table."""
        begin = int(self.meta[table, Meta.REGION_BEGIN])
        return self.buckets[begin : begin + int(self.tables[table, Table.BUCKET_COUNT])]


class WrittenFile(NamedTuple):
    """A file that was written.

    Attributes:
        path: of the file.
        identity: its id, two words.
        rows: number of its rows.
        bytes: of the rows, without checksums.
    """

    path: Path
    identity: tuple[int, ...]
    rows: int
    bytes: int


class RowFolder:
    """A new folder for the files of a copy of a model, with one file for each group of tables.

    Args:
        storage: its path, its cache and its limit of the disk.
        rows: format of rows, as in :func:`torch_dynemb.freeze`.

    Raises:
        FileExistsError: the folder has files already.
    """

    def __init__(self, storage: SSDStore, rows: RowKind | None) -> None:
        self.storage, self.rows = storage, rows
        self._path = Path(storage.path)
        self._written: list[WrittenFile] = []
        self._left = storage.disk_bytes or (1 << 62)
        if storage.io == "io_uring" and ops.IoPath.URING not in ops.store_io_paths():
            raise RuntimeError(
                "freeze: storage has io='io_uring', which this build or this kernel lacks: leave "
                "io out"
            )
        self._made = [of for of in (self._path, *self._path.parents) if not of.exists()]
        with space_errors(self._path):
            self._path.mkdir(parents=True, exist_ok=True)
        self._mark = self._path / UNFINISHED
        try:
            with space_errors(self._mark):
                self._mark.touch(exist_ok=False)  # another freeze may begin here, too
        except FileExistsError:
            raise self._not_empty() from None
        if os.listdir(self._path) != [UNFINISHED]:
            self._mark.unlink()
            raise self._not_empty()

    def _not_empty(self) -> FileExistsError:
        return FileExistsError(
            f"freeze: storage has the path {self._path}, which is not empty: give a folder of "
            "its own to each copy of a model, and to each rank, for instance one by version"
        )

    def write(self, group: TableGroup, index: CopiedIndex) -> WrittenFile:
        """Write the tables of a group. Stored handles of ``index`` become row numbers.

        Raises:
            DiskFullError: the disk is full, or ``disk=`` of the storage is reached.
            ValueError: ``rows`` cannot hold the rows of a table.
        """
        path = self._path / f"tables{len(self._written)}.rows"
        with _Writer(path, self._left) as writer:
            done = writer.write(group, index, self.rows)
        self._left -= path.stat().st_size
        self._written.append(done)
        return done

    def cache_bytes(self, written: WrittenFile) -> int:
        """Return the part of the cache that one of the files gets."""
        rows = sum(file.rows for file in self._written)
        # one without rows, which may get some, counts a little
        total = sum(max(1, file.bytes) for file in self._written)
        return self.storage.cache_size.part(max(1, written.bytes), rows, total)

    def finish(self) -> None:
        """Wait until the names of the files are on the disk."""
        self._mark.unlink()
        folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def remove(self) -> None:
        """Remove what was written, and the folders that were made for it."""
        for file in (*(written.path for written in self._written), self._mark):
            file.unlink(missing_ok=True)
        with suppress(OSError):  # a mount, or files of others
            for folder in self._made:
                folder.rmdir()


class _Writer:
    """A file that is written; it is removed if an error leaves it incomplete."""

    def __init__(self, path: Path, most_bytes: int) -> None:
        self._path, self._most, self._end = path, most_bytes, 0
        self._identity = new_identity()
        words = torch.tensor(self._identity, dtype=torch.int64, device="cpu")
        self._id_sum = ops.crc32c(words)

    def __enter__(self) -> _Writer:
        with space_errors(self._path):
            self._file = os.open(
                self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666
            )
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        os.close(self._file)
        if kind is not None:
            self._path.unlink()

    def _write(self, data: Tensor, begin: int) -> None:
        view = raw(as_bytes(data))
        if begin + len(view) > self._most:
            raise DiskFullError(
                f"freeze: {self._path} takes more than the {self._most} bytes that disk= of the "
                "storage leaves: give it more, or rows of a narrower format (rows='int8')",
                path=self._path,
            )
        with space_errors(self._path, begin):
            while len(view):
                done = os.pwrite(self._file, view, begin)
                view, begin = view[done:], begin + done
        self._end = max(self._end, begin)

    def _next_page(self) -> int:
        return -(-self._end // _PAGE) * _PAGE

    def write(self, group: TableGroup, index: CopiedIndex, kind: RowKind | None) -> WrittenFile:
        count = len(group.config.tables)
        words = _WORDS + count * _TABLE_WORDS
        self._end = (words + 1) * 8
        header = torch.zeros(words + 1, dtype=torch.int64, device="cpu")
        rows = total = 0
        for table, name in enumerate(group.names):
            begin = self._next_page()
            slab = group.config.slabs[group.config.slab_of(table)]
            empty = torch.zeros(1, slab.dim, dtype=slab.dtype, device="cpu")
            size = as_bytes(_formatted(name, empty, empty, kind)).numel()
            form = kind or _DTYPES[slab.dtype]
            of_table = self._write_rows(group, index, table, kind, size)
            lines = index.lines(table)
            at = _WORDS + table * _TABLE_WORDS
            header[at : at + 7] = torch.tensor(
                [
                    int(index.meta[table, Meta.REGION_BEGIN]),
                    len(lines),
                    slab.dim,
                    LIVE_FORMATS[form],
                    begin,
                    of_table,
                    int(index.tables[table, Table.SIZE]),
                ],
                device="cpu",
            )
            rows, total = rows + of_table, total + of_table * size
        index_begin = self._next_page()
        self._write(index.buckets, index_begin)
        blocks = as_bytes(index.buckets).split(_INDEX_BLOCK)
        sums = torch.tensor(
            [ops.crc32c(block) for block in blocks], dtype=torch.int64, device="cpu"
        )
        sums_begin = self._end
        self._write(sums.to(torch.uint32), sums_begin)
        head = [
            MAGIC,
            *self._identity,
            self._end,
            count,
            index_begin,
            index.buckets.shape[0],
            sums_begin,
        ]
        header[:_WORDS] = torch.tensor(head, dtype=torch.int64, device="cpu")
        header[words] = ops.crc32c(as_bytes(header[:words].clone()))
        with space_errors(self._path, self._end):
            os.fsync(self._file)
            self._write(header, 0)
            os.fsync(self._file)
        return WrittenFile(self._path, self._identity, rows, total)

    def _write_rows(
        self,
        group: TableGroup,
        index: CopiedIndex,
        table: int,
        kind: RowKind | None,
        size: int,
    ) -> int:
        """Write the rows of a table in the order of its index; return their number."""
        begin, done = self._next_page(), 0
        self._end = begin
        per_page = max(1, _PAGE // (size + 4))
        at_once = max(1, _BATCH_BYTES // (size * per_page)) * per_page
        lines = index.lines(table)
        for ids, handles in _batches(lines, at_once):
            weights = read_rows(group.tables, table, ids, handles, state=False).rows
            weights = _formatted(group.names[table], weights, ids, kind)
            packed = as_bytes(weights.contiguous()).reshape(len(ids), size)
            pages = ops.file_pages(ids, packed, self._id_sum)
            self._write(pages, begin)
            begin += pages.numel()
            done += len(ids)
        handles = lines[:, BUCKET_WIDTH:]
        occupied = handles > 0
        handles[occupied] = torch.arange(1, done + 1, device="cpu")
        return done


def _batches(lines: Tensor, at_once: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Iterate over ids and handles of a table, so many at a time, in the order of its index."""
    ids, handles = lines.new_empty(0), lines.new_empty(0)
    for piece in occupied_slots(lines):
        ids = torch.cat([ids, piece.ids])
        handles = torch.cat([handles, piece.stored - 1])
        while len(ids) >= at_once:
            yield ids[:at_once], handles[:at_once]
            ids, handles = ids[at_once:], handles[at_once:]
    if len(ids):
        yield ids, handles


def _formatted(name: str, weights: Tensor, ids: Tensor, kind: RowKind | None) -> Tensor:
    if kind is None:
        return weights
    try:
        done = stored_rows(weights, kind)
    except ValueError as error:
        raise ValueError(f"freeze: rows is {kind!r}, table {name!r}: {error}") from None
    if bool(done.lost.any()):
        raise lost_rows(kind, name, int(done.lost.sum()), int(ids[done.lost][0]))
    return done.weights


def lost_rows(kind: str, name: str, count: int, example: int) -> ValueError:
    """Return the error for rows that a format cannot hold."""
    return ValueError(
        f"freeze: rows is {kind!r}, but {count} rows of table {name!r}, such as that of id "
        f"{example}, have NaN, infinity or values beyond its range: train or assign them anew, "
        "erase their ids, or freeze with rows=None"
    )


__all__ = ["CopiedIndex", "RowFolder", "WrittenFile", "lost_rows"]
