"""States that a module refuses to load, which leave it as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import assert_refuses, full_of_policies
from torch import Tensor, nn
from trained_collection import TABLES, collection, train, used

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH

pytestmark = pytest.mark.any_device


def test_states_of_other_modules_are_refused() -> None:
    target = used()

    def other(
        tables: Any = TABLES, policy: td.Policy | None = None, **arguments: Any
    ) -> dict[str, Tensor]:
        return td.DynamicEmbeddingBagCollection(
            [td.TableConfig(name, dim, policy=policy or td.Policy()) for name, dim in tables],
            **{"optimizer": td.Adam(lr=0.1), **arguments},
        ).state_dict()

    assert_refuses(target, other((("a", 4), ("b", 16), ("c", 4))), "tables = .*'embedding_dim': 16")
    assert_refuses(target, other((("a", 4), ("x", 8), ("c", 4))), "tables = .*'x'")
    assert_refuses(target, other((("b", 8), ("a", 4), ("c", 4))), "tables = ")
    assert_refuses(target, other(TABLES[:2]), "tables = ")
    assert_refuses(target, other(optimizer=td.AdamW(lr=0.1)), "optimizer = .*'AdamW'.*has .*'Adam'")
    assert_refuses(target, other(policy=td.Policy(score="step")), r"scores = \['step'\]")
    assert_refuses(target, nn.Linear(2, 2).state_dict(), "Missing key.*format")


def test_versions_are_checked() -> None:
    target, state = used(), used().state_dict()
    text = json.loads(bytes(state["format"].tolist()))
    for version in (0, 2, 4, "3", None):
        text["version"] = version
        entry = torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)
        assert_refuses(target, {**state, "format": entry}, f"format version {version}")


def scored() -> td.DynamicEmbedding:
    """A full table that evicts ids by their step, with a free row."""
    policy = td.Policy(capacity=40)
    module = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1), policy=policy, name="t")
    module(torch.arange(40)).sum().backward()
    module.optimizer.step()
    module.group.erase(0, torch.tensor([2]))
    return module


@pytest.mark.parametrize(
    ("entry", "value", "message"),
    [
        ("t.scores", -2, "its index is damaged"),  # a claim, to an eviction
        ("t.scores", 99, "its index is damaged"),  # a step that has not come
        ("clock", 2**63 - 1, "'clock' is corrupted: a count is above 2\\^62"),
        ("row_clock", 2**63 - 1, "'row_clock' is corrupted: a count is above 2\\^62"),
    ],
)
def test_counts_that_no_training_leaves(entry: str, value: int, message: str) -> None:
    state = scored().state_dict()
    state[entry].fill_(value)
    assert_refuses(scored(), state, message)


def test_a_free_row_newer_than_its_next_owner() -> None:
    """The next id would read zeros for ever."""
    state = scored().state_dict()
    state["dim4.generations"][int(state["dim4.free_rows"][0] >> 28)] += 2**20
    assert_refuses(scored(), state, "their owners do not match")


def test_a_state_without_values() -> None:
    state = scored().state_dict()
    state["dim4.exp_avg"] = state["dim4.exp_avg"].to("meta")
    assert_refuses(scored(), state, "'dim4.exp_avg' is on the meta device, expected values")


def test_missing_and_unexpected_entries() -> None:
    target, state = used(), used().state_dict()
    for name in (name for name, tensor in state.items() if tensor.numel() > 0):
        lacking = {key: tensor for key, tensor in state.items() if key != name}
        for strict in (True, False):
            if name == "format" and not strict:
                assert target.load_state_dict(lacking, strict=False).missing_keys == ["format"]
            elif name == "places":  # older states lack it
                target.load_state_dict(lacking)
            else:
                assert_refuses(target, lacking, f"'?{name}'?", strict=strict)
    more = {**state, "surprise": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"Unexpected key.*surprise"):
        target.load_state_dict(more)
    assert target.load_state_dict(more, strict=False).missing_keys == []


def test_a_state_larger_than_the_reservation() -> None:
    source = used()
    assert_refuses(collection(max_rows=8), source.state_dict(), "larger max_rows")
    enough = collection(max_rows=2000)
    enough.load_state_dict(source.state_dict())
    ids = {name: torch.arange(100)[None] for name, _ in TABLES}
    assert torch.equal(enough.eval()(ids), source.eval()(ids))


def test_a_row_of_the_padding_id_is_refused() -> None:
    source = td.DynamicEmbedding(2, name="t", optimizer=td.SGD(lr=0.1))
    source(torch.arange(5))
    target = td.DynamicEmbedding(2, padding_idx=3, name="t", optimizer=td.SGD(lr=0.1))
    assert_refuses(target, source.state_dict(), "a row for id 3, which is the padding id")


def capacity_of(ids: int, **policy: Any) -> td.DynamicEmbedding:
    torch.manual_seed(0)
    kept = td.Policy(score="step", capacity=ids, **policy)
    module = td.DynamicEmbedding(4, optimizer=td.Adam(lr=0.1), policy=kept, name="t")
    module(torch.arange(30)).sum().backward()
    module.optimizer.step()
    return module


def test_a_module_with_another_capacity() -> None:
    source = capacity_of(30)
    state = source.state_dict()
    assert_refuses(capacity_of(10), state, "30 rows 'dim4', more than the 10 .* capacity")
    for more in (capacity_of(31), capacity_of(500), capacity_of(10, on_full="grow")):
        more.load_state_dict(state)
        rows = [one.group.read(0, torch.arange(30)) for one in (more, source)]
        assert torch.equal(*rows)
        more(torch.arange(25, 45)).sum().backward()
        more.optimizer.step()
        twin = copy.deepcopy(more)
        assert all(torch.equal(t, more.state_dict()[n]) for n, t in twin.state_dict().items())
        assert more.sizes()["t"] == (31 if more.group.config.capacity_bound(0) == 31 else 45)


def test_scores_that_could_not_be_saved_are_refused() -> None:
    group = full_of_policies().group
    ids = torch.arange(2)
    for value in (-1, 2**62 + 1):
        with pytest.raises(ValueError, match=f"scores has {value}, expected frequencies from 0"):
            group.scores.set(0, ids, torch.tensor([value, 0]), score="frequency")
    with pytest.raises(ValueError, match="seconds is 4611686018427387905, expected at"):
        group.clock.set_now(2**62 + 1)
    group.clock.set_now(2**62)


def test_a_wrong_time_leaves_the_rows_alone() -> None:
    module = full_of_policies()
    before = module.state_dict()
    with pytest.raises(ValueError, match="now: seconds is 4611686018427387905, expected at most"):
        module.optimizer.step(now=2**62 + 1)
    assert all(torch.equal(t, before[name]) for name, t in module.state_dict().items())


Damage = Callable[[dict[str, Tensor]], None]


def set_entry(name: str, make: Callable[[Tensor], Any]) -> Damage:
    def damage(state: dict[str, Tensor]) -> None:
        state[name] = make(state[name])

    return damage


def add_to(name: str, *index: int, amount: int = 1) -> Damage:
    def damage(state: dict[str, Tensor]) -> None:
        state[name][index] += amount

    return damage


def first_handle(change: Callable[[int], int]) -> Damage:
    """Changes the stored handle of the first occupied slot of table b."""

    def damage(state: dict[str, Tensor]) -> None:
        stored = state["b.buckets"][:, BUCKET_WIDTH:]
        bucket, slot = (stored != 0).nonzero()[0].tolist()
        stored[bucket, slot] = change(int(stored[bucket, slot]))

    return damage


def flip_keys(state: dict[str, Tensor]) -> None:
    """A bit of five keys: one alone may by chance belong where it lies."""
    buckets = state["b.buckets"]
    for bucket, slot in (buckets[:, BUCKET_WIDTH:] != 0).nonzero()[:5].tolist():
        buckets[bucket, slot] ^= 1 << 40


DAMAGES: dict[str, Damage] = {
    "format: a bit": lambda state: state["format"].__setitem__(3, state["format"][3] ^ 1),
    "format: not UTF-8": set_entry("format", lambda text: text | 0x80),
    "format: a list": set_entry("format", lambda _: torch.tensor([91, 93], dtype=torch.uint8)),
    "format: another dtype": set_entry("format", lambda text: text.float()),
    "weights: another dtype": set_entry("dim4.weights", lambda rows: rows.double()),
    "weights: a row less": set_entry("dim4.weights", lambda rows: rows[:-1]),
    "weights: another dim": set_entry("dim4.weights", lambda rows: rows[:, :-1]),
    "weights: flat": set_entry("dim4.weights", lambda rows: rows.flatten()),
    "weights: no tensor": set_entry("dim4.weights", lambda rows: rows.tolist()),
    "optimizer state: a row less": set_entry("dim8.exp_avg", lambda rows: rows[:-1]),
    "generations: changed": add_to("dim8.generations", 2),
    "generations: a row less": set_entry("dim8.generations", lambda rows: rows[:-1]),
    "free rows: fewer": set_entry("dim4.free_rows", lambda rows: rows[:-1]),
    "free rows: repeated": set_entry("dim4.free_rows", lambda rows: rows[:1].expand(len(rows))),
    "free rows: live generation": add_to("dim4.free_rows", 0, amount=-1),
    "buckets: fewer": set_entry("a.buckets", lambda buckets: buckets[:-1]),
    "buckets: moved": set_entry("b.buckets", lambda buckets: buckets.flip(0)),
    "keys: a bit": flip_keys,
    "handle: gone": first_handle(lambda stored: 0),
    "handle: another row": first_handle(lambda stored: stored + (1 << 28)),
    "handle: a row far away": first_handle(lambda stored: stored + (1 << 60)),
    "handle: negative": first_handle(lambda stored: -stored),
    "handle: another generation": first_handle(lambda stored: stored + 1),
    "seed": add_to("seeds", 1),
    "seeds: fewer": set_entry("seeds", lambda seeds: seeds[:-1]),
    "tables: bucket count": add_to("tables", 0, 0, amount=4),
    "tables: no buckets": set_entry("tables", torch.zeros_like),
    "tables: size": add_to("tables", 1, 1),
    "tables: tombstones": add_to("tables", 1, 2),
    "tables: negative": add_to("tables", 1, 3, amount=-(10**6)),
    "tables: fewer": set_entry("tables", lambda tables: tables[:-1]),
    "slabs: next row": add_to("slabs", 0, 0),
    "slabs: negative": add_to("slabs", 0, 0, amount=-(10**6)),
    "slabs: free count": add_to("slabs", 0, 1, amount=-1),
    "slabs: fewer": set_entry("slabs", lambda slabs: slabs[:-1]),
    "clock: negative": add_to("clock", 0, amount=-100),
    "row clock: longer": set_entry("row_clock", lambda clock: torch.cat([clock, clock])),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_damaged_states_are_refused(damage: Damage) -> None:
    state = used().state_dict()
    damage(state)
    target = collection(seed=3)
    train(target, range(2))
    assert_refuses(target, state, r"corrupted|expected|format version")
