"""Trains a small model of clicks and writes the package that the servers of this folder serve.

python -m tutorials.serving.export_model clicks --version 1
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


def trained(steps: int) -> Clicks:
    """A model after so many steps on clicks that depend on the sum of two ids."""
    torch.manual_seed(0)
    model = Clicks()
    dense = torch.optim.Adam(model.top.parameters(), lr=0.01)
    for _ in range(steps):
        user, item = torch.randint(0, IDS, (2, 256, 1))
        clicked = ((user % 7 + item % 5) % 2 == 0).float()
        loss = nn.functional.binary_cross_entropy(model(user, item), clicked)
        dense.zero_grad()
        loss.backward()
        dense.step()
        model.bags.optimizer.step()
    return model


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
    options = parser.parse_args()
    ids = torch.zeros(4, 1, dtype=torch.int64)
    batch = Dim.DYNAMIC
    td.serving.export(
        trained(options.steps),
        options.package,
        (ids, ids),
        dynamic_shapes=({0: batch}, {0: batch}),
        headroom=options.headroom,
        version=options.version,
    )
    print(f"{options.package} is written")


if __name__ == "__main__":
    main()
