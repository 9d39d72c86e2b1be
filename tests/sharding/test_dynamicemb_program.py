"""A program for DynamicEmb trains, dumps, loads and gives increments with the package in its place.

Its ranks are processes of their own, in which ``dynamicemb`` is this package.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dynamicemb_program_steps import (
    Increments,
    admission,
    increments,
    prefetch_warnings,
    save_and_load,
)
from ranks import Ranks
from torch import Tensor

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")

TABLES = ("readers", "storys", "regions")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Two processes of this module alone: what they register, others do not see."""
    own = Ranks(2)
    yield own
    own.stop()


def seen(found: list[Increments], feature: int, batches: range) -> Tensor:
    """Distinct ids of a feature in some batches of all ranks, ascending."""
    return torch.cat([rank.trained[n][feature] for rank in found for n in batches]).unique()


@pytest.mark.long
def test_a_program_loads_what_it_has_saved(ranks: Ranks, tmp_path: Path) -> None:
    for of in ranks.run(save_and_load, str(tmp_path / "saved")):
        assert torch.equal(of.loaded, of.trained)
        assert not torch.equal(of.fresh, of.trained)
        assert not torch.equal(of.trained_on, of.trained)
        assert torch.equal(of.loaded_on, of.trained_on)
        assert "TableEntry" in of.entries
    names = {path.name for path in (tmp_path / "saved" / "tables" / "model.sparse").iterdir()}
    assert {f"{table}_opt_args.json" for table in TABLES} <= names
    assert len(names) == 5 * len(TABLES)  # keys, values, scores, state, options


def test_increments_have_the_ids_of_the_steps_since(ranks: Ranks) -> None:
    found = ranks.run(increments)
    for of in found:
        assert of.first_score == {"model.sparse": dict.fromkeys(TABLES, 0)}
        assert of.last_score == {"model.sparse": dict.fromkeys(TABLES, 5)}
        for (begin, rows, threshold), end in zip(of.dumped, (3, 5), strict=True):
            for feature, table in enumerate(TABLES):
                # the threshold of custom scores stays what it was: every id
                since = range(0 if table == "regions" else begin, end)
                assert torch.equal(rows[table][0], seen(found, feature, since)), table
                assert rows[table][1].shape == (rows[table][0].numel(), 8)
            assert threshold["model.sparse"] == {"readers": end, "storys": end, "regions": 0}
        _, rows, _ = of.dumped[-1]
        for feature, (table, read) in enumerate(zip(TABLES, of.read.values(), strict=True)):
            ids, values = rows[table]
            places = torch.searchsorted(ids, of.trained[4][feature])
            assert torch.equal(values[places], read)


def test_admission_gives_rows_to_frequent_ids(ranks: Ranks) -> None:
    found = ranks.run(admission)
    for feature, table in enumerate(TABLES):
        occurred = torch.cat([of.ids[feature] for of in found])
        ids, counts = occurred.unique(return_counts=True)
        for step in range(3):
            admitted = ids[counts * (step + 1) >= 3]
            for of in found:
                assert torch.equal(of.dumped[step][table], admitted)
        assert int((counts < 3).sum()) > 0
        refused = ~torch.isin(found[0].ids[feature], ids[counts >= 3])
        rows = list(found[0].read.values())[feature]
        assert int(refused.sum()) > 0
        assert (rows[refused] == 0).all()
        assert (rows[~refused] != 0).any(1).all()


def test_prefetch_pipeline_warns_once(ranks: Ranks) -> None:
    for caught in ranks.run(prefetch_warnings):
        assert len(caught) == 1
        assert "prefetch_pipeline=True, which has no effect here" in caught[0]
        assert "PrefetchTrainPipeline" in caught[0]
