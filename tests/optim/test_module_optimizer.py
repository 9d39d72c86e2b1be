"""module.optimizer: schedules, hyper-parameters, the step that ends a training step, misuse."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from group_calls import raises_in_step
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torch_dynemb as td
from torch_dynemb.nn.forgotten_steps import FORGOTTEN_STEPS
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.any_device

ID = torch.tensor([42])
Scheduler = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]


def embedding(optimizer: OptimizerConfig | None = None, **arguments: Any) -> td.DynamicEmbedding:
    return td.DynamicEmbedding(
        1,
        optimizer=td.SGD(lr=0.1) if optimizer is None else optimizer,
        initializer=td.Constant(0.0),
        **arguments,
    )


def train_step(module: td.DynamicEmbedding, gradient: float = 1.0) -> None:
    """One backward in which the row of ID gets ``gradient``."""
    (module(ID) * gradient).sum().backward()


def value(module: td.DynamicEmbedding) -> float:
    return float(module.group.read(0, ID))


# -- schedules ---------------------------------------------------------------------------------

SCHEDULERS: dict[str, Scheduler] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=7),
    "restarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, T_0=3),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "exponential": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, gamma=0.7),
    "linear": lambda optimizer: lr_scheduler.LinearLR(optimizer, total_iters=4),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=10),
    "sequence": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [
            lr_scheduler.ConstantLR(optimizer, factor=0.1, total_iters=3),
            lr_scheduler.ExponentialLR(optimizer, gamma=0.5),
        ],
        milestones=[3],
    ),
}


@pytest.mark.parametrize("scheduler", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_schedules_reach_the_rows(scheduler: Scheduler) -> None:
    """Adam's moments and OneCycleLR's betas too: each step equals that of torch.optim.Adam."""
    module = embedding(td.Adam(lr=0.1))
    static = nn.Parameter(torch.zeros(1))
    optimizers = module.optimizer, torch.optim.Adam([static], lr=0.1)
    schedulers = [scheduler(optimizer) for optimizer in optimizers]
    rates = set()
    for step in range(9):
        train_step(module, 1.0 + step)
        static.grad = torch.tensor([1.0 + step])
        for optimizer, schedule in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            schedule.step()
        assert value(module) == pytest.approx(float(static.detach()), rel=1e-5)
        rate = float(optimizers[0].param_groups[0]["lr"])
        assert rate == pytest.approx(float(optimizers[1].param_groups[0]["lr"]))
        rates.add(rate)
    assert len(rates) > 1


def test_plateau_schedule() -> None:
    module = embedding()
    scheduler = lr_scheduler.ReduceLROnPlateau(module.optimizer, factor=0.5, patience=1)
    for _ in range(4):
        scheduler.step(1.0)
    train_step(module)
    assert value(module) == pytest.approx(-0.05)


def test_schedule_resumes_from_its_state_dict() -> None:
    def run(module: td.DynamicEmbedding, steps: int, saved: Any = None) -> Any:
        scheduler = lr_scheduler.CosineAnnealingLR(module.optimizer, T_max=8)
        if saved is not None:
            module.load_state_dict(saved[0])
            module.optimizer.load_state_dict(saved[1])
            scheduler.load_state_dict(saved[2])
        for _ in range(steps):
            train_step(module)
            module.optimizer.step()
            scheduler.step()
        return copy.deepcopy(
            (module.state_dict(), module.optimizer.state_dict(), scheduler.state_dict())
        )

    whole, first, second = (embedding(name="t") for _ in range(3))
    run(whole, 6)
    run(second, 3, run(first, 3))
    assert value(whole) == value(second)


# -- hyper-parameters --------------------------------------------------------------------------


def two_tables() -> td.DynamicEmbeddingBagCollection:
    tables = [td.TableConfig(name, 1, initializer=td.Constant(0.0)) for name in ("a", "b")]
    return td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=0.1))


@pytest.mark.parametrize("value", ["fast", (0.1, 0.2), None, {}], ids=str)
def test_a_state_with_no_number_is_refused_before_any_change(value: Any) -> None:
    module = two_tables()
    before = module.optimizer.state_dict()
    state = copy.deepcopy(before)
    state["param_groups"][0]["lr"] = 0.7
    state["param_groups"][1]["lr"] = value
    with pytest.raises(ValueError, match=r"lr of table 'b' is .*, expected 1 number"):
        module.optimizer.load_state_dict(state)
    for groups in (None, [3, 4], {}):
        with pytest.raises(ValueError, match="param_groups is a"):
            module.optimizer.load_state_dict({**before, "param_groups": groups})
    assert module.optimizer.state_dict() == before


def test_a_param_group_per_table() -> None:
    module = two_tables()
    groups = module.optimizer.param_groups
    assert [group["name"] for group in groups] == ["a", "b"]
    groups[1]["lr"] = 0.5
    module({"a": ID[None], "b": ID[None]}).sum().backward()
    assert float(module.group.read(0, ID)) == pytest.approx(-0.1)
    assert float(module.group.read(1, ID)) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    "write",
    [
        lambda group: group.__setitem__("lr", 0.5),
        lambda group: group.__setitem__("lr", torch.tensor(0.5)),
        lambda group: group.update(lr=0.5),
        lambda group: group.update({"lr": 0.5}),
        lambda group: group.__ior__({"lr": 0.5}),
    ],
    ids=["number", "tensor", "update keyword", "update dict", "or"],
)
def test_every_way_to_write_lr_reaches_the_rows(write: Callable[[Any], Any]) -> None:
    module = embedding()
    group = module.optimizer.param_groups[0]
    for factor in (1, 2):  # the connection outlives a write
        write(group)
        assert float(group["lr"]) == 0.5
        train_step(module)
        assert value(module) == pytest.approx(-0.5 * factor)


def test_lr_may_change_between_forward_and_backward() -> None:
    module = embedding()
    loss = module(ID).sum()
    module.optimizer.param_groups[0]["lr"] = 0.5
    loss.backward()
    assert value(module) == pytest.approx(-0.5)


def test_other_hyper_parameters_write_through() -> None:
    module, twin = embedding(td.Adam(lr=0.1)), embedding(td.Adam(lr=0.1, betas=(0.5, 0.6), eps=0.1))
    group = module.optimizer.param_groups[0]
    group["betas"] = (0.5, 0.6)
    group["eps"] = 0.1
    assert group["betas"] == (0.5, 0.6)
    for gradient in (1.0, -3.0, 0.5):
        train_step(module, gradient)
        train_step(twin, gradient)
    assert value(module) == value(twin) != 0
    with pytest.raises(ValueError, match=r"betas is 0\.5, expected 2 numbers"):
        group["betas"] = 0.5
    decayed = embedding(td.SGD(lr=0.1))
    train_step(decayed)
    decayed.optimizer.param_groups[0]["weight_decay"] = 10.0
    train_step(decayed, 0.0)
    assert value(decayed) == pytest.approx(0.0, abs=1e-7)


def test_load_state_dict_keeps_the_connection() -> None:
    module, source = embedding(), embedding(td.SGD(lr=0.3))
    source.optimizer.param_groups[0]["name"] = module.optimizer.param_groups[0]["name"]
    saved = source.optimizer.state_dict()
    assert not any(isinstance(entry, Tensor) for entry in saved["param_groups"][0].values())
    group = module.optimizer.param_groups[0]
    module.optimizer.load_state_dict(saved)
    train_step(module)
    assert value(module) == pytest.approx(-0.3)
    module.optimizer.param_groups[0]["lr"] = 0.5
    assert module.optimizer.param_groups[0] is group
    train_step(module)
    assert value(module) == pytest.approx(-0.8)


def test_load_state_dict_refuses_what_does_not_fit() -> None:
    module = embedding(td.Adam(lr=0.1), name="t")
    before = module.optimizer.state_dict()
    good = embedding(td.Adam(lr=0.7), name="t").optimizer.state_dict()
    other_table = embedding(td.Adam(lr=0.7), name="u").optimizer.state_dict()
    other_optimizer = embedding(td.AdamW(lr=0.7), name="t").optimizer.state_dict()
    incomplete = copy.deepcopy(good)
    del incomplete["param_groups"][0]["betas"]
    with pytest.raises(ValueError, match=r"for tables \['u'\], expected \['t'\]"):
        module.optimizer.load_state_dict(other_table)
    with pytest.raises(ValueError, match="is of optimizer 'AdamW', expected 'Adam'"):
        module.optimizer.load_state_dict(other_optimizer)
    with pytest.raises(ValueError, match=r"'t' lacks \['betas'\]"):
        module.optimizer.load_state_dict(incomplete)
    with pytest.raises(ValueError, match="is of optimizer None"):
        module.optimizer.load_state_dict(torch.optim.Adam([nn.Parameter(ID.float())]).state_dict())
    assert module.optimizer.state_dict() == before


def test_a_state_without_newer_options_means_their_old_values() -> None:
    module = embedding(td.Adagrad(lr=0.1, lr_decay=0.5, maximize=True))
    saved = module.optimizer.state_dict()
    for name in ("maximize", "lr_decay"):
        del saved["param_groups"][0][name]
    module.optimizer.load_state_dict(saved)
    group = module.optimizer.param_groups[0]
    assert (group["maximize"], group["lr_decay"]) == (False, 0.0)
    train_step(module, 1.0)
    train_step(module, 1.0)
    assert value(module) == pytest.approx(-0.1 - 0.1 / 2**0.5)


def test_state_from_before_a_scheduler_loads_after_it() -> None:
    module = embedding(td.Adam(lr=0.1))
    saved = module.optimizer.state_dict()
    lr_scheduler.OneCycleLR(module.optimizer, max_lr=0.3, total_steps=10)
    module.optimizer.load_state_dict(saved)
    assert float(module.optimizer.param_groups[0]["lr"]) == 0.1


def test_defaults_are_those_of_the_config() -> None:
    assert embedding(td.Adam(lr=0.1)).optimizer.defaults == {
        "lr": 0.1,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "clip_value": None,
        "clip_norm": None,
        "maximize": False,
    }


# -- the end of a training step ----------------------------------------------------------------


def test_step_advances_the_clock_and_zero_grad_is_harmless() -> None:
    module = embedding(policy=td.Policy(score="step"))
    for step in range(3):
        module.optimizer.zero_grad()
        module.optimizer.zero_grad(set_to_none=False)
        train_step(module)
        assert module.optimizer.updates_since_step() == 1
        [batch] = module.group.export(0)
        assert batch.scores.tolist() == [step]
        module.optimizer.step()
        assert module.optimizer.updates_since_step() == 0
    module.zero_grad()
    assert value(module) == pytest.approx(-0.3)


def test_closure() -> None:
    module = embedding()

    def closure() -> float:
        module.optimizer.zero_grad()
        loss = module(ID).sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert module.optimizer.step(closure) == 0.0
        assert module.optimizer.step(closure) == pytest.approx(-0.1)
    assert value(module) == pytest.approx(-0.2)
    assert module.optimizer.updates_since_step() == 0


def test_a_profile_names_the_step_and_global_hooks_are_called() -> None:
    """step() goes through torch's wrapper then; without either it does not."""
    module = td.DynamicEmbedding(4, optimizer=td.SGD(lr=0.1))
    called: list[tuple[object, ...]] = []
    handle = register_optimizer_step_pre_hook(lambda *arguments: called.append(arguments))
    try:
        module.optimizer.step()
        module.optimizer.step(lambda: 0.5)
    finally:
        handle.remove()
    module.optimizer.step()
    optimizers = [arguments[0] for arguments in called]
    assert optimizers == [module.optimizer, module.optimizer]
    assert [len(arguments[1]) for arguments in called] == [1, 2]  # with the closure
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module.optimizer.step()
    names = {event.key for event in profile.key_averages()}
    assert "Optimizer.step#FusedOptimizer.step" in names


