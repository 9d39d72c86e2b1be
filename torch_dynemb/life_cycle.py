"""What keeps a table healthy that lives for months: scores, removal, evictions, statistics."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.admission import AdmitBy, AdmitFrequentSketch, NewIds, admission_hook
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    BUCKET_WORDS,
    CLOCK_HEAD,
    EVICTED_COLUMNS,
    GENERATION_BITS,
    SKETCH_ROWS,
    Clock,
    Evicted,
    Meta,
    PolicyColumn,
    RowClock,
    Table,
)
from torch_dynemb.policy_layout import PolicyLayout

if TYPE_CHECKING:
    from torch_dynemb.ops.lookup import Rows
    from torch_dynemb.table_config import TableConfig
    from torch_dynemb.table_memory import TableMemory


class ScalarWriter(Protocol):
    """What ``torch.utils.tensorboard.SummaryWriter`` and others have."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> object:
        """Logs one number."""


Predicate = Callable[[Tensor, Tensor], Tensor]
Condition = Callable[[ops.ExportedBatch], Tensor]


class EvictedIds(NamedTuple):
    """Ids that a table has evicted, in the order of the ids that took their rows.

    Attributes:
        ids: int64 [n].
        scores: int64 [n], what they were evicted for.
        rows: float32 [n, dim], their last values; None if they were not asked for.
    """

    ids: Tensor
    scores: Tensor
    rows: Tensor | None


EvictionCallback = Callable[[str, EvictedIds], object]


@dataclass(frozen=True)
class TableStats:
    """What a table holds and what has happened to it.

    Attributes:
        size: ids.
        capacity: ids that it may hold; 0: as many as memory.
        slots: places for ids in the index, used or not.
        load: size / slots; the index grows beyond 0.7.
        inserted: ids that have ever got a row.
        found: ids of training lookups that had a row, every occurrence counted.
        missed: those that had none, but for padding.
        evicted: ids that had to go for others.
        rejected: new ids, once per lookup, for which there was no room.
        not_admitted: new ids, once per lookup, that were not admitted.
        default_served: ids of training lookups that were looked up without a row, every occurrence
            counted.
        stale: gradients dropped because their row had been given to another id; of the whole group.
        removed: ids that have been erased or removed.
        growths: rehashes of the index.
        tombstones: places of removed ids that probes still have to pass.
        counted: ids without a row whose occurrences are counted exactly.
        index_bytes: of the table's index, with scores.
        counter_bytes: of what admission counts.
        row_bytes: of the rows of its ids, with generations and optimizer state.
    """

    size: int
    capacity: int
    slots: int
    load: float
    inserted: int
    found: int
    missed: int
    evicted: int
    rejected: int
    not_admitted: int
    default_served: int
    stale: int
    removed: int
    growths: int
    tombstones: int
    counted: int
    index_bytes: int
    counter_bytes: int
    row_bytes: int

    def as_dict(self) -> dict[str, float]:
        """By name."""
        return asdict(self)


