"""Sharders of collections with dynamic tables, for DistributedModelParallel."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import (
    CommOp,
    ParameterSharding,
    QuantizedCommCodecs,
    ShardingEnv,
    ShardingType,
)

from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.torchrec.collections.bag import ShardedDynamicEmbeddingBagCollection
from torch_dynemb.torchrec.collections.sequence import ShardedDynamicEmbeddingCollection
from torch_dynemb.torchrec.planning.choice import ChosenTables, OptionsOfTables, TableChoice
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL, is_dynamic


def _check_codecs(owner: str, registry: object) -> None:
    """Raise TypeError or ValueError unless it maps names of collectives to their codecs."""
    if registry is None:
        return
    if not isinstance(registry, Mapping):
        raise TypeError(
            f"{owner}: qcomm_codecs_registry is a {type(registry).__name__}, expected a dict of "
            "codecs by collective: get_qcomm_codecs_registry(config) of "
            "torchrec.distributed.fbgemm_qcomm_codec makes it of a QCommsConfig"
        )
    known = list(CommOp.__members__)
    for name, codecs in registry.items():
        if name not in known:
            raise ValueError(
                f"{owner}: qcomm_codecs_registry has {name!r}, expected some of {known}"
            )
        if not isinstance(codecs, QuantizedCommCodecs):
            raise TypeError(
                f"{owner}: qcomm_codecs_registry[{name!r}] is a {type(codecs).__name__}, expected "
                "QuantizedCommCodecs"
            )


def _warn_of_static_tables(owner: str, tables: list[str], module: str | None) -> None:
    where = f" of {module!r}" if module else ""
    warnings.warn(
        f"{owner}: the plan makes no table{where} dynamic, so {tables} have num_embeddings rows "
        "and take no other ids. To make tables dynamic, give the sharder tables='all' or their "
        "names, plan with DynamicEmbeddingShardingPlanner().collective_plan(model, [sharder]), and "
        "give that plan to DistributedModelParallel",
        stacklevel=3,
    )


def _warn_of_weights(owner: str, tables: list[str], module: str | None) -> None:
    where = f" of {module!r}" if module else ""
    warnings.warn(
        f"{owner}: dynamic tables {tables}{where} do not take the weights of the unsharded "
        "collection: their rows start anew. To keep the weights as rows of ids 0, 1, ..., take the "
        "model's state_dict() before sharding, and give it to load_state_dict(..., strict=False) "
        "of the sharded model; otherwise construct the collection on torch.device('meta')",
        stacklevel=3,
    )


class _DynamicSharder:
    """Arguments of both sharders for dynamic tables."""

    fused_params: dict[str, Any] | None
    qcomm_codecs_registry: dict[str, Any] | None
    sharded_module_type: Any
    module_type: Any

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
        *,
        tables: ChosenTables | None = None,
        options: OptionsOfTables | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)  # type: ignore[call-arg]
        self._use_index_dedup = use_index_dedup
        owner = type(self).__name__
        self._choice = TableChoice(owner, tables, options)
        if self.fused_params is not None and not isinstance(self.fused_params, Mapping):
            raise TypeError(
                f"{owner}: fused_params is {self.fused_params!r}, expected a dict: such as "
                "{'optimizer': EmbOptimType.ADAM, 'learning_rate': 0.01}"
            )
        if optimizer is not None and not isinstance(optimizer, OptimizerConfig):
            raise TypeError(
                f"{owner}: optimizer is {optimizer!r}, expected a config such as "
                "torch_dynemb.Adam(lr=1e-3); EmbOptimType goes into fused_params"
            )
        _check_codecs(owner, self.qcomm_codecs_registry)
        self._optimizer = optimizer

    def shard(
        self,
        module: nn.Module,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """Return the module sharded by a plan, with the dynamic tables that the plan names."""
        if not isinstance(module, self.module_type):
            raise TypeError(
                f"{type(self).__name__}: module has type {type(module).__name__}, expected "
                f"{self.module_type.__name__}"
            )
        sharded: nn.Module = self.sharded_module_type(
            module,
            params,
            env,
            self.fused_params,
            device,
            choice=self._choice,
            optimizer=self._optimizer,
            use_index_dedup=self._use_index_dedup,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
        unmentioned = not self._choice.chooses_any and not any(map(is_dynamic, params.values()))
        if unmentioned and env.rank == 0:
            _warn_of_static_tables(type(self).__name__, list(params), module_fqn)
        dropped = [
            table
            for name, weight in module.named_parameters()
            if not weight.is_meta and is_dynamic(params[table := name.split(".")[-2]])
        ]
        if dropped and env.rank == 0:
            _warn_of_weights(type(self).__name__, dropped, module_fqn)
        return sharded

    def reshard(
        self,
        sharded_module: Any,
        changed_shard_to_params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
    ) -> Any:
        """Move tables of a sharded module; :meth:`DistributedModelParallel.reshard` calls it.

        See :func:`torch_dynemb.torchrec.reshard`.

        Args:
            sharded_module: made by this sharder.
            changed_shard_to_params: by table, its new place in the plan.
            env: of the ranks.
            device: of the rows.
        """
        if len(changed_shard_to_params) > 0:
            sharded_module.update_shards(changed_shard_to_params, env, device)
        return sharded_module

    @property
    def choice(self) -> TableChoice:
        """Tables that become dynamic, and their options."""
        return self._choice

    @property
    def optimizer(self) -> OptimizerConfig | None:
        """Config of the dynamic tables; None: that of parameters or of fused_params."""
        return self._optimizer

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return TorchRec's kernels and the one of dynamic tables.

        Raises:
            ValueError: TorchRec's own enumerator asks, and the sharder was given ``tables``.
        """
        self._choice.check_planner()
        stock: list[str] = super().compute_kernels(  # type: ignore[misc]
            sharding_type, compute_device_type
        )
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return stock
        return [*stock, DYNAMIC_KERNEL]


