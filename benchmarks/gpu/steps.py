"""Lookups and training steps on a GPU: against their own limits, static tables and graph replay.

Stages:

* ``host`` counts waits of the host in a training step, and compares replay with eager.
* ``published`` is the case that DynamicEmb publishes.
* ``host_rows`` is that case with rows in host memory.
* ``tiers`` is that case with rows in host memory and a cache in HBM, of several sizes.
* ``dims`` times every op at several widths and shares of distinct ids.
"""

from __future__ import annotations

import argparse
import functools
import gc
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from benchmarks.common.progress import progress
from benchmarks.common.report import Row, RowFile, failure
from benchmarks.gpu import limits
from benchmarks.gpu.experiments import read_ceilings
from benchmarks.gpu.stages.candidates import Settings
from benchmarks.gpu.stages.host import measure_host
from benchmarks.gpu.stages.host_rows import measure_host_rows
from benchmarks.gpu.stages.published import measure_published
from benchmarks.gpu.stages.tiers import measure_tiers
from benchmarks.gpu.stages.widths import measure_dim

STAGES = ("host", "published", "host_rows", "tiers", "dims")


def release() -> None:
    """Give the memory of tables that are gone back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run_stages(settings: Settings, stages: list[str], rows: RowFile) -> bool:
    """Run stages; one that fails leaves a row with the reason and does not stop the others."""
    work: list[tuple[str, Callable[[], Iterator[Row]]]] = []
    if "host" in stages:
        work.append(("host", lambda: measure_host(settings)))
    if "published" in stages:
        work.append(("published", lambda: measure_published(settings)))
    if "host_rows" in stages:
        work.append(("host_rows", lambda: measure_host_rows(settings)))
    if "tiers" in stages:
        work.append(("tiers", lambda: measure_tiers(settings)))
    if "dims" in stages:
        for dim in settings.dims:
            work.append((f"D={dim}", functools.partial(measure_dim, settings, dim)))
    complete = True
    for name, measure in progress(work, "stages"):
        try:
            for row in measure():
                rows.add(row)
        except Exception as error:
            traceback.print_exc(file=sys.stderr)
            complete = False
            reason = f"{type(error).__name__}: {error}"
            rows.add(failure("gpu_failed", name, reason[:1000]))
        release()
    return complete


def settings_of(options: argparse.Namespace) -> Settings:
    """Return sizes by the command line."""
    quick = options.quick
    return Settings(
        device=torch.device(options.device),
        ceilings=limits.ASSUMED_H200
        if options.assume_ceilings
        else read_ceilings(options.ceilings),
        rounds=options.rounds,
        # those with targets first, should time run out
        dims=tuple(options.dims or ((8, 64) if quick else (128, 64, 256, 32, 8))),
        shares=(0.33,) if quick else (1.0, 0.33, 0.1),
        ids=1 << 12 if quick else 1 << 20,
        bag=16,
        rows=1 << 14 if quick else 1 << 24,
        bytes=64_000_000_000,
        batches=2 if quick else 8,
        peer_calls=1 if quick else 2,
        published_tables=10,
        published_ids=1000 if quick else 1_048_570,
        published_rows=1000 if quick else 1_000_000,
        launches=options.launches,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help="cpu: a check")
    arguments.add_argument("--quick", action="store_true", help="smaller sizes: a check, no result")
    arguments.add_argument("--rounds", type=int, default=7, help="timed rounds (default 7)")
    arguments.add_argument("--dims", type=int, nargs="+", help="columns (default 8 to 256)")
    arguments.add_argument(
        "--stages", nargs="+", choices=STAGES, default=list(STAGES), help="default: all"
    )
    arguments.add_argument(
        "--launches",
        action="store_true",
        help="also note which kernels are launched; the profiler may slow down what is timed later",
    )
    arguments.add_argument("--rows", type=Path, help="file for the rows, a JSON line each")
    ceilings = arguments.add_mutually_exclusive_group()
    ceilings.add_argument("--ceilings", type=Path, help="rows of experiments.py")
    ceilings.add_argument(
        "--assume-ceilings", action="store_true", help="an H200's, as limits.py guesses them"
    )
    options = arguments.parse_args()
    torch.manual_seed(0)
    if not run_stages(settings_of(options), options.stages, RowFile(options.rows)):
        raise SystemExit("a stage failed; its row says why")


if __name__ == "__main__":
    main()
