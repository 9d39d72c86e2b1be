"""Collections: inputs of every kind give what one module per feature gives."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from group_calls import raises_in_step
from seeding import seeded
from torch import Tensor, nn

import torch_dynemb as td

pytestmark = pytest.mark.any_device

BATCH = 4
# two features share a table, dims differ
TABLES = [
    td.TableConfig("user", 3),
    td.TableConfig("ad", 5, ["shown", "clicked"]),
    td.TableConfig("query", 2, initializer=td.Uniform(-1, 1)),
]
NAMES = ["user", "shown", "clicked", "query"]
TABLE_OF = {"user": "user", "shown": "ad", "clicked": "ad", "query": "query"}


def collection(mode: str = "sum", **arguments: Any) -> td.DynamicEmbeddingBagCollection:
    return td.DynamicEmbeddingBagCollection(
        TABLES, mode=mode, **{"optimizer": td.SGD(lr=0.1), **arguments}
    )


def separate(mode: str = "sum") -> dict[str, td.DynamicEmbeddingBag]:
    """A module per table with the same names, hence the same initial values."""
    return {
        table.name: td.DynamicEmbeddingBag(
            table.embedding_dim,
            mode=mode,
            include_last_offset=True,
            name=table.name,
            initializer=table.initializer,
            optimizer=td.SGD(lr=0.1),
        )
        for table in TABLES
    }


@pytest.fixture(autouse=True)
def same_seed() -> None:
    torch.manual_seed(0)


class Jagged:
    """Random bags: ids and offsets by feature name."""

    def __init__(self, names: list[str] = NAMES, batch: int = BATCH, seed: int = 0) -> None:
        generator = seeded(seed)
        self.lengths = {n: torch.randint(0, 4, (batch,), generator=generator) for n in names}
        self.values = {
            n: torch.randint(-5, 6, (int(length.sum()),), generator=generator)
            for n, length in self.lengths.items()
        }
        self.weights = {n: torch.rand(v.shape, generator=generator) for n, v in self.values.items()}

    def offsets(self, name: str) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths[name].cumsum(0)])

    def pairs(self) -> dict[str, tuple[Tensor, Tensor]]:
        return {name: (self.values[name], self.offsets(name)) for name in self.values}

    def keyed(self, names: list[str], *, weighted: bool = False) -> td.KeyedJagged:
        lengths = torch.cat([self.lengths[name] for name in names])
        return td.KeyedJagged(
            names,
            torch.cat([self.values[name] for name in names]),
            torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
            torch.cat([self.weights[name] for name in names]) if weighted else None,
        )


def expected(
    modules: dict[str, td.DynamicEmbeddingBag], jagged: Jagged, *, weighted: bool = False
) -> Tensor:
    return torch.cat(
        [
            modules[TABLE_OF[name]](
                jagged.values[name],
                jagged.offsets(name),
                jagged.weights[name] if weighted else None,
            )
            for name in NAMES
        ],
        dim=1,
    )


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("training", [True, False])
def test_every_kind_of_input(mode: str, training: bool) -> None:
    jagged = Jagged()
    reordered = ["query", "clicked", "user", "shown"]
    more = Jagged([*NAMES, "other"])
    inputs: list[tuple[Any, Jagged]] = [
        (jagged.pairs(), jagged),
        (jagged.keyed(NAMES), jagged),
        (jagged.keyed(reordered), jagged),
        (more.keyed(["other", *reordered]), more),
        (more.pairs(), more),
    ]
    for features, source in inputs:
        tables, modules = collection(mode).train(training), separate(mode)
        for module in modules.values():
            module.train(training)
        output = tables(features)
        assert output.shape == (BATCH, 15)
        assert torch.equal(output, expected(modules, source))
        assert tables.sizes() == {name: len(module) for name, module in modules.items()}
        assert output.requires_grad == training


def test_ids_of_two_dimensions_by_name() -> None:
    ids = {name: torch.arange(8).reshape(4, 2) + i for i, name in enumerate(NAMES)}
    tables, modules = collection(), separate()
    offsets = torch.arange(0, 9, 2)
    parts = [modules[TABLE_OF[name]](ids[name].flatten(), offsets) for name in NAMES]
    assert torch.equal(tables(ids), torch.cat(parts, 1))
    # both forms in one dict, other integers too
    mixed = {**ids, "shown": (ids["shown"].flatten().int(), offsets.int())}
    assert torch.equal(tables(mixed), torch.cat(parts, 1))
    lengths_differ = {**ids, "query": torch.empty(4, 0, dtype=torch.int64)}
    assert torch.equal(tables(lengths_differ)[:, -2:], torch.zeros(4, 2))


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("names", [NAMES, NAMES[::-1]], ids=["in order", "reversed"])
def test_weights_and_their_gradient(mode: str, names: list[str]) -> None:
    jagged = Jagged()
    tables = collection(mode)
    features = jagged.keyed(names, weighted=True)
    weights = features.weights_or_none()
    assert weights is not None
    weights.requires_grad_()
    output = tables(features)
    assert torch.equal(output, expected(separate(mode), jagged, weighted=True))
    upstream = torch.randn(output.shape)
    output.backward(upstream)

    modules, own_weights = separate(mode), jagged.weights
    parts = []
    for name in NAMES:
        own_weights[name].requires_grad_()
        rows = modules[TABLE_OF[name]].eval().group.read(0, jagged.values[name])  # initial values
        for bag in (rows * own_weights[name][:, None]).split(jagged.lengths[name].tolist()):
            parts.append(bag.sum(0))
        if mode == "mean":
            bags = own_weights[name].split(jagged.lengths[name].tolist())
            for b, bag in enumerate(bags):
                parts[b - BATCH] = (
                    parts[b - BATCH] / bag.sum() if len(bag) > 0 else parts[b - BATCH]
                )
    static = torch.cat([torch.stack(parts[f * BATCH :][:BATCH]) for f in range(len(NAMES))], 1)
    torch.testing.assert_close(output, static)
    static.backward(upstream)
    gradients = [own_weights[name].grad for name in names]
    torch.testing.assert_close(weights.grad, torch.cat([g for g in gradients if g is not None]))


def test_features_of_one_table_are_one_update() -> None:
    """Gradients of an id that two features look up are summed before the optimizer sees them."""
    tables = [td.TableConfig("ad", 4, ["shown", "clicked"], initializer=td.Constant(1.0))]
    group = td.DynamicEmbeddingBagCollection(tables, optimizer=td.Adagrad(lr=0.5))
    ids = torch.tensor([[3]])
    output = group({"shown": ids, "clicked": ids})
    assert group.sizes() == {"ad": 1}
    (output * torch.tensor([1.0, 1, 1, 1, 3, 3, 3, 3])).sum().backward()
    static = nn.Parameter(torch.ones(4))
    static.grad = torch.full((4,), 4.0)
    torch.optim.Adagrad([static], lr=0.5).step()
    torch.testing.assert_close(group.group.read(0, ids)[0], static.detach())


def test_training_equals_separate_modules() -> None:
    config = td.Adam(lr=0.1)
    tables = td.DynamicEmbeddingBagCollection(
        [td.TableConfig("a", 3), td.TableConfig("b", 5), td.TableConfig("c", 3)], optimizer=config
    )
    modules = [
        td.DynamicEmbeddingBag(
            dim, mode="sum", name=name, include_last_offset=True, optimizer=config
        )
        for name, dim in (("a", 3), ("b", 5), ("c", 3))
    ]
    for step in range(6):
        jagged = Jagged(["a", "b", "c"], seed=step)
        output = tables(jagged.keyed(["a", "b", "c"]))
        parts = [
            module(jagged.values[name], jagged.offsets(name))
            for name, module in zip("abc", modules, strict=True)
        ]
        assert torch.equal(output, torch.cat(parts, 1))
        output.square().sum().backward()
        torch.cat(parts, 1).square().sum().backward()
        tables.optimizer.step()
        for module in modules:
            module.optimizer.step()
    for t, module in enumerate(modules):
        ids = module.ids().sort().values
        assert torch.equal(tables.group.read(t, ids), module.group.read(0, ids))


def test_split_by_feature() -> None:
    tables = collection()
    output = tables(Jagged().keyed(NAMES))
    parts = tables.split(output)
    assert list(parts) == tables.feature_names == NAMES
    assert [part.shape[1] for part in parts.values()] == tables.feature_dims == [3, 5, 5, 2]
    assert torch.equal(torch.cat(list(parts.values()), 1), output)


def test_empty_batch() -> None:
    tables = collection()
    output = tables(Jagged(batch=0).keyed(NAMES))
    assert output.shape == (0, 15)
    output.sum().backward()
    assert tables({n: torch.empty(0, 3, dtype=torch.int64) for n in NAMES}).shape == (0, 15)
    assert tables(Jagged(batch=0).keyed(NAMES[::-1])).shape == (0, 15)


def test_padding_and_eval_default_are_of_each_table() -> None:
    tables = td.DynamicEmbeddingBagCollection(
        [
            td.TableConfig("a", 2, padding_idx=7, initializer=td.Constant(1.0)),
            td.TableConfig("b", 2, eval_default="zeros", initializer=td.Constant(2.0)),
            td.TableConfig("c", 2, eval_default=torch.tensor([5.0, 6.0])),
        ],
        optimizer=td.SGD(lr=0.1),
    ).eval()
    ids = torch.tensor([[7], [8]])
    output = tables({"a": ids, "b": ids, "c": ids})
    assert output.tolist() == [[0, 0, 0, 0, 5, 6], [1, 1, 0, 0, 5, 6]]


def test_keyed_jagged_of_torchrec() -> None:
    sparse = pytest.importorskip("torchrec.sparse.jagged_tensor")
    jagged = Jagged()
    for names in (NAMES, NAMES[::-1]):
        for weighted in (False, True):
            own = jagged.keyed(names, weighted=weighted)
            theirs = sparse.KeyedJaggedTensor(
                keys=names,
                values=own.values(),
                lengths=own.offsets().diff(),
                weights=own.weights_or_none(),
            )
            assert torch.equal(collection()(theirs), collection()(own))
    varying = sparse.KeyedJaggedTensor(
        keys=["user", "query"],
        values=torch.arange(4),
        lengths=torch.ones(4, dtype=torch.int64),
        stride_per_key_per_rank=[[1], [3]],
    )
    two = td.DynamicEmbeddingBagCollection([TABLES[0], TABLES[2]], optimizer=td.SGD(lr=0.1))
    with pytest.raises(ValueError, match="a batch size per key"):
        two(varying)


# -- one vector per id -------------------------------------------------------------------------


def test_sequence_collection() -> None:
    tables = [td.TableConfig("item", 3, ["history", "candidate"]), td.TableConfig("page", 3)]
    group = td.DynamicEmbeddingCollection(tables, optimizer=td.SGD(lr=0.1))
    item = td.DynamicEmbedding(3, name="item", optimizer=td.SGD(lr=0.1))
    page = td.DynamicEmbedding(3, name="page", optimizer=td.SGD(lr=0.1))
    features = {
        "history": torch.arange(6).reshape(2, 3),
        "candidate": torch.tensor(4, dtype=torch.int32),
        "page": torch.empty(0, dtype=torch.int64),
        "unknown": torch.tensor([1]),
    }
    output = group(features)
    assert list(output) == group.feature_names == ["history", "candidate", "page"]
    assert torch.equal(output["history"], item(features["history"]))
    assert torch.equal(output["candidate"], item(features["candidate"]))
    assert torch.equal(output["page"], page(features["page"]))
    (output["history"].sum() + 2 * output["candidate"].sum()).backward()
    ids = torch.cat([features["history"].flatten(), features["candidate"].reshape(1)])
    (item(ids) * torch.tensor([[1.0]] * 6 + [[2.0]])).sum().backward()
    assert torch.equal(group.group.read(0, torch.arange(6)), item.group.read(0, torch.arange(6)))
    assert group.sizes() == {"item": 6, "page": 0}


def test_rows_of_a_collection_are_changed_in_place_as_those_of_an_embedding() -> None:
    tables = [td.TableConfig("item", 4, ["history", "candidate"], initializer=td.Constant(0.5))]
    dynamic = td.DynamicEmbeddingCollection(tables, optimizer=td.SGD(lr=0.25))
    static = nn.Embedding.from_pretrained(torch.full((4, 4), 0.5), freeze=False)
    ids = {"history": torch.tensor([[1, 2]]), "candidate": torch.tensor([3, 2])}
    for outputs in (dynamic(ids), {name: static(of) for name, of in ids.items()}):
        outputs["history"] += torch.arange(4.0)
        outputs["candidate"].mul_(torch.tensor([-1.0, 1.0, 2.0, 3.0])).relu_()
        outputs["history"].square_()
        torch.cat([of.flatten() for of in outputs.values()]).sum().backward()
    torch.optim.SGD(static.parameters(), lr=0.25).step()
    assert torch.equal(dynamic.group.read(0, torch.arange(1, 4)), static.weight[1:])


# -- errors ------------------------------------------------------------------------------------


def test_missing_features() -> None:
    jagged = Jagged()
    pairs = jagged.pairs()
    del pairs["shown"]
    with pytest.raises(KeyError, match=r"features lacks \['shown'\]"):
        collection()(pairs)
    with pytest.raises(KeyError, match=r"features lacks \['clicked', 'query'\]"):
        collection()(jagged.keyed(["shown", "user"]))
    group = td.DynamicEmbeddingCollection([td.TableConfig("a", 2)], optimizer=td.SGD(lr=0.1))
    with pytest.raises(KeyError, match=r"features lacks \['a'\]"):
        group({"b": torch.arange(3)})


@pytest.mark.parametrize("offsets", [[1, 2, 4], [0, 2, 3], [0, 2, 5]], ids=str)
def test_offsets_must_cover_their_own_feature(offsets: list[int]) -> None:
    """Else the ids of one feature would be looked up as the next one's."""
    tables = collection()
    ids: dict[str, Any] = {name: torch.arange(4).reshape(2, 2) for name in NAMES}
    ids["user"] = (torch.arange(4), torch.tensor(offsets))
    ids["shown"] = (torch.arange(4), torch.tensor([0, 2, 9 - offsets[-1] - offsets[0]]))
    with raises_in_step(tables.group, r"offsets\[\d\].* (is|begins|ends|does not)"):
        tables(ids)
    assert set(tables.sizes().values()) == {0}


