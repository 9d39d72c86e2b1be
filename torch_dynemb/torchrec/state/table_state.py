"""State dict entries of a dynamic table, with the names of TorchRec's virtual tables.

These ShardedTensors have matching rows, with ascending ids within a shard:

* ``weight`` [ids, dim];
* ``weight_id`` [ids, column shards];
* ``metadata`` [ids, column shards * scores], the scores;
* ``optimizer.<state>``.

Further entries:

* ``bucket`` [shards of ids, 1]: the number of ids of each shard.
* ``count_id`` and ``count``: counted ids, which have no row.
* ``layout``: a small tensor, equal on all ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

from torch_dynemb.errors import UnsupportedFormatError
from torch_dynemb.ops.columns import MAX_COUNT
from torch_dynemb.optim.base import OptimizerConfig, StateTensor
from torch_dynemb.rows.exchange import Place
from torch_dynemb.table.content import CountedIds
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.shards import TableShard
from torch_dynemb.torchrec.state.shard_places import placement_of
from torch_dynemb.torchrec.state.table_entry import TableEntry

FORMAT_VERSION = 1
# Numbers of scores in files are permanent; a new score gets the next one.
_SCORE_CODES = {"step": 0, "timestamp": 1, "frequency": 2, "custom": 3, "expiry": 4, "decayed": 5}
_CODE_BITS = 8  # of a score; the half-life of decayed counts is above them
_SCORE_NAMES = {code: name for name, code in _SCORE_CODES.items()}
_LAYOUT_HEAD = 5


class TableShape(NamedTuple):
    """Facts of a table that all ranks know.

    Attributes:
        name, embedding_dim: of its config.
        dtype: of its rows.
        optimizer: of its rows.
        scores: names of the scores of an id.
        half_life: of decayed counts, ``Policy.half_life_ticks``.
        counted: whether ids without a row have exact counts.
        admission_half_life: of these, ``Policy.admission_ticks``.
        places: its shards.
    """

    name: str
    embedding_dim: int
    dtype: torch.dtype
    optimizer: OptimizerConfig
    scores: tuple[str, ...]
    counted: bool
    places: list[Place]
    half_life: int = 0
    admission_half_life: int = 0


class Layout(NamedTuple):
    """Content of the entry ``layout``.

    Attributes:
        optimizer_steps: updates of the table.
        clock: steps of the index.
        scores: names of the columns of ``metadata``.
        first_columns: of the column shards.
        half_life: of decayed counts, in the code of their score: seconds, or below 0 steps.
        admission_half_life: of the counts of ids without a row, in a last word if it is not 0.
        now: seconds that the next lookups have, in a word after it if it is not 0; 0: unknown, or
            no table keeps times.
    """

    optimizer_steps: int
    clock: int
    scores: tuple[str, ...]
    first_columns: tuple[int, ...]
    half_life: int = 0
    admission_half_life: int = 0
    now: int = 0

    def tensor(self) -> Tensor:
        codes = [_SCORE_CODES[name] for name in self.scores]
        if "decayed" in self.scores:
            codes[self.scores.index("decayed")] += _encoded(self.half_life) << _CODE_BITS
        last = [_encoded(self.admission_half_life), self.now]
        while last and last[-1] == 0:
            last.pop()
        head = [FORMAT_VERSION, self.optimizer_steps, self.clock, len(codes)]
        return torch.tensor(
            [*head, len(self.first_columns), *codes, *self.first_columns, *last], device="cpu"
        )

    @staticmethod
    def of(table: str, tensor: Any) -> Layout:
        """Decode a layout.

        Raises:
            ValueError: another version, or damaged.
        """
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64 or tensor.is_meta:
            what = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise ValueError(f"table {table!r}: layout is {what}, expected int64 with values")
        words = tensor.flatten().tolist()
        if words[:1] != [FORMAT_VERSION]:
            raise UnsupportedFormatError(
                f"table {table!r}: layout has version {words[:1]}, but this torch_dynemb reads "
                f"{FORMAT_VERSION}: load it with the version that wrote it",
                tables=[table],
            )
        damaged = ValueError(f"table {table!r}: layout is damaged: {words[:32]}")
        if len(words) < _LAYOUT_HEAD or min(words[1:]) < 0 or max(words) > MAX_COUNT:
            raise damaged
        end = _LAYOUT_HEAD + words[3] + words[4]
        if not end <= len(words) <= end + 2:
            raise damaged
        admission_code, now = [*words[end:], 0, 0][:2]
        codes = words[_LAYOUT_HEAD : _LAYOUT_HEAD + words[3]]
        columns = words[_LAYOUT_HEAD + words[3] : end]
        half_life = 0
        for k, code in enumerate(codes):
            codes[k] = code & ((1 << _CODE_BITS) - 1)
            if codes[k] == _SCORE_CODES["decayed"]:
                half_life = _decoded(code >> _CODE_BITS)
            elif codes[k] != code:
                raise damaged
        if len(set(codes)) < len(codes) or not set(codes) <= set(_SCORE_NAMES):
            raise damaged
        if columns[:1] != [0] or columns != sorted(set(columns)):
            raise damaged
        names = tuple(_SCORE_NAMES[code] for code in codes)
        admission_half_life = _decoded(admission_code)
        return Layout(
            words[1], words[2], names, tuple(columns), half_life, admission_half_life, now
        )


def _encoded(ticks: int) -> int:
    """Encode a half-life as a number from 0 on: twice the ticks, and 1 more for steps."""
    return 2 * abs(ticks) + int(ticks < 0)


def _decoded(code: int) -> int:
    ticks, steps = divmod(code, 2)
    return -ticks if steps else ticks


def state_key(name: str) -> str:
    """Return the entry name of an optimizer's state."""
    return f"optimizer.{name}"


