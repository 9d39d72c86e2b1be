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
from torch_dynemb.optim import FusedOptimizer
from torch_dynemb.parts.table_parts import table_name
from torch_dynemb.rows.into_part import loaders_of, publish_all, raise_first, replace_content
from torch_dynemb.rows.loader import RowLoader
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.undisturbed import Undisturbed
from torch_dynemb.torchrec.resharding.moved_table import MovedTable
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
    # rows of a group lie in the order of its tables after a load, too
    parts = sorted((of for table in tables for of in table.parts.values()), key=lambda of: of.table)
    for table in tables:
        table.check()

    def prepare() -> None:
        for table in tables:
            table.prepare()

    def choose() -> list[RowLoader]:
        for table in tables:
            table.choose()
        return loaders_of(parts)

    ranks.run(prepare)
    for table in tables:
        table.send_ids()
    loaders = ranks.run(choose)

    def write() -> None:
        failures = [table.send_rows() for table in tables]
        ranks.run(lambda: raise_first(failures))
        ranks.run(reading.check)

    def publish() -> None:
        publish_all(parts)
        recorded = [table for table in tables if any(of.records_changes for of in table.facts)]
        new = [of.group for table in recorded for of in table.new]
        for group in {id(group): group for group in new}.values():
            keep_recording(group)
        for one in here:
            one.follow(moved)

    replace_content(ranks, loaders, write, publish)
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
            (name, local.place): OldRows(local) for name, of in self._old.items() for local in of
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
                    local,
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
            new.local(shape),
            process_group=new.process_group,
            device=new.device,
        )

    def follow(self, moved: dict[str, MovedTable]) -> None:
        """Give the optimizers of new shards the hyper-parameters of the old ones."""
        for name in self.move.tables:
            table = moved[self.move.name_of(name)]
            for new in table.new:
                self._optimizer(new).param_groups[new.table].update(table.facts[0].hyper)

    def _optimizer(self, local: LocalTable) -> FusedOptimizer:
        return self._tables[id(local.group)].optimizer

    def _of(self, shards: dict[str, list[LocalTable]]) -> list[ShardTables]:
        """Return the tables that have some shards, each group once."""
        found = {id(local.group): local for of in shards.values() for local in of}
        return [self._tables[number] for number in found]


__all__ = ["CollectionMove", "ReshardedTable", "move_tables"]
