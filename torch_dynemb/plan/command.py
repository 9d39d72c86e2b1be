"""``python -m torch_dynemb plan``."""

from __future__ import annotations

import argparse
import json
import re
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch_dynemb.plan.choices import row_formats
from torch_dynemb.plan.counting import KEPT, IdCounter
from torch_dynemb.plan.growth import distinct_ids
from torch_dynemb.plan.outcome import Wishes, outcome
from torch_dynemb.plan.plot import check_plot, plot
from torch_dynemb.plan.ranks.grammar import rank_counts
from torch_dynemb.plan.ranks.options import add_rank_options, rank_wishes
from torch_dynemb.plan.ranks.outcome import modelled
from torch_dynemb.plan.ranks.plot import plot_ranks
from torch_dynemb.plan.replay.options import add_replay_options, replay_wishes
from torch_dynemb.plan.replay.outcome import replayed
from torch_dynemb.plan.replay.plot import plot_replay
from torch_dynemb.plan.replay.recording import Recording
from torch_dynemb.plan.report import print_report
from torch_dynemb.plan.sizes import DTYPES, OPTIMIZERS, STATE_DTYPES
from torch_dynemb.plan.streams import FORMATS, read_lines
from torch_dynemb.policy.admission import parse_bytes

_TIMES = re.compile(r"x?([0-9]+(?:\.[0-9]+)?)x?")
_LEAST_KEPT = 64


def add_command(commands: Any) -> None:
    """Add the command ``plan``.

    Args:
        commands: result of ``ArgumentParser.add_subparsers``.
    """
    parser = commands.add_parser(
        "plan",
        help="estimate number and size of ids from a sample, and suggest settings",
        description="Count the ids in a sample of a stream, extrapolate their number, and print "
        "the sizes of their tables and settings that fit.",
    )
    add = parser.add_argument
    add(
        "data",
        nargs="+",
        metavar="DATA",
        help="files in the order of time: Criteo's format, Parquet, or an id in each line; text "
        "may be compressed (.gz); - is the standard input",
    )
    add("--format", choices=FORMATS, help="format of the files (default: detect it)")
    add(
        "--columns",
        metavar="A,B",
        help="columns of ids: C1 to C26 and I1 to I13 of Criteo's format; integers, strings "
        "or lists of them in Parquet (default: all, without I1 to I13)",
    )
    add("--lines", type=_positive, metavar="N", help="maximum number of lines (default: all)")
    add(
        "--total",
        metavar="N",
        help="lines of the whole stream, or a multiple of the sample, such as 10x (default: the "
        "sample)",
    )
    add("--dim", type=_positive, required=True, help="columns of a row")
    add(
        "--optimizer",
        choices=sorted(OPTIMIZERS),
        default="rowwise-adagrad",
        metavar="NAME",
        help=f"{', '.join(OPTIMIZERS)} (default: rowwise-adagrad)",
    )
    add("--dtype", choices=DTYPES, help="of rows (default: what fits)")
    add(
        "--state-dtype",
        choices=STATE_DTYPES,
        help="of the optimizer's state by weight (default: what fits)",
    )
    add(
        "--device-memory",
        metavar="BYTES",
        help="memory for tables on each rank, such as 40GB; leave room for the rest of the model",
    )
    add(
        "--ranks",
        type=rank_counts,
        default=[1],
        metavar="N",
        help="number of ranks that share the ids (default: 1); with --link a list such as "
        "8,64,1024, of which choices and replay take the first",
    )
    add(
        "--keep",
        type=_positive,
        default=KEPT,
        metavar="N",
        help="ids of a column in memory, at least 64; of more, a sample is counted, and figures "
        f"become estimates (default: {KEPT}, about 40 MB)",
    )
    add("--json", action="store_true", help="print all figures as JSON")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="draw growth and coverage, or the replay or the ranks if there are any; needs "
        "matplotlib",
    )
    add_replay_options(parser, _positive)
    add_rank_options(parser, _positive)
    parser.set_defaults(run=run)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 1")
    return int(text)


