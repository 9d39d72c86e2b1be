"""Many features and tables in one group: one call of each op for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from typing_extensions import Unpack

from torch_dynemb._library.error_names import name_feature
from torch_dynemb.nn.features import Features
from torch_dynemb.nn.forwards import BagsOfFeatures, RowsOfFeatures
from torch_dynemb.nn.inputs import pooling_of
from torch_dynemb.nn.options import ModuleOptions
from torch_dynemb.nn.static_arguments import advises
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table import extension as table_extension
from torch_dynemb.table.config import TableConfig, check_tables
from torch_dynemb.table.group_config import GroupConfig


class NamedFeatures(NamedTuple):
    """The features of a collection, each at the same place of the lists.

    Attributes:
        names: of the features.
        tables: that they look up.
        dims: of these tables.
        policies: rows of ``policy``; empty: no table has one.
    """

    names: list[str]
    tables: list[int]
    dims: list[int]
    policies: list[int]


class Collection(TableModule):
    """Feature names, tables and dims of a collection."""

    feature_names: list[str]
    feature_tables: list[int]
    feature_dims: list[int]
    feature_policies: list[int]

    def __init__(self, tables: Sequence[TableConfig], **options: Unpack[ModuleOptions]) -> None:
        super().__init__(check_tables(type(self).__name__, tables), **options)
        self._set_features(self._named_features(self._group.config))

    def _named_features(self, config: GroupConfig) -> NamedFeatures:
        """List all features, in the order of the tables."""
        tables = config.tables
        owners: dict[str, int] = {}
        for t, table in enumerate(tables):
            for feature in table.feature_names:
                if feature in owners:
                    raise ValueError(
                        f"{type(self).__name__}: feature {feature!r} belongs to two tables, "
                        f"{tables[owners[feature]].name!r} and {table.name!r}: name it in one"
                    )
                owners[feature] = t
        layout = config.layout
        return NamedFeatures(
            list(owners),
            list(owners.values()),
            [tables[t].embedding_dim for t in owners.values()],
            [
                layout.of_feature.get((t, feature), t)
                for feature, t in owners.items()
                if layout.rows
            ],
        )

    def _check_bags(self, batch: LookupBatch) -> None:
        try:
            super()._check_bags(batch)
        except RuntimeError as error:
            name_feature(error, self.feature_names, batch.offsets.shape[0] - 1)
            raise

    def _set_features(self, features: NamedFeatures) -> None:
        self.feature_names = features.names
        self.feature_tables = features.tables
        self.feature_dims = features.dims
        self.feature_policies = features.policies

    def add_table(self, table: TableConfig) -> None:
        """Add a table and its features at the end, between training steps.

        All tensors of the group are replaced: compiled code is compiled again, graphs must be
        captured again. While it is done, the tables are in memory twice. The optimizer gets a param
        group; schedulers made before do not know it.

        Args:
            table: its name, and those of its features, must differ from the others.

        Raises:
            TypeError: ``table`` is not a :class:`TableConfig`.
            ValueError: a name is taken, or the table does not fit.
            RuntimeError: too little memory, or addresses, or this process is a fork of the one that
                made the tables. In all cases nothing has been changed.
        """
        check_tables(f"{type(self).__name__}.add_table", [table])
        self._check_new_table(table)
        with self._group.tables.changing(moves_rows=True):
            extended = table_extension.extend(self._group.tables, table)
            features = self._named_features(extended.config)
            with defer_signals():
                self._group._become(extended)
                self._set_features(features)
                self._rebind_optimizer()
                if self._optimizer is not None:
                    self._optimizer.add_table(table.name)

    def _check_new_table(self, table: TableConfig) -> None:
        taken = [name for name in table.feature_names if name in self.feature_names]
        if taken:
            raise ValueError(
                f"{type(self).__name__}.add_table: features {taken} of table {table.name!r} belong "
                "to other tables: give it features of its own"
            )


class DynamicEmbeddingBagCollection(BagsOfFeatures, Collection):
    """Pooled lookups of many features; tables may differ in dim.

    Args:
        tables: one config per table, at least one; a table may serve several features, but a
            feature has one table.
        mode: ``"sum"`` or ``"mean"``.
        **options: those of :class:`torch_dynemb.ModuleOptions`.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``tables`` is empty, two have one name, or a feature belongs to two. Or an
            argument is out of its range, arguments contradict each other, or a trainable module
            lacks an optimizer.
        RuntimeError: tables cannot lie on the device, or too little memory, or addresses.

    Example:
        >>> import torch, torch_dynemb as td
        >>> tables = [td.TableConfig("user", 4), td.TableConfig("ad", 8, ["shown", "clicked"])]
        >>> collection = td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=0.1))
        >>> ids = {name: torch.arange(6).reshape(3, 2) for name in collection.feature_names}
        >>> collection(ids).shape
        torch.Size([3, 20])
        >>> collection.sizes()
        {'user': 6, 'ad': 6}
    """

    @advises("tables")
    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        mode: str = "sum",
        **options: Unpack[ModuleOptions],
    ) -> None:
        pooling = pooling_of(mode)
        super().__init__(tables, **options)
        self.mode = mode
        self._pooling = pooling

    def forward(self, features: Features) -> Tensor:
        """Look up and pool all features.

        Args:
            features: a dict name -> ids (B, L) or name -> (values (N,), offsets (B + 1,)), all
                int64 or int32. Or a keyed jagged input, such as :class:`KeyedJagged` or TorchRec's
                KeyedJaggedTensor, with its weights. Features of other names are ignored.

        Returns:
            ``output_dtype`` (B, sum of feature_dims), features side by side in the order of
            ``feature_names``; :meth:`split` takes them apart.

        Raises:
            KeyError: a feature is missing.
            TypeError, ValueError, RuntimeError: as in :meth:`DynamicEmbeddingBag.forward`.
        """
        batch = self._requested(self._batch, features, self._pooling)
        try:
            return self._lookup(batch, feature_policies=self.feature_policies)
        except RuntimeError as error:
            name_feature(error, self.feature_names, batch.offsets.shape[0] - 1)
            raise

    def prefetch(self, features: Features, *, ahead: int = 1) -> None:
        """Begin to bring rows into memory; see :meth:`DynamicEmbedding.prefetch`.

        Args:
            features: ids by name, of any shapes that :meth:`forward` takes.
            ahead: in how many training steps, at least 1.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: as :meth:`forward`, and
                :meth:`DynamicEmbedding.prefetch`.
        """
        self._prefetch(self._batch(features, self._pooling), ahead)


class DynamicEmbeddingCollection(RowsOfFeatures, Collection):
    """A vector per id for many features; all tables have one dim.

    Args:
        tables: as in :class:`DynamicEmbeddingBagCollection`.
        **options: those of :class:`torch_dynemb.ModuleOptions`.

    Raises:
        ValueError: tables differ in dim, or as in :class:`DynamicEmbeddingBagCollection`.
        TypeError, RuntimeError: as in :class:`DynamicEmbeddingBagCollection`.

    Example:
        >>> import torch, torch_dynemb as td
        >>> tables = [td.TableConfig("item", 8, ["history", "candidate"])]
        >>> collection = td.DynamicEmbeddingCollection(tables, optimizer=td.SGD(lr=0.1))
        >>> history, candidate = torch.arange(6).reshape(2, 3), torch.arange(2)
        >>> out = collection({"history": history, "candidate": candidate})
        >>> out["history"].shape, out["candidate"].shape
        (torch.Size([2, 3, 8]), torch.Size([2, 8]))
    """

    @advises("tables")
    def __init__(self, tables: Sequence[TableConfig], **options: Unpack[ModuleOptions]) -> None:
        tables = check_tables("DynamicEmbeddingCollection", tables)
        dims = {table.name: table.embedding_dim for table in tables}
        if len(set(dims.values())) > 1:
            raise ValueError(
                f"DynamicEmbeddingCollection: tables have embedding_dim {dims}, expected one dim: "
                "use one collection per dim, or DynamicEmbeddingBagCollection"
            )
        super().__init__(tables, **options)

    def forward(self, features: Features) -> dict[str, Tensor]:
        """Look up all features.

        Args:
            features: name -> ids, int64 or int32 of any shape; other names are ignored. Or a keyed
                jagged input, such as :class:`KeyedJagged` or TorchRec's KeyedJaggedTensor, of which
                the weights are ignored, as TorchRec's EmbeddingCollection does.

        Returns:
            name -> ``output_dtype``, the shape of the ids + (dim,); of a keyed jagged input
            (n, dim), the rows of the n ids of a feature, sample after sample.

        Raises:
            KeyError: a feature is missing.
            TypeError, ValueError, RuntimeError: as in :meth:`DynamicEmbedding.forward`.
        """
        batch = self._requested(self._batch, features)
        rows = self._lookup(batch, feature_policies=self.feature_policies)
        return self._split(rows, batch, features)

    def prefetch(self, features: Features, *, ahead: int = 1) -> None:
        """Begin to bring rows into memory; see :meth:`DynamicEmbedding.prefetch`.

        Args:
            features: ids by name, of any shapes that :meth:`forward` takes.
            ahead: in how many training steps, at least 1.

        Raises:
            KeyError, TypeError, ValueError, RuntimeError: as :meth:`forward`, and
                :meth:`DynamicEmbedding.prefetch`.
        """
        self._prefetch(self._batch(features), ahead)

    def _check_new_table(self, table: TableConfig) -> None:
        super()._check_new_table(table)
        if table.embedding_dim != self.feature_dims[0]:
            raise ValueError(
                f"DynamicEmbeddingCollection.add_table: table {table.name!r} has embedding_dim "
                f"{table.embedding_dim}, expected {self.feature_dims[0]}, that of the others"
            )
