"""Keys of rows in Redis, and their position in a log."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

LAYOUT = 2  # version of all keys


class RowPosition(NamedTuple):
    """Position of rows in a delta log.

    Attributes:
        base: uuid of the checkpoint that was loaded.
        sequence: number of the last commit; None: none since the base.
        chains: chains after that commit, by rank of the log.
    """

    base: str
    sequence: int | None = None
    chains: tuple[int, ...] = ()

    def text(self, shards: int) -> str:
        """Return the value of the field ``position``.

        Args:
            shards: number of hashes of a table.
        """
        commit = () if self.sequence is None else (self.sequence, *self.chains)
        return " ".join(map(str, (shards, self.base, *commit)))


def parsed_position(text: bytes) -> tuple[int, RowPosition]:
    """Return the number of hashes of a table, and the position.

    Args:
        text: value of a field ``position``, not empty.
    """
    shards, base, *commit = text.decode().split()
    sequence = int(commit[0]) if commit else None
    return int(shards), RowPosition(base, sequence, tuple(map(int, commit[1:])))


class RowKeys(NamedTuple):
    """Keys of the rows of a name.

    Attributes:
        name: first part of all keys.
        shards: number of hashes of a table, a power of two.
        columns: of the tables, by name.
    """

    name: str
    shards: int
    columns: Mapping[str, int]

    def key(self, table: str, shard: int) -> str:
        """Return the key of a hash.

        Args:
            table: name of the table.
            shard: number of the hash.
        """
        # so that the last two colons divide a key, and its slot is that of the whole key
        for mark in "%:{}":
            table = table.replace(mark, f"%{ord(mark):X}")
        return f"{self.name}:{table}:{shard}"

    def all_keys(self) -> Iterator[str]:
        """Iterate over the keys of all hashes."""
        for table in self.columns:
            for shard in range(self.shards):
                yield self.key(table, shard)


def key_of_staged(key: str) -> str:
    """Return the key of the rows of a commit that is not applied yet, in the slot of a hash."""
    return f"{{{key}}}:next"


__all__ = ["LAYOUT", "RowKeys", "RowPosition", "key_of_staged", "parsed_position"]
