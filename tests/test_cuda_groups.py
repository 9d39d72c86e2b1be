"""Groups of tables on the emulated GPU against groups on the CPU: equal state after any calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_groups import different_state, emulated_cuda
from emulator.mode import set_seed
from group_calls import Call, bag_lookup, call_of, read_bags, same_bits
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.ops.columns import Pooling, Table
from torch_dynemb.optim import OptimizerConfig

OPTIMIZERS: list[OptimizerConfig] = [
    td.SGD(lr=0.5, weight_decay=0.125),
    td.Adagrad(lr=0.5, initial_accumulator_value=0.5),
    td.RowWiseAdagrad(lr=0.5, weight_decay=0.125),
    td.Adam(lr=0.1),
    td.AdamW(lr=0.1, weight_decay=0.25),
]


@pytest.fixture(autouse=True)
def order_of_threads() -> Iterator[None]:
    set_seed(5)
    yield
    set_seed(0)


def make_group(dims: list[int], **arguments: Any) -> td.TableGroup:
    names = [f"table{i}" for i in range(len(dims))]
    initializers = [td.Uniform(-1.0, 1.0), td.Normal(), td.TruncatedNormal(std=0.5), td.Constant(2)]
    tables = [
        td.TableConfig(
            name,
            dim,
            initializer=initializers[i % 4],
            padding_idx=7 if i == 1 else None,
            eval_default="zeros" if i == 2 else "initial",
        )
        for i, (name, dim) in enumerate(zip(names, dims, strict=True))
    ]
    return td.TableGroup(tables, **{"optimizer": td.SGD(lr=0.5), "seed": 3, **arguments})


class Pair:
    """The same calls on a group of the CPU and one of the emulated GPU."""

    def __init__(self, dims: list[int], **arguments: Any) -> None:
        self.rounded = isinstance(arguments.get("optimizer"), td.RowWiseAdagrad)
        self.cpu = make_group(dims, **arguments)
        with emulated_cuda():
            self.cuda = make_group(dims, **arguments)

    def both(self, operation: Callable[[td.TableGroup], Any]) -> tuple[Any, Any]:
        expected = operation(self.cpu)
        with emulated_cuda():
            return expected, operation(self.cuda)

    def check_equal(self, operation: Callable[[td.TableGroup], Any]) -> Any:
        expected, given = self.both(operation)
        if isinstance(expected, Tensor):
            if self.rounded and expected.is_floating_point():
                torch.testing.assert_close(given, expected, rtol=1e-4, atol=1e-5)
            else:
                assert same_bits(given, expected)
        else:
            assert given == expected
        return given

    def check_state(self) -> None:
        with emulated_cuda():
            self.cuda.materialize()
        self.cpu.materialize()
        assert different_state(self.cpu, self.cuda, rounded=self.rounded) == []

    def train(self, call: Call, pooling: Pooling = Pooling.SUM, weighted: bool = False) -> None:
        generator = torch.Generator().manual_seed(call.ids.numel())
        weights = torch.rand(call.ids.numel(), generator=generator) if weighted else None

        def step(group: td.TableGroup) -> Tensor:
            output = bag_lookup(group, call, pooling=pooling, weights=weights)
            output.backward(torch.linspace(-1.0, 1.0, output.numel()).reshape(output.shape))
            group.clock += 1
            return output.detach()

        self.check_equal(step)


def random_ids(generator: torch.Generator, count: int, distinct: int) -> list[int]:
    return (torch.randint(0, distinct, (count,), generator=generator) * 7919 - 50).tolist()


def random_call(
    group: td.TableGroup, generator: torch.Generator, count: int, distinct: int
) -> Call:
    """One feature per table, bags of 0 to 9 ids."""
    features = []
    for table in range(len(group.tables_config)):
        bags = [random_ids(generator, int(length), distinct) for length in range(10)]
        bags += [random_ids(generator, 9, distinct) for _ in range(count // 9)]
        features.append((table, bags))
    return call_of(group, features)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.op_name)
@pytest.mark.parametrize("score", ["none", "step"])
def test_a_life_of_tables(optimizer: OptimizerConfig, score: Any) -> None:
    """Insertion, training, erasure, growth with and without tombstones, export."""
    pair = Pair([3, 8, 8], optimizer=optimizer, score=score)
    generator = torch.Generator().manual_seed(1)
    for step in range(8):
        call = random_call(pair.cpu, generator, 60, distinct=60 * (step + 1))
        pair.train(call, Pooling.MEAN if step % 2 else Pooling.SUM, weighted=step % 3 == 0)
        pair.check_equal(lambda group, call=call: read_bags(group, call))
        erased = torch.tensor(random_ids(generator, 40, distinct=200))
        pair.check_equal(lambda group, erased=erased: group.erase(1, erased))
        pair.check_equal(lambda group, erased=erased: group.read(1, erased))
        pair.check_equal(lambda group: group.sizes())
        pair.check_state()
    pair.check_equal(lambda group: group.reserve(2, 500))
    pair.check_state()
    for table in range(3):

        def export(group: td.TableGroup, table: int = table) -> Tensor:
            return torch.cat([batch.ids for batch in group.export(table, batch_size=64)])

        pair.check_equal(export)


def test_growth_in_place_keeps_every_entry() -> None:
    """Bucket counts below, at and above the unit of parallel work, several growths in one call."""
    pair = Pair([2, 2], optimizer=None)
    begin = 0
    for count in (30, 1, 200, 3000, 10, 700, 9000):
        ids = torch.arange(begin, begin + count) * 0x9E3779B97F4A7C1
        begin += count
        pair.check_equal(lambda group, ids=ids: group.insert(0, ids))
        pair.check_state()
    assert int(pair.cpu.tables[0, Table.GROWTHS]) >= 4


@pytest.mark.parametrize("dim", [1, 2, 4, 5, 12, 16, 30, 64, 65, 128, 131, 132, 256, 513, 4096])
def test_dims(dim: int) -> None:
    for optimizer in (td.Adam(lr=0.1), td.RowWiseAdagrad(lr=0.1)):
        pair = Pair([dim], optimizer=optimizer, max_rows=200)
        generator = torch.Generator().manual_seed(dim)
        for _ in range(2):
            pair.train(random_call(pair.cpu, generator, 18, distinct=30), weighted=True)
        pair.check_state()


def test_dims_that_do_not_align() -> None:
    """A feature of odd width moves the columns of the next one off 16-byte boundaries."""
    pair = Pair([4, 3, 8], optimizer=td.Adam(lr=0.1))
    generator = torch.Generator().manual_seed(0)
    for _ in range(2):
        pair.train(random_call(pair.cpu, generator, 18, distinct=30))
    pair.check_state()


def test_one_id_in_many_places() -> None:
    """A run of gradients that is summed in pieces, and one that just is not."""
    pair = Pair([8, 5], optimizer=td.Adagrad(lr=0.1))
    bags = [[3] * 100, [3] * 28 + [4] * 129, [5] * 128, [6, 3] * 200]
    pair.train(call_of(pair.cpu, [(0, bags), (1, bags[::-1]), (0, bags)]), weighted=True)
    pair.check_state()


def test_ids_that_collide() -> None:
    from collisions import ids_in_one_bucket

    pair = Pair([2], optimizer=None, score="step")
    ids = ids_in_one_bucket(pair.cpu, 0, 40, bucket_count=16)
    pair.check_equal(lambda group: group.insert(0, ids[:20]))
    pair.check_equal(lambda group: group.erase(0, ids[5:15]))
    pair.check_equal(lambda group: group.insert(0, ids.flip(0)))
    pair.check_state()