def test_step_hooks() -> None:
    module = embedding()
    called = []
    module.optimizer.register_step_post_hook(lambda *_: called.append("post"))
    module.optimizer.step()
    assert called == ["post"]


@pytest.mark.filterwarnings("error")
def test_no_warning_where_step_is_called() -> None:
    module = embedding()
    for _ in range(FORGOTTEN_STEPS):
        train_step(module)
        module.optimizer.step()
    for _ in range(FORGOTTEN_STEPS - 1):  # accumulation
        train_step(module)
    module(ID)
    module.eval()
    module.state_dict()


@pytest.mark.parametrize(
    "use",
    [lambda m: m(ID), lambda m: m.eval(), lambda m: m.state_dict(), lambda m: m.train(False)],
    ids=["forward", "eval", "state_dict", "train(False)"],
)
def test_forgotten_step_is_reported(use: Callable[[Any], Any]) -> None:
    module = embedding()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(FORGOTTEN_STEPS):
            train_step(module)
    with pytest.warns(RuntimeWarning, match=r"16 backwards .* since the last optimizer\.step"):
        use(module)
    model = nn.Sequential(module)
    model.train()
    with pytest.warns(RuntimeWarning, match="since the last"):
        model.eval()


def test_forwards_report_a_forgotten_step_once() -> None:
    module = embedding()
    for _ in range(FORGOTTEN_STEPS):
        train_step(module)
    with pytest.warns(RuntimeWarning, match=r"DynamicEmbedding \(\w+\): 16 .*table_optimizers"):
        train_step(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2 * FORGOTTEN_STEPS):
            train_step(module)
    module.optimizer.step()
    for _ in range(FORGOTTEN_STEPS):
        train_step(module)
    with pytest.warns(RuntimeWarning, match="since the last"):
        train_step(module)


