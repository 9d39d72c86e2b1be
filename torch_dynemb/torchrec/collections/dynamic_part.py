"""Shared part of both sharded collections: their dynamic tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torchrec.distributed.embedding_sharding import (
    EmbeddingShardingInfo,
    KJTListSplitsAwaitable,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb.distributed.failures import raise_together
from torch_dynemb.nn.module_kinds import RowOptimizers, SharedRows
from torch_dynemb.table.dense_state import leaves_tables_out
from torch_dynemb.torchrec.planning.options import is_dynamic
from torch_dynemb.torchrec.planning.plans import PLAN, KernelPlan, ModulePlan
from torch_dynemb.torchrec.sharding.agreed_sizes import (
    SizesUnderWay,
    as_torchrec_waits,
    leave_sizes,
)
from torch_dynemb.torchrec.sharding.batches import copied
from torch_dynemb.torchrec.sharding.kernels import DynamicKernel
from torch_dynemb.torchrec.sharding.optimizer import shown_parameter
from torch_dynemb.torchrec.state.module_state import ModuleState

_MODULE_PLAN = "torch_dynemb_plan"  # key of a plan in the fused_params of TorchRec's constructors


def with_plan(fused_params: Mapping[str, Any] | None, plan: ModulePlan) -> dict[str, Any]:
    """Copy fused_params and add a module's plan; :func:`taken_plan` takes it out again."""
    return {**(fused_params or {}), _MODULE_PLAN: plan}


def taken_plan(fused_params: Mapping[str, Any] | None) -> tuple[dict[str, Any], ModulePlan]:
    """Separate fused_params from the plan that :func:`with_plan` has added."""
    given = dict(fused_params or {})
    plan: ModulePlan = given.pop(_MODULE_PLAN)
    return given, plan


def table_plans(infos: list[EmbeddingShardingInfo]) -> dict[str, KernelPlan]:
    """Return the plans of the dynamic tables of a sharding, by table name."""
    return {info.embedding_config.name: info.fused_params[PLAN] for info in infos}


