"""A group on the CPU and one on a GPU, emulated or real, that are trained alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from emulated_groups import different_state, emulated_cuda
from group_calls import Call, bag_lookup, call_of, same_bits
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import Hyper, Pooling, RowClock
from torch_dynemb.ops.pending import PendingGradients, merge_grad_
from torch_dynemb.optim import OptimizerConfig

FLOAT32 = torch.float32

OPTIMIZERS: list[OptimizerConfig] = [
    td.SGD(lr=0.5, weight_decay=0.125),
    td.MomentumSGD(lr=0.1, nesterov=True),
    td.MomentumSGD(lr=0.1, dampening=0.5, maximize=True),
    td.Adagrad(lr=0.5, initial_accumulator_value=0.5),
    td.RowWiseAdagrad(lr=0.5, initial_accumulator_value=0.5, weight_decay=0.125),
    td.Adam(lr=0.1),
    td.AdamW(lr=0.1, weight_decay=0.25),
    td.AdamWTF(lr=0.01),
    td.AMSGrad(lr=0.01),
    td.SmartDecayAdam(lr=0.1),
    td.PartialRowWiseAdam(lr=0.1),
    td.LAMB(lr=0.1, weight_decay=0.1),
    td.PartialRowWiseLAMB(lr=0.1, weight_decay=0.1),
    td.LARSSGD(lr=0.5, trust_coefficient=0.5, weight_decay=0.125),
    td.Ftrl(lr=0.5, l1=0.1, l2=0.1, beta=1.0),
    td.GroupFtrl(lr=0.5, l1=0.01, group_l1=0.1),
    td.RMSprop(lr=0.1),
    td.RMSprop(lr=0.1, momentum=0.5),
    td.Adadelta(),
    td.RowWiseRMSprop(lr=0.1, ar_alpha=1.0, weight_decay=0.125),
]
# Sums over a row are rounded in another order than on the CPU.
SUMMED = (
    td.RowWiseAdagrad,
    td.PartialRowWiseAdam,
    td.LAMB,
    td.PartialRowWiseLAMB,
    td.LARSSGD,
    td.GroupFtrl,
    td.RowWiseRMSprop,
)
SEEDS = [0, 1, 5]  # orders of threads on the emulator; 0: ascending


def name_of(value: Any) -> str:
    return value.name if isinstance(value, OptimizerConfig) else str(value)


class Pair:
    """The same training on a group of the CPU and one of a GPU.

    Args:
        slabs: dim and dtype of the rows of each table.
        rounded: floats need only be close.
    """

    def __init__(
        self,
        gpu: str,
        optimizer: OptimizerConfig,
        slabs: list[tuple[int, torch.dtype]],
        *,
        rounded: bool | None = None,
        **arguments: Any,
    ) -> None:
        self.rounded = isinstance(optimizer, SUMMED) if rounded is None else rounded
        self.on_gpu = emulated_cuda if gpu == "emulated" else partial(torch.device, "cuda")
        initializers = [td.Uniform(-1.0, 1.0), td.Normal(), td.TruncatedNormal(std=0.5)]
        tables = [
            td.TableConfig(
                f"table{number}",
                dim,
                dtype=dtype,
                initializer=initializers[number % 3],
                padding_idx=7 if number == 1 else None,
            )
            for number, (dim, dtype) in enumerate(slabs)
        ]
        arguments = {"optimizer": optimizer, "seed": 3, "max_rows": 600, **arguments}
        self.cpu = td.TableGroup(tables, device="cpu", **arguments)
        with self.on_gpu():
            self.gpu = td.TableGroup(tables, **arguments)

    def groups(self) -> list[td.TableGroup]:
        return [self.cpu, self.gpu]

    def forward(self, group: td.TableGroup, call: Call, **arguments: Any) -> Tensor:
        ids, offsets = call.ids.to(group.device), call.offsets.to(group.device)
        return bag_lookup(group, call._replace(ids=ids, offsets=offsets), **arguments)

    def train(
        self,
        call: Call,
        *,
        pooling: Pooling = Pooling.SUM,
        weighted: bool = False,
        gradient: Tensor | None = None,
    ) -> None:
        """One lookup and its backward on both; the outputs must be equal."""
        count = call.ids.numel()
        weights = torch.linspace(0.5, 1.5, count, device="cpu") if weighted else None

        def step(group: td.TableGroup) -> Tensor:
            on_device = None if weights is None else weights.to(group.device)
            output = self.forward(group, call, pooling=pooling, weights=on_device)
            given = gradient
            if given is None:
                given = torch.linspace(-1.0, 1.0, output.numel(), device="cpu") ** 3
            output.backward(given.to(group.device).reshape(output.shape))
            group.index.clock[0] += 1
            return output.detach().cpu()

        with torch.device("cpu"):
            expected = step(self.cpu)
        with self.on_gpu():
            given = step(self.gpu)
            self.raise_errors()
        if self.rounded:
            torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
        else:
            assert same_bits(given, expected)

    def raise_errors(self) -> None:
        """What the device has found wrong; the step goes on."""
        if self.gpu.device.type == "cuda":
            torch.cuda.synchronize()
        torch.ops.dynemb.raise_device_errors(self.gpu.device.index or 0)

    def apply(self) -> None:
        """The step of split mode, as ``SplitOptimizer`` does it."""
        for group, device in ((self.cpu, partial(torch.device, "cpu")), (self.gpu, self.on_gpu)):
            with device():
                pending = PendingGradients.of(group.rows.pending)
                merge_grad_(pending, group.rows)
                tables = len(group.config.tables)
                updates = group.rows.row_clock[tables + RowClock.UPDATES].reshape(1).clone()
                assert group.config.optimizer is not None
                counts = pending.counts[:, 0].contiguous()
                torch.ops.dynemb.apply_grad_(
                    *group.rows.updated,
                    *pending[:-1],
                    counts,
                    updates,
                    list(range(tables)),
                    group.config.optimizer.kernel_number,
                )
                pending.counts.zero_()
                group.end_step()

    def set_hyper(self, column: Hyper, value: float) -> None:
        for group in self.groups():
            group.rows.hyper[:, column] = value

    def check_state(self) -> None:
        with torch.device("cpu"):
            self.cpu.materialize()
        with self.on_gpu():
            self.gpu.materialize()
        assert different_state(self.cpu, self.gpu, rounded=self.rounded) == []

    def row_clock(self) -> list[int]:
        on_cpu, on_gpu = (group.rows.row_clock.tolist() for group in self.groups())
        assert on_cpu == on_gpu
        return on_cpu


def random_call(pair: Pair, seed: int, distinct: int = 40) -> Call:
    """A feature per table, bags of 0 to 9 ids."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    features = []
    for table in range(len(pair.cpu.config.tables)):
        ids = torch.randint(0, distinct, (10, 9), generator=generator, device="cpu") * 7919 - 50
        features.append((table, [row[:length].tolist() for length, row in enumerate(ids)]))
    with torch.device("cpu"):
        return call_of(pair.cpu, features)
