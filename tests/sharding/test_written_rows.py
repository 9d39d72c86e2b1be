"""Rows of ids that are given: DistributedModelParallel.write, and insert_new over ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from ranks import Ranks
from sharded_models import Table, sharded
from written_steps import (
    content,
    function_that_fails,
    inserted,
    keyed,
    model_with,
    of_private_tables,
    refused,
    rows_by_id,
)

pytestmark = pytest.mark.cpu_only("TorchRec over gloo")


@pytest.mark.usefixtures("one_rank")
def test_a_full_table_evicts_for_rows_that_are_written() -> None:
    model = model_with(100)
    for first in (0, 60):
        ids = list(range(first, first + 60))
        model.write(keyed(ids, content(torch.tensor(ids))))
        model(keyed(ids, None))
        model.fused_optimizer.step()
    rows = rows_by_id(model, "users")
    assert len(rows) == 100
    assert rows.items() >= {id: content(torch.tensor([id]))[0].tolist() for id in ids}.items()


def test_an_error_of_a_rank_is_raised_on_all_and_writes_nothing(two_ranks: Ranks) -> None:
    for raised, stays in two_ranks.run(refused):
        assert raised["kind"].startswith("TypeError: write: embeddings is a int, expected a Keyed")
        assert raised["keys"].startswith("ValueError: write: embeddings has keys ['usr'], expected")
        assert "weights of embeddings have shape None, expected (1, 8), a row" in raised["weights"]
        assert "weights of embeddings have shape (1, 9), expected (1, 8), a row" in raised["dim"]
        assert raised["dtype"].startswith("TypeError: write: weights of embeddings have dtype")
        assert raised["room"].startswith("NoRoomError: dynemb::find_or_insert_: table 'users'")
        assert stays


@pytest.mark.parametrize("sharding", ["nn", "row_wise", "column_wise", "table_wise"])
def test_each_rank_inserts_its_own_new_ids(two_ranks: Ranks, sharding: str) -> None:
    results = two_ranks.run(inserted, sharding)
    new = list(range(10, 120))
    expected = {id: content(torch.tensor([id]))[0].tolist() for id in new}
    expected |= {id: (-content(torch.tensor([id])))[0].tolist() for id in range(10)}
    asked = [sorted(ids) for _, ids, _ in results]
    assert sum(count for count, _, _ in results) == len(new)
    assert all(rows == expected for _, _, rows in results)
    if sharding == "column_wise":
        assert asked == [new, new]
    else:
        assert sorted(asked[0] + asked[1]) == new


def test_errors_and_private_tables_of_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(function_that_fails) == [("rows_of: no vectors here", 0)] * 2
    assert two_ranks.run(of_private_tables) == [[0, 1, 2], [1, 2, 3]]


@pytest.mark.usefixtures("one_rank")
def test_tables_that_cannot_be_written() -> None:
    table = Table("users", 8, ("user",), "none", written=True)
    with pytest.raises(NotImplementedError, match=r"\['users'\] .* of an EmbeddingCollection only"):
        sharded((replace(table, pooling="sum"),))
    days = replace(table, name="days", features=("day",), dynamic=False)
    with pytest.raises(NotImplementedError, match=r"but \['days'\] are static"):
        sharded((table, days))
    model: Any = sharded((replace(table, written=False),))
    with pytest.raises(RuntimeError, match="No writable sharded modules found"):
        model.write(keyed([1], torch.zeros(1, 8)))
