"""Train a model, publish what changes to a database of SQLite, and serve a copy that follows.

The copy answers while training goes on. At the end both answer alike, and the program prints by how
much they differed before each commit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

import torch_dynemb as td
from torch_dynemb import serving
from tutorials.delta_log.sqlite_sink import SQLiteSink

USERS = 2_000


def make_model() -> nn.Sequential:
    """Return a table of users, and a dense layer that stays as it is."""
    torch.manual_seed(0)
    users = td.DynamicEmbeddingBag(8, mode="sum", name="users", optimizer=td.Adagrad(lr=0.1))
    return nn.Sequential(users, nn.Linear(8, 1))


def train(model: nn.Sequential, steps: int) -> None:
    """Train on users with tastes that follow from their numbers."""
    users = model[0]
    for _ in range(steps):
        ids = torch.randint(0, USERS, (256, 1))
        likes = (ids % 3 == 0).float()
        loss = nn.functional.binary_cross_entropy_with_logits(model(ids), likes)
        loss.backward()
        users.optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("runs/delta_log"), metavar="FOLDER")
    parser.add_argument("--commits", type=int, default=10)
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)

    model = make_model()
    train(model, 20)
    # A log that is not in a directory of its own begins with a checkpoint somewhere.
    base = options.out / "base"
    td.checkpoint.save(base, model)
    database = options.out / "log.sqlite3"
    database.unlink(missing_ok=True)
    log = td.delta_log.DeltaLog(SQLiteSink(database), dense=False)
    log.attach(model, base=base)

    # What follows: here a copy in the same process; anywhere else a package, or a model that was
    # loaded from the base. It opens the database for itself.
    served = serving.live(model, headroom=USERS)
    follower = td.delta_log.follow(SQLiteSink(database), served, base=base)
    follower.start(every_seconds=0.01)

    everybody = torch.arange(USERS)[:, None]

    def apart() -> float:
        """Return the largest difference between the answers of the two."""
        with torch.no_grad():
            answers = model.eval()(everybody)
        model.train()
        return float((served(everybody).detach() - answers).abs().max())

    behind = []
    for _ in range(options.commits):
        train(model, 10)
        behind.append(apart())
        commit = log.publish()
        log.flush()
        while follower.sequence != commit:
            follower.check()
    follower.stop()
    log.close()
    size = database.stat().st_size
    print(json.dumps({"behind_before_commits": behind, "apart": apart(), "database_bytes": size}))


if __name__ == "__main__":
    main()
