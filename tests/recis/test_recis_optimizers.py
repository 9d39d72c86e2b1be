"""Sparse optimizers and HashTable's gradients against formulas and torch.optim."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interrupting import at_line
from lookups import embedding, hash_table, option, rows_of

import torch_dynemb as td
from torch_dynemb.initializers import Constant
from torch_dynemb.nn.forgotten_steps import FORGOTTEN_STEPS
from torch_dynemb.recis import (
    AdmitHook,
    DynamicEmbedding,
    EmbeddingEngine,
    FilterHook,
    HashTable,
    RowFilter,
    SparseAdam,
    SparseAdamW,
    SparseAdamWTF,
    filter_out_sparse_param,
    gen_slice,
    register_filter_hook,
    split_sparse_dense_state_dict,
)
from torch_dynemb.recis.tables import hooks as hooks_module

pytestmark = pytest.mark.any_device

IDS = torch.tensor([[1, 2], [2, 3]])


def adam(w: Any, g: Any, state: dict[str, Any], lr: float, decay: float, kind: str) -> Any:
    """One step, float64."""
    state["t"] = t = state.get("t", 0) + 1
    if kind == "SparseAdam":
        g = g + decay * w
    elif kind == "SparseAdamW":
        w = w * (1 - lr * decay)
    else:
        w = w * (1 - decay)
    state["m"] = m = 0.9 * state.get("m", 0) + 0.1 * g
    state["v"] = v = 0.999 * state.get("v", 0) + 0.001 * g * g
    if kind == "SparseAdamWTF":
        return w - lr * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t) * m / (v.sqrt() + 1e-3)
    return w - lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-3)


@pytest.mark.parametrize("kind", [SparseAdam, SparseAdamW, SparseAdamWTF])
def test_formulas(kind: type[SparseAdam]) -> None:
    module = embedding()
    module(IDS)
    optimizer = kind(filter_out_sparse_param(module), lr=0.1, eps=1e-3, weight_decay=0.02)
    weights = rows_of(module.hashtable, [1, 2, 3]).double()
    state: dict[str, Any] = {}
    for step in range(4):
        lr = 0.1 / (step + 1)
        for group in optimizer.param_groups:
            group["lr"] = lr
        module(IDS).square().sum().backward()
        bags = torch.stack([weights[0] + weights[1], weights[1] + weights[2]])
        gradient = torch.stack([2 * bags[0], 2 * bags[0] + 2 * bags[1], 2 * bags[1]])
        weights = adam(weights, gradient, state, lr, 0.02, kind.__name__)
        optimizer.step()
        given = rows_of(module.hashtable, [1, 2, 3]).double()
        torch.testing.assert_close(given, weights, rtol=1e-5, atol=1e-6)


def test_schedulers_reach_the_rows() -> None:
    module = embedding()
    optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    module(IDS).sum().backward()
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert module.hashtable.optimizer.param_groups[0]["lr"] == 0.05
    assert optimizer.param_groups[0]["name"] == "item"


def test_accumulation_has_its_own_count() -> None:
    module = embedding()
    optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.1)
    optimizer.set_grad_accum_steps(2)
    before = module(IDS).detach()
    for step in range(4):
        module(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        moved = not torch.equal(module(IDS).detach(), before)
        assert moved == (step > 0)
        if step == 0:
            module.zero_grad()
            assert module.hashtable.grad().ids.numel() > 0
            with pytest.raises(RuntimeError, match="1 of 2 steps of an accumulation"):
                optimizer.set_grad_accum_steps(1)
    assert module.hashtable.group.steps == 2
    for steps, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(error, match=f"steps is {steps}, expected (at least 1|int)"):
            optimizer.set_grad_accum_steps(steps)  # type: ignore[arg-type]


def test_state_dict_goes_on_in_an_accumulation() -> None:
    def make() -> tuple[DynamicEmbedding, SparseAdam]:
        torch.manual_seed(0)
        module = embedding()
        return module, SparseAdam(filter_out_sparse_param(module), lr=0.1)

    module, optimizer = make()
    optimizer.set_grad_accum_steps(3)
    for _ in range(3):
        module(IDS).sum().backward()
        optimizer.step()
    optimizer.step()
    _other, loaded = make()
    loaded.load_state_dict(optimizer.state_dict())
    assert loaded.state_dict() == optimizer.state_dict()
    assert loaded.state_dict()["micro_steps"] == 1


def test_states_that_do_not_fit_are_refused_and_change_nothing() -> None:
    model = torch.nn.ModuleList([embedding("a"), embedding("b")])
    optimizer = SparseAdam(filter_out_sparse_param(model), lr=0.1)
    before = optimizer.state_dict()
    only = SparseAdam(filter_out_sparse_param(embedding("a")), lr=0.5).state_dict()
    with pytest.raises(ValueError, match=r"the state is of tables \['a'\], expected \['a', 'b'\]"):
        optimizer.load_state_dict(only)
    tables = {name: embedding(name).hashtable for name in "ab"}
    wrong = SparseAdam(tables, lr=0.5).state_dict()
    wrong["tables"]["b"] = SparseAdamWTF({"b": embedding("b").hashtable}).state_dict()["tables"][
        "b"
    ]
    with pytest.raises(ValueError, match="optimizer 'AdamWTF', expected 'Adam'"):
        optimizer.load_state_dict(wrong)
    assert optimizer.state_dict() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("micro_steps", 3),
        ("micro_steps", -1),
        ("micro_steps", None),
        ("grad_accum_steps", 0),
        ("grad_accum_steps", "2"),
        ("grad_accum_steps", True),
    ],
)
def test_a_place_in_no_accumulation_is_refused(name: str, value: Any) -> None:
    optimizer = SparseAdam(filter_out_sparse_param(embedding("a")), lr=0.1)
    other = SparseAdam(filter_out_sparse_param(embedding("a")), lr=0.5)
    before = optimizer.state_dict()
    with pytest.raises(ValueError, match=f"grad_accum_steps and micro_steps are .*{value!r}"):
        optimizer.load_state_dict({**other.state_dict(), name: value})
    assert optimizer.state_dict() == before


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(TypeError, match=r"param_dict\['a'\] is a Linear, expected a HashTable"):
        SparseAdam({"a": torch.nn.Linear(1, 1)})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"param_dict has \[\], expected a trainable table"):
        SparseAdam({})
    optimizer = SparseAdam({"a": hash_table([4])})
    with pytest.raises(RuntimeError, match="the groups are those of the tables"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    table = hash_table([4])
    with pytest.raises(TypeError, match="expected a config such as"):
        table.set_optimizer(3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="has no optimizer yet"):
        _ = table.optimizer


def test_training_without_an_optimizer_is_reported_once() -> None:
    if torch.get_default_device().type == "cuda":
        pytest.skip("a GPU's backwards are counted when the module is saved or evaluated")
    module = embedding()
    for _ in range(FORGOTTEN_STEPS):
        module(IDS).sum().backward()
    with pytest.warns(RuntimeWarning, match=r"because it has no optimizer yet: give it to one"):
        module(IDS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(IDS).sum().backward()
        SparseAdam(filter_out_sparse_param(module)).step()  # applies what has been gathered
        for _ in range(FORGOTTEN_STEPS):
            module(IDS).sum().backward()  # micro-batches
        module(IDS)


def test_a_closure_and_clipping() -> None:
    module = embedding()
    optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.1)

    def closure() -> float:
        loss = module(IDS).sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) is not None
    module(IDS).sum().backward()
    norm = td.clip_grad_norm_(module, 0.5)
    gradients = module.hashtable.grad().gradients
    torch.testing.assert_close(norm, torch.tensor((4 * (1 + 4 + 1)) ** 0.5))
    torch.testing.assert_close(gradients.norm(), torch.tensor(0.5), rtol=1e-4, atol=1e-4)


def test_grad_scaler() -> None:
    def run(scaled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        module = embedding()
        optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.1)
        scaler = torch.amp.GradScaler(
            torch.get_default_device().type, init_scale=1024.0, enabled=scaled
        )
        for step in range(3):
            loss = module(IDS).square().sum()
            if scaled and step == 1:
                loss = loss * torch.inf
            if step != 1 or scaled:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
        return module.hashtable.embeddings()

    torch.testing.assert_close(run(True), run(False), rtol=1e-5, atol=1e-6)


# -- gradients of a table --------------------------------------------------------------------------


def test_gradients_are_accepted_read_and_cleared() -> None:
    table = hash_table([4], initializer=td.Normal(), children=["a", "b"], coalesced=True)
    table.insert(torch.tensor([1, 2]), torch.zeros(2, 4), "a")
    table.insert(torch.tensor([1, 3]), torch.zeros(2, 4), "b")
    optimizer = SparseAdam({"t": table}, lr=0.1)
    table.accept_grad(torch.tensor([2, 1, 2, 9]), torch.ones(4, 4), "a")
    table(torch.tensor([3]), child="b").sum().backward()
    assert dict(zip(*[t.tolist() for t in table.grad("a")[::2]], strict=True)) == {
        1: [1.0] * 4,
        2: [2.0] * 4,
        9: [1.0] * 4,
    }
    assert table.ids("a").tolist() == [1, 2, 9]
    assert table.grad("b").ids.tolist() == [3]
    table.clear_grad()
    assert table.grad("a").ids.numel() == 0
    optimizer.step()
    assert not table.embeddings("a")[:2].any()
    table.accept_grad(torch.tensor([2]), torch.ones(1, 4), "a")
    optimizer.step()
    second_step = -0.1 * (0.1 / 0.19) / (0.001 / 0.001999) ** 0.5
    torch.testing.assert_close(table.embeddings("a")[1], torch.full((4,), second_step))
    assert not table.embeddings("b").any()


def test_gradients_of_ids_without_a_row() -> None:
    table = hash_table([2])
    ids, ones = torch.tensor([1, 2, 3]), torch.ones(3, 2)
    table.accept_grad(ids, ones)
    for factor in (2.0, 3.0):
        table.accept_grad(ids[:1].repeat(3) + int(factor) - 2, factor * ones)
    assert table.grad().ids.tolist() == [1, 2, 3]
    assert table.grad().gradients.tolist() == [[7.0] * 2, [10.0] * 2, [1.0] * 2]
    optimizer = SparseAdam({"t": table}, lr=0.1)
    optimizer.step()
    torch.testing.assert_close(table.embeddings(), torch.full((3, 2), -0.1))
    table.eval()
    table.accept_grad(torch.tensor([4, 3]), ones[:2])
    assert table.grad().ids.tolist() == [3]
    admission = {"t": td.AdmitFrequent(2)}
    counted = hash_table([2], name="t", admissions=admission)
    for expected in ([], [5]):
        counted.accept_grad(torch.tensor([5]), ones[:1])
        assert counted.grad().ids.tolist() == expected
    sliced = hash_table([2], slice=gen_slice(0, 2))
    with pytest.raises(ValueError, match=r"accept_grad: ids has \d+ ids of other slices"):
        sliced.accept_grad(torch.arange(20), torch.ones(20, 2))
    assert len(sliced.ids()) == 0


@pytest.mark.parametrize(
    ("kind", "prefix"),
    [
        (SparseAdam, "sparse_adam_"),
        (SparseAdamW, "sparse_adamw_"),
        (SparseAdamWTF, "sparse_adamw_tf_"),
    ],
)
def test_slots_have_recis_s_names_and_follow_row_numbers(kind: Any, prefix: str) -> None:
    table = hash_table([4], initializer=td.Normal(), children=["a", "b"], coalesced=True)
    optimizer = kind({"t": table}, lr=0.1)
    for child, ids in (("b", [9, 8]), ("a", [5, 1, 7]), ("b", [3, 9])):
        table(torch.tensor(ids), child=child).square().sum().backward()
        optimizer.step()
    for child in ("a", "b"):
        slots, rows = table.slot_group(child), table.ids_map(child).rows
        assert [slot.name() for slot in slots.slots()] == ["embedding", "exp_avg", "exp_avg_sq"]
        assert torch.equal(slots.slot_by_name("embedding").value()[rows], table.embeddings(child))
        for place, name in enumerate(("exp_avg", "exp_avg_sq"), 1):
            value = slots.slot_by_name(prefix + name).value()
            assert value.shape == (6, 4)
            assert slots[name].any()
            assert torch.equal(value[rows], slots[name])
            assert torch.equal(slots.slot_by_index(place).values()[0], value)
    with pytest.raises(KeyError, match="name is 'sum', expected one of"):
        slots.slot_by_name("sum")


def test_the_entries_of_tables_in_a_state_dict() -> None:
    model = torch.nn.ModuleDict({"user": embedding(), "top": torch.nn.Linear(4, 1)})
    SparseAdam(filter_out_sparse_param(model), lr=0.1)
    model["user"](IDS).sum().backward()
    model["user"].hashtable.optimizer.step()
    state = model.state_dict()
    sparse, dense = split_sparse_dense_state_dict(state)
    assert list(dense) == ["top.weight", "top.bias"]
    assert all(name.startswith("user.hashtable.") for name in sparse)
    assert list({**sparse, **dense}) == list(state)
    assert split_sparse_dense_state_dict(dense) == ({}, dense)
    own = model["user"].hashtable.state_dict()
    assert split_sparse_dense_state_dict(own) == (own, {})
    other = torch.nn.ModuleDict({"user": embedding(), "top": torch.nn.Linear(4, 1)})
    SparseAdam(filter_out_sparse_param(other), lr=0.1)
    other.load_state_dict(sparse, strict=False)
    rows = [m["user"].hashtable.embeddings() for m in (model, other)]
    assert torch.equal(*rows)


REFUSED: list[tuple[Callable[[HashTable], Any], type[Exception], str]] = [
    (lambda t: t(torch.tensor([1])), ValueError, "child is None, expected one of"),
    (lambda t: t.ids("c"), ValueError, r"child is 'c', expected one of \['a', 'b'\]"),
    (
        lambda t: t.insert(torch.tensor([1]), torch.ones(1, 3), "a"),
        ValueError,
        r"embeddings has shape \(1, 3\), expected \(1, 4\)",
    ),
    (
        lambda t: t.accept_grad(torch.tensor([1]), torch.ones(1, 3), "a"),
        ValueError,
        r"grad has shape \(1, 3\), expected \(1, 4\)",
    ),
    (
        lambda t: t(torch.tensor([1]), AdmitHook("Frequency", {"threshold": 2}), child="a"),
        ValueError,
        "but the rules of its children are {}",
    ),
    (lambda t: t(torch.tensor([1.0]), child="a"), TypeError, "dtype torch.float32"),
]


@pytest.mark.parametrize(("call", "error", "message"), REFUSED)
def test_wrong_calls_are_refused(
    call: Callable[[HashTable], Any], error: type[Exception], message: str
) -> None:
    table = hash_table([4], children=["a", "b"], coalesced=True)
    with pytest.raises(error, match=message):
        call(table)
    assert table.sizes() == {"a": 0, "b": 0}


def test_tables_that_cannot_be() -> None:
    with pytest.raises(ValueError, match=r"embedding_shape is \[2, 2\], expected one size"):
        hash_table([2, 2])
    with pytest.raises(ValueError, match="grad_reduce_by is 'rank'"):
        hash_table([2], grad_reduce_by="rank")
    with pytest.raises(ValueError, match="coalesced is False"):
        hash_table([2], children=["a", "b"])
    frozen = hash_table([2], trainable=False)
    for call in (
        lambda: frozen.set_optimizer(td.Adam()),
        lambda: frozen.accept_grad(torch.tensor([1]), torch.ones(1, 2)),
        frozen.grad,
    ):
        with pytest.raises(ValueError, match="is not trainable"):
            call()
    frozen.clear_grad()


def test_a_slice_has_its_ids_only() -> None:
    from torch_dynemb import ops

    parts = [hash_table([2], slice=gen_slice(part, 2), name="t") for part in range(2)]
    ids = torch.arange(20)
    owners = ops.id_owners(ids, parts=2)
    for part, table in enumerate(parts):
        mine = ids[owners == part]
        table.insert(mine, torch.ones(len(mine), 2))
        with pytest.raises(ValueError, match="ids of other slices, such as"):
            table.insert(ids, torch.ones(20, 2))
        assert torch.equal(table.ids(), mine)
    with pytest.raises(
        RuntimeError, match="is of slots_0_to_32768_of_65536, expected slots_32768_to_"
    ):
        parts[1].load_state_dict(parts[0].state_dict())
    with pytest.raises(RuntimeError, match="Missing key"):
        parts[0].load_state_dict({})


# -- hooks -----------------------------------------------------------------------------------------


def test_rows_not_seen_go_and_their_rows_are_used_again() -> None:
    params = {"filter_step": 2, "filter_interval": 2}
    module = embedding(filter_hook=FilterHook("GlobalStepFilter", params))
    optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.1)
    known = []
    for step in range(6):
        module(torch.tensor([[step, 100]])).sum().backward()
        optimizer.step()
        known.append(module.hashtable.ids().tolist())
    assert known[0] == [0, 100]
    assert known[2] == [1, 2, 100] or known[2] == [0, 1, 2, 100]
    assert 0 not in known[-1]
    assert {4, 5, 100} <= set(known[-1])
    assert module.hashtable.group.index.used_rows(0) < 7


def test_read_only_and_other_features_of_one_table() -> None:
    hook = AdmitHook("Frequency", {"threshold": 2})
    engine = EmbeddingEngine(
        {"reads": option(admit_hook=AdmitHook("ReadOnly")), "counts": option(admit_hook=hook)}
    )
    (table,) = filter_out_sparse_param(engine).values()
    ids = torch.tensor([[7], [8]])
    for seen in ([], [7, 8]):
        output = engine({"reads": ids, "counts": ids})
        assert table.ids().tolist() == seen
        assert not output["reads"].any() or seen
    assert table(torch.tensor([7]), hook).any()
    assert not table(torch.tensor([70]), AdmitHook("ReadOnly")).any()


def test_filters_of_users_are_called() -> None:
    @register_filter_hook("SmallRows")
    class SmallRows(RowFilter):
        interval = 2

        def __init__(self, norm: float) -> None:
            self.norm = norm

        def remove(self, group: td.TableGroup, table: int) -> int:
            return group.remove(table, norm_below=self.norm)

    try:
        hook = FilterHook("SmallRows", {"norm": 1.0})
        table = hash_table([2], filter_hook=hook, children=["a", "b"], coalesced=True)
        optimizer = SparseAdam({"t": table}, lr=0.0)
        for child in ("a", "b"):
            table.insert(torch.tensor([1, 2]), torch.tensor([[0.1, 0.1], [3.0, 4.0]]), child)
        for expected in ([1, 2], [2]):
            optimizer.step()
            assert table.ids("a").tolist() == table.ids("b").tolist() == expected
    finally:
        del hooks_module._FILTERS["SmallRows"]


def test_an_interrupted_table_has_the_optimizer_and_its_gradients_or_neither() -> None:
    def table() -> HashTable:
        made = hash_table([4], initializer=Constant(1.0))
        made(torch.arange(6)).sum().backward()
        return made

    changed = table()
    lines = at_line(lambda: changed.set_optimizer(td.SGD(lr=1.0)), 0)
    seen = set()
    for line in [*range(1, lines, lines // 8), *range(lines - 30, lines, 3)]:
        trial = table()
        at_line(lambda trial=trial: trial.set_optimizer(td.SGD(lr=1.0)), line)
        seen.add(trial._has_optimizer)
        assert trial.grad().ids.tolist() == list(range(6))
        if not trial._has_optimizer:
            with pytest.raises(RuntimeError, match="no optimizer yet"):
                trial.optimizer  # noqa: B018
            trial.set_optimizer(td.SGD(lr=1.0))
        trial.optimizer.step()
        assert torch.equal(trial.embeddings(), torch.zeros(6, 4))
    assert seen == {False, True}