def state_bounds(tensor: StateTensor, places: list[Place]) -> list[tuple[int, int]]:
    """Return (first column, columns) in the entry of a state tensor, by column shard."""
    columns = {place.column_shard: place for place in places}
    if tensor.splits_by_column:
        return [(columns[k].first_column, columns[k].columns) for k in sorted(columns)]
    bounds, begin = [], 0
    for k in sorted(columns):
        width = tensor.columns(columns[k].columns)
        bounds.append((begin, width))
        begin += width
    return bounds


class LocalTable(NamedTuple):
    """Shard on this rank: a table of a group, with some ids and columns."""

    place: Place
    group: TableGroup
    table: int
    shard: TableShard


class _Tile(NamedTuple):
    first_row: int
    rows: int
    first_column: int
    columns: int
    rank: int


def _sharded(
    tiles: list[_Tile],
    local: dict[_Tile, Tensor],
    *,
    dtype: torch.dtype,
    process_group: dist.ProcessGroup,
    device: torch.device,
) -> TableEntry:
    filled = [tile for tile in tiles if tile.rows > 0]
    if not filled:  # a ShardedTensor has shards of all columns, even without rows
        filled = list({tile.first_column: tile for tile in tiles}.values())

    def metadata(tile: _Tile) -> ShardMetadata:
        return ShardMetadata(
            shard_offsets=[tile.first_row, tile.first_column],
            shard_sizes=[tile.rows, tile.columns],
            placement=placement_of(tile.rank, device),
        )

    rows = max((tile.first_row + tile.rows for tile in tiles), default=0)
    columns = max((tile.first_column + tile.columns for tile in tiles), default=0)
    return TableEntry.of(
        [LocalShard(local[tile], metadata(tile)) for tile in filled if tile in local],
        ShardedTensorMetadata(
            [metadata(tile) for tile in filled],
            torch.Size([rows, columns]),
            TensorProperties(dtype=dtype),
        ),
        process_group,
    )