def test_keyed_jagged_errors() -> None:
    values, offsets = torch.arange(8), torch.arange(9)
    tables = collection()
    with pytest.raises(ValueError, match="every key once"):
        tables(td.KeyedJagged([*NAMES, "user"], torch.arange(10), torch.arange(11)))
    with pytest.raises(ValueError, match=r"offsets has 8 elements, expected 4 features \* batch"):
        tables(td.KeyedJagged(NAMES, values, offsets[:-1]))
    for dtype in (torch.float32, torch.float64, torch.bool, torch.int8, torch.uint8, torch.int16):
        message = f"features {NAMES}: input has dtype {dtype}, expected int64 or int32 ids"
        with pytest.raises(TypeError, match=re.escape(message)):
            tables(td.KeyedJagged(NAMES, values.to(dtype), offsets))
    with pytest.raises(ValueError, match=r"weights has shape \(7,\)"):
        tables(td.KeyedJagged(NAMES, values, offsets, torch.rand(7)))
    with pytest.raises(TypeError, match=r"weights has dtype torch\.float64"):
        tables(td.KeyedJagged(NAMES, values, offsets, torch.rand(8).double()))
    with raises_in_step(tables.group, "the last offset is 8, expected the number of ids"):
        tables(td.KeyedJagged(NAMES, values[:7], offsets))
    begins = (torch.arange(5), torch.tensor([0, 2]))  # as an nn.EmbeddingBag takes them
    message = r"offsets have (one element per bag and )?that number at the(ir)? end"
    with raises_in_step(tables.group, message):
        tables(dict.fromkeys(NAMES, begins))
    assert set(tables.sizes().values()) == {0}


