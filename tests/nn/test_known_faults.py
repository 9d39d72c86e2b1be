"""Faults that users of other libraries of dynamic tables have met, one test each.

Others of the kind have tests where the feature is tested: nondeterministic backward
(test_reduced_gradients), widths above 1024 (test_cuda_groups), unsupported dtypes (test_guards),
waits for the device (test_cuda_device), growth that copies rows (test_index_growth).
"""

from __future__ import annotations

import pytest
import torch
from group_calls import train

import torch_dynemb as td

pytestmark = pytest.mark.any_device


def test_an_id_without_a_row_does_not_get_whatever_memory_holds() -> None:
    policy = td.Policy(capacity=2, on_full="default", score="none", refused="zeros")
    module = td.DynamicEmbedding(8, name="t", optimizer=td.SGD(lr=1.0), policy=policy)
    for _ in range(3):
        torch.full((1000, 8), float("nan"))  # what freed memory might hold
        output = module(torch.arange(10))
        assert torch.equal(output[2:], torch.zeros(8, 8))


def test_an_id_without_a_row_is_counted_and_can_be_an_error() -> None:
    policy = td.Policy(capacity=2, on_full="default", score="none", check="error")
    module = td.DynamicEmbedding(8, name="t", optimizer=td.SGD(lr=1.0), policy=policy)
    module(torch.arange(10))
    assert module.group.usage.tables(wait=True)["t"].rejected == 8
    with pytest.raises(RuntimeError, match="no room for 8 new ids"):
        module.optimizer.step()


def test_tables_of_one_group_keep_their_own_initializers() -> None:
    tables = [
        td.TableConfig(f"t{high}", 4, initializer=td.Uniform(high - 1, high)) for high in (1, 5, 9)
    ]
    collection = td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=1.0))
    output = collection({table.name: torch.arange(50)[:, None] for table in tables})
    for high, part in zip((1, 5, 9), output.split(4, 1), strict=True):
        assert bool(((part >= high - 1) & (part < high)).all())


def test_ids_in_use_are_protected_in_their_own_table() -> None:
    """The same ids in two tables, of which one is looked up."""
    policy = td.Policy(capacity=50)
    tables = [td.TableConfig("a", 4, policy=policy), td.TableConfig("b", 4, policy=policy)]
    group = td.TableGroup(tables, optimizer=None, seed=1)
    ids = torch.arange(50)
    for table in range(2):
        group.insert(table, ids)
    group.step()
    group.insert(0, ids)
    for table in range(2):
        group.insert(table, torch.arange(100, 130))
    assert bool(group.contains(0, ids).all())
    assert int(group.contains(1, ids).sum()) < 30


def test_weights_of_samples_are_no_counts() -> None:
    policy = td.Policy(score="frequency")
    bag = td.DynamicEmbeddingBag(4, mode="sum", name="t", optimizer=td.SGD(lr=1.0), policy=policy)
    ids, weights = torch.tensor([[1, 1, 2]]), torch.tensor([[0.5, 7.0, 3.0]])
    output = bag(ids, per_sample_weights=weights)
    rows = bag.group.read(0, torch.tensor([1, 2]))
    torch.testing.assert_close(output[0], 7.5 * rows[0] + 3.0 * rows[1])
    assert bag.group.scores.get(0, torch.tensor([1, 2])).scores.tolist() == [2, 1]


def test_frequencies_count_occurrences_and_not_distinct_ids_of_a_batch() -> None:
    policy = td.Policy(score="frequency")
    group = td.TableGroup([td.TableConfig("t", 4, policy=policy)], optimizer=None, seed=1)
    group.insert(0, torch.tensor([5, 5, 5, 6]))
    group.insert(0, torch.tensor([6, 6, 5]))
    assert group.scores.get(0, torch.tensor([5, 6])).scores.tolist() == [4, 3]


def test_extreme_ids_survive_saving() -> None:
    ids = torch.tensor([-1, 0, -(2**63), 2**63 - 1, -2, 1])
    module = td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=1.0))
    module(ids).sum().backward()
    other = td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=1.0))
    other.load_state_dict(module.state_dict())
    assert set(other.ids().tolist()) == set(ids.tolist())
    assert torch.equal(other.group.read(0, ids), module.group.read(0, ids))


