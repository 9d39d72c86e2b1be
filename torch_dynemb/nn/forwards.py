"""What forwards do around one lookup, whether its tables are trained or only read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb._library.error_names import name_feature
from torch_dynemb.nn.features import Features, group_ids
from torch_dynemb.nn.inputs import integer_ids
from torch_dynemb.ops.columns import Pooling

Lookup = Callable[..., Tensor]


class RowsOfIds:
    """A module with one table that gives a row for every id."""

    embedding_dim: int
    _lookup: Lookup

    def _rows(self, ids: Tensor, shape: torch.Size, one_bag: Tensor, **more: Any) -> Tensor:
        """Rows of ids of any shape.

        Args:
            ids: int64 [n], flattened.
            shape: of the ids before.
            one_bag: int64 [0], on the device of the ids.
            **more: of the lookup.
        """
        rows = self._lookup(
            ids,
            one_bag,
            None,
            feature_tables=[0],
            feature_dims=[self.embedding_dim],
            pooling=Pooling.NONE,
            **more,
        )
        return rows if len(shape) == 1 else rows.reshape(*shape, self.embedding_dim)


class BagsOfFeatures:
    """A module that pools the ids of many features."""

    feature_names: list[str]
    feature_tables: list[int]
    feature_dims: list[int]
    _lookup: Lookup

    def _bags(self, features: Features, pooling: Pooling, **more: Any) -> Tensor:
        """Bags of all features side by side.

        Args:
            features: as :func:`torch_dynemb.nn.features.group_ids` takes them.
            pooling: how the rows of a bag become one.
            **more: of the lookup.
        """
        grouped = group_ids(type(self).__name__, self.feature_names, features)
        try:
            return self._lookup(
                *grouped,
                feature_tables=self.feature_tables,
                feature_dims=self.feature_dims,
                pooling=pooling,
                **more,
            )
        except RuntimeError as error:
            name_feature(error, self.feature_names, grouped.offsets.shape[0] - 1)
            raise

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


class RowsOfFeatures:
    """A module that gives a row for every id of many features."""

    feature_names: list[str]
    feature_tables: list[int]
    feature_dims: list[int]
    _lookup: Lookup

    def _rows(self, features: Mapping[str, Tensor], **more: Any) -> dict[str, Tensor]:
        """Rows by feature, in the shapes of their ids.

        Args:
            features: int64 or int32 of any shape, by name.
            **more: of the lookup.
        """
        owner = type(self).__name__
        ids, offsets, sizes = sequence_inputs(owner, self.feature_names, features)
        rows = self._lookup(
            ids,
            offsets,
            None,
            feature_tables=self.feature_tables,
            feature_dims=self.feature_dims,
            pooling=Pooling.NONE,
            **more,
        )
        return split_rows(rows, sizes, features)


def sequence_inputs(
    owner: str, names: list[str], features: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor, dict[str, int]]:
    """ids int64 (N,) feature after feature, offsets int64 (F + 1,), and the number of ids by name.

    Raises:
        KeyError: a feature is missing.
        TypeError: a feature is no tensor of integers.
    """
    if not isinstance(features, Mapping):
        raise TypeError(
            f"{owner}: features is a {type(features).__name__}, expected a dict of ids by feature "
            "name"
        )
    missing = [name for name in names if name not in features]
    if missing:
        raise KeyError(f"{owner}: features lacks {missing}; it has {list(features)}")
    ids = [integer_ids(f"{owner}: feature {name!r}", features[name]) for name in names]
    sizes = {name: given.numel() for name, given in zip(names, ids, strict=True)}
    return *ops.ids_concat(ids, bags=1), sizes


def split_rows(
    rows: Tensor, sizes: dict[str, int], features: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Rows (N, dim) by feature, in the shape of its ids + (dim,)."""
    parts = rows.split(list(sizes.values())) if len(sizes) > 1 else [rows]
    return {
        name: (
            part
            if features[name].dim() == 1
            else part.reshape(*features[name].shape, rows.shape[1])
        )
        for name, part in zip(sizes, parts, strict=True)
    }


__all__ = ["BagsOfFeatures", "RowsOfFeatures", "RowsOfIds", "sequence_inputs", "split_rows"]
