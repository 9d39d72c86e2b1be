"""Vectors of a table as files for libraries of approximate search."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torch_dynemb.argument_checks import described, text
from torch_dynemb.files.locations import checked_path
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.table.group import TableGroup

VectorFormat = Literal["npy", "faiss"]
_ROWS_AT_ONCE = 1 << 16


def export_vectors(
    model: nn.Module,
    table: str,
    path: str | os.PathLike[str],
    *,
    format: VectorFormat = "npy",  # noqa: A002 - of files
    index: str = "IDMap,Flat",
) -> Path:
    """Write the rows of a table for a library of approximate search.

    Args:
        model: has the table in a module of this process, not frozen.
        table: its name.
        path: with ``"npy"`` a folder that does not exist yet. It gets ``ids.npy``, int64 [n], and
            ``vectors.npy``, float32 [n, dim], written in batches. With ``"faiss"`` a file that does
            not exist yet, an index of faiss-cpu with the ids of the table.
        format: ``"npy"`` needs numpy, ``"faiss"`` faiss-cpu (extra ``faiss``).
        index: with ``"faiss"``: a description for ``faiss.index_factory``, with products as scores.
            ``"IVF1024,Flat"`` is trained on all rows, for which they are in memory.

    Returns:
        The path.

    Raises:
        TypeError: ``model`` is not a module, or an argument is not a str.
        ValueError: the model has no or several tables of that name, ranks share it, it is empty, or
            ``format`` is unknown.
        FileExistsError: ``path`` exists.
        ImportError: the library of the format is not installed.

    Example:
        >>> import tempfile, numpy, torch, torch_dynemb as td
        >>> items = td.DynamicEmbedding(2, name="items", optimizer=td.SGD(lr=0.1))
        >>> items.group.insert_or_assign(0, torch.tensor([7]), torch.ones(1, 2))
        >>> path = td.export_vectors(items, "items", tempfile.mkdtemp() + "/items")
        >>> numpy.load(path / "ids.npy"), numpy.load(path / "vectors.npy")
        (array([7]), array([[1., 1.]], dtype=float32))
    """
    owner = "export_vectors"
    if not isinstance(model, nn.Module):
        raise TypeError(f"{owner}: model is {described(model)}, expected a torch.nn.Module")
    group, number = _found(owner, model, text(f"{owner}: table", table))
    if format not in ("npy", "faiss"):
        raise ValueError(f"{owner}: format is {described(format)}, expected 'npy' or 'faiss'")
    checked_path(owner, path)
    target = Path(path)
    if os.path.lexists(target):
        raise FileExistsError(f"{owner}: {target} exists: choose another path, or remove it")
    if group.size(number) == 0:
        raise ValueError(f"{owner}: table {table!r} is empty, expected an id or more: train it")
    if format == "npy":
        _write_arrays(group, number, target)
    else:
        _write_faiss(group, number, target, text(f"{owner}: index", index))
    return target


def _found(owner: str, model: nn.Module, table: str) -> tuple[TableGroup, int]:
    found, known = [], []
    for module in model.modules():
        if isinstance(module, TableModule):
            known += module.group.names
            if table in module.group.names:
                found.append(module)
    if len(found) != 1:
        raise ValueError(
            f"{owner}: table is {table!r}, of which the model has {len(found)}, expected one of "
            f"{known}"
        )
    if found[0]._shared_rows is not None:
        raise ValueError(
            f"{owner}: ranks share table {table!r}, of which this one has a part: save the model "
            "with torch_dynemb.checkpoint.save, and load it into one without process_group"
        )
    return found[0].group, found[0].group.names.index(table)


def _write_arrays(group: TableGroup, table: int, target: Path) -> None:
    import numpy

    count, dim = group.size(table), group.config.tables[table].embedding_dim
    target.mkdir()
    open_memmap: Any = numpy.lib.format.open_memmap
    ids = open_memmap(target / "ids.npy", mode="w+", dtype="int64", shape=(count,))
    vectors = open_memmap(target / "vectors.npy", mode="w+", dtype="float32", shape=(count, dim))
    begin = 0
    for batch in group.export(table, batch_size=_ROWS_AT_ONCE):
        end = begin + batch.ids.shape[0]
        ids[begin:end] = batch.ids.cpu().numpy()
        vectors[begin:end] = batch.rows.cpu().numpy()
        begin = end
    ids.flush()
    vectors.flush()


def _write_faiss(group: TableGroup, table: int, target: Path, description: str) -> None:
    try:
        import faiss
    except ImportError:
        raise ImportError(
            "export_vectors: format is 'faiss', for which faiss-cpu is missing: "
            "pip install torch_dynemb[faiss]"
        ) from None
    dim = group.config.tables[table].embedding_dim
    made = faiss.index_factory(dim, description, faiss.METRIC_INNER_PRODUCT)
    if not made.is_trained:
        rows = torch.cat([batch.rows for batch in group.export(table)])
        made.train(rows.cpu().numpy())
    for batch in group.export(table, batch_size=_ROWS_AT_ONCE):
        made.add_with_ids(batch.rows.cpu().numpy(), batch.ids.cpu().numpy())
    faiss.write_index(made, str(target))


__all__ = ["VectorFormat", "export_vectors"]
