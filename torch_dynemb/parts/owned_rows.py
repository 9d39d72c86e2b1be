"""Rows of ids from any rank to the parts of a table that own the ids, and into them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from torch_dynemb import ops
from torch_dynemb.distributed.exchange import start_rows
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.parts.whole_tables import check_whole
from torch_dynemb.rows.row_update import RowUpdate
from torch_dynemb.rows.whole_update import Call, apply_all
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.rows import insert_or_assign
from torch_dynemb.table.shards import TableShard


class OwnedRows(NamedTuple):
    """Rows of ids that a part owns.

    Attributes:
        part: of a table, on this rank.
        batch: ids, and their rows in the columns of the part.
    """

    part: TablePart
    batch: RowBatch


def rows_to_owners(
    parts: Sequence[TablePart],
    shards: Sequence[Sequence[TableShard]],
    batch: RowBatch,
    ranks: Ranks,
) -> list[OwnedRows]:
    """Send ids and rows of a table to the ranks that own the ids; all ranks call it.

    Args:
        parts: of the table on this rank.
        shards: of the table, by rank.
        batch: whole rows of ids, which may be repeated; or no columns: ids alone. All ranks give
            the same dtype, on the device of the tables.
        ranks: that share the table. If each of them has all of it, nothing is sent.

    Returns:
        For each part what all ranks have sent to it, rank after rank.

    Raises:
        ValueError: ranks do not have the whole table together.
    """
    if ranks.group is None or all(any(_whole(of) for of in of_rank) for of_rank in shards):
        return [_columns_of(part, batch) for part in parts]
    places = [(rank, shard) for rank, of_rank in enumerate(shards) for shard in of_rank]
    check_whole(places)
    arrived = []
    for columns in sorted({(of.columns.start, of.columns.stop) for _, of in places}):
        owners = [(rank, of.ids) for rank, of in places if of.columns == range(*columns)]
        slots = owners[0][1].slots
        rank_of = torch.zeros(slots, dtype=torch.int64, device=batch.ids.device)
        for rank, owned in owners:
            rank_of[owned.begin : owned.end] = rank
        target = rank_of[ops.id_owners(batch.ids, parts=slots, slots=slots)]
        order = torch.argsort(target, stable=True)
        lengths = torch.bincount(target, minlength=ranks.size)
        equal = [1] * ranks.size
        received = start_rows(lengths, equal, equal, ranks.group).wait().tolist()
        sent = lengths.tolist()
        ids = start_rows(batch.ids[order], received, sent, ranks.group).wait()
        came, rows = RowBatch.without_rows(ids), batch.rows[:, slice(*columns)]
        if rows.shape[1] > 0:
            came = RowBatch(ids, start_rows(rows[order], received, sent, ranks.group).wait())
        arrived += [OwnedRows(part, came) for part in parts if part.columns == range(*columns)]
    return arrived


def _whole(shard: TableShard) -> bool:
    return shard.ids.whole and not shard.split


def _columns_of(part: TablePart, batch: RowBatch) -> OwnedRows:
    columns = slice(part.columns.start, part.columns.stop)
    return OwnedRows(part, batch._replace(rows=batch.rows[:, columns]))


def last_of_each(batch: RowBatch) -> RowBatch:
    """Return each id once, with the last of its rows."""
    count = batch.ids.numel()
    places = torch.arange(count, device=batch.ids.device)
    unique = ops.unique_ids(batch.ids, places.new_tensor([0, count]))
    last = torch.zeros_like(unique.ids).scatter_reduce_(0, unique.inverse, places, "amax")
    return batch.picked(last)


def assign_all(call: str, owned: Sequence[OwnedRows], ranks: Ranks) -> None:
    """Set rows of distinct ids in all parts on all ranks, or in none; all ranks call it.

    New ids are inserted as :meth:`torch_dynemb.TableGroup.insert_or_assign` does. Ids that were
    evicted for them stay away after an error.

    Args:
        call: beginning of errors.
        owned: on this rank.
        ranks: that share the tables.

    Raises:
        Exception: of any rank, on all ranks.
    """

    def prepared() -> list[Call]:
        updates = []
        for part, batch in owned:
            tables, ids = part.group.tables, batch.ids
            update = RowUpdate(f"{call}: table {part.name!r}", tables, part.table, batch)
            update.copy_known()
            assign = partial(insert_or_assign, tables, part.table, ids, batch.rows)
            updates.append(Call(assign, update.undo))
        return updates

    apply_all(ranks.run(prepared), lambda: None, agreed=ranks.run)


__all__ = ["OwnedRows", "assign_all", "last_of_each", "rows_to_owners"]
