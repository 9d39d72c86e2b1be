"""Checks of a sharder's arguments before a module is sharded: on each rank, and across ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    ParameterSharding,
    ShardingEnv,
    ShardingEnv2D,
    ShardingStrategy,
    ShardingType,
)

from torch_dynemb.distributed.agreement import (
    Described,
    Option,
    check_agreement,
    comparable,
    options_of,
)
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.storage.tiers import needs_device_cache
from torch_dynemb.torchrec.planning.options import TableOptions, is_dynamic, planned_options
from torch_dynemb.torchrec.planning.sharding_groups import SyncedEnv2D, sharding_group

_KERNELS = [kernel.value for kernel in EmbeddingComputeKernel]
_CONFIG = (
    "embedding_dim",
    "num_embeddings",
    "data_type",
    "feature_names",
    "pooling",
    "weight_init_min",
    "weight_init_max",
)
_SHARDING = ("sharding_type", "compute_kernel")
_IN_BACKWARD = ("_optimizer_classes", "_optimizer_kwargs")  # of apply_optimizer_in_backward
_PLACES = ("ranks", "sharding_spec")  # which sharding groups have each for itself


def check_where(owner: str, env: ShardingEnv | None, device: torch.device | None) -> None:
    """Check that a module can be sharded in an environment and on a device.

    Raises:
        RuntimeError: the process group is missing.
        ValueError: the device has no memory.
    """
    if env is None or env.process_group is None:
        raise RuntimeError(
            f"{owner}: env is {'None' if env is None else 'without a process group'}: call "
            "torch.distributed.init_process_group, also for one rank, and give "
            "ShardingEnv.from_process_group(torch.distributed.group.WORLD), or leave env of "
            "DistributedModelParallel out"
        )
    if device is not None and torch.device(device).type == "meta":
        raise ValueError(
            f"{owner}: device is 'meta', which has no memory for rows: the module may be on meta, "
            "but give DistributedModelParallel device=torch.device('cpu') or a CUDA device"
        )


def check_storage_device(
    owner: str, options: Mapping[str, TableOptions], device: torch.device | None
) -> None:
    """Check that tables with a store of rows have a cache on their device.

    Args:
        owner: the collection.
        options: by table.
        device: of the rows.

    Raises:
        ValueError: a table with a store is on a GPU, and its storage has no ``device_cache``.
    """
    if device is None or torch.device(device).type == "cpu":
        return
    for name, of_table in options.items():
        if needs_device_cache(of_table.storage):
            raise ValueError(
                f"{owner}: table {name!r} has storage {of_table.storage}, but the device is "
                f"{device}, which needs a cache of its own above a store: give device_cache=, or "
                "DistributedModelParallel device=torch.device('cpu')"
            )


def check_scores_from_weights(
    owner: str,
    options: Mapping[str, TableOptions],
    shardings: Mapping[str, ParameterSharding],
    *,
    is_weighted: bool,
    use_index_dedup: bool,
) -> None:
    """Check that weights of features can be scores of the tables that ask for it.

    Args:
        owner: the collection.
        options: of its dynamic tables.
        shardings: of all its tables.
        is_weighted: whether weights are those of bags, too.
        use_index_dedup: whether each distinct id is sent once.

    Raises:
        NotImplementedError: deduplication, which sends no weights, or static tables, the bags of
            which TorchRec would weight.
    """
    scored = [name for name, of_table in options.items() if of_table.score_from == "weights"]
    if scored and use_index_dedup:
        raise NotImplementedError(
            f"{owner}: tables {scored} have score_from='weights', but use_index_dedup sends each "
            "distinct id once, without its weights: leave use_index_dedup or score_from out"
        )
    static = [name for name, sharding in shardings.items() if not is_dynamic(sharding)]
    if scored and static and not is_weighted and owner == "EmbeddingBagCollection":
        raise NotImplementedError(
            f"{owner}: tables {scored} have score_from='weights', but tables {static} are static, "
            "and TorchRec would weight their bags: make them dynamic, or give them a collection of "
            "their own"
        )


def check_written(
    owner: str, configs: Sequence[Any], shardings: Mapping[str, ParameterSharding], env: ShardingEnv
) -> None:
    """Raise NotImplementedError if DistributedModelParallel.write cannot write a dynamic table."""
    written = [
        config.name for config in configs if getattr(config, "enable_embedding_update", False)
    ]
    dynamic = [name for name in written if is_dynamic(shardings[name])]
    static = [name for name in written if name not in dynamic]
    if dynamic and owner != "EmbeddingCollection":
        raise NotImplementedError(
            f"{owner}: tables {dynamic} have enable_embedding_update, but "
            "DistributedModelParallel.write writes those of an EmbeddingCollection only: leave "
            "enable_embedding_update out, and write rows of ids by torch_dynemb.migrate.load or "
            "torch_dynemb.insert_new"
        )
    if dynamic and static:
        raise NotImplementedError(
            f"{owner}: tables {written} have enable_embedding_update, but {static} are static: "
            "give these a collection of their own"
        )
    if dynamic and isinstance(env, ShardingEnv2D):
        raise NotImplementedError(
            f"{owner}: tables {dynamic} have enable_embedding_update, but each sharding group of a "
            "DynamicDMPCollection would write its own rows: leave enable_embedding_update out, or "
            "use DistributedModelParallel"
        )


def check_groups_synced(
    owner: str, env: ShardingEnv, shardings: Mapping[str, ParameterSharding]
) -> None:
    """Check that sharding groups keep dynamic tables equal.

    Raises:
        ValueError: the groups of TorchRec's DMPCollection would train diverging copies.
        NotImplementedError: the strategy keeps a part of the weights on each group.
    """
    dynamic = [name for name, sharding in shardings.items() if is_dynamic(sharding)]
    if not dynamic or not isinstance(env, ShardingEnv2D):
        return
    if not isinstance(env, SyncedEnv2D):
        raise ValueError(
            f"{owner}: env is a {type(env).__name__}, but tables {dynamic} are dynamic, and each "
            "group of ranks would train its own diverging copy: construct "
            "torch_dynemb.torchrec.DynamicDMPCollection, without submodule_configs for their "
            "module, or make the tables static"
        )
    if env.sharding_strategy == ShardingStrategy.FULLY_SHARDED:
        raise NotImplementedError(
            f"{owner}: sharding_strategy is FULLY_SHARDED, which divides weights among sharding "
            f"groups, but tables {dynamic} are dynamic: give ShardingStrategy.DEFAULT or "
            "PER_MODULE, or make the tables static"
        )


def check_plan(
    owner: str, tables: Sequence[str], shardings: Mapping[str, ParameterSharding]
) -> None:
    """Raise ValueError unless a plan has a known kernel for every table."""
    missing = [name for name in tables if name not in shardings]
    if missing:
        raise ValueError(
            f"{owner}: the plan lacks tables {missing}, it has {list(shardings)}: plan all tables "
            f"of the module, which are {list(tables)}"
        )
    unknown = [name for name in shardings if name not in tables]
    if unknown:
        raise ValueError(
            f"{owner}: the plan has tables {unknown}, but those of the module are {list(tables)}: "
            "correct or remove these names"
        )
    for name in tables:
        sharding = shardings[name]
        kernel = sharding.compute_kernel
        if kernel not in _KERNELS:
            raise ValueError(
                f"{owner}: the plan has compute_kernel {kernel!r} for table {name!r}, expected "
                f"'customized_kernel' for a dynamic table, else one of {_KERNELS}"
            )
        if is_dynamic(sharding) and sharding.sharding_spec is None and not _replicated(sharding):
            raise ValueError(
                f"{owner}: the plan has no sharding_spec for table {name!r}: make it by a planner, "
                "or by construct_module_sharding_plan of torchrec.distributed.sharding_plan"
            )


def _replicated(sharding: ParameterSharding) -> bool:
    return bool(sharding.sharding_type == ShardingType.DATA_PARALLEL.value)


def check_ranks_agree(
    owner: str,
    module: nn.Module,
    configs: Sequence[Any],
    shardings: Mapping[str, ParameterSharding],
    env: ShardingEnv,
    device: torch.device | None,
    *,
    options: Mapping[str, TableOptions],
    optimizer: OptimizerConfig | None,
    fused_params: Mapping[str, Any] | None,
    flags: Mapping[str, object],
) -> None:
    """Raise ValueError on all ranks unless their tables, plans, options and optimizers are equal.

    Call it before checks of one rank: a rank that raised alone would leave the others waiting.
    """
    alike: Described = {Option("", name): comparable(value) for name, value in flags.items()}
    alike[Option("", "tables")] = comparable([config.name for config in configs])
    places: Described = {}
    weights = {name.split(".")[-2]: of for name, of in module.named_parameters()}
    for config in configs:
        table = config.name
        for name in _CONFIG:
            alike[Option(table, name)] = comparable(getattr(config, name, None))
        sharding = shardings.get(table)
        for name in _SHARDING:
            alike[Option(table, name)] = comparable(getattr(sharding, name, None))
        for name in _PLACES:
            places[Option(table, name)] = comparable(getattr(sharding, name, None))
        planned = None if sharding is None else planned_options(sharding)
        given = {"planned options": planned, "options": options.get(table)}
        for prefix, of_table in given.items():
            alike |= options_of(table, prefix, of_table)
            if of_table is not None:
                alike |= options_of(table, f"{prefix}.policy", of_table.policy)
                del alike[Option(table, f"{prefix}.policy")]
        alike |= options_of(table, "optimizer", optimizer)
        alike |= options_of(table, "fused_params", fused_params or {})
        weight = weights.get(table)
        in_backward = [getattr(weight, name, None) for name in _IN_BACKWARD]
        alike[Option(table, "optimizer in backward")] = comparable(in_backward)
        alike[Option(table, "requires_grad")] = comparable(getattr(weight, "requires_grad", None))
    # nccl sends objects from the current device, which may differ from that of the tables
    on_gpu = device is not None and torch.device(device).type == "cuda"
    with torch.cuda.device(device) if on_gpu else nullcontext():
        if sharding_group(env) is env.process_group:
            alike |= places
        else:
            ranks_of(env.process_group).run(
                lambda: check_agreement(owner, places, sharding_group(env))
            )
        check_agreement(owner, alike, env.process_group)


__all__ = [
    "check_groups_synced",
    "check_plan",
    "check_ranks_agree",
    "check_scores_from_weights",
    "check_storage_device",
    "check_where",
    "check_written",
]
