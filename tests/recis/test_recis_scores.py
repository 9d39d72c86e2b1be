"""Scores of ids from a feature: of each id or each sample, on the tables of an engine."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from lookups import option

import torch_dynemb as td
from torch_dynemb.recis import (
    AdmitHook,
    DynamicEmbedding,
    EmbeddingEngine,
    FilterHook,
    RaggedTensor,
    RowFilter,
    register_filter_hook,
)
from torch_dynemb.recis.tables import hooks

pytestmark = pytest.mark.any_device


@pytest.fixture
def engaged() -> Iterator[FilterHook]:
    @register_filter_hook("Engaged")
    class Engaged(RowFilter):
        interval = 2
        scores = ("custom",)

        def remove(self, group: td.TableGroup, table: int) -> int:
            return group.remove(table, score_below=10)

    yield FilterHook("Engaged")
    del hooks._FILTERS["Engaged"]


def scores(engine: EmbeddingEngine, *ids: int) -> list[float]:
    (table,) = engine.tables.values()
    found = table.group.scores.get(0, torch.tensor(ids))  # type: ignore[union-attr,operator]
    return found.scores.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("combiner", ["sum", "tile"])
@pytest.mark.parametrize(
    ("ids", "worth", "expected"),
    [
        (torch.tensor([[1, 2], [3, 1]]), torch.tensor([[5, 1], [7, 2]]), [5, 1, 7]),
        (torch.tensor([[1, 2], [3, 1]]), torch.tensor([4.6, 9.5]), [10, 5, 10]),
        (
            RaggedTensor(torch.tensor([1, 2, 3]), torch.tensor([0, 0, 3])),
            RaggedTensor(torch.tensor([3, -1, 2]), torch.tensor([0, 0, 3])),
            [3, -1, 2],
        ),
        (
            RaggedTensor(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3])),
            torch.tensor([[8.0], [6.0]]),
            [8, 6, 6],
        ),
    ],
    ids=["of ids", "of samples", "ragged", "of ragged samples"],
)
def test_a_feature_gives_scores(
    engaged: FilterHook, combiner: Any, ids: Any, worth: Any, expected: list[int]
) -> None:
    tile = {"combiner_kwargs": {"tile_len": 2}} if combiner == "tile" else {}
    item = option(combiner=combiner, filter_hook=engaged, score_from="worth", **tile)
    engine = EmbeddingEngine({"item": item})
    out = engine({"item": ids, "worth": worth})
    assert out["worth"] is worth
    assert scores(engine, 1, 2, 3) == expected
    engine.eval()
    assert torch.equal(engine({"item": ids})["item"], out["item"])  # scores are not needed


def test_floats_are_added_to_decayed_sums() -> None:
    @register_filter_hook("Decayed")
    class Decayed(RowFilter):
        scores = (td.Custom(combine="decayed_sum", half_life_steps=1),)

    try:
        item = option(filter_hook=FilterHook("Decayed"), score_from="worth")
        engine = EmbeddingEngine({"item": item})
        for _ in range(2):
            engine({"item": torch.tensor([[1, 1, 2]]), "worth": torch.tensor([0.25])})
        assert scores(engine, 1, 2, 3) == pytest.approx([1.0, 0.5, 0.0])
        if torch.get_default_device().type == "cpu":  # a GPU's values are not waited for
            with pytest.raises(ValueError, match=r"scores has -1\.0, expected numbers from 0 on"):
                engine({"item": torch.tensor([[1]]), "worth": torch.tensor([-1.0])})
    finally:
        del hooks._FILTERS["Decayed"]


def test_features_of_one_table_bring_their_own_scores(engaged: FilterHook) -> None:
    def item(source: str | None) -> Any:
        return option(filter_hook=engaged, score_from=source)

    engine = EmbeddingEngine({"bought": item("price"), "clicked": item("clicks")})
    ids = {"bought": torch.tensor([[1]]), "clicked": torch.tensor([[2, 3]])}
    engine({**ids, "price": torch.tensor([20]), "clicks": torch.tensor([[3, 11]])})
    assert scores(engine, 1, 2, 3) == [20, 3, 11]
    with pytest.raises(KeyError, match=r"input_features lacks \['clicks'\]"):
        engine({**ids, "price": torch.tensor([20])})
    mixed = EmbeddingEngine({"bought": item("price"), "clicked": item(None)})
    with pytest.raises(ValueError, match="keeps custom scores, but none have been given"):
        mixed({**ids, "price": torch.tensor([20])})


def test_wrong_options_and_scores(engaged: FilterHook) -> None:
    for changes, message in (
        ({}, "score_from is 'worth', but filter_hook is None, which keeps scores ()"),
        (
            {"filter_hook": FilterHook("GlobalStepFilter", {"filter_step": 3})},
            "which keeps scores ('step',): give a filter with 'custom' or a",
        ),
        ({"filter_hook": engaged, "trainable": False}, "so lookups change no scores"),
        ({"filter_hook": engaged, "admit_hook": AdmitHook("ReadOnly")}, "change no scores"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            option(score_from="worth", **changes)
    with pytest.raises(TypeError, match="score_from is 3, expected str"):
        option(score_from=3)
    item = option(filter_hook=engaged, score_from="worth")
    with pytest.raises(ValueError, match="has one feature: give the option to an EmbeddingEngine"):
        DynamicEmbedding(item)
    engine = EmbeddingEngine({"item": item})
    wrong: list[tuple[Any, type[Exception], str]] = [
        (torch.ones(3), ValueError, "'worth' has 3 values, expected one for each of the 4 ids"),
        (torch.ones(4).bool(), TypeError, "'worth' has dtype torch.bool, expected int64"),
        ([1, 2, 3, 4], TypeError, "'worth' is a list, expected a Tensor"),
    ]
    if torch.get_default_device().type == "cpu":
        wrong += [
            (torch.tensor([1, torch.nan]), ValueError, "has nan, expected finite scores"),
            (torch.tensor([1, -torch.inf]), ValueError, "has -inf, expected finite scores"),
        ]
    for worth, error, message in wrong:
        with pytest.raises(error, match=message):
            engine({"item": torch.tensor([[1, 2], [3, 4]]), "worth": worth})
    (table,) = engine.tables.values()
    assert table.ids().numel() == 0  # type: ignore[operator]