class DynamicPart:
    """Dynamic tables of a sharded collection: state dict, kernels and training mode.

    Attributes:
        module_kind: name of the unsharded class.
        tables_attribute: name of the attribute that has the collection's tables by name. Entries of
            the state dict begin with it.
        configs_attribute: name of the attribute that has their configs.
        plan_of_tables: options of the dynamic tables, as the sharder was given them.
    """

    module_kind: ClassVar[str]
    tables_attribute: ClassVar[str]
    configs_attribute: ClassVar[str]
    plan_of_tables: ModulePlan

    _lookups: list[torch.nn.Module]
    _input_dists: list[torch.nn.Module]
    module_sharding_plan: Mapping[str, ParameterSharding]
    _keeps_state = False
    _strict_load = True
    _env: ShardingEnv
    _device: torch.device
    _has_uninitialized_input_dist: bool
    _reorders: Callable[[], bool]  # returns whether features must be reordered

    def _configs(self, *, dynamic: bool) -> list[Any]:
        """Return the configs of the tables that are dynamic, or of those that are static."""
        plan = self.module_sharding_plan
        return [
            config
            for config in getattr(self, self.configs_attribute)
            if is_dynamic(plan[config.name]) == dynamic
        ]

    @contextmanager
    def _static_only(self) -> Iterator[None]:
        """Exclude the configs of dynamic tables while TorchRec works on all configs."""
        configs = getattr(self, self.configs_attribute)
        setattr(self, self.configs_attribute, self._configs(dynamic=False))
        try:
            yield
        finally:
            setattr(self, self.configs_attribute, configs)

    def reset_parameters(self) -> None:
        """Initialize the static tables; dynamic rows start when their ids arrive."""
        tables = getattr(self, self.tables_attribute)
        for config in self._configs(dynamic=True):
            if not hasattr(tables[config.name], "weight"):  # its weight is on another rank
                shown = shown_parameter((config.embedding_dim,), torch.empty(0))
                tables[config.name].register_parameter("weight", shown)
        with self._static_only():
            super().reset_parameters()  # type: ignore[misc]

    def _keep_state(self, plan: ModulePlan, env: ShardingEnv, device: torch.device | None) -> None:
        """Install hooks that save and load the dynamic tables."""
        self.plan_of_tables = plan
        tables = getattr(self, self.tables_attribute)
        dynamic = self._configs(dynamic=True)
        state = ModuleState(
            dynamic,
            plan,
            self.module_sharding_plan,
            list(self.kernels()),
            prefix=f"{self.tables_attribute}.",
            parameters={config.name: tables[config.name].weight for config in dynamic},
            process_group=env.process_group,
            device=torch.device("cpu") if device is None else device,
        )

        def save(module: Any, destination: dict[str, Any], start: str, _: Any) -> None:
            if leaves_tables_out():
                for name in state.shown:
                    destination.pop(start + name, None)
                return
            if env.output_dtensor:
                raise NotImplementedError(
                    "state_dict: dynamic tables are saved as ShardedTensor, not as DTensor: set "
                    "output_dtensor of the ShardingEnv to False"
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
            # torch passes strict=True to hooks, whatever the caller gave
            state.load(state_dict, start, self._strict_load, missing, unexpected, errors)

        self._keeps_state = True
        self._register_state_dict_hook(save)  # type: ignore[attr-defined]
        self._register_load_state_dict_pre_hook(load)  # type: ignore[attr-defined]

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, **more: Any
    ) -> Any:
        """Replace rows, state and scores; all ranks call it together.

        The state may come from a sharded collection in any sharding. ``strict=False`` also accepts:

        * a state without optimizer state, scores or counts, which then start anew;
        * ``weight`` of a static collection alone: its rows get the ids 0, 1, ...

        Missing entries are listed as torch does. ``strict=True`` raises for them before any row is
        replaced.
        """
        if not self._keeps_state:
            # TorchRec's constructor copies the weights of the module to shard, which are not
            # dynamic rows
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

    def _create_input_dist(self, *arguments: Any, **more: Any) -> None:
        """Create TorchRec's input dists; ranks exchange the sizes of all of them at once."""
        super()._create_input_dist(*arguments, **more)  # type: ignore[misc]
        if self._several_ranks is not None:
            for input_dist in self._input_dists:
                leave_sizes(input_dist)

    @property
    def _several_ranks(self) -> dist.ProcessGroup | None:
        """The ranks that exchange ids: those of a group in 2D parallelism; None: this rank only."""
        ranks = getattr(self._env, "sharding_pg", self._env.process_group)
        return None if ranks is None or ranks.size() == 1 else ranks

    def _agreed(
        self,
        context: Any,
        check: Callable[[], KeyedJaggedTensor],
        send: Callable[[KeyedJaggedTensor], KJTListSplitsAwaitable],
    ) -> KJTListSplitsAwaitable:
        """Send a batch, unless a rank refuses its own: then all ranks raise its error.

        They do so as the lookup of the batch begins, so a pipeline ends the batches before it.

        Args:
            context: of the batch.
            check: returns the batch, or raises.
            send: TorchRec's ``input_dist``, which sends nothing yet: see :func:`leave_sizes`.
        """
        ranks = self._several_ranks
        if ranks is None:
            return send(check())
        sent = KJTListSplitsAwaitable([None] * len(self._lookups), context)
        features: KeyedJaggedTensor | None = None
        refused: Exception | None = None
        try:
            features = check()
        except Exception as error:
            refused = error
        if self._has_uninitialized_input_dist:
            raise_together(refused, ranks)  # all ranks make TorchRec's input dists, or none does
        if features is not None:
            try:
                sent = send(features)
            except Exception as error:
                refused = error
        requests = sent.awaitables if refused is None else refused
        shardings = len(sent.awaitables)
        under_way = SizesUnderWay(self.module_kind, requests, shardings, ranks, self._device)
        return as_torchrec_waits(under_way, sent)

    def _own(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return features in memory that no other module of a pipeline frees.

        TorchRec's pipelines with ``free_features_storage_early`` free a batch as soon as one module
        has reordered its features, because reordering copies them. A module that needs no
        reordering would read freed memory.
        """
        if not getattr(self, "_free_features_storage_early", False):
            return features
        if self._has_uninitialized_input_dist or not self._reorders():
            return copied(features)
        return features

    def kernels(self) -> Iterator[DynamicKernel]:
        """Yield the kernels of dynamic tables on this rank."""
        for lookup in self._lookups:
            for module in lookup.modules():
                if isinstance(module, DynamicKernel):
                    yield module

    def row_optimizers(self) -> RowOptimizers:
        """Return the optimizers of the rows on this rank, one per kernel."""
        ranks = self._env.process_group
        shared = None
        if ranks is not None and ranks.size() > 1:
            shared = SharedRows(ranks, self._device)
        return RowOptimizers([kernel.tables.optimizer for kernel in self.kernels()], shared)

    def update_shards(self, changed_sharding_params: Any, *arguments: Any, **more: Any) -> None:
        """Move shards of static tables, as TorchRec does.

        Raises:
            NotImplementedError: a dynamic table would move.
        """
        plan = self.module_sharding_plan
        dynamic = [name for name in changed_sharding_params if is_dynamic(plan[name])]
        if dynamic:
            raise NotImplementedError(
                f"update_shards: tables {dynamic} are dynamic; their shards cannot move in a live "
                "model: save its state_dict and load it into one with another plan"
            )
        super().update_shards(changed_sharding_params, *arguments, **more)  # type: ignore[misc]

    def train(self, mode: bool = True) -> Any:
        """Set training mode, also of the lookups, which TorchRec does not register as
        submodules."""
        super().train(mode)  # type: ignore[misc]
        for lookup in self._lookups:
            lookup.train(mode)
        return self


__all__ = ["DynamicPart", "table_plans", "taken_plan", "with_plan"]
