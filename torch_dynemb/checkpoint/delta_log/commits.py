"""What the ranks' batches of one number say together: the changes of whole tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.checkpoint.delta_log.batch import DENSE, ERASE, ROWS, TABLES, Batch
from torch_dynemb.checkpoint.delta_log.payloads import LoggedTable, tables_of_payload, tensors_of
from torch_dynemb.checkpoint.entries import ID, PACKED, WEIGHT, score_entry, state_entry
from torch_dynemb.errors import DamagedFileError

_STATE = state_entry("")
DTYPES_OF_ROWS = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.bfloat16, torch.float16)
}


class TableDelta(NamedTuple):
    """What a commit changes in a table.

    Attributes:
        embedding_dim: columns of its rows.
        dtype: of its rows, as a checkpoint names it.
        ids: int64 [n], each once, that are new or whose rows have changed.
        rows: [n, embedding_dim], of the dtype of the table.
        state: optimizer state by name, [n] or [n, columns] each; none where the log has none.
        removed: int64 [m], ids that are gone.
        optimizer: name of what trains the rows; None: the log has no optimizer state.
        optimizer_steps: that it has made.
        scores: int64 [n], custom scores of the ids; None: the table keeps none.
    """

    embedding_dim: int
    dtype: str
    ids: Tensor
    rows: Tensor
    state: dict[str, Tensor]
    removed: Tensor
    optimizer: str | None
    optimizer_steps: int
    scores: Tensor | None = None


class Commit(NamedTuple):
    """What one publish of all ranks has changed.

    Attributes:
        sequence: its number.
        step: of training.
        tables: by name; those that have not changed have no ids.
        dense: tensors of the dense part that have changed, by name in the model's state dict.
    """

    sequence: int
    step: int
    tables: dict[str, TableDelta]
    dense: dict[str, Tensor]


class _Piece(NamedTuple):
    """What a rank says of its part of a table."""

    table: LoggedTable
    ids: Tensor
    rows: Tensor
    state: dict[str, Tensor]
    removed: Tensor
    scores: Tensor | None = None


def commit_of(batches: Sequence[Batch], *, whole: bool = True) -> Commit:
    """The batches of one number as one commit.

    Args:
        batches: of all ranks, at least one.
        whole: all columns of the tables must be there; else rows may have fewer.

    Raises:
        DamagedFileError: they cannot be understood.
    """
    head = batches[0].head
    try:
        pieces: dict[str, list[_Piece]] = {}
        dense: dict[str, Tensor] = {}
        for batch in batches:
            for piece in _pieces_of(batch):
                pieces.setdefault(piece.table.name, []).append(piece)
            for record in batch.records:
                if record.kind == DENSE:
                    dense.update(tensors_of(record.payload))
        tables = {name: _whole(name, of_table, whole=whole) for name, of_table in pieces.items()}
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"delta log: commit {head.sequence} cannot be understood: {error}"
        ) from error
    return Commit(head.sequence, head.step, tables, dense)


def _pieces_of(batch: Batch) -> list[_Piece]:
    described = [of for of in batch.records if of.kind == TABLES]
    tables = tables_of_payload(described[0].payload) if described else []
    none = torch.empty(0, dtype=torch.int64)
    pieces = [_Piece(table, none, torch.empty(0, table.columns), {}, none) for table in tables]
    for record in batch.records:
        if record.kind == ROWS:
            tensors = tensors_of(record.payload)
            state = {
                name.removeprefix(_STATE): values
                for name, values in tensors.items()
                if name.startswith(_STATE)
            }
            piece = pieces[record.table]._replace(
                ids=tensors[ID],
                rows=tensors[WEIGHT],
                state=state,
                scores=tensors.get(score_entry("custom")),
            )
            _check_rows(piece)
            pieces[record.table] = piece
        elif record.kind == ERASE:
            removed = tensors_of(record.payload)[ID]
            _check_ids(pieces[record.table], removed)
            pieces[record.table] = pieces[record.table]._replace(removed=removed)
        elif record.kind not in (DENSE, TABLES):
            raise ValueError(f"it has a record of kind {record.kind}")
    return pieces


def _check_ids(piece: _Piece, ids: Tensor) -> None:
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"table {piece.table.name!r} has ids of {ids.dtype} {tuple(ids.shape)}")


def _check_rows(piece: _Piece) -> None:
    """Raises ValueError where a record has other rows than its table says."""
    table, count = piece.table, piece.ids.shape[:1]
    _check_ids(piece, piece.ids)
    dtype = torch.float32 if table.dtype == PACKED else DTYPES_OF_ROWS.get(table.dtype)
    if piece.rows.dtype != dtype or piece.rows.shape != (*count, table.columns):
        raise ValueError(
            f"table {table.name!r} of {table.columns} columns of {table.dtype} has rows of "
            f"{piece.rows.dtype} {tuple(piece.rows.shape)} for {piece.ids.numel()} ids"
        )
    if piece.scores is not None:
        _check_ids(piece, piece.scores)
    beside = [*piece.state.values(), *([] if piece.scores is None else [piece.scores])]
    if any(values.shape[:1] != count for values in beside):
        raise ValueError(f"table {table.name!r} has no state or score for each of its ids")


def _whole(name: str, pieces: Sequence[_Piece], *, whole: bool) -> TableDelta:
    """A table from the ids and columns that ranks have of it."""
    table = pieces[0].table
    by_columns: dict[int, list[_Piece]] = {}
    for piece in pieces:
        by_columns.setdefault(piece.table.first_column, []).append(piece)
    columns = [_joined(of_columns) for _, of_columns in sorted(by_columns.items())]
    if whole and sum(piece.table.columns for piece in columns) != table.embedding_dim:
        raise ValueError(f"table {name!r} has not all of its {table.embedding_dim} columns")
    first = columns[0]
    rows = first.rows
    if len(columns) > 1:
        columns = [_sorted(piece) for piece in columns]
        first = columns[0]
        if any(not torch.equal(piece.ids, first.ids) for piece in columns):
            raise ValueError(f"ranks that share the columns of table {name!r} have other ids")
        rows = torch.cat([piece.rows for piece in columns], dim=1)
    return TableDelta(
        table.embedding_dim,
        table.dtype,
        first.ids,
        rows,
        first.state,
        first.removed,
        table.optimizer,
        table.optimizer_steps,
        first.scores,
    )


def _joined(pieces: Sequence[_Piece]) -> _Piece:
    """Of the same columns: the ids of all."""
    if len(pieces) == 1:
        return pieces[0]
    filled = [piece for piece in pieces if piece.ids.numel() > 0] or pieces[:1]
    scores = [piece.scores for piece in filled if piece.scores is not None]
    state = {name: torch.cat([piece.state[name] for piece in filled]) for name in filled[0].state}
    return pieces[0]._replace(
        ids=torch.cat([piece.ids for piece in filled]),
        rows=torch.cat([piece.rows for piece in filled]),
        state=state,
        removed=torch.cat([piece.removed for piece in pieces]),
        scores=torch.cat(scores) if len(scores) == len(filled) else None,
    )


def _sorted(piece: _Piece) -> _Piece:
    ids, order = piece.ids.sort()
    scores = None if piece.scores is None else piece.scores[order]
    return piece._replace(ids=ids, rows=piece.rows[order], scores=scores)


__all__ = ["Commit", "TableDelta", "commit_of"]
