"""Training: every optimizer, with rows and state of every dtype, fused and split."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contents import Outputs, contents
from made_tensors import ids, short_values, values

import torch_dynemb as td
from torch_dynemb.optim import OptimizerConfig

BETAS = (0.5, 0.75)  # powers are exact

# two of each: defaults, and as many options as go together
OPTIMIZERS: dict[str, tuple[OptimizerConfig, OptimizerConfig]] = {
    "sgd": (
        td.SGD(lr=0.1),
        td.SGD(lr=0.1, weight_decay=0.1, decoupled_weight_decay=True, clip_value=0.5),
    ),
    "momentum_sgd": (
        td.MomentumSGD(lr=0.02),
        td.MomentumSGD(lr=0.02, momentum=0.5, nesterov=True, weight_decay=0.1),
    ),
    "lars_sgd": (
        td.LARSSGD(lr=0.5, trust_coefficient=0.05),
        td.LARSSGD(lr=0.5, momentum=0.5, trust_coefficient=0.1, weight_decay=0.1),
    ),
    "adagrad": (
        td.Adagrad(lr=0.1),
        td.Adagrad(lr=0.1, weight_decay=0.1, initial_accumulator_value=0.5, eps=1e-3),
    ),
    "rowwise_adagrad": (
        td.RowWiseAdagrad(lr=0.1),
        td.RowWiseAdagrad(lr=0.1, weight_decay=0.1, clip_norm=1.5, clip_value=0.5),
    ),
    "rmsprop": (
        td.RMSprop(lr=0.1, alpha=0.75),
        td.RMSprop(lr=0.1, alpha=0.75, momentum=0.5, weight_decay=0.1, maximize=True),
    ),
    "adadelta": (
        td.Adadelta(rho=0.75),
        td.Adadelta(lr=0.5, rho=0.75, eps=1e-3, weight_decay=0.1),
    ),
    "rowwise_rmsprop": (
        td.RowWiseRMSprop(lr=0.1, ema_beta=0.75),
        td.RowWiseRMSprop(lr=0.1, ema_beta=0.75, ar_alpha=2.5, clip_norm=1.5),
    ),
    "dampened and decayed rates": (
        td.MomentumSGD(lr=0.1, momentum=0.5, dampening=0.25),
        td.Adagrad(lr=0.5, lr_decay=0.25, eps=1e-3, maximize=True),
    ),
    "adam": (
        td.Adam(lr=0.01, betas=BETAS),
        td.Adam(lr=0.01, betas=BETAS, weight_decay=0.1, eps=1e-3, clip_norm=0.75, row_steps=True),
    ),
    "adamw": (
        td.AdamW(lr=0.01, betas=BETAS),
        td.AdamW(lr=0.01, betas=(0.0, 0.75), weight_decay=0.2, eps=1e-3),
    ),
    "adamw_tf": (
        td.AdamWTF(lr=0.01, betas=BETAS),
        td.AdamWTF(lr=0.01, betas=BETAS, weight_decay=0.2, eps=1e-2, row_steps=True),
    ),
    "amsgrad": (
        td.AMSGrad(lr=0.01, betas=BETAS),
        td.AMSGrad(lr=0.01, betas=BETAS, weight_decay=0.1, decoupled_weight_decay=True),
    ),
    "smart_decay_adam": (
        td.SmartDecayAdam(lr=0.01, betas=BETAS),
        td.SmartDecayAdam(lr=0.01, betas=BETAS, weight_decay=0.1, eps=1e-3),
    ),
    "partial_rowwise_adam": (
        td.PartialRowWiseAdam(lr=0.01, betas=BETAS),
        td.PartialRowWiseAdam(lr=0.01, betas=BETAS, weight_decay=0.1, row_steps=True),
    ),
    "lamb": (
        td.LAMB(lr=0.01, betas=BETAS, weight_decay=0.1),
        td.LAMB(lr=0.01, betas=BETAS, weight_decay=0.1, decoupled_weight_decay=False),
    ),
    "partial_rowwise_lamb": (
        td.PartialRowWiseLAMB(lr=0.01, betas=BETAS, weight_decay=0.1),
        td.PartialRowWiseLAMB(lr=0.01, betas=BETAS, clip_norm=0.75, row_steps=True),
    ),
    "ftrl": (
        td.Ftrl(lr=0.1),
        td.Ftrl(lr=0.1, l1=0.3, l2=0.1, beta=1.0, weight_decay=0.1),
    ),
    "group_ftrl": (
        td.GroupFtrl(lr=0.1, group_l1=0.3),
        td.GroupFtrl(lr=0.1, l1=0.1, l2=0.1, beta=1.0, group_l1=0.5),
    ),
}

DIMS = (6, 33)
BAGS = 8


def collection(
    optimizer: OptimizerConfig, *, dtype: torch.dtype = torch.float32, **arguments: Any
) -> td.DynamicEmbeddingBagCollection:
    """Make a collection of two tables, one of which two features look up."""
    tables = [
        td.TableConfig("a", DIMS[0], ["first", "second"], dtype=dtype),
        td.TableConfig("b", DIMS[1], ["third"], initializer=td.Normal(0.0, 0.5), dtype=dtype),
    ]
    return td.DynamicEmbeddingBagCollection(tables, optimizer=optimizer, max_rows=1000, **arguments)


def batch(step: int, *, below: int = 24) -> dict[str, torch.Tensor]:
    """Make the features of a step; ids return in later ones."""
    return {
        name: ids(BAGS, 3, below=below + 4 * step, seed=7 * step + number)
        for number, name in enumerate(("first", "second", "third"))
    }


def train(module: td.DynamicEmbeddingBagCollection, steps: range) -> torch.Tensor:
    """Train steps, each of which depends on its number alone; returns all outputs."""
    outputs = []
    for step in steps:
        output = module(batch(step))
        output.backward(values(*output.shape, seed=step).to(output.dtype))
        module.optimizer.step()
        outputs.append(output.detach())
    return torch.stack(outputs)


def fused(optimizer: OptimizerConfig, dtype: torch.dtype, folder: Path) -> Outputs:
    """Train with updates in the backward."""
    module = collection(optimizer, dtype=dtype)
    return {"outputs": train(module, range(3)), **contents(module)}


def split(optimizer: OptimizerConfig, dtype: torch.dtype, folder: Path) -> Outputs:
    """Train with updates in the optimizer's step, which two micro-batches precede."""
    module = collection(optimizer, dtype=dtype, split=True)
    outputs = []
    for step in range(2):
        for micro in range(2):
            output = module(batch(2 * step + micro))
            output.backward(values(*output.shape, seed=2 * step + micro))
            outputs.append(output.detach())
        module.optimizer.step()
        module.optimizer.zero_grad()
    return {"outputs": torch.stack(outputs), **contents(module)}


