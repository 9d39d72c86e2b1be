"""Softmax over all ids, by chunks, against a matrix of scores in double precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.nn.forgotten_steps import FORGOTTEN_STEPS

pytestmark = pytest.mark.any_device

DIM, TEMPERATURE = 4, 0.5
POSITIVES = [30, 2, 30, -8, 17]  # -8 is new


def items_of(count: int = 41, **options: Any) -> td.DynamicEmbedding:
    torch.manual_seed(4)
    options = {"optimizer": td.SGD(lr=1.0), **options}
    items = td.DynamicEmbedding(DIM, name="items", **options)
    items.group.insert(0, torch.arange(count))
    return items


def query_of(n: int = len(POSITIVES)) -> Tensor:
    return torch.randn(n, DIM, generator=seeded(5)).requires_grad_()


def dense_loss(
    query: Tensor, rows: Tensor, ids: Tensor, positives: list[int], weights: Tensor | None
) -> Tensor:
    places = torch.tensor([ids.tolist().index(id) for id in positives], device="cpu")
    losses = F.cross_entropy(query @ rows.t() / TEMPERATURE, places, reduction="none")
    return losses.mean() if weights is None else (losses * weights).sum() / weights.sum()


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("chunk", [4, 1000])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradients(split: bool, chunk: int, weighted: bool) -> None:
    items, query = items_of(split=split), query_of()
    weights = torch.tensor([1.0, 0.5, 2.0, 0.0, 1.0]) if weighted else None
    loss = td.FullSoftmaxLoss(items, temperature=TEMPERATURE, chunk=chunk)
    value = loss(query, torch.tensor(POSITIVES), weights)
    ids = items.ids()
    before = items.group.read(0, ids)
    value.backward()
    items.optimizer.step()
    rows = before.cpu().double().requires_grad_()
    own = query.detach().cpu().double().requires_grad_()
    expected = dense_loss(own, rows, ids, POSITIVES, None if weights is None else weights.cpu())
    expected.backward()
    torch.testing.assert_close(value.detach().cpu().double(), expected.detach(), rtol=1e-5, atol=0)
    assert query.grad is not None
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(query.grad.cpu().double(), own.grad, **close)
    changes = (before - items.group.read(0, ids)).cpu().double()  # lr is 1
    torch.testing.assert_close(changes, rows.grad, **close)


def test_chunks_are_one_update_of_the_step() -> None:
    """Adam counts it once, and no step is said to be forgotten."""
    results = []
    for chunk in (4, 1000):
        items = items_of(4 * FORGOTTEN_STEPS, optimizer=td.Adam(lr=0.1))
        loss = td.FullSoftmaxLoss(items, temperature=1.0, chunk=chunk)
        for _ in range(3):
            loss(query_of(), torch.tensor(POSITIVES)).backward()
            items.optimizer.step()
        assert items.optimizer.lookups_since_step == 0
        results.append(items.group.read(0, torch.arange(60)))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_another_lookup_in_the_same_backward_needs_split_mode() -> None:
    ids = torch.arange(41)
    items = items_of()
    before = items.group.read(0, ids)
    query = items(torch.tensor([[1, 2], [3, 1]])).mean(1)
    value = td.FullSoftmaxLoss(items)(query, torch.tensor([5, 9]))
    with pytest.raises(RuntimeError, match=r"another lookup of tables .'items'.*split=True"):
        value.backward()
    assert torch.equal(items.group.read(0, ids), before)

    items = items_of(split=True)
    rows = before.cpu().double().requires_grad_()
    query = items(torch.tensor([[1, 2], [3, 1]])).mean(1)
    td.FullSoftmaxLoss(items, temperature=TEMPERATURE)(query, torch.tensor([5, 9])).backward()
    items.optimizer.step()
    dense = rows[torch.tensor([[1, 2], [3, 1]], device="cpu")].mean(1)
    dense_loss(dense, rows, ids, [5, 9], None).backward()
    changes = (before - items.group.read(0, ids)).cpu().double()
    torch.testing.assert_close(changes, rows.grad, rtol=1e-4, atol=1e-5)


def test_nothing_changes_in_eval_mode() -> None:
    items, query = items_of().eval(), query_of(2)
    before = items.state_dict()
    td.FullSoftmaxLoss(items)(query, torch.tensor([3, 999])).backward()  # 999 is unknown
    assert query.grad is not None
    assert bool(query.grad[0].any())
    assert not bool(query.grad[1].any())
    after = items.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
