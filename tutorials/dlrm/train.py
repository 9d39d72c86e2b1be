"""Train DLRM with dynamic embedding tables: ``python -m tutorials.dlrm.train --help``."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

import torch_dynemb as td
from tutorials.dlrm import checkpoint, options
from tutorials.dlrm.criteo import CriteoReader, DataError, Position, check_paths, count_lines
from tutorials.dlrm.generate import generate
from tutorials.dlrm.loop import Pass, peak_memory
from tutorials.dlrm.model import DLRM
from tutorials.dlrm.optimizers import check_baseline
from tutorials.dlrm.options import Options
from tutorials.dlrm.planted import PlantedConfig
from tutorials.dlrm.plot import plot
from tutorials.dlrm.policies import COUNTED_LINES, count_ids, make_policies
from tutorials.dlrm.rows import DynamicRows, HashedRows, split_rows

_ROW_BOUND = 0.01  # rows start uniform in [-bound, bound]
_COUNTED_BATCH = 1 << 14  # samples, while ids are counted


class Data(NamedTuple):
    """The files, and where the held-out lines begin."""

    paths: list[Path]
    lines: int
    train_lines: int
    best_auc: float | None


class Trained(NamedTuple):
    """A model after its pass over the data."""

    progress: Pass
    auc: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        arguments: Of the command line; None for those of this process.
    """
    opts = options.parse(arguments)
    try:
        result = run(opts)
    except (DataError, FileNotFoundError, checkpoint.CheckpointError, ValueError) as error:
        sys.exit(f"error: {error}")
    print(json.dumps(result))


def run(opts: Options) -> dict[str, Any]:
    """Train, evaluate, plot.

    Returns:
        What the program prints at its end; see ``--help``.
    """
    if opts.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no CUDA device; use --device cpu")
    opts.rows.config(opts.lr)  # raises before anything is read if there is no such optimizer
    if opts.baseline:
        check_baseline(opts.rows)
    torch.set_num_threads(opts.threads)
    opts.out.mkdir(parents=True, exist_ok=True)
    data = _open_data(opts)

    policies = _policies(opts, data)
    torch.manual_seed(opts.seed)
    rows = DynamicRows(
        opts.embedding_dim, lr=opts.lr, bound=_ROW_BOUND, policies=policies, options=opts.rows
    )
    dynamic = _train_dynamic(opts, data, rows)
    curves = {"dynamic tables": (dynamic.progress.points, dynamic.auc)}
    baseline_auc = None
    if opts.baseline:
        counts = split_rows(rows.sizes(), rows.table_bytes(), opts.embedding_dim)
        baseline = _train_baseline(opts, data, counts)
        curves["hashed tables"] = (baseline.progress.points, baseline.auc)
        baseline_auc = _number(baseline.auc)
    plot(opts.out / "training.png", curves, best_auc=data.best_auc)
    return {
        "auc": _number(dynamic.auc),
        "best_auc": data.best_auc,
        "baseline_auc": baseline_auc,
        "samples": dynamic.progress.samples,
        "samples_per_s": round(dynamic.progress.samples / dynamic.progress.seconds, 1),
        "ids": sum(rows.sizes()),
        "table_bytes": rows.table_bytes(),
        "optimizer": opts.optimizer,
        "row_dtype": opts.row_dtype,
        "state_dtype": opts.state_dtype,
        "rounding": opts.rounding,
        "accumulate": opts.accumulate,
        "capacity": opts.capacity,
        "eviction": opts.eviction,
        "admission": opts.admission,
        **rows.turnover()._asdict(),
        "device": opts.device,
        "compiled": opts.compile,
    }


def _open_data(opts: Options) -> Data:
    if opts.data:
        paths = check_paths(opts.data)
        lines = count_lines(paths)
        if lines < 2:
            list(CriteoReader(paths, 1, on_bad_line=opts.on_bad_line))  # raises if they are bad
            raise DataError(
                f"{', '.join(map(str, paths))}: {lines} lines of data; "
                "give at least 2, one to train on and one to hold out"
            )
        if opts.samples is not None:
            lines = min(lines, opts.samples)
    else:
        config = PlantedConfig(seed=opts.seed)
        if opts.samples is not None:
            config = PlantedConfig(seed=opts.seed, samples=opts.samples)
        generated = generate(config, opts.cache)
        print(
            f"{generated.path}: {generated.distinct_ids:,} distinct ids, "
            f"{generated.late_share:.0%} of them first seen in the second half",
            file=sys.stderr,
        )
        paths, lines = [generated.path], config.samples
    train_lines = min(max(1, round(lines * (1 - opts.held_out))), lines - 1)
    best_auc = None if opts.data else generated.best_auc(train_lines)
    return Data(paths, lines, train_lines, best_auc)


def _policies(opts: Options, data: Data) -> list[td.Policy] | None:
    """What the tables are told, after a look at the first lines; None: nothing."""
    if opts.capacity is None and opts.admission is None:
        return None
    reader = CriteoReader(
        data.paths,
        _COUNTED_BATCH,
        stop_line=min(COUNTED_LINES, data.train_lines),
        on_bad_line=opts.on_bad_line,
    )
    # With twice the ids that there is room for, it shows which features have few.
    counts = count_ids(reader, None if opts.capacity is None else 2 * opts.capacity)
    return make_policies(
        capacity=opts.capacity,
        eviction=opts.eviction or "none",
        admission=opts.admission,
        counts=counts,
    )


