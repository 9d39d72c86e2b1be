"""Forwards around one lookup, of tables that are trained or only read."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.nn.features import Features, begins_of_features, group_ids
from torch_dynemb.nn.inputs import integer_ids
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.tensors import LookupBatch


class BagsOfFeatures:
    """A module that pools the ids of many features."""

    feature_names: list[str]
    feature_tables: list[int]
    feature_dims: list[int]

    def _batch(self, features: Features, pooling: Pooling) -> LookupBatch:
        """Ask for the bags of all features side by side.

        Args:
            features: as :func:`torch_dynemb.nn.features.group_ids` takes them.
            pooling: how the rows of a bag become one.
        """
        grouped = group_ids(type(self).__name__, self.feature_names, features)
        return LookupBatch(*grouped, self.feature_tables, self.feature_dims, pooling)

    def split(self, output: Tensor) -> dict[str, Tensor]:
        """Split an output into columns by feature name.

        Args:
            output: (B, sum of feature_dims), what :meth:`forward` has returned.

        Returns:
            name -> a view (B, dim) of the output.

        Raises:
            RuntimeError: ``output`` has another number of columns.
        """
        return dict(zip(self.feature_names, output.split(self.feature_dims, dim=1), strict=True))


class RowsOfFeatures:
    """A module that gives a row for every id of many features."""

    feature_names: list[str]
    feature_tables: list[int]
    feature_dims: list[int]

    def _batch(self, features: Features) -> LookupBatch:
        """Ask for a row for each id, feature after feature.

        Args:
            features: int64 or int32 of any shape, by name; or a keyed jagged input.

        Raises:
            KeyError: a feature is missing.
            TypeError: a feature is not a tensor of integers.
        """
        owner, names = type(self).__name__, self.feature_names
        if not isinstance(features, Mapping):
            keyed = group_ids(owner, names, features)
            offsets = begins_of_features(keyed.offsets, len(names))
            return LookupBatch(
                keyed.ids, offsets, None, self.feature_tables, self.feature_dims, Pooling.NONE
            )
        missing = [name for name in names if name not in features]
        if missing:
            raise KeyError(f"{owner}: features lacks {missing}; it has {list(features)}")
        ids = [integer_ids(f"{owner}: feature {name!r}", features[name]) for name in names]
        joined = ops.ids_concat(ids, bags=1)
        return LookupBatch(*joined, None, self.feature_tables, self.feature_dims, Pooling.NONE)

    def _split(self, rows: Tensor, batch: LookupBatch, features: Features) -> dict[str, Tensor]:
        """Split rows (N, dim) by feature, in the shape of its ids + (dim,)."""
        if not isinstance(features, Mapping):
            of_features = rows.split(batch.offsets.diff().tolist())
            return dict(zip(self.feature_names, of_features, strict=True))
        sizes = [features[name].numel() for name in self.feature_names]
        # unsafe_split: autograd takes the parts in place, as nothing else reads the rows
        parts = torch.unsafe_split_with_sizes(rows, sizes) if len(sizes) > 1 else [rows]
        return {
            name: rows_in_shape(part, features[name], self.feature_dims[0])
            for name, part in zip(self.feature_names, parts, strict=True)
        }


def rows_in_shape(rows: Tensor, ids: Tensor, dim: int) -> Tensor:
    """Bring rows (N, dim) into the shape of their ids + (dim,)."""
    return rows if ids.dim() == 1 else rows.reshape(*ids.shape, dim)


__all__ = ["BagsOfFeatures", "RowsOfFeatures", "rows_in_shape"]
