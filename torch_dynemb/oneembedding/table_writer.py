"""Writer of snapshots without training, from keys and values in any order."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Sequence
from contextlib import ExitStack
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.checkpoint.manifest.records import Manifest, SavedDense
from torch_dynemb.checkpoint.saving.save import check_target, finish_folder
from torch_dynemb.checkpoint.saving.table_files import Folder, PartWriter, RowsShape
from torch_dynemb.files.commit import claimed, new_files
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import local
from torch_dynemb.oneembedding.embedding import Embedding
from torch_dynemb.oneembedding.key_value_spool import KeyValueSpool
from torch_dynemb.oneembedding.keys import id_of, ids_of, key_type_of
from torch_dynemb.oneembedding.row_layout import RowLayout
from torch_dynemb.oneembedding.snapshots import folder_of_snapshot, root_of, table_entry
from torch_dynemb.oneembedding.stores import block_size
from torch_dynemb.oneembedding.table_reader import check_value_type, checked_paths
from torch_dynemb.ops.columns import TABLE_COLUMNS, Meta
from torch_dynemb.parts.saved_tables import NO_GROUP, SavedPart, SavedTable
from torch_dynemb.policy import Policy
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.process.torch_modes import plain_torch

_OWNER = "make_persistent_table_writer"
_DISK = Disk()
_PIECE_BYTES = 8 << 20


class _Target(NamedTuple):
    """Settings of the snapshot to write.

    Attributes:
        tables: manifest entry of each table, without its parts.
        layout: of values.
        padding: id without a row.
        steps: number of updates made by the optimizer.
    """

    tables: list[SavedTable]
    layout: RowLayout
    padding: int | None
    steps: int


class PersistentTableWriter:
    """Writer of a snapshot, as returned by :func:`make_persistent_table_writer`.

    It is a context manager. Closing it creates the snapshot as a whole; if the ``with`` block
    raises,
    no snapshot is created.

    Args:
        folder: of the snapshot.
        key_type, value_type: of the input.
        target: settings of the snapshot.

    Raises:
        RuntimeError: another process writes to ``folder``.
        OSError: the folder cannot be created.
    """

    def __init__(
        self, folder: Path, key_type: torch.dtype, value_type: torch.dtype, target: _Target
    ) -> None:
        self._folder, self._key_type, self._value_type = folder, key_type, value_type
        self._target = target
        self._uuid = uuids.uuid4().hex
        self._closed = False
        self._claim = ExitStack()
        self._claim.enter_context(claimed("checkpoint.save", _DISK, folder, self._uuid))
        self._unfinished = local(new_files(folder, self._uuid))
        _DISK.make_folder(self._unfinished)
        self._spools = [
            KeyValueSpool(self._unfinished, number, value_type, target.layout.width)
            for number in range(len(target.tables))
        ]

    @plain_torch()
    def write(self, keys: Any, values: Any, table_ids: Any = 0) -> None:
        """Add rows; the last values of a key count.

        Args:
            keys: [n], of the writer's key type: a tensor or a numpy array.
            values: [n, storage_dim], of the writer's value type.
            table_ids: the table number of all keys, or int64 [n], that of each.

        Raises:
            TypeError: a dtype is another.
            ValueError: shapes do not match, the table does not exist, a key is the padding id, or
                the
                writer is closed.
            OSError: the disk is full or fails.
        """
        if self._closed:
            raise ValueError("write: the writer is closed: make another one to write more")
        ids = ids_of("write: keys", _tensor(keys), self._key_type)
        values = _tensor(values)
        width = self._target.layout.width
        if not isinstance(values, Tensor) or values.dtype != self._value_type:
            raise TypeError(
                f"write: values is {described(values)}, expected a tensor of {self._value_type}"
            )
        if ids.dim() != 1 or tuple(values.shape) != (ids.shape[0], width):
            raise ValueError(
                f"write: keys has shape {tuple(ids.shape)} and values {tuple(values.shape)}, "
                f"expected (n,) and (n, {width})"
            )
        if self._target.padding is not None and bool((ids == self._target.padding).any()):
            raise ValueError(
                f"write: keys has {self._target.padding}, the padding_idx of the embedding, which "
                "has no row: leave it out"
            )
        of_each = self._tables_of(table_ids, ids.shape[0])
        for number, spool in enumerate(self._spools):
            chosen = of_each == number
            if bool(chosen.any()):
                spool.append(ids[chosen], values[chosen])

    def _tables_of(self, table_ids: Any, count: int) -> Tensor:
        tables = len(self._spools)
        given = _tensor(table_ids)
        if not isinstance(given, Tensor):
            number = integer("write: table_ids", given, least=0, most=tables - 1)
            return torch.full((count,), number, device="cpu")
        if given.is_floating_point() or tuple(given.shape) != (count,):
            raise ValueError(
                f"write: table_ids is {described(given)}, expected integers of shape ({count},)"
            )
        outside = given[(given < 0) | (given >= tables)]
        if outside.numel() > 0:
            raise ValueError(
                f"write: table_ids has {int(outside[0])}, expected 0 to {tables - 1}: give the "
                "writer the embedding that has these tables"
            )
        return given.cpu()

    def __enter__(self) -> PersistentTableWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif not self._closed:
            self._closed = True
            self._remove()

    def _remove(self) -> None:
        with defer_signals():
            for spool in self._spools:
                spool.remove()
            self._claim.close()

    @plain_torch()
    def close(self) -> None:
        """Create the snapshot, replacing one of the same name.

        Raises:
            OSError: the disk is full or fails. Then no new snapshot is created.
        """
        if self._closed:
            return
        self._closed = True
        try:
            tables = {}
            with Folder(_DISK, self._unfinished) as folder:
                for number, (spool, table) in enumerate(
                    zip(self._spools, self._target.tables, strict=True)
                ):
                    tables[table_entry(number)] = self._write_table(folder, number, spool, table)
                    spool.remove()
        except BaseException:
            self._remove()
            raise
        manifest = Manifest(
            self._uuid, "full", None, 1, tables, [], SavedDense(), SavedDense(values=None)
        )
        with self._claim:
            finish_folder(_DISK, self._folder, manifest)

    def _write_table(
        self, folder: Folder, number: int, spool: KeyValueSpool, saved: SavedTable
    ) -> SavedTable:
        layout = self._target.layout
        places = spool.places()
        columns = range(layout.dim)
        shape = RowsShape.of_saved(table_entry(number), saved, 0, 1, columns, places.numel())
        with PartWriter(folder, shape) as writer:
            size = max(1, _PIECE_BYTES // (8 + layout.width * self._value_type.itemsize))
            for ids, of_ids in spool.batches(places, size):
                batch = layout.parted(ids, of_ids, saved.column_dtype)
                writer.append(batch.each(Tensor.contiguous))
        whole = SavedPart(
            *(0, 0, layout.dim, 0, 1, 1, places.numel(), 0, NO_GROUP, 0, [0] * TABLE_COLUMNS),
            optimizer_steps=self._target.steps,
            rows=writer.files,
        )
        saved.parts.append(whole)
        return saved


def _tensor(value: Any) -> Any:
    """Convert numpy arrays to tensors that share their memory; move tensors to the CPU."""
    if isinstance(value, Tensor):
        return value.detach().cpu()
    return torch.as_tensor(value, device="cpu") if hasattr(value, "__array_interface__") else value


@plain_torch()
def make_persistent_table_writer(
    paths: Sequence[str | PathLike[str]],
    snapshot_name: str,
    key_type: torch.dtype,
    value_type: torch.dtype,
    storage_dim: int,
    physical_block_size: int = 4096,
    *,
    embedding: Embedding | None = None,
    optimizer_steps: int = 0,
) -> PersistentTableWriter:
    """Create a snapshot for an embedding's ``load_snapshot``, with 40 bytes of memory for an id.

    Args:
        paths: a list with the ``persistent_path``; of several the first counts.
        snapshot_name: name of the snapshot. Closing the writer replaces one of this name.
        key_type: int64, int32, uint64 or uint32: the key type of the embedding.
        value_type: float32, bfloat16 or float16.
        storage_dim: elements of a value; as in :func:`make_persistent_table_reader`.
        physical_block_size: 512 or 4096; the files do not depend on it.
        embedding: one like the embedding that will load the snapshot. It defines the number of
            tables, the columns, the optimizer state in values, the padding id and the initial rows.
            Default: one table of ``storage_dim`` columns, without state.
        optimizer_steps: number of updates made by the optimizer, for Adam's bias correction.

    Returns:
        A context manager with ``write(keys, values, table_ids=0)`` and ``close()``.

    Raises:
        TypeError, ValueError: a wrong value, or one that does not fit ``embedding``.
        FileExistsError: the path exists and is not a snapshot.
        OSError: the disk fails.

    Example:
        >>> import tempfile, torch
        >>> from torch_dynemb import oneembedding
        >>> folder = tempfile.TemporaryDirectory()
        >>> with oneembedding.make_persistent_table_writer(
        ...     [folder.name], "given", torch.int64, torch.float32, storage_dim=4
        ... ) as writer:
        ...     writer.write(torch.arange(10), torch.ones(10, 4))
        >>> store = oneembedding.make_device_mem_store_options(folder.name, 1000)
        >>> embedding = oneembedding.MultiTableEmbedding(
        ...     "items", 4, torch.float32, torch.int64, None, store
        ... )
        >>> report = embedding.load_snapshot("given")
        >>> embedding(torch.tensor([9])).tolist()
        [[1.0, 1.0, 1.0, 1.0]]
        >>> folder.cleanup()
    """
    key_type_of(f"{_OWNER}: key_type", key_type)
    check_value_type(_OWNER, value_type)
    storage_dim = integer(f"{_OWNER}: storage_dim", storage_dim, least=1)
    block_size(_OWNER, physical_block_size)
    steps = integer(f"{_OWNER}: optimizer_steps", optimizer_steps, least=0)
    root = root_of(checked_paths(_OWNER, paths)[0])
    folder = folder_of_snapshot(_OWNER, root, snapshot_name)
    if embedding is None:
        plain = _saved_table(storage_dim, value_type, 0, None, None, Policy().description())
        target = _Target([plain], RowLayout(storage_dim, ()), None, 0)
        return _writer(folder, key_type, value_type, target)
    if not isinstance(embedding, Embedding):
        raise TypeError(
            f"{_OWNER}: embedding is {described(embedding)}, expected one such as "
            "MultiTableEmbedding, or None"
        )
    if embedding.key_type != key_type:
        raise ValueError(
            f"{_OWNER}: key_type is {key_type}, but that of the embedding is {embedding.key_type}"
        )
    return writer_for(embedding, folder, value_type, storage_dim, steps)


def writer_for(
    embedding: Embedding, folder: Path, value_type: torch.dtype, storage_dim: int, steps: int
) -> PersistentTableWriter:
    """Create a writer of a snapshot for an embedding.

    Args:
        embedding: with the tables and the optimizer of the snapshot.
        folder: of the snapshot.
        value_type: of values.
        storage_dim: elements of a value: with all of the optimizer's state, or without.
        steps: number of updates made by the optimizer.

    Raises:
        ValueError: ``storage_dim`` does not fit.
        FileExistsError: the path exists and is not a snapshot.
    """
    target = _target_of(embedding, storage_dim, steps)
    return _writer(folder, embedding.key_type, value_type, target)


def _writer(
    folder: Path, key_type: torch.dtype, value_type: torch.dtype, target: _Target
) -> PersistentTableWriter:
    check_target(folder)
    return PersistentTableWriter(folder, key_type, value_type, target)


def _target_of(embedding: Embedding, storage_dim: int, steps: int) -> _Target:
    config = embedding.group.config
    optimizer = config.optimizer if embedding.trained == "now" else None
    state = () if optimizer is None else optimizer.state
    owner = f"{_OWNER}: embedding {embedding.name!r}"
    layout = RowLayout.of(owner, embedding.embedding_dim, state, storage_dim)
    described_state = optimizer.description() if optimizer is not None and layout.state else None
    padding = None
    if embedding.padding_idx is not None:
        padding = id_of("padding_idx", embedding.padding_idx, embedding.key_type)
    seeds = embedding.group.index.meta[: embedding.num_tables, Meta.SEED].tolist()
    tables = [
        _saved_table(
            *(layout.dim, embedding.dtype, seed, described_state, padding),
            table.policy.description(),
        )
        for seed, table in zip(seeds, config.tables, strict=True)
    ]
    return _Target(tables, layout, padding, steps if layout.state else 0)


def _saved_table(
    dim: int,
    dtype: torch.dtype,
    seed: int,
    optimizer: dict[str, Any] | None,
    padding: int | None,
    policy: dict[str, Any],
) -> SavedTable:
    name = str(dtype).removeprefix("torch.")
    return SavedTable(dim, name, seed, optimizer, {}, padding, [], policy, 0, 0, [])


__all__ = ["PersistentTableWriter", "make_persistent_table_writer", "writer_for"]