def with_state(config: OptimizerConfig, dtype: torch.dtype) -> OptimizerConfig | None:
    """Change the dtype of the state; None: the optimizer has no state of that dtype."""
    if not any(field.name == "state_dtype" for field in dataclasses.fields(config)):
        return None
    try:
        return dataclasses.replace(config, state_dtype=dtype)  # type: ignore[call-arg]
    except ValueError:
        return None


def of_optimizers() -> dict[str, Callable[[Path], Outputs]]:
    """Collect the cases of each optimizer."""
    found: dict[str, Callable[[Path], Outputs]] = {}
    for name, (plain, options) in OPTIMIZERS.items():
        nearest = dataclasses.replace(plain, stochastic_rounding=False)
        short = with_state(plain, torch.bfloat16) or plain
        short_nearest = with_state(nearest, torch.bfloat16) or nearest
        for kind, case, config, dtype in (
            ("fp32", fused, plain, torch.float32),
            ("options", fused, options, torch.float32),
            ("split", split, options, torch.float32),
            ("bf16", fused, short, torch.bfloat16),
            ("bf16 nearest", fused, short_nearest, torch.bfloat16),
            ("fp16", fused, plain, torch.float16),
            ("fp16 nearest", fused, nearest, torch.float16),
        ):
            found[f"train {name} {kind}"] = partial(case, config, dtype)
        eight_bits = with_state(options, torch.uint8)
        if eight_bits is not None:
            found[f"train {name} 8-bit state"] = partial(fused, eight_bits, torch.bfloat16)
            found[f"train {name} 8-bit state split"] = partial(split, eight_bits, torch.float16)
    return found


# -- batches that threads share, and long runs of one id -------------------------------------------


