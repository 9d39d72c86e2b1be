"""Reader of a snapshot's rows without an embedding."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import checkpoint
from torch_dynemb.argument_checks import described, integer, integers
from torch_dynemb.checkpoint import CheckpointTable
from torch_dynemb.files.locations import checked_path
from torch_dynemb.oneembedding.keys import key_type_of, keys_of
from torch_dynemb.oneembedding.oneflow_snapshot import is_oneflow_table, oneflow_table
from torch_dynemb.oneembedding.row_layout import VALUE_TYPES, RowLayout
from torch_dynemb.oneembedding.snapshots import (
    RANK_FOLDER,
    folder_of_snapshot,
    number_in_snapshot,
    root_of,
)
from torch_dynemb.oneembedding.stores import block_size
from torch_dynemb.process.torch_modes import plain_torch

_ROWS = 65536
_BYTES = 64 << 20


class KeysAndValues(NamedTuple):
    """Batch of rows of a snapshot.

    Attributes:
        keys: [n], of the reader's key type.
        values: [n, storage_dim], of its value type.
    """

    keys: Tensor
    values: Tensor


class PersistentTableReader:
    """Iterator over the rows of a snapshot, as returned by :func:`make_persistent_table_reader`.

    It yields :class:`KeysAndValues` of at most 65,536 rows and 64 MiB each. As a context manager it
    closes the files.

    Args:
        folders: of checkpoints, or of OneFlow's ranks.
        name: of the snapshot.
        key_type, value_type: of the result.
        storage_dim: elements of a value.
        block: bytes of a sector of OneFlow's files.
        tables: numbers of the tables to read; None: all.

    Attributes:
        table_id: table number of the last batch; None for OneFlow's files, which do not store it.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        name: str,
        key_type: torch.dtype,
        value_type: torch.dtype,
        storage_dim: int,
        block: int,
        tables: Sequence[int] | None,
    ) -> None:
        self._name, self._key_type, self._value_type = name, key_type, value_type
        self._storage_dim, self._wanted = storage_dim, tables
        self._size = max(1, min(_ROWS, _BYTES // max(1, storage_dim * value_type.itemsize)))
        self._open = ExitStack()
        self._closed = False
        self.table_id: int | None = None
        of_oneflow = [is_oneflow_table(folder) for folder in folders]
        if any(of_oneflow):
            self._batches = self._of_oneflow(folders, block)
        else:
            self._batches = self._of_checkpoints(folders)

    @plain_torch()
    def __next__(self) -> KeysAndValues:
        if self._closed:
            raise ValueError(f"{_OWNER}: the reader is closed: make another one to read again")
        return next(self._batches)

    def __iter__(self) -> PersistentTableReader:
        return self

    def __enter__(self) -> PersistentTableReader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files and end the iterator."""
        self._closed = True
        self._open.close()

    def _of_checkpoints(self, folders: Sequence[Path]) -> Iterator[KeysAndValues]:
        planned: list[tuple[int, CheckpointTable, RowLayout]] = []
        for folder in folders:
            saved = self._open.enter_context(checkpoint.open(folder))
            of_saved = {
                number_in_snapshot(_OWNER, name): table for name, table in saved.tables.items()
            }
            wanted = sorted(of_saved) if self._wanted is None else self._wanted
            for number in wanted:
                if number not in of_saved:
                    raise ValueError(
                        f"{_OWNER}: tables has {number}, but {folder} has {sorted(of_saved)}"
                    )
                table = of_saved[number]
                layout = RowLayout.of(
                    f"{_OWNER}: table {number} of {folder}",
                    table.embedding_dim,
                    table.state_tensors,
                    self._storage_dim,
                )
                planned.append((number, table, layout))
        return self._of_tables(planned)

    def _of_tables(
        self, planned: Sequence[tuple[int, CheckpointTable, RowLayout]]
    ) -> Iterator[KeysAndValues]:
        for number, table, layout in planned:
            with_state = bool(layout.state)
            for batch in table.batches(self._size, state=with_state, scores=False):
                self.table_id = number
                yield KeysAndValues(
                    keys_of(f"{_OWNER}: key_type", batch.ids, self._key_type),
                    layout.joined(batch, self._value_type),
                )

    def _of_oneflow(self, folders: Sequence[Path], block: int) -> Iterator[KeysAndValues]:
        if self._wanted is not None:
            raise ValueError(
                f"{_OWNER}: tables is {list(self._wanted)}, but {folders[0]} was written by "
                "OneFlow, which does not store table numbers: leave tables out"
            )
        opened = [oneflow_table(_OWNER, folder, block) for folder in folders]
        for table in opened:
            if table.key_bytes != self._key_type.itemsize:
                raise ValueError(
                    f"{_OWNER}: key_type is {self._key_type}, but keys of {table.folder} have "
                    f"{table.key_bytes} bytes"
                )
            if table.value_bytes != 4 * self._storage_dim:
                raise ValueError(
                    f"{_OWNER}: storage_dim is {self._storage_dim}, but values of {table.folder} "
                    f"have {table.value_bytes // 4} elements"
                )
            table.chunks(_OWNER, self._name)  # raises if the snapshot does not exist
        return (
            KeysAndValues(keys, values.to(self._value_type))
            for table in opened
            for keys, values in table.rows(_OWNER, self._name, self._key_type, self._size)
        )


_OWNER = "make_persistent_table_reader"


@plain_torch()
def make_persistent_table_reader(
    paths: Sequence[str | PathLike[str]],
    snapshot_name: str,
    key_type: torch.dtype,
    value_type: torch.dtype,
    storage_dim: int,
    physical_block_size: int = 4096,
    *,
    tables: Sequence[int] | None = None,
) -> PersistentTableReader:
    """Open a snapshot for reading without an embedding, with bounded memory; OneFlow's, too.

    Args:
        paths: a list with the ``persistent_path``, or with the folders ``<rank>-<ranks>`` of all
            ranks in it. For OneFlow's files: the folders of all ranks.
        snapshot_name: name of the snapshot.
        key_type: int64, int32, uint64 or uint32: the key type of the embedding.
        value_type: float32, bfloat16 or float16, to which values are rounded.
        storage_dim: elements of a value: the columns of a row, or those and all of its optimizer
            state. For Adam 3 * dim: the row, then the first and the second moment.
        physical_block_size: that of OneFlow's files; the files of this package do not depend on it.
        tables: numbers of the tables to read, one after another; default: all.

    Returns:
        An iterator of keys [n] and values [n, storage_dim], at most 65,536 rows at a time. Its
        ``table_id`` is the number of their table.

    Raises:
        TypeError, ValueError: a wrong value, or one that does not fit the snapshot.
        FileNotFoundError: the snapshot does not exist.

    Example:
        >>> import tempfile, torch
        >>> from torch_dynemb import oneembedding
        >>> folder = tempfile.TemporaryDirectory()
        >>> store = oneembedding.make_device_mem_store_options(folder.name, 1000)
        >>> embedding = oneembedding.MultiTableEmbedding(
        ...     "items", 4, torch.float32, torch.int64, None, store
        ... )
        >>> rows = embedding(torch.arange(10))
        >>> embedding.save_snapshot("ten")
        >>> with oneembedding.make_persistent_table_reader(
        ...     [folder.name], "ten", torch.int64, torch.float32, storage_dim=4
        ... ) as reader:
        ...     for keys, values in reader:
        ...         print(keys.sort().values.tolist(), values.shape)
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9] torch.Size([10, 4])
        >>> folder.cleanup()
    """
    key_type_of(f"{_OWNER}: key_type", key_type)
    check_value_type(_OWNER, value_type)
    storage_dim = integer(f"{_OWNER}: storage_dim", storage_dim, least=1)
    block = block_size(_OWNER, physical_block_size)
    wanted = None if tables is None else integers(f"{_OWNER}: tables", tables, least=0)
    given = checked_paths(_OWNER, paths)
    folders = _snapshot_folders(given, snapshot_name)
    return PersistentTableReader(
        folders, snapshot_name, key_type, value_type, storage_dim, block, wanted
    )


def check_value_type(owner: str, value_type: object) -> None:
    """Check that values may have this dtype; raise TypeError otherwise."""
    if value_type not in VALUE_TYPES:
        raise TypeError(
            f"{owner}: value_type is {described(value_type)}, expected one of {list(VALUE_TYPES)}"
        )


def checked_paths(owner: str, paths: object) -> list[Path]:
    """Check that ``paths`` is a list of at least one folder and return the folders.

    Raises:
        TypeError: it is not a list of paths.
        ValueError: it is empty, or lacks folders of some ranks.
    """
    if not isinstance(paths, list | tuple) or not all(isinstance(p, str | PathLike) for p in paths):
        raise TypeError(f"{owner}: paths is {described(paths)}, expected a list of paths")
    if not paths:
        raise ValueError(f"{owner}: paths is empty, expected at least one folder")
    for path in paths:
        checked_path(owner, path)  # no URL
    given = [Path(os.fspath(path)) for path in paths]
    ranks = [match for path in given if (match := RANK_FOLDER.fullmatch(path.name))]
    for match in ranks:
        named = sorted(int(found[1]) for found in ranks if found[2] == match[2])
        if named != list(range(int(match[2]))):
            raise ValueError(
                f"{owner}: paths has folders of ranks {named} of {match[2]}: give those of all "
                "ranks, once each"
            )
    return given


def _snapshot_folders(paths: Sequence[Path], name: object) -> list[Path]:
    """Find the folder of a snapshot that all ranks saved together, or OneFlow's folders of
    ranks."""
    found: list[Path] = []
    for path in paths:
        if is_oneflow_table(path):
            folder = path
            folder_of_snapshot(_OWNER, path, name)
        else:
            folder = folder_of_snapshot(_OWNER, root_of(path), name)
        if folder not in found:
            found.append(folder)
    if any(is_oneflow_table(folder) != is_oneflow_table(found[0]) for folder in found):
        raise ValueError(
            f"{_OWNER}: paths mixes folders of OneFlow with others: read them separately"
        )
    return found


__all__ = [
    "KeysAndValues",
    "PersistentTableReader",
    "check_value_type",
    "checked_paths",
    "make_persistent_table_reader",
]
