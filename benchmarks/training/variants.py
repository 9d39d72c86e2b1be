"""Our optimizers, in the ways in which a table can keep its numbers."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from common.id_streams import distinct_ids
from peers.static_tables import LEARNING_RATE

import torch_dynemb as td

OPTIMIZERS = (
    *("SGD", "MomentumSGD", "LARSSGD", "Adagrad", "RowWiseAdagrad", "Ftrl", "GroupFtrl"),
    *("Adam", "AdamW", "AdamWTF", "AMSGrad", "SmartDecayAdam", "PartialRowWiseAdam"),
    *("LAMB", "PartialRowWiseLAMB", "RMSprop", "Adadelta", "RowWiseRMSprop"),
)
BASE = "RowWiseAdagrad"
OPTIONS: dict[str, dict[str, float]] = {"GroupFtrl": {"l1": 1e-6, "group_l1": 1e-6}}
FLOAT32, BFLOAT16, FLOAT16, UINT8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
SHORT = {FLOAT32: "fp32", BFLOAT16: "bf16", FLOAT16: "fp16", UINT8: "8-bit"}


@dataclass(frozen=True)
class Variant:
    """One of our optimizers, how it keeps its numbers, and when it applies gradients."""

    optimizer: str
    rows: torch.dtype = FLOAT32
    state: torch.dtype = FLOAT32
    stochastic: bool = True
    micro_batches: int = 0  # of a step in split mode; 0: the update is fused into the backward

    @property
    def name(self) -> str:
        """Of the optimizer, and what is not as usual."""
        parts = [self.optimizer]
        if self.rows != FLOAT32:
            parts.append(f"{SHORT[self.rows]} rows" + ("" if self.stochastic else " to nearest"))
        if self.state != FLOAT32:
            parts.append(f"{SHORT[self.state]} state")
        if self.micro_batches:
            parts.append("split")
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        return ", ".join(parts)

    def config(self) -> td.optim.OptimizerConfig:
        """Return the optimizer's config."""
        options: dict[str, Any] = dict(OPTIONS.get(self.optimizer, {}))
        if self.state != FLOAT32:
            options["state_dtype"] = self.state
        kind = getattr(td, self.optimizer)
        config: td.optim.OptimizerConfig = kind(
            lr=LEARNING_RATE, stochastic_rounding=self.stochastic, **options
        )
        return config

    def table(self, dim: int) -> td.DynamicEmbeddingBag:
        """Return an empty table of ``dim`` columns."""
        return td.DynamicEmbeddingBag(
            dim,
            mode="sum",
            name="bench",
            initializer=td.Uniform(-0.01, 0.01),  # as the peers
            optimizer=self.config(),
            dtype=self.rows,
            split=self.micro_batches > 0,
        )


def state_dtypes(optimizer: str) -> tuple[torch.dtype, ...]:
    """Return dtypes of an optimizer's values by weight, float32 first."""
    kind = getattr(td, optimizer)
    if "state_dtype" not in {entry.name for entry in fields(kind)}:
        return (FLOAT32,)
    return (FLOAT32, BFLOAT16, UINT8) if issubclass(kind, td.Adam) else (FLOAT32, BFLOAT16)


def train_all(bag: td.DynamicEmbeddingBag, count: int, batch: int) -> None:
    """Train a table once with the ids of numbers 0 to ``count - 1``, ``batch`` in a step."""
    for ids in distinct_ids(0, count).split(batch):
        bag(ids.view(-1, 1)).backward(torch.zeros(len(ids), bag.embedding_dim))
        bag.optimizer.step()
