"""DynamicEmb's table options, translated to torch_dynemb's."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, data_type_to_dtype

from torch_dynemb.distributed.ranks import default_group
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.policy import Policy
from torch_dynemb.policy.policy import Default
from torch_dynemb.storage.tiers import HostStore, Storage, check_storage
from torch_dynemb.table.config import ROW_DTYPES
from torch_dynemb.torchrec.dynamicemb.arguments import (
    AdmissionStrategy,
    DynamicEmbCheckMode,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    EvictedItemMode,
    FrequencyAdmissionStrategy,
    KVCounter,
    ProbabilisticAdmissionStrategy,
    default_of,
    kept_scores,
)
from torch_dynemb.torchrec.dynamicemb.sizes import (
    BUCKET_CAPACITY,
    get_sharded_table_capacity,
    row_values,
)
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL, TableOptions, TableParams

ScoreStrategy = DynamicEmbScoreStrategy | tuple[DynamicEmbScoreStrategy, ...]
DistType = Literal["continuous", "roundrobin", "hash_roundrobin"]

# Fields that must keep their defaults, and the remedy.
_NOT_BUILT = {
    "evict_strategy": "score_strategy decides which ids are evicted: set that",
    "local_hbm_for_values": "DynamicEmb's planner sets it: leave it out",
    "device_id": "a table lies on the device of its rank: leave it out",
    "score_function": "scores are compared unchanged. For a count that decays, give score_strategy="
    "DynamicEmbScoreStrategy.LFU_DECAY and half_life='7d'; for scores of your own, CUSTOMIZED",
}
_OUTPUT = "TorchRec's collectives carry rows between ranks"
_COUNTER = (
    "counts are exact and take about 23 bytes for each id without a row; for a bound, give "
    "TableOptions(policy=Policy(admission=AdmitFrequentSketch(...)))"
)
# Fields of another memory layout: results do not depend on them.
_OTHER_LAYOUT = {
    "init_capacity": "memory is allocated as ids arrive",
    "max_load_factor": "the index grows in place by 45 % whenever it is 70 % full",
    "dist_type": "a hash assigns ids to ranks",
    "admission_counter": _COUNTER,
    "admit_strategy.counter": _COUNTER,
    "output_dist": _OUTPUT,
    "output_dist_capacity": _OUTPUT,
}
_GROUPED = (
    "training",
    "caching",
    "external_storage",
    "index_type",
    "dist_type",
    "score_strategy",
    "admit_strategy",
    "evicted_item_mode",
    "half_life",
)
_warned: set[str] = set()


def _warn_once(name: str, value: object) -> None:
    if name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"DynamicEmbTableOptions: {name} is {value!r}, which has no effect here: "
            f"{_OTHER_LAYOUT[name]}",
            UserWarning,
            stacklevel=5,
        )


@dataclass(eq=False)
class DynamicEmbTableOptions:
    """DynamicEmb's options of a table.

    Fields can be assigned and are checked again when a table is planned. As in DynamicEmb, options
    are equal, and have the same hash, if :meth:`get_grouped_key` is equal.

    The capacity is the config's num_embeddings, rounded up for each rank as in DynamicEmb; shards
    share it equally. An id without room is looked up as zeros in training, or as
    ``admit_strategy`` says.

    Args:
        embedding_dtype, dim: those of the table's config, or None.
        max_capacity: the config's num_embeddings, or None. DynamicEmb's planner replaces it by the
            rows of a rank, as :func:`get_sharded_table_capacity` does here.
        evict_strategy, local_hbm_for_values, device_id: must keep their defaults; the error names
            the remedy.
        training: ``TableOptions.trainable``: False neither inserts nor trains rows.
        initializer_args: ``TableOptions.initializer``.
        eval_initializer_args: ``TableOptions.eval_default``, of any mode; DynamicEmb takes
            constants only.
        caching: whether the ``global_hbm_for_values`` cache rows, all of which then lie in host
            memory: ``HostStore(cache=...)``.
        score_function: must keep its default; the error names the remedy.
        external_storage: ``TableOptions.storage``: :class:`torch_dynemb.SSDStore` or
            :class:`torch_dynemb.ExternalStore`, which set how many rows stay in memory: on a GPU
            ``device_cache`` in HBM and ``cache`` in host memory, of each rank.
        init_capacity, max_load_factor, admission_counter, output_dist, output_dist_capacity: have
            no effect. A value other than the default warns once in a process and says what happens
            instead. So does the counter of an admit_strategy.
        bucket_capacity: the rows of a rank are rounded up to a multiple of it, see
            :func:`get_sharded_table_capacity`. Buckets hold 4 ids here, and the least score of 8 of
            them is evicted.
        score_strategy: ``Policy.score``; with NO_EVICTION the table grows beyond num_embeddings.
            The first of a tuple decides which ids are evicted, or the second if the first is
            TIMESTAMP. None: as STEP.
        safe_check_mode: ``Policy.check``: ``optimizer.step()`` warns or raises.
        global_hbm_for_values: bytes of GPU memory for rows and states, over all ranks. If it is
            more than 0 and less than all of them, the rest lies in host memory:
            ``TableOptions.storage`` is a :class:`torch_dynemb.HostStore`, with a cache if
            ``caching``. On the CPU it has no effect.
        index_type: torch.int64, or None, which means the same.
        dist_type: ``"roundrobin"``, ``"hash_roundrobin"`` or ``"continuous"``. A hash assigns ids
            to ranks in any case; ``"continuous"`` warns about it.
        admit_strategy: ``Policy.admission`` and ``Policy.refused``; None: every id gets a row.
        evicted_item_mode: ``TableOptions.record_evicted``: with RETAIN_KEY, ``pop_evicted_keys`` of
            ``incremental_dump`` returns the evicted ids.
        half_life: ``Policy.half_life``, of LFU_DECAY; DynamicEmb has no such field.

    Raises:
        NotImplementedError: a value of a field that is not built.
        TypeError, ValueError: a wrong value, or a contradiction.

    Example:
        >>> from torch_dynemb.torchrec.dynamicemb import DynamicEmbTableOptions
        >>> from torch_dynemb.torchrec.dynamicemb import DynamicEmbScoreStrategy
        >>> options = DynamicEmbTableOptions(score_strategy=DynamicEmbScoreStrategy.LFU)
        >>> policy = options.table_options(num_embeddings=1_000_000, embedding_dim=64).policy
        >>> policy.score, policy.capacity, policy.on_full
        ('frequency', 1000000, 'evict')
    """

    embedding_dtype: torch.dtype | None = None
    dim: int | None = None
    max_capacity: int | None = None
    evict_strategy: Any = None
    local_hbm_for_values: int = 0
    device_id: int | None = None
    training: bool = True
    initializer_args: DynamicEmbInitializerArgs = field(default_factory=DynamicEmbInitializerArgs)
    eval_initializer_args: DynamicEmbInitializerArgs = field(
        default_factory=lambda: DynamicEmbInitializerArgs(DynamicEmbInitializerMode.CONSTANT)
    )
    caching: bool = False
    init_capacity: int | None = None
    max_load_factor: float = 0.5
    score_strategy: ScoreStrategy | None = DynamicEmbScoreStrategy.TIMESTAMP
    bucket_capacity: int = BUCKET_CAPACITY
    safe_check_mode: DynamicEmbCheckMode = DynamicEmbCheckMode.IGNORE
    global_hbm_for_values: int = 0
    external_storage: Storage | None = None
    index_type: torch.dtype | None = None
    dist_type: DistType = "roundrobin"
    admit_strategy: AdmissionStrategy | None = None
    admission_counter: KVCounter | None = None
    score_function: Any = None
    evicted_item_mode: EvictedItemMode = EvictedItemMode.DISCARD
    output_dist: str | None = None
    output_dist_capacity: Any = None
    half_life: int | str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.score_strategy, tuple) and len(self.score_strategy) == 1:
            (self.score_strategy,) = self.score_strategy
        self._check_fields()
        # errors of the other fields do not depend on the table
        self._options(num_embeddings=1, embedding_dim=1)

    def get_grouped_key(self) -> dict[str, Any]:
        """Return the fields by which DynamicEmb groups tables and compares options."""
        drawn = {"initializer": self.initializer_args}
        drawn["eval_initializer"] = self.eval_initializer_args
        key: dict[str, Any] = {name: getattr(self, name) for name in _GROUPED}
        return key | {name: arguments.mode for name, arguments in drawn.items()}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DynamicEmbTableOptions):
            return NotImplemented
        return self.get_grouped_key() == other.get_grouped_key()

    def __hash__(self) -> int:
        return hash(tuple(self.get_grouped_key().items()))

    def _check_fields(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if entry.name in _NOT_BUILT and value != entry.default:
                raise NotImplementedError(
                    f"DynamicEmbTableOptions: {entry.name} is {value!r}, but only "
                    f"{entry.default!r} is built: {_NOT_BUILT[entry.name]}"
                )
        dtype = self.embedding_dtype
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1:
            raise NotImplementedError(
                f"DynamicEmbTableOptions: embedding_dtype is {dtype}, and rows of 8 bits are not "
                "trained: give data_type=DataType.BF16 in the table's config, and leave this out. "
                "torch_dynemb.freeze(model, rows='fp8') serves rows of 8 bits"
            )
        self._check("embedding_dtype", (None, *ROW_DTYPES))
        check_storage("DynamicEmbTableOptions", self.external_storage, argument="external_storage")
        self._check("index_type", (None, torch.int64))
        self._check("dist_type", ("continuous", "roundrobin", "hash_roundrobin"))
        self._check("safe_check_mode", tuple(DynamicEmbCheckMode))
        for name, kind in (
            ("initializer_args", DynamicEmbInitializerArgs),
            ("eval_initializer_args", DynamicEmbInitializerArgs),
            ("admit_strategy", AdmissionStrategy | None),
            ("admission_counter", KVCounter | None),
            ("evicted_item_mode", EvictedItemMode),
        ):
            if not isinstance(getattr(self, name), kind):
                raise TypeError(
                    f"DynamicEmbTableOptions: {name} is {getattr(self, name)!r}, expected "
                    f"{getattr(kind, '__name__', kind)}"
                )
        strategy = self.admit_strategy
        counts = isinstance(strategy, FrequencyAdmissionStrategy)
        if self.admission_counter is not None and not counts:
            raise ValueError(
                f"DynamicEmbTableOptions: admission_counter is {self.admission_counter!r}, but "
                f"admit_strategy is {strategy!r}, expected FrequencyAdmissionStrategy, which reads "
                "it: give one, or leave it out"
            )
        for name in ("training", "caching"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(
                    f"DynamicEmbTableOptions: {name} is {getattr(self, name)!r}, expected True or "
                    "False"
                )
        if self.caching and self.global_hbm_for_values == 0:
            raise ValueError(
                "DynamicEmbTableOptions: caching is True, but global_hbm_for_values is 0: give the "
                "bytes of GPU memory that cache rows, or leave caching out: all rows are there"
            )
        for entry in fields(self):
            value = getattr(self, entry.name)
            routed_alike = entry.name == "dist_type" and value != "continuous"
            if entry.name in _OTHER_LAYOUT and value != entry.default and not routed_alike:
                _warn_once(entry.name, value)
        if isinstance(strategy, FrequencyAdmissionStrategy) and strategy.counter is not None:
            _warn_once("admit_strategy.counter", strategy.counter)

    def _check(self, name: str, allowed: tuple[Any, ...]) -> None:
        if getattr(self, name) not in allowed:
            raise ValueError(
                f"DynamicEmbTableOptions: {name} is {getattr(self, name)!r}, expected one of "
                f"{list(allowed)}"
            )

    def table_options(self, *, num_embeddings: int, embedding_dim: int) -> TableOptions:
        """Return the equivalent options for a table with these numbers in its config.

        Args:
            num_embeddings: capacity, at least 1; initial values may depend on it.
            embedding_dim: columns of a row, at least 1.

        Raises:
            NotImplementedError, TypeError, ValueError: as the constructor, for assigned fields.
            ValueError: ``max_capacity`` is another number than ``num_embeddings``.
        """
        self._check_fields()
        if self.max_capacity not in (None, num_embeddings):
            raise ValueError(
                f"DynamicEmbTableOptions: max_capacity is {self.max_capacity}, but the config has "
                f"num_embeddings={num_embeddings}: set num_embeddings to the capacity of the whole "
                "table, and leave max_capacity out"
            )
        return self._options(num_embeddings=num_embeddings, embedding_dim=embedding_dim)

    def _options(self, *, num_embeddings: int, embedding_dim: int) -> TableOptions:
        kept = kept_scores(self.score_strategy)
        if ("decayed" in (kept.score or ())) != (self.half_life is not None):
            raise ValueError(
                f"DynamicEmbTableOptions: half_life is {self.half_life!r} and score_strategy is "
                f"{self.score_strategy!r}: LFU_DECAY needs a half-life such as '7d', and other "
                "strategies have none"
            )
        refused: Default = "zeros"
        admission = None
        strategy = self.admit_strategy
        if strategy is not None:
            strategy.check()
            admission = strategy.rule()
            if strategy.initializer_args in (None, self.initializer_args):
                refused = "initial"
            else:
                refused = default_of(strategy.initializer_args, num_embeddings, embedding_dim)
        return TableOptions(
            initializer=self.initializer_args.initializer(num_embeddings),
            policy=Policy(
                score=kept.score[0] if kept.score and len(kept.score) == 1 else kept.score,
                half_life=self.half_life,
                capacity=num_embeddings,
                on_full="evict" if kept.evicts else "grow",
                admission=admission,
                refused=refused,
                check=DynamicEmbCheckMode(self.safe_check_mode).check,
            ),
            eval_default=default_of(self.eval_initializer_args, num_embeddings, embedding_dim),
            trainable=self.training,
            storage=self.external_storage,
            record_evicted=EvictedItemMode.RETAIN_KEY in self.evicted_item_mode,
        )


class DynamicEmbParameterConstraints(ParameterConstraints):  # type: ignore[misc]
    """DynamicEmb's constraints of a table.

    Args:
        sharding_types: as in TorchRec's ParameterConstraints; any but data_parallel.
        use_dynamicemb: whether the table is dynamic; if not, ``dynamicemb_options`` are ignored.
        dynamicemb_options: options of the dynamic table.
        constraints: further ones of TorchRec, such as ``pooling_factors``.

    Raises:
        ValueError: another kernel in ``compute_kernels`` than ``"customized_kernel"``, or
            ``key_value_params``, of a dynamic table.
        TypeError: options of another type.

    Example:
        >>> from torch_dynemb.torchrec.dynamicemb import (
        ...     DynamicEmbParameterConstraints, DynamicEmbTableOptions,
        ... )
        >>> constraints = {"users": DynamicEmbParameterConstraints(
        ...     sharding_types=["row_wise"], use_dynamicemb=True,
        ...     dynamicemb_options=DynamicEmbTableOptions(),
        ... )}
    """

    def __init__(
        self,
        sharding_types: list[str] | None = None,
        *,
        use_dynamicemb: bool = False,
        dynamicemb_options: DynamicEmbTableOptions | None = None,
        **constraints: Any,
    ) -> None:
        owner = "DynamicEmbParameterConstraints"
        options = DynamicEmbTableOptions() if dynamicemb_options is None else dynamicemb_options
        if not isinstance(options, DynamicEmbTableOptions):
            raise TypeError(
                f"{owner}: dynamicemb_options is {options!r}, expected DynamicEmbTableOptions(...);"
                " TableOptions(...) go into DynamicTableConstraints"
            )
        super().__init__(sharding_types=sharding_types, **constraints)
        self._use_dynamicemb = False
        self.use_dynamicemb = use_dynamicemb
        self.dynamicemb_options = options

    @property
    def use_dynamicemb(self) -> bool:
        """Whether the table is dynamic; can be assigned."""
        return self._use_dynamicemb

    @use_dynamicemb.setter
    def use_dynamicemb(self, value: bool) -> None:
        if value == self._use_dynamicemb:
            return
        for name, allowed in (
            ("compute_kernels", (None, [DYNAMIC_KERNEL])),
            ("key_value_params", (None,)),
        ):
            given = getattr(self, name)
            if value and given not in allowed:
                raise ValueError(
                    f"DynamicEmbParameterConstraints: {name} is {given!r}, but the table is "
                    "dynamic: leave it out"
                )
        self.compute_kernels = [DYNAMIC_KERNEL] if value else None
        # marks the table as dynamic; the enumerator, which has the config, asks for the options
        self.key_value_params = TableParams() if value else None
        self._use_dynamicemb = bool(value)

    def __hash__(self) -> int:
        return hash((super().__hash__(), self.use_dynamicemb, repr(self.dynamicemb_options)))

    def options_of_table(
        self, config: BaseEmbeddingConfig, optimizer: OptimizerConfig
    ) -> TableOptions:
        """Return the options of the table with this config.

        Args:
            config: of the table in its TorchRec collection.
            optimizer: of the table: its states count among the bytes of ``global_hbm_for_values``.

        The capacity is that of DynamicEmb's ranks together, for the ranks of the process group, or
        for one without a group.

        Raises:
            TypeError, ValueError: options that contradict the config, or wrong assigned fields.
        """
        options, name = self.dynamicemb_options, config.name
        if not isinstance(options, DynamicEmbTableOptions):
            raise TypeError(
                f"DynamicEmbParameterConstraints of table {name!r}: dynamicemb_options is "
                f"{options!r}, expected DynamicEmbTableOptions(...)"
            )
        rows, dim = config.num_embeddings, config.embedding_dim
        # not the parameter's dtype: TorchRec makes it float16 for every dtype but float32
        dtype = data_type_to_dtype(config.data_type)
        if options.embedding_dtype not in (None, dtype):
            raise ValueError(
                f"DynamicEmbTableOptions of table {name!r}: embedding_dtype is "
                f"{options.embedding_dtype}, but its config has data_type={config.data_type}: set "
                "data_type there, such as data_type=DataType.BF16"
            )
        if options.dim not in (None, dim):
            raise ValueError(
                f"DynamicEmbTableOptions of table {name!r}: dim is {options.dim}, but its config "
                f"has embedding_dim={dim}: leave dim out"
            )
        needed = rows * row_values(dim, optimizer) * dtype.itemsize
        found = options.table_options(num_embeddings=rows, embedding_dim=dim)
        group = default_group()
        ranks = 1 if group is None else group.size()
        if 0 < options.global_hbm_for_values < needed:
            if found.storage is not None:
                raise ValueError(
                    f"DynamicEmbTableOptions of table {name!r}: global_hbm_for_values is "
                    f"{options.global_hbm_for_values}, less than the {needed} bytes of all rows "
                    "and states, but there is an external_storage, which has a cache of its own: "
                    "leave one of them out"
                )
            hbm = options.global_hbm_for_values // ranks
            found = replace(
                found, storage=HostStore(cache=hbm) if options.caching else HostStore(hbm=hbm)
            )
        capacity = ranks * get_sharded_table_capacity(config, ranks, options.bucket_capacity)
        return replace(found, policy=replace(found.policy, capacity=capacity))


__all__ = [
    "DynamicEmbCheckMode",
    "DynamicEmbInitializerArgs",
    "DynamicEmbInitializerMode",
    "DynamicEmbParameterConstraints",
    "DynamicEmbScoreStrategy",
    "DynamicEmbTableOptions",
    "EvictedItemMode",
    "FrequencyAdmissionStrategy",
    "KVCounter",
    "ProbabilisticAdmissionStrategy",
]
