"""States that a module refuses to load, which leave it as it was."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trained_collection import TABLES, collection, train, used

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH, Slab, Table

pytestmark = pytest.mark.any_device


def assert_refuses(
    module: Any, state: dict[str, Any], message: str, *, strict: bool = True
) -> None:
    before = module.state_dict()
    with pytest.raises(RuntimeError, match=message):
        module.load_state_dict(state, strict=strict)
    after = module.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


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
    """A full table whose ids are evicted by their step, with a free row."""
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
    for name in state:
        lacking = {key: tensor for key, tensor in state.items() if key != name}
        for strict in (True, False):
            if name == "format" and not strict:
                assert target.load_state_dict(lacking, strict=False).missing_keys == ["format"]
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
    target = td.DynamicEmbedding(2, 3, name="t", optimizer=td.SGD(lr=0.1))
    assert_refuses(target, source.state_dict(), "a row for id 3, which is the padding id")


def full_of_policies() -> td.DynamicEmbedding:
    """A table with every score, counts of ids, and steps of rows."""
    policy = td.Policy(
        score=("custom", "timestamp", "frequency"),
        capacity=30,
        ttl=100,
        admission=td.AdmitFrequent(2),
    )
    optimizer = td.Adam(lr=0.1, row_steps=True)
    module = td.DynamicEmbedding(4, optimizer=optimizer, policy=policy, name="t", max_rows=100)
    module.group.set_batch_score(0, 3)
    for ids in (torch.arange(20).repeat(2), torch.arange(10, 40)):
        module(ids).sum().backward()
        module.optimizer.step(now=50)
    module.group.erase(0, torch.tensor([2, 3]))
    return module


def set_column(entry: str, column: int, value: int, row: int = 0) -> Callable[[Any], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[entry][row, column] = value

    return change


def set_word(word: int, value: int) -> Callable[[Any], None]:
    """A score word of the first id."""

    def change(state: dict[str, Tensor]) -> None:
        bucket, slot = (state["t.buckets"][:, BUCKET_WIDTH:] > 0).nonzero()[0].tolist()
        state["t.scores"][bucket, word * BUCKET_WIDTH + slot] = value

    return change


def free_slot_step(state: dict[str, Tensor]) -> None:
    bucket, slot = (state["t.buckets"][:, BUCKET_WIDTH:] == 0).nonzero()[0].tolist()
    state["t.scores"][bucket, slot] = 1


def free_generation(handle: int, stored: int) -> Callable[[Any], None]:
    def change(state: dict[str, Tensor]) -> None:
        row = int(state["dim4.free_rows"][0]) >> 28
        state["dim4.free_rows"][0] = row << 28 | handle
        state["dim4.generations"][row] = stored

    return change


def live_generation(handle: int, stored: int) -> Callable[[Any], None]:
    def change(state: dict[str, Tensor]) -> None:
        words = state["t.buckets"][:, BUCKET_WIDTH:]
        bucket, slot = (words > 0).nonzero()[0].tolist()
        row = (int(words[bucket, slot]) - 1) >> 28
        words[bucket, slot] = (row << 28 | handle) + 1
        state["dim4.generations"][row] = stored

    return change


def counted_twice(state: dict[str, Tensor]) -> None:
    """Beside itself, in an empty slot of its bucket."""
    lines = state["t.counts"]
    for line in lines:
        taken, free = (line[BUCKET_WIDTH:] > 0).nonzero(), (line[BUCKET_WIDTH:] == 0).nonzero()
        if taken.numel() > 0 and free.numel() > 0:
            line[int(free[0])] = line[int(taken[0])]
            line[BUCKET_WIDTH + int(free[0])] = line[BUCKET_WIDTH + int(taken[0])]
            state["tables"][1, Table.SIZE] += 1
            return


def crowd(state: dict[str, Tensor]) -> None:
    """As many buckets as ids need at full load."""
    state["t.buckets"] = state["t.buckets"][:4]
    state["t.scores"] = state["t.scores"][:4]
    state["tables"][0, Table.BUCKET_COUNT] = 4


def put(entry: str, value: int) -> Callable[[Any], None]:
    def change(state: dict[str, Tensor]) -> None:
        state[entry].view(-1)[0] = value

    return change


def in_place_of(entry: str, make: Callable[[Tensor], Any]) -> Callable[[Any], None]:
    def change(state: dict[str, Any]) -> None:
        state[entry] = make(state[entry])

    return change


def as_format(make: Callable[[str], str]) -> Callable[[Any], None]:
    def change(state: dict[str, Tensor]) -> None:
        text = make(bytes(state["format"].tolist()).decode())
        state["format"] = torch.tensor(list(text.encode()), dtype=torch.uint8)

    return change


class Labelled(Tensor):
    """A tensor that is more than one."""


REFUSED: dict[str, tuple[Callable[[Any], None], str]] = {
    "step: a claim": (set_word(0, -5), "'t.scores' has step -5"),
    "step: of a free slot": (free_slot_step, "'t.scores' has a step where no id is"),
    "step: 2^32 before the clock": (put("clock", 2**33), "'t.scores' has step 0, .* 2\\^32 before"),
    "frequency: negative": (set_word(2, -1), "'t.scores' has frequency -1, expected 0 to"),
    "frequency: overflows": (
        set_word(2, 2**63 - 1),
        "'t.scores' has frequency 9223372036854775807",
    ),
    "tables: a count": (
        set_column("tables", Table.FOUND, 2**63 - 1),
        "'tables' is corrupted: FOUND of 't' is 9223372036854775807",
    ),
    "tables: of counters": (
        set_column("tables", Table.ERASED, -1, row=1),
        "'tables' is corrupted: ERASED of 'counts of t' is -1",
    ),
    "tables: no column": (
        set_column("tables", 15, 1),
        "'tables' .* column 15 of 't' is 1, expected 0",
    ),
    "slabs: no column": (
        set_column("slabs", 7, 1),
        "'slabs' is corrupted: column 7 of 'dim4' is 1",
    ),
    "slabs: committed": (
        set_column("slabs", Slab.COMMITTED_ROWS, 2**40),
        "'slabs' is corrupted: COMMITTED_ROWS of 'dim4' is 1099511627776, expected at most",
    ),
    "slabs: generation": (
        set_column("slabs", Slab.GENERATION, 1 << 28),
        "'slabs' is corrupted: GENERATION of 'dim4' is 268435456, expected at most 268435455",
    ),
    "counts: overflow": (
        lambda state: state["t.counts"][:, BUCKET_WIDTH:].masked_fill_(
            state["t.counts"][:, BUCKET_WIDTH:] > 0, 2**63 - 1
        ),
        "'t.counts' is corrupted: a count is above 2\\^62",
    ),
    "counts: an id twice": (counted_twice, "'t.counts' counts an id twice"),
    "sketch: none here": (in_place_of("sketch", lambda _: torch.zeros(4)), "'sketch' is .*float32"),
    "buckets: too few": (crowd, "'t.buckets' has 4 buckets .* at least 16"),
    "generations: 0, free": (
        free_generation(0, 0),
        "'dim4.generations' is of rows with .* generation 0",
    ),
    "generations: 0, live": (
        live_generation(0, 0),
        "'dim4.generations' is of rows with .* generation 0",
    ),
    "generations: beyond": (
        live_generation(1, (1 << 28) + 1),
        "'dim4.generations' has .* beyond 0 to",
    ),
    "generations: half around": (
        free_generation((1 << 27) + 3, 2),
        "'dim4.generations' says that a free row is newer",
    ),
    "steps of rows": (put("dim4.step", -1), "'dim4.step' is corrupted: a count is negative"),
    "sparse": (
        in_place_of("clock", lambda t: t.to_sparse()),
        "'clock' has layout torch.sparse_coo",
    ),
    "complex": (
        in_place_of("dim4.weights", lambda t: t.to(torch.complex64)),
        "'dim4.weights' is torch.co",
    ),
    "subclass": (
        in_place_of("dim4.weights", lambda t: t.as_subclass(Labelled)),
        "'dim4.weights' is a Labelled, expected a plain tensor",
    ),
    "a list": (
        in_place_of("t.buckets", lambda t: t.tolist()),
        "'t.buckets' is a list, expected a tensor",
    ),
    "a row of all": (
        in_place_of("t.buckets", lambda t: t[:1].expand(t.shape)),
        "'t.buckets' ",
    ),
    "format: deep": (
        as_format(lambda _: "[" * 100_000),
        "'format' is corrupted: maximum recursion",
    ),
    "format: twice": (
        as_format(lambda text: text[:-1] + ', "version": 3}'),
        "'format' is corrupted: a key is there twice",
    ),
    "format: a long number": (
        as_format(lambda text: text.replace('"version": 3', '"version": ' + "3" * 10_000)),
        "'format' is corrupted: Exceeds the limit",
    ),
    "format: NaN": (
        as_format(lambda text: text.replace('"version": 3', '"version": NaN')),
        "'format' is corrupted: NaN is no number",
    ),
    "format: true for 1": (
        as_format(lambda text: text.replace('"bucket_width": 4', '"bucket_width": 4.0')),
        "bucket_width = 4.0",
    ),
    "format: a list": (
        as_format(lambda text: text.replace('"optimizer": {', '"optimizer": [], "other": {')),
        r"optimizer = \[\]",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_no_training_leaves_is_refused_by_name(
    change: Callable[[Any], None], message: str
) -> None:
    source, target = full_of_policies(), full_of_policies()
    assert source.group.index.tables[1, Table.SIZE] > 0
    state = dict(source.state_dict())
    change(state)
    assert_refuses(target, state, message)


def assert_goes_on(module: Any, twin: Any) -> None:
    """Both are trained, evict and compact; they stay equal, also through another file."""
    third = full_of_policies()
    for one in (module, twin):
        one.group.set_batch_score(0, 3)
        one.group.erase(0, torch.arange(0, 20, 2))
        one.group.compact()
        one(torch.arange(100, 140).repeat(2)).sum().backward()
        one.optimizer.step(now=60)
    third.load_state_dict(module.state_dict())
    for one in (twin, third):
        state = one.state_dict()
        assert all(torch.equal(t, state[name]) for name, t in module.state_dict().items())
    rows = module.group.read(0, torch.arange(100, 140))
    assert bool((rows[module.group.contains(0, torch.arange(100, 140))] != 0).any(1).all())


MASK = (1 << 28) - 1
TAKEN: dict[str, Callable[[Any], None]] = {
    "steps to come": set_word(0, 2**62),
    "any custom score": set_word(1, -(2**63)),
    "any expiry": set_word(4, 2**63 - 1),
    "the last clock": lambda state: (
        state["clock"][:2].fill_(2**62),
        state["t.scores"][:, :BUCKET_WIDTH].masked_fill_(
            state["t.buckets"][:, BUCKET_WIDTH:] > 0, 2**62 - 5
        ),
    ),
    "the last counts": lambda state: (
        state["row_clock"].fill_(2**62),
        state["tables"][:, Table.INSERTED :][:, : len(Table) - 3].fill_(2**62),
    ),
    "the last step of rows": lambda state: state["dim4.step"].fill_(2**31 - 1),
    "the last generation of rows given out": set_column("slabs", Slab.GENERATION, MASK),
    "the last generation but one": set_column("slabs", Slab.GENERATION, MASK - 1),
    "the last generation of a free row": free_generation(MASK, MASK - 1),
    "a generation after the last": free_generation(1, MASK),
    "the last generation of an id": live_generation(MASK, MASK),
    "not contiguous": lambda state: state.update(
        {name: torch.stack([t, t], -1)[..., 0] for name, t in state.items()}
    ),
    "negative views": lambda state: state.update(
        {name: torch._neg_view(-t) for name, t in state.items() if t.dtype == torch.int64}
    ),
    "parameters": lambda state: state.update(
        {name: nn.Parameter(t) for name, t in state.items() if t.is_floating_point()}
    ),
    "NaN": lambda state: state["dim4.exp_avg"].fill_(float("nan")),
}


@pytest.mark.filterwarnings("ignore:.*backwards have updated")
@pytest.mark.parametrize("change", TAKEN.values(), ids=TAKEN.keys())
def test_what_loads_trains_and_loads_again(change: Callable[[Any], None]) -> None:
    state = dict(full_of_policies().state_dict())
    change(state)
    module, twin = full_of_policies(), full_of_policies()
    module.load_state_dict(state)
    twin.load_state_dict(state)
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor.nan_to_num(), state[name].nan_to_num()) or name == "slabs", name
    assert not any(tensor.requires_grad for tensor in module.group.rows.weights)
    if "NaN" not in str(state["dim4.exp_avg"]).replace("nan", "NaN"):
        assert_goes_on(module, twin)


def test_a_module_whose_rows_were_given_back_takes_no_far_generation() -> None:
    """Rows beyond would take their next owner for an older one."""
    module = full_of_policies()
    module.group.erase(0, torch.arange(20))
    module.group.compact()
    state = dict(full_of_policies().state_dict())
    state["slabs"][0, Slab.GENERATION] = (1 << 27) + 10
    assert_refuses(module, state, "'slabs' has GENERATION 134217738 of 'dim4', too far")
    full_of_policies().load_state_dict(state)


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
            group.set_score(0, ids, torch.tensor([value, 0]), score="frequency")
    with pytest.raises(ValueError, match="seconds is 4611686018427387905, expected at"):
        group.set_now(2**62 + 1)
    group.set_now(2**62)


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
