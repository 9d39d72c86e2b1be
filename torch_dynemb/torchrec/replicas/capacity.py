"""Ids that a table has no room for after a sync: the same ones in all sharding groups."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_dynemb.errors import NoRoomError
from torch_dynemb.ops.columns import Table
from torch_dynemb.table.content import score_names
from torch_dynemb.table.scores import deciding_score
from torch_dynemb.table.tables import Tables, exported

_IDS_AT_ONCE = 1 << 20


def beyond_capacity(
    tables: Tables,
    table: int,
    ids: Tensor,
    scores: Mapping[str, Tensor],
    known: Tensor,
    removed: Tensor,
) -> Tensor:
    """Return the ids with the least scores that exceed the capacity of a table, int64 [k].

    Ties go by the oldest lookup, then by the least id. A table that evicts loses any ids; one with
    ``on_full="default"`` loses ids that are new since the last sync.

    Args:
        tables: of the group.
        table: its number.
        ids: int64 [n], merged ids.
        scores: int64 [n] by name, their merged scores.
        known: bool [n], whether the groups had them at the last sync.
        removed: int64 [m], ids to remove.

    Raises:
        NoRoomError: the ids of all groups exceed the capacity, and ``on_full`` is ``"error"``.
    """
    config = tables.config.tables[table]
    bound, on_full = tables.config.capacity_bound(table), config.policy.full(budget=False)
    none = ids[:0]
    if bound is None or on_full == "grow":
        return none
    left_out = torch.cat([ids, removed])
    size = int(tables.index.tables[table, Table.SIZE])
    if size + ids.numel() <= bound:
        return none
    others, of_others = _others(tables, table, left_out)
    over = others.numel() + ids.numel() - bound
    if over <= 0:
        return none
    if on_full == "error":
        raise NoRoomError(
            f"sync: table {config.name!r} has a capacity of {bound} and on_full='error', but the "
            f"sharding groups have {over} ids more together: give it a larger capacity, or "
            "on_full='evict'. Nothing has been synced",
            tables=[config.name],
        )
    if on_full == "default":
        new = ~known
        return _least(ids[new], {name: of[new] for name, of in scores.items()}, over, tables, table)
    joined = {name: torch.cat([of_others[name], of]) for name, of in scores.items()}
    return _least(torch.cat([others, ids]), joined, over, tables, table)


def _others(tables: Tables, table: int, left_out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Return all ids of a table except some, with their scores by name."""
    layout, names = tables.config.layout, score_names(tables, table)
    ids, scores = [left_out[:0]], {name: [left_out[:0]] for name in names}
    for batch in exported(tables, table, _IDS_AT_ONCE):
        stays = ~torch.isin(batch.ids, left_out)
        ids.append(batch.ids[stays])
        for name in names:
            scores[name].append(batch.scores[stays, layout.word(name)])
    return torch.cat(ids), {name: torch.cat(of) for name, of in scores.items()}


def _least(
    ids: Tensor, scores: Mapping[str, Tensor], count: int, tables: Tables, table: int
) -> Tensor:
    """Return the ``count`` ids with the least scores."""
    deciding = deciding_score(tables, table)
    score = scores[deciding] if deciding in scores else torch.zeros_like(ids)
    step = scores.get("step", torch.zeros_like(ids))
    low = score <= score.kthvalue(count).values
    ids, step, score = ids[low], step[low], score[low]
    order = torch.argsort(ids)
    for by in (step, score):
        order = order[torch.argsort(by[order], stable=True)]
    return ids[order[:count]]


__all__ = ["beyond_capacity"]
