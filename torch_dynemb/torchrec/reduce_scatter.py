"""Sums of bags over ranks whose batches differ in size, also where gloo carries them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.dist_data import PooledEmbeddingsReduceScatter
from torchrec.distributed.types import Awaitable


class PaddedReduceScatter(PooledEmbeddingsReduceScatter):  # type: ignore[misc]
    """TorchRec's reduce-scatter, which for batches of different sizes needs nccl.

    With gloo, every rank's part is padded with zeros to the size of the largest.
    """

    def forward(
        self, local_embs: Tensor, input_splits: list[int] | None = None
    ) -> Awaitable[Tensor]:
        uneven = input_splits is not None and len(set(input_splits)) > 1
        if not uneven or dist.get_backend(self._pg) != "gloo":
            return super().forward(local_embs, input_splits)
        assert input_splits is not None
        most = max(input_splits)
        parts = local_embs.split(input_splits)
        padded = [nn.functional.pad(part, (0, 0, 0, most - part.shape[0])) for part in parts]
        awaitable = super().forward(torch.cat(padded))
        mine = input_splits[dist.get_rank(self._pg)]
        awaitable.callbacks.append(lambda summed: summed[:mine])
        return awaitable


def sum_uneven(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """A forward pre-hook of row-wise output dists: makes them use :class:`PaddedReduceScatter`."""
    context = arguments[1] if len(arguments) > 1 else None
    if context is not None and context.variable_batch_per_feature:
        return
    if hasattr(module, "_intra_dist"):
        if module._intra_dist is None:
            module._create_output_dist_modules(context)
            module._intra_dist = PaddedReduceScatter(module._intra_pg, module._intra_codecs)
    elif module._dist is None:
        module._dist = PaddedReduceScatter(module._pg, module._codecs)


__all__ = ["PaddedReduceScatter", "sum_uneven"]
