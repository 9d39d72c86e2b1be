"""Export of the tables of a checkpoint as npz or Parquet files."""

from __future__ import annotations

import importlib
import json
import os
import uuid as uuids
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from os import PathLike
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import torch
from torch import Tensor

from torch_dynemb.argument_checks import flag
from torch_dynemb.checkpoint.file_names import table_folder
from torch_dynemb.checkpoint.manifest.file import check_full
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.checkpoint.reading.saved_table import CheckpointTable
from torch_dynemb.console.progress import progress_bar
from torch_dynemb.files.commit import claimed, put_new
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import (
    Location,
    Url,
    checked_location,
    local,
)
from torch_dynemb.files.presence import is_there
from torch_dynemb.files.uploads import disk_of, new_file
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.process.torch_modes import plain_torch
from torch_dynemb.rows.tensor_names import score_entry, state_entry
from torch_dynemb.table.row_batch import RowBatch

ExportFormat = Literal["npz", "parquet"]
SUMMARY = "tables.json"

_DISK = Disk()
_NPZ_BYTES = 64 << 20  # size of a file, which is one batch
_GROUP_BYTES = 32 << 20  # size of a Parquet row group
_GROUPS = 32  # row groups of a file

Columns = dict[str, Tensor]  # [n] or [n, k] each


class _Appends(Protocol):
    """A file that is being written."""

    def append(self, columns: Columns) -> None: ...


class _Format(Protocol):
    """A file format, with ``batches`` of about ``batch_bytes`` in each file."""

    suffix: str
    batch_bytes: int
    batches: int

    def create(self, path: Location) -> AbstractContextManager[_Appends]: ...


class _NpzWriter:
    def __init__(self, numpy: Any, file: Any) -> None:
        self._numpy, self._file = numpy, file

    def append(self, columns: Columns) -> None:
        self._numpy.savez(self._file, **{name: of.numpy() for name, of in columns.items()})


class _Npz:
    def __init__(self) -> None:
        self._numpy = _needed("numpy", "npz")
        self.suffix, self.batch_bytes, self.batches = ".npz", _NPZ_BYTES, 1

    @contextmanager
    def create(self, path: Location) -> Iterator[_NpzWriter]:
        with new_file(path) as file:
            yield _NpzWriter(self._numpy, file)


class _ParquetWriter:
    def __init__(self, arrow: Any, parquet: Any, path: Location) -> None:
        self._arrow, self._parquet, self._path = arrow, parquet, path
        self._writer: Any = None
        self._file: BinaryIO | None = None

    def append(self, columns: Columns) -> None:
        table = self._arrow.table({name: self._array(of) for name, of in columns.items()})
        if self._writer is None:
            # values of rows seldom repeat, so no dictionary; Arrow opens only UTF-8 paths itself
            self._file = new_file(self._path)
            self._writer = self._parquet.ParquetWriter(
                self._file, table.schema, use_dictionary=False
            )
        self._writer.write_table(table, row_group_size=max(1, table.num_rows))

    def _array(self, values: Tensor) -> Any:
        """Return an array over the memory of a tensor; an array of lists if it has columns."""
        values = values.contiguous()
        size = values.numel() * values.element_size()
        memory = self._arrow.py_buffer(b"")
        if size > 0:
            memory = self._arrow.foreign_buffer(values.data_ptr(), size, base=values)
        kind = getattr(self._arrow, _ARROW[values.dtype])()
        flat = self._arrow.Array.from_buffers(kind, values.numel(), [None, memory])
        if values.dim() == 1:
            return flat
        return self._arrow.FixedSizeListArray.from_arrays(flat, values.shape[1])

    def close(self) -> None:
        try:
            if self._writer is not None:
                self._writer.close()
        finally:
            if self._file is not None:
                self._file.close()


_ARROW = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.uint8: "uint8",
}


