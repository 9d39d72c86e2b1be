"""The DLRM job under agents of torchrun, a process for each machine, with ranks that are killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from unittest import mock

import torch.distributed as dist
from killing_disk import KillingDisk

RANKS = {"first": 3, "second": 1}  # of the machines; the second one goes and is started again


class Moment(NamedTuple):
    """When a rank is killed.

    Attributes:
        ranks: number of ranks at that time.
        step: it is the first time that so many steps of the job are trained, or a later one.
        where: "step": after it; "forward": within the next one; "save": at a call of the file
            system of the next save or commit.
        call: the number of that call.
        victim: rank that is killed; -1: the second machine, with its agent.
    """

    ranks: int
    step: int
    where: str
    call: int
    victim: int


class Files:
    """What the processes of a job leave in a folder for each other.

    Args:
        folder: exists.
    """

    def __init__(self, folder: Path) -> None:
        self.out, self.result = folder / "out", folder / "result.json"
        self.lives = folder / "lives"  # a line for each start: ranks, first step; or an error
        self.waiting = folder / "waiting"  # a pipe: a line where ranks wait for a machine
        self._folder = folder

    def finish(
        self, opts: Any, data: Any, progress: Any, figures: Any, curves: Any, more: Any
    ) -> None:
        """Write the result of the job."""
        found = {"ids": figures.ids, "evicted": figures.evicted + figures.rejected}
        points = [point[:3] for point in progress.points]
        ((_, auc),) = curves.values()
        self.result.write_text(json.dumps({**found, **more, "auc": auc, "points": points}))

    def killed(self) -> int:
        """Return how many ranks were killed so far."""
        return len(list(self._folder.glob("killed-*")))

    def kill(self) -> None:
        """Note that a rank is about to be killed."""
        (self._folder / f"killed-{self.killed()}").touch()


def agent(
    folder: Path, machine: str, port: int, arguments: list[str], moments: list[Moment]
) -> None:
    """Be the agent of a machine until the job has ended.

    Args:
        folder: see :class:`Files`.
        machine: key of ``RANKS``.
        port: of the store in which agents meet.
        arguments: of the job.
        moments: when ranks are killed, in this order.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    import tutorials.dlrm.job.sharded_model  # noqa: F401, once for all ranks

    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=len(RANKS),
        nproc_per_node=RANKS[machine],
        run_id="elastic",
        rdzv_backend="c10d",
        rdzv_endpoint=f"localhost:{port}",
        # a machine without a sign of life for so long is gone, and no other one may come
        rdzv_configs={
            "is_host": False,
            "keep_alive_interval": 1,
            "keep_alive_max_attempt": 5,
            "last_call_timeout": 3,
        },
        local_addr="localhost",
        max_restarts=len(moments) + 2,
        start_method="fork",  # imports take seconds
    )
    elastic_launch(config, rank)(folder, machine, os.getpid(), arguments, moments)


def rank(
    folder: Path, machine: str, agent: int, arguments: list[str], moments: list[Moment]
) -> None:
    """Be a rank: train from the last save or commit on, until the end or a chosen moment."""
    from tutorials.dlrm import options
    from tutorials.dlrm.job import ranks, workflow

    for number in (signal.SIGTERM, signal.SIGINT):  # forks have the handlers of their agent
        signal.signal(number, signal.SIG_DFL)
    # TorchRec takes the machines to have equally many: here each rank has one of its own
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    files = Files(folder)
    opts = options.parse([*arguments, "--torchrec", "--resume", "--out", str(files.out)])
    life = Life(files, machine, agent, moments)
    with life.watched(), mock.patch.object(workflow, "report", files.finish):
        ranks.work(opts)


