"""Checks that the state of a table group is complete and valid.

A state may come from anywhere. Kernels trust values that only they write, so these are checked
here: addresses, running counts, and score words that eviction marks temporarily.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    CLOCK_HEAD,
    COMMIT_STEP_BYTES,
    FREE_STEP,
    GENERATION_BITS,
    GENERATION_MASK,
    MAX_COUNT,
    MAX_LOAD_PERCENT,
    MIN_BUCKETS,
    NEVER_OCCURRED,
    STEP_AGES,
    Clock,
    Meta,
    Slab,
    Table,
)
from torch_dynemb.ops.tensors import IndexTensors
from torch_dynemb.table.group_config import TIERED_ROW_BYTES
from torch_dynemb.table.tables import Tables

_LINE_ALIGNMENT = 16  # bytes, of what a kernel reads of a bucket at once


# -- content -------------------------------------------------------------------------------------


def check_content(tables: Tables, entries: Mapping[str, Tensor]) -> list[Tensor]:
    """Check that the entries of a group's state fit together.

    Args:
        tables: of the group.
        entries: all, or all without rows, from ``torch_dynemb.table.state.entries_of``.

    Returns:
        By slab the handles of ids by row, int64 [rows]; 0: a free row.

    Raises:
        ValueError: they do not.
    """
    check_counts("clock", entries["clock"][:CLOCK_HEAD])  # custom scores follow: any numbers
    check_counts("row_clock", entries["row_clock"])
    check_counts("sketch", entries["sketch"])
    counters = [f"counts of {tables.config.names[t]}" for t in tables.config.layout.counter_tables]
    check_columns("tables", entries["tables"], Table, [*tables.config.names, *counters])
    check_columns("slabs", entries["slabs"], Slab, [slab.name for slab in tables.config.slabs])
    rows: list[list[Tensor]] = [[] for _ in tables.config.slabs]
    for t, table in enumerate(tables.config.tables):
        rows[tables.config.slab_of(t)].append(
            _check_index(tables, entries, t, f"{table.name}.buckets")
        )
        number = tables.config.layout.counters[t]
        if number is not None:
            _check_counters(tables, entries, number, f"{table.name}.counts")
    return [_check_rows(tables, entries, s, of_slab) for s, of_slab in enumerate(rows)]


def check_counts(name: str, counts: Tensor) -> None:
    """Check that counts are from 0 to 2^62, so that sums cannot overflow."""
    if counts.numel() == 0:
        return
    if _least(counts) < 0:
        raise ValueError(
            f"state entry {name!r} is corrupted: a count is negative: {_least(counts)}"
        )
    if _most(counts) > MAX_COUNT:  # as Python ints: MAX_COUNT exceeds int32
        raise ValueError(
            f"state entry {name!r} is corrupted: a count is above 2^62: {_most(counts)}"
        )


def _least(values: Tensor) -> int:
    return int(values.min())


def _most(values: Tensor) -> int:
    return int(values.max())


def check_columns(
    name: str, rows: Tensor, columns: Iterable[IntEnum], owners: Iterable[str]
) -> None:
    """Check that columns with a meaning have counts, and others 0."""
    meant = {column.value: column.name for column in columns}
    for owner, row in zip(owners, rows.tolist(), strict=True):
        for number, value in enumerate(row):
            most = MAX_COUNT if number in meant else 0
            if not 0 <= value <= most:
                column = meant.get(number, f"column {number}")
                raise ValueError(
                    f"state entry {name!r} is corrupted: {column} of {owner!r} is {value}, "
                    f"expected {f'0 to {most}' if most else 0}"
                )


def _index_damage(entry: str, what: str) -> ValueError:
    table = entry.rpartition(".")[0]
    return ValueError(
        f"state of table {table!r} is corrupted: its index is damaged: entry {entry!r} {what}"
    )


def _check_index(tables: Tables, entries: Mapping[str, Tensor], t: int, entry: str) -> Tensor:
    """Check that lookups find every id of a table; return their handles, int64 [n]."""
    keys, stored = _slots(tables, entries, t, entry)
    if tables.config.layout.score_words:
        _check_scores(tables, entries, f"{entry.rpartition('.')[0]}.scores", stored > 0)
    return _check_found(tables, entries, t, entry, *_occupied(keys, stored))


def _occupied(keys: Tensor, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return ids and stored words, int64 [n] each."""
    words = stored.reshape(-1)
    slots = words.nonzero()[:, 0]
    return keys.reshape(-1)[slots], words[slots]


