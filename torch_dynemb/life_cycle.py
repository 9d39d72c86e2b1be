"""Removal of ids by rule, and statistics: what keeps a table healthy that lives for months."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import BUCKET_WIDTH, BUCKET_WORDS, Meta, Table

if TYPE_CHECKING:
    from torch_dynemb.table import TableGroup


class ScalarWriter(Protocol):
    """What ``torch.utils.tensorboard.SummaryWriter`` and others have."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Logs one number."""


Predicate = Callable[[Tensor, Tensor], Tensor]
Condition = Callable[[ops.ExportedBatch], Tensor]


@dataclass(frozen=True)
class TableStats:
    """What a table holds and what has happened to it.

    Attributes:
        size: ids.
        slots: places for ids in the index, used or not.
        load: size / slots; the index grows beyond 0.7.
        inserted: ids that have ever got a row.
        removed: ids that have been erased or removed.
        growths: rehashes of the index.
        tombstones: places of removed ids that probes still have to pass.
        index_bytes: of the table's index.
        row_bytes: of the rows of its ids, with generations and optimizer state.
    """

    size: int
    slots: int
    load: float
    inserted: int
    removed: int
    growths: int
    tombstones: int
    index_bytes: int
    row_bytes: int

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


def stats(group: TableGroup) -> dict[str, TableStats]:
    """Statistics by table name; on a GPU, waits for the device."""
    words = BUCKET_WORDS + (BUCKET_WIDTH if group.score != "none" else 0)
    result = {}
    for name, table, row in zip(
        group.names, group.tables_config, group.tables.tolist(), strict=True
    ):
        slots = row[Table.BUCKET_COUNT] * BUCKET_WIDTH
        result[name] = TableStats(
            size=row[Table.SIZE],
            slots=slots,
            load=row[Table.SIZE] / slots,
            inserted=row[Table.INSERTED],
            removed=row[Table.ERASED],
            growths=row[Table.GROWTHS],
            tombstones=row[Table.TOMBSTONES],
            index_bytes=8 * words * row[Table.BUCKET_COUNT],
            row_bytes=group.row_bytes(table.embedding_dim) * row[Table.SIZE],
        )
    return result


def exported(group: TableGroup, table: int, batch_size: int) -> Iterator[ops.ExportedBatch]:
    """All ids of a table with handles and scores; ids of past batches may be erased meanwhile."""
    begin = 0
    while begin >= 0:
        batch = ops.export_batch(
            group.buckets,
            group.scores,
            group.tables,
            group.meta,
            table=table,
            begin=begin,
            max_ids=batch_size,
        )
        begin = int(batch.next)
        if batch.ids.numel() > 0:
            yield batch


def remove(group: TableGroup, table: int, condition: Condition, batch_size: int) -> int:
    """Removes the ids for which a condition, bool [n] of a batch, holds; returns how many.

    Raises:
        ValueError: ``batch_size`` is less than a bucket.
    """
    if batch_size < BUCKET_WIDTH:
        raise ValueError(f"remove: batch_size is {batch_size}, expected at least {BUCKET_WIDTH}")
    removed = 0
    for batch in exported(group, table, batch_size):
        chosen = batch.ids[condition(batch)]
        if chosen.numel() > 0:
            removed += group.erase(table, chosen)
    return removed


def condition_of(
    group: TableGroup,
    table: int,
    *,
    not_seen_for: int | None,
    score_below: int | None,
    norm_below: float | None,
    predicate: Predicate | None,
) -> Condition:
    """The one condition that is not None.

    Raises:
        ValueError: none or several were given, or one that the group cannot tell.
        TypeError: the predicate is not callable.
    """
    given = {
        "not_seen_for": not_seen_for,
        "score_below": score_below,
        "norm_below": norm_below,
        "predicate": predicate,
    }
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ValueError(f"remove: got {names or 'no condition'}, expected one of {list(given)}")
    if names[0] in ("not_seen_for", "score_below") and group.score == "none":
        raise ValueError(
            f"remove: {names[0]} needs scores, but the group has score='none': create it with "
            "score='step'"
        )
    if not_seen_for is not None:
        if not_seen_for < 1:
            raise ValueError(f"remove: not_seen_for is {not_seen_for}, expected at least 1 step")
        oldest = group.clock - not_seen_for
        return lambda batch: batch.scores < oldest
    if score_below is not None:
        least = score_below
        return lambda batch: batch.scores < least
    if norm_below is not None:
        if not norm_below > 0:
            raise ValueError(f"remove: norm_below is {norm_below}, expected more than 0")
        smallest = norm_below
        return lambda batch: _norms(group, table, batch) < smallest
    if not callable(predicate):
        raise TypeError(f"remove: predicate is {predicate!r}, expected a function")
    return lambda batch: _checked(predicate(batch.ids, batch.scores), batch.ids)


def _checked(mask: Tensor, ids: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape:
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise TypeError(
            f"remove: predicate returned {what}, expected a bool tensor of shape {tuple(ids.shape)}"
        )
    return mask


def _norms(group: TableGroup, table: int, batch: ops.ExportedBatch) -> Tensor:
    """L2 norms of rows, float32 [n]."""
    rows = ops.embedding_inference(
        group.rows,
        batch.ids,
        batch.handles,
        torch.tensor([0, batch.ids.numel()], device=batch.ids.device),
        feature_tables=[table],
        dim=int(group.meta[table, Meta.DIM]),
    )
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


__all__ = ["Predicate", "ScalarWriter", "TableStats", "condition_of", "exported", "remove", "stats"]
