"""DLRM with OneEmbedding's names: ``python -m tutorials.oneembedding.train``.

As in OneFlow's ``one_embedding``, the same calls build the tables, over torch. What to
look at:

* ``model.py``: 26 tables in one ``MultiTableEmbedding``, looked up with ids of shape
  (batch, tables); ``store_options``; and ``Optimizer``, which has the rows follow an optimizer of
  torch.
* ``first_run``, ``second_run`` below: the loop, ``save_snapshot``, another model that loads it, and
  ``make_persistent_table_reader``, which reads the snapshot without a model.

It generates clicks in the Criteo format, or takes such files, trains one pass in some seconds and
prints a JSON line. ``--help`` has the options.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_dynemb import oneembedding
from tutorials.dlrm.data import CriteoReader
from tutorials.dlrm.job.files import check_paths, count_lines
from tutorials.dlrm.job.generate import generate
from tutorials.dlrm.job.planted import PlantedConfig
from tutorials.dlrm.metrics import exact_auc
from tutorials.dlrm.model import DLRM, dense_features
from tutorials.oneembedding.model import (
    SIZE_FACTORS,
    Rows,
    make_model,
    make_optimizer,
    store_options,
)

HELD_OUT = 0.1  # of the samples, the last ones
STORES = ("device_mem", "cached_host_mem", "cached_ssd")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line.

    Args:
        arguments: Without the program's name; None for those of this process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tutorials.oneembedding.train",
        description="Train DLRM with OneEmbedding's names on clicks in the Criteo format.",
    )
    parser.add_argument("data", nargs="*", help="files in the Criteo format; default: generated")
    parser.add_argument("--samples", type=int, default=60_000, help="to generate")
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--embedding-dim", type=int, default=16)
    parser.add_argument("--optimizer", choices=SIZE_FACTORS, default="adam")
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--store", choices=STORES, default="device_mem")
    parser.add_argument("--capacity", type=int, default=1_000_000, help="ids of a table")
    parser.add_argument("--cache-mb", type=int, default=64, help="of rows in use")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/oneembedding"), help="for snapshots")
    parser.add_argument("--cache", type=Path, default=Path("runs/data"), help="for generated data")
    return parser.parse_args(arguments)


def build(opts: argparse.Namespace) -> tuple[DLRM, Any, oneembedding.Optimizer]:
    """Make the model, its embedding, and their optimizer."""
    torch.manual_seed(opts.seed)
    options = store_options(
        opts.store,
        opts.out,
        capacity=opts.capacity,
        cache_mb=opts.cache_mb,
        size_factor=SIZE_FACTORS[opts.optimizer],
    )
    model = make_model(opts.embedding_dim, options)
    assert isinstance(model.rows, Rows)
    embedding = model.rows.embedding
    return model, embedding, make_optimizer(opts.optimizer, model, embedding, lr=opts.lr)


def train(
    model: DLRM,
    optimizer: oneembedding.Optimizer,
    paths: list[Path],
    opts: argparse.Namespace,
    lines: int,
) -> float:
    """Train one pass over the first lines; return the mean loss of the last tenth of the steps."""
    losses = []
    for batch in CriteoReader(paths, opts.batch_size, stop_line=lines):
        logits = model(dense_features(batch.integers), torch.from_numpy(batch.ids))
        labels = torch.from_numpy(batch.labels)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return float(torch.stack(losses[-max(1, len(losses) // 10) :]).mean())


@torch.no_grad()
def auc(model: DLRM, paths: list[Path], opts: argparse.Namespace, lines: int) -> float:
    """Return the AUC on the lines after the first ones."""
    model.eval()
    labels, scores = [], []
    read = 0
    for batch in CriteoReader(paths, opts.batch_size):
        begin = max(0, lines - read)
        read += len(batch.labels)
        if begin < len(batch.labels):
            logits = model(dense_features(batch.integers), torch.from_numpy(batch.ids))
            labels.append(batch.labels[begin:])
            scores.append(logits.numpy()[begin:])
    model.train()
    return exact_auc(np.concatenate(labels), np.concatenate(scores))


def read_snapshot(opts: argparse.Namespace, name: str) -> int:
    """Read a snapshot without a model; return how many ids it has."""
    width = opts.embedding_dim * SIZE_FACTORS[opts.optimizer]
    with oneembedding.make_persistent_table_reader(
        [str(opts.out)], name, torch.int64, torch.float, storage_dim=width
    ) as reader:
        return sum(len(keys) for keys, _ in reader)


class Trained(NamedTuple):
    """Results of training; the rows are in the snapshot."""

    dense: dict[str, Any]  # the state dict of the network
    auc: float
    loss: float
    ids: int
    seconds: float


def first_run(paths: list[Path], opts: argparse.Namespace, lines: int) -> Trained:
    """Train, and save the rows as the snapshot ``trained``."""
    model, embedding, optimizer = build(opts)
    begin = time.monotonic()
    loss = train(model, optimizer, paths, opts, lines)
    seconds = time.monotonic() - begin
    embedding.save_snapshot("trained")
    network = torch.nn.ModuleList([model.bottom, model.top])
    ids = sum(embedding.sizes().values())
    return Trained(network.state_dict(), auc(model, paths, opts, lines), loss, ids, seconds)


def second_run(trained: Trained, paths: list[Path], opts: argparse.Namespace, lines: int) -> float:
    """Make the model anew, load the snapshot, and return the AUC."""
    model, embedding, _ = build(opts)
    torch.nn.ModuleList([model.bottom, model.top]).load_state_dict(trained.dense)
    embedding.load_snapshot("trained")
    return auc(model, paths, opts, lines)


def run(opts: argparse.Namespace) -> dict[str, Any]:
    """Train and save; load into another model; read what was saved without any."""
    best = None
    if opts.data:
        paths = check_paths(opts.data)
        lines = round(count_lines(paths) * (1 - HELD_OUT))
    else:
        generated = generate(PlantedConfig(seed=opts.seed, samples=opts.samples), opts.cache)
        paths, lines = [generated.path], round(opts.samples * (1 - HELD_OUT))
        best = generated.best_auc(lines)
    trained = first_run(paths, opts, lines)
    return {
        "auc": trained.auc,
        "loaded_auc": second_run(trained, paths, opts, lines),
        "best_auc": best,
        "loss": trained.loss,
        "ids": trained.ids,
        "ids_read": read_snapshot(opts, "trained"),
        "store": opts.store,
        "optimizer": opts.optimizer,
        "samples": lines,
        "seconds": round(trained.seconds, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        arguments: Of the command line; None for those of this process.
    """
    print(json.dumps(run(parse(arguments))))


if __name__ == "__main__":
    main(sys.argv[1:])
