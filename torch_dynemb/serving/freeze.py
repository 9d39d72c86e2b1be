"""Read-only copies of models: what is exported and served."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torch_dynemb import ops
from torch_dynemb.argument_checks import described
from torch_dynemb.nn.bag import DynamicEmbeddingBag, bag_inputs
from torch_dynemb.nn.collection import (
    DynamicEmbeddingBagCollection,
    DynamicEmbeddingCollection,
    sequence_inputs,
    split_rows,
)
from torch_dynemb.nn.embedding import DynamicEmbedding
from torch_dynemb.nn.inputs import Features, group_ids
from torch_dynemb.nn.table_module import TableModule, flat_ids
from torch_dynemb.ops.columns import BUCKET_WIDTH, Clock, Meta, Pooling, Table
from torch_dynemb.ops.tensors import RowTensors
from torch_dynemb.serving.frozen_state import check_frozen
from torch_dynemb.table.group import TableGroup, pooling_of
from torch_dynemb.table.tables import exported

Model = TypeVar("Model", bound=nn.Module)


class FrozenTables(nn.Module):
    """A group's ids and rows as buffers of their used size, without optimizer state.

    Args:
        group: what to copy; its rows are materialised first.
    """

    def __init__(self, group: TableGroup) -> None:
        super().__init__()
        group.materialize()
        count = len(group.config.tables)
        meta, tables = group.index.meta[:count].clone(), group.index.tables[:count].clone()
        active = [group.index.active_buckets(t) for t in range(count)]
        meta[:, Meta.REGION_BUCKETS] = tables[:, Table.BUCKET_COUNT]
        meta[:, Meta.REGION_BEGIN] = (
            meta[:, Meta.REGION_BUCKETS].cumsum(0) - (meta[:, Meta.REGION_BUCKETS])
        )
        self.names = group.names
        buckets = torch.cat([group.index.buckets[part] for part in active])
        _forget_expired(group, buckets, tables, meta)
        self.register_buffer("buckets", buckets)
        self.register_buffer("tables", tables)
        self.register_buffer("meta", meta)
        self.register_buffer("init_data", group.rows.init_data.clone())
        self.slabs = len(group.config.slabs)
        for s in range(self.slabs):
            # at least one row, so that an empty table has a shape that kernels accept
            used = max(1, group.index.used_rows(s))
            self.register_buffer(f"weights{s}", group.rows.weights[s][:used].clone())
            self.register_buffer(f"generations{s}", group.rows.generations[s][:used].clone())

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        own = dict(self.named_buffers())
        absent = [prefix + name for name in own if prefix + name not in state_dict]
        if absent:  # the others would not go with what is here
            missing_keys += absent
            return
        try:
            check_frozen(own, {name: state_dict[prefix + name] for name in own})
        except ValueError as error:
            error_msgs.append(f"{prefix.rstrip('.')}: {error}")
            return
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )

    def rows(self) -> RowTensors:
        """The row tensors in the order in which ops take them; no optimizer."""
        none = self.get_buffer("meta").new_empty(0)
        return RowTensors(
            [self.get_buffer(f"weights{s}") for s in range(self.slabs)],
            [self.get_buffer(f"generations{s}") for s in range(self.slabs)],
            [],
            none,
            none,
            self.get_buffer("meta"),
            self.get_buffer("init_data"),
            [],
        )

    def find(self, ids: Tensor, offsets: Tensor, feature_tables: list[int]) -> ops.FoundIds:
        """Handles of ids; see :func:`torch_dynemb.ops.find`."""
        index = ops.IndexTensors.read_only(
            self.get_buffer("buckets"), self.get_buffer("tables"), self.get_buffer("meta")
        )
        return ops.find(index, ids, offsets, feature_tables)

    def sizes(self) -> dict[str, int]:
        """Number of ids by table name."""
        return dict(zip(self.names, self.get_buffer("tables")[:, Table.SIZE].tolist(), strict=True))


def _forget_expired(group: TableGroup, buckets: Tensor, tables: Tensor, meta: Tensor) -> None:
    """Takes ids whose ttl has passed out of a copy of the index."""
    if "expiry" not in group.config.layout.score_words:
        return
    word = group.config.layout.word("expiry")
    for table in range(tables.shape[0]):
        for batch in exported(group.tables, table, 1 << 20):
            ids = batch.ids[batch.scores[:, word] <= group.index.clock[Clock.NOW]]
            index = ops.IndexTensors.read_only(buckets, tables, meta)._replace(
                scores=buckets.new_empty(0, BUCKET_WIDTH),
                slabs=torch.zeros_like(group.index.slabs),
                free_rows=buckets.new_empty(
                    group.index.slabs.shape[0], int(tables[:, Table.SIZE].sum())
                ),
            )
            ops.erase_(index, ids, ids.new_empty(0), [table])


class FrozenModule(nn.Module):
    """Base of the frozen modules: a lookup that only reads."""

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
        """The columns of an output by feature name: (B, dim) each."""
        return dict(zip(self.feature_names, output.split(self.feature_dims, dim=1), strict=True))


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


def _frozen(module: TableModule) -> FrozenModule:
    if isinstance(module, DynamicEmbedding):
        return FrozenEmbedding(module)
    if isinstance(module, DynamicEmbeddingBag):
        return FrozenEmbeddingBag(module)
    if isinstance(module, DynamicEmbeddingBagCollection):
        return FrozenBagCollection(module)
    if isinstance(module, DynamicEmbeddingCollection):
        return FrozenCollection(module)
    raise TypeError(f"freeze: {type(module).__name__} is not a module that freeze() knows")


def freeze(model: Model) -> Model:
    """A deep copy of a model in eval mode whose dynamic tables are read-only.

    Its tables are buffers of the size in use, so it can be exported with ``torch.export``, saved,
    and moved between threads. The model itself is not changed, and may be a table module itself.

    Args:
        model: any module; the dense part is deep-copied as it is.

    Returns:
        A model of the same class; table modules in it are replaced by read-only ones.

    Example:
        >>> import torch, torch_dynemb as td
        >>> bag = td.DynamicEmbeddingBag(4, optimizer=td.SGD(lr=0.1))
        >>> model = torch.nn.Sequential(bag, torch.nn.Linear(4, 1))
        >>> ids = torch.tensor([[1, 2], [3, 1]])
        >>> _ = model(ids)
        >>> program = torch.export.export(td.freeze(model), (ids,))
        >>> torch.equal(program.module()(ids), model.eval()(ids))
        True
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"freeze: model is {described(model)}, expected a torch.nn.Module")
    memo: dict[int, Any] = {}
    for module in model.modules():
        if isinstance(module, TableModule):
            memo[id(module)] = _frozen(module)
    return copy.deepcopy(model, memo).eval()


__all__ = [
    "FrozenBagCollection",
    "FrozenCollection",
    "FrozenEmbedding",
    "FrozenEmbeddingBag",
    "FrozenModule",
    "FrozenTables",
    "freeze",
]
