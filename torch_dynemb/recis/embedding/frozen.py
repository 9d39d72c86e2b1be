"""Read-only copies of embeddings and engines."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from torch_dynemb.recis.embedding.bags import Ids
from torch_dynemb.recis.embedding.dynamic_embedding import DynamicEmbedding
from torch_dynemb.recis.embedding.embedding_engine import EmbeddingEngine
from torch_dynemb.recis.embedding.feature_lookups import FeatureLookups
from torch_dynemb.recis.embedding.joint_lookup import JointLookup, Runtime
from torch_dynemb.recis.embedding.prepared import PreparedLookup, finished
from torch_dynemb.recis.embedding.requests_of_children import requests_of
from torch_dynemb.recis.embedding.unreduced import NoReduceEmbedding
from torch_dynemb.recis.tables.frozen_table import FrozenHashTable, frozen_hash_table
from torch_dynemb.serving import Choices, ReadOnly, converted_dtype


def _converted(runtime: Runtime, fn: Callable[[Tensor], Tensor]) -> Runtime:
    return runtime._replace(output_dtype=converted_dtype(fn, runtime.output_dtype))


class FrozenDynamicEmbedding(ReadOnly):
    """Read-only copy of a :class:`DynamicEmbedding` of this package.

    Args:
        source: the embedding.
        hashtable: the copy of its table.
    """

    def __init__(self, source: DynamicEmbedding, hashtable: FrozenHashTable) -> None:
        super().__init__()
        self.emb_opt = replace(source.emb_opt, storage=None)  # all rows of the copy are in memory
        self.hashtable = hashtable
        hashtable.frozen_tables.depth = 2  # hashtable.frozen_tables
        self._runtime = Runtime.of(source.emb_opt)

    def forward(
        self, input_ids: Ids | Mapping[str, Ids], input_weights: Tensor | None = None
    ) -> Tensor | NoReduceEmbedding | dict[str, Tensor]:
        """Look ids up as :meth:`DynamicEmbedding.forward` does in eval mode.

        Args:
            input_ids: ids of samples, as int64 or int32 [..., L] or as innermost rows of a
                RaggedTensor. For several children a dict of them.
            input_weights: float of the shape of dense ids, or [N] for the N values of a ragged
                tensor.

        Returns:
            The output of the embedding, without a gradient.

        Raises:
            KeyError: names of a dict are not those of the children.
            TypeError, ValueError: dtypes, shapes or devices do not match.
        """
        self._refuse_trace()
        owner = type(self).__name__
        requests = requests_of(owner, self.emb_opt, input_ids, input_weights)
        lookup = JointLookup(self.hashtable, self._runtime, list(requests.values()), None)
        results = finished(PreparedLookup([(list(requests), lookup)], {}))
        if len(self.emb_opt.children) == 1:
            only: Tensor | NoReduceEmbedding = results[self.emb_opt.children[0]]
            return only
        return results

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> FrozenDynamicEmbedding:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._runtime = _converted(self._runtime, fn)
        return self


class FrozenEmbeddingEngine(ReadOnly, FeatureLookups):
    """Read-only copy of an :class:`EmbeddingEngine`.

    Args:
        source: the engine.
        tables: copies of its physical tables, by name.
    """

    def __init__(self, source: EmbeddingEngine, tables: Mapping[str, FrozenHashTable]) -> None:
        super().__init__()
        self._features = {
            name: feature._replace(option=replace(feature.option, storage=None))
            for name, feature in source._features.items()
        }
        self._lookups = {key: list(names) for key, names in source._lookups.items()}
        self._runtimes = dict(source._runtimes)
        self._ranks = dict.fromkeys(source._ranks)
        self.tables = nn.ModuleDict(tables)
        for table in tables.values():
            table.frozen_tables.depth = 3  # tables.<physical table>.frozen_tables

    def forward(self, input_features: Mapping[str, Any]) -> dict[str, Any]:
        """Look features up as :meth:`EmbeddingEngine.forward` does in eval mode.

        Args:
            input_features: by name, as :meth:`FrozenDynamicEmbedding.forward` takes them.

        Returns:
            The output of the engine, without gradients; other entries unchanged.

        Raises:
            KeyError: a feature is missing.
            TypeError, ValueError: dtypes, shapes or devices do not match.
        """
        self._refuse_trace()
        return finished(self._prepared(input_features))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenEmbeddingEngine:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._runtimes = {key: _converted(runtime, fn) for key, runtime in self._runtimes.items()}
        return self


def frozen_dynamic_embedding(
    source: DynamicEmbedding, choices: Choices
) -> FrozenDynamicEmbedding | None:
    hashtable = frozen_hash_table(source.hashtable, choices)
    return None if hashtable is None else FrozenDynamicEmbedding(source, hashtable)


def frozen_engine(source: EmbeddingEngine, choices: Choices) -> FrozenEmbeddingEngine | None:
    copies: dict[str, FrozenHashTable] = {}
    for name, table in source.tables.items():  # in the same order on all ranks
        copy = frozen_hash_table(table, choices)  # type: ignore[arg-type]
        if copy is not None:
            copies[name] = copy
    return FrozenEmbeddingEngine(source, copies) if len(copies) == len(source.tables) else None


__all__ = ["FrozenDynamicEmbedding", "FrozenEmbeddingEngine"]
