"""A sink of delta logs that keeps batches in a database of SQLite, from the standard library."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path


class SQLiteSink:
    """The batches of one rank, a row of a table each.

    It has what `DeltaSink` and `EndingSink` ask for.

    A log calls `append` in a thread and the rest in others, and a connection of SQLite is for one
    thread, so every call has its own. One writer: a second one would append a number that is there
    already, which the primary key refuses.

    Args:
        path: Of the database; it is made when it is not there.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._connection() as database:
            # readers and the writer do not wait for each other
            database.execute("PRAGMA journal_mode = WAL")
            database.execute(
                "CREATE TABLE IF NOT EXISTS batches (sequence INTEGER PRIMARY KEY, data BLOB)"
            )

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Open a connection and a transaction that is on the disk when it ends without error."""
        with closing(sqlite3.connect(self.path)) as database:
            database.execute("PRAGMA synchronous = FULL")
            with database:
                yield database

    def append(self, data: memoryview, sequence: int) -> None:
        """Keep a batch: all of it, or nothing."""
        with self._connection() as database:
            database.execute("INSERT INTO batches VALUES (?, ?)", (sequence, data))

    def read(self, from_sequence: int) -> Iterator[bytes]:
        """Yield the batches from a number on, as far as there are any now."""
        while True:
            with self._connection() as database:
                row = database.execute(
                    "SELECT sequence, data FROM batches WHERE sequence >= ? ORDER BY sequence",
                    (from_sequence,),
                ).fetchone()
            if row is None:
                return
            from_sequence = row[0] + 1
            yield row[1]

    def ending(self, sequence: int) -> bytes | None:
        """Return the last 48 bytes of a batch, by which followers notice a rollback."""
        with self._connection() as database:
            row = database.execute(
                "SELECT substr(data, -48) FROM batches WHERE sequence = ?", (sequence,)
            ).fetchone()
        return None if row is None else row[0]

    def truncate(self, before: int) -> None:
        """Drop the batches before a number."""
        with self._connection() as database:
            database.execute("DELETE FROM batches WHERE sequence < ?", (before,))

    def drop_after(self, sequence: int) -> None:
        """Drop the batches after a number."""
        with self._connection() as database:
            database.execute("DELETE FROM batches WHERE sequence > ?", (sequence,))
