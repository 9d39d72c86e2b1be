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
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL, TableOptions, is_dynamic

_ENTRIES = {
    "options": "TableOptions(...) by table name",
    "fused_params": "such as {'optimizer': EmbOptimType.ADAM, 'learning_rate': 0.01}",
}


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
    example = f"{tables[0]!r}: " if tables else ""
    warnings.warn(
        f"{owner}: the plan makes no table{where} dynamic, so {tables} have num_embeddings rows "
        "and take no other ids. To make tables dynamic, plan with DynamicEmbeddingShardingPlanner("
        f"constraints={{{example}DynamicTableConstraints(TableOptions()), ...}}).collective_plan("
        "model, [sharder]), and give that plan to DistributedModelParallel",
        stacklevel=3,
    )


class _DynamicSharder:
    """Arguments of both sharders for dynamic tables."""

    fused_params: dict[str, Any] | None
    qcomm_codecs_registry: dict[str, Any] | None
    sharded_module_type: Any
    module_type: Any
    _use_index_dedup: bool

    def _set_dynamic(
        self,
        owner: str,
        options: Mapping[str, TableOptions] | None,
        optimizer: OptimizerConfig | None,
    ) -> None:
        for argument, value in (("options", options), ("fused_params", self.fused_params)):
            if value is not None and not isinstance(value, Mapping):
                raise TypeError(
                    f"{owner}: {argument} is {value!r}, expected a dict: {_ENTRIES[argument]}"
                )
        for name, given in (options or {}).items():
            if not isinstance(given, TableOptions):
                raise TypeError(
                    f"{owner}: options[{name!r}] is {given!r}, expected TableOptions(...)"
                )
        if optimizer is not None and not isinstance(optimizer, OptimizerConfig):
            raise TypeError(
                f"{owner}: optimizer is {optimizer!r}, expected a config such as "
                "torch_dynemb.Adam(lr=1e-3); EmbOptimType goes into fused_params"
            )
        _check_codecs(owner, self.qcomm_codecs_registry)
        self._options = dict(options or {})
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
            options=self._options,
            optimizer=self._optimizer,
            use_index_dedup=self._use_index_dedup,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
        )
        if not any(map(is_dynamic, params.values())) and env.rank == 0:
            _warn_of_static_tables(type(self).__name__, list(params), module_fqn)
        return sharded

    @property
    def optimizer(self) -> OptimizerConfig | None:
        """Config of the dynamic tables; None: that of parameters or of fused_params."""
        return self._optimizer

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return TorchRec's kernels and the one of dynamic tables."""
        stock: list[str] = super().compute_kernels(  # type: ignore[misc]
            sharding_type, compute_device_type
        )
        if sharding_type == ShardingType.DATA_PARALLEL.value:
            return stock
        return [*stock, DYNAMIC_KERNEL]


class DynamicEmbeddingBagCollectionSharder(_DynamicSharder, EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """Sharder of EmbeddingBagCollections with some dynamic tables, as the plan says.

    Static tables run TorchRec's kernels. If the plan makes no table of a module dynamic, the
    sharder warns.

    Args:
        fused_params: optimizer of all tables, as in TorchRec: ``optimizer`` (an EmbOptimType),
            ``learning_rate``, ``eps``, ``beta1``, ``beta2``, ``weight_decay``, ``output_dtype``...
        qcomm_codecs_registry: codecs of quantized communication.
        use_index_dedup: send each distinct id of a batch once to its dynamic table, get its row
            back, and pool bags on the rank of the batch. This sends less if ids repeat within a
            rank's batch. Tables must be row_wise or table_wise.
        options: by table name; only for tables without options in the plan. They do not make a
            table dynamic: the plan does, by its kernel ``"customized_kernel"``. Plans of a
            :class:`DynamicEmbeddingShardingPlanner` have both.
        optimizer: config of the dynamic tables instead of fused_params, such as
            ``torch_dynemb.Ftrl(lr=0.1)``. A table keeps the optimizer that
            apply_optimizer_in_backward gave it.

    Raises:
        TypeError: ``options``, ``optimizer`` or ``qcomm_codecs_registry`` has another type.
        ValueError: codecs of an unknown collective.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
        *,
        options: Mapping[str, TableOptions] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry)
        self._use_index_dedup = use_index_dedup
        self._set_dynamic(type(self).__name__, options, optimizer)

    @property
    def sharded_module_type(self) -> type[ShardedDynamicEmbeddingBagCollection]:
        return ShardedDynamicEmbeddingBagCollection


class DynamicEmbeddingCollectionSharder(_DynamicSharder, EmbeddingCollectionSharder):  # type: ignore[misc]
    """Sharder of EmbeddingCollections with some dynamic tables, as the plan says.

    Static tables run TorchRec's kernels.

    Args:
        use_index_dedup: send each distinct id of a batch once to its table, dynamic or static.
        fused_params, qcomm_codecs_registry, options, optimizer: as in
            :class:`DynamicEmbeddingBagCollectionSharder`.
    """

    def __init__(
        self,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: dict[str, Any] | None = None,
        use_index_dedup: bool = False,
        *,
        options: Mapping[str, TableOptions] | None = None,
        optimizer: OptimizerConfig | None = None,
    ) -> None:
        super().__init__(fused_params, qcomm_codecs_registry, use_index_dedup)
        self._set_dynamic(type(self).__name__, options, optimizer)

    @property
    def sharded_module_type(self) -> type[ShardedDynamicEmbeddingCollection]:
        return ShardedDynamicEmbeddingCollection


__all__ = ["DynamicEmbeddingBagCollectionSharder", "DynamicEmbeddingCollectionSharder"]