class Life:
    """A rank between two restarts.

    Args:
        files: of the job.
        machine: key of ``RANKS``.
        agent: process of its agent.
        moments: when ranks are killed, in this order.
    """

    def __init__(self, files: Files, machine: str, agent: int, moments: list[Moment]) -> None:
        self._files, self._machine, self._agent = files, machine, agent
        left = moments[files.killed() :]
        self._moment = left[0] if left else None
        self._disk = KillingDisk(0, self._die)

    def watched(self) -> Any:
        """Return a context in which the job is killed, and its content is compared."""
        from tutorials.dlrm.job import checkpoint, commits, ranks

        for name in ("checkpoint.saving.save", "delta_log.log_folder", "delta_log.directory"):
            sys.modules[f"torch_dynemb.{name}"]._DISK = self._disk  # type: ignore[attr-defined]
        watching = _Patches()
        for kind in (checkpoint.Checkpoints, commits.Commits):
            watching.wrap(kind, "resume", self._resumed)
        watching.wrap(ranks.RankPass, "_train_batch", self._trained)
        return watching

    def _resumed(self, resume: Any, checkpoints: Any) -> Any:
        """Resume, and compare all ids and their counts with those of the lines until there."""
        position = resume(checkpoints)
        progress, opts = checkpoints._progress, checkpoints._opts
        found = counted(progress.model)
        if dist.get_rank() == 0:
            good = found == occurrences(opts.data, position.line)
            good &= progress.samples == position.line
            with self._files.lives.open("a") as lives:
                lives.write(f"{dist.get_world_size()} {progress.step} {good}\n")
        return position

    def _trained(self, train_batch: Any, progress: Any, batch: Any, following: Any) -> None:
        moment = self._moment
        due = moment is not None and progress.step >= moment.step
        if not due or moment is None:
            return train_batch(progress, batch, following)
        if moment.ranks != dist.get_world_size():
            if dist.get_rank() == 0:
                with self._files.waiting.open("w") as pipe:
                    pipe.write("waiting\n")
            signal.pause()  # until the second machine is there, and all ranks are started again
        dies = self._machine == "second" if moment.victim < 0 else moment.victim == dist.get_rank()
        if not dies:
            return train_batch(progress, batch, following)
        if moment.where == "step":
            self._kill()
        elif moment.where == "forward":
            progress.model.register_forward_hook(lambda *_: self._kill())
        elif self._disk.left <= 0:
            self._disk.left = moment.call
        return train_batch(progress, batch, following)

    def _kill(self) -> NoReturn:
        self._die()
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("SIGKILL did not end the process")

    def _die(self) -> None:
        """Prepare the end of this process: end its machine before, if that is to be."""
        assert self._moment is not None
        self._files.kill()
        if self._moment.victim < 0:
            os.kill(self._agent, signal.SIGKILL)


class _Patches:
    """Methods that are replaced in a ``with`` block."""

    def __init__(self) -> None:
        self._patches: list[Any] = []

    def wrap(self, kind: type, name: str, wrapper: Any) -> None:
        """Have a method call a function with the real one and its arguments."""
        real = kind.__dict__[name]

        def wrapped(*arguments: Any) -> Any:
            return wrapper(real, *arguments)

        self._patches.append(mock.patch.object(kind, name, wrapped))

    def __enter__(self) -> None:
        for patch in self._patches:
            patch.start()

    def __exit__(self, *error: object) -> None:
        for patch in self._patches:
            patch.stop()


Counts = list[Counter[int]]  # of ids, by feature


def counted(model: Any) -> Counts | None:
    """Return the occurrences that a sharded model has counted, on rank 0. All ranks call it."""
    from torch_dynemb.torchrec import local_shards
    from tutorials.dlrm.data import FEATURE_NAMES

    mine: Counts = [Counter() for _ in FEATURE_NAMES]
    for local in local_shards(model):
        if local.shard.first_column == 0:
            for batch in local.group.export(local.number):
                counts = dict(zip(batch.ids.tolist(), batch.scores.tolist(), strict=True))
                mine[FEATURE_NAMES.index(local.shard.name)].update(counts)
    everyones: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyones)
    if everyones is None:
        return None
    return [sum(of_ranks, Counter()) for of_ranks in zip(*everyones, strict=True)]


def occurrences(paths: list[Path], lines: int) -> Counts:
    """Count the ids in the first lines of files."""
    from tutorials.dlrm.data import CATEGORY_COUNT, CriteoReader

    found: Counts = [Counter() for _ in range(CATEGORY_COUNT)]
    for batch in CriteoReader(paths, 1024, stop_line=lines) if lines else ():
        for counts, ids in zip(found, batch.ids, strict=True):
            counts.update(ids.tolist())
    return found
