"""``torch.optim.swa_utils.AveragedModel`` of models with tables: rows are averaged by id.

Torch averages ``parameters()``; rows are not among them. Importing this package adds the tables to
``AveragedModel.update_parameters``. An id that the average lacks gets a copy of its row. The rows
of the others are averaged in float32 by the same function as the parameters. Ids that the model
has lost leave the average. Scores, times and initial values are then those of the model.

An update reads and writes every row, about a million at a time. Call it every n steps where that
takes too long, with a decay to the power of n. Rows of 16 bits are rounded at every update, so a
decay close to 1 does not move them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.nn.collection import Collection
from torch_dynemb.nn.embedding import SingleTable
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.nn.torch_changes import replace
from torch_dynemb.ops.columns import Meta
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.content import score_names
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.state import recount

_BATCH = 1 << 20


class _Pair(NamedTuple):
    """Tables of the average, and those of the model that they follow."""

    average: TableModule
    model: TableModule


def _tables_of(model: nn.Module) -> list[tuple[str, TableModule]]:
    """Find modules with tables by their paths.

    Raises:
        TypeError: the rows of one of them are not averaged.
    """
    found = [(path, m) for path, m in model.named_modules() if isinstance(m, TableModule)]
    for path, module in found:
        if not isinstance(module, SingleTable | Collection):
            raise TypeError(
                f"AveragedModel: model has a {type(module).__name__} at {path!r}, and only rows of "
                "torch_dynemb's own modules, such as DynamicEmbedding, are averaged: average the "
                "model without it, or save checkpoints with torch_dynemb.checkpoint instead"
            )
        if process_group_of(module._sharing_ranks) is not None:
            raise TypeError(
                f"AveragedModel: model has a {type(module).__name__} at {path!r} with "
                "process_group=: ranks share its rows, and only rows of one process are averaged: "
                "average the model without it, or save checkpoints with torch_dynemb.checkpoint"
            )
    return found


def _pairs(average: nn.Module, model: nn.Module) -> list[_Pair]:
    """Pair tables; raise ValueError, or TypeError, unless both have the same tables."""
    ours, theirs = _tables_of(average), _tables_of(model)
    pairs = [_Pair(one, other) for (_, one), (_, other) in zip(ours, theirs, strict=False)]
    described = [_described(one) for _, one in ours], [_described(one) for _, one in theirs]
    if described[0] != described[1]:
        raise ValueError(
            f"AveragedModel.update_parameters: model has tables {described[1]}, but the average "
            f"{described[0]}: make an AveragedModel of the model as it is now"
        )
    return pairs


def _described(module: TableModule) -> list[tuple[str, int]]:
    return [(table.name, table.embedding_dim) for table in module.group.config.tables]


Average = Callable[[Tensor, Tensor], Tensor]


def _function_of(averaged: Any, device: torch.device) -> Average | None:
    """Return how rows on a device are averaged; None: copied, as at the first update."""
    count = averaged.n_averaged.to(device)
    if averaged.n_averaged == 0:
        return None
    if averaged.avg_fn is not None:
        return lambda average, of_model: averaged.avg_fn(average, of_model, count)
    if averaged.multi_avg_fn is None:
        return lambda average, of_model: swa_utils.get_swa_avg_fn()(average, of_model, count)

    def in_place(average: Tensor, of_model: Tensor) -> Tensor:
        averaged.multi_avg_fn([average], [of_model], count)
        return average

    return in_place


def _reserve(pair: _Pair) -> None:
    """Raise RuntimeError before any change if the index of the average cannot grow."""
    for table, size in enumerate(pair.model.group.sizes().values()):
        pair.average.group.reserve(table, size)


def _average_rows(averaged: Any, pair: _Pair) -> None:
    average, model = pair.average.group, pair.model.group
    function = _function_of(averaged, average.device)
    _take_seeds(average, model)
    for table in range(len(model.config.tables)):
        _average_table(average, model, table, function)
    average.index.clock.copy_(model.index.clock)
    recount(average.tables)


def _take_seeds(average: TableGroup, model: TableGroup) -> None:
    """Give the average the seeds of initial values, which also say where the index has its ids."""
    seeds = model.index.meta[:, Meta.SEED].to(average.device)
    if torch.equal(average.index.meta[:, Meta.SEED], seeds):
        return
    held = [
        [(of.ids, of.rows) for of in average.export(table, batch_size=_BATCH)]
        for table in range(len(average.config.tables))
    ]
    with defer_signals():
        for table, batches in enumerate(held):
            for ids, _ in batches:
                average.erase(table, ids)
        average.index.meta[:, Meta.SEED] = seeds
        for table, batches in enumerate(held):
            for ids, rows in batches:
                average.insert_or_assign(table, ids, rows)


def _average_table(
    average: TableGroup, model: TableGroup, table: int, function: Average | None
) -> None:
    gone = [
        batch.ids[~model.contains(table, batch.ids.to(model.device)).to(average.device)]
        for batch in average.export(table, batch_size=_BATCH)
    ]
    for ids in gone:  # before others come: the average has never more ids than the model
        average.erase(table, ids)
    words = score_names(model.tables, table)
    for batch in model.export(table, batch_size=_BATCH):
        ids, rows = batch.ids.to(average.device), batch.rows.to(average.device)
        if function is not None:
            known = average.contains(table, ids)
            rows[known] = function(average.read(table, ids[known]), rows[known])
        average.insert_or_assign(table, ids, rows)
        for word in words:
            scores = model.scores.get(table, batch.ids, score=word).scores
            average.scores.set(table, ids, scores.to(average.device), score=word)


def average_tables_too() -> None:
    """Change torch's AveragedModel: its copies of tables would stay as they were made."""
    replace("AveragedModel", swa_utils.AveragedModel, "__init__", _checks_tables)
    replace("AveragedModel", swa_utils.AveragedModel, "update_parameters", _averages_rows)


def _checks_tables(construct: Any) -> Any:
    @functools.wraps(construct)
    def construct_checked(self: Any, model: nn.Module, *args: Any, **options: Any) -> None:
        _tables_of(model)
        construct(self, model, *args, **options)

    return construct_checked


def _averages_rows(update: Any) -> Any:
    @functools.wraps(update)
    def update_parameters(self: Any, model: nn.Module) -> None:
        pairs = _pairs(self.module, model)
        with torch.no_grad():
            for pair in pairs:
                _reserve(pair)
            for pair in pairs:
                _average_rows(self, pair)
            update(self, model)
            for pair in pairs:
                pair.average._follows_parameters()

    return update_parameters


__all__ = ["average_tables_too"]
