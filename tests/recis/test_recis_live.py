"""Live copies of RecIS's engines: the rows of frozen ones, until they are updated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_recis_frozen import assert_same, batch, options, trained_engine

import torch_dynemb as td
from torch_dynemb import serving
from torch_dynemb.ops.columns import Meta
from torch_dynemb.recis import DynamicEmbedding

pytestmark = pytest.mark.cpu_only("live tables are in the memory of the CPU")


def test_served_tables_have_the_names_of_the_options() -> None:
    expected = {f"sparse.{option.shared_name}" for option in options().values()}
    model = torch.nn.ModuleDict({"sparse": trained_engine()})
    for served in (td.freeze(model), serving.live(td.freeze(model), headroom=1)):
        assert set(serving.CountsMissing(served).table_names) == expected
    alone = torch.nn.ModuleDict({"sparse": DynamicEmbedding(options()["user"])})
    assert td.freeze(alone, missing=True).table_names == ["sparse.user"]


def test_live_engines_take_updates() -> None:
    """By the ids that their tables have; merged ones have the table's number in the ids."""
    engine = trained_engine()
    frozen = td.freeze(engine)
    live = serving.live(frozen, headroom=4)
    assert_same(live(batch(7)), frozen(batch(7)))
    for name, tables in serving.live_tables(live).items():
        source: Any = frozen.get_submodule(name)
        for number, table in enumerate(tables.names):
            ids = source.ids(number)
            dim = int(tables.tensors().meta[number, Meta.DIM])
            tables.update(table, ids, torch.zeros(len(ids), dim))
    before, after = frozen(batch(7)), live(batch(7))
    assert before["user"].any()
    assert not after["user"].any()  # all its ids are there, and have rows of zeros
