"""Command line of the DLRM training program."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from torch_dynemb.serving.row_formats import RowKind
from tutorials.dlrm.arguments import (
    admission,
    at_least,
    cache,
    disk,
    fraction,
    not_negative,
    number_from,
    positive,
    row_kinds,
)
from tutorials.dlrm.criteo import OnBadLine
from tutorials.dlrm.description import DESCRIPTION
from tutorials.dlrm.optimizers import (
    DEFAULT,
    OPTIMIZERS,
    Rounding,
    RowDtype,
    RowOptions,
    StateDtype,
)
from tutorials.dlrm.option_checks import (
    only_files,
    only_torchrec,
    wrong_with_files,
    wrong_with_torchrec,
)
from tutorials.dlrm.parsing import CATEGORY_COUNT
from tutorials.dlrm.planted import PlantedConfig
from tutorials.dlrm.policies import Eviction

# Options that may differ between a run and the one that resumes it.
_FREE_ON_RESUME = (
    *("out", "samples_folder", "resume", "baseline", "quantize", "export", "progress_interval"),
    *("storage", "cache", "storage_path", "disk"),
    *("async_checkpoint", "publish", "publish_every", "nproc", "sharding"),
)

Storage = Literal["memory", "ssd"]

_DEFAULT_CACHE = "25%"

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
    quantize: tuple[RowKind, ...]
    """Kinds of rows that the trained model is frozen with."""
    export: Path | None
    """Folder of the packages of the frozen model; None: there are none."""
    baseline: bool
    cardinality_divisor: float
    zipf: float
    storage: Storage
    cache: str | None
    """Of rows; None with rows in memory, as the next two."""
    storage_path: Path | None
    disk: str | None
    out: Path
    samples_folder: Path
    checkpoint_every: int
    async_checkpoint: bool
    publish: Path | None
    publish_every: int
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
        description=DESCRIPTION,
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
        type=at_least(2),
        metavar="N",
        help="use the first N lines of the files, held-out ones included (default: all), "
        f"or generate N samples (default: {PlantedConfig.samples})",
    )
    add(
        "--held-out",
        type=fraction,
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
    add = parser.add_argument_group("generated samples (without files)").add_argument
    add(
        "--cardinality-divisor",
        type=number_from(1),
        default=PlantedConfig.cardinality_divisor,
        metavar="X",
        help="features have the numbers of categories of the Criteo data, divided by X",
    )
    add(
        "--zipf",
        type=positive,
        default=PlantedConfig.zipf_exponent,
        metavar="S",
        help="the k-th category of a feature is as popular as k ** -S",
    )
    add(
        "--samples-folder",
        type=Path,
        default=Path("runs/data"),
        metavar="FOLDER",
        help="keeps generated samples",
    )
    add = parser.add_argument_group("training").add_argument
    add("--embedding-dim", type=at_least(1), default=16, metavar="D", help="length of a row")
    add("--batch-size", type=at_least(1), default=2048, metavar="B", help="samples per step")
    add("--lr", type=positive, default=0.02, help="learning rate of the rows")
    add("--dense-lr", type=positive, default=1e-3, help="learning rate of the MLPs (Adam)")
    add("--seed", type=at_least(0), default=0, help="of generated data and of initial values")
    add(
        "--threads",
        type=at_least(1),
        default=os.cpu_count() or 1,
        metavar="N",
        help="CPU threads of a training step; processes on a machine share them",
    )
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to train")
    add("--compile", action="store_true", help="torch.compile(fullgraph=True, dynamic=True)")
    add(
        "--quantize",
        type=row_kinds,
        default=(),
        metavar="KIND[,KIND...]",
        help="evaluate the frozen model, too, with rows of int8, int4, fp8, fp16 or bf16 (default: "
        "do not)",
    )
    add(
        "--export",
        type=Path,
        metavar="FOLDER",
        help="write the frozen model as packages into it, one for each kind of rows, and compare "
        "what they give with the model (default: do not)",
    )
    add(
        "--no-baseline",
        dest="baseline",
        action="store_false",
        help="do not train the model with hashed tables (baseline_auc is null)",
    )
    add(
        "--accumulate",
        type=at_least(1),
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
        type=at_least(CATEGORY_COUNT),
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
        type=admission,
        metavar="RULE",
        help="which new ids get a row: count:N, those of N occurrences; sketch:N:BYTES, the same "
        "with counts in so much memory for all tables, roughly; chance:P, each with probability P "
        "in every step that has it (default: all)",
    )
    add = parser.add_argument_group("where rows lie").add_argument
    add(
        "--storage",
        choices=get_args(Storage),
        default="memory",
        help="all rows in memory, or in files, with a cache of rows in memory",
    )
    add(
        "--cache",
        type=cache,
        metavar="SIZE",
        help="rows in memory, with --storage ssd: a part of all, such as 25%%, bytes, such as 4GB, "
        f'or "100000 rows" (default: {_DEFAULT_CACHE.replace("%", "%%")})',
    )
    add(
        "--storage-path",
        type=Path,
        metavar="FOLDER",
        help="gets the files of rows, in place of those of an earlier run (default: a folder named "
        "rows in --out)",
    )
    add(
        "--disk",
        type=disk,
        metavar="BYTES",
        help="that the files may take, such as 200GB; a third more than the rows take at least "
        "(default: what the file system has free)",
    )
    add = parser.add_argument_group("many processes").add_argument
    add(
        "--torchrec",
        action="store_true",
        help="shard the tables over processes with TorchRec, gloo between CPUs, NCCL between GPUs",
    )
    add(
        "--nproc",
        type=at_least(1),
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
        help="gets report.html, training.png and a folder named checkpoint",
    )
    add(
        "--checkpoint-every",
        type=at_least(1),
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
        "--publish",
        type=Path,
        metavar="FOLDER",
        help="gets a delta log: what training changes, which models that serve can follow while it "
        "goes on; where there is one, the next commit has what differs from it",
    )
    add(
        "--publish-every",
        type=at_least(1),
        default=50,
        metavar="STEPS",
        help="steps between commits of --publish; there is one at the end, too",
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
        type=at_least(1),
        default=10,
        metavar="STEPS",
        help="steps between points of the plot",
    )
    add(
        "--progress-interval",
        type=not_negative,
        default=0.5,
        metavar="SECONDS",
        help="least time between updates of the progress bar",
    )
    values = vars(parser.parse_args(arguments))
    for wrong in (
        wrong_with_torchrec(values) if values["torchrec"] else only_torchrec(values),
        wrong_with_files(values) if values["storage"] == "ssd" else only_files(values),
    ):
        if wrong:
            parser.error(wrong)
    if values["torchrec"]:
        values |= {"baseline": False, "sharding": values["sharding"] or "auto"}
    if values["storage"] == "ssd":
        values["cache"] = values["cache"] or _DEFAULT_CACHE
        values["storage_path"] = values["storage_path"] or values["out"] / "rows"
    if values["capacity"] is not None:
        values["eviction"] = values["eviction"] or "lfu"
    elif values["eviction"] is not None:
        parser.error(
            f"argument --eviction: {values['eviction']} needs a table that can be full: "
            "give --capacity, too"
        )
    return Options(**values)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the description's lines; append defaults that have no text of their own."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help and ("default:" in action.help or action.nargs in (0, "*")):
            return action.help
        return super()._get_help_string(action)
