"""Live copies of RecIS's engines: the rows of frozen ones, until they are updated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_recis_frozen import assert_same, batch, trained_engine

import torch_dynemb as td
from torch_dynemb import serving
from torch_dynemb.ops.columns import Meta

pytestmark = pytest.mark.cpu_only("live tables are in the memory of the CPU")


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
