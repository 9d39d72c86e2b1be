"""State of modules: saving, loading, copying; what is refused leaves the module as it was."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from execution import threads
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH
from torch_dynemb.optim import OptimizerConfig

OPTIMIZERS = [
    td.SGD(lr=0.1),
    td.Adagrad(lr=0.1),
    td.RowWiseAdagrad(lr=0.1),
    td.Adam(lr=0.01),
    td.AdamW(lr=0.01),
]
TABLES = ("a", 4), ("b", 8), ("c", 4)


def collection(
    optimizer: OptimizerConfig | None = None, *, seed: int = 0, **arguments: Any
) -> td.DynamicEmbeddingBagCollection:
    torch.manual_seed(seed)
    return td.DynamicEmbeddingBagCollection(
        [td.TableConfig(name, dim) for name, dim in TABLES],
        optimizer=td.Adam(lr=0.01) if optimizer is None else optimizer,
        **arguments,
    )


def train(module: td.DynamicEmbeddingBagCollection, steps: range, ids: int = 40) -> None:
    """Steps whose batches depend on their numbers alone; ids come, grow the index and leave."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        features = {
            name: torch.randint(0, 30 * (step + 1), (ids, 2), generator=generator)
            for name, _ in TABLES
        }
        output = module(features)
        (output * torch.randn(output.shape, generator=generator)).sum().backward()
        module.optimizer.step()
        if step % 3 == 2:
            module.group.erase(step % 2, torch.arange(0, 30 * step, 7))


def used() -> td.DynamicEmbeddingBagCollection:
    module = collection()
    train(module, range(4))
    module({name: torch.arange(900, 910)[None] for name, _ in TABLES})  # no backward yet
    for table in range(len(TABLES)):
        module.group.erase(table, next(module.group.export(table)).ids[:6])
    return module


def assert_equal_states(one: nn.Module, two: nn.Module) -> None:
    states = one.state_dict(), two.state_dict()
    assert list(states[0]) == list(states[1])
    different = [name for name in states[0] if not torch.equal(states[0][name], states[1][name])]
    assert not different


def saved_bytes(state: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return buffer.getvalue()


def through_file(state: dict[str, Tensor]) -> dict[str, Tensor]:
    loaded = torch.load(io.BytesIO(saved_bytes(state)), weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def through_safetensors(state: dict[str, Tensor]) -> dict[str, Tensor]:
    torch_files = pytest.importorskip("safetensors.torch")
    loaded = torch_files.load(torch_files.save(state))
    assert isinstance(loaded, dict)
    return loaded


def through_state_dict(module: Any) -> Any:
    twin = collection(module.group.optimizer_config, seed=99)
    twin.load_state_dict(module.state_dict())
    return twin


def unpickled(module: Any) -> Any:
    return pickle.loads(pickle.dumps(module))


def from_file(module: Any) -> Any:
    return torch.load(io.BytesIO(saved_bytes(module)), weights_only=False)


# -- equality ----------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", [dict, through_file, through_safetensors])
def test_state_dict_round_trip(transport: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    source, target = used(), collection(seed=5)
    train(target, range(6, 9))  # what it holds is replaced
    result = target.load_state_dict(transport(source.state_dict()))
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_equal_states(source, target)
    ids = {name: torch.arange(-5, 950)[None] for name, _ in TABLES}
    # present ids have their rows, and the saved seed gives missing ids the same initial values
    assert torch.equal(source.eval()(ids), target.eval()(ids))
    assert source.sizes() == target.sizes()


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda config: type(config).__name__)
@pytest.mark.parametrize("duplicate", [through_state_dict, copy.deepcopy, unpickled, from_file])
def test_continuing_is_bit_identical(
    optimizer: OptimizerConfig, duplicate: Callable[[Any], Any]
) -> None:
    whole, part = collection(optimizer), collection(optimizer)
    train(whole, range(6))
    train(part, range(3))
    before = part.state_dict()
    twin = duplicate(part)
    train(twin, range(3, 6))
    assert_equal_states(whole, twin)
    # a copy: the original stays where it was, and goes the same way
    assert all(torch.equal(tensor, before[name]) for name, tensor in part.state_dict().items())
    train(part, range(3, 6))
    assert_equal_states(whole, part)


@pytest.mark.parametrize("counts", [(1, 2), (2, 1)], ids=str)
def test_continuing_with_another_number_of_threads(counts: tuple[int, int]) -> None:
    whole, part, ids = collection(), collection(), 5000  # enough for several threads
    with threads(counts[0]):
        train(whole, range(4), ids)
        train(part, range(2), ids)
    twin = through_state_dict(part)
    with threads(counts[1]):
        train(twin, range(2, 4), ids)
    assert_equal_states(whole, twin)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, unpickled, from_file])
