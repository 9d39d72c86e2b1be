"""torch.compile(fullgraph=True), by inductor: equal to eager bit for bit, compiled once."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from seeding import seeded
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import torch_dynemb as td
from torch_dynemb.nn.forgotten_steps import FORGOTTEN_STEPS
from torch_dynemb.ops import functional_copies
from torch_dynemb.ops.columns import Table

pytestmark = pytest.mark.cpu_only("compilers and their view of ops")

DIM = 6
OPTIMIZERS = [
    td.SGD(lr=0.1, weight_decay=0.01),
    td.Adagrad(lr=0.1),
    td.RowWiseAdagrad(lr=0.1),
    td.Adam(lr=0.01),
    td.AdamW(lr=0.01),
]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Nothing from other tests, and nothing from disk: formulas are not part of a cache's key."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def compiled(module: Any, *, dynamic: bool | None = None) -> tuple[Any, CompileCounterWithBackend]:
    counter = CompileCounterWithBackend("inductor")
    return torch.compile(module, backend=counter, fullgraph=True, dynamic=dynamic), counter


def tables_of(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "grad_anchor")]


def train_step(
    model: nn.Module, function: Callable[..., Tensor], arguments: tuple[Any, ...]
) -> Tensor:
    model.zero_grad()
    output = function(*arguments)
    output.sum().backward()
    for table in tables_of(model):
        table.optimizer.step()
    return output.detach()


def assert_equal_bits(one: nn.Module, two: nn.Module) -> None:
    states = one.state_dict(), two.state_dict()
    different = [name for name in states[0] if not torch.equal(states[0][name], states[1][name])]
    assert not different
    for first, second in zip(one.parameters(), two.parameters(), strict=True):
        assert (first.grad is None) == (second.grad is None)
        assert first.grad is None or torch.equal(first.grad, second.grad)  # type: ignore[arg-type]


class Head(nn.Module):
    """A linear head over a lookup."""

    def __init__(self, lookup: nn.Module, dim: int) -> None:
        super().__init__()
        self.lookup = lookup
        self.head = nn.Linear(dim, 2, bias=False)

    def forward(self, *arguments: Any) -> Tensor:
        output = self.lookup(*arguments)
        if isinstance(output, dict):
            output = torch.cat([part.reshape(-1, part.shape[-1]) for part in output.values()])
        result: Tensor = self.head(output)
        return result


def random_ids(*shape: int, seed: int, below: int = 60) -> Tensor:
    return torch.randint(-below, below, shape, generator=seeded(seed))


def bags(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids, offsets of 4 to 7 bags, weights."""
    generator = seeded(step)
    lengths = torch.randint(0, 5, (4 + step,), generator=generator)
    ids = random_ids(int(lengths.sum()) + 2, seed=step)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    return ids, offsets, torch.rand(ids.shape, generator=generator).requires_grad_()


CONFIGS = [td.TableConfig("a", 4), td.TableConfig("b", 8, ["b", "c"])]
FEATURES = ["a", "b", "c"]
Inputs = Callable[[int], tuple[Any, ...]]


