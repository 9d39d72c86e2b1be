"""Compute kernels, which TorchRec calls for the tables of one grouped config."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embedding_kernel import BaseEmbedding
from torchrec.distributed.embedding_types import GroupedEmbeddingConfig
from torchrec.modules.embedding_configs import PoolingType
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb.ops.columns import Pooling
from torch_dynemb.table.shards import IdSlots
from torch_dynemb.torchrec.planning.plans import PLAN
from torch_dynemb.torchrec.sharding.optimizer import TableOptimizer, shown_parameter
from torch_dynemb.torchrec.sharding.tables import ShardTables

_POOLING = {
    PoolingType.SUM: Pooling.SUM,
    PoolingType.MEAN: Pooling.MEAN,
    PoolingType.NONE: Pooling.NONE,
}


class DynamicKernel(BaseEmbedding, FusedOptimizerModule):  # type: ignore[misc]
    """Kernel of a rank's dynamic tables that are looked up together, pooled or per id.

    Args:
        grouped_config: its fused_params are ``optimizer_config``, ``output_dtype``, ``split`` and a
            plan per table.
        device: of the rows.
        ids: the ids that this rank owns.
        pooling: of bags in this kernel; NONE: it returns a row per id.
        counted: whether weights of ids are their numbers of occurrences.
        by_rank: whether rows are returned in the order in which ranks sent their ids.
    """

    def __init__(
        self,
        grouped_config: GroupedEmbeddingConfig,
        device: torch.device | None,
        ids: IdSlots,
        pooling: PoolingType,
        *,
        counted: bool = False,
        by_rank: bool = False,
    ) -> None:
        super().__init__()
        self._config = grouped_config  # TorchRec reads this name
        fused_params = grouped_config.fused_params or {}
        # several column shards of a table on this rank have one parameter
        self._shown = {
            table.name: shown_parameter(
                (table.embedding_dim,), device, trained=table.fused_params[PLAN].trained
            )
            for table in grouped_config.embedding_tables
        }
        self._tables = ShardTables(
            grouped_config,
            self._shown,
            optimizer=fused_params["optimizer_config"],
            ids=ids,
            pooling=_POOLING[pooling],
            output_dtype=fused_params["output_dtype"],
            split=fused_params["split"],
            device=device,
            counted=counted,
            by_rank=by_rank,
        )
        self._optimizer = TableOptimizer(
            [self._tables],
            {f"{name}.weight": shown for name, shown in self._shown.items()},
            fused_params["optimizer_config"],
        )
        of_parameters = [self._optimizer.of_parameters()]
        for shown in self._shown.values():
            shown._in_backward_optimizers = of_parameters  # type: ignore[attr-defined]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Look up ids; see :meth:`ShardTables.forward`."""
        output: Tensor = self._tables(features)
        return output

    @property
    def config(self) -> GroupedEmbeddingConfig:
        return self._config

    @property
    def _emb_module(self) -> Any:
        """FBGEMM's tables, which other modules of TorchRec read and change by row number."""
        raise NotImplementedError(
            f"DynamicKernel: _emb_module of tables {list(self._shown)} is asked for, but dynamic "
            "tables have no rows by number, which managed collisions, pruning and trackers of "
            "optimizer state need: leave these out, or make the tables static"
        )

    emb_module = _emb_module

    @property
    def tables(self) -> ShardTables:
        """The tables of the kernel."""
        return self._tables

    @property
    def fused_optimizer(self) -> TableOptimizer:
        return self._optimizer

    def flush(self) -> None:
        """Do nothing: the kernel has no cache to flush."""

    def purge(self) -> None:
        """Do nothing: the kernel has no cache to purge."""

    # TorchRec's modules show parameters and state of kernels as those of the tables.

    def named_parameters_by_table(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield a parameter without rows for each table."""
        yield from self._shown.items()

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self._shown.items():
            yield f"{prefix}.{name}.weight" if prefix else f"{name}.weight", parameter

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        yield from ()

    def state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
    ) -> dict[str, Any]:
        """Return nothing: the sharded module saves the rows of all its kernels together."""
        return {} if destination is None else destination


__all__ = ["DynamicKernel"]
