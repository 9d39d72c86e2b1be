"""Sharded collection without pooling: the output has one row per id."""

from __future__ import annotations

from typing import Any

import torch
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torch_dynemb.distributed.gloo_threads import let_senders_finish
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.torchrec.collections.dynamic_part import (
    DynamicPart,
    table_plans,
    taken_plan,
    with_plan,
)
from torch_dynemb.torchrec.collections.rebuilding import Given, blueprint
from torch_dynemb.torchrec.planning.choice import TableChoice
from torch_dynemb.torchrec.planning.options import is_dynamic
from torch_dynemb.torchrec.planning.plans import (
    KeptInfos,
    ModulePlan,
    module_plan,
    plan_dynamic,
)
from torch_dynemb.torchrec.sharding.batches import (
    BatchCheck,
    scored_features,
    with_one_sample,
)
from torch_dynemb.torchrec.sharding.dedup import (
    FeatureGroups,
    counts_frequency,
    distinct,
    feature_groups_of,
)
from torch_dynemb.torchrec.sharding.shardings import SEQUENCE


class ShardedDynamicEmbeddingCollection(DynamicPart, ShardedEmbeddingCollection):  # type: ignore[misc]
    """EmbeddingCollection with some dynamic tables, as its plan says.

    Args:
        choice, optimizer, use_index_dedup: as in :class:`.ShardedDynamicEmbeddingBagCollection`.
        module, table_name_to_parameter_sharding, env, fused_params, device, ...: as in TorchRec.
    """

    module_kind = "EmbeddingCollection"
    tables_attribute = "embeddings"
    configs_attribute = "_embedding_configs"
    shardings_attribute = "_sharding_type_to_sharding"
    divides_dims = False
    _embedding_configs: list[Any]

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        choice: TableChoice,
        optimizer: OptimizerConfig | None,
        use_index_dedup: bool,
        planned: ModulePlan | None = None,
        **more: Any,
    ) -> None:
        self.sharding_types = list(SEQUENCE)
        self._given = Given(
            blueprint(module), fused_params, choice, optimizer, use_index_dedup, more
        )
        plan = planned or module_plan(
            "EmbeddingCollection",
            module,
            module.embedding_configs(),
            table_name_to_parameter_sharding,
            env,
            device,
            sharding_types=self.sharding_types,
            choice=choice,
            optimizer=optimizer,
            fused_params=fused_params,
            use_index_dedup=use_index_dedup,
            codecs=more.get("qcomm_codecs_registry"),
            path=more.get("module_fqn"),
        )
        self.plan_of_tables = plan
        self._dynamic_options = plan.options
        self._feature_groups: list[FeatureGroups] = []
        super().__init__(
            module,
            table_name_to_parameter_sharding,
            env,
            with_plan(fused_params, plan),
            device,
            use_index_dedup=use_index_dedup,
            **more,
        )
        self._check_batch = BatchCheck(
            "EmbeddingCollection",
            [name for config in self._embedding_configs for name in config.feature_names],
            weighted=False,
            scored=scored_features(self._embedding_configs, plan.options),
            detaches=False,
        )
        self._keep_state(plan, env, device)
        let_senders_finish(env.process_group)

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: Any,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        fused_params: dict[str, Any] | None,
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        given, plan = taken_plan(fused_params)
        infos = super().create_grouped_sharding_infos(
            module, table_name_to_parameter_sharding, given
        )
        return plan_dynamic("EmbeddingCollection", infos, plan)

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

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Send ids to the ranks that own them."""
        return self._agreed(
            ctx, lambda: self._checked(ctx, features), lambda checked: self._sent(ctx, checked)
        )

    def _checked(self, ctx: Any, features: Any) -> KeyedJaggedTensor:
        """Check the batch of this rank."""
        checked = self._own(
            self._check_batch(
                features,
                first=self._has_uninitialized_input_dist,
                trains=self.training and torch.is_grad_enabled(),
            )
        )
        shares_bags = checked.variable_stride_per_key()
        if (checked.inverse_indices()[1].shape[1] if shares_bags else checked.stride()) == 0:
            # TorchRec's outputs need a sample, and other ranks wait for the backward of this one
            checked = with_one_sample(checked)
            ctx.without_samples = True
        return checked

    def _sent(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        """Bring a batch on its way, as TorchRec does."""
        return super().input_dist(ctx, features)

    def output_names(self) -> list[str]:
        """Return the names of outputs in the order of TorchRec's shardings."""
        of_shardings = self._embedding_names_per_sharding
        return list(dict.fromkeys(name for names in of_shardings for name in names))

    def output_dist(self, ctx: Any, output: Any) -> Any:
        """Send rows back to the ranks that asked for them."""
        return self._in_order(_cut_sample(ctx, super().output_dist(ctx, output)))

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up the ids that arrived and send their rows back."""
        return self._in_order(_cut_sample(ctx, super().compute_and_output_dist(ctx, input)))

    def _in_order(self, awaitable: Any) -> Any:
        """Give outputs the order from before tables moved."""
        order = self._output_order
        if order is not None:
            awaitable.callbacks.append(lambda outputs: {name: outputs[name] for name in order})
        return awaitable

    def _create_hash_size_info(self, feature_names: list[str], ctx: Any = None) -> None:
        """Set what dedup needs of the shardings; TorchRec's version needs GPUs and ids below
        2^31."""
        self._feature_groups = [
            feature_groups_of(sharding, self._dynamic_options)
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

    def _embedding_dim_for_sharding_type(self, sharding_type: str) -> int:
        dim: int = super()._embedding_dim_for_sharding_type(sharding_type.removeprefix("dynamic_"))
        return dim


def _cut_sample(ctx: Any, awaitable: Any) -> Any:
    """Remove the sample that :func:`with_one_sample` has added."""
    if getattr(ctx, "without_samples", False):
        awaitable.callbacks.append(
            lambda outputs: {
                name: JaggedTensor(
                    values=jagged.values()[:0],
                    lengths=jagged.lengths()[:0],
                    weights=None if (of := jagged.weights_or_none()) is None else of[:0],
                )
                for name, jagged in outputs.items()
            }
        )
    return awaitable


__all__ = ["ShardedDynamicEmbeddingCollection"]
