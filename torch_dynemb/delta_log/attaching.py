"""Attachment of a model to a delta log: checks, and the base of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from os import PathLike

from torch import Tensor, nn

from torch_dynemb.argument_checks import described
from torch_dynemb.changes.batch import Batch
from torch_dynemb.checkpoint.loading.table_plan import resumed_plan
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.checkpoint.saving.save import check_saveable
from torch_dynemb.delta_log.bases import base_folder, base_folders, newest_base
from torch_dynemb.delta_log.comparison import differing_ids, touched_ids
from torch_dynemb.delta_log.folding import can_resume
from torch_dynemb.delta_log.own_log import OwnLog
from torch_dynemb.delta_log.rank_sinks import rank_folders
from torch_dynemb.delta_log.recorded import RecordedModel
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.errors import NewBaseNeededError
from torch_dynemb.files.locations import Location
from torch_dynemb.parts.table_parts import TablePart, groups_of, parts_of
from torch_dynemb.parts.whole_tables import check_whole


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


__all__ = ["checked_parts", "find_base", "uuid_of"]
