"""What ranks do in tests of state dicts of tables that they share."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from small_embeddings import embedding
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)

import torch_dynemb as td
from torch_dynemb import recis
from torch_dynemb.nn import rank_states
from torch_dynemb.nn.table_module import TableModule

Rows = dict[tuple[int, int], list[float]]


def model(group: Any = None) -> nn.Module:
    """Return tables of each kind that ranks of a group share."""
    group = dist.group.WORLD if group is None else group
    adam = td.Adam(lr=0.1)
    clicks = recis.EmbeddingOption(
        embedding_dim=4, shared_name="clicks", initializer=td.Normal(), block_size=8, pg=group
    )
    tables = nn.ModuleDict(
        {
            "ads": td.DynamicEmbedding(4, optimizer=adam, process_group=group),
            "clicks": recis.DynamicEmbedding(clicks),
            "small": embedding(pg=group),
        }
    )
    tables["clicks"].hashtable.set_optimizer(adam)
    tables["small"].set_optimizer(adam)
    return tables


def trained(rank: int, group: Any = None) -> nn.Module:
    """Return tables with ids that are the rank's own, and common ones."""
    tables = td.private_to_rank(model(group))
    ids = torch.arange(30) + 15 * rank
    for step in range(2):
        rows = tables["ads"](ids), tables["clicks"](ids[:, None]), tables["small"](ids.view(10, 3))
        sum((step + 1) * (of.sin() * 2).sum() for of in rows).backward()  # type: ignore[union-attr]
        for optimizer in td.table_optimizers(tables):
            optimizer.step()
    return tables


def content(tables: nn.Module) -> list[Rows]:
    """Return rows by number and id, of the tables of each module on this rank."""
    groups = [m.group for m in tables.modules() if isinstance(m, TableModule)]
    return [
        {
            (number, int(id)): row.tolist()
            for number in range(len(group.names))
            for batch in group.export(number)
            for id, row in zip(batch.ids, batch.rows, strict=True)
        }
        for group in groups
    ]


def kept_by_dcp(rank: int, folder: str, alone: bool) -> dict[str, Any]:
    """Save and load in two ways; return entries, content, and whether it was loaded."""
    group = None
    if alone:  # each rank has tables of its own, below the same names
        group = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    tables = trained(rank, group)
    state = tables.state_dict()
    dcp.save(state, checkpoint_id=Path(folder) / "plain")
    plain = model(group)
    read = plain.state_dict()
    dcp.load(read, checkpoint_id=Path(folder) / "plain")
    plain.load_state_dict(read)
    dcp.save(get_model_state_dict(tables), checkpoint_id=Path(folder) / "helped")
    helped = model(group)
    read = get_model_state_dict(helped)
    dcp.load(read, checkpoint_id=Path(folder) / "helped")
    set_model_state_dict(helped, read)
    return {
        "entries": sorted(state),
        "content": content(tables),
        "loaded": content(plain) == content(tables) == content(helped),
    }


def called_by(package: str, function: str, tables: nn.Module) -> str:
    """Make a state dict in a function of a package; return its error, or an empty text."""
    names: dict[str, Any] = {"__name__": f"{package}.of_a_test"}
    exec(f"def {function}(model):\n    return model.state_dict()\n", names)
    try:
        names[function](tables)
    except RuntimeError as error:
        return str(error)
    return ""


def lost_by_callers(rank: int) -> dict[str, Any]:
    """Return errors by caller, and warnings of plain calls."""
    tables = model()
    rank_states._warned = False  # another test in this process may have had the warning
    with warnings.catch_warnings(record=True) as plain:
        warnings.simplefilter("always")
        tables.state_dict()
        get_model_state_dict(tables)
        tables.state_dict()
    try:
        get_model_state_dict(tables, options=StateDictOptions(full_state_dict=True))
        full = ""
    except RuntimeError as error:
        full = str(error)
    return {
        "accelerate": called_by("accelerate", "get_state_dict", tables),
        "lightning": called_by("lightning", "dump_checkpoint", tables),
        "transformers": called_by("transformers", "_save", tables),
        "other function": called_by("transformers", "train", tables),
        "full": full,
        "plain": [str(warning.message) for warning in plain],
    }


def trained_in_a_part_of_the_world(rank: int) -> str:
    """Return the error of tables that the ranks of a smaller group share."""
    group = [dist.new_group([r]) for r in range(dist.get_world_size())][rank]
    try:
        model(group)["ads"](torch.arange(3))
    except RuntimeError as error:
        return str(error)
    return ""
