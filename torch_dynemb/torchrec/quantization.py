"""TorchRec's quantization of models for inference, of models with dynamic tables.

Importing it tells ``torchrec.inference.modules`` of them: ``quantize_inference_model`` replaces
them by frozen copies with quantized rows, and ``shard_quant_model`` refuses to divide these.
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
    """What the mapping has for sharded collections, whose rows other ranks have, too."""

    @classmethod
    def from_float(cls, module: nn.Module) -> NoReturn:
        raise TypeError(
            f"quantize_inference_model: {type(module).__name__} is sharded over ranks: quantize "
            "what torch_dynemb.freeze(model), called by all ranks, gives"
        )


class _RefusingSharder(ModuleSharder[nn.Module]):  # type: ignore[misc]
    """Tells shard_quant_model that frozen dynamic tables are not divided.

    Args:
        module_type: that it is for.
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
            "whole with sharders=[...], a list of TorchRec's sharders without those of torch_dynemb"
        )

    def shard(self, module: nn.Module, *args: Any, **kwargs: Any) -> NoReturn:
        self.shardable_parameters(module)


def quantization_mapping() -> dict[type[nn.Module], type[nn.Module]]:
    """The modules with dynamic tables, and what quantization makes of them.

    ``quantize_inference_model`` of ``torchrec.inference.modules`` knows them: its
    ``DEFAULT_QUANT_MAPPING`` has their names. Functions that are told what to replace take this
    mapping.

    Returns:
        The classes of :mod:`torch_dynemb.nn` and of frozen modules, and those that have a
        ``from_float`` for them.

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
