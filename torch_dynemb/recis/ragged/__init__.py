"""Ragged tensors."""

from torch_dynemb.recis.ragged import pytree_node
from torch_dynemb.recis.ragged.tensor import RaggedTensor

pytree_node.register()

__all__ = ["RaggedTensor"]
