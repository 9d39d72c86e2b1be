"""DynamicEmbedding, EmbeddingEngine and HashTable against their definitions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lookups import bags, combined, embedding, hash_table, option, rows_of

import torch_dynemb as td
from torch_dynemb.recis import (
    AdmitHook,
    DynamicEmbedding,
    EmbeddingEngine,
    EmbeddingOption,
    RaggedTensor,
    SparseAdam,
    filter_out_sparse_param,
)
from torch_dynemb.recis.embedding import joint_lookup

pytestmark = pytest.mark.any_device

CLICKS = RaggedTensor(torch.tensor([5, 6, 5, 7, -1]), torch.tensor([0, 3, 3, 5]))
WEIGHTS = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.25])
TILE = {"combiner": "tile", "combiner_kwargs": {"tile_len": 2}}


@pytest.mark.parametrize("combiner", ["sum", "mean", "tile"])
@pytest.mark.parametrize("weighted", [False, True])
def test_ragged_ids(combiner: str, weighted: bool) -> None:
    module = embedding(**(TILE if combiner == "tile" else {"combiner": combiner}))
    clicks = CLICKS.with_weight(WEIGHTS) if weighted else CLICKS
    output = module(clicks)
    rows = rows_of(module.hashtable, CLICKS.values())
    weights = bags(CLICKS, WEIGHTS) if weighted else None
    expected = combined(bags(CLICKS, rows), weights, combiner, tile_len=2)
    assert output.shape == (3, 8 if combiner == "tile" else 4)
    torch.testing.assert_close(output.detach(), expected)


@settings(max_examples=25)
@given(
    st.lists(st.integers(1, 3), min_size=0, max_size=3),
    st.integers(1, 3),
    st.sampled_from(["sum", "mean", "tile"]),
    st.booleans(),
)
def test_dense_and_ragged_agree(
    leading: list[int], length: int, combiner: str, weighted: bool
) -> None:
    torch.manual_seed(0)
    module = embedding(**(TILE if combiner == "tile" else {"combiner": combiner}))
    ids = torch.randint(-9, 9, (*leading, length))
    weights = torch.rand(ids.shape) if weighted else None
    dense = module(ids, weights)
    assert dense.shape == (*leading, 8 if combiner == "tile" else 4)
    offsets = [torch.tensor([0, length])]
    bag_count = 1
    if leading:
        offsets, rows = [], leading[0]
        for size in (*leading[1:], length):
            offsets.append(torch.arange(rows + 1) * size)
            rows *= size
        bag_count = ids.numel() // length
    ragged = RaggedTensor(ids.flatten(), offsets, None if weights is None else weights.flatten())
    assert offsets[-1].shape[0] - 1 == bag_count
    assert torch.equal(module(ragged).reshape(dense.shape), dense)


def test_ragged_of_three_dimensions_is_dense_with_gaps() -> None:
    module = embedding()
    deep = RaggedTensor(
        torch.tensor([1, 2, 3, 4]), [torch.tensor([0, 2, 2, 3]), torch.tensor([0, 2, 2, 4])]
    )
    output = module(deep).detach()
    rows = rows_of(module.hashtable, [1, 2, 3, 4])
    assert output.shape == (3, 2, 4)
    torch.testing.assert_close(output[0, 0], rows[0] + rows[1])
    torch.testing.assert_close(output[2, 0], rows[2] + rows[3])
    assert not output[0, 1].any()
    assert not output[1].any()
    assert not output[2, 1].any()


def test_int32_ids_and_offsets() -> None:
    module = embedding()
    narrow = RaggedTensor(
        CLICKS.values().to(torch.int32), [o.to(torch.int32) for o in CLICKS.offsets()]
    )
    assert torch.equal(module(CLICKS), module(narrow))
    assert torch.equal(module(torch.tensor([[1]], dtype=torch.int32)), module(torch.tensor([[1]])))


def test_weights_get_gradients_and_may_be_left_out() -> None:
    module = embedding(combiner="mean")
    weights = WEIGHTS.clone().requires_grad_()
    module(CLICKS.with_weight(weights)).sum().backward()
    assert weights.grad is not None
    rows = rows_of(module.hashtable, CLICKS.values())
    reference = WEIGHTS.clone().requires_grad_()
    combined(bags(CLICKS, rows), bags(CLICKS, reference), "mean").sum().backward()
    assert reference.grad is not None
    torch.testing.assert_close(weights.grad, reference.grad)
    unweighted = embedding(combiner="mean", use_weight=False)
    assert torch.equal(unweighted(CLICKS.with_weight(WEIGHTS)), unweighted(CLICKS))


def test_the_mean_has_one_definition() -> None:
    """Whatever the average length: sum(w e) / sum(w)."""
    module = embedding(combiner="mean")
    for length in (1, 3, 100):
        ids = torch.arange(length)[None]
        weights = torch.rand(1, length)
        rows = rows_of(module.hashtable, ids) if module(ids) is not None else None
        assert rows is not None
        expected = (rows * weights[0, :, None]).sum(0) / weights.sum()
        torch.testing.assert_close(module(ids, weights)[0].detach(), expected)


WRONG: list[tuple[dict[str, Any], tuple[Any, ...], type[Exception], str]] = [
    ({}, (torch.tensor([[1.0]]),), TypeError, "dtype torch.float32, expected int64 or int32"),
    ({}, (torch.tensor(1),), ValueError, r"shape \(\)"),
    ({}, ([1, 2],), TypeError, "is a list, expected a Tensor or a RaggedTensor"),
    ({}, (torch.tensor([[1]]).to_sparse(),), ValueError, "layout torch.sparse_coo"),
    ({}, (torch.tensor([[1, 2]]), torch.ones(1)), ValueError, r"weights has shape \(1,\)"),
    ({}, (CLICKS, torch.ones(3)), ValueError, r"weights has shape \(3,\)"),
    ({}, (CLICKS.with_weight(WEIGHTS), WEIGHTS), ValueError, "has weights, but others are given"),
    ({}, (torch.tensor([[1]]), torch.ones(1, 1, device="meta")), RuntimeError, "device is meta"),
    (
        {"use_weight": False},
        (torch.tensor([[1, 2]]), torch.ones(1)),
        ValueError,
        r"weights has shape \(1,\)",
    ),
]


@pytest.mark.parametrize(("changes", "arguments", "error", "message"), WRONG)
def test_wrong_inputs_are_refused(
    changes: dict[str, Any], arguments: tuple[Any, ...], error: type[Exception], message: str
) -> None:
    module = embedding(**changes)
    with pytest.raises(error, match=message):
        module(*arguments)
    assert module.hashtable.ids().numel() == 0


# -- reading ---------------------------------------------------------------------------------------


def test_evaluation_reads_and_gives_zeros_for_the_unknown() -> None:
    module = embedding()
    known = module(torch.tensor([[1, 2]])).detach()
    module.eval()
    assert torch.equal(
        module(torch.tensor([[1, 2], [3, 4]])), torch.stack([known[0], 0 * known[0]])
    )
    module.train()
    with torch.no_grad():
        assert not module(torch.tensor([[9]])).any()
    assert module.hashtable.ids().tolist() == [1, 2]


def test_frozen_features_have_no_history() -> None:
    engine = EmbeddingEngine(
        {
            "seen": option(),
            "frozen": option(trainable=False),
            "read": option(admit_hook=AdmitHook("ReadOnly")),
        }
    )
    assert len(engine.tables) == 1
    ids = {name: torch.tensor([[n]]) for n, name in enumerate(("seen", "frozen", "read"))}
    output = engine(ids)
    assert output["seen"].any()
    assert not output["frozen"].any()
    assert not output["read"].any()
    assert not output["frozen"].requires_grad
    (table,) = filter_out_sparse_param(engine).values()
    assert table.ids("item").tolist() == [0]
    ids = dict.fromkeys(ids, torch.tensor([[0]]))
    sum(out.sum() for out in engine(ids).values()).backward()  # type: ignore[union-attr]
    assert table.grad("item").gradients.tolist() == [[2.0] * 4]  # seen and read, not frozen


def test_a_module_that_is_not_trainable() -> None:
    module = embedding(trainable=False)
    module.hashtable.insert(torch.tensor([3]), torch.ones(1, 4))
    output = module(torch.tensor([[3, 4]]))
    assert output.tolist() == [[1.0] * 4]
    assert not output.requires_grad
    with pytest.raises(ValueError, match="expected a trainable table"):
        SparseAdam(filter_out_sparse_param(module))


@pytest.mark.parametrize("combiner", ["sum", "mean", "tile"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_dtypes(combiner: str, dtype: torch.dtype) -> None:
    kinds = TILE if combiner == "tile" else {"combiner": combiner}
    module = embedding(dtype=dtype, **kinds)
    output = module(CLICKS)
    assert output.dtype == torch.float32
    rows = rows_of(module.hashtable, CLICKS.values())
    expected = combined(bags(CLICKS, rows), None, combiner, 2)
    # rows are not rounded until they are written
    torch.testing.assert_close(output.detach(), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("combiner", ["sum", "mean", "tile"])
@pytest.mark.parametrize("fp16", [False, True])
def test_rows_of_8_bits_have_a_scale(combiner: str, fp16: bool) -> None:
    kinds = TILE if combiner == "tile" else {"combiner": combiner}
    module = embedding(dtype=torch.int8, fp16_enabled=fp16, embedding_dim=6, **kinds)
    ids = torch.tensor([5, 6, 7, -1])
    rows = torch.randn(4, 6) * torch.tensor([1e-3, 1.0, 100.0, 0.0])[:, None]
    module.hashtable.insert(ids, rows)
    scale = rows.abs().amax(1, keepdim=True) / 127
    stored = module.hashtable.embeddings()[torch.argsort(torch.argsort(ids))]
    assert ((stored - rows).abs() <= scale / 2 + 1e-9).all()
    known = dict(zip(ids.tolist(), stored, strict=True))
    looked_up = torch.stack([known[i] for i in CLICKS.values().tolist()])
    output = module(CLICKS)
    expected = combined(bags(CLICKS, looked_up), None, combiner, 2)
    assert output.dtype == (torch.float16 if fp16 else torch.float32)
    torch.testing.assert_close(output, expected.to(output.dtype))
    assert not output.requires_grad
    assert not module(torch.tensor([[99]])).any()


# -- several tables --------------------------------------------------------------------------------


def features() -> dict[str, EmbeddingOption]:
    return {
        "clicked": option(combiner="mean"),
        "candidate": option(),
        "user": option("user"),
        "wide": option("wide", embedding_dim=8),
        "history": option(**TILE),
    }


def batch() -> dict[str, Any]:
    return {
        "clicked": CLICKS.with_weight(WEIGHTS),
        "candidate": torch.tensor([[5], [8], [9]]),
        "user": torch.tensor([[[5, 1], [2, 3]], [[4, 4], [5, 5]], [[6, 6], [7, 7]]]),
        "wide": CLICKS,
        "history": CLICKS,
        "label": torch.ones(3),
    }


def test_an_engine_gives_what_single_embeddings_give() -> None:
    torch.manual_seed(0)
    engine = EmbeddingEngine(features())
    assert len(engine.tables) == 2
    data = batch()
    output = engine(data)
    assert output["label"] is data["label"]
    assert sorted(output) == sorted(data)
    for name, chosen in features().items():
        alone = DynamicEmbedding(chosen)
        assert torch.equal(output[name], alone(data[name])), name


def test_an_engine_trains_as_single_embeddings_do() -> None:
    torch.manual_seed(0)
    engine = EmbeddingEngine(features())
    by_table = {
        name: option(name, embedding_dim=8 if name == "wide" else 4)
        for name in ("item", "user", "wide")
    }
    tables = {name: DynamicEmbedding(chosen).hashtable for name, chosen in by_table.items()}
    alone = {name: DynamicEmbedding(chosen) for name, chosen in features().items()}
    for name, module in alone.items():
        module.hashtable = tables[features()[name].shared_name]
    together = SparseAdam(filter_out_sparse_param(engine), lr=0.1)
    apart = SparseAdam(tables, lr=0.1)
    for _ in range(3):
        data = batch()
        output = engine(data)
        # in place, as results of one embedding may be changed
        sum(output[name].square_().sum() for name in alone).backward()  # type: ignore[union-attr]
        sum(alone[name](data[name]).square().sum() for name in alone).backward()  # type: ignore[union-attr]
        together.step()
        apart.step()
    for name, table in tables.items():
        (owner,) = (
            t for t in filter_out_sparse_param(engine).values() if name in t.children_hashtable
        )
        assert torch.equal(owner.ids(name), table.ids())
        torch.testing.assert_close(owner.embeddings(name), table.embeddings())


def test_children_keep_all_64_bits() -> None:
    children = ["a", "b", "c"]
    module = embedding("abc", children=children, coalesced=True)
    high = torch.tensor([[1, 1 + 2**52, 1 + 2**60, -1, -(2**63), 2**63 - 1]])
    output = module(dict.fromkeys(children, high))
    assert sorted(output) == children
    for child in children:
        assert module.hashtable.ids(child).tolist() == sorted(high[0].tolist())
        rows = module.hashtable.embeddings(child)
        assert torch.unique(rows, dim=0).shape[0] == 6
    assert not torch.equal(output["a"], output["b"])
    assert module.hashtable.children_info().is_coalesce
    assert not embedding().hashtable.children_info().is_coalesce
    with pytest.raises(TypeError, match="expected a dict of ids by child"):
        module(high)
    with pytest.raises(KeyError, match="expected the children"):
        module({"a": high})
    with pytest.raises(ValueError, match="input_weights is given with several children"):
        module(dict.fromkeys(children, high), torch.ones(1, 6))


def test_exchange_and_lookup_may_be_apart() -> None:
    torch.manual_seed(0)
    engine, other = EmbeddingEngine(features()), EmbeddingEngine(features())
    data = batch()
    prepared = engine.exchange_ids(data)
    output, expected = engine(prepared), other(data)
    for name in features():
        assert torch.equal(output[name], expected[name])
    module = embedding()
    prepared = module.exchange_ids(torch.tensor([[1, 2]]), torch.tensor([[0.5, 2.0]]))
    with pytest.raises(ValueError, match="input_weights is given with a result of exchange_ids"):
        module(prepared, torch.ones(1, 2))
    assert module(prepared).shape == (1, 4)


# -- compile, copies -------------------------------------------------------------------------------


@pytest.mark.long_cases("engine")
@pytest.mark.traced
@pytest.mark.parametrize("kind", ["engine", "embedding"])
def test_compiled_steps_are_eager_ones(kind: str) -> None:
    def make() -> torch.nn.Module:
        torch.manual_seed(0)
        return EmbeddingEngine(features()) if kind == "engine" else embedding(combiner="mean")

    names = list(features())

    def step(module: torch.nn.Module, data: dict[str, Any]) -> torch.Tensor:
        if kind == "engine":
            outputs = module(data)
            return sum(outputs[name].square().sum() for name in names)  # type: ignore[return-value]
        return module(data["clicked"]).square().sum()  # type: ignore[no-any-return]

    eager, compiled = make(), make()
    optimizers = [SparseAdam(filter_out_sparse_param(m), lr=0.1) for m in (eager, compiled)]
    run = torch.compile(step, fullgraph=True)
    for _ in range(2):
        losses = [step(eager, batch()), run(compiled, batch())]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
        torch.testing.assert_close(losses[0], losses[1])
    for one, other in zip(
        filter_out_sparse_param(eager).values(),
        filter_out_sparse_param(compiled).values(),
        strict=True,
    ):
        for child in one.children_hashtable:
            torch.testing.assert_close(one.embeddings(child), other.embeddings(child))


def test_copies_are_equal_and_apart() -> None:
    engine = EmbeddingEngine(features())
    optimizer = SparseAdam(filter_out_sparse_param(engine), lr=0.1)
    engine(batch())["clicked"].sum().backward()
    optimizer.step()
    for twin in (copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        assert torch.equal(twin(batch())["history"], engine(batch())["history"])
        twin(batch())["history"].sum().backward()
        for table in filter_out_sparse_param(twin).values():
            table.optimizer.step()
    twin_out, own = twin(batch())["history"], engine(batch())["history"]
    assert not torch.equal(twin_out, own)
    assert isinstance(filter_out_sparse_param(twin), dict)


def test_block_size_is_room_in_the_index() -> None:
    small, large = (hash_table([4], block_size=n) for n in (5, 10_000))
    before = large.group.index.tables.clone()
    large.insert(torch.arange(10_000), torch.zeros(10_000, 4))
    assert torch.equal(large.group.index.tables[:, 0], before[:, 0])  # the number of buckets
    small.insert(torch.arange(10_000), torch.zeros(10_000, 4))
    assert td.TableGroup.size(small.group, 0) == 10_000


def test_many_ids_are_looked_up_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU; the result is that of one call."""

    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        engine = EmbeddingEngine(features())
        optimizer = SparseAdam(filter_out_sparse_param(engine), lr=0.1)
        outputs = []
        for _ in range(2):
            output = engine(batch())
            outputs += [output[name].detach() for name in features()]
            torch.stack([output[name].square().sum() for name in features()]).sum().backward()
            optimizer.step()
        return outputs

    whole = trained()
    monkeypatch.setattr(joint_lookup, "_IDS_OF_CALL", 4)
    assert all(torch.equal(a, b) for a, b in zip(whole, trained(), strict=True))


@pytest.mark.parametrize("order", ["ab", "aba", "ba"])
def test_many_gradients_of_several_children_wait(order: str) -> None:
    torch.manual_seed(0)
    together = hash_table([2], children=["a", "b"], coalesced=True, initializer=td.Normal())
    apart = {c: hash_table([2], name=c, initializer=td.Normal()) for c in "ab"}
    for optimized in ({"t": together}, apart):
        optimizer = SparseAdam(optimized, lr=0.1)
        for child in order:
            ids = torch.arange(40_000) * 7 % 50_000
            rows = together(ids, child=child) if optimized is not apart else apart[child](ids)
            rows.square().sum().backward()
        optimizer.step()
    for child, table in apart.items():
        assert torch.equal(table.embeddings(), together.embeddings(child))
