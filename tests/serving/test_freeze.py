"""torch_dynemb.freeze: a read-only copy equal to eval mode; saved, exported, shared by threads."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from seeding import seeded
from torch import Tensor, nn
from torch.export import Dim

import torch_dynemb as td
from torch_dynemb.ops.columns import Meta, Table

pytestmark = pytest.mark.any_device

IDS = torch.randint(-(2**60), 2**60, (40, 3), generator=seeded(0)) % 500
UNSEEN = IDS + 1000
NAMES = ["a", "b", "c"]

Features = dict[str, Tensor]
Case = tuple[Callable[[], nn.Module], tuple[Any, ...], tuple[Any, ...]]


def tables(*dims: int) -> list[td.TableConfig]:
    return [
        td.TableConfig(name, dim, eval_default=default, padding_idx=3)  # type: ignore[arg-type]
        for name, dim, default in zip(
            NAMES, dims, ["initial", "zeros", torch.arange(dims[2]).float()], strict=True
        )
    ]


def keyed(ids: Tensor) -> td.KeyedJagged:
    """Three features with bags of one id."""
    return td.KeyedJagged(NAMES, ids.t().reshape(-1), torch.arange(ids.numel() + 1))


ADAM = td.Adam(lr=0.05)
# module, arguments with known ids, arguments with ids that are not there
CASES: dict[str, Case] = {
    "embedding": (lambda: td.DynamicEmbedding(8, optimizer=ADAM), (IDS,), (UNSEEN,)),
    "bag": (
        lambda: td.DynamicEmbeddingBag(8, mode="mean", padding_idx=5, optimizer=ADAM),
        (IDS,),
        (UNSEEN,),
    ),
    "bag with offsets": (
        lambda: td.DynamicEmbeddingBag(8, mode="sum", optimizer=ADAM, include_last_offset=True),
        (IDS.flatten(), torch.tensor([0, 7, 7, 120]), torch.rand(120)),
        (UNSEEN.flatten(), torch.tensor([0, 0, 9, 120]), torch.rand(120)),
    ),
    "bags": (
        lambda: td.DynamicEmbeddingBagCollection(tables(4, 8, 4), optimizer=ADAM, mode="mean"),
        ({name: IDS + i for i, name in enumerate(NAMES)},),
        ({name: UNSEEN + i for i, name in enumerate(NAMES)},),
    ),
    "ragged bags": (
        lambda: td.DynamicEmbeddingBagCollection(tables(4, 8, 4), optimizer=ADAM),
        ({name: (IDS.flatten(), torch.tensor([0, 50, 50, 120])) for name in NAMES},),
        ({name: (UNSEEN.flatten(), torch.tensor([0, 3, 90, 120])) for name in NAMES},),
    ),
    "keyed bags": (
        lambda: td.DynamicEmbeddingBagCollection(tables(4, 8, 4), optimizer=ADAM),
        (keyed(IDS),),
        (keyed(UNSEEN),),
    ),
    "sequences": (
        lambda: td.DynamicEmbeddingCollection(tables(6, 6, 6), optimizer=ADAM),
        ({"a": IDS, "b": IDS[:2], "c": IDS[0, 0]},),
        ({"a": UNSEEN, "b": UNSEEN[:2], "c": UNSEEN[0, 0]},),
    ),
}
each_case = pytest.mark.parametrize(("make", "seen", "unseen"), CASES.values(), ids=list(CASES))


def trained(make: Callable[[], nn.Module], arguments: tuple[Any, ...]) -> Any:
    """A module that has learnt some ids, and met others that no backward has written."""
    module: Any = make()
    module(*arguments)
    for _ in range(2):
        output = module(*arguments)
        parts = output.values() if isinstance(output, dict) else [output]
        sum(part.square().sum() for part in parts).backward()
        module.optimizer.step()
    return module


def assert_same(one: Any, two: Any) -> None:
    if isinstance(one, dict):
        assert list(one) == list(two)
        for name in one:
            assert torch.equal(one[name], two[name])
    else:
        assert torch.equal(one, two)


@each_case
def test_frozen_equals_eval(
    make: Callable[[], nn.Module], seen: tuple[Any, ...], unseen: tuple[Any, ...]
) -> None:
    module = trained(make, seen)
    frozen = td.freeze(module)
    sizes = module.sizes()
    module.eval()
    for arguments in (seen, unseen):
        assert_same(frozen(*arguments), module(*arguments))
    assert frozen.sizes() == module.sizes() == sizes


@each_case
def test_frozen_only_reads(
    make: Callable[[], nn.Module], seen: tuple[Any, ...], unseen: tuple[Any, ...]
) -> None:
    module = trained(make, seen)
    frozen = td.freeze(module)
    before = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
    expected = frozen(*seen)
    for training in (True, False):
        frozen.train(training)
        assert not frozen.training
        output = frozen(*unseen)
        parts = output.values() if isinstance(output, dict) else [output]
        assert not any(part.requires_grad for part in parts)
    # a copy: training the source does not reach it
    trained(lambda: module.train(), seen)
    assert_same(frozen(*seen), expected)
    after = frozen.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_freezing_does_not_change_the_source() -> None:
    make, seen, unseen = CASES["bags"]
    module, twin = trained(make, seen), trained(make, seen)
    td.freeze(module)
    assert module.training
    for one in (module, twin):
        one(*unseen).sum().backward()
    states = module.state_dict(), twin.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


class Model(nn.Module):
    """Tables at several depths, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.users = td.DynamicEmbedding(4, name="users", optimizer=td.SGD(lr=0.1))
        self.towers = nn.ModuleList(
            [
                td.DynamicEmbeddingBag(4, mode="sum", name="ads", optimizer=td.SGD(lr=0.1)),
                nn.Dropout(0.5),
            ]
        )
        self.again = nn.ModuleDict({"users": self.users})
        self.dense = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, ids: Tensor) -> Tensor:
        pooled = self.users(ids[:, 0]) + self.towers[0](ids)
        result: Tensor = self.dense(self.towers[1](pooled))
        return result


