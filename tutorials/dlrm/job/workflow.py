"""Steps that one process and ranks have in common: open the data, train, evaluate, report."""

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from tutorials.dlrm import options
from tutorials.dlrm.data import CriteoReader, DataError
from tutorials.dlrm.job.checkpoint import Checkpoints
from tutorials.dlrm.job.commits import Commits
from tutorials.dlrm.job.files import check_paths, count_lines
from tutorials.dlrm.job.generate import generate
from tutorials.dlrm.job.planted import PlantedConfig
from tutorials.dlrm.job.publish import published
from tutorials.dlrm.job.storage import storage_summary
from tutorials.dlrm.loop import Pass
from tutorials.dlrm.model import Figures


class Data(NamedTuple):
    """The files, and where the held-out lines begin."""

    paths: list[Path]
    lines: int
    train_lines: int
    best_auc: float | None  # that a model can reach; None: unknown


class Trained(NamedTuple):
    """A model with dynamic tables after its pass over the data."""

    auc: float
    figures: Figures
    held_out: Callable[[], CriteoReader]


def open_data(opts: Namespace, *, quiet: bool = False) -> Data:
    """Find the files, or generate them, and count their lines.

    Raises:
        DataError: There are too few lines, or they cannot be read.
        FileNotFoundError: A file does not exist.
    """
    opts.out.mkdir(parents=True, exist_ok=True)
    if opts.data:
        paths = check_paths(opts.data)
        lines = count_lines(paths)
        if lines < 2:
            list(CriteoReader(paths, 1, on_bad_line=opts.on_bad_line))  # raises if they are bad
            raise DataError(
                f"{', '.join(map(str, paths))}: {lines} lines of data; "
                "give at least 2, one to train on and one to hold out"
            )
        lines = min(lines, opts.samples or lines)
    else:
        config = PlantedConfig(
            seed=opts.seed,
            samples=opts.samples or PlantedConfig.samples,
            cardinality_divisor=opts.cardinality_divisor,
            zipf_exponent=opts.zipf,
        )
        generated = generate(config, opts.samples_folder)
        if not quiet:
            print(
                f"{generated.path}: {generated.distinct_ids:,} distinct ids, "
                f"{generated.late_share:.0%} of them first seen in the second half",
                file=sys.stderr,
            )
        paths, lines = [generated.path], config.samples
    train_lines = min(max(1, round(lines * (1 - opts.held_out))), lines - 1)
    return Data(paths, lines, train_lines, None if opts.data else generated.best_auc(train_lines))


def train(
    opts: Namespace,
    data: Data,
    progress: Pass,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    rank: int = 0,
    world_size: int = 1,
) -> Trained:
    """Train dynamic tables, from the checkpoint if the options ask for it, and evaluate them.

    Args:
        opts: Of the job.
        data: Of the job.
        progress: Of the model, new.
        optimizers: Those with a state that checkpoints save.
        rank: Of this process; ranks call this together.
        world_size: Number of ranks.
    """
    reader = partial(reader_of(opts, data), part=rank, parts=world_size)
    quiet = rank > 0
    sizes = [path.stat().st_size for path in data.paths]
    settings = options.settings_of_job(opts) | {"lines": data.lines, "file sizes": sizes}
    kind = Commits if opts.commit_every else Checkpoints
    with kind(opts, progress, optimizers, settings, quiet=quiet) as checkpoints:
        start = checkpoints.resume()
        samples = reader(start=start, stop_line=data.train_lines)
        with (
            bar_of(opts, "training dynamic tables", data.train_lines, start.line, quiet) as bar,
            published(opts, progress.model, checkpoints.after_step) as after_step,
        ):
            progress.train(samples, bar, after_step)
        if not progress.samples:
            raise DataError(
                f"no samples to train on: the {data.train_lines} lines before the held-out ones "
                f"are bad, the first: {samples.first_skipped}; give files in the Criteo format"
            )
        assert progress.figures is not None
        figures = progress.figures()  # before rows are looked up to evaluate
        checkpoints.save(samples.position)
        make_held_out = partial(reader, start=samples.position, stop_line=data.lines)
        held_out = make_held_out()
        held_out_lines = data.lines - data.train_lines
        with bar_of(opts, "evaluating dynamic tables", held_out_lines, 0, quiet) as bar:
            auc = progress.evaluate(held_out, bar)
    if (skipped := held_out.position.skipped) and not quiet:
        first = samples.first_skipped or held_out.first_skipped
        print(
            f"skipped {skipped} of {data.lines} lines" + (f", the first: {first}" if first else ""),
            file=sys.stderr,
        )
    return Trained(auc, figures, make_held_out)


def report(
    opts: Namespace,
    data: Data,
    progress: Pass,
    figures: Figures,
    curves: dict[str, tuple[list[Any], float]],
    more: dict[str, Any],
) -> dict[str, Any]:
    """Write the report; return the result that the program prints at its end."""
    # here, since matplotlib takes half a second, and ranks that report nothing do without
    from tutorials.dlrm import report

    # JSON has no NaN: the AUC is undefined if one of the labels does not occur
    aucs = {name: None if math.isnan(auc) else auc for name, (_, auc) in curves.items()}
    summary = {
        "auc": aucs["dynamic tables"],
        "best_auc": data.best_auc,
        "baseline_auc": aucs.get("hashed tables"),
        "samples": progress.samples,
        "samples_per_s": round(progress.samples / progress.seconds, 1),
        "ids": figures.ids,
        "table_bytes": figures.table_bytes,
        "optimizer": opts.optimizer,
        "row_dtype": opts.row_dtype,
        "state_dtype": opts.state_dtype,
        "rounding": opts.rounding,
        "accumulate": opts.accumulate,
        "capacity": opts.capacity,
        "eviction": opts.eviction,
        "admission": opts.admission,
        "evicted": figures.evicted,
        "rejected": figures.rejected,
        "not_admitted": figures.not_admitted,
        "device": opts.device,
        "compiled": opts.compile,
        "storage": storage_summary(opts, figures.storage, progress),
        **more,
    }
    report.write_report(opts.out, curves, summary, options.settings(opts))
    return summary


def reader_of(opts: Namespace, data: Data) -> Callable[..., CriteoReader]:
    """Return a function that makes readers of the lines of a job."""
    return partial(CriteoReader, data.paths, opts.batch_size, on_bad_line=opts.on_bad_line)


def bar_of(
    opts: Namespace, name: str, lines: int, done: int = 0, hidden: bool = False
) -> tqdm[Any]:
    """Return a bar over lines, of which some are done."""
    return tqdm(
        total=lines,
        initial=done,
        desc=name,
        unit=" samples",
        unit_scale=True,
        mininterval=opts.progress_interval,
        miniters=1,
        dynamic_ncols=True,
        disable=hidden,
    )
