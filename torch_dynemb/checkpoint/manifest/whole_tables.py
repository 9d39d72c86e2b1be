"""Whether the parts that ranks have of a table are the whole table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch_dynemb.checkpoint.manifest.records import SavedTable
from torch_dynemb.checkpoint.parts import IdSlots, TablePart


class PartPlace(NamedTuple):
    """Which part of a table a rank has.

    Attributes:
        name, embedding_dim: of the whole table.
        first_column, end_column: its columns.
        ids: which ids it has.
        rank: that has it.
    """

    name: str
    embedding_dim: int
    first_column: int
    end_column: int
    ids: IdSlots
    rank: int

    @staticmethod
    def of(part: TablePart, rank: int) -> PartPlace:
        """The place of a part on a rank."""
        columns = part.columns
        return PartPlace(part.name, part.embedding_dim, columns.start, columns.stop, part.ids, rank)


def check_whole(places: Iterable[PartPlace]) -> None:
    """Raises ValueError unless every id and every column of each table is in one part."""
    by_table: dict[str, list[PartPlace]] = {}
    for place in places:
        by_table.setdefault(place.name, []).append(place)
    for name, parts in by_table.items():
        _check_table(name, parts)


def _check_table(name: str, parts: Sequence[PartPlace]) -> None:
    by_columns: dict[tuple[int, int], list[PartPlace]] = {}
    for part in parts:
        by_columns.setdefault((part.first_column, part.end_column), []).append(part)
    for of_columns in by_columns.values():
        ordered = sorted(of_columns, key=lambda part: part.ids)
        end, slots = 0, ordered[0].ids.slots
        for part in ordered:
            if part.ids.begin < end or part.ids.slots != slots:
                raise ValueError(
                    f"checkpoint: table {name!r} has the same ids on ranks {ordered[0].rank} and "
                    f"{part.rank}, which are no parts of one table: give process_group=, the ranks "
                    "that share their tables"
                )
            if part.ids.begin > end:
                break
            end = part.ids.end
        if end != slots:
            raise ValueError(
                f"checkpoint: table {name!r} has no ids of slots {end} to {slots} on ranks "
                f"{[part.rank for part in ordered]}: all ranks that share the table call it, "
                "together"
            )
    end = 0
    for first, last in sorted(by_columns):
        if first != end:
            break
        end = last
    if end != parts[0].embedding_dim:
        raise ValueError(
            f"checkpoint: table {name!r} has columns {sorted(by_columns)} on these ranks, expected "
            f"all of {parts[0].embedding_dim}: all ranks that share the table call it, together"
        )


def together(parts: Iterable[tuple[str, SavedTable]]) -> dict[str, SavedTable]:
    """Tables by name, of what ranks say of their parts.

    Args:
        parts: names, and tables with some of their parts each.
    """
    tables: dict[str, SavedTable] = {}
    for name, table in parts:
        known = tables.get(name, replace(table, parts=[]))
        tables[name] = replace(
            known,
            step=max(known.step, table.step),
            now=max(known.now, table.now),  # on which ranks agree with their next lookup
            parts=[*known.parts, *table.parts],
        )
    for name, table in tables.items():
        ordered = sorted(table.parts, key=lambda part: (part.first_column, part.slots_begin))
        tables[name] = replace(table, parts=ordered)
    return tables


def check_same_ids(name: str, table: SavedTable) -> None:
    """Raises RuntimeError where parts with other columns of a table have other ids.

    By then they have been written in the order of their ids.
    """
    first = {(part.slots_begin, part.slots): part for part in table.first_parts}
    for part in table.parts:
        same = first[part.slots_begin, part.slots]
        # a batch of changes has the counts of the first columns only
        counted = part.counted if part.rows else same.counted
        if (part.ids, part.ids_crc32c, counted) != (same.ids, same.ids_crc32c, same.counted):
            raise RuntimeError(
                f"checkpoint: table {name!r}: its column shards on ranks {same.rank} and "
                f"{part.rank} have {same.ids} and {part.ids} ids, not the same ones: evictions "
                "have made them differ; shard a table that evicts by rows"
            )


__all__ = ["PartPlace", "check_same_ids", "check_whole", "together"]
