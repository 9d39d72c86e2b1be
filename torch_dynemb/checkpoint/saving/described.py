"""Description of a table for a manifest or a batch of changes."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from torch_dynemb.checkpoint.manifest.records import SavedPart, SavedTable
from torch_dynemb.ops.columns import Clock
from torch_dynemb.policy.layout import score_words_of
from torch_dynemb.table.group_config import GroupConfig


def described_table(
    config: GroupConfig,
    number: int,
    part: SavedPart,
    *,
    embedding_dim: int,
    dtype: str,
    optimized: bool,
    seeds: Tensor,
    hyper: Tensor,
    clock: Tensor,
    now: int,
) -> SavedTable:
    """Describe a table with one part.

    Args:
        config: config of the group.
        number: number of the table in the group.
        part: description of the part.
        embedding_dim, dtype: of the whole table.
        optimized: whether to describe the optimizer.
        seeds, hyper, clock: of the group, see :class:`GroupSource`.
        now: seconds of the next lookups.
    """
    of_table = config.tables[number]
    optimizer = config.optimizer if optimized else None
    return SavedTable(
        embedding_dim=embedding_dim,
        dtype=dtype,
        seed=int(seeds[number]),
        optimizer=None if optimizer is None else optimizer.description(),
        hyper={} if optimizer is None else _hyper_of(config, hyper[number].tolist()),
        padding_idx=of_table.padding_idx,
        scores=list(score_words_of([of_table], config.memory_budget is not None)),
        policy=of_table.policy.description(),
        step=int(clock[Clock.STEP]),
        now=now,
        parts=[part],
    )


def _hyper_of(config: GroupConfig, row: list[float]) -> dict[str, Any]:
    """Return hyper-parameters by name, as lists of numbers; None for no limit."""
    assert config.optimizer is not None
    return {
        name: [row[column] if math.isfinite(row[column]) else None for column in columns]
        for name, columns in config.optimizer.hyper_columns.items()
    }


__all__ = ["described_table"]