def trained_model() -> Model:
    torch.manual_seed(0)
    model = Model()
    dense = torch.optim.SGD(model.dense.parameters(), lr=0.1)
    for _ in range(3):
        model(IDS).square().mean().backward()
        dense.step()
        model.users.optimizer.step()
        model.towers[0].optimizer.step()
    return model


def test_nested_models() -> None:
    model = trained_model()
    frozen = td.freeze(model)
    assert isinstance(frozen, Model)
    assert not frozen.training
    assert frozen.again["users"] is frozen.users
    assert frozen.dense[0].weight is not model.dense[0].weight
    model.eval()
    assert torch.equal(frozen(IDS), model(IDS))
    assert torch.equal(frozen(UNSEEN), model(UNSEEN))
    frozen.train()  # the dense part may be fine-tuned over fixed rows
    assert frozen.dense.training
    assert not frozen.users.training
    frozen(IDS).sum().backward()
    assert frozen.dense[0].weight.grad is not None
    assert len(model.users) == IDS[:, 0].unique().numel()


def test_empty_tables() -> None:
    frozen = td.freeze(td.DynamicEmbedding(3, name="t", optimizer=td.SGD(lr=0.1)))
    live = td.DynamicEmbedding(3, name="t", optimizer=td.SGD(lr=0.1)).eval()
    assert torch.equal(frozen(IDS), live(IDS))
    assert frozen.sizes() == {"t": 0}


def test_a_frozen_model_is_an_ordinary_module(tmp_path: Path) -> None:
    frozen = td.freeze(trained_model())
    expected = frozen(IDS)
    assert torch.equal(copy.deepcopy(frozen)(IDS), expected)
    torch.save(frozen, tmp_path / "model.pt")
    assert torch.equal(torch.load(tmp_path / "model.pt", weights_only=False)(IDS), expected)
    other = td.freeze(trained_model())
    for buffer in other.buffers():
        buffer.zero_()
    other.load_state_dict(frozen.state_dict())
    assert torch.equal(other(IDS), expected)
    assert torch.equal(td.freeze(frozen)(IDS), expected)


def frozen_states() -> tuple[nn.Module, dict[str, Tensor]]:
    """A module, and the state of one like it."""
    module = trained(CASES["bags"][0], CASES["bags"][1])
    one, other = td.freeze(module), td.freeze(module)
    return one, {name: tensor.clone() for name, tensor in other.state_dict().items()}


def tamper(name: str, *index: int, value: float) -> Callable[[dict[str, Any]], None]:
    def change(state: dict[str, Any]) -> None:
        state[f"frozen_tables.{name}"][index] = value

    return change


def another_kind(state: dict[str, Any]) -> None:
    state["frozen_tables.weights0"] = state["frozen_tables.weights0"].double()


def gone(state: dict[str, Any]) -> None:
    del state["frozen_tables.tables"]