def large(optimizer: OptimizerConfig, mode: str, folder: Path) -> Outputs:
    """Train on batches of 6,000 ids, one of which comes 700 times."""
    module = td.DynamicEmbeddingBag(
        20, mode=mode, name="large", optimizer=optimizer, max_rows=10_000
    )
    outputs = []
    for step in range(2):
        of_bags = ids(1500, 4, below=2500, seed=step)
        of_bags[::2, 1] = torch.where(of_bags[::2, 1] % 4 > 0, 77, of_bags[::2, 1])
        output = module(of_bags)
        output.backward(values(*output.shape, seed=step))
        module.optimizer.step()
        outputs.append(output.detach())
    return {"outputs": torch.stack(outputs), **contents(module)}


# -- options of training ---------------------------------------------------------------------------


def other_rates(folder: Path) -> Outputs:
    """Train with learning rates of a table's own, which change."""
    module = collection(td.Adam(lr=0.5, betas=BETAS))
    outputs: list[torch.Tensor] = []
    for step in range(3):
        for group in module.optimizer.param_groups:
            group["lr"] = 0.25 / (1 + step + len(outputs))
        module.optimizer.param_groups[0]["weight_decay"] = 0.125 * step
        outputs.append(train(module, range(step, step + 1)))
    return {"outputs": torch.cat(outputs), **contents(module)}


def another_optimizer(folder: Path) -> Outputs:
    """Give trained rows another optimizer."""
    module = collection(td.Adagrad(lr=0.1))
    train(module, range(2))
    module.set_optimizer(td.Adam(lr=0.1, betas=BETAS))
    return {"outputs": train(module, range(2, 4)), **contents(module)}


def non_finite(folder: Path) -> Outputs:
    """Skip gradients with NaN or infinity."""
    module = td.DynamicEmbedding(
        5, name="rows", optimizer=td.Adagrad(lr=0.1, non_finite="skip"), max_rows=100
    )
    for step in range(2):
        output = module(torch.arange(12))
        gradient = values(*output.shape, seed=step)
        gradient[3 + step, 2] = float("nan")
        gradient[7, step] = float("inf")
        output.backward(gradient)
        module.optimizer.step()
    skipped = torch.tensor(module.optimizer.non_finite_gradients())
    return {"skipped": skipped, **contents(module)}


def delayed(folder: Path) -> Outputs:
    """Apply gradients of rows that have been updated meanwhile."""
    optimizer = td.Adam(lr=0.1, betas=BETAS, delayed_gradients="apply")
    module = td.DynamicEmbedding(5, name="rows", optimizer=optimizer, max_rows=100)
    early, late = module(torch.arange(12)), module(torch.arange(6, 18))
    late.backward(values(*late.shape, seed=1))
    module.optimizer.step()
    early.backward(values(*early.shape, seed=2))
    module.optimizer.step()
    return contents(module)


def clipped(folder: Path) -> Outputs:
    """Scale pending gradients to one norm, which is exact: of one table, since norms of norms are
    not."""
    module = td.DynamicEmbeddingBag(
        12, mode="sum", name="bag", optimizer=td.SGD(lr=0.1), split=True, max_rows=100
    )
    norms = []
    for step in range(2):
        output = module(ids(BAGS, 3, below=30, seed=step))
        output.backward(short_values(*output.shape, seed=step))
        norms.append(td.clip_grad_norm_(module, max_norm=2.0))
        module.optimizer.step()
        module.optimizer.zero_grad()
    return {"norms": torch.stack(norms), **contents(module)}


def added_table(folder: Path) -> Outputs:
    """Add a table to trained ones."""
    module = collection(td.Adagrad(lr=0.1))
    train(module, range(2))
    module.add_table(td.TableConfig("c", 6, ["fourth"]))
    outputs = []
    for step in range(2, 4):
        features = {**batch(step), "fourth": ids(BAGS, 2, below=20, seed=step)}
        output = module(features)
        output.backward(values(*output.shape, seed=step))
        module.optimizer.step()
        outputs.append(output.detach())
    return {"outputs": torch.stack(outputs), **contents(module)}


CASES: dict[str, Callable[[Path], Outputs]] = {
    **of_optimizers(),
    "train large sum": partial(large, td.SGD(lr=0.1), "sum"),
    "train large mean": partial(large, td.Adam(lr=0.1, betas=BETAS), "mean"),
    "train large by row": partial(large, td.RowWiseAdagrad(lr=0.1), "sum"),
    "train rates": other_rates,
    "train another optimizer": another_optimizer,
    "train non-finite": non_finite,
    "train delayed": delayed,
    "train clipped": clipped,
    "train added table": added_table,
}
