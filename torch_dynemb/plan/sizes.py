"""Bytes of tables by number of ids and tier, as the library itself counts them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

import torch

from torch_dynemb import ops, optim
from torch_dynemb.distributed.owners import share_of
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.policy import Policy
from torch_dynemb.policy.layout import INDEX_STEP, index_bytes_per_id
from torch_dynemb.storage.tiers import SSDStore
from torch_dynemb.storage.tiers.cache_size import LEAST_SLOTS
from torch_dynemb.table import TableConfig
from torch_dynemb.table.group_config import SLOT_BYTES, TIERED_ROW_BYTES, GroupConfig

_ROOM_TO_COLLECT = 4 / 3  # bytes of files per byte of rows; see SSDStore


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "sgd": optim.SGD,
    "momentum-sgd": optim.MomentumSGD,
    "lars-sgd": optim.LARSSGD,
    "adagrad": optim.Adagrad,
    "rowwise-adagrad": optim.RowWiseAdagrad,
    "rmsprop": optim.RMSprop,
    "rowwise-rmsprop": optim.RowWiseRMSprop,
    "adadelta": optim.Adadelta,
    "ftrl": optim.Ftrl,
    "group-ftrl": optim.GroupFtrl,
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "adamw-tf": optim.AdamWTF,
    "amsgrad": optim.AMSGrad,
    "smart-decay-adam": optim.SmartDecayAdam,
    "partial-rowwise-adam": optim.PartialRowWiseAdam,
    "lamb": optim.LAMB,
    "partial-rowwise-lamb": optim.PartialRowWiseLAMB,
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
STATE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "uint8": torch.uint8}


@dataclass(frozen=True)
class PlannedRow:
    """Format of a row and of its optimizer state.

    Attributes:
        dim: columns of a row.
        optimizer: a name in :data:`OPTIMIZERS`.
        dtype: of the row, a name in :data:`DTYPES`.
        state_dtype: of the optimizer's state, a name in :data:`STATE_DTYPES`.

    Raises:
        ValueError: ``dim`` is out of its range, or the optimizer has no state of that dtype.
    """

    dim: int
    optimizer: str
    dtype: str
    state_dtype: str

    def __post_init__(self) -> None:
        self.group()

    def optimizer_config(self) -> OptimizerConfig:
        """Return the optimizer, with an arbitrary learning rate."""
        kind = OPTIMIZERS[self.optimizer]
        options: dict[str, Any] = {"lr": 0.01}
        if "state_dtype" in {entry.name for entry in dataclasses.fields(kind)}:
            options["state_dtype"] = STATE_DTYPES[self.state_dtype]
        elif self.state_dtype != "float32":
            raise ValueError(
                f"state_dtype is {self.state_dtype}, but {self.optimizer} keeps no value per "
                "weight: leave --state-dtype out"
            )
        return kind(**options)

    def group(self, policy: Policy | None = None, *, stored: bool = False) -> GroupConfig:
        """Return the configuration of a group with a table of such rows; allocates nothing.

        Args:
            policy: of the table; None: keep all ids.
            stored: whether its rows are in files.
        """
        table = TableConfig(
            "table",
            self.dim,
            dtype=DTYPES[self.dtype],
            policy=policy or Policy(),
            storage=SSDStore("rows") if stored else None,
        )
        return GroupConfig((table,), self.optimizer_config(), None, None, seed=0, split=False)


@dataclass(frozen=True)
class Bytes:
    """Bytes of a rank's part of the tables.

    Attributes:
        rows: of weights, with the generation of each row.
        state: of the optimizer.
        index: of ids, handles, scores and counts of admission.
        disk: of files.
    """

    rows: int
    state: int
    index: int
    disk: int = 0

    @property
    def memory(self) -> int:
        """Bytes of memory: the sum of rows, state and index."""
        return self.rows + self.state + self.index


def in_memory(
    row: PlannedRow, ids: float, *, ranks: int, policy: Policy | None = None, counted: float = 0
) -> Bytes:
    """Return a rank's bytes if all rows are in memory.

    Args:
        row: format of rows.
        ids: number of ids, over all ranks.
        ranks: number of ranks that share them.
        policy: of the tables; its capacity, if it has one, should be ``ids``. Without a capacity
            the index has its largest size after a growth.
        counted: number of ids without a row that admission counts.
    """
    group = row.group(policy)
    (slab,) = group.slabs
    mine = share_of(math.ceil(ids), ranks)
    bounded = policy is not None and policy.capacity is not None
    index = index_bytes_per_id(len(group.layout.score_words)) * (1 if bounded else INDEX_STEP)
    counters = index_bytes_per_id(0) * INDEX_STEP * share_of(math.ceil(counted), ranks)
    state = group.state_bytes(slab)
    return Bytes(
        rows=mine * (group.row_bytes(slab) - state),
        state=mine * state,
        index=math.ceil(mine * index + counters),
    )


def on_disk(row: PlannedRow, ids: float, cached: float, *, ranks: int) -> Bytes:
    """Return a rank's bytes if rows are in files, and some of them cached in memory.

    Args:
        row: format of rows.
        ids: number of ids, over all ranks.
        cached: number of cached rows, over all ranks.
        ranks: number of ranks that share them.
    """
    group = row.group(stored=True)
    (slab,) = group.slabs
    mine = share_of(math.ceil(ids), ranks)
    slots = max(LEAST_SLOTS, share_of(math.ceil(cached), ranks))
    state = group.state_bytes(slab)
    index = mine * (
        index_bytes_per_id(len(group.layout.score_words)) * INDEX_STEP + TIERED_ROW_BYTES
    )
    record = ops.record_bytes(group.row_bytes(slab) - 4)
    return Bytes(
        rows=slots * (group.row_bytes(slab) - state),
        state=slots * state,
        index=math.ceil(index) + slots * SLOT_BYTES,
        disk=math.ceil(mine * record * _ROOM_TO_COLLECT),
    )


def most_ids(row: PlannedRow, memory: int, *, ranks: int, policy: Policy) -> int:
    """Return the number of ids that fit with all rows in the memory of ranks.

    Args:
        row: format of rows.
        memory: bytes of each rank.
        ranks: number of ranks that share the ids.
        policy: of the tables, with any capacity.
    """
    million = in_memory(row, 1_000_000, ranks=1, policy=policy).memory
    return memory * 1_000_000 // million * ranks


__all__ = [
    "DTYPES",
    "OPTIMIZERS",
    "STATE_DTYPES",
    "Bytes",
    "PlannedRow",
    "in_memory",
    "most_ids",
    "on_disk",
]
