"""Rows by id in Redis, for programs without PyTorch."""

from __future__ import annotations

from os import PathLike
from typing import NamedTuple

from torch import Tensor

from torch_dynemb.argument_checks import integer, text
from torch_dynemb.checkpoint.delta_log.commits import Commit
from torch_dynemb.checkpoint.delta_log.follower import Follower, Log, base_of
from torch_dynemb.checkpoint.delta_log.reader import LogReader, sinks_of
from torch_dynemb.checkpoint.entries import PACKED
from torch_dynemb.checkpoint.plain_torch import plain_torch
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.checkpoint.redis.connection import (
    Server,
    check_keeps_keys,
    client_of,
    lost_connection,
    place_of,
    redis_errors,
)
from torch_dynemb.checkpoint.redis.row_values import VERSION, by_shard
from torch_dynemb.errors import InUseError, UnsupportedFormatError

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
    ``torch_dynemb/checkpoint/README.md`` has the layout and a reader. Dense tensors are left out.

    A commit is written in pieces, and its number last. A program that is killed in between, and
    started again, writes that commit again: rows are the same then. A reader may see rows of a
    commit before others; each row is whole. Only one program may write, and a second one gets an
    InUseError.

    Args:
        server: URL such as ``"redis://host:6379/0"``, or a ``redis.Redis``. Its
            ``maxmemory-policy`` must not drop rows (``noeviction``). Redis Cluster is not built.
        name: first part of all keys.
        shards: number of hashes of a table, a power of two; default: that of the existing rows, or
            256. An id lies in the hash of its lowest bits.

    Raises:
        ImportError: the package redis is missing.
        TypeError, ValueError: a wrong argument.

    Example:
        >>> import torch_dynemb as td
        >>> rows = td.checkpoint.RedisRows("redis://localhost:6379/0", "clicks")  # doctest: +SKIP
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
        self._position: _Position | None = None  # as this object has written or read it last

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
            log: as for :func:`torch_dynemb.checkpoint.follow`.
            base: path of the base; default: the newest one in the directory of the log.

        Returns:
            The follower: call ``update()``, or ``start()`` for a thread.

        Raises:
            TypeError, ValueError: ``log`` is not a log, or has rows of 8 bits.
            FileNotFoundError: the base is missing.
            UnsupportedFormatError: the rows have another format version.
            NoRoomError, OSError, RuntimeError: the server fails.
        """
        sinks = sinks_of(log)
        position = self._read()
        if position is None:
            position = self._load(str(base_of("RedisRows.follow", log, base)))
        self._position = position
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
            RuntimeError: neither :meth:`load` nor :meth:`follow` was called.
            NoRoomError, OSError, RuntimeError: the server fails. The number is that before, and the
                next update writes the commit again.
        """
        if self._position is None:
            raise RuntimeError(
                "RedisRows.apply: no base is loaded: call follow(log), which loads it"
            )
        with redis_errors("RedisRows.apply", self._client):
            self._check_own(self._position)
            for name, delta in commit.tables.items():
                if delta.ids.numel() + delta.removed.numel() == 0:
                    continue
                self._client.sadd(f"{self.name}:tables", name)
                self._remove(name, delta.removed)
                self._write(name, delta.ids, delta.rows)
            position = _Position(self._position.base, commit.sequence, commit.chains)
            self._advance(self._position, position)

    # -- base ----------------------------------------------------------------------------------

    @plain_torch()
    def load(self, checkpoint: str | PathLike[str]) -> None:
        """Replace all rows by those of a checkpoint, such as a newer base of the log.

        The position is removed first and set last, so that a killed load is begun again.

        Args:
            checkpoint: path of a whole checkpoint.

        Raises:
            FileNotFoundError: the checkpoint is missing.
            ValueError: a table has rows of 8 bits, or the checkpoint is an increment.
            DamagedFileError: a file is damaged.
            NoRoomError, OSError, RuntimeError: the server fails.
        """
        self._read()
        self._position = self._load(checkpoint)

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
            self._clear()
            shards = _SHARDS if self._shards is None else self._shards
            self._shards = shards
            self._client.hset(self.name, mapping={"version": VERSION, "shards": shards})
            for name, table in saved.tables.items():
                self._client.sadd(f"{self.name}:tables", name)
                for batch in table.batches(_ROWS, state=False, scores=False):
                    self._write(name, batch.ids, batch.rows)
            position = _Position(saved.uuid, None, ())
            self._client.hset(self.name, mapping=_fields(position))
        return position

    def _clear(self) -> None:
        """Remove all rows; the position first."""
        self._client.hdel(self.name, "base", "sequence", "chains")
        found = self._client.hget(self.name, "shards")
        for table in self._client.smembers(f"{self.name}:tables"):
            with self._client.pipeline(transaction=False) as pipe:
                for shard in range(int(found or 0)):
                    pipe.unlink(self._key(table.decode(), shard))
                pipe.execute()
        self._client.delete(self.name, f"{self.name}:tables")

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
        with self._client.pipeline(transaction=False) as pipe:
            for shard, items in by_shard(ids, self._shards, rows):
                pipe.execute_command(command, self._key(table, shard), *items)
            pipe.execute()

    def _key(self, table: str, shard: int) -> str:
        return f"{self.name}:{table}:{shard}"

    # -- position ------------------------------------------------------------------------------

    def _read(self) -> _Position | None:
        """Return the position in the server; None: whole rows are missing."""
        with redis_errors("RedisRows", self._client):
            found = self._client.hgetall(self.name)
        if not found:
            return None
        if int(found.get(b"version", 0)) != VERSION:
            raise UnsupportedFormatError(
                f"RedisRows: {self!r} has rows of format version {found.get(b'version')!r}, but "
                f"this library writes {VERSION}: take another name"
            )
        shards = int(found[b"shards"])
        if b"base" not in found:
            return None
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

    def _is_at(self, position: _Position) -> bool:
        fields = _fields(position)
        found = self._client.hmget(self.name, list(fields))
        return [value.encode() for value in fields.values()] == found

    def _check_own(self, position: _Position) -> None:
        """Raise InUseError if the server has another position than this object has written."""
        if not self._is_at(position):
            raise InUseError(
                f"RedisRows.apply: {self!r} has another position than this program has written: "
                "stop the other program that writes these rows, and call follow(log) again"
            )

    def _advance(self, former: _Position, position: _Position) -> None:
        """Write the next position, unless another program has written one."""
        from redis.exceptions import WatchError

        with self._client.pipeline() as pipe:
            pipe.watch(self.name)
            self._check_own(former)
            pipe.multi()
            pipe.hset(self.name, mapping=_fields(position))
            try:
                pipe.execute()
            except WatchError as error:  # another program, or a lost connection
                if not self._is_at(position):
                    self._check_own(former)
                    raise lost_connection("RedisRows.apply", self._client) from error
        self._position = position


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
