"""Saving of a model as a checkpoint."""

from __future__ import annotations

import uuid as uuids
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from os import PathLike
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from torch_dynemb.argument_checks import described, flag, integer
from torch_dynemb.checkpoint.file_names import DELTA, DENSE, FULL, STATE
from torch_dynemb.checkpoint.manifest.file import check_replaceable
from torch_dynemb.checkpoint.manifest.records import Manifest, SavedDense, SavedEntry, SavedGroup
from torch_dynemb.checkpoint.saving.dense_state import (
    DenseSource,
    dense_source,
    dense_state,
    state_source,
    write_dense,
)
from torch_dynemb.checkpoint.saving.handle import SaveHandle, check_none_running
from torch_dynemb.checkpoint.saving.increments import (
    Increment,
    increment_of,
    parent_of,
    write_changes,
)
from torch_dynemb.checkpoint.saving.keep_last import Series
from torch_dynemb.checkpoint.saving.staging import staged
from torch_dynemb.checkpoint.saving.table_files import Folder, SourcePart, write_group
from torch_dynemb.console.progress import progress_bar
from torch_dynemb.distributed.together import Ranks, background_ranks, ranks_of
from torch_dynemb.files.checksummed_files import space_errors
from torch_dynemb.files.commit import (
    abandon,
    check_unclaimed,
    claimed,
    commit,
    draft_of,
    new_files,
)
from torch_dynemb.files.direct_disk import WINDOW_BYTES, DirectDisk
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location, Url, checked_location
from torch_dynemb.files.uploads import disk_of
from torch_dynemb.ops.pending import PendingGradients
from torch_dynemb.parts.saved_tables import (
    NO_GROUP,
    SavedFile,
    SavedTable,
)
from torch_dynemb.parts.table_parts import TablePart, end_steps, groups_of, parts_of
from torch_dynemb.parts.whole_tables import check_same_ids, check_whole, together
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.process.torch_modes import one_thread, plain_torch
from torch_dynemb.rows.source import (
    GroupSource,
    pin_rows,
    source_of,
    unpin_rows,
    write_initial_rows,
)
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.sampling import list_again
from torch_dynemb.table.undisturbed import Undisturbed

_DISK = Disk()
# Memory for writing: some pieces of 8 MiB, and per row its id, slot, owner and number. Rows in a
# store also take their generation and their place.
_BUFFER_BYTES = 32 << 20
_WINDOWS_BYTES = 5 * WINDOW_BYTES  # past the page cache: of ids, weights, and some states
_BYTES_OF_ROW_ORDER = 17
_BYTES_OF_STORED_ROW = _BYTES_OF_ROW_ORDER + 4 + 8


class ModelSource(NamedTuple):
    """State that a rank saves.

    Attributes:
        groups: groups of its tables.
        parts: parts of each group.
        dense: the dense state, and what the program gave as ``state=``.
        increment: changes of the tables, in place of the groups; None for a whole checkpoint.
    """

    groups: list[GroupSource]
    parts: list[list[SourcePart]]
    dense: tuple[DenseSource, DenseSource]
    increment: Increment | None = None


class _Written(NamedTuple):
    """Files that a rank has written."""

    groups: list[SavedGroup]
    tables: list[tuple[str, SavedTable]]
    changes: list[SavedFile]
    dense: list[tuple[SavedFile | None, dict[str, list[SavedEntry]], Any]]