def _make_pass(opts: Options, rows: DynamicRows | HashedRows, *, compiled: bool) -> Pass:
    torch.manual_seed(opts.seed)  # again, whatever the rows drew: both models get the same MLPs
    model = DLRM(rows, opts.embedding_dim).to(opts.device)
    dense = torch.optim.Adam(model.dense_parameters(), lr=opts.dense_lr)
    return Pass(
        model,
        [dense, rows.optimizer()],
        log_every=opts.log_every,
        accumulate=opts.accumulate,
        compiled=compiled,
    )


def _reader(opts: Options, data: Data, start: Position, stop_line: int) -> CriteoReader:
    return CriteoReader(
        data.paths,
        opts.batch_size,
        start=start,
        stop_line=stop_line,
        on_bad_line=opts.on_bad_line,
    )


def _bar(name: str, data: Data, opts: Options, *, done: int) -> tqdm[Any]:
    return tqdm(
        total=data.train_lines,
        initial=done,
        desc=name,
        unit=" samples",
        unit_scale=True,
        mininterval=opts.progress_interval,
        miniters=1,
        dynamic_ncols=True,
    )


def _train_dynamic(opts: Options, data: Data, rows: DynamicRows) -> Trained:
    """Train with dynamic tables, from the checkpoint if told so, writing checkpoints."""
    progress = _make_pass(opts, rows, compiled=opts.compile)
    path = opts.out / "checkpoint.pt"
    settings = opts.settings() | {
        "lines": data.lines,
        "file sizes": [p.stat().st_size for p in data.paths],
    }
    start = Position()
    if opts.resume and path.exists():
        start = _resume(progress, checkpoint.load(path), settings)
        print(f"resuming after line {start.line} from {path}", file=sys.stderr)
    elif opts.resume:
        print(f"no checkpoint at {path}: beginning with the first line", file=sys.stderr)
    reader = _reader(opts, data, start, data.train_lines)

    def save() -> None:
        checkpoint.save(path, _state(progress, reader.position, settings))

    def after_step() -> None:
        if progress.step % opts.checkpoint_every == 0:
            save()

    def describe() -> dict[str, str]:
        shown = {
            "ids": f"{sum(rows.sizes()):,}",
            "tables": f"{rows.tables.memory()['total'] / 2**20:.0f}MiB",
            "peak": f"{peak_memory() / 2**20:.0f}MiB",
        }
        counted = rows.turnover()._asdict() | {"skipped": reader.position.skipped}
        return shown | {name: f"{n:,}" for name, n in counted.items() if n > 0}

    with _bar("dynamic tables", data, opts, done=start.line) as bar:
        progress.train(reader, bar, describe=describe, after_step=after_step)
    if not progress.samples:
        raise DataError(
            f"no samples to train on: the {data.train_lines} lines before the held-out ones are "
            f"bad, the first: {reader.first_skipped}; give files in the Criteo format"
        )
    save()
    held_out = _reader(opts, data, reader.position, data.lines)
    auc = progress.evaluate(held_out)
    if skipped := held_out.position.skipped:
        first = reader.first_skipped or held_out.first_skipped
        print(
            f"skipped {skipped} of {data.lines} lines" + (f", the first: {first}" if first else ""),
            file=sys.stderr,
        )
    return Trained(progress, auc)


def _train_baseline(opts: Options, data: Data, row_counts: list[int]) -> Trained:
    """Train with hashed tables of given sizes, never compiled, on the same batches."""
    torch.manual_seed(opts.seed)
    rows = HashedRows(row_counts, opts.embedding_dim, lr=opts.lr, bound=_ROW_BOUND)
    progress = _make_pass(opts, rows, compiled=False)
    reader = _reader(opts, data, Position(), data.train_lines)
    with _bar("hashed tables", data, opts, done=0) as bar:
        progress.train(reader, bar, describe=dict, after_step=lambda: None)
    auc = progress.evaluate(_reader(opts, data, reader.position, data.lines))
    return Trained(progress, auc)


def _state(progress: Pass, position: Position, settings: dict[str, object]) -> dict[str, Any]:
    return {
        "settings": settings,
        "model": progress.model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in progress.optimizers],
        "progress": progress.state_dict(),
        "seconds": progress.seconds,
        "rng": torch.get_rng_state(),  # of the only generator that training uses
        "position": tuple(position),
    }


def _resume(progress: Pass, state: dict[str, Any], settings: dict[str, object]) -> Position:
    """Take over a checkpoint; return where its reader stood."""
    checkpoint.check_same_settings(state["settings"], settings)
    progress.model.load_state_dict(state["model"])
    for optimizer, saved in zip(progress.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    progress.load_state_dict(state["progress"])
    progress.seconds = state["seconds"]
    torch.set_rng_state(state["rng"])
    return Position(*state["position"])


def _number(auc: float) -> float | None:
    """Return what JSON can hold: there is no AUC if one of the labels does not occur."""
    return None if math.isnan(auc) else auc


if __name__ == "__main__":
    main()
