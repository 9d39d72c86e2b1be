"""A table that one backward would update twice: refused before any row changes, or right."""

from __future__ import annotations

import weakref
from collections.abc import Callable
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
REFUSED = r"2 lookups of tables \['items'\] meet in one backward.*split=True.*No row has changed"


def table(name: str = "items", **arguments: Any) -> td.DynamicEmbedding:
    start, optimizer = td.Constant(0.0), td.SGD(lr=1.0)
    return td.DynamicEmbedding(
        2, name=name, initializer=start, **{"optimizer": optimizer, **arguments}
    )


def rows(module: td.DynamicEmbedding) -> list[float]:
    read: list[float] = module.group.read(0, ALL)[:, 0].tolist()
    return read


def test_both_are_refused_and_split_mode_sums_them() -> None:
    module = table()
    with pytest.raises(RuntimeError, match=REFUSED):
        (module(LEFT).sum() + module(RIGHT).sum()).backward()
    assert rows(module) == [0.0, 0.0, 0.0]
    assert module.optimizer.updates_since_step() == 0
    module(torch.cat([LEFT, RIGHT])).sum().backward()
    assert rows(module) == [-2.0, -1.0, -1.0]
    split = table(split=True)
    (split(LEFT).sum() + split(RIGHT).sum()).backward()
    split.optimizer.step()
    assert rows(split) == [-2.0, -1.0, -1.0]


@pytest.mark.parametrize("first", [True, False])
def test_other_tables_of_the_backward_do_not_change_either(first: bool) -> None:
    """Whether the backward reaches them before or after."""
    module, other = table(), table("other")
    before = [other(ALL).sum()] if not first else []
    twice = [module(LEFT).sum(), module(RIGHT).sum()]
    after = [other(ALL).sum()] if first else []
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.stack([*before, *twice, *after]).sum().backward()
    assert rows(module) == rows(other) == [0.0, 0.0, 0.0]


def test_two_tables_of_a_group() -> None:
    """A group is updated as one: its lookups of different tables do not fit each other either."""
    tables = [td.TableConfig("a", 2, ["a"]), td.TableConfig("b", 2, ["b"])]
    bags = td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=1.0))
    features = {"a": LEFT[None], "b": RIGHT[None]}
    with pytest.raises(RuntimeError, match=r"2 lookups of tables \['a', 'b'\] meet"):
        (bags(features).sum() + bags(features).sum()).backward()
    assert bags.optimizer.updates_since_step() == 0


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
    (late(LEFT).sum() + late(RIGHT).sum()).backward()
    assert rows(late) == [-2.0, -1.0, -1.0]


# -- graphs whose backward does not come, or comes on its own ----------------------------------


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
    loss = module(LEFT).sum() + module(RIGHT).sum()
    with pytest.raises(RuntimeError, match="meet in one backward"):
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
    """A new table may have the key of one that is gone, whose open lookups were dropped."""
    module = table()
    key = id(module.group.rows.row_clock)
    gone = weakref.ref(nn.Identity())
    open_lookups.OPEN[key] = gone
    open_lookups.SEVERAL[key] = [gone, gone]
    has_failed(module)
    assert rows(module) == [0.0] * 3


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


def test_checkpoints_without_reentrance() -> None:
    module, dense = table(), nn.Linear(2, 2)
    tower = nn.Sequential(module, dense)
    other = nn.Sequential(table("other"), dense)
    for _ in range(2):  # each is looked up again in backward
        checked = [checkpoint(of, ALL, use_reentrant=False) for of in (tower, other)]
        torch.stack([out.sum() for out in checked]).sum().backward()
        module.optimizer.step()
    start = rows(module)
    both = [checkpoint(tower, ids, use_reentrant=False).sum() for ids in (LEFT, RIGHT)]
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.stack(both).sum().backward()
    assert rows(module) == start


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
    with pytest.raises(RuntimeError, match=REFUSED):
        twice.backward()
    assert rows(module) == before


# -- compiled ----------------------------------------------------------------------------------


@pytest.mark.traced
def test_two_lookups_of_compiled_code() -> None:
    def losses(module: td.DynamicEmbedding) -> Any:
        def loss(left: Tensor, right: Tensor) -> Tensor:
            return module(left).sum() + module(right).sum()

        return torch.compile(loss, fullgraph=True, backend="aot_eager")

    module = table(max_rows=100)
    with pytest.raises(Exception, match=r"2 lookups of compiled tables .*\(.*dims \[2\]\) meet"):
        losses(module)(LEFT, RIGHT).backward()
    assert len(module) == 0
    split = table(split=True, max_rows=100)
    losses(split)(LEFT, RIGHT).backward()
    split.optimizer.step()
    assert rows(split) == [-2.0, -1.0, -1.0]
