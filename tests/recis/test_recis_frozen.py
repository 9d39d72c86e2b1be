"""td.freeze of RecIS's modules: what the live ones give in eval mode, exported and converted."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from lookups import embedding, hash_table, option
from torch import Tensor, nn
from torch.ao.quantization import PlaceholderObserver, QConfig
from torch.export import Dim

import torch_dynemb as td
from torch_dynemb.recis import (
    AdmitHook,
    DynamicEmbedding,
    EmbeddingEngine,
    EmbeddingOption,
    FilterHook,
    FrozenDynamicEmbedding,
    FrozenEmbeddingEngine,
    FrozenHashTable,
    RaggedTensor,
    SparseAdam,
    filter_out_sparse_param,
)

pytestmark = pytest.mark.any_device

TILE = {"combiner": "tile", "combiner_kwargs": {"tile_len": 3}}


def options() -> dict[str, EmbeddingOption]:
    """Features of all kinds: merged tables and lookups, combiners, hooks, rows of 8 bits."""
    return {
        "clicked": option(combiner="mean"),
        "candidate": option(),
        "unweighted": option(use_weight=False),
        "history": option(**TILE),
        "user": option("user"),
        "wide": option("wide", embedding_dim=8),
        "counted": option("counted", admit_hook=AdmitHook("Frequency", {"threshold": 2})),
        "read": option("counted", admit_hook=AdmitHook("ReadOnly")),
        "filtered": option(
            "filtered", filter_hook=FilterHook("GlobalStepFilter", {"filter_step": 1})
        ),
        "fixed": option("fixed", trainable=False),
        "content": option("content", dtype=torch.int8, fp16_enabled=True),
    }


def ragged(seed: int, samples: int = 4, ids: int = 9, weighted: bool = False) -> RaggedTensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    lengths = torch.randint(0, 5, (samples,), generator=generator, device="cpu")
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    count = int(offsets[-1])
    values = torch.randint(-ids, ids, (count,), generator=generator, device="cpu")
    weights = torch.rand(count, generator=generator, device="cpu") if weighted else None
    device = torch.get_default_device()
    return RaggedTensor(
        values.to(device), offsets.to(device), None if weights is None else weights.to(device)
    )


def batch(seed: int, samples: int = 4, ids: int = 9) -> dict[str, Any]:
    """Ids of all features."""
    generator = torch.Generator("cpu").manual_seed(seed)
    device = torch.get_default_device()
    users = torch.randint(0, ids, (samples, 2, 3), generator=generator, device="cpu").to(device)
    given: dict[str, Any] = {
        name: ragged(seed + n, samples, ids, weighted=name in ("clicked", "history", "unweighted"))
        for n, name in enumerate(options())
    }
    return given | {"user": users, "candidate": users[:, 0, :1].clone()}


def trained_engine() -> EmbeddingEngine:
    torch.manual_seed(0)
    engine = EmbeddingEngine(options())
    tables = filter_out_sparse_param(engine)
    (content,) = (table for table in tables.values() if table.packed)
    generator = torch.Generator("cpu").manual_seed(1)
    rows = torch.randn(12, 4, generator=generator, device="cpu").to(content.group.device)
    content.insert(torch.arange(-6, 6), rows)
    optimizer = SparseAdam(tables, lr=0.1)
    for step in range(3):
        outputs = engine(batch(10 * step))
        losses = [of.float().square().sum() for of in outputs.values() if of.requires_grad]
        torch.stack(losses).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine


def assert_same(given: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(given) == list(expected)
    for name, of in expected.items():
        assert given[name].dtype == of.dtype
        assert torch.equal(given[name], of), name
        assert not given[name].requires_grad


def test_frozen_engines_give_what_live_ones_do() -> None:
    engine = trained_engine()
    frozen = td.freeze(engine)
    assert isinstance(frozen, FrozenEmbeddingEngine)
    assert engine.training
    engine.eval()
    for data in (
        batch(3),
        batch(4, samples=0),
        batch(5, ids=90),
        {**batch(6), "label": torch.ones(4)},
    ):
        assert_same(frozen(data), engine(data))
    before = {name: tensor.clone() for name, tensor in frozen.state_dict().items()}
    frozen.train()
    frozen(batch(7, ids=90))
    assert all(torch.equal(of, before[name]) for name, of in frozen.state_dict().items())
    with pytest.raises(KeyError, match=r"input_features lacks \['clicked'\]"):
        frozen({name: of for name, of in batch(3).items() if name != "clicked"})


@pytest.mark.parametrize("kind", ["sum", "mean", "tile"])
def test_frozen_embeddings(kind: str) -> None:
    live = embedding(**(TILE if kind == "tile" else {"combiner": kind}))
    ids, weights = ragged(1), ragged(2, weighted=True)
    live(ids)
    frozen = td.freeze(nn.Sequential(live))[0]
    assert isinstance(frozen, FrozenDynamicEmbedding)
    live.eval()
    deep = RaggedTensor(
        torch.tensor([1, 2, 3, 4]), [torch.tensor([0, 2, 2, 3]), torch.tensor([0, 2, 2, 4])]
    )
    dense = torch.arange(6).reshape(2, 3)
    for given in (ids, weights, deep, dense, dense[:0]):
        assert torch.equal(frozen(given), live(given))
    of_ids = torch.rand(2, 3, requires_grad=True)
    output = frozen(dense, of_ids)
    assert torch.equal(output, live(dense, of_ids))
    rows = frozen.hashtable(dense) * of_ids[..., None]
    plain = rows.flatten(1) if kind == "tile" else rows.sum(1)
    if kind == "mean":
        plain = plain / of_ids.sum(1, keepdim=True)
    factors = torch.rand(output.shape)
    given, right = (torch.autograd.grad((of * factors).sum(), of_ids)[0] for of in (output, plain))
    torch.testing.assert_close(given, right)


def test_frozen_embeddings_of_several_children() -> None:
    live = DynamicEmbedding(option(children=["a", "b"], coalesced=True))
    data = {"a": ragged(1), "b": ragged(2)}
    live(data)
    frozen = td.freeze(live)
    assert_same(frozen(data), {name: of.detach() for name, of in live.eval()(data).items()})
    with pytest.raises(KeyError, match="expected the children"):
        frozen({"a": ragged(1)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_frozen_hash_tables(dtype: torch.dtype) -> None:
    live = hash_table([4], dtype=dtype, coalesced=True, children=["a", "b"])
    ids = torch.arange(6).reshape(2, 3)
    for child, factor in (("a", 1.0), ("b", -2.0)):
        live.insert(ids, factor * torch.arange(24.0).reshape(6, 4), child)
    frozen = td.freeze(live)
    live.eval()
    for child in ("a", "b"):
        for given in (ids, ids + 4, ids[:0]):
            assert torch.equal(frozen(given, child=child), live(given, child=child))
    for child in (None, "c"):
        with pytest.raises(ValueError, match=r"child is .*, expected one of \['a', 'b'\]"):
            frozen(ids, child=child)
    assert frozen.sizes() == {"a": 6, "b": 6}


@pytest.mark.parametrize(("rows", "near"), [("int8", 0.05), ("int4", 0.8), ("bf16", 0.05)])
def test_rows_in_another_form(rows: Any, near: float) -> None:
    live = hash_table([4], dtype=torch.float32)
    ids = torch.arange(6)
    live.insert(ids, torch.arange(24.0).reshape(6, 4) - 12)
    frozen = td.freeze(live, rows=rows)
    torch.testing.assert_close(frozen(ids), live.eval()(ids), rtol=0, atol=near)
    assert frozen.frozen_tables.get_buffer("weights0").dtype != torch.float32
    unknown = torch.arange(20, 30)
    expected = live(unknown).bfloat16().float() if rows == "bf16" else live(unknown)
    assert torch.equal(frozen(unknown), expected)


def test_rows_of_int8_are_not_quantized_again() -> None:
    live = hash_table([4], dtype=torch.int8, name="packed")
    live.insert(torch.arange(3), torch.ones(3, 4))
    with pytest.raises(ValueError, match=r"rows of \['packed'\] are int8 already: freeze wi"):
        td.freeze(live, rows="int4")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
def test_rows_in_the_form_of_a_qconfig() -> None:
    live: Any = hash_table([4], dtype=torch.float32)
    live.insert(torch.arange(6), torch.arange(24.0).reshape(6, 4) - 12)
    observers = [PlaceholderObserver.with_args(dtype=of) for of in (torch.float16, torch.int8)]
    live.qconfig = QConfig(*observers)
    made = FrozenHashTable.from_float(live)
    ids = torch.arange(20)
    assert torch.equal(made(ids), td.freeze(live, rows="int8")(ids).half())


def test_engines_with_rows_of_8_bits() -> None:
    kept = {name: of for name, of in options().items() if name != "content"}
    engine = EmbeddingEngine(kept)
    data = {name: of for name, of in batch(3).items() if name in kept}
    engine(data)
    expected = engine.eval()(data)
    for name, of in td.freeze(engine, rows="int8")(data).items():
        torch.testing.assert_close(of, expected[name].detach(), rtol=0.02, atol=0.02)


def test_converted_engines() -> None:
    engine = trained_engine()
    frozen = td.freeze(engine)
    data = batch(3)
    expected = engine.eval()(data)
    assert frozen.to(torch.bfloat16) is frozen
    for name, of in frozen(data).items():
        assert torch.equal(of, expected[name].to(torch.bfloat16))
    assert {of.dtype for of in frozen.float()(data).values()} == {torch.float32}


def any_sizes(of: Any) -> Any:
    """The dynamic shapes of a feature, of any number of samples and ids."""
    if of is None:
        return None
    if isinstance(of, RaggedTensor):  # as torch flattens it
        return [any_sizes(part) for part in (of.values(), of.weight(), *of.offsets())]
    return {0: Dim.AUTO}


@pytest.mark.long
@pytest.mark.traced
@pytest.mark.parametrize("strict", [False, True])
def test_exported_engines(strict: bool) -> None:
    engine = trained_engine()
    frozen = td.freeze(engine)
    example = batch(3)
    shapes = {name: any_sizes(of) for name, of in example.items()}
    program = torch.export.export(frozen, (example,), dynamic_shapes=(shapes,), strict=strict)
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    engine.eval()
    for data in (batch(4), batch(5, samples=7, ids=90), batch(6, samples=0)):
        assert_same(loaded(data), engine(data))


@pytest.mark.traced
@pytest.mark.parametrize("strict", [False, True])
def test_exported_tables_and_embeddings(strict: bool) -> None:
    table = hash_table([4], initializer=td.Normal())
    table(torch.arange(9))
    single = embedding()
    single(torch.arange(9))
    for live in (table, single):
        ids = torch.arange(6).reshape(3, 2)
        shapes = ({0: Dim.DYNAMIC, 1: Dim.DYNAMIC},)
        program = torch.export.export(td.freeze(live), (ids,), dynamic_shapes=shapes, strict=strict)
        for given in (ids, torch.arange(20).reshape(4, 5), ids[:0]):
            assert torch.equal(program.module()(given), live.eval()(given))


@pytest.mark.traced
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_traces_are_refused() -> None:
    """A trace would keep the number of bags, which decides what is looked up together."""
    for source in (embedding(combiner="mean"), EmbeddingEngine({"a": option(), "b": option()})):
        frozen = td.freeze(source)
        ids = torch.arange(6).reshape(2, 3)
        given: Any = {"a": ids, "b": ids} if isinstance(source, EmbeddingEngine) else ids
        with pytest.raises(RuntimeError, match=r"torch\.jit\.trace would keep .* torch\.export"):
            torch.jit.trace(frozen, (given,), strict=False)
