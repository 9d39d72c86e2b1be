"""Plans of modules and kernels: which tables are dynamic, and with which options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torchrec.distributed.embedding_sharding import EmbeddingShardingInfo
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingType

from torch_dynemb.distributed.seed import common_start
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.storage.tiers import Storage
from torch_dynemb.storage.tiers.sharing import part_of_storage
from torch_dynemb.table.group_config import check_stored_gradients
from torch_dynemb.torchrec.planning.choice import TableChoice
from torch_dynemb.torchrec.planning.fused_params import (
    optimizer_of,
    output_dtype_of,
    warn_of_prefetch,
)
from torch_dynemb.torchrec.planning.options import TableOptions, is_dynamic, planned_options
from torch_dynemb.torchrec.planning.plan_checks import (
    check_groups_synced,
    check_plan,
    check_ranks_agree,
    check_scores_from_weights,
    check_storage_device,
    check_where,
    check_written,
)

# Key of a KernelPlan in the fused_params of a table.
PLAN = "dynamic"


@dataclass(frozen=True)
class ModulePlace:
    """Location of a module: its path and this rank.

    Attributes:
        module: path of the module in the model; of a module that is sharded alone, its class.
        rank, ranks: of the process group.
    """

    module: str
    rank: int
    ranks: int


class KeptSharding(NamedTuple):
    """A sharding that stays while other tables of its collection move.

    Attributes:
        tables: names of its tables.
        sharding: TorchRec's sharding.
        lookup: its lookup on this rank.
    """

    tables: list[str]
    sharding: Any
    lookup: Any


class KeptInfos(list[EmbeddingShardingInfo]):
    """TorchRec's descriptions of the tables of a sharding that stays.

    Args:
        infos: the descriptions.
        sharding: the sharding.
    """

    def __init__(self, infos: Iterable[EmbeddingShardingInfo], sharding: Any) -> None:
        super().__init__(infos)
        self.sharding = sharding


@dataclass(frozen=True)
class ModulePlan:
    """Settings from a sharder for the dynamic tables of a module.

    Attributes:
        options: by table name.
        optimizer: of all dynamic tables; None: that of their parameter, or of fused_params.
        seed: of initial values, equal on all ranks.
        now: start time in seconds, equal on all ranks.
        dedup: send each distinct id of a batch once.
        place: of the module.
        optimizers: of the dynamic tables by name, set by planning.
        output_dtypes: of the outputs of these tables.
        trained: ``requires_grad`` of the weights of these tables.
        tables: names of all tables by sharding, set by planning.
        kept: shardings of a former plan that stay as they are.
    """

    options: Mapping[str, TableOptions]
    optimizer: OptimizerConfig | None
    seed: int
    now: int
    dedup: bool
    place: ModulePlace
    optimizers: dict[str, OptimizerConfig] = field(default_factory=dict)
    output_dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    trained: dict[str, bool] = field(default_factory=dict)
    tables: dict[str, list[str]] = field(default_factory=dict)
    kept: Sequence[KeptSharding] = ()

    def replanned(self, kept: Sequence[KeptSharding]) -> ModulePlan:
        """Return the plan of the same tables with other shards.

        Args:
            kept: shardings that stay as they are.
        """
        return replace(self, optimizers={}, output_dtypes={}, trained={}, tables={}, kept=kept)


@dataclass(frozen=True, eq=False)
class KernelPlan:
    """Settings that a kernel needs of a dynamic table beyond TorchRec's configs.

    TorchRec puts tables with equal fused_params into one kernel. Plans are equal if their storage
    and the source and dtype of their scores are equal. So tables with otherwise different options
    share a group: it has one store, and its lookups bring scores for all tables or for none.
    """

    options: TableOptions
    seed: int
    now: int
    dedup: bool
    place: ModulePlace
    trained: bool

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KernelPlan) and self._shared == other._shared

    @property
    def _shared(self) -> tuple[object, ...]:
        """What all tables of a kernel have in common."""
        options = self.options
        return options.storage, options.score_from, options.adds_weights_to_decayed_sums

    def __hash__(self) -> int:
        return hash(KernelPlan)

    def storage_of(self, tables: Sequence[str]) -> Storage | None:
        """Return the storage of a kernel.

        Args:
            tables: names of the kernel's tables.
        """
        storage, place = self.options.storage, self.place
        if storage is None:
            return None
        return part_of_storage(storage, place.module, tables, rank=place.rank, ranks=place.ranks)


def options_by_table(
    owner: str,
    tables: Sequence[str],
    shardings: Mapping[str, ParameterSharding],
    given: Mapping[str, TableOptions],
    sharding_types: Sequence[str],
) -> dict[str, TableOptions]:
    """Return the options of the dynamic tables, from the plan or from the sharder.

    Raises:
        ValueError: a table has options but is static in the plan, or is dynamic without options, or
            its sharding type does not support dynamic tables.
    """
    unplanned = [name for name in given if name in tables and not is_dynamic(shardings[name])]
    if unplanned:
        raise ValueError(
            f"{owner}: the sharder's tables or options name {unplanned}, which the plan makes "
            "static: plan with DynamicEmbeddingShardingPlanner and tables= of the sharder, or give "
            "them compute_kernel='customized_kernel' in a plan of your own, and give the plan to "
            "DistributedModelParallel"
        )
    options = {}
    for name in tables:
        sharding = shardings[name]
        if not is_dynamic(sharding):
            continue
        if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
            raise ValueError(
                f"{owner}: table {name!r} is dynamic and data_parallel, which would give every "
                f"rank its own diverging copy: choose one of {list(sharding_types)}, or leave the "
                "table static"
            )
        if sharding.sharding_type not in sharding_types:
            raise ValueError(
                f"{owner}: table {name!r} has sharding_type {sharding.sharding_type!r}, expected "
                f"one of {list(sharding_types)}"
            )
        planned = planned_options(sharding)
        if planned is not None and name in given:
            raise ValueError(
                f"{owner}: table {name!r} has options in the plan and in the sharder's options: "
                "give them once"
            )
        if planned is None and name not in given:
            raise ValueError(
                f"{owner}: the plan makes table {name!r} dynamic, but has no options: give "
                f"options=TableOptions(...) or options={{{name!r}: TableOptions(...)}} to the "
                "sharder"
            )
        options[name] = given[name] if planned is None else planned
    return options


def module_plan(
    owner: str,
    module: Any,
    configs: list[Any],
    shardings: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None,
    *,
    sharding_types: list[str],
    choice: TableChoice,
    optimizer: OptimizerConfig | None,
    fused_params: dict[str, Any] | None,
    use_index_dedup: bool,
    codecs: Mapping[str, Any] | None,
    path: str | None,
) -> ModulePlan:
    """Check what a sharder was given and return the plan of a module's dynamic tables.

    Raises:
        RuntimeError: the process group is missing.
        ValueError: the device has no memory, the plan is for other tables, ranks were given
            different arguments, or a table's sharding or storage is not supported.
        TypeError: a function of the sharder has returned something else.
    """
    check_where(owner, env, device)
    is_weighted: bool = getattr(module, "is_weighted", lambda: False)()
    options = ranks_of(env.process_group).run(lambda: choice.of_module(configs, shardings))
    check_ranks_agree(
        owner,
        module,
        configs,
        shardings,
        env,
        device,
        options=options,
        optimizer=optimizer,
        fused_params=fused_params,
        flags={
            "is_weighted": is_weighted,
            "use_index_dedup": use_index_dedup,
            "qcomm_codecs_registry": sorted(codecs or {}),
        },
    )
    names = [config.name for config in configs]
    check_plan(owner, names, shardings)
    check_written(owner, configs, shardings, env)
    check_groups_synced(owner, env, shardings)
    pooled_after = use_index_dedup and owner == "EmbeddingBagCollection"
    of_tables = options_by_table(
        f"{owner} with use_index_dedup" if pooled_after else owner,
        names,
        shardings,
        options,
        sharding_types,
    )
    check_storage_device(owner, of_tables, device)
    check_scores_from_weights(
        owner,
        of_tables,
        shardings,
        is_weighted=is_weighted,
        use_index_dedup=use_index_dedup,
    )
    return ModulePlan(
        of_tables,
        optimizer,
        *common_start(
            env.process_group, own_seed=torch.initial_seed() & ((1 << 63) - 1), device=device
        ),
        use_index_dedup,
        ModulePlace(path or owner, env.process_group.rank(), env.process_group.size()),
    )


def plan_dynamic(
    owner: str,
    infos: dict[str, list[EmbeddingShardingInfo]],
    plan: ModulePlan,
    *,
    by_dim: bool = False,
) -> dict[str, list[EmbeddingShardingInfo]]:
    """Separate dynamic from static tables in shardings, and store plans in their fused_params.

    A sharding type with both kinds of tables becomes two shardings. With ``by_dim`` there is one
    for each dim of the dynamic tables.
    """
    separated: dict[str, list[EmbeddingShardingInfo]] = {}
    for sharding_type, of_type in infos.items():
        static = [info for info in of_type if not is_dynamic(info.param_sharding)]
        dynamic = [info for info in of_type if is_dynamic(info.param_sharding)]
        if static:
            separated[sharding_type] = static
        dims = sorted({info.embedding_config.embedding_dim for info in dynamic if by_dim})
        for dim in dims:
            separated[f"dynamic_{sharding_type}_{dim}"] = [
                info for info in dynamic if info.embedding_config.embedding_dim == dim
            ]
        if dynamic and not by_dim:
            separated[f"dynamic_{sharding_type}" if static else sharding_type] = dynamic
        for info in dynamic:
            info.fused_params = _planned_params(owner, info, plan)
    for key, of_sharding in separated.items():
        plan.tables[key] = [info.embedding_config.name for info in of_sharding]
        for kept in plan.kept:
            if plan.tables[key] == kept.tables:
                separated[key] = KeptInfos(of_sharding, kept.sharding)
    return separated


def _planned_params(owner: str, info: EmbeddingShardingInfo, plan: ModulePlan) -> dict[str, Any]:
    name = info.embedding_config.name
    given = info.fused_params or {}
    of_table = f"{owner}: table {name!r}"
    own = any(kind is not None for kind in getattr(info.param, "_optimizer_classes", []))
    if plan.optimizer is not None and not own:
        optimizer = plan.optimizer
    else:
        optimizer = optimizer_of(of_table, given)
    optimizer = plan.options[name].optimizer_of(optimizer)
    check_stored_gradients(of_table, plan.options[name].storage, optimizer)
    if plan.options[name].storage is None:
        warn_of_prefetch(of_table, given)
    plan.optimizers[name] = optimizer
    plan.output_dtypes[name] = output_dtype_of(of_table, given)
    plan.trained[name] = info.param.requires_grad
    return {
        "optimizer_config": optimizer,
        "output_dtype": plan.output_dtypes[name],
        "split": plan.options[name].split,
        PLAN: KernelPlan(
            plan.options[name], plan.seed, plan.now, plan.dedup, plan.place, plan.trained[name]
        ),
    }


__all__ = [
    "PLAN",
    "KeptInfos",
    "KeptSharding",
    "KernelPlan",
    "ModulePlace",
    "ModulePlan",
    "module_plan",
    "plan_dynamic",
]
