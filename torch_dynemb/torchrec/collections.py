"""Sharded collections with dynamic and static tables in them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.sparse.tensor_dict import maybe_td_to_kjt

from torch_dynemb.torchrec.kernels import DynamicKernel
from torch_dynemb.torchrec.means import mean_divisor, pooled_outputs
from torch_dynemb.torchrec.optimizer import shown_parameter
from torch_dynemb.torchrec.options import TableOptions, is_dynamic
from torch_dynemb.torchrec.plans import ModulePlan, options_by_table, plan_dynamic, shared_seed
from torch_dynemb.torchrec.shardings import POOLED, SEQUENCE

_PLAN = "torch_dynemb_plan"  # how a plan travels through TorchRec's constructors


def _planned(fused_params: dict[str, Any] | None) -> tuple[dict[str, Any], ModulePlan]:
    given = dict(fused_params or {})
    plan: ModulePlan = given.pop(_PLAN)
    return given, plan


class _Sharded:
    """The part of a sharded collection that knows its dynamic tables."""

    _lookups: list[torch.nn.Module]
    _embedding_shardings: list[Any]

    def kernels(self) -> Iterator[DynamicKernel]:
        """The kernels of dynamic tables on this rank."""
        for lookup in self._lookups:
            for module in lookup.modules():
                if isinstance(module, DynamicKernel):
                    yield module

    def train(self, mode: bool = True) -> Any:
        """Sets training mode, also of the lookups, which TorchRec keeps out of sight."""
        super().train(mode)  # type: ignore[misc]
        for lookup in self._lookups:
            lookup.train(mode)
        return self


class ShardedDynamicEmbeddingBagCollection(_Sharded, ShardedEmbeddingBagCollection):  # type: ignore[misc]
    """EmbeddingBagCollection whose plan makes some tables dynamic.

    Args:
        options: how tables are dynamic, by name, where the plan does not say it.
        optimizer: of the dynamic tables; default: what fused_params describe.
        module, table_name_to_parameter_sharding, env, fused_params, device, ...: as in TorchRec.
    """

    _embedding_bag_configs: list[Any]

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        options: Mapping[str, TableOptions],
        optimizer: Any,
        **more: Any,
    ) -> None:
        configs = module.embedding_bag_configs()
        plan = ModulePlan(
            options_by_table(
                "EmbeddingBagCollection",
                [config.name for config in configs],
                table_name_to_parameter_sharding,
                options,
                list(POOLED),
            ),
            optimizer,
            shared_seed(env.process_group, device),
        )
        fused_params = {**(fused_params or {}), _PLAN: plan}
        super().__init__(
            module, table_name_to_parameter_sharding, env, fused_params, device, **more
        )
        self._pooled_outputs = pooled_outputs(configs, self.module_sharding_plan, plan.options)
        self._grids = [
            name
            for name, sharding in self.module_sharding_plan.items()
            if sharding.sharding_type == ShardingType.GRID_SHARD.value
        ]
        self._has_mean_pooling_callback = any(of.divided for of in self._pooled_outputs.values())

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: Any,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        prefix: str,
        fused_params: dict[str, Any] | None,
        suffix: str | None = "weight",
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        given, plan = _planned(fused_params)
        infos = super().create_grouped_sharding_infos(
            module, table_name_to_parameter_sharding, prefix, given, suffix
        )
        return plan_dynamic("EmbeddingBagCollection", infos, plan)

    @classmethod
    def create_embedding_bag_sharding(
        cls,
        sharding_infos: list[EmbeddingShardingInfo],
        env: ShardingEnv,
        device: torch.device | None = None,
        permute_embeddings: bool = False,
        qcomm_codecs_registry: dict[str, Any] | None = None,
    ) -> EmbeddingSharding[Any, Any, Any, Any]:
        sharding = sharding_infos[0].param_sharding
        if not is_dynamic(sharding):
            return super().create_embedding_bag_sharding(
                sharding_infos, env, device, permute_embeddings, qcomm_codecs_registry
            )
        arguments: dict[str, Any] = {"qcomm_codecs_registry": qcomm_codecs_registry}
        by_columns = (ShardingType.COLUMN_WISE.value, ShardingType.TABLE_COLUMN_WISE.value)
        if sharding.sharding_type in by_columns:
            arguments["permute_embeddings"] = permute_embeddings
        return POOLED[sharding.sharding_type](sharding_infos, env, device, **arguments)

    def reset_parameters(self) -> None:
        """Initialises the static tables; rows of dynamic ones begin when their ids arrive."""
        configs = self._embedding_bag_configs
        _show_parameters(self.embedding_bags, configs, self.module_sharding_plan)
        self._embedding_bag_configs = _static(configs, self.module_sharding_plan)
        try:
            super().reset_parameters()
        finally:
            self._embedding_bag_configs = configs

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Sends ids to the ranks that own them."""
        features = maybe_td_to_kjt(features, None)
        if self._grids and features.variable_stride_per_key():
            raise NotImplementedError(
                f"EmbeddingBagCollection: tables {self._grids} are grid_shard, and features has a "
                "batch size per feature, which TorchRec does not reduce over a grid: choose "
                "another sharding type, or one batch size for all features"
            )
        configs, divides = self._embedding_bag_configs, self._has_mean_pooling_callback
        if self._has_uninitialized_input_dist:
            # TorchRec checks the first batch against num_embeddings, which bounds no dynamic table
            self._embedding_bag_configs = _static(configs, self.module_sharding_plan)
        self._has_mean_pooling_callback = False  # the divisor is made here
        try:
            sent = super().input_dist(ctx, features)
        finally:
            self._embedding_bag_configs, self._has_mean_pooling_callback = configs, divides
        if divides:
            with torch.no_grad():
                ctx.divisor = mean_divisor(
                    features,
                    [self._pooled_outputs[name] for name in self._embedding_names],
                    self._embedding_dims,
                    weighted=self._is_weighted,
                )
        return sent


