"""The command line of the training program."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch_dynemb as td
from torch_dynemb.serving.row_formats import ROW_KINDS
from tutorials.dlrm.data import CATEGORY_COUNT
from tutorials.dlrm.job.optimizers import DEFAULT, OPTIMIZERS
from tutorials.dlrm.job.planted import PlantedConfig
from tutorials.dlrm.job.policies import SCORES, admission_rule

DESCRIPTION = """\
Train DLRM on click logs in the Criteo format, with dynamic embedding tables.

A line has 40 tab-separated fields: a label (0 or 1), 13 integers, 26 categories as hexadecimal
strings; empty means missing. Files may be gzipped and are streamed once, in the order given,
without vocabulary and preprocessing. Without files, samples of a known model are generated once
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
once per step: for want of room, or by --admission), device, compiled, storage (null where all rows
are in memory).

With --quantize the trained model is also frozen, as it would be served, and its AUC is computed
with rows as they are and with rows of each of the kinds. The JSON object has one more entry then,
quantized, an object with an entry for each kind, and one named unchanged: auc, row_bytes (of an
id's row) and bytes_per_id (of all that the frozen tables have).

With --export the frozen model is also written as a package, which torch_dynemb.serving.load and the
C++ reader run without a compiler and without these classes: FOLDER/unchanged, and one for each kind
of --quantize, such as FOLDER/int8. Each is compiled in half a minute or so, loaded, and has to give
the frozen model's log-odds of the held-out samples. The entry exported is an object with an entry
for each package: path, bytes, samples (that were compared) and largest_difference (of log-odds).

With --storage ssd the rows and their optimizer state lie in files, and a cache in memory has those
in use; table_bytes is what is in memory. While a batch is trained on, the rows of the next one are
fetched (not with --torchrec). The results are those of a run in memory, to the last bit; hashed
tables get as much memory as the cache and the index have. The entry storage is an object, of the
training alone: kind, cache, hits (ids with a row in memory), misses (rows that a step waited
for, or that were new), prefetched (rows that came while the batch before was trained on),
read_mb_per_s, written_mb_per_s (of the files), waited_s (for the disk), stored (rows in files),
disk_bytes and peak_bytes (the most memory that the process has had).

With --torchrec the tables are sharded over processes by TorchRec's DistributedModelParallel and the
MLPs are data parallel. Each rank takes its part of every batch, so that all together do the steps
of one process. Without a baseline, the JSON object has two more entries: world_size and
sharding (of each table). For several machines, start the program with torchrun on each.
"""

Options = argparse.Namespace

SHARDINGS = (
    *("auto", "row_wise", "table_wise", "column_wise"),
    *("table_row_wise", "table_column_wise", "grid_shard"),
)

# Options that may differ between a run and the one that resumes it.
_FREE_ON_RESUME = (
    *("out", "samples_folder", "resume", "baseline", "quantize", "export", "progress_interval"),
    *("storage", "cache", "storage_path", "disk"),
    *("async_checkpoint", "publish", "publish_every", "commit_every"),
    *("nproc", "sharding", "timeout"),
)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse a command line.

    Args:
        arguments: Without the program's name; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tutorials.dlrm.train", description=DESCRIPTION, formatter_class=_Formatter
    )
    parser.add_argument(
        "data",
        nargs="*",
        type=Path,
        help="files in the Criteo format, .gz too; none: generated samples",
    )
    add = parser.add_argument_group("data").add_argument
    add(
        "--samples",
        type=at_least(2),
        metavar="N",
        help="use the first N lines of the files, held-out ones included (default: all), "
        f"or generate N samples (default: {PlantedConfig.samples})",
    )
    add(
        "--held-out",
        type=_number("a number between 0 and 1", lambda value: 0 < value < 1),
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
        type=_number("a number from 1 on", lambda value: value >= 1),
        default=PlantedConfig.cardinality_divisor,
        metavar="X",
        help="features have the numbers of categories of the Criteo data, divided by X",
    )
    add(
        "--zipf",
        type=_positive,
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
    add("--lr", type=_positive, default=0.02, help="learning rate of the rows")
    add("--dense-lr", type=_positive, default=1e-3, help="learning rate of the MLPs (Adam)")
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
        type=_row_kinds,
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
        choices=("float32", "bfloat16", "float16"),
        default="float32",
        help="what rows are kept in; arithmetic is float32",
    )
    add(
        "--state-dtype",
        choices=("float32", "bfloat16", "uint8"),
        default="float32",
        help="what the optimizer's values by weight are kept in: bfloat16 unless there are none "
        "(sgd, rowwise-adagrad); uint8, 8-bit floats with a scale per 128 columns, for adam and "
        "its kin",
    )
    add(
        "--rounding",
        choices=("stochastic", "nearest"),
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
        choices=tuple(SCORES),
        help="which id makes room in a full table: that trained on least often (lfu), or least "
        "recently (lru); none: new ids get no row (default: lfu with --capacity)",
    )
    add(
        "--admission",
        type=_checked(admission_rule),
        metavar="RULE",
        help="which new ids get a row: count:N, those of N occurrences; sketch:N:BYTES, the same "
        "with counts in so much memory for all tables, roughly; chance:P, each with probability P "
        "in every step that has it (default: all)",
    )
    add = parser.add_argument_group("where rows lie").add_argument
    add(
        "--storage",
        choices=("memory", "ssd"),
        default="memory",
        help="all rows in memory, or in files, with a cache of rows in memory",
    )
    add(
        "--cache",
        type=_checked(lambda text: td.SSDStore("rows", cache=text)),
        metavar="SIZE",
        help="rows in memory, with --storage ssd: a part of all, such as 25%%, bytes, such as 4GB, "
        'or "100000 rows" (default: 25%%)',
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
        type=_checked(lambda text: td.SSDStore("rows", disk=text)),
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
        choices=SHARDINGS,
        help="how a table lies on the ranks: its ids or its columns on several, all of it on one, "
        "or, auto, as TorchRec's planner thinks fastest (default: auto with --torchrec)",
    )
    add(
        "--timeout",
        type=_positive,
        metavar="SECONDS",
        help="that a rank waits for another one before it fails, such as one on a machine that has "
        "vanished (default: 1800 with --torchrec)",
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
        "--commit-every",
        type=at_least(1),
        metavar="STEPS",
        help="also write what has changed every so many steps; --resume then goes on from the last "
        "commit, also on another number of ranks; checkpoints and commits lie in a folder named "
        "commits in --out (default: checkpoints only)",
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
        type=_number("0 or a number above", lambda value: value >= 0),
        default=0.5,
        metavar="SECONDS",
        help="least time between updates of the progress bar",
    )
    opts = parser.parse_args(arguments)
    if wrong := _contradiction(opts):
        parser.error(wrong)
    if opts.torchrec:
        opts.baseline, opts.sharding = False, opts.sharding or "auto"
        opts.timeout = opts.timeout or 1800
    if opts.storage == "ssd":
        opts.cache = opts.cache or "25%"
        opts.storage_path = opts.storage_path or opts.out / "rows"
    if opts.capacity is not None:
        opts.eviction = opts.eviction or "lfu"
    return opts


def settings(opts: Options) -> dict[str, object]:
    """Return the values of all options by name."""
    return {"--" + name.replace("_", "-"): value for name, value in vars(opts).items()}


def settings_of_job(opts: Options) -> dict[str, object]:
    """Return the settings that a resumed run must have in common with the interrupted one."""
    fixed = {name: value for name, value in vars(opts).items() if name not in _FREE_ON_RESUME}
    fixed["data"] = [str(path.resolve()) for path in opts.data]
    return settings(Options(**fixed))


def _contradiction(opts: Options) -> str | None:
    """Return which options do not go together, and why."""
    given = vars(opts)
    for needed, is_given, names, about in (
        ("--torchrec", opts.torchrec, ("nproc", "sharding", "timeout"), "many processes"),
        (
            "--storage ssd",
            opts.storage == "ssd",
            ("cache", "storage_path", "disk"),
            "rows in files",
        ),
    ):
        for name in names:
            if not is_given and given[name] is not None:
                option = name.replace("_", "-")
                return f"argument --{option}: {given[name]} is about {about}: add {needed}"
    if opts.eviction is not None and opts.capacity is None:
        return (
            f"argument --eviction: {opts.eviction} needs a table that can be full: "
            "give --capacity, too"
        )
    refused = [
        (
            opts.publish and opts.commit_every,
            f"--publish: {opts.publish} not with --commit-every: models that serve can follow the "
            "log of the commits",
        )
    ]
    if opts.torchrec:
        refused += [
            (opts.compile, "--compile: not with --torchrec: exchanging ids cannot be compiled"),
            (opts.quantize, "--quantize: not with --torchrec: evaluate in one process"),
            (opts.export, f"--export: {opts.export} not with --torchrec: export in one process"),
            (
                opts.accumulate > 1,
                f"--accumulate: {opts.accumulate} not with --torchrec: its tables update rows in "
                "each backward, so take a smaller --batch-size",
            ),
        ]
    if opts.storage == "ssd":
        refused += [
            (
                opts.device == "cuda",
                "--storage: ssd not with --device cuda: rows in files need tables on the CPU",
            ),
            (
                opts.async_checkpoint,
                "--async-checkpoint: not with --storage ssd: memory has no copy of the rows "
                "to write from",
            ),
            (
                opts.publish,
                f"--publish: {opts.publish} not with --storage ssd: changes of rows that lie in "
                "files are not recorded",
            ),
            (
                opts.commit_every,
                f"--commit-every: {opts.commit_every} not with --storage ssd: changes of rows that "
                "lie in files are not recorded, so take a smaller --checkpoint-every",
            ),
        ]
    return next((f"argument {why}" for wrong, why in refused if wrong), None)


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keep the description's lines; append defaults that have no text of their own."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.help and ("default:" in action.help or action.nargs in (0, "*")):
            return action.help
        return super()._get_help_string(action)


def _number(
    expected: str, good: Callable[[float], bool], kind: type[int] | type[float] = float
) -> Callable[[str], float]:
    """Make the type of a number in a range."""

    def parse_number(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            what = "a number" if kind is float else expected
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}") from None
        if not good(value) or value == float("inf"):
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse_number


def at_least(least: int) -> Callable[[str], float]:
    """Make the type of an integer that is not less."""
    return _number(f"an integer from {least} on", lambda value: value >= least, int)


_positive = _number("a number above 0", lambda value: value > 0)


def _checked(check: Callable[[str], object]) -> Callable[[str], str]:
    """Make the type of a text for which a function raises no error."""

    def parse_text(text: str) -> str:
        try:
            check(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        return text

    return parse_text


def _row_kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    if len(set(kinds)) != len(kinds) or not set(kinds) <= set(ROW_KINDS):
        raise argparse.ArgumentTypeError(
            f"expected some of {', '.join(ROW_KINDS)} between commas, each once, got {text!r}"
        )
    return kinds
