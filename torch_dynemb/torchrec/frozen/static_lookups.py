"""Lookups in the static tables of read-only collections: TorchRec's own, quantized or not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeAlias

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    get_embedding_names_by_table,
)
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb.torchrec.frozen.split_features import FeatureIds

StaticBags: TypeAlias = EmbeddingBagCollection | QuantBagCollection
StaticRows: TypeAlias = EmbeddingCollection | QuantCollection


class Named(Protocol):
    """Output of a collection.

    Attributes:
        feature: the feature to look up.
        of: name of the table.
    """

    @property
    def feature(self) -> str: ...
    @property
    def of(self) -> str: ...


def static_bags(
    static: StaticBags, given: Sequence[FeatureIds], outputs: Sequence[Named], *, weighted: bool
) -> list[Tensor]:
    """Pool bags of static tables.

    Args:
        static: the tables.
        given: ids of each output, all with the same number of bags.
        outputs: a feature and a table each.
        weighted: whether ids have weights.

    Returns:
        [B, dim] for each output.
    """
    if isinstance(static, EmbeddingBagCollection):
        tables = [static.embedding_bags[output.of] for output in outputs]
        return [
            # nn.EmbeddingBag takes weights of the dtype of its rows alone
            table(of.values, of.offsets, of.weights.to(table.weight.dtype))
            if weighted and of.weights is not None
            else table(of.values, of.offsets)
            for of, table in zip(given, tables, strict=True)
        ]
    found = static(_keyed(given, outputs, weighted=weighted)).to_dict()
    names = _names(static.embedding_bag_configs())
    return [found[names[output.of, output.feature]] for output in outputs]


def static_rows(
    static: StaticRows, given: Sequence[FeatureIds], outputs: Sequence[Named]
) -> list[Tensor]:
    """Look up rows of static tables.

    Args:
        static: the tables.
        given: ids of each output.
        outputs: a feature and a table each.

    Returns:
        [n, dim] for each output.
    """
    if isinstance(static, EmbeddingCollection):
        return [
            static.embeddings[output.of](of.values)
            for of, output in zip(given, outputs, strict=True)
        ]
    found = static(_keyed(given, outputs, weighted=False))
    names = _names(static.embedding_configs())
    return [found[names[output.of, output.feature]].values() for output in outputs]


def _keyed(
    given: Sequence[FeatureIds], outputs: Sequence[Named], *, weighted: bool
) -> KeyedJaggedTensor:
    """Join ids of outputs in a fixed order, because quantized collections keep the first one."""
    features = {output.feature: of for of, output in zip(given, outputs, strict=True)}
    parts = list(features.values())
    most = max(part.lengths.shape[0] for part in parts)
    lengths = [
        torch.cat([part.lengths, part.lengths.new_zeros(most - part.lengths.shape[0])])
        for part in parts
    ]
    weights = [part.weights for part in parts if part.weights is not None]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.cat([part.values for part in parts]),
        weights=torch.cat(weights) if weighted else None,
        lengths=torch.cat(lengths),
    )


def _names(configs: Sequence[BaseEmbeddingConfig]) -> Mapping[tuple[str, str], str]:
    """Map table and feature to the name of the output, in a collection of these tables alone."""
    return {
        (config.name, feature): name
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        for feature, name in zip(config.feature_names, names, strict=True)
    }


__all__ = ["StaticBags", "StaticRows", "static_bags", "static_rows"]
