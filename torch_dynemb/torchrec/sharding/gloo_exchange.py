"""All-to-all of rows over gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import comm_ops
from torchrec.distributed.dist_data import SequenceEmbeddingsAllToAll
from torchrec.distributed.types import Awaitable

from torch_dynemb.distributed.exchange import is_gloo, start_rows


class GlooAllToAll(SequenceEmbeddingsAllToAll):  # type: ignore[misc]
    """TorchRec's all-to-all for rows that need no reordering.

    With gloo and without codecs, ranks send each other their rows directly.

    Args:
        process_group: of the ranks.
        device: of the rows.
        codecs: of quantized communication.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, device: torch.device | None, codecs: Any
    ) -> None:
        super().__init__(process_group, [0] * process_group.size(), device, codecs)

    def forward(
        self,
        local_embs: Tensor,
        lengths: Tensor,
        input_splits: list[int],
        output_splits: list[int],
        *unused: Any,
        **more: Any,
    ) -> Awaitable[Tensor]:
        """Send ``output_splits`` rows, by rank, and receive ``input_splits``."""
        if self._codecs is None and is_gloo(self._pg):
            return _RowsAwaitable(local_embs, output_splits, input_splits, self._pg)
        return super().forward(local_embs, lengths, input_splits, output_splits, *unused, **more)


class _RowsAwaitable(Awaitable[Tensor]):  # type: ignore[misc]
    """Rows in transit."""

    def __init__(
        self, local: Tensor, sent: list[int], received: list[int], process_group: dist.ProcessGroup
    ) -> None:
        super().__init__()
        self._local = local
        self._splits = (sent, received)
        self._process_group = process_group
        self._under_way = start_rows(local, received, sent, process_group)

    def _wait_impl(self) -> Tensor:
        arrived = self._under_way.wait()
        apply: Callable[..., Tensor] = _Exchanged.apply
        return apply(self._local, arrived, *self._splits, self._process_group)


class _Exchanged(torch.autograd.Function):
    """Autograd function of received rows; gradients go the other way."""

    @staticmethod
    def forward(
        ctx: Any,
        local: Tensor,
        arrived: Tensor,
        sent: list[int],
        received: list[int],
        process_group: dist.ProcessGroup,
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.process_group = sent, received, process_group
        return arrived

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        of_local = start_rows(grad, ctx.sent, ctx.received, ctx.process_group).wait()
        if comm_ops.GRADIENT_DIVISION:  # as in TorchRec
            of_local /= ctx.process_group.size()
        return of_local, None, None, None, None


__all__ = ["GlooAllToAll"]
