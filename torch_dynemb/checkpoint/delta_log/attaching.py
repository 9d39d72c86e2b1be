"""A delta log gets a model: checks, and the checkpoint with which the log begins."""

from __future__ import annotations

from collections.abc import Callable
from os import PathLike
from pathlib import Path

from torch import nn

from torch_dynemb.argument_checks import described
from torch_dynemb.checkpoint.delta_log.bases import base_folder, newest_base
from torch_dynemb.checkpoint.delta_log.comparison import differing_ids, touched_ids
from torch_dynemb.checkpoint.delta_log.directory import rank_folders
from torch_dynemb.checkpoint.delta_log.own_log import OwnLog
from torch_dynemb.checkpoint.delta_log.recorded import RecordedModel
from torch_dynemb.checkpoint.manifest.whole_tables import check_whole
from torch_dynemb.checkpoint.parts import TablePart, groups_of, parts_of
from torch_dynemb.checkpoint.reading.reader import open as open_checkpoint
from torch_dynemb.checkpoint.saving.save import check_saveable
from torch_dynemb.checkpoint.together import Ranks


def checked_parts(
    ranks: Ranks, model: nn.Module, log: Path | None, *, optimizer_state: bool
) -> tuple[list[TablePart], dict[str, int]]:
    """The tables of a model on this rank, and columns of those of all by name; all ranks call it.

    Args:
        ranks: that share the model.
        model: that is to be published.
        log: directory of the log; None: it is elsewhere.
        optimizer_state: that of rows is to be published, too.

    Raises:
        TypeError: it is no module.
        ValueError: the tables are not whole, or the log is of another number of ranks, or state
            lies on several ranks.
        RuntimeError: gradients are pending.
    """

    def parts_here() -> list[TablePart]:
        if not isinstance(model, nn.Module):
            raise TypeError(
                f"DeltaLog.attach: model is {described(model)}, expected a torch.nn.Module"
            )
        folders = [] if log is None else rank_folders(log)
        if folders and len(folders) != ranks.size:
            raise ValueError(
                f"DeltaLog.attach: {log} has a log of {len(folders)} ranks, and these are "
                f"{ranks.size}: publish to a new directory"
            )
        parts = parts_of(model)
        for group in groups_of(parts):
            check_saveable("DeltaLog.attach", group)
        return parts

    parts = ranks.run(parts_here)
    told = ranks.gather([(ranks.rank, part.shard) for part in parts])
    places = [place for of_rank in told for place in of_rank]
    check_whole(places)
    split = {shard.name for _, shard in places if shard.split}
    if split and optimizer_state:
        raise ValueError(
            f"DeltaLog.attach: optimizer_state is True, but the columns of tables {sorted(split)} "
            "lie on several ranks, and so does their state: give optimizer_state=False"
        )
    return parts, {shard.name: shard.embedding_dim for _, shard in places}


def find_base(
    own: OwnLog,
    ranks: Ranks,
    recorded: RecordedModel,
    *,
    log: Path | None,
    base: str | PathLike[str] | None,
    save: Callable[[Path], None],
) -> None:
    """Finds out what those who follow know of a model, or saves it; all ranks call it.

    Args:
        own: the log of this rank, which gets the base.
        ranks: that share the model.
        recorded: the model, which gets what the next publish has to look at.
        log: directory of the log; None: it is elsewhere.
        base: path of the checkpoint; None: one in the directory.
        save: saves the model as a checkpoint.

    Raises:
        ValueError: the base does not fit the log or the model, or there is none.
        FileNotFoundError: it is no checkpoint.
        DamagedFileError: the log or the base is damaged.
        OSError: the disk fails.
    """
    path = base
    if path is None:
        if log is None:
            raise ValueError(
                "DeltaLog.attach: base is None, but the log is not in a directory, which could "
                "have it: give the path of the checkpoint that the log begins with"
            )
        if own.sequence == 0:
            first = base_folder(log, 0)
            save(first)
            own.base, own.base_sequence = uuid_of(first), 0
            ranks.run(recorded.begin)
            return
        path = newest_base(log, ranks.run(own.bases))
    uuid = ranks.run(lambda: uuid_of(path))
    own.base, own.base_sequence = uuid, ranks.run(lambda: own.sequence_of(uuid))
    touched = ranks.gather(ranks.run(lambda: touched_ids(own.batches(own.base_sequence + 1))))

    def compare() -> None:
        with open_checkpoint(path) as saved:
            owed = differing_ids(recorded.parts, saved, touched, state=recorded.optimizer_state)
        recorded.begin()
        recorded.owe(owed, dense=True)

    ranks.run(compare)


def uuid_of(path: str | PathLike[str]) -> str:
    """The uuid of a checkpoint.

    Args:
        path: of it.

    Raises:
        FileNotFoundError: it is none.
        DamagedFileError: its manifest is damaged.
    """
    with open_checkpoint(path) as saved:
        return saved.uuid


__all__ = ["checked_parts", "find_base", "uuid_of"]
