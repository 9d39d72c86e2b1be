"""Attachment of a model to a delta log: checks, its base, and what differs from the base."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from os import PathLike

import torch
from torch import Tensor, nn

from torch_dynemb.argument_checks import described
from torch_dynemb.changes.batch import Batch
from torch_dynemb.changes.commits import commit_of
from torch_dynemb.checkpoint.file_names import FULL
from torch_dynemb.checkpoint.loading.table_plan import resumed_plan
from torch_dynemb.checkpoint.reading.reader import Checkpoint
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.checkpoint.reading.saved_table import CheckpointTable
from torch_dynemb.checkpoint.saving.save import check_saveable
from torch_dynemb.delta_log.folding import can_resume
from torch_dynemb.delta_log.log_folder import base_folder, base_folders, newest_base, rank_folders
from torch_dynemb.delta_log.own_log import OwnLog
from torch_dynemb.delta_log.recorded import RecordedModel
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.errors import NewBaseNeededError
from torch_dynemb.files.locations import Location
from torch_dynemb.parts.table_parts import TablePart, groups_of, parts_of
from torch_dynemb.parts.whole_tables import check_whole
from torch_dynemb.table.lookup import find
from torch_dynemb.table.row_access import read_rows
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.scores import stored_scores
from torch_dynemb.table.tables import exported, one_table

_IDS_AT_ONCE = 1 << 18


def checked_parts(
    ranks: Ranks, model: nn.Module, log: Location | None, *, optimizer_state: bool, resume: bool
) -> tuple[list[TablePart], dict[str, int], bool]:
    """Check the model of a log. All ranks call it.

    Args:
        ranks: ranks that share the model.
        model: model to publish.
        log: place of the log; None if it is elsewhere.
        optimizer_state: whether optimizer state of rows will be published.
        resume: whether training will resume from the log.

    Returns:
        Its tables on this rank, the columns of all tables by name, and whether ranks share the
        columns of a table.

    Raises:
        TypeError: the model is not a module.
        ValueError: tables are incomplete, the log has another number of ranks, or optimizer state
            is split over ranks.
        RuntimeError: gradients are pending, or rows lie in a store.
    """

    def parts_here() -> list[TablePart]:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"DeltaLog.attach: model is {described(model)}, expected a torch.nn.Module"
            )
        folders = [] if log is None else rank_folders(log)
        if folders and len(folders) != ranks.size:
            raise ValueError(
                f"DeltaLog.attach: {log} has a log of {len(folders)} ranks, but the model has "
                f"{ranks.size}: publish to a new directory"
            )
        parts = parts_of(model)
        for group in groups_of(parts):
            check_saveable("DeltaLog.attach", group)
            tiers = group.tables.tiers
            if resume and tiers is not None and not tiers.records_changes:
                group.tables.check_in_memory(
                    "DeltaLog.attach: resume=True",
                    "a model with such tables resumes from its last snapshot: call "
                    "torch_dynemb.checkpoint.save_snapshot, and give it the position of the reader "
                    "as state=",
                )
        return parts

    parts = ranks.run(parts_here)
    gathered = ranks.gather([(ranks.rank, part.shard) for part in parts])
    places = [place for of_rank in gathered for place in of_rank]
    check_whole(places)
    split = {shard.name for _, shard in places if shard.split}
    if split and optimizer_state and not resume:
        raise ValueError(
            f"DeltaLog.attach: optimizer_state is True, but the columns of tables {sorted(split)} "
            "lie on several ranks, which splits their state: give optimizer_state=False"
        )
    return parts, {shard.name: shard.embedding_dim for _, shard in places}, bool(split)


def find_base(
    own: OwnLog,
    ranks: Ranks,
    recorded: RecordedModel,
    *,
    log: Location | None,
    base: str | PathLike[str] | None,
    save: Callable[[Location], None],
) -> None:
    """Find the base of a log, and what followers lack; or save a first base. All ranks call it.

    Args:
        own: log of this rank, which gets the base.
        ranks: ranks that share the model.
        recorded: the model, which gets the ids that the next publish must check.
        log: place of the log; None if it is elsewhere.
        base: path of the base; None: the one in the directory.
        save: saves the model as a checkpoint.

    Raises:
        ValueError: the base does not fit the log or the model, or none is given.
        FileNotFoundError: it is not a checkpoint.
        DamagedFileError: the log or the base is damaged.
        OSError: the disk fails.
    """
    path = base
    if path is None:
        if log is None:
            raise ValueError(
                "DeltaLog.attach: base is None, but the log is not in a directory, which could "
                "have one: give the path of the checkpoint that the log begins with"
            )
        # a trainer that has ended before its first commit may have left a base, and followers of it
        if own.sequence == 0 and not ranks.gather(ranks.run(lambda: bool(base_folders(log))))[0]:
            first = base_folder(log, 0)
            save(first)
            own.base, own.base_sequence = uuid_of(str(first)), 0
            ranks.run(lambda: recorded.begin(saved=True))
            return
        path = str(newest_base(log, ranks.run(own.bases)))
    uuid = ranks.run(lambda: uuid_of(path))
    own.base, own.base_sequence = uuid, ranks.run(lambda: own.sequence_of(uuid))

    def read_ids() -> dict[str, Tensor]:
        batches = own.batches(own.base_sequence + 1)
        return touched_ids(_continuing(batches, own.base_sequence, resume=recorded.resume))

    touched = ranks.gather(ranks.run(read_ids))

    def compare() -> None:
        with open_checkpoint(path) as saved:
            owed = differing_ids(
                recorded.parts,
                saved,
                touched,
                state=recorded.optimizer_state,
                scores=recorded.scores_of,
            )
            for part in recorded.parts if recorded.resume else ():
                resumed_plan("DeltaLog.attach", part, saved.manifest.tables[part.name], None)
        recorded.begin()
        recorded.owe(owed, dense=True)

    ranks.run(compare)


def _continuing(batches: Iterable[Batch], base: int, *, resume: bool) -> Iterator[Batch]:
    """Iterate over the batches after a base.

    Args:
        batches: the batches.
        base: number of the last commit in the base.
        resume: the argument of the log.

    Raises:
        NewBaseNeededError: a batch is missing.
        ValueError: they were published with another ``resume=``.
    """
    for number, batch in enumerate(batches, start=base + 1):
        if batch.head.sequence != number:
            raise NewBaseNeededError(
                f"DeltaLog.attach: the base has the changes up to commit {base}, but the log lacks "
                f"commit {number}: give a newer base of the log, or publish to a new one"
            )
        if can_resume(batch) != resume:
            raise ValueError(
                f"DeltaLog.attach: resume is {resume}, but commit {batch.head.sequence} of the log "
                f"was published with resume={not resume}: give that, or publish to a new directory"
            )
        yield batch


def uuid_of(path: str | PathLike[str]) -> str:
    """Return the uuid of a checkpoint.

    Args:
        path: path of the checkpoint.

    Raises:
        FileNotFoundError: it is not a checkpoint.
        DamagedFileError: its manifest is damaged.
    """
    with open_checkpoint(path) as saved:
        return saved.uuid


def touched_ids(batches: Iterable[Batch]) -> dict[str, Tensor]:
    """Collect the ids that the batches of a rank have changed or removed, by table.

    Args:
        batches: batches of one rank.

    Returns:
        int64 [n] each, unique ids.

    Raises:
        DamagedFileError: a batch cannot be decoded.
    """
    found: dict[str, list[Tensor]] = {}
    for batch in batches:
        # ids are complete even if some columns are missing
        for name, delta in commit_of([batch], whole=False).tables.items():
            found.setdefault(name, []).extend([delta.changed.ids.clone(), delta.removed.clone()])
    return {name: torch.cat(ids).unique() for name, ids in found.items()}


def differing_ids(
    parts: Sequence[TablePart],
    saved: Checkpoint,
    touched: Sequence[Mapping[str, Tensor]],
    *,
    state: bool,
    scores: Callable[[TablePart], Sequence[str]],
) -> list[Tensor]:
    """Collect ids of each part for which followers of a log may differ from the model.

    Args:
        parts: parts of the model, on this rank.
        saved: base of the log.
        touched: results of :func:`touched_ids` on every rank, for the commits since the base.
        state: also compare optimizer state.
        scores: returns the names of the scores that are compared.

    Returns:
        int64 [n] of each part, on the CPU.

    Raises:
        ValueError: the base lacks a table, or has other columns for it.
        DamagedFileError: a file of the base is damaged.
    """
    if saved.kind != FULL:
        raise ValueError(
            f"DeltaLog: base {saved.folder} is an increment of another checkpoint, but a "
            "log needs a whole one: save one, or merge it"
        )
    result = []
    for part in parts:
        of_ranks = [ids[part.name] for ids in touched if part.name in ids]
        result.append(_differing(part, saved, of_ranks, state, scores(part)))
    return result


def _differing(
    part: TablePart,
    saved: Checkpoint,
    touched: Sequence[Tensor],
    state: bool,
    words: Sequence[str],
) -> Tensor:
    table = saved.tables.get(part.name)
    if table is None or table.embedding_dim != part.embedding_dim:
        raise ValueError(
            f"DeltaLog: base {saved.folder} has no table {part.name!r} of {part.embedding_dim} "
            "columns: save a checkpoint of the model, and begin a new log with it"
        )
    found: list[Tensor] = []
    known: list[Tensor] = []
    for batch in table.batches(_IDS_AT_ONCE, state=state, scores=bool(words)):
        own = part.ids.owned(batch.ids)
        known.append(batch.ids[own])
        found.append(batch.ids[own][_differs(part, table, batch, own, state, words)])
    in_base = torch.cat(known) if known else torch.empty(0, dtype=torch.int64, device="cpu")
    for exported_ids in exported(part.group.tables, part.table, _IDS_AT_ONCE):
        ids = exported_ids.ids.cpu()
        found.append(ids[~torch.isin(ids, in_base)])
    found += [ids[part.ids.owned(ids)] for ids in touched]
    return torch.cat(found).unique() if found else in_base


def _differs(
    part: TablePart,
    table: CheckpointTable,
    batch: RowBatch,
    own: Tensor,
    state: bool,
    words: Sequence[str],
) -> Tensor:
    """Return which owned ids of a batch are missing in the model or have another row, bool [n]."""
    tables, ids = part.group.tables, batch.ids[own].to(part.group.device)
    handles = find(tables, *one_table(tables, part.table, ids)).handles
    result = handles < 0
    there = (~result).nonzero()[:, 0]
    now = read_rows(tables, part.table, ids[there], handles[there])
    columns = slice(part.columns.start, part.columns.stop)
    pairs = [(now.rows, batch.rows[own][:, columns])]
    whole = part.columns == range(part.embedding_dim)
    same_state = whole and part.optimizer is not None and table.optimizer is not None
    if state and same_state and now.state.keys() == batch.state.keys():
        pairs += [(now.state[name], batch.state[name][own]) for name in now.state]
    elif state:
        return torch.ones_like(result).cpu()
    for word in words:
        if word not in batch.scores:
            return torch.ones_like(result).cpu()
        scores = stored_scores(tables, part.table, ids[there], word).scores[:, None]
        pairs.append((scores, batch.scores[word][own, None]))
    for mine, theirs in pairs:
        given = theirs.to(ids.device)[there]
        if given.dtype != mine.dtype or given.shape != mine.shape:
            return torch.ones_like(result).cpu()
        # compare bits: NaN equals itself
        unequal = given.contiguous().view(torch.uint8) != mine.contiguous().view(torch.uint8)
        result[there] |= unequal.any(1)
    return result.cpu()


__all__ = ["checked_parts", "differing_ids", "find_base", "touched_ids", "uuid_of"]
