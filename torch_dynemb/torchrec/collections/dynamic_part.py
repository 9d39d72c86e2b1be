"""Shared part of both sharded collections: their dynamic tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torchrec.distributed.embedding_sharding import (
    EmbeddingShardingInfo,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv

from torch_dynemb.distributed.gloo_threads import let_senders_finish
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.nn.module_kinds import RowOptimizers, SharedRows
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.table.dense_state import leaves_tables_out
from torch_dynemb.torchrec.collections.batch_part import BatchPart
from torch_dynemb.torchrec.collections.rebuilding import (
    Given,
    adopt,
    blueprint,
    optimizers_unchanged,
)
from torch_dynemb.torchrec.planning.choice import TableChoice
from torch_dynemb.torchrec.planning.chosen_tables import configs_of
from torch_dynemb.torchrec.planning.options import is_dynamic
from torch_dynemb.torchrec.planning.plans import (
    PLAN,
    KeptSharding,
    KernelPlan,
    ModulePlan,
    module_plan,
    plan_dynamic,
)
from torch_dynemb.torchrec.planning.sharding_groups import SyncedEnv2D, sharding_group
from torch_dynemb.torchrec.resharding.collections import check_static_move, reshard_collections
from torch_dynemb.torchrec.sharding.batches import BatchCheck
from torch_dynemb.torchrec.sharding.kernels import DynamicKernel
from torch_dynemb.torchrec.sharding.optimizer import TableOptimizer, shown_parameter
from torch_dynemb.torchrec.state.module_state import ModuleState

_MOVED = "the tables moved to other shards"
_INSTEAD = "model.fused_optimizer, or list torch_dynemb.table_optimizers(model) again"
_MODULE_PLAN = "torch_dynemb_plan"  # key of a plan in the fused_params of TorchRec's constructors


def table_plans(infos: list[EmbeddingShardingInfo]) -> dict[str, KernelPlan]:
    """Return the plans of the dynamic tables of a sharding, by table name."""
    return {info.embedding_config.name: info.fused_params[PLAN] for info in infos}


def _without(shardings: Any, kept: Mapping[int, Any]) -> Any:
    """Return shardings, a list or a dict, without some of them."""
    if isinstance(shardings, dict):
        return {kind: of for kind, of in shardings.items() if id(of) not in kept}
    return [of for of in shardings if id(of) not in kept]


class DynamicPart(BatchPart):
    """Dynamic tables of a sharded collection: state dict, kernels and training mode.

    Args:
        choice: options of dynamic tables without options in the plan.
        optimizer: of the dynamic tables; default: the one that fused_params describe.
        use_index_dedup: send each distinct id of a batch once.
        planned: the plan of a rebuilt collection.
        module, table_name_to_parameter_sharding, env, fused_params, device, ...: as in TorchRec.

    Attributes:
        tables_attribute: name of the attribute that has the collection's tables by name. Entries of
            the state dict begin with it.
        divides_dims: whether deduplicated tables of different dims are sharded apart; otherwise
            TorchRec deduplicates.
        plan_of_tables: options of the dynamic tables, as the sharder was given them.
    """

    tables_attribute: ClassVar[str]
    divides_dims: ClassVar[bool]
    sharding_types: Callable[[], list[str]]  # of dynamic tables
    plan_of_tables: ModulePlan

    module_sharding_plan: Mapping[str, ParameterSharding]
    _sharding_types: list[str]
    _optim: Any
    _given: Given
    _state: ModuleState
    output_names: Callable[[], list[str]]  # in the order of TorchRec's outputs
    _keeps_state = False
    _strict_load = True
    _prepare_batches: Callable[[ModulePlan], BatchCheck]  # called as the last part of construction

    def __init__(
        self,
        module: Any,
        table_name_to_parameter_sharding: dict[str, ParameterSharding],
        env: ShardingEnv,
        fused_params: dict[str, Any] | None = None,
        device: torch.device | None = None,
        *,
        choice: TableChoice,
        optimizer: OptimizerConfig | None,
        use_index_dedup: bool,
        planned: ModulePlan | None = None,
        **more: Any,
    ) -> None:
        self._given = Given(
            blueprint(module), fused_params, choice, optimizer, use_index_dedup, more
        )
        plan = planned or module_plan(
            self.module_kind,
            module,
            configs_of(module),
            table_name_to_parameter_sharding,
            env,
            device,
            sharding_types=self.sharding_types(),
            choice=choice,
            optimizer=optimizer,
            fused_params=fused_params,
            use_index_dedup=use_index_dedup,
            codecs=more.get("qcomm_codecs_registry"),
            path=more.get("module_fqn"),
        )
        self.plan_of_tables = plan
        super().__init__(  # type: ignore[call-arg]
            module,
            table_name_to_parameter_sharding,
            env,
            {**(fused_params or {}), _MODULE_PLAN: plan},
            device,
            **({} if self.divides_dims else {"use_index_dedup": use_index_dedup}),
            **more,
        )
        self._check_batch = self._prepare_batches(plan)
        self._keep_state(plan, env, device)
        let_senders_finish(env.process_group)

    @classmethod
    def create_grouped_sharding_infos(
        cls, module: Any, shardings: dict[str, ParameterSharding], *more: Any
    ) -> dict[str, list[EmbeddingShardingInfo]]:
        """Describe the tables by sharding, with the plan that the constructor has added.

        Args:
            module, shardings, more: as in TorchRec; the last one is fused_params.
        """
        *prefix, given = more
        given = dict(given)
        plan: ModulePlan = given.pop(_MODULE_PLAN)
        infos = super().create_grouped_sharding_infos(  # type: ignore[misc]
            module, shardings, *prefix, given
        )
        return plan_dynamic(cls.module_kind, infos, plan, by_dim=plan.dedup and cls.divides_dims)

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
                trained = self.plan_of_tables.trained[config.name]
                shown = shown_parameter((config.embedding_dim,), None, trained=trained)
                tables[config.name].register_parameter("weight", shown)
        if self.plan_of_tables.kept:  # static tables keep their rows
            return
        with self._static_only():
            super().reset_parameters()  # type: ignore[misc]

    def _keep_state(self, plan: ModulePlan, env: ShardingEnv, device: torch.device | None) -> None:
        """Install hooks that save and load the dynamic tables, and handles of their optimizers."""
        tables = getattr(self, self.tables_attribute)
        dynamic = self._configs(dynamic=True)
        self._state = ModuleState(
            dynamic,
            plan,
            self.module_sharding_plan,
            list(self.kernels()),
            prefix=f"{self.tables_attribute}.",
            parameters={config.name: tables[config.name].weight for config in dynamic},
            process_group=sharding_group(env),
            device=torch.device("cpu") if device is None else device,
        )

        def save(module: Any, destination: dict[str, Any], start: str, _: Any) -> None:
            if leaves_tables_out():
                for name in self._state.shown:
                    destination.pop(start + name, None)
                return
            self.check_one_group("state_dict")
            if env.output_dtensor:
                raise NotImplementedError(
                    "state_dict: dynamic tables are saved as ShardedTensor, not as DTensor: set "
                    "output_dtensor of the ShardingEnv to False"
                )
            for name, entry in self._state.entries().items():
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
            if not leaves_tables_out():
                self.check_one_group("load_state_dict")
            # torch passes strict=True to hooks, whatever the caller gave
            self._state.load(state_dict, start, self._strict_load, missing, unexpected, errors)

        self._keeps_state = True
        self._keep_optimizers(plan)
        self._register_state_dict_hook(save)  # type: ignore[attr-defined]
        self._register_load_state_dict_pre_hook(load)  # type: ignore[attr-defined]

    def check_one_group(self, call: str) -> None:
        """Raise NotImplementedError if several sharding groups have the tables."""
        if isinstance(self._env, SyncedEnv2D):
            tables = [config.name for config in self._configs(dynamic=True)]
            raise NotImplementedError(
                f"{call}: tables {tables} are dynamic, and each sharding group of a "
                "DynamicDMPCollection has all their rows: save and load the model with "
                "torch_dynemb.checkpoint and process_group=model.sharding_group"
            )

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

    def kernels(self) -> Iterator[DynamicKernel]:
        """Yield the kernels of dynamic tables on this rank."""
        for lookup in self._lookups:
            for module in lookup.modules():
                if isinstance(module, DynamicKernel):
                    yield module

    def row_optimizers(self) -> RowOptimizers:
        """Return the optimizers of the rows on this rank, one per kernel."""
        ranks = sharding_group(self._env)
        shared = None
        if ranks is not None and ranks.size() > 1:
            shared = SharedRows(ranks, self._device)
        return RowOptimizers([kernel.tables.optimizer for kernel in self.kernels()], shared)

    # -- other shards ---------------------------------------------------------------------------

    def _create_lookups(self) -> None:
        """Create the lookups of all shardings that are not kept; an error of a rank is raised on
        all."""
        shardings = getattr(self, self.shardings_attribute)
        kept = {id(of.sharding): of.lookup for of in self.plan_of_tables.kept}
        kept = {number: kept[number] for number in map(id, self.shardings()) if number in kept}
        setattr(self, self.shardings_attribute, _without(shardings, kept))
        try:
            ranks_of(self._env.process_group).run(super()._create_lookups)  # type: ignore[misc]
        finally:
            setattr(self, self.shardings_attribute, shardings)
        created = iter(self._lookups)
        self._lookups = [
            kept[id(sharding)] if id(sharding) in kept else next(created)
            for sharding in self.shardings()
        ]

    def init_data_parallel(self) -> None:
        """Wrap data-parallel lookups, unless a former plan has done so."""
        if not self.plan_of_tables.kept:
            super().init_data_parallel()  # type: ignore[misc]

    @property
    def wraps_apart(self) -> bool:
        """Whether TorchRec wraps data-parallel lookups by :meth:`init_data_parallel`, as newer
        versions do."""
        return hasattr(super(), "init_data_parallel")

    def _keep_optimizers(self, plan: ModulePlan) -> None:
        """Give ``fused_optimizer`` handles that stay when tables move, on every rank.

        Schedulers and TorchRec's wrappers hold its param groups.
        """
        handles: list[tuple[str, Any]] = [
            (key, of.handle() if isinstance(of, TableOptimizer) else of)
            for key, of in self._optim._optims
        ]
        for config in plan.optimizers.values():
            if not any(isinstance(of, TableOptimizer) and of.config == config for _, of in handles):
                handles.append(("", TableOptimizer([], {}, config)))
        self._optim._optims[:] = handles

    def beside(self, changed: Mapping[str, ParameterSharding]) -> set[str]:
        """Return the dynamic tables that share a sharding with tables that move, before or after.

        TorchRec looks up all tables of a sharding together, so :meth:`rebuilt` moves these, too.

        Args:
            changed: new shardings of the tables that move.
        """
        current, dims = self.module_sharding_plan, self.plan_of_tables.dedup and self.divides_dims

        def kind(config: Any, sharding: ParameterSharding) -> tuple[str, int]:
            return sharding.sharding_type, config.embedding_dim if dims else 0

        configs = self._configs(dynamic=True)
        kinds = {
            kind(config, plan[config.name])
            for config in configs
            for plan in (current, changed)
            if config.name in changed
        }
        return {of.name for of in configs if kind(of, current[of.name]) in kinds} - changed.keys()

    def rebuilt(self, changed: Mapping[str, ParameterSharding]) -> Any:
        """Construct the collection for another plan; its moved tables are empty.

        Other tables are those of this collection. All ranks call it together.

        Args:
            changed: new shardings of the tables that move.

        Raises:
            Exception: of any rank, on all ranks.
        """
        plan, given = self.plan_of_tables, self._given
        old = zip(self._sharding_types, self.shardings(), self._lookups, strict=True)
        kept = [
            KeptSharding(plan.tables[kind], sharding, lookup)
            for kind, sharding, lookup in old
            if not changed.keys() & set(plan.tables[kind])
        ]
        now, planned = (getattr(of, self.tables_attribute) for of in (self, given.module))
        for config in self._configs(dynamic=True):
            trained = now[config.name].weight.requires_grad
            planned[config.name].weight.requires_grad_(trained)
        construct: Any = type(self)
        with optimizers_unchanged(self._lookups):
            rebuilt = construct(
                given.module,
                {**self.module_sharding_plan, **changed},
                self._env,
                given.fused_params,
                self._device,
                choice=given.choice,
                optimizer=given.optimizer,
                use_index_dedup=given.use_index_dedup,
                planned=plan.replanned(kept),
                **given.more,
            )
        rebuilt.plan_of_tables = replace(rebuilt.plan_of_tables, kept=())  # constructed: as any
        return rebuilt

    def adopt(self, other: Any) -> None:
        """Take the shards of a collection that :meth:`rebuilt` has constructed."""
        moved = [kernel.tables for kernel in self.kernels()]
        stay = [kernel.tables for kernel in other.kernels()]
        other.train(self.training)
        optimizers: list[TableOptimizer] = [kernel.fused_optimizer for kernel in other.kernels()]
        seen: list[OptimizerConfig] = []
        for _, handle in self._optim._optims:
            if isinstance(handle, TableOptimizer):
                first = handle.config not in seen
                seen.append(handle.config)
                handle.follow([of for of in optimizers if first and of.config == handle.config])
        order = self._output_order or self.output_names()
        adopt(self, other)  # type: ignore[arg-type]
        self._output_order = None if order == self.output_names() else order
        for tables in moved:
            if not any(tables is of for of in stay):
                tables.optimizer._retire(_MOVED, _INSTEAD)
                tables.group.tables._retire()

    def update_shards(
        self, changed_sharding_params: Any, env: Any = None, device: Any = None
    ) -> None:
        """Move tables to other shards; all ranks call it together.

        Static tables stay where they are, unless the collection has no dynamic ones: then TorchRec
        moves them.

        Args:
            changed_sharding_params: new shardings by table; other tables stay.
            env, device: as in TorchRec; those of the collection.

        Raises:
            Exception: as :func:`torch_dynemb.torchrec.reshard`.
        """
        if not any(map(is_dynamic, self.module_sharding_plan.values())):
            check_static_move(self, changed_sharding_params)
            super().update_shards(changed_sharding_params, env, device)  # type: ignore[misc]
            return
        reshard_collections({"": (self, changed_sharding_params)}, self._env.process_group)

    def train(self, mode: bool = True) -> Any:
        """Set training mode, also of the lookups, which TorchRec does not register as
        submodules."""
        super().train(mode)  # type: ignore[misc]
        for lookup in self._lookups:
            lookup.train(mode)
        return self


__all__ = ["DynamicPart", "table_plans"]
