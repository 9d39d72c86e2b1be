"""DLRM with OneEmbedding's names: ``python -m tutorials.oneembedding.train``.

For those who know OneFlow's ``one_embedding``: the same calls build the tables, over torch. What to
look at:

* ``model.py``: 26 tables in one ``MultiTableEmbedding``, looked up with ids of shape
  (batch, tables); ``store_options``; and ``Optimizer``, which has the rows follow an optimizer of
  torch.
* ``run`` below: the loop, ``save_snapshot``, another model that loads it, and
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
from typing import Any

import numpy as np
import torch

from torch_dynemb import oneembedding
from tutorials.dlrm.criteo import CriteoReader, check_paths, count_lines
from tutorials.dlrm.generate import generate
from tutorials.dlrm.metrics import exact_auc
from tutorials.dlrm.model import DLRM, dense_features
from tutorials.dlrm.planted import PlantedConfig
from tutorials.oneembedding.model import (
    SIZE_FACTORS,
    Rows,
    make_model,
    make_optimizer,
    store_options,
)

HELD_OUT = 0.1  # of the samples, the last ones


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
    parser.add_argument("--store", choices=("device_mem", "cached_host_mem"), default="device_mem")
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


def run(opts: argparse.Namespace) -> dict[str, Any]:
    """Train, save, load into another model, and read what was saved."""
    if opts.data:
        paths = check_paths(opts.data)
        samples, best = count_lines(paths), None
    else:
        generated = generate(PlantedConfig(seed=opts.seed, samples=opts.samples), opts.cache)
        paths, samples = [generated.path], opts.samples
    lines = round(samples * (1 - HELD_OUT))
    if not opts.data:
        best = generated.best_auc(lines)
    model, embedding, optimizer = build(opts)
    begin = time.monotonic()
    loss = train(model, optimizer, paths, opts, lines)
    seconds = time.monotonic() - begin
    result = auc(model, paths, opts, lines)

    embedding.save_snapshot("trained")
    other, loaded, _ = build(opts)
    other.bottom.load_state_dict(model.bottom.state_dict())
    other.top.load_state_dict(model.top.state_dict())
    loaded.load_snapshot("trained")
    return {
        "auc": result,
        "loaded_auc": auc(other, paths, opts, lines),
        "best_auc": best,
        "loss": loss,
        "ids": sum(embedding.sizes().values()),
        "ids_read": read_snapshot(opts, "trained"),
        "store": opts.store,
        "optimizer": opts.optimizer,
        "samples": lines,
        "seconds": round(seconds, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the program.

    Args:
        arguments: Of the command line; None for those of this process.
    """
    print(json.dumps(run(parse(arguments))))


if __name__ == "__main__":
    main(sys.argv[1:])
