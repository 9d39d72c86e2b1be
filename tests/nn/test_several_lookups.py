"""Several lookups of a table in one backward: one update by the sum of their gradients."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from group_calls import raises_in_step
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torch_dynemb as td
from torch_dynemb.ops import open_lookups

pytestmark = pytest.mark.any_device

LEFT, RIGHT = torch.tensor([1, 2]), torch.tensor([1, 3])
ALL = torch.tensor([1, 2, 3])


def table(name: str = "items", **arguments: Any) -> td.DynamicEmbedding:
    start, optimizer = td.Constant(0.0), td.SGD(lr=1.0)
    return td.DynamicEmbedding(
        2, name=name, initializer=start, **{"optimizer": optimizer, **arguments}
    )


def rows(module: td.DynamicEmbedding) -> list[float]:
    read: list[float] = module.group.read(0, ALL)[:, 0].tolist()
    return read


# -- as nn.Embedding -----------------------------------------------------------------------------


class TwoTowers(nn.Module):
    """Items of a history and a candidate share one table."""

    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        self.items = items

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        user = torch.tanh(self.items(history)).mean(1)
        return (user * self.items(candidate)).sum(1)


class Attention(nn.Module):
    """DIN: the candidate weighs the history; both are looked up again for a regularizer."""

    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        self.items = items

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        target = self.items(candidate)
        clicks = self.items(history)
        weight = torch.softmax((clicks * target[:, None]).sum(2), 1)
        return ((weight[:, :, None] * clicks).sum(1) * target).sum(1) + self.items(history).sum()


class Tied(nn.Module):
    """One module under two names."""

    def __init__(self, items: nn.Module) -> None:
        super().__init__()
        self.left = self.right = items

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        return torch.tanh(self.left(history)).sum((1, 2)) * self.right(candidate).sum(1)


@pytest.mark.parametrize("model", [TwoTowers, Attention, Tied])
@pytest.mark.parametrize(
    ("dynamic", "static"),
    [
        (td.SGD(lr=0.1), lambda weights: torch.optim.SGD(weights, lr=0.1)),
        (td.Adam(lr=0.1), lambda weights: torch.optim.SparseAdam(weights, lr=0.1)),
    ],
)
def test_trains_as_a_static_table(
    model: Callable[[nn.Module], nn.Module], dynamic: Any, static: Callable[[Any], Any]
) -> None:
    torch.manual_seed(0)
    start = torch.randn(20, 4)
    rows_of = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
    optimizer = static(rows_of.parameters())
    items = td.DynamicEmbedding.from_embedding(start, optimizer=dynamic)
    pair = model(items), model(rows_of)
    for step in range(4):
        torch.manual_seed(step)
        history, candidate = torch.randint(0, 20, (3, 5)), torch.randint(0, 20, (3,))
        losses = [one(history, candidate).square().mean() for one in pair]
        torch.testing.assert_close(*losses, rtol=1e-3, atol=1e-4)
        optimizer.zero_grad()
        sum(losses).backward()
        items.optimizer.step()
        optimizer.step()
    read = items.group.read(0, torch.arange(20))
    torch.testing.assert_close(read, rows_of.weight.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "compiler",
    [
        pytest.param(torch.compile(backend="eager"), marks=pytest.mark.long, id="compiled"),
        pytest.param(lambda graph: graph, id="traced"),
    ],
)
def test_compiled_autograd_trains_as_a_static_table(compiler: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    start = torch.randn(20, 4)
    rows_of = nn.Embedding.from_pretrained(start.clone(), freeze=False, sparse=True)
    optimizer = torch.optim.SparseAdam(rows_of.parameters(), lr=0.1)
    items = td.DynamicEmbedding.from_embedding(start, optimizer=td.Adam(lr=0.1))
    pair = Attention(items), Attention(rows_of)
    for step in range(3):
        torch.manual_seed(step)
        history, candidate = torch.randint(0, 20, (3, 5)), torch.randint(0, 20, (3,))
        kept = items(candidate).sum()  # has no part in the backward
        loss, expected = (one(history, candidate).square().mean() for one in pair)
        with torch._dynamo.compiled_autograd._enable(compiler):
            loss.backward()
        assert items.optimizer.updates_since_step() == 1
        items.optimizer.step()
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        del kept
    read = items.group.read(0, torch.arange(20))
    torch.testing.assert_close(read, rows_of.weight.detach(), rtol=1e-3, atol=1e-4)
    assert not open_lookups.EXPECTED


def test_counts_as_one_update(recwarn: pytest.WarningsRecorder) -> None:
    module = table()
    for _ in range(2):
        (module(LEFT).sum() + module(RIGHT).sum() + module(LEFT[:0]).sum()).backward()
        assert module.optimizer.updates_since_step() == 1
        module.optimizer.step()
    assert rows(module) == [-4.0, -2.0, -2.0]
    assert not recwarn.list


def test_bits_are_those_of_split_mode() -> None:
    """Which adds the gradients in the same order."""
    pair = [table(optimizer=td.Adam(lr=0.1), split=split) for split in (False, True)]
    for step in range(3):
        torch.manual_seed(step)
        ids = torch.randint(0, 9, (4, 6))
        for module in pair:
            first = module(ids).sin().sum() + module(ids[:2]).cos().sum() * 0.3
            (first + module(ids[1]).exp().sum()).backward()
            module.optimizer.step()
    read = [module.group.read(0, torch.arange(9)) for module in pair]
    assert torch.equal(*read)


@pytest.mark.parametrize("first", [True, False])
def test_other_tables_of_the_backward(first: bool) -> None:
    """Whether the backward reaches them before or after."""
    module, other = table(), table("other")
    before = [other(ALL).sum()] if not first else []
    twice = [module(LEFT).sum(), module(RIGHT).sum()]
    after = [other(ALL).sum()] if first else []
    torch.stack([*before, *twice, *after]).sum().backward()
    assert rows(module) == [-2.0, -1.0, -1.0]
    assert rows(other) == [-1.0] * 3


def test_tables_of_a_group_with_bags_and_weights() -> None:
    """A lookup of table a and one of table b, and of both: dims, bags and modes differ."""
    tables = [
        td.TableConfig("a", 2, ["a"], initializer=td.Constant(1.0)),
        td.TableConfig("b", 3, ["b"], initializer=td.Constant(2.0)),
    ]
    bags = td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=1.0))
    both = bags({"a": LEFT[None], "b": RIGHT[None]}).sum()
    again = 3 * bags({"a": torch.tensor([[1], [4]]), "b": torch.tensor([[3], [3]])}).sum()
    (both + again).backward()
    assert bags.optimizer.updates_since_step() == 1
    read = [bags.group.read(t, torch.tensor([1, 2, 3, 4]))[:, 0].tolist() for t in range(2)]
    assert read == [[1 - 4.0, 1 - 1.0, 1.0, 1 - 3.0], [2 - 1.0, 2.0, 2 - 7.0, 2.0]]


def test_weights_of_bags_get_gradients_of_the_rows_that_were_read() -> None:
    bag = td.DynamicEmbeddingBag(
        2, mode="sum", name="items", initializer=td.Constant(1.0), optimizer=td.SGD(lr=1.0)
    )
    weights = [torch.full((1, 3), value, requires_grad=True) for value in (2.0, 3.0)]
    sum(bag(ALL[None], per_sample_weights=weight).sum() for weight in weights).backward()
    assert [weight.grad.tolist() for weight in weights] == [[[2.0] * 3]] * 2  # type: ignore[union-attr]
    assert bag.group.read(0, ALL)[:, 0].tolist() == [1 - 5.0] * 3


def test_gradients_of_weights_only_and_late_gradients_may_meet() -> None:
    bag = td.DynamicEmbeddingBag(2, mode="sum", name="items", optimizer=td.SGD(lr=1.0))
    bag(ALL[None]).sum().backward()
    weights = torch.ones(1, 3, requires_grad=True)
    bag.eval()
    torch.stack(
        [bag(ALL[None], per_sample_weights=weights).sum() for _ in range(2)]
    ).sum().backward()
    assert weights.grad is not None
    late = table(optimizer=td.SGD(lr=1.0, delayed_gradients="apply"))
    early = late(LEFT).sum()
    late(RIGHT).sum().backward()
    (early + late(RIGHT).sum()).backward()  # an update has come between
    assert rows(late) == [-3.0, -1.0, -2.0]
    assert late.optimizer.updates_since_step() == 2


def test_a_lookup_that_gets_no_gradient() -> None:
    """The engine reaches it, with None."""

    class Stops(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> None:
            return None

    stops: Any = Stops.apply
    for lookups in ([LEFT, RIGHT], [RIGHT, LEFT], [LEFT]):
        module = table()
        losses = [stops(module(LEFT)).sum(), *(module(ids).sum() for ids in lookups)]
        sum(losses).backward()
        assert rows(module) == [-1.0 * len(lookups), -1.0, 1.0 - len(lookups)]
    module = table()
    sum(stops(module(ids)).sum() for ids in (LEFT, RIGHT)).backward()
    assert rows(module) == [0.0] * 3


def test_an_error_between_two_backwards_changes_no_row() -> None:
    module = table()

    def fail(grad: Tensor) -> None:
        raise ArithmeticError("between")

    held = module(LEFT)
    held.register_hook(fail)
    loss = held.sum() + module(RIGHT).sum()  # the last lookup is reached first
    with pytest.raises(ArithmeticError, match="between"):
        loss.backward()
    assert rows(module) == [0.0] * 3
    del loss, held
    gc.collect()
    (module(LEFT).sum() + module(RIGHT).sum()).backward()
    assert rows(module) == [-2.0, -1.0, -1.0]


def test_retain_graph() -> None:
    """The second backward of a graph comes after an update, which it may not."""
    module = table()
    loss = module(LEFT).sum() + module(RIGHT).sum()
    loss.backward(retain_graph=True)
    with raises_in_step(module.group, "the rows were updated between"):
        loss.backward()
    assert rows(module) == [-2.0, -1.0, -1.0]


# -- graphs without a backward, or with one of their own ---------------------------------------


def dropped(module: td.DynamicEmbedding) -> Any:
    module(LEFT)


def kept(module: td.DynamicEmbedding) -> Any:
    return [module(LEFT).sum(), module(RIGHT).sum()]


def detached(module: td.DynamicEmbedding) -> Any:
    return module(LEFT).detach()


def read(module: td.DynamicEmbedding) -> Any:
    result = module.eval()(LEFT)
    module.train()
    return result


def has_failed(module: td.DynamicEmbedding) -> Any:
    held = module(LEFT)
    held.register_hook(lambda grad: 1 / 0)
    loss = held.sum() + module(RIGHT).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    return loss


@pytest.mark.parametrize("before", [dropped, kept, detached, read, has_failed])
@pytest.mark.parametrize("tables", [1, 2])
def test_graphs_without_a_backward_do_not_count(
    before: Callable[[td.DynamicEmbedding], Any], tables: int
) -> None:
    modules = [table(str(t)) for t in range(tables)]
    alive = [before(module) for module in modules]
    for _ in range(3):
        torch.stack([module(ALL).sum() for module in modules]).sum().backward()
        for module in modules:
            module.optimizer.step()
        alive += [before(module) for module in modules]
    assert [rows(module) for module in modules] == [[-3.0] * 3] * tables


def test_entries_of_tables_that_are_gone_do_not_count() -> None:
    """A new table may have the key of one that is gone with its open lookups."""
    module = table()
    key = id(module.group.rows.row_clock)
    gone = weakref.ref(nn.Identity())
    open_lookups.OPEN[key] = gone
    open_lookups.SEVERAL[key] = [gone, gone]
    has_failed(module)
    (module(LEFT).sum() + module(RIGHT).sum()).backward()
    assert rows(module) == [-2.0, -1.0, -1.0]
    assert key not in open_lookups.SEVERAL or all(
        ref() is not None for ref in open_lookups.SEVERAL[key]
    )


def test_backwards_of_their_own() -> None:
    """Micro-batches, and a part of the graph: only what one backward reaches counts."""
    module = table()
    for ids in (LEFT, RIGHT):
        module(ids).sum().backward()
    assert rows(module) == [-2.0, -1.0, -1.0]
    module.optimizer.step()
    first, second = module(LEFT), module(RIGHT)
    (first.sum() + second.detach().sum()).backward()
    assert rows(module) == [-3.0, -2.0, -1.0]
    module.optimizer.step()
    start = torch.ones(2, requires_grad=True)
    first = module(LEFT) * start
    second = module(RIGHT) * start[:1]
    loss = first.sum() + second.sum()
    torch.autograd.grad(loss, second, retain_graph=True)
    assert rows(module) == [-3.0, -2.0, -1.0]


def test_a_graph_whose_rows_have_been_updated_meanwhile() -> None:
    module = table()
    first, second = module(LEFT).sum(), module(RIGHT).sum()
    first.backward()
    with raises_in_step(module.group, "the rows were updated between"):
        second.backward()
    assert rows(module) == [-1.0, -1.0, 0.0]


# -- recomputation -----------------------------------------------------------------------------


def _call(of: nn.Module, ids: Tensor) -> Tensor:
    result: Tensor = of(ids)
    return result


def test_checkpoints_without_reentrance() -> None:
    module, dense = table(), nn.Linear(2, 2)
    tower = nn.Sequential(module, dense)
    other = nn.Sequential(table("other"), dense)
    for _ in range(2):  # each is looked up again in backward
        checked = [checkpoint(of, ALL, use_reentrant=False) for of in (tower, other)]
        torch.stack([out.sum() for out in checked]).sum().backward()
        module.optimizer.step()
    plain = copy.deepcopy(tower)
    for of, call in ((tower, partial(checkpoint, use_reentrant=False)), (plain, _call)):
        torch.stack([call(of, ids).square().sum() for ids in (LEFT, RIGHT)]).sum().backward()
        of[0].optimizer.step()
    assert rows(module) == rows(plain[0])
    assert module.optimizer.updates_since_step() == 0


def test_reentrant_checkpoints() -> None:
    module, dense = table(), nn.Linear(2, 2)
    start = torch.zeros(2, requires_grad=True)
    module(ALL)

    def looked_up(ids: Tensor) -> Tensor:
        out: Tensor = checkpoint(lambda x: dense(module(ids) + x).sum(), start, use_reentrant=True)
        return out

    for _ in range(2):
        looked_up(ALL).backward()
        module.optimizer.step()
    twice = checkpoint(
        lambda x: (module(LEFT) + x).sum() + module(RIGHT).sum(), start, use_reentrant=True
    )
    before = rows(module)
    twice.backward()
    assert rows(module) == [b - g for b, g in zip(before, (2.0, 1.0, 1.0), strict=True)]


# -- compiled ----------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.traced
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code(backend: str) -> None:
    """Bits of eager code, for batches of any size."""

    def loss(module: nn.Module, left: Tensor, right: Tensor) -> Tensor:
        return (module(left).square().sum() + module(right).sum()) * module(left[:1]).exp().sum()

    modules = [table(max_rows=100, optimizer=td.Adam(lr=0.1)) for _ in range(2)]
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled = torch.compile(partial(loss, modules[1]), fullgraph=True, backend=backend)
        for size in (2, 4, 7):
            left, right = torch.arange(size), torch.arange(size, 0, -1)
            loss(modules[0], left, right).backward()
            compiled(left, right).backward()
            for module in modules:
                assert module.optimizer.updates_since_step() == 1
                module.optimizer.step()
    assert torch.equal(*(module.group.read(0, torch.arange(8)) for module in modules))
