"""Packages of RecIS's engines that are updated while they serve."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from quick_packages import QUICK
from test_recis_frozen import any_sizes, assert_same, batch, options, trained_engine
from torch._inductor import config

import torch_dynemb as td
from torch_dynemb import serving

pytestmark = [pytest.mark.cpu_only("packages are compiled for the CPU"), pytest.mark.long]


def test_a_served_engine_takes_updates(tmp_path: Path) -> None:
    """It gives what a live copy of the engine gives, before and after the same updates."""
    from tutorials.serving.metrics import Metrics
    from tutorials.serving.server import tables_of

    frozen = td.freeze(trained_engine())
    live = serving.live(frozen, headroom=20)
    example = batch(3)
    shapes = {name: any_sizes(of) for name, of in example.items()}
    with config.patch(QUICK):
        serving.export(
            frozen, tmp_path / "engine", (example,), dynamic_shapes=(shapes,), headroom=20
        )
    served = serving.load(tmp_path / "engine")
    for data in (batch(4), batch(5, samples=7, ids=90), batch(6, samples=0)):
        assert_same(served.run(data), live(data))
    tables = {option.shared_name for option in options().values()}
    assert set(served.tables) == tables
    metrics = Metrics(served, None).text().decode()
    assert set(re.findall(r'table="(.*?)"', metrics)) == tables == tables_of(served).keys()
    names = iter(served.stats())
    for tables in serving.live_tables(live).values():
        for name in tables.names:
            ids = torch.arange(-3, 9)
            in_package: Any = next(names)
            rows = torch.randn(len(ids), served.tables[in_package].embedding_dim)
            given = {"ids": ids, "rows": rows, "erased": ids[:2] - 4}
            assert served.apply(in_package, **given) == tables.update(name, **given)
    assert_same(served.run(batch(7)), live(batch(7)))
