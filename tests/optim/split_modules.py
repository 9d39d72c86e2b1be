"""Modules in split mode, which have one dim, and a step of them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.optim import OptimizerConfig

DIM = 6


def bag(config: OptimizerConfig, **arguments: Any) -> td.DynamicEmbeddingBag:
    return td.DynamicEmbeddingBag(
        DIM,
        name="t",
        optimizer=config,
        initializer=td.Uniform(-1.0, 1.0),
        **{"mode": "sum", "max_rows": 1000, **arguments},
    )


def embedding(config: OptimizerConfig, **arguments: Any) -> td.DynamicEmbedding:
    return td.DynamicEmbedding(
        DIM,
        name="t",
        optimizer=config,
        initializer=td.Uniform(-1.0, 1.0),
        **{"split": True, "max_rows": 1000, **arguments},
    )


def train(module: nn.Module, ids: Tensor, gradient: Tensor) -> None:
    module(ids).backward(gradient)
