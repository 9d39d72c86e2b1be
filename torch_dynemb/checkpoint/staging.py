"""Copies of what a save in the background writes, while training goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_dynemb import ops
from torch_dynemb.checkpoint.rest import dense_state, tensor_pieces
from torch_dynemb.storage.address_space import what_ran_out
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.state import used_tensors

_HUGE_FROM = 4 << 20  # bytes from which on large pages are worth their address space


class Staging:
    """Memory of the CPU for copies."""

    def check_memory(self, groups: Sequence[TableGroup], model: nn.Module, state: Any) -> None:
        """Raises RuntimeError where there is too little memory for copies of all."""
        tensors = [tensor for group in groups for _, tensor in used_tensors(group.tables)]
        rest = [*dense_state(model).values(), *pytree.tree_leaves(state)]
        tensors += [
            piece for v in rest if isinstance(v, Tensor) for piece, _, _ in tensor_pieces(v)
        ]
        needed = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        free = ops.available_memory()
        if needed > free:
            raise RuntimeError(
                f"checkpoint.save: asynchronous needs a copy of {needed} bytes, but {free} bytes "
                "of memory are free: save without asynchronous"
            )

    def copy(self, tensor: Tensor) -> Tensor:
        """A contiguous copy on the CPU."""
        size = tensor.numel() * tensor.element_size()
        if size < _HUGE_FROM:
            return tensor.detach().to("cpu", copy=True).contiguous()
        try:
            copied = ops.reserve(tensor.shape, tensor.dtype, huge_pages=True)
        except RuntimeError:
            raise RuntimeError(
                f"checkpoint.save: no addresses for a copy of {size} bytes: {what_ran_out(size)}"
            ) from None
        return copied.copy_(tensor.detach())


__all__ = ["Staging"]
