"""Every instruction set that this machine has gives the same bits in every kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from execution import simd, simd_levels
from group_calls import (
    Call,
    bag_lookup,
    differences,
    read_bags,
    same_bits,
    snapshot,
)
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.cpu_only("instruction sets of the CPU")

DIMS = (1, 3, 7, 16, 17, 33, 129)
OPTIMIZERS: list[OptimizerConfig] = [
    td.SGD(lr=0.1, weight_decay=0.01),
    td.Adagrad(lr=0.1, weight_decay=0.01),
    td.RowWiseAdagrad(lr=0.1, weight_decay=0.01),
    td.Adam(lr=0.1, weight_decay=0.01),
    td.AdamW(lr=0.1),
    td.MomentumSGD(lr=0.1, nesterov=True),
    td.AMSGrad(lr=0.01),
    td.AdamWTF(lr=0.01),
]
INITIALIZERS = [
    td.Constant(0.3),
    td.Uniform(-0.3, 0.7),
    td.Normal(0.1, 2.0),
    td.TruncatedNormal(),
    td.XavierUniform(),
    td.XavierNormal(),
    td.KaimingUniform(),
    td.KaimingNormal(),
]


def make_group(optimizer: OptimizerConfig | None = None, *, score: Any = "none") -> td.TableGroup:
    tables = [
        td.TableConfig(
            f"t{dim}",
            dim,
            initializer=INITIALIZERS[(i + 1) % len(INITIALIZERS)],
            padding_idx=0,
            policy=td.Policy(score=score),
        )
        for i, dim in enumerate(DIMS)
    ]
    return td.TableGroup(tables, optimizer=optimizer, max_rows=2000, seed=4)


def mixed_call(batch: int, *, seed: int) -> Call:
    """All tables, bags of 0 to 40 ids, some ids very often."""
    generator = seeded(seed)
    lengths = torch.randint(5, (len(DIMS) * batch,), generator=generator)
    lengths[::17] = 40
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    ids = torch.randint(300, (int(offsets[-1]),), generator=generator)
    ids[torch.rand(len(ids), generator=generator) < 0.3] = 7
    return Call(ids, offsets, list(range(len(DIMS))), list(DIMS))


def on_every_level(compute: Callable[[], list[Tensor] | dict[str, Tensor]]) -> None:
    """Compares the tensors that ``compute`` gives at each level with those of the lowest."""
    expected = None
    for level in simd_levels():
        with simd(level):
            assert ops.simd_level() == level
            result = compute()
        tensors = dict(enumerate(result)) if isinstance(result, list) else result
        if expected is None:
            expected = tensors
        assert differences(expected, tensors) == [], f"level {level}"


def test_levels_can_be_chosen() -> None:
    best = ops.simd_level()
    assert simd_levels() == list(range(best + 1))
    for level in (-1, best + 1, 9):
        with pytest.raises(RuntimeError, match=rf"level is {level}, .*levels 0 .* to {best}"):
            ops.set_simd_level(level)
    assert ops.simd_level() == best


def test_levels_of_the_processor() -> None:
    """On x86 the library uses what the processor says it has."""
    with open("/proc/cpuinfo") as cpuinfo:
        flags = next((line.split() for line in cpuinfo if line.startswith("flags")), [])
    if "avx512vl" in flags and "avx512dq" in flags:
        assert ops.simd_level() == 2
    elif "avx2" in flags and "bmi2" in flags:
        assert ops.simd_level() == 1


@pytest.mark.parametrize("score", ["none", "step"])
def test_index(score: str) -> None:
    call = mixed_call(200, seed=1)

    def compute() -> dict[str, Tensor]:
        group = make_group(score=score)
        half = len(call.ids) // 2 // len(DIMS) * len(DIMS)
        offsets = torch.arange(len(DIMS) + 1) * (half // len(DIMS))
        first = group.find_or_insert(call.ids[:half], offsets, call.tables)
        group.index.clock[0] += 1
        group.erase(2, torch.arange(0, 300, 3))
        found = group.find(call.ids, call.offsets, call.tables)
        second = group.find_or_insert(call.ids, call.offsets, call.tables)
        return snapshot(group) | {"first": first, "second": second, **found._asdict()}

    on_every_level(compute)


@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda i: type(i).__name__)
@pytest.mark.parametrize("dim", DIMS)
def test_initializers_and_materialize(initializer: td.Initializer, dim: int) -> None:
    def compute() -> list[Tensor]:
        table = td.TableConfig("table", dim, initializer=initializer)
        group = td.TableGroup([table], optimizer=td.Adagrad(lr=0.1), max_rows=1000, seed=4)
        read = group.read(0, torch.arange(-400, 400))
        group.insert(0, torch.arange(-400, 400))
        group.materialize()
        return [read, group.rows.weights[0], group.rows.state[0], group.rows.generations[0]]

    on_every_level(compute)


@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN], ids=["sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_bags(pooling: Pooling, weighted: bool) -> None:
    call = mixed_call(100, seed=2)
    generator = seeded(3)
    values = torch.rand(len(call.ids), generator=generator)
    gradient = torch.randn(100, sum(DIMS), generator=generator)

    def compute() -> list[Tensor]:
        group = make_group()
        handles = group.find_or_insert(call.ids, call.offsets, call.tables)
        handles[::5] = -1
        weights = values.clone().requires_grad_() if weighted else None
        output = bag_lookup(
            group, call, handles=handles, pooling=pooling, weights=weights, optimizer=-1
        )
        output.backward(gradient)
        read = read_bags(
            group, call, handles=handles, pooling=pooling, weights=values if weighted else None
        )
        assert same_bits(read, output.detach())
        weight_grad = [] if weights is None or weights.grad is None else [weights.grad]
        return [read, *weight_grad, *reduced(group, call, handles, values, gradient, pooling)]

    on_every_level(compute)


def reduced(
    group: td.TableGroup,
    call: Call,
    handles: Tensor,
    weights: Tensor,
    gradient: Tensor,
    pooling: Pooling,
) -> list[Tensor]:
    """The entries that reduce_grad sets."""
    result = ops.reduce_grad(group.rows, gradient, call.batch(pooling, weights), handles)
    lists = (result.handles, result.ids, result.tables, result.gradients)
    counts = result.counts.tolist()
    return [part[:n] for each in lists for part, n in zip(each, counts, strict=True)]


@pytest.mark.parametrize("dim", DIMS)
def test_sequences(dim: int) -> None:
    def compute() -> list[Tensor]:
        group = td.TableGroup([td.TableConfig("table", dim)], optimizer=None, max_rows=500, seed=4)
        ids = torch.arange(-400, 400)
        handles = group.insert(0, ids[::2])
        group.materialize()
        offsets = torch.tensor([0, 800])
        found = group.find(ids, offsets, [0]).handles
        batch = ops.LookupBatch.of_rows(ids, offsets, [0], dim)
        lookup = ops.embedding_inference(group.rows, batch, found)
        return [handles, found, lookup]

    on_every_level(compute)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda config: config.kernel_name)
@pytest.mark.parametrize("pooling", [Pooling.SUM, Pooling.MEAN], ids=["sum", "mean"])
def test_optimizers(optimizer: OptimizerConfig, pooling: Pooling) -> None:
    """Fused backward over three steps, and the split update after it."""

    def compute() -> dict[str, Tensor]:
        group = make_group(optimizer)
        for step in range(3):
            call = mixed_call(60, seed=step)
            generator = seeded(step)
            gradient = torch.randn(60, sum(DIMS), generator=generator)
            bag_lookup(group, call, pooling=pooling).backward(gradient)
        handles = group.find(call.ids, call.offsets, call.tables).handles
        arguments = ops.reduce_grad(group.rows, gradient, call.batch(pooling), handles)
        given = (*arguments, torch.tensor([3]), call.tables, optimizer.kernel_number)
        torch.ops.dynemb.apply_grad_(*group.rows.updated, *given)
        return snapshot(group)

    on_every_level(compute)
