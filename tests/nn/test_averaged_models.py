"""torch.optim.swa_utils.AveragedModel averages rows by id; other averages of copies are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import _get_current_dispatch_mode

import torch_dynemb as td

pytestmark = pytest.mark.any_device

DIM, IDS = 4, 12


class Both(nn.Module):
    """A table with a capacity, and a static embedding with rows trained in the same way."""

    def __init__(self, policy: td.Policy | None = None) -> None:
        super().__init__()
        weight = torch.arange(IDS * DIM, dtype=torch.float32).reshape(IDS, DIM) / 10
        self.static = nn.Embedding.from_pretrained(weight.clone(), freeze=False)
        options: Any = {"optimizer": td.SGD(lr=0.5), "name": "ads", "policy": policy}
        self.dynamic = td.DynamicEmbedding.from_embedding(weight, **options)
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.dynamic(ids), self.static(ids)

    def train_step(self, ids: Tensor) -> None:
        for rows in self(ids):
            (rows * rows).sum().backward()
        self.dynamic.optimizer.step()
        with torch.no_grad():
            self.static.weight -= 0.5 * self.static.weight.grad
        self.zero_grad()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8)},
        {"avg_fn": swa_utils.get_ema_avg_fn(0.8), "use_buffers": True},
    ],
    ids=["swa", "multi", "ema"],
)
def test_rows_are_averaged_as_those_of_a_static_embedding(options: dict[str, Any]) -> None:
    model = Both()
    average = AveragedModel(model, **options)
    for step in range(4):
        model.train_step(torch.tensor([step, step + 1, step + 1]))
        average.update_parameters(model)
        dynamic, static = average.eval()(torch.arange(IDS))
        torch.testing.assert_close(dynamic, static)
    assert not torch.equal(dynamic, model.eval()(torch.arange(IDS))[0])
    assert int(average.n_averaged) == 4


def test_ids_come_and_go_with_the_model() -> None:
    policy = td.Policy(score="frequency", ttl=100, capacity=2 * IDS)
    model = Both(policy)
    average = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    group, of_average = model.dynamic.group, average.module.dynamic.group
    for step in range(3):
        group.clock.set_now(1000 + 60 * step)
        new = torch.arange(100 * step, 100 * step + 20)
        model.dynamic(new).sum().backward()
        model.dynamic.optimizer.step()
        group.erase(0, torch.tensor([step]))
        average.update_parameters(model)
        ids = model.dynamic.ids().sort().values
        assert torch.equal(average.module.dynamic.ids().sort().values, ids)
        assert of_average.steps == group.steps
        for score in ("frequency", "expiry"):
            one = group.scores.get(0, ids, score=score).scores
            assert torch.equal(of_average.scores.get(0, ids, score=score).scores, one)
    fresh = torch.arange(200, 220)  # new at the last update
    assert torch.equal(average.module.dynamic.eval()(fresh), model.dynamic.eval()(fresh))


def test_tables_of_a_collection_and_an_unnamed_one() -> None:
    tables = [td.TableConfig("user", 2, policy=td.Policy(score="custom")), td.TableConfig("ad", 2)]
    model = nn.ModuleList(
        [
            td.DynamicEmbeddingBagCollection(tables, optimizer=td.Adam(lr=0.1)),
            td.DynamicEmbeddingBag(3, optimizer=td.Adam(lr=0.1), dtype=torch.bfloat16),
        ]
    )
    average = AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.5))
    rows = []
    model[0].group.scores.set_batch(0, 7)
    for step in range(2):
        ids = torch.arange(5 * (step + 1))[None]
        (model[0]({"user": ids, "ad": ids}).sum() + model[1](ids).sum()).backward()
        for optimizer in td.table_optimizers(model):
            optimizer.step()
        average.update_parameters(model)
        rows.append([model[0].group.read(t, torch.arange(5)) for t in range(2)])
    for table in range(2):
        expected = (rows[0][table] + rows[1][table]) / 2
        found = average.module[0].group.read(table, torch.arange(5))
        torch.testing.assert_close(found, expected)
    assert average.module[0].sizes() == model[0].sizes()
    assert len(average.module[1]) == len(model[1]) == 10


def test_a_state_dict_of_an_average_goes_on() -> None:
    model = Both()
    averages = [AveragedModel(model) for _ in range(2)]
    for _ in range(2):
        model.train_step(torch.arange(5))
        averages[0].update_parameters(model)
    averages[1].load_state_dict(averages[0].state_dict())
    model.train_step(torch.arange(5))
    for average in averages:
        average.update_parameters(model)
    results = [average.eval()(torch.arange(IDS))[0] for average in averages]
    assert torch.equal(*results)


def test_update_bn_inserts_nothing() -> None:
    model = nn.Sequential(
        td.DynamicEmbeddingBag(DIM, optimizer=td.SGD(lr=0.1)), nn.BatchNorm1d(DIM)
    )
    average = AveragedModel(model)
    model(torch.arange(6).reshape(3, 2)).sum().backward()
    model[0].optimizer.step()
    average.update_parameters(model)
    swa_utils.update_bn([torch.arange(12).reshape(6, 2)], average)
    assert len(average.module[0]) == 6


def test_other_tables_are_refused_before_a_change() -> None:
    average = AveragedModel(Both())
    other = nn.Sequential(td.DynamicEmbedding(DIM, name="items", optimizer=td.SGD(lr=0.1)))
    with pytest.raises(ValueError, match=r"model has tables .*'items'.*but the average .*'ads'"):
        average.update_parameters(other)
    assert int(average.n_averaged) == 0


def test_modules_of_other_kinds_are_refused() -> None:
    from torch_dynemb.nn.optimized_later import OptimizedLater

    tables = [td.TableConfig("ads", DIM)]
    module = OptimizedLater(
        "ads", tables, trainable=False, device=torch.get_default_device(), max_rows=None, seed=None
    )
    with pytest.raises(TypeError, match="model has a OptimizedLater at '0', and only rows of"):
        AveragedModel(nn.Sequential(module))


def by_hand(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for own, of_model in zip(average.parameters(), model.parameters(), strict=True):
            own.mul_(0.9).add_(of_model, alpha=0.1)


def foreach(average: nn.Module, model: nn.Module) -> None:
    own = [parameter.detach() for parameter in average.parameters()]
    torch._foreach_lerp_(own, [parameter.detach() for parameter in model.parameters()], 0.1)


def test_state_dicts_that_are_averaged_in_place_are_refused() -> None:
    """As timm's EMA does; a state dict that is changed may be loaded."""
    model = Both()
    average = copy.deepcopy(model).eval()
    with torch.no_grad():
        pairs = zip(average.state_dict().values(), model.state_dict().values(), strict=True)
        for own, of_model in pairs:
            own.copy_(0.5 * own + 0.5 * of_model if own.is_floating_point() else of_model)
    for use in (
        lambda: average(torch.arange(3)),
        average.state_dict,
        lambda: copy.deepcopy(average),
    ):
        with pytest.raises(RuntimeError, match=r"\(ads\): values have been written to tensors of"):
            use()
    average.dynamic._follows_parameters()
    rows = average(torch.arange(3))[0]
    state = average.state_dict()
    state["dynamic.dim4.weights"].zero_()
    average.load_state_dict(state)
    assert not average(torch.arange(3))[0].any()
    assert rows.any()
    model.train_step(torch.arange(3))
    del state
    average.state_dict()
    average(torch.arange(3))
    assert not average.dynamic._given_entries


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_means_of_state_dicts_hold_where_ids_have_their_places(dtype: torch.dtype) -> None:
    """A soup of two models of one ancestor is one of parameters; others are refused."""
    first = Both()
    second, other = copy.deepcopy(first), Both()
    order = torch.arange(IDS).flip(0)
    other.dynamic = td.DynamicEmbedding.from_embedding(
        other.static.weight[order], ids=order, optimizer=td.SGD(lr=0.5), name="ads"
    )
    for step, model in enumerate((first, second, other)):
        model.train_step(torch.arange(5 * step + 2))

    def soup(one: Both, two: Both) -> dict[str, Tensor]:
        states = one.state_dict(), two.state_dict()
        return {
            name: (0.3 * of.to(dtype) + 0.7 * states[1][name].to(dtype)).to(of.dtype)
            if of.is_floating_point()
            else of
            for name, of in states[0].items()
        }

    result = copy.deepcopy(first)
    result.load_state_dict(soup(first, second))
    torch.testing.assert_close(*result.eval()(torch.arange(IDS)))
    with pytest.raises(RuntimeError, match=r"'places' is .*AveragedModel"):
        result.load_state_dict(soup(first, other))


