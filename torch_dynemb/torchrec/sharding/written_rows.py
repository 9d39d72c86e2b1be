"""Rows that a batch of DistributedModelParallel.write brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb.argument_checks import tensor_on
from torch_dynemb.parts.owned_rows import last_of_each
from torch_dynemb.table.row_batch import RowBatch


class WrittenTable(NamedTuple):
    """A table that is written.

    Attributes:
        keys: of its rows in a batch: the names of the collection's outputs.
        dim: columns of a row.
        padding_idx: the padding id, or None.
    """

    keys: Sequence[str]
    dim: int
    padding_idx: int | None


def written_rows(
    batch: object, tables: Mapping[str, WrittenTable], device: torch.device
) -> dict[str, RowBatch]:
    """Check a batch, and return its rows by table, float32: of each id the last one.

    Args:
        batch: keys of all tables, with ids, and rows as weights, float [N, dim].
        tables: by name.
        device: of the tables.

    Raises:
        TypeError, ValueError: the batch is something else.
    """
    call = "write"
    if not isinstance(batch, KeyedJaggedTensor):
        raise TypeError(
            f"{call}: embeddings is a {type(batch).__name__}, expected a KeyedJaggedTensor with "
            "rows as weights"
        )
    keys, ids, weights = batch.keys(), batch.values(), batch.weights_or_none()
    expected = [key for table in tables.values() for key in table.keys]
    if sorted(keys) != sorted(expected):
        raise ValueError(
            f"{call}: embeddings has keys {keys}, expected {expected}: those of all tables with "
            "enable_embedding_update, each once"
        )
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{call}: ids have dtype {ids.dtype}, expected int64 or int32")
    (dim,) = {table.dim for table in tables.values()}
    if weights is None or tuple(weights.shape) != (ids.numel(), dim):
        shape = None if weights is None else tuple(weights.shape)
        raise ValueError(
            f"{call}: weights of embeddings have shape {shape}, expected ({ids.numel()}, {dim}), a "
            "row for each id"
        )
    if not weights.is_floating_point():
        raise TypeError(
            f"{call}: weights of embeddings have dtype {weights.dtype}, expected floats"
        )
    ends = batch.offset_per_key()
    if ends[-1] != ids.numel() or bool((batch.lengths() < 0).any()):
        raise ValueError(
            f"{call}: lengths of embeddings add up to {ends[-1]}, but there are {ids.numel()} ids"
        )
    ids = tensor_on(f"{call}: ids", ids, device).to(torch.int64)
    rows = tensor_on(f"{call}: weights", weights, device).detach().to(torch.float32)
    pieces = {key: slice(ends[n], ends[n + 1]) for n, key in enumerate(keys)}
    found = {}
    for name, table in tables.items():
        of_table = [piece for key, piece in pieces.items() if key in table.keys]
        own = RowBatch(
            torch.cat([ids[piece] for piece in of_table]),
            torch.cat([rows[piece] for piece in of_table]),
        )
        if table.padding_idx is not None and bool((own.ids == table.padding_idx).any()):
            raise ValueError(
                f"{call}: ids of table {name!r} have its padding id {table.padding_idx}, which has "
                "no row: leave it out"
            )
        found[name] = last_of_each(own)
    return found


__all__ = ["WrittenTable", "written_rows"]
