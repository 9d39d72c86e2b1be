"""Everything that training has left in the tables of a model, apart from where it lies.

Cases read tables through this module alone: code that moves is followed here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.parts.table_parts import parts_of
from torch_dynemb.table.content import (
    optimizer_steps,
    read_content,
    read_counts,
)

Outputs = dict[str, Tensor | Mapping[str, Tensor]]

# what a table counts; bytes are left out: they are a matter of layout
_COUNTED = (
    "size",
    "capacity",
    "inserted",
    "found",
    "missed",
    "evicted",
    "rejected",
    "not_admitted",
    "default_served",
    "stale",
    "removed",
    "counted",
)


def tables_of(model: nn.Module | td.TableGroup) -> Iterable[tuple[str, td.TableGroup, int]]:
    """Name the tables of a model or a group: (name, group, number of the table)."""
    if isinstance(model, td.TableGroup):
        return [(name, model, table) for table, name in enumerate(model.names)]
    return [(f"{of.name}+{of.first_column}", of.group, of.table) for of in parts_of(model)]


def contents(model: nn.Module | td.TableGroup, *, of: str = "") -> Outputs:
    """Read the tables of a model.

    Args:
        model: with tables on this rank.
        of: begins the names of the outputs.

    Returns:
        By ascending id: ``rows`` (ids and rows), ``state`` (of the optimizer, with its steps) and
        ``scores`` (scores, counts and sketches of admission, steps).
    """
    rows: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    scores: dict[str, Tensor] = {}
    for name, group, table in tables_of(model):
        tables = group.tables
        content = read_content(tables, table)
        rows[f"{name}.ids"], rows[f"{name}.rows"] = content.ids, content.rows
        for kind in sorted(content.state):
            state[f"{name}.{kind}"] = content.state[kind]
        state[f"{name}.steps"] = torch.tensor(optimizer_steps(tables, table))
        for word in sorted(content.scores):
            scores[f"{name}.{word}"] = content.scores[word]
        counted = read_counts(tables, table)
        if counted is not None:
            scores[f"{name}.waiting"] = counted.ids
            scores[f"{name}.counts"] = counted.counts
        if isinstance(config_of(group, table).policy.admission, td.AdmitFrequentSketch):
            scores[f"{name}.sketch"] = group.index.sketch.clone()
        scores[f"{name}.ended steps"] = torch.tensor(group.steps)
    prefix = f"{of} " if of else ""
    return {f"{prefix}rows": rows, f"{prefix}state": state, f"{prefix}scores": scores}


def config_of(group: td.TableGroup, table: int) -> td.TableConfig:
    """Find the config of a table."""
    return group.config.tables[table]


def statistics(group: td.TableGroup) -> dict[str, Tensor]:
    """Read what the tables of a group have counted."""
    return {
        f"{name}.{figure}": torch.tensor(dataclasses.asdict(of)[figure])
        for name, of in group.usage.tables(wait=True).items()
        for figure in _COUNTED
    }


def places(group: td.TableGroup, table: int) -> dict[str, Tensor]:
    """Read the order in which ids are exported, and the handles of their rows.

    Evictions depend on places, so restructured code keeps them.
    """
    exported = [batch.ids for batch in group.export(table, batch_size=64)]
    ids = torch.cat([torch.empty(0, dtype=torch.int64), *exported])
    found = group.find(ids, torch.tensor([0, ids.numel()]), [table])
    return {"exported": ids, "handles": found.handles}
