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

from torch_dynemb.checkpoint.file_names import FORMAT, VERSION
from torch_dynemb.files.checksummed_files import checksum_of_bytes
from torch_dynemb.parts.saved_tables import SavedFile, SavedTable


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
class InSeries:
    """A checkpoint that a later save with ``keep_last=`` removes.

    Attributes:
        name: name of its folder, beside that of the manifest.
        uuid: its uuid.
    """

    name: str
    uuid: str


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
        series: checkpoints that the model was saved as with ``keep_last=``, oldest first; some may
            be gone.
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
    series: list[InSeries] = field(default_factory=list)

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
    "InSeries",
    "Manifest",
    "SavedDense",
    "SavedEntry",
    "SavedGroup",
    "canonical",
]
