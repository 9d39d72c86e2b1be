"""Changes to saved states, chosen by a number: bits, values, shapes, kinds, JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, GENERATION_MASK, Slab, Table

State = dict[str, Any]
Change = Callable[[random.Random, State], None]

_POWERS = [8, 16, 27, 28, 31, 32, 33, 61, 62]
EXTREMES = [0, 1, -1, -(2**63), 2**63 - 1]
EXTREMES += [sign * 2**power + more for sign in (1, -1) for power in _POWERS for more in (-1, 0, 1)]


def entry_of(rng: random.Random, state: State) -> str:
    names = [name for name, value in state.items() if isinstance(value, Tensor)]
    whole = [name for name in names if state[name].dtype in (torch.int32, torch.int64)]
    return rng.choice(whole if whole and rng.random() < 0.8 else names)


def extreme(rng: random.Random, tensor: Tensor) -> int:
    """A value that the tensor can hold."""
    bits = 8 * tensor.element_size()
    value = rng.choice(EXTREMES)
    return (value + (1 << (bits - 1))) % (1 << bits) - (1 << (bits - 1))


def as_bits(tensor: Tensor) -> Tensor:
    """The same memory as integers of its element size, or as it is."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(kinds[tensor.element_size()])


def put(tensor: Tensor, index: Any, value: int) -> None:
    bits = as_bits(tensor)
    bits[index] = value % 256 if bits.dtype == torch.uint8 else value


def flip_bit(rng: random.Random, state: State) -> None:
    tensor = state[entry_of(rng, state)]
    if tensor.numel() > 0 and tensor.is_contiguous():
        flat = tensor.view(-1).view(torch.uint8)
        flat[rng.randrange(flat.numel())] ^= 1 << rng.randrange(8)


def set_element(rng: random.Random, state: State) -> None:
    tensor = state[entry_of(rng, state)]
    if tensor.numel() > 0:
        index = tuple(rng.randrange(size) for size in tensor.shape)
        put(tensor, index, extreme(rng, tensor))


def set_many(rng: random.Random, state: State) -> None:
    """All, a row or a column."""
    tensor = state[entry_of(rng, state)]
    if tensor.numel() == 0:
        return
    row = (rng.randrange(tensor.shape[0]),)
    columns = [(slice(None), rng.randrange(tensor.shape[1]))] if tensor.dim() == 2 else []
    put(tensor, rng.choice([row, ..., *columns]), extreme(rng, tensor))


