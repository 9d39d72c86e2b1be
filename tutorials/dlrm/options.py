"""Command line of the DLRM training program."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tutorials.dlrm.criteo import OnBadLine
from tutorials.dlrm.optimizers import (
    DEFAULT,
    OPTIMIZERS,
    Rounding,
    RowDtype,
    RowOptions,
    StateDtype,
)
from tutorials.dlrm.parsing import CATEGORY_COUNT
from tutorials.dlrm.planted import PlantedConfig
from tutorials.dlrm.policies import Eviction, admission_rule

_DESCRIPTION = """\
Train DLRM on click logs in the Criteo format, with dynamic embedding tables.

A line has 40 tab-separated fields: a label (0 or 1), 13 integers, 26 categories as hexadecimal
strings; empty means missing. Files may be gzipped and are streamed once, in the order given; there
is no vocabulary and no preprocessing. Without files, samples of a known model are generated once
and kept.

Tables grow with the ids that come, or up to --capacity, which is divided among the features after a
look at the first lines: in equal shares, but none larger than the feature needs. Rows are updated
by --optimizer and kept in --row-dtype, its state in --state-dtype.

The last lines of the data are held out for the AUC. Then the same model is trained with hashed
tables of the same size as a baseline. The last line of the output is a JSON object: auc, best_auc
(of the planted probabilities; null for your own files), baseline_auc, samples (trained on),
samples_per_s, ids (in the tables at the end), table_bytes (rows, optimizer state, index, scores and
counts of ids not admitted), optimizer, row_dtype, state_dtype, rounding, accumulate, capacity,
eviction, admission, evicted (ids that had to go), rejected and not_admitted (new ids without a row,
once per step: for want of room, or by --admission), device, compiled.

