"""``Policy(keep_at_least=)``: ids that are read although their ttl has passed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.distributed.owners import policy_of_share

pytestmark = pytest.mark.any_device


def trained(seconds: list[int], policy: td.Policy) -> td.DynamicEmbedding:
    """A table that saw id n at ``seconds[n]``; its rows are trained away from zero."""
    module = td.DynamicEmbedding(
        4, name="t", optimizer=td.SGD(lr=1.0), initializer=td.Constant(0.0), policy=policy
    )
    for id, second in enumerate(seconds):
        module.group.clock.set_now(second)
        module(torch.tensor([id])).sum().backward()
        module.optimizer.step(now=second)
    return module.eval()


def there(module: torch.nn.Module, count: int) -> list[int]:
    rows: Tensor = module(torch.arange(count))
    return rows.any(1).nonzero()[:, 0].tolist()


def test_the_ids_seen_least_recently_expire_first_and_only_beyond_the_floor() -> None:
    module = trained(list(range(6)), td.Policy(ttl=10, keep_at_least=3))
    group = module.group
    for now, left in ((9, [0, 1, 2, 3, 4, 5]), (11, [2, 3, 4, 5]), (100, [3, 4, 5])):
        group.clock.set_now(now)
        assert there(module, 6) == left
        frozen = td.freeze(module)
        assert there(frozen, 6) == left
        assert frozen.sizes() == {"t": len(left)}
    assert group.remove(0, expired=True) == 3
    assert there(module, 6) == sorted(module.ids().tolist()) == [3, 4, 5]
    assert group.remove(0, expired=True) == 0
    group.erase(0, torch.tensor([3]))  # fewer than the floor: the others stay
    assert there(module, 6) == [4, 5]


def test_ids_of_one_second_stay_together_and_training_brings_ids_back() -> None:
    module = trained([0, 5, 5, 5, 6], td.Policy(ttl=10, keep_at_least=2))
    module.group.clock.set_now(100)
    assert there(module, 5) == [1, 2, 3, 4]
    module.train()
    module(torch.tensor([0])).sum().backward()
    module.optimizer.step(now=101)
    assert there(module.eval(), 5) == [0, 4]


def test_each_table_of_a_lookup_has_its_own_floor() -> None:
    policies = {"a": td.Policy(ttl=10, keep_at_least=2), "b": td.Policy(ttl=10), "c": td.Policy()}
    module = td.DynamicEmbeddingCollection(
        [
            td.TableConfig(name, 4, [name], initializer=td.Constant(0.0), policy=policy)
            for name, policy in policies.items()
        ],
        optimizer=td.SGD(lr=1.0),
    )
    for second in range(4):
        module.group.clock.set_now(second)
        rows = module({name: torch.tensor([second]) for name in policies})
        torch.cat(list(rows.values())).sum().backward()
        module.optimizer.step(now=second)
    module.group.clock.set_now(12)
    ids = {"a": torch.arange(4), "b": torch.arange(4)[1:], "c": torch.arange(3)}
    rows = module.eval()(ids)
    assert {name: of.any(1).tolist() for name, of in rows.items()} == {
        "a": [False, False, True, True],
        "b": [False, False, True],
        "c": [True, True, True],
    }


def test_loaded_tables_have_floors_and_shards_their_share() -> None:
    policy = td.Policy(ttl=10, keep_at_least=5, capacity=9)
    module = trained(list(range(7)), policy)
    module.group.clock.set_now(100)
    other = td.DynamicEmbedding(
        4, name="t", optimizer=td.SGD(lr=1.0), initializer=td.Constant(0.0), policy=policy
    )
    other.load_state_dict(module.state_dict())
    assert there(other.eval(), 7) == there(module, 7) == [2, 3, 4, 5, 6]
    share = policy_of_share(policy, 2)
    assert (share.capacity, share.keep_at_least) == (5, 3)
    assert policy_of_share(td.Policy(), 2).keep_at_least is None
    assert policy.description()["keep_at_least"] == 5
    assert "keep_at_least" not in td.Policy(ttl=1).description()


@pytest.mark.traced
def test_compiled_lookups_read_the_floor_of_the_last_second() -> None:
    module = trained(list(range(5)), td.Policy(ttl=10, keep_at_least=2))
    module.group.clock.set_now(100)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert there(compiled, 5) == [3, 4]
    module.train()
    module(torch.tensor([0])).sum().backward()
    module.optimizer.step(now=101)
    module.eval()
    assert there(compiled, 5) == [0, 4]
