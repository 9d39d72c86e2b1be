"""Increments: saves of what has changed since another checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import NamedTuple

from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.changes.batch import Head, Pieces, batch_file, pieces_of_batch, rank_folder
from torch_dynemb.changes.changed_parts import (
    admission_records,
    changed_records,
    combine_columns,
    logged_part,
)
from torch_dynemb.changes.payloads import LoggedPart, of_tables
from torch_dynemb.checkpoint.manifest.file import read_manifest
from torch_dynemb.checkpoint.saving.table_files import Folder
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.errors import NewBaseNeededError
from torch_dynemb.files.locations import Location, checked_location
from torch_dynemb.parts.saved_tables import SavedFile, SavedTable
from torch_dynemb.parts.table_parts import TablePart, groups_of, parts_of
from torch_dynemb.table.change_reader import ChangeReader
from torch_dynemb.table.changes import (
    Changes,
    read_changes,
    reader_of,
    take_changes,
)
from torch_dynemb.table.changes import (
    record_changes as record_group_changes,
)
from torch_dynemb.table.content import score_names
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.row_access import materialize

_READER = "checkpoint"


def record_changes(model: nn.Module) -> None:
    """Record changes in the tables of a model, for saves with ``since=``.

    After the next :func:`torch_dynemb.checkpoint.save` or :func:`torch_dynemb.checkpoint.load`, a
    save with ``since=`` writes only what has changed. Recording takes one dirty byte per row and 16
    bytes per row for its owner, and 8 more for each score.

    Call it between two training steps. Compiled models are compiled again, and CUDA graphs must be
    captured again. A second call does nothing.

    Args:
        model: any module with tables of this library; also a sharded one, on all ranks.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: it has no tables.
        RuntimeError: rows lie in a store: use :func:`torch_dynemb.checkpoint.save_snapshot` there,
            which writes only changes; or this process is a fork of the one that created the tables.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> items = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
        >>> td.checkpoint.record_changes(items)
        >>> items(torch.arange(100)).sum().backward()
        >>> folder = tempfile.TemporaryDirectory()
        >>> base, delta, whole = (f"{folder.name}/{name}" for name in ("base", "delta", "whole"))
        >>> handle = td.checkpoint.save(base, items)
        >>> items(torch.tensor([7, 100])).sum().backward()
        >>> handle = td.checkpoint.save(delta, items, since=base)
        >>> td.checkpoint.open(delta).tables["embedding"].ids
        2
        >>> td.checkpoint.merge([base, delta], whole)
        >>> td.checkpoint.open(whole).tables["embedding"].ids
        101
        >>> folder.cleanup()
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"record_changes: model is {described(model)}, expected a torch.nn.Module")
    groups = groups_of(parts_of(model))
    if not groups:
        raise ValueError("record_changes: model has no tables of this library on this rank")
    for group in groups:
        keep_recording(group)


def records_increments(group: TableGroup) -> bool:
    """Return whether changes of a group are recorded for increments."""
    return _reader(group) is not None


def keep_recording(group: TableGroup) -> None:
    """Record changes of a group that has the content of another one.

    All of its ids count as changed: an increment needs a whole save, or a load, before it.
    """
    scored = bool(group.config.layout.score_words)
    record_group_changes(group.tables, _READER, scores=scored)


class Increment(NamedTuple):
    """Recorded changes in the tables of a rank.

    Attributes:
        parent: uuid of the checkpoint that it continues; None: everything is written.
        parts: parts of the tables.
        groups: groups with recorded changes.
        changes: changes of these groups since the parent.
    """

    parent: str | None
    parts: Sequence[TablePart]
    groups: list[TableGroup]
    changes: list[Changes]

    def taken(self, uuid: str) -> None:
        """Count later changes from the checkpoint that was written.

        Args:
            uuid: uuid of the checkpoint.
        """
        for group, changes in zip(self.groups, self.changes, strict=True):
            reader = _reader(group)
            assert reader is not None
            take_changes(group.tables, reader, changes, uuid)

    def lost(self) -> None:
        """Forget the checkpoint that changes are counted from, because some may be lost."""
        for group in self.groups:
            reader = _reader(group)
            assert reader is not None
            reader.since = None


