"""Records of a manifest: the files of a checkpoint and their content.

The manifest is written last, so a folder without one is not a checkpoint. It contains its own
checksum.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_dynemb.checkpoint.entries import FORMAT, VERSION
from torch_dynemb.files.checksummed_files import FileChecksums, checksum_of_bytes
from torch_dynemb.optim.base import StateTensor
from torch_dynemb.parts.table_parts import PACKED
from torch_dynemb.table.shards import IdSlots, TableShard


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


@dataclass(frozen=True)
class SavedGroup:
    """Tables that were one group on a rank.

    Attributes:
        rank: rank that saved it.
        tables: names of its saved tables.
        score_words: scores that the group kept for ids, in order.
        file: file with the part of the group's state that is not portable.
        stored: numbers of the tables with rows in a store. Tables of the same dim and dtype that
            are not listed had rows in memory.
    """

    rank: int
    tables: list[str]
    score_words: list[str]
    file: SavedFile
    stored: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SavedEntry:
    """An entry of the dense state: a tensor, or a piece of one.

    Attributes:
        file: its number among the files of the dense state.
        tensor: name of the tensor in that file.
        offsets, sizes: place of the piece, and sizes of the whole tensor; empty for a whole tensor.
    """

    file: int
    tensor: str
    offsets: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class SavedDense:
    """Tensors outside tables: the dense state of a model, or what a program gave as ``state=``.

    Attributes:
        files: files of all ranks.
        entries: pieces by name of the tensor.
        values: values other than tensors, as JSON.
    """

    files: list[SavedFile] = field(default_factory=list)
    entries: dict[str, list[SavedEntry]] = field(default_factory=dict)
    values: Any = None


@dataclass(frozen=True)
class Manifest:
    """Content of a checkpoint.

    Attributes:
        uuid: unique id of the checkpoint.
        kind: ``"full"``, or ``"delta"``: an increment, which has the changes of tables since its
            parent and the whole dense state.
        parent: uuid of the checkpoint that an increment continues; None for a full one.
        ranks: number of ranks that saved it.
        tables: tables by name; those of an increment are in its batches.
        groups: groups of all ranks.
        dense: the dense state of the model.
        state: what the program gave as ``state=``.
        changes: batches of an increment, by rank.
    """

    uuid: str
    kind: str
    parent: str | None
    ranks: int
    tables: dict[str, SavedTable]
    groups: list[SavedGroup]
    dense: SavedDense
    state: SavedDense
    changes: list[SavedFile] = field(default_factory=list)

    def files(self) -> list[SavedFile]:
        """List all files but the manifest, each once."""
        found = [file for t in self.tables.values() for part in t.parts for file in part.files]
        found += [group.file for group in self.groups]
        found += [*self.changes, *self.dense.files, *self.state.files]
        return list({file.path: file for file in found}.values())

    def text(self) -> bytes:
        """Return the bytes of the manifest file."""
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return canonical({**content, "crc32c": checksum_of_bytes(canonical(content))})


def canonical(content: Mapping[str, Any]) -> bytes:
    """Return the unique text of JSON content, over which its checksum is computed."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


__all__ = [
    "Manifest",
    "SavedDense",
    "SavedEntry",
    "SavedFile",
    "SavedGroup",
    "SavedPart",
    "SavedTable",
    "canonical",
]