def _check_counters(tables: Tables, entries: Mapping[str, Tensor], t: int, entry: str) -> None:
    """Check a counter table, with counts as stored words."""
    keys, stored = _slots(tables, entries, t, entry)
    ids, counts = _occupied(keys, stored)
    _check_found(tables, entries, t, entry, ids, counts)
    check_counts(entry, counts)
    if ids.unique().numel() != ids.numel():  # for ids with rows, handles show it
        raise _index_damage(entry, "counts an id twice")


def _slots(
    tables: Tables, entries: Mapping[str, Tensor], t: int, entry: str
) -> tuple[Tensor, Tensor]:
    """Return keys and stored words, int64 [buckets, 4], after checking their numbers."""
    buckets, row = entries[entry], entries["tables"][t].tolist()
    count, slots = row[Table.BUCKET_COUNT], row[Table.BUCKET_COUNT] * BUCKET_WIDTH
    if count < MIN_BUCKETS or buckets.shape[0] != count:
        raise _index_damage(
            entry,
            f"has {buckets.shape[0]} buckets and 'tables' says {count}, expected as many, and at "
            f"least {MIN_BUCKETS}",
        )
    region = int(tables.index.meta[t, Meta.REGION_BUCKETS])
    if count > region:
        raise ValueError(
            f"table {entry.rpartition('.')[0]!r} of the state has {count} buckets in {entry!r}, "
            f"more than the {region} that this module reserves: construct it with a larger "
            "capacity or max_rows"
        )
    keys, stored = buckets[:, :BUCKET_WIDTH], buckets[:, BUCKET_WIDTH:]
    ids = int((stored > 0).sum())
    tombstones = int(((stored == 0) & (keys != 0)).sum())
    if bool((stored < 0).any()):
        raise _index_damage(entry, f"has the stored word {_least(stored)}, expected 0 or more")
    if (ids, tombstones) != (row[Table.SIZE], row[Table.TOMBSTONES]):
        raise _index_damage(
            entry,
            f"has {ids} ids and {tombstones} tombstones, but 'tables' says {row[Table.SIZE]} and "
            f"{row[Table.TOMBSTONES]}",
        )
    if ids > slots * MAX_LOAD_PERCENT // 100:  # else probes and growth would not end
        raise _index_damage(
            entry, f"has {ids} ids in {slots} slots, expected at most {MAX_LOAD_PERCENT} %"
        )
    return keys, stored


def _check_found(
    tables: Tables,
    entries: Mapping[str, Tensor],
    t: int,
    entry: str,
    ids: Tensor,
    stored: Tensor,
) -> Tensor:
    """Check that a lookup finds the ids; return their handles."""
    meta = tables.index.meta[t : t + 1].cpu().clone()
    meta[0, Meta.SEED] = entries["seeds"][t]
    meta[0, Meta.REGION_BEGIN] = 0
    meta[0, Meta.REGION_BUCKETS] = entries[entry].shape[0]
    if bool(meta[0, Meta.HAS_PADDING]) and bool((ids == meta[0, Meta.PADDING_ID]).any()):
        raise ValueError(
            f"table {entry.rpartition('.')[0]!r} of the state has a row for id "
            f"{int(meta[0, Meta.PADDING_ID])}, which is the padding id of this module: construct "
            "it with the padding_idx it was saved with"
        )
    offsets = torch.tensor([0, ids.numel()], device=ids.device)
    table = entries["tables"][t : t + 1].contiguous()
    handles = stored - 1
    buckets = entries[entry]
    if buckets.data_ptr() % _LINE_ALIGNMENT != 0:  # tensors of a file may begin anywhere
        buckets = buckets.clone()
    index = IndexTensors.read_only(buckets, table, meta)
    found = ops.find(index, ids, offsets, [0])
    if not torch.equal(found.handles, handles):
        raise _index_damage(entry, "has ids where no lookup finds them")
    return handles


