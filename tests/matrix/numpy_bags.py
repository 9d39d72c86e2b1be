"""Batches of sharded collections, and what rows and outputs numpy has in float64."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from covering import Case
from numpy.typing import NDArray
from oracle import initial_state, optimizer_step
from seeding import seeded
from sharded_models import Table
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import torch_dynemb as td

KNOWN = 12  # ids 0 to 11 have rows before the first step
NEW = 4  # ids after these that get theirs in training, or none
PADDING = KNOWN  # one of these
INITIAL = 0.25  # what rows of new ids start with
SAMPLES = 4
Floats = NDArray[np.float64]

OPTIMIZERS = {
    "sgd": td.SGD(lr=0.5, stochastic_rounding=False),
    "adam": td.Adam(lr=0.1, eps=0.1, stochastic_rounding=False),
    "adagrad": td.Adagrad(lr=0.5, initial_accumulator_value=0.1, stochastic_rounding=False),
    "row_wise_adagrad": td.RowWiseAdagrad(lr=0.5, stochastic_rounding=False),
    "momentum": td.MomentumSGD(lr=0.2, momentum=0.5, weight_decay=0.1, stochastic_rounding=False),
}
POLICIES = {
    "none": td.Policy(),
    "room": td.Policy(score="step", capacity=400),
    "frequency": td.Policy(score="frequency", capacity=400, on_full="evict"),
    "ttl": td.Policy(ttl=10**6),
}
TYPES = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
BY_ROWS = ("table_wise", "row_wise", "table_row_wise")  # shards with whole rows
TOLERANCE = {"FP32": 1e-5, "FP16": 2e-2, "BF16": 1.6e-1}  # gradients of outputs are rounded, too


@dataclass(frozen=True)
class Bags:
    """The bags of a feature on a rank: ids and weights, and the bag of each sample."""

    ids: list[list[int]]
    weights: list[list[float]]
    of_samples: list[int]


def tables_of(case: Case) -> list[Table]:
    """Return t, of features a and b, and perhaps another one before it."""
    pooling = case["pooling"]
    other = {"sum": "mean", "mean": "sum", "none": "none"}[pooling]
    options: dict[str, Any] = {
        "sharding": case["sharding"],
        "num_embeddings": KNOWN + NEW,
        "data_type": case["data_type"],
    }
    padding_idx = PADDING if case["padding_idx"] else None
    t = Table("t", case["dim"], ("a", "b"), pooling, padding_idx=padding_idx, **options)
    t = replace(t, written=case["written"])
    dim = case["dim"] if pooling == "none" else 24  # sequences have one
    others = {
        "one": [],
        "two": [Table("u", dim, ("c",), other, **options)],
        "shared": [Table("u", dim, ("b", "c"), other, **options)],
        "static": [Table("u", dim, ("c",), other, dynamic=False, **options)],
    }
    return [*others[case["beside"]], t]


def bags_of(case: Case, rank: int, step: int, feature: int, samples: int = SAMPLES) -> Bags:
    """Return what a rank has of a feature in a step."""
    random = seeded(10000 * case["seed"] + 100 * step + 10 * rank + feature)

    def draw(limit: int) -> int:
        return int(torch.randint(limit, (), generator=random))

    empty = case["empty"]
    if empty == "batch" or (empty == "rank" and rank == 0):
        samples = 0
    bags = min(samples, 1 + (step + feature + rank) % SAMPLES) if case["vbe"] else samples
    ids = [[draw(KNOWN + NEW) for _ in range(draw(4))] for _ in range(bags)]
    if bags:
        ids[0] = [1, 1, PADDING]  # an id twice
    if empty == "bags" or (empty == "feature" and feature == 0):
        ids = [[] for _ in ids]
    weights = [[(1 + draw(8)) / 4 if case["weighted"] else 1.0 for _ in bag] for bag in ids]
    of_samples = [draw(bags) if case["vbe"] else sample for sample in range(samples)]
    return Bags(ids, weights, of_samples)


def _strided(tensor: Tensor) -> Tensor:
    """Return the same values, each beside another value."""
    return torch.stack([tensor, torch.full_like(tensor, 3)], dim=-1)[..., 0]


def batch_of(case: Case, of_features: Mapping[str, Bags]) -> KeyedJaggedTensor:
    """Return the bags of features as TorchRec takes them."""
    ids_type, lengths_type = getattr(torch, case["ids_type"]), getattr(torch, case["lengths_type"])
    parts: dict[str, Tensor | None] = {
        "ids": torch.tensor(
            [id for of in of_features.values() for bag in of.ids for id in bag], dtype=ids_type
        ),
        "weights": torch.tensor(
            [w for of in of_features.values() for bag in of.weights for w in bag],
            dtype=torch.float32,
        ),
        "lengths": torch.tensor(
            [len(bag) for of in of_features.values() for bag in of.ids], dtype=lengths_type
        ),
        "inverse": torch.tensor([of.of_samples for of in of_features.values()], dtype=lengths_type),
    }
    for name, tensor in parts.items():
        if case["strided"] in (name, "all"):
            parts[name] = _strided(tensor)
    weights = parts["weights"] if case["weighted"] else None
    sizes: dict[str, Any] = {"lengths": parts["lengths"]}
    if case["offsets"]:
        lengths = parts["lengths"]
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(lengths_type)
        sizes = {"offsets": _strided(offsets) if case["strided"] == "lengths" else offsets}
    keys = list(of_features)
    if not case["vbe"]:
        stride = len(next(iter(of_features.values())).ids)
        return KeyedJaggedTensor(keys, parts["ids"], weights, **sizes, stride=stride)
    return KeyedJaggedTensor(
        keys,
        parts["ids"],
        weights,
        **sizes,
        stride_per_key_per_rank=[[len(of.ids)] for of in of_features.values()],
        inverse_indices=(keys, parts["inverse"]),
    )


class Rows:
    """The rows of a table and their optimizer state."""

    def __init__(self, case: Case, table: Table, rows: Tensor) -> None:
        self.case, self.table = case, table
        self.dtype = TYPES[table.data_type]
        self.config = OPTIMIZERS[case["optimizer"]]
        self.rows = {id: row.numpy().astype(np.float64) for id, row in enumerate(rows.double())}
        self.state: dict[int, list[Floats]] = {}
        self.steps = 0
        self.gradient: dict[int, Floats] = {}

    def row(self, id: int, *, reads: bool = False) -> Floats:
        zeros = reads and self.case["eval_default"] == "zeros"
        if id == self.table.padding_idx:
            return np.zeros(self.table.dim)
        return self.rows.get(id, np.full(self.table.dim, 0.0 if zeros else INITIAL))

    def output(self, bags: Bags, *, reads: bool) -> Floats:
        """Return [samples, dim], or [ids, dim] without pooling; ``reads``: no id gets a row."""
        if self.table.pooling == "none":
            ids = [id for bag in bags.of_samples for id in bags.ids[bag]]
            found = [self.row(id, reads=reads) for id in ids]
        else:
            found = [
                sum(
                    (w * self.row(id, reads=reads) for id, w in self._weighted(bags, bag)),
                    self.row_of_zeros(),
                )
                for bag in bags.of_samples
            ]
        return np.array(found).reshape(-1, self.table.dim)

    def row_of_zeros(self) -> Floats:
        return np.zeros(self.table.dim)

    def _weighted(self, bags: Bags, bag: int) -> list[tuple[int, float]]:
        counted = [
            (id, weight)
            for id, weight in zip(bags.ids[bag], bags.weights[bag], strict=True)
            if id != self.table.padding_idx
        ]
        total = sum(w for _, w in counted) if self.table.pooling == "mean" else 1.0
        return [(id, weight / total) for id, weight in counted]

    def write(self, id: int, row: Tensor) -> None:
        """Set the row of an id; its optimizer state stays."""
        self.rows[id] = row.to(self.dtype).double().numpy()

    def add_gradient(self, bags: Bags, of_output: Floats) -> None:
        """Add that of an output to the gradients of its rows."""
        if self.table.pooling == "none":
            ids = [id for bag in bags.of_samples for id in bags.ids[bag]]
            parts = [(id, 1.0, n) for n, id in enumerate(ids) if id != self.table.padding_idx]
        else:
            parts = [
                (id, weight, sample)
                for sample, bag in enumerate(bags.of_samples)
                for id, weight in self._weighted(bags, bag)
            ]
        for id in {id for bag in bags.ids for id in bag} - {self.table.padding_idx}:
            self.gradient.setdefault(id, self.row_of_zeros())  # no sample may have the bag
        for id, weight, n in parts:
            self.gradient[id] = self.gradient[id] + weight * of_output[n]

    def step(self, world: int) -> None:
        """Update rows by the mean of the ranks' gradients."""
        self.steps += 1
        for id, total in self.gradient.items():
            state = self.state.get(id) or initial_state(self.config, self.table.dim)
            row, self.state[id] = optimizer_step(
                self.config, self.steps, self.row(id), total / world, state
            )
            self.rows[id] = torch.from_numpy(row).to(self.dtype).double().numpy()
        self.gradient = {}
