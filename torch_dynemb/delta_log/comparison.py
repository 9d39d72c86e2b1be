"""Comparison of a model with a checkpoint and the commits of a delta log after it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from torch_dynemb.changes.batch import Batch
from torch_dynemb.changes.commits import commit_of
from torch_dynemb.checkpoint.file_names import FULL
from torch_dynemb.checkpoint.reading.reader import Checkpoint
from torch_dynemb.checkpoint.reading.saved_table import CheckpointTable
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.table.lookup import find
from torch_dynemb.table.row_access import read_rows
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.scores import stored_scores
from torch_dynemb.table.tables import exported, one_table

_IDS_AT_ONCE = 1 << 18


def touched_ids(batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Collect the ids that the batches of a rank have changed or removed, by table.

    Args:
        batches: batches of one rank.

    Returns:
        int64 [n] each, unique ids.

    Raises:
        DamagedFileError: a batch cannot be decoded.
    """
    found: dict[str, list[Tensor]] = {}
    for batch in batches:
        # ids are complete even if some columns are missing
        for name, delta in commit_of([batch], whole=False).tables.items():
            found.setdefault(name, []).extend([delta.changed.ids.clone(), delta.removed.clone()])
    return {name: torch.cat(ids).unique() for name, ids in found.items()}


def differing_ids(
    parts: Sequence[TablePart],
    saved: Checkpoint,
    touched: Sequence[Mapping[str, Tensor]],
    *,
    state: bool,
    scores: Callable[[TablePart], Sequence[str]],
) -> list[Tensor]:
    """Collect ids of each part for which followers of a log may differ from the model.

    Args:
        parts: parts of the model, on this rank.
        saved: base of the log.
        touched: results of :func:`touched_ids` on every rank, for the commits since the base.
        state: also compare optimizer state.
        scores: returns the names of the scores that are compared.

    Returns:
        int64 [n] of each part, on the CPU.

    Raises:
        ValueError: the base lacks a table, or has other columns for it.
        DamagedFileError: a file of the base is damaged.
    """
    if saved.kind != FULL:
        raise ValueError(
            f"DeltaLog: base {saved.folder} is an increment of another checkpoint, but a "
            "log needs a whole one: save one, or merge it"
        )
    result = []
    for part in parts:
        of_ranks = [ids[part.name] for ids in touched if part.name in ids]
        result.append(_differing(part, saved, of_ranks, state, scores(part)))
    return result


def _differing(
    part: TablePart,
    saved: Checkpoint,
    touched: Sequence[Tensor],
    state: bool,
    words: Sequence[str],
) -> Tensor:
    table = saved.tables.get(part.name)
    if table is None or table.embedding_dim != part.embedding_dim:
        raise ValueError(
            f"DeltaLog: base {saved.folder} has no table {part.name!r} of {part.embedding_dim} "
            "columns: save a checkpoint of the model, and begin a new log with it"
        )
    found: list[Tensor] = []
    known: list[Tensor] = []
    for batch in table.batches(_IDS_AT_ONCE, state=state, scores=bool(words)):
        own = part.ids.owned(batch.ids)
        known.append(batch.ids[own])
        found.append(batch.ids[own][_differs(part, table, batch, own, state, words)])
    in_base = torch.cat(known) if known else torch.empty(0, dtype=torch.int64, device="cpu")
    for exported_ids in exported(part.group.tables, part.table, _IDS_AT_ONCE):
        ids = exported_ids.ids.cpu()
        found.append(ids[~torch.isin(ids, in_base)])
    found += [ids[part.ids.owned(ids)] for ids in touched]
    return torch.cat(found).unique() if found else in_base


def _differs(
    part: TablePart,
    table: CheckpointTable,
    batch: RowBatch,
    own: Tensor,
    state: bool,
    words: Sequence[str],
) -> Tensor:
    """Return which owned ids of a batch are missing in the model or have another row, bool [n]."""
    tables, ids = part.group.tables, batch.ids[own].to(part.group.device)
    handles = find(tables, *one_table(tables, part.table, ids)).handles
    result = handles < 0
    there = (~result).nonzero()[:, 0]
    now = read_rows(tables, part.table, ids[there], handles[there])
    columns = slice(part.columns.start, part.columns.stop)
    pairs = [(now.rows, batch.rows[own][:, columns])]
    whole = part.columns == range(part.embedding_dim)
    same_state = whole and part.optimizer is not None and table.optimizer is not None
    if state and same_state and now.state.keys() == batch.state.keys():
        pairs += [(now.state[name], batch.state[name][own]) for name in now.state]
    elif state:
        return torch.ones_like(result).cpu()
    for word in words:
        if word not in batch.scores:
            return torch.ones_like(result).cpu()
        scores = stored_scores(tables, part.table, ids[there], word).scores[:, None]
        pairs.append((scores, batch.scores[word][own, None]))
    for mine, theirs in pairs:
        given = theirs.to(ids.device)[there]
        if given.dtype != mine.dtype or given.shape != mine.shape:
            return torch.ones_like(result).cpu()
        # compare bits: NaN equals itself
        unequal = given.contiguous().view(torch.uint8) != mine.contiguous().view(torch.uint8)
        result[there] |= unequal.any(1)
    return result.cpu()


__all__ = ["differing_ids", "touched_ids"]
