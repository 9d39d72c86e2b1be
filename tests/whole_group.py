"""What must hold for a table group at any time."""

from __future__ import annotations

import torch
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    FREE_STEP,
    GENERATION_BITS,
    GENERATION_MASK,
    OnFull,
    PolicyColumn,
    Slab,
    Table,
)
from torch_dynemb.table.tables import exported


def check_whole(group: td.TableGroup) -> None:
    """No id twice, every id is found, no row is lost or has two owners, counts are true."""
    for slab, handles in enumerate(check_owners(group)):
        # rows are never newer than their owners
        stored = group.rows.generations[slab][handles >> GENERATION_BITS]
        assert bool((stored <= (handles & GENERATION_MASK)).all())


def check_owners(group: td.TableGroup) -> list[Tensor]:
    """The same, wherever rows lie; returns the handles of each slab's ids."""
    owned: list[list[Tensor]] = [[] for _ in group.config.slabs]
    for table, config in enumerate(group.config.tables):
        batches = list(exported(group.tables, table, 1 << 20))
        empty = torch.zeros(0, dtype=torch.int64)
        ids = torch.cat([empty, *(batch.ids for batch in batches)])
        handles = torch.cat([empty, *(batch.handles for batch in batches)])
        assert ids.unique().numel() == ids.numel() == group.size(table)
        lines = group.index.buckets[group.index.active_buckets(table)]
        assert int((lines[:, BUCKET_WIDTH:] > 0).sum()) == group.size(table)
        tombstones = (lines[:, BUCKET_WIDTH:] == 0) & (lines[:, :BUCKET_WIDTH] != 0)
        assert int(tombstones.sum()) == int(group.index.tables[table, Table.TOMBSTONES])
        if group.index.scores.shape[0] > 0:
            steps = group.index.scores[group.index.active_buckets(table), :BUCKET_WIDTH]
            of_free_slots = steps[lines[:, BUCKET_WIDTH:] == 0]
            assert bool(((of_free_slots == 0) | (of_free_slots == FREE_STEP)).all())
        found = group.find(ids, torch.tensor([0, ids.numel()]), [table]).handles
        assert torch.equal(found, handles)
        owned[group.config.slabs.index(config.slab)].append(handles)
        if group.config.layout.rows:
            policy = group.config.layout.rows[table]
            if policy[PolicyColumn.CAPACITY] > 0 and policy[PolicyColumn.ON_FULL] != OnFull.GROW:
                assert group.size(table) <= policy[PolicyColumn.CAPACITY]
    for slab, row in enumerate(group.index.slabs.tolist()):
        used = row[Slab.NEXT_ROW]
        handles = torch.cat(owned[slab])
        free = group.index.free_rows[slab, : row[Slab.FREE_COUNT]]
        rows = torch.cat([handles, free]) >> GENERATION_BITS
        assert torch.equal(rows.sort().values, torch.arange(used))
    return [torch.cat(of_slab) for of_slab in owned]
