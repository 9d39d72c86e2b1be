"""Options of dynamic tables in a TorchRec collection, and their place in a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, runtime_checkable

from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import KeyValueParams, ParameterSharding
from torchrec.modules.embedding_configs import BaseEmbeddingConfig

from torch_dynemb.initializers import Initializer
from torch_dynemb.optim import SGD
from torch_dynemb.optim.base import DELAYED_GRADIENTS, DelayedGradients, OptimizerConfig
from torch_dynemb.policy.admission import AdmitNone
from torch_dynemb.policy.policy import FeaturePolicy, Policy
from torch_dynemb.storage.tiers import Storage, check_storage
from torch_dynemb.table.config import EvalDefault

# Name of the dynamic kernel in a sharding plan; TorchRec has no registry of kernels.
DYNAMIC_KERNEL = EmbeddingComputeKernel.CUSTOMIZED_KERNEL.value
# Optimizer of tables that are not trained: no state, and gradients leave rows unchanged.
NOT_TRAINED = SGD(lr=0.0, non_finite="skip")


@dataclass(frozen=True, eq=False, kw_only=True)
class TableOptions:
    """Options of a dynamic table in an EmbeddingBagCollection or EmbeddingCollection.

    Name, dim, features and dtype are those of the table's TorchRec config. Its ``num_embeddings``
    limits nothing; planners use it as the capacity if the policy has none.

    Args:
        initializer: of new rows; default: uniform between the config's ``weight_init_min`` and
            ``weight_init_max``, which are plus and minus sqrt(1 / num_embeddings) by default.
        policy: admission and eviction of ids. Its capacity, and the memory of a sketch, are those
            of the whole table: shards of its ids share them equally.
        feature_policies: exceptions from the policy, by feature.
        padding_idx: an id that is looked up as zeros, never inserted and never trained.
        eval_default: value of ids without a row in read-only lookups.
        trainable: False: neither insert nor train rows. Rows come from a loaded state and have no
            optimizer state; training lookups read as evaluation does.
        delayed_gradients: as in :class:`torch_dynemb.optim.OptimizerConfig`; None: as the sharder's
            ``optimizer`` says. ``"apply"`` is for pipelines that look a batch up before the
            backward of the previous one, such as TorchRec's ``TrainPipelineSemiSync``. It cannot be
            combined with ``storage``.
        split: backward only collects gradients, and ``step()`` of the model's ``fused_optimizer``
            applies their sum once, so several micro-batches are one batch. ``zero_grad()`` drops
            them. See :class:`torch_dynemb.SplitOptimizer`.
        storage: store of rows beyond those in the memory of the device; None: all rows are in it. A
            :class:`torch_dynemb.HostStore` is for GPUs: TorchRec's FUSED_UVM is ``HostStore()``,
            and its FUSED_UVM_CACHING is ``HostStore(cache=cache_load_factor)``.
            Its budgets are for the tables of one kernel on each rank, and the planner counts rows
            beyond ``hbm`` as host memory. On GPUs, the other stores need ``device_cache``.
            On each rank, tables of a module with the same storage, sharding type and optimizer
            share one cache. An :class:`torch_dynemb.SSDStore` writes into ``<path>/<path of the
            module>/<tables>/rank<r>of<n>``. An :class:`torch_dynemb.ExternalStore` gets table names
            of the form ``<path of the module>.<table>``. Each rank has its own store; a store in a
            plan that is sent to all ranks must support pickling.
        score_from: ``"weights"``: weights of the ids in a KeyedJaggedTensor are the custom scores
            of training lookups, rounded to integers unless they are added to a decayed sum. They
            are weights of bags, too, only if the collection is weighted. None: scores are set with
            ``group.scores.set_batch``.
        record_evicted: record the ids that the table evicts, on the host, until
            ``pop_evicted_keys`` of :mod:`torch_dynemb.compat.dynamicemb` takes them. Every step
            then waits for the device, and raises if it evicts more than a million ids of a kernel.

    Tables of one module may differ in all options. Options for updates, and ``storage``, also
    decide which tables share a kernel.

    Raises:
        TypeError: ``initializer``, ``policy``, ``trainable``, ``split``, ``storage`` or
            ``record_evicted`` has another type.
        ValueError: ``delayed_gradients`` or ``score_from`` has another value, or the policy keeps
            no custom scores for ``score_from``.
    """

    initializer: Initializer | None = None
    policy: Policy = field(default_factory=Policy)
    feature_policies: Mapping[str, FeaturePolicy] = field(default_factory=dict)
    padding_idx: int | None = None
    eval_default: EvalDefault = "initial"
    trainable: bool = True
    delayed_gradients: DelayedGradients | None = None
    split: bool = False
    storage: Storage | None = None
    score_from: Literal["weights"] | None = None
    record_evicted: bool = False

    def __post_init__(self) -> None:
        if self.initializer is not None and not isinstance(self.initializer, Initializer):
            raise TypeError(
                f"TableOptions: initializer is {self.initializer!r}, expected one of "
                "torch_dynemb's initializers, such as Uniform(-0.01, 0.01)"
            )
        if not isinstance(self.policy, Policy):
            raise TypeError(
                f"TableOptions: policy is {self.policy!r}, expected torch_dynemb.Policy(...)"
            )
        for name in ("trainable", "split", "record_evicted"):
            given = getattr(self, name)
            if not isinstance(given, bool):
                raise TypeError(f"TableOptions: {name} is {given!r}, expected True or False")
        if self.delayed_gradients not in (None, *DELAYED_GRADIENTS):
            raise ValueError(
                f"TableOptions: delayed_gradients is {self.delayed_gradients!r}, expected None or "
                f"one of {DELAYED_GRADIENTS}"
            )
        check_storage("TableOptions", self.storage)
        if self.score_from not in (None, "weights"):
            raise ValueError(
                f"TableOptions: score_from is {self.score_from!r}, expected None or 'weights'"
            )
        if self.score_from is not None and self.policy.custom is None:
            raise ValueError(
                f"TableOptions: score_from is {self.score_from!r}, but the policy has scores "
                f"{self.policy.scores}, none of which is given: give policy=Policy(score=Custom()),"
                " or leave score_from out"
            )
        if not self.trainable:
            policy = replace(self.policy, admission=AdmitNone(), refused=None)
            object.__setattr__(self, "policy", policy)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableOptions:
        """Return the same object, which is immutable: planners copy options, but must not copy a
        store."""
        return self

    def optimizer_of(self, optimizer: OptimizerConfig) -> OptimizerConfig:
        """Return the optimizer config of the table's rows.

        Args:
            optimizer: that of trained tables; ``delayed_gradients`` of the options override its
                own.
        """
        if not self.trainable:
            return NOT_TRAINED
        if self.delayed_gradients is None:
            return optimizer
        return replace(optimizer, delayed_gradients=self.delayed_gradients)

    @property
    def adds_weights_to_decayed_sums(self) -> bool:
        """Whether ``score_from`` gives the scores of :class:`torch_dynemb.Custom` decayed sums."""
        return self.score_from is not None and self.policy.combine == "decayed_sum"

    @property
    def keeps_time(self) -> bool:
        """Whether ids of the table have timestamps, decay by seconds, or expire."""
        ttls = [self.policy.ttl, *(feature.ttl for feature in self.feature_policies.values())]
        by_seconds = max(self.policy.half_life_ticks, self.policy.admission_ticks) > 0
        timed = "timestamp" in self.policy.scores or by_seconds
        return timed or any(ttl is not None for ttl in ttls)


@dataclass
class TableParams(KeyValueParams):  # type: ignore[misc]
    """Carrier of :class:`TableOptions` from a planner's constraints into its plan.

    Planners copy ``key_value_params`` unread from the constraints to the plan, which rank 0
    broadcasts. TorchRec reads it for its own key-value kernels only.
    """

    options: TableOptions = field(default_factory=TableOptions)

    def __hash__(self) -> int:
        return hash(repr(self.options))


@dataclass
class DynamicTableConstraints(ParameterConstraints):  # type: ignore[misc]
    """Planner constraints of a dynamic table.

    Args:
        options: of the table.
        constraints: as in TorchRec's ParameterConstraints, such as ``sharding_types``,
            ``min_partition`` and ``pooling_factors``.

    Raises:
        TypeError: ``options`` has another type, or TorchRec lacks a constraint.
        ValueError: ``compute_kernels`` names another kernel, or ``key_value_params`` is given.

    Example:
        >>> from torch_dynemb.torchrec import DynamicTableConstraints, TableOptions
        >>> import torch_dynemb as td
        >>> options = TableOptions(policy=td.Policy(capacity=1_000_000))
        >>> constraints = {"users": DynamicTableConstraints(options, sharding_types=["row_wise"])}
    """

    options: TableOptions | None = None

    def __init__(self, options: TableOptions | None = None, **constraints: object) -> None:
        kernels = constraints.pop("compute_kernels", None)
        if kernels not in (None, [DYNAMIC_KERNEL]):
            raise ValueError(
                f"DynamicTableConstraints: compute_kernels is {kernels!r}, expected none: the "
                f"table is dynamic, so its kernel is {DYNAMIC_KERNEL!r}. In place of 'fused_uvm' "
                "give TableOptions(storage=HostStore()), and for 'fused_uvm_caching' "
                "HostStore(cache=cache_load_factor)"
            )
        if constraints.get("key_value_params") is not None:
            raise ValueError(
                "DynamicTableConstraints: key_value_params is for TorchRec's own key-value "
                "kernels; give options"
            )
        if options is not None and not isinstance(options, TableOptions):
            raise TypeError(
                f"DynamicTableConstraints: options is {options!r}, expected TableOptions(...)"
            )
        self.options = TableOptions() if options is None else options
        constraints["key_value_params"] = TableParams(options=self.options)
        constraints["compute_kernels"] = [DYNAMIC_KERNEL]
        super().__init__(**constraints)

    def __hash__(self) -> int:
        value: int = super().__hash__()
        return value


@runtime_checkable
class OptionsByTable(Protocol):
    """Constraints with options that depend on the table's config."""

    def options_of_table(
        self, config: BaseEmbeddingConfig, optimizer: OptimizerConfig
    ) -> TableOptions:
        """Return the options of the table with this config."""


def is_dynamic(sharding: ParameterSharding) -> bool:
    """Return whether a plan makes a table dynamic."""
    return bool(sharding.compute_kernel == DYNAMIC_KERNEL)


def planned_options(sharding: ParameterSharding) -> TableOptions | None:
    """Return the options that a plan has for a table."""
    params = sharding.key_value_params
    return params.options if isinstance(params, TableParams) else None


def constrained_options(constraints: ParameterConstraints | None) -> TableOptions | None:
    """Return the options in the constraints of a table; None if it is static."""
    params = None if constraints is None else constraints.key_value_params
    return params.options if isinstance(params, TableParams) else None


__all__ = [
    "DYNAMIC_KERNEL",
    "NOT_TRAINED",
    "DynamicTableConstraints",
    "OptionsByTable",
    "TableOptions",
    "TableParams",
    "constrained_options",
    "is_dynamic",
    "planned_options",
]
