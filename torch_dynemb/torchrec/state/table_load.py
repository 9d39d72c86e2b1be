"""Brings saved rows of a dynamic table to the ranks that own their ids now."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor

from torch_dynemb.distributed.exchange import move_rows, one_to_each
from torch_dynemb.distributed.owners import part_of, rows_of
from torch_dynemb.distributed.ranks import RankGroup, from_all_ranks, rank_group
from torch_dynemb.ops.columns import MAX_COUNT, STEP_AGES
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.table.content import CountedIds, TableContent
from torch_dynemb.torchrec.state.shard_places import Place
from torch_dynemb.torchrec.state.table_state import (
    Layout,
    TableShape,
    splits_by_column,
    state_bounds,
    state_key,
)


class Columns(NamedTuple):
    """Columns [begin, end) of rows."""

    begin: int
    end: int


class Loaded(NamedTuple):
    """What a place of this rank gets.

    Attributes:
        content: its rows; without state and scores where rows alone were saved.
        counted: ids without a row; None: the table counts none one by one, or none were saved.
    """

    content: TableContent
    counted: CountedIds | None


class _Piece(NamedTuple):
    """Ids and, by entry, what belongs to them: [n, columns]."""

    ids: Tensor
    values: dict[str, Tensor]


class _Tile(NamedTuple):
    """Part of an entry: its values, and where they begin."""

    first_row: int
    first_column: int
    values: Tensor

    def columns(self, columns: Columns) -> Tensor | None:
        """Some columns; None: the tile lacks them."""
        begin, end = columns.begin - self.first_column, columns.end - self.first_column
        return self.values[:, begin:end] if begin >= 0 and end <= self.values.shape[1] else None


def first_columns_of(shape: TableShape) -> tuple[int, ...]:
    """Where the column shards of a table begin."""
    return tuple(sorted({place.first_column for place in shape.places}))


_NAMES = ("weight", "weight_id", "bucket", "metadata", "count_id", "count", "layout")


def is_entry(name: str) -> bool:
    """Whether a table's state can have an entry of this name."""
    return name in _NAMES or name.startswith(state_key(""))


def missing_entries(
    shape: TableShape, entries: Mapping[str, Any], layout: Layout | None
) -> list[str]:
    """Which entries of a table's own state are not given.

    A policy that keeps other scores than the saved one, as ``layout`` says, lacks nothing.
    """
    expected = ["weight", "weight_id", "bucket", "layout"]
    if shape.scores if layout is None else layout.scores:
        expected.append("metadata")
    if not any(name.startswith(state_key("")) for name in entries):  # else check_entries judges it
        expected += [state_key(tensor.name) for tensor in shape.optimizer.state]
    if shape.counted:
        expected += ["count_id", "count"]
    return [name for name in expected if name not in entries]


