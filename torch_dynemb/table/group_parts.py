"""What the parts of :class:`torch_dynemb.table.TableGroup` know of each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.policy.layout import PolicyLayout

if TYPE_CHECKING:
    from torch_dynemb.ops.lookup import Rows
    from torch_dynemb.table.config import SlabConfig, TableConfig


class GroupParts:
    """Tensors and questions that the parts of a table group share."""

    tables_config: tuple[TableConfig, ...]
    layout: PolicyLayout
    slab_configs: list[SlabConfig]
    meta: Tensor
    row_meta: Tensor
    policy: Tensor
    init_data: Tensor
    hyper: Tensor
    buckets: Tensor
    scores: Tensor
    tables: Tensor
    clock: Tensor
    sketch: Tensor
    evicted: Tensor
    one_bag: Tensor  # empty: the offsets of a call of one feature, whose ids are not pooled
    row_clock: Tensor
    slabs: Tensor
    free_rows: Tensor
    weights: list[Tensor]
    generations: list[Tensor]
    state: list[Tensor]
    pending: list[Tensor]
    forked: bool = False  # whether this process got it from its parent

    if TYPE_CHECKING:

        @property
        def device(self) -> torch.device: ...
        @property
        def names(self) -> list[str]: ...
        @property
        def rows(self) -> Rows: ...
        def _config(self, table: int, call: str = ...) -> TableConfig: ...
        def _one_table(
            self, table: int, ids: Tensor, call: str = ...
        ) -> tuple[Tensor, Tensor, list[int]]: ...
        def insert(self, table: int, ids: Tensor) -> Tensor: ...
        def contains(self, table: int, ids: Tensor) -> Tensor: ...
        def find_or_insert(
            self,
            ids: Tensor,
            offsets: Tensor,
            feature_tables: Sequence[int],
            feature_policies: Sequence[int] | None = None,
        ) -> Tensor: ...
        def find(
            self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]
        ) -> ops.FoundIds: ...
        def erase(self, table: int, ids: Tensor) -> int: ...
        def materialize(self) -> int: ...
        def release_memory(self) -> None: ...
        def memory(self) -> dict[str, int]: ...
        def used_rows(self, slab: int) -> int: ...
        def end_step(self) -> None: ...
        def row_bytes(self, slab: SlabConfig) -> int: ...

        def slab_of(self, table: int) -> int: ...
        def capacity_bound(self, table: int) -> int | None: ...
        def active_buckets(self, table: int) -> slice: ...
        def bind_memory(self) -> None: ...


def exported(group: GroupParts, table: int, batch_size: int) -> Iterator[ops.ExportedBatch]:
    """All ids of a table with handles and scores; ids of past batches may be erased meanwhile."""
    begin = 0
    while begin >= 0:
        batch = ops.export_batch(
            group.buckets,
            group.scores,
            group.tables,
            group.meta,
            table=table,
            begin=begin,
            max_ids=batch_size,
        )
        begin = int(batch.next)
        if batch.ids.numel() > 0:
            yield batch


__all__ = ["GroupParts", "exported"]
