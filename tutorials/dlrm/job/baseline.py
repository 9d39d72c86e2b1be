"""The baseline: tables of a fixed size, in which ids share rows.

That is the hashing trick (Weinberger et al. 2009, https://arxiv.org/abs/0902.2206).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tutorials.dlrm.data import CATEGORY_COUNT
from tutorials.dlrm.model import ROW_BOUND


class HashedRows(nn.Module):
    """One nn.EmbeddingBag per feature, indexed by a hash of the id.

    Args:
        rows: Number of rows by feature.
        embedding_dim: Length of a row.
        lr: Learning rate of the rows.
    """

    row_counts: Tensor

    def __init__(self, rows: Sequence[int], embedding_dim: int, *, lr: float) -> None:
        super().__init__()
        if len(rows) != CATEGORY_COUNT or min(rows) < 1:
            raise ValueError(
                f"rows must be {CATEGORY_COUNT} numbers of at least 1, got {list(rows)}"
            )
        self.lr = lr
        bags = [nn.EmbeddingBag(n, embedding_dim, mode="sum", sparse=True) for n in rows]
        for bag in bags:
            nn.init.uniform_(bag.weight, -ROW_BOUND, ROW_BOUND)
        self.bags = nn.ModuleList(bags)
        self.register_buffer("row_counts", torch.tensor(rows).unsqueeze(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids (26, B) int64 as embeddings (B, 26, D) float32."""
        indices = torch.remainder(_hash(ids), self.row_counts).unsqueeze(-1)
        return torch.stack([bag(i) for bag, i in zip(self.bags, indices, strict=True)], dim=1)

    def optimizer(self) -> torch.optim.Optimizer:
        """Return a new optimizer of the rows."""
        return SparseRowWiseAdagrad(self.parameters(), self.lr)


def split_rows(sizes: Sequence[int], table_bytes: int, embedding_dim: int) -> list[int]:
    """Divide memory among hashed tables, in their favour.

    A fixed table is sized before training, when the number of ids to come is unknown. Here the
    final number of ids of every feature is given, and rows are divided in proportion, except that
    features of few ids get more rows than ids: a tenth of all rows, divided equally, is a table's
    least. In plain proportion a handful of ids that occur in most samples would collide, and the
    hashed tables would do far worse.

    Args:
        sizes: Ids by feature.
        table_bytes: What rows and optimizer state (one float a row) may take altogether.
        embedding_dim: Length of a row.

    Returns:
        Rows by feature; altogether they take at most ``table_bytes``, unless that is less than a
        row per feature.
    """
    total = table_bytes // (4 * (embedding_dim + 1))
    least = max(1, total // (10 * len(sizes)))
    large = [n if n > least else 0 for n in sizes]
    left = total - least * large.count(0)
    return [max(1, left * n // sum(large)) if n else least for n in large]


class SparseRowWiseAdagrad(torch.optim.Optimizer):
    """Adagrad with one accumulator per row, moving only the rows that have a gradient.

    For a row with gradient g, summed over its occurrences: ``s += mean(g * g)``, then
    ``w -= lr * g / (sqrt(s) + eps)``; the formula of ``torch_dynemb.RowWiseAdagrad``.

    Args:
        params: Weights (rows, dim) of sparse embeddings.
        lr: Learning rate.
        eps: Added to the root.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, *, eps: float = 1e-8) -> None:
        if lr < 0:
            raise ValueError(f"lr must be 0 or above, got {lr}")
        super().__init__(params, {"lr": lr, "eps": eps})
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight]["sum"] = torch.zeros(len(weight), device=weight.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Apply the gradients of the last backward."""
        if closure is not None:
            raise ValueError("closure must be None; run the backward before step()")
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._update(weight, group["lr"], group["eps"])

    def _update(self, weight: Tensor, lr: float, eps: float) -> None:
        if weight.grad is None or not weight.grad.is_sparse:
            raise ValueError("params must have sparse gradients; use nn.EmbeddingBag(sparse=True)")
        gradient = weight.grad.coalesce()
        rows, g = gradient.indices()[0], gradient.values()
        s = self.state[weight]["sum"]
        s[rows] += (g * g).mean(1)
        weight.index_add_(0, rows, g / (s[rows].sqrt_() + eps).unsqueeze(1), alpha=-lr)


def _hash(x: Tensor) -> Tensor:
    """Return splitMix64's output function on int64."""
    for shift, multiplier in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ _shift_right(x, shift)) * multiplier
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Shift in zeros; ``>>`` on int64 repeats the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)
