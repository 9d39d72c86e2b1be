"""Custom scores that lookups combine, against Python's integers and sums of powers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from execution import threads

import torch_dynemb as td
from torch_dynemb.ops.columns import NEVER_OCCURRED, Combine
from torch_dynemb.table.given_scores import scores_of_distinct

pytestmark = pytest.mark.any_device

LARGEST, LEAST = (1 << 63) - 1, -(1 << 63)
KINDS = {
    "max": td.Custom(combine="max"),
    "sum": td.Custom(combine="sum"),
    "decayed_sum": td.Custom(combine="decayed_sum", half_life_steps=4),
}


def make_group(*scores: Any, **arguments: Any) -> td.TableGroup:
    tables = [
        td.TableConfig(f"t{k}", 4, ["f"], policy=td.Policy(score=score, **arguments))
        for k, score in enumerate(scores)
    ]
    return td.TableGroup(tables, optimizer=td.SGD(lr=0.1), seed=1)


def score_of(group: td.TableGroup, ids: Any, table: int = 0) -> list[float]:
    name = group.config.tables[table].policy.custom.score
    return group.scores.get(table, torch.tensor(ids), score=name).scores.tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_random_lookups_are_those_of_python(kind: str) -> None:
    torch.manual_seed(3)
    group = make_group(KINDS[kind])
    exact: dict[int, float] = {}
    for _ in range(20):
        ids = (torch.rand(300) ** 3 * 40).long()
        # not contiguous
        scores = torch.randint(0 if kind == "decayed_sum" else -50, 50, (300, 2))[:, 0]
        group.insert(0, ids, scores=scores)
        for i, score in zip(ids.tolist(), scores.tolist(), strict=True):
            before = exact.get(i, LEAST if kind == "max" else 0)
            exact[i] = max(before, score) if kind == "max" else before + score
        group.step()
        if kind == "decayed_sum":
            exact = {i: worth * 2**-0.25 for i, worth in exact.items()}
    found = score_of(group, list(exact))
    assert found == pytest.approx(list(exact.values()), rel=1e-4 if kind == "decayed_sum" else 0)


def test_weights_are_floats() -> None:
    group = make_group(KINDS["decayed_sum"])
    weights = torch.tensor([5.0, 0.1, 1e-30, 0.0, 3e38, 1 / 3])
    group.insert(0, torch.arange(6), scores=weights)
    assert score_of(group, list(range(6))) == pytest.approx(weights.tolist(), rel=1e-6)
    group.insert(0, torch.arange(6), scores=weights.double())
    assert score_of(group, list(range(6))) == pytest.approx(
        (2 * weights.double()).tolist(), rel=1e-6
    )


def test_a_kernel_ignores_weights_that_are_no_numbers() -> None:
    group = make_group(KINDS["decayed_sum"])
    ids = torch.arange(6)
    group.insert(0, ids, scores=torch.ones(6))
    wrong = torch.tensor([math.nan, math.inf, -math.inf, -1.0, -0.0, 5e-324], dtype=torch.float64)
    td.ops.combine_scores_(
        group.index,
        ids,
        torch.tensor([0, 6]),
        [0],
        wrong.view(torch.int64),
        combines=[Combine.DECAYED_SUM],
        half_lives=[-4],
        word=group.config.layout.word("decayed"),
    )
    assert score_of(group, list(range(6))) == pytest.approx([1.0] * 6, rel=1e-6)


def test_decayed_sums_of_a_call_are_those_of_calls_with_each_id_once() -> None:
    """Bit by bit, with any number of threads: sums are rounded, so their order counts."""
    torch.manual_seed(4)
    distinct, times = 300, 30
    ids = torch.stack([torch.randperm(distinct) for _ in range(times)])
    weights = torch.rand(times, distinct).exp()
    whole, parts = (make_group(KINDS["decayed_sum"]) for _ in range(2))
    with threads(3):
        whole.insert(0, ids.reshape(-1), scores=weights.reshape(-1))
    for some, of_some in zip(ids, weights, strict=True):
        parts.insert(0, some, scores=of_some)
    word = whole.config.layout.word("decayed")
    flat = (torch.arange(distinct), torch.tensor([0, distinct]), [0])
    stored = [td.ops.get_scores(of.index, *flat, word=word).scores for of in (whole, parts)]
    assert torch.equal(*stored)


def test_sums_end_at_the_limits_of_int64() -> None:
    group = make_group(KINDS["sum"])
    for _ in range(3):
        group.insert(0, torch.tensor([1, 2]), scores=torch.tensor([1 << 62, -(1 << 62)]))
    assert score_of(group, [1, 2]) == [LARGEST, LEAST]


def test_tables_of_one_lookup_combine_as_they_say() -> None:
    group = make_group("custom", KINDS["max"], KINDS["sum"], KINDS["decayed_sum"], "step")
    ids, tables = torch.tensor([7, 7] * 4), [0, 1, 2, 3]
    for first, second in ((3, 5), (4, 1)):
        scores = torch.tensor([first, second] * 4)
        group.find_or_insert(ids, torch.tensor([0, 2, 4, 6, 8]), tables, scores=scores)
    assert [score_of(group, [7], table)[0] for table in tables] == [4, 5, 13, pytest.approx(13.0)]
    with pytest.raises(TypeError, match=r"scores has dtype torch.float32, expected int64$"):
        group.find_or_insert(ids, torch.tensor([0, 2, 4, 6, 8]), tables, scores=torch.ones(8))


def test_the_score_of_a_batch_counts_for_each_occurrence() -> None:
    group = make_group(KINDS["sum"], KINDS["decayed_sum"])
    offsets = torch.tensor([0, 3, 6])
    ids = torch.tensor([1, 1, 2, 1, 1, 2])
    with pytest.raises(ValueError, match="'t0' keeps custom scores, but none have been given"):
        group.find_or_insert(ids, offsets, [0, 1])
    group.scores.set_batch(0, 5)
    group.scores.set_batch(1, 2)
    group.find_or_insert(ids, offsets, [0, 1])
    assert score_of(group, [1, 2]) == [10, 5]
    assert score_of(group, [1, 2], 1) == pytest.approx([4.0, 2.0])
    once = torch.tensor([1, 2])
    group.find_or_insert(once, torch.tensor([0, 2]), [0], counts=torch.tensor([3, 1]))
    assert score_of(group, [1, 2]) == [25, 10]


@pytest.mark.parametrize("kind", ["custom", *KINDS])
def test_assigned_rows_keep_or_get_scores(kind: str) -> None:
    group = make_group(KINDS.get(kind, kind))
    group.insert(0, torch.tensor([1, 2]), scores=torch.tensor([5, 7]))
    some, rows = torch.tensor([2, 3]), torch.ones(2, 4)
    group.insert_or_assign(0, some, rows)
    assert score_of(group, [1, 2, 3]) == pytest.approx([5, 7, 0])
    group.insert_or_assign(0, some, 2 * rows, scores=torch.tensor([4, 6]))
    known = {"custom": 4, "max": 7, "sum": 11, "decayed_sum": 11}[kind]
    assert score_of(group, [1, 2, 3]) == pytest.approx([5, known, 6])
    assert torch.equal(group.read(0, some), 2 * rows)
    group.scores.set_batch(0, 3)
    group.insert_or_assign(0, torch.tensor([4]), rows[:1])
    assert score_of(group, [4]) == pytest.approx([3])


def test_counted_ids_bring_the_score_of_all_their_occurrences() -> None:
    group = make_group("custom", *KINDS.values())
    ids, counts = torch.tensor([7, 8] * 4), torch.tensor([3, 1] * 4)
    offsets, tables = torch.tensor([0, 2, 4, 6, 8]), [0, 1, 2, 3]
    group.find_or_insert(ids, offsets, tables, scores=torch.tensor([6, 2] * 4), counts=counts)
    for table in tables:
        assert score_of(group, [7, 8], table) == pytest.approx([6, 2], rel=1e-6)


def test_scores_of_distinct_ids() -> None:
    values = [3, LARGEST, LEAST, 5, LARGEST, LEAST, -1, 1 << 62, -(1 << 62), LARGEST, -7]
    places = [0, 1, 2, 0, 1, 2, 3, 4, 5, 4, 3]
    scores, inverse, ids = torch.tensor(values), torch.tensor(places), torch.arange(6)
    largest = scores_of_distinct(scores, inverse, ids, "last").tolist()
    assert largest == [5, LARGEST, LEAST, -1, LARGEST, -(1 << 62)]
    sums = scores_of_distinct(scores, inverse, ids, "sum").tolist()
    assert sums == [8, LARGEST, LEAST, -8, LARGEST, -(1 << 62)]
    weights = torch.tensor([0.5, 2.0, 0.25], dtype=torch.float64)
    decayed = scores_of_distinct(weights, torch.tensor([1, 0, 1]), ids[:2], "decayed_sum")
    assert decayed.tolist() == [2.0, 0.75]


def test_features_that_update_nothing_bring_no_batch_score() -> None:
    table = td.TableConfig(
        "ads",
        4,
        ["clicked", "shown"],
        policy=td.Policy(score=KINDS["sum"]),
        feature_policies={"shown": td.FeaturePolicy(updates_scores=False)},
    )
    group = td.TableGroup([table], optimizer=td.SGD(lr=0.1))
    group.scores.set_batch(0, 3)
    policies = [group.config.layout.of_feature.get((0, name), 0) for name in table.feature_names]
    group.find_or_insert(torch.tensor([1, 2]), torch.tensor([0, 1, 2]), [0, 0], policies)
    assert score_of(group, [1, 2]) == [3, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_the_least_combined_score_is_evicted(kind: str) -> None:
    group = make_group(KINDS[kind], capacity=3)
    for ids, scores in (([1, 2, 3], [5, 1, 2]), ([2], [1]), ([4], [3])):
        group.insert(0, torch.tensor(ids), scores=torch.tensor(scores))
        group.step()
    # id 2: max 1; sum 2, as id 3 has, which is older; decayed sum 1 + 2^-1/4, id 3: 2^3/4
    gone = {"max": 2, "sum": 3, "decayed_sum": 3}[kind]
    found = group.contains(0, torch.tensor([1, 2, 3, 4])).tolist()
    assert found == [i != gone for i in (1, 2, 3, 4)]


@pytest.mark.traced
def test_it_compiles() -> None:
    policy = td.Policy(score=KINDS["decayed_sum"], capacity=100)
    module = td.DynamicEmbedding(4, name="t", policy=policy, optimizer=td.SGD(lr=0.1))
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    compiled(torch.tensor([1, 2, 1]), scores=torch.tensor([1.0, 2.0, 0.5])).sum().backward()
    assert score_of(module.group, [1, 2]) == pytest.approx([1.5, 2.0])


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_keep_combined_scores(kind: str, tmp_path: Path) -> None:
    def make(score: td.Custom) -> td.DynamicEmbedding:
        policy = td.Policy(score=score)
        return td.DynamicEmbedding(4, name="t", policy=policy, optimizer=td.SGD(lr=0.1))

    module = make(KINDS[kind])
    module(torch.tensor([1, 2, 1]), scores=torch.tensor([5, 1, 2])).sum().backward()
    module.optimizer.step()
    td.checkpoint.save(tmp_path / "saved", module)
    other = KINDS[kind]
    if kind == "decayed_sum":
        other = td.Custom(combine="decayed_sum", half_life_steps=9)
    for score in (KINDS[kind], other):
        loaded = make(score)
        td.checkpoint.load(tmp_path / "saved", loaded)
        assert score_of(loaded.group, [1, 2]) == pytest.approx(score_of(module.group, [1, 2]))
        loaded(torch.tensor([1]), scores=torch.tensor([4]))
        before = score_of(module.group, [1])[0]
        expected = max(before, 4) if kind == "max" else before + 4
        assert score_of(loaded.group, [1]) == pytest.approx([expected])


def test_a_new_id_begins_with_the_least_score() -> None:
    group = make_group(KINDS["max"], KINDS["sum"], KINDS["decayed_sum"])
    for table, least in enumerate((LEAST, 0, NEVER_OCCURRED)):
        call = (torch.tensor([1]), torch.tensor([0, 1]), None, [table], [table])
        td.ops.find_or_insert_(group.index, *call)
        word = group.config.layout.word("decayed" if table == 2 else "custom")
        found = td.ops.get_scores(group.index, *call[:2], [table], word=word).scores
        assert found.tolist() == [least]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"combine": "mean"}, r"Custom: combine is 'mean', expected one of \('last', 'max', 'sum'"),
        ({"combine": "decayed_sum"}, "decayed counts need one of them, such as half_life='7d'"),
        ({"half_life": "7d"}, "combine is 'last': they are for combine='decayed_sum'"),
        ({"combine": "decayed_sum", "half_life": 0}, "half_life is 0, expected from 1 to 2"),
        ({"combine": "decayed_sum", "half_life_steps": -3}, "half_life_steps is -3, expected"),
        ({"combine": "decayed_sum", "half_life": 1 << 33}, "half_life is 8589934592, expected"),
    ],
)
def test_wrong_combinations(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        td.Custom(**arguments)


@pytest.mark.parametrize(
    "score", [("custom", td.Custom(combine="sum")), ("decayed", KINDS["decayed_sum"])]
)
def test_a_score_given_twice(score: Any) -> None:
    with pytest.raises(ValueError, match=r"expected every score once"):
        td.Policy(score=score)


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -1.0])
def test_wrong_weights_change_nothing(wrong: float) -> None:
    group = make_group(KINDS["decayed_sum"])
    if group.device.type != "cpu":
        pytest.skip("a GPU does not wait to look at weights")
    with pytest.raises(ValueError, match=rf"scores has {wrong}, expected numbers from 0 on"):
        group.insert(0, torch.tensor([1, 2]), scores=torch.tensor([1.0, wrong]))
    assert group.usage.tables()["t0"].size == 0
