"""td.replace_embeddings: dynamic tables in the place of static ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torch_dynemb as td

pytestmark = pytest.mark.cpu_only("modules, whatever the device")

ADAM = td.Adam(lr=0.1)


class Towers(nn.Module):
    """A shared table, a bag, and one inside a list."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(50, 4, padding_idx=0)
        self.again = self.items
        self.tags = nn.EmbeddingBag(30, 6, mode="sum", include_last_offset=True)
        self.more = nn.ModuleList([nn.Embedding(20, 4), nn.Linear(4, 4)])
        nn.init.normal_(self.items.weight, 0.5, 0.1)
        nn.init.uniform_(self.tags.weight, -0.2, 0.4)
        nn.init.constant_(self.more[0].weight, 3.0)

    def forward(self, ids: Tensor) -> Tensor:
        tags = self.tags(ids.reshape(-1), torch.arange(0, ids.numel() + 1, ids.shape[1]))
        return (
            tags.sum(1) + (self.items(ids) * self.again(ids)).sum((1, 2)) + self.more[0](ids).sum()
        )


def test_every_table_is_replaced_with_its_settings() -> None:
    torch.manual_seed(0)
    model = Towers()
    model.more[0].weight.requires_grad_(False)
    report = td.replace_embeddings(model, optimizer=ADAM)
    items, tags, more = model.items, model.tags, model.more[0]
    assert isinstance(items, td.DynamicEmbedding)
    assert isinstance(more, td.DynamicEmbedding)
    assert isinstance(tags, td.DynamicEmbeddingBag)
    assert model.again is items
    assert (items.padding_idx, tags.mode, tags.include_last_offset) == (0, "sum", True)
    assert [m.trainable for m in (items, tags, more)] == [True, True, False]
    assert [m.group.names for m in (items, tags, more)] == [["items"], ["tags"], ["more.0"]]
    assert [of.paths for of in report.replaced] == [["items", "again"], ["tags"], ["more.0"]]
    assert [(of.rows, of.taken) for of in report.replaced] == [(50, 0), (30, 0), (20, 0)]
    kinds = [of.initializer for of in report.replaced]
    assert isinstance(kinds[0], td.Normal)
    assert kinds[0].mean == pytest.approx(0.5, abs=0.05)
    assert kinds[0].std == pytest.approx(0.1, abs=0.03)
    assert isinstance(kinds[1], td.Uniform)
    assert (kinds[1].low, kinds[1].high) == pytest.approx((-0.2, 0.4), abs=0.05)
    assert kinds[2] == td.Constant(3.0)
    assert str(report).splitlines()[0].startswith("items, again: dim 4, 50 static rows, 0 taken")
    td.step_with(torch.optim.SGD(model.more[1].parameters(), lr=0.1), model)
    model(torch.tensor([[0, 2**50], [-7, 9]])).sum().backward()
    assert (len(items), len(tags), len(more)) == (3, 4, 0)


def test_rows_are_taken_over() -> None:
    model = Towers()
    ids = torch.tensor([[1, 2, 19], [0, 7, 7]])
    with torch.no_grad():
        model.items.weight[0] = 0  # a dynamic table reads zeros for the padding id
        before = model(ids)
    report = td.replace_embeddings(model, ids="rows", optimizer=td.SGD(lr=0.1), split=True)
    assert [of.taken for of in report.replaced] == [49, 30, 20]
    with torch.no_grad():
        torch.testing.assert_close(model(ids), before)
    assert model.items.group.config.split


@pytest.mark.parametrize(
    "only",
    ["more.*", ["more.0"], lambda path, module: module.embedding_dim == 4 and path[0] == "m"],
)
def test_only_some(only: Any) -> None:
    model, normal = Towers(), td.Normal(0.0, 1.0)
    report = td.replace_embeddings(model, only=only, optimizer=ADAM, initializer=normal)
    assert [of.paths for of in report.replaced] == [["more.0"]]
    assert report.replaced[0].initializer == normal
    assert set(report.left) == {"items", "again", "tags"}
    assert isinstance(model.items, nn.Embedding)


def test_modules_that_share_a_weight_become_one_table() -> None:
    model = nn.ModuleDict({"left": nn.Embedding(5, 2), "right": nn.Embedding(5, 2)})
    model["right"].weight = model["left"].weight
    td.replace_embeddings(model, optimizer=ADAM)
    assert model["left"] is model["right"]


