"""Read-only copies of the modules of :mod:`torch_dynemb.nn`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_dynemb._library.error_names import name_feature
from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.nn.bag import DynamicEmbeddingBag, bag_batch
from torch_dynemb.nn.collection import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
)
from torch_dynemb.nn.embedding import DynamicEmbedding
from torch_dynemb.nn.features import Features
from torch_dynemb.nn.forwards import BagsOfFeatures, RowsOfFeatures, rows_in_shape
from torch_dynemb.nn.inputs import flat_ids, pooling_of
from torch_dynemb.nn.module_kinds import Choices, register_module
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.serving.file_tables import read_only_tables
from torch_dynemb.serving.gathering import whole_group
from torch_dynemb.serving.missing import CountedTables
from torch_dynemb.serving.quantization import quantized_copy
from torch_dynemb.table.group import TableGroup


def converted_dtype(fn: Callable[[Tensor], Tensor], dtype: torch.dtype) -> torch.dtype:
    """Return the dtype after :meth:`torch.nn.Module.to` and its kin, which call ``_apply(fn)``.

    Args:
        fn: the function that ``_apply`` gets for every tensor of a module.
        dtype: a floating-point dtype.
    """
    return fn(torch.zeros(1, dtype=dtype, device="cpu")).dtype


class ReadOnly(nn.Module):
    """Base of modules with frozen tables, which are never in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.training = False

    def train(self, mode: bool = True) -> ReadOnly:
        """Do nothing: a frozen module only reads."""
        return self

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: torch.jit.script does not take frozen tables: use "
            "torch.jit.trace or torch.export"
        )

    def _refuse_trace(self) -> None:
        """Raise RuntimeError in ``torch.jit.trace``, for a forward that reads sizes of bags."""
        if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
            raise RuntimeError(
                f"{type(self).__name__}: torch.jit.trace would keep the sizes of the example's "
                "features, and give wrong rows for others: use torch.export"
            )


class FrozenModule(ReadOnly):
    """Base of the frozen modules: a lookup that only reads.

    ``to(torch.bfloat16)``, ``half()`` and the like change the dtype of lookup outputs. Rows keep
    their dtype, in which sums and means are computed; ids and the index are integers.

    Args:
        group: the tables to copy. Rows that no backward has written yet are written first; nothing
            else of it changes.
        output_dtype: of the outputs of lookups.
        kept_because: reason if rows cannot be stored in another format.
    """

    def __init__(
        self, group: TableGroup, output_dtype: torch.dtype, kept_because: str | None = None
    ) -> None:
        super().__init__()
        self.frozen_tables: CountedTables = read_only_tables(group, kept_because)
        self.output_dtype = output_dtype

    @classmethod
    def from_float(cls, module: nn.Module) -> FrozenModule:
        """Convert a module for ``torch.ao.quantization.convert`` and TorchRec's quantization.

        Args:
            module: a module that this class is the read-only copy of, or such a copy. Its
                ``qconfig`` gives the dtypes of rows and outputs. ``weight``: int8 (also qint8,
                quint8), quint4x2, float8_e4m3fn, float16, bfloat16 or float32 (as they are), by
                table name in ``per_table_weight_dtype``. ``activation``: float32, float16 or
                bfloat16. The module does not change.

        Returns:
            The result of ``torch_dynemb.freeze(module, rows=...)``, with such outputs.

        Raises:
            TypeError: ``module`` is of another class, or its rows are updated while they serve.
            ValueError: the module has no qconfig, or rows or outputs cannot have its dtypes.

        Example:
            >>> import torch, torch_dynemb as td
            >>> from torch.ao.quantization import PlaceholderObserver, QConfig
            >>> table = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
            >>> table.qconfig = QConfig(
            ...     activation=PlaceholderObserver.with_args(dtype=torch.float16),
            ...     weight=PlaceholderObserver.with_args(dtype=torch.int8),
            ... )
            >>> td.serving.FrozenEmbedding.from_float(table)(torch.arange(3)).dtype
            torch.float16
        """
        owner = f"{cls.__name__}.from_float"
        made = quantized_copy(owner, module)
        if not isinstance(made, cls):
            raise TypeError(
                f"{owner}: module is a {type(module).__name__}, which {type(made).__name__} is the "
                "read-only copy of"
            )
        return made

    def sizes(self) -> dict[str, int]:
        """Return the number of ids by table name."""
        return self.frozen_tables.sizes()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FrozenModule:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.output_dtype = converted_dtype(fn, self.output_dtype)
        return self