With --torchrec the tables are sharded over processes by TorchRec's DistributedModelParallel and the
MLPs are data parallel. Each rank takes its part of every batch, so that all together do the steps
of one process. There is no baseline, and the JSON object has two more entries: world_size and
sharding (of each table). For several machines, start the program with torchrun on each.
"""

# Options that may differ between a run and the one that resumes it.
_FREE_ON_RESUME = (
    *("out", "cache", "resume", "baseline", "progress_interval"),
    *("async_checkpoint", "nproc", "sharding"),
)

Sharding = Literal[
    "auto",
    "row_wise",
    "table_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
]


@dataclass(frozen=True)
class Options:
    """Everything the program is told; see :func:`parse`."""

    data: list[Path]
    samples: int | None
    held_out: float
    on_bad_line: OnBadLine
    embedding_dim: int
    lr: float
    dense_lr: float
    batch_size: int
    optimizer: str
    row_dtype: RowDtype
    state_dtype: StateDtype
    rounding: Rounding
    accumulate: int
    capacity: int | None
    eviction: Eviction | None
    """None without a capacity."""
    admission: str | None
    seed: int
    threads: int
    device: str
    compile: bool
    baseline: bool
    out: Path
    cache: Path
    checkpoint_every: int
    async_checkpoint: bool
    resume: bool
    log_every: int
    progress_interval: float
    torchrec: bool
    nproc: int | None
    """None with torchrun, which has started the processes."""
    sharding: Sharding | None
    """None without TorchRec."""

    @property
    def rows(self) -> RowOptions:
        """How rows are updated and kept."""
        split = self.accumulate > 1
        return RowOptions(self.optimizer, self.row_dtype, self.state_dtype, self.rounding, split)

    def settings(self) -> dict[str, object]:
        """Return what a resumed run must have in common with the interrupted one."""
        plain = asdict(self) | {"data": [str(path.resolve()) for path in self.data]}
        return {
            "--" + name.replace("_", "-"): value
            for name, value in plain.items()
            if name not in _FREE_ON_RESUME
        }


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse a command line.

    Args:
        arguments: Without the program's name; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tutorials.dlrm.train",
        description=_DESCRIPTION,
        formatter_class=_Formatter,
    )
    add = parser.add_argument_group("data").add_argument
    parser.add_argument(
        "data",
        nargs="*",
        type=Path,
        help="files in the Criteo format, .gz too; none: generated samples",
    )
    add(
        "--samples",
        type=_at_least(2),
        metavar="N",
        help="use the first N lines of the files, held-out ones included (default: all), "
        f"or generate N samples (default: {PlantedConfig.samples})",
    )
    add(
        "--held-out",
        type=_fraction,
        default=0.1,
        metavar="SHARE",
        help="share of the lines, at the end, that is not trained on",
    )
    add(
        "--on-bad-line",
        choices=("error", "skip"),
        default="error",
        help="stop at a line that is not in the format, or leave it out and count it",
    )
    add = parser.add_argument_group("training").add_argument
    add("--embedding-dim", type=_at_least(1), default=16, metavar="D", help="length of a row")
    add("--batch-size", type=_at_least(1), default=2048, metavar="B", help="samples per step")
    add("--lr", type=_positive, default=0.02, help="learning rate of the rows")
    add("--dense-lr", type=_positive, default=1e-3, help="learning rate of the MLPs (Adam)")
    add("--seed", type=_at_least(0), default=0, help="of generated data and of initial values")
    add(
        "--threads",
        type=_at_least(1),
        default=os.cpu_count() or 1,
        metavar="N",
        help="CPU threads of a training step; processes on a machine share them",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    add("--compile", action="store_true", help="torch.compile(fullgraph=True, dynamic=True)")
    add(
        "--no-baseline",
        dest="baseline",
        action="store_false",
        help="do not train the model with hashed tables (baseline_auc is null)",
    )
    add(
        "--accumulate",
        type=_at_least(1),
        default=1,
        metavar="K",
        help="divide a batch into K micro-batches; from 2 on, rows are updated once the gradients "
        "of all have been added up, not in each backward",
    )
    add = parser.add_argument_group("rows and their optimizer (with --no-baseline)").add_argument
    add(
        "--optimizer",
        choices=tuple(OPTIMIZERS),
        default=DEFAULT,
        help="of the rows; each has a --lr of its own that suits it",
    )
    add(
        "--row-dtype",
        choices=get_args(RowDtype),
        default="float32",
        help="what rows are kept in; arithmetic is float32",
    )
    add(
        "--state-dtype",
        choices=get_args(StateDtype),
        default="float32",
        help="what the optimizer's values by weight are kept in: bfloat16 unless there are none "
        "(sgd, rowwise-adagrad); uint8, 8-bit floats with a scale per 128 columns, for adam and "
        "its kin",
    )
    add(
        "--rounding",
        choices=get_args(Rounding),
        default="stochastic",
        help="of rows and state below float32: by chance, right on average, or to the nearest",
    )
    add = parser.add_argument_group("life cycle of ids").add_argument
    add(
        "--capacity",
        type=_at_least(CATEGORY_COUNT),
        metavar="N",
        help="ids that the tables hold at most, all together (default: all that come)",
    )
    add(
        "--eviction",
        choices=get_args(Eviction),
        help="who makes room in a full table: the id that was trained on least often, or least "
        "recently; none: nobody, and new ids have no row (default: lfu with --capacity)",
    )
    add(
        "--admission",
        type=_admission,
        metavar="RULE",
        help="which new ids get a row: count:N, those of N occurrences; sketch:N:BYTES, the same "
        "with counts in so much memory for all tables, roughly; chance:P, each with probability P "
        "in every step that has it (default: all)",
    )
    add = parser.add_argument_group("many processes").add_argument
    add(
        "--torchrec",
        action="store_true",
        help="shard the tables over processes with TorchRec, gloo between CPUs, NCCL between GPUs",
    )
    add(
        "--nproc",
        type=_at_least(1),
        metavar="N",
        help="processes to start on this machine (default: one per GPU; 1 with --device cpu)",
    )
    add(
        "--sharding",
        choices=get_args(Sharding),
        help="how a table lies on the ranks: its ids or its columns on several, all of it on one, "
        "or, auto, as TorchRec's planner thinks fastest (default: auto with --torchrec)",
    )
    add = parser.add_argument_group("output").add_argument
    add(
        "--out",
        type=Path,
        default=Path("runs/dlrm"),
        metavar="FOLDER",
        help="gets training.png and a folder named checkpoint",
    )
    add(
        "--cache",
        type=Path,
        default=Path("runs/data"),
        metavar="FOLDER",
        help="keeps generated samples",
    )
    add(
        "--checkpoint-every",
        type=_at_least(1),
        default=200,
        metavar="STEPS",
        help="steps between checkpoints; there is one at the end, too",
    )
    add(
        "--async-checkpoint",
        action="store_true",
        help="write checkpoints from a copy in memory while training goes on; one that is due "
        "while the one before is still being written waits for it",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the checkpoint in --out, if there is one, under the same settings; "
        "the result is, bit for bit, that of a run without interruption; with --torchrec other "
        "ranks in any number may go on, and only sums of floats come in another order",
    )
    add(
        "--log-every",
        type=_at_least(1),
        default=10,
        metavar="STEPS",
        help="steps between points of the plot",
    )
    add(
        "--progress-interval",
        type=_not_negative,
        default=0.5,
        metavar="SECONDS",
        help="least time between updates of the progress bar",
    )
    values = vars(parser.parse_args(arguments))
    if wrong := _wrong_with_torchrec(values) if values["torchrec"] else _only_torchrec(values):
        parser.error(wrong)
    if values["torchrec"]:
        values |= {"baseline": False, "sharding": values["sharding"] or "auto"}
    if values["capacity"] is not None:
        values["eviction"] = values["eviction"] or "lfu"
    elif values["eviction"] is not None:
        parser.error(
            f"argument --eviction: {values['eviction']} needs a table that can be full: "
            "give --capacity, too"
        )
    return Options(**values)


def _only_torchrec(values: dict[str, Any]) -> str | None:
    """Say which option needs --torchrec."""
    for name in ("nproc", "sharding"):
        if values[name] is not None:
            return f"argument --{name}: {values[name]} is about many processes: add --torchrec"
    return None


def _wrong_with_torchrec(values: dict[str, Any]) -> str | None:
    """Say which option does not go with --torchrec, and why."""
    if values["compile"]:
        return "argument --compile: not with --torchrec: exchanging ids cannot be compiled"
    if values["accumulate"] > 1:
        return (
            f"argument --accumulate: {values['accumulate']} not with --torchrec, whose tables "
            "update rows in each backward: take a smaller --batch-size"
        )
    return None


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the description's lines; append defaults that have no text of their own."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help and ("default:" in action.help or action.nargs in (0, "*")):
            return action.help
        return super()._get_help_string(action)


def _at_least(least: int):  # type: ignore[no-untyped-def]
    def parse_number(text: str) -> int:
        value = int(text) if text.lstrip("-").isdigit() else None
        if value is None or value < least:
            raise argparse.ArgumentTypeError(f"expected an integer from {least} on, got {text!r}")
        return value

    return parse_number


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def _positive(text: str) -> float:
    if not 0 < (value := _number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _not_negative(text: str) -> float:
    if not 0 <= (value := _number(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"expected 0 or a number above, got {text!r}")
    return value


def _admission(text: str) -> str:
    try:
        admission_rule(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _fraction(text: str) -> float:
    if not 0 < (value := _number(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected a number between 0 and 1, got {text!r}")
    return value
