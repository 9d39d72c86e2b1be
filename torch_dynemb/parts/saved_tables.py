"""Descriptions of tables and their parts, in manifests and batches of changes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.files.checksummed_files import FileChecksums
from torch_dynemb.ops.columns import Clock
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.parts.table_parts import PACKED
from torch_dynemb.policy.layout import score_words_of
from torch_dynemb.table.group_config import GroupConfig
from torch_dynemb.table.shards import IdSlots, TableShard

NO_GROUP = -1  # group number of a part without saved places of ids and rows


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint.

    Attributes:
        path: path within the checkpoint.
        rows: rows of its tensors, if all have the same number.
        bytes, block_bytes, crc32c: see :class:`FileChecksums`.
    """

    path: str
    rows: int
    bytes: int
    block_bytes: int
    crc32c: list[int]

    @property
    def sums(self) -> FileChecksums:
        """Expected size and checksums of the file."""
        return FileChecksums(self.bytes, self.block_bytes, tuple(self.crc32c))


@dataclass(frozen=True)
class SavedPart:
    """A part of a table: what one rank holds of it.

    Attributes:
        rank: rank that saved it.
        first_column, columns: first column in the table, and number of columns.
        slots_begin, slots_end, slots: ids that it owns; see :class:`IdSlots`.
        ids: number of ids.
        ids_crc32c: checksum of all ids, in their order; 0 if columns are not split.
        group: number of its group in the manifest. NO_GROUP: places of ids and rows are not saved,
            and a load takes only ids and values.
        number: number of the table in that group.
        counters: its row of ``tables``, int64 [16]: event counters.
        optimizer_steps: number of updates of its optimizer.
        rows: files with its rows, one after another; empty if a batch of changes has the rows,
            counts and sketch.
        counts: file with the ids that wait for admission, and their counts. Only the part with the
            first columns has it. Parts with other columns keep the places of these ids in their own
            index.
        counted: number of ids that wait.
        sketch: file with its counting sketch, which parts may share.
        sketch_width: cells per row of the sketch.
        removed_ids: number of removed ids, in a batch of changes.
    """

    rank: int
    first_column: int
    columns: int
    slots_begin: int
    slots_end: int
    slots: int
    ids: int
    ids_crc32c: int
    group: int
    number: int
    counters: list[int]
    optimizer_steps: int
    rows: list[SavedFile]
    counts: SavedFile | None = None
    counted: int = 0
    sketch: SavedFile | None = None
    sketch_width: int = 0
    removed_ids: int = 0

    @property
    def id_slots(self) -> IdSlots:
        """Ids that the part owns."""
        return IdSlots(self.slots_begin, self.slots_end, self.slots)

    @property
    def range_of_columns(self) -> range:
        """Columns of the table that the part has."""
        return range(self.first_column, self.first_column + self.columns)

    def shard_of(self, name: str, embedding_dim: int) -> TableShard:
        """Return the ids and columns of the part.

        Args:
            name, embedding_dim: of the whole table.
        """
        return TableShard(name, embedding_dim, self.range_of_columns, self.id_slots)

    @property
    def files(self) -> list[SavedFile]:
        """All files of the part."""
        others = (self.counts, self.sketch)
        return [*self.rows, *(file for file in others if file is not None)]


@dataclass(frozen=True)
class SavedTable:
    """A table.

    Attributes:
        embedding_dim, dtype: of its rows. The dtype is ``"float32"`` or similar, or
            ``table_parts.PACKED``.
        seed: seed of initial values.
        optimizer: name and state tensors, as ``OptimizerConfig.description`` returns them; None if
            the table was not trained.
        hyper: hyper-parameters of the optimizer at the time of the save.
        padding_idx: id without a row.
        scores: names of the scores that are kept for each id.
        policy: as ``Policy.description`` returns it.
        step, now: clock of its group: training steps, and seconds of the next lookups.
        parts: parts of the ranks, by first column, then by ids.
    """

    embedding_dim: int
    dtype: str
    seed: int
    optimizer: dict[str, Any] | None
    hyper: dict[str, Any]
    padding_idx: int | None
    scores: list[str]
    policy: dict[str, Any]
    step: int
    now: int
    parts: list[SavedPart]

    @property
    def packed(self) -> bool:
        """Whether its float32 columns are the bits of something else, such as 8-bit rows."""
        return self.dtype == PACKED

    @property
    def column_dtype(self) -> torch.dtype:
        """Dtype of tensors in files of rows."""
        dtype: torch.dtype = torch.float32 if self.packed else getattr(torch, self.dtype)
        return dtype

    @property
    def state_tensors(self) -> tuple[StateTensor, ...]:
        """Saved tensors of optimizer state."""
        described = () if self.optimizer is None else self.optimizer["state"]
        return tuple(
            StateTensor(name, per_row, getattr(torch, dtype)) for name, per_row, dtype in described
        )

    @property
    def first_parts(self) -> list[SavedPart]:
        """Parts with the first column: each id is in one of them."""
        return [part for part in self.parts if part.first_column == 0]

    @property
    def ids(self) -> int:
        """Number of ids in the table."""
        return sum(part.ids for part in self.first_parts)


def described_table(
    config: GroupConfig,
    number: int,
    part: SavedPart,
    *,
    embedding_dim: int,
    dtype: str,
    optimized: bool,
    seeds: Tensor,
    hyper: Tensor,
    clock: Tensor,
    now: int,
) -> SavedTable:
    """Describe a table with one part.

    Args:
        config: config of the group.
        number: number of the table in the group.
        part: description of the part.
        embedding_dim, dtype: of the whole table.
        optimized: whether to describe the optimizer.
        seeds, hyper, clock: of the group, see :class:`GroupSource`.
        now: seconds of the next lookups.
    """
    of_table = config.tables[number]
    optimizer = config.optimizer if optimized else None
    return SavedTable(
        embedding_dim=embedding_dim,
        dtype=dtype,
        seed=int(seeds[number]),
        optimizer=None if optimizer is None else optimizer.description(),
        hyper={} if optimizer is None else _hyper_of(config, hyper[number].tolist()),
        padding_idx=of_table.padding_idx,
        scores=list(score_words_of([of_table], config.memory_budget is not None)),
        policy=of_table.policy.description(),
        step=int(clock[Clock.STEP]),
        now=now,
        parts=[part],
    )


def _hyper_of(config: GroupConfig, row: list[float]) -> dict[str, Any]:
    """Return hyper-parameters by name, as lists of numbers; None for no limit."""
    assert config.optimizer is not None
    return {
        name: [row[column] if math.isfinite(row[column]) else None for column in columns]
        for name, columns in config.optimizer.hyper_columns.items()
    }


def table_of(table: dict[str, Any]) -> SavedTable:
    """Convert the JSON of a table. Values are not checked.

    Args:
        table: ``asdict`` of a table, as JSON has it.

    Raises:
        TypeError, KeyError, AttributeError: an entry is missing or wrong.
    """
    return SavedTable(**{**table, "parts": [_part_of(part) for part in table["parts"]]})


def _part_of(part: dict[str, Any]) -> SavedPart:
    files = {
        name: None if part.get(name) is None else SavedFile(**part[name])
        for name in ("counts", "sketch")
    }
    return SavedPart(**{**part, **files, "rows": [SavedFile(**file) for file in part["rows"]]})


__all__ = ["NO_GROUP", "SavedFile", "SavedPart", "SavedTable", "described_table", "table_of"]
