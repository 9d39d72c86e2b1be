"""Saves a model as a checkpoint."""

from __future__ import annotations

import os
import uuid as uuids
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import described, flag
from torch_dynemb.checkpoint.entries import DELTA, DENSE, FULL, MANIFEST, NO_GROUP, STATE
from torch_dynemb.checkpoint.files.bounded_json import check_values
from torch_dynemb.checkpoint.files.checksummed_files import ChecksummedWriter, space_errors
from torch_dynemb.checkpoint.files.disk import Disk
from torch_dynemb.checkpoint.manifest.places import (
    check_replaceable,
    check_unclaimed,
    checked_path,
    claimed,
    put_in_place,
    unfinished,
)
from torch_dynemb.checkpoint.manifest.records import (
    Manifest,
    SavedEntry,
    SavedFile,
    SavedGroup,
    SavedPart,
    SavedRest,
    SavedTable,
)
from torch_dynemb.checkpoint.manifest.whole_tables import check_same_ids, check_whole, together
from torch_dynemb.checkpoint.parts import TablePart, end_steps, groups_of, parts_of
from torch_dynemb.checkpoint.plain_torch import plain_torch
from torch_dynemb.checkpoint.progress import progress_bar
from torch_dynemb.checkpoint.saving.described import described_table
from torch_dynemb.checkpoint.saving.handle import SaveHandle, check_none_running
from torch_dynemb.checkpoint.saving.held import hold_rows, release_rows
from torch_dynemb.checkpoint.saving.increments import (
    Increment,
    increment_of,
    parent_of,
    write_changes,
)
from torch_dynemb.checkpoint.saving.rest import (
    RestSource,
    dense_source,
    dense_state,
    state_source,
    write_rest,
)
from torch_dynemb.checkpoint.saving.source import GroupSource, source_of, write_initial_rows
from torch_dynemb.checkpoint.saving.staging import staged
from torch_dynemb.checkpoint.saving.table_files import Folder, SourcePart, write_group
from torch_dynemb.checkpoint.threads import one_thread
from torch_dynemb.checkpoint.together import Ranks, background_ranks, ranks_of
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.storage.tiers.ssd import SSDTiers
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.undisturbed import Undisturbed

_DISK = Disk()
# What writing takes besides: some pieces of 8 MiB, and by row its id, slot, owner and number; of
# rows in a store the generation too, and where each lies.
_BUFFER_BYTES = 32 << 20
_BYTES_OF_ROW_ORDER = 17
_BYTES_OF_STORED_ROW = _BYTES_OF_ROW_ORDER + 4 + 8


class ModelSource(NamedTuple):
    """What a rank saves.

    Attributes:
        groups: of its tables.
        parts: of each group.
        rest: the dense part, and what the program gave.
        increment: the tables' changes, in the place of their groups; None: a whole checkpoint.
    """

    groups: list[GroupSource]
    parts: list[list[SourcePart]]
    rest: tuple[RestSource, RestSource]
    increment: Increment | None = None


class _Written(NamedTuple):
    """What a rank has written."""

    groups: list[SavedGroup]
    tables: list[tuple[str, SavedTable]]
    changes: list[SavedFile]
    rest: list[tuple[SavedFile | None, dict[str, list[SavedEntry]], Any]]


