"""Delta log in a Redis Stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch_dynemb.argument_checks import integer, text
from torch_dynemb.checkpoint.delta_log.batch import COMMIT_BYTES
from torch_dynemb.checkpoint.redis.connection import (
    Server,
    check_keeps_keys,
    client_of,
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
    single server, also behind Sentinel; Redis Cluster is not built.

    Keys, of which ``KEY`` is ``key``:

    * ``KEY``: Stream. An entry ``PLACE-PIECE`` has the field ``data``, a piece of a batch of at
      most 8 MiB. The last piece is the commit, 48 bytes.
    * ``KEY:index``: sorted set of ``PLACE-PIECES`` by the number of the batch.
    * ``KEY:writer``: hash with ``epoch``, the number of writers so far, and ``places``, that of
      batches.

    Args:
        server: URL such as ``"redis://host:6379/0"``, or a ``redis.Redis``.
        key: key of the stream, one for each rank.

    Raises:
        ImportError: the package redis is missing.
        TypeError, ValueError: a wrong argument.

    Example:
        >>> import torch_dynemb as td
        >>> sink = td.checkpoint.RedisSink("redis://localhost:6379/0", "clicks")  # doctest: +SKIP
        >>> log = td.checkpoint.DeltaLog(sink)  # doctest: +SKIP
        >>> log.attach(model, base="base")  # doctest: +SKIP
    """

    def __init__(self, server: Server, key: str) -> None:
        self._client = client_of("RedisSink", server)
        self.key = text("RedisSink: key", key)
        self._index, self._writer = f"{key}:index", f"{key}:writer"
        self._epoch: int | None = None

    def __repr__(self) -> str:
        return f"RedisSink({place_of(self._client)}, key={self.key!r})"

    # -- writing -------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the log for this writer, in place of an earlier one.

        Raises:
            ValueError: the server evicts keys.
            NoRoomError, OSError, RuntimeError: the server fails.
        """
        if self._epoch is None:
            with redis_errors("RedisSink.lock", self._client):
                check_keeps_keys("RedisSink.lock", self._client)
                self._epoch = int(self._client.hincrby(self._writer, "epoch", 1))

    def close(self) -> None:
        """Stop being the writer."""
        self._epoch = None

    def append(self, data: memoryview, sequence: int) -> None:
        """Append a batch; see :meth:`DeltaSink.append`.

        Args:
            data: the batch, uint8.
            sequence: number of the batch.

        Raises:
            InUseError: the log has another writer.
            NoRoomError: the server has no memory left.
            OSError: the server cannot be reached, or refuses the user.
            NewBaseNeededError: the server has lost the log.
        """
        end = len(data) - COMMIT_BYTES
        begins = range(0, end, _PIECE_BYTES)
        pieces = [data[begin : min(begin + _PIECE_BYTES, end)] for begin in begins]
        pieces.append(data[end:])

        def queue(pipe: Any, places: int) -> None:
            place = places + 1
            for number, piece in enumerate(pieces):
                pipe.xadd(self.key, {"data": bytes(piece)}, id=f"{place}-{number + 1}")
            pipe.zadd(self._index, {f"{place}-{len(pieces)}": sequence})
            pipe.hset(self._writer, "places", place)

        self._change("append", queue)

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

        def queue(pipe: Any, places: int) -> None:
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

        def queue(pipe: Any, places: int) -> None:
            for member in members:
                place, pieces = _place(member)
                pipe.xdel(self.key, *(f"{place}-{number + 1}" for number in range(pieces)))
            if members:
                pipe.zrem(self._index, *members)

        self._change("drop_after", queue)

    def _change(self, method: str, queue: Callable[[Any, int], None]) -> None:
        """Run commands as one transaction, if the log still has this writer.

        Args:
            method: that errors name.
            queue: queues the commands; it gets the number of writes so far.
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
                epoch, places = pipe.hmget(self._writer, "epoch", "places")
                if epoch is None:
                    raise NewBaseNeededError(
                        f"{owner}: {self!r} has lost the log, such as by a restart without its "
                        "data: close the log, and attach it again with a new base"
                    )
                if int(epoch) != self._epoch:
                    raise taken
                pipe.multi()
                queue(pipe, int(places or 0))
                pipe.execute()
            except WatchError as error:  # another writer, or a lost connection
                if self._client.hget(self._writer, "epoch") != str(self._epoch).encode():
                    raise taken from error
                raise lost_connection(owner, self._client) from error

    # -- reading -------------------------------------------------------------------------------

    def read(self, from_sequence: int) -> Iterator[bytearray]:
        """Iterate over the batches; see :meth:`DeltaSink.read`.

        Args:
            from_sequence: number of the first batch.

        Raises:
            OSError, RuntimeError: the server fails.
        """
        following = integer("RedisSink.read: from_sequence", from_sequence, least=0)
        while True:
            with redis_errors("RedisSink.read", self._client):
                found = self._client.zrangebyscore(
                    self._index, following, "+inf", start=0, num=1, withscores=True
                )
                data = self._batch(found[0][0]) if found else None
            if data is None:
                return  # dropped meanwhile: the next read finds what there is
            following = int(found[0][1]) + 1
            yield data

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
