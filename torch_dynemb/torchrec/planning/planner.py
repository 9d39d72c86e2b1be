"""TorchRec's planner and enumerator for models with dynamic tables."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner
from torchrec.distributed.planner.constants import BATCH_SIZE
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.types import (
    Enumerator,
    ParameterConstraints,
    ShardEstimator,
    ShardingOption,
    StorageReservation,
    Topology,
)
from torchrec.distributed.planner.utils import sharder_name
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ModuleSharder, ShardingPlan, ShardingPlanner, ShardingType
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torch_dynemb.distributed.ranks import default_group, from_first_rank
from torch_dynemb.torchrec.planning.choice import enumerating
from torch_dynemb.torchrec.planning.chosen_tables import (
    check_child_names,
    check_sharding_types,
    chosen_tables,
    configs_of,
)
from torch_dynemb.torchrec.planning.estimators import (
    Constraints,
    DynamicPerfEstimator,
    DynamicStorageEstimator,
    PlannedTable,
    is_dynamic_option,
    planned_optimizer,
    set_planned,
)
from torch_dynemb.torchrec.planning.options import (
    DYNAMIC_KERNEL,
    OptionsByTable,
    constrained_options,
)
from torch_dynemb.torchrec.planning.wrapped_sharders import (
    check_processors_learn,
    planned_sharder,
)

_DATA_PARALLEL = ShardingType.DATA_PARALLEL.value


def _check_constraints(owner: str, constraints: Constraints) -> None:
    for name, constraint in constraints.items():
        kernels = constraint.compute_kernels or []
        if constrained_options(constraint) is None:
            if DYNAMIC_KERNEL in kernels:
                raise ValueError(
                    f"{owner}: compute_kernels of table {name!r} is {kernels}, but no options "
                    "make it dynamic: constrain it with DynamicTableConstraints(...)"
                )
            continue
        check_sharding_types(owner, name, constraint)


class DynamicEmbeddingEnumerator(EmbeddingEnumerator):  # type: ignore[misc]
    """TorchRec's EmbeddingEnumerator for models with dynamic tables.

    A table with :class:`DynamicTableConstraints`, or in ``tables`` of its sharder, is offered as a
    dynamic one only, in every sharding type but data_parallel. Row-wise types are offered on the
    CPU, too. Other tables are offered and priced as TorchRec does.

    A table may have both. Options of DynamicTableConstraints replace those that the sharder has
    for all of its tables. ParameterConstraints of such a table, such as ``sharding_types``, apply.

    Args:
        topology: of the machines.
        batch_size: of one rank.
        constraints: by table name.
        estimator: default: DynamicPerfEstimator and DynamicStorageEstimator around TorchRec's own.
            They take others as ``stock``.
        use_exact_enumerate_order: as in TorchRec.

    Raises:
        ValueError: constraints that dynamic tables cannot meet.
    """

    def __init__(
        self,
        topology: Topology,
        batch_size: int | None = None,
        constraints: Constraints | None = None,
        estimator: ShardEstimator | list[ShardEstimator] | None = None,
        use_exact_enumerate_order: bool = False,
    ) -> None:
        _check_constraints("DynamicEmbeddingEnumerator", constraints or {})
        super().__init__(
            topology=topology,
            batch_size=BATCH_SIZE if batch_size is None else batch_size,
            constraints=constraints,
            estimator=estimator
            or [
                DynamicPerfEstimator(topology, constraints),
                DynamicStorageEstimator(topology, constraints),
            ],
            use_exact_enumerate_order=use_exact_enumerate_order,
        )
        self._chosen: frozenset[str] = frozenset()

    def dynamic_tables(self) -> set[str]:
        """Return the names of the tables to make dynamic.

        These are the tables of constraints, and those that the sharders of the last
        :meth:`enumerate` have chosen.
        """
        return _dynamic_names(self._constraints) | self._chosen

    def enumerate(
        self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]
    ) -> list[ShardingOption]:
        """Return the sharding options of all tables of a model.

        Raises:
            ValueError: the model lacks a table that constraints or a sharder name, its sharder
                cannot make it dynamic, or constraints contradict the sharder's choice.
            NotImplementedError: a sharder around that of a collection needs static tables.
        """
        sharders = [planned_sharder(sharder) for sharder in sharders]
        self._chosen = chosen_tables(module, sharders, self._constraints or {})
        check_child_names(module, self.dynamic_tables())
        if self._world_size > 1:
            check_processors_learn(module, sharders, self.dynamic_tables())
        with enumerating():
            options: list[ShardingOption] = super().enumerate(module, sharders)
        names = {option.name for option in options}
        missing = {
            name
            for name in _dynamic_names(self._constraints) - names
            # tables of other device groups are not listed
            if self._constraints[name].device_group in (None, "", self._compute_device)
        }
        if missing:
            raise ValueError(
                f"DynamicEmbeddingEnumerator: constraints make {sorted(missing)} dynamic, but the "
                f"model's tables are {sorted(names)}: correct or remove these names"
            )
        parameters = {part for name, _ in module.named_parameters() for part in name.split(".")}
        unknown = set(self._constraints or {}) - names - parameters
        if unknown:
            raise ValueError(
                f"DynamicEmbeddingEnumerator: constraints name tables {sorted(unknown)}, but "
                f"those of the model are {sorted(names)}: correct or remove these "
                "names"
            )
        return options

    def populate_estimates(self, sharding_options: list[ShardingOption]) -> None:
        """Set storage and time of every shard."""
        for option in sharding_options:
            if not is_dynamic_option(option):
                continue
            constraint = (self._constraints or {}).get(option.name)
            sharder = self.sharder_map[sharder_name(type(option.module[1]))]
            optimizer = planned_optimizer(option.tensor, sharder)
            in_plan = constrained_options(constraint) is not None
            if not in_plan:
                options = sharder.choice.options_of(_config_of(option))
            elif isinstance(constraint, OptionsByTable):
                options = constraint.options_of_table(_config_of(option), optimizer)
            else:
                options = option.key_value_params.options
            table = PlannedTable(options, options.optimizer_of(optimizer))
            set_planned(option, table, in_plan=in_plan)
        super().populate_estimates(sharding_options)

    def _filter_sharding_types(
        self, name: str, allowed_sharding_types: list[str], sharder_key: str = ""
    ) -> list[str]:
        allowed = list(allowed_sharding_types)
        if name in self.dynamic_tables():
            # TorchRec's sharder of bags does not list row-wise types for the CPU
            on_gpu = self.sharder_map[sharder_key].sharding_types("cuda")
            allowed += [kind for kind in on_gpu if kind not in allowed]
            allowed = [kind for kind in allowed if kind != _DATA_PARALLEL]
        filtered: list[str] = super()._filter_sharding_types(name, allowed, sharder_key)
        return filtered

    def _filter_compute_kernels(
        self, name: str, allowed_compute_kernels: list[str], sharding_type: str
    ) -> list[str]:
        dynamic = name in self.dynamic_tables()
        allowed = [kind for kind in allowed_compute_kernels if (kind == DYNAMIC_KERNEL) == dynamic]
        if dynamic and not allowed:
            raise ValueError(
                f"DynamicEmbeddingEnumerator: table {name!r} is to be dynamic, but its sharder "
                f"offers {allowed_compute_kernels} only: shard its collection with "
                "DynamicEmbeddingBagCollectionSharder or DynamicEmbeddingCollectionSharder, and "
                "leave the sharder of a module around it out, or leave the table static"
            )
        filtered: list[str] = super()._filter_compute_kernels(name, allowed, sharding_type)
        return filtered


def _config_of(option: ShardingOption) -> BaseEmbeddingConfig:
    module = option.module[1]
    for config in configs_of(module):
        if config.name == option.name:
            return config
    raise TypeError(
        f"DynamicEmbeddingEnumerator: table {option.name!r} is to be dynamic, but its module is a "
        f"{type(module).__name__}, expected an EmbeddingBagCollection or EmbeddingCollection"
    )


def _dynamic_names(constraints: Constraints | None) -> set[str]:
    return {
        name
        for name, constraint in (constraints or {}).items()
        if constrained_options(constraint) is not None
    }


def dynamic_enumerator(
    topology: Topology,
    constraints: Constraints | None = None,
    batch_size: int | None = None,
) -> DynamicEmbeddingEnumerator:
    """Return an enumerator for TorchRec's own planners; see :class:`DynamicEmbeddingEnumerator`.

    Args:
        topology: of the machines.
        constraints: by table name; the same as the planner's.
        batch_size: of one rank.

    Example:
        >>> from torch_dynemb.torchrec import DynamicTableConstraints, TableOptions
        >>> from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
        >>> topology = Topology(world_size=2, compute_device="cpu")
        >>> constraints = {"users": DynamicTableConstraints(TableOptions())}
        >>> planner = EmbeddingShardingPlanner(
        ...     topology, constraints=constraints,
        ...     enumerator=dynamic_enumerator(topology, constraints),
        ... )
    """
    return DynamicEmbeddingEnumerator(topology, batch_size, constraints)


def collective_plan(
    planner: ShardingPlanner,
    module: nn.Module,
    sharders: list[ModuleSharder[nn.Module]] | None = None,
    pg: dist.ProcessGroup | None = None,
) -> ShardingPlan:
    """Plan on rank 0 and broadcast the plan; all ranks raise an error of rank 0.

    TorchRec's own method leaves the other ranks waiting when rank 0 raises.

    Args:
        planner: any that has ``plan``.
        module: the model.
        sharders: default: TorchRec's, which support static tables only.
        pg: default: all ranks.

    Raises:
        RuntimeError: the process group is missing.
        Exception: as ``planner.plan`` raised on rank 0.
    """
    if pg is None:
        pg = default_group()
        if pg is None:
            raise RuntimeError(
                "collective_plan: the process group is missing: call "
                "torch.distributed.init_process_group first, or planner.plan(...) for one rank"
            )
    if sharders is None:
        sharders = get_default_sharders()
    plan: ShardingPlan | None = None
    failure: Exception | None = None
    message: Any = None
    if pg.rank() == 0:
        try:
            plan = planner.plan(module, sharders)
            # pickled inside the try: a plan that cannot be pickled is an error of rank 0, too
            message = (pickle.dumps(plan), None, "")
        except Exception as raised:
            failure = raised
            message = (None, _portable(raised), traceback.format_exc())
    if pg.size() > 1:
        message = from_first_rank(message, pg)
    if failure is not None:
        raise failure
    if plan is not None:
        return plan
    pickled, error, told = message
    if error is not None:
        raise pickle.loads(error) from RuntimeError(f"planning failed on rank 0:\n{told}")
    return pickle.loads(pickled)


def _portable(error: Exception) -> bytes:
    """Serialize an error so that other ranks can raise it: itself, or else its text."""
    try:
        pickled = pickle.dumps(error)
        # an error with another constructor signature can be pickled, but not unpickled
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    return pickled


class DynamicEmbeddingShardingPlanner(EmbeddingShardingPlanner):  # type: ignore[misc]
    """TorchRec's EmbeddingShardingPlanner for models with dynamic tables; the name is DynamicEmb's.

    Tables become dynamic by ``tables`` of their sharder, or by :class:`DynamicTableConstraints`;
    see :class:`DynamicEmbeddingEnumerator`.

    Args:
        eb_configs: configs of the model's tables; names in ``constraints`` are checked against
            them. None: names are checked against the model alone.
        topology: of the machines; default: that of the process group.
        batch_size: of one rank.
        enumerator: a :class:`DynamicEmbeddingEnumerator` with the same dynamic tables; default: one
            with these constraints.
        storage_reservation: as in TorchRec.
        constraints: by table name.
        planner: further arguments of TorchRec's planner, such as ``proposer`` and ``debug``.

    Raises:
        ValueError: ``constraints`` names tables that ``eb_configs`` lack, or dynamic tables cannot
            meet them.
        TypeError: ``eb_configs`` or ``enumerator`` has another type.
    """

    def __init__(
        self,
        eb_configs: Sequence[BaseEmbeddingConfig] | None = None,
        topology: Topology | None = None,
        batch_size: int | None = None,
        enumerator: Enumerator | None = None,
        storage_reservation: StorageReservation | None = None,
        *,
        constraints: Mapping[str, ParameterConstraints] | None = None,
        **planner: Any,
    ) -> None:
        owner = "DynamicEmbeddingShardingPlanner"
        if isinstance(eb_configs, Topology):  # the first argument of TorchRec's planner
            raise TypeError(
                f"{owner}: eb_configs is a Topology, expected configs of tables: give it as "
                "topology="
            )
        if eb_configs is not None:
            names = [config.name for config in eb_configs]
            unknown = sorted(set(constraints or {}) - set(names))
            if unknown:
                raise ValueError(
                    f"{owner}: constraints name {unknown}, but the tables of eb_configs are "
                    f"{names}: correct or remove these names"
                )
        if enumerator is not None:
            _check_enumerator(owner, enumerator, constraints)
        else:
            _check_constraints(owner, constraints or {})
        super().__init__(
            topology=topology,
            batch_size=batch_size,
            enumerator=enumerator,
            storage_reservation=storage_reservation,
            constraints=constraints,
            **planner,
        )
        if enumerator is None:
            self._enumerator = DynamicEmbeddingEnumerator(
                self._topology, self._batch_size, constraints
            )

    def collective_plan(
        self,
        module: nn.Module,
        sharders: list[ModuleSharder[nn.Module]] | None = None,
        pg: dist.ProcessGroup | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 and broadcast the plan; see :func:`collective_plan`."""
        return collective_plan(self, module, sharders, pg)


def _check_enumerator(owner: str, enumerator: Enumerator, constraints: Constraints | None) -> None:
    if not isinstance(enumerator, DynamicEmbeddingEnumerator):
        raise TypeError(
            f"{owner}: enumerator is {enumerator!r}, expected a DynamicEmbeddingEnumerator: others "
            "cannot price dynamic tables"
        )
    expected, given = _dynamic_names(constraints), _dynamic_names(enumerator._constraints)
    if given != expected:
        raise ValueError(
            f"{owner}: constraints make {sorted(expected)} dynamic, but those of the enumerator "
            f"{sorted(given)}: give both the same constraints"
        )


__all__ = [
    "DynamicEmbeddingEnumerator",
    "DynamicEmbeddingShardingPlanner",
    "collective_plan",
    "dynamic_enumerator",
]
