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
from group_calls import raises_in_step
from torch import Tensor, nn
from trained_collection import TABLES, collection, train, used

import torch_dynemb as td
from torch_dynemb.ops.columns import BUCKET_WIDTH
from torch_dynemb.optim import OptimizerConfig

pytestmark = pytest.mark.any_device

OPTIMIZERS = [
    td.SGD(lr=0.1),
    td.Adagrad(lr=0.1),
    td.RowWiseAdagrad(lr=0.1),
    td.Adam(lr=0.01),
    td.AdamW(lr=0.01),
]


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
    twin = collection(module.group.config.optimizer, seed=99)
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


def test_a_state_without_its_empty_entries_loads() -> None:
    source, target = used(), collection(seed=5)
    target.load_state_dict(
        {name: tensor for name, tensor in source.state_dict().items() if tensor.numel() > 0}
    )
    assert_equal_states(source, target)
    new = collection()  # also where all entries of rows are empty
    target.load_state_dict(
        {name: tensor for name, tensor in new.state_dict().items() if tensor.numel() > 0}
    )
    assert_equal_states(new, target)


def test_not_strict_leaves_missing_tables_as_they_are() -> None:
    source = nn.ModuleDict({"one": used()})
    target = nn.ModuleDict({"one": collection(), "other": used()})
    sizes = target["other"].sizes()
    state = {**source.state_dict(), "one.more": torch.zeros(1), "further": torch.zeros(1)}
    missing, unexpected = target.load_state_dict(state, strict=False)
    assert missing == ["other.format"]
    assert sorted(unexpected) == ["further", "one.more"]
    assert_equal_states(source["one"], target["one"])
    assert target["other"].sizes() == sizes


def test_models_of_the_helpers_of_safetensors(tmp_path: Path) -> None:
    torch_files = pytest.importorskip("safetensors.torch")
    source = nn.Sequential(
        td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.Adam(lr=0.1)), nn.Linear(4, 2)
    )
    for ids in (torch.empty(1, 0, dtype=torch.int64), torch.arange(6)[None]):
        source(ids).sum().backward()
        source[0].optimizer.step()
        target = nn.Sequential(
            td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.Adam(lr=0.1)), nn.Linear(4, 2)
        )
        torch_files.save_model(source, str(tmp_path / "model"))
        assert torch_files.load_model(target, str(tmp_path / "model")) == (set(), [])
        assert_equal_states(source, target)


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
            4, mode="mean", name="t", padding_idx=0, optimizer=td.Adam(lr=0.1), eval_default="zeros"
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
    assert saved["version"] == 3
    assert saved["tables"] == [
        {"name": n, "embedding_dim": d, "dtype": "float32"} for n, d in TABLES
    ]
    assert saved["optimizer"] == {
        "name": "Adam",
        "state": [["exp_avg", False, "float32"], ["exp_avg_sq", False, "float32"]],
    }


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
            {"ads": td.DynamicEmbeddingBag(4, mode="sum", name="ads", optimizer=td.SGD(lr=0.1))}
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


# -- devices and dtypes ------------------------------------------------------------------------


def test_moves_that_change_nothing() -> None:
    model = nn.Sequential(td.DynamicEmbedding(3, optimizer=td.SGD(lr=0.1)), nn.Linear(3, 1))
    expected = model(torch.arange(4)).detach()
    address = model[0].group.rows.weights[0].data_ptr()
    here = torch.get_default_device()
    moves = [lambda: model.to(here), model.float, lambda: model.to(torch.float32)]
    if here == torch.device("cpu"):
        moves.append(model.cpu)
    for move in moves:
        same = move()
        assert same is model
        assert torch.equal(model(torch.arange(4)), expected)
    assert model[0].group.rows.weights[0].data_ptr() == address


@pytest.mark.parametrize(
    ("move", "error", "message"),
    [
        (lambda module: module.to("meta"), RuntimeError, "device is meta"),
        (lambda module: module.half(), TypeError, r"dtype torch\.float16"),
        (lambda module: module.bfloat16(), TypeError, r"dtype torch\.bfloat16"),
        (lambda module: module.double(), TypeError, r"dtype torch\.float64"),
        (lambda module: module.to(torch.float64), TypeError, r"dtype torch\.float64"),
    ],
    ids=["meta", "half", "bfloat16", "double", "to(float64)"],
)
def test_moves_that_are_refused(move: Callable[[Any], Any], error: Any, message: str) -> None:
    module, twin = used(), used()
    with pytest.raises(error, match=message):
        move(module)
    assert_equal_states(module, twin)
    train(module, range(4, 6))
    train(twin, range(4, 6))
    assert_equal_states(module, twin)


def test_memory_of_the_cpu_is_not_shared() -> None:
    with torch.device("cpu"):  # memory of a GPU is shared as it is
        module, twin = used(), used()
        with pytest.raises(RuntimeError, match="belongs to this process"):
            module.share_memory()
        assert_equal_states(module, twin)


def test_moves_between_devices() -> None:
    with torch.device("cpu"):
        module = used()
        expected = module.state_dict()
    here = torch.get_default_device()
    module.to(here)
    assert module.group.device == here
    module.to("cpu")
    given = module.state_dict()
    assert given.keys() == expected.keys()
    assert all(torch.equal(given[name], expected[name]) for name in given)


@pytest.mark.skipif(torch.cuda.is_available(), reason="moves there, where there is a GPU")
def test_move_to_a_gpu_raises() -> None:
    module = used()
    # without a CUDA build torch itself refuses
    with pytest.raises((RuntimeError, AssertionError), match=r"cuda|CUDA"):
        module.to("cuda")
    assert len(module.group.rows.weights) == 2


# -- loading in place --------------------------------------------------------------------------


def test_loading_keeps_addresses() -> None:
    module, source = collection(seed=7), used()
    train(module, range(2))
    group = module.group
    tensors = [
        group.index.buckets,
        group.index.tables,
        group.index.meta,
        *group.rows.weights,
        *group.rows.state,
        group.rows.hyper,
    ]
    addresses = [tensor.data_ptr() for tensor in tensors]
    module.load_state_dict(source.state_dict())
    train(module, range(4, 6))
    train(source, range(4, 6))
    assert_equal_states(module, source)
    again = [
        group.index.buckets,
        group.index.tables,
        group.index.meta,
        *group.rows.weights,
        *group.rows.state,
        group.rows.hyper,
    ]
    assert [tensor.data_ptr() for tensor in again] == addresses


def test_loading_does_not_touch_hyper_parameters() -> None:
    module = collection(td.Adam(lr=0.5))
    module.load_state_dict(used().state_dict())
    assert [float(group["lr"]) for group in module.optimizer.param_groups] == [0.5] * 3


def test_loading_while_a_backward_is_pending_raises_in_it() -> None:
    module = used()
    output = module({name: torch.arange(3)[None] for name, _ in TABLES})
    train(module, range(4, 5))
    with raises_in_step(module.group, "split"):
        output.sum().backward()
