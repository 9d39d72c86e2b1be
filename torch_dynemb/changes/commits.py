"""Commits: the batches of all ranks with one number, combined into changes of whole tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.changes.batch import (
    DENSE,
    ERASE,
    KINDS,
    ROWS,
    TABLES,
    Batch,
    Record,
)
from torch_dynemb.changes.payloads import (
    LOG_ROWS,
    LoggedPart,
    as_floats,
    kind_of,
    rows_of,
    tables_of,
    tensors_of,
)
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.ops.columns import SKETCH_ROWS
from torch_dynemb.parts.saved_tables import SavedTable
from torch_dynemb.rows.column_shards import whole_rows
from torch_dynemb.rows.tensor_names import COUNT, ID, SKETCH
from torch_dynemb.table.row_batch import RowBatch


class TableDelta(NamedTuple):
    """Change of a table in a commit.

    Attributes:
        embedding_dim: columns of its rows.
        dtype: dtype of its rows, as a checkpoint names it.
        changed: unique ids that are new or have changed rows. State and scores are empty if the log
            has none.
        removed: int64 [m], removed ids.
        optimizer: name of the optimizer of the rows; None if the log has no optimizer state.
        optimizer_steps: number of its updates.
        quantized: uint8 [n, embedding_dim + 8], the rows of a log with ``rows="int8"`` as
            published, which ``changed`` has as floats; None: other rows, or those of several column
            shards.
    """

    embedding_dim: int
    dtype: str
    changed: RowBatch
    removed: Tensor
    optimizer: str | None
    optimizer_steps: int
    quantized: Tensor | None = None


class Commit(NamedTuple):
    """A commit: the changes that all ranks published under one number.

    Attributes:
        sequence: number of the commit.
        step: training step.
        tables: changes by table name; unchanged tables have no ids.
        dense: changed tensors of the dense state, of any shape, by name in the model's state dict.
        chains: chain after the commit, by rank, which is unique to the log.
    """

    sequence: int
    step: int
    tables: dict[str, TableDelta]
    dense: dict[str, Tensor]
    chains: tuple[int, ...] = ()


class _Piece(NamedTuple):
    """A rank's change of its part of a table."""

    logged: LoggedPart
    rows: list[RowBatch]
    removed: Tensor


def commit_of(batches: Sequence[Batch], *, whole: bool = True, by_shard: bool = False) -> Commit:
    """Combine the batches of one number into a commit. Records that followers ignore are skipped.

    Args:
        batches: batches of all ranks, at least one.
        whole: whether all columns of the tables must be there; False: rows may have fewer.
        by_shard: whether state with one value per row keeps that of each column shard, [n, shards]
            in the order of their columns; False: it is combined, [n, 1].

    Raises:
        DamagedFileError: they cannot be decoded.
    """
    head = batches[0].head
    try:
        pieces: dict[str, list[_Piece]] = {}
        dense: dict[str, Tensor] = {}
        for batch in batches:
            for piece in _pieces_of(batch.records):
                pieces.setdefault(piece.logged.name, []).append(piece)
            for record in batch.records:
                if record.kind == DENSE:
                    dense.update(tensors_of(record.payload))
        tables = {name: _delta(of, whole, by_shard) for name, of in pieces.items()}
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"delta log: commit {head.sequence} cannot be decoded: {error}"
        ) from error
    chains = tuple(batch.chain for batch in batches)
    return Commit(head.sequence, head.step, tables, dense, chains)


def _pieces_of(records: Sequence[Record]) -> list[_Piece]:
    described = [of for of in records if of.kind == TABLES]
    tables = tables_of(described[0].payload) if described else []
    none = torch.empty(0, dtype=torch.int64, device="cpu")
    pieces = [_Piece(logged, [], none) for logged in tables]
    for record in records:
        if record.kind == ROWS:
            piece = pieces[record.table]
            piece.rows.append(checked_rows(piece.logged, record.payload, forms=True))
        elif record.kind == ERASE:
            removed = checked_ids(pieces[record.table].logged.name, record.payload)
            pieces[record.table] = pieces[record.table]._replace(removed=removed)
        elif record.kind not in KINDS:
            raise ValueError(f"it has a record of unknown kind {record.kind}")
    return pieces


def checked_ids(name: str, payload: Tensor, entry: str = ID) -> Tensor:
    """Return the int64 [n] of a record.

    Args:
        name: name of the table.
        payload: uint8 [n].
        entry: name of the tensor.

    Raises:
        KeyError, ValueError: it is not such a record.
    """
    return _int64(name, tensors_of(payload)[entry])


def checked_counts(name: str, payload: Tensor) -> Tensor:
    """Return the ids of a record with their counts, int64 [2, n].

    Args:
        name: name of the table.
        payload: uint8 [n].

    Raises:
        KeyError, RuntimeError, ValueError: it is not such a record.
    """
    return torch.stack([checked_ids(name, payload, of) for of in (ID, COUNT)])


def checked_sketch(name: str, payload: Tensor) -> Tensor:
    """Return the counting sketch of a record, int32 [rows, width].

    Args:
        name: name of the table.
        payload: uint8 [n].

    Raises:
        KeyError, ValueError: it is not such a record.
    """
    cells = tensors_of(payload)[SKETCH]
    if cells.dtype != torch.int32 or cells.dim() != 2 or cells.shape[0] != SKETCH_ROWS:
        raise ValueError(
            f"table {name!r} has a sketch of {cells.dtype} {tuple(cells.shape)}, expected int32 "
            f"[{SKETCH_ROWS}, width]"
        )
    return cells


