"""Checkpoints of the job on many ranks: a folder that is whole, or is not there.

Tables and MLPs are written by torch.distributed.checkpoint, all ranks at once, everything else by
rank 0 into one file beside them, with a digest. The folder gets its name when both are on the disk.
A checkpoint does not depend on the ranks that wrote it: others, in any number, may go on. On
several machines it has to lie on a file system that they share.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from torch_dynemb.torchrec import LoadPlanner
from tutorials.dlrm import checkpoint
from tutorials.dlrm.criteo import Position
from tutorials.dlrm.rank_loop import RankPass
from tutorials.dlrm.rows import Turnover
from tutorials.dlrm.torchrec_model import ShardedModel

_JOB = "job.pt"


def save(
    folder: Path,
    progress: RankPass,
    model: ShardedModel,
    position: Position,
    settings: dict[str, object],
) -> None:
    """Write a checkpoint in place of the one before, together with all ranks.

    Args:
        folder: Of the checkpoint; the folder around it exists.
        progress: Of the model.
        model: With its optimizers; that of the rows is in the state of the tables.
        position: Of the readers.
        settings: What a run that goes on must have in common with this one.
    """
    first = dist.get_rank() == 0
    unfinished, before = checkpoint.unfinished(folder), _before(folder)
    if first:
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir()
    dist.barrier()
    dcp.save({"model": model.parallel.state_dict()}, checkpoint_id=unfinished)
    job = {
        "settings": settings,
        "dense optimizer": model.dense_optimizer.state_dict(),
        "turnover": tuple(model.figures().turnover),
        "progress": progress.state_dict(),
        "seconds": progress.seconds,
        "position": tuple(position),
    }
    if first:
        checkpoint.save(unfinished / _JOB, job)
        if folder.exists():
            shutil.rmtree(before, ignore_errors=True)
            folder.rename(before)
        unfinished.rename(folder)
        shutil.rmtree(before, ignore_errors=True)
    dist.barrier()


def find(folder: Path) -> Path | None:
    """Return where the last whole checkpoint is; None: there is none."""
    return next((path for path in (folder, _before(folder)) if path.exists()), None)


def load(
    folder: Path,
    progress: RankPass,
    model: ShardedModel,
    settings: dict[str, object],
) -> Position:
    """Take over a checkpoint, together with all ranks.

    Args:
        folder: From :func:`find`.
        progress, model, settings: As in :func:`save`.

    Returns:
        Where the readers stood.

    Raises:
        CheckpointError: The checkpoint is damaged, or the settings differ.
    """
    job: dict[str, Any] = checkpoint.load(folder / _JOB)
    checkpoint.check_same_settings(job["settings"], settings)
    state = {"model": model.parallel.state_dict()}
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
    model.parallel.load_state_dict(state["model"])
    model.dense_optimizer.load_state_dict(job["dense optimizer"])
    model.earlier_turnover = Turnover(*job["turnover"])
    progress.load_state_dict(job["progress"])
    progress.seconds = job["seconds"]
    return Position(*job["position"])


def _before(folder: Path) -> Path:
    """The name that a checkpoint has while the next one takes its place."""
    return folder.with_name(folder.name + ".before")
