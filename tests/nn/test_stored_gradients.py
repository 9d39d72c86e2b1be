"""Gradients of tables with rows in files: they stay in memory until their step ends."""

from __future__ import annotations

import pytest
import torch
from record_dict import RecordDict

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("stores of rows are for the CPU")

IDS = torch.arange(8)


def storage() -> td.ExternalStore:
    return td.ExternalStore(RecordDict(), cache="64 rows")


@pytest.mark.parametrize("split", [False, True])
def test_a_backward_after_its_step_is_refused(split: bool) -> None:
    table = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1), split=split, storage=storage())
    first, late = table(IDS).sum(), table(IDS + 4).sum()
    first.backward()
    table.optimizer.step()
    with pytest.raises(RuntimeError, match="DynamicEmbedding: backward of a lookup 1 steps ago, s"):
        late.backward()
    table(IDS).sum().backward()  # as if nothing had been
    table.optimizer.step()
    assert table.group.usage.stale_gradients() == 0


def test_a_backward_of_weights_after_its_step_is_refused() -> None:
    bags = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), storage=storage())
    weights = torch.ones(1, 8, requires_grad=True)
    bags.eval()
    late = bags(IDS[None], per_sample_weights=weights).sum()
    bags.train()(IDS[None]).sum().backward()
    bags.optimizer.step()
    with pytest.raises(RuntimeError, match="backward of a lookup 1 steps ago"):
        late.backward()


def test_several_lookups_of_a_step_have_their_backwards() -> None:
    split = {"optimizer": td.SGD(lr=0.1), "split": True, "name": "t", "initializer": td.Normal()}
    table = td.DynamicEmbedding(4, **split, storage=storage())  # type: ignore[arg-type]
    plain = td.DynamicEmbedding(4, **split)  # type: ignore[arg-type]
    for step in range(12):
        for module in (table, plain):
            torch.manual_seed(step)
            outputs = [module(IDS + 12 * step + begin).square().sum() for begin in (0, 4)]
            for output in outputs:
                output.backward()
            module.optimizer.step()
            module.optimizer.zero_grad()
    ids = torch.arange(140)
    stored = torch.cat([table.eval()(some) for some in ids.split(20)])
    assert torch.equal(stored, plain.eval()(ids))


def test_gradients_may_not_come_steps_later() -> None:
    later = td.Adam(lr=0.1, delayed_gradients="apply")
    with pytest.raises(
        ValueError, match=r"table 'users' has storage .*delayed_gradients='apply', "
    ):
        td.DynamicEmbedding(4, name="users", optimizer=later, storage=storage())
