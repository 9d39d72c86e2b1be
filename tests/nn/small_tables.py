"""Tables of a dozen rows, and what they are compared with."""

from __future__ import annotations

from typing import Any

import torch
from seeding import seeded
from torch import Tensor

import torch_dynemb as td

ROWS, DIM = 12, 5
# ids of the rows: nothing of the order, sign or size of a vocabulary
IDS = torch.tensor([7, -3, 0, 2**62, -(2**63), 2**63 - 1, 99, -1, 10**12, 5, 6, 1])


def weight(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, DIM, generator=seeded(seed))


def positions(*shape: int, seed: int = 0) -> Tensor:
    """Row numbers; IDS[positions] are the ids."""
    return torch.randint(0, ROWS, shape, generator=seeded(seed))


def embedding(**arguments: Any) -> td.DynamicEmbedding:
    return td.DynamicEmbedding(DIM, **{"optimizer": td.SGD(lr=0.1), **arguments})


def bag(**arguments: Any) -> td.DynamicEmbeddingBag:
    return td.DynamicEmbeddingBag(DIM, **{"mode": "sum", "optimizer": td.SGD(lr=0.1), **arguments})


def rows_of(module: td.DynamicEmbedding | td.DynamicEmbeddingBag) -> Tensor:
    """The rows of IDS."""
    return module.group.read(0, IDS)