def test_copies_are_whole_modules(duplicate: Callable[[Any], Any]) -> None:
    model = nn.Sequential(
        td.DynamicEmbeddingBag(
            4, "mean", name="t", padding_idx=0, optimizer=td.Adam(lr=0.1), eval_default="zeros"
        ),
        nn.Linear(4, 2),
    ).eval()
    model[0].optimizer.param_groups[0]["lr"] = 0.25
    twin = duplicate(model)
    bag = twin[0]
    assert not bag.training
    assert (bag.mode, bag.padding_idx, bag.table.name) == ("mean", 0, "t")
    assert bag.table.eval_default == "zeros"
    assert float(bag.optimizer.param_groups[0]["lr"]) == 0.25
    bag.optimizer.param_groups[0]["lr"] = 0.5  # of the copy alone, and still connected
    assert float(model[0].optimizer.param_groups[0]["lr"]) == 0.25
    twin.train()
    twin(torch.tensor([[5, 0]])).sum().backward()
    bag.optimizer.step()
    moved = bag.group.read(0, torch.tensor([5])) - model[0].group.read(0, torch.tensor([5]))
    assert len(model[0]) == 0
    assert len(bag) == 1
    assert moved.shape == (1, 4)


def test_a_copy_within_a_copy_stays_shared() -> None:
    table = td.DynamicEmbedding(2, optimizer=td.SGD(lr=0.1))
    model = nn.ModuleList([table, nn.Sequential(table)])
    twin = copy.deepcopy(model)
    assert twin[0] is twin[1][0]
    assert twin[0] is not table


# -- format ------------------------------------------------------------------------------------


def test_format_has_a_version() -> None:
    state = used().state_dict()
    saved = json.loads(bytes(state["format"].tolist()))
    assert saved["version"] == 1
    assert saved["tables"] == [{"name": n, "embedding_dim": d} for n, d in TABLES]
    assert saved["optimizer"] == "adam"


def test_state_holds_the_used_part_only(tmp_path: Path) -> None:
    module = td.DynamicEmbedding(16, optimizer=td.Adam(lr=0.1))
    empty = len(saved_bytes(module.state_dict()))
    assert empty < 8000
    for _ in range(5):
        module(torch.randint(0, 10**12, (1000,))).sum().backward()
        module.optimizer.step()
    bytes_used = module.memory()["total"]
    assert bytes_used < len(saved_bytes(module.state_dict())) < bytes_used + 16000
    assert bytes_used < len(pickle.dumps(module)) < bytes_used + 16000
    assert bytes_used < len(saved_bytes(module)) < bytes_used + 16000


def test_state_dict_is_a_copy() -> None:
    module = used()
    state = module.state_dict()
    before = {name: tensor.clone() for name, tensor in state.items()}
    train(module, range(4, 7))
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_parameters_and_buffers_hold_no_rows() -> None:
    model = nn.Sequential(used(), nn.Linear(2, 1))
    assert [name for name, _ in model.named_parameters()] == [
        "0.grad_anchor",
        "1.weight",
        "1.bias",
    ]
    assert model[0].grad_anchor.shape == (1,)
    assert not list(model.buffers())
    assert "0.grad_anchor" not in model.state_dict()


# -- several tables in a model -----------------------------------------------------------------


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = td.DynamicEmbedding(4, name="users", optimizer=td.SGD(lr=0.1))
        self.tower = nn.ModuleDict(
            {"ads": td.DynamicEmbeddingBag(4, name="ads", optimizer=td.SGD(lr=0.1))}
        )
        self.dense = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.dense(self.users(ids[:, 0]) + self.tower["ads"](ids))
        return result


def test_nested_in_a_model() -> None:
    model = Model()
    ids = torch.randint(0, 100, (16, 3))
    model(ids).sum().backward()
    state = model.state_dict()
    prefixes = {name.rsplit(".", 2)[0] for name in state if name.endswith("buckets")}
    assert prefixes == {"users", "tower.ads"}
    twin = Model()
    twin.load_state_dict(state)
    assert torch.equal(twin.eval()(ids), model.eval()(ids))
    part = {name: tensor for name, tensor in state.items() if not name.startswith("tower")}
    with pytest.raises(RuntimeError, match=r"Missing key.*tower\.ads\.format"):
        Model().load_state_dict(part)
    third = Model()
    assert third.load_state_dict(part, strict=False).missing_keys == ["tower.ads.format"]
    assert len(third.users) == len(model.users)
    assert len(third.tower["ads"]) == 0


