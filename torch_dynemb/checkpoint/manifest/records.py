"""The manifest: which files a checkpoint has, and what they hold.

It is written last, so a folder without one is no checkpoint. Its own checksum is in it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_dynemb.checkpoint.entries import FORMAT, PACKED, VERSION
from torch_dynemb.checkpoint.files.checksummed_files import FileSums, sums_of_bytes
from torch_dynemb.table.shards import IdSlots, TableShard


@dataclass(frozen=True)
class SavedFile:
    """A file of a checkpoint.

    Attributes:
        path: within the checkpoint.
        rows: of its tensors, where all have as many.
        bytes, block_bytes, crc32c: see :class:`FileSums`.
    """

    path: str
    rows: int
    bytes: int
    block_bytes: int
    crc32c: list[int]

    @property
    def sums(self) -> FileSums:
        """What the file should be."""
        return FileSums(self.bytes, self.block_bytes, tuple(self.crc32c))


@dataclass(frozen=True)
class SavedPart:
    """A part of a table: what one rank had of it.

    Attributes:
        rank: that saved it.
        first_column, columns: which columns of the table it has.
        slots_begin, slots_end, slots: which ids; see :class:`IdSlots`.
        ids: how many it has.
        ids_crc32c: of all of them, in their order; 0 where columns are not split.
        group: number of its group in the manifest; NO_GROUP: it has none, and its files say nothing
            of where ids and rows stood, so that only ids and values are loaded.
        number: of the table in that group.
        counters: its row of ``tables``, int64 [16]: how often what has happened.
        optimizer_steps: updates that its optimizer has made.
        rows: files with its rows, one after another; none: a batch of changes has them, with the
            counts and the sketch.
        counts: file with the ids that wait for admission, and their counts: that of the first
            columns; those of other columns have where these ids stand in their own index.
        counted: how many there are.
        sketch: file with its counting sketch, which parts may share.
        sketch_width: cells of a row of the sketch.
        removed_ids: of a batch, how many ids are no more.
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
        """Which ids it has."""
        return IdSlots(self.slots_begin, self.slots_end, self.slots)

    def shard_of(self, name: str, embedding_dim: int) -> TableShard:
        """Which ids and columns it has.

        Args:
            name, embedding_dim: of the whole table.
        """
        columns = range(self.first_column, self.first_column + self.columns)
        return TableShard(name, embedding_dim, columns, self.id_slots)

    @property
    def files(self) -> list[SavedFile]:
        """All files of the part."""
        others = (self.counts, self.sketch)
        return [*self.rows, *(file for file in others if file is not None)]


@dataclass(frozen=True)
class SavedTable:
    """A table.

    Attributes:
        embedding_dim, dtype: of its rows; the dtype as ``"float32"``, or ``entries.PACKED``.
        seed: from which initial values are drawn.
        optimizer: its name and state tensors, as ``OptimizerConfig.description`` gives them; None:
            the table was not trained.
        hyper: hyper-parameters of the optimizer when it was saved.
        padding_idx: the id that has no row.
        scores: names of what is kept of an id.
        policy: what ``Policy.description`` gives.
        step, now: clock of its group: training steps, and seconds of the lookups that follow.
        parts: what ranks had of it, by first column, then by ids.
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
        """Whether its float32 columns are bits of something else, such as rows of 8 bits."""
        return self.dtype == PACKED

    @property
    def column_dtype(self) -> torch.dtype:
        """Of the tensors in files that have its rows."""
        dtype: torch.dtype = torch.float32 if self.packed else getattr(torch, self.dtype)
        return dtype

    @property
    def first_parts(self) -> list[SavedPart]:
        """The parts that have the first column: each id is in one of them."""
        return [part for part in self.parts if part.first_column == 0]

    @property
    def ids(self) -> int:
        """How many ids the table has."""
        return sum(part.ids for part in self.first_parts)


@dataclass(frozen=True)
class SavedGroup:
    """Tables that were one group on a rank.

    Attributes:
        rank: that saved it.
        tables: names of its tables that were saved.
        score_words: what the group kept of ids, in order.
        file: with the state of the group that is not portable.
        stored: numbers in the group of the tables whose rows lay in a store, beside those of the
            other tables of their dim.
    """

    rank: int
    tables: list[str]
    score_words: list[str]
    file: SavedFile
    stored: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class SavedEntry:
    """An entry of the rest of a model: a tensor, or a piece of one.

    Attributes:
        file: its number among the files of the rest.
        offsets, sizes: where it lies in the tensor; empty: it is the whole tensor.
    """

    file: int
    tensor: str
    offsets: list[int]
    sizes: list[int]


@dataclass(frozen=True)
class SavedRest:
    """Tensors apart from the tables: the dense part of a model, or what a program gave.

    Attributes:
        files: of all ranks.
        entries: pieces by name of the tensor.
        values: what else there is, as JSON.
    """

    files: list[SavedFile] = field(default_factory=list)
    entries: dict[str, list[SavedEntry]] = field(default_factory=dict)
    values: Any = None


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        uuid: of the checkpoint: no two have the same.
        kind: ``"full"``, or ``"delta"``: an increment, a log of one commit: what has changed in the
            tables since its parent, beside everything else as it is.
        parent: uuid of the checkpoint that an increment goes on from; None for a full one.
        ranks: that saved it.
        tables: by name; those of an increment are in its batches.
        groups: of all ranks.
        dense: the rest of the model.
        state: what the program gave to save with it.
        changes: batches of an increment, by rank.
    """

    uuid: str
    kind: str
    parent: str | None
    ranks: int
    tables: dict[str, SavedTable]
    groups: list[SavedGroup]
    dense: SavedRest
    state: SavedRest
    changes: list[SavedFile] = field(default_factory=list)

    def files(self) -> list[SavedFile]:
        """All files but the manifest, each once."""
        found = [file for t in self.tables.values() for part in t.parts for file in part.files]
        found += [group.file for group in self.groups]
        found += [*self.changes, *self.dense.files, *self.state.files]
        return list({file.path: file for file in found}.values())

    def text(self) -> bytes:
        """What its file holds."""
        content = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return canonical({**content, "crc32c": sums_of_bytes(canonical(content))})


def canonical(content: Mapping[str, Any]) -> bytes:
    """The one text of some JSON content, which is summed."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


__all__ = [
    "Manifest",
    "SavedEntry",
    "SavedFile",
    "SavedGroup",
    "SavedPart",
    "SavedRest",
    "SavedTable",
    "canonical",
]
