"""Training loops as programs have them: a model with a dynamic table beside one with nn.Embedding.

Both models run the same loop. Its calls on the table's optimizer are on torch's for nn.Embedding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from covering import Case, Space
from seeding import seeded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import torch_dynemb as td

ROWS, DIM, BATCH, STEPS = 10, 4, 6, 4
TOLERANCE = {"sgd": 2e-4, "adagrad": 2e-4, "adam": 2e-3}
EPSILON = 1e-15  # SparseAdam corrects no bias of it, so that a large one means something else

# of the table: torch's, the same of ours, and whether nn.Embedding has sparse gradients
TABLE_OPTIMIZERS: dict[str, tuple[Callable[..., Any], td.optim.OptimizerConfig, bool]] = {
    "sgd": (torch.optim.SGD, td.SGD(lr=0.2), False),
    "adagrad": (torch.optim.Adagrad, td.Adagrad(lr=0.2), False),
    "adam": (partial(torch.optim.SparseAdam, eps=EPSILON), td.Adam(lr=0.05, eps=EPSILON), True),
}
DENSE_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.5),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.02),
    "lbfgs": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda of: lr_scheduler.LambdaLR(of, lambda step: 1 / (1 + step)),
    "multiplicative": lambda of: lr_scheduler.MultiplicativeLR(of, lambda step: 0.7),
    "step": lambda of: lr_scheduler.StepLR(of, 2, 0.5),
    "multi_step": lambda of: lr_scheduler.MultiStepLR(of, [1, 3], 0.5),
    "constant": lambda of: lr_scheduler.ConstantLR(of, 0.5, 2),
    "linear": lambda of: lr_scheduler.LinearLR(of, 0.1, 1.0, 3),
    "exponential": lambda of: lr_scheduler.ExponentialLR(of, 0.8),
    "polynomial": lambda of: lr_scheduler.PolynomialLR(of, 5),
    "cosine": lambda of: lr_scheduler.CosineAnnealingLR(of, 4),
    "restarts": lambda of: lr_scheduler.CosineAnnealingWarmRestarts(of, 2),
    "cyclic": lambda of: lr_scheduler.CyclicLR(of, 0.01, 0.2, 2, cycle_momentum=False),
    "one_cycle": lambda of: lr_scheduler.OneCycleLR(of, 0.3, STEPS + 1, cycle_momentum=False),
    "sequential": lambda of: lr_scheduler.SequentialLR(
        of, [lr_scheduler.ConstantLR(of, 0.1, 2), lr_scheduler.ExponentialLR(of, 0.5)], [2]
    ),
    "chained": lambda of: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(of, 0.1, 2), lr_scheduler.ExponentialLR(of, 0.9)]
    ),
    "swa": lambda of: SWALR(of, 0.05, anneal_epochs=2),
    "plateau": lambda of: lr_scheduler.ReduceLROnPlateau(of, factor=0.5, patience=0),
}


class Model(nn.Module):
    """A table, a layer after its lookup, and a tower with a head per task."""

    def __init__(self, case: Case, table: nn.Module) -> None:
        super().__init__()
        self.case, self.table = case, table
        self.tower = nn.Linear(DIM, DIM)
        self.heads = nn.ModuleList(nn.Linear(DIM, 1) for _ in range(2))

    def rows(self, ids: Tensor) -> Tensor:
        """Look up, [batch, DIM]; the layer after it may change its input."""
        looked_up = self.table(ids)
        in_place = self.case["in_place"]
        if in_place == "relu":
            looked_up = nn.functional.relu(looked_up, inplace=True)
        elif in_place == "dropout":
            looked_up = nn.functional.dropout(looked_up, 0.0, inplace=True)
        elif in_place == "mul":
            looked_up.mul_(0.5)
        elif in_place == "index":
            looked_up[:, 0] = 0.0
        pooled: Tensor = looked_up.mean(1)
        if self.case["lookups"] == 2:
            pooled = pooled * self.table(ids.flip(0)[:, :1]).squeeze(1)
        return pooled

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows and the outputs of the tasks, [batch, 2]."""
        rows = self.rows(ids)
        if self.case["recomputes"]:
            hidden = checkpoint(lambda of: torch.tanh(self.tower(of)), rows, use_reentrant=False)
        else:
            hidden = torch.tanh(self.tower(rows))
        return rows, torch.cat([head(hidden) for head in self.heads], 1)


