"""Sums of bags over ranks by gloo, also for batches of different sizes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed import comm_ops
from torchrec.distributed.dist_data import (
    PooledEmbeddingsReduceScatter,
    VariableBatchPooledEmbeddingsReduceScatter,
)
from torchrec.distributed.types import Awaitable

from torch_dynemb.distributed.exchange import is_gloo, room_for, start_exchange


class GlooReduceScatter(PooledEmbeddingsReduceScatter):  # type: ignore[misc]
    """TorchRec's reduce-scatter, also over gloo for batches of different sizes.

    TorchRec's own needs nccl for them. With gloo, ranks exchange parts and add them up in the order
    of ranks, which takes less time than gloo's reduce-scatter. Parts with codecs use gloo's, padded
    with zeros to the size of the largest.
    """

    def forward(
        self, local_embs: Tensor, input_splits: list[int] | None = None
    ) -> Awaitable[Tensor]:
        ranks = self._pg.size()
        if not is_gloo(self._pg):
            return super().forward(local_embs, input_splits)
        if input_splits is None:
            input_splits = [local_embs.shape[0] // ranks] * ranks
        if self._codecs is None:
            return _Sums(local_embs, input_splits, self._pg)
        if len(set(input_splits)) == 1:
            return super().forward(local_embs, input_splits)
        most = max(input_splits)
        parts = local_embs.split(input_splits)
        padded = [nn.functional.pad(part, (0, 0, 0, most - part.shape[0])) for part in parts]
        awaitable = super().forward(torch.cat(padded))
        mine = input_splits[self._pg.rank()]
        awaitable.callbacks.append(lambda summed: summed[:mine])
        return awaitable


class GlooVariableReduceScatter(VariableBatchPooledEmbeddingsReduceScatter):  # type: ignore[misc]
    """TorchRec's reduce-scatter for a batch size per feature; its backward needs nccl.

    With gloo and without codecs, ranks add parts up as :class:`GlooReduceScatter` does.
    """

    def forward(
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: list[list[int]],
        embedding_dims: list[int],
    ) -> Awaitable[Tensor]:
        if self._codecs is not None or not is_gloo(self._pg):
            return super().forward(local_embs, batch_size_per_rank_per_feature, embedding_dims)
        sizes = [
            sum(bags * dim for bags, dim in zip(of_rank, embedding_dims, strict=True))
            for of_rank in batch_size_per_rank_per_feature or [[]] * self._pg.size()
        ]  # a node without tables has no features
        return _Sums(local_embs, sizes, self._pg)


class _Sums(Awaitable[Tensor]):  # type: ignore[misc]
    """Exchange of parts [sum of sizes, ...]; each rank receives its own from all ranks."""

    def __init__(self, local: Tensor, sizes: list[int], process_group: dist.ProcessGroup) -> None:
        super().__init__()
        self._works: list[dist.Work] = []
        self._local = local
        self._sizes = sizes
        self._process_group = process_group
        parts = list(local.detach().contiguous().split(sizes))
        mine = parts[process_group.rank()]
        self._parts = [
            mine if rank == process_group.rank() else room_for(mine, mine.shape)
            for rank in range(len(sizes))
        ]
        self._works = start_exchange(parts, self._parts, process_group)

    def __del__(self) -> None:
        """End the exchange of sums that are not used: the next one would receive its bytes."""
        with suppress(RuntimeError):  # a rank has exited
            self._end()

    def _end(self) -> None:
        works, self._works = self._works, []
        for work in works:
            work.wait()

    def _wait_impl(self) -> Tensor:
        self._end()
        apply: Callable[..., Tensor] = _SumParts.apply
        return apply(self._local, self._parts, self._sizes, self._process_group)


class _SumParts(torch.autograd.Function):
    """Autograd function that sums received parts; the gradient comes from all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        parts: list[Tensor],
        sizes: list[int],
        process_group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sizes, ctx.process_group = sizes, process_group
        first, second, *others = parts
        # in place, but never into the part of the local tensor
        total, other = (second, first) if process_group.rank() == 0 else (first, second)
        total += other
        for part in others:
            total += part
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        grad = grad.contiguous()
        if comm_ops.GRADIENT_DIVISION:  # as in TorchRec
            grad = grad / len(ctx.sizes)
        of_all = room_for(grad, (sum(ctx.sizes), *grad.shape[1:]))
        parts = list(of_all.split(ctx.sizes))
        works = start_exchange([grad] * len(parts), parts, ctx.process_group)
        parts[ctx.process_group.rank()].copy_(grad)
        for work in works:
            work.wait()
        return of_all, None, None, None


def sum_by_exchange(module: nn.Module, arguments: tuple[Any, ...]) -> None:
    """Make a row-wise output dist sum by exchange; a forward pre-hook."""
    context = arguments[1] if len(arguments) > 1 else None
    variable = context is not None and context.variable_batch_per_feature
    if hasattr(module, "_intra_dist"):
        made = module._variable_intra_dist if variable else module._intra_dist
        if made is None:
            module._create_output_dist_modules(context)
            process_group, codecs = module._intra_pg, module._intra_codecs
            module._intra_dist = GlooReduceScatter(process_group, codecs)
            if variable:
                module._variable_intra_dist = GlooVariableReduceScatter(process_group, codecs)
    else:
        kind = GlooVariableReduceScatter if variable else GlooReduceScatter
        if type(module._dist) is not kind:
            module._dist = kind(module._pg, module._codecs)


__all__ = ["GlooReduceScatter", "GlooVariableReduceScatter", "sum_by_exchange"]
