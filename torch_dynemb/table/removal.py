"""Removal of ids by rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated

import torch
from torch import Tensor
from typing_extensions import TypedDict, Unpack

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, flag, integer, number
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    SKETCH_ROWS,
    Clock,
    Meta,
    PolicyColumn,
    Table,
)
from torch_dynemb.policy.admission import AdmitFrequentSketch
from torch_dynemb.policy.half_life import counts_of
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.expiry import Expiry
from torch_dynemb.table.lookup import find
from torch_dynemb.table.pending_gradients import drop_pending
from torch_dynemb.table.row_access import readable, write_rows
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.scores import decay_time, deciding_score, eviction_scores
from torch_dynemb.table.tables import Tables, exported, one_table

_FILLED_AT_ONCE = 1 << 17
Predicate = Callable[[Tensor, Tensor], Tensor]
Condition = Callable[[ops.ExportedBatch], Tensor]


class Conditions(TypedDict, total=False):
    """Conditions for the removal of ids of a table: give one.

    Attributes:
        not_seen_for: steps, at least 1: ids without a training lookup in the last so many steps.
        expired: True: ids past their ttl, except those that ``keep_at_least`` keeps.
        score_below: ids with a lower score (the score that eviction goes by), an int; of decayed
            counts a number, compared with the counts of the present time.
        norm_below: ids with a row of a smaller L2 norm (of an untrained row: that of its initial
            value); more than 0.
        predicate: function of ids int64 [n] and scores int64 [n] of a batch, with result bool [n].
    """

    not_seen_for: Annotated[int | None, None]
    expired: Annotated[bool | None, None]
    score_below: Annotated[float | None, None]
    norm_below: Annotated[float | None, None]
    predicate: Annotated[Predicate | None, None]


def contains(tables: Tables, table: int, ids: Tensor) -> Tensor:
    """Return which ids are in a table, as :meth:`torch_dynemb.TableGroup.contains` does."""
    handles = find(tables, *one_table(tables, table, ids, "contains")).handles
    return (handles >= 0).reshape(ids.shape)


def erase(tables: Tables, table: int, ids: Tensor) -> int:
    """Remove ids as :meth:`torch_dynemb.TableGroup.erase` does."""
    flat, offsets, features = one_table(tables, table, ids, "erase")
    slab = tables.config.slab_of(table)
    stored = tables.stored(slab)
    with defer_signals(), tables.changing():
        handles = None if stored is None else find(tables, flat, offsets, features).handles
        erased = int(ops.erase_(tables.index, flat, offsets, features)[table])
        if erased > 0:
            drop_pending(tables, table, flat)
            if stored is not None and handles is not None:
                had_rows = handles >= 0
                stored.erase(slab, table, flat[had_rows], handles[had_rows])
    return erased


def remove(
    tables: Tables, table: int, *, batch_size: int = 1 << 20, **conditions: Unpack[Conditions]
) -> int:
    """Remove ids as :meth:`torch_dynemb.TableGroup.remove` does."""
    batch_size = integer("remove: batch_size", batch_size, least=BUCKET_WIDTH)
    condition = condition_of(tables, table, conditions)
    with tables.changing():
        # in one erase: an error of a predicate, or an interrupt, removes nothing
        chosen = [batch.ids[condition(batch)] for batch in exported(tables, table, batch_size)]
        return erase(tables, table, torch.cat(chosen)) if chosen else 0


class RemovalInSlices(Iterator[int]):
    """Removal of the ids that meet a condition, a slice of the index at each ``next()``.

    Iteration raises StopIteration once all ids were looked at. After another error, the next call
    takes the same slice.

    Args:
        current: returns the tables that the group has now.
        table: its number.
        batch_size, conditions: as in :meth:`torch_dynemb.TableGroup.remove_in_slices`.
    """

    def __init__(
        self,
        current: Callable[[], Tables],
        table: int,
        *,
        batch_size: int = 1 << 16,
        **conditions: Unpack[Conditions],
    ) -> None:
        self._ids = integer("remove_in_slices: batch_size", batch_size, least=BUCKET_WIDTH)
        self._current, self._tables, self._table = current, current(), table
        self._condition = condition_of(self._tables, table, conditions)
        self._begin, self._places = 0, self._index_state()

    def _index_state(self) -> list[int]:
        """Return numbers that change whenever ids get other places in the index."""
        row = self._tables.index.tables[self._table]
        return [int(row[Table.BUCKET_COUNT]), int(row[Table.GROWTHS])]

    def __next__(self) -> int:
        tables = self._tables
        if self._current() is not tables:
            raise RuntimeError(
                "remove_in_slices: the group has other tables since the first slice, by "
                "add_table(), set_optimizer() or to(): begin a new removal"
            )
        if self._begin < 0:
            raise StopIteration
        with tables.changing():
            places = self._index_state()
            if places != self._places:
                # An id may have moved to a place that was looked at. Twice the size: the removal
                # ends, however often that happens.
                self._begin, self._places, self._ids = 0, places, 2 * self._ids
            batch = ops.export_batch(
                tables.index, table=self._table, begin=self._begin, max_ids=self._ids
            )
            removed = 0
            if batch.ids.numel() > 0:
                removed = erase(tables, self._table, batch.ids[self._condition(batch)])
            self._begin = int(batch.next)
        return removed


def clear(tables: Tables, table: int) -> int:
    """Remove all ids as :meth:`torch_dynemb.TableGroup.clear` does."""
    return remove(tables, table, predicate=lambda ids, _: torch.ones_like(ids, dtype=torch.bool))


def fill(tables: Tables, table: int, value: float) -> None:
    """Set all rows as :meth:`torch_dynemb.TableGroup.fill` does."""
    value = number("fill: value", value)
    dim = tables.config.tables[table].embedding_dim
    dtype = tables.config.slabs[tables.config.slab_of(table)].dtype
    row = torch.full((1, dim), value, dtype=dtype, device=tables.device)
    with defer_signals(), tables.changing():
        for batch in exported(tables, table, _FILLED_AT_ONCE):
            rows = row.expand(batch.ids.numel(), dim)
            write_rows(tables, table, RowBatch(batch.ids, rows), batch.handles)


def reset_counts(tables: Tables, table: int) -> None:
    """Reset counts of admission as :meth:`torch_dynemb.TableGroup.reset_counts` does."""
    rule = tables.config.tables[table].policy.admission
    counters = tables.config.layout.counters[table]
    if counters is not None:
        with defer_signals(), tables.changing():
            tables.index.buckets[tables.index.active_buckets(counters)] = 0
            tables.index.tables[counters, [Table.SIZE, Table.TOMBSTONES]] = 0
            tables.bind_memory()
    elif isinstance(rule, AdmitFrequentSketch):
        begin = tables.config.layout.rows[table][PolicyColumn.SKETCH_BEGIN]
        with tables.changing():
            tables.index.sketch[begin : begin + SKETCH_ROWS * rule.width] = 0
    else:
        raise ValueError(
            f"reset_counts: table {tables.config.names[table]!r} counts nothing: its "
            "admission is neither AdmitFrequent nor AdmitFrequentSketch"
        )


def condition_of(tables: Tables, table: int, conditions: Conditions) -> Condition:
    """Return the given condition as a function of a batch.

    Raises:
        ValueError: none or several were given, or the table has no data for it.
        TypeError: the predicate is not callable.
    """
    names = list(Conditions.__annotations__)
    given = {
        name: value
        for name, value in conditions.items()
        if value is not None and value is not False
    }
    if len(given) != 1:
        raise ValueError(f"remove: got {list(given) or 'no condition'}, expected one of {names}")
    ((name, value),) = given.items()
    if name == "not_seen_for" and not tables.config.layout.score_words:
        raise ValueError(
            "remove: not_seen_for needs scores, but no table keeps any: create one with "
            "policy=Policy(score='step')"
        )
    if name == "score_below" and deciding_score(tables, table) == "none":
        raise ValueError(
            "remove: score_below needs scores, but the table keeps none: create it with "
            "policy=Policy(score='step')"
        )
    if name == "expired" and "expiry" not in tables.config.layout.score_words:
        raise ValueError(
            "remove: expired needs a ttl, but no table has one: create it with "
            "policy=Policy(ttl='7d')"
        )
    if name == "not_seen_for":
        steps = integer("remove: not_seen_for", value, what="a number of steps, int")
        if steps < 1:
            raise ValueError(f"remove: not_seen_for is {steps}, expected at least 1 step")
        oldest = tables.index.clock[Clock.STEP] - steps
        return lambda batch: batch.scores[:, 0] < oldest
    if name == "expired":
        flag("remove: expired", value)
        return Expiry(tables, table).expired
    if name == "score_below":
        if deciding_score(tables, table) == "decayed":
            return _decayed_below(tables, table, number("remove: score_below", value))
        least = integer("remove: score_below", value)
        return lambda batch: eviction_scores(tables, table, batch) < least
    if name == "norm_below":
        smallest = number("remove: norm_below", value)
        if not smallest > 0:
            raise ValueError(f"remove: norm_below is {value}, expected more than 0")
        return lambda batch: _norms(tables, table, batch) < smallest
    if not callable(value):
        raise TypeError(f"remove: {name} is {described(value)}, expected a function")
    if deciding_score(tables, table) == "decayed":
        now = decay_time(tables, table)
        return lambda batch: _checked(
            value(batch.ids, counts_of(eviction_scores(tables, table, batch), now)), batch.ids
        )
    return lambda batch: _checked(
        value(batch.ids, eviction_scores(tables, table, batch)), batch.ids
    )


def _decayed_below(tables: Tables, table: int, least: float) -> Condition:
    if not least > 0:
        raise ValueError(f"remove: score_below is {least}, expected a count of more than 0")
    now = decay_time(tables, table)
    return lambda batch: counts_of(eviction_scores(tables, table, batch), now) < least


def _checked(mask: object, ids: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape:
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise TypeError(
            f"remove: predicate returned {what}, expected a bool tensor of shape {tuple(ids.shape)}"
        )
    return mask


def _norms(tables: Tables, table: int, batch: ops.ExportedBatch) -> Tensor:
    """Return L2 norms of rows, float32 [n]."""
    source, handles = readable(tables, table, batch.ids, batch.handles)
    bag = torch.tensor([0, batch.ids.numel()], device=batch.ids.device)
    dim = int(tables.index.meta[table, Meta.DIM])
    rows = ops.embedding_inference(
        source, ops.LookupBatch.of_rows(batch.ids, bag, [table], dim), handles
    )
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1)
    return norms


__all__ = [
    "Conditions",
    "Predicate",
    "RemovalInSlices",
    "clear",
    "contains",
    "erase",
    "fill",
    "remove",
    "reset_counts",
]
