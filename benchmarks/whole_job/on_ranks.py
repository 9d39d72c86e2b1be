"""A program that trains the job's model on samples of a file, and says what its steps took.

``two_ranks.py`` starts it from the folder of benchmarks: ``python -m whole_job.on_ranks JOB``.
"""

from __future__ import annotations

import json
import resource
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tqdm import tqdm

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tutorials.dlrm import options
from tutorials.dlrm.data import Batch, Position
from tutorials.dlrm.loop import Pass
from tutorials.ranks import run_on_ranks, silence

ALONE = 0
"""In place of a number of ranks: one process without TorchRec, as the job is without --torchrec."""


class Job(NamedTuple):
    """Sizes of a training.

    Attributes:
        dynamic: our tables; False: TorchRec's static ones, each as large as its vocabulary.
        ranks: processes, one thread each; :data:`ALONE`: one, of dynamic tables without TorchRec.
        sizes: of the vocabulary, by feature.
        batch: samples of a step, of all ranks together.
        steps: that are trained.
        warmup: of them, those before the steps' time is taken.
        folder: with labels.npy, integers.npy, ids.npy and rows.npy, rows of the vocabulary.
    """

    dynamic: bool
    ranks: int
    sizes: list[int]
    batch: int
    steps: int
    warmup: int
    folder: str


class _Batches:
    """Batches in memory, or the part of each that a rank trains on, as the job's reader has them.

    Args:
        job: of the samples.
        steps: numbers of the batches.
        part, parts: of every batch.
    """

    position = Position()

    def __init__(self, job: Job, steps: range, part: int, parts: int) -> None:
        self._job, self._steps = job, steps
        self._part, self._parts = part, parts

    def __iter__(self) -> Iterator[Batch]:
        folder, batch = Path(self._job.folder), self._job.batch
        given = "ids" if self._job.dynamic else "rows"
        labels, integers, ids = (
            np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("labels", "integers", given)
        )
        for step in self._steps:
            mine = slice(step * batch + self._part, (step + 1) * batch, self._parts)
            columns = np.ascontiguousarray(ids[:, mine])
            yield Batch(labels[mine].copy(), integers[mine].copy(), columns, batch)


def train(job: Job) -> float:
    """Train in this process.

    Returns:
        Seconds of user and system time that it spent on the steps after the warm-up.
    """
    torch.set_num_threads(1)
    torch.manual_seed(0)
    part, parts = 0, 1
    progress: Any
    if job.ranks == ALONE:
        progress = _pass_alone()
    else:
        import torch.distributed as dist

        part, parts = dist.get_rank(), job.ranks
        progress = _rank_pass(job)

    def run(steps: range) -> None:
        reader: Any = _Batches(job, steps, part, parts)
        bar: Any = tqdm(disable=True)
        progress.train(reader, bar)

    run(range(job.warmup))
    before = _spent()
    run(range(job.warmup, job.steps))
    return _spent() - before


def _pass_alone() -> Pass:
    from tutorials.dlrm.job.optimizers import row_optimizer
    from tutorials.dlrm.model import DLRM, DynamicRows

    opts = options.parse([])
    rows = DynamicRows(opts.embedding_dim, row_optimizer(opts))
    model = DLRM(rows, opts.embedding_dim)
    dense = torch.optim.Adam(model.dense_parameters(), lr=opts.dense_lr)
    return Pass(model, [dense, rows.optimizer()], log_every=opts.log_every)


def _rank_pass(job: Job) -> Pass:
    from tutorials.dlrm.job.ranks import RankPass

    device = torch.device("cpu")
    opts = options.parse(["--torchrec"])
    model: Any
    if job.dynamic:
        from tutorials.dlrm.job.sharded_model import ShardedModel

        sharded = ShardedModel(opts, None, device)
        model, optimizers = sharded.parallel, [sharded.optimizer]
    else:
        from whole_job.torchrec_rows import static_candidate

        from tutorials.dlrm.job.optimizers import DEFAULT

        model, optimizers, *_ = static_candidate(DEFAULT, job.sizes)
    return RankPass(model, optimizers, device=device, log_every=opts.log_every)


def train_on_rank(job: Job) -> float:
    """Train as one of the ranks that torch's launcher has started.

    Returns:
        What :func:`train` does, of all ranks together.
    """
    import torch.distributed as dist

    silence()
    dist.init_process_group("gloo")
    try:
        seconds = torch.tensor(train(job), dtype=torch.float64)
        dist.all_reduce(seconds)
    finally:
        dist.destroy_process_group()
    return float(seconds)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    if job.ranks > 1:
        from whole_job import on_ranks  # as ranks import it, not as the program that was called

        seconds = run_on_ranks(
            job.ranks, on_ranks.train_on_rank, job, forked_from="whole_job.rank_imports"
        )
    elif job.ranks == 1:
        from whole_job.torchrec_rows import join_alone

        silence()
        join_alone()
        seconds = train(job)
    else:
        seconds = train(job)
    print(json.dumps(seconds))


def _spent() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
