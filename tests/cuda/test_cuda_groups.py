"""Groups of tables on a GPU, emulated or real, against groups on the CPU: equal after any calls."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from emulated_groups import different_state, emulated_cuda
from group_calls import Call, bag_lookup, call_of, read_bags, same_bits
from torch import Tensor
from torch.utils import _pytree as pytree

import torch_dynemb as td
from torch_dynemb.ops.columns import Pooling, Table
from torch_dynemb.optim import OptimizerConfig

pytestmark = [pytest.mark.own_device, pytest.mark.usefixtures("order_of_threads")]

OPTIMIZERS: list[OptimizerConfig] = [
    td.SGD(lr=0.5, weight_decay=0.125),
    td.Adagrad(lr=0.5, initial_accumulator_value=0.5),
    td.RowWiseAdagrad(lr=0.5, weight_decay=0.125),
    td.Adam(lr=0.1),
    td.AdamW(lr=0.1, weight_decay=0.25),
    td.MomentumSGD(lr=0.1, nesterov=True),
    td.AMSGrad(lr=0.01),
    td.AdamWTF(lr=0.01),
]


def make_group(dims: list[int], score: Any = "none", **arguments: Any) -> td.TableGroup:
    names = [f"table{i}" for i in range(len(dims))]
    initializers = [td.Uniform(-1.0, 1.0), td.Normal(), td.TruncatedNormal(std=0.5), td.Constant(2)]
    tables = [
        td.TableConfig(
            name,
            dim,
            initializer=initializers[i % 4],
            padding_idx=7 if i == 1 else None,
            eval_default="zeros" if i == 2 else "initial",
            policy=td.Policy(score=score),
        )
        for i, (name, dim) in enumerate(zip(names, dims, strict=True))
    ]
    return td.TableGroup(tables, **{"optimizer": td.SGD(lr=0.5), "seed": 3, **arguments})


def moved(group: td.TableGroup, tree: Any) -> Any:
    """Tensors of a tree on the group's device."""
    return pytree.tree_map_only(Tensor, lambda tensor: tensor.to(group.device), tree)


class Pair:
    """The same calls on a group of the CPU and one of a GPU."""

    def __init__(self, gpu: str, dims: list[int], **arguments: Any) -> None:
        self.rounded = isinstance(arguments.get("optimizer"), td.RowWiseAdagrad)
        self.on_gpu = emulated_cuda if gpu == "emulated" else partial(torch.device, "cuda")
        self.cpu = make_group(dims, device="cpu", **arguments)
        with self.on_gpu():
            self.gpu = make_group(dims, **arguments)

    def check_equal(self, operation: Callable[..., Any], *arguments: Any) -> None:
        """Runs operation(group, *arguments) on both and compares what it returns."""
        with torch.device("cpu"):
            expected = operation(self.cpu, *moved(self.cpu, arguments))
        with self.on_gpu():
            given = operation(self.gpu, *moved(self.gpu, arguments))
            self.gpu.end_step()
        if not isinstance(expected, Tensor):
            assert given == expected
        elif self.rounded and expected.is_floating_point():
            torch.testing.assert_close(given.cpu(), expected, rtol=1e-4, atol=1e-5)
        else:
            assert same_bits(given.cpu(), expected)

    def check_state(self) -> None:
        with self.on_gpu():
            self.gpu.materialize()
        self.cpu.materialize()
        assert different_state(self.cpu, self.gpu, rounded=self.rounded) == []

    def train(self, call: Call, pooling: Pooling = Pooling.SUM, weighted: bool = False) -> None:
        generator = torch.Generator(device="cpu").manual_seed(call.ids.numel())
        weights = torch.rand(call.ids.numel(), generator=generator, device="cpu")

        def step(group: td.TableGroup, call: Call, weights: Tensor | None) -> Tensor:
            output = bag_lookup(group, call, pooling=pooling, weights=weights)
            gradient = torch.linspace(-1.0, 1.0, output.numel(), device="cpu").to(group.device)
            output.backward(gradient.reshape(output.shape))
            group.index.clock[0] += 1
            return output.detach()

        self.check_equal(step, call, weights if weighted else None)


def random_ids(generator: torch.Generator, count: int, distinct: int) -> list[int]:
    return (
        torch.randint(0, distinct, (count,), generator=generator, device="cpu") * 7919 - 50
    ).tolist()


