"""Gradients of lookups in tables that others have replaced since: they are refused."""

from __future__ import annotations

import pytest
import torch

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("on a GPU, a later call raises")

IDS = torch.arange(6).view(2, 3)
REPLACED = r"set_optimizer\(\), add_table\(\) or to\(\) has replaced .* call backward before"


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("split", [False, True])
def test_a_backward_after_set_optimizer(split: bool, compiled: bool) -> None:
    bag = td.DynamicEmbeddingBag(
        4,
        mode="sum",
        optimizer=td.SGD(lr=1.0, delayed_gradients="apply"),
        split=split,
        initializer=td.Constant(0.0),
        max_rows=1024,
    )
    lookup = torch.compile(bag, fullgraph=True, backend="aot_eager") if compiled else bag
    late = lookup(IDS).sum()
    bag.set_optimizer(td.SGD(lr=2.0))
    with pytest.raises(RuntimeError, match=REPLACED):
        late.backward()
    lookup(IDS).sum().backward()  # as if nothing had been
    bag.optimizer.step()
    assert torch.equal(bag.eval()(IDS), torch.full((2, 4), -6.0))


def test_a_backward_after_add_table() -> None:
    tables = [td.TableConfig("a", 4, initializer=td.Constant(0.0))]
    bags = td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=1.0))
    late = bags({"a": IDS}).sum()
    bags.add_table(td.TableConfig("b", 4))
    with pytest.raises(RuntimeError, match=REPLACED):
        late.backward()
    assert bags.eval()({"a": IDS, "b": IDS})[:, :4].count_nonzero() == 0
