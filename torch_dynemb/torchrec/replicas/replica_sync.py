"""The steps of a sync of all dynamic tables of a model, in one order on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb.distributed.together import Ranks
from torch_dynemb.ops.columns import Clock
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.policy.admission import AdmitFrequentSketch
from torch_dynemb.rows.whole_update import apply_all
from torch_dynemb.torchrec.replicas.common_base import CommonBase
from torch_dynemb.torchrec.replicas.peer_exchange import (
    PeerExchange,
    merged_rows,
    unpacked,
)
from torch_dynemb.torchrec.replicas.table_merge import LatestClocks, TableMerge
from torch_dynemb.torchrec.sharding.tables import ShardTables

# Numbers in a header: of a group of tables its digest, step and time; of a table its updates, and
# its touched, removed and waiting ids.
_BASE, _TABLE = 3, 4
T = TypeVar("T")


class SyncStats(NamedTuple):
    """Numbers of a sync of dynamic tables, on this rank.

    Attributes:
        ids: touched ids of this rank's shards, over all sharding groups.
        removed: ids that were removed because no group touched them and some removed them.
        evicted: ids that this rank had and that exceeded a capacity.
        sent_bytes: bytes sent to the other ranks of the replica group.
    """

    ids: int
    removed: int
    evicted: int
    sent_bytes: int


class ReplicaSync:
    """Sync of the dynamic tables on this rank with those of its replica group.

    Args:
        shards: the tables on this rank, in the order of the model's modules.
        replica_group: ranks that have the same shards.
        everyone: all ranks.

    Raises:
        NotImplementedError: a table has what a sync cannot merge.
        RuntimeError: the tables have eight readers of changes.
    """

    def __init__(
        self, shards: Sequence[ShardTables], replica_group: dist.ProcessGroup, everyone: Ranks
    ) -> None:
        self._shards, self._group, self._everyone = list(shards), replica_group, everyone
        everyone.run(self._check_mergeable)
        self._bases = everyone.run(lambda: [CommonBase(of.group) for of in self._shards])

    def _check_mergeable(self) -> None:
        for of in self._shards:
            config = of.group.config
            state = () if config.optimizer is None else config.optimizer.state
            eight_bit = [tensor.name for tensor in state if tensor.dtype == torch.uint8]
            if eight_bit:
                raise NotImplementedError(
                    f"DynamicDMPCollection: tables {config.names} have 8-bit state {eight_bit}, "
                    "which has no mean over sharding groups: give the optimizer state_dtype=torch."
                    "float32 or torch.bfloat16"
                )
            tiers = of.group.tables.tiers
            if tiers is not None and not tiers.records_changes:
                raise NotImplementedError(
                    f"DynamicDMPCollection: tables {config.names} have storage {config.storage}, "
                    "which does not record which rows change: keep the rows in memory, or in a "
                    "HostStore on a GPU"
                )
            for table in config.tables:
                if isinstance(table.policy.admission, AdmitFrequentSketch):
                    raise NotImplementedError(
                        f"DynamicDMPCollection: table {table.name!r} has admission "
                        f"{table.policy.admission!r}, the counts of which cannot be merged over "
                        "sharding groups: choose AdmitFrequent"
                    )

    def renew_replaced(self) -> None:
        """Take loaded content as the base, before training changes it."""
        for base in self._bases:
            base.renew_if_replaced()

    @torch.no_grad()
    def run(self, state: bool) -> SyncStats:
        """Make the tables of all groups equal. All ranks call it between two training steps.

        Args:
            state: whether optimizer state is synced, too.

        Raises:
            NotImplementedError: ``state`` is False.
            RuntimeError: gradients are pending, memory is short, or a disk fails.
            NoRoomError: the ids of all groups exceed the capacity of a table that does not evict.
            ValueError: groups loaded different content. After an error on one rank all ranks raise
                it, and the tables are unchanged.
        """
        together = self._everyone.run
        together(lambda: self._check(state))
        together(self._begin)
        exchange = PeerExchange(self._group)
        merges = together(self._touched)
        headers = self._headers(exchange, merges)
        together(lambda: self._check_digests(headers))
        clocks = self._clocks(merges, headers)
        self._unite(exchange, merges, headers)
        merged, failure = _merged(exchange, merges, clocks)

        def prepare() -> None:
            if failure is not None:
                raise failure
            for of, clock, (rows, waiting) in zip(merges, clocks, merged, strict=True):
                of.prepare(rows, waiting, clock)

        together(prepare)
        evicted = 0

        def finish() -> None:  # updated tables and their new base belong together
            nonlocal evicted
            evicted = sum(of.finish() for of in merges)
            self._set_clocks(headers)
            for base in self._bases:
                base.renew()
                base.digest = 0

        apply_all(merges, finish, agreed=together)
        return SyncStats(
            sum(of.ids.numel() for of in merges),
            sum(of.removed.numel() for of in merges),
            evicted,
            exchange.sent_bytes,
        )

    def _check(self, state: bool) -> None:
        for of in self._shards:
            if not state:
                raise NotImplementedError(
                    f"sync: include_optimizer_state is {state}, but tables {of.group.names} are "
                    "dynamic, and their rows are synced with their optimizer state: leave it out"
                )
            tables = of.group.tables
            tables.check_own()
            pending = tables.rows.pending
            if pending and int(PendingGradients.of(pending).counts[:, 0].sum()) > 0:
                raise RuntimeError(
                    f"sync: tables {tables.config.names} have pending gradients: call step() of "
                    "the model's fused_optimizer, or zero_grad(), before sync()"
                )

    def _begin(self) -> None:
        for of in self._shards:
            of.end_begun_step()
        self.renew_replaced()

    def _touched(self) -> list[TableMerge]:
        return [
            TableMerge(base, table, touched)
            for base in self._bases
            for table, touched in enumerate(base.touched())
        ]

    def _headers(self, exchange: PeerExchange, merges: Sequence[TableMerge]) -> Tensor:
        """Return digests, clocks and counts of the tables, int64 [sharding groups, numbers]."""
        numbers: list[int] = []
        for base in self._bases:
            clock = base.group.tables.index.clock
            numbers += [base.digest, int(clock[Clock.STEP]), int(clock[Clock.NOW])]
        for of in merges:
            numbers += [of.updates, *(ids.numel() for ids in of.touched)]
        if not numbers:
            return torch.empty(exchange.size, 0, dtype=torch.int64, device="cpu")
        mine = torch.tensor([numbers], dtype=torch.int64, device=self._shards[0].group.device)
        return torch.cat(exchange.to_all(mine, [1] * exchange.size)).cpu()

    def _check_digests(self, headers: Tensor) -> None:
        for number, base in enumerate(self._bases):
            if headers[:, _BASE * number].unique().numel() > 1:
                raise ValueError(
                    f"sync: tables {base.group.names} were loaded since the last sync, with "
                    "another content in each sharding group, or not in all of them: load the same "
                    "checkpoint in all groups. Nothing has been synced"
                )

    def _clocks(self, merges: Sequence[TableMerge], headers: Tensor) -> list[LatestClocks]:
        """Return the latest clocks of all groups, by table."""
        latest = headers.amax(0).tolist()
        result: list[LatestClocks] = []
        for number, base in enumerate(self._bases):
            _, step, now = latest[_BASE * number : _BASE * (number + 1)]
            for _ in base.group.names:
                at = _BASE * len(self._bases) + _TABLE * len(result)
                result.append(LatestClocks(step, now, latest[at]))
        return result

    def _unite(self, exchange: PeerExchange, merges: Sequence[TableMerge], headers: Tensor) -> None:
        """Send touched, removed and waiting ids of all tables to all groups."""
        if not merges:
            return
        counts = headers[:, _BASE * len(self._bases) :].reshape(-1, len(merges), _TABLE)
        sizes = counts[:, :, 1:].reshape(exchange.size, -1)
        mine = torch.cat([ids for of in merges for ids in of.touched])
        of_groups = exchange.to_all(mine, sizes.sum(1).tolist())
        pieces = [
            ids.split(of_group.tolist()) for ids, of_group in zip(of_groups, sizes, strict=True)
        ]
        for number, of in enumerate(merges):
            ids, removed, waiting = (
                [group[3 * number + kind] for group in pieces] for kind in range(3)
            )
            of.unite(ids, removed, waiting)

    def _set_clocks(self, headers: Tensor) -> None:
        for number, base in enumerate(self._bases):
            tables = base.group.tables
            _, step, now = headers.amax(0)[_BASE * number : _BASE * (number + 1)].tolist()
            tables.index.clock[Clock.STEP], tables.index.clock[Clock.NOW] = step, now
            tables.host.steps = step


def _merged(
    exchange: PeerExchange, merges: Sequence[TableMerge], clocks: Sequence[LatestClocks]
) -> tuple[list[tuple[list[Tensor], Tensor]], Exception | None]:
    """Merge the records of all groups: each rank merges a part of the ids, for all others.

    Args:
        exchange: of the replica group.
        merges, clocks: by table.

    Returns:
        Merged values of rows, and waiting counts, int64 [k], by table; and the first error of this
        rank, after which it has sent zeros.
    """
    failures: list[Exception] = []

    def attempt(make: Callable[[], T], instead: Callable[[], T]) -> T:
        if not failures:
            try:
                return make()
            except Exception as error:
                failures.append(error)
        return instead()

    result = []
    for of, clock in zip(merges, clocks, strict=True):
        rows = attempt(partial(of.no_merged, of.ids.numel()), partial(of.no_merged, 0))
        for block in of.blocks():
            parts = _parts(block, exchange.size)
            count = block.stop - block.start
            records = attempt(partial(of.records, block), partial(of.no_records, count))
            received = _to_mergers(exchange, records, block.start, parts)
            mine = parts[exchange.rank]
            values = attempt(
                partial(of.merged, received, mine, clock),
                partial(of.no_merged_bytes, mine.stop - mine.start),
            )
            counts = [part.stop - part.start for part in parts]
            by_rank = [unpacked(data, rows) for data in exchange.to_all(values, counts)]
            if failures:
                continue
            for number, whole in enumerate(rows):
                for part, of_rank in zip(parts, by_rank, strict=True):
                    whole[part] = of_rank[number]
        parts = _parts(slice(0, of.waiting.numel()), exchange.size)
        none = partial(torch.zeros_like, of.waiting)
        received = _to_mergers(exchange, attempt(of.waiting_records, none), 0, parts)
        mine = parts[exchange.rank]
        waiting = attempt(
            partial(of.merged_waiting, received, mine, clock),
            partial(torch.zeros_like, of.waiting[mine]),
        )
        counts = [part.stop - part.start for part in parts]
        result.append((rows, torch.cat(exchange.to_all(waiting, counts))))
    return result, failures[0] if failures else None


def _parts(block: slice, ranks: int) -> list[slice]:
    """Return the part of a block that each rank merges."""
    parts = (merged_rows(block.stop - block.start, rank, ranks) for rank in range(ranks))
    return [slice(block.start + part.start, block.start + part.stop) for part in parts]


def _to_mergers(
    exchange: PeerExchange, records: Tensor, begin: int, parts: Sequence[slice]
) -> list[Tensor]:
    """Send each rank its part of some records, the first of which has number ``begin``."""
    mine = parts[exchange.rank]
    pieces = [records[part.start - begin : part.stop - begin] for part in parts]
    return exchange.to_each(pieces, [mine.stop - mine.start] * exchange.size)


__all__ = ["ReplicaSync", "SyncStats"]