def test_tables_with_different_names_do_not_collide() -> None:
    """One group: names separate entries; an entry of a table is not taken for another's."""
    module = used()
    state = module.state_dict()
    sizes = {int((state[f"{name}.buckets"][:, BUCKET_WIDTH:] != 0).sum()) for name, _ in TABLES}
    assert sizes == set(module.sizes().values())
    swapped = dict(state)
    swapped["a.buckets"], swapped["c.buckets"] = state["c.buckets"], state["a.buckets"]
    with pytest.raises(RuntimeError, match="damaged"):
        collection().load_state_dict(swapped)


# -- what is refused ---------------------------------------------------------------------------


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

    def other(tables: Any = TABLES, **arguments: Any) -> dict[str, Tensor]:
        return td.DynamicEmbeddingBagCollection(
            [td.TableConfig(name, dim) for name, dim in tables],
            **{"optimizer": td.Adam(lr=0.1), **arguments},
        ).state_dict()

    assert_refuses(target, other((("a", 4), ("b", 16), ("c", 4))), "tables = .*'embedding_dim': 16")
    assert_refuses(target, other((("a", 4), ("x", 8), ("c", 4))), "tables = .*'x'")
    assert_refuses(target, other((("b", 8), ("a", 4), ("c", 4))), "tables = ")
    assert_refuses(target, other(TABLES[:2]), "tables = ")
    assert_refuses(target, other(optimizer=td.AdamW(lr=0.1)), "optimizer = 'adamw'.*has 'adam'")
    assert_refuses(target, other(score="step"), "score = 'step'")
    assert_refuses(target, nn.Linear(2, 2).state_dict(), "Missing key.*format")


def test_versions_are_checked() -> None:
    target, state = used(), used().state_dict()
    text = json.loads(bytes(state["format"].tolist()))
    for version in (0, 2, "1", None):
        text["version"] = version
        entry = torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8)
        assert_refuses(target, {**state, "format": entry}, f"format version {version}")


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


# -- devices and dtypes ------------------------------------------------------------------------


def test_moves_that_change_nothing() -> None:
    model = nn.Sequential(td.DynamicEmbedding(3, optimizer=td.SGD(lr=0.1)), nn.Linear(3, 1))
    expected = model(torch.arange(4)).detach()
    address = model[0].group.weights[0].data_ptr()
    for same in (model.to("cpu"), model.float(), model.cpu(), model.to(torch.float32)):
        assert same is model
        assert torch.equal(model(torch.arange(4)), expected)
    assert model[0].group.weights[0].data_ptr() == address


@pytest.mark.parametrize(
    ("move", "error", "message"),
    [
        (lambda module: module.to("meta"), RuntimeError, "device is meta"),
        (lambda module: module.half(), TypeError, r"dtype torch\.float16"),
        (lambda module: module.bfloat16(), TypeError, r"dtype torch\.bfloat16"),
        (lambda module: module.double(), TypeError, r"dtype torch\.float64"),
        (lambda module: module.to(torch.float64), TypeError, r"dtype torch\.float64"),
        (lambda module: module.share_memory(), RuntimeError, "belongs to this process"),
    ],
    ids=["meta", "half", "bfloat16", "double", "to(float64)", "share_memory"],
)
def test_moves_that_are_refused(move: Callable[[Any], Any], error: Any, message: str) -> None:
    module, twin = used(), used()
    with pytest.raises(error, match=message):
        move(module)
    assert_equal_states(module, twin)
    train(module, range(4, 6))
    train(twin, range(4, 6))
    assert_equal_states(module, twin)


def test_move_to_a_gpu_raises() -> None:
    module = used()
    # without a CUDA build torch itself refuses
    with pytest.raises((RuntimeError, AssertionError), match=r"cuda|CUDA"):
        module.to("cuda")
    assert len(module.group.weights) == 2


# -- loading in place --------------------------------------------------------------------------


def test_loading_keeps_addresses() -> None:
    module, source = collection(seed=7), used()
    train(module, range(2))
    group = module.group
    tensors = [group.buckets, group.tables, group.meta, *group.weights, *group.state, group.hyper]
    addresses = [tensor.data_ptr() for tensor in tensors]
    module.load_state_dict(source.state_dict())
    train(module, range(4, 6))
    train(source, range(4, 6))
    assert_equal_states(module, source)
    again = [group.buckets, group.tables, group.meta, *group.weights, *group.state, group.hyper]
    assert [tensor.data_ptr() for tensor in again] == addresses


def test_loading_does_not_touch_hyper_parameters() -> None:
    module = collection(td.Adam(lr=0.5))
    module.load_state_dict(used().state_dict())
    assert [float(group["lr"]) for group in module.optimizer.param_groups] == [0.5] * 3


def test_loading_while_a_backward_is_pending_raises_in_it() -> None:
    module = used()
    output = module({name: torch.arange(3)[None] for name, _ in TABLES})
    train(module, range(4, 5))
    with pytest.raises(RuntimeError, match="split"):
        output.sum().backward()
