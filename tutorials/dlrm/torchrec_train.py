"""The job as one of many ranks, with its tables sharded by TorchRec."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tutorials.dlrm.checkpoint import Checkpoints
from tutorials.dlrm.data import job_settings, make_reader, open_data, table_policies
from tutorials.dlrm.options import Options
from tutorials.dlrm.progress import (
    check_trained,
    describe,
    evaluation_bar,
    report_skipped,
    training_bar,
)
from tutorials.dlrm.publish import published
from tutorials.dlrm.rank_loop import RankPass
from tutorials.dlrm.summary import summarize
from tutorials.dlrm.torchrec_model import ShardedModel


def run(opts: Options) -> dict[str, Any] | None:
    """Train, evaluate, plot and report together with the other ranks, started with this one.

    Returns:
        What the program prints at its end; None on ranks other than 0.
    """
    torch.set_num_threads(max(1, opts.threads // int(os.environ["LOCAL_WORLD_SIZE"])))
    with _process_group(opts) as device:
        return train(opts, device)


def train(opts: Options, device: torch.device) -> dict[str, Any] | None:
    """Do the work of :func:`run` in the process group that there is.

    Args:
        opts: Of the job, the same on all ranks.
        device: Of this rank.
    """
    first = dist.get_rank() == 0
    opts.out.mkdir(parents=True, exist_ok=True)
    # Ranks of a machine that find no samples wait for one of them to make some.
    data = open_data(opts, quiet=not first)
    model = ShardedModel(opts, table_policies(opts, data), device)
    if first:
        print(model.describe_plan(), file=sys.stderr)
    progress = RankPass(model.parallel, [model.optimizer], device=device, log_every=opts.log_every)
    checkpoints = Checkpoints(
        opts, progress, [model.dense_optimizer], job_settings(opts, data), quiet=not first
    )
    mine = {"part": dist.get_rank(), "parts": dist.get_world_size()}
    with checkpoints:
        start = checkpoints.resume()
        reader = make_reader(opts, data, start, data.train_lines, **mine)

        def shown() -> dict[str, str]:
            figures = model.figures()
            progress.remember(figures)
            return describe(figures, reader, progress)

        with (
            training_bar("dynamic tables", data, opts, done=start.line, hidden=not first) as bar,
            published(opts, progress.model, checkpoints.after_step) as after_step,
        ):
            progress.train(reader, bar, describe=shown, after_step=after_step)
        check_trained(progress, data, reader)
        figures = model.figures()  # before rows are looked up to evaluate
        progress.remember(figures)
        checkpoints.save(reader.position)
        held_out = make_reader(opts, data, reader.position, data.lines, **mine)
        with evaluation_bar("dynamic tables", data, opts, hidden=not first) as bar:
            auc = progress.evaluate(held_out, bar)
    if not first:
        return None
    report_skipped(data, reader, held_out)
    curves = {"dynamic tables": (progress.points, auc)}
    # here, since matplotlib takes half a second, and ranks that plot nothing do without
    from tutorials.dlrm.plot import plot
    from tutorials.dlrm.report import write_report

    plot(opts.out / "training.png", curves, best_auc=data.best_auc)
    summary = {
        **summarize(opts, data, progress, auc, None, figures),
        "world_size": dist.get_world_size(),
        "sharding": model.sharding_types(),
    }
    write_report(opts, data, curves, progress.moments, summary)
    return summary


@contextmanager
def _process_group(opts: Options) -> Iterator[torch.device]:
    """Join the other ranks; the device is this rank's."""
    device = torch.device(opts.device)
    if opts.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if opts.device == "cuda" else "gloo")
    try:
        yield device
    finally:
        dist.destroy_process_group()
