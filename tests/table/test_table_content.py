"""Content of a table that moves between groups: ids, rows, state, scores, counts."""

from __future__ import annotations

import pytest
import torch
from loaded_content import write_content
from seeding import seeded

import torch_dynemb as td
from torch_dynemb.table.content import (
    CountedIds,
    read_content,
    read_counts,
    score_names,
)

pytestmark = pytest.mark.any_device

POLICY = td.Policy(
    score=("timestamp", "frequency"), ttl=50, capacity=500, admission=td.AdmitFrequent(2)
)


def trained(steps: int, optimizer: td.optim.OptimizerConfig) -> td.DynamicEmbeddingBagCollection:
    tables = [td.TableConfig("kept", 8, policy=POLICY), td.TableConfig("plain", 4)]
    module = td.DynamicEmbeddingBagCollection(tables, optimizer=optimizer, max_rows=4096)
    generator = seeded(steps)
    for step in range(steps):
        ids = {
            name: torch.randint(-9, 30, (8, 3), generator=generator) for name in ("kept", "plain")
        }
        module(ids).square().sum().backward()
        module.optimizer.step(now=step + 5)
    module.group.materialize()
    return module


@pytest.mark.parametrize(
    "optimizer",
    [td.Adam(lr=0.1, row_steps=True), td.RowWiseAdagrad(lr=0.1), td.SGD(lr=0.1)],
    ids=lambda config: config.name,
)
def test_content_arrives_whole(optimizer: td.optim.OptimizerConfig) -> None:
    source, target = trained(5, optimizer).group, trained(2, optimizer).group
    for table in (0, 1):
        content, counted = read_content(source.tables, table), read_counts(source.tables, table)
        before = target.usage.tables()[target.names[table]]
        write_content(target.tables, table, content, counted)
        target.materialize()
        arrived = read_content(target.tables, table)
        assert content.ids.numel() > 0
        assert torch.equal(arrived.ids, content.ids)
        assert torch.equal(arrived.rows, content.rows)
        assert arrived.scores.keys() == content.scores.keys()
        for name, scores in content.scores.items():
            assert torch.equal(arrived.scores[name], scores)
        assert arrived.state.keys() == content.state.keys()
        for name, state in content.state.items():
            assert torch.equal(arrived.state[name], state)
        again = read_counts(target.tables, table)
        assert (counted is None) == (again is None)
        if counted is not None and again is not None:
            assert counted.ids.numel() > 0
            assert torch.equal(counted.ids, again.ids)
            assert torch.equal(counted.counts, again.counts)
        after = target.usage.tables()[target.names[table]]
        assert after.not_admitted == before.not_admitted  # without any lookup
        assert after.default_served == before.default_served


def test_scores_of_another_table_stay_out() -> None:
    group = trained(3, td.SGD(lr=0.1)).group
    assert score_names(group.tables, 0) == ("step", "timestamp", "frequency", "expiry")
    assert score_names(group.tables, 1) == ()
    assert read_content(group.tables, 1).scores == {}


def test_an_empty_table_has_content() -> None:
    group = trained(0, td.Adam(lr=0.1)).group
    content = read_content(group.tables, 0)
    assert content.ids.shape == (0,)
    assert content.rows.shape == (0, 8)
    assert content.state["exp_avg"].shape == (0, 8)
    write_content(group.tables, 0, content, read_counts(group.tables, 0))
    assert group.size(0) == 0


def test_a_table_without_room_stays_as_it_was() -> None:
    tables = [td.TableConfig("small", 4, policy=td.Policy(capacity=3, on_full="default"))]
    group = td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=0.1)).group
    group.insert(0, torch.arange(3))
    content = read_content(trained(2, td.SGD(lr=0.1)).group.tables, 1)
    with pytest.raises(RuntimeError, match="'small' has no room"):
        write_content(group.tables, 0, content, None)
    assert read_content(group.tables, 0).ids.tolist() == [0, 1, 2]


def test_ids_that_only_wait_for_room_arrive_with_their_counts() -> None:
    """They are beyond the threshold, and get no row before they are seen again."""
    policy = td.Policy(score="step", capacity=3, on_full="default", admission=td.AdmitFrequent(2))

    def make(capacity: int) -> td.TableGroup:
        given = td.Policy(**{**vars(policy), "capacity": capacity})
        return td.TableGroup([td.TableConfig("t", 4, policy=given)], optimizer=None, seed=1)

    source, target = make(3), make(10)
    source.insert(0, torch.tensor([1, 2, 3]).repeat(2))
    source.insert(0, torch.tensor([4] * 5 + [5]))
    content, counted = read_content(source.tables, 0), read_counts(source.tables, 0)
    assert counted is not None
    assert (counted.ids.tolist(), counted.counts.tolist()) == ([4, 5], [5, 1])
    write_content(target.tables, 0, content, counted)
    again = read_counts(target.tables, 0)
    assert again is not None
    assert (again.ids.tolist(), again.counts.tolist()) == ([4, 5], [5, 1])
    assert read_content(target.tables, 0).ids.tolist() == [1, 2, 3]
    assert target.usage.tables(wait=True)["t"].not_admitted == 0
    target.insert(0, torch.tensor([4]))
    assert read_content(target.tables, 0).ids.tolist() == [1, 2, 3, 4]


def test_what_has_a_row_is_not_counted_though_a_file_says_so() -> None:
    source = trained(5, td.SGD(lr=0.1)).group
    target = trained(2, td.SGD(lr=0.1)).group
    content = read_content(source.tables, 0)
    counted = CountedIds(content.ids, torch.ones_like(content.ids))
    write_content(target.tables, 0, content, counted)
    assert target.usage.tables(wait=True)["kept"].counted == 0
    assert torch.equal(read_content(target.tables, 0).ids, content.ids)
