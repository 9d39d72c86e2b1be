"""Checks that the parts of all ranks form whole tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torch_dynemb.parts.saved_tables import SavedTable
from torch_dynemb.table.shards import TableShard


def check_whole(shards: Iterable[tuple[int, TableShard]]) -> None:
    """Raise ValueError unless every id and every column of each table is in exactly one shard.

    Args:
        shards: ranks and their shards.
    """
    by_table: dict[str, list[tuple[int, TableShard]]] = {}
    for rank, shard in shards:
        by_table.setdefault(shard.name, []).append((rank, shard))
    for name, of_table in by_table.items():
        _check_table(name, of_table)


def _check_table(name: str, shards: Sequence[tuple[int, TableShard]]) -> None:
    by_columns: dict[tuple[int, int], list[tuple[int, TableShard]]] = {}
    for rank, shard in shards:
        columns = (shard.columns.start, shard.columns.stop)
        by_columns.setdefault(columns, []).append((rank, shard))
    for of_columns in by_columns.values():
        ordered = sorted(of_columns, key=lambda of: of[1].ids)
        first, end, slots = ordered[0][0], 0, ordered[0][1].ids.slots
        for rank, shard in ordered:
            if shard.ids.begin < end or shard.ids.slots != slots:
                raise ValueError(
                    f"checkpoint: table {name!r} has the same ids on ranks {first} and {rank}, "
                    "which is not one sharded table: give process_group=, the ranks that share "
                    "their tables"
                )
            if shard.ids.begin > end:
                break
            end = shard.ids.end
        if end != slots:
            raise ValueError(
                f"checkpoint: table {name!r} has no ids of slots {end} to {slots} on ranks "
                f"{[rank for rank, _ in ordered]}: all ranks that share the table call it, "
                "together"
            )
    end = 0
    for begin, last in sorted(by_columns):
        if begin != end:
            break
        end = last
    if end != shards[0][1].embedding_dim:
        raise ValueError(
            f"checkpoint: table {name!r} has columns {sorted(by_columns)} on these ranks, expected "
            f"all of {shards[0][1].embedding_dim}: all ranks that share the table call it, together"
        )


def together(parts: Iterable[tuple[str, SavedTable]]) -> dict[str, SavedTable]:
    """Combine the descriptions that ranks give of their parts. Return tables by name.

    Args:
        parts: names, and tables with some of their parts each.
    """
    tables: dict[str, SavedTable] = {}
    for name, table in parts:
        known = tables.get(name, replace(table, parts=[]))
        tables[name] = replace(
            known,
            step=max(known.step, table.step),
            now=max(known.now, table.now),  # ranks agree on it in their next lookup
            parts=[*known.parts, *table.parts],
        )
    for name, table in tables.items():
        ordered = sorted(table.parts, key=lambda part: (part.first_column, part.slots_begin))
        tables[name] = replace(table, parts=ordered)
    return tables


def check_same_ids(name: str, table: SavedTable) -> None:
    """Raise RuntimeError if parts with other columns of a table have other ids.

    At this point the files are already written, in the order of ids.
    """
    first = {(part.slots_begin, part.slots): part for part in table.first_parts}
    for part in table.parts:
        same = first[part.slots_begin, part.slots]
        # only the first columns have counts
        counted = same.counted if part.counts is None else part.counted
        if (part.ids, part.ids_crc32c, counted) != (same.ids, same.ids_crc32c, same.counted):
            raise RuntimeError(
                f"checkpoint: table {name!r}: its column shards on ranks {same.rank} and "
                f"{part.rank} have {same.ids} and {part.ids} ids, not the same ones: evictions "
                "have made them differ; shard a table that evicts by rows"
            )


__all__ = ["check_same_ids", "check_whole", "together"]