def _check_scores(
    tables: Tables, entries: Mapping[str, Tensor], entry: str, occupied: Tensor
) -> None:
    """Check the score words of ids; times and custom scores may be any numbers."""
    scores = entries[entry]
    if scores.shape[0] != occupied.shape[0]:
        raise _index_damage(
            entry, f"has scores of {scores.shape[0]} buckets, expected {occupied.shape[0]}"
        )
    now = int(entries["clock"][Clock.STEP])
    steps = scores[:, :BUCKET_WIDTH]
    of_free_slots = steps[~occupied]
    if bool(((of_free_slots != 0) & (of_free_slots != FREE_STEP)).any()):
        raise _index_damage(entry, f"has a step where no id is, expected 0 or {FREE_STEP}")
    steps = steps[occupied]  # future steps are allowed; eviction marks ids by negative ones
    if bool((steps < 0).any()) or bool((steps <= now - STEP_AGES).any()):
        raise _index_damage(
            entry,
            f"has step {_least(steps)}, expected 0 or more, and less than 2^32 before {now}, the "
            "step of 'clock'",
        )
    if "decayed" in tables.config.layout.score_words:
        first = tables.config.layout.word("decayed") * BUCKET_WIDTH
        logarithms = scores[:, first : first + BUCKET_WIDTH][occupied]
        if logarithms.numel() > 0 and not (
            NEVER_OCCURRED <= _least(logarithms) <= _most(logarithms) <= MAX_COUNT
        ):
            least = _least(logarithms)
            wrong = least if least < NEVER_OCCURRED else _most(logarithms)
            raise _index_damage(entry, f"has a decayed count of {wrong}, expected -2^62 to 2^62")
    if "frequency" in tables.config.layout.score_words:
        first = tables.config.layout.word("frequency") * BUCKET_WIDTH
        counts = scores[:, first : first + BUCKET_WIDTH][occupied]
        if counts.numel() > 0 and not 0 <= _least(counts) <= _most(counts) <= MAX_COUNT:
            wrong = _least(counts) if _least(counts) < 0 else _most(counts)
            raise _index_damage(entry, f"has frequency {wrong}, expected 0 to {MAX_COUNT}")


# -- rows ----------------------------------------------------------------------------------------


def _check_rows(
    tables: Tables, entries: Mapping[str, Tensor], s: int, handles: list[Tensor]
) -> Tensor:
    """Check that every used row belongs to one id, or to the free list; return handles by row."""
    prefix = tables.config.slabs[s].name

    def damage(entry: str, what: str) -> ValueError:
        return ValueError(
            f"state of the rows {prefix!r} is corrupted: their owners do not match: entry "
            f"{entry!r} {what}"
        )

    slab = entries["slabs"][s].tolist()
    used, free = slab[Slab.NEXT_ROW], entries[f"{prefix}.free_rows"]
    config = tables.config.optimizer
    state = () if config is None else config.state
    stored = f"{prefix}.generations" not in entries  # the reader of rows in a store checks them
    names = ("weights", "generations", *(tensor.name for tensor in state))
    for name in () if stored else names:
        rows_given = entries[f"{prefix}.{name}"].shape[0]
        if rows_given != used:
            raise damage(f"{prefix}.{name}", f"has {rows_given} rows, but 'slabs' says {used}")
    if free.shape[0] != slab[Slab.FREE_COUNT]:
        raise damage(
            f"{prefix}.free_rows",
            f"has {free.shape[0]} rows, but 'slabs' says {slab[Slab.FREE_COUNT]}",
        )
    if used > tables.reserved_rows(s):
        raise ValueError(
            f"the state has {used} rows {prefix!r}, more than the "
            f"{tables.reserved_rows(s)} that this module reserves: construct it with a "
            "larger max_rows, capacity or budget"
        )
    check_slab(tables, s, slab)
    for tensor in state:
        if tensor.dtype == torch.int32 and not stored:
            check_counts(f"{prefix}.{tensor.name}", entries[f"{prefix}.{tensor.name}"])
    owned = torch.cat([*handles, free])
    if owned.numel() != used:
        ids = owned.numel() - free.numel()
        raise damage(
            f"{prefix}.free_rows",
            f"and the ids have {free.numel()} and {ids} rows, but 'slabs' says {used}",
        )
    rows = owned >> GENERATION_BITS
    if used > 0 and not 0 <= _least(rows) <= _most(rows) < used:
        wrong = _least(rows) if _least(rows) < 0 else _most(rows)
        raise damage(f"{prefix}.free_rows", f"or an id has row {wrong}, expected 0 to {used - 1}")
    by_row = torch.full((used,), -1, device="cpu").index_copy_(0, rows, owned)
    if bool((by_row < 0).any()):
        raise damage(f"{prefix}.free_rows", "or an id has a row that another one has")
    if bool(((by_row & GENERATION_MASK) == 0).any()):  # the mark of a row without a value
        raise damage(
            f"{prefix}.free_rows", "or an id has a handle of generation 0, expected 1 or more"
        )
    by_row[free >> GENERATION_BITS] = 0
    if not stored:
        entry = f"{prefix}.generations"
        _check_generations(entry, entries[entry], by_row, free, damage)
    return by_row


