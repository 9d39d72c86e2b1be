"""TorchRec's quantization for inference, extended to dynamic tables.

Importing this module registers dynamic tables with ``torchrec.inference.modules``. Then
``quantize_inference_model`` replaces them by frozen copies with quantized rows, and
``shard_quant_model`` refuses them.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torchrec.distributed.types import ModuleSharder
from torchrec.inference.modules import DEFAULT_QUANT_MAPPING, DEFAULT_SHARDERS

from torch_dynemb.nn.bag import DynamicEmbeddingBag
from torch_dynemb.nn.collection import DynamicEmbeddingBagCollection, DynamicEmbeddingCollection
from torch_dynemb.nn.embedding import DynamicEmbedding
from torch_dynemb.serving import (
    FrozenBagCollection,
    FrozenCollection,
    FrozenEmbedding,
    FrozenEmbeddingBag,
    FrozenModule,
)
from torch_dynemb.torchrec.collections.bag import ShardedDynamicEmbeddingBagCollection
from torch_dynemb.torchrec.collections.sequence import ShardedDynamicEmbeddingCollection
from torch_dynemb.torchrec.frozen import FrozenEmbeddingBagCollection, FrozenEmbeddingCollection

_UNSHARDED: dict[type[nn.Module], type[FrozenModule]] = {
    DynamicEmbedding: FrozenEmbedding,
    DynamicEmbeddingBag: FrozenEmbeddingBag,
    DynamicEmbeddingBagCollection: FrozenBagCollection,
    DynamicEmbeddingCollection: FrozenCollection,
}
_FROZEN: tuple[type[FrozenModule], ...] = (
    *_UNSHARDED.values(),
    FrozenEmbeddingBagCollection,
    FrozenEmbeddingCollection,
)


class _Sharded(nn.Module):
    """Entry of the mapping for sharded collections, which raises: one rank has only some rows."""

    @classmethod
    def from_float(cls, module: nn.Module) -> NoReturn:
        raise TypeError(
            f"quantize_inference_model: {type(module).__name__} is sharded over ranks: quantize "
            "the result of torch_dynemb.freeze(model), called by all ranks"
        )


class _RefusingSharder(ModuleSharder[nn.Module]):  # type: ignore[misc]
    """Sharder that raises, because shard_quant_model cannot divide frozen dynamic tables.

    Args:
        module_type: the refused class.
    """

    def __init__(self, module_type: type[nn.Module]) -> None:
        super().__init__()
        self._module_type = module_type

    @property
    def module_type(self) -> type[nn.Module]:
        return self._module_type

    def shardable_parameters(self, module: nn.Module) -> NoReturn:
        raise TypeError(
            f"shard_quant_model: {type(module).__name__} has dynamic tables, which are not divided "
            "over the devices of a process: run a copy of the model on each, or leave the tables "
            "whole with sharders=[...], a list of TorchRec's sharders without those of "
            "torch_dynemb. Tables beyond the memory of a machine lie in a Redis Cluster: "
            "torch_dynemb.freeze(model, storage=RedisRows(...))"
        )

    def shard(self, module: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        self.shardable_parameters(module)


def quantization_mapping() -> dict[type[nn.Module], type[nn.Module]]:
    """Map modules with dynamic tables to their quantized classes.

    ``DEFAULT_QUANT_MAPPING`` of ``torchrec.inference.modules``, which ``quantize_inference_model``
    uses, already includes this mapping. Pass it to functions that take a mapping, such as
    ``quantize_embeddings``.

    Returns:
        Classes of :mod:`torch_dynemb.nn` and of frozen modules, each with a class that has a
        ``from_float`` for it.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torchrec.inference.modules import quantize_embeddings
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1))
        >>> mapping = td.torchrec.quantization_mapping()
        >>> model = quantize_embeddings(
        ...     torch.nn.Sequential(bag),
        ...     torch.int8,
        ...     inplace=False,
        ...     additional_qconfig_spec_keys=list(mapping),
        ...     additional_mapping=mapping,
        ... )
        >>> type(model[0]).__name__
        'FrozenEmbeddingBag'
    """
    mapping: dict[type[nn.Module], type[nn.Module]] = {**_UNSHARDED, **{of: of for of in _FROZEN}}
    mapping[ShardedDynamicEmbeddingBagCollection] = _Sharded
    mapping[ShardedDynamicEmbeddingCollection] = _Sharded
    return mapping


DEFAULT_QUANT_MAPPING.update({torch.typename(of): to for of, to in quantization_mapping().items()})
DEFAULT_SHARDERS.extend(_RefusingSharder(of) for of in _FROZEN)

__all__ = ["quantization_mapping"]