def test_the_optimizers_of_all_tables_of_a_model() -> None:
    towers = [embedding(), embedding()]
    frozen = td.DynamicEmbedding(4, trainable=False)
    model = nn.ModuleDict(
        {
            "towers": nn.ModuleList(towers),
            "again": towers[0],
            "frozen": frozen,
            "top": nn.Linear(4, 1),
        }
    )
    found = td.table_optimizers(model)
    assert [id(optimizer) for optimizer in found] == [id(tower.optimizer) for tower in towers]
    assert len(td.table_optimizers([towers[1], model])) == 2
    for tower in towers:
        train_step(tower)
    for optimizer in found:
        optimizer.step()
    assert all(optimizer.updates_since_step() == 0 for optimizer in found)
    with pytest.raises(TypeError, match=r"table_optimizers: modules\[0\] is .*expected a torch.nn"):
        td.table_optimizers([torch.zeros(1)])
    with pytest.raises(TypeError, match="table_optimizers: modules is 3, expected a module"):
        td.table_optimizers(3)


# -- misuse ------------------------------------------------------------------------------------


def test_steps_of_grad_scaler_raise_and_say_why() -> None:
    """Also where no scaled loss has led to the table."""
    module = embedding()
    for unscale in (False, True):
        scaler = torch.amp.GradScaler(torch.get_default_device().type)
        scaler.scale(torch.ones(1))
        module(ID).sum().backward()
        if unscale:
            scaler.unscale_(module.optimizer)
        with pytest.raises(RuntimeError, match="gradients that were still multiplied by the loss"):
            scaler.step(module.optimizer)


