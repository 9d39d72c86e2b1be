"""Sharded collection of bags: the ids of a sample become one vector per feature."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.sparse.jagged_tensor_validator import validate_keyed_jagged_tensor

from torch_dynemb.torchrec.collections.dynamic_part import DynamicPart, table_plans
from torch_dynemb.torchrec.planning.options import is_dynamic
from torch_dynemb.torchrec.planning.plans import KeptInfos, ModulePlan
from torch_dynemb.torchrec.sharding.agreed_sizes import as_sent
from torch_dynemb.torchrec.sharding.batches import (
    BatchCheck,
    check_processed,
    missing_weights,
    scored_features,
)
from torch_dynemb.torchrec.sharding.dedup import DEDUPED, DedupInputDist
from torch_dynemb.torchrec.sharding.means import mean_divisor, pooled_outputs
from torch_dynemb.torchrec.sharding.shardings import POOLED


class ShardedDynamicEmbeddingBagCollection(DynamicPart, ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """EmbeddingBagCollection with some dynamic tables, as its plan says."""

    module_kind = "EmbeddingBagCollection"
    tables_attribute = "embedding_bags"
    configs_attribute = "_embedding_bag_configs"
    shardings_attribute = "_embedding_shardings"
    divides_dims = True
    _embedding_bag_configs: list[Any]

    def _prepare_batches(self, plan: ModulePlan) -> BatchCheck:
        self._pooled_outputs = pooled_outputs(
            self._embedding_bag_configs,
            {
                table: sharding
                for kind, sharding in zip(self._sharding_types, self.shardings(), strict=True)
                for table in plan.tables[kind]
            },
            plan.options,
        )
        self._inverse_names: list[str] | None = None
        divides = any(of.divided for of in self._pooled_outputs.values())
        self._has_mean_pooling_callback = divides
        self._needs_weights = {
            "pooling=MEAN in a by-rows sharding": divides,
            "score_from='weights'": bool(
                scored_features(self._embedding_bag_configs, plan.options)
            ),
            "use_index_dedup": plan.dedup,
        }
        pooled_here = self._several_ranks is None or (
            plan.dedup and not self._configs(dynamic=False)
        )
        return BatchCheck(
            self.module_kind,
            self._embedding_bag_configs,
            plan.options,
            weighted=self._is_weighted and (divides or plan.dedup),
            detaches=self._is_weighted and (divides or not pooled_here),
        )

    def sharding_types(self) -> list[str]:
        """Return the sharding types of dynamic tables."""
        return list(DEDUPED if self._given.use_index_dedup else POOLED)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        if isinstance(sharding_infos, KeptInfos):
            kept: EmbeddingSharding[Any, Any, Any, Any] = sharding_infos.sharding
            return kept
        sharding = sharding_infos[0].param_sharding
        if not is_dynamic(sharding):
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        arguments: dict[str, Any] = {"qcomm_codecs_registry": qcomm_codecs_registry}
        plans = table_plans(sharding_infos)
        if any(plan.dedup for plan in plans.values()):
            options = {name: plan.options for name, plan in plans.items()}
            deduped = DEDUPED[sharding.sharding_type]
            return deduped(sharding_infos, env, device, options=options, **arguments)
        by_columns = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
        if sharding.sharding_type in by_columns:
            arguments["permute_embeddings"] = permute_embeddings
        return POOLED[sharding.sharding_type](sharding_infos, env, device, **arguments)

    def _reorders(self) -> bool:
        return bool(self._has_features_permute)

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        """Look up the ids that arrived."""
        self._check_arrived(ctx, dist_input)
        return super().compute(ctx, dist_input)

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Look up the ids that arrived and send their bags back."""
        self._check_arrived(ctx, input)
        return super().compute_and_output_dist(ctx, input)

    def _checked(self, ctx: Any, features: Any) -> KeyedJaggedTensor:
        checked = super()._checked(ctx, features)
        if self._has_uninitialized_input_dist:  # TorchRec checks it, too, but after ranks agreed
            validate_keyed_jagged_tensor(checked, self._configs(dynamic=False))
        ctx.unweighted = checked.weights_or_none() is None
        return checked

    def _lacks_sample(self, features: KeyedJaggedTensor) -> bool:
        shares_bags = features.variable_stride_per_key()
        return bool(shares_bags and features.inverse_indices()[1].shape[1] == 0)

    def _check_arrived(self, ctx: Any, arrived: Sequence[KeyedJaggedTensor]) -> None:
        """Check the weights of bags, which feature processors compute after the exchange.

        Raises:
            ValueError: there are none.
            NotImplementedError: they are needed before.
        """
        if not self._is_weighted:
            return
        weights = [features.weights_or_none() for features in arrived]
        if self._several_ranks is None:
            processed = any(of is not None and of.requires_grad for of in weights)
        else:
            processed = not all(map(as_sent, arrived))
        if processed:
            check_processed(self.module_kind, self._needs_weights)
        elif ctx.unweighted and all(of is None for of in weights):
            raise missing_weights(self.module_kind)

    def _sent(self, ctx: Any, features: KeyedJaggedTensor) -> Any:
        divides = self._has_mean_pooling_callback
        # TorchRec checks the first batch against num_embeddings, which does not limit dynamic
        # tables
        checked = self._static_only() if self._has_uninitialized_input_dist else nullcontext()
        self._has_mean_pooling_callback = False  # this class divides
        try:
            with checked:
                sent = super()._sent(ctx, features)
        finally:
            self._has_mean_pooling_callback = divides
        if ctx.variable_batch_per_feature:
            self._find_bags_of_outputs(ctx.inverse_indices)
        if divides:
            with torch.no_grad():
                ctx.divisor = mean_divisor(
                    features,
                    [self._pooled_outputs[name] for name in self._embedding_names],
                    self._embedding_dims,
                    weighted=self._is_weighted,
                )
        for i, dist in enumerate(self._input_dists):
            if isinstance(dist, DedupInputDist):
                ctx.sharding_contexts[i] = dist.take_context()
        return sent

    def _find_bags_of_outputs(self, inverse_indices: tuple[list[str], torch.Tensor]) -> None:
        """Find the rows of ``inverse_indices`` for all outputs.

        TorchRec does so for the first batch only, also if that has one batch size.
        """
        names = list(inverse_indices[0])
        if names != self._inverse_names:
            self._inverse_names = names
            self._inverse_indices_permute_indices = None
            self._create_inverse_indices_permute_indices(inverse_indices)

    def output_names(self) -> list[str]:
        """Return the names of outputs in the order of TorchRec's shardings."""
        return list(self._embedding_names)

    @staticmethod
    def _without_samples(bags: KeyedTensor) -> KeyedTensor:
        return KeyedTensor(
            keys=bags.keys(),
            length_per_key=bags.length_per_key(),
            values=bags.values()[:0],
            key_dim=bags.key_dim(),
        )

    @staticmethod
    def _reordered(outputs: KeyedTensor, keys: list[str]) -> KeyedTensor:
        parts = outputs.to_dict()
        return KeyedTensor(
            keys=keys,
            length_per_key=[parts[key].shape[1] for key in keys],
            values=torch.cat([parts[key] for key in keys], dim=1),
        )


__all__ = ["ShardedDynamicEmbeddingBagCollection"]