def set_occupied(rng: random.Random, state: State) -> None:
    """A score word, or a stored one, where an id is."""
    names = [name for name in state if name.endswith((".scores", ".buckets", ".counts"))]
    if not names:
        return
    name = rng.choice(names)
    table = name.rpartition(".")[0]
    lines = state[f"{table}.buckets"] if name.endswith(".scores") else state[name]
    occupied = (lines[:, BUCKET_WIDTH:] > 0).nonzero().tolist()
    if occupied and state[name].shape[0] == lines.shape[0]:
        bucket, slot = rng.choice(occupied)
        word = rng.randrange(state[name].shape[1] // BUCKET_WIDTH)
        state[name][bucket, word * BUCKET_WIDTH + slot] = extreme(rng, lines)


def nudge(rng: random.Random, state: State) -> None:
    tensor = state[entry_of(rng, state)]
    if tensor.numel() > 0:
        index = tuple(rng.randrange(size) for size in tensor.shape)
        as_bits(tensor)[index] += rng.choice([1, -1, 2, -2])


def swap_rows(rng: random.Random, state: State) -> None:
    tensor = state[entry_of(rng, state)]
    dim = rng.randrange(tensor.dim())
    if tensor.shape[dim] > 1:
        a, b = (rng.randrange(tensor.shape[dim]) for _ in range(2))
        order = list(range(tensor.shape[dim]))
        order[a], order[b] = order[b], order[a]
        tensor.copy_(tensor.index_select(dim, torch.tensor(order)))


def swap_entries(rng: random.Random, state: State) -> None:
    a, b = entry_of(rng, state), entry_of(rng, state)
    state[a], state[b] = state[b], state[a]


def reshape(rng: random.Random, state: State) -> None:
    name = entry_of(rng, state)
    tensor = state[name]
    made = [
        tensor[:-1],
        tensor[: rng.randrange(tensor.shape[0] + 1)],
        torch.cat([tensor, tensor[-1:]]),
        torch.cat([tensor, torch.zeros_like(tensor[:1])]),
        tensor[:0],
        tensor.flatten(),
        tensor[None],
        tensor.flip(0),
        tensor.mT if tensor.dim() > 1 else tensor,
        tensor[:1].expand(tensor.shape) if tensor.shape[0] > 0 else tensor,
    ]
    state[name] = rng.choice(made)


class Subclass(Tensor):
    """Some tensor."""


def change_kind(rng: random.Random, state: State) -> None:
    """Another dtype, layout, class or device; the same values in another layout must load."""
    name = entry_of(rng, state)
    tensor: Tensor = state[name]
    kinds: list[Callable[[], Any]] = [
        lambda: tensor.to(rng.choice([torch.int16, torch.int32, torch.float32, torch.float64])),
        lambda: tensor.to(torch.complex64),
        lambda: tensor.to_sparse(),
        lambda: tensor.to("meta"),
        lambda: tensor.as_subclass(Subclass),
        lambda: nn.Parameter(tensor, requires_grad=tensor.is_floating_point()),
        lambda: torch.stack([tensor, tensor], -1)[..., 0],
        lambda: torch._neg_view(-tensor),
        lambda: tensor.tolist(),
        lambda: None,
        lambda: tensor.bool(),
    ]
    if tensor.dtype == torch.uint8:
        kinds = [kind for kind in kinds if kind is not kinds[7]]
    state[name] = rng.choice(kinds)()


def drop(rng: random.Random, state: State) -> None:
    del state[rng.choice(list(state))]


def other_values(rng: random.Random) -> list[Any]:
    return [None, True, [], {}, "", "step", 0, -1, 4.0, 2**70, [[]], {"name": "a"}, rng.random()]


def change_json(rng: random.Random, state: State) -> None:
    if not isinstance(state.get("format"), Tensor) or state["format"].dtype != torch.uint8:
        return
    text = bytes(state["format"].flatten().tolist()).decode(errors="replace")
    try:
        value = json.loads(text)
    except ValueError:
        return
    at, key = value, rng.choice(list(value))
    while rng.random() < 0.6 and isinstance(at[key], dict | list) and at[key]:
        at = at[key]
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
    at[key] = rng.choice(other_values(rng))
    texts = [
        json.dumps(value),
        text[: rng.randrange(len(text))],
        "[" * 100_000,
        text[:-1] + ', "version": 3}',
        '{"version": ' + "3" * 5000 + "}",
        text.replace(":", ": NaN,", 1),
        text + " ",
        text.replace('"', "'"),
    ]
    made = rng.choice([texts[0], rng.choice(texts)])
    state["format"] = torch.tensor(list(made.encode()), dtype=torch.uint8)


# -- changes to several entries, which may make another sound state ------------------------------


def slab_of(rng: random.Random, state: State) -> tuple[str, int]:
    names = [name.removesuffix(".free_rows") for name in state if name.endswith(".free_rows")]
    number = rng.randrange(len(names))
    return names[number], number


def other_generation(rng: random.Random, state: State) -> None:
    """An id and its row, or a free row, or the slab, with another generation."""
    slab, number = slab_of(rng, state)
    generation = rng.choice(
        [0, 1, 2, GENERATION_MASK, GENERATION_MASK - 1, 1 << 27, (1 << 27) - 1, (1 << 27) + 1]
    )
    which = rng.randrange(3)
    if which == 0:
        state["slabs"][number, Slab.GENERATION] = generation
    elif which == 1 and state[f"{slab}.free_rows"].numel() > 0:
        free = state[f"{slab}.free_rows"]
        place = rng.randrange(free.numel())
        row = int(free[place]) >> GENERATION_BITS
        free[place] = row << GENERATION_BITS | generation
        stored = rng.choice([0, 1, (generation - 1) & GENERATION_MASK, generation])
        state[f"{slab}.generations"][row] = stored
    else:
        name = rng.choice([name for name in state if name.endswith(".buckets")])
        stored = state[name][:, BUCKET_WIDTH:]
        occupied = (stored > 0).nonzero().tolist()
        if not occupied:
            return
        bucket, slot = rng.choice(occupied)
        row = (int(stored[bucket, slot]) - 1) >> GENERATION_BITS
        stored[bucket, slot] = (row << GENERATION_BITS | generation) + 1
        for name in [name for name in state if name.endswith(".generations")]:
            if row < state[name].shape[0] and rng.random() < 0.7:
                state[name][row] = generation


def more_free_rows(rng: random.Random, state: State) -> None:
    slab, number = slab_of(rng, state)
    used = int(state["slabs"][number, Slab.NEXT_ROW])
    more = rng.choice([1, 5, 300])
    for name in [name for name in state if name.startswith(f"{slab}.")]:
        own = state[name]
        if name == f"{slab}.free_rows":
            handles = (torch.arange(used, used + more) << GENERATION_BITS) + 1
            state[name] = torch.cat([own, handles])
        elif own.shape[:1] == (used,):
            state[name] = torch.cat([own, own.new_zeros(more, *own.shape[1:])])
    state["slabs"][number, Slab.NEXT_ROW] += more
    state["slabs"][number, Slab.FREE_COUNT] += more


def more_tombstones(rng: random.Random, state: State) -> None:
    """In one empty slot, or in all."""
    table = rng.randrange(state["tables"].shape[0])
    kind = ".buckets" if table < sum(name.endswith(".buckets") for name in state) else ".counts"
    name = rng.choice([name for name in state if name.endswith(kind)])
    lines = state[name]
    empty = (lines[:, BUCKET_WIDTH:] == 0) & (lines[:, :BUCKET_WIDTH] == 0)
    places = empty.nonzero()
    if rng.random() < 0.5:
        places = places[:1]
    lines[places[:, 0], places[:, 1]] = 77
    names = [name for name in state if name.endswith(kind)]
    first = 0 if kind == ".buckets" else sum(name.endswith(".buckets") for name in state)
    row = state["tables"][first + names.index(name)]
    row[Table.TOMBSTONES] += places.shape[0]


def later(rng: random.Random, state: State) -> None:
    """A clock and the steps of ids, or one of them, far on."""
    far = rng.choice([1, 2**31, 2**32, 2**33, 2**62 - 10])
    state["clock"][0] += far
    if rng.random() < 0.7:
        for name in [name for name in state if name.endswith(".scores")]:
            occupied = state[name.replace(".scores", ".buckets")][:, BUCKET_WIDTH:] > 0
            state[name][:, :BUCKET_WIDTH] += far * occupied


def many_counts(rng: random.Random, state: State) -> None:
    name = rng.choice(["row_clock", "sketch", "tables"])
    most = 2**31 - 1 if name == "sketch" else rng.choice([2**62, 2**62 - 1, 2**31])
    if name == "tables":
        state[name][:, rng.randrange(3, len(Table))] = most
    else:
        state[name].fill_(most)


_OF_ONE_ENTRY = 10  # the first
CHANGES: list[Change] = [
    flip_bit,
    set_element,
    set_many,
    set_occupied,
    nudge,
    swap_rows,
    swap_entries,
    reshape,
    change_kind,
    drop,
    change_json,
    other_generation,
    more_free_rows,
    more_tombstones,
    later,
    many_counts,
]
# What has been changed in kind can hardly be changed again.
_LAST = (reshape, change_kind, drop, swap_entries, change_json)


def changed(number: int, state: State) -> tuple[State, list[str]]:
    """A state changed in the way of a number, and what was done."""
    rng = random.Random(number)
    result = {name: value.clone() for name, value in state.items()}
    done = []
    live = "slabs" in state
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        change = rng.choice(CHANGES if live else CHANGES[:_OF_ONE_ENTRY])
        change(rng, result)
        done.append(change.__name__)
        if change in _LAST:
            break
    return result, done
