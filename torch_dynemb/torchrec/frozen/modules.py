"""Read-only collections with the inputs and outputs of TorchRec's unsharded ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from torch_dynemb import ops
from torch_dynemb.nn.features import KeyedJagged, keyed_ids
from torch_dynemb.nn.inputs import integer_ids
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.serving import FrozenModule
from torch_dynemb.table.group import TableGroup
from torch_dynemb.torchrec.frozen.split_features import (
    FeatureIds,
    bags_of_samples,
    jagged_ids,
    repeated,
    split_ids,
)
from torch_dynemb.torchrec.frozen.static_lookups import (
    StaticBags,
    StaticRows,
    static_bags,
    static_rows,
)

_POOLING = {PoolingType.SUM: Pooling.SUM, PoolingType.MEAN: Pooling.MEAN}


class _Output(NamedTuple):
    """Output of a collection: a feature in a table.

    Attributes:
        name: of the output.
        feature: the feature to look up.
        of: name of the table.
        table: number of the table among the dynamic ones; None: it is static.
        dim: columns.
        pooling: of the table's bags.
    """

    name: str
    feature: str
    of: str
    table: int | None
    dim: int
    pooling: Pooling


def _outputs(configs: Sequence[BaseEmbeddingConfig], dynamic: Sequence[str]) -> list[_Output]:
    """List outputs in the order of the tables.

    Args:
        dynamic: names of the dynamic tables.
    """
    numbers = {name: number for number, name in enumerate(dynamic)}
    return [
        _Output(
            name,
            feature,
            config.name,
            numbers.get(config.name),
            config.embedding_dim,
            _POOLING[config.pooling] if isinstance(config, EmbeddingBagConfig) else Pooling.NONE,
        )
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        for name, feature in zip(names, config.feature_names, strict=True)
    ]


class FrozenEmbeddingBagCollection(FrozenModule):
    """Read-only copy of a sharded EmbeddingBagCollection, unsharded.

    Args:
        configs: of all tables, in order.
        group: the dynamic tables, at least one.
        static: the static tables, or None.
        names: of the outputs, in order, which in sharded collections differs from that of tables.
        is_weighted: whether ids have weights.
        output_dtype: of the outputs.
    """

    def __init__(
        self,
        configs: Sequence[EmbeddingBagConfig],
        group: TableGroup,
        static: StaticBags | None,
        *,
        names: Sequence[str],
        is_weighted: bool,
        output_dtype: torch.dtype,
    ) -> None:
        super().__init__(group, output_dtype)
        self.static = static  # TorchRec's quantization replaces it
        self._is_weighted = is_weighted
        self._configs = list(configs)
        self._names = list(names)
        by_table = _outputs(configs, group.names)
        self._outputs = sorted(by_table, key=lambda output: self._names.index(output.name))
        self._dims = [output.dim for output in self._outputs]
        # positions of the outputs: static ones, and dynamic ones by pooling
        self._static_places = [p for p, of in enumerate(self._outputs) if of.table is None]
        poolings = {of.pooling for of in self._outputs if of.table is not None}
        self._places = {
            pooling: [
                p
                for p, of in enumerate(self._outputs)
                if of.table is not None and of.pooling == pooling
            ]
            for pooling in sorted(poolings)
        }

    def is_weighted(self) -> bool:
        """Return whether ids have weights."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """Return the configs of all tables."""
        return self._configs

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Pool bags like EmbeddingBagCollection, with the values of the sharded one in eval mode.

        Args:
            features: ids of all features; further features are ignored. A batch size per feature
                needs ``inverse_indices``.

        Returns:
            Bags by feature name, or by ``feature@table`` if several tables share a feature.

        Raises:
            KeyError: a feature is missing.
            TypeError: ids are not integers.
            ValueError: weights are missing. Or features have a batch size each, and
                ``inverse_indices`` is missing or torch.export traces.
        """
        if self.static is not None or features.variable_stride_per_key():
            self._refuse_trace()
        owner = type(self).__name__
        ids = jagged_ids(owner, features)
        of_samples = {} if ids.bags is None else bags_of_samples(owner, features, ids.bags)
        weights = features.weights() if self._is_weighted else None
        columns: list[Tensor | None] = [None] * len(self._outputs)
        if self.static is not None:
            split = split_ids(ids)
            chosen = [self._outputs[place] for place in self._static_places]
            given = [_of(owner, split, output.feature) for output in chosen]
            found = static_bags(self.static, given, chosen, weighted=self._is_weighted)
            for place, bags in zip(self._static_places, found, strict=True):
                columns[place] = bags
        jagged = KeyedJagged(ids.keys, ids.values, ids.offsets, weights)
        for pooling, places in self._places.items():
            chosen = [self._outputs[place] for place in places]
            dims = [output.dim for output in chosen]
            tables = [output.table for output in chosen if output.table is not None]
            of_chosen = keyed_ids(owner, [output.feature for output in chosen], jagged, anew=False)
            pooled = self.frozen_tables.lookup(LookupBatch(*of_chosen, tables, dims, pooling))
            for place, part in zip(places, pooled.split(dims, 1), strict=True):
                columns[place] = part
        parts = [part.to(self.output_dtype) for part in columns if part is not None]
        if of_samples:
            parts = [
                part[of_samples[output.feature]]
                for part, output in zip(parts, self._outputs, strict=True)
            ]
        return KeyedTensor(self._names, self._dims, torch.cat(parts, 1))


