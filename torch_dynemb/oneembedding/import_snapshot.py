"""Import of OneFlow's OneEmbedding snapshots into an embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, flag, integer
from torch_dynemb.checkpoint import LoadReport
from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.oneembedding.embedding import Embedding
from torch_dynemb.oneembedding.keys import id_of, ids_of
from torch_dynemb.oneembedding.oneflow_snapshot import is_oneflow_table, oneflow_table
from torch_dynemb.oneembedding.row_layout import RowLayout
from torch_dynemb.oneembedding.snapshots import folder_of_snapshot
from torch_dynemb.oneembedding.stores import block_size
from torch_dynemb.oneembedding.table_reader import checked_paths, make_persistent_table_reader
from torch_dynemb.oneembedding.table_writer import writer_for
from torch_dynemb.optim import MomentumSGD

_OWNER = "import_snapshot"
# Optimizers with a state that OneFlow stores behind the row in the same order and meaning.
_KNOWN = ("SGD", "MomentumSGD", "Adagrad", "Adam", "AdamW", "Ftrl")


def import_snapshot(
    embedding: Embedding,
    paths: Sequence[str | PathLike[str]],
    snapshot_name: str,
    *,
    table_of: Callable[[Tensor], Tensor] | None = None,
    optimizer_state: bool = True,
    optimizer_steps: int = 0,
    physical_block_size: int = 4096,
) -> LoadReport:
    """Load a snapshot written by OneFlow's OneEmbedding; all ranks call it together.

    The first rank converts it, with bounded memory, to a snapshot of this package of the same name
    below the embedding's ``persistent_path``. Then all ranks load the converted snapshot.

    Args:
        embedding: with the same columns and key type, on any number of ranks. Its content is
            replaced.
        paths: a list with the folder of each rank of the OneFlow job, such as
            ``["/data/0-2", "/data/1-2"]``.
        snapshot_name: name of the snapshot.
        table_of: function from keys [n] of the embedding's key type to table numbers int64 [n].
            OneFlow's files do not store table numbers, so it is required with several tables.
        optimizer_state: if True, load the optimizer state, too: of SGD with momentum, Adagrad,
            Adam, AdamW or Ftrl. If False, load rows only; state starts anew.
        optimizer_steps: number of updates made by the optimizer, for Adam's bias correction.
        physical_block_size: that of the store options of the OneFlow job.

    Returns:
        What was loaded.

    Raises:
        TypeError, ValueError: a wrong value, or files that do not fit the embedding.
        FileNotFoundError: the snapshot does not exist, or one of its files is missing.
        FileExistsError: the embedding has a snapshot of this name.
        OSError: the disk is full or fails. In all cases all ranks raise, and the embedding keeps
            its
            content.
    """
    if not isinstance(embedding, Embedding):
        raise TypeError(
            f"{_OWNER}: embedding is {described(embedding)}, expected one such as "
            "MultiTableEmbedding"
        )
    flag(f"{_OWNER}: optimizer_state", optimizer_state)
    steps = integer(f"{_OWNER}: optimizer_steps", optimizer_steps, least=0)
    block = block_size(_OWNER, physical_block_size)
    folder = folder_of_snapshot(_OWNER, embedding.store_options.root(), snapshot_name)

    def convert() -> None:
        if folder.exists():
            raise FileExistsError(
                f"{_OWNER}: {folder} already exists: load it with load_snapshot, or remove it"
            )
        source = _source_of(embedding, paths, block, optimizer_state)
        _convert(embedding, source, folder, table_of, steps)

    ranks_of(process_group_of(embedding.rank_group)).on_first(convert)
    return embedding.load_snapshot(snapshot_name, optimizer_state=optimizer_state)


class _SnapshotFiles(NamedTuple):
    """OneFlow's files, and the part of each value to load.

    Attributes:
        paths: folders of all ranks.
        block: bytes of a sector.
        stored: elements of a value.
        width: number of elements to load.
        factor: of the state behind the row.
    """

    paths: list[Path]
    block: int
    stored: int
    width: int
    factor: float


def _source_of(
    embedding: Embedding,
    paths: Sequence[str | PathLike[str]],
    block: int,
    optimizer_state: bool,
) -> _SnapshotFiles:
    """Open the files and check that they fit the embedding.

    Raises:
        FileNotFoundError: OneFlow has not written there.
        ValueError: the files do not fit.
    """
    folders = checked_paths(_OWNER, paths)
    for folder in folders:
        if not is_oneflow_table(folder):
            raise FileNotFoundError(
                f"{_OWNER}: {folder} was not written by OneFlow: it has no keys and no KEY_SIZE"
            )
    stored = oneflow_table(_OWNER, folders[0], block).value_bytes // 4
    dim = embedding.embedding_dim
    if not optimizer_state:
        if stored < dim:
            raise ValueError(
                f"{_OWNER}: values of {folders[0]} have {stored} elements, but rows of embedding "
                f"{embedding.name!r} have {dim} columns"
            )
        return _SnapshotFiles(folders, block, stored, dim, 1.0)
    optimizer = embedding.group.config.optimizer if embedding.trained == "now" else None
    name = "no optimizer yet" if optimizer is None else optimizer.name
    width = dim if optimizer is None else RowLayout(dim, optimizer.state).width
    if stored != width or (optimizer is not None and optimizer.name not in _KNOWN):
        raise ValueError(
            f"{_OWNER}: values of {folders[0]} have {stored} elements, expected {width} of the "
            f"{dim} columns of embedding {embedding.name!r} with {name}, and one of {_KNOWN}: give "
            "it the optimizer with which it was written, or optimizer_state=False for rows alone"
        )
    # OneFlow: v' = momentum * v - lr * g, here v' = momentum * v + g
    factor = -1 / optimizer.lr if isinstance(optimizer, MomentumSGD) else 1.0
    return _SnapshotFiles(folders, block, stored, width, factor)


def _convert(
    embedding: Embedding,
    source: _SnapshotFiles,
    folder: Path,
    table_of: Callable[[Tensor], Tensor] | None,
    steps: int,
) -> None:
    """Write a snapshot with the rows of OneFlow's files."""
    if table_of is None and embedding.num_tables > 1:
        raise ValueError(
            f"{_OWNER}: table_of is None, but embedding {embedding.name!r} has "
            f"{embedding.num_tables} tables: give a function from keys to numbers of tables"
        )
    key_type = embedding.key_type
    reader = make_persistent_table_reader(
        *(source.paths, folder.name, key_type, torch.float32, source.stored, source.block)
    )
    writer = writer_for(embedding, folder, torch.float32, source.width, steps)
    dim, padding = embedding.embedding_dim, embedding.padding_idx
    with reader, writer:
        for keys, values in reader:
            kept = values[:, : source.width]
            if source.factor != 1:
                kept[:, dim:] *= source.factor
            if padding is not None:  # the padding id has no row here
                others = ids_of(_OWNER, keys, key_type) != id_of(_OWNER, padding, key_type)
                keys, kept = keys[others], kept[others]
            writer.write(keys, kept, 0 if table_of is None else table_of(keys))


__all__ = ["import_snapshot"]
