"""A DeepFM on MovieLens (the sample in RecBole), with static or dynamic tables.

``build/programs/bin/python tests/programs/deepfm_run.py 3`` prints a line of JSON: the AUC of both
for three seeds. The dynamic run differs by ``td.replace_embeddings`` and ``td.step_with`` alone.
"""

from __future__ import annotations

import csv
import json
import sys

import torch
from fetch import FOLDER
from torch import Tensor, nn

import torch_dynemb as td

FIELDS = ("user_id", "item_id", "age", "gender", "occupation", "release_year", "class")
DIM, BATCH, EPOCHS = 16, 1024, 6


def read(name: str) -> list[dict[str, str]]:
    """Read a file of the sample; names lose their types."""
    (path,) = FOLDER.glob(f"lib/*/site-packages/recbole/dataset_example/ml-100k/ml-100k.{name}")
    with path.open(encoding="utf-8") as file:
        rows = csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
        names = [column.split(":")[0] for column in next(rows)]
        return [dict(zip(names, row, strict=True)) for row in rows]


def samples() -> tuple[Tensor, Tensor]:
    """Row numbers of each field's values, int64 [n, fields], and whether ratings are above 3."""
    users = {row["user_id"]: row for row in read("user")}
    items = {row["item_id"]: row for row in read("item")}
    ratings = read("inter")
    rows = [{**users[of["user_id"]], **items[of["item_id"]], **of} for of in ratings]
    columns = []
    for field in FIELDS:
        numbers: dict[str, int] = {}
        columns.append([numbers.setdefault(row[field], len(numbers)) for row in rows])
    labels = torch.tensor([float(row["rating"]) > 3 for row in rows])
    return torch.tensor(columns).T.contiguous(), labels.float()


class DeepFM(nn.Module):
    """Linear part, factorization machine and MLP over the same fields, initialized as FuxiCTR."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.linear = nn.ModuleList(nn.Embedding(size, 1) for size in sizes)
        self.rows = nn.ModuleList(nn.Embedding(size, DIM) for size in sizes)
        for table in (*self.linear, *self.rows):
            nn.init.normal_(table.weight, std=1e-4)
        self.deep = nn.Sequential(
            nn.Linear(DIM * len(sizes), 64),
            nn.ReLU(),
            nn.Linear(64, 64),
            nn.ReLU(),
            nn.Linear(64, 1),
        )

    def forward(self, ids: Tensor) -> Tensor:
        rows = torch.stack([table(of) for table, of in zip(self.rows, ids.T, strict=True)], 1)
        first = sum(table(of) for table, of in zip(self.linear, ids.T, strict=True))
        pairs = (rows.sum(1).square() - rows.square().sum(1)).sum(1, keepdim=True) / 2
        return (first + pairs + self.deep(rows.flatten(1))).squeeze(1)


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve."""
    ranks = scores.argsort().argsort().double() + 1
    good = int(labels.sum())
    area = ranks[labels.bool()].sum() - good * (good + 1) / 2
    return float(area / (good * (len(labels) - good)))


def run(ids: Tensor, labels: Tensor, seed: int, dynamic: bool) -> float:
    """Train; return the best AUC of an epoch, as FuxiCTR's early stopping keeps it."""
    torch.manual_seed(seed)
    order = torch.randperm(len(ids))
    test, train = order[: len(ids) // 10], order[len(ids) // 10 :]
    model = DeepFM([int(column.max()) + 1 for column in ids.T])
    if dynamic:
        td.replace_embeddings(model, optimizer=td.Adam(lr=1e-3, row_steps=True))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    if dynamic:
        td.step_with(optimizer, model)
    found = []
    draw = torch.Generator().manual_seed(seed)
    for _ in range(EPOCHS):
        model.train()
        for batch in train[torch.randperm(len(train), generator=draw)].split(BATCH):
            loss = nn.functional.binary_cross_entropy_with_logits(model(ids[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found.append(auc(model(ids[test]), labels[test]))
    return max(found)


if __name__ == "__main__":
    torch.set_num_threads(1)
    data = samples()
    print(
        json.dumps(
            {
                kind: [run(*data, seed, kind == "dynamic") for seed in range(int(sys.argv[1]))]
                for kind in ("static", "dynamic")
            }
        )
    )
