"""Row-wise Adagrad for nn.EmbeddingBag(sparse=True); torch.optim has none."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn


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