def tied(model: Towers) -> None:
    model.more[1] = nn.Linear(4, 50, bias=False)
    model.more[1].weight = model.items.weight


def hooked(model: Towers) -> None:
    model.tags.register_forward_hook(lambda *_: None)


def with_attribute(path: str, name: str, value: Any) -> Callable[[Towers], None]:
    return lambda model: setattr(model.get_submodule(path), name, value)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (tied, r"items shares its weight with more\.1\.weight, as a tied output layer"),
        (hooked, r"tags is EmbeddingBag with hooks"),
        (with_attribute("more.0", "max_norm", 1.0), r"more\.0 is Embedding with max_norm=1.0"),
        (with_attribute("items", "sparse", True), r"items is Embedding with sparse=True"),
        (
            with_attribute("tags", "scale_grad_by_freq", True),
            r"tags is EmbeddingBag with scale_grad_by_freq=True.*set tags.scale_grad_by_freq to F",
        ),
        (with_attribute("tags", "mode", "max"), r"tags is EmbeddingBag with mode='max'"),
        (
            with_attribute("more", "0", nn.Embedding(5, 4, device="meta")),
            r"more\.0 is Embedding with a weight on the meta device",
        ),
    ],
)
def test_what_would_be_otherwise_is_refused(change: Callable[[Towers], None], says: str) -> None:
    model = Towers()
    change(model)
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=says):
        td.replace_embeddings(model, optimizer=ADAM)
    assert dict(model.named_modules()) == before


def test_shared_weights_of_different_modules_are_refused() -> None:
    model = nn.ModuleDict({"left": nn.Embedding(5, 2), "right": nn.Embedding(5, 2, padding_idx=1)})
    model["right"].weight = model["left"].weight
    with pytest.raises(ValueError, match="right is Embedding and shares its weight with left, but"):
        td.replace_embeddings(model, optimizer=ADAM)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_arguments() -> None:
    class Own(nn.Embedding):
        pass

    with pytest.raises(ValueError, match="Linear has nothing to replace"):
        td.replace_embeddings(nn.Linear(2, 2), optimizer=ADAM)
    with pytest.raises(ValueError, match=r"that only='x' chooses.*'items': 'not among only'"):
        td.replace_embeddings(Towers(), only="x", optimizer=ADAM)
    with pytest.raises(ValueError, match="Own may do more than the class it is made from"):
        td.replace_embeddings(nn.Sequential(Own(3, 2)), optimizer=ADAM)
    quantized = torch.ao.nn.quantized.Embedding(3, 2)
    with pytest.raises(
        ValueError, match=r"nothing to replace.*left: {'0': 'a quantized Embedding'}"
    ):
        td.replace_embeddings(nn.Sequential(quantized), optimizer=ADAM)
    report = td.replace_embeddings(nn.Sequential(quantized, nn.Embedding(3, 2)), optimizer=ADAM)
    assert report.left == {"0": "a quantized Embedding"}
    with pytest.raises(ValueError, match=r"itself.*DynamicEmbedding\.from_embedding"):
        td.replace_embeddings(nn.Embedding(3, 2), optimizer=ADAM)
    with pytest.raises(TypeError, match="model is 3"):
        td.replace_embeddings(3, optimizer=ADAM)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="ids is 'hashed'"):
        td.replace_embeddings(Towers(), ids="hashed", optimizer=ADAM)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="name is 'a', but each table gets its own"):
        td.replace_embeddings(Towers(), name="a", optimizer=ADAM)
    with pytest.raises(TypeError, match="only has 3"):
        td.replace_embeddings(Towers(), only=[3], optimizer=ADAM)  # type: ignore[list-item]
    with pytest.raises(TypeError, match="colour"):
        td.replace_embeddings(Towers(), optimizer=ADAM, colour=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match="optimizer is None"):
        td.replace_embeddings(Towers())


def test_a_parent_with_two_names() -> None:
    tower = nn.Sequential(nn.Embedding(6, 2))
    model = nn.ModuleDict({"one": tower, "two": tower})
    before = tower(torch.arange(6)).detach()
    td.replace_embeddings(model, ids="rows", optimizer=td.SGD(lr=0.1))
    assert model["one"][0] is model["two"][0]
    assert isinstance(model["one"][0], td.DynamicEmbedding)
    assert torch.equal(model["two"](torch.arange(6)), before)
