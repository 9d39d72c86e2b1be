"""Changes saved states at random and loads them: ``python state_fuzz.py FIRST LAST``.

What loads must train, save, load again and go on equally; all else is refused by a RuntimeError and
leaves the module as it was. Every number is one change, the same in every run.
"""

from __future__ import annotations

import faulthandler
import json
import random
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, Slab, Table

State = dict[str, Any]
Change = Callable[[random.Random, State], None]
NOW = 1000  # seconds
SECONDS = 60  # of one change, before it is taken for an endless loop
FROZEN = 10  # every so many is of a read-only copy
MASK = (1 << GENERATION_BITS) - 1

# -- modules --------------------------------------------------------------------------------------


def collection(
    policies: dict[str, dict[str, Any]], *, optimizer: Any = None, **arguments: Any
) -> td.DynamicEmbeddingBagCollection:
    """Tables named by letters, of dims 4 and 8 in turn."""
    tables = [
        td.TableConfig(name, 4 + 4 * (t % 2), **config)
        for t, (name, config) in enumerate(policies.items())
    ]
    torch.manual_seed(5)  # of new rows
    arguments = {"max_rows": 400, **arguments}
    return td.DynamicEmbeddingBagCollection(
        tables, optimizer=td.Adam(lr=0.1) if optimizer is None else optimizer, **arguments
    )


def policy(*scores: str, **arguments: Any) -> dict[str, td.Policy]:
    return {"policy": td.Policy(**({"score": scores} if scores else {}), **arguments)}


MODULES: dict[str, Callable[[], td.DynamicEmbeddingBagCollection]] = {
    "plain": lambda: collection({"a": {}, "b": {}, "c": {}}),
    "lru": lambda: collection({"a": policy(capacity=30), "b": {}}),
    "scores": lambda: collection(
        {
            "a": policy("custom", "timestamp", "frequency", capacity=30, ttl=50),
            "b": policy("frequency", capacity=20, protected_steps=2),
        },
        optimizer=td.Adam(lr=0.1, state_dtype=torch.uint8),
    ),
    "timestamps": lambda: collection(
        {"a": policy("timestamp", capacity=25, ttl=3)}, optimizer=td.Adam(lr=0.1, row_steps=True)
    ),
    "counts": lambda: collection(
        {
            "a": policy("frequency", capacity=25, admission=td.AdmitFrequent(3)),
            "b": policy(admission=td.AdmitFrequent(2)),
        },
        optimizer=td.RowWiseAdagrad(lr=0.1),
    ),
    "sketch": lambda: collection(
        {
            "a": policy(capacity=25, admission=td.AdmitFrequentSketch(2, 512, halve_every=2)),
            "b": policy(admission=td.AdmitByChance(0.5)),
        },
        optimizer=td.SGD(lr=0.1),
    ),
    "budget": lambda: collection({"a": policy("frequency"), "b": {}}, memory_budget=40_000),
    "split": lambda: collection(
        {"a": policy(capacity=30), "b": {}}, optimizer=td.Adam(lr=0.1, row_steps=True), split=True
    ),
    "padding": lambda: collection(
        {
            "a": {"padding_idx": 3, "dtype": torch.bfloat16},
            "dim4": {"padding_idx": 0, "dtype": torch.float16, **policy(capacity=30)},
        },
        optimizer=td.RowWiseAdagrad(lr=0.1),
    ),
}


def train(module: Any, steps: range) -> None:
    """Steps whose batches depend on their numbers alone; the first ids have been seen before."""
    for t, config in enumerate(module.group.tables_config):
        if "custom" in config.policy.scores:
            module.group.set_batch_score(t, 7)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        features = {
            name: torch.randint(0, 25 * (step + 1), (25, 2), generator=generator)
            for name in module.feature_names
        }
        output = module(features)
        (output * torch.randn(output.shape, generator=generator)).sum().backward()
        module.optimizer.step(now=NOW + step if module.group._keeps_time else None)


def live(module: Any, first: int) -> None:
    """A piece of a life: ids come, are evicted, removed, and their rows given back."""
    train(module, range(first, first + 2))
    for t in range(len(module.group.names)):
        module.group.erase(t, torch.arange(first, 40, 5))
        module.group.remove(t, norm_below=0.01)
        if "expiry" in module.group.layout.score_words:
            module.group.remove(t, expired=True)
    module.group.compact()
    train(module, range(first + 2, first + 3))
    module.eval()
    module({name: torch.arange(60)[None] for name in module.feature_names})
    module.train()
    module.group.stats()


