"""Optimizers of rows: configs, and the torch optimizer of a module."""

from torch_dynemb.optim.adagrad import Adagrad, RowWiseAdagrad
from torch_dynemb.optim.adam import (
    Adam,
    AdamW,
    AdamWTF,
    AMSGrad,
    PartialRowWiseAdam,
    SmartDecayAdam,
)
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.optim.ftrl import Ftrl, GroupFtrl
from torch_dynemb.optim.fused import FusedOptimizer
from torch_dynemb.optim.lamb import LAMB, PartialRowWiseLAMB
from torch_dynemb.optim.rmsprop import Adadelta, RMSprop, RowWiseRMSprop
from torch_dynemb.optim.sgd import LARSSGD, SGD, MomentumSGD
from torch_dynemb.optim.split import SplitOptimizer

__all__ = [
    "LAMB",
    "LARSSGD",
    "SGD",
    "AMSGrad",
    "Adadelta",
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
    "RMSprop",
    "RowWiseAdagrad",
    "RowWiseRMSprop",
    "SmartDecayAdam",
    "SplitOptimizer",
]