class _Parquet:
    def __init__(self) -> None:
        self._arrow = _needed("pyarrow", "parquet")
        self._parquet = _needed("pyarrow.parquet", "parquet")
        self.suffix, self.batch_bytes, self.batches = ".parquet", _GROUP_BYTES, _GROUPS

    def create(self, path: Location) -> AbstractContextManager[_ParquetWriter]:
        return closing(_ParquetWriter(self._arrow, self._parquet, path))


def _needed(module: str, file_format: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ModuleNotFoundError(
            f"export: file_format {file_format!r} needs {package}, which cannot be imported "
            f"({error}): pip install {package}"
        ) from error


@plain_torch()
def export(
    path: str | PathLike[str],
    out: str | PathLike[str],
    *,
    file_format: ExportFormat,
    tables: Sequence[str] | None = None,
    state: bool = False,
    progress: bool | None = None,
) -> None:
    """Write the tables of a checkpoint for other programs, in one folder each.

    Files are numbered, ``part-00000.npz`` and so on. They have these columns:

    * ``id``: int64 [n];
    * ``row``: [n, dim];
    * ``score.NAME``: int64 [n];
    * ``state.NAME``: [n] or [n, dim], if requested.

    In Parquet, columns with a second dimension are lists of fixed size. bfloat16 becomes float32,
    without loss; 8-bit state stays uint8 as saved. ``tables.json`` has the folder and the
    description of each table. An npz file takes about 64 MiB, and a Parquet file about 1 GiB.
    Memory use is 64 MiB, or 32 MiB for Parquet.

    Args:
        path: path of the checkpoint.
        out: folder to create, or its URL. It must not exist, and appears as a whole or not at all:
            at a URL, ``tables.json`` is written last.
        file_format: ``"npz"``, which needs numpy, or ``"parquet"``, which needs pyarrow.
        tables: names of the tables to write; default: all.
        state: also write optimizer state.
        progress: show a progress bar; default: if the standard error is a terminal.

    Raises:
        TypeError, ValueError: a wrong argument, an unknown table, or a table of 8-bit rows.
        ModuleNotFoundError: numpy or pyarrow is missing.
        FileNotFoundError: ``path`` is not a checkpoint.
        FileExistsError: ``out`` exists.
        DamagedFileError: a file is damaged or missing.
        OSError: the disk is full, or fails. In all cases nothing is left at ``out``.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
        >>> items(torch.arange(100)).sum().backward()
        >>> folder = tempfile.TemporaryDirectory()
        >>> handle = td.checkpoint.save(folder.name + "/last", items)
        >>> td.checkpoint.export(folder.name + "/last", folder.name + "/npz", file_format="npz")
        >>> import numpy
        >>> numpy.load(folder.name + "/npz/embedding/part-00000.npz")["row"].shape
        (100, 4)
        >>> folder.cleanup()
    """
    if file_format not in ("npz", "parquet"):
        raise ValueError(f"export: file_format is {file_format!r}, expected 'npz' or 'parquet'")
    flag("export: state", state)
    target = checked_location("export", out)
    writer: _Format = _Npz() if file_format == "npz" else _Parquet()
    with open_checkpoint(path) as source:
        check_full("export", source.folder, source.manifest)
        names = list(dict.fromkeys(source.tables if tables is None else tables))
        unknown = [name for name in names if name not in source.tables]
        if unknown:
            raise ValueError(
                f"export: tables has {unknown[0]!r}, but the checkpoint has {list(source.tables)}"
            )
        packed = [name for name in names if source.tables[name].packed]
        if packed:
            raise ValueError(
                f"export: table {packed[0]!r} has rows of 8 bits, packed into columns that other "
                f"programs cannot read: give tables without {packed}"
            )
        if is_there(target):
            raise FileExistsError(f"export: {target} exists already: give another path")
        # at a URL, the summary is what appears last
        disk = disk_of(target, _DISK)
        chosen = [source.tables[name] for name in names]
        total = sum(table.ids * _id_bytes(table, state) for table in chosen)
        with claimed("export", disk, target, uuids.uuid4().hex) as folder:
            try:
                disk.make_folder(folder)
                with progress_bar(f"exporting {source.folder.name}", total, progress) as bar:
                    summary = {}
                    for table in chosen:
                        files = _write_table(folder, table, writer, state, bar.update)
                        summary[table.name] = {**_summary(table, state), "files": files}
                text = json.dumps({"checkpoint": source.uuid, "tables": summary}, indent=2)
                if isinstance(target, Url):
                    with defer_signals():  # a request that is interrupted goes on
                        target.store.put(str(target / SUMMARY), f"{text}\n".encode())
                    return
                summary_file = local(folder / SUMMARY)
                summary_file.write_text(text + "\n")
                _sync(summary_file)
                for inner in {folder, *(folder / table_folder(name) for name in names)}:
                    disk.sync_folder(inner)
                put_new(disk, local(folder), target)
            except BaseException:
                with defer_signals():
                    disk.remove(folder)
                raise


def _id_bytes(table: CheckpointTable, state: bool) -> int:
    without = () if state else table.state_tensors
    return table.row_bytes - sum(of.row_bytes(table.embedding_dim) for of in without)


def _write_table(
    folder: Location, table: CheckpointTable, writer: _Format, state: bool, progress: Any
) -> int:
    """Write the files of a table. Return their number."""
    size = max(1, writer.batch_bytes // _id_bytes(table, state))
    batches = table.batches(size, state=state)
    per_row = {of.name for of in table.state_tensors if of.per_row}
    inner = folder / table_folder(table.name)
    disk_of(inner, _DISK).make_folder(inner)
    batch: RowBatch | None = next(batches, None) or _empty(table, state)
    files = 0
    while batch is not None:
        path = inner / f"part-{files:05}{writer.suffix}"
        with writer.create(path) as file:
            for _ in range(writer.batches):
                if batch is None:
                    break
                file.append(_columns(batch, per_row))
                progress(batch.ids.numel() * _id_bytes(table, state))
                batch = None  # freed before the next one is read
                batch = next(batches, None)
        if isinstance(path, Path):
            _sync(path)
        files += 1
    return files


def _columns(batch: RowBatch, per_row: Collection[str]) -> Columns:
    columns = {"id": batch.ids, "row": batch.rows}
    columns.update({score_entry(word): of for word, of in batch.scores.items()})
    for name, of in batch.state.items():
        columns[state_entry(name)] = of[:, 0] if name in per_row else of
    return {name: of.float() if of.dtype == torch.bfloat16 else of for name, of in columns.items()}


def _empty(table: CheckpointTable, state: bool) -> RowBatch:
    """Return an empty batch, so that the file of a table without ids still has its columns."""
    dim = table.embedding_dim
    tensors = {
        of.name: torch.empty(0, of.columns(dim), dtype=of.dtype, device="cpu")
        for of in (table.state_tensors if state else ())
    }
    ids = torch.empty(0, dtype=torch.int64, device="cpu")
    rows = torch.empty(0, dim, dtype=table.dtype, device="cpu")
    return RowBatch(ids, rows, tensors, dict.fromkeys(table.scores, ids))


def _summary(table: CheckpointTable, state: bool) -> dict[str, Any]:
    return {
        "folder": table_folder(table.name),
        "ids": table.ids,
        "embedding_dim": table.embedding_dim,
        "dtype": str(table.dtype).removeprefix("torch."),
        "scores": list(table.scores),
        "state": [of.name for of in table.state_tensors] if state else [],
        "optimizer": table.optimizer,
    }


def _sync(path: Path) -> None:
    """Wait until a file is on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _DISK.sync(file)
    finally:
        _DISK.close(file)


__all__ = ["ExportFormat", "export"]
