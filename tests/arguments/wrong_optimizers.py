"""Configs of optimizers."""

from __future__ import annotations

import math

import torch
from refusing import Row, raising

import torch_dynemb as td

ROWS: list[Row] = [
    *raising(
        ValueError,
        (lambda: td.SGD(lr=-0.1), r"SGD: lr is -0\.1, expected a finite number of at least 0"),
        (lambda: td.SGD(lr=float("nan")), r"SGD: lr is nan"),
        (lambda: td.Adagrad(0.1, eps=-1.0), r"Adagrad: eps is -1\.0"),
        (lambda: td.Adagrad(0.1, initial_accumulator_value=-1.0), r"initial_accumulator_value is"),
        (lambda: td.RowWiseAdagrad(0.1, weight_decay=-1.0), r"RowWiseAdagrad: weight_decay is"),
        (lambda: td.Adam(betas=(0.9, 1.0)), r"Adam: betas is \(0\.9, 1\.0\), expected two numbers"),
        (lambda: td.AdamW(betas=(-0.1, 0.9)), r"AdamW: betas is \(-0\.1, 0\.9\)"),
        (lambda: td.Adam(betas=(0.9,)), r"Adam: betas is \(0\.9,\)"),
        (lambda: td.MomentumSGD(0.1, momentum=1.0), r"MomentumSGD: momentum is 1\.0, expected a"),
        (
            lambda: td.MomentumSGD(0.1, 0.0, nesterov=True),
            r"momentum is 0\.0, expected more than 0",
        ),
        (
            lambda: td.MomentumSGD(0.1, nesterov=True, dampening=0.5),
            r"MomentumSGD: dampening is 0\.5, expected 0 with nesterov",
        ),
        (lambda: td.MomentumSGD(0.1, dampening=1.5), r"dampening is 1\.5, expected a number in"),
        (lambda: td.Adagrad(0.1, lr_decay=-1.0), r"Adagrad: lr_decay is -1\.0, expected a finite"),
        (lambda: td.RMSprop(alpha=1.0), r"RMSprop: alpha is 1\.0, expected a number in \[0, 1\)"),
        (lambda: td.RMSprop(momentum=1.0), r"RMSprop: momentum is 1\.0"),
        (lambda: td.Adadelta(rho=-0.5), r"Adadelta: rho is -0\.5"),
        (lambda: td.RowWiseRMSprop(ema_beta=1.0), r"RowWiseRMSprop: ema_beta is 1\.0"),
        (lambda: td.RowWiseRMSprop(ar_alpha=-1.0), r"ar_alpha is -1\.0, expected a finite number"),
        (
            lambda: td.RowWiseRMSprop(min_shrinkage=1.5),
            r"min_shrinkage is 1\.5, expected a number in \[0, 1\]",
        ),
        (lambda: td.AMSGrad(lr=-1.0), r"AMSGrad: lr is -1\.0"),
        (
            lambda: td.SGD(lr=1.0, delayed_gradients="skip"),
            r"SGD: delayed_gradients is 'skip', expected one of \('raise', 'apply'\)",
        ),
        (lambda: td.SGD(lr=0.1, clip_value=0.0), r"clip_value is 0\.0, expected a number above 0"),
        (lambda: td.SGD(lr=0.1, clip_norm=-1.0), r"clip_norm is -1\.0, expected a number above 0"),
        (lambda: td.SGD(lr=0.1, non_finite="ignore"), r"non_finite is 'ignore', expected one of"),
        (lambda: td.Ftrl(lr=0.0), r"Ftrl: lr is 0\.0, expected more than 0"),
        (lambda: td.Ftrl(0.1, initial_accumulator_value=0.0), r"expected more than 0 where beta"),
        (lambda: td.Ftrl(0.1, l1=-1.0), r"Ftrl: l1 is -1\.0"),
        (lambda: td.GroupFtrl(0.1, group_l1=math.inf), r"GroupFtrl: group_l1 is inf"),
        (lambda: td.LARSSGD(0.1, trust_coefficient=-1.0), r"trust_coefficient is -1\.0"),
        (lambda: td.LARSSGD(0.1, momentum=1.5), r"LARSSGD: momentum is 1\.5"),
        (lambda: td.SmartDecayAdam(row_steps=True), r"row_steps is True, expected False"),
        (lambda: td.LAMB(betas=(0.9, 2.0)), r"LAMB: betas is \(0\.9, 2\.0\)"),
        (lambda: td.PartialRowWiseAdam(eps=-1.0), r"PartialRowWiseAdam: eps is -1\.0"),
        (
            lambda: td.Adagrad(0.1, state_dtype=torch.uint8),
            r"state_dtype is torch\.uint8, expected",
        ),
        (
            lambda: td.Adam(state_dtype=torch.float16),
            r"state_dtype is torch\.float16, expected one",
        ),
    ),
    *raising(
        TypeError,
        (lambda: td.SGD(lr=0.1, state_dtype=torch.bfloat16), "state_dtype"),
        (lambda: td.RMSprop(centered=True), "centered"),
    ),
]