@pytest.mark.parametrize("offsets", [[0, 0, 1000, 3], [0, 2, 1, 3], [0, 1, 2, 5], [1, 1, 2, 3]])
@pytest.mark.parametrize("keys", ["cab", "cabd"], ids=["all", "one dropped"])
def test_wrong_offsets_of_reordered_features(offsets: list[int], keys: str) -> None:
    """They are found by the lookup; before it, nothing is read or written outside of the ids."""
    tables = [td.TableConfig(name, 4) for name in "abc"]
    collection = td.DynamicEmbeddingBagCollection(tables, optimizer=td.SGD(lr=0.1))
    if len(keys) == 4:
        offsets = [*offsets, offsets[-1]]
    features = td.KeyedJagged(list(keys), torch.tensor([1, 2, 3]), torch.tensor(offsets))
    with raises_in_step(collection.group, "offset"):
        collection(features)
    assert collection.group.sizes() == {"a": 0, "b": 0, "c": 0}


def test_rows_of_keyed_jagged_inputs_are_those_of_nn_embedding() -> None:
    """Also of ids that are not contiguous, of other features, with weights, and of no sample."""
    names, columns = ["history", "item"], torch.arange(11)
    start = {name: torch.randn(11, 4, generator=seeded(k)) for k, name in enumerate(names)}
    reordered = ["item", "other", "history"]
    plain, more = Jagged(names, seed=3), Jagged(reordered, seed=3)
    every_second = plain.keyed(names)
    twice = every_second.values().repeat_interleave(2)
    inputs = [
        (plain, every_second),
        (plain, td.KeyedJagged(names, twice[::2], every_second.offsets())),
        (plain, plain.keyed(names, weighted=True)),
        (more, more.keyed(reordered)),
        (Jagged(names, batch=0), Jagged(names, batch=0).keyed(names)),
    ]
    for given, features in inputs:
        rows = td.DynamicEmbeddingCollection(
            [td.TableConfig(name, 4) for name in names], optimizer=td.SGD(lr=0.5)
        )
        static = {
            name: nn.Embedding.from_pretrained(start[name].clone(), freeze=False) for name in names
        }
        for name in names:
            rows.group.insert_or_assign(name, columns - 5, start[name])
        outputs = rows(features)
        expected = {name: static[name](given.values[name] + 5) for name in names}
        assert list(outputs) == names
        for name in names:
            assert torch.equal(outputs[name], expected[name])
        for of in (outputs, expected):
            torch.stack([of[name].square().sum() for name in names]).sum().backward()
        frozen = td.freeze(rows)(features)
        for name in names:
            weight = static[name].weight
            now = (weight - 0.5 * weight.grad).detach()
            torch.testing.assert_close(rows.group.read(name, columns - 5), now)
            torch.testing.assert_close(frozen[name], now[given.values[name] + 5])