def check_entries(
    shape: TableShape, entries: Mapping[str, Any], layout: Layout | None
) -> list[str]:
    """What is wrong with the entries of a table, by what all ranks know of them."""
    table = f"table {shape.name!r}"
    for name, value in entries.items():
        if isinstance(value, ShardedTensor):  # a Tensor, too, but one that can tell nothing
            continue
        if not isinstance(value, Tensor):
            return [f"{table}: {name} is a {type(value).__name__}, expected a tensor"]
        if value.is_meta or value.layout != torch.strided:
            where = "on the meta device" if value.is_meta else f"of layout {value.layout}"
            return [f"{table}: {name} is {where}, expected a dense tensor with values"]
    size, _ = _size_and_dtype(entries["weight"])
    if len(size) != 2 or size[1] != shape.embedding_dim:
        return [f"{table}: weight has shape {size}, expected (ids, {shape.embedding_dim})"]
    if layout is None:
        others = sorted(name for name in entries if name != "weight" and is_entry(name))
        if others:
            return [
                f"{table}: has {others} beside weight, but no layout, which says how to read them: "
                "give all entries, or weight alone for rows of ids 0, 1, ..."
            ]
        return []
    if layout.first_columns[-1] >= shape.embedding_dim:
        return [
            f"{table}: layout has column shards that begin at columns {layout.first_columns}, "
            f"expected less than {shape.embedding_dim}"
        ]
    if "weight_id" not in entries:
        return [f"{table}: has layout, but no weight_id, which says whose rows these are"]
    counts = {"count_id", "count"} & set(entries)
    if len(counts) == 1:
        return [f"{table}: has {counts.pop()}, but not the other of count_id and count"]
    for name in ("weight_id", "metadata", "count_id", "count"):
        if name in entries:
            _, dtype = _size_and_dtype(entries[name])
            if dtype != torch.int64:
                return [f"{table}: {name} has dtype {dtype}, expected torch.int64"]
    given = sorted(name for name in entries if name.startswith(state_key("")))
    expected = sorted(state_key(tensor.name) for tensor in shape.optimizer.state)
    if not given:
        return []  # rows alone
    if given != expected:
        return [
            f"{table}: was saved with optimizer state {given}, but {shape.optimizer.name} has "
            f"{expected}: give it the optimizer it was saved with"
        ]
    errors = []
    for tensor in shape.optimizer.state:
        key = state_key(tensor.name)
        _, dtype = _size_and_dtype(entries[key])
        if dtype != tensor.dtype:
            errors.append(f"{table}: {key} has dtype {dtype}, expected {tensor.dtype}")
        blocks = not splits_by_column(tensor) and not tensor.per_row
        if blocks and layout.first_columns != first_columns_of(shape):
            errors.append(
                f"{table}: {key} has 8-bit blocks of column shards that begin at columns "
                f"{layout.first_columns}, but the shards begin at {first_columns_of(shape)}: shard "
                "columns as they were when it was saved"
            )
    return errors


def _size_and_dtype(value: Tensor | ShardedTensor) -> tuple[tuple[int, ...], torch.dtype]:
    if isinstance(value, ShardedTensor):  # whose own properties warn of DTensor
        metadata = value.metadata()
        return tuple(metadata.size), metadata.tensor_properties.dtype
    return tuple(value.size()), value.dtype


def _tiles(value: Tensor | ShardedTensor, ranks: RankGroup) -> list[_Tile]:
    """What this rank brings of an entry."""
    if isinstance(value, ShardedTensor):
        return [
            _Tile(shard.metadata.shard_offsets[0], shard.metadata.shard_offsets[1], shard.tensor)
            for shard in value.local_shards()
        ]
    # a whole tensor, which all ranks have: each brings an equal part
    rows = rows_of(ranks.rank, ranks.size, value.shape[0])
    return [_Tile(rows.start, 0, value[rows.start : rows.stop])]


