"""The samples of the job: which files, which of their lines are held out, who reads them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

import torch_dynemb as td
from tutorials.dlrm.criteo import CriteoReader, DataError, Position, check_paths, count_lines
from tutorials.dlrm.generate import generate
from tutorials.dlrm.options import Options
from tutorials.dlrm.planted import PlantedConfig
from tutorials.dlrm.policies import COUNTED_LINES, count_ids, make_policies

_COUNTED_BATCH = 1 << 14  # samples, while ids are counted


class Data(NamedTuple):
    """The files, and where the held-out lines begin."""

    paths: list[Path]
    lines: int
    train_lines: int
    best_auc: float | None


def open_data(opts: Options, *, quiet: bool = False) -> Data:
    """Find the files, or generate them, and count their lines.

    Args:
        opts: Of the job.
        quiet: Say nothing about what was generated.

    Raises:
        DataError: There are too few lines, or they cannot be read.
        FileNotFoundError: A file is not there.
    """
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
    best_auc = None if opts.data else generated.best_auc(train_lines)
    return Data(paths, lines, train_lines, best_auc)


def table_policies(opts: Options, data: Data) -> list[td.Policy] | None:
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


def make_reader(
    opts: Options, data: Data, start: Position, stop_line: int, *, part: int = 0, parts: int = 1
) -> CriteoReader:
    """Return a reader of the lines from a position on, or of a part of every batch of them."""
    return CriteoReader(
        data.paths,
        opts.batch_size,
        start=start,
        stop_line=stop_line,
        on_bad_line=opts.on_bad_line,
        part=part,
        parts=parts,
    )


def job_settings(opts: Options, data: Data) -> dict[str, object]:
    """Return what a run that goes on must have in common with the interrupted one."""
    sizes = [path.stat().st_size for path in data.paths]
    return opts.settings() | {"lines": data.lines, "file sizes": sizes}
