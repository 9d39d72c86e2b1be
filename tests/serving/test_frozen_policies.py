"""What policies mean in a frozen model: it reads what the live one would read in eval mode."""

from __future__ import annotations

import pytest
import torch
from seeding import seeded

import torch_dynemb as td

pytestmark = pytest.mark.any_device

ADAM = td.Adam(lr=0.05)
POLICIES = {
    "lru": td.Policy(capacity=20),
    "lfu": td.Policy(score="frequency", capacity=20),
    "full, default": td.Policy(capacity=20, on_full="default", refused=torch.arange(4.0)),
    "counted": td.Policy(admission=td.AdmitFrequent(3)),
    "sketched": td.Policy(admission=td.AdmitFrequentSketch(3, memory="4KiB"), refused="zeros"),
    "chance": td.Policy(admission=td.AdmitByChance(0.5)),
    "none": td.Policy(admission=td.AdmitNone()),
    "ttl": td.Policy(ttl=10),
    "custom": td.Policy(score="custom", capacity=20),
}


def trained(policy: td.Policy) -> td.DynamicEmbeddingBag:
    """A table of a policy; training has inserted, removed and refused ids."""
    bag = td.DynamicEmbeddingBag(4, mode="sum", name="bag", optimizer=ADAM, policy=policy)
    if policy.ttl is not None:
        bag.group.clock.set_now(996)
    for step in range(5):
        ids = torch.randint(0, 12, (8, 3), generator=seeded(step)) + 6 * step
        scores = ids if policy.score == "custom" else None
        bag(ids, scores=scores).square().sum().backward()
        bag.optimizer.step(now=1000 + 4 * step if policy.ttl else None)
    return bag


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_frozen_equals_eval(policy: td.Policy) -> None:
    bag = trained(policy)
    frozen = td.freeze(bag)
    bag.eval()
    ids = torch.arange(60).reshape(20, 3)
    single = torch.arange(60).reshape(60, 1)
    for given in (ids, single):
        assert torch.equal(frozen(given), bag(given))
    before = frozen.sizes()
    for _ in range(4):  # which would admit ids, were it not for reading only
        frozen(single)
    assert frozen.sizes() == before
    if policy.ttl is None:
        assert before == bag.sizes()


def test_ids_that_have_expired_are_left_out_and_others_stay() -> None:
    bag = trained(POLICIES["ttl"])  # at 1016; ids of the first steps have expired at 1010 and 1014
    single = torch.arange(60).reshape(60, 1)
    there = td.freeze(bag, missing=True)
    (size,) = there.model.sizes().values()
    assert 0 < size < len(bag)
    output, missing = there(single)
    assert int(missing) == 60 - size
    bag.optimizer.step(now=2000)  # by now all have, but not in the copy
    assert torch.equal(there(single)[0], output)
    assert td.freeze(bag).sizes() == {"bag": 0}


def test_functions_of_admission_are_not_called() -> None:
    calls = []

    @td.register_admission("frozen policies")
    def admit(new: td.NewIds) -> torch.Tensor:
        calls.append(new.table)
        return new.ids % 2 == 0

    rule = td.AdmitBy("frozen policies")
    bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=ADAM, policy=td.Policy(admission=rule))
    ids = torch.arange(12).reshape(4, 3)
    bag(ids).sum().backward()
    assert len(calls) == 1
    frozen = td.freeze(bag)
    assert torch.equal(frozen(ids), bag.eval()(ids))
    assert len(calls) == 1