@plain_torch()
def save(
    path: str | PathLike[str],
    model: nn.Module,
    *,
    process_group: dist.ProcessGroup | None = None,
    asynchronous: bool = False,
    since: str | PathLike[str] | None = None,
    state: Mapping[str, Any] | None = None,
    keep_last: int | None = None,
    progress: bool | None = None,
) -> SaveHandle:
    """Save a model with its tables between two training steps. All ranks call it together.

    It saves ids, rows, optimizer state and steps, scores, admission counts, clocks, and the dense
    state. The checkpoint is a folder, which :func:`load` reads on any number of ranks. It appears
    as a whole or not at all: after a crash, the checkpoint from before is still there.

    Args:
        path: path of the checkpoint, or its URL, such as ``s3://bucket/last``. An existing one is
            replaced once the new one is whole. Ranks on several machines need a path on a shared
            file system, or a URL.
        model: any module with tables of this library; also a sharded one.
        process_group: ranks that save together; default: all.
        asynchronous: write in a thread while training goes on. Rows on a GPU, and those beneath its
            cache, are first copied to other host memory. CPU rows are copied only on write: an
            update of an unwritten row copies it first. Updates wait (backpressure) once a quarter
            of a slab's rows, or 1 GiB of them, are copied. Rows on disks (:class:`SSDStore`) are
            pinned: cached rows are written to the disk first. The disk needs room for what training
            writes meanwhile.
        since: path of the checkpoint that was saved last, or fully loaded. An increment is saved:
            only ids changed or removed since then, with their rows, state and scores. The dense
            state is saved as a whole. :func:`record_changes` must have been called before that
            checkpoint. :func:`merge` makes a whole checkpoint of one and its increments. Default:
            everything.
        state: other values that the program needs to resume: nested dicts, lists and tuples of
            tensors, numbers and texts. :func:`load` returns it, with tensors on the CPU. That of
            the first rank is saved.
        keep_last: number of checkpoints that stay, the new one included, of those in its folder
            that the model was saved as with ``keep_last``, or continues after :func:`load`. Older
            ones are removed once the new one is whole; checkpoints saved without it, and files of
            others, stay. Default: all.
        progress: show a progress bar; default: if the standard error is a terminal.

    Returns:
        A handle with ``wait()`` and ``done()``; already done without ``asynchronous``.

    Raises:
        TypeError, ValueError: a wrong argument, inconsistent tables, or an entry that would need
            pickling.
        FileExistsError: ``path`` exists but is not a checkpoint. Files of other programs
            beside its manifest stay; folders named by 32 hexadecimal digits are those of saves.
        FileNotFoundError: ``since`` is not a checkpoint.
        InUseError: another process saves to ``path``, another save runs in the background, or
            another thread trains or changes the model.
        NewBaseNeededError: the changes since ``since`` are unknown.
        HostMemoryError: there is too little memory for the copy.
        DiskFullError: the disk is full.
        BackgroundError: the asynchronous save before has failed, and its error was not raised yet.
        RuntimeError: gradients are pending for an optimizer's ``step()``, or rows lie in an
            :class:`ExternalStore` with ``asynchronous``.
        OSError: the disk fails. In all cases all ranks raise, and what was at ``path`` is
            unchanged. One exception: a disk or store that fails as it takes the name or the
            manifest may have the new checkpoint. With ``asynchronous``, errors of the thread are
            raised by ``wait()``, or by the next ``optimizer.step()`` as a
            :class:`~torch_dynemb.errors.BackgroundError`.

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

    def prepare() -> tuple[Location, list[TablePart], str | None]:
        target = checked_location("checkpoint.save", path)
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"checkpoint.save: model is {described(model)}, expected a torch.nn.Module"
            )
        flag("checkpoint.save: asynchronous", asynchronous)
        if keep_last is not None:
            integer("checkpoint.save: keep_last", keep_last, least=1)
            if since is not None:
                raise ValueError(
                    f"checkpoint.save: keep_last is {keep_last} and since is given, but an "
                    "increment needs the checkpoint before it: leave one of them out"
                )
        check_none_running()
        check_target(target)
        parts = parts_of(model)
        for group in groups_of(parts):
            check_saveable("checkpoint.save", group)
            tiers = group.tables.tiers
            if asynchronous and tiers is not None and not tiers.pins:
                group.tables.check_in_memory(
                    "checkpoint.save: asynchronous=True",
                    "an ExternalStore cannot pin them during training, so save without "
                    "asynchronous, which streams them",
                )
        if since is None:
            return target, parts, None
        return target, parts, parent_of(since, target, groups_of(parts), asynchronous)

    target, parts, parent = ranks.run(prepare)
    disk = disk_of(target, _DISK)
    ranks.agree(
        "checkpoint.save",
        path=str(path),
        asynchronous=asynchronous,
        parent=parent,
        keep_last=keep_last,
    )
    gathered = ranks.gather(([(ranks.rank, part.shard) for part in parts], uuids.uuid4().hex))
    check_whole([place for places, _ in gathered for place in places])
    uuid = gathered[0][1]
    series = Series(model, target, uuid, keep_last)
    dense, reading = ranks.run(lambda: begin_reading("checkpoint.save", parts, model))

    def read() -> ModelSource:
        with reading:
            whole = parts if parent is None else ()
            return source_of_model(whole, dense, state, ranks, asynchronous)

    source = ranks.run(read)
    increment = increment_of(ranks, parts, parent)
    handle = SaveHandle(target)
    if not asynchronous:
        if parent is not None:
            source = source._replace(increment=increment)
        write_checkpoint(ranks, disk, target, uuid, source, progress, reading, series)
        increment.taken(uuid)
        if reading.is_disturbed():  # since the last check
            increment.lost()
        return handle
    copies = staged(ranks, source, _BUFFER_BYTES + _WINDOWS_BYTES + _bytes_of_orders(source))

    def pin() -> None:
        with reading:
            increment.taken(uuid)
            pin_rows(copies.groups)

    with ExitStack() as pinned:
        pinned.callback(unpin_rows, copies.groups)
        try:
            ranks.run(pin)
        except BaseException:
            increment.lost()
            raise
        behind = background_ranks(ranks)
        past_cache = disk if isinstance(target, Url) else DirectDisk(disk)
        with defer_signals():  # from its start on, the thread has the rows
            handle._run(
                lambda: _write_copies(behind, past_cache, target, uuid, copies, progress, series),
                groups_of(parts),
            )
            pinned.pop_all()
    return handle


def check_target(target: Location) -> None:
    """Raise an error if a path exists but is not a checkpoint, or another call saves to it.

    Raises:
        FileExistsError, InUseError: it is.
    """
    check_unclaimed("checkpoint.save", target)
    check_replaceable(target)


def check_saveable(call: str, group: TableGroup) -> None:
    """Raise RuntimeError for tables in the middle of a step, or of another process.

    Args:
        call: prefix of the error.
        group: group of the tables.
    """
    group.tables.check_own()
    if group.rows.pending and int(PendingGradients.of(group.rows.pending).counts[:, 0].sum()) > 0:
        raise RuntimeError(
            f"{call}: tables {group.names} have gradients pending, which are not saved: "
            "call optimizer.step(), or zero_grad(), before"
        )


def source_of_model(
    parts: Sequence[TablePart],
    dense: Mapping[str, Any],
    state: Mapping[str, Any] | None,
    ranks: Ranks,
    to_be_copied: bool = False,
) -> ModelSource:
    """Collect what a rank saves of a model.

    Args:
        parts: tables that are saved.
        dense: dense state of the model.
        state: state from the program.
        ranks: ranks that save together.
        to_be_copied: see :func:`source_of`.

    Raises:
        TypeError: an entry cannot be saved.
    """
    groups = groups_of(parts)
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
            dense_source(DENSE, dense, ranks.rank),
            state_source(STATE, state, ranks.rank),
        ),
    )


def begin_reading(
    call: str, parts: Sequence[TablePart], model: nn.Module
) -> tuple[dict[str, Any], Undisturbed]:
    """End open training steps. Return the dense state of a model, and a guard against changes.

    Counted ids are listed again, because a job that resumes has to list them.

    Args:
        call: prefix of errors.
        parts: parts that are read.
        model: model with the dense state that is read with them.

    Raises:
        InUseError: another thread is changing the tables now.
    """
    end_steps(parts)
    for group in groups_of(parts):
        list_again(group.tables)
    dense = dense_state(model)
    tensors = [value for value in dense.values() if type(value) is torch.Tensor]
    return dense, Undisturbed(call, groups_of(parts), tensors)


def _bytes_of_orders(source: ModelSource) -> int:
    return sum(
        slab.used * (_BYTES_OF_ROW_ORDER if slab.reader is None else _BYTES_OF_STORED_ROW)
        + (0 if slab.copy_on_write is None else slab.copy_on_write.bytes_of(number))
        + (0 if slab.in_store is None else slab.in_store.copied_bytes(number))
        for group in source.groups
        for number, slab in enumerate(group.slabs)
    )


# -- writing -------------------------------------------------------------------------------------


@plain_torch()
def write_checkpoint(
    ranks: Ranks,
    disk: Disk,
    target: Location,
    uuid: str,
    source: ModelSource,
    progress: bool | None,
    reading: AbstractContextManager[object] | None = None,
    series: Series | None = None,
) -> None:
    """Write all files on all ranks, then the manifest on the first.

    Args:
        ranks: ranks that save together.
        disk: the file system.
        target: path of the checkpoint.
        uuid: uuid of the checkpoint.
        source: what this rank saves.
        progress: show a progress bar.
        reading: context that raises at its end if what was read inside it has changed.
        series: older checkpoints of the model.

    Raises:
        OSError: the disk is full, or fails.
        RuntimeError: error of ``reading``.
    """
    folder = new_files(target, uuid)
    parent = None if source.increment is None else source.increment.parent

    def write() -> _Written:
        with reading or nullcontext():
            return _write_files(ranks, disk, folder, source, target.name, progress)

    with ExitStack() as claim:

        def begin() -> None:
            with space_errors(folder):
                claim.enter_context(claimed("checkpoint.save", disk, target, uuid))
                disk.make_folder(folder)

        naming = False
        try:
            ranks.on_first(begin)
            written = ranks.run(write)
            of_ranks = ranks.gather(written)

            def checked() -> Manifest:
                manifest = _manifest_of(uuid, parent, of_ranks, series)
                if ranks.rank == 0:
                    _check_files(folder, manifest)
                return manifest

            manifest = ranks.run(checked)
            # set before the first rank may begin: others cannot know how far it has come
            naming = True
            ranks.gather(None)

            def finish() -> None:
                finish_folder(disk, target, manifest)
                claim.close()  # removes its file before other ranks continue
                if series is not None:
                    series.committed(disk)

            ranks.on_first(finish)
        except BaseException:
            if not naming:
                abandon(disk, target, uuid)  # on each rank, in case they do not share one disk
            raise


def _write_copies(
    ranks: Ranks,
    disk: Disk,
    target: Location,
    uuid: str,
    source: ModelSource,
    progress: bool | None,
    series: Series,
) -> None:
    """Write a checkpoint of pinned rows, then unpin them."""
    try:
        write_checkpoint(ranks, disk, target, uuid, source, progress, series=series)
    finally:
        unpin_rows(source.groups)


def _write_files(
    ranks: Ranks,
    disk: Disk,
    folder: Location,
    source: ModelSource,
    name: str,
    progress: bool | None,
) -> _Written:
    total = sum(_bytes_of(group) for group in source.groups)
    total += sum(p.values.numel() * p.values.element_size() for r in source.dense for p in r.pieces)
    groups: list[SavedGroup] = []
    tables: list[tuple[str, SavedTable]] = []
    changes: list[SavedFile] = []
    with (
        one_thread(),
        progress_bar(f"saving {name}", total, progress) as bar,
        Folder(disk, folder, ranks.rank, ranks.size, bar.update) as to,
    ):
        for number, (group, parts) in enumerate(zip(source.groups, source.parts, strict=True)):
            write_initial_rows(group)
            saved, of_tables = write_group(to, group, parts, number)
            unpin_rows([group])
            groups.append(saved)
            tables += of_tables
        if source.increment is not None:
            file, tables = write_changes(to, source.increment)
            changes.append(file)
        dense = [(*write_dense(to, of_dense), of_dense.values) for of_dense in source.dense]
    return _Written(groups, tables, changes, dense)


def _bytes_of(group: GroupSource) -> int:
    rows = sum((8 + slab.row_bytes) * slab.used for slab in group.slabs)
    return rows + sum(of.numel() * of.element_size() for of in group.entries.values())


def _manifest_of(
    uuid: str, parent: str | None, written: Sequence[_Written], series: Series | None
) -> Manifest:
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
    dense, state = (_dense_of([of_rank.dense[k] for of_rank in written]) for k in range(2))
    kind, changes = (FULL if parent is None else DELTA), [f for of in written for f in of.changes]
    own = tables if parent is None else {}  # tables of an increment are in its batches
    entries = [] if series is None else series.entries
    return Manifest(uuid, kind, parent, len(written), own, groups, dense, state, changes, entries)


def _dense_of(
    written: Sequence[tuple[SavedFile | None, dict[str, list[SavedEntry]], Any]],
) -> SavedDense:
    saved = SavedDense(values=written[0][2])
    for file, entries, _ in written:
        if file is None:
            continue
        for name, pieces in entries.items():
            here = [replace(piece, file=len(saved.files)) for piece in pieces]
            saved.entries.setdefault(name, []).extend(here)
        saved.files.append(file)
    return saved


def _check_files(folder: Location, manifest: Manifest) -> None:
    """Raise OSError unless the files of all ranks are in a folder."""
    found = folder.store.sizes(str(folder)) if isinstance(folder, Url) else {}
    for file in manifest.files():
        if isinstance(folder, Url):
            size = found.get(file.path.partition("/")[2], 0)
        else:
            path = folder.parent / file.path
            size = path.stat().st_size if path.exists() else 0
        if size != file.bytes:
            raise OSError(
                f"checkpoint.save: {folder.parent} has {size} bytes of {file.path}, expected "
                f"{file.bytes}: all ranks must see the same files, and a store must not remove them"
            )


def finish_folder(
    disk: Disk,
    target: Location,
    manifest: Manifest,
    check: Callable[[Location], None] = check_replaceable,
) -> None:
    """Turn new files into a checkpoint; see :func:`commit`."""
    draft = draft_of(target, manifest.uuid)
    inner = {(draft / file.path).parent for file in manifest.files()}
    folders = [*sorted(inner, key=str), new_files(target, manifest.uuid)]
    commit(disk, target, manifest.uuid, manifest.text(), check, folders)


__all__ = [
    "ModelSource",
    "begin_reading",
    "check_saveable",
    "check_target",
    "finish_folder",
    "save",
    "source_of_model",
    "write_checkpoint",
]