class FrozenEmbeddingCollection(FrozenModule):
    """Read-only copy of a sharded EmbeddingCollection, unsharded.

    Args:
        configs: of all tables, in order.
        group: the dynamic tables, at least one.
        static: the static tables, or None.
        names: of the outputs, in order.
        need_indices: whether outputs have the ids as weights.
        output_dtype: of the outputs.
    """

    def __init__(
        self,
        configs: Sequence[BaseEmbeddingConfig],
        group: TableGroup,
        static: StaticRows | None,
        *,
        names: Sequence[str],
        need_indices: bool,
        output_dtype: torch.dtype,
    ) -> None:
        super().__init__(group, output_dtype)
        self.static = static  # TorchRec's quantization replaces it
        self._need_indices = need_indices
        self._configs = list(configs)
        self._names = list(names)
        self._outputs = _outputs(configs, group.names)

    def need_indices(self) -> bool:
        """Return whether outputs have the ids as weights."""
        return self._need_indices

    def embedding_configs(self) -> list[BaseEmbeddingConfig]:
        """Return the configs of all tables."""
        return self._configs

    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Look up rows like EmbeddingCollection, with the values of the sharded one in eval mode.

        Args:
            features: ids of all features; further features are ignored. A batch size per feature
                needs ``inverse_indices``.

        Returns:
            Rows by feature name, or by ``feature@table`` if several tables share a feature. Each
            sample has its ids, also where samples share bags.

        Raises:
            KeyError: a feature is missing.
            TypeError: ids are not integers.
            ValueError: features have a batch size each, and ``inverse_indices`` is missing or
                torch.export traces.
        """
        self._refuse_trace()
        owner = type(self).__name__
        jagged = jagged_ids(owner, features)
        split = split_ids(jagged)
        if jagged.bags is not None:
            for feature, bags in bags_of_samples(owner, features, jagged.bags).items():
                split[feature] = repeated(split[feature], bags)
        given = {of.name: _of(owner, split, of.feature) for of in self._outputs}
        dynamic = [of for of in self._outputs if of.table is not None]
        ids = [integer_ids(f"{owner}: {of.feature}", given[of.name].values) for of in dynamic]
        tables = [of.table for of in dynamic if of.table is not None]
        dims = [of.dim for of in dynamic]
        joined = ops.ids_concat(ids, bags=1)
        batch = LookupBatch(*joined, None, tables, dims, Pooling.NONE)
        found_rows = self.frozen_tables.lookup(batch).to(self.output_dtype)
        rows = found_rows.split([of_feature.shape[0] for of_feature in ids])
        found = {of.name: part for of, part in zip(dynamic, rows, strict=True)}
        if self.static is not None:
            outputs = [of for of in self._outputs if of.table is None]
            rows_of = static_rows(self.static, [given[of.name] for of in outputs], outputs)
            for of, part in zip(outputs, rows_of, strict=True):
                found[of.name] = part.to(self.output_dtype)
        return {
            name: JaggedTensor(
                values=found[name],
                lengths=given[name].lengths,
                weights=given[name].values if self._need_indices else None,
            )
            for name in self._names
        }


def _of(owner: str, split: dict[str, FeatureIds], feature: str) -> FeatureIds:
    if feature not in split:
        raise KeyError(f"{owner}: features lacks {[feature]}; it has {list(split)}")
    return split[feature]


__all__ = ["FrozenEmbeddingBagCollection", "FrozenEmbeddingCollection"]
