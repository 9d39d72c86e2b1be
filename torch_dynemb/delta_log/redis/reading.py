"""Reads of rows in Redis: one round trip a node, and rows of one commit."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, flag
from torch_dynemb.delta_log.redis.nodes import Command, Nodes
from torch_dynemb.delta_log.redis.row_keys import RowKeys, RowPosition, parsed_position
from torch_dynemb.delta_log.redis.row_values import rows_of_values, shard_of, values_by_shard
from torch_dynemb.errors import NewBaseNeededError, ReplacedError
from torch_dynemb.process.torch_modes import plain_torch

_MOST_WAIT = 0.02  # seconds between two readings


class RowsRead(NamedTuple):
    """Rows of some ids.

    Attributes:
        rows: float32 [n, columns]; zeros for ids without a row.
        found: bool [n], whether an id has a row.
        positions: commits that the rows are of, the oldest one first: one, unless ``mixed`` allowed
            several; none without ids.
    """

    rows: Tensor
    found: Tensor
    positions: tuple[RowPosition, ...]


class UniqueRows(NamedTuple):
    """Rows of the ids of one table, each id once.

    Attributes:
        rows: float32 [m, columns]; zeros for ids without a row.
        found: bool [m], whether an id has a row.
        places: int64 [n], the row of each id that was asked for.
    """

    rows: Tensor
    found: Tensor
    places: Tensor


class AllRows(NamedTuple):
    """Rows of ids of several tables, of the same commits.

    Attributes:
        tables: rows of each table.
        positions: see :class:`RowsRead`.
    """

    tables: list[UniqueRows]
    positions: tuple[RowPosition, ...]


class _Reading(NamedTuple):
    """Unique ids of a table.

    Attributes:
        table: name of the table.
        ids: int64 [m], in the order of their hashes.
        places: int64 [n], the unique id of each id.
    """

    table: str
    ids: Tensor
    places: Tensor


class RemoteReader:
    """Reader of rows; any number of threads use it.

    Args:
        nodes: servers with the rows.
        layout: reads the present position and layout.
        owner: name of the rows in errors.
        timeout: seconds until rows of one commit must be found.
        retries: number of further readings after lost connections.
    """

    def __init__(
        self,
        nodes: Nodes,
        layout: Callable[[], tuple[RowPosition, RowKeys]],
        owner: str,
        timeout: float,
        retries: int,
    ) -> None:
        self._nodes, self._find_layout, self._owner = nodes, layout, owner
        self._timeout, self._retries = timeout, retries
        self._layout: tuple[RowPosition, RowKeys] | None = None

    def read(self, table: str, ids: Tensor, *, mixed: bool = False) -> RowsRead:
        """Read rows of a table; see :meth:`RedisRows.read`."""
        (of_table,), positions = self.read_all([(table, ids)], mixed=mixed)
        rows, found, places = of_table
        return RowsRead(rows[places], found[places], positions)

    @plain_torch()
    def read_all(self, asked: Sequence[tuple[str, Tensor]], *, mixed: bool = False) -> AllRows:
        """Read rows of several tables by one round trip a node; see :meth:`RedisRows.read`.

        Args:
            asked: names of tables, each once, with ids.
            mixed: whether rows may be of several commits.

        Returns:
            The rows of each.
        """
        flag("RedisRows.read: mixed", mixed)
        for _, ids in asked:
            if not isinstance(ids, Tensor) or ids.dtype != torch.int64 or ids.dim() != 1:
                raise TypeError(
                    f"RedisRows.read: ids is {described(ids)}, expected an int64 tensor [n]"
                )
        until, lost, waits = time.monotonic() + self._timeout, 0, 0
        while True:
            self._layout = self._layout or self._find_layout()
            position, layout = self._layout
            for table, _ in asked:
                if table not in layout.columns:
                    raise KeyError(
                        f"RedisRows.read: {self._owner} has no table {table!r}, but "
                        f"{sorted(layout.columns)}"
                    )
            readings = [_reading(table, ids.cpu(), layout.shards) for table, ids in asked]
            try:
                found, texts = self._ask(layout, readings)
            except (ConnectionError, TimeoutError):
                lost += 1
                if lost > self._retries or time.monotonic() >= until:
                    raise
                self._nodes.refresh()
                continue
            positions = sorted({parsed_position(text) for text in texts}, key=_age)
            loads = {(shards, of.base) for shards, of in positions}
            if loads - {(layout.shards, position.base)}:
                self._layout = None  # other tables may have been loaded
            elif len(positions) <= 1 or (mixed and time.monotonic() >= until):
                tables = self._results(layout, readings, found)
                return AllRows(tables, tuple(of for _, of in positions))
            if time.monotonic() >= until:
                raise ReplacedError(
                    f"RedisRows.read: {self._owner} had rows of several commits for "
                    f"{self._timeout} seconds, last {_named(positions)}: call again if a commit is "
                    "being applied; start its writer again if that has ended; or pass mixed=True"
                )
            time.sleep(min(_MOST_WAIT, 0.001 * 2 ** min(waits, 10)))
            waits += 1

    def _ask(
        self, layout: RowKeys, readings: Sequence[_Reading]
    ) -> tuple[list[list[bytes | None]], set[bytes]]:
        """Return a value for each unique id, and the positions of all hashes that were read."""
        calls, numbers = [], []
        for number, (table, ids, _) in enumerate(readings):
            for shard, items in values_by_shard(ids, layout.shards):
                key = layout.key(table, shard)
                calls.append(Command((key,), (b"position", *items), command="HMGET"))
                numbers.append(number)
        answers = self._nodes.answers("RedisRows.read", calls)
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        found: list[list[bytes | None]] = [[] for _ in readings]
        texts = set()
        for call, number, (text, *values) in zip(calls, numbers, answers, strict=True):
            if not text:
                self._layout = None
                raise NewBaseNeededError(
                    f"RedisRows.read: {self._owner} has no whole rows in {call.keys[0]!r}: a node "
                    "has lost its data, or a load is not complete. Call follow(log) in the program "
                    "that writes, and read once it has returned"
                )
            texts.add(text)
            found[number] += values
        return found, texts

    def _results(
        self, layout: RowKeys, readings: Sequence[_Reading], found: list[list[bytes | None]]
    ) -> list[UniqueRows]:
        results = []
        for (table, _, places), values in zip(readings, found, strict=True):
            has_row = torch.tensor(
                [value is not None for value in values], dtype=torch.bool, device="cpu"
            )
            rows = torch.zeros(
                len(values), layout.columns[table], dtype=torch.float32, device="cpu"
            )
            rows[has_row] = rows_of_values(
                f"RedisRows.read: table {table!r} of {self._owner}",
                [value for value in values if value is not None],
                layout.columns[table],
            )
            results.append(UniqueRows(rows, has_row, places))
        return results


def _reading(table: str, ids: Tensor, shards: int) -> _Reading:
    unique, places = ids.unique(return_inverse=True)
    order = shard_of(unique, shards).argsort(stable=True)
    moved = torch.empty_like(order)
    moved[order] = torch.arange(len(order), device="cpu")
    return _Reading(table, unique[order], moved[places])


def _age(position: tuple[int, RowPosition]) -> int:
    return position[1].sequence or 0


def _named(positions: Sequence[tuple[int, RowPosition]]) -> str:
    return " and ".join(
        f"base {of.base}" if of.sequence is None else f"commit {of.sequence}" for _, of in positions
    )


__all__ = ["AllRows", "RemoteReader", "RowsRead", "UniqueRows"]
