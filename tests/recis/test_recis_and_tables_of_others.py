"""An EmbeddingEngine takes rows of other libraries, and says which optimizers its tables have."""

from __future__ import annotations

import pytest
import torch

import torch_dynemb as td
from torch_dynemb import migrate
from torch_dynemb.recis import (
    EmbeddingEngine,
    EmbeddingOption,
    SparseAdam,
    filter_out_sparse_param,
)

pytestmark = pytest.mark.any_device


def engine() -> EmbeddingEngine:
    return EmbeddingEngine(
        {
            name: EmbeddingOption(
                embedding_dim=4, shared_name=f"{name}s", device=torch.get_default_device()
            )
            for name in ("user", "item")
        }
    )


def test_rows_are_loaded_by_the_names_of_tables() -> None:
    model = engine()
    ids, rows = torch.arange(5) * 2**40, torch.randn(5, 4, device="cpu")
    report = migrate.load(model, {"items": migrate.read_tensors(ids.cpu(), rows)})
    assert {name: table.ids for name, table in report.items()} == {"items": 5}
    read = model.eval()({"item": ids[:, None], "user": ids[:, None]})
    assert torch.equal(read["item"].cpu(), rows)
    assert read["user"].count_nonzero() == 0
    with pytest.raises(ValueError, match="users"):
        migrate.load(model, {"unknown": migrate.read_tensors(ids.cpu(), rows)})


def test_its_optimizer_is_found() -> None:
    model = engine()
    SparseAdam(filter_out_sparse_param(model), lr=0.1)
    (optimizer,) = td.table_optimizers(model)
    assert {group["name"] for group in optimizer.param_groups} == {"users", "items"}
    ids = torch.arange(3)[:, None]
    sum(rows.sum() for rows in model({"item": ids, "user": ids}).values()).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(rows.abs().min() > 0 for rows in model.eval()({"item": ids, "user": ids}).values())
