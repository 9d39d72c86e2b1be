"""Tables larger than memory: reads of blocks from an SSD.

``--part`` picks what is measured. Reads are set against fio, which has to be installed.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from common.command import parser, positive
from common.report import Report, Row
from tiered.reads import read_rows

BENCH = "tiers"


@dataclass(frozen=True)
class Measured:
    """What a part is given.

    Attributes:
        megabytes: of the files that are read.
        reads: of a round.
        rounds: that are timed.
        only: texts of the comparisons that are asked for.
        folder: for files, on the disk that is measured.
    """

    megabytes: int
    reads: int
    rounds: int
    only: list[str]
    folder: Path


def _reads(of: Measured) -> Iterator[Row | str]:
    return read_rows(BENCH, of.folder, of.megabytes, of.reads, of.rounds, of.only)


PARTS: dict[str, Callable[[Measured], Iterator[Row | str]]] = {"reads": _reads}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--part",
        choices=PARTS,
        action="append",
        help="what to measure; may be repeated (default: all)",
    )
    arguments.add_argument("--dir", type=Path, help="for files (default: that of the system)")
    arguments.add_argument("--megabytes", type=positive, help="size of the file (default 1024)")
    arguments.add_argument("--reads", type=positive, help="of a round (default 100,000)")
    options = arguments.parse_args()
    if shutil.which("fio") is None:
        arguments.error("fio is not on PATH; Debian and Ubuntu: apt-get install fio")
    megabytes = options.megabytes or (16 if options.quick else 1024)
    reads = options.reads or (1000 if options.quick else 100_000)
    report = Report(as_json=options.json, cases=4)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        measured = Measured(megabytes, reads, options.rounds, options.only, Path(folder))
        for part in options.part or PARTS:
            report.take(PARTS[part](measured))
    report.close()


if __name__ == "__main__":
    main()