DAMAGED: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "slab": (tamper("meta", 0, Meta.SLAB, value=5), "'meta' is corrupted: table 0 has dim 4 and"),
    "region": (tamper("meta", 1, Meta.REGION_BEGIN, value=-4), "'meta' is corrupted: its regions"),
    "records": (tamper("meta", 0, Meta.INIT_BEGIN, value=2**40), "'init_data' is corrupted"),
    "columns": (tamper("init_data", 1, value=2**30), "'init_data' is corrupted"),
    "buckets": (tamper("tables", 0, Table.BUCKET_COUNT, value=2**62), "'tables' is corrupted"),
    "size": (
        tamper("tables", 0, Table.SIZE, value=1),
        "'buckets' is corrupted: the index of table 0",
    ),
    "generation": (
        tamper("generations0", 3, value=9),
        "'buckets' is corrupted: the index of table",
    ),
    "stored": (
        tamper("buckets", 2, 5, value=2**62),
        "'buckets' is corrupted: the index of table 0",
    ),
    "dtype": (another_kind, "'weights0' is torch.float64"),
    "gone": (gone, "Missing key.*frozen_tables.tables"),
}


@pytest.mark.parametrize(("change", "message"), DAMAGED.values(), ids=DAMAGED.keys())
def test_damaged_states_are_refused(change: Callable[[dict[str, Any]], None], message: str) -> None:
    frozen, state = frozen_states()
    frozen.load_state_dict(dict(state))
    before = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
    for name in state:
        if name.endswith(("weights0", "weights1")):
            state[name] += 1  # loaded first, were the others not looked at before
    change(state)
    with pytest.raises(RuntimeError, match=message):
        frozen.load_state_dict(state)
    assert all(torch.equal(t, before[name]) for name, t in frozen.state_dict().items())


# -- export ------------------------------------------------------------------------------------


def through_file(program: torch.export.ExportedProgram) -> tuple[nn.Module, int]:
    """The program after saving and loading, and its bytes."""
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    return torch.export.load(buffer).module(), len(buffer.getvalue())


@pytest.mark.traced
@each_case
def test_exported_saved_and_loaded(
    make: Callable[[], nn.Module], seen: tuple[Any, ...], unseen: tuple[Any, ...]
) -> None:
    module = trained(make, seen)
    frozen = td.freeze(module)
    loaded, _ = through_file(torch.export.export(frozen, seen))
    for arguments in (seen, unseen):
        assert_same(loaded(*arguments), frozen(*arguments))


@pytest.mark.traced
@pytest.mark.parametrize("strict", [False, True])
def test_exported_with_a_batch_of_any_size(strict: bool) -> None:
    model = trained_model()
    frozen = td.freeze(model)
    program = torch.export.export(
        frozen, (IDS,), dynamic_shapes=({0: Dim("batch"), 1: Dim("length")},), strict=strict
    )
    loaded, _ = through_file(program)
    model.eval()
    for ids in (IDS, UNSEEN, IDS[:5, :2], IDS.reshape(8, 15)):
        torch.testing.assert_close(loaded(ids), model(ids))


@pytest.mark.traced
def test_an_exported_file_has_the_size_of_the_used_part() -> None:
    sizes = {}
    for ids in (2000, 20_000):
        table = td.DynamicEmbedding(16, optimizer=td.Adam(lr=0.1))
        table(torch.arange(ids)).sum().backward()
        _, sizes[ids] = through_file(torch.export.export(td.freeze(table), (IDS,)))
        memory = table.memory()
        # rows and index, no optimizer state
        assert 0 < sizes[ids] - memory["rows"] - memory["index"] < 100_000
    assert sizes[20_000] < 11 * sizes[2000]


@pytest.mark.traced
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
# torch.jit takes tensors, tuples, lists and dicts
@pytest.mark.parametrize(
    ("make", "seen", "unseen"),
    [case for name, case in CASES.items() if name != "keyed bags"],
    ids=[name for name in CASES if name != "keyed bags"],
)
def test_traced_saved_and_loaded(
    make: Callable[[], nn.Module], seen: tuple[Any, ...], unseen: tuple[Any, ...]
) -> None:
    frozen = td.freeze(trained(make, seen))
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.trace(frozen, seen, strict=False), buffer)
    buffer.seek(0)
    loaded = torch.jit.load(buffer)
    for arguments in (seen, unseen):
        assert_same(loaded(*arguments), frozen(*arguments))