@plain_torch()
def save(
    path: str | PathLike[str],
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    asynchronous: bool = False,
    since: str | PathLike[str] | None = None,
    state: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> SaveHandle:
    """Saves a model with its tables between two training steps; all ranks call it together.

    Ids, rows, optimizer state and its steps, scores, counts of admission, clocks, and the rest of
    the model. The checkpoint is a folder, which :func:`load` reads on any number of ranks. It is
    there as a whole or not at all: who dies on the way leaves what was there before.

    Args:
        path: of the checkpoint; one that is there is replaced when the new one is whole. Ranks on
            several machines give a path of a file system that they share.
        model: any module with tables of this library; sharded ones too.
        process_group: of the ranks that save together; default: all.
        asynchronous: write in a thread while training goes on. Rows on a GPU are copied into
            memory of the CPU. Rows in that memory are not: an update of a row that has not been
            written copies it first, and where a quarter of the rows of a slab or 1 GiB of them have
            been copied, training waits. Rows on disks (:class:`SSDStore`) are not copied, either:
            those of the cache are written to the disk first, and what is there stays until it has
            been read, so that the disk has to have room for what training writes meanwhile.
        since: path of the checkpoint that was saved last, or wholly loaded: an increment is saved,
            which has only the ids that have changed or gone since then, with their rows, state and
            scores; the rest of the model is saved as a whole. It takes the memory of
            :func:`record_changes`, which must have been called before that checkpoint.
            :func:`merge` makes a checkpoint of one and its increments. Default: everything.
        state: what else the program needs to go on: nested dicts, lists and tuples of tensors,
            numbers and texts; :func:`load` gives it back, its tensors on the CPU. That of the first
            rank is saved.
        progress: show a progress bar; default: where the standard error is a terminal.

    Returns:
        A handle with ``wait()`` and ``done()``; without ``asynchronous``, it is done.

    Raises:
        TypeError, ValueError: a wrong argument, tables that do not go together, or an entry that
            cannot be saved without pickling it.
        FileExistsError: ``path`` is there and no checkpoint. Files of other programs in a
            checkpoint are kept: they move into the one that replaces it.
        FileNotFoundError: ``since`` is no checkpoint.
        InUseError: another process saves to ``path``, another save goes on in the background, or
            another thread trains or changes the model.
        NewBaseNeededError: it is not known what has changed since ``since``.
        HostMemoryError: memory is short for the copy.
        DiskFullError: the disk is full.
        BackgroundError: the asynchronous save before has failed, and nothing has raised that yet.
        RuntimeError: gradients are pending for an optimizer's ``step()``, or ``asynchronous`` is
            asked for where rows lie in an :class:`ExternalStore`.
        OSError: the disk fails. In all cases all ranks raise, and what was at ``path`` before is as
            it was. With ``asynchronous``, what the thread raises is raised by ``wait()``, or by the
            next ``optimizer.step()`` as a :class:`~torch_dynemb.errors.BackgroundError`.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1))
        >>> bag(torch.tensor([[1, 2], [3, 1]])).sum().backward()
        >>> bag.optimizer.step()
        >>> folder = tempfile.TemporaryDirectory()
        >>> handle = td.checkpoint.save(folder.name + "/last", bag, state={"epoch": 1})
        >>> other = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1))
        >>> td.checkpoint.load(folder.name + "/last", other).state
        {'epoch': 1}
        >>> other.group.size(0)
        3
        >>> folder.cleanup()
    """
    ranks = ranks_of(process_group)
    disk = _DISK

    def prepare() -> tuple[Path, list[TablePart], str | None]:
        target = checked_path("checkpoint.save", path)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"checkpoint.save: model is {described(model)}, expected a torch.nn.Module"
            )
        flag("checkpoint.save: asynchronous", asynchronous)
        check_none_running()
        check_unclaimed(target)
        check_replaceable(target)
        parts = parts_of(model)
        for group in groups_of(parts):
            check_saveable("checkpoint.save", group)
            if asynchronous and not isinstance(group.tables.tiers, SSDTiers):
                group.tables.check_in_memory(
                    "checkpoint.save: asynchronous=True",
                    "an ExternalStore cannot keep them as they are while training goes on, so save "
                    "without asynchronous, which streams them",
                )
        if since is None:
            return target, parts, None
        return target, parts, parent_of(since, target, groups_of(parts), asynchronous)

    target, parts, parent = ranks.run(prepare)
    ranks.agree("checkpoint.save", path=os.fspath(path), asynchronous=asynchronous, parent=parent)
    told = ranks.gather(([(ranks.rank, part.shard) for part in parts], uuids.uuid4().hex))
    check_whole([place for places, _ in told for place in places])
    uuid = told[0][1]
    reading = ranks.run(lambda: begin_reading("checkpoint.save", parts, model))

    def read() -> ModelSource:
        with reading:
            whole = parts if parent is None else ()
            return source_of_model(whole, model, state, ranks, asynchronous)

    source = ranks.run(read)
    increment = increment_of(ranks, parts, parent)
    handle = SaveHandle(target)
    if not asynchronous:
        if parent is not None:
            source = source._replace(increment=increment)
        write_checkpoint(ranks, disk, target, uuid, source, progress, reading)
        increment.taken(uuid)
        if reading.is_disturbed():  # since it was checked last
            increment.lost()
        return handle
    copies = staged(ranks, source, _BUFFER_BYTES + _bytes_of_orders(source))

    def hold() -> None:
        with reading:
            increment.taken(uuid)
            hold_rows(copies.groups)

    try:
        try:
            ranks.run(hold)
        except BaseException:
            increment.lost()
            raise
        behind = background_ranks(ranks)
        handle._run(
            lambda: _write_copies(behind, disk, target, uuid, copies, progress), groups_of(parts)
        )
    except BaseException:
        release_rows(copies.groups)
        raise
    return handle


