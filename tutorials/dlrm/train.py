"""Train DLRM with dynamic embedding tables: ``python -m tutorials.dlrm.train --help``."""

from __future__ import annotations

import json
import math
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from tutorials.dlrm import options
from tutorials.dlrm.data import CriteoReader, DataError
from tutorials.dlrm.job import ranks, serving
from tutorials.dlrm.job.baseline import HashedRows, split_rows
from tutorials.dlrm.job.checkpoint import CheckpointError, Checkpoints, report_interruption
from tutorials.dlrm.job.files import check_paths, count_lines
from tutorials.dlrm.job.generate import generate
from tutorials.dlrm.job.optimizers import row_optimizer
from tutorials.dlrm.job.planted import PlantedConfig
from tutorials.dlrm.job.policies import table_policies
from tutorials.dlrm.job.publish import published
from tutorials.dlrm.job.storage import storage_of, storage_summary
from tutorials.dlrm.loop import Pass
from tutorials.dlrm.model import DLRM, DynamicRows, Figures
from tutorials.dlrm.options import Options


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        arguments: Of the command line; None for those of this process.
    """
    opts = options.parse(arguments)
    try:
        result = ranks.run(opts) if opts.torchrec else run(opts)
    except (DataError, FileNotFoundError, CheckpointError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        report_interruption(opts)
        sys.exit(128 + signal.SIGINT)  # as a shell says it
    if result is not None:
        print(json.dumps(result))


def run(opts: Options) -> dict[str, Any]:
    """Train in this process, evaluate, report.

    Returns:
        The result that the program prints at its end; see ``--help``.
    """
    ranks.check_alone()
    if opts.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device; use --device cpu")
    row_optimizer(opts)  # raises before anything is read
    serving.check_places(opts)
    torch.set_num_threads(opts.threads)
    data = open_data(opts)
    progress = make_pass(opts, make_rows(opts, data), compiled=opts.compile)
    trained = train(opts, data, progress, progress.optimizers)
    frozen = serving.freeze(opts, progress.model, progress.step, trained.held_out)
    curves = {"dynamic tables": (progress.points, trained.auc)}
    if opts.baseline:
        curves["hashed tables"] = train_baseline(opts, data, trained.figures)
    return report(opts, data, progress, trained.figures, curves, frozen)


def open_data(opts: Options, *, quiet: bool = False) -> Data:
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


def make_rows(opts: Options, data: Data) -> DynamicRows:
    """Make the dynamic tables, empty.

    Raises:
        ValueError: The folder for files of rows is in use, or has other rows.
    """
    policies = table_policies(opts, data.paths, data.train_lines)
    torch.manual_seed(opts.seed)
    try:
        return DynamicRows(
            opts.embedding_dim,
            row_optimizer(opts),
            policies=policies,
            dtype=getattr(torch, opts.row_dtype),
            split=opts.accumulate > 1,
            storage=storage_of(opts),
        )
    except RuntimeError as error:
        if opts.storage == "memory":
            raise
        raise ValueError(f"--storage-path {opts.storage_path}: {error}") from error


def make_pass(opts: Options, rows: DynamicRows | HashedRows, *, compiled: bool) -> Pass:
    """Make the model around its rows, and its training."""
    torch.manual_seed(opts.seed)  # again, since rows drew: both models get the same MLPs
    model = DLRM(rows, opts.embedding_dim).to(opts.device)
    dynamic = isinstance(rows, DynamicRows)
    return Pass(
        model,
        [torch.optim.Adam(model.dense_parameters(), lr=opts.dense_lr), rows.optimizer()],
        device=opts.device,
        log_every=opts.log_every,
        accumulate=opts.accumulate,
        figures=rows.figures if dynamic else None,
        prefetch=rows.prefetch if dynamic and opts.storage == "ssd" else None,
        compiled=compiled,
    )


def train(
    opts: Options,
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
    reader = partial(_reader(opts, data), part=rank, parts=world_size)
    quiet = rank > 0
    sizes = [path.stat().st_size for path in data.paths]
    settings = options.settings_of_job(opts) | {"lines": data.lines, "file sizes": sizes}
    with Checkpoints(opts, progress, optimizers, settings, quiet=quiet) as checkpoints:
        start = checkpoints.resume()
        samples = reader(start=start, stop_line=data.train_lines)
        with (
            _bar(opts, "training dynamic tables", data.train_lines, start.line, quiet) as bar,
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
        with _bar(opts, "evaluating dynamic tables", held_out_lines, 0, quiet) as bar:
            auc = progress.evaluate(held_out, bar)
    if (skipped := held_out.position.skipped) and not quiet:
        first = samples.first_skipped or held_out.first_skipped
        print(
            f"skipped {skipped} of {data.lines} lines" + (f", the first: {first}" if first else ""),
            file=sys.stderr,
        )
    return Trained(auc, figures, make_held_out)


def train_baseline(opts: Options, data: Data, figures: Figures) -> tuple[list[Any], float]:
    """Train hashed tables of the bytes of the dynamic ones, never compiled, on the same batches."""
    counts = split_rows(figures.ids_by_feature, figures.table_bytes, opts.embedding_dim)
    torch.manual_seed(opts.seed)
    progress = make_pass(opts, HashedRows(counts, opts.embedding_dim, lr=opts.lr), compiled=False)
    samples = _reader(opts, data)(stop_line=data.train_lines)
    with _bar(opts, "training hashed tables", data.train_lines) as bar:
        progress.train(samples, bar)
    held_out = _reader(opts, data)(start=samples.position, stop_line=data.lines)
    with _bar(opts, "evaluating hashed tables", data.lines - data.train_lines) as bar:
        return progress.points, progress.evaluate(held_out, bar)


def report(
    opts: Options,
    data: Data,
    progress: Pass,
    figures: Figures,
    curves: dict[str, tuple[list[Any], float]],
    more: dict[str, Any],
) -> dict[str, Any]:
    """Write the report; return the result that the program prints at its end."""
    # here, since matplotlib takes half a second, and ranks that report nothing do without
    from tutorials.dlrm import report

    # JSON has no NaN: there is no AUC if one of the labels does not occur
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


def _reader(opts: Options, data: Data) -> Callable[..., CriteoReader]:
    return partial(CriteoReader, data.paths, opts.batch_size, on_bad_line=opts.on_bad_line)


def _bar(opts: Options, name: str, lines: int, done: int = 0, hidden: bool = False) -> tqdm[Any]:
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


if __name__ == "__main__":
    main()
