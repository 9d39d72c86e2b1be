"""Rows by id in Redis, for programs without PyTorch, and for models that serve."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any, NoReturn

from torch import Tensor

from torch_dynemb.argument_checks import integer, number, text
from torch_dynemb.changes.commits import Commit, TableDelta
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.delta_log.follower import Follower, Log, base_of
from torch_dynemb.delta_log.reader import LogReader, sinks_of
from torch_dynemb.delta_log.redis.connection import (
    Server,
    check_keeps_keys,
    check_kinds,
    client_of,
    place_of,
    redis_errors,
)
from torch_dynemb.delta_log.redis.nodes import Command, Nodes
from torch_dynemb.delta_log.redis.reading import RemoteReader, RowsRead
from torch_dynemb.delta_log.redis.row_keys import (
    LAYOUT,
    RowKeys,
    RowPosition,
    key_of_staged,
    parsed_position,
)
from torch_dynemb.delta_log.redis.row_scripts import ADVANCE, PUT, STAGE
from torch_dynemb.delta_log.redis.row_values import values_by_shard
from torch_dynemb.delta_log.redis.row_writer import RowWriter
from torch_dynemb.errors import NewBaseNeededError, UnsupportedFormatError
from torch_dynemb.parts.table_parts import PACKED
from torch_dynemb.process.torch_modes import plain_torch

_ROWS = 4096  # of one round trip
_SHARDS = 256
_MOST_SHARDS = 1 << 20
_APPLIED = 1 << 18  # rows that are applied in one round trip, below a second
_KEYS = 1024  # of one round trip without rows


class RedisRows:
    """Rows by id in Redis, kept up to date with a delta log. Needs the extra ``redis``.

    :meth:`read` reads rows, and ``td.freeze(model, storage=rows)`` serves a model with them. Any
    program that speaks to Redis can read the rows of an id, in any language;
    ``torch_dynemb/delta_log/README.md`` has the layout and a reader. Dense tensors are left out.

    The hashes of a table are spread over the nodes of a Redis Cluster, so a table may be larger
    than the memory of one machine.

    A commit is sent first and applied afterwards, hash by hash, each as a whole with the number of
    the commit. A program that is killed in between, and started again, writes that commit again:
    rows are the same then. The last program that calls :meth:`follow` or :meth:`load` is the
    writer: an earlier one gets an InUseError, and writes nothing more. If a server or a node comes
    back without its last writes, the next one raises NewBaseNeededError: call :meth:`follow` again,
    which goes on from the commit that all nodes have.

    Args:
        server: URL such as ``"redis://host:6379/0"``, or a ``redis.Redis``. Of a Redis Cluster
            ``"redis+cluster://host:6379"`` (or ``rediss+cluster``) with any of its nodes, or a
            ``redis.cluster.RedisCluster``. Its ``maxmemory-policy`` must not drop rows
            (``noeviction``).
        name: first part of all keys, without braces. A key with a value of another program is
            refused.
        shards: number of hashes of a table, a power of two; default: that of the existing rows, or
            256. An id lies in the hash of its lowest bits.
        timeout: seconds for an answer of a node, and for :meth:`read` to find rows of one commit. A
            client that is given keeps its own settings for the former.
        retries: how often :meth:`read` asks again after a lost connection, while ``timeout`` has
            not passed.

    Attributes:
        name: see the argument.
        timeout: see the argument.
        reader: reads rows of several tables at once, for models that serve.

    Raises:
        ImportError: the package redis is missing.
        TypeError, ValueError: a wrong argument.
        OSError: the cluster cannot be reached.

    Example:
        >>> import torch_dynemb as td
        >>> rows = td.delta_log.RedisRows("redis://localhost:6379/0", "clicks")  # doctest: +SKIP
        >>> follower = rows.follow("log")  # doctest: +SKIP
        >>> follower.update()  # doctest: +SKIP
        17
    """

    def __init__(
        self,
        server: Server,
        name: str,
        *,
        shards: int | None = None,
        timeout: float = 5.0,
        retries: int = 2,
    ) -> None:
        self.name = text("RedisRows: name", name)
        if "{" in name or "}" in name:
            raise ValueError(
                f"RedisRows: name is {name!r}, but braces would put all rows into one slot of a "
                "cluster: take another name"
            )
        if shards is not None:
            integer("RedisRows: shards", shards, least=1, most=_MOST_SHARDS, what="int or None")
            if shards & (shards - 1):
                raise ValueError(f"RedisRows: shards is {shards}, expected a power of two")
        if not number("RedisRows: timeout", timeout) > 0:
            raise ValueError(f"RedisRows: timeout is {timeout}, expected more than 0")
        integer("RedisRows: retries", retries, least=0)
        self.timeout = timeout
        self._client = client_of("RedisRows", server, timeout=timeout)
        self._nodes = Nodes(self._client)
        self._shards = shards
        self._base = ""
        self._layout = RowKeys(name, 0, {})  # of the rows that this program writes
        self._writer: RowWriter | None = None  # None: neither load nor follow was called
        self._positions: dict[str, RowPosition | None] = {}  # of hashes, while this is the writer
        self.reader = RemoteReader(self._nodes, self._found_layout, repr(self), timeout, retries)

    def __repr__(self) -> str:
        return f"RedisRows({place_of(self._client)}, name={self.name!r})"

    def __deepcopy__(self, memo: object) -> RedisRows:
        return self  # connections are for all threads, and for copies of models

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} has connections, which a pickle cannot have: construct RedisRows, and "
            "freeze the model with it, in each process"
        )

    @property
    def sequence(self) -> int | None:
        """Number of the commit in the server; None: there is none, or only a base.

        Raises:
            UnsupportedFormatError: the rows have another format version.
            OSError, RuntimeError: the server fails.
        """
        position, _ = self._read()
        return None if position is None else position.sequence

    @property
    def columns(self) -> Mapping[str, int]:
        """Number of columns of each table, by its name in a checkpoint.

        Raises:
            ValueError: the rows of this name are missing, or not whole.
            UnsupportedFormatError: the rows have another format version.
            OSError, RuntimeError: the server fails.
        """
        return dict(self._found_layout()[1].columns)

    # -- reading -------------------------------------------------------------------------------

    def read(self, table: str, ids: Tensor, *, mixed: bool = False) -> RowsRead:
        """Read the rows of some ids, by one round trip to each node, to all nodes at once.

        While a commit is applied, some nodes have it and others not: the rows are read again then,
        until ``timeout`` seconds have passed.

        Args:
            table: name of the table in the checkpoint.
            ids: int64 [n], in any order, also repeated.
            mixed: True: return rows of several commits after that, with the positions of all.

        Returns:
            The rows, zeros for ids without one, and the commits that they are of.

        Raises:
            KeyError: an unknown table.
            TypeError, ValueError: wrong ids, or the rows of this name are missing, or not whole.
            ReplacedError: the rows were of several commits until the end. A writer that was killed
                while it applied one leaves that: start it again.
            NewBaseNeededError: a node has lost its rows, or a load is not complete.
            DamagedFileError, UnsupportedFormatError: the rows are damaged, or of another version.
            ConnectionError, TimeoutError: a node does not answer.
            RuntimeError: a node refuses the command.
        """
        return self.reader.read(table, ids, mixed=mixed)

    def _found_layout(self) -> tuple[RowPosition, RowKeys]:
        """Return position and layout of whole rows in the server."""
        position, layout = self._read()
        if position is None:
            raise ValueError(
                f"RedisRows.read: {self!r} has no whole rows: wait until follow(log) or "
                "load(checkpoint) has returned in the program that writes them"
            )
        return position, layout

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
        position, _ = self._read()
        if position is not None:
            writer = self._lock()
            before, self._layout = self._read()  # another program may have written until then
            position = self._taken(writer)
            if position is not None and position != before:
                self._put({"position": position.text(self._layout.shards)})
        if position is None:
            position = self._load(str(base_of("RedisRows.follow", log, base)))
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
            ValueError: a table has rows of 8 bits, or is not in the base.
        """
        for name, delta in commit.tables.items():
            _check_dtype(name, delta.dtype)
            is_known = self._layout.columns.get(name) == delta.embedding_dim
            if self._writer is not None and not is_known and _has_changes(delta):
                raise ValueError(
                    f"RedisRows: a commit changes table {name!r} of dim {delta.embedding_dim}, but "
                    f"the base that was loaded has {dict(self._layout.columns)}: load a newer base"
                )

    def apply(self, commit: Commit) -> None:
        """Send the rows of a commit, then apply them in each hash with its number.

        Args:
            commit: the next commit.

        Raises:
            InUseError: another program writes these rows.
            NewBaseNeededError: the server has lost its last writes.
            RuntimeError: neither :meth:`load` nor :meth:`follow` was called.
            NoRoomError, OSError, RuntimeError: the server fails. The number is that before, and the
                next update writes the commit again.
        """
        if self._writer is None or None in self._positions.values():
            raise RuntimeError(
                "RedisRows.apply: no base is loaded: call follow(log), which loads it"
            )
        after = RowPosition(self._base, commit.sequence, commit.chains)
        positions = self._positions.items()
        behind = [key for key, position in positions if position and self._lacks(position, after)]
        if behind:
            left, sent = set(behind), Counter[str]()
            for name, delta in commit.tables.items():
                if _has_changes(delta):
                    self._stage(name, delta.removed, None, left, sent)
                    self._stage(name, delta.changed.ids, delta.changed.rows, left, sent)
            self._advance(behind, after, sent)
        self._put({"position": after.text(self._layout.shards)})

    def _lacks(self, position: RowPosition, after: RowPosition) -> bool:
        """Return whether a hash lacks a commit; nodes that come back may have later ones."""
        assert after.sequence is not None
        if position.sequence == after.sequence and position != after:
            raise NewBaseNeededError(
                f"RedisRows.apply: a node of {self!r} has another commit {after.sequence}: the log "
                "was rolled back and continued, so load its newest base"
            )
        return position.sequence is None or position.sequence < after.sequence

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
        self._load(checkpoint)

    def _load(self, checkpoint: str | PathLike[str]) -> RowPosition:
        with open_checkpoint(checkpoint) as saved:
            if saved.parent is not None:
                raise ValueError(
                    f"RedisRows.load: {checkpoint} is an increment, expected a whole checkpoint: "
                    "merge it first"
                )
            for name, table in saved.tables.items():
                _check_dtype(name, PACKED if table.packed else str(table.dtype))
            with redis_errors("RedisRows.load", self._client):
                check_keeps_keys("RedisRows.load", self._client)
            position, own = self._read()
            shards = self._shards or (_SHARDS if position is None else own.shards)
            columns = {name: table.embedding_dim for name, table in saved.tables.items()}
            layout = RowKeys(self.name, shards, columns)
            self._check_free(layout)
            writer = self._lock()
            self._positions = {"": None}  # until all is loaded
            _, before = self._read()  # another program may have loaded other tables until then
            self._put({"position": ""})
            writer.take(before.all_keys(), "drop")
            self._layout = layout
            self._put({"shards": shards, "tables": json.dumps(columns)})
            keys = list(layout.all_keys())
            writer.take(keys, "clear")
            for name, table in saved.tables.items():
                for batch in table.batches(_ROWS, state=False, scores=False):
                    fields = values_by_shard(batch.ids, shards, batch.rows)
                    writer.change(PUT, {layout.key(name, of): items for of, items in fields})
            self._base = saved.uuid
            position = RowPosition(saved.uuid)
            self._positions = dict.fromkeys(keys)
            self._advance(keys, position, Counter())
            self._put({"position": position.text(shards)})
        return position

    def _check_free(self, layout: RowKeys) -> None:
        """Raise ValueError if a key of a table has a value of another program."""
        keys = [*layout.all_keys(), *map(key_of_staged, layout.all_keys())]
        calls = [Command((key,), (), command="EXISTS") for key in keys]
        found = {key for key, count in zip(keys, self._answers(calls), strict=True) if count > 0}
        _, own = self._read()  # another program may have loaded rows until then
        found -= {*own.all_keys(), *map(key_of_staged, own.all_keys())}
        if found:
            raise ValueError(
                f"RedisRows.load: {self!r} has {len(found)} keys of another program where rows "
                f"belong, such as {min(found)!r}: take another name"
            )

    # -- rows ----------------------------------------------------------------------------------

    def _stage(
        self, table: str, ids: Tensor, rows: Tensor | None, left: set[str], sent: Counter[str]
    ) -> None:
        """Send changes of a commit.

        Args:
            table: name of the table.
            ids: int64 [n].
            rows: [n, columns]; None: the ids are removed.
            left: keys of the hashes that lack the commit.
            sent: numbers of changes by key; more are added.
        """
        assert self._writer is not None
        for begin in range(0, len(ids), _ROWS):
            some = slice(begin, begin + _ROWS)
            of_rows = None if rows is None else rows[some]
            values = {}
            for shard, items in values_by_shard(ids[some], self._layout.shards, of_rows):
                key = self._layout.key(table, shard)
                if key in left:
                    if rows is None:
                        items = [word for id in items for word in (id, b"")]
                    values[key] = [b"0" if key in sent else b"1", *items]
            self._writer.change(STAGE, values)
            for key, (_, *fields) in values.items():
                sent[key] += len(fields) // 2

    def _advance(self, keys: list[str], after: RowPosition, sent: Counter[str]) -> None:
        """Apply the commit of a position in some hashes."""
        assert self._writer is not None
        shards = self._layout.shards
        for some in _pieces(keys, sent):
            values = {}
            for key in some:
                before = self._positions[key]
                text = "" if before is None else before.text(shards)
                values[key] = (text, after.text(shards), "1" if key in sent else "0")
            self._writer.change(ADVANCE, values)
            self._positions.update(dict.fromkeys(values, after))

    # -- first hash ----------------------------------------------------------------------------

    def _read(self) -> tuple[RowPosition | None, RowKeys]:
        """Return the position in the server, None if whole rows are missing, and the layout."""
        with redis_errors("RedisRows", self._client):
            check_kinds("RedisRows", self._client, {self.name: "hash"})
            found = self._client.hgetall(self.name)
        if not found:
            return None, RowKeys(self.name, 0, {})
        if b"version" not in found:
            raise ValueError(
                f"RedisRows: {self!r} has keys of another program under its name: take another name"
            )
        if int(found[b"version"]) != LAYOUT:
            raise UnsupportedFormatError(
                f"RedisRows: {self!r} has rows of format version {found[b'version']!r}, but "
                f"this library writes {LAYOUT}: take another name"
            )
        columns = json.loads(found.get(b"tables", b"{}"))
        layout = RowKeys(self.name, int(found.get(b"shards", 0)), columns)
        if not found.get(b"position"):
            return None, layout
        shards, position = parsed_position(found[b"position"])
        if self._shards not in (None, shards):
            raise ValueError(
                f"RedisRows: shards is {self._shards}, but {self!r} has {shards} for each table: "
                "leave shards out, or take another name"
            )
        return position, layout

    def _lock(self) -> RowWriter:
        """Lock the rows for this program, in place of another program."""
        self._writer = RowWriter(self._nodes, self.name, repr(self))
        return self._writer

    def _taken(self, writer: RowWriter) -> RowPosition | None:
        """Take all hashes; return the position that all have, or None if some have none."""
        shards = self._layout.shards
        found = writer.take(self._layout.all_keys(), "keep")
        positions = {key: parsed_position(text) for key, text in found.items() if text}
        bases = {(of, position.base) for of, position in positions.values()}
        if len(positions) < len(found) or len(bases) != 1 or (of := bases.pop())[0] != shards:
            return None
        self._base = of[1]
        self._positions = {key: position for key, (_, position) in positions.items()}
        return min((of for _, of in positions.values()), key=lambda of: of.sequence or 0)

    def _put(self, fields: Mapping[str, object]) -> None:
        """Set fields of the first hash."""
        assert self._writer is not None
        items = [word for item in fields.items() for word in item]
        self._writer.change(PUT, {self.name: items})

    def _answers(self, calls: list[Command]) -> list[Any]:
        answers = self._nodes.answers("RedisRows", calls)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers


def _pieces(keys: list[str], sent: Counter[str]) -> Iterator[list[str]]:
    """Divide hashes into those of one message, which a node applies in time."""
    piece, rows = list[str](), 0
    for key in keys:
        if piece and (len(piece) >= _KEYS or rows + sent[key] > _APPLIED):
            yield piece
            piece, rows = [], 0
        piece.append(key)
        rows += sent[key]
    if piece:
        yield piece


def _has_changes(delta: TableDelta) -> bool:
    return delta.changed.ids.numel() + delta.removed.numel() > 0


def _check_dtype(name: str, dtype: str) -> None:
    if dtype == PACKED:
        raise ValueError(
            f"RedisRows: table {name!r} has trained rows of 8 bits with a scale, which Redis rows "
            "cannot have: leave it out of the log by DeltaLog(tables=)"
        )


__all__ = ["RedisRows"]
