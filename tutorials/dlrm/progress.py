"""What is shown while the job runs, and said about lines that were left out."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm

from tutorials.dlrm import files_of_rows
from tutorials.dlrm.criteo import CriteoReader, DataError
from tutorials.dlrm.data import Data
from tutorials.dlrm.loop import Pass, peak_memory
from tutorials.dlrm.options import Options
from tutorials.dlrm.packages import Exported
from tutorials.dlrm.quantized import Served
from tutorials.dlrm.rows import Figures


def training_bar(
    name: str, data: Data, opts: Options, *, done: int = 0, hidden: bool = False
) -> tqdm[Any]:
    """Return a bar over the lines to train on, of which some are done."""
    return _bar(f"training {name}", data.train_lines, opts, done, hidden)


def evaluation_bar(name: str, data: Data, opts: Options, *, hidden: bool = False) -> tqdm[Any]:
    """Return a bar over the lines that are held out."""
    return _bar(f"evaluating {name}", data.lines - data.train_lines, opts, 0, hidden)


def _bar(name: str, lines: int, opts: Options, done: int, hidden: bool) -> tqdm[Any]:
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


def describe(figures: Figures, reader: CriteoReader, progress: Pass) -> dict[str, str]:
    """Return what the bar shows of the tables, their files, the process and the reader."""
    shown = {
        "ids": f"{figures.ids:,}",
        "tables": f"{figures.table_bytes / 2**20:.0f}MiB",
        "peak": f"{peak_memory() / 2**20:.0f}MiB",
    }
    if figures.storage is not None:
        shown |= files_of_rows.shown(figures.storage, progress)
    counted = figures.turnover._asdict() | {"skipped": reader.position.skipped}
    return shown | {name: f"{n:,}" for name, n in counted.items() if n > 0}


def check_trained(progress: Pass, data: Data, reader: CriteoReader) -> None:
    """Refuse data of which no line could be trained on.

    Raises:
        DataError: The pass had no samples.
    """
    if not progress.samples:
        raise DataError(
            f"no samples to train on: the {data.train_lines} lines before the held-out ones are "
            f"bad, the first: {reader.first_skipped}; give files in the Criteo format"
        )


def report_skipped(data: Data, reader: CriteoReader, held_out: CriteoReader) -> None:
    """Say on stderr how many lines the two readers have left out, if any."""
    if skipped := held_out.position.skipped:
        first = reader.first_skipped or held_out.first_skipped
        print(
            f"skipped {skipped} of {data.lines} lines" + (f", the first: {first}" if first else ""),
            file=sys.stderr,
        )


def report_served(kind: str, served: Served) -> None:
    """Say on stderr what the AUC of a frozen model is."""
    auc = "-" if served.auc is None else f"{served.auc:.6f}"
    print(
        f"frozen, rows {kind}: auc={auc}, {served.row_bytes} bytes of an id's row, "
        f"{served.bytes_per_id} bytes an id",
        file=sys.stderr,
    )


def report_exported(kind: str, package: Exported) -> None:
    """Say on stderr where a package is."""
    print(
        f"package, rows {kind}: {package.path}, {package.bytes:,} bytes, log-odds of "
        f"{package.samples:,} samples differ by {package.largest_difference:.1e} at most",
        file=sys.stderr,
    )
