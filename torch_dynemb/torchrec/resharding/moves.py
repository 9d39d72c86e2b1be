"""Moves of the tables of several collections at once: all of them, or none.

1. Exchange facts of the old shards, and check that they fit together.
2. Send ids, and choose those that the new shards have room for.
3. Send rows in blocks; new shards write them before any id has them.
4. Publish the ids on all ranks.

Old shards only are read. An error of a rank is raised on all ranks, and empties the new shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch_dynemb.checkpoint.saving.increments import keep_recording, records_increments
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.ops.columns import Clock
from torch_dynemb.optim import FusedOptimizer
from torch_dynemb.parts.table_parts import table_name
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.rows.loader import RowLoader, undone_after_error
from torch_dynemb.table.clock import set_time
from torch_dynemb.table.content import set_optimizer_steps
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.shards import TableShard
from torch_dynemb.table.undisturbed import Undisturbed
from torch_dynemb.torchrec.resharding.moved_table import MovedTable, NewShard
from torch_dynemb.torchrec.resharding.old_shards import OldRows, OldShard, facts_of
from torch_dynemb.torchrec.sharding.tables import ShardTables
from torch_dynemb.torchrec.state.module_state import ModuleState
from torch_dynemb.torchrec.state.table_state import LocalTable


class ReshardedTable(NamedTuple):
    """Result for a table, over all ranks.

    Attributes:
        ids: number of its ids.
        evicted: number of ids without room in their new shards: those with the lowest scores.
        bytes: sent between ranks.
    """

    ids: int
    evicted: int
    bytes: int


class CollectionMove(NamedTuple):
    """Tables of a collection that move.

    Attributes:
        path: of the collection in the model.
        old, new: its dynamic tables in both plans; the new ones are empty.
        tables: names of the tables that move.
    """

    path: str
    old: ModuleState
    new: ModuleState
    tables: Sequence[str]

    def name_of(self, table: str) -> str:
        """Return the name of a table in the model."""
        return table_name(self.path, table)


def move_tables(moves: Sequence[CollectionMove], ranks: Ranks) -> dict[str, ReshardedTable]:
    """Fill the tables of new shards; all ranks call it together.

    Args:
        moves: of all collections.
        ranks: that share the tables.

    Returns:
        Results by ``<path>.<table>``.

    Raises:
        Exception: of any rank, on all ranks; the new tables are empty then.
    """
    here = ranks.run(lambda: [_Here(move) for move in moves])
    reading = ranks.run(lambda: Undisturbed("reshard", [of for one in here for of in one.groups]))
    facts = ranks.run(lambda: [one.facts() for one in here])
    gathered = ranks.gather(facts)
    moved: dict[str, MovedTable] = {}
    for k, one in enumerate(here):
        for name in one.move.tables:
            of_table = [fact for of_rank in gathered for fact in of_rank[k][name]]
            moved[one.move.name_of(name)] = one.moved(name, of_table)
    tables = list(moved.values())
    for table in tables:
        table.check()

    def prepare() -> None:
        for table in tables:
            table.prepare()

    def choose() -> dict[int, RowLoader]:
        for table in tables:
            table.choose()
        return _loaders(tables)

    ranks.run(prepare)
    for table in tables:
        table.send_ids()
    loaders = ranks.run(choose)

    def begin() -> None:
        for loader in loaders.values():
            loader.begin()

    def check_written(failures: Sequence[Exception | None]) -> None:
        for failure in failures:
            if failure is not None:
                raise failure
        reading.check()

    def publish() -> None:
        _publish(tables, loaders)
        for one in here:
            one.follow(moved)

    with undone_after_error(loaders.values()) as done:
        ranks.run(begin)
        failures = [table.send_rows(loaders) for table in tables]
        ranks.run(lambda: check_written(failures))
        with defer_signals():
            ranks.run(publish)
            done()
    results = ranks.gather({name: table.sent_bytes for name, table in moved.items()})
    counts = ranks.gather({name: table.counts() for name, table in moved.items()})
    return {
        name: ReshardedTable(
            sum(of_rank[name] for of_rank in counts),
            table.ids_before - sum(of_rank[name] for of_rank in counts),
            sum(of_rank[name] for of_rank in results),
        )
        for name, table in moved.items()
    }


def _loaders(tables: Sequence[MovedTable]) -> dict[int, RowLoader]:
    """Return a loader for each group of new shards."""
    return {
        number: RowLoader(
            group.tables,
            {new.local.table: table.count(new.local) for table, new in _shards_of(group, tables)},
        )
        for number, group in _groups(tables).items()
    }


def _groups(tables: Sequence[MovedTable]) -> dict[int, TableGroup]:
    return {id(new.local.group): new.local.group for table in tables for new in table.new}


def _shards_of(
    group: TableGroup, tables: Sequence[MovedTable]
) -> list[tuple[MovedTable, NewShard]]:
    """Return the new shards of a group by number: rows lie in that order after a load, too."""
    found = [(table, new) for table in tables for new in table.new if new.local.group is group]
    return sorted(found, key=lambda of: of[1].local.table)


def _publish(tables: Sequence[MovedTable], loaders: dict[int, RowLoader]) -> None:
    """Give the new shards of this rank their ids, and continue clocks."""
    for number, group in _groups(tables).items():
        shards = _shards_of(group, tables)
        for table, new in shards:
            table.publish(new, loaders[number])
        facts = [of for table, _ in shards for of in table.facts]
        index = group.tables.index
        index.clock[Clock.STEP] = max(of.step for of in facts)
        if group.config.keeps_time:
            now = max(of.now for of in facts) or int(index.clock[Clock.NOW])
            set_time(group.tables, now)
        for table, new in shards:
            steps = table.optimizer_steps(new.shard)
            set_optimizer_steps(group.tables, new.local.table, steps)
        loaders[number].end()
        if any(of.records_changes for of in facts):
            keep_recording(group)


class _Here:
    """Tables of a move on this rank.

    Args:
        move: of a collection.
    """

    def __init__(self, move: CollectionMove) -> None:
        self.move = move
        self._tables: dict[int, ShardTables] = {}
        for state in (move.old, move.new):
            for kernel in state.kernels:
                self._tables[id(kernel.tables.group)] = kernel.tables
        self._old: dict[str, list[LocalTable]] = {
            name: list(move.old.local(move.old.shapes[name])) for name in move.tables
        }
        for tables in self._of(self._old):
            tables.end_begun_step()
        self._rows = {
            (name, local.place): OldRows(local.group.tables, local.table, self._shard(local))
            for name, of in self._old.items()
            for local in of
        }

    @property
    def groups(self) -> list[TableGroup]:
        """Groups of the old shards."""
        return [tables.group for tables in self._of(self._old)]

    def facts(self) -> dict[str, list[OldShard]]:
        """Return facts of the old shards, by table."""
        return {
            name: [
                facts_of(
                    local.group.tables,
                    local.table,
                    self._shard(local),
                    local.place.rank,
                    self._rows[name, local.place],
                    self._optimizer(local),
                    records_changes=records_increments(local.group),
                )
                for local in of
            ]
            for name, of in self._old.items()
        }

    def moved(self, name: str, facts: Sequence[OldShard]) -> MovedTable:
        """Return the move of a table.

        Args:
            name: of the table.
            facts: of its old shards on all ranks.
        """
        new, shape = self.move.new, self.move.new.shapes[name]
        return MovedTable(
            shape,
            facts,
            [(local, self._rows[name, local.place]) for local in self._old[name]],
            [NewShard(local, self._shard(local)) for local in new.local(shape)],
            process_group=new.process_group,
            device=new.device,
        )

    def follow(self, moved: dict[str, MovedTable]) -> None:
        """Give the optimizers of new shards the hyper-parameters of the old ones."""
        for name in self.move.tables:
            table = moved[self.move.name_of(name)]
            for new in table.new:
                self._optimizer(new.local).param_groups[new.local.table].update(
                    table.facts[0].hyper
                )

    def _shard(self, local: LocalTable) -> TableShard:
        return self._tables[id(local.group)].shards[local.table]

    def _optimizer(self, local: LocalTable) -> FusedOptimizer:
        return self._tables[id(local.group)].optimizer

    def _of(self, shards: dict[str, list[LocalTable]]) -> list[ShardTables]:
        """Return the tables that have some shards, each group once."""
        found = {id(local.group): local for of in shards.values() for local in of}
        return [self._tables[number] for number in found]


__all__ = ["CollectionMove", "ReshardedTable", "move_tables"]
