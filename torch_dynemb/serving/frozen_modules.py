"""Read-only copies of the modules of :mod:`torch_dynemb.nn`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from torch_dynemb import ops
from torch_dynemb.nn.bag import DynamicEmbeddingBag, bag_inputs
from torch_dynemb.nn.collection import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    sequence_inputs,
    split_rows,
)
from torch_dynemb.nn.embedding import DynamicEmbedding
from torch_dynemb.nn.features import Features, group_ids
from torch_dynemb.nn.inputs import flat_ids
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.serving.freeze import freezes
from torch_dynemb.serving.frozen_tables import FrozenTables
from torch_dynemb.table.group import pooling_of


class FrozenModule(nn.Module):
    """Base of the frozen modules: a lookup that only reads.

    Args:
        source: the module to copy. Its rows that no backward has written yet are written first;
            nothing else of it changes.
    """

    def __init__(self, source: TableModule) -> None:
        super().__init__()
        self.frozen_tables = FrozenTables(source.group)
        self.output_dtype = source.output_dtype
        self.training = False

    def train(self, mode: bool = True) -> FrozenModule:
        """Does nothing: a frozen module only reads."""
        return self

    def sizes(self) -> dict[str, int]:
        """Number of ids by table name."""
        return self.frozen_tables.sizes()

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: torch.jit.script does not take frozen tables: use "
            "torch.jit.trace or torch.export"
        )

    def _lookup(
        self,
        ids: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        *,
        feature_tables: list[int],
        feature_dims: list[int],
        pooling: Pooling,
    ) -> Tensor:
        tables = self.frozen_tables
        handles = tables.find(ids, offsets, feature_tables).handles
        if pooling == Pooling.NONE:
            output = ops.embedding_inference(
                tables.rows(),
                ids,
                handles,
                offsets,
                feature_tables=feature_tables,
                dim=feature_dims[0],
            )
        else:
            output = ops.embedding_bag_inference(
                tables.rows(),
                ids,
                handles,
                offsets,
                None if per_sample_weights is None else per_sample_weights.detach(),
                feature_tables=feature_tables,
                feature_dims=feature_dims,
                pooling=pooling,
            )
        return output.to(self.output_dtype)


@freezes(DynamicEmbedding)
class FrozenEmbedding(FrozenModule):
    """Read-only copy of a :class:`DynamicEmbedding`."""

    def __init__(self, source: DynamicEmbedding) -> None:
        super().__init__(source)
        self.embedding_dim = source.embedding_dim

    def forward(self, input: Tensor) -> Tensor:
        """As :meth:`DynamicEmbedding.forward` in eval mode."""
        ids = flat_ids("FrozenEmbedding", input)
        rows = self._lookup(
            ids,
            ids.new_empty(0),  # all in one bag
            None,
            feature_tables=[0],
            feature_dims=[self.embedding_dim],
            pooling=Pooling.NONE,
        )
        return rows.reshape(*input.shape, self.embedding_dim)


@freezes(DynamicEmbeddingBag)
class FrozenEmbeddingBag(FrozenModule):
    """Read-only copy of a :class:`DynamicEmbeddingBag`."""

    def __init__(self, source: DynamicEmbeddingBag) -> None:
        super().__init__(source)
        self.embedding_dim = source.embedding_dim
        self.mode = source.mode
        self.include_last_offset = source.include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """As :meth:`DynamicEmbeddingBag.forward` in eval mode."""
        return self._lookup(
            *bag_inputs(
                input, offsets, per_sample_weights, include_last_offset=self.include_last_offset
            ),
            feature_tables=[0],
            feature_dims=[self.embedding_dim],
            pooling=pooling_of(self.mode),
        )


@freezes(DynamicEmbeddingBagCollection)
class FrozenBagCollection(FrozenModule):
    """Read-only copy of a :class:`DynamicEmbeddingBagCollection`."""

    def __init__(self, source: DynamicEmbeddingBagCollection) -> None:
        super().__init__(source)
        self.mode = source.mode
        self.feature_names = list(source.feature_names)
        self.feature_dims = list(source.feature_dims)
        self.feature_tables = list(source.feature_tables)

    def forward(self, features: Features) -> Tensor:
        """As :meth:`DynamicEmbeddingBagCollection.forward` in eval mode."""
        return self._lookup(
            *group_ids(type(self).__name__, self.feature_names, features),
            feature_tables=self.feature_tables,
            feature_dims=self.feature_dims,
            pooling=pooling_of(self.mode),
        )

    def split(self, output: Tensor) -> dict[str, Tensor]:
        """The columns of an output by feature name.

        Args:
            output: (B, sum of feature_dims), what :meth:`forward` has returned.

        Returns:
            name -> a view (B, dim) of the output.

        Raises:
            RuntimeError: ``output`` has another number of columns.
        """
        return dict(zip(self.feature_names, output.split(self.feature_dims, dim=1), strict=True))


@freezes(DynamicEmbeddingCollection)
class FrozenCollection(FrozenModule):
    """Read-only copy of a :class:`DynamicEmbeddingCollection`."""

    def __init__(self, source: DynamicEmbeddingCollection) -> None:
        super().__init__(source)
        self.feature_names = list(source.feature_names)
        self.feature_dims = list(source.feature_dims)
        self.feature_tables = list(source.feature_tables)

    def forward(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As :meth:`DynamicEmbeddingCollection.forward` in eval mode."""
        ids, offsets, sizes = sequence_inputs(type(self).__name__, self.feature_names, features)
        rows = self._lookup(
            ids,
            offsets,
            None,
            feature_tables=self.feature_tables,
            feature_dims=self.feature_dims,
            pooling=Pooling.NONE,
        )
        return split_rows(rows, sizes, features)


__all__ = [
    "FrozenBagCollection",
    "FrozenCollection",
    "FrozenEmbedding",
    "FrozenEmbeddingBag",
    "FrozenModule",
]
