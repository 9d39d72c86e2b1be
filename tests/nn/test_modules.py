"""DynamicEmbedding and DynamicEmbeddingBag against nn.Embedding and nn.EmbeddingBag."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from small_tables import DIM, IDS, ROWS, bag, embedding, positions, rows_of, weight
from torch import Tensor, nn

import torch_dynemb as td

pytestmark = pytest.mark.any_device


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


# -- lookup ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (0,), (1,), (7,), (3, 4), (2, 0, 3), (2, 3, 1, 2)])
@pytest.mark.parametrize("training", [True, False])
def test_embedding_takes_ids_of_any_shape(shape: tuple[int, ...], training: bool) -> None:
    static = nn.Embedding.from_pretrained(weight())
    dynamic = td.DynamicEmbedding.from_embedding(weight(), IDS, optimizer=td.SGD(lr=0.1))
    dynamic.train(training)
    rows = positions(*shape)
    output = dynamic(IDS[rows])
    assert torch.equal(output, static(rows))
    assert output.shape == (*shape, DIM)
    assert output.dtype == torch.float32
    assert output.requires_grad == training


def test_ids_of_32_bits() -> None:
    dynamic = embedding()
    ids = torch.tensor([[5, -7], [2**31 - 1, -(2**31)]], dtype=torch.int32)
    assert torch.equal(dynamic(ids), dynamic(ids.long()))
    assert sorted(dynamic.ids().tolist()) == sorted(ids.flatten().tolist())
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    pooled = bag()
    assert torch.equal(pooled(ids.flatten(), offsets), pooled(ids.flatten().long(), offsets.long()))


def test_ids_that_are_not_contiguous() -> None:
    dynamic = embedding()
    ids = torch.arange(24).reshape(4, 6)
    assert torch.equal(dynamic(ids.t()), dynamic(ids).transpose(0, 1))
    assert torch.equal(dynamic(ids[:, ::2]), dynamic(ids)[:, ::2])


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("shape", [(4, 3), (1, 1), (0, 3), (3, 0), (0, 0)])
def test_bag_of_two_dimensions(mode: str, shape: tuple[int, int]) -> None:
    static = nn.EmbeddingBag.from_pretrained(weight(), mode=mode)
    dynamic = td.DynamicEmbeddingBag.from_embedding(
        weight(), IDS, mode=mode, optimizer=td.SGD(lr=0.1)
    )
    rows = positions(*shape)
    # nn.EmbeddingBag refuses bags of length 0 in two dimensions
    expected = static(rows) if shape[1] > 0 else torch.zeros(shape[0], DIM)
    for training in (True, False):
        torch.testing.assert_close(dynamic.train(training)(IDS[rows]), expected)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("include_last", [True, False])
@pytest.mark.parametrize(
    "starts", [[0, 3, 4], [0], [0, 0, 0, 9], [0, 9, 9], [0, 2, 2, 5, 9]], ids=str
)
def test_bag_with_offsets(mode: str, include_last: bool, starts: list[int]) -> None:
    arguments: dict[str, Any] = {"mode": mode, "include_last_offset": include_last}
    static = nn.EmbeddingBag.from_pretrained(weight(), **arguments)
    dynamic = td.DynamicEmbeddingBag.from_embedding(
        weight(), IDS, optimizer=td.SGD(lr=0.1), **arguments
    )
    rows = positions(9)
    offsets = torch.tensor([*starts, 9] if include_last else starts)
    torch.testing.assert_close(dynamic(IDS[rows], offsets), static(rows, offsets))


def test_empty_input_with_offsets() -> None:
    empty = torch.empty(0, dtype=torch.int64)
    dynamic = bag()
    assert torch.equal(dynamic(empty, torch.tensor([0, 0])), torch.zeros(2, DIM))
    assert dynamic(empty, empty).shape == (0, DIM)
    dynamic(empty, torch.tensor([0])).sum().backward()
    assert len(dynamic) == 0


@pytest.mark.parametrize("training", [True, False])
def test_per_sample_weights_and_their_gradient(training: bool) -> None:
    static = nn.EmbeddingBag.from_pretrained(weight(), mode="sum")
    dynamic = td.DynamicEmbeddingBag.from_embedding(
        weight(), IDS, mode="sum", optimizer=td.SGD(lr=0.1)
    )
    dynamic.train(training)
    rows, upstream = positions(4, 3), torch.randn(4, DIM)
    factors = torch.rand(4, 3)
    gradients = []
    for module, ids in ((static, rows), (dynamic, IDS[rows])):
        given = factors.clone().requires_grad_()
        output = module(ids, per_sample_weights=given)
        torch.testing.assert_close(output, static(rows, per_sample_weights=factors))
        (output * upstream).sum().backward()
        gradients.append(given.grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    if not training:
        assert torch.equal(rows_of(dynamic), weight())


def test_weighted_mean_divides_by_the_sum_of_weights() -> None:
    dynamic = td.DynamicEmbeddingBag.from_embedding(
        weight(), IDS, mode="mean", optimizer=td.SGD(lr=0.1)
    )
    rows, upstream = positions(4, 3), torch.randn(4, DIM)
    factors = torch.rand(4, 3)
    given, expected_given = factors.clone().requires_grad_(), factors.clone().requires_grad_()
    output = dynamic(IDS[rows], per_sample_weights=given)
    expected = (weight()[rows] * expected_given[..., None]).sum(1)
    expected = expected / expected_given.sum(1, keepdim=True)
    torch.testing.assert_close(output, expected)
    (output * upstream).sum().backward()
    (expected * upstream).sum().backward()
    torch.testing.assert_close(given.grad, expected_given.grad)


@pytest.mark.parametrize("padding", [3, -1])
def test_padding_of_an_embedding(padding: int) -> None:
    dynamic = embedding(padding_idx=padding, initializer=td.Constant(2.0))
    ids = torch.tensor([padding, 8, padding, 9])
    output = dynamic(ids)
    assert output[0].tolist() == [0.0] * DIM
    assert output[1].tolist() == [2.0] * DIM
    output.sum().backward()
    dynamic.optimizer.step()
    assert len(dynamic) == 2
    assert padding not in dynamic
    assert dynamic.eval()(ids)[2].tolist() == [0.0] * DIM


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_padding_of_a_bag_is_as_in_torch(mode: str) -> None:
    static = nn.EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=3, _weight=weight())
    dynamic = td.DynamicEmbeddingBag.from_embedding(
        weight(), IDS, mode=mode, padding_idx=int(IDS[3]), optimizer=td.SGD(lr=1.0)
    )
    assert len(dynamic) == ROWS - 1
    rows = torch.tensor([[3, 3, 3], [1, 3, 2], [3, 4, 4], [0, 1, 2]])
    optimizer = torch.optim.SGD(static.parameters(), lr=1.0)
    for _ in range(3):
        outputs = static(rows), dynamic(IDS[rows])
        torch.testing.assert_close(outputs[1], outputs[0])
        optimizer.zero_grad()
        outputs[0].square().sum().backward()
        outputs[1].square().sum().backward()
        optimizer.step()
        dynamic.optimizer.step()


# -- when ids are inserted ---------------------------------------------------------------------


def test_only_training_with_grad_inserts() -> None:
    dynamic = embedding()
    ids = torch.tensor([1, 2, 3])
    initial = dynamic.eval()(ids)
    with torch.no_grad():
        assert torch.equal(dynamic.train()(ids), initial)
    with torch.inference_mode():
        assert torch.equal(dynamic(ids), initial)
    assert torch.equal(dynamic.eval()(ids), initial)
    assert len(dynamic) == 0
    output = dynamic.train()(ids)
    assert torch.equal(output, initial)
    assert output.requires_grad
    assert len(dynamic) == 3
    output.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(dynamic(ids), initial - 0.1)
    assert not dynamic.eval()(ids).requires_grad


@pytest.mark.parametrize("pooled", [False, True])
def test_what_a_missing_id_gives_when_read(pooled: bool) -> None:
    vector = torch.arange(DIM) / 7
    expected: list[tuple[Any, Tensor]] = [
        ("zeros", torch.zeros(DIM)),
        (vector, vector),
        ("initial", torch.full((DIM,), 3.0)),
    ]
    for eval_default, missing in expected:
        module = (bag if pooled else embedding)(
            eval_default=eval_default, initializer=td.Constant(3.0)
        )
        present = module(torch.tensor([[5]])).detach().flatten()
        assert present.tolist() == [3.0] * DIM  # training gives the initial value
        output = module.eval()(torch.tensor([[5], [6]])).reshape(2, DIM)
        torch.testing.assert_close(output, torch.stack([present, missing]))
        assert len(module) == 1


def test_initial_default_depends_on_the_id() -> None:
    dynamic = embedding(initializer=td.Normal(0, 1)).eval()
    first = dynamic(IDS)
    assert torch.unique(first, dim=0).shape == (ROWS, DIM)
    assert torch.equal(dynamic(IDS.flip(0)), first.flip(0))


def test_a_table_that_is_not_trainable_only_reads() -> None:
    dynamic = embedding(trainable=False, optimizer=None)
    output = dynamic(IDS)
    assert not output.requires_grad
    assert len(dynamic) == 0
    with pytest.raises(RuntimeError, match="trainable=False"):
        _ = dynamic.optimizer
    filled = td.DynamicEmbedding.from_embedding(weight(), IDS, trainable=False)
    assert torch.equal(filled(IDS), weight())
    assert len(filled) == ROWS


def test_a_table_whose_anchor_wants_no_grad_only_reads() -> None:
    model = nn.Sequential(embedding(), nn.Linear(DIM, 1))
    model.requires_grad_(False)
    assert not model(IDS).requires_grad
    assert len(model[0]) == 0
    model.requires_grad_(True)
    assert model(IDS).requires_grad
    assert len(model[0]) == ROWS


# -- content -----------------------------------------------------------------------------------


def test_length_membership_and_ids() -> None:
    dynamic = embedding()
    assert len(dynamic) == 0
    assert dynamic  # an empty table is still a module
    assert dynamic.ids().shape == (0,)
    dynamic(IDS[:4])
    dynamic(IDS[2:6])
    assert len(dynamic) == 6
    assert all(int(id) in dynamic for id in IDS[:6])
    assert 12345 not in dynamic
    assert sorted(dynamic.ids().tolist()) == sorted(IDS[:6].tolist())
    assert dynamic.sizes() == {dynamic.table.name: 6}


def test_memory_is_that_of_the_used_part() -> None:
    dynamic = embedding(optimizer=td.Adam(lr=0.1))
    assert dynamic.memory()["rows"] == 0
    dynamic(torch.arange(1000)).sum().backward()
    memory = dynamic.memory()
    assert memory["rows"] == 1000 * (4 * DIM + 4)
    assert memory["state"] == 1000 * 2 * 4 * DIM
    assert 1000 * 16 <= memory["index"] <= 3 * 1000 * 16
    assert memory["total"] == memory["rows"] + memory["state"] + memory["index"]


@pytest.mark.parametrize("kind", [td.DynamicEmbedding, td.DynamicEmbeddingBag])
def test_round_trip_through_a_static_table(kind: Any) -> None:
    dynamic = kind.from_embedding(weight(), IDS, optimizer=td.SGD(lr=0.1))
    static, ids = dynamic.to_embedding()
    assert sorted(ids.tolist()) == sorted(IDS.tolist())
    assert static.weight.requires_grad
    order = torch.stack([(ids == id).nonzero()[0, 0] for id in IDS])
    assert torch.equal(static.weight.detach()[order], weight())
    again = kind.from_embedding(static.weight, ids, optimizer=td.SGD(lr=0.1))
    assert torch.equal(again.group.read(0, IDS), weight())
    # a copy: training one does not change the other
    dynamic(IDS[:, None]).sum().backward()
    assert torch.equal(static.weight.detach()[order], weight())


def test_to_embedding_has_rows_that_no_backward_has_written() -> None:
    dynamic = embedding()
    expected = dynamic(IDS).detach()
    static, ids = dynamic.to_embedding()
    assert torch.equal(static.weight.detach(), dynamic.eval()(ids))
    assert torch.equal(expected, dynamic(IDS))
    empty, no_ids = embedding().to_embedding()
    assert empty.weight.shape == (0, DIM)
    assert no_ids.shape == (0,)


def test_bag_keeps_its_mode_in_to_embedding() -> None:
    dynamic = td.DynamicEmbeddingBag.from_embedding(
        weight(), mode="mean", include_last_offset=True, optimizer=td.SGD(lr=0.1)
    )
    static, ids = dynamic.to_embedding()
    offsets = torch.tensor([0, 2, 5])
    order = torch.stack([(ids == row).nonzero()[0, 0] for row in range(ROWS)])
    rows = positions(5)
    torch.testing.assert_close(static(order[rows], offsets), dynamic(rows, offsets))


def test_ids_of_from_embedding_default_to_row_numbers() -> None:
    dynamic = td.DynamicEmbedding.from_embedding(weight(), optimizer=td.SGD(lr=0.1))
    assert torch.equal(dynamic(torch.arange(ROWS)), weight())


def two_unnamed_tables() -> nn.Module:
    """In nested modules, and one that trains otherwise than the other."""
    pair = nn.ModuleList([embedding(), bag()])
    return nn.ModuleDict({"pair": pair, "named": embedding(name="users")})


def test_unnamed_tables_of_a_second_instance_have_the_same_initial_rows() -> None:
    def initial() -> list[Tensor]:
        torch.manual_seed(3)
        model = two_unnamed_tables()
        first, second = model["pair"]
        return [first(IDS).detach(), second(IDS[:, None]).detach(), model["named"](IDS).detach()]

    rows = initial()
    assert all(map(torch.equal, rows, initial()))
    for one, other in itertools.combinations(rows, 2):
        assert not torch.equal(one, other)
    torch.manual_seed(3)
    first = embedding()
    assert not torch.equal(first(IDS), embedding()(IDS))  # no more than two nn.Embedding have


def test_a_second_instance_loads_the_state_of_unnamed_tables() -> None:
    first = two_unnamed_tables()
    for place, module in enumerate(first["pair"]):
        module(IDS[: 2 + place].reshape(-1, 1)).sum().backward()
        module.optimizer.step()
    second = two_unnamed_tables()
    second.load_state_dict(first.state_dict())
    assert [len(module) for module in second["pair"]] == [2, 3]
    for one, other in zip(first["pair"], second["pair"], strict=True):
        other.optimizer.load_state_dict(one.optimizer.state_dict())
        ids = torch.arange(2 * ROWS).reshape(-1, 1)  # new ones start equal, too
        assert torch.equal(one(ids), other(ids))
    wider = nn.ModuleDict({**two_unnamed_tables(), "more": embedding()})
    with pytest.raises(RuntimeError, match=r'Missing key.*"more.format"'):
        wider.load_state_dict(first.state_dict())
    missing, unexpected = wider.load_state_dict(first.state_dict(), strict=False)
    assert missing == ["more.format"]
    assert unexpected == []


def test_initial_values_depend_on_seed_and_name_only() -> None:
    def initial(seed: int, name: str) -> Tensor:
        torch.manual_seed(seed)
        torch.rand(seed)  # how far the generator has come does not matter
        module = embedding(name=name)
        module(IDS.flip(0))  # nor does the order of arrival
        return module(IDS).detach()

    assert torch.equal(initial(1, "a"), initial(1, "a"))
    for one, other in itertools.combinations([(1, "a"), (2, "a"), (1, "b")], 2):
        assert not torch.equal(initial(*one), initial(*other))


def test_autocast_leaves_rows_in_float32() -> None:
    model = nn.Sequential(bag(), nn.Linear(DIM, 2))
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        output = model(IDS.reshape(3, 4))
        assert output.dtype == torch.bfloat16
        output.float().sum().backward()
    assert len(model[0]) == ROWS