def write_changes(
    folder: Folder, increment: Increment
) -> tuple[SavedFile, list[tuple[str, SavedTable]]]:
    """Write the batch of a rank. Return its file, and the tables that it describes.

    Args:
        folder: destination.
        increment: the changes.
    """
    assert increment.parent is not None
    tables: list[LoggedPart] = []
    records: list[Pieces] = []
    for number, part in enumerate(increment.parts):
        of_group = increment.changes[increment.groups.index(part.group)]
        changed = of_group.tables[part.table]
        tables.append(logged_part(part, folder.rank, number, changed, state=True))
        scores = score_names(part.group.tables, part.table)
        records += changed_records(part, number, changed, state=True, scores=scores)
        if part.first_column == 0:
            records += admission_records(part, number)
    step = max((group.steps for group in increment.groups), default=0)
    head = Head(folder.rank, folder.ranks, 0, increment.parent, 0, 1, step, 0, 0)
    pieces = pieces_of_batch(head, [of_tables(tables), *records])
    name = f"{rank_folder(folder.rank, folder.ranks)}/{batch_file(1)}"
    return folder.write_pieces(name, pieces, len(records)), [(*of,) for of in tables]


def _reader(group: TableGroup) -> ChangeReader | None:
    return reader_of(group.tables, _READER)


def parent_of(
    since: str | PathLike[str], target: Location, groups: Sequence[TableGroup], asynchronous: bool
) -> str:
    """Return the uuid of the checkpoint that an increment continues.

    Args:
        since: path of the checkpoint.
        target: path of the increment.
        groups: groups that are saved.
        asynchronous: argument of the save.

    Raises:
        TypeError: ``since`` is not a path.
        ValueError: it is the path of the increment, or the save is asynchronous.
        FileNotFoundError, DamagedFileError: it is not a checkpoint.
        NewBaseNeededError: the changes since then are unknown.
    """
    path = checked_location("checkpoint.save", since)
    if asynchronous:
        raise ValueError(
            "checkpoint.save: asynchronous=True with since= is not built: save an increment "
            "without asynchronous=True, or a whole checkpoint in the background"
        )
    if path == target:
        raise ValueError(
            f"checkpoint.save: since is {path}, which the increment would replace: give another "
            "path"
        )
    uuid = read_manifest(path).uuid
    for group in groups:
        reader = _reader(group)
        if reader is None:
            raise NewBaseNeededError(
                f"checkpoint.save: since is given, but changes of tables {group.names} are not "
                "recorded: call torch_dynemb.checkpoint.record_changes(model) before the save "
                "that the increment continues, and again after tables have been added, moved "
                "or given another optimizer",
                path=path,
                tables=group.names,
            )
        if reader.since != uuid:
            known = (
                "no checkpoint, because none was saved or fully loaded since then"
                if reader.since is None
                else f"the checkpoint with uuid {reader.since}"
            )
            raise NewBaseNeededError(
                f"checkpoint.save: since is {path}, with uuid {uuid}, but changes of tables "
                f"{group.names} are known since {known}: give the checkpoint that was saved or "
                "loaded last, or save without since",
                path=path,
                tables=group.names,
            )
    return uuid


def increment_of(ranks: Ranks, parts: Sequence[TablePart], parent: str | None) -> Increment:
    """Read the changes in the tables of a model. All ranks call it together.

    Args:
        ranks: ranks that save together.
        parts: tables of this rank.
        parent: uuid of the checkpoint that an increment continues; None for a whole checkpoint.
    """
    groups = [group for group in groups_of(parts) if _reader(group) is not None]

    def read() -> list[Changes]:
        for group in groups if parent is not None else ():
            materialize(group.tables)  # as a whole save does
        return [_read(group) for group in groups]

    changes = ranks.run(read)
    if parent is not None:
        combine_columns(ranks, parts, groups, changes)
    return Increment(parent, parts, groups, changes)


def _read(group: TableGroup) -> Changes:
    reader = _reader(group)
    assert reader is not None
    return read_changes(group.tables, reader)


def count_from(groups: Sequence[TableGroup], uuid: str | None) -> None:
    """Count changes from a load on.

    Args:
        groups: groups that were loaded.
        uuid: uuid of the checkpoint; None: the tables differ from it.
    """
    for group in groups:
        reader = _reader(group)
        if reader is not None:
            take_changes(group.tables, reader, read_changes(group.tables, reader), uuid)


__all__ = [
    "Increment",
    "count_from",
    "increment_of",
    "keep_recording",
    "parent_of",
    "record_changes",
    "records_increments",
    "write_changes",
]
