"""Tables larger than memory: rows in files on an SSD, with a cache of them in memory.

``--part`` picks what is measured. Blocks are read against fio, rows against RocksDB, which have to
be installed.
"""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from common.command import parser, positive
from common.report import Report, Row
from peers.build import has_rocksdb
from tiered import logs, mapped, training, whole
from tiered.reads import read_rows

BENCH = "tiers"


def _reads(options: Namespace, folder: Path) -> Iterator[Row | str]:
    megabytes = options.megabytes or (16 if options.quick else 1024)
    reads = options.reads or (1000 if options.quick else 100_000)
    return read_rows(BENCH, folder, megabytes, reads, options.rounds, options.only)


def _training_sizes(options: Namespace) -> training.Sizes:
    return training.Sizes(
        ids=options.ids or (100_000 if options.quick else 2_000_000),
        bags=options.batch or (256 if options.quick else 4096),
        rounds=options.rounds,
        calls=2 if options.quick else 8,
        settling=2 if options.quick else 40,
    )


def _training(options: Namespace, folder: Path) -> Iterator[Row | str]:
    return training.training_rows(BENCH, folder, _training_sizes(options), options.only)


def _mapped(options: Namespace, folder: Path) -> Iterator[Row | str]:
    return mapped.mapped_rows(BENCH, folder, _training_sizes(options), options.cgroup, options.only)


def _logs(options: Namespace, folder: Path) -> Iterator[Row | str]:
    rows = options.rows or (20_000 if options.quick else 2_000_000)
    sizes = logs.Sizes(
        rows=rows,
        reads=options.reads or (2000 if options.quick else 100_000),
        writes=max(1, rows // 4),
        rounds=options.rounds,
    )
    return logs.log_rows(BENCH, folder, sizes, options.only)


def _snapshot(options: Namespace, folder: Path) -> Iterator[Row | str]:
    ids = options.ids or (10_000 if options.quick else 1_000_000)
    return whole.snapshot_rows(BENCH, folder, ids, options.rounds, options.only)


def _memory(options: Namespace, folder: Path) -> Iterator[Row | str]:
    ids = options.ids or (10_000 if options.quick else 10_000_000)
    return whole.memory_rows(BENCH, folder, ids, options.only)


# memory is first: what other parts have freed would be taken for memory that was there before
PARTS: dict[str, Callable[[Namespace, Path], Iterator[Row | str]]] = {
    "memory": _memory,
    "reads": _reads,
    "training": _training,
    "logs": _logs,
    "snapshot": _snapshot,
    "mapped": _mapped,
}


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument(
        "--part",
        choices=PARTS,
        action="append",
        help="what to measure; may be repeated (default: all, mapped with --cgroup only)",
    )
    arguments.add_argument(
        "--cgroup",
        type=Path,
        help="mapped: a memory cgroup (version 1) in which this process may make another one, "
        "to limit its own memory, for example /sys/fs/cgroup/memory as root",
    )
    arguments.add_argument("--dir", type=Path, help="for files (default: that of the system)")
    arguments.add_argument("--megabytes", type=positive, help="reads: of the file (default 1024)")
    arguments.add_argument("--reads", type=positive, help="of a round (default 100,000)")
    arguments.add_argument("--rows", type=positive, help="logs: that are written (default 2 M)")
    arguments.add_argument("--ids", type=positive, help="of a table (default 1 to 10 M)")
    arguments.add_argument("--batch", type=positive, help="training: bags of 20 ids (default 4096)")
    arguments.add_argument("--threads", type=positive, default=1, help="of torch (default 1)")
    options = arguments.parse_args()
    if options.part is None:
        parts = [part for part in PARTS if part != "mapped" or options.cgroup is not None]
    else:
        parts = [part for part in PARTS if part in options.part]
    if "mapped" in parts and options.cgroup is None:
        arguments.error("--part mapped needs --cgroup, because it limits the process's memory")
    if shutil.which("fio") is None:
        arguments.error("fio is not on PATH; Debian and Ubuntu: apt-get install fio")
    if "logs" in parts and not has_rocksdb():
        arguments.error("RocksDB is missing; Debian and Ubuntu: apt-get install librocksdb-dev")
    torch.set_num_threads(options.threads)
    report = Report(as_json=options.json, cases=22)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        for part in parts:
            report.take(PARTS[part](options, Path(folder)))
    report.close()


if __name__ == "__main__":
    main()
