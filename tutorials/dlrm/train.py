"""Train DLRM with dynamic embedding tables: ``python -m tutorials.dlrm.train --help``."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch

from tutorials.dlrm import options
from tutorials.dlrm.data import DataError
from tutorials.dlrm.job import ranks, serving
from tutorials.dlrm.job.baseline import HashedRows, split_rows
from tutorials.dlrm.job.checkpoint import CheckpointError, report_interruption
from tutorials.dlrm.job.optimizers import row_optimizer
from tutorials.dlrm.job.policies import table_policies
from tutorials.dlrm.job.storage import storage_of
from tutorials.dlrm.job.workflow import Data, bar_of, open_data, reader_of, report, train
from tutorials.dlrm.loop import Pass
from tutorials.dlrm.model import DLRM, DynamicRows, Figures
from tutorials.dlrm.options import Options


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


def train_baseline(opts: Options, data: Data, figures: Figures) -> tuple[list[Any], float]:
    """Train hashed tables of the bytes of the dynamic ones, never compiled, on the same batches."""
    counts = split_rows(figures.ids_by_feature, figures.table_bytes, opts.embedding_dim)
    torch.manual_seed(opts.seed)
    progress = make_pass(opts, HashedRows(counts, opts.embedding_dim, lr=opts.lr), compiled=False)
    samples = reader_of(opts, data)(stop_line=data.train_lines)
    with bar_of(opts, "training hashed tables", data.train_lines) as bar:
        progress.train(samples, bar)
    held_out = reader_of(opts, data)(start=samples.position, stop_line=data.lines)
    with bar_of(opts, "evaluating hashed tables", data.lines - data.train_lines) as bar:
        return progress.points, progress.evaluate(held_out, bar)


if __name__ == "__main__":
    main()
