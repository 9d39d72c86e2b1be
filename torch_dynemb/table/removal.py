"""Removal of ids by rule."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, flag, integer, number
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    GENERATION_BITS,
    SKETCH_ROWS,
    Clock,
    Meta,
    PolicyColumn,
    Table,
)
from torch_dynemb.policy.admission import AdmitFrequentSketch
from torch_dynemb.process.forked import check_own
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.table.group_parts import exported
from torch_dynemb.table.scores import Scores

Predicate = Callable[[Tensor, Tensor], Tensor]
Condition = Callable[[ops.ExportedBatch], Tensor]


class Removal(Scores):
    """The part of a table group that removes ids."""

    def remove(
        self,
        table: int,
        *,
        not_seen_for: int | None = None,
        expired: bool | None = None,
        score_below: int | None = None,
        norm_below: float | None = None,
        predicate: Predicate | None = None,
        batch_size: int = 1 << 20,
    ) -> int:
        """Removes the ids of a table for which one condition holds; later ids get their rows.

        Between training steps only: handles of a forward whose backward is still to come become
        stale, and their gradients are dropped and counted.

        Args:
            not_seen_for: that no training lookup of the last so many steps has met.
            expired: True: whose ttl has passed.
            score_below: whose score (the one that decides who is evicted) is less.
            norm_below: whose row has a smaller L2 norm (an untrained row: its initial value).
            predicate: from ids int64 [n] and scores int64 [n] of a batch to bool [n].
            batch_size: ids looked at at a time.

        Returns:
            How many ids were removed.

        Raises:
            ValueError, TypeError: no condition or several, or one that does not fit the table.
                Nothing has been removed then, nor where ``predicate`` raises.
        """
        self._config(table, "remove")
        batch_size = integer("remove: batch_size", batch_size, least=BUCKET_WIDTH)
        condition = condition_of(
            self,
            table,
            {
                "not_seen_for": not_seen_for,
                "expired": expired,
                "score_below": score_below,
                "norm_below": norm_below,
                "predicate": predicate,
            },
        )
        check_own(self)
        # removed together, so that a predicate that raises, or an interrupt, removes nothing
        chosen = [batch.ids[condition(batch)] for batch in exported(self, table, batch_size)]
        return self.erase(table, torch.cat(chosen)) if chosen else 0

    def clear(self, table: int) -> int:
        """Removes all ids of a table; returns how many. Its index keeps its size."""
        self._config(table, "clear")
        return self.remove(table, predicate=lambda ids, _: torch.ones_like(ids, dtype=torch.bool))

    def fill(self, table: int, value: float) -> None:
        """Sets the rows of all ids of a table to a value; optimizer state stays."""
        value = number("fill: value", value)
        slab = int(self.meta[self.names.index(self._config(table, "fill").name), Meta.SLAB])
        check_own(self)
        self.materialize()
        rows = [batch.handles >> GENERATION_BITS for batch in exported(self, table, 1 << 20)]
        if rows:
            self.weights[slab].index_fill_(0, torch.cat(rows), value)

    def reset_counts(self, table: int) -> None:
        """Forgets how often the ids that were not admitted have been seen.

        Raises:
            ValueError: the table's admission counts nothing.
        """
        rule = self._config(table, "reset_counts").policy.admission
        check_own(self)
        counters = self.layout.counters[table]
        if counters is not None:
            active = self.active_buckets(counters)
            with held_back():
                self.buckets[active] = 0
                self.tables[counters, [Table.SIZE, Table.TOMBSTONES]] = 0
                self.bind_memory()
        elif isinstance(rule, AdmitFrequentSketch):
            begin = self.layout.rows[table][PolicyColumn.SKETCH_BEGIN]
            self.sketch[begin : begin + SKETCH_ROWS * rule.width] = 0
        else:
            raise ValueError(f"reset_counts: table {self.names[table]!r} counts nothing")


def condition_of(group: Scores, table: int, conditions: dict[str, object]) -> Condition:
    """The one condition that is given.

    Raises:
        ValueError: none or several were given, or one that the table cannot tell.
        TypeError: the predicate is not callable.
    """
    given = {
        name: value
        for name, value in conditions.items()
        if value is not None and value is not False
    }
    if len(given) != 1:
        raise ValueError(
            f"remove: got {list(given) or 'no condition'}, expected one of {list(conditions)}"
        )
    ((name, value),) = given.items()
    if name == "not_seen_for" and not group.layout.score_words:
        raise ValueError(
            "remove: not_seen_for needs scores, but no table keeps any: create one with "
            "policy=Policy(score='step')"
        )
    if name == "score_below" and group.deciding_score(table) == "none":
        raise ValueError(
            "remove: score_below needs scores, but the table keeps none: create it with "
            "policy=Policy(score='step')"
        )
    if name == "expired" and "expiry" not in group.layout.score_words:
        raise ValueError(
            "remove: expired needs a ttl, but no table has one: create it with "
            "policy=Policy(ttl=seconds)"
        )
    if name == "not_seen_for":
        steps = integer("remove: not_seen_for", value, what="a number of steps, int")
        if steps < 1:
            raise ValueError(f"remove: not_seen_for is {steps}, expected at least 1 step")
        oldest = group.clock[Clock.STEP] - steps
        return lambda batch: batch.scores[:, 0] < oldest
    if name == "expired":
        flag("remove: expired", value)
        word = group.layout.word("expiry")
        return lambda batch: batch.scores[:, word] <= group.clock[Clock.NOW]
    if name == "score_below":
        least = integer("remove: score_below", value)
        return lambda batch: group._eviction_scores(table, batch) < least
    if name == "norm_below":
        smallest = number("remove: norm_below", value)
        if not smallest > 0:
            raise ValueError(f"remove: norm_below is {value}, expected more than 0")
        return lambda batch: _norms(group, table, batch) < smallest
    if not callable(value):
        raise TypeError(f"remove: {name} is {described(value)}, expected a function")
    return lambda batch: _checked(value(batch.ids, group._eviction_scores(table, batch)), batch.ids)


def _checked(mask: object, ids: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape:
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise TypeError(
            f"remove: predicate returned {what}, expected a bool tensor of shape {tuple(ids.shape)}"
        )
    return mask


def _norms(group: Scores, table: int, batch: ops.ExportedBatch) -> Tensor:
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


__all__ = ["Predicate", "Removal"]