class TableLoad:
    """Moves one table. All ranks of the group make the same calls.

    Args:
        shape: of the table now.
        entries: as :func:`save_table` made them, sharded by rows in any way; or ``weight`` alone,
            rows of ids 0, 1, ...
        layout: what was saved with them; None: ``weight`` alone.
        device: of the rows.
    """

    def __init__(
        self,
        shape: TableShape,
        entries: Mapping[str, Any],
        layout: Layout | None,
        *,
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._shape = shape
        ranks = rank_group(process_group)
        assert ranks is not None
        self._process_group = process_group
        self._ranks = ranks
        self._device = device
        self._layout = layout
        self._tiles = {
            name: _tiles(value, ranks) for name, value in entries.items() if name != "layout"
        }
        state = shape.optimizer.state
        # all of it or nothing, says check_entries
        self._saved_state = [
            t for t in state if layout is not None and state_key(t.name) in entries
        ]
        first = (0,) if layout is None else layout.first_columns
        ends = (*first[1:], shape.embedding_dim)
        self._saved = [Columns(*bounds) for bounds in zip(first, ends, strict=True)]

    def run(self) -> dict[Place, Loaded]:
        """What the places of this rank get.

        Raises:
            ValueError: the entries do not belong together; on all ranks.
        """
        pieces, saved_counts, error = self._saved_pieces()
        self._agree_on(error)
        column_shards: dict[int, list[Place]] = {}
        for place in self._shape.places:
            column_shards.setdefault(place.column_shard, []).append(place)
        loaded: dict[Place, Loaded] = {}
        damaged = ""
        for places in column_shards.values():
            columns = Columns(places[0].first_column, places[0].first_column + places[0].columns)
            received = []
            counted = None
            for k, saved in enumerate(self._saved):
                begin, end = max(saved.begin, columns.begin), min(saved.end, columns.end)
                if begin >= end:
                    continue
                cut = self._cut(pieces[k], begin - saved.begin, end - saved.begin)
                received.append((end - begin, _sorted(self._exchange(cut, places))))
                if saved_counts and counted is None:
                    moved = _sorted(self._exchange(saved_counts[k], places))
                    counted = CountedIds(moved.ids, moved.values["count"][:, 0])
            if not _same_ids([piece for _, piece in received]):
                damaged = "ids are repeated, or those of its columns differ"
            else:
                content = self._assembled(received)
                mine = [place for place in places if place.rank == self._ranks.rank]
                loaded.update({place: Loaded(content, counted) for place in mine})
        self._agree_on(damaged)
        return loaded

    def _agree_on(self, error: str) -> None:
        """Raises ValueError on all ranks if one has an error."""
        errors = from_all_ranks(error, self._process_group)
        found = [f"{text} (rank {rank})" for rank, text in enumerate(errors) if text]
        if found:
            raise ValueError(
                f"table {self._shape.name!r}: the entries of the state do not belong together: "
                f"{'; '.join(found)}"
            )

    # -- what this rank brings ------------------------------------------------------------------

    def _saved_pieces(self) -> tuple[list[_Piece], list[_Piece], str]:
        """Rows and counted ids by saved column shard, or what is wrong with them."""
        try:
            pieces = [self._saved_piece("weight_id", k, self._entries(k)) for k in self._shards()]
            counted = []
            if self._shape.counted and "count_id" in self._tiles:
                counted = [
                    self._saved_piece("count_id", k, {"count": (Columns(k, k + 1), torch.int64)})
                    for k in self._shards()
                ]
        except ValueError as error:
            return [], [], str(error)
        return pieces, counted, ""

    def _shards(self) -> range:
        return range(len(self._saved))

    def _entries(self, k: int) -> dict[str, tuple[Columns, torch.dtype]]:
        """The entries of a saved column shard, with its columns in them."""
        entries = {"weight": (self._saved[k], self._shape.dtype)}
        if self._layout is None:
            return entries
        for tensor in self._saved_state:
            entries[state_key(tensor.name)] = (self._state_columns(tensor, k), tensor.dtype)
        words = len(self._layout.scores)
        if words > 0 and "metadata" in self._tiles:
            entries["metadata"] = (Columns(k * words, (k + 1) * words), torch.int64)
        return entries

    def _state_columns(self, tensor: StateTensor, k: int) -> Columns:
        saved = [
            Place(number, columns.begin, columns.end - columns.begin, 0, 0)
            for number, columns in enumerate(self._saved)
        ]
        begin, width = state_bounds(tensor, saved)[k]
        return Columns(begin, begin + width)

    def _saved_piece(
        self, id_entry: str, k: int, entries: dict[str, tuple[Columns, torch.dtype]]
    ) -> _Piece:
        ids: list[Tensor] = []
        values: dict[str, list[Tensor]] = {
            name: [torch.empty((0, columns.end - columns.begin), dtype=dtype, device=self._device)]
            for name, (columns, dtype) in entries.items()
        }
        named = next(iter(entries))
        for tile in self._tiles[named]:
            if tile.columns(entries[named][0]) is None:
                continue
            count = tile.values.shape[0]
            if self._layout is None:
                ids.append(torch.arange(tile.first_row, tile.first_row + count))
            else:
                ids.append(self._rows_of(id_entry, tile, Columns(k, k + 1))[:, 0])
            for name, (columns, dtype) in entries.items():
                part = self._rows_of(name, tile, columns).to(dtype)
                self._check_values(name, part)
                values[name].append(part)
        none = torch.empty(0, dtype=torch.int64, device=self._device)
        return _Piece(
            torch.cat([none, *(part.to(self._device) for part in ids)]),
            {
                name: torch.cat([part.to(self._device) for part in parts])
                for name, parts in values.items()
            },
        )

    def _check_values(self, name: str, values: Tensor) -> None:
        """Raises ValueError for what no training leaves, and training could not go on from.

        Args:
            values: [n, columns] of an entry.
        """
        ranges = []
        if name == "count":
            ranges = [("counts", values, 1)]
        elif name == "metadata" and self._layout is not None:
            words = dict(zip(self._layout.scores, values.unbind(1), strict=True))
            # an eviction takes a negative step for a claim; other scores may be any numbers
            oldest = max(0, self._layout.clock - STEP_AGES + 1)
            counted = {"step": ("steps", oldest), "frequency": ("frequencies", 0)}
            ranges = [
                (what, words[word], least)
                for word, (what, least) in counted.items()
                if word in words
            ]
        elif values.dtype == torch.int32:
            ranges = [("steps of rows", values, 0)]
        for what, numbers, least in ranges:
            if numbers.numel() == 0:
                continue
            low, high = int(numbers.min()), int(numbers.max())
            most = {"counts": (1 << 31) - 1, "steps": (1 << 63) - 1}.get(what, MAX_COUNT)
            if low < least or high > most:
                raise ValueError(
                    f"{name} has {low if low < least else high}, expected {what} from {least} to "
                    f"{most}"
                )

    def _rows_of(self, name: str, like: _Tile, columns: Columns) -> Tensor:
        """The rows of a tile in another entry."""
        for tile in self._tiles.get(name, []):
            same = (tile.first_row, tile.values.shape[0]) == (like.first_row, like.values.shape[0])
            found = tile.columns(columns) if same else None
            if found is not None:
                return found
        raise ValueError(
            f"{name} lacks rows {like.first_row} to {like.first_row + like.values.shape[0]} and "
            f"columns {columns.begin} to {columns.end}"
        )

    # -- what moves -----------------------------------------------------------------------------

    def _cut(self, piece: _Piece, begin: int, end: int) -> _Piece:
        """Some columns of a saved column shard."""
        split = {"weight"} | {
            state_key(tensor.name)
            for tensor in self._shape.optimizer.state
            if splits_by_column(tensor)
        }
        values = {
            name: value[:, begin:end] if name in split else value
            for name, value in piece.values.items()
        }
        return piece._replace(values=values)

    def _exchange(self, piece: _Piece, places: list[Place]) -> _Piece:
        """Sends ids and their values to the places that own them; returns what has come."""
        rank_of = torch.tensor([place.rank for place in places], device=self._device)
        target = rank_of[part_of(piece.ids, len(places))]
        order = torch.argsort(target, stable=True)
        lengths = torch.bincount(target, minlength=self._ranks.size)
        sent, received = lengths.tolist(), one_to_each(lengths, self._ranks).tolist()

        def move(values: Tensor) -> Tensor:
            return move_rows(values[order], received, sent, self._ranks)

        return _Piece(
            move(piece.ids), {name: move(value) for name, value in sorted(piece.values.items())}
        )

    def _assembled(self, received: list[tuple[int, _Piece]]) -> TableContent:
        """Rows of a place from pieces of its columns: (number of columns, what has come)."""
        first = received[0][1]
        state = {}
        for tensor in self._saved_state:
            values = [piece.values[state_key(tensor.name)] for _, piece in received]
            if splits_by_column(tensor):
                state[tensor.name] = torch.cat(values, 1)
            elif len(values) == 1:
                state[tensor.name] = values[0]
            elif tensor.dtype.is_floating_point:  # a mean over columns: that of the parts' means
                weights = torch.tensor([width for width, _ in received], dtype=torch.float64)
                mean = torch.stack(values, -1).double() @ (weights / weights.sum()).to(self._device)
                state[tensor.name] = mean.to(tensor.dtype)
            else:
                state[tensor.name] = torch.stack(values).amax(0)
        return TableContent(
            first.ids,
            torch.cat([piece.values["weight"] for _, piece in received], 1),
            state,
            first.values.get("metadata", first.ids.new_empty((first.ids.shape[0], 0))),
        )


def _sorted(piece: _Piece) -> _Piece:
    order = torch.argsort(piece.ids)
    return _Piece(piece.ids[order], {name: value[order] for name, value in piece.values.items()})


def _same_ids(pieces: list[_Piece]) -> bool:
    """Whether every id is there once, and in all pieces; ids ascend."""
    ids = pieces[0].ids
    once = bool((ids[1:] != ids[:-1]).all())
    return once and all(torch.equal(piece.ids, ids) for piece in pieces)


__all__ = ["Loaded", "TableLoad", "check_entries", "first_columns_of"]
