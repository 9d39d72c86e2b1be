"""Train DLRM with dynamic embedding tables: ``python -m tutorials.dlrm.train --help``."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

import torch_dynemb as td
from tutorials.dlrm import launch, options
from tutorials.dlrm.checkpoint import CheckpointError, Checkpoints, report_interruption
from tutorials.dlrm.criteo import DataError, Position
from tutorials.dlrm.data import Data, job_settings, make_reader, open_data, table_policies
from tutorials.dlrm.files_of_rows import storage_of
from tutorials.dlrm.loop import Pass
from tutorials.dlrm.model import DLRM
from tutorials.dlrm.optimizers import check_baseline
from tutorials.dlrm.options import Options
from tutorials.dlrm.packages import Exported, check_places, export_package
from tutorials.dlrm.progress import (
    check_trained,
    describe,
    evaluation_bar,
    report_exported,
    report_served,
    report_skipped,
    training_bar,
)
from tutorials.dlrm.publish import published
from tutorials.dlrm.quantized import Served, evaluate_frozen, kinds_of_rows
from tutorials.dlrm.rows import ROW_BOUND, DynamicRows, Figures, HashedRows, split_rows
from tutorials.dlrm.summary import summarize


class Trained(NamedTuple):
    """A model after its pass over the data."""

    progress: Pass
    auc: float
    served: dict[str, Served] | None = None
    """Frozen, by kind of rows; None: not asked for."""
    exported: dict[str, Exported] | None = None
    """Packages, by kind of rows; None: not asked for."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        arguments: Of the command line; None for those of this process.
    """
    opts = options.parse(arguments)
    try:
        result = launch.run(opts) if opts.torchrec else run(opts)
    except (DataError, FileNotFoundError, CheckpointError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        report_interruption(opts)
        sys.exit(128 + signal.SIGINT)  # as a shell says it
    if result is not None:
        print(json.dumps(result))


def run(opts: Options) -> dict[str, Any]:
    """Train in this process, evaluate, plot, report.

    Returns:
        What the program prints at its end; see ``--help``.
    """
    launch.check_alone()
    if opts.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device; use --device cpu")
    opts.rows.config(opts.lr)  # raises before anything is read if there is no such optimizer
    if opts.baseline:
        check_baseline(opts.rows)
    check_places(opts)
    torch.set_num_threads(opts.threads)
    opts.out.mkdir(parents=True, exist_ok=True)
    data = open_data(opts)

    rows = make_rows(opts, data)
    dynamic, figures = _train_dynamic(opts, data, rows)
    curves = {"dynamic tables": (dynamic.progress.points, dynamic.auc)}
    baseline_auc = None
    if opts.baseline:
        counts = split_rows(rows.sizes(), figures.table_bytes, opts.embedding_dim)
        baseline = _train_baseline(opts, data, counts)
        curves["hashed tables"] = (baseline.progress.points, baseline.auc)
        baseline_auc = baseline.auc
    # here, since matplotlib takes half a second, and ranks that plot nothing do without
    from tutorials.dlrm.plot import plot
    from tutorials.dlrm.report import write_report

    plot(opts.out / "training.png", curves, best_auc=data.best_auc)
    summary = summarize(opts, data, dynamic.progress, dynamic.auc, baseline_auc, figures)
    if dynamic.served is not None:
        summary["quantized"] = {kind: of_kind._asdict() for kind, of_kind in dynamic.served.items()}
    if dynamic.exported is not None:
        summary["exported"] = {kind: of._asdict() for kind, of in dynamic.exported.items()}
    write_report(opts, data, curves, dynamic.progress.moments, summary)
    return summary


def make_rows(opts: Options, data: Data) -> DynamicRows:
    """Make the dynamic tables, empty.

    Raises:
        ValueError: The folder for files of rows is in use, or has other rows.
    """
    policies = table_policies(opts, data)
    torch.manual_seed(opts.seed)
    try:
        return DynamicRows(
            opts.embedding_dim,
            lr=opts.lr,
            bound=ROW_BOUND,
            policies=policies,
            options=opts.rows,
            storage=storage_of(opts),
        )
    except RuntimeError as error:
        if opts.storage == "memory":
            raise
        raise ValueError(f"--storage-path {opts.storage_path}: {error}") from error


def _make_pass(opts: Options, rows: DynamicRows | HashedRows, *, compiled: bool) -> Pass:
    torch.manual_seed(opts.seed)  # again, whatever the rows drew: both models get the same MLPs
    model = DLRM(rows, opts.embedding_dim).to(opts.device)
    prefetches = isinstance(rows, DynamicRows) and opts.storage == "ssd"
    dense = torch.optim.Adam(model.dense_parameters(), lr=opts.dense_lr)
    return Pass(
        model,
        [dense, rows.optimizer()],
        log_every=opts.log_every,
        accumulate=opts.accumulate,
        prefetch=rows.prefetch if prefetches else None,
        compiled=compiled,
    )


def _train_dynamic(opts: Options, data: Data, rows: DynamicRows) -> tuple[Trained, Figures]:
    """Train with dynamic tables, from the checkpoint if told so, writing checkpoints.

    Returns:
        The model, and what there is to report of its tables when training ends.
    """
    progress = _make_pass(opts, rows, compiled=opts.compile)
    settings = job_settings(opts, data)
    with Checkpoints(opts, progress, progress.optimizers, settings) as checkpoints:
        start = checkpoints.resume()
        reader = make_reader(opts, data, start, data.train_lines)

        def shown() -> dict[str, str]:
            figures = rows.figures()
            progress.remember(figures)
            return describe(figures, reader, progress)

        with (
            training_bar("dynamic tables", data, opts, done=start.line) as bar,
            published(opts, progress.model, checkpoints.after_step) as after_step,
        ):
            progress.train(reader, bar, describe=shown, after_step=after_step)
        check_trained(progress, data, reader)
        figures = rows.figures()  # before rows are looked up to evaluate
        progress.remember(figures)
        checkpoints.save(reader.position)
        held_out = make_reader(opts, data, reader.position, data.lines)
        with evaluation_bar("dynamic tables", data, opts) as bar:
            auc = progress.evaluate(held_out, bar)
        served, exported = _freeze(opts, data, progress, reader.position)
    report_skipped(data, reader, held_out)
    return Trained(progress, auc, served, exported), figures


def _freeze(
    opts: Options, data: Data, progress: Pass, position: Position
) -> tuple[dict[str, Served] | None, dict[str, Exported] | None]:
    """Freeze the model with each kind of rows, one after another, to evaluate and export it."""
    served: dict[str, Served] | None = {} if opts.quantize else None
    exported: dict[str, Exported] | None = None if opts.export is None else {}
    if served is None and exported is None:
        return None, None
    for kind, rows in kinds_of_rows(opts):
        frozen = td.freeze(progress.model, rows=rows)
        if served is not None:
            served[kind] = evaluate_frozen(opts, data, frozen, position)
            report_served(kind, served[kind])
        if exported is not None and opts.export is not None:
            held_out = make_reader(opts, data, position, data.lines)
            path = opts.export / kind
            exported[kind] = export_package(frozen, path, progress.step, held_out)
            report_exported(kind, exported[kind])
    return served, exported


def _train_baseline(opts: Options, data: Data, row_counts: list[int]) -> Trained:
    """Train with hashed tables of given sizes, never compiled, on the same batches."""
    torch.manual_seed(opts.seed)
    rows = HashedRows(row_counts, opts.embedding_dim, lr=opts.lr, bound=ROW_BOUND)
    progress = _make_pass(opts, rows, compiled=False)
    reader = make_reader(opts, data, Position(), data.train_lines)
    with training_bar("hashed tables", data, opts) as bar:
        progress.train(reader, bar, describe=dict, after_step=lambda _: None)
    with evaluation_bar("hashed tables", data, opts) as bar:
        auc = progress.evaluate(make_reader(opts, data, reader.position, data.lines), bar)
    return Trained(progress, auc)


if __name__ == "__main__":
    main()