def run(arguments: argparse.Namespace) -> None:
    """Read the sample, and print the plan.

    Args:
        arguments: of the command line.

    Raises:
        OSError, ValueError, ImportError: an option is wrong, or a file cannot be read.
    """
    if arguments.keep < _LEAST_KEPT:
        raise ValueError(f"--keep is {arguments.keep}, expected at least {_LEAST_KEPT}")
    rows = row_formats(arguments.dim, arguments.optimizer, arguments.dtype, arguments.state_dtype)
    memory = arguments.device_memory
    if memory is not None:
        memory = parse_bytes("--device-memory", memory)
    total = None if arguments.total is None else _total(arguments.total)
    columns = None if arguments.columns is None else arguments.columns.split(",")
    replay = replay_wishes(arguments)
    scale = rank_wishes(arguments)
    if replay is not None and arguments.plot is not None:
        if scale is not None:
            raise ValueError(
                "--plot draws the replay or the ranks: leave --replay or --link out, and plan again"
            )
        check_plot(arguments.plot)  # a replay takes minutes
    names, batches = read_lines(
        arguments.data,
        file_format=arguments.format,
        columns=columns,
        limit=arguments.lines,
        values=[] if replay is None else replay.roles.names,
    )
    counters = {name: IdCounter(arguments.keep) for name in names}
    missing = dict.fromkeys(names, 0)
    with ExitStack() as stack:
        recording = None
        if replay is not None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            recording = Recording(folder, names, replay.roles, replay.batch_size)
        for batch in batches:
            for name, column in batch.columns.items():
                counters[name].add(column.ids, column.lines, lines=batch.count)
                missing[name] += column.missing
            if recording is not None:
                recording.add(batch)
        counts = {name: counter.counts() for name, counter in counters.items()}
        if all(column.lookups == 0 for column in counts.values()):
            raise ValueError(
                f"{', '.join(arguments.data)}: no line has an id in {', '.join(names)}; name with "
                "--columns those that have"
            )
        times, ranks = _times(total, counts[names[0]].lines), arguments.ranks[0]
        plan = outcome(arguments.data, counts, missing, Wishes(rows, times, ranks, memory))
        plan["replay"] = plan["scale"] = None
        if scale is not None:
            later = {name: distinct_ids(column, times) for name, column in counts.items()}
            plan["scale"] = modelled(counts, later, rows[0], scale)
        if replay is not None and recording is not None:
            recording.close()
            plan["replay"] = replayed(recording, counts, rows[0], ranks, replay)
    if arguments.plot is not None and plan["replay"] is not None:
        plot_replay(plan["replay"], arguments.plot)
    elif arguments.plot is not None and plan["scale"] is not None:
        plot_ranks(plan["scale"], arguments.plot)
    elif arguments.plot is not None:
        plot(plan, arguments.plot)
    if arguments.json:
        print(json.dumps(plan, indent=2))
    else:
        print_report(plan)


def _total(text: str) -> float | int:
    """Parse a number of lines (int), or a multiple of the sample (float)."""
    found = _TIMES.fullmatch(text)
    is_times = "x" in text
    if found is None or text.count("x") > 1 or (not is_times and not text.isdecimal()):
        raise ValueError(
            f"--total is {text!r}, expected a number of lines such as 1000000000, or how many "
            "times the sample, such as 10x"
        )
    if is_times and float(found[1]) < 1:
        raise ValueError(f"--total is {text!r}, expected at least 1x: the sample itself")
    return float(found[1]) if is_times else int(text)


def _times(total: float | int | None, lines: int) -> float:
    if total is None:
        return 1.0
    if isinstance(total, float):
        return total
    if total < lines:
        raise ValueError(
            f"--total is {total} lines, but the sample has {lines}: give at least as many, or take "
            "fewer of the sample with --lines"
        )
    return total / lines


__all__ = ["add_command", "run"]
