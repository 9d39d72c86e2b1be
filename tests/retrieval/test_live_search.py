"""Searches of tables that are updated while they serve: of their ids and rows at that time."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from seeding import seeded
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import ops, serving
from torch_dynemb.ops.columns import LiveTable

pytestmark = pytest.mark.cpu_only("live tables are on the CPU")

DIM = 6


def items_of(count: int) -> td.DynamicEmbedding:
    items = td.DynamicEmbedding(DIM, name="items", optimizer=td.SGD(lr=0.1), padding_idx=-1)
    rows = torch.randn(count, DIM, generator=seeded(1))
    items.group.insert_or_assign(0, torch.arange(count) * 3, rows)
    return items


def check(live: Any, known: dict[int, Tensor], k: int = 9) -> None:
    """Results are those of a table of plain rows."""
    query = torch.randn(4, DIM, generator=seeded(2))
    ids = torch.tensor(list(known))
    expected = (query @ torch.stack(list(known.values())).t()).topk(min(k, len(known)))
    found = td.top_k(query, live, k)
    count = expected.indices.shape[1]
    assert torch.equal(found.ids[:, :count], ids[expected.indices])
    assert bool((found.ids[:, count:] == -1).all())
    torch.testing.assert_close(found.scores[:, :count], expected.values)


@pytest.mark.parametrize("form", list(ops.LIVE_FORMATS))
def test_results_are_those_of_the_rows_as_they_are_stored(form: Any) -> None:
    items = items_of(300)
    live: Any = serving.live(items, headroom=50, rows=form)
    frozen: Any = td.freeze(items, rows=None if form == "fp32" else form)
    query = torch.randn(5, DIM, generator=seeded(3))
    seen = torch.arange(30).view(5, 6) * 3
    for metric in ("dot", "cosine"):
        found = td.top_k(query, live, 8, metric=metric, exclude=seen, filter=lambda ids: ids > 6)
        expected = td.top_k(
            query, frozen, 8, metric=metric, exclude=seen, filter=lambda ids: ids > 6
        )
        assert torch.equal(found.ids, expected.ids)
        torch.testing.assert_close(found.scores, expected.scores)


def test_updates_and_removals_are_seen_through_rehashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_dynemb.retrieval.search._ROWS_AT_ONCE", 64)
    live = serving.live(items_of(0), headroom=600)
    tables = live.frozen_tables
    assert td.top_k(torch.ones(1, DIM), live, 2).ids.tolist() == [[-1, -1]]
    known = dict(enumerate(torch.randn(500, DIM, generator=seeded(1))))
    tables.update("items", torch.arange(500), torch.stack(list(known.values())))
    for step in range(150):
        passing = 1000 + 100 * step + torch.arange(100)
        rows = torch.randn(100, DIM, generator=seeded(step))
        tables.update("items", passing, rows)
        if step % 15 == 0:
            check(live, known | dict(zip(passing.tolist(), rows, strict=True)))
        tables.erase("items", passing)
        if step % 15 == 1:
            check(live, known)
    assert int(tables.tensors().tables[0, LiveTable.ACTIVE]) >= 2


def test_lists_have_each_id_in_a_slot() -> None:
    tables = serving.live(items_of(200), headroom=100).frozen_tables
    tables.erase("items", torch.arange(0, 300, 3))
    ids, found = tables.list_ids(0)
    assert sorted(ids[found].tolist()) == list(range(300, 600, 3))
    wanted = found & (ids % 2 == 0)
    read = tables.read_ids(0, ids, wanted)
    assert torch.equal(read.found, wanted)
    batch = ops.LookupBatch.of_rows(ids, tables.one_bag, [0], DIM)
    assert torch.equal(read.rows[wanted], tables.lookup(batch)[wanted])
    assert not bool(read.rows[~wanted].any())
    assert tables.read_ids(0, torch.tensor([-1, 7, 300])).found.tolist() == [False, False, True]


def test_searches_beside_an_updating_thread() -> None:
    """Ids that stay are always found; each score is that of one version of the row, never another.

    A row of version v is v times a vector of its id, which starts with the id.
    """
    stays, passes, versions = torch.arange(1, 400), torch.arange(400, 800), 7
    live = serving.live(items_of(0), headroom=1000)
    tables = live.frozen_tables

    def rows_of(ids: Tensor, version: int) -> Tensor:
        ones = torch.ones(len(ids), DIM)
        ones[:, 0] = ids.float()
        return version * ones

    tables.update("items", stays, rows_of(stays, 1))
    searched, updates = threading.Event(), 0

    def update() -> None:
        nonlocal updates
        for step in itertools.count():
            if searched.is_set():
                return
            version = step % versions + 1
            if step % 2 == 0:  # other slots of the index, again and again
                tables.update("items", passes + 1000 * (step % 50), rows_of(passes, version))
            else:
                tables.erase("items", passes + 1000 * ((step - 1) % 50))
            tables.update("items", stays, rows_of(stays, version))
            updates += 1

    thread = threading.Thread(target=update)
    thread.start()
    try:
        query = torch.eye(DIM)[:2]  # the id times the version, and the version
        searches = 0
        while min(searches, updates) < 60:
            searches += 1
            found = td.top_k(query, live, 1000)
            for divides, all_ids, all_scores in zip((True, False), *found, strict=True):
                ids, scores = all_ids[all_ids >= 0], all_scores[all_ids >= 0]
                assert len(ids.unique()) == len(ids)
                assert bool(torch.isin(stays, ids).all())
                first = torch.where(ids < 400, ids, (ids - 400) % 1000 + 400)
                version = scores / first if divides else scores
                assert bool(((version >= 1) & (version <= versions) & (version % 1 == 0)).all())
    finally:
        searched.set()
        thread.join()
