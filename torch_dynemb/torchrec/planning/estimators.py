"""Bytes and time that planners estimate for each shard of dynamic tables."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner.constants import kernel_bw_lookup
from torchrec.distributed.planner.shard_estimators import (
    EmbeddingPerfEstimator,
    EmbeddingStorageEstimator,
)
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Shard,
    ShardEstimator,
    ShardingOption,
    Storage,
    Topology,
)
from torchrec.distributed.planner.utils import get_num_poolings
from torchrec.distributed.types import ModuleSharder
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type

from torch_dynemb.distributed.owners import share_of
from torch_dynemb.ops.columns import BUCKET_WORDS, SKETCH_ROWS
from torch_dynemb.ops.tiers import record_bytes
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.policy.admission import AdmitFrequentSketch
from torch_dynemb.policy.layout import index_bytes_per_id
from torch_dynemb.storage.tiers import ExternalStore, HostStore, SSDStore
from torch_dynemb.storage.tiers import Storage as TierStorage
from torch_dynemb.storage.tiers.configs import CachedStorage
from torch_dynemb.storage.tiers.host_store import LEAST_SPLIT_BYTES
from torch_dynemb.table.group_config import SLOT_BYTES, TIERED_ROW_BYTES
from torch_dynemb.torchrec.planning.fused_params import default_optimizer
from torch_dynemb.torchrec.planning.options import DYNAMIC_KERNEL, TableOptions, TableParams

Constraints = Mapping[str, ParameterConstraints]

# FBGEMM's optimizer if fused_params name none
_DEFAULT_OPTIMIZER = EmbOptimType.EXACT_SGD
# A lookup reads one bucket of the index, which is a cache line, for each id.
_PROBE_BYTES = 8 * BUCKET_WORDS

_GENERATION_BYTES = 4  # of a row
_PLACE_BYTES = 4  # of a row, in the cache of a HostStore


def planned_optimizer(parameter: Tensor, sharder: ModuleSharder[nn.Module]) -> OptimizerConfig:
    """Return the optimizer of a dynamic table, which determines its state.

    The order of precedence is apply_optimizer_in_backward, the sharder's ``optimizer``, the
    sharder's fused_params.

    Raises:
        NotImplementedError: dynamic tables lack this optimizer.
    """
    own = (getattr(parameter, "_optimizer_kwargs", None) or [{}])[0]
    kind = (getattr(parameter, "_optimizer_classes", None) or [None])[0]
    given = getattr(sharder, "optimizer", None)
    fused_params = getattr(sharder, "fused_params", None) or {}
    if "optimizer" in own:
        kind = own["optimizer"]
    elif kind is not None:
        kind = optimizer_type_to_emb_opt_type(kind)
    elif isinstance(given, OptimizerConfig):
        return given
    else:
        kind = fused_params.get("optimizer", _DEFAULT_OPTIMIZER)
    return default_optimizer("planner", kind)


def is_dynamic_option(option: ShardingOption) -> bool:
    """Return whether a sharding option makes its table dynamic."""
    return bool(option.compute_kernel == DYNAMIC_KERNEL)


class PlannedTable(NamedTuple):
    """Dynamic table in a planner.

    Attributes:
        options: of the table.
        optimizer: with the state of its rows.
    """

    options: TableOptions
    optimizer: OptimizerConfig


def set_planned(option: ShardingOption, table: PlannedTable, *, in_plan: bool) -> None:
    """Store the table in a dynamic sharding option.

    Args:
        option: of the table.
        table: for the estimates.
        in_plan: whether its options become part of the plan; False: the sharder has them.
    """
    if in_plan:
        option.key_value_params = TableParams(options=table.options)
    # estimators see a snapshot of the sharder, without the optimizers added to it
    option.dynamic_table = table


def _planned(option: ShardingOption) -> PlannedTable:
    table = getattr(option, "dynamic_table", None)
    if not isinstance(table, PlannedTable):
        raise ValueError(
            f"table {option.name!r}: its compute_kernel is {DYNAMIC_KERNEL!r}, but the enumerator "
            "has not set its options: plan with a DynamicEmbeddingEnumerator"
        )
    return table


def shard_bytes(option: ShardingOption, *, on_gpu: bool = True) -> list[int]:
    """Return bytes of rows, optimizer state and index for each shard of a full dynamic table.

    A shard holds capacity / parts ids, where parts are the ranks that share its columns. Each id
    takes:

    * its columns, 4 bytes for the generation of the row, and its optimizer state;
    * a slot of 16 bytes (id and handle) in a bucket of four, filled up to 70 %;
    * 8 bytes for each score that the table keeps.

    Each shard of columns has its own index.

    A table with ``storage`` counts the rows in its caches, each with a slot of 36 bytes, and 12
    bytes for each id; :func:`bytes_on_disk` has its rows on disk. A cache of fixed bytes or rows is
    counted once per shard, because which tables share one is known only after planning. Rows of a
    table with a HostStore count in full, wherever they lie; those in its cache count a second time.

    The estimate has these limits:

    * scores are those of the table's own policy, but tables of one kernel keep the scores of all of
      them;
    * the index of an unbounded table grows by 45 % at a time and may be that much larger;
    * an admission sketch counts once for each shard; counters of AdmitFrequent are not included.

    Args:
        option: of the table.
        on_gpu: whether a GPU has a cache of its own above a store (``device_cache``).
    """
    options, _ = _planned(option)
    index = index_bytes_per_id(_score_words(options))
    sketch = 0
    if isinstance(options.policy.admission, AdmitFrequentSketch):
        sketch = 4 * SKETCH_ROWS * options.policy.admission.width
    return [
        math.ceil(ids * index) + _row_bytes(options.storage, ids, sum(row), on_gpu) + sketch
        for ids, row in _ids_and_row_bytes(option)
    ]


def bytes_beyond_hbm(option: ShardingOption) -> list[int]:
    """Return the bytes of :func:`shard_bytes` that a GPU maps in host memory, by shard.

    These are the rows of a table with a HostStore beyond its ``hbm``, which is counted once per
    shard, or all of its rows if it has a cache. Of a table with a store it is the cache in host
    memory. On the CPU all bytes are host memory.
    """
    storage = _planned(option)[0].storage
    if isinstance(storage, SSDStore | ExternalStore):
        return [_host_bytes(storage, ids, sum(row)) for ids, row in _ids_and_row_bytes(option)]
    if not isinstance(storage, HostStore):
        return [0] * len(option.shards)
    return [
        max(0, ids * sum(size for size in row if size >= LEAST_SPLIT_BYTES) - storage.hbm_bytes)
        for ids, row in _ids_and_row_bytes(option)
    ]


def bytes_on_disk(option: ShardingOption) -> list[int]:
    """Return the bytes of the records that full shards have on a disk.

    Files are larger: they also have records that were written again since. 0 for tables without an
    SSDStore.
    """
    if not isinstance(_planned(option)[0].storage, SSDStore):
        return [0] * len(option.shards)
    return [
        # without the generation, which is a part of the record's header
        ids * record_bytes(sum(row) - _GENERATION_BYTES)
        for ids, row in _ids_and_row_bytes(option)
    ]


def _ids_and_row_bytes(option: ShardingOption) -> list[tuple[int, list[int]]]:
    """Return the ids of each full shard, and the bytes a row of each tensor with its rows."""
    options, optimizer = _planned(option)
    capacity = options.policy.capacity or option.tensor.shape[0]
    parts = _parts(option)
    result = []
    for shard in option.shards:
        dim = shard.size[1]
        weights = dim * option.tensor.element_size()
        row = [weights, _GENERATION_BYTES, *(tensor.row_bytes(dim) for tensor in optimizer.state)]
        result.append((share_of(capacity, parts[shard.offset[1]]), row))
    return result


def _row_bytes(storage: TierStorage | None, ids: int, row: int, on_gpu: bool) -> int:
    """Return bytes of memory for the rows of ``ids`` ids, with ``row`` bytes each."""
    slot = row + SLOT_BYTES
    if isinstance(storage, HostStore) and storage.cache_size is not None:
        return ids * (row + _PLACE_BYTES) + storage.slots(max(ids, 1), slot, share=1.0) * slot
    if storage is None or isinstance(storage, HostStore):
        return ids * row
    device = 0
    if on_gpu and storage.device_size is not None:
        slots = min(ids, storage.device_size.slots(ids, slot, share=1.0))
        device = ids * _PLACE_BYTES + slots * slot
    return device + _host_bytes(storage, ids, row)


def _host_bytes(storage: CachedStorage, ids: int, row: int) -> int:
    """Return bytes of host memory for rows of a store and their cache."""
    slot = row + SLOT_BYTES
    cached = min(ids, storage.cache_size.slots(ids, slot, share=1.0))
    return ids * TIERED_ROW_BYTES + cached * slot


def _parts(option: ShardingOption) -> Counter[int]:
    """Count the shards that share the ids of the same columns, by first column."""
    return Counter(shard.offset[1] for shard in option.shards)


def _score_words(options: TableOptions) -> int:
    """Count the score words of an id; any score also keeps the step."""
    kept = set(options.policy.scores) - {"none"}
    of_features = any(policy.ttl is not None for policy in options.feature_policies.values())
    if of_features or options.policy.ttl is not None:
        kept.add("expiry")
    return len(kept | {"step"}) if kept else 0


class _NoRows:
    """Shape of a table without rows, for which TorchRec's formula counts the buffers alone."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape = tensor.shape
        self.dtype: torch.dtype = tensor.dtype
        self._element_size = tensor.element_size()

    def element_size(self) -> int:
        return self._element_size

    def numel(self) -> int:
        return 0