def saved(name: str) -> State:
    """The state of a module that has lived."""
    module = MODULES[name]()
    train(module, range(3))
    for t in range(len(module.group.names)):
        module.group.erase(t, torch.arange(0, 20, 3))
    return plain(module.state_dict())


# -- changes --------------------------------------------------------------------------------------

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
    generation = rng.choice([0, 1, 2, MASK, MASK - 1, 1 << 27, (1 << 27) - 1, (1 << 27) + 1])
    which = rng.randrange(3)
    if which == 0:
        state["slabs"][number, Slab.GENERATION] = generation
    elif which == 1 and state[f"{slab}.free_rows"].numel() > 0:
        free = state[f"{slab}.free_rows"]
        place = rng.randrange(free.numel())
        row = int(free[place]) >> GENERATION_BITS
        free[place] = row << GENERATION_BITS | generation
        stored = rng.choice([0, 1, (generation - 1) & MASK, generation])
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


# -- what must hold -------------------------------------------------------------------------------


def differences(one: State, two: State) -> list[str]:
    """Names of entries with other bits."""

    def same(a: Tensor, b: Tensor) -> bool:
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        return torch.equal(as_bits(a), as_bits(b))

    return [name for name in two if name not in one or not same(one[name], two[name])]


def plain(state: State) -> State:
    return {
        name: value.detach().resolve_neg().clone(memory_format=torch.contiguous_format)
        for name, value in state.items()
    }


class Fuzz:
    """Loads changed states into modules, which are kept as long as they refuse."""

    def __init__(self) -> None:
        self.states = {name: saved(name) for name in MODULES}
        self.targets: dict[str, Any] = {}
        self.frozen = {name: self._frozen(name) for name in MODULES}
        self.loaded = 0

    def _frozen(self, name: str) -> nn.Module:
        module = MODULES[name]()
        module.load_state_dict(self.states[name])
        return td.freeze(module)

    def run_frozen(self, number: int) -> None:
        """The same of read-only copies: what loads is read."""
        name = list(MODULES)[number // FROZEN % len(MODULES)]
        frozen = self.frozen[name]
        before = plain(frozen.state_dict())
        state, _ = changed(number, before)
        try:
            frozen.load_state_dict(state)
        except RuntimeError:
            assert not differences(frozen.state_dict(), before), "refused, but changed"
            return
        self.loaded += 1
        assert not differences(frozen.state_dict(), plain(state)), "loaded otherwise than saved"
        features: Any = frozen.feature_names
        ids = {name: torch.arange(-5, 200)[None] for name in features}
        assert torch.equal(as_bits(frozen(ids)), as_bits(frozen(ids)))
        frozen.load_state_dict(before)

    def target(self, name: str) -> tuple[Any, State]:
        """A module that has another life behind it, and its state."""
        if name not in self.targets:
            module = MODULES[name]()
            train(module, range(1, 3))
            self.targets[name] = module, dict(module.state_dict())
        return self.targets[name]

    def run(self, number: int) -> None:
        """Raises AssertionError, or anything but what loading may raise, if something is wrong."""
        if number % FROZEN == 0:
            self.run_frozen(number)
            return
        name = list(MODULES)[number % len(MODULES)]
        state, _ = changed(number, self.states[name])
        module, before = self.target(name)
        try:
            module.load_state_dict(state)
        except RuntimeError as error:
            text = str(error)
            assert "corrupted" in text or "expected" in text or "state" in text, text
            assert not differences(module.state_dict(), before), "refused, but changed"
            return
        del self.targets[name]
        self.loaded += 1
        given = plain(state)
        wrong = set(differences(module.state_dict(), given)) - {"slabs", "format"}
        assert not wrong, f"loaded otherwise than saved: {sorted(wrong)}"
        live(module, 3)
        twin = MODULES[name]()
        twin.load_state_dict(module.state_dict())
        wrong = set(differences(twin.state_dict(), dict(module.state_dict())))
        assert not wrong, f"loaded otherwise than saved afterwards: {sorted(wrong)}"
        live(module, 6)
        live(twin, 6)
        wrong = set(differences(twin.state_dict(), dict(module.state_dict())))
        assert not wrong, f"goes on otherwise: {sorted(wrong)}"


def main(first: int, last: int) -> None:
    """Prints a number before its change is loaded, so that a crash has one."""
    torch.set_num_threads(1)
    faulthandler.enable()
    fuzz = Fuzz()
    for number in range(first, last):
        print(number, flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of steps that a changed count says are missing
                fuzz.run(number)
        except Exception:
            print(f"change {number} failed", flush=True)
            raise
    faulthandler.cancel_dump_traceback_later()
    print(f"{fuzz.loaded} of {last - first} loaded", flush=True)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:]))
