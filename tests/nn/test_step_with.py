"""td.step_with: the optimizer of the dense part ends the steps of the tables."""

from __future__ import annotations

import copy
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("torch's optimizers, whatever the device")

step_with_module = sys.modules[td.step_with.__module__]
IDS = torch.tensor([[1, 2], [3, 1]])


class Model(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        options = {"optimizer": td.Adam(lr=0.1), "initializer": td.Constant(1.0), **options}
        self.users = td.DynamicEmbedding(4, name="users", **options)
        self.items = td.DynamicEmbeddingBag(4, mode="sum", name="items", **options)
        self.head = nn.Linear(4, 1)
        nn.init.ones_(self.head.weight)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.users(ids[:, 0]) + self.items(ids)).square().mean()
        return out

    def rows(self) -> list[Tensor]:
        return [m.group.read(0, torch.arange(4)) for m in (self.users, self.items)]


def same_rows(one: Model, other: Model) -> bool:
    return all(torch.equal(*pair) for pair in zip(one.rows(), other.rows(), strict=True))


def dense_of(model: Model) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.head.parameters(), lr=0.01)


def trained_by_steps_of_its_own(steps: int, **options: Any) -> Model:
    torch.manual_seed(0)
    model = Model(**options)
    dense = dense_of(model)
    for _ in range(steps):
        dense.zero_grad()
        model(IDS).backward()
        for optimizer in (dense, *td.table_optimizers(model)):
            optimizer.step()
    return model


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("closure", [False, True])
def test_ends_the_steps_of_all_tables(split: bool, closure: bool) -> None:
    expected = trained_by_steps_of_its_own(3, split=split)
    torch.manual_seed(0)
    model = Model(split=split)
    dense = dense_of(model)
    td.step_with(dense, model)

    def backward() -> float:
        dense.zero_grad()
        loss = model(IDS)
        loss.backward()
        return float(loss.detach())

    for _ in range(3):
        if closure:
            assert dense.step(backward) > 0
        else:
            backward()
            dense.step()
        assert [of.updates_since_step() for of in td.table_optimizers(model)] == [0, 0]
    assert same_rows(model, expected)


def test_accumulation_in_split_mode_is_one_update() -> None:
    expected = trained_by_steps_of_its_own(1, split=True)
    torch.manual_seed(0)
    model = Model(split=True)
    dense = dense_of(model)
    td.step_with(dense, [model.users, model.items])
    for part in IDS:
        (model(part[None]) / 2).backward()
    dense.step()
    assert same_rows(model, expected)


@pytest.mark.parametrize(
    ("of", "compiled"),
    [("optimizer", False), ("tables", True), ("model", False), ("model", True)],
)
def test_zero_grad_forgets_gradients_of_tables(of: str, compiled: bool) -> None:
    model = Model(split=True)
    dense = dense_of(model)
    td.step_with(dense, model)
    model(IDS).backward()
    owners: dict[str, list[Any]] = {
        "optimizer": [dense],
        "tables": td.table_optimizers(model),
        "model": [model],
    }
    for owner in owners[of]:
        zero_grad = owner.zero_grad
        if compiled:
            zero_grad = torch.compile(zero_grad, backend="eager")
        zero_grad(set_to_none=False)
    dense.step()
    assert all(bool((rows == 1).all()) for rows in model.rows())


