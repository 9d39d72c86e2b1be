"""Modules twice: with rows in memory, and with rows in a store beneath a cache of 64 of them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from group_calls import same_bits
from record_dict import RecordDict
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops import store_io_paths as io_paths
from torch_dynemb.ops.columns import GENERATION_BITS, GENERATION_MASK, Slab, Slot, Tier
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.storage.tiers import Storage

HEADER = ops.tiers.RECORD_HEADER
MAX_ROWS = 4096
CACHE = "64 rows"
SEGMENT = 64 << 10

Features = Mapping[str, tuple[Tensor, Tensor]]


class Batch(NamedTuple):
    """Ids of a lookup, which follow from a few numbers: ``count`` of them, ``stride`` apart.

    Attributes:
        first: the first id.
        count: how many.
        stride: between two ids.
    """

    first: int
    count: int
    stride: int

    def ids(self) -> Tensor:
        """int64 [count], of 300 different ones, some of them twice."""
        return (self.first + self.stride * torch.arange(self.count)) % 300


# Where rows may lie: in a store written in Python, or in files that are read in one of these ways.
STORES = ["python", *("io_uring" if p == ops.IoPath.URING else "threads" for p in io_paths())]


def storage_of(kind: str, path: Path, **caches: Any) -> Storage:
    """A store for a cache of 64 rows.

    Args:
        kind: one of ``STORES``.
        path: of files.
        caches: other arguments.
    """
    caches = {"cache": CACHE, **caches}
    if kind == "python":
        return td.ExternalStore(RecordDict(), **caches)
    return td.SSDStore(path, segment=SEGMENT, io=kind, **caches)


class Pair:
    """A collection of tables in memory, and the same with ``storage``.

    Args:
        tables: configs without storage.
        storage: of the second collection.
        in_memory: names of tables that have their rows in memory there, too.
        timed: whether tables keep times.
        arguments: of both collections.
    """

    def __init__(
        self,
        tables: Sequence[td.TableConfig],
        optimizer: OptimizerConfig,
        storage: Storage,
        *,
        in_memory: Sequence[str] = (),
        timed: bool = False,
        **arguments: Any,
    ) -> None:
        stored = [
            table if table.name in in_memory else dataclasses.replace(table, storage=storage)
            for table in tables
        ]
        self.modules = []
        for configs in (tables, stored):
            torch.manual_seed(7)
            self.modules.append(
                td.DynamicEmbeddingBagCollection(
                    configs, optimizer=optimizer, **{"max_rows": MAX_ROWS, **arguments}
                )
            )
        self.plain, self.tiered = self.modules
        self.in_memory = in_memory
        self.timed = timed
        self.steps = 0
        self.moved_rows = False  # by compact(), where rows are in memory
        if timed:
            self.step()  # until then it is the machine's time

    # -- lookups -------------------------------------------------------------------------------

    def features(self, batch: Batch) -> Features:
        """Every table gets other ids, in bags of 0 to 3 of them."""
        result = {}
        for t, name in enumerate(self.plain.feature_names):
            ids = (batch.ids() + 7 * t) % 300
            lengths = torch.tensor([3, 0, 1, 2])[torch.arange(batch.count) % 4]
            ends = lengths.cumsum(0).clamp(max=batch.count)
            ends[-1:] = batch.count
            result[name] = ids, torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        return result

    def both(self, call: Callable[[Any], Tensor]) -> tuple[Tensor, Tensor]:
        """What both modules say, which has the same bits."""
        plain, tiered = (call(module) for module in self.modules)
        assert same_bits(plain.detach(), tiered.detach())
        return plain, tiered

    def forward(self, *batches: Batch) -> Tensor:
        """A loss of each module, stacked; its gradients are the same."""
        losses = [torch.zeros(2)]
        for batch in batches:
            outputs = self.both(lambda m, batch=batch: m(self.features(batch)))
            weights = torch.randn(outputs[0].shape, generator=seeded(batch.count + self.steps))
            losses.append(torch.stack([(output * weights).sum() for output in outputs]))
        return torch.stack(losses).sum(0)

    def train(self, *batches: Batch) -> None:
        self.forward(*batches).sum().backward()

    def read(self, batch: Batch) -> None:
        for module in self.modules:
            module.eval()
        self.both(lambda m: m(self.features(batch)))
        for module in self.modules:
            module.train()

    def prefetch(self, batch: Batch, ahead: int = 1) -> None:
        for module in self.modules:  # of tables in memory it does nothing
            module.prefetch(self.features(batch), ahead=ahead)

    def micro_batches(self, *batches: Batch, max_norm: float = 0.5) -> None:
        """Split mode: gradients of several backwards, with one norm, which has the same bits."""
        for batch in batches:
            self.train(batch)
        if self.moved_rows:  # a norm is a sum in the order of rows, which compact() has changed
            return
        norms = [td.clip_grad_norm_(module, max_norm) for module in self.modules]
        assert same_bits(norms[0], norms[1]), norms

    def step(self) -> None:
        self.steps += 1
        with warnings.catch_warnings():
            # that a step needs more rows than the cache is to have, and that this was checked often
            warnings.filterwarnings("ignore", "a step needed", RuntimeWarning)
            for module in self.modules:
                module.optimizer.step(now=1000 + self.steps if self.timed else None)

    def groups(self, call: Callable[[td.TableGroup], Any]) -> None:
        """A call on both groups, which give, or raise, the same."""
        results = []
        for module in self.modules:
            try:
                results.append(call(module.group))
            except RuntimeError as error:  # such as too little room for all ids
                results.append(str(error))
        plain, tiered = results
        if isinstance(plain, Tensor):
            assert same_bits(plain, tiered)
        else:
            assert plain == tiered

    def moved(self, column: Tier) -> int:
        """A count of the cache, of all slabs."""
        tiers = self.tiered.group.tables.tiers
        assert tiers is not None
        return int(tiers.tensors.clock[1:, column].sum())

    def compact(self) -> None:
        for module in self.modules:
            module.group.compact()
        self.moved_rows = True

    # -- what is compared ----------------------------------------------------------------------

    def check_index(self) -> None:
        """All tensors of the index, and what the tables count."""
        a, b = self.plain.group, self.tiered.group
        for name, mine in a.index._asdict().items():
            other = getattr(b.index, name)
            if name == "slabs":
                columns = [c for c in Slab if c != Slab.ROW_BYTES]
                mine, other = mine[:, columns], other[:, columns]
            if name in ("meta", "policy"):
                continue  # names slabs, and bytes of a row
            assert same_bits(mine, other), name
        assert torch.equal(a.rows.row_clock, b.rows.row_clock)
        assert torch.equal(a.rows.hyper, b.rows.hyper)

    def check_rows(self) -> None:
        """Weights and optimizer state of every id of every table, and whether they are written."""
        a, b = self.plain.group, self.tiered.group
        for t in range(len(a.config.tables)):
            assert a.size(t) == b.size(t)
            for batch, same in zip(a.export(t), b.export(t), strict=True):
                if not self.moved_rows:
                    assert torch.equal(batch.ids, same.ids)
                    assert same_bits(batch.rows, same.rows)
                assert same_bits(a.read(t, batch.ids), b.read(t, batch.ids))
                mine, other = stored_rows(a, t, batch.ids), stored_rows(b, t, batch.ids)
                assert torch.equal(mine.written, other.written)
                assert torch.equal(mine.payload[mine.written], other.payload[mine.written])

    def check(self) -> None:
        if not self.in_memory and not self.moved_rows:  # else rows have other numbers
            self.check_index()
        self.check_rows()
        check_cache(self.tiered.group)


class StoredRows(NamedTuple):
    """Rows of ids as they are stored.

    Attributes:
        payload: uint8 [n, bytes], weights and state.
        written: bool [n].
    """

    payload: Tensor
    written: Tensor


def stored_rows(group: td.TableGroup, table: int, ids: Tensor) -> StoredRows:
    """From memory, or the cache and the store."""
    slab = group.config.slab_of(table)
    handles = group.find(ids, torch.tensor([0, len(ids)]), [table]).handles
    assert bool((handles >= 0).all())
    tiers = group.tables.tiers
    if tiers is not None and tiers.holds(slab):
        records, written = tiers.read(slab, table, ids, handles)
        return StoredRows(records[:, HEADER:], written)
    records = ops.gather_records(group.rows, slab, handles >> GENERATION_BITS)
    generations = records.view(torch.int32)[:, 0]
    return StoredRows(records[:, HEADER:], generations == (handles & GENERATION_MASK))


def check_cache(group: td.TableGroup) -> None:
    """Places and slots name each other, and every free slot is on the stack of them."""
    tiers = group.tables.tiers
    assert tiers is not None
    for slab in tiers.cached:
        places, slots = tiers.tensors.places[slab], tiers.tensors.slots[slab]
        clock = tiers.tensors.clock[1 + slab].tolist()
        used = clock[Tier.USED]
        owners = slots[:used, Slot.OWNER]
        taken = owners > 0
        rows = (owners[taken] - 1) >> GENERATION_BITS
        assert torch.equal(places[rows].long() - 1, taken.nonzero().reshape(-1))
        assert int((places > 0).sum()) == len(rows)
        free = tiers.tensors.free_slots[slab][: clock[Tier.FREE_COUNT]].tolist()
        assert sorted(free) == (~taken).nonzero().reshape(-1).tolist()
        assert 0 <= clock[Tier.CURSOR] <= used