class Loop:
    """A model in training.

    Args:
        case: what the loop does.
        model: with an attribute ``table``.
        of_table: makes its optimizer of its parameters, once the model is wrapped.
        joined: the dense optimizer steps the table, too.
        clip: the function that clips by the norm of all gradients.
    """

    def __init__(
        self,
        case: Case,
        model: Model,
        of_table: Callable[[Any], Any],
        *,
        joined: bool,
        clip: Callable[..., Tensor],
    ) -> None:
        self.case, self.model, self.clip = case, model, clip
        self.rank = dist.get_rank() if case["ranks"] else 0
        self.called: nn.Module = model
        if case["wrap"] == "ddp":
            unused = case["freezes"] != "no"
            self.called = DistributedDataParallel(model, find_unused_parameters=unused)
        elif case["wrap"] == "fsdp2":
            fully_shard(model)
        dense = [of for name, of in model.named_parameters() if not name.startswith("table.")]
        self.dense = DENSE_OPTIMIZERS[case["dense_optimizer"]](dense)
        self.of_table, self.joined = of_table(model.table.parameters()), joined
        if joined and isinstance(model.table, td.DynamicEmbedding):
            td.step_with(self.dense, model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=16.0, enabled=case["scaler"] != "no")
        self.schedulers: list[Any] = []
        if case["schedule"] not in ("none", "by_hand"):
            self.schedulers = [
                SCHEDULES[case["schedule"]](of) for of in (self.of_table, self.dense)
            ]
        self.averaged: Any = None
        if case["averages"] == "ema":
            self.averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
        elif case["averages"] == "swa":
            self.averaged = AveragedModel(model)
        self.losses: list[float] = []

    def _own(self) -> list[Any]:
        """Return the optimizers that this loop calls: torch's is not joined, but ours may be."""
        dynamic = isinstance(self.model.table, td.DynamicEmbedding)
        return [self.dense] if dynamic and self.joined else [self.dense, self.of_table]

    def _zero(self) -> None:
        if self.case["zeroes"] == "model":
            self.model.zero_grad()
        for of in self._own() if self.case["zeroes"] == "optimizers" else []:
            of.zero_grad()

    def _loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=self.case["autocast"])
        with autocast:
            rows, outputs = self.called(ids)
        tasks = (outputs.float() - targets).square().mean(0)
        loss = tasks.sum()
        if self.case["extra"] == "penalty":
            (gradient,) = torch.autograd.grad(loss, rows, create_graph=True)
            loss = loss + gradient.square().sum()
        elif self.case["extra"] == "grad_norm":
            norms = [
                torch.autograd.grad(task, self.model.tower.weight, retain_graph=True)[0].norm()
                for task in tasks
            ]
            loss = (tasks * torch.stack(norms).softmax(0).detach()).sum()
        elif self.case["extra"] == "l2":
            loss = loss + 0.1 * rows.float().square().sum()
        self.losses.append(float(loss.detach()))
        return loss

    def _backward(self, ids: Tensor, targets: Tensor) -> Tensor:
        parts = self.case["accumulates"]
        total = torch.zeros(())
        for part in range(parts):
            last = part == parts - 1
            waits = self.case["no_sync"] and not last
            with self.called.no_sync() if waits else nullcontext():
                loss = self._loss(ids[part::parts], targets[part::parts]) / parts
                self.scaler.scale(loss).backward()
            total += loss.detach()
        if self.case["wrap"] == "by_hand":
            for of in self.model.parameters():
                if of.grad is not None:
                    dist.all_reduce(of.grad)
                    of.grad /= dist.get_world_size()
        return total

    def _ascend(self) -> list[Tensor]:
        """Move dense parameters along their gradients, as SAM does; return the moves."""
        moves = []
        with torch.no_grad():
            for of in self.model.tower.parameters():
                moves.append(0.05 * of.grad / (of.grad.norm() + 1e-6))
                of += moves[-1]
        return moves

    def step(self, number: int) -> None:
        """Make a training step."""
        ids = torch.randint(
            0, ROWS, (BATCH, 3), generator=seeded(number + 100 * self.case["seed"] + 50 * self.rank)
        )
        targets = torch.randn(BATCH, 2, generator=seeded(1000 + number + 50 * self.rank))
        if self.case["scaler"] == "overflow" and number == 1:
            targets = targets * float("inf")
        if self.case["freezes"] != "no":
            frozen = self.model.table if self.case["freezes"] == "table" else self.model.tower
            frozen.requires_grad_(number not in (1, 2))
        if self.case["schedule"] == "by_hand":
            for of, rate in ((self.of_table, 0.2), (self.dense, 0.1)):
                for group in of.param_groups:
                    group["lr"] = rate * min(1.0, (number + 1) / 3)
        self._zero()
        if self.case["dense_optimizer"] == "lbfgs":

            def closure() -> Tensor:
                for of in (self.dense, self.of_table):
                    of.zero_grad()
                return self._backward(ids, targets)

            self.dense.step(closure)
            if len(self._own()) == 2:
                self.of_table.step()
            return
        loss = self._backward(ids, targets)
        if self.case["sharpness"]:
            moves = self._ascend()
            self._zero()
            self._backward(ids, targets)
            with torch.no_grad():
                for of, move in zip(self.model.tower.parameters(), moves, strict=True):
                    of -= move
        if self.case["clips"]:
            for of in self._own() if self.case["scaler"] != "no" else []:
                self.scaler.unscale_(of)
            self.clip(self.model, 0.3)
        for of in self._own():
            self.scaler.step(of)
        self.scaler.update()
        for scheduler in self.schedulers:
            is_plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
            scheduler.step(*[loss] if is_plateau else [])
        if self.averaged is not None:
            self.averaged.update_parameters(self.model)

    def run(self) -> None:
        """Train; go back to an earlier state, if the case stops early."""
        kept = None
        for number in range(STEPS):
            self.step(number)
            if self.case["reloads"] and number == 1:
                kept = copy.deepcopy(
                    (self.model.state_dict(), self.dense.state_dict(), self.of_table.state_dict())
                )
            if self.case["validates"]:
                self.model.eval()
                with torch.no_grad():
                    self.called(torch.arange(6).view(2, 3))
                if self.case["wrap"] == "fsdp2":
                    self.model.reshard()  # without a backward, FSDP2 leaves the root whole
                self.model.train()
        if kept is not None:
            of_model, of_dense, of_table = kept
            self.model.load_state_dict(of_model)
            self.dense.load_state_dict(of_dense)
            self.of_table.load_state_dict(of_table)
            self.step(STEPS)

    def outputs(self) -> dict[str, Tensor]:
        """Return what training has left."""
        ids = torch.arange(ROWS)[:, None]
        found = {"losses": torch.tensor(self.losses)}
        for name, model in (("model", self.model), ("averaged model", self.averaged)):
            if model is not None:
                model.eval()
                with torch.no_grad():
                    found[f"outputs of the {name}"] = model(ids)[1].float()
        tower = self.model.tower.weight.detach()
        found["tower"] = tower.full_tensor() if isinstance(tower, DTensor) else tower
        with torch.no_grad():
            found["rows"] = self.model(ids)[0].float()
        rates = [group["lr"] for of in (self.of_table, self.dense) for group in of.param_groups]
        found["rates"] = torch.tensor(rates)
        return found