class Scored(nn.Module):
    """A bag and a dense layer, of which the gradient of the bag alone may overflow."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(6, 4, mode="sum"), nn.Linear(4, 1)

    def forward(self, ids: Tensor, overflows: bool) -> Tensor:
        pooled = self.bag(ids)
        if overflows:
            pooled.register_hook(lambda gradient: gradient * float("inf"))
        out: Tensor = self.head(pooled).square().mean()
        return out


def scaled_steps(dynamic: bool, *, unscales: bool, **options: Any) -> list[Any]:
    """Follow PyTorch's recipe; the second of three steps overflows."""
    torch.manual_seed(0)
    model = Scored()
    if dynamic:
        td.replace_embeddings(model, optimizer=td.SGD(lr=0.1), split=True, ids="rows")
    dense = torch.optim.SGD(model.parameters(), lr=0.1, **options)
    if dynamic:
        td.step_with(dense, model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4096.0)
    seen: list[Any] = []
    for overflows in (False, True, False):
        for ids in (IDS, IDS + 2):
            scaler.scale(model(ids, overflows) / 2).backward()
        if unscales:
            scaler.unscale_(dense)
            clip: Any = td.clip_grad_norm_ if dynamic else nn.utils.clip_grad_norm_
            seen.append(float(clip(model if dynamic else model.parameters(), 0.05)))
        scaler.step(dense)
        scaler.update()
        (dense if unscales else model).zero_grad()
        with torch.no_grad():
            rows = model.bag(torch.arange(6)[:, None])
        seen += [scaler.get_scale(), rows, model.head.weight.detach().clone()]
    return seen


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscales", [False, True])
def test_grad_scaler_treats_rows_as_parameters(unscales: bool, fused: bool) -> None:
    """A fused optimizer unscales in its step, and skips it there."""
    expected = scaled_steps(False, unscales=unscales, fused=fused)
    given = scaled_steps(True, unscales=unscales, fused=fused)
    assert len(given) == len(expected)
    for one, other in zip(given, expected, strict=True):
        torch.testing.assert_close(one, other, equal_nan=True)


