"""Checkpoints: saving, loading, and how much an asynchronous save holds training up.

``--part`` picks what is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from checkpoints.files import load_rows, save_rows
from checkpoints.stall import stall_rows
from checkpoints.training import step_rows
from common.command import parser, positive
from common.report import Report, Row

BENCH = "checkpoint"


@dataclass(frozen=True)
class Measured:
    """Arguments of a part.

    Attributes:
        ids: of all tables together.
        rounds: that are timed.
        only: texts of the comparisons that are asked for.
        folder: for files.
    """

    ids: int
    rounds: int
    only: list[str]
    folder: Path


def _save(of: Measured) -> Iterator[Row | str]:
    return save_rows(BENCH, of.folder, of.ids, of.rounds, of.only)


def _load(of: Measured) -> Iterator[Row | str]:
    return load_rows(BENCH, of.folder, of.ids, of.rounds, of.only)


def _stall(of: Measured) -> Iterator[Row | str]:
    return stall_rows(BENCH, of.ids, of.rounds, of.only)


def _during(of: Measured) -> Iterator[Row | str]:
    return step_rows(BENCH, of.folder, of.ids, of.rounds, of.only)


PARTS: dict[str, Callable[[Measured], Iterator[Row | str]]] = {
    "save": _save,
    "load": _load,
    "stall": _stall,
    "during": _during,
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--part",
        choices=PARTS,
        action="append",
        help="what to measure; may be repeated (default: all)",
    )
    arguments.add_argument("--ids", type=positive, help="ids of the tables (default 1,900,000)")
    arguments.add_argument("--folder", type=Path, help="for files (default: that of the system)")
    arguments.add_argument("--threads", type=positive, help="threads (default: all)")
    options = arguments.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    ids = options.ids or (100_000 if options.quick else 1_900_000)
    report = Report(as_json=options.json, cases=10)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measured = Measured(ids, options.rounds, options.only, Path(folder))
        for part in options.part or PARTS:
            report.take(PARTS[part](measured))
    report.close()


if __name__ == "__main__":
    main()
