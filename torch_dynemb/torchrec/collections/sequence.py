"""Sharded collection without pooling: the output has one row per id."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.types import Awaitable, NoWait, ShardingEnv
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.parts.owned_rows import OwnedRows, assign_all, last_of_each, rows_to_owners
from torch_dynemb.parts.table_parts import parts_in
from torch_dynemb.torchrec.collections.dynamic_part import DynamicPart, table_plans
from torch_dynemb.torchrec.planning.options import is_dynamic
from torch_dynemb.torchrec.planning.plans import KeptInfos, ModulePlan
from torch_dynemb.torchrec.sharding.batches import BatchCheck
from torch_dynemb.torchrec.sharding.dedup import (
    FeatureGroups,
    counts_frequency,
    distinct,
    feature_groups_of,
)
from torch_dynemb.torchrec.sharding.shardings import SEQUENCE
from torch_dynemb.torchrec.sharding.written_rows import WrittenTable, written_rows


class ShardedDynamicEmbeddingCollection(DynamicPart, ShardedEmbeddingCollection):  # type: ignore[misc]
    """EmbeddingCollection with some dynamic tables, as its plan says."""

    module_kind = "EmbeddingCollection"
    tables_attribute = "embeddings"
    configs_attribute = "_embedding_configs"
    shardings_attribute = "_sharding_type_to_sharding"
    divides_dims = False
    _embedding_configs: list[Any]
    _feature_groups: list[FeatureGroups]

    def _prepare_batches(self, plan: ModulePlan) -> BatchCheck:
        return BatchCheck(self.module_kind, self._embedding_configs, plan.options)

    def sharding_types(self) -> list[str]:
        """Return the sharding types of dynamic tables."""
        return list(SEQUENCE)

    @classmethod
    def create_embedding_sharding(
        cls,
        sharding_type: str,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        if isinstance(sharding_infos, KeptInfos):
            kept: EmbeddingSharding[Any, Any, Any, Any] = sharding_infos.sharding
            return kept
        sharding = sharding_infos[0].param_sharding
        if not is_dynamic(sharding):
            return super().create_embedding_sharding(
                sharding_type, sharding_infos, env, device, qcomm_codecs_registry
            )
        created = SEQUENCE[sharding.sharding_type](
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
        )
        created.counted = any(
            plan.dedup and counts_frequency(plan.options)
            for plan in table_plans(sharding_infos).values()
        )
        return created

    def _reorders(self) -> bool:
        return bool(self._features_order)

    def _lacks_sample(self, features: KeyedJaggedTensor) -> bool:
        shares_bags = features.variable_stride_per_key()
        samples = features.inverse_indices()[1].shape[1] if shares_bags else features.stride()
        return bool(samples == 0)

    def output_names(self) -> list[str]:
        """Return the names of outputs in the order of TorchRec's shardings."""
        of_shardings = self._embedding_names_per_sharding
        return list(dict.fromkeys(name for names in of_shardings for name in names))

    @staticmethod
    def _without_samples(outputs: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        return {
            name: JaggedTensor(
                values=jagged.values()[:0],
                lengths=jagged.lengths()[:0],
                weights=None if (of := jagged.weights_or_none()) is None else of[:0],
            )
            for name, jagged in outputs.items()
        }

    @staticmethod
    def _reordered(outputs: dict[str, JaggedTensor], names: list[str]) -> dict[str, JaggedTensor]:
        return {name: outputs[name] for name in names}

    def _create_hash_size_info(self, feature_names: list[str], ctx: Any = None) -> None:
        """Set what dedup needs of the shardings; TorchRec's version needs GPUs and ids below
        2^31."""
        self._feature_groups = [
            feature_groups_of(sharding, self.plan_of_tables.options)
            for sharding in self._sharding_type_to_sharding.values()
        ]

    def _dedup_indices(self, ctx: Any, input_feature_splits: list[Any]) -> list[Any]:
        sent = []
        for features, groups in zip(input_feature_splits, self._feature_groups, strict=True):
            unique = distinct(features, groups)
            ctx.input_features.append(features)
            ctx.reverse_indices.append(unique.inverse)
            sent.append(unique.features)
        return sent

    def _compute_sequence_vbe_context(self, ctx: Any, unpadded_features: Any) -> None:
        """Find the row of each output if samples share bags; TorchRec copies rows by an op of
        FBGEMM without a gradient, so tables would not learn."""
        super()._compute_sequence_vbe_context(ctx, unpadded_features)
        of_shardings, ctx.seq_vbe_ctx = ctx.seq_vbe_ctx, []
        sent, ctx.input_features = ctx.input_features, []
        for i, shared in enumerate(of_shardings):
            rows = torch.arange(int(shared.unpadded_lengths.sum()), device=shared.recat.device)
            lengths, positions, _ = torch.ops.fbgemm.permute_1D_sparse_data(
                shared.recat, shared.unpadded_lengths, rows
            )
            if sent:
                ctx.reverse_indices[i] = ctx.reverse_indices[i][positions]
            else:
                ctx.reverse_indices.append(positions)
            ids = positions if shared.reindexed_values is None else shared.reindexed_values
            names = [str(n) for n in range(len(shared.reindexed_lengths))]
            ctx.input_features.append(KeyedJaggedTensor(names, ids, lengths=lengths))

    # -- rows from outside ----------------------------------------------------------------------

    def _written(self) -> dict[str, WrittenTable]:
        """Return the dynamic tables with ``enable_embedding_update``."""
        configs, options = self._embedding_configs, self.plan_of_tables.options
        return {
            config.name: WrittenTable(keys, config.embedding_dim, options[config.name].padding_idx)
            for config, keys in zip(configs, get_embedding_names_by_table(configs), strict=True)
            if config.name in options and getattr(config, "enable_embedding_update", False)
        }

    @torch.no_grad()
    def write_dist(self, ctx: Any, embeddings: KeyedJaggedTensor) -> Awaitable[Awaitable[Any]]:
        """Send rows to the ranks that own their ids, for :meth:`update`; all ranks call it.

        TorchRec's ``DistributedModelParallel.write`` calls both. All tables of the collection with
        ``enable_embedding_update`` are written, in any sharding. Rows of known ids are replaced,
        new ids are inserted without admission; optimizer state and scores are those of
        ``TableGroup.insert_or_assign``. If an id comes several times, its last row counts, and that
        of the last rank.

        Args:
            ctx: of TorchRec.
            embeddings: keys are the names of the collection's outputs, values are ids, and weights
                rows, float [N, dim].

        Raises:
            TypeError, ValueError: the batch of a rank is something else; on all ranks.
            NoRoomError: from :meth:`update`, on all ranks, if a table has no room; no row has been
                written.
        """
        written = self._written()
        if not written:
            return super().write_dist(ctx, embeddings)
        ranks = ranks_of(self._env.process_group)
        batches = ranks.run(lambda: written_rows(embeddings, written, self._device))
        parts = list(parts_in(self, ""))
        shards = ranks.gather([part.shard for part in parts])
        owned: list[OwnedRows] = []
        for name, batch in batches.items():
            own = [part for part in parts if part.name == name]
            of_table = [[shard for shard in of if shard.name == name] for of in shards]
            arrived = rows_to_owners(own, of_table, batch, ranks)
            owned += [OwnedRows(part, last_of_each(rows)) for part, rows in arrived]
        return NoWait(NoWait(owned))

    def update(self, ctx: Any, dist_input: Any) -> None:
        """Write the rows that :meth:`write_dist` has sent to this rank; all ranks call it.

        Args:
            ctx: of TorchRec.
            dist_input: what :meth:`write_dist` has given.
        """
        if not self._written():
            super().update(ctx, dist_input)
            return
        assign_all("write", dist_input, ranks_of(self._env.process_group))

    def _embedding_dim_for_sharding_type(self, sharding_type: str) -> int:
        dim: int = super()._embedding_dim_for_sharding_type(sharding_type.removeprefix("dynamic_"))
        return dim


__all__ = ["ShardedDynamicEmbeddingCollection"]