def check(rank: int, case: Case) -> list[str]:
    """Return what differs between the two models."""
    make, config, sparse = TABLE_OPTIMIZERS[case["optimizer"]]
    start = torch.randn(ROWS, DIM, generator=seeded(case["seed"]))
    static = nn.Embedding(ROWS, DIM, sparse=sparse, _weight=start.clone())
    dynamic = td.DynamicEmbedding.from_embedding(
        start.clone(),
        name="t",
        optimizer=config,
        split=case["split"],
        process_group=dist.group.WORLD if case["ranks"] else None,
    )
    models = []
    for table in (static, dynamic):
        torch.manual_seed(0)
        models.append(Model(case, table))

    def clip(model: nn.Module, most: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), most)

    joined = case["steps"] == "step_with"
    loops = [
        Loop(case, models[0], partial(make, lr=config.lr), joined=joined, clip=clip),
        Loop(case, models[1], lambda _: dynamic.optimizer, joined=joined, clip=td.clip_grad_norm_),
    ]
    for loop in loops:
        loop.run()
    expected, got = (loop.outputs() for loop in loops)
    within = TOLERANCE[case["optimizer"]] if not case["autocast"] else 3e-2
    return [
        f"{name}: off by up to {(got[name] - of).abs().max():.3g}"
        for name, of in expected.items()
        if not torch.allclose(got[name], of, rtol=within, atol=within, equal_nan=True)
    ]


