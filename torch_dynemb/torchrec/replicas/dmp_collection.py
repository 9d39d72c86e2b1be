"""TorchRec's DMPCollection with dynamic tables."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.remote_device import _remote_device
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import ShardingEnv2D, ShardingPlan

from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.torchrec.collections.dynamic_part import DynamicPart
from torch_dynemb.torchrec.planning.sharding_groups import SyncedEnv2D
from torch_dynemb.torchrec.replicas.group_checks import check_groups
from torch_dynemb.torchrec.replicas.replica_sync import ReplicaSync, SyncStats


class _SyncedModelParallel(DistributedModelParallel):  # type: ignore[misc]
    """Base of DynamicDMPCollection behind DMPCollection: its device, and its environment."""

    _tables_device: torch.device

    def __init__(
        self, module: nn.Module, env: ShardingEnv2D, device: torch.device, *more: Any, **named: Any
    ) -> None:
        super().__init__(module, SyncedEnv2D.of(env), self._tables_device, *more, **named)


class DynamicDMPCollection(DMPCollection, _SyncedModelParallel):  # type: ignore[misc]
    """TorchRec's DMPCollection (2D parallelism) for models with dynamic tables.

    Ranks form sharding groups, each of which has the whole model. :meth:`sync` makes the groups
    equal: static tables as TorchRec does, dynamic tables by the ids that a group has touched since
    the last sync. DistributedDataParallel averages gradients of the dense part over all ranks.

    It runs on CPUs over gloo, too.

    Args:
        module: model; sharders of :mod:`torch_dynemb.torchrec` make its tables dynamic.
        device: of the tables.
        plan: for the ranks of one sharding group; it is not changed.
        world_size: number of all ranks.
        sharding_group_size: number of ranks that share a model; it divides ``world_size``.
        global_pg: process group of all ranks.
        **more: other arguments of DMPCollection, such as ``sharders``. Modules of
            ``submodule_configs`` must have static tables alone.

    Raises:
        TypeError, ValueError: a wrong argument, or ranks were given different ones. All ranks
            raise, before anything is constructed.
        NotImplementedError: ``sharding_strategy`` is FULLY_SHARDED and a table is dynamic, or
            ``submodule_configs`` is given over gloo; or a dynamic table has 8-bit state, an
            AdmitFrequentSketch, an SSDStore or an ExternalStore.

    Example:
        In the README of this package.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        plan: ShardingPlan,
        world_size: int,
        sharding_group_size: int,
        global_pg: dist.ProcessGroup,
        **more: Any,
    ) -> None:
        check_groups(module, device, plan, world_size, sharding_group_size, global_pg, more)
        self._tables_device = device
        if dist.get_backend(global_pg) == "gloo" and more.get("custom_all_reduce") is None:
            more["custom_all_reduce"] = self._average  # gloo has no ReduceOp.AVG
        # The constructor of DMPCollection asserts a GPU, and needs none.
        asserted = torch.device("cuda") if device.type == "cpu" else device
        super().__init__(
            module,
            asserted,
            copy.deepcopy(plan),  # the constructor writes its own ranks into the plan
            world_size,
            sharding_group_size,
            global_pg,
            **more,
        )
        collections = [of for of in self.module.modules() if isinstance(of, DynamicPart)]
        self._tables_sync = ReplicaSync(
            [kernel.tables for of in collections for kernel in of.kernels()],
            self.replica_group,
            ranks_of(global_pg),
        )
        self._last_sync: SyncStats | None = None

    def _remap_sharding_plan(self, plan: ShardingPlan, *arguments: Any, **named: Any) -> None:
        """Write the ranks of this rank's sharding group into the plan, as DMPCollection does."""
        super()._remap_sharding_plan(plan, *arguments, **named)
        if self._tables_device.type != "cpu":
            return
        for of_module in plan.plan.values():
            for sharding in dict(of_module).values():
                for shard in getattr(sharding.sharding_spec, "shards", None) or []:
                    # DMPCollection numbers devices, but there is one CPU
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")

    @property
    def _device(self) -> torch.device:
        """Device of the process groups' mesh; DMPCollection sets it to what it was given."""
        return self._tables_device

    @_device.setter
    def _device(self, asserted: torch.device) -> None:
        pass

    @property
    def sharding_group(self) -> dist.ProcessGroup:
        """Ranks that share this rank's model."""
        group: dist.ProcessGroup = self._default_ctx.sharding_pg
        return group

    @property
    def replica_group(self) -> dist.ProcessGroup:
        """Ranks that have the same shards as this rank."""
        group: dist.ProcessGroup = self._default_ctx.replica_pg
        return group

    @property
    def in_first_group(self) -> bool:
        """Whether this rank is in the first sharding group, which saves the model."""
        return self.replica_group.rank() == 0

    @property
    def last_sync(self) -> SyncStats | None:
        """What the last sync of dynamic tables has moved; None: there was none."""
        return self._last_sync

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Call the model."""
        self._tables_sync.renew_replaced()
        return super().forward(*arguments, **named)

    def sync(self, include_optimizer_state: bool = True) -> None:
        """Make all sharding groups equal. All ranks call it between two training steps.

        Dynamic tables have equal ids, rows, optimizer state and scores afterwards, bit for bit.

        Args:
            include_optimizer_state: of static tables. It must be True if a table is dynamic.

        Raises:
            NotImplementedError: ``include_optimizer_state`` is False and a table is dynamic.
            RuntimeError: gradients are pending, or memory is short.
            NoRoomError: the ids of all groups exceed the capacity of a table that does not evict.
            ValueError: groups loaded different content. After an error on one rank all ranks raise
                it, and no table has changed.
        """
        self._last_sync = self._tables_sync.run(include_optimizer_state)
        super().sync(include_optimizer_state)

    def _average(self, tensors: list[Tensor]) -> None:
        """Average tensors of static tables over the replica group."""
        for tensor in tensors:
            dist.all_reduce(tensor, group=self.replica_group)
            tensor /= self.replica_group.size()


__all__ = ["DynamicDMPCollection"]
