"""States with altered entries: refused by name, or taken and trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from refusals import assert_refuses, full_of_policies
from torch import Tensor, nn

from torch_dynemb.ops.columns import BUCKET_WIDTH, Slab, Table

pytestmark = pytest.mark.any_device


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
        del state["places"]  # of other handles

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
        "'dim4.free_rows' or an id has .* generation 0",
    ),
    "generations: 0, live": (
        live_generation(0, 0),
        "'dim4.free_rows' or an id has .* generation 0",
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
    "sparse slabs": (
        in_place_of("slabs", lambda t: t.to_sparse()),
        "'slabs' has layout torch.sparse_coo",
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
        "'format' is corrupted: a key occurs twice",
    ),
    "format: a long number": (
        as_format(lambda text: text.replace('"version": 3', '"version": ' + "3" * 10_000)),
        "'format' is corrupted: Exceeds the limit",
    ),
    "format: NaN": (
        as_format(lambda text: text.replace('"version": 3', '"version": NaN')),
        "'format' is corrupted: NaN is not a number of JSON",
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
        one.group.scores.set_batch(0, 3)
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
        before = state.get(name, tensor)
        assert torch.equal(tensor.nan_to_num(), before.nan_to_num()) or name == "slabs", name
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
