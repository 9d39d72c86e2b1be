"""Command line of the sequence model."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tutorials.ranks import started_by_torchrun

_DESCRIPTION = """\
Train a target-attention model on click sequences, with and without the histories.

A sample shows an item to a user after 1 to 50 clicks on others. The model predicts whether this one
is clicked as well. The clicks are generated: users click what is near to their last clicks,
and users and items come and go all the time. Ids are any 64-bit numbers; rows appear with them.

All embeddings are in one torch_dynemb.recis.EmbeddingEngine. The candidate and the history share
the table of items. The history is ragged and comes twice: row by row (combiner "tile") for the
attention, and as a mean weighted by recency. SparseAdam updates the rows, torch.optim.Adam the
network.

The later steps are held out for the AUC. Then the same model is trained without the history. The
last line of the output is a JSON object: auc, baseline_auc (without the history), best_auc (of the
planted probabilities), history (whether auc is of a model that has it), ids (with a row, by table),
steps, samples (trained on), seconds (of training the first model), world_size, compiled.

With --nproc the tables lie on the ranks, each id on one of them, and the network is data parallel
(DistributedDataParallel). Each rank takes its part of every batch, so that all together do the
steps of one process. torchrun can start the ranks, too.
"""


@dataclass(frozen=True)
class Options:
    """Options of the program; see :func:`parse`."""

    steps: int
    batch_size: int
    embedding_dim: int
    lr: float
    dense_lr: float
    seed: int
    threads: int
    history: bool
    compile: bool
    nproc: int
    out: Path
    log_every: int


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Parse a command line.

    Args:
        arguments: Without the program's name; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tutorials.sequence_model",
        description=_DESCRIPTION,
        formatter_class=_Formatter,
    )
    add = parser.add_argument
    add("--steps", type=_count, default=400, metavar="N", help="training steps")
    add("--batch-size", type=_count, default=512, metavar="B", help="samples of a step")
    add("--embedding-dim", type=_count, default=16, metavar="D", help="columns of a row")
    add("--lr", type=_positive, default=0.02, help="learning rate of the rows")
    add("--dense-lr", type=_positive, default=0.003, help="learning rate of the network")
    add("--seed", type=int, default=0, help="of the generated clicks and of initial values")
    add("--threads", type=_count, default=1, metavar="N", help="CPU threads of a process")
    add(
        "--no-history",
        dest="history",
        action="store_false",
        help="train the model without the history only (baseline_auc is null)",
    )
    add("--compile", action="store_true", help="torch.compile(fullgraph=True, dynamic=True)")
    add("--nproc", type=_count, default=1, metavar="N", help="processes to start on this machine")
    add(
        "--out",
        type=Path,
        default=Path("runs/sequence"),
        metavar="FOLDER",
        help="gets training.png",
    )
    add("--log-every", type=_count, default=10, metavar="STEPS", help="steps between points")
    options = Options(**vars(parser.parse_args(arguments)))
    ranks = options.nproc
    if started_by_torchrun():
        if options.nproc > 1:
            parser.error(
                f"argument --nproc: {options.nproc}, but torchrun has started the processes: leave "
                "it out"
            )
        ranks = int(os.environ["WORLD_SIZE"])
    if options.seed < 0:
        parser.error(f"argument --seed: {options.seed}, expected 0 or more")
    if options.batch_size % ranks != 0:
        parser.error(
            f"argument --batch-size: {options.batch_size}, expected a multiple of {ranks}, the "
            "number of processes: each takes as many samples"
        )
    if options.compile and ranks > 1:
        parser.error(
            f"argument --compile: not with {ranks} processes: their exchange of ids is not compiled"
        )
    return options


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Formatter that keeps lines of the description, and appends defaults of options."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.nargs == 0 else super()._get_help_string(action)


def _count(text: str) -> int:
    value = int(text) if text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected an integer from 1 on, got {text!r}")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value
