"""What ranks do in the tests of the DLRM job."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.optim.lr_scheduler import LambdaLR

from torch_dynemb.torchrec.collections.bag import ShardedDynamicEmbeddingBagCollection
from torch_dynemb.torchrec.sharding.dedup import DEDUPED
from tutorials.dlrm import options, report, train
from tutorials.dlrm.data import Position
from tutorials.dlrm.job import ranks
from tutorials.dlrm.job.checkpoint import Checkpoints
from tutorials.dlrm.job.commits import Commits
from tutorials.dlrm.job.sharded_model import ShardedModel
from tutorials.dlrm.loop import Point

Outcome = tuple[dict[str, Any], list[Point]]


def job(rank: int, arguments: list[str]) -> Outcome | None:
    """The job on all ranks: what rank 0 prints, and losses and running AUCs from its plot."""
    opts = options.parse([*arguments, "--torchrec"])
    with mock.patch.object(report, "write_report") as drawn:
        result = ranks.train(opts, torch.device("cpu"))
    return None if result is None else (result, _points(drawn))


def interrupted_job(rank: int, arguments: list[str]) -> None:
    """The job until its second checkpoint."""
    written = 0
    save = Checkpoints.save

    def save_and_stop(checkpoints: Checkpoints, position: Position) -> None:
        nonlocal written
        save(checkpoints, position)
        written += 1
        if written == 2:
            raise KeyboardInterrupt

    with mock.patch.object(Checkpoints, "save", save_and_stop), suppress(KeyboardInterrupt):
        job(rank, arguments)


def committed_job(rank: int, arguments: list[str], steps: int) -> None:
    """The job until so many steps are committed."""
    after_step = Commits.after_step

    def commit_and_stop(commits: Commits, position: Position) -> None:
        after_step(commits, position)
        if commits._progress.step == steps:
            commits._log.flush()
            raise KeyboardInterrupt

    with mock.patch.object(Commits, "after_step", commit_and_stop), suppress(KeyboardInterrupt):
        job(rank, arguments)


def stopped_job(arguments: list[str]) -> None:
    """Be a rank; after two steps, rank 1 neither answers nor ends."""
    train_batch = ranks.RankPass._train_batch

    def train_and_stop(progress: ranks.RankPass, *batches: Any) -> None:
        train_batch(progress, *batches)
        if progress.step == 2 and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGSTOP)

    with mock.patch.object(ranks.RankPass, "_train_batch", train_and_stop):
        ranks.work(options.parse([*arguments, "--torchrec"]))


def job_of_one_process(arguments: list[str]) -> Outcome:
    """The same of the job without ranks."""
    with mock.patch.object(report, "write_report") as drawn:
        result = train.run(options.parse([*arguments, "--no-baseline"]))
    return result, _points(drawn)


def _points(drawn: mock.Mock) -> list[Point]:
    (curves,) = (call.args[1] for call in drawn.call_args_list)
    points: list[Point] = curves["dynamic tables"][0]
    return [point._replace(seconds=0, resident_bytes=0, table_bytes=0) for point in points]


def schedule(rank: int, arguments: list[str]) -> tuple[list[float], dict[str, list[float]]]:
    """Learning rates under a schedule: of the optimizer, and of the tables themselves."""
    model = ShardedModel(options.parse([*arguments, "--torchrec"]), None, torch.device("cpu"))
    schedule = LambdaLR(model.optimizer, lambda epoch: 0.5**epoch)
    model.optimizer.step()
    schedule.step()
    rates = [group["lr"] for group in model.optimizer.param_groups]
    of_tables = {}
    for module in model.parallel.modules():
        for kernel in module.kernels() if hasattr(module, "kernels") else ():
            groups = kernel.tables.optimizer.param_groups
            of_tables[kernel.tables.group.names[0]] = [float(group["lr"]) for group in groups]
    return rates, of_tables


def sends_once(rank: int, arguments: list[str]) -> list[bool]:
    """By sharding of the tables: whether it sends an id that a batch has often once."""
    model = ShardedModel(options.parse([*arguments, "--torchrec"]), None, torch.device("cpu"))
    return [
        isinstance(sharding, tuple(DEDUPED.values()))
        for module in model.parallel.modules()
        if isinstance(module, ShardedDynamicEmbeddingBagCollection)
        for sharding in module._embedding_shardings
    ]