def test_a_live_table_in_a_model_is_not_exported() -> None:
    with pytest.raises(RuntimeError, match=r"export torch_dynemb\.freeze\(model\)"):
        torch.export.export(trained_model().eval(), (IDS,))


@pytest.mark.long
def test_frozen_modules_compile() -> None:
    frozen = td.freeze(trained_model())
    compiled = torch.compile(frozen, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for ids in (IDS, UNSEEN[:7]):
            torch.testing.assert_close(compiled(ids), frozen(ids))


# -- threads -----------------------------------------------------------------------------------


def run_in_threads(work: Callable[[int], None], count: int = 4) -> None:
    errors: list[BaseException] = []

    def run(number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("freeze", [True, False], ids=["frozen", "eval"])
def test_concurrent_lookups(freeze: bool) -> None:
    ids = torch.arange(20_000).reshape(100, 200)
    bag = td.DynamicEmbeddingBag(8, mode="sum", optimizer=td.SGD(lr=0.1))
    bag(ids).sum().backward()
    reader = td.freeze(bag) if freeze else bag.eval()
    batches = [ids[i::7] + 5000 * i for i in range(7)]  # known ids and unknown ones
    expected = [reader(batch) for batch in batches]

    def work(number: int) -> None:
        for i in range(40):
            batch = (i + number) % 7
            assert torch.equal(reader(batches[batch]), expected[batch])

    run_in_threads(work)
    assert bag.sizes() == {bag.table.name: 20_000}


@pytest.mark.traced
def test_frozen_copies_serve_while_the_source_trains() -> None:
    ids = torch.arange(3000).reshape(100, 30)
    bag = td.DynamicEmbeddingBag(8, mode="sum", optimizer=td.SGD(lr=0.1))
    bag(ids).sum().backward()
    frozen = td.freeze(bag)
    expected = frozen(ids)

    def work(number: int) -> None:
        for step in range(30):
            if number == 0:
                bag(ids + 1000 * step).sum().backward()
                bag.optimizer.step()
            else:
                assert torch.equal(frozen(ids), expected)

    run_in_threads(work, 3)
    assert not torch.equal(bag(ids), expected)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("kind", ["frozen", "int8", "live"])
def test_weights_of_ids_get_the_gradient_of_plain_torch(
    mode: str, kind: str, request: pytest.FixtureRequest
) -> None:
    """Of features of two dims, with padding ids, which count neither in sums nor in means."""
    if kind == "live" and request.config.getoption("--device") != "cpu":
        pytest.skip("live tables are on the CPU")
    bags = td.DynamicEmbeddingBagCollection(
        [td.TableConfig("a", 4, padding_idx=3), td.TableConfig("b", 8, ["b", "c"])],
        mode=mode,
        optimizer=ADAM,
    )
    ids = torch.randint(0, 8, (36,), generator=seeded(1))
    ends = torch.tensor([1, 4, 4, 9, 12, 13, 20, 20, 28, 30, 31, 36])
    names, offsets = ["c", "a", "b"], torch.cat([ends.new_zeros(1), ends])
    bags(td.KeyedJagged(names, ids, offsets)).sum().backward()
    copy = (
        td.serving.live(bags, headroom=5)
        if kind == "live"
        else td.freeze(bags, rows="int8" if kind == "int8" else None)
    )
    weights = torch.rand(36, generator=seeded(2), requires_grad=True)
    with torch.no_grad():
        plain = copy(td.KeyedJagged(names, ids, offsets, weights))
        rows = copy.split(copy(dict.fromkeys(names, ids[:, None])))
    output = copy(td.KeyedJagged(names, ids, offsets, weights))
    assert torch.equal(output, plain)
    expected = []
    for name in bags.feature_names:
        for bag in range(4):
            begin = 4 * names.index(name) + bag
            of = slice(int(offsets[begin]), int(offsets[begin + 1]))
            counted = weights[of] * (ids[of] != 3) if name == "a" else weights[of]
            total = (rows[name][of] * counted[:, None]).sum(0)
            expected.append(total / counted.sum() if mode == "mean" and len(counted) else total)
    whole = torch.cat([torch.stack(expected[4 * f : 4 * f + 4]) for f in range(3)], 1)
    torch.testing.assert_close(output, whole)
    factors = torch.rand(output.shape, generator=seeded(3))
    (given,) = torch.autograd.grad((output * factors).sum(), weights)
    (right,) = torch.autograd.grad((whole * factors).sum(), weights)
    torch.testing.assert_close(given, right)