def _int64(name: str, ids: Tensor) -> Tensor:
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"table {name!r} has ids of {ids.dtype} {tuple(ids.shape)}")
    return ids


def checked_rows(logged: LoggedPart, payload: Tensor, *, forms: bool = False) -> RowBatch:
    """Return the rows of a record, checked against the description of their table.

    Args:
        logged: table in the batch.
        payload: uint8 [n].
        forms: whether they may have a form of logs in place of that of the table.

    Raises:
        KeyError, ValueError: it has other rows.
    """
    rows, form = rows_of(payload, LOG_ROWS if forms else ())
    rows = rows._replace(first_column=logged.part.first_column)
    name, count = logged.name, _int64(logged.name, rows.ids).shape
    dtype, columns = kind_of(logged, form)
    if rows.rows.dtype != dtype or rows.rows.shape != (*count, columns):
        raise ValueError(
            f"table {name!r} of {columns} columns of {dtype} has rows of "
            f"{rows.rows.dtype} {tuple(rows.rows.shape)} for {rows.ids.numel()} ids"
        )
    scores = [_int64(name, of) for of in rows.scores.values()]
    if any(values.shape[:1] != count for values in (*rows.state.values(), *scores)):
        raise ValueError(f"table {name!r} lacks state or scores for some of its ids")
    _check_state(logged, rows)
    return rows


def _check_state(logged: LoggedPart, rows: RowBatch) -> None:
    """Raise KeyError or ValueError unless rows have the optimizer state of their table."""
    name, table = logged
    for tensor in table.state_tensors:
        of, values = tensor.name, rows.state[tensor.name]
        shape = (*rows.ids.shape, tensor.columns(logged.part.columns))
        if values.dtype != tensor.dtype or values.shape != shape:
            raise ValueError(
                f"table {name!r} has state {of!r} of {values.dtype} {tuple(values.shape)}, "
                f"expected {tensor.dtype} {tuple(shape)}"
            )


def _delta(pieces: Sequence[_Piece], whole: bool, by_shard: bool) -> TableDelta:
    """Combine the ids and columns of all ranks into the change of a table."""
    name, table = pieces[0].logged
    by_columns: dict[int, list[_Piece]] = {}
    for piece in pieces:
        by_columns.setdefault(piece.logged.part.first_column, []).append(piece)
    columns = [of[0].logged.part.columns for of in by_columns.values()]
    if whole and sum(columns) != table.embedding_dim:
        raise ValueError(f"table {name!r} lacks some of its {table.embedding_dim} columns")
    shards = [
        _joined([rows for piece in of for rows in piece.rows], of[0].logged)
        for _, of in sorted(by_columns.items())
    ]
    only = shards[0].rows if len(shards) == 1 else None
    logged = [by_columns[first][0].logged for first in sorted(by_columns)]
    shards = [as_floats(of, rows) for of, rows in zip(logged, shards, strict=True)]
    if len(shards) > 1:
        shards = [of.picked(of.ids.argsort()) for of in shards]
    per_shard = [of.part.range_of_columns for of in logged] if by_shard else None
    rows = combined(table, name, shards, per_shard)
    steps = max(piece.logged.part.optimizer_steps for piece in pieces)
    return TableDelta(
        table.embedding_dim,
        table.dtype,
        rows,
        torch.cat([piece.removed for piece in by_columns[min(by_columns)]]),
        None if table.optimizer is None else str(table.optimizer["name"]),
        steps,
        only if only is not None and only.dtype == torch.uint8 else None,
    )


def combined(
    table: SavedTable, name: str, shards: Sequence[RowBatch], columns: Sequence[range] | None
) -> RowBatch:
    """Combine column shards into rows with all columns. Ids and their order must be the same.

    Args:
        table: description of the table.
        name: its name.
        shards: by column.
        columns: of the shards that state with one value per row is for; None: of the whole rows.

    Raises:
        ValueError: they have different ids.
    """
    if any(not torch.equal(of.ids, shards[0].ids) for of in shards[1:]):
        raise ValueError(f"ranks that share the columns of table {name!r} have different ids")
    per_row = {of.name for of in table.state_tensors if of.per_row}
    return whole_rows(shards, per_row, columns)


def _joined(rows: Sequence[RowBatch], logged: LoggedPart) -> RowBatch:
    """Concatenate rows of the same columns."""
    rows = [of for of in rows if of.ids.numel() > 0] or rows[:1]
    if not rows:
        none = torch.empty(0, logged.part.columns, dtype=logged.table.column_dtype, device="cpu")
        ids = torch.empty(0, dtype=torch.int64, device="cpu")
        return RowBatch(ids, none, first_column=logged.part.first_column)
    if len({of.rows.dtype for of in rows}) > 1:
        rows = [as_floats(logged, of) for of in rows]
    return RowBatch.joined(rows)


__all__ = [
    "Commit",
    "TableDelta",
    "checked_counts",
    "checked_ids",
    "checked_rows",
    "checked_sketch",
    "combined",
    "commit_of",
]
