"""The job's DLRM with its rows in dynamic tables, and in tables of a fixed size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tutorials.dlrm.data import FEATURE_NAMES
from tutorials.dlrm.job.baseline import SparseRowWiseAdagrad, split_rows
from tutorials.dlrm.job.optimizers import DEFAULT
from tutorials.dlrm.job.optimizers import OPTIMIZERS as CONFIGS
from tutorials.dlrm.model import DLRM, ROW_BOUND, DynamicRows

DIM = 16
LEARNING_RATE = 0.02
DENSE_LEARNING_RATE = 1e-3
EPS = 1e-8

OURS = "dynamic tables"
BY_FEATURE = "nn.EmbeddingBag by feature, vocabulary"
IN_ONE = "one nn.EmbeddingBag, vocabulary"
HASHED = "nn.EmbeddingBag by feature, hashing trick"
TORCHREC = "TorchRec's fused static tables, vocabulary"
PEERS = (BY_FEATURE, IN_ONE, HASHED, TORCHREC)
OPTIMIZERS = (DEFAULT, "adagrad", "sgd")


class Candidate(NamedTuple):
    """A model that trains.

    Attributes:
        model: with tables.
        optimizers: ``step()`` of each ends a training step.
        takes_rows: it is given the places of ids in the vocabulary, not the ids.
        fullgraph: it compiles without a break.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    takes_rows: bool
    fullgraph: bool = True


class _StaticRows(nn.Module):
    """An nn.EmbeddingBag for each feature.

    Args:
        sizes: rows by feature.
        hashed: it is given any ids, of which it takes the remainder; False: row numbers.
    """

    counts: Tensor

    def __init__(self, sizes: Sequence[int], *, hashed: bool) -> None:
        super().__init__()
        self.hashed = hashed
        self.bags = nn.ModuleList([_bag(size) for size in sizes])
        self.register_buffer("counts", torch.tensor(sizes).unsqueeze(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return rows (B, 26, DIM) of ids or row numbers int64 (26, B)."""
        rows = torch.remainder(ids, self.counts) if self.hashed else ids
        bags = zip(self.bags, rows.unsqueeze(-1), strict=True)
        return torch.stack([bag(of_feature) for bag, of_feature in bags], dim=1)


class _RowsInOne(nn.Module):
    """One nn.EmbeddingBag, in which the rows of each feature follow those of the one before."""

    first: Tensor

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        self.bag = _bag(sum(sizes))
        first = [0, *accumulate(sizes)][:-1]
        self.register_buffer("first", torch.tensor(first).unsqueeze(1), persistent=False)

    def forward(self, rows: Tensor) -> Tensor:
        """Return rows (B, 26, DIM) of row numbers int64 (26, B)."""
        numbers = (rows + self.first).t().reshape(-1, 1)
        return self.bag(numbers).view(-1, len(rows), DIM)


def _bag(rows: int) -> nn.EmbeddingBag:
    bag = nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True)
    nn.init.uniform_(bag.weight, -ROW_BOUND, ROW_BOUND)
    return bag


def _sparse_optimizer(name: str, rows: nn.Module) -> torch.optim.Optimizer:
    """Return torch.optim's optimizer for sparse gradients; row-wise Adagrad is the job's."""
    if name == "sgd":
        return torch.optim.SGD(rows.parameters(), lr=LEARNING_RATE)
    if name == "adagrad":
        return torch.optim.Adagrad(rows.parameters(), lr=LEARNING_RATE)
    return SparseRowWiseAdagrad(rows.parameters(), LEARNING_RATE, eps=EPS)


def make_candidate(name: str, optimizer: str, sizes: Sequence[int], table_bytes: int) -> Candidate:
    """Return a model and its optimizers.

    Args:
        name: :data:`OURS` or one of :data:`PEERS`.
        optimizer: of the rows, one of :data:`OPTIMIZERS`.
        sizes: of the vocabulary, by feature.
        table_bytes: what the hashing trick may use for rows and state.
    """
    torch.manual_seed(0)
    if name == TORCHREC:
        from whole_job.torchrec_rows import static_candidate

        return static_candidate(optimizer, sizes)
    rows: nn.Module
    if name == OURS:
        rows = DynamicRows(DIM, CONFIGS[optimizer](LEARNING_RATE))
        of_rows = rows.optimizer()
    else:
        if name == IN_ONE:
            rows = _RowsInOne(sizes)
        else:
            hashed = name == HASHED
            given = split_rows(sizes, table_bytes, DIM) if hashed else sizes
            rows = _StaticRows(given, hashed=hashed)
        of_rows = _sparse_optimizer(optimizer, rows)
    model = DLRM(rows, DIM)
    dense = torch.optim.Adam(model.dense_parameters(), lr=DENSE_LEARNING_RATE)
    return Candidate(model, [dense, of_rows], takes_rows=name in (BY_FEATURE, IN_ONE))


def fill(rows: DynamicRows, ids: Tensor, batch: int = 16_384) -> None:
    """Train the rows of ids once, without the dense part.

    Args:
        ids: int64 (26, N).
    """
    for begin in range(0, ids.shape[1], batch):
        rows(ids[:, begin : begin + batch].contiguous()).mean().backward()
        rows.optimizer().step()


def bytes_of_tables(optimizer: str, ids: Tensor) -> int:
    """Return the bytes of all dynamic tables once they have met the ids (26, N) int64."""
    rows = DynamicRows(DIM, CONFIGS[optimizer](LEARNING_RATE))
    features: dict[str, tuple[Tensor, Tensor]] = {}
    for name, column in zip(FEATURE_NAMES, ids, strict=True):
        distinct = column.unique()
        features[name] = (distinct, torch.tensor([0, len(distinct)]))
    rows.tables(features)
    return rows.figures().table_bytes