def _fused_twin(option: ShardingOption) -> ShardingOption:
    """Copy an option as one of FBGEMM's fused kernel, because TorchRec prices only its own
    kernels."""
    twin = copy.copy(option)
    twin.compute_kernel = EmbeddingComputeKernel.FUSED.value
    # any rank may get ids, also ranks without rows of a short static table
    twin.shards = [
        Shard(size=[max(shard.size[0], 1), shard.size[1]], offset=shard.offset)
        for shard in option.shards
    ]
    return twin


class _Estimator(ShardEstimator):  # type: ignore[misc]
    """Base of estimators that pass static tables to TorchRec's."""

    _default_stock: ClassVar[type[Any]]  # prices tables that the call gives no stock for

    def __init__(
        self,
        topology: Topology,
        constraints: Constraints | None = None,
        *,
        stock: ShardEstimator | None = None,
    ) -> None:
        self._topology = topology
        self._constraints = constraints
        self._stock = stock or self._default_stock(topology, constraints)

    # the name of the second argument differs between TorchRec versions
    def estimate(
        self, sharding_options: Sequence[ShardingOption], *args: Any, **kwargs: Any
    ) -> None:
        static = [option for option in sharding_options if not is_dynamic_option(option)]
        dynamic = [option for option in sharding_options if is_dynamic_option(option)]
        if static:
            self._stock.estimate(static, *args, **kwargs)
        if not dynamic:
            return
        twins = [self._twin(option) for option in dynamic]
        self._stock.estimate(twins, *args, **kwargs)
        for option, twin in zip(dynamic, twins, strict=True):
            self._price(option, twin)

    def _twin(self, option: ShardingOption) -> ShardingOption:
        return _fused_twin(option)

    def _price(self, option: ShardingOption, twin: ShardingOption) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} does not define _price(): a subclass prices dynamic tables "
            "there"
        )