class DynamicEmbeddingBagCollectionSharder(_DynamicSharder, EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Sharder of EmbeddingBagCollections, some or all tables of which become dynamic.

    These are the tables that ``tables`` chooses, and those that the planner's constraints make
    dynamic. Static tables run TorchRec's kernels. If neither makes a table of a module dynamic, the
    sharder warns.

    Args:
        fused_params: optimizer of all tables, as in TorchRec: ``optimizer`` (an EmbOptimType, or
            DynamicEmb's DynamicEmbOptimType), ``learning_rate``, ``eps``, ``beta1``, ``beta2``,
            ``weight_decay``, ``output_dtype``...
        qcomm_codecs_registry: codecs of quantized communication.
        use_index_dedup: send each distinct id of a batch once to its dynamic table, get its row
            back, and pool bags on the rank of the batch. This sends less if ids repeat within a
            rank's batch. Tables must be row_wise or table_wise.
        tables: to make dynamic: ``"all"``, a list of names, or a function that takes a table's
            config and returns a bool. Plan with a :class:`DynamicEmbeddingShardingPlanner` or
            another planner with a :class:`DynamicEmbeddingEnumerator`. In plans of your own, these
            tables have the kernel ``"customized_kernel"``.
        options: of dynamic tables: one TableOptions for all, a dict by name, or a function that
            takes a table's config and returns TableOptions. Tables that a dict leaves out have the
            default options. Options of a :class:`DynamicTableConstraints` replace them; a table in
            both the dict and the constraints raises. Options alone make no table dynamic.
        optimizer: config of the dynamic tables instead of fused_params, such as
            ``torch_dynemb.Ftrl(lr=0.1)``. A table keeps the optimizer that
            apply_optimizer_in_backward gave it.

    Raises:
        TypeError: ``tables``, ``options``, ``optimizer`` or ``qcomm_codecs_registry`` has another
            type.
        ValueError: codecs of an unknown collective, or ``tables`` is a name.

    Example:
        >>> import torch_dynemb as td
        >>> from torch_dynemb.torchrec import DynamicEmbeddingBagCollectionSharder, TableOptions
        >>> sharder = DynamicEmbeddingBagCollectionSharder(
        ...     tables="all",
        ...     options=TableOptions(policy=td.Policy(capacity=1_000_000)),
        ...     optimizer=td.Adam(lr=0.01),
        ... )
    """

    @property
    def sharded_module_type(self) -> type[ShardedDynamicEmbeddingBagCollection]:
        return ShardedDynamicEmbeddingBagCollection


class DynamicEmbeddingCollectionSharder(_DynamicSharder, EmbeddingCollectionSharder):  # type: ignore[misc]
    """Sharder of EmbeddingCollections, some or all tables of which become dynamic.

    Static tables run TorchRec's kernels.

    Args:
        use_index_dedup: send each distinct id of a batch once to its table, dynamic or static.
        fused_params, qcomm_codecs_registry, tables, options, optimizer: as in
            :class:`DynamicEmbeddingBagCollectionSharder`.

    Raises:
        TypeError, ValueError: as in :class:`DynamicEmbeddingBagCollectionSharder`.
    """

    @property
    def sharded_module_type(self) -> type[ShardedDynamicEmbeddingCollection]:
        return ShardedDynamicEmbeddingCollection


__all__ = ["DynamicEmbeddingBagCollectionSharder", "DynamicEmbeddingCollectionSharder"]