def test_who_was_seen_longest_ago_still_goes_first_after_loading() -> None:
    policy = td.Policy(capacity=8)
    table = td.TableConfig("t", 4, policy=policy)
    group, other = (td.TableGroup([table], optimizer=None, seed=1) for _ in range(2))
    for id in range(8):
        group.insert(0, torch.tensor([id]))
        group.step()
    other.state.load(group.state.tensors())
    for each in (group, other):
        each.evicted.record(8)
        each.insert(0, torch.tensor([100, 101]))
    evicted = group.evicted.take()["t"].ids.tolist()
    assert evicted == other.evicted.take()["t"].ids.tolist()
    assert set(evicted) <= set(range(5))  # of 64 slots, 16 are looked at


def test_what_an_admission_rule_gives_is_what_was_asked_for() -> None:
    for refused in (torch.full((4,), 2.0), "zeros"):
        policy = td.Policy(admission=td.AdmitFrequent(2), refused=refused)
        module = td.DynamicEmbedding(
            4, name="t", optimizer=td.SGD(lr=1.0), policy=policy, initializer=td.Constant(7.0)
        )
        expected = torch.zeros(4) if isinstance(refused, str) else refused
        assert torch.equal(module(torch.tensor([3]))[0], expected)
        assert torch.equal(module(torch.tensor([3]))[0], torch.full((4,), 7.0))


def test_initial_rows_follow_the_seed() -> None:
    def rows(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        return td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=1.0))(torch.arange(5))

    assert torch.equal(rows(1), rows(1))
    assert not torch.equal(rows(1), rows(2))


def test_a_table_that_never_evicts_reads_its_own_rows() -> None:
    module = td.DynamicEmbedding(4, name="t", optimizer=td.SGD(lr=1.0))
    module.group.insert_or_assign(0, torch.arange(1000), torch.arange(4000.0).reshape(1000, 4))
    order = torch.randperm(1000)
    assert torch.equal(module.eval()(order), torch.arange(4000.0).reshape(1000, 4)[order])


def test_one_empty_batch_is_a_batch() -> None:
    for policy in (td.Policy(), td.Policy(capacity=5), td.Policy(admission=td.AdmitFrequent(2))):
        module = td.DynamicEmbeddingBag(
            4, mode="sum", name="t", optimizer=td.Adam(lr=0.1), policy=policy
        )
        output = module(torch.zeros(0, dtype=torch.int64), torch.zeros(3, dtype=torch.int64))
        output.sum().backward()
        module.optimizer.step()
        assert torch.equal(output, torch.zeros(3, 4))


def test_a_large_table_is_exported_in_small_parts() -> None:
    group = td.TableGroup([td.TableConfig("t", 4)], optimizer=None, seed=1)
    group.insert(0, torch.arange(10_000))
    sizes = [batch.ids.numel() for batch in group.export(0, batch_size=64)]
    assert max(sizes) <= 64
    assert sum(sizes) == 10_000


def test_a_static_table_becomes_a_dynamic_one() -> None:
    static = torch.nn.Embedding(6, 4)
    dynamic = td.DynamicEmbedding.from_embedding(static.weight, optimizer=td.SGD(lr=1.0))
    assert torch.equal(dynamic.eval()(torch.arange(6)), static.weight)
    policy = td.Policy(score="frequency", capacity=6, admission=td.AdmitFrequent(100))
    capped = td.DynamicEmbedding.from_embedding(
        static.weight, optimizer=td.SGD(lr=1.0), policy=policy
    )
    assert torch.equal(capped.eval()(torch.arange(6)), static.weight)


def test_reused_rows_keep_no_optimizer_state() -> None:
    group = td.TableGroup([td.TableConfig("t", 4)], optimizer=td.Adam(lr=0.1), seed=1)
    for _ in range(5):
        train(group, 0, torch.arange(3), torch.ones(3, 4))
    group.erase(0, torch.arange(3))
    train(group, 0, torch.arange(10, 13), torch.ones(3, 4))
    moments = group.rows.state[0][:3]
    torch.testing.assert_close(moments, torch.full((3, 4), 0.1))  # (1 - beta1) * 1