SPACE = Space(
    "loops",
    axes={
        "ranks": [0, 2],
        "wrap": ["no", "ddp", "by_hand", "fsdp2"],
        "no_sync": [False, True],
        "optimizer": list(TABLE_OPTIMIZERS),
        "dense_optimizer": list(DENSE_OPTIMIZERS),
        "split": [False, True],
        "steps": ["apart", "step_with"],
        "zeroes": ["optimizers", "model"],
        "accumulates": [1, 2],
        "scaler": ["no", "yes", "overflow"],
        "autocast": [False, True],
        "clips": [False, True],
        "schedule": ["none", "by_hand", *SCHEDULES],
        "freezes": ["no", "table", "tower"],
        "in_place": ["no", "relu", "dropout", "mul", "index"],
        "extra": ["no", "penalty", "grad_norm", "l2"],
        "sharpness": [False, True],
        "averages": ["no", "ema", "swa"],
        "reloads": [False, True],
        "validates": [False, True],
        "lookups": [1, 2],
        "recomputes": [False, True],
    },
    constraints=[
        lambda ranks, wrap: (ranks == 0) == (wrap == "no"),
        lambda no_sync, wrap: not no_sync or wrap == "ddp",
        lambda no_sync, accumulates: not no_sync or accumulates > 1,
        # torch refuses these on several ranks, or has them otherwise
        lambda wrap, optimizer: wrap != "fsdp2" or optimizer != "adam",
        lambda wrap, optimizer, freezes: wrap != "ddp" or optimizer != "adam" or freezes != "table",
        lambda wrap, extra: wrap != "fsdp2" or extra not in ("grad_norm", "penalty"),
        lambda wrap, extra, freezes: wrap != "ddp" or extra != "penalty" or freezes == "no",
        lambda wrap, dense_optimizer: wrap != "fsdp2" or dense_optimizer != "lbfgs",
        lambda ranks, averages: ranks == 0 or averages == "no",  # refused
        lambda ranks, schedule: ranks == 0 or schedule != "plateau",  # of a loss of each rank
        # each backward is an update without split=True
        lambda split, accumulates: split or accumulates == 1,
        lambda split, scaler: split or scaler == "no",
        lambda split, clips: split or not clips,
        lambda split, sharpness: split or not sharpness,
        lambda split, dense_optimizer: split or dense_optimizer != "lbfgs",
        # torch refuses them, or they mean nothing
        lambda dense_optimizer, scaler: dense_optimizer != "lbfgs" or scaler == "no",
        lambda dense_optimizer, sharpness: dense_optimizer != "lbfgs" or not sharpness,
        lambda dense_optimizer, clips: dense_optimizer != "lbfgs" or not clips,
        lambda dense_optimizer, averages: dense_optimizer != "lbfgs" or averages == "no",
        lambda dense_optimizer, schedule: (
            dense_optimizer != "lbfgs" or schedule in ("none", "by_hand")
        ),
        lambda optimizer, clips: optimizer != "adam" or not clips,  # sparse gradients
        lambda optimizer, scaler: optimizer != "adam" or scaler == "no",
        lambda freezes, extra: (
            (freezes, extra) not in {("table", "penalty"), ("tower", "grad_norm")}
        ),
        lambda freezes, sharpness: freezes != "tower" or not sharpness,
        lambda freezes, scaler: freezes == "no" or scaler == "no",
        # documented: in split mode each step() counts for the bias corrections of all tables
        lambda split, optimizer, freezes: not split or optimizer != "adam" or freezes != "table",
        lambda scaler, schedule: scaler != "overflow" or schedule != "plateau",
        lambda scaler, sharpness: scaler != "overflow" or not sharpness,
        lambda scaler, extra: scaler != "overflow" or extra == "no",
        lambda autocast, optimizer: not autocast or optimizer == "sgd",  # signs of small gradients
    ],
    check=check,
    hiding={"wrap": ["ddp", "by_hand", "fsdp2"]},  # they hide nothing, but ranks take long
)
