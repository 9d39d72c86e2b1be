"""Optimizers with every option, and groups that they train."""

from __future__ import annotations

import pytest
import torch
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.optim import OptimizerConfig

OPTIMIZERS = {
    "sgd": td.SGD(lr=0.1),
    "sgd decay": td.SGD(lr=0.1, weight_decay=0.1),
    "adagrad": td.Adagrad(lr=0.1),
    "adagrad decay": td.Adagrad(lr=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-3),
    "rowwise_adagrad": td.RowWiseAdagrad(lr=0.1),
    "rowwise_adagrad decay": td.RowWiseAdagrad(
        lr=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-3
    ),
    "rmsprop": td.RMSprop(lr=0.01),
    "rmsprop decay": td.RMSprop(lr=0.01, alpha=0.75, momentum=0.5, weight_decay=0.1, eps=1e-3),
    "adadelta": td.Adadelta(),
    "adadelta decay": td.Adadelta(lr=0.5, rho=0.75, weight_decay=0.1, eps=1e-3),
    "rowwise_rmsprop": td.RowWiseRMSprop(lr=0.01),
    "rowwise_rmsprop decay": td.RowWiseRMSprop(
        lr=0.01, ema_beta=0.75, ar_alpha=10.0, min_shrinkage=0.5, weight_decay=0.1, eps=1e-3
    ),
    "adam": td.Adam(lr=0.01),
    "adam decay": td.Adam(lr=0.01, betas=(0.5, 0.75), weight_decay=0.1, eps=1e-3),
    "momentum_sgd": td.MomentumSGD(lr=0.02),
    "momentum_sgd decay": td.MomentumSGD(lr=0.02, momentum=0.5, nesterov=True, weight_decay=0.1),
    "amsgrad": td.AMSGrad(lr=0.01),
    "amsgrad decay": td.AMSGrad(lr=0.01, betas=(0.5, 0.75), weight_decay=0.1, eps=1e-3),
    "adamw_tf": td.AdamWTF(lr=0.01),
    "adamw_tf decay": td.AdamWTF(lr=0.01, betas=(0.5, 0.99), weight_decay=0.2, eps=1e-2),
    "adamw": td.AdamW(lr=0.01),
    "adamw decay": td.AdamW(lr=0.01, betas=(0.0, 0.99), weight_decay=0.2, eps=1e-3),
    "smart_decay_adam": td.SmartDecayAdam(lr=0.01),
    "smart_decay_adam decay": td.SmartDecayAdam(
        lr=0.01, betas=(0.5, 0.75), weight_decay=0.1, eps=1e-3
    ),
    "partial_rowwise_adam": td.PartialRowWiseAdam(lr=0.01),
    "partial_rowwise_adam decay": td.PartialRowWiseAdam(
        lr=0.01, betas=(0.5, 0.75), weight_decay=0.1, eps=1e-3
    ),
    "lamb": td.LAMB(lr=0.01, weight_decay=0.1),
    "lamb decay": td.LAMB(lr=0.01, weight_decay=0.1, decoupled_weight_decay=False, eps=1e-3),
    "partial_rowwise_lamb": td.PartialRowWiseLAMB(lr=0.01, weight_decay=0.1),
    "partial_rowwise_lamb decay": td.PartialRowWiseLAMB(
        lr=0.01, weight_decay=0.1, decoupled_weight_decay=False, eps=1e-3
    ),
    "lars_sgd": td.LARSSGD(lr=0.5, trust_coefficient=0.05),
    "lars_sgd decay": td.LARSSGD(lr=0.5, momentum=0.5, trust_coefficient=0.1, weight_decay=0.1),
    "ftrl": td.Ftrl(lr=0.1),
    "ftrl decay": td.Ftrl(lr=0.1, l1=0.3, l2=0.1, beta=1.0, weight_decay=0.1),
    "group_ftrl": td.GroupFtrl(lr=0.1, group_l1=0.3),
    "group_ftrl decay": td.GroupFtrl(lr=0.1, l1=0.1, l2=0.1, beta=1.0, group_l1=0.5),
    # options that all of them have, or a family
    "sgd decoupled": td.SGD(lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "momentum decoupled": td.MomentumSGD(lr=0.02, weight_decay=0.1, decoupled_weight_decay=True),
    "lars decoupled": td.LARSSGD(
        lr=0.5, trust_coefficient=0.1, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adagrad decoupled": td.Adagrad(lr=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "rowwise_adagrad decoupled": td.RowWiseAdagrad(
        lr=0.1, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "ftrl decoupled": td.Ftrl(lr=0.1, l1=0.1, weight_decay=0.1, decoupled_weight_decay=True),
    "amsgrad decoupled": td.AMSGrad(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "partial decoupled": td.PartialRowWiseAdam(
        lr=0.01, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adam row steps": td.Adam(lr=0.01, row_steps=True),
    "adamw_tf row steps": td.AdamWTF(lr=0.01, row_steps=True),
    "amsgrad row steps": td.AMSGrad(lr=0.01, row_steps=True),
    "lamb row steps": td.LAMB(lr=0.01, row_steps=True),
    "partial row steps": td.PartialRowWiseLAMB(lr=0.01, row_steps=True),
    "sgd clip value": td.SGD(lr=0.1, clip_value=0.5),
    "adam clip norm": td.Adam(lr=0.01, clip_norm=0.75),
    "rowwise clip both": td.RowWiseAdagrad(lr=0.1, clip_norm=1.5, clip_value=0.5),
    "lamb clip norm": td.LAMB(lr=0.01, clip_norm=0.75),
    "momentum dampened": td.MomentumSGD(lr=0.1, momentum=0.5, dampening=0.25, weight_decay=0.1),
    "adagrad lr decay": td.Adagrad(lr=0.5, lr_decay=0.25, maximize=True),
    "rowwise_adagrad lr decay": td.RowWiseAdagrad(
        lr=0.5, lr_decay=0.25, weight_decay=0.1, decoupled_weight_decay=True
    ),
    "adam maximize": td.Adam(lr=0.01, weight_decay=0.1, maximize=True, clip_value=0.5),
    "rmsprop decoupled": td.RMSprop(lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "rowwise_rmsprop decoupled": td.RowWiseRMSprop(
        lr=0.1, ar_alpha=0.5, weight_decay=0.1, decoupled_weight_decay=True, maximize=True
    ),
}
PLAIN = [name for name in OPTIMIZERS if " " not in name]
plain_optimizers = pytest.mark.parametrize("config", [OPTIMIZERS[n] for n in PLAIN], ids=PLAIN)


def make_group(
    config: OptimizerConfig, dims: tuple[int, ...] = (6,), max_rows: int = 1000
) -> td.TableGroup:
    uniform = td.Uniform(-1.0, 1.0)
    tables = [td.TableConfig(f"t{t}", dim, initializer=uniform) for t, dim in enumerate(dims)]
    return td.TableGroup(tables, optimizer=config, max_rows=max_rows, seed=21)


def exact_gradient(*shape: int, seed: int) -> Tensor:
    """Multiples of 1/64 in [-2, 2): their sums have no rounding."""
    generator = seeded(seed)
    return torch.randint(-128, 128, shape, generator=generator) / 64
