"""Rows from every rank to every other where gloo carries them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import comm_ops
from torchrec.distributed.dist_data import SequenceEmbeddingsAllToAll
from torchrec.distributed.types import Awaitable

from torch_dynemb import ops

# Page faults of a fresh tensor of this size cost more than what is written into it.
_HUGE_PAGES_FROM = 16 << 20


def is_gloo(group: dist.ProcessGroup) -> bool:
    """Whether ranks of the group exchange tensors by :func:`start_exchange`."""
    several = group.size() > 1 and not torch.compiler.is_compiling()
    return several and dist.get_backend(group) == "gloo"


def room_for(like: Tensor, size: Sequence[int]) -> Tensor:
    """Memory for a tensor that is about to be received, in huge pages if it is large."""
    if like.device.type == "cpu" and math.prod(size) * like.element_size() >= _HUGE_PAGES_FROM:
        return ops.reserve(size, like.dtype, huge_pages=True)
    return like.new_empty(size)


def start_exchange(
    sent: Sequence[Tensor], received: Sequence[Tensor], group: dist.ProcessGroup
) -> list[dist.Work]:
    """Sends a tensor to every other rank and receives one from each.

    Args:
        sent, received: by rank; those of this rank are left alone.
        group: of the ranks.

    Returns:
        What to wait for.
    """
    others = [rank for rank in range(group.size()) if rank != group.rank()]
    works = [dist.irecv(received[rank], group=group, group_src=rank) for rank in others]
    works += [dist.isend(sent[rank], group=group, group_dst=rank) for rank in others]
    return [work for work in works if work is not None]


class GlooAllToAll(SequenceEmbeddingsAllToAll):  # type: ignore[misc]
    """TorchRec's all-to-all of rows that need no other order.

    With gloo, and unless rows are encoded, ranks send each other their rows directly.

    Args:
        group: of the ranks.
        device: of the rows.
        codecs: of quantized communication.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None, codecs: Any) -> None:
        super().__init__(group, [0] * group.size(), device, codecs)

    def forward(
        self,
        local_embs: Tensor,
        lengths: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        *unused: Any,
        **more: Any,
    ) -> Awaitable[Tensor]:
        """Sends ``output_splits`` rows, by rank, and receives ``input_splits``."""
        if self._codecs is None and is_gloo(self._pg):
            return _Rows(local_embs, output_splits, input_splits, self._pg)
        return super().forward(local_embs, lengths, input_splits, output_splits, *unused, **more)


def _start(
    local: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> tuple[Tensor, list[dist.Work]]:
    local = local.detach().contiguous()
    arrived = room_for(local, (sum(received), *local.shape[1:]))
    parts, places = local.split(sent), arrived.split(received)
    works = start_exchange(parts, places, group)
    places[group.rank()].copy_(parts[group.rank()])
    return arrived, works


class _Rows(Awaitable[Tensor]):  # type: ignore[misc]
    """Rows under way."""

    def __init__(
        self, local: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self._local = local
        self._splits = (sent, received)
        self._group = group
        self._arrived, self._works = _start(local, sent, received, group)

    def _wait_impl(self) -> Tensor:
        for work in self._works:
            work.wait()
        apply: Callable[..., Tensor] = _Exchanged.apply
        return apply(self._local, self._arrived, *self._splits, self._group)


class _Exchanged(torch.autograd.Function):
    """The rows that have arrived; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        arrived: Tensor,
        sent: list[int],
        received: list[int],
        group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        of_local, works = _start(grad, ctx.received, ctx.sent, ctx.group)
        for work in works:
            work.wait()
        if comm_ops.GRADIENT_DIVISION:  # as TorchRec's
            of_local /= ctx.group.size()
        return of_local, None, None, None, None


__all__ = ["GlooAllToAll", "is_gloo", "room_for", "start_exchange"]
