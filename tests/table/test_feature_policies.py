"""Features of one table may have their own admission, time to live and scores."""

from __future__ import annotations

import pytest
import torch
from table_ids import ids_of

import torch_dynemb as td

pytestmark = pytest.mark.any_device


def ads(**policies: td.FeaturePolicy) -> td.DynamicEmbeddingBagCollection:
    table = td.TableConfig(
        "ads",
        4,
        ["clicked", "shown"],
        policy=td.Policy(score="frequency", admission=td.AdmitFrequent(3), ttl=100),
        feature_policies=policies,
    )
    other = td.TableConfig("users", 4)
    return td.DynamicEmbeddingBagCollection([table, other], optimizer=td.SGD(lr=0.1))


def look_up(module: td.DynamicEmbeddingBagCollection, **ids: list[int]) -> None:
    features = {name: torch.tensor([ids.get(name, [])]).long() for name in module.feature_names}
    module(features).sum().backward()


def test_a_feature_may_have_its_own_threshold() -> None:
    module = ads(clicked=td.FeaturePolicy(threshold=1))
    look_up(module, clicked=[1], shown=[2], users=[9])
    assert ids_of(module.group, 0) == {1}
    assert ids_of(module.group, 1) == {9}
    look_up(module, shown=[2, 2])
    assert ids_of(module.group, 0) == {1, 2}


def test_a_feature_may_have_its_own_ttl() -> None:
    module = ads(
        clicked=td.FeaturePolicy(threshold=1, ttl=1000), shown=td.FeaturePolicy(threshold=1)
    )
    module.group.clock.set_now(50)
    look_up(module, clicked=[1, 3], shown=[2, 3])
    module.optimizer.step(now=160)
    look_up(module, shown=[1])  # a shorter ttl takes nothing away
    assert module.group.remove(0, expired=True) == 1
    assert ids_of(module.group, 0) == {1, 3}
    module.optimizer.step(now=1050)
    assert module.group.remove(0, expired=True) == 2


@pytest.mark.parametrize("first", ["clicked", "shown"])
def test_a_new_id_of_two_features_gets_what_both_give(first: str) -> None:
    """As an id that is there would, whichever of them comes first."""
    other = "shown" if first == "clicked" else "clicked"
    table = td.TableConfig(
        "ads",
        4,
        [first, other, "third"],
        policy=td.Policy(score="frequency", admission=td.AdmitFrequent(4), ttl=10),
        feature_policies={
            "clicked": td.FeaturePolicy(threshold=2, ttl=5),
            "shown": td.FeaturePolicy(ttl=100),
        },
    )
    module = td.DynamicEmbeddingBagCollection([table], optimizer=td.SGD(lr=0.1))
    module.group.clock.set_now(1000)
    look_up(module, clicked=[1, 3], shown=[1, 2], third=[2, 4])
    assert ids_of(module.group) == {1}  # the least threshold
    assert module.group.scores.get(0, torch.tensor([1])).scores.tolist() == [2]
    look_up(module, clicked=[3], shown=[2], third=[2])
    ids = torch.tensor([1, 2, 3])
    assert ids_of(module.group) == {1, 2, 3}
    assert module.group.scores.get(0, ids).scores.tolist() == [2, 4, 2]
    scores = module.group.scores.get(0, ids, score="expiry").scores
    assert scores.tolist() == [1100, 1100, 1005]  # the longest ttl


@pytest.mark.parametrize("ttl", [None, 7])
def test_a_feature_that_leaves_scores_alone_prolongs_no_ttl(ttl: int | None) -> None:
    table = td.TableConfig(
        "ads",
        4,
        ["quiet", "silent", "clicked"],
        policy=td.Policy(score="frequency", ttl=ttl),
        feature_policies={
            "quiet": td.FeaturePolicy(updates_scores=False, ttl=1000),
            "silent": td.FeaturePolicy(updates_scores=False, ttl=100),
        },
    )
    module = td.DynamicEmbeddingBagCollection([table], optimizer=td.SGD(lr=0.1))
    module.group.clock.set_now(1)
    look_up(module, quiet=[1, 2], silent=[2, 3], clicked=[1])
    scores = module.group.scores.get(0, torch.tensor([1, 2, 3]), score="expiry").scores
    never = (1 << 63) - 1
    assert scores.tolist() == [never if ttl is None else 8, 1001, 101]
    assert module.group.scores.get(0, torch.tensor([1, 2, 3])).scores.tolist() == [1, 0, 0]


def test_a_ttl_that_never_ends_is_none() -> None:
    policy = td.Policy(ttl=(1 << 63) - 5)
    group = td.TableGroup([td.TableConfig("t", 4, policy=policy)], optimizer=None, seed=1)
    group.clock.set_now(1000)
    for _ in range(2):  # new, then known
        group.insert(0, torch.tensor([1]))
        expiry = group.scores.get(0, torch.tensor([1]), score="expiry").scores
        assert expiry.tolist() == [(1 << 63) - 1]


def test_a_feature_may_leave_scores_alone() -> None:
    module = ads(
        clicked=td.FeaturePolicy(threshold=1), shown=td.FeaturePolicy(updates_scores=False)
    )
    module.group.clock.set_now(10)
    look_up(module, clicked=[1, 1])
    module.optimizer.step(now=20)
    look_up(module, shown=[1, 1, 1, 5, 5, 5])
    assert module.group.scores.get(0, torch.tensor([1])).scores.tolist() == [2]
    assert module.group.scores.get(0, torch.tensor([1]), score="expiry").scores.tolist() == [110]
    assert module.group.scores.get(0, torch.tensor([1]), score="step").scores.tolist() == [1]
    assert ids_of(module.group, 0) == {1}  # and 5 has not been counted
    look_up(module, clicked=[1])
    assert module.group.scores.get(0, torch.tensor([1])).scores.tolist() == [3]
