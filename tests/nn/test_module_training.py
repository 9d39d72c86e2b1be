"""Training with DynamicEmbedding and DynamicEmbeddingBag against torch.nn and torch.optim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_tables import DIM, IDS, ROWS, bag, embedding, positions, rows_of, weight
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.any_device

OPTIMIZERS = [
    td.SGD(lr=0.1),
    td.Adagrad(lr=0.1),
    td.RowWiseAdagrad(lr=0.1),
    td.Adam(lr=0.05),
    td.AdamW(lr=0.05, weight_decay=0.1),
]


def optimizer_name(optimizer: OptimizerConfig) -> str:
    return type(optimizer).__name__


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class StaticRowWiseAdagrad(torch.optim.Optimizer):
    """torch has no row-wise Adagrad: s += mean(g^2); w -= lr * g / (sqrt(s) + eps)."""

    def __init__(self, parameters: Any, lr: float, eps: float = 1e-8) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                total = self.state[parameter].setdefault("sum", torch.zeros(parameter.shape[0], 1))
                total += parameter.grad.square().mean(1, keepdim=True)
                parameter -= group["lr"] * parameter.grad / (total.sqrt() + group["eps"])


STATIC: dict[type, Callable[..., torch.optim.Optimizer]] = {
    td.SGD: torch.optim.SGD,
    td.Adagrad: torch.optim.Adagrad,
    td.RowWiseAdagrad: StaticRowWiseAdagrad,
    td.Adam: torch.optim.Adam,
    td.AdamW: torch.optim.AdamW,
}


def static_optimizer(config: OptimizerConfig, module: nn.Module) -> torch.optim.Optimizer:
    known = ("lr", "betas", "eps", "weight_decay")
    chosen = {key: value for key, value in config.hyper().items() if key in known}
    if isinstance(config, td.RowWiseAdagrad):
        del chosen["weight_decay"]
    return STATIC[type(config)](module.parameters(), **chosen)


def train_both(
    static: nn.Module,
    dynamic: td.DynamicEmbedding | td.DynamicEmbeddingBag,
    optimizer: torch.optim.Optimizer,
    batches: list[Tensor],
) -> None:
    head = torch.randn(DIM)
    for rows in batches:
        optimizer.zero_grad()
        losses = [
            (module(ids) @ head - 1).square().mean()
            for module, ids in ((static, rows), (dynamic, IDS[rows]))
        ]
        torch.testing.assert_close(losses[1], losses[0])
        sum(losses).backward()  # type: ignore[union-attr]
        optimizer.step()
        dynamic.optimizer.step()


@pytest.mark.parametrize("config", OPTIMIZERS, ids=optimizer_name)
@pytest.mark.parametrize("pooled", [False, True])
def test_training_equals_torch_where_every_row_is_touched(
    config: OptimizerConfig, pooled: bool
) -> None:
    static = (nn.EmbeddingBag if pooled else nn.Embedding).from_pretrained(weight(), freeze=False)
    kind = td.DynamicEmbeddingBag if pooled else td.DynamicEmbedding
    dynamic = kind.from_embedding(weight(), IDS, optimizer=config)
    batches = [
        torch.cat([torch.randperm(ROWS), positions(ROWS, seed=step)]).reshape(6, 4)
        for step in range(12)
    ]
    train_both(static, dynamic, static_optimizer(config, static), batches)
    torch.testing.assert_close(rows_of(dynamic), static.weight.detach(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [td.SGD(lr=0.1), td.Adagrad(lr=0.1)], ids=optimizer_name)
def test_training_equals_torch_where_few_rows_are_touched(config: OptimizerConfig) -> None:
    static = nn.Embedding.from_pretrained(weight(), freeze=False)
    dynamic = td.DynamicEmbedding.from_embedding(weight(), IDS, optimizer=config)
    batches = [positions(2, 2, seed=step) for step in range(15)]
    train_both(static, dynamic, static_optimizer(config, static), batches)
    torch.testing.assert_close(rows_of(dynamic), static.weight.detach(), rtol=1e-5, atol=1e-6)


def test_adam_moves_touched_rows_only_as_sparse_adam() -> None:
    static = nn.Embedding.from_pretrained(weight(), freeze=False, sparse=True)
    dynamic = td.DynamicEmbedding.from_embedding(weight(), IDS, optimizer=td.Adam(lr=0.05))
    optimizer = torch.optim.SparseAdam(static.parameters(), lr=0.05)
    batches = [positions(2, 2, seed=step) for step in range(15)]
    train_both(static, dynamic, optimizer, batches)
    # SparseAdam scales eps by the bias correction of v
    torch.testing.assert_close(rows_of(dynamic), static.weight.detach(), rtol=1e-4, atol=1e-5)


def test_new_ids_train_like_old_ones() -> None:
    """A row that no backward has written starts at its initial value all the same."""
    reader, learner = (
        embedding(name="same", optimizer=td.Adagrad(lr=0.1), initializer=td.Uniform(-1, 1))
        for _ in range(2)
    )
    initial = reader.eval()(IDS)
    static = nn.Embedding.from_pretrained(initial, freeze=False)
    assert len(learner) == 0
    batches = [positions(3, 2, seed=step) for step in range(8)]
    train_both(static, learner, torch.optim.Adagrad(static.parameters(), lr=0.1), batches)
    touched = torch.cat(batches).unique()
    assert sorted(learner.ids().tolist()) == sorted(IDS[touched].tolist())
    torch.testing.assert_close(rows_of(learner), static.weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_no_contiguous_tensor() -> None:
    one, two = embedding(name="g"), embedding(name="g")
    one(IDS).sum().backward()  # expanded
    two(IDS).backward(torch.ones(ROWS, DIM))
    assert torch.equal(rows_of(one), rows_of(two))
    pooled = bag(name="g")
    pooled(IDS[:, None]).t().sum().backward()
    assert torch.equal(rows_of(pooled), rows_of(two))


def test_gradient_accumulation_is_one_update_per_backward() -> None:
    dynamic = embedding(initializer=td.Constant(1.0))
    for _ in range(3):
        dynamic(torch.tensor([4])).sum().backward()
    dynamic.optimizer.step()
    assert dynamic.group.read(0, torch.tensor([4]))[0].tolist() == pytest.approx([0.7] * DIM)


def test_a_branch_without_gradient_leaves_rows_alone() -> None:
    dynamic = embedding()
    before = dynamic(IDS).detach()
    loss = dynamic(IDS).detach().sum() + torch.ones(1, requires_grad=True)
    loss.backward()
    assert torch.equal(rows_of(dynamic), before)
