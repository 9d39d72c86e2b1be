"""Ops on the cache of tiered tables: a small cache with a history, above the rows of a group."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from op_cases.groups import Case, OpArguments, found, make_group, pooled_call
from torch_dynemb import TableGroup
from torch_dynemb.ops.columns import (
    GENERATION_BITS,
    SLOT_COLUMNS,
    TIER_COLUMNS,
    Pooling,
    Slot,
    Tier,
    TierHead,
)
from torch_dynemb.ops.tensors import TierTensors
from torch_dynemb.table.group_config import SLOT_BYTES

LIMIT = 4  # slots
CACHED = 0  # the slab of table b


def empty_cache(group: TableGroup, limit: int = LIMIT, rows: int = 0) -> TierTensors:
    """Of the first slab of a group of :func:`make_group`; the second one has none."""
    rows = rows or len(group.rows.weights[CACHED])
    clock = torch.zeros(3, TIER_COLUMNS, dtype=torch.int64)
    clock[0, TierHead.EPOCH] = 1
    clock[1 + CACHED, Tier.LIMIT] = limit
    clock[1 + CACHED, Tier.SLOT_BYTES] = 4 + 3 * 16 + SLOT_BYTES
    return TierTensors(
        [torch.zeros(count, dtype=torch.int32) for count in (rows, 0)],
        [torch.zeros(count, SLOT_COLUMNS, dtype=torch.int64) for count in (rows, 0)],
        [torch.zeros(count, dtype=torch.int32) for count in (rows, 0)],
        clock,
    )


def arguments_of_ids(group: TableGroup, tiers: TierTensors) -> OpArguments:
    """For known, unknown, repeated and padding ids of three tables."""
    call = pooled_call(group)
    return (
        *tiers,
        group.index.meta,
        call.ids,
        found(group, call),
        call.offsets,
        call.tables,
    )


def end_epoch(tiers: TierTensors) -> None:
    tiers.clock[0, TierHead.EPOCH] += 1
    tiers.clock[0, TierHead.TRAINING] = 0


def used_cache(*, dirty: bool = True) -> tuple[TableGroup, TierTensors]:
    """All slots are in use; rows of an epoch before may go, and one slot is free."""
    group = make_group()
    tiers = empty_cache(group)
    table, ids = 1, torch.tensor([3, 4, 8, 9])
    handles = group.find(ids, torch.tensor([0, 4]), [table]).handles
    meta, offsets = group.index.meta, torch.tensor([0, 4])
    torch.ops.dynemb.plan_moves_(*tiers, meta, ids, handles, offsets, [table], dirty, 0)
    end_epoch(tiers)
    torch.ops.dynemb.forget_rows_(*tiers, CACHED, handles[1:2])
    return group, tiers


def planned(*, trains: bool, ahead: int = 0, new: bool = False) -> OpArguments:
    group, tiers = used_cache()
    if new:
        tiers = empty_cache(group)
    return (*arguments_of_ids(group, tiers), trains, ahead)


def reused_row() -> OpArguments:
    """The row in a slot belongs to another id since."""
    group, tiers = used_cache()
    slot = int(tiers.places[CACHED].nonzero()[0])
    tiers.slots[CACHED][tiers.places[CACHED][slot] - 1, Slot.OWNER] -= 1  # an earlier generation
    ids = torch.tensor([3, 5])
    offsets = torch.tensor([0, 2])
    handles = group.find(ids, offsets, [1]).handles
    return (*tiers, group.index.meta, ids, handles, offsets, [1], True, 0)


def free_victim() -> OpArguments:
    """A call misses one row, but takes one of 64 slots from its row: 2 of 128."""
    group, limit = make_group(), 128
    tiers = empty_cache(group, limit, rows=2 * limit)
    ids = torch.arange(limit + 1)
    handles, offsets = ids << GENERATION_BITS | 1, torch.tensor([0, limit])
    meta = group.index.meta
    known, missing = slice(limit), slice(limit, None)
    torch.ops.dynemb.plan_moves_(*tiers, meta, ids[known], handles[known], offsets, [1], True, 0)
    end_epoch(tiers)
    return (*tiers, meta, ids[missing], handles[missing], torch.tensor([0, 1]), [1], True, 0)


def two_free_slots() -> OpArguments:
    """They are given in the order of their numbers afterwards."""
    _, tiers = used_cache()
    owner = tiers.slots[CACHED][2:3, Slot.OWNER]
    torch.ops.dynemb.forget_rows_(*tiers, CACHED, owner - 1)
    return (*tiers, CACHED, 3)


def on_slab(*more: int | Tensor, dirty: bool = True) -> OpArguments:
    _, tiers = used_cache(dirty=dirty)
    return (*tiers, CACHED, *more)


def cached_handles() -> Tensor:
    _, tiers = used_cache()
    owners = tiers.slots[CACHED][:, Slot.OWNER]
    return torch.cat([owners[owners != 0] - 1, torch.tensor([60 << GENERATION_BITS | 1])])


def records_of(optimizer: str = "adam") -> OpArguments:
    rows = make_group(optimizer=optimizer).rows
    return (rows.weights, rows.generations, rows.state, CACHED, torch.tensor([1, 5, 1, 0]))


def scattered_records(optimizer: str = "adam") -> OpArguments:
    """Records of some rows, to others."""
    weights, generations, state, slab, _ = records_of(optimizer)
    trained = generations[slab].nonzero().reshape(-1)[:1]
    records = torch.ops.dynemb.gather_records(
        weights, generations, state, slab, torch.cat([trained, trained + 1])
    )
    return weights, generations, state, slab, torch.tensor([5, 40]), records


def staged_lookup() -> OpArguments:
    group, tiers = used_cache()
    *_, meta, ids, handles, offsets, tables = arguments_of_ids(group, tiers)
    rows = (group.rows.weights, group.rows.generations, meta, group.rows.init_data)
    return (*tiers, *rows, ids, handles, offsets, None, tables, [4, 3, 4], int(Pooling.SUM))


def records_to_stage() -> OpArguments:
    *arguments, _, _ = planned(trains=False)
    return (*arguments, torch.arange(len(arguments[5])) % 2 == 0)


def full_cache() -> OpArguments:
    group, tiers = used_cache()
    *_, meta, ids, _, offsets, tables = arguments_of_ids(group, tiers)
    return (tiers.clock, group.index.buckets, group.index.tables, meta, ids, offsets, tables)


EMPTY = torch.empty(0, dtype=torch.int64)
CASES: dict[str, dict[str, Case]] = {
    "plan_moves_": {
        "train": partial(planned, trains=True),
        "read": partial(planned, trains=False),
        "prefetch": partial(planned, trains=False, ahead=1),
        "empty cache": partial(planned, trains=True, new=True),
        "another owner": reused_row,
        "a free victim": free_victim,
    },
    "take_dirty_": {
        "": lambda: on_slab(0, 2),
        "from the second": lambda: on_slab(1, 100),
        "none": lambda: on_slab(0, 2, dirty=False),
    },
    "shrink_cache_": {
        "": lambda: on_slab(1),
        "clean": lambda: on_slab(1, dirty=False),
        "nothing": lambda: on_slab(LIMIT),
        "two free slots": two_free_slots,
    },
    "forget_rows_": {"": lambda: on_slab(cached_handles()), "nothing": lambda: on_slab(EMPTY)},
    "gather_records": {
        "": records_of,
        "bfloat16": partial(records_of, "bfloat16"),
        "8 bits": partial(records_of, "8 bits"),
        "row state": partial(records_of, "rowwise_adagrad"),
        "no state": partial(records_of, "sgd"),
    },
    "scatter_records_": {
        "": scattered_records,
        "bfloat16": partial(scattered_records, "bfloat16"),
        "8 bits": partial(scattered_records, "8 bits"),
    },
}

# Ops that take the tensors of an open store only, which no copies are. What the first two plan is
# what plan_moves_ plans.
REGISTERED: dict[str, Case] = {
    "reserve_space_": lambda: full_cache(),
    "stage_": lambda: planned(trains=True)[:-1],
    "staged_lookup_": lambda: staged_lookup(),
    "prefetch_": lambda: (*planned(trains=False, ahead=1)[:-2], 1),
    "reserve_saves_": lambda: (empty_cache(make_group()).clock, [1, 0]),
    "stage_records_": lambda: records_to_stage(),
    "store_submit": lambda: (empty_cache(make_group()).clock, torch.zeros(0, 7, dtype=torch.int64)),
}