def check_saveable(call: str, group: TableGroup) -> None:
    """Raises RuntimeError for tables in the midst of a step, or of another process.

    Args:
        call: what the error begins with.
        group: the tables.
    """
    group.tables.check_own()
    if group.rows.pending and int(PendingGradients.of(group.rows.pending).counts[:, 0].sum()) > 0:
        raise RuntimeError(
            f"{call}: tables {group.names} have gradients pending, which are not saved: "
            "call optimizer.step(), or zero_grad(), before"
        )


def source_of_model(
    parts: Sequence[TablePart],
    model: nn.Module,
    state: Mapping[str, Any] | None,
    ranks: Ranks,
    to_be_copied: bool = False,
) -> ModelSource:
    """What a rank saves of a model, after steps that have begun.

    Args:
        parts: the tables that are saved.
        model: whose dense part is.
        state: what the program gives.
        ranks: that save together.
        to_be_copied: see :func:`source_of`.

    Raises:
        TypeError: an entry cannot be saved.
    """
    groups = groups_of(parts)
    end_steps(parts)
    sources = [source_of(group.tables, to_be_copied=to_be_copied) for group in groups]
    of_groups = [
        [
            SourcePart(
                part.name,
                part.table,
                part.columns,
                part.ids,
                part.embedding_dim,
                part.dtype,
                part.optimizer is not None,
            )
            for part in parts
            if part.group is group
        ]
        for group in groups
    ]
    return ModelSource(
        sources,
        of_groups,
        (
            dense_source(DENSE, model, ranks.rank),
            state_source(STATE, state, ranks.rank),
        ),
    )


def begin_reading(call: str, parts: Sequence[TablePart], model: nn.Module) -> Undisturbed:
    """Guard what is read from now on; steps that have begun end before.

    Args:
        call: begins errors.
        parts: of the tables that are read.
        model: with the dense state that is read with them.

    Raises:
        InUseError: another thread is changing the tables now.
    """
    end_steps(parts)
    dense = [value for value in dense_state(model).values() if type(value) is torch.Tensor]
    return Undisturbed(call, groups_of(parts), dense)


def _bytes_of_orders(source: ModelSource) -> int:
    return sum(
        slab.used * (_BYTES_OF_ROW_ORDER if slab.reader is None else _BYTES_OF_STORED_ROW)
        + (0 if slab.copy_on_write is None else slab.copy_on_write.bytes_of(number))
        for group in source.groups
        for number, slab in enumerate(group.slabs)
    )


# -- writing -------------------------------------------------------------------------------------


@plain_torch()
def write_checkpoint(
    ranks: Ranks,
    disk: Disk,
    target: Path,
    uuid: str,
    source: ModelSource,
    progress: bool | None,
    reading: AbstractContextManager[object] | None = None,
) -> None:
    """Writes all files on all ranks, then the manifest on the first.

    Args:
        ranks: that save together.
        disk: the file system.
        target: path of the checkpoint.
        uuid: of the checkpoint.
        source: what this rank saves.
        progress: show a progress bar.
        reading: a context that raises at its end unless what was read inside it is whole.

    Raises:
        OSError: the disk is full, or fails.
        RuntimeError: what ``reading`` raises.
    """
    folder = unfinished(target, uuid)
    parent = None if source.increment is None else source.increment.parent

    def write() -> _Written:
        with reading or nullcontext():
            return _write_files(ranks, disk, folder, source, progress)

    with ExitStack() as claim:

        def begin() -> None:
            with space_errors(folder):
                claim.enter_context(claimed(disk, target, uuid))

        try:
            ranks.on_first(begin)
            written = ranks.run(write)
            of_ranks = ranks.gather(written)

            def finish() -> None:
                manifest = _manifest_of(uuid, parent, of_ranks)
                finish_folder(disk, folder, target, uuid, manifest)
                claim.close()  # its file is gone when other ranks go on

            ranks.on_first(finish)
        except BaseException:
            disk.remove(folder)  # also where ranks do not write to one disk, as they should
            raise


def _write_copies(
    ranks: Ranks, disk: Disk, target: Path, uuid: str, source: ModelSource, progress: bool | None
) -> None:
    """Like :func:`write_checkpoint`, of rows that are held until then."""
    try:
        write_checkpoint(ranks, disk, target, uuid, source, progress)
    finally:
        release_rows(source.groups)


