"""Delta log in a Redis Stream."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Callable, Iterator
from typing import Any

from torch_dynemb.argument_checks import integer, text
from torch_dynemb.changes.batch import COMMIT_BYTES
from torch_dynemb.delta_log.redis.connection import (
    Server,
    check_keeps_keys,
    check_kinds,
    client_of,
    is_cluster,
    lost_connection,
    place_of,
    redis_errors,
)
from torch_dynemb.errors import InUseError, NewBaseNeededError

_PIECE_BYTES = 8 << 20


class RedisSink:
    """Batches of one rank in a Redis Stream; see :class:`DeltaSink`. Needs the extra ``redis``.

    A batch is stored by one transaction, whole or not at all. Followers on any machine read it,
    each from its own position. The log has one writer, the last one that was attached: an earlier
    one gets an InUseError from its next commit, of which nothing is stored. So a trainer that was
    killed blocks no other one.

    The server keeps a batch as its persistence says: ``appendfsync always`` survives a power
    failure, the default loses up to a second. Its ``maxmemory-policy`` must be ``noeviction``. A
    single server, also behind Sentinel: a Redis Cluster is refused, where one node would have the
    stream.

    Keys, of which ``KEY`` is ``key``:

    * ``KEY``: Stream. An entry ``PLACE-PIECE`` has the field ``data``, a piece of a batch of at
      most 8 MiB. The last piece is the commit, 48 bytes.
    * ``KEY:index``: sorted set of ``PLACE-PIECES`` by the number of the batch.
    * ``KEY:writer``: hash with ``writer``, the uuid of the last writer, and ``places``, the number
      of batches so far.

    Args:
        server: URL such as ``"redis://host:6379/0"``, or a ``redis.Redis``.
        key: key of the stream, one for each rank.

    Raises:
        ImportError: the package redis is missing.
        TypeError, ValueError: a wrong argument.

    Example:
        >>> import torch_dynemb as td
        >>> sink = td.delta_log.RedisSink("redis://localhost:6379/0", "clicks")  # doctest: +SKIP
        >>> log = td.delta_log.DeltaLog(sink)  # doctest: +SKIP
        >>> log.attach(model, base="base")  # doctest: +SKIP
    """

    def __init__(self, server: Server, key: str) -> None:
        self._client = client_of("RedisSink", server)
        if is_cluster(self._client):
            raise ValueError(
                "RedisSink: server is a Redis Cluster, but a log is one stream, which one node "
                "would have: give a single server, or one behind Sentinel"
            )
        self.key = text("RedisSink: key", key)
        self._index, self._writer = f"{key}:index", f"{key}:writer"
        self._token: bytes | None = None  # in the hash of the writer while this is the writer

    def __repr__(self) -> str:
        return f"RedisSink({place_of(self._client)}, key={self.key!r})"

    # -- writing -------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the log for this writer, in place of an earlier one.

        Raises:
            ValueError: the server evicts keys, or a key has a value of another program.
            NoRoomError, OSError, RuntimeError: the server fails.
        """
        if self._token is None:
            token = uuid.uuid4().hex.encode()
            with redis_errors("RedisSink.lock", self._client):
                check_keeps_keys("RedisSink.lock", self._client)
                kinds = {self.key: "stream", self._index: "zset", self._writer: "hash"}
                check_kinds("RedisSink.lock", self._client, kinds)
                fields = set(self._client.hkeys(self._writer))
                is_there = self._client.exists(self.key, self._index) > 0
                if (is_there and not fields) or not fields <= {b"writer", b"places"}:
                    raise ValueError(
                        f"RedisSink.lock: {self!r} has keys of another program under its name: "
                        "take another key"
                    )
                self._client.hset(self._writer, "writer", token)
            self._token = token

    def close(self) -> None:
        """Stop being the writer."""
        self._token = None

    def append(self, data: memoryview, sequence: int) -> None:
        """Append a batch; see :meth:`DeltaSink.append`.

        Args:
            data: the batch, uint8.
            sequence: number of the batch.

        Raises:
            InUseError: the log has another writer.
            NoRoomError: the server has no memory left.
            OSError: the server cannot be reached, or refuses the user.
            NewBaseNeededError: the server has lost the log, or its end.
        """
        end = len(data) - COMMIT_BYTES
        begins = range(0, end, _PIECE_BYTES)
        pieces = [data[begin : min(begin + _PIECE_BYTES, end)] for begin in begins]
        pieces.append(data[end:])

        def queue(pipe: Any, place: int) -> None:
            for number, piece in enumerate(pieces):
                pipe.xadd(self.key, {"data": bytes(piece)}, id=f"{place}-{number + 1}")
            pipe.zadd(self._index, {f"{place}-{len(pieces)}": sequence})
            pipe.hset(self._writer, "places", place)

        self._change("append", queue, sequence)

    def truncate(self, before: int) -> None:
        """Drop earlier batches; the last one stays.

        Args:
            before: number of the first batch that must stay.

        Raises:
            InUseError: the log has another writer.
            OSError, RuntimeError: the server fails.
        """
        with redis_errors("RedisSink.truncate", self._client):
            last = self._client.zrange(self._index, -1, -1, withscores=True)
            kept = min(before, int(last[0][1])) if last else before
            first = self._client.zrangebyscore(self._index, kept, "+inf", start=0, num=1)
        if not first:
            return

        def queue(pipe: Any, place: int) -> None:
            pipe.xtrim(self.key, minid=f"{_place(first[0])[0]}-0", approximate=False)
            pipe.zremrangebyscore(self._index, "-inf", f"({kept}")

        self._change("truncate", queue)

    def drop_after(self, sequence: int) -> None:
        """Remove batches at the end.

        Args:
            sequence: number of the last batch that stays.

        Raises:
            InUseError: the log has another writer.
            OSError, RuntimeError: the server fails.
        """
        with redis_errors("RedisSink.drop_after", self._client):
            members = self._client.zrangebyscore(self._index, f"({sequence}", "+inf")

        def queue(pipe: Any, place: int) -> None:
            for member in members:
                begin, pieces = _place(member)
                pipe.xdel(self.key, *(f"{begin}-{number + 1}" for number in range(pieces)))
            if members:
                pipe.zrem(self._index, *members)

        self._change("drop_after", queue)

    def _change(
        self, method: str, queue: Callable[[Any, int], None], sequence: int | None = None
    ) -> None:
        """Run commands as one transaction, if the log still has this writer.

        Args:
            method: that errors name.
            queue: queues the commands; it gets the number of the next batch so far.
            sequence: number of the batch to append; None: no batch.
        """
        from redis.exceptions import WatchError

        self.lock()
        owner = f"RedisSink.{method}"
        taken = InUseError(
            f"{owner}: {self!r} has another writer, which was attached later: nothing is written. "
            "Stop one of them, and attach the log of the other one again"
        )
        with redis_errors(owner, self._client), self._client.pipeline() as pipe:
            try:
                pipe.watch(self._writer)
                writer, places = pipe.hmget(self._writer, "writer", "places")
                if writer not in (None, self._token):
                    raise taken
                last = pipe.zrange(self._index, -1, -1, withscores=True)
                end = int(last[0][1]) if last else 0
                if writer is None or (sequence is not None and end < sequence - 1):
                    raise NewBaseNeededError(
                        f"{owner}: {self!r} has lost the log after commit {end}, such as by a "
                        "restart without its last data: close the log, and attach it again with "
                        "its base. The next commit has all differences"
                    )
                if sequence is not None and end >= sequence:
                    raise FileExistsError(
                        errno.EEXIST,
                        f"{owner}: {self!r} has commit {sequence} from before: call again",
                    )
                pipe.multi()
                queue(pipe, int(places or 0) + 1)
                pipe.execute()
            except WatchError as error:  # another writer, or a lost connection
                if self._client.hget(self._writer, "writer") not in (None, self._token):
                    raise taken from error
                raise lost_connection(owner, self._client) from error

    # -- reading -------------------------------------------------------------------------------

    def read(self, from_sequence: int) -> Iterator[bytearray]:
        """Iterate over the batches; see :meth:`DeltaSink.read`.

        Args:
            from_sequence: number of the first batch.

        Raises:
            NewBaseNeededError: another program has removed the last batch from the stream.
            OSError, RuntimeError: the server fails.
        """
        following = integer("RedisSink.read: from_sequence", from_sequence, least=0)
        is_lost = False
        while True:
            with redis_errors("RedisSink.read", self._client):
                found = self._client.zrangebyscore(
                    self._index, following, "+inf", start=0, num=1, withscores=True
                )
                if not found:
                    break
                member, number = found[0]
                data = self._batch(member)
                # by XTRIM, or dropped by the writer meanwhile
                is_lost = data is None and self._client.zscore(self._index, member) is not None
            following = int(number) + 1
            if data is not None:
                yield data
        if is_lost:
            raise NewBaseNeededError(
                f"RedisSink.read: {self!r} lacks commit {following - 1}, which another program has "
                "removed from the stream: have the trainer save a new base (DeltaLog.save), load "
                "it, and follow from there. A trainer that starts needs another key"
            )

    def ending(self, sequence: int) -> bytes | None:
        """Return the end of a batch; see :meth:`EndingSink.ending`.

        Args:
            sequence: number of the batch.

        Raises:
            OSError, RuntimeError: the server fails.
        """
        with redis_errors("RedisSink.ending", self._client):
            found = self._client.zrangebyscore(self._index, sequence, sequence)
            if not found:
                return None
            place, pieces = _place(found[0])
            return self._piece(place, pieces)

    def _batch(self, member: bytes) -> bytearray | None:
        """Return a batch by its entry in the index; None if it was dropped meanwhile."""
        place, pieces = _place(member)
        data = bytearray()
        for number in range(1, pieces + 1):
            piece = self._piece(place, number)
            if piece is None:
                return None
            data += piece
        return data

    def _piece(self, place: int, number: int) -> bytes | None:
        name = f"{place}-{number}"
        entries = self._client.xrange(self.key, name, name)
        return bytes(entries[0][1][b"data"]) if entries else None


def _place(member: bytes) -> tuple[int, int]:
    """Return place and number of pieces of a batch."""
    place, _, pieces = member.partition(b"-")
    return int(place), int(pieces)


__all__ = ["RedisSink"]