def test_disabled_grad_scaler_works() -> None:
    module = embedding()
    scaler = torch.amp.GradScaler(torch.get_default_device().type, enabled=False)
    scaler.scale(module(ID).sum()).backward()
    scaler.step(module.optimizer)
    scaler.update()
    assert value(module) == pytest.approx(-0.1)
    assert module.optimizer.updates_since_step() == 0


def kinds() -> dict[str, tuple[nn.Module, Any]]:
    config: dict[str, Any] = {"optimizer": td.SGD(lr=0.1)}
    tables = [td.TableConfig("a", 2), td.TableConfig("b", 2)]
    features = {"a": ID[None], "b": ID[None]}
    return {
        "embedding": (td.DynamicEmbedding(2, **config), ID),
        "bag": (td.DynamicEmbeddingBag(2, **config), ID[None]),
        "bags": (td.DynamicEmbeddingBagCollection(tables, **config), features),
        "sequences": (td.DynamicEmbeddingCollection(tables, **config), features),
    }


def total(output: Tensor | dict[str, Tensor]) -> Tensor:
    outputs = output.values() if isinstance(output, dict) else [output]
    return torch.stack([out.square().sum() for out in outputs]).sum()


@pytest.mark.parametrize("kind", kinds().keys())
def test_two_lookups_before_backward_are_one_update(kind: str) -> None:
    module, ids = kinds()[kind]
    (total(module(ids)) + total(module(ids))).backward()
    assert module.optimizer.updates_since_step() == 1


@pytest.mark.parametrize("kind", kinds().keys())
def test_a_second_backward_raises(kind: str) -> None:
    module, ids = kinds()[kind]
    loss = total(module(ids))
    loss.backward(retain_graph=True)
    with raises_in_step(module.group, "split"):
        loss.backward()


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("kind", kinds().keys())
def test_create_graph_raises(kind: str) -> None:
    module, ids = kinds()[kind]
    for loss in (total, lambda output: total(output).sqrt()):
        with pytest.raises(RuntimeError, match="create_graph=True through a dynamic table"):
            loss(module(ids)).backward(create_graph=True)
    assert module.optimizer.updates_since_step() == 0


def test_an_abandoned_forward_is_legal() -> None:
    module = embedding()
    module(ID)
    train_step(module)
    assert value(module) == pytest.approx(-0.1)


def test_the_optimizer_has_no_groups_but_its_tables() -> None:
    module = embedding()
    with pytest.raises(RuntimeError, match="one param group per table"):
        module.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
    assert len(module.optimizer.param_groups) == 1


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_the_optimizer_is_not_copied_without_its_module(duplicate: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="copy or pickle the module"):
        duplicate(embedding().optimizer)


def test_optimizer_of_the_dense_part_leaves_the_table_alone() -> None:
    model = nn.Sequential(embedding(), nn.Linear(1, 1))
    dense = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    model(ID).sum().backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    dense.step()
    after = value(model[0])
    model(ID).sum().backward()
    dense.step()
    assert model[0].grad_anchor.grad is None
    assert model[0].grad_anchor.item() == 0.0
    assert value(model[0]) != after
