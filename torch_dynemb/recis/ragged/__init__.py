"""Ragged tensors, and ids as lookups take them."""

from torch_dynemb.recis.ragged.tensor import RaggedTensor

__all__ = ["RaggedTensor"]