class ShardedDynamicEmbeddingCollection(_Sharded, ShardedEmbeddingCollection):  # type: ignore[misc]
    """EmbeddingCollection whose plan makes some tables dynamic.

    Args:
        options, optimizer: as in :class:`ShardedDynamicEmbeddingBagCollection`.
        module, table_name_to_parameter_sharding, env, fused_params, device, ...: as in TorchRec.
    """

    _embedding_configs: list[Any]

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        options: Mapping[str, TableOptions],
        optimizer: Any,
        **more: Any,
    ) -> None:
        plan = ModulePlan(
            options_by_table(
                "EmbeddingCollection",
                [config.name for config in module.embedding_configs()],
                table_name_to_parameter_sharding,
                options,
                list(SEQUENCE),
            ),
            optimizer,
            shared_seed(env.process_group, device),
        )
        fused_params = {**(fused_params or {}), _PLAN: plan}
        super().__init__(
            module, table_name_to_parameter_sharding, env, fused_params, device, **more
        )

    @classmethod
    def create_grouped_sharding_infos(
        cls,
        module: Any,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        fused_params: dict[str, Any] | None,
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        given, plan = _planned(fused_params)
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
        sharding = sharding_infos[0].param_sharding
        if not is_dynamic(sharding):
            return super().create_embedding_sharding(
                sharding_type, sharding_infos, env, device, qcomm_codecs_registry
            )
        return SEQUENCE[sharding.sharding_type](
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
        )

    def reset_parameters(self) -> None:
        """Initialises the static tables; rows of dynamic ones begin when their ids arrive."""
        configs = self._embedding_configs
        _show_parameters(self.embeddings, configs, self.module_sharding_plan)
        self._embedding_configs = _static(configs, self.module_sharding_plan)
        try:
            super().reset_parameters()
        finally:
            self._embedding_configs = configs

    def _embedding_dim_for_sharding_type(self, sharding_type: str) -> int:
        dim: int = super()._embedding_dim_for_sharding_type(sharding_type.removeprefix("dynamic_"))
        return dim


def _static(configs: list[Any], plan: Mapping[str, ParameterSharding]) -> list[Any]:
    return [config for config in configs if not is_dynamic(plan[config.name])]


def _show_parameters(
    tables: torch.nn.ModuleDict, configs: list[Any], plan: Mapping[str, ParameterSharding]
) -> None:
    """Registers a parameter for the dynamic tables that have none because they lie elsewhere."""
    for config in configs:
        if is_dynamic(plan[config.name]) and not hasattr(tables[config.name], "weight"):
            shown = shown_parameter((config.embedding_dim,), torch.empty(0))
            tables[config.name].register_parameter("weight", shown)


__all__ = ["ShardedDynamicEmbeddingBagCollection", "ShardedDynamicEmbeddingCollection"]