def keyed(names: list[str]) -> Inputs:
    def inputs(step: int) -> tuple[Any, ...]:
        generator = seeded(step)
        lengths = torch.randint(0, 4, (3 * (4 + step),), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        ids = random_ids(int(offsets[-1]), seed=step)
        weights = torch.rand(ids.shape, generator=generator).requires_grad_()
        return (td.KeyedJagged(names, ids, offsets, weights),)

    return inputs


def by_name(step: int) -> tuple[Any, ...]:
    ids, offsets, _ = bags(step)
    rows = {name: random_ids(len(offsets), 3, seed=step) for name in ("a", "b")}
    return ({**rows, "c": (ids, torch.cat([offsets, torch.tensor([len(ids)])]))},)


def sequences(step: int) -> tuple[Any, ...]:
    names = zip(FEATURES, [(5 + step, 2), (9 + step,), ()], strict=True)
    return ({name: random_ids(*shape, seed=step) for name, shape in names},)


def bag_collection() -> Head:
    return Head(td.DynamicEmbeddingBagCollection(CONFIGS, optimizer=td.Adagrad(lr=0.1)), 20)


KINDS: dict[str, tuple[Callable[[], Head], Inputs]] = {
    "embedding": (
        lambda: Head(
            td.DynamicEmbedding(DIM, padding_idx=3, name="t", optimizer=td.Adagrad(lr=0.1)), DIM
        ),
        lambda step: (random_ids(4 + step, 3 + step, seed=step),),
    ),
    "weighted bag": (
        lambda: Head(
            td.DynamicEmbeddingBag(
                DIM, mode="mean", name="t", padding_idx=3, optimizer=td.Adagrad(lr=0.1)
            ),
            DIM,
        ),
        bags,
    ),
    "keyed bags": (bag_collection, keyed(FEATURES)),
    "keyed bags in another order": (bag_collection, keyed(FEATURES[::-1])),
    "bags by name": (bag_collection, by_name),
    "sequences": (
        lambda: Head(
            td.DynamicEmbeddingCollection(
                [td.TableConfig("t", DIM, FEATURES)], optimizer=td.Adagrad(lr=0.1)
            ),
            DIM,
        ),
        sequences,
    ),
}


# -- equality ----------------------------------------------------------------------------------


class OfAllOptimizers(nn.Module):
    """A bag per optimizer, so that one compilation covers them."""

    def __init__(self) -> None:
        super().__init__()
        self.lookups = nn.ModuleList(
            td.DynamicEmbeddingBag(DIM, mode="sum", name=f"t{i}", optimizer=config)
            for i, config in enumerate(OPTIMIZERS)
        )
        self.head = nn.Linear(DIM * len(OPTIMIZERS), 2, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        result: Tensor = self.head(torch.cat([lookup(ids) for lookup in self.lookups], 1))
        return result


def make_twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    twins = []
    for _ in range(2):
        torch.manual_seed(0)
        twins.append(make())
    return twins[0], twins[1]


@pytest.mark.long
def test_all_optimizers_equal_eager() -> None:
    eager, model = make_twins(OfAllOptimizers)
    function, counter = compiled(model, dynamic=True)
    for step in range(6):
        ids = (random_ids(4 + step, 3 + step % 2, seed=step),)
        assert torch.equal(train_step(eager, eager, ids), train_step(model, function, ids))
        assert_equal_bits(eager, model)
    assert counter.frame_count == 1


QUICK = ("embedding", "weighted bag", "keyed bags")


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        pytest.param(*case, id=name, marks=() if name in QUICK else pytest.mark.long)
        for name, case in KINDS.items()
    ],
)
def test_modules_equal_eager(make: Callable[[], Head], inputs: Inputs) -> None:
    eager, model = make_twins(make)
    function, counter = compiled(model, dynamic=True)
    for step in range(4):
        given = inputs(step), inputs(step)
        outputs = train_step(eager, eager, given[0]), train_step(model, function, given[1])
        assert torch.equal(*outputs)
        assert_equal_bits(eager, model)
        for one, two in zip(*(pytree.tree_leaves(arguments) for arguments in given), strict=True):
            assert not one.requires_grad or torch.equal(one.grad, two.grad)
    assert counter.frame_count <= 1