class DynamicStorageEstimator(_Estimator):
    """Estimator of bytes: dynamic tables by capacity, static ones as TorchRec counts them.

    A dynamic shard takes the bytes of :func:`shard_bytes`, and the buffers of ids and outputs that
    TorchRec counts for a static one.

    Args:
        topology: of the machines.
        constraints: by table name.
        stock: prices the static tables; default: TorchRec's EmbeddingStorageEstimator.
    """

    _default_stock = EmbeddingStorageEstimator

    def _twin(self, option: ShardingOption) -> ShardingOption:
        twin = _fused_twin(option)
        twin._tensor = _NoRows(option.tensor)
        return twin

    def _price(self, option: ShardingOption, twin: ShardingOption) -> None:
        on_host = self._topology.compute_device == "cpu"
        sizes = shard_bytes(option, on_gpu=not on_host)
        ddr = sizes if on_host else bytes_beyond_hbm(option)
        ssd = bytes_on_disk(option)
        for k, (shard, priced) in enumerate(zip(option.shards, twin.shards, strict=True)):
            rows = Storage(hbm=sizes[k] - ddr[k], ddr=ddr[k], ssd=ssd[k])
            shard.storage = priced.storage + rows


class DynamicPerfEstimator(_Estimator):
    """Estimator of milliseconds: TorchRec's, plus index probes of dynamic tables.

    A dynamic shard takes TorchRec's time for FBGEMM's fused kernel. The forward adds 64 bytes of
    memory traffic per id: its bucket, which is not cached. The backward has handles and adds none.
    Rows of a table with ``storage`` are priced as rows in the memory of the device, because misses
    depend on the ids.

    Args:
        topology: of the machines.
        constraints: by table name.
        stock: prices the rest; default: TorchRec's EmbeddingPerfEstimator.
    """

    _default_stock = EmbeddingPerfEstimator

    def _price(self, option: ShardingOption, twin: ShardingOption) -> None:
        bandwidth = kernel_bw_lookup(
            self._topology.compute_device,
            EmbeddingComputeKernel.FUSED.value,
            self._topology.hbm_mem_bw,
            self._topology.ddr_mem_bw,
            self._topology.hbm_to_ddr_mem_bw,
        )
        parts = _parts(option)
        ids = self._ids(option)
        for shard, priced in zip(option.shards, twin.shards, strict=True):
            probes = ids / parts[shard.offset[1]] * _PROBE_BYTES / bandwidth
            shard.perf = dataclasses.replace(
                priced.perf, fwd_compute=priced.perf.fwd_compute + probes
            )

    def _ids(self, option: ShardingOption) -> float:
        """Return the number of ids of a table in the batches of all ranks."""
        constraints = (self._constraints or {}).get(option.name)
        sizes = constraints.batch_sizes if constraints is not None else None
        return float(
            sum(
                length * poolings * size
                for length, poolings, size in zip(
                    option.input_lengths,
                    get_num_poolings(self._constraints, option),
                    sizes or [option.batch_size] * option.num_inputs,
                    strict=True,
                )
            )
            * self._topology.world_size
        )


__all__ = [
    "DynamicPerfEstimator",
    "DynamicStorageEstimator",
    "PlannedTable",
    "bytes_beyond_hbm",
    "bytes_on_disk",
    "is_dynamic_option",
    "planned_optimizer",
    "set_planned",
    "shard_bytes",
]
