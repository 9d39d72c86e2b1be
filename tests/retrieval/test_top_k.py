"""Exact search: equal to a full sort, whatever the storage of the rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from seeding import seeded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import torch_dynemb as td
from torch_dynemb import ops
from torch_dynemb.retrieval.search import TopK

pytestmark = pytest.mark.any_device

DIM = 4


def items_with(ids: Tensor, rows: Tensor, **options: Any) -> td.DynamicEmbedding:
    items = td.DynamicEmbedding(rows.shape[1], name="items", optimizer=td.SGD(lr=0.1), **options)
    items.group.insert_or_assign(0, ids, rows)
    return items


def small_numbers(count: int, seed: int) -> Tensor:
    """Rows of small integers: many scores are equal, and all are exact."""
    return torch.randint(-2, 3, (count, DIM), generator=seeded(seed)).float()


def sorted_by_score(
    scores: Tensor, ids: Tensor, k: int, allowed: Tensor
) -> tuple[list[list[int]], list[list[float]]]:
    """The first k of each query by score, then id, in plain Python."""
    found_ids, found_scores = [], []
    for row, may in zip(scores.tolist(), allowed.tolist(), strict=True):
        ranked = sorted(
            (-score, id) for score, id, yes in zip(row, ids.tolist(), may, strict=True) if yes
        )[:k]
        missing = k - len(ranked)
        found_ids.append([id for _, id in ranked] + [-1] * missing)
        found_scores.append([-score for score, _ in ranked] + [-torch.inf] * missing)
    return found_ids, found_scores


def check(
    found: TopK, query: Tensor, rows: Tensor, ids: Tensor, allowed: Tensor | None = None
) -> None:
    k = found.ids.shape[1]
    allowed = torch.ones(len(query), len(ids), dtype=torch.bool) if allowed is None else allowed
    expected_ids, expected_scores = sorted_by_score(query @ rows.t(), ids, k, allowed)
    assert found.ids.tolist() == expected_ids
    assert found.scores.tolist() == expected_scores
    assert found.counts.tolist() == [
        sum(score > -torch.inf for score in s) for s in expected_scores
    ]


IDS = torch.randperm(90, generator=torch.Generator("cpu").manual_seed(1), device="cpu") * 5 - 200


@pytest.mark.parametrize("k", [1, 7, 60, 100])
@pytest.mark.parametrize("form", ["live", "bfloat16", "frozen", "bf16"])
def test_results_are_those_of_a_full_sort(k: int, form: str) -> None:
    ids, rows = IDS.to(torch.get_default_device()), small_numbers(90, 2)
    items: Any = items_with(
        ids, rows, dtype=torch.bfloat16 if form == "bfloat16" else torch.float32
    )
    items.group.erase(0, ids[:20])
    if form == "bf16":
        items = td.freeze(items, rows="bf16")
    elif form == "frozen":
        items = td.freeze(items)
    query = small_numbers(5, 3)
    check(td.top_k(query, items, k), query, rows[20:], ids[20:])


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
def test_quantized_rows_are_scored_as_lookups_read_them(form: Any) -> None:
    ids, rows = torch.arange(70), torch.randn(70, DIM, generator=seeded(13))
    frozen = td.freeze(items_with(ids, rows), rows=form)
    query = torch.randn(3, DIM, generator=seeded(14))
    found = td.top_k(query, frozen, 8)
    expected = (query @ frozen(ids).t()).topk(8)
    torch.testing.assert_close(found.scores, expected.values)
    assert torch.equal(found.ids, ids[expected.indices])


def test_rows_that_no_backward_has_written_have_their_initial_values() -> None:
    initializer = td.Constant(2.0)
    items = td.DynamicEmbedding(
        DIM, name="items", initializer=initializer, optimizer=td.SGD(lr=0.1)
    )
    items(torch.tensor([4, 3]))
    found = td.top_k(torch.ones(1, DIM), items, 3)
    assert found.ids.tolist() == [[3, 4, -1]]
    assert found.scores.tolist() == [[8.0, 8.0, -torch.inf]]


def test_cosine_is_the_product_of_normalized_vectors() -> None:
    ids, rows = torch.arange(50), torch.randn(50, DIM, generator=seeded(4))
    query = torch.randn(3, DIM, generator=seeded(5))
    found = td.top_k(query, items_with(ids, rows), 5, metric="cosine")
    cosines = torch.nn.functional.cosine_similarity(query[:, None], rows[None], dim=2)
    expected = cosines.topk(5)
    assert torch.equal(found.ids, ids[expected.indices])
    torch.testing.assert_close(found.scores, expected.values)


def test_excluded_and_filtered_ids_are_no_results() -> None:
    ids, rows, query = torch.arange(-20, 20), small_numbers(40, 6), small_numbers(3, 7)
    items = items_with(ids, rows)
    excluded = torch.randint(-20, 25, (3, 12), generator=seeded(8))
    allowed = torch.stack([~torch.isin(ids, given) for given in excluded])
    for k in (1, 6, 50):
        found = td.top_k(query, items, k, exclude=excluded)
        check(found, query, rows, ids, allowed)
    ragged = (torch.cat([excluded[0, :4], excluded[2]]), torch.tensor([0, 4, 4, 16]))
    allowed[0] = ~torch.isin(ids, excluded[0, :4])
    allowed[1] = True
    check(td.top_k(query, items, 40, exclude=ragged), query, rows, ids, allowed)
    none = (ids[:0], torch.zeros(4, dtype=torch.int64))
    check(td.top_k(query, items, 9, exclude=none), query, rows, ids)
    found = td.top_k(query, items, 9, filter=lambda ids: ids % 3 == 0, exclude=ragged)
    check(found, query, rows, ids, allowed & (ids % 3 == 0))


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor that an op makes."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize("frozen", [False, True])
def test_scores_are_made_in_chunks(monkeypatch: pytest.MonkeyPatch, frozen: bool) -> None:
    monkeypatch.setattr("torch_dynemb.retrieval.search._SCORES_AT_ONCE", 40)
    monkeypatch.setattr("torch_dynemb.retrieval.search._ROWS_AT_ONCE", 32)
    ids, rows, query = torch.arange(300), small_numbers(300, 9), small_numbers(6, 10)
    items: Any = items_with(ids, rows)
    items = td.freeze(items) if frozen else items
    with LargestTensor() as largest:
        found = td.top_k(query, items, 5)
    check(found, query, rows, ids)
    assert largest.elements < 2000  # 1800 scores in all, 128 of rows


def test_rows_with_nan_are_no_results() -> None:
    rows = torch.eye(DIM)
    rows[1, 0] = torch.nan
    found = td.top_k(torch.ones(1, DIM), items_with(torch.arange(DIM), rows), DIM)
    assert found.ids.tolist() == [[0, 2, 3, -1]]


def test_an_empty_table_has_no_results() -> None:
    items = td.DynamicEmbedding(DIM, name="items", optimizer=td.SGD(lr=0.1))
    for searched in (items, td.freeze(items)):
        found = td.top_k(torch.ones(2, DIM), searched, 3)
        assert found.ids.tolist() == [[-1] * 3] * 2
        assert found.counts.tolist() == [0, 0]


def test_a_table_of_several_is_searched_by_name() -> None:
    tables = [td.TableConfig(name, DIM) for name in ("a", "b")]
    model = td.DynamicEmbeddingCollection(tables, optimizer=td.SGD(lr=0.1))
    for table in range(2):
        model.group.insert_or_assign(table, torch.tensor([table]), torch.eye(DIM)[:1])
    for searched in (model, td.freeze(model)):
        assert td.top_k(torch.ones(1, DIM), searched, 1, table="b").ids.tolist() == [[1]]


def test_merges_of_many_candidates_are_a_sort() -> None:
    scores = torch.randint(-20, 20, (4, 5000), generator=seeded(11)).float()
    ids = torch.randperm(5000, generator=seeded(12))
    best = ops.BestScores(torch.full((4, 30), -torch.inf), torch.full((4, 30), -1))
    for begin in range(0, 5000, 1234):
        part = slice(begin, begin + 1234)
        best = ops.merge_top_k(scores[:, part].contiguous(), ids[part].contiguous(), best)
    allowed = torch.ones(4, 5000, dtype=torch.bool)
    expected_ids, expected_scores = sorted_by_score(scores, ids, 30, allowed)
    assert best.ids.tolist() == expected_ids
    assert best.scores.tolist() == expected_scores