class Twice(nn.Module):
    """Looks one table up twice before a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = td.DynamicEmbeddingBag(
            DIM,
            mode="sum",
            optimizer=td.SGD(lr=0.1, delayed_gradients="apply"),
            name="twice",
            max_rows=1024,  # aot_eager copies tables
        )

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return self.table(one).square().sum() + self.table(other).square().sum()


def test_delayed_gradients_equal_eager() -> None:
    eager, model = make_twins(Twice)
    function = torch.compile(model, backend="aot_eager", fullgraph=True)
    for step in range(3):
        given = random_ids(8, 3, seed=step), random_ids(8, 3, seed=step + 10)
        assert torch.equal(train_step(eager, eager, given), train_step(model, function, given))
        assert_equal_bits(eager, model)


@pytest.mark.long
def test_reading_equals_eager() -> None:
    """eval(), no_grad and inference_mode read; each is a graph of its own."""
    make, inputs = KINDS["keyed bags"]
    model = make()
    for step in range(2):
        train_step(model, model, inputs(step))
    sizes = tables_of(model)[0].sizes()
    function, counter = compiled(model, dynamic=True)
    modes: list[tuple[bool, Callable[[], Any]]] = [
        (True, torch.no_grad),
        (False, torch.no_grad),
        (False, torch.inference_mode),
    ]
    for training, mode in modes:
        model.train(training)
        for step in (1, 7):  # known ids, and unknown ones
            with mode():
                assert torch.equal(function(*inputs(step)), model(*inputs(step)))
    assert tables_of(model)[0].sizes() == sizes
    assert counter.frame_count <= len(modes)


# -- recompilation -----------------------------------------------------------------------------


@pytest.mark.long
def test_each_varying_dimension_compiles_once_more() -> None:
    model = Head(td.DynamicEmbeddingBag(DIM, mode="sum", optimizer=td.SGD(lr=0.1)), DIM)
    function, counter = compiled(model)

    def graphs_after(*shapes: tuple[int, int]) -> int:
        for shape in shapes:
            train_step(model, function, (random_ids(*shape, seed=0),))
        return counter.frame_count

    assert graphs_after((8, 3), (8, 3)) == 1
    assert graphs_after((5, 3), (9, 3), (16, 3)) <= 2
    assert graphs_after((9, 4), (7, 7), (12, 2), (3, 9)) <= 3
    # sizes 0 and 1 may add one each
    assert graphs_after((1, 4), (1, 5), (0, 4), (0, 5), (6, 8)) <= 5


@pytest.mark.long
def test_growth_schedules_and_loading_do_not_recompile() -> None:
    eager, model = make_twins(bag_collection)
    function, counter = compiled(model, dynamic=True)
    schedulers = [lr_scheduler.StepLR(tables_of(m)[0].optimizer, 1, 0.5) for m in (eager, model)]
    tables = tables_of(model)[0]
    addresses = [
        tensor.data_ptr() for tensor in (tables.group.index.buckets, *tables.group.rows.weights)
    ]

    def step_both(step: int, below: int) -> None:
        ids = random_ids(3 * 500, seed=step, below=below)
        arguments = (td.KeyedJagged(FEATURES, ids, torch.arange(3 * 500 + 1)),)
        outputs = train_step(eager, eager, arguments), train_step(model, function, arguments)
        assert torch.equal(*outputs)
        for scheduler in schedulers:
            scheduler.step()

    for step in range(10):
        step_both(step, 10**step)
    assert int(tables.group.index.tables[:, Table.GROWTHS].min()) >= 4
    saved = model.state_dict()
    step_both(10, 100)
    for module in (eager, model):
        module.load_state_dict(saved)
    tables.optimizer.param_groups[0]["lr"] = 0.3
    tables_of(eager)[0].optimizer.param_groups[0]["lr"] = 0.3
    step_both(11, 10**6)
    assert_equal_bits(eager, model)
    assert counter.frame_count == 1
    group = tables.group
    assert [tensor.data_ptr() for tensor in (group.index.buckets, *group.rows.weights)] == addresses


# -- checkpointing, misuse ---------------------------------------------------------------------


@pytest.mark.long_cases("compiled")
@pytest.mark.parametrize(
    "how",
    [
        "reentrant",
        "not reentrant",
        "selective",
        "compiled",
        pytest.param("selective compiled", marks=pytest.mark.long),
    ],
)
def test_activation_checkpointing(how: str) -> None:
    """The lookup runs again in the backward: ids are inserted once, rows move once."""
    model, plain = make_twins(
        lambda: Head(td.DynamicEmbedding(DIM, name="t", optimizer=td.Adam(lr=0.1)), DIM)
    )
    options: dict[str, Any] = {"use_reentrant": how == "reentrant"}
    if how.startswith("selective"):
        saved = [torch.ops.aten.addmm.default]
        options["context_fn"] = lambda: torch.utils.checkpoint.create_selective_checkpoint_contexts(
            saved
        )

    def body(ids: Tensor, shift: Tensor) -> Tensor:
        result: Tensor = model.head(model.lookup(ids) + shift)
        return result

    def checkpointed(ids: Tensor, shift: Tensor) -> Tensor:
        result: Tensor = checkpoint(body, ids, shift, **options)
        return result

    function = compiled(checkpointed, dynamic=True)[0] if "compiled" in how else checkpointed
    for step in range(3):
        ids = random_ids(9 + step, seed=step)
        # reentrant checkpointing wants an input that has a gradient
        output = train_step(model, function, (ids, torch.zeros(DIM, requires_grad=True)))
        assert torch.equal(output, train_step(plain, plain, (ids,)))
        # the second lookup of a step is counted
        model.lookup.group.index.tables[:, Table.FOUND] = plain.lookup.group.index.tables[
            :, Table.FOUND
        ]
        assert_equal_bits(model, plain)


@pytest.mark.long
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_compiled_activation_checkpointing_counts_ids_once(use_reentrant: bool) -> None:
    policy = td.Policy(score="frequency")
    table = td.DynamicEmbedding(DIM, optimizer=td.SGD(lr=0.1), policy=policy)

    def body(ids: Tensor, shift: Tensor) -> Tensor:
        result: Tensor = (table(ids) * 2).sin() + shift
        return result

    def checkpointed(ids: Tensor, shift: Tensor) -> Tensor:
        result: Tensor = checkpoint(body, ids, shift, use_reentrant=use_reentrant)
        return result

    function, _ = compiled(checkpointed)
    ids = torch.tensor([1, 2, 2])
    for _ in range(2):
        function(ids, torch.zeros(DIM, requires_grad=True)).sum().backward()
        table.optimizer.step()
    assert table.group.scores.get(0, ids).scores.tolist() == [2, 4, 4]
    assert int(table.group.rows.row_clock[0]) == 2  # updates


@pytest.mark.long_cases("compiled autograd-False")
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("how", ["forward", "backward", "compiled autograd"])
def test_backends_that_copy_reserved_memory_are_refused(
    monkeypatch: pytest.MonkeyPatch, how: str, split: bool
) -> None:
    table = td.DynamicEmbedding(DIM, optimizer=td.Adam(lr=0.1), split=split, max_rows=1000)
    index = sum(
        t.nbytes
        for t in (table.group.index.buckets, table.group.index.scores, table.group.index.free_rows)
    )
    assert sum(t.nbytes for t in (*table.group.rows.weights, *table.group.rows.state)) > index
    most = index - 1 if how == "forward" else index
    monkeypatch.setattr(functional_copies, "MOST_COPIED", most)
    compiler = torch.compile(backend="aot_eager")
    if how == "compiled autograd":
        function, context = table, torch._dynamo.compiled_autograd._enable(compiler)
    else:
        function, context = compiler(table), nullcontext()
    message = r"would copy the \d+ bytes .* backend='inductor'"
    with pytest.raises(RuntimeError, match=message), context:
        function(torch.arange(4)).sum().backward()
    monkeypatch.undo()
    assert len(table) == (4 if how == "compiled autograd" else 0)


def test_small_tables_train_with_a_backend_that_copies_them() -> None:
    twins = make_twins(
        lambda: td.DynamicEmbedding(DIM, name="t", optimizer=td.SGD(lr=0.1), max_rows=100)
    )
    compiled_twin = torch.compile(twins[0], backend="aot_eager", fullgraph=True)
    for function, table in zip((compiled_twin, twins[1]), twins, strict=True):
        function(torch.arange(4)).square().sum().backward()
        table.optimizer.step()
    assert_equal_bits(*twins)


def test_a_forgotten_step_is_reported_after_compiled_training() -> None:
    table = td.DynamicEmbedding(DIM, optimizer=td.SGD(lr=0.1))
    function, _ = compiled(table)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(FORGOTTEN_STEPS):
            function(torch.arange(4)).sum().backward()
    for use in (table.state_dict, table.eval):
        with pytest.warns(RuntimeWarning, match=r"since the last optimizer\.step"):
            use()


def test_errors_of_compiled_calls() -> None:
    bag = td.DynamicEmbeddingBag(
        DIM, mode="sum", include_last_offset=True, optimizer=td.SGD(lr=0.1)
    )
    function, _ = compiled(bag, dynamic=True)
    function(torch.arange(4), torch.tensor([0, 2, 4]))
    with pytest.raises(RuntimeError, match="the last offset is 3, expected the number of ids, 4"):
        function(torch.arange(4, 8), torch.tensor([0, 2, 3]))
    assert len(bag) == 4
