"""Places of tables on ranks, by sharding type of TorchRec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

Sharding = Literal[
    "table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise", "grid_shard"
]
SHARDINGS: tuple[Sharding, ...] = get_args(Sharding)
DEDUPED: tuple[Sharding, ...] = ("table_wise", "row_wise")  # that can send each id once
_PLANNER_COLUMNS = 128  # least columns of a shard in TorchRec's planner


class PlacedColumns(NamedTuple):
    """Columns of a table, on one rank or divided by id over several.

    Attributes:
        table: number of the table; the pieces of a table are in the order of its columns.
        width: columns.
        ranks: ranks that share the ids, each with those of one remainder of the hash.
    """

    table: int
    width: int
    ranks: range


class Cluster(NamedTuple):
    """Ranks and nodes.

    Attributes:
        ranks: of the job, a multiple of ``node_size`` or less.
        node_size: ranks of a full node.
    """

    ranks: int
    node_size: int

    @property
    def local(self) -> int:
        """Ranks of a node."""
        return min(self.ranks, self.node_size)

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.ranks // self.local

    def node(self, number: int) -> range:
        """Return the ranks of a node."""
        return range(number * self.local, (number + 1) * self.local)


def least_columns(dim: int) -> int:
    """Return the least columns of a shard by default: those of TorchRec's planner, or half a row.

    Args:
        dim: columns of a row.
    """
    return max(1, min(_PLANNER_COLUMNS, dim // 2))


def column_shards(dim: int, least: int, most_shards: int) -> int:
    """Return the largest number of equal column shards.

    Args:
        dim: columns of a row.
        least: columns of a shard at least.
        most_shards: of a table.
    """
    counts = range(1, min(most_shards, dim) + 1)
    return max((n for n in counts if dim % n == 0 and dim // n >= least), default=1)


def placed(
    sharding: Sharding, loads: Sequence[float], dim: int, cluster: Cluster, *, least: int
) -> list[PlacedColumns]:
    """Place tables: the largest load first, each on the rank or node with the least load so far.

    This is the rule of Graham (1969), which TorchRec's planner follows, too.

    Args:
        sharding: type.
        loads: of the tables, such as ids of a line.
        dim: columns of a row.
        cluster: the ranks.
        least: columns of a shard at least, where columns are divided.
    """
    everywhere = range(cluster.ranks)
    if sharding == "row_wise":
        return [PlacedColumns(table, dim, everywhere) for table in range(len(loads))]
    order = sorted(range(len(loads)), key=lambda table: (-loads[table], table))
    of_ranks, of_nodes = [0.0] * cluster.ranks, [0.0] * cluster.nodes
    pieces = []
    for table in order:
        where = everywhere
        if sharding in ("table_column_wise", "table_row_wise"):
            where = cluster.node(_least_loaded(of_nodes, range(cluster.nodes), 1)[0])
            of_nodes[where.start // cluster.local] += loads[table]
        shards = 1
        if sharding in ("column_wise", "table_column_wise"):
            shards = column_shards(dim, least, len(where))
        elif sharding == "grid_shard":
            shards = column_shards(dim, least, cluster.nodes)
        if sharding == "table_row_wise":
            homes = [where]
        elif sharding == "grid_shard":
            nodes = _least_loaded(of_nodes, range(cluster.nodes), shards)
            homes = [cluster.node(node) for node in nodes]
            for node in nodes:
                of_nodes[node] += loads[table] / shards
        else:
            ranks = _least_loaded(of_ranks, where, shards)
            homes = [range(rank, rank + 1) for rank in ranks]
            for rank in ranks:
                of_ranks[rank] += loads[table] / shards
        pieces += [PlacedColumns(table, dim // shards, home) for home in homes]
    return sorted(pieces, key=lambda piece: piece.table)


def _least_loaded(loads: Sequence[float], among: range, count: int) -> list[int]:
    return sorted(among, key=lambda place: (loads[place], place))[:count]


__all__ = [
    "DEDUPED",
    "SHARDINGS",
    "Cluster",
    "PlacedColumns",
    "Sharding",
    "column_shards",
    "least_columns",
    "placed",
]