def save_table(
    shape: TableShape,
    local: list[tuple[LocalTable, RowBatch, CountedIds | None]],
    sizes: dict[Place, tuple[int, int]],
    layout: Layout,
    *,
    process_group: dist.ProcessGroup,
    device: torch.device,
) -> dict[str, TableEntry | Tensor]:
    """Return the entries of a table.

    Args:
        local: the shards on this rank, with their content and counted ids.
        sizes: of all shards: ids, and counted ids.
    """
    shared: dict[str, Any] = {"process_group": process_group, "device": device}
    first_row = _first_rows(shape, sizes, 0)

    def by_rows(width: int, begin: int, place: Place) -> _Tile:
        return _Tile(first_row[place.part], sizes[place][0], begin, width, place.rank)

    first_shards = [place for place in shape.places if place.column_shard == 0]
    entries: dict[str, TableEntry | Tensor] = {"layout": layout.tensor()}

    def add(
        name: str, places: list[Place], tile: Any, values: dict[Place, Tensor], dtype: torch.dtype
    ) -> None:
        tiles = {place: tile(place) for place in places}
        here = {tiles[place]: value for place, value in values.items() if place in tiles}
        entries[name] = _sharded(list(tiles.values()), here, dtype=dtype, **shared)

    contents = {of.place: content for of, content, _ in local}
    add(
        "weight",
        shape.places,
        lambda place: by_rows(place.columns, place.first_column, place),
        {place: content.rows for place, content in contents.items()},
        shape.dtype,
    )
    add(
        "weight_id",
        shape.places,
        lambda place: by_rows(1, place.column_shard, place),
        {place: content.ids[:, None] for place, content in contents.items()},
        torch.int64,
    )
    add(
        "bucket",
        first_shards,
        lambda place: _Tile(place.part, 1, 0, 1, place.rank),
        {place: torch.tensor([[c.ids.numel()]], device=device) for place, c in contents.items()},
        torch.int64,
    )
    words = len(shape.scores)
    if words > 0:
        add(
            "metadata",
            shape.places,
            lambda place: by_rows(words, place.column_shard * words, place),
            {
                place: torch.stack([content.scores[word] for word in shape.scores], 1)
                for place, content in contents.items()
            },
            torch.int64,
        )
    for tensor in shape.optimizer.state:
        bounds = state_bounds(tensor, shape.places)
        add(
            state_key(tensor.name),
            shape.places,
            lambda place, bounds=bounds: by_rows(
                bounds[place.column_shard][1], bounds[place.column_shard][0], place
            ),
            {place: content.state[tensor.name] for place, content in contents.items()},
            tensor.dtype,
        )
    if shape.counted:
        first_count = _first_rows(shape, sizes, 1)
        counted_ids = {of.place: counted for of, _, counted in local if counted is not None}
        for name, field in (("count_id", "ids"), ("count", "counts")):
            add(
                name,
                shape.places,
                lambda place: _Tile(
                    first_count[place.part], sizes[place][1], place.column_shard, 1, place.rank
                ),
                {place: getattr(counted, field)[:, None] for place, counted in counted_ids.items()},
                torch.int64,
            )
    return entries


def _first_rows(
    shape: TableShape, sizes: dict[Place, tuple[int, int]], which: int
) -> dict[int, int]:
    """Return the first row of each part; all column shards must have the same ids.

    Raises:
        RuntimeError: column shards have different numbers of ids.
    """
    first: dict[int, int] = {}
    begin = 0
    for place in shape.places:
        if place.column_shard == 0:
            first[place.part] = begin
            begin += sizes[place][which]
    for place in shape.places:
        (same,) = (p for p in shape.places if p.column_shard == 0 and p.part == place.part)
        if sizes[place] != sizes[same]:
            raise RuntimeError(
                f"table {shape.name!r}: its column shards on ranks {same.rank} and {place.rank} "
                f"have {sizes[same][0]} and {sizes[place][0]} ids: evictions have made them "
                "differ; shard a table that evicts by rows"
            )
    return first


__all__ = [
    "FORMAT_VERSION",
    "Layout",
    "LocalTable",
    "TableShape",
    "save_table",
    "state_bounds",
    "state_key",
]
