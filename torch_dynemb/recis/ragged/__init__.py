"""Ragged tensors."""

from torch_dynemb.recis.not_offered import RAGGED_METHODS, MissingMethod
from torch_dynemb.recis.ragged import pytree_node
from torch_dynemb.recis.ragged.tensor import RaggedTensor

pytree_node.register_ragged_tensor()
for _name, _instead in RAGGED_METHODS.items():
    setattr(RaggedTensor, _name, MissingMethod(_name, _instead))

__all__ = ["RaggedTensor"]
