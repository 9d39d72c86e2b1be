"""Optimizers of rows: small config objects, and the torch optimizer that a module shows."""

from torch_dynemb.optim.clipping import clip_grad_norm_
from torch_dynemb.optim.config import (
    LAMB,
    LARSSGD,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    AdamWTF,
    AMSGrad,
    Ftrl,
    GroupFtrl,
    MomentumSGD,
    OptimizerConfig,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
    SmartDecayAdam,
)
from torch_dynemb.optim.fused import FusedOptimizer
from torch_dynemb.optim.split import SplitOptimizer

__all__ = [
    "LAMB",
    "LARSSGD",
    "SGD",
    "AMSGrad",
    "Adagrad",
    "Adam",
    "AdamW",
    "AdamWTF",
    "Ftrl",
    "FusedOptimizer",
    "GroupFtrl",
    "MomentumSGD",
    "OptimizerConfig",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
    "SmartDecayAdam",
    "SplitOptimizer",
    "clip_grad_norm_",
]