def _write_files(
    ranks: Ranks, disk: Disk, folder: Path, source: ModelSource, progress: bool | None
) -> _Written:
    total = sum(_bytes_of(group) for group in source.groups)
    total += sum(p.values.numel() * p.values.element_size() for r in source.rest for p in r.pieces)
    groups: list[SavedGroup] = []
    tables: list[tuple[str, SavedTable]] = []
    changes: list[SavedFile] = []
    name = folder.name.rpartition(".tmp-")[0]
    with (
        one_thread(),
        progress_bar(f"saving {name}", total, progress) as bar,
        Folder(disk, folder, ranks.rank, ranks.size, bar.update) as to,
    ):
        for number, (group, parts) in enumerate(zip(source.groups, source.parts, strict=True)):
            write_initial_rows(group)
            saved, of_parts = write_group(to, group, parts, number)
            release_rows([group])
            groups.append(saved)
            tables += [
                (part.name, _table_of(group, part, saved_part))
                for part, saved_part in zip(parts, of_parts, strict=True)
            ]
        if source.increment is not None:
            file, tables = write_changes(to, source.increment)
            changes.append(file)
        rest = [(*write_rest(to, of_rest), of_rest.values) for of_rest in source.rest]
    return _Written(groups, tables, changes, rest)


def _bytes_of(group: GroupSource) -> int:
    rows = sum((8 + slab.row_bytes) * slab.used for slab in group.slabs)
    return rows + sum(of.numel() * of.element_size() for of in group.entries.values())


def _table_of(group: GroupSource, part: SourcePart, saved: SavedPart) -> SavedTable:
    return described_table(
        group.config,
        part.number,
        saved,
        embedding_dim=part.embedding_dim,
        dtype=part.dtype,
        optimized=part.optimized,
        seeds=group.entries["seeds"],
        hyper=group.hyper,
        clock=group.entries["clock"],
        now=group.now,
    )


def _manifest_of(uuid: str, parent: str | None, written: Sequence[_Written]) -> Manifest:
    of_ranks: list[tuple[str, SavedTable]] = []
    groups: list[SavedGroup] = []
    for of_rank in written:
        for name, table in of_rank.tables:
            [part] = table.parts
            if part.group != NO_GROUP:
                part = replace(part, group=part.group + len(groups))
            of_ranks.append((name, replace(table, parts=[part])))
        groups += of_rank.groups
    tables = together(of_ranks)
    for name, table in tables.items():
        check_same_ids(name, table)
    dense, state = (_rest_of([of_rank.rest[k] for of_rank in written]) for k in range(2))
    kind, changes = (FULL if parent is None else DELTA), [f for of in written for f in of.changes]
    own = tables if parent is None else {}  # those of an increment are in its batches
    return Manifest(uuid, kind, parent, len(written), own, groups, dense, state, changes)


def _rest_of(
    written: Sequence[tuple[SavedFile | None, dict[str, list[SavedEntry]], Any]],
) -> SavedRest:
    rest = SavedRest(values=written[0][2])
    for file, entries, _ in written:
        if file is None:
            continue
        for name, pieces in entries.items():
            here = [replace(piece, file=len(rest.files)) for piece in pieces]
            rest.entries.setdefault(name, []).extend(here)
        rest.files.append(file)
    return rest


def finish_folder(disk: Disk, folder: Path, target: Path, uuid: str, manifest: Manifest) -> None:
    """What makes a folder of files a checkpoint."""
    for file in manifest.files():
        path = folder / file.path
        size = path.stat().st_size if path.exists() else 0
        if size != file.bytes:
            raise OSError(
                f"checkpoint.save: {file.path} has {size} bytes, expected {file.bytes}: all ranks "
                f"must see the same {folder.parent}"
            )
    for inner in sorted({(folder / file.path).parent for file in manifest.files()}):
        with space_errors(inner):
            disk.sync_folder(inner)
    text = manifest.text()
    check_values(text)
    writer = ChecksummedWriter(disk, folder / MANIFEST)
    try:
        writer.write(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        writer.finish()
    finally:
        writer.close()
    with space_errors(folder):
        disk.sync_folder(folder)
        put_in_place(disk, folder, target, uuid)


__all__ = [
    "ModelSource",
    "begin_reading",
    "check_saveable",
    "finish_folder",
    "save",
    "source_of_model",
    "write_checkpoint",
]
