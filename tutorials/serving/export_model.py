"""Trains a small model of clicks and writes the package that the servers of this folder serve.

python -m tutorials.serving.export_model clicks --version 1

With ``--publish LOG`` it then goes on training, and publishes what changes to a delta log, which
the servers follow with ``--follow LOG``.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor, nn
from torch.export import Dim

import torch_dynemb as td

IDS = 2000  # of each feature that are clicked on; any other id is served, too
FEATURES = ("user", "item")


class Clicks(nn.Module):
    """The chance that a user clicks on an item."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = td.DynamicEmbeddingBagCollection(
            [td.TableConfig(name, 16, eval_default="zeros") for name in FEATURES],
            optimizer=td.Adam(lr=0.01),
        )
        self.top = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return torch.sigmoid(self.top(self.bags({"user": user, "item": item})))


def train(model: Clicks, steps: int, log: td.delta_log.DeltaLog | None = None) -> None:
    """Train a model on clicks that depend on the sum of two ids.

    Args:
        model: it.
        steps: how many.
        log: where it publishes what changes, if it does.
    """
    dense = torch.optim.Adam(model.top.parameters(), lr=0.01)
    for _ in range(steps):
        user, item = torch.randint(0, IDS, (2, 256, 1))
        clicked = ((user % 7 + item % 5) % 2 == 0).float()
        loss = nn.functional.binary_cross_entropy(model(user, item), clicked)
        dense.zero_grad()
        loss.backward()
        dense.step()
        model.bags.optimizer.step()
        if log is not None:
            log.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="a folder that does not exist yet")
    parser.add_argument("--version", default="1", help="what this model is called (default 1)")
    parser.add_argument(
        "--headroom",
        type=int,
        default=100_000,
        help="ids that updates may add to each table (default 100000)",
    )
    parser.add_argument("--steps", type=int, default=200, help="of training (default 200)")
    parser.add_argument(
        "--publish", metavar="LOG", help="a delta log for as many steps again, each tenth a commit"
    )
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Clicks()
    train(model, options.steps)
    log, base = None, None
    if options.publish is not None:
        log = td.delta_log.DeltaLog(options.publish, every_steps=10)
        log.attach(model)
        log.publish()  # what the log has already is taken back
        base = log.position()
    ids = torch.zeros(4, 1, dtype=torch.int64)
    batch = Dim.DYNAMIC
    td.serving.export(
        model,
        options.package,
        (ids, ids),
        dynamic_shapes=({0: batch}, {0: batch}),
        headroom=options.headroom,
        version=options.version,
        missing=True,  # for metrics of the servers
        base=base,
    )
    print(f"{options.package} is written")
    if log is not None:
        with log:
            train(model, options.steps, log)
        print(f"{log.sequence} commits are in {options.publish}")


if __name__ == "__main__":
    main()
