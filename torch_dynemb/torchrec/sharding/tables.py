"""Tables of one rank: the shards of a grouped config in one table group."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig, ShardedEmbeddingTable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.types import DataType

from torch_dynemb.distributed.owners import policy_of_share, share_of
from torch_dynemb.distributed.ranks import default_group
from torch_dynemb.initializers import Uniform
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.ops.columns import SKETCH_ROWS, Pooling
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.policy.admission import AdmissionRule, AdmitFrequentSketch
from torch_dynemb.table.config import ColumnShard, TableConfig
from torch_dynemb.table.given_scores import custom_scores
from torch_dynemb.table.shards import IdSlots, TableShard
from torch_dynemb.torchrec.planning.plans import PLAN, KernelPlan
from torch_dynemb.torchrec.sharding.evicted_ids import record_evicted

_ROW_DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}


def shard_of_table(table: ShardedEmbeddingTable, ids: IdSlots) -> TableShard:
    """Return the ids and columns of its table that a local table has."""
    metadata = table.local_metadata
    offsets = [] if metadata is None else metadata.shard_offsets
    first = offsets[1] if len(offsets) > 1 else 0
    columns = range(first, first + table.local_cols)
    return TableShard(table.name, table.embedding_dim, columns, ids)


def row_dtype_of(table: str, data_type: DataType) -> torch.dtype:
    """Return the dtype of rows.

    Raises:
        TypeError: rows of this type cannot be trained.
    """
    if data_type not in _ROW_DTYPES:
        raise TypeError(
            f"table {table!r}: data_type is {data_type}, expected FP32, FP16 or BF16: rows of "
            "other types cannot be trained"
        )
    return _ROW_DTYPES[data_type]


def _plan_of(table: ShardedEmbeddingTable) -> KernelPlan:
    plan: KernelPlan = table.fused_params[PLAN]
    return plan


def _admission_of(rule: AdmissionRule | None, parts: int) -> AdmissionRule | None:
    """Return the rule of one part of a table: parts share the memory of a sketch."""
    if not isinstance(rule, AdmitFrequentSketch) or parts == 1:
        return rule
    return replace(rule, memory=4 * SKETCH_ROWS * share_of(rule.width, parts))


def _table_config(table: ShardedEmbeddingTable, shard: TableShard) -> TableConfig:
    options = _plan_of(table).options
    if shard.first_column % 4 != 0:
        raise ValueError(
            f"table {table.name!r}: a column shard begins at column {shard.first_column}, expected "
            "a multiple of 4: choose another min_partition"
        )
    policy = options.policy
    columns = slice(shard.columns.start, shard.columns.stop)

    def of_columns(default: Any) -> Any:
        return default[columns] if isinstance(default, Tensor) else default

    initializer = options.initializer
    if initializer is None:
        initializer = Uniform(table.get_weight_init_min(), table.get_weight_init_max())
    return TableConfig(
        name=table.name
        if not shard.split
        else f"{table.name}.columns{columns.start}to{columns.stop}",
        embedding_dim=len(shard.columns),
        feature_names=table.feature_names,
        initializer=initializer,
        padding_idx=options.padding_idx,
        eval_default=of_columns(options.eval_default),
        policy=replace(
            policy_of_share(policy, shard.ids.slots),
            refused=of_columns(policy.refused),
            admission=_admission_of(policy.admission, shard.ids.slots),
        ),
        feature_policies=options.feature_policies,
        dtype=row_dtype_of(table.name, table.data_type),
        shard=ColumnShard(table.name, shard.embedding_dim, shard.first_column),
    )


class ShardTables(TableModule):
    """The shards of one rank that share a kernel.

    Args:
        grouped_config: fused_params of its tables have a :class:`KernelPlan`.
        shown: by table, the parameter that users see: lookups train while it requires a gradient.
        optimizer: of all tables.
        ids: the ids that this rank owns.
        pooling: of the ids of a bag.
        output_dtype: of lookup outputs.
        split: backward only collects gradients, and :meth:`end_step` applies them.
        device: of the rows.
        counted: without pooling, weights of ids are their numbers of occurrences.
        by_rank: without pooling, return rows in the order in which ranks sent their ids.
    """

    _can_be_wrapped = False  # DDP wraps the dense part alone

    def __init__(
        self,
        grouped_config: GroupedEmbeddingConfig,
        shown: Mapping[str, nn.Parameter],
        *,
        optimizer: OptimizerConfig,
        ids: IdSlots,
        pooling: Pooling,
        output_dtype: torch.dtype,
        split: bool,
        device: torch.device | None,
        counted: bool,
        by_rank: bool = False,
    ) -> None:
        tables = grouped_config.embedding_tables
        shards = [shard_of_table(table, ids) for table in tables]
        configs = [_table_config(*of) for of in zip(tables, shards, strict=True)]
        storage = _plan_of(tables[0]).storage_of([config.name for config in configs])
        super().__init__(
            [replace(config, storage=storage) for config in configs],
            optimizer=optimizer,
            output_dtype=output_dtype,
            split=split,
            device=device,
            seed=_plan_of(tables[0]).seed,
        )
        self.shards = shards
        self._shown = [shown[table.name] for table in tables]
        self._weighted = grouped_config.is_weighted or grouped_config.has_feature_processor
        self._scored = _plan_of(tables[0]).options.score_from == "weights"
        self._decays = _plan_of(tables[0]).options.adds_weights_to_decayed_sums
        self._pooling = pooling
        self._counted = counted
        self._by_rank = by_rank
        self._feature_tables = [t for t, table in enumerate(tables) for _ in table.feature_names]
        self._feature_dims = [tables[t].local_cols for t in self._feature_tables]
        layout = self._group.config.layout
        self._feature_policies = [
            layout.of_feature.get((t, feature), t)
            for t, table in enumerate(tables)
            for feature in table.feature_names
            if layout.rows
        ]
        self.in_step = False  # whether a backward has begun a step
        recorded = [_plan_of(table).options.record_evicted for table in tables]
        record_evicted(
            self._group, (of.name for of, chosen in zip(configs, recorded, strict=True) if chosen)
        )
        if self._group.config.keeps_time:
            self._group.clock.share(_plan_of(tables[0]).now)

    def agree_on_now(self, proposals: Tensor) -> None:
        """Set the time of training lookups to the latest that ranks propose, int64 [ranks]."""
        if self._group.config.keeps_time and self.learns():
            self._group.clock.agree_on(proposals)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Look up the ids that were sent to this rank.

        Args:
            features: of the tables, in order.

        Returns:
            pooled: (B, sum of dims); with a batch size per feature, flat: rank after rank, feature
            after feature. Not pooled: (N, dim), feature after feature, or rank after rank.
        """
        if self.learns():
            self.end_begun_step()
        ids = features.values().to(torch.int64).contiguous()
        offsets = features.offsets().to(torch.int64)
        weights = features.weights_or_none()
        if self._pooling == Pooling.NONE:
            if self._by_rank:
                output = self._rows_by_rank(ids, features.lengths(), weights)
            else:
                output = self._rows_of(ids, offsets, weights)
        elif not features.variable_stride_per_key():
            output = self._bags_of(ids, offsets, weights)
        else:
            strides = features.stride_per_key_per_rank()
            padded = self._bags_of(ids, self._padded(offsets, strides), weights)
            output = padded.flatten()[self._vbe_order(strides, offsets.device)]
        if output.requires_grad:
            output.register_hook(self._backward_begins)
        elif super().learns() and not self._shares_infinities:
            output.requires_grad_()  # the backward of other ranks waits for that of this one
        return output

    def learns(self) -> bool:
        """Return whether a lookup now trains a table."""
        return super().learns() and any(shown.requires_grad for shown in self._shown)

    def _look_up(
        self,
        batch: LookupBatch,
        feature_policies: list[int],
        scores: Tensor | None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Look up ids; tables with parameters that require no gradient are only read."""
        learns = self.learns()
        frozen = [not self._shown[table].requires_grad for table in batch.feature_tables]
        if not (learns and any(frozen)) or batch.ids.shape[0] == 0:
            return self._lookup(
                batch,
                feature_policies=feature_policies,
                scores=scores,
                counts=counts,
                trains=learns,
            )
        # two lookups, each with empty bags in place of those of the other
        bags = (batch.offsets.shape[0] - 1) // len(frozen)
        read = torch.tensor(frozen, device=batch.ids.device)
        read = read.repeat_interleave(batch.offsets[::bags].diff())
        outputs, places = [], []
        for chosen, trains in ((~read, True), (read, False)):
            place = chosen.nonzero().flatten()
            ends = torch.nn.functional.pad(chosen.cumsum(0), (1, 0))

            def part(of: Tensor | None, place: Tensor = place) -> Any:
                return None if of is None else of[place]

            of_tables = batch._replace(
                ids=part(batch.ids),
                offsets=ends[batch.offsets],
                per_sample_weights=part(batch.per_sample_weights),
            )
            outputs.append(
                self._lookup(
                    of_tables,
                    feature_policies=feature_policies,
                    scores=part(scores),
                    counts=part(counts),
                    trains=trains,
                )
            )
            places.append(place)
        if batch.pooling == Pooling.NONE:
            return torch.cat(outputs)[torch.cat(places).argsort()]
        return outputs[0] + outputs[1]

    def prefetch(self, features: KeyedJaggedTensor) -> None:
        """Start to load the rows of the next batch into memory; without ``storage`` do nothing.

        Args:
            features: the argument of the next :meth:`forward`.

        Raises:
            RuntimeError: the storage has failed.
        """
        if self._group.config.storage is None:
            return
        bounds = torch.tensor(features.offset_per_key(), device="cpu")
        tables, dims = self._feature_tables, self._feature_dims
        ids = features.values().to(torch.int64).contiguous()
        self._prefetch(LookupBatch(ids, bounds, None, tables, dims, self._pooling), 1)

    def _backward_begins(self, gradient: Tensor) -> None:
        self.in_step = True

    def end_step(self, now: int | None = None) -> None:
        """End a training step.

        ``optimizer.step()`` calls it. So does, except in split mode, a forward after a backward.
        """
        self.in_step = False
        self.optimizer.step(now=now)

    def end_begun_step(self) -> None:
        """End the step of an earlier backward, unless it may continue with a micro-batch."""
        if self.in_step and not self._group.config.split:
            self.end_step()

    def _bags_of(self, ids: Tensor, offsets: Tensor, weights: Tensor | None) -> Tensor:
        batch = LookupBatch(
            ids,
            offsets,
            weights.to(torch.float32) if self._weighted and weights is not None else None,
            self._feature_tables,
            self._feature_dims,
            self._pooling,
        )
        return self._look_up(batch, self._feature_policies, self._scores_of(weights))

    def _scores_of(self, weights: Tensor | None) -> Tensor | None:
        """Return the custom scores that a lookup brings, [N]; None: it brings none."""
        if not self._scored or weights is None:
            return None
        return custom_scores(weights, decays=self._decays)

    def _rows_of(
        self, ids: Tensor, offsets: Tensor, weights: Tensor | None, ranks: int = 1
    ) -> Tensor:
        features = ranks * len(self._feature_tables)
        batch = (offsets.shape[0] - 1) // features
        # bags are irrelevant: one per feature
        offsets = offsets[::batch].contiguous() if batch > 0 else offsets.new_zeros(features + 1)
        tables, dims = ranks * self._feature_tables, ranks * self._feature_dims
        return self._look_up(
            LookupBatch(ids, offsets, None, tables, dims, Pooling.NONE),
            ranks * self._feature_policies,
            self._scores_of(weights),
            weights.to(torch.int64) if self._counted and weights is not None else None,
        )

    def _rows_by_rank(self, ids: Tensor, lengths: Tensor, weights: Tensor | None) -> Tensor:
        """Return rows rank after rank, by reordering ids, which is cheaper than reordering rows.

        Every rank has sent one bag per feature. Ids of a table keep their order.
        """
        features = len(self._feature_tables)
        ranks = lengths.numel() // features
        order = torch.arange(features * ranks, dtype=torch.int32, device=ids.device)
        lengths, ids, weights = torch.ops.fbgemm.permute_2D_sparse_data(
            order.view(features, ranks).t().flatten(),
            lengths.to(torch.int64).view(-1, 1),
            ids,
            weights,
            ids.shape[0],
        )
        offsets = torch.ops.fbgemm.asynchronous_complete_cumsum(lengths.view(-1))
        return self._rows_of(ids, offsets, weights, ranks)

    def _padded(self, offsets: Tensor, strides: list[list[int]]) -> Tensor:
        """Pad offsets with empty bags, so that all features have as many bags as the largest."""
        batches = [sum(ranks) for ranks in strides]
        most = max(batches, default=0)
        parts = []
        begin = 0
        for batch in batches:
            parts += [offsets[begin : begin + batch]]
            parts += [offsets[begin + batch : begin + batch + 1].expand(most - batch)]
            begin += batch
        return torch.cat([*parts, offsets[-1:]])

    def _vbe_order(self, strides: list[list[int]], device: torch.device) -> Tensor:
        """Return positions of the flat output's elements in the padded one, (B, sum of dims)."""
        width = sum(self._feature_dims)
        pieces = []
        begin = [0] * len(strides)
        for rank in range(len(strides[0]) if strides else 0):
            column = 0
            for f, dim in enumerate(self._feature_dims):
                rows = torch.arange(begin[f], begin[f] + strides[f][rank], device=device)
                columns = torch.arange(column, column + dim, device=device)
                pieces.append((rows[:, None] * width + columns).flatten())
                begin[f] += strides[f][rank]
                column += dim
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64, device=device)

    def _is_shared(self) -> bool:
        return True

    @property
    def _shares_infinities(self) -> bool:
        """Whether this process has all ranks' rows: shards do not know the ranks of the others."""
        world = default_group()
        return world is None or world.size() == 1


__all__ = [
    "ShardTables",
    "row_dtype_of",
    "shard_of_table",
]