@pytest.mark.parametrize("update", [by_hand, foreach])
def test_a_copy_whose_parameters_alone_are_averaged_is_refused(
    update: Callable[[nn.Module, nn.Module], None],
) -> None:
    other_device = torch.get_default_device() != torch.device("cpu")
    if update is foreach and (other_device or _get_current_dispatch_mode() is not None):
        pytest.skip("torch does not count what foreach functions write under a dispatch mode")
    model = Both()
    average = copy.deepcopy(model)
    assert torch.equal(average.eval()(torch.arange(3))[0], model(torch.arange(3))[0])
    update(average, model)
    stale = r"\(ads\): the module is a copy, and values"
    for use in (
        lambda: average(torch.arange(3)),
        average.state_dict,
        lambda: copy.deepcopy(average),
    ):
        with pytest.raises(RuntimeError, match=stale):
            use()
    average.dynamic._follows_parameters()
    average(torch.arange(3))
    trained = copy.deepcopy(model)
    dense = torch.optim.Adam(trained.parameters(), weight_decay=0.1)
    for _ in range(2):
        sum(rows.sum() for rows in trained(torch.arange(3))).backward()
        dense.step()
        trained.dynamic.optimizer.step()


def test_an_average_goes_on_after_a_load_with_other_seeds() -> None:
    def module() -> td.DynamicEmbedding:
        return td.DynamicEmbedding(2, name="t", optimizer=td.SGD(lr=1.0))

    ids = torch.arange(100)
    torch.manual_seed(1)
    saved = module()
    saved.group.insert_or_assign("t", ids, torch.full((100, 2), 3.0))
    torch.manual_seed(2)
    model = module()
    model.group.insert_or_assign("t", ids, torch.full((100, 2), 1.0))
    average = AveragedModel(model)
    average.update_parameters(model)
    model.load_state_dict(saved.state_dict())
    average.update_parameters(model)
    assert average.module.group.size("t") == 100
    assert torch.equal(average.module.group.read("t", ids), torch.full((100, 2), 2.0))
    average.update_parameters(model)
    assert torch.allclose(average.module.group.read("t", ids), torch.full((100, 2), 7 / 3))