def clamp_committed(tables: Tables) -> None:
    """Clamp the number of rows with checked memory to what a table of this kind checks ahead."""
    slabs = tables.index.slabs
    for s, config in enumerate(tables.config.slabs):
        row_bytes = TIERED_ROW_BYTES if config.tiered else config.dim * config.dtype.itemsize
        most = slabs[s, Slab.NEXT_ROW] + COMMIT_STEP_BYTES // row_bytes
        slabs[s, Slab.COMMITTED_ROWS].clamp_(max=most.clamp(max=tables.index.free_rows.shape[1]))


def check_slab(tables: Tables, s: int, slab: list[int]) -> None:
    """Check the number of rows with checked memory, and the next generation."""
    config = tables.config.slabs[s]
    used, committed = slab[Slab.NEXT_ROW], slab[Slab.COMMITTED_ROWS]
    # by the smallest rows: set_optimizer makes rows larger without a change of this number, and a
    # table may move between memory and storage
    row_bytes = min(TIERED_ROW_BYTES, config.dim * config.dtype.itemsize)
    most = used + COMMIT_STEP_BYTES // row_bytes
    if committed > most:
        raise ValueError(
            f"state entry 'slabs' is corrupted: COMMITTED_ROWS of {config.name!r} is {committed}, "
            f"expected at most {most}"
        )
    generation = slab[Slab.GENERATION]
    if generation > GENERATION_MASK:
        raise ValueError(
            f"state entry 'slabs' is corrupted: GENERATION of {config.name!r} is {generation}, "
            f"expected at most {GENERATION_MASK}"
        )
    # rows that compact() freed keep their generation, and only half of all values count as newer
    own = int(tables.index.slabs[s, Slab.GENERATION])
    if own > 0 and generation - own > GENERATION_MASK >> 1:
        raise ValueError(
            f"state entry 'slabs' has GENERATION {generation} of {config.name!r}, too far from "
            f"this module's {own}: load it into a new module"
        )


def _check_generations(
    entry: str,
    generations: Tensor,
    by_row: Tensor,
    free: Tensor,
    damage: Callable[[str, str], ValueError],
) -> None:
    """Check that rows of ids are live, and free rows older than the handle of their next owner.

    Args:
        entry: its name.
        generations: int32 [rows].
        by_row: int64 [rows], handles of ids; 0: a free row.
        free: int64 [n], handles of free rows.
    """
    if generations.numel() == 0:
        return
    if not 0 <= _least(generations) <= _most(generations) <= GENERATION_MASK:
        raise damage(entry, f"has generations beyond 0 to {GENERATION_MASK}")
    if bool(((generations != by_row & GENERATION_MASK) & (by_row != 0)).any()):
        raise damage(entry, "says that the row of an id is another one's")
    # counted with wrap-around
    own = generations[free >> GENERATION_BITS].to(torch.int64)
    ahead = ((free & GENERATION_MASK) - own) & GENERATION_MASK
    if not bool(((own == 0) | ((ahead > 0) & (ahead <= GENERATION_MASK >> 1))).all()):
        raise damage(entry, "says that a free row is newer than its next owner")


__all__ = ["check_columns", "check_content", "check_counts", "check_slab", "clamp_committed"]
