"""Read-only copies of sharded models."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from torch_dynemb.initializers import Uniform
from torch_dynemb.parts.table_parts import TablePart, parts_in
from torch_dynemb.serving import Choices
from torch_dynemb.serving.freeze import frozen_by
from torch_dynemb.serving.gathering import gathered
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.group import TableGroup
from torch_dynemb.torchrec.collections.dynamic_part import DynamicPart
from torch_dynemb.torchrec.frozen.modules import (
    FrozenEmbeddingBagCollection,
    FrozenEmbeddingCollection,
)
from torch_dynemb.torchrec.frozen.static_weights import static_weights
from torch_dynemb.torchrec.planning.options import TableOptions
from torch_dynemb.torchrec.planning.sharding_groups import sharding_group
from torch_dynemb.torchrec.sharding.tables import row_dtype_of


def frozen_model(source: DistributedModelParallel, choices: Choices) -> nn.Module | None:
    return frozen_by(choices, source.module)


def frozen_processed(
    source: ShardedFeatureProcessedEmbeddingBagCollection, choices: Choices
) -> nn.Module | None:
    """Return the unsharded copy of a feature-processed collection; None on a rank without one."""
    bags = frozen_by(choices, source._embedding_bag_collection)
    if bags is None:
        return None
    processors = copy.deepcopy(source._feature_processors)
    for part in processors.modules():
        if hasattr(part, "_pre_processed"):  # by-rows shardings give positions as weights
            part._pre_processed = False
    if isinstance(processors, nn.ModuleDict):
        processors = dict(processors.items())
    collection: nn.Module = FeatureProcessedEmbeddingBagCollection(bags, processors)
    return collection


def frozen_unknown(source: ShardedModule, choices: Choices) -> nn.Module:
    raise TypeError(
        f"freeze: {type(source).__name__} is not a sharded module that freeze() knows, which are "
        "those of EmbeddingBagCollection, EmbeddingCollection and "
        "FeatureProcessedEmbeddingBagCollection: freeze the model's other "
        "parts, or register a function that copies it with "
        "torch_dynemb.register_module(..., frozen=)"
    )


def frozen_collection(source: Any, choices: Choices) -> nn.Module | None:
    """Return the unsharded copy of a sharded collection; None on a rank that gets none.

    Args:
        source: the collection, with or without dynamic tables.
        choices: of :func:`torch_dynemb.freeze`.

    Raises:
        ValueError: ``ranks`` is ``"own"``, and this rank has only some columns of a dynamic table,
            or not all of a static one.
        HostMemoryError: the rows do not fit in memory.
    """
    pooled = isinstance(source, ShardedEmbeddingBagCollection)
    configs = source._embedding_bag_configs if pooled else source._embedding_configs
    device = torch.device("cpu") if source._device is None else source._device
    process_group: dist.ProcessGroup | None = sharding_group(source._env)
    if process_group is not None and process_group.size() == 1:
        process_group = None
    plan = source.plan_of_tables if isinstance(source, DynamicPart) else None
    options = {} if plan is None else plan.options
    group: TableGroup | None = None
    names = [config.name for config in configs if config.name in options]
    if plan is not None and names:
        parts: list[TablePart] = list(parts_in(source, ""))
        group = gathered(
            "freeze",
            parts,
            [_whole(config, options[config.name]) for config in configs if config.name in options],
            names=names,
            seed=plan.seed,
            device=device,
            process_group=process_group,
            choices=choices,
        )
    static = [config for config in configs if config.name not in options]
    weights = static_weights(
        source,
        [config.name for config in static],
        prefix="embedding_bags" if pooled else "embeddings",
        process_group=process_group,
        ranks=choices.ranks,
        device=device,
    )
    if weights is None:
        return None
    others = _static_collection(source, static, weights, pooled=pooled) if static else None
    if plan is None or group is None:
        return others
    output_dtype = plan.output_dtypes[names[0]]
    names_of_outputs = _names_of_outputs(source, pooled=pooled)
    if pooled:
        return FrozenEmbeddingBagCollection(
            configs,
            group,
            others,
            names=names_of_outputs,
            is_weighted=source._is_weighted,
            output_dtype=output_dtype,
        )
    return FrozenEmbeddingCollection(
        configs,
        group,
        others,
        names=names_of_outputs,
        need_indices=source._need_indices,
        output_dtype=output_dtype,
    )


def _names_of_outputs(source: Any, *, pooled: bool) -> list[str]:
    """Return the output names of a sharded collection, in their order."""
    moved: list[str] | None = getattr(source, "_output_order", None)
    if moved is not None:
        return moved
    if pooled:
        return list(source._embedding_names)
    shardings = source._sharding_type_to_sharding.values()
    return list(dict.fromkeys(name for of in shardings for name in of.embedding_names()))


def _whole(config: Any, options: TableOptions) -> TableConfig:
    """Return the config of an unsharded table with these options, without its policy."""
    initializer = options.initializer
    if initializer is None:
        initializer = Uniform(config.get_weight_init_min(), config.get_weight_init_max())
    return TableConfig(
        name=config.name,
        embedding_dim=config.embedding_dim,
        feature_names=config.feature_names,
        initializer=initializer,
        padding_idx=options.padding_idx,
        eval_default=options.eval_default,
        dtype=row_dtype_of(config.name, config.data_type),
    )


def _static_collection(
    source: Any, configs: list[Any], weights: dict[str, Tensor], *, pooled: bool
) -> EmbeddingBagCollection | EmbeddingCollection:
    meta = torch.device("meta")
    if pooled:
        made = EmbeddingBagCollection(configs, is_weighted=source._is_weighted, device=meta)
    else:
        made = EmbeddingCollection(configs, device=meta, need_indices=source._need_indices)
    tables = made.embedding_bags if pooled else made.embeddings
    for name, weight in weights.items():
        tables[name].weight = nn.Parameter(weight)
        made._device = weight.device
    return made


__all__ = ["frozen_collection"]
