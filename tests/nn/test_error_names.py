"""Errors of ops call tables and features by name, and end with the place in the source."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import serving
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.tensors import LookupBatch

pytestmark = pytest.mark.cpu_only("a GPU raises errors of values in a later op")

NAMES = ["users", "items"]


def collection(**options: Any) -> td.DynamicEmbeddingBagCollection:
    tables = [td.TableConfig(name, 4) for name in NAMES]
    return td.DynamicEmbeddingBagCollection(
        tables, optimizer=td.SGD(lr=0.1, **options.pop("optimizer", {})), **options
    )


def features(*ends: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Two bags of three ids of each table; those of ``items`` end at ``ends``."""
    of_users = torch.arange(3), torch.tensor([0, 2, 3])
    return {"users": of_users, "items": (torch.arange(3), torch.tensor([0, *ends]))}


@pytest.mark.parametrize("form", ["train", "eval", "frozen", "live"])
def test_wrong_offsets_name_the_feature_and_the_tables(form: str) -> None:
    model: Any = collection().train(form == "train")
    if form == "frozen":
        model = td.freeze(model)
    if form == "live":
        model = serving.live(model, headroom=3)
    says = (
        r"dynemb::\w+: offsets\[4\], of feature 'items', is 6, less than offsets\[3\] = 12: "
        r"offsets must not decrease; tables 'users', 'items'"
    )
    with pytest.raises(RuntimeError, match=says) as refusal:
        model(features(9, 3))
    assert type(refusal.value) is RuntimeError


def test_a_backward_names_the_table() -> None:
    model = collection(optimizer={"non_finite": "raise"})
    output = model(features(2, 3))
    gradient = torch.ones_like(output)
    gradient[:, 5] = float("nan")
    with pytest.raises(RuntimeError, match="gradient of id 0 of table 'items' has NaN"):
        output.backward(gradient)


def test_methods_of_groups_name_the_table() -> None:
    group = collection(max_rows=1000).group
    with pytest.raises(RuntimeError, match=r"table 'items' needs .* buckets .* larger max_rows"):
        group.reserve(1, 10**7)
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), padding_idx=3, name="ads")
    tables = serving.live(bag, headroom=5).frozen_tables
    with pytest.raises(RuntimeError, match="the padding id of table 'ads', which has no row"):
        tables.update("ads", torch.tensor([3]), torch.ones(1, 4))  # type: ignore[operator]


def test_a_table_added_later_is_named() -> None:
    model = collection(max_rows=1000)
    model.add_table(td.TableConfig("shops", 4))
    with pytest.raises(RuntimeError, match="table 'shops' needs"):
        model.group.reserve(2, 10**7)


def test_the_place_in_the_source_comes_last() -> None:
    bag = td.freeze(td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), name="ads"))
    batch = LookupBatch(torch.arange(3), torch.tensor([0, 3]), None, [5], [4], Pooling.SUM)
    with pytest.raises(RuntimeError) as refusal:
        bag.frozen_tables.lookup(batch)  # type: ignore[operator, union-attr]
    says = "dynemb::serve_lookup: feature_tables[0] is 5, expected 0 to 0; table 'ads' (csrc/"
    first, *_ = str(refusal.value).split("\n")
    assert first.startswith(says)
    assert re.search(r"\(csrc/arguments/index\.cpp:\d+\)$", first)