def test_gradients_that_are_scaled_are_neither_clipped_nor_applied() -> None:
    model = Model(split=True)
    dense, scaler = dense_of(model), torch.amp.GradScaler("cpu")
    handle = td.step_with(dense, model)
    head = model.head.weight.detach().clone()
    scaler.scale(model(IDS)).backward()
    for call, message in (
        (lambda: td.clip_grad_norm_(model, 1.0), r"clip_grad_norm_: .*'users'.*scaler.unscale_"),
        (dense.step, r"optimizer.step: .*call scaler.step\(optimizer\)"),
        (lambda: scaler.unscale_(model.users.optimizer), "unscale_.*step_with has SGD"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call()
    handle.remove()
    with pytest.raises(RuntimeError, match=r"step: .*call scaler.step\(module.optimizer\)"):
        model.users.optimizer.step()
    assert torch.equal(model.head.weight, head)
    assert all(bool((rows == 1).all()) for rows in model.rows())
    for optimizer in td.table_optimizers(model):
        scaler.unscale_(optimizer)
    assert float(td.clip_grad_norm_([model.users, model.items], 1.0)) > 0
    for optimizer in td.table_optimizers(model):
        optimizer.zero_grad()
    model(IDS).backward()  # what was scaled is gone
    for optimizer in td.table_optimizers(model):
        optimizer.step()
    assert not any(bool((rows[1:] == 1).all()) for rows in model.rows())


@pytest.mark.parametrize("how", ["number", "function", "clock"])
def test_steps_at_the_time_of_events(how: str) -> None:
    """A replay of old events ends as one by optimizer.step(now=); a table without times follows."""
    event, ttl = 1_700_000_000, td.Policy(ttl=86_400)
    kept = []
    for helps in (True, False):
        users = td.DynamicEmbedding(4, name="users", optimizer=td.SGD(lr=0.1), policy=ttl)
        model = nn.ModuleList([users, Model().items, nn.Linear(4, 1)])
        dense = torch.optim.SGD(model[2].parameters(), lr=0.1)
        times = iter(range(event, event + 3))
        now = {"number": event, "function": lambda: next(times), "clock": None}[how]  # noqa: B023
        if helps:
            td.step_with(dense, model, now=now)
        for step in range(3):
            users.group.clock.set_now(event + step)
            model[2](users(IDS[:, 0] + step) + model[1](IDS)).sum().backward()
            dense.step()
            if not helps:
                users.optimizer.step(now=event if how == "number" else event + step)
                model[1].optimizer.step()
        expired = users.group.remove(0, expired=True)
        kept.append((int(users.group.index.clock[0]), expired, sorted(users.ids().tolist())))
    assert kept[0] == kept[1]
    assert kept[0][1:] == (0, [1, 2, 3, 4, 5])


def test_a_step_that_tables_refuse_leaves_the_dense_part() -> None:
    model = Model(policy=td.Policy(ttl=10))
    dense, times = dense_of(model), iter([5, -5, "x"])
    td.step_with(dense, model, now=lambda: next(times))  # type: ignore[arg-type, return-value]
    dense.step()
    model(IDS).backward()
    head = model.head.weight.detach().clone()
    for error, message in ((ValueError, "seconds is -5"), (TypeError, "seconds is 'x'")):
        with pytest.raises(error, match=message):
            dense.step()
    assert torch.equal(model.head.weight, head)
    assert model.users.group.steps == 1
    for now in (True, 1.5, "x"):
        with pytest.raises(TypeError, match=r"step_with: now is .*a function that returns them"):
            td.step_with(dense, model, now=now)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"no table keeps times: leave it out.*a ttl"):
        td.step_with(dense, Model(), now=5)


def test_tables_with_another_optimizer_are_stepped_too() -> None:
    model = Model()
    dense = dense_of(model)
    td.step_with(dense, model)
    model.users.set_optimizer(td.SGD(lr=1.0))
    model(IDS).backward()
    dense.step()
    model(IDS).backward()
    dense.step()
    assert [of.updates_since_step() for of in td.table_optimizers(model)] == [0, 0]
    with pytest.raises(RuntimeError, match="step_with has SGD end their steps"):
        model.users.optimizer.step()


def test_steps_of_their_own_are_refused_until_the_handle_is_removed() -> None:
    model = Model()
    dense = dense_of(model)
    handle = td.step_with(dense, model)
    with pytest.raises(RuntimeError, match=r"tables \['users'\].*SGD.*remove\(\) the handle"):
        model.users.optimizer.step()
    with pytest.raises(ValueError, match=r"\['users'\].*ended by another call, for SGD"):
        td.step_with(dense_of(model), model)
    handle.remove()
    handle.remove()
    model(IDS).backward()
    dense.step()
    assert model.users.optimizer.updates_since_step() == 1
    model.users.optimizer.step()
    assert "zero_grad" not in vars(dense)
    other = dense_of(model)
    td.step_with(other, model)
    other.step()
    del other  # an optimizer that is gone ends no steps
    model.users.optimizer.step()


def test_copies_of_the_model_have_steps_of_their_own() -> None:
    model = Model()
    dense = dense_of(model)
    td.step_with(dense, model)
    twin = copy.deepcopy(model)
    twin.users.optimizer.step()
    state = copy.deepcopy(dense.state_dict())
    dense.load_state_dict(state)
    scheduler = torch.optim.lr_scheduler.StepLR(dense, 1)
    model(IDS).backward()
    dense.step()
    scheduler.step()
    assert model.users.optimizer.updates_since_step() == 0


def test_arguments() -> None:
    model = Model()
    with pytest.raises(TypeError, match=r"optimizer is .*Model.*expected a torch.optim.Optimizer"):
        td.step_with(model, model)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is that of a table"):
        td.step_with(model.users.optimizer, model)
    for without in (nn.Linear(2, 2), []):
        with pytest.raises(ValueError, match="lack trainable dynamic tables"):
            td.step_with(dense_of(model), without)
    with pytest.raises(TypeError, match="modules"):
        td.step_with(dense_of(model), 3)  # type: ignore[arg-type]


def decays(table_decay: float, groups: str) -> list[str]:
    """Warnings of step_with where the dense optimizer decays weights."""
    options = {"optimizer": td.Adam(lr=0.1, weight_decay=table_decay)}
    model = Model(**options)
    anchors = [module.grad_anchor for module in (model.users, model.items)]
    if groups == "all":
        dense = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    else:
        rest = [{"params": model.head.parameters()}, {"params": anchors, "weight_decay": 0.0}]
        dense = torch.optim.AdamW(rest, weight_decay=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        td.step_with(dense, model)
    return [str(warning.message) for warning in caught]


def test_weight_decay_that_misses_tables_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_with_module, "_warned_of_decay", False)
    assert decays(0.1, "all") == decays(0.0, "apart") == []
    (message,) = decays(0.0, "all")
    assert "AdamW has weight_decay=0.1" in message
    assert "tables (users)" in message
    assert decays(0.0, "all") == []
