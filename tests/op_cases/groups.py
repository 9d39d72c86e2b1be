"""Small groups of tables, and calls on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from group_calls import Call, call_of
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops, optim
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.optim import OptimizerConfig

OpArguments = tuple[Any, ...]
Case = Callable[[], OpArguments]


def _is_config(kind: object) -> bool:
    return isinstance(kind, type) and "kernel_name" in vars(kind)


OPTIMIZERS: dict[str, OptimizerConfig] = {
    **{kind.kernel_name: kind(lr=0.1) for kind in vars(optim).values() if _is_config(kind)},
    # with options that kernels branch on
    "adagrad": td.Adagrad(lr=0.1, initial_accumulator_value=0.5),
    "rowwise_adagrad": td.RowWiseAdagrad(lr=0.1, initial_accumulator_value=0.5),
    "momentum_sgd": td.MomentumSGD(lr=0.1, nesterov=True),
    "partial_rowwise_adam": td.PartialRowWiseAdam(lr=0.1, row_steps=True),
    "rmsprop_momentum": td.RMSprop(lr=0.1, momentum=0.5),
    "rowwise_rmsprop": td.RowWiseRMSprop(lr=0.1, ar_alpha=1.0),
    "lamb": td.LAMB(lr=0.1, weight_decay=0.1),
    "ftrl": td.Ftrl(lr=0.1, l1=0.1),
    "group_ftrl": td.GroupFtrl(lr=0.1, group_l1=0.1),
}
# optimizers with other state or rows than the plain ones
STORED: dict[str, tuple[OptimizerConfig, torch.dtype]] = {
    "bfloat16": (td.Adam(lr=0.1, state_dtype=torch.bfloat16, row_steps=True), torch.bfloat16),
    "8 bits": (td.Adam(lr=0.1, state_dtype=torch.uint8), torch.float16),
}

MANY_SCORES = td.Policy(score=("timestamp", "frequency"), ttl=10)
# of a group that has ten ids in every table, when pooled_call brings new ones
POLICIES = {
    "frequency": td.Policy(score="frequency"),
    "decayed": td.Policy(score="decayed", half_life_steps=4),
    "many scores": MANY_SCORES,
    "evict": td.Policy(score="frequency", capacity=10),
    "default": td.Policy(capacity=11, on_full="default"),
    "beyond capacity": td.Policy(capacity=11, on_full="grow"),
    "counted": td.Policy(admission=td.AdmitFrequent(2)),
    "sketch": td.Policy(score="step", admission=td.AdmitFrequentSketch(2, memory=4096)),
    "chance": td.Policy(admission=td.AdmitByChance(0.5)),
    "admit none": td.Policy(score="step", admission=td.AdmitNone()),
}


def make_group(
    *, optimizer: str = "adam", score: Any = "step", split: bool = False
) -> td.TableGroup:
    """Two dims, three tables; ids 0 to 9 are there, some trained, some erased."""
    policy = score if isinstance(score, td.Policy) else td.Policy(score=score)
    config, dtype = STORED.get(optimizer) or (OPTIMIZERS[optimizer], torch.float32)
    tables = [
        td.TableConfig("a", 4, policy=policy, dtype=dtype),
        td.TableConfig("b", 3, padding_idx=0, policy=policy, dtype=dtype),
        td.TableConfig("c", 4, initializer=td.Uniform(), policy=policy, dtype=dtype),
    ]
    group = td.TableGroup(tables, optimizer=config, max_rows=64, seed=2, split=split)
    group.index.clock[1] = 1000  # not the machine's time
    for table in range(3):
        group.index.clock[0] += 1
        group.insert(table, torch.arange(10))
    call = call_of(group, [(0, [[1, 2]]), (1, [[1]]), (2, [[3]])])
    handles = group.find(call.ids, call.offsets, call.tables).handles
    output = ops.embedding(
        group.rows,
        call.batch(),
        handles,
        torch.zeros(1, requires_grad=True),
        optimizer=group.config.optimizer_code,
    )
    output.sum().backward()
    group.erase(0, torch.arange(3))
    return group


def pooled_call(group: td.TableGroup, batch: int = 2) -> Call:
    """Known, new, repeated and padding ids, in bags of mixed length."""
    bags = [[[1, 2, 70], [], [5]], [[0, 3, 3, 71], [72], [4]], [[6], [73, 7, 7], []]]
    return call_of(group, [(t, bags[t][:batch]) for t in range(3)])


def flat_call(group: td.TableGroup) -> Call:
    """Features of one dim."""
    return call_of(group, [(0, [[1, 2, 70]]), (2, [[5, 6, 6]])])


def found(group: td.TableGroup, call: Call) -> Tensor:
    return group.find(call.ids, call.offsets, call.tables).handles


def pooled_kinds() -> Iterator[tuple[str, Pooling]]:
    for kind in ("plain", "weighted"):
        for pooling in (Pooling.SUM, Pooling.MEAN):
            yield kind, pooling