class LifeCycle:
    """The part of a table group that lets ids come and go."""

    tables_config: tuple[TableConfig, ...]
    layout: PolicyLayout
    dims: list[int]
    meta: Tensor
    buckets: Tensor
    scores: Tensor
    tables: Tensor
    clock: Tensor
    sketch: Tensor
    evicted: Tensor
    row_clock: Tensor
    weights: list[Tensor]
    _memory: TableMemory

    if TYPE_CHECKING:

        @property
        def device(self) -> torch.device: ...
        @property
        def names(self) -> list[str]: ...
        @property
        def rows(self) -> Rows: ...
        def _config(self, table: int) -> TableConfig: ...
        def _one_table(self, table: int, ids: Tensor) -> tuple[Tensor, Tensor, list[int]]: ...
        def find(
            self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]
        ) -> ops.FoundIds: ...
        def erase(self, table: int, ids: Tensor) -> int: ...
        def materialize(self) -> int: ...
        def end_step(self) -> None: ...
        def row_bytes(self, dim: int) -> int: ...
        def capacity_bound(self, table: int) -> int | None: ...
        def active_buckets(self, table: int) -> slice: ...
        def bind_memory(self) -> None: ...

    def _start_life_cycle(self) -> None:
        self._steps = 0
        self._rejected = [0] * len(self.tables_config)
        self._batch_scored: set[int] = set()
        self._eviction_callback: EvictionCallback | None = None
        self._evicted_rows: list[list[Tensor]] | None = None
        self._hooked = [isinstance(table.policy.admission, AdmitBy) for table in self.tables_config]
        if self._keeps_time:
            self.set_now(int(time.time()))

    def state_was_loaded(self) -> None:
        """What is known of the tensors on the host follows them."""
        self._steps = int(self.clock[Clock.STEP])
        self._rejected = self.tables[: len(self.names), Table.REJECTED].tolist()

    # -- time ----------------------------------------------------------------------------------

    @property
    def _keeps_time(self) -> bool:
        return "timestamp" in self.layout.score_words or "expiry" in self.layout.score_words

    def set_now(self, seconds: int) -> None:
        """Sets the time that lookups give their ids, until the next ``optimizer.step()``.

        Raises:
            TypeError, ValueError: not a whole number from 0 on.
            RuntimeError: no table keeps times.
        """
        if isinstance(seconds, bool) or not isinstance(seconds, int):
            raise TypeError(f"set_now: seconds is {seconds!r}, expected int")
        if seconds < 0:
            raise ValueError(f"set_now: seconds is {seconds}, expected at least 0")
        if not self._keeps_time:
            raise RuntimeError(
                "set_now: no table keeps times: create one with policy=Policy(score='timestamp') "
                "or a ttl"
            )
        self.clock[Clock.NOW] = seconds

    def step(self, now: int | None = None) -> None:
        """Ends a training step: what ``optimizer.step()`` does for the index.

        Args:
            now: seconds, such as those of Unix time; default: the machine's clock.

        Raises:
            RuntimeError: ids found no place, and a policy says ``check="error"``. Everything else
                has been done by then.
        """
        if self._keeps_time or now is not None:
            self.set_now(int(time.time()) if now is None else now)
        self.clock[Clock.STEP] += 1
        self._steps += 1
        for begin, cells, halve_every in self.layout.sketches:
            if halve_every > 0 and self._steps % halve_every == 0:
                self.sketch[begin : begin + cells].bitwise_right_shift_(1)
        self.end_step()
        if self._eviction_callback is not None:
            for name, batch in self.take_evicted().items():
                self._eviction_callback(name, batch)
        if any(table.policy.check != "ignore" for table in self.tables_config):
            self._check_rejected()

    def _check_rejected(self) -> None:
        counts, _ = ops.reported_counts(self.buckets, self.tables, self.row_clock)
        rejected = counts[:, Table.REJECTED].tolist()
        errors = []
        for t, table in enumerate(self.tables_config):
            more = rejected[t] - self._rejected[t]
            self._rejected[t] = rejected[t]
            if more <= 0 or table.policy.check == "ignore":
                continue
            message = (
                f"table {table.name!r} had no room for {more} new ids since the last step, which "
                "were looked up without a row: give it a larger capacity or memory_budget, fewer "
                "protected_steps, or smaller batches"
            )
            if table.policy.check == "error":
                errors.append(message)
            else:
                warnings.warn(message, RuntimeWarning, stacklevel=4)
        if errors:
            raise RuntimeError("; ".join(errors))

    # -- scores --------------------------------------------------------------------------------

    def _word(self, table: int, score: str | None) -> int:
        policy = self._config(table).policy
        name = policy.scores[0] if score is None else score
        if name not in self.layout.score_words or (score is None and name == "none"):
            raise ValueError(
                f"table {self.names[table]!r} does not keep score {name!r}: create it with "
                f"policy=Policy(score={'step' if name == 'none' else name!r})"
            )
        return self.layout.score_words.index(name)

    def _eviction_scores(self, table: int, batch: ops.ExportedBatch) -> Tensor:
        """int64 [n]; zeros if the table keeps none."""
        if self.tables_config[table].policy.scores[0] == "none" or batch.scores.shape[1] == 0:
            return torch.zeros_like(batch.ids)
        return batch.scores[:, self._word(table, None)].contiguous()

    def get_score(self, table: int, ids: Tensor, *, score: str | None = None) -> ops.ScoredIds:
        """Scores of ids of one table; see :func:`torch_dynemb.ops.get_scores`.

        Args:
            score: which of those that are kept; default: the one that decides who is evicted.

        Raises:
            ValueError: it is not kept.
        """
        word = self._word(table, score)
        flat, offsets, features = self._one_table(table, ids)
        return ops.get_scores(
            self.buckets, self.scores, self.tables, self.meta, flat, offsets, features, word=word
        )

    def set_score(
        self, table: int, ids: Tensor, scores: Tensor, *, score: str | None = None
    ) -> int:
        """Sets scores of the ids that are in a table; returns how many of ``ids`` are.

        Args:
            ids: int64 [n].
            scores: int64 [n], from 0 on for steps; of several for one id the largest counts.
            score: as in :meth:`get_score`.

        Raises:
            ValueError, TypeError: shape, dtype or values of scores, or a score that is not kept.
        """
        word = self._word(table, score)
        if word == 0 and scores.numel() > 0 and int(scores.min()) < 0:
            raise ValueError(f"set_score: scores has {int(scores.min())}, expected steps from 0 on")
        flat, offsets, features = self._one_table(table, ids)
        found = ops.set_scores_(
            self.buckets,
            self.scores,
            self.tables,
            self.meta,
            flat,
            offsets,
            features,
            scores.reshape(-1).contiguous(),
            word=word,
        )
        return int(found.sum())

    def set_batch_score(self, table: int, score: int) -> None:
        """The custom score that lookups give the ids of a table from now on.

        Raises:
            ValueError: the table keeps no custom scores, or the score leaves int64.
        """
        if "custom" not in self._config(table).policy.scores:
            raise ValueError(
                f"set_batch_score: table {self.names[table]!r} keeps no custom scores: create it "
                "with policy=Policy(score='custom')"
            )
        if not -(1 << 63) <= score < (1 << 63):
            raise ValueError(f"set_batch_score: score is {score}, expected an int64")
        self.clock[CLOCK_HEAD + table] = score
        self._batch_scored.add(table)

    def _check_custom_scores(
        self, feature_tables: Sequence[int], ids: Tensor, scores: Tensor | None
    ) -> None:
        if scores is None:
            for t in feature_tables:
                policy = self.tables_config[t].policy
                if "custom" in policy.scores and t not in self._batch_scored:
                    raise ValueError(
                        f"table {self.names[t]!r} keeps custom scores, but none have been given: "
                        "call group.set_batch_score, or give scores with the lookup"
                    )
            return
        if "custom" not in self.layout.score_words:
            raise ValueError(
                "scores are given, but no table keeps custom scores: create one with "
                "policy=Policy(score='custom')"
            )
        if scores.dtype != torch.int64:
            raise TypeError(f"scores has dtype {scores.dtype}, expected int64")
        if scores.shape != ids.shape:
            raise ValueError(
                f"scores has shape {tuple(scores.shape)}, expected that of the ids, "
                f"{tuple(ids.shape)}"
            )
        if scores.device != ids.device:
            raise ValueError(f"scores is on {scores.device}, but the ids are on {ids.device}")

    # -- admission -----------------------------------------------------------------------------

    def _admitted_by_hooks(
        self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]
    ) -> Tensor | None:
        """bool [N], or None where no hook is asked."""
        hooked = sorted({t for t in feature_tables if self._hooked[t]})
        if not hooked:
            return None
        known = self.find(ids, offsets, feature_tables).handles >= 0
        admitted = torch.ones_like(known)
        batch = (offsets.shape[0] - 1) // len(feature_tables)
        for t in hooked:
            rule = self.tables_config[t].policy.admission
            assert isinstance(rule, AdmitBy)
            with torch.no_grad():
                new = NewIds(ids, known, self.clock[:1], self.names[t])
                mask = admission_hook(rule.name)(new)
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape:
                what = (
                    f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
                )
                raise TypeError(
                    f"admission hook {rule.name!r} returned {what}, expected a bool tensor of "
                    f"shape {tuple(ids.shape)}"
                )
            if any(other != t for other in feature_tables):
                ends = offsets[batch::batch]
                places = torch.arange(ids.shape[0], device=ids.device)
                feature = torch.searchsorted(ends, places, right=True)
                of_table = torch.tensor(feature_tables, device=ids.device)[feature] == t
                mask = mask | ~of_table
            admitted = admitted & mask
        return admitted

    def reset_counts(self, table: int) -> None:
        """Forgets how often the ids that were not admitted have been seen.

        Raises:
            ValueError: the table's admission counts nothing.
        """
        rule = self._config(table).policy.admission
        counters = self.layout.counters[table]
        if counters is not None:
            active = self.active_buckets(counters)
            self.buckets[active] = 0
            self.tables[counters, [Table.SIZE, Table.TOMBSTONES]] = 0
            self.bind_memory()
        elif isinstance(rule, AdmitFrequentSketch):
            begin = self.layout.rows[table][PolicyColumn.SKETCH_BEGIN]
            self.sketch[begin : begin + SKETCH_ROWS * rule.width] = 0
        else:
            raise ValueError(f"reset_counts: table {self.names[table]!r} counts nothing")

    # -- expiry --------------------------------------------------------------------------------

    def without_expired(
        self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int], handles: Tensor
    ) -> Tensor:
        """Handles in which ids whose ttl has passed are missing."""
        if "expiry" not in self.layout.score_words:
            return handles
        expires, found = ops.get_scores(
            self.buckets,
            self.scores,
            self.tables,
            self.meta,
            ids,
            offsets,
            feature_tables,
            word=self.layout.word("expiry"),
        )
        return torch.where(found & (expires <= self.clock[Clock.NOW]), -1, handles)

    # -- evictions -----------------------------------------------------------------------------

    def record_evicted(self, records: int, *, rows: bool = False) -> None:
        """Keeps the ids that are evicted from now on, until :meth:`take_evicted`.

        Replaces a tensor: compiled code is compiled again, graphs must be captured again.

        Args:
            records: how many to keep room for; more are counted and lost.
            rows: keep their rows, too. Every lookup then waits for the device, and cannot be
                compiled.
        """
        if records < 1:
            raise ValueError(f"record_evicted: records is {records}, expected at least 1")
        self.evicted = torch.zeros(
            1 + records, EVICTED_COLUMNS, dtype=torch.int64, device=self.device
        )
        torch._dynamo.mark_static(self.evicted)
        self._evicted_rows = [[] for _ in self.tables_config] if rows else None

    def on_evicted(
        self, callback: EvictionCallback, *, records: int = 1 << 16, rows: bool = False
    ) -> None:
        """Has ``optimizer.step()`` call ``callback(table name, EvictedIds)``; waits for the device.

        Args:
            records, rows: as in :meth:`record_evicted`; records of one step.
        """
        if not callable(callback):
            raise TypeError(f"on_evicted: callback is {callback!r}, expected a function")
        self.record_evicted(records, rows=rows)
        self._eviction_callback = callback

    def take_evicted(self) -> dict[str, EvictedIds]:
        """What has been recorded since the last call, by table; waits for the device.

        Raises:
            RuntimeError: more ids were evicted than there was room to record.
        """
        count, lost = self.evicted[0, :2].tolist()
        records = self.evicted[1 : 1 + count].clone()
        self.evicted[0].zero_()
        kept, self._evicted_rows = (
            self._evicted_rows,
            None if self._evicted_rows is None else [[] for _ in self.tables_config],
        )
        if lost > 0:
            raise RuntimeError(
                f"take_evicted: {lost} evicted ids were not recorded: there was room for "
                f"{self.evicted.shape[0] - 1}: call record_evicted with more, or take_evicted more "
                "often"
            )
        result = {}
        for t, name in enumerate(self.names):
            own = records[records[:, Evicted.TABLE] == t]
            if own.shape[0] > 0:
                rows = None if kept is None else torch.cat(kept[t])
                result[name] = EvictedIds(
                    own[:, Evicted.ID].contiguous(), own[:, Evicted.SCORE].contiguous(), rows
                )
        return result

    def _evicted_before(self) -> int:
        return 0 if self._evicted_rows is None else int(self.evicted[0, 0])

    def _keep_evicted_rows(self, before: int) -> None:
        """The new owners have not been written yet: the rows are still those of the old ones."""
        if self._evicted_rows is None:
            return
        records = self.evicted[1 + before : 1 + int(self.evicted[0, 0])]
        for t, table in enumerate(self.tables_config):
            own = records[records[:, Evicted.TABLE] == t]
            if own.shape[0] > 0:
                self._evicted_rows[t].append(
                    ops.embedding_inference(
                        self.rows,
                        own[:, Evicted.ID].contiguous(),
                        own[:, Evicted.HANDLE].contiguous(),
                        torch.tensor([0, own.shape[0]], device=self.device),
                        feature_tables=[t],
                        dim=table.embedding_dim,
                    )
                )

    # -- removal -------------------------------------------------------------------------------

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
            ValueError, TypeError: no condition or several, or one that does not fit the table;
                nothing has been removed.
        """
        self._config(table)
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
        if batch_size < BUCKET_WIDTH:
            raise ValueError(
                f"remove: batch_size is {batch_size}, expected at least {BUCKET_WIDTH}"
            )
        removed = 0
        for batch in exported(self, table, batch_size):
            chosen = batch.ids[condition(batch)]
            if chosen.numel() > 0:
                removed += self.erase(table, chosen)
        return removed

    def clear(self, table: int) -> int:
        """Removes all ids of a table; returns how many. Its index keeps its size."""
        return self.remove(table, predicate=lambda ids, _: torch.ones_like(ids, dtype=torch.bool))

    def fill(self, table: int, value: float) -> None:
        """Sets the rows of all ids of a table to a value; optimizer state stays."""
        slab = int(self.meta[self.names.index(self._config(table).name), Meta.SLAB])
        self.materialize()
        for batch in exported(self, table, 1 << 20):
            self.weights[slab][batch.handles >> GENERATION_BITS] = value

    # -- statistics ----------------------------------------------------------------------------

    def stats(self) -> dict[str, TableStats]:
        """What each table holds and what has happened to it, by name.

        Waits for nothing. On a GPU it is what the device has reported by the last
        ``optimizer.step()`` that it has finished, so that it may lag by a step.
        """
        counts, row_clock = ops.reported_counts(self.buckets, self.tables, self.row_clock)
        line = 8 * (BUCKET_WORDS + BUCKET_WIDTH * len(self.layout.score_words))
        rows = counts.tolist()
        stale = int(row_clock[len(self.tables_config) + RowClock.STALE])
        sketch = 4 * sum(cells for _, cells, _ in self.layout.sketches)
        result = {}
        for t, table in enumerate(self.tables_config):
            row = rows[t]
            number = self.layout.counters[t]
            counters = None if number is None else rows[number]
            slots = row[Table.BUCKET_COUNT] * BUCKET_WIDTH
            result[table.name] = TableStats(
                size=row[Table.SIZE],
                capacity=self.capacity_bound(t) or 0,
                slots=slots,
                load=row[Table.SIZE] / slots,
                inserted=row[Table.INSERTED],
                found=row[Table.FOUND],
                missed=row[Table.MISSED],
                evicted=row[Table.EVICTED],
                rejected=row[Table.REJECTED],
                not_admitted=row[Table.NOT_ADMITTED],
                default_served=row[Table.DEFAULT_SERVED],
                stale=stale,
                removed=row[Table.ERASED],
                growths=row[Table.GROWTHS],
                tombstones=row[Table.TOMBSTONES],
                counted=0 if counters is None else counters[Table.SIZE],
                index_bytes=line * row[Table.BUCKET_COUNT],
                counter_bytes=sketch if counters is None else line * counters[Table.BUCKET_COUNT],
                row_bytes=self.row_bytes(table.embedding_dim) * row[Table.SIZE],
            )
        return result

    def log_to(self, writer: ScalarWriter, step: int | None = None) -> None:
        """Writes :meth:`stats` to a ``torch.utils.tensorboard.SummaryWriter``, as ``table/name``.

        Args:
            writer: anything with its ``add_scalar``.
            step: default: the number of ``optimizer.step()`` so far.
        """
        at = self._steps if step is None else step
        for table, values in self.stats().items():
            for name, value in values.as_dict().items():
                writer.add_scalar(f"{table}/{name}", value, at)


def exported(group: LifeCycle, table: int, batch_size: int) -> Iterator[ops.ExportedBatch]:
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


def condition_of(group: LifeCycle, table: int, conditions: dict[str, object]) -> Condition:
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
    policy = group.tables_config[table].policy
    if name == "not_seen_for" and not group.layout.score_words:
        raise ValueError(
            "remove: not_seen_for needs scores, but no table keeps any: create one with "
            "policy=Policy(score='step')"
        )
    if name == "score_below" and policy.scores[0] == "none":
        raise ValueError(
            "remove: score_below needs scores, but the table keeps none: create it with "
            "policy=Policy(score='step')"
        )
    if name == "expired" and "expiry" not in group.layout.score_words:
        raise ValueError(
            "remove: expired needs a ttl, but no table has one: create it with "
            "policy=Policy(ttl=seconds)"
        )
    if isinstance(value, int) and name == "not_seen_for":
        if value < 1:
            raise ValueError(f"remove: not_seen_for is {value}, expected at least 1 step")
        oldest = group.clock[Clock.STEP] - value
        return lambda batch: batch.scores[:, 0] < oldest
    if name == "expired":
        word = group.layout.word("expiry")
        return lambda batch: batch.scores[:, word] <= group.clock[Clock.NOW]
    if isinstance(value, int) and name == "score_below":
        least = value
        return lambda batch: group._eviction_scores(table, batch) < least
    if isinstance(value, int | float) and name == "norm_below":
        if not value > 0:
            raise ValueError(f"remove: norm_below is {value}, expected more than 0")
        smallest = value
        return lambda batch: _norms(group, table, batch) < smallest
    if name != "predicate" or not callable(value):
        raise TypeError(f"remove: {name} is {value!r}, expected a function")
    return lambda batch: _checked(value(batch.ids, group._eviction_scores(table, batch)), batch.ids)


def _checked(mask: object, ids: Tensor) -> Tensor:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape:
        what = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
        raise TypeError(
            f"remove: predicate returned {what}, expected a bool tensor of shape {tuple(ids.shape)}"
        )
    return mask


def _norms(group: LifeCycle, table: int, batch: ops.ExportedBatch) -> Tensor:
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


__all__ = [
    "EvictedIds",
    "LifeCycle",
    "Predicate",
    "ScalarWriter",
    "TableStats",
    "condition_of",
    "exported",
]