def random_call(
    group: td.TableGroup, generator: torch.Generator, count: int, distinct: int
) -> Call:
    """One feature per table, bags of 0 to 9 ids."""
    features = []
    for table in range(len(group.config.tables)):
        bags = [random_ids(generator, int(length), distinct) for length in range(10)]
        bags += [random_ids(generator, 9, distinct) for _ in range(count // 9)]
        features.append((table, bags))
    return call_of(group, features)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.kernel_name)
@pytest.mark.parametrize("score", ["none", "step"])
def test_a_life_of_tables(optimizer: OptimizerConfig, score: Any, gpu: str) -> None:
    """Insertion, training, erasure, growth with and without tombstones, export."""
    pair = Pair(gpu, [3, 8, 8], optimizer=optimizer, score=score)
    generator = torch.Generator(device="cpu").manual_seed(1)
    for step in range(8):
        call = random_call(pair.cpu, generator, 60, distinct=60 * (step + 1))
        pair.train(call, Pooling.MEAN if step % 2 else Pooling.SUM, weighted=step % 3 == 0)
        pair.check_equal(read_bags, call)
        erased = torch.tensor(random_ids(generator, 40, distinct=200))
        pair.check_equal(lambda group, ids: group.erase(1, ids), erased)
        pair.check_equal(lambda group, ids: group.read(1, ids), erased)
        pair.check_equal(lambda group: group.sizes())
        pair.check_state()
    pair.check_equal(lambda group: group.reserve(2, 500))
    pair.check_state()
    for table in range(3):

        def export(group: td.TableGroup, table: int = table) -> Tensor:
            return torch.cat([batch.ids for batch in group.export(table, batch_size=64)])

        pair.check_equal(export)


def test_growth_in_place_keeps_every_entry(gpu: str) -> None:
    """Bucket counts below, at and above the unit of parallel work, several growths in one call."""
    pair = Pair(gpu, [2, 2], optimizer=None)
    begin = 0
    for count in (30, 1, 200, 3000, 10, 700, 9000):
        ids = torch.arange(begin, begin + count) * 0x9E3779B97F4A7C1
        begin += count
        pair.check_equal(lambda group, ids: group.insert(0, ids), ids)
        pair.check_state()
    assert int(pair.cpu.index.tables[0, Table.GROWTHS]) >= 4


@pytest.mark.parametrize("dim", [1, 2, 4, 5, 12, 16, 30, 64, 65, 128, 131, 132, 256, 513, 4096])
def test_dims(dim: int, gpu: str) -> None:
    for optimizer in (td.Adam(lr=0.1), td.RowWiseAdagrad(lr=0.1)):
        pair = Pair(gpu, [dim], optimizer=optimizer, max_rows=200)
        generator = torch.Generator(device="cpu").manual_seed(dim)
        for _ in range(2):
            pair.train(random_call(pair.cpu, generator, 18, distinct=30), weighted=True)
        pair.check_state()


def test_dims_that_do_not_align(gpu: str) -> None:
    """A feature of odd width moves the columns of the next one off 16-byte boundaries."""
    pair = Pair(gpu, [4, 3, 8], optimizer=td.Adam(lr=0.1))
    generator = torch.Generator(device="cpu").manual_seed(0)
    for _ in range(2):
        pair.train(random_call(pair.cpu, generator, 18, distinct=30))
    pair.check_state()


def test_one_id_in_many_places(gpu: str) -> None:
    """A run of gradients that is summed in pieces, and one that just is not."""
    pair = Pair(gpu, [8, 5], optimizer=td.Adagrad(lr=0.1))
    bags = [[3] * 100, [3] * 28 + [4] * 129, [5] * 128, [6, 3] * 200]
    pair.train(call_of(pair.cpu, [(0, bags), (1, bags[::-1]), (0, bags)]), weighted=True)
    pair.check_state()


def test_ids_that_collide(gpu: str) -> None:
    from collisions import ids_in_one_bucket

    pair = Pair(gpu, [2], optimizer=None, score="step")
    ids = ids_in_one_bucket(pair.cpu, 0, 40, bucket_count=16)
    pair.check_equal(lambda group, ids: group.insert(0, ids), ids[:20])
    pair.check_equal(lambda group, ids: group.erase(0, ids), ids[5:15])
    pair.check_equal(lambda group, ids: group.insert(0, ids), ids.flip(0))
    pair.check_state()
