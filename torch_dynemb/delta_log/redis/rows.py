"""Rows by id in Redis, for programs without PyTorch."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from functools import partial
from os import PathLike
from typing import Any, NamedTuple

from torch import Tensor

from torch_dynemb.argument_checks import integer, text
from torch_dynemb.changes.commits import Commit
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.delta_log.follower import Follower, Log, base_of
from torch_dynemb.delta_log.reader import LogReader, sinks_of
from torch_dynemb.delta_log.redis.connection import (
    Server,
    check_keeps_keys,
    check_kinds,
    client_of,
    lost_connection,
    place_of,
    redis_errors,
)
from torch_dynemb.delta_log.redis.row_values import VERSION, by_shard
from torch_dynemb.errors import InUseError, NewBaseNeededError, UnsupportedFormatError
from torch_dynemb.parts.table_parts import PACKED
from torch_dynemb.process.torch_modes import plain_torch

_ROWS = 4096  # of one round trip
_SHARDS = 256
_MOST_SHARDS = 1 << 20


class _Position(NamedTuple):
    """Position of the rows in a log.

    Attributes:
        base: uuid of the checkpoint that was loaded.
        sequence: number of the last commit; None: none since the base.
        chains: chains after that commit, by rank.
    """

    base: str
    sequence: int | None
    chains: tuple[int, ...]


class RedisRows:
    """Rows by id in Redis, kept up to date with a delta log. Needs the extra ``redis``.

    Any program that speaks to Redis can read the rows of an id, in any language;
    ``torch_dynemb/delta_log/README.md`` has the layout and a reader. Dense tensors are left out.

    A commit is written in pieces, and its number last. A program that is killed in between, and
    started again, writes that commit again: rows are the same then. A reader may see rows of a
    commit before others; each row is whole. The last program that calls :meth:`follow` or
    :meth:`load` is the writer: an earlier one gets an InUseError, and writes nothing more. If the
    server comes back without its last writes, the next one raises NewBaseNeededError: call
    :meth:`follow` again, which goes on from the commit that the server has.

    Args:
        server: URL such as ``"redis://host:6379/0"``, or a ``redis.Redis``. Its
            ``maxmemory-policy`` must not drop rows (``noeviction``). Redis Cluster is not built.
        name: first part of all keys. A key with a value of another program is refused.
        shards: number of hashes of a table, a power of two; default: that of the existing rows, or
            256. An id lies in the hash of its lowest bits.

    Raises:
        ImportError: the package redis is missing.
        TypeError, ValueError: a wrong argument.

    Example:
        >>> import torch_dynemb as td
        >>> rows = td.delta_log.RedisRows("redis://localhost:6379/0", "clicks")  # doctest: +SKIP
        >>> follower = rows.follow("log")  # doctest: +SKIP
        >>> follower.update()  # doctest: +SKIP
        17
    """

    def __init__(self, server: Server, name: str, *, shards: int | None = None) -> None:
        self._client = client_of("RedisRows", server)
        self.name = text("RedisRows: name", name)
        if shards is not None:
            integer("RedisRows: shards", shards, least=1, most=_MOST_SHARDS, what="int or None")
            if shards & (shards - 1):
                raise ValueError(f"RedisRows: shards is {shards}, expected a power of two")
        self._shards = shards
        self._writer = ""  # uuid of this writer; empty: neither load nor follow was called
        # what the hash may have as its last change: two values if an answer was lost
        self._changes: set[bytes] = set()
        self._base = ""

    def __repr__(self) -> str:
        return f"RedisRows({place_of(self._client)}, name={self.name!r})"

    @property
    def sequence(self) -> int | None:
        """Number of the commit in the server; None: there is none, or only a base.

        Raises:
            UnsupportedFormatError: the rows have another format version.
            OSError, RuntimeError: the server fails.
        """
        position = self._read()
        return None if position is None else position.sequence

    # -- following -----------------------------------------------------------------------------

    def follow(self, log: Log, *, base: str | PathLike[str] | None = None) -> Follower:
        """Follow a delta log, from the commit that the rows have.

        Loads the base first if the server has no whole rows of this name.

        Args:
            log: as for :func:`torch_dynemb.delta_log.follow`.
            base: path of the base; default: the newest one in the directory of the log.

        Returns:
            The follower: call ``update()``, or ``start()`` for a thread.

        Raises:
            TypeError, ValueError: ``log`` is not a log, or has rows of 8 bits; or a key has a value
                of another program.
            FileNotFoundError: the base is missing.
            UnsupportedFormatError: the rows have another format version.
            NoRoomError, OSError, RuntimeError: the server fails.
        """
        sinks = sinks_of(log)
        position = self._read()
        if position is not None:
            with redis_errors("RedisRows.follow", self._client):
                self._lock()
            position = self._read()  # another program may have written until then
        if position is None:
            position = self._load(str(base_of("RedisRows.follow", log, base)))
        self._base = position.base
        if position.sequence is None:
            reader = LogReader(sinks, base=position.base, sequence=None)
        else:
            chains = dict(enumerate(position.chains))
            reader = LogReader(sinks, base=None, sequence=position.sequence, chains=chains)
        return Follower(reader, self, dense="keep")

    def check(self, commit: Commit) -> None:
        """Check that the rows of a commit can be written.

        Args:
            commit: the next commit.

        Raises:
            ValueError: a table has rows of 8 bits.
        """
        for name, delta in commit.tables.items():
            _check_dtype(name, delta.dtype)

    def apply(self, commit: Commit) -> None:
        """Write the rows of a commit, and its number last.

        Args:
            commit: the next commit.

        Raises:
            InUseError: another program writes these rows.
            NewBaseNeededError: the server has lost its last writes.
            RuntimeError: neither :meth:`load` nor :meth:`follow` was called.
            NoRoomError, OSError, RuntimeError: the server fails. The number is that before, and the
                next update writes the commit again.
        """
        if not self._writer:
            raise RuntimeError(
                "RedisRows.apply: no base is loaded: call follow(log), which loads it"
            )
        with redis_errors("RedisRows.apply", self._client):
            for name, delta in commit.tables.items():
                if delta.changed.ids.numel() + delta.removed.numel() > 0:
                    self._change(partial(_add_table, self.name, name))
                    self._remove(name, delta.removed)
                    self._write(name, delta.changed.ids, delta.changed.rows)
            self._advance(_Position(self._base, commit.sequence, commit.chains))

    # -- base ----------------------------------------------------------------------------------

    @plain_torch()
    def load(self, checkpoint: str | PathLike[str]) -> None:
        """Replace all rows by those of a checkpoint, such as a newer base of the log.

        The position is removed first and set last, so that a killed load is begun again.

        Args:
            checkpoint: path of a whole checkpoint.

        Raises:
            FileNotFoundError: the checkpoint is missing.
            ValueError: a table has rows of 8 bits, the checkpoint is an increment, or a key has a
                value of another program.
            DamagedFileError: a file is damaged.
            NoRoomError, OSError, RuntimeError: the server fails.
        """
        self._read()
        self._base = self._load(checkpoint).base

    def _load(self, checkpoint: str | PathLike[str]) -> _Position:
        with (
            open_checkpoint(checkpoint) as saved,
            redis_errors("RedisRows.load", self._client),
        ):
            if saved.parent is not None:
                raise ValueError(
                    f"RedisRows.load: {checkpoint} is an increment, expected a whole checkpoint: "
                    "merge it first"
                )
            for name, table in saved.tables.items():
                _check_dtype(name, PACKED if table.packed else str(table.dtype))
            check_keeps_keys("RedisRows.load", self._client)
            shards = _SHARDS if self._shards is None else self._shards
            self._check_free(saved.tables, shards)
            self._lock()
            self._clear()
            self._shards = shards
            layout = {"version": VERSION, "shards": shards}
            self._change(lambda pipe: pipe.hset(self.name, mapping=layout))
            for name, table in saved.tables.items():
                self._change(partial(_add_table, self.name, name))
                for batch in table.batches(_ROWS, state=False, scores=False):
                    self._write(name, batch.ids, batch.rows)
            position = _Position(saved.uuid, None, ())
            self._advance(position)
        return position

    def _clear(self) -> None:
        """Remove all rows; the position first."""
        self._change(lambda pipe: pipe.hdel(self.name, "base", "sequence", "chains"))
        shards = range(int(self._client.hget(self.name, "shards") or 0))
        for table in self._client.smembers(f"{self.name}:tables"):
            keys = [self._key(table.decode(), shard) for shard in shards]
            self._change(partial(_unlink, keys))
        self._change(lambda pipe: pipe.unlink(f"{self.name}:tables"))

    def _check_free(self, tables: Iterable[str], shards: int) -> None:
        """Raise ValueError if a key of a table has a value of another program."""
        with self._client.pipeline() as pipe:
            pipe.smembers(f"{self.name}:tables")
            for table in tables:
                pipe.exists(*(self._key(table, shard) for shard in range(shards)))
            own, *found = pipe.execute()
        for table, count in zip(tables, found, strict=True):
            if count > 0 and table.encode() not in own:
                raise ValueError(
                    f"RedisRows.load: {self!r} has {count} keys of another program among "
                    f"{self._key(table, 0)!r} and following, where rows belong: take another name"
                )

    # -- rows ----------------------------------------------------------------------------------

    def _write(self, table: str, ids: Tensor, rows: Tensor) -> None:
        for begin in range(0, len(ids), _ROWS):
            some = slice(begin, begin + _ROWS)
            self._send("HSET", table, ids[some], rows[some])

    def _remove(self, table: str, ids: Tensor) -> None:
        for some in ids.split(_ROWS):
            self._send("HDEL", table, some)

    def _send(self, command: str, table: str, ids: Tensor, rows: Tensor | None = None) -> None:
        assert self._shards is not None
        fields = list(by_shard(ids, self._shards, rows))

        def queue(pipe: Any) -> None:
            for shard, items in fields:
                pipe.execute_command(command, self._key(table, shard), *items)

        if fields:
            self._change(queue)

    def _key(self, table: str, shard: int) -> str:
        # so that the last two colons divide a key, whatever the names are
        escaped = table.replace("%", "%25").replace(":", "%3A")
        return f"{self.name}:{escaped}:{shard}"

    # -- position ------------------------------------------------------------------------------

    def _read(self) -> _Position | None:
        """Return the position in the server; None: whole rows are missing."""
        with redis_errors("RedisRows", self._client):
            tables = f"{self.name}:tables"
            check_kinds("RedisRows", self._client, {self.name: "hash", tables: "set"})
            has_tables = self._client.exists(tables)  # before the hash, which is written first
            found = self._client.hgetall(self.name)
        if not found and not has_tables:
            return None
        if b"version" not in found:
            raise ValueError(
                f"RedisRows: {self!r} has keys of another program under its name: take another name"
            )
        if int(found.get(b"version", 0)) != VERSION:
            raise UnsupportedFormatError(
                f"RedisRows: {self!r} has rows of format version {found.get(b'version')!r}, but "
                f"this library writes {VERSION}: take another name"
            )
        if b"base" not in found:
            return None
        shards = int(found[b"shards"])
        if self._shards not in (None, shards):
            raise ValueError(
                f"RedisRows: shards is {self._shards}, but {self!r} has {shards} for each table: "
                "leave shards out, or take another name"
            )
        self._shards = shards
        sequence = found.get(b"sequence", b"").decode()
        chains = found.get(b"chains", b"").decode().split()
        return _Position(
            found[b"base"].decode(), int(sequence) if sequence else None, tuple(map(int, chains))
        )

    def _lock(self) -> None:
        """Lock the rows for this program, in place of another program."""
        self._writer = uuid.uuid4().hex
        self._changes = {f"{self._writer} 0".encode()}
        mapping = {"version": VERSION, "writer": f"{self._writer} 0"}
        self._client.hset(self.name, mapping=mapping)

    def _advance(self, position: _Position) -> None:
        """Write the position, after the rows that belong to it."""
        self._change(lambda pipe: pipe.hset(self.name, mapping=_fields(position)))

    def _change(self, queue: Callable[[Any], object]) -> None:
        """Run commands as one transaction, if this is still the writer.

        So a program that was paused while another one took over changes nothing any more, and a
        server that has lost some of the changes gets none that follow them.
        """
        from redis.exceptions import WatchError

        with self._client.pipeline() as pipe:
            try:
                pipe.watch(self.name)
                before = self._checked(pipe.hget(self.name, "writer"))
                now = f"{self._writer} {int(before.split()[1]) + 1}".encode()
                pipe.multi()
                queue(pipe)
                pipe.hset(self.name, "writer", now)
                self._changes = {before, now}
                pipe.execute()
                self._changes = {now}
            except WatchError as error:  # another program, or a lost connection
                self._checked(self._client.hget(self.name, "writer"))
                raise lost_connection("RedisRows", self._client) from error

    def _checked(self, found: bytes | None) -> bytes:
        """Return the last change in the server, if it is the last one of this writer."""
        if found in self._changes:
            return found
        if found is not None and not found.startswith(self._writer.encode()):
            raise InUseError(
                f"RedisRows: {self!r} has another writer, which has called follow or load later: "
                "stop one of both programs"
            )
        raise NewBaseNeededError(
            f"RedisRows: {self!r} has lost its last writes, such as by a restart without its last "
            "data: call follow(log) again, which goes on from the commit that the server has"
        )


def _unlink(keys: list[str], pipe: Any) -> None:
    pipe.unlink(*keys)


def _add_table(name: str, table: str, pipe: Any) -> None:
    pipe.sadd(f"{name}:tables", table)


def _fields(position: _Position) -> dict[str, str]:
    """Return the fields of a position in the hash of the name."""
    sequence = "" if position.sequence is None else str(position.sequence)
    chains = " ".join(map(str, position.chains))
    return {"base": position.base, "sequence": sequence, "chains": chains}


def _check_dtype(name: str, dtype: str) -> None:
    if dtype == PACKED:
        raise ValueError(
            f"RedisRows: table {name!r} has trained rows of 8 bits with a scale, which Redis rows "
            "cannot have: leave it out of the log by DeltaLog(tables=)"
        )


__all__ = ["RedisRows"]
