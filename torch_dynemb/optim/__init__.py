"""Optimizers of rows: small config objects, and the torch optimizer that a module shows."""

from torch_dynemb.optim.config import (
    SGD,
    Adagrad,
    Adam,
    AdamW,
    AdamWTF,
    AMSGrad,
    MomentumSGD,
    OptimizerConfig,
    RowWiseAdagrad,
)
from torch_dynemb.optim.fused import FusedOptimizer

__all__ = [
    "SGD",
    "AMSGrad",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamWTF",
    "FusedOptimizer",
    "MomentumSGD",
    "OptimizerConfig",
    "RowWiseAdagrad",
]