class FrozenEmbedding(FrozenModule):
    """Read-only copy of a :class:`DynamicEmbedding`.

    Args:
        source: the module to copy.
        group: its rows, or those of all ranks that share it.
    """

    def __init__(self, source: DynamicEmbedding, group: TableGroup) -> None:
        super().__init__(group, source.output_dtype)
        self.embedding_dim = source.embedding_dim

    def forward(self, input: Tensor) -> Tensor:
        """Look ids up as :meth:`DynamicEmbedding.forward` in eval mode."""
        ids, tables = flat_ids("FrozenEmbedding", input), self.frozen_tables
        batch = LookupBatch.of_rows(ids, tables.one_bag, [0], self.embedding_dim)
        rows = tables.lookup(batch).to(self.output_dtype)
        return rows_in_shape(rows, input, self.embedding_dim)


class FrozenEmbeddingBag(FrozenModule):
    """Read-only copy of a :class:`DynamicEmbeddingBag`.

    Args:
        source: the module to copy.
        group: its rows, or those of all ranks that share it.
    """

    def __init__(self, source: DynamicEmbeddingBag, group: TableGroup) -> None:
        super().__init__(group, source.output_dtype)
        self.embedding_dim = source.embedding_dim
        self.mode = source.mode
        self.include_last_offset = source.include_last_offset

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Look bags up as :meth:`DynamicEmbeddingBag.forward` in eval mode."""
        batch = bag_batch(
            input,
            offsets,
            per_sample_weights,
            include_last_offset=self.include_last_offset,
            dim=self.embedding_dim,
            pooling=pooling_of(self.mode),
        )
        return self.frozen_tables.lookup(batch).to(self.output_dtype)


class FrozenBagCollection(BagsOfFeatures, FrozenModule):
    """Read-only copy of a :class:`DynamicEmbeddingBagCollection`.

    Args:
        source: the module to copy.
        group: its rows, or those of all ranks that share it.
    """

    def __init__(self, source: DynamicEmbeddingBagCollection, group: TableGroup) -> None:
        super().__init__(group, source.output_dtype)
        self.mode = source.mode
        self.feature_names = list(source.feature_names)
        self.feature_dims = list(source.feature_dims)
        self.feature_tables = list(source.feature_tables)

    def forward(self, features: Features) -> Tensor:
        """Look bags up as :meth:`DynamicEmbeddingBagCollection.forward` in eval mode."""
        batch = self._batch(features, pooling_of(self.mode))
        try:
            return self.frozen_tables.lookup(batch).to(self.output_dtype)
        except RuntimeError as error:
            name_feature(error, self.feature_names, batch.offsets.shape[0] - 1)
            raise


class FrozenCollection(RowsOfFeatures, FrozenModule):
    """Read-only copy of a :class:`DynamicEmbeddingCollection`.

    Args:
        source: the module to copy.
        group: its rows, or those of all ranks that share it.
    """

    def __init__(self, source: DynamicEmbeddingCollection, group: TableGroup) -> None:
        super().__init__(group, source.output_dtype)
        self.feature_names = list(source.feature_names)
        self.feature_dims = list(source.feature_dims)
        self.feature_tables = list(source.feature_tables)

    def forward(self, features: Features) -> dict[str, Tensor]:
        """Look ids up as :meth:`DynamicEmbeddingCollection.forward` in eval mode."""
        batch = self._batch(features)
        rows = self.frozen_tables.lookup(batch).to(self.output_dtype)
        return self._split(rows, batch, features)


def _register(kind: type[TableModule], frozen: Callable[[Any, TableGroup], nn.Module]) -> None:
    """Register the read-only copy of a module; other ranks may have rows of it."""

    def copy_of(source: TableModule, choices: Choices) -> nn.Module | None:
        owner = f"freeze: {type(source).__name__} {source.group.names}"
        ranks = process_group_of(source._sharing_ranks)
        group = whole_group(owner, source.group, ranks, choices)
        return None if group is None else frozen(source, group)

    register_module(kind, frozen=copy_of)


_register(DynamicEmbedding, FrozenEmbedding)
_register(DynamicEmbeddingBag, FrozenEmbeddingBag)
_register(DynamicEmbeddingBagCollection, FrozenBagCollection)
_register(DynamicEmbeddingCollection, FrozenCollection)

__all__ = [
    "FrozenBagCollection",
    "FrozenCollection",
    "FrozenEmbedding",
    "FrozenEmbeddingBag",
    "FrozenModule",
    "ReadOnly",
    "converted_dtype",
]
