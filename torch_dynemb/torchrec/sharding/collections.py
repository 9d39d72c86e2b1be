"""Sharded collections with dynamic and static tables in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embedding_sharding import EmbeddingSharding, EmbeddingShardingInfo
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.optim.clipping import SharedRows
from torch_dynemb.optim.fused import FusedOptimizer
from torch_dynemb.torchrec.planning.options import TableOptions, is_dynamic
from torch_dynemb.torchrec.planning.plans import ModulePlan, module_plan, plan_dynamic
from torch_dynemb.torchrec.sharding.batches import BatchCheck
from torch_dynemb.torchrec.sharding.dedup import (
    DEDUPED,
    DedupGroups,
    DedupInputDist,
    counts_occurrences,
    dedup_groups,
    distinct,
)
from torch_dynemb.torchrec.sharding.kernels import DynamicKernel
from torch_dynemb.torchrec.sharding.means import mean_divisor, pooled_outputs
from torch_dynemb.torchrec.sharding.optimizer import shown_parameter
from torch_dynemb.torchrec.sharding.shardings import POOLED, SEQUENCE, copied
from torch_dynemb.torchrec.sharding.tables import PLAN, TablePlan
from torch_dynemb.torchrec.state.module_state import ModuleState

_PLAN = "torch_dynemb_plan"  # how a plan travels through TorchRec's constructors


def _planned(fused_params: dict[str, Any] | None) -> tuple[dict[str, Any], ModulePlan]:
    given = dict(fused_params or {})
    plan: ModulePlan = given.pop(_PLAN)
    return given, plan


class _Sharded:
    """The part of a sharded collection that knows its dynamic tables."""

    _lookups: list[torch.nn.Module]
    module_sharding_plan: Mapping[str, ParameterSharding]
    _keeps_state = False
    _strict_load = True
    _env: ShardingEnv
    _device: torch.device
    _has_uninitialized_input_dist: bool
    _reorders: Callable[[], bool]  # whether batches have features in another order

    def _keep_state(
        self,
        configs: list[Any],
        plan: ModulePlan,
        env: ShardingEnv,
        device: torch.device | None,
        prefix: str,
    ) -> None:
        """Has state_dict and load_state_dict take care of the dynamic tables."""
        tables = getattr(self, prefix)
        dynamic = [c for c in configs if is_dynamic(self.module_sharding_plan[c.name])]
        state = ModuleState(
            dynamic,
            plan,
            self.module_sharding_plan,
            list(self.kernels()),
            prefix=f"{prefix}.",
            parameters={config.name: tables[config.name].weight for config in dynamic},
            process_group=env.process_group,
            device=torch.device("cpu") if device is None else device,
        )

        def save(module: Any, destination: dict[str, Any], start: str, _: Any) -> None:
            if env.output_dtensor:
                raise NotImplementedError(
                    "state_dict: dynamic tables are saved as ShardedTensor, not as DTensor: leave "
                    "output_dtensor of the ShardingEnv False"
                )
            for name, entry in state.entries().items():
                destination[start + name] = entry

        def load(
            state_dict: dict[str, Any],
            start: str,
            metadata: Any,
            strict: bool,
            missing: list[str],
            unexpected: list[str],
            errors: list[str],
        ) -> None:
            # torch tells hooks True whatever its caller has said
            state.load(state_dict, start, self._strict_load, missing, unexpected, errors)

        self._keeps_state = True
        self._register_state_dict_hook(save)  # type: ignore[attr-defined]
        self._register_load_state_dict_pre_hook(load)  # type: ignore[attr-defined]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, **more: Any
    ) -> Any:
        """Replaces rows, state and scores; all ranks call it together.

        The state of a sharded collection in any sharding. With ``strict=False``, also one without
        state of the optimizer, which begins anew then, or without scores or counts; or ``weight``
        of a static collection alone, whose rows are those of ids 0, 1, ... What was missing is
        listed, as torch does, and with ``strict=True`` raised before any row is replaced.
        """
        if not self._keeps_state:
            # TorchRec's constructor copies the weights of the module that it shards: not as rows
            own = self.state_dict()  # type: ignore[attr-defined]
            dynamic = {
                f"{name}.weight"
                for name, sharding in self.module_sharding_plan.items()
                if is_dynamic(sharding)
            }
            state_dict = {
                key: own[key] if any(key.endswith(f".{name}") for name in dynamic) else value
                for key, value in state_dict.items()
            }
        self._strict_load = strict
        try:
            return super().load_state_dict(state_dict, strict, **more)  # type: ignore[misc]
        finally:
            self._strict_load = True

    def _own(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Features whose memory no other module of a pipeline gives back.

        With ``free_features_storage_early``, TorchRec's pipelines free that of a batch as soon as
        one module has put its features into another order, which copies them. A module that takes
        them as they come would go on reading them.
        """
        if not getattr(self, "_free_features_storage_early", False):
            return features
        if self._has_uninitialized_input_dist or not self._reorders():
            return copied(features)
        return features

    def kernels(self) -> Iterator[DynamicKernel]:
        """The kernels of dynamic tables on this rank."""
        for lookup in self._lookups:
            for module in lookup.modules():
                if isinstance(module, DynamicKernel):
                    yield module

    def row_optimizers(self) -> list[FusedOptimizer]:
        """Those of the rows on this rank, by kernel."""
        return [kernel.tables.optimizer for kernel in self.kernels()]

    @property
    def shared_rows(self) -> SharedRows | None:
        """The ranks whose gradients have one norm; see :func:`torch_dynemb.clip_grad_norm_`."""
        group = self._env.process_group
        if group is None or group.size() == 1:
            return None
        return SharedRows(group, self._device)

    def update_shards(self, changed_sharding_params: Any, *arguments: Any, **more: Any) -> None:
        """As TorchRec's, for static tables.

        Raises:
            NotImplementedError: a dynamic table is to move.
        """
        plan = self.module_sharding_plan
        dynamic = [name for name in changed_sharding_params if is_dynamic(plan[name])]
        if dynamic:
            raise NotImplementedError(
                f"update_shards: tables {dynamic} are dynamic, whose shards do not move in a live "
                "model: save its state_dict and load it into one with another plan"
            )
        super().update_shards(changed_sharding_params, *arguments, **more)  # type: ignore[misc]

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
        use_index_dedup: send every id of a batch once.
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
        optimizer: OptimizerConfig | None,
        use_index_dedup: bool,
        **more: Any,
    ) -> None:
        plan = module_plan(
            "EmbeddingBagCollection",
            module,
            module.embedding_bag_configs(),
            table_name_to_parameter_sharding,
            env,
            device,
            sharding_types=list(DEDUPED if use_index_dedup else POOLED),
            options=options,
            optimizer=optimizer,
            fused_params=fused_params,
            use_index_dedup=use_index_dedup,
            codecs=more.get("qcomm_codecs_registry"),
        )
        fused_params = {**(fused_params or {}), _PLAN: plan}
        super().__init__(
            module, table_name_to_parameter_sharding, env, fused_params, device, **more
        )
        self._pooled_outputs = pooled_outputs(
            self._embedding_bag_configs, self.module_sharding_plan, plan
        )
        self._grids = [
            name
            for name, sharding in self.module_sharding_plan.items()
            if sharding.sharding_type == ShardingType.GRID_SHARD.value
        ]
        self._has_mean_pooling_callback = any(of.divided for of in self._pooled_outputs.values())
        self._check_batch = BatchCheck(
            "EmbeddingBagCollection",
            [name for config in self._embedding_bag_configs for name in config.feature_names],
            weighted=self._is_weighted,
        )
        self._keep_state(self._embedding_bag_configs, plan, env, device, "embedding_bags")

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
        return plan_dynamic("EmbeddingBagCollection", infos, plan, by_dim=plan.dedup)

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
        plans = _plans(sharding_infos)
        if any(plan.dedup for plan in plans.values()):
            options = {name: plan.options for name, plan in plans.items()}
            deduped = DEDUPED[sharding.sharding_type]
            return deduped(sharding_infos, env, device, options=options, **arguments)
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

    def _reorders(self) -> bool:
        return bool(self._has_features_permute)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Sends ids to the ranks that own them."""
        features = self._own(self._check_batch(features, first=self._has_uninitialized_input_dist))
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
        for i, dist in enumerate(self._input_dists):
            if isinstance(dist, DedupInputDist):
                ctx.sharding_contexts[i] = dist.take_context()
        return sent


class ShardedDynamicEmbeddingCollection(_Sharded, ShardedEmbeddingCollection):  # type: ignore[misc]
    """EmbeddingCollection whose plan makes some tables dynamic.

    Args:
        options, optimizer, use_index_dedup: as in :class:`ShardedDynamicEmbeddingBagCollection`.
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
        optimizer: OptimizerConfig | None,
        use_index_dedup: bool,
        **more: Any,
    ) -> None:
        plan = module_plan(
            "EmbeddingCollection",
            module,
            module.embedding_configs(),
            table_name_to_parameter_sharding,
            env,
            device,
            sharding_types=list(SEQUENCE),
            options=options,
            optimizer=optimizer,
            fused_params=fused_params,
            use_index_dedup=use_index_dedup,
            codecs=more.get("qcomm_codecs_registry"),
        )
        self._dynamic_options = plan.options
        self._dedup_groups: list[DedupGroups] = []
        fused_params = {**(fused_params or {}), _PLAN: plan}
        super().__init__(
            module,
            table_name_to_parameter_sharding,
            env,
            fused_params,
            device,
            use_index_dedup=use_index_dedup,
            **more,
        )
        self._check_batch = BatchCheck(
            "EmbeddingCollection",
            [name for config in self._embedding_configs for name in config.feature_names],
            weighted=False,
        )
        self._keep_state(self._embedding_configs, plan, env, device, "embeddings")

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
        created = SEQUENCE[sharding.sharding_type](
            sharding_infos, env, device, qcomm_codecs_registry=qcomm_codecs_registry
        )
        created.counted = any(
            plan.dedup and counts_occurrences(plan.options)
            for plan in _plans(sharding_infos).values()
        )
        return created

    def reset_parameters(self) -> None:
        """Initialises the static tables; rows of dynamic ones begin when their ids arrive."""
        configs = self._embedding_configs
        _show_parameters(self.embeddings, configs, self.module_sharding_plan)
        self._embedding_configs = _static(configs, self.module_sharding_plan)
        try:
            super().reset_parameters()
        finally:
            self._embedding_configs = configs

    def _reorders(self) -> bool:
        return bool(self._features_order)

    def input_dist(self, ctx: Any, features: Any) -> Any:
        """Sends ids to the ranks that own them."""
        features = self._own(self._check_batch(features, first=self._has_uninitialized_input_dist))
        if not features.variable_stride_per_key() and features.stride() == 0:
            # TorchRec's outputs want a sample, and the other ranks a backward of this one
            features = with_one_sample(features)
            ctx.without_samples = True
        return super().input_dist(ctx, features)

    def output_dist(self, ctx: Any, output: Any) -> Any:
        """Sends rows back."""
        return _cut_sample(ctx, super().output_dist(ctx, output))

    def compute_and_output_dist(self, ctx: Any, input: Any) -> Any:
        """Looks up what has come here and sends it back."""
        return _cut_sample(ctx, super().compute_and_output_dist(ctx, input))

    def _create_hash_size_info(self, feature_names: list[str], ctx: Any = None) -> None:
        """What dedup must know of the shardings; TorchRec's works on GPUs and ids below 2^31."""
        self._dedup_groups = [
            dedup_groups(sharding, self._dynamic_options)
            for sharding in self._sharding_type_to_sharding.values()
        ]

    def _dedup_indices(self, ctx: Any, input_feature_splits: list[Any]) -> list[Any]:
        sent = []
        for features, groups in zip(input_feature_splits, self._dedup_groups, strict=True):
            unique = distinct(features, groups)
            ctx.input_features.append(features)
            ctx.reverse_indices.append(unique.inverse)
            sent.append(unique.features)
        return sent

    def _embedding_dim_for_sharding_type(self, sharding_type: str) -> int:
        dim: int = super()._embedding_dim_for_sharding_type(sharding_type.removeprefix("dynamic_"))
        return dim


def with_one_sample(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """A batch without samples as one of an empty sample."""
    keys = features.keys()
    lengths = torch.zeros(len(keys), dtype=torch.int64, device=features.device())
    return KeyedJaggedTensor(keys=keys, values=features.values(), lengths=lengths, stride=1)


def _cut_sample(ctx: Any, awaitable: Any) -> Any:
    """Takes the sample out again that :func:`with_one_sample` has put in."""
    if getattr(ctx, "without_samples", False):
        awaitable.callbacks.append(
            lambda outputs: {
                name: JaggedTensor(
                    values=jagged.values(),
                    lengths=jagged.lengths()[:0],
                    weights=jagged.weights_or_none(),
                )
                for name, jagged in outputs.items()
            }
        )
    return awaitable


def _plans(infos: list[EmbeddingShardingInfo]) -> dict[str, TablePlan]:
    return {info.embedding_config.name: info.fused_params[PLAN] for info in infos}


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
