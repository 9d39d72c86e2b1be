"""Expired ids: past their ttl, and beyond the ids that a table keeps in any case.

An id is expired if its time has passed and it is below the floor of its table. The floor of a
table with ``Policy(keep_at_least=k)`` is the k-th latest of all its times of expiry. So the ids
seen least recently expire first, and ids of one second together.

Lookups read floors from a tensor. A scan of the index computes them anew:

* in the first eager lookup for inference after a step, or after a change of a table's size;
* for compiled code, in ``step()`` once a second.

Training raises floors, so one that is late expires too few ids. Tables without ``keep_at_least``
have neither the tensor nor the scans.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import Clock, Table
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.group_config import GroupConfig
from torch_dynemb.table.host_state import ExpiryFloors
from torch_dynemb.table.tables import Tables, exported

_NONE_EXPIRES = -(1 << 63)
_ALL_EXPIRE = (1 << 63) - 1
_IDS_AT_ONCE = 1 << 20


def new_floors(config: GroupConfig, device: torch.device) -> ExpiryFloors | None:
    """Return the floors of empty tables; None: none of them has ``keep_at_least``."""
    kept = [table.policy.keep_at_least for table in config.tables]
    if not any(kept):
        return None
    first = [_ALL_EXPIRE if keep is None else _NONE_EXPIRES for keep in kept]
    values = torch.tensor(first, dtype=torch.int64, device=device)
    mark_static([values])
    return ExpiryFloors(values)


class Expiry:
    """Test for expired ids of a table at the present time; scans the index of a table with a floor.

    Args:
        tables: of the group.
        table: number of the table.
    """

    def __init__(self, tables: Tables, table: int) -> None:
        self._expires = "expiry" in tables.config.layout.score_words
        self._word = tables.config.layout.word("expiry") if self._expires else 0
        self._now = tables.index.clock[Clock.NOW].clone()  # the clock goes on
        self._floor = _floor(tables, table) if self._expires else _NONE_EXPIRES

    def expired(self, batch: ops.ExportedBatch) -> Tensor:
        """Return which ids of a batch of the table are expired, bool [n].

        Args:
            batch: ids of the table.
        """
        if not self._expires:
            return torch.zeros_like(batch.ids, dtype=torch.bool)
        times = batch.scores[:, self._word]
        return (times <= self._now) & (times < self._floor)

    def unexpired(self, batch: ops.ExportedBatch) -> ops.ExportedBatch:
        """Return a batch of the table without its expired ids.

        Args:
            batch: ids of the table.
        """
        return batch.chosen(~self.expired(batch)) if self._expires else batch


def below_floors(
    tables: Tables, times: Tensor, offsets: Tensor, feature_tables: Sequence[int]
) -> Tensor:
    """Return which ids of a lookup are below the floors of their tables, bool [n].

    Args:
        tables: of the group, which has floors.
        times: int64 [n], of expiry.
        offsets, feature_tables: of the lookup.
    """
    floors = tables.host.expiry_floors
    assert floors is not None
    if not torch.compiler.is_compiling() and not tables.memory.is_capturing():
        _refresh(tables, floors)
    if len(set(feature_tables)) == 1:
        return times < floors.values[feature_tables[0]]
    of_features = floors.values[torch.tensor(list(feature_tables), device=times.device)]
    bags = (offsets.shape[0] - 1) // len(feature_tables)
    places = torch.arange(times.shape[0], device=times.device)
    features = torch.bucketize(places, offsets[bags:-1:bags].contiguous(), right=True)
    return times < of_features[features]


def refresh_each_second(tables: Tables, second: int) -> None:
    """Compute floors anew at the end of a step, unless that was done in this second.

    Args:
        tables: of the group.
        second: any number that changes once a second.
    """
    floors = tables.host.expiry_floors
    if floors is None or floors.second == second:
        return
    _refresh(tables, floors)
    floors.second = second


def _refresh(tables: Tables, floors: ExpiryFloors) -> None:
    """Compute floors anew if steps have ended or sizes have changed since the last time."""
    seen = (tables.host.steps, *tables.index.tables[:, Table.SIZE].tolist())
    if seen == floors.seen:
        return
    for number, table in enumerate(tables.config.tables):
        if table.policy.keep_at_least is not None:
            floors.values[number] = _floor(tables, number)
    floors.seen = seen


def _floor(tables: Tables, table: int) -> int:
    keep = tables.config.tables[table].policy.keep_at_least
    if keep is None:
        return _ALL_EXPIRE
    if int(tables.index.tables[table, Table.SIZE]) <= keep:
        return _NONE_EXPIRES
    word = tables.config.layout.word("expiry")
    batches = exported(tables, table, _IDS_AT_ONCE)
    times = torch.cat([batch.scores[:, word].clone() for batch in batches])
    return int(times.kthvalue(times.numel() - keep + 1).values)


__all__ = ["Expiry", "below_floors", "new_floors", "refresh_each_second"]
