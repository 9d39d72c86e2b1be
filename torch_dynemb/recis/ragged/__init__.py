"""Ragged tensors."""

from torch_dynemb.recis.ragged import pytree_node
from torch_dynemb.recis.ragged.tensor import RaggedTensor

pytree_node.register_ragged_tensor()

__all__ = ["RaggedTensor"]
