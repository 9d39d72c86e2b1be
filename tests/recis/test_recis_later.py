"""What RecIS has had since version 1.0: rows that users insert, combiners of users, rows that stay
apart, hashes, masks, Adagrad; and all of its names, each of them here or refused with advice."""

from __future__ import annotations

import copy
import io
import itertools
import uuid
from typing import Any

import pytest
import torch
from lookups import bags, embedding, hash_table, option, rows_of
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import recis
from torch_dynemb.recis import (
    EmbeddingEngine,
    EmbeddingOption,
    FusedStringMultiHashOP,
    Hash,
    HashTable,
    Mask,
    NoReduceEmbedding,
    RaggedTensor,
    SparseAdagrad,
    SparseRowWiseAdagrad,
    StringMultiHash,
    filter_out_sparse_param,
    filter_out_trainable_sparse_param,
)
from torch_dynemb.recis import functional as F

pytestmark = pytest.mark.any_device

# Public names of RecIS 1.2.18 by module (docs/api and the modules' __all__, or all that has no
# underscore), without trainers, readers, savers and hooks of jobs.
NAMES = {
    "nn": "DynamicEmbedding EmbeddingOption EmbeddingEngine HashTable NoReduceEmbedding",
    "nn.modules.embedding": "EmbeddingExchange ExchangeIDsResults ExchangeEmbResults",
    "nn.modules.embedding_engine": "HashTableCoalescedGroup RuntimeGroupFeature",
    "nn.modules.hashtable": """Slice gen_slice HashTableLookupHelpFunction GradIDMeanFunction
        GradWorkerMeanFunction GradWorkerSumFunction GradHDMPGroupSumFunction is_hashtable
        split_sparse_dense_state_dict filter_out_sparse_param filter_out_trainable_sparse_param
        HashtableRegister""",
    "nn.modules.hashtable_hook_impl": """HashtableHookFactory BaseAdmitHookImpl ReadOnlyHookImpl
        BaseFilterHookImpl GlobalStepFilterHookImpl""",
    "nn.hashtable_hook": "AdmitHook FilterHook",
    "nn.initializers": """Initializer ConstantInitializer UniformInitializer NormalInitializer
        XavierUniformInitializer XavierNormalInitializer KaimingUniformInitializer
        KaimingNormalInitializer TruncNormalInitializer""",
    "features": """Feature FeatureEngine Bucketize SelectField Hash SelectFields FeatureCross
        SequenceTruncate Mod IDMultiHash Mask StringMultiHash DataValueProcessor FusedOpFactory
        FusedBoundaryOP FusedModOP FusedHashOP FusedCutoffOP FusedMultiHashOP
        FusedStringMultiHashOP""",
    "optim": """AdamWTF NamedAdagrad NamedAdam NamedAdamW NamedSGD NamedAdamWTF SparseAdam
        SparseAdamW SparseAdamWTF SparseAdagrad SparseAdagradSum
        SparseRowWiseAdagrad SparseRowWiseAdagradSum SparseOptimizer wrapped_named_optimizer
        clip_grad_by_global_norm_ adamwtf""",
    "ragged.tensor": "RaggedTensor RaggedPadInfo",
    "serialize": "Saver Loader CheckpointReader",
    "framework": "Trainer CheckpointManager get_build_info",
    "packages": "nn features optim serialize framework io hooks metrics utils",
}
FUNCTIONS = """bucketize bucketize_mod multi_hash segment_sum_sparse weight_norm_sparse
    EmbeddingSegmentReduceSparse EmbeddingSegmentReduceRagged ragged_embedding_segment_reduce
    sparse_embedding_segment_reduce merge_offsets ids_partition ids_encode fused_bucketize_gpu
    fused_uint64_mod_gpu fused_ids_encode_gpu fused_multi_hash fused_int64_to_string_int8
    fused_string_mask fused_number_mask farmhash ev_farmhash murmurhash djb2hash sdbmhash
    dense_to_ragged ragged_to_sparse fused_ragged_cutoff_3D fused_ragged_cutoff_2D ragged_to_dense
    feature_cross_ragged RaggedTile ragged_tile check_para index_select_ragged_by_padded_index
    ragged_topk_index_cutoff compute_real_length ReduceFunctionRegistry register_combiner
    get_combiner"""
METHODS = {
    HashTable: """forward accept_grad grad clear_grad insert reset clear ids ids_map embeddings
        embeddings_map ids_embeddings snap_shot raw_embeddings slot_group children_info
        children_hashtable coalesce device initializer allocator_id_info id_info
        requires_optimizer_state clear_child accept_grad_sq""",
    RaggedTensor: """set_dim_by_rank dim max_length pad_info set_pad_info real_shape get_shape
        to_dense from_numpy from_dense to_sparse device shape size values set_values offsets weight
        set_weight dtype pin_memory to cuda clone from_offsets""",
}


def test_each_name_of_recis_is_here_or_refused_with_advice() -> None:
    places = [(recis, name) for names in NAMES.values() for name in names.split()]
    places += [(F, name) for name in FUNCTIONS.split()]
    refused = set()
    for module, name in places:
        if name in module.__all__:
            assert getattr(module, name) is not None
            continue
        with pytest.raises(ImportError, match=rf"does not offer {name} of RecIS: \w+"):
            getattr(module, name)
        refused.add(name)
    assert refused == set(recis.not_offered.NAMES)
    with pytest.raises(ImportError, match=r"RaggedTensor\.pad"):
        from torch_dynemb.recis import RaggedPadInfo  # noqa: F401
    with pytest.raises(AttributeError, match="has no attribute 'Embeding', expected one of"):
        recis.Embeding  # noqa: B018
    assert not hasattr(F, "Embeding")


@pytest.mark.parametrize("kind", METHODS)
def test_each_method_of_recis_is_here_or_refused_with_advice(kind: type) -> None:
    made: Any = hash_table([4]) if kind is HashTable else RAGGED
    for name in METHODS[kind].split():
        if hasattr(made, name):
            continue
        with pytest.raises(AttributeError, match=rf"^{kind.__name__} has no {name}: \w+"):
            getattr(made, name)


RAGGED = RaggedTensor(
    torch.tensor([7, 9, 7, 8, 7]),
    torch.tensor([0, 2, 2, 5]),
    torch.tensor([1.0, 2.0, 0.5, 1.5, 3.0]),
)


# -- strings and masks ---------------------------------------------------------------------------

WORDS = [b"", b"a", b"caf\xc3\xa9", b"null", b"0", bytes(range(256))]
IDS = [0, 7, -7, 10, 1000, -(2**63), 2**63 - 1, 10**18, -(10**18) - 1]


def strings(words: list[bytes], dtype: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    joined = torch.tensor(list(b"".join(words)), dtype=torch.uint8).view(dtype)
    lengths = torch.tensor([0, *map(len, words)])
    return joined, lengths.cumsum(0)


def signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def chained(word: bytes, base: int, seed: int) -> int:
    """h = base * h + byte, bytes signed as in RecIS's kernel."""
    value = seed
    for byte in word:
        value = value * base + (byte if byte < 128 else byte - 256)
    return signed(value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_hashes_of_strings(dtype: torch.dtype) -> None:
    values, begins = strings(WORDS, dtype)
    inputs, splits = [values, values[:0]], [begins.int(), torch.tensor([0, 0])]
    djb2, empty = F.djb2hash(inputs, splits)
    assert djb2.tolist() == [chained(word, 33, 5381) for word in WORDS]
    assert empty.tolist() == [5381]
    assert F.sdbmhash(inputs, splits)[0].tolist() == [chained(word, 65599, 0) for word in WORDS]
    expected = [h & (2**63 - 1) for h in F.farmhash(inputs, splits)[0].tolist()]
    assert F.ev_farmhash(inputs, splits)[0].tolist() == expected
    assert Hash("ev_farm")(RaggedTensor(values, begins)).tolist() == expected


def test_ids_as_text_and_their_hashes() -> None:
    characters, begins = F.fused_int64_to_string_int8([torch.tensor(IDS), torch.tensor(IDS)[:0]])
    words = [str(i).encode() for i in IDS]
    assert characters[0].tolist() == list(b"".join(words))
    assert begins[0].tolist() == strings(words)[1].tolist()
    assert characters[1].numel() == 0
    assert begins[1].tolist() == [0]
    text, offsets = strings(words)
    buckets = [100, 2**40, 7, 1000]
    hashes = [F.farmhash, F.murmurhash, F.sdbmhash, F.djb2hash]
    expected = {
        f"h_{i}": [h % 2**64 % n for h in hashed([text], [offsets])[0].tolist()]
        for i, (hashed, n) in enumerate(zip(hashes, buckets, strict=True))
    }
    ragged = RaggedTensor(torch.tensor(IDS), torch.tensor([0, 4, 9]))
    few, all_four = StringMultiHash(buckets[:2], "h"), StringMultiHash(buckets, "h")
    first, second = FusedStringMultiHashOP([few, all_four])([ragged, torch.tensor([IDS[:3]])])
    assert {name: of.values().tolist() for name, of in first.items()} == {
        name: expected[name] for name in ("h_0", "h_1")
    }
    assert {name: of.tolist() for name, of in second.items()} == {
        name: [of[:3]] for name, of in expected.items()
    }
    with pytest.raises(ValueError, match="num_buckets is"):
        StringMultiHash([])


def test_masks() -> None:
    values, begins = strings(WORDS)
    words = ["null", "café", "", "nul"]
    expected = [float(word.decode("latin1") not in {"null", "cafÃ©", ""}) for word in WORDS]
    assert F.fused_string_mask([values], [begins.int()], [words])[0].tolist() == expected
    assert Mask(words)(RaggedTensor(values, begins)).tolist() == expected
    assert F.fused_string_mask([values], [begins], [[]])[0].tolist() == [1.0] * len(WORDS)
    ids = torch.tensor([[2**53, 2**53 + 1], [-(2**63), 0]])
    assert Mask([2**53 + 1, 0.0, 0.5, 2**70], torch.int64)(ids).tolist() == [[1, 0], [1, 0]]
    floats = torch.tensor([0.1, float("nan"), -0.0, float("inf")])
    assert Mask([0.1, 0, float("nan")], torch.float32)(floats).tolist() == [0, 1, 0, 1]
    assert Mask([7], torch.int64)(RAGGED).tolist() == [0, 1, 0, 1, 0]
    with pytest.raises(TypeError, match=r"Mask got values of torch\.float32, expected"):
        Mask([0], torch.int64)(floats)
    with pytest.raises(TypeError, match=r"masks\[0\] is 0, expected str"):
        Mask([0])
    with pytest.raises(ValueError, match=r"expected torch\.int8 for strings"):
        Mask([0], torch.bool)


def test_real_lengths() -> None:
    generator = torch.Generator("cpu").manual_seed(0)
    sequences = torch.tensor([0, 3, 3, 5])
    inner = [torch.tensor([0, 0, 2, 3, 5, 6]), torch.tensor([0, 1, 2, 2, 3, 5])]
    for _ in range(20):
        drawn = [
            torch.randint(0, 2, (int(of[-1]),), generator=generator, device="cpu") for of in inner
        ]
        places = [
            [bool(v[a:b].any()) for a, b in itertools.pairwise(of.tolist())]
            for v, of in zip(drawn, inner, strict=True)
        ]
        both = [a and b for a, b in zip(*places, strict=True)]
        expected = [sum(both[0:3]), 0, sum(both[3:5])]
        device = torch.get_default_device()
        ragged = [
            RaggedTensor(v.to(device), [sequences, of]) for v, of in zip(drawn, inner, strict=True)
        ]
        assert F.compute_real_length(*ragged).tolist() == expected
        texts = [[(b"0", b"", b"17", b"x")[int(n) * 2] for n in v] for v in drawn]
        named = [
            RaggedTensor(text, [sequences, of, begins])
            for (text, begins), of in zip(map(strings, texts), inner, strict=True)
        ]
        assert F.compute_real_length(*named).tolist() == expected
    with pytest.raises(ValueError, match="expected as many"):
        F.compute_real_length(ragged[0], RaggedTensor(torch.ones(1), [torch.tensor([0, 1])] * 2))


# -- combiners -----------------------------------------------------------------------------------


@F.register_combiner("power mean")
def power_mean(
    emb: Tensor, weight: Tensor | None, reverse_index: Tensor, offsets: Tensor, combiner_kwargs: Any
) -> Tensor:
    """Sums of powers, and the number of ids beside them."""
    rows = emb[reverse_index] ** combiner_kwargs["power"]
    if weight is not None:
        rows = rows * weight[:, None]
    count = offsets.shape[0] - 1
    samples = torch.arange(count, device=emb.device).repeat_interleave(offsets.diff())
    sums = rows.new_zeros(count, rows.shape[1]).index_add(0, samples, rows)
    return torch.cat([sums, offsets.diff()[:, None]], 1)


def powers(name: str, power: int, **changes: object) -> EmbeddingOption:
    return option(name, combiner="power mean", combiner_kwargs={"power": power}, **changes)


def test_combiners_of_users() -> None:
    engine = EmbeddingEngine(
        {
            "squares": powers("item", 2),
            "cubes": powers("item", 3),
            "plain": powers("item", 2, use_weight=False),
            "sum": option("item"),
        }
    )
    given = {
        "squares": RAGGED,
        "cubes": torch.tensor([[[7, 8], [8, 8]]]),
        "plain": RAGGED,
        "sum": RAGGED,
    }
    output = engine(given)
    (table,) = engine.tables.values()
    weight = RAGGED.weight()
    assert weight is not None
    for name, power, weights in (("squares", 2, weight), ("plain", 2, torch.ones(5))):
        rows = rows_of(table, RAGGED.values()) ** power * weights[:, None]
        expected = torch.stack([bag.sum(0) for bag in bags(RAGGED, rows)])
        torch.testing.assert_close(output[name][:, :4], expected)
        assert output[name][:, 4].tolist() == [2, 0, 3]
    cubes = (rows_of(table, given["cubes"]) ** 3).reshape(1, 2, 2, 4).sum(2)
    torch.testing.assert_close(output["cubes"][..., :4], cubes)
    output["cubes"].sum().backward()
    seven, eight = rows_of(table, [7, 8])
    found = dict(zip(table.grad().ids.tolist(), table.grad().gradients, strict=True))
    torch.testing.assert_close(found[7], 3 * seven**2)
    torch.testing.assert_close(found[8], 9 * eight**2)
    frozen = td.freeze(engine)
    assert torch.equal(frozen(given)["squares"], engine.eval()(given)["squares"].detach())


def test_wrong_combiners() -> None:
    with pytest.raises(ValueError, match="name is 'sum', which is taken"):
        F.register_combiner("sum")
    with pytest.raises(TypeError, match="expected a function"):
        F.register_combiner("nothing")(None)  # type: ignore[type-var]
    with pytest.raises(ValueError, match=r"combiner is 'largest', expected one of \['sum', 'mean'"):
        EmbeddingOption(combiner="largest")
    with pytest.raises(ValueError, match="register_combiner adds others"):
        F.get_combiner("largest")

    name = f"wrong {uuid.uuid4()}"

    @F.register_combiner(name)
    def wrong(**arguments: Any) -> Tensor:
        return arguments["emb"]

    with pytest.raises(ValueError, match=r"'wrong .*' returned .*expected a tensor \[1, col"):
        embedding(combiner=name)(torch.tensor([[1, 2]]))


@pytest.mark.parametrize("combiner", ["sum", "mean"])
def test_own_combiners_by_name(combiner: str) -> None:
    rows = torch.randn(10, 4)
    output = F.get_combiner(combiner)(
        emb=rows, weight=RAGGED.weight(), reverse_index=RAGGED.values(), offsets=RAGGED.offsets()[0]
    )
    expected = F.ragged_embedding_segment_reduce(
        rows, RAGGED.weight(), RAGGED.values(), RAGGED.offsets()[0], combiner
    )
    assert torch.equal(output, expected)


# -- rows that stay apart ------------------------------------------------------------------------


def test_rows_that_are_not_combined() -> None:
    engine = EmbeddingEngine(
        {
            "history": option("item", no_reduce=True),
            "again": option("item", no_reduce=True),
            "sum": option("item"),
        }
    )
    again = torch.tensor([[9, 9], [1, 7]])
    output = engine({"history": RAGGED, "again": again, "sum": again})
    (table,) = engine.tables.values()
    for name, ids, begins in (
        ("history", RAGGED.values(), [0, 2, 2, 5]),
        ("again", again.flatten(), [0, 2, 4]),
    ):
        found = output[name]
        assert isinstance(found, NoReduceEmbedding)
        assert found.emb.shape == (3, 4)  # distinct ids
        assert torch.equal(found.emb[found.reverse_index], rows_of(table, ids))
        assert found.offsets.tolist() == begins
    emb, inverse, _ = output["history"]
    factors = torch.arange(1.0, 6)
    (emb[inverse] * factors[:, None]).sum().backward()
    gradients = dict(zip(*(of.tolist() for of in table.grad()[::2]), strict=True))
    assert gradients == {7: [9.0] * 4, 9: [2.0] * 4, 8: [4.0] * 4}
    frozen = td.freeze(engine)({"history": RAGGED, "again": again, "sum": again})
    assert torch.equal(frozen["history"].emb, emb.detach())
    assert torch.equal(frozen["history"].reverse_index, inverse)


@pytest.mark.parametrize("kind", ["trained", "fixed", "int8", "empty"])
def test_rows_apart_of_any_option(kind: str) -> None:
    changes: dict[str, object] = {
        "fixed": {"trainable": False},
        "int8": {"dtype": torch.int8, "fp16_enabled": True},
    }.get(kind, {})
    module = embedding(no_reduce=True, **changes)
    if kind != "trained":
        module.insert(torch.tensor([7, 8, 9]), torch.randn(3, 4))
    ids = (
        torch.zeros(0, 3, dtype=torch.int64) if kind == "empty" else torch.tensor([[7, 8], [9, 7]])
    )
    found = module(ids)
    assert found.emb.requires_grad == (kind in ("trained", "empty"))
    assert found.emb.dtype == (torch.float16 if kind == "int8" else torch.float32)
    rows = found.emb[found.reverse_index].float()
    torch.testing.assert_close(
        rows, rows_of(module.hashtable, ids), rtol=1e-3, atol=1e-3 * (kind == "int8")
    )


def test_rows_apart_are_of_one_child() -> None:
    with pytest.raises(ValueError, match="no_reduce is True with children"):
        EmbeddingOption(children=["a", "b"], coalesced=True, no_reduce=True)


@pytest.mark.long
@pytest.mark.cpu_only("an export takes as long on any device")
@pytest.mark.parametrize("strict", [False, True])
def test_exported_rows_apart(strict: bool) -> None:
    class Attention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = embedding(no_reduce=True)

        def forward(self, ids: Tensor) -> tuple[Tensor, NoReduceEmbedding]:
            found = self.items(ids)
            return found.emb[found.reverse_index].reshape(*ids.shape, -1).amax(1), found

    model = Attention()
    model(torch.tensor([[1, 2], [3, 3]]))
    frozen = td.freeze(model)
    samples = torch.export.Dim("samples", min=0)
    program = torch.export.export(
        frozen, (torch.tensor([[1, 2], [3, 3]]),), dynamic_shapes=({0: samples},), strict=strict
    )
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    ids = torch.tensor([[3, 9], [1, 1], [2, 3]])
    interest, found = torch.export.load(file).module()(ids)
    expected, apart = model.eval()(ids)
    assert torch.equal(interest, expected)
    assert isinstance(found, NoReduceEmbedding)
    assert all(torch.equal(a, b) for a, b in zip(found, apart, strict=True))


# -- rows that users insert ----------------------------------------------------------------------


def test_inserted_rows() -> None:
    engine = EmbeddingEngine({"clicked": option("item"), "user": option("user")})
    rows = torch.arange(8.0).reshape(2, 4)
    engine.insert("clicked", torch.tensor([[5], [6]], dtype=torch.int32), rows)
    engine.insert("user", torch.tensor([5]), -rows[:1])
    output = engine({"clicked": torch.tensor([[5, 6]]), "user": torch.tensor([[5]])})
    assert output["clicked"].tolist() == [rows.sum(0).tolist()]
    assert output["user"].tolist() == [(-rows[0]).tolist()]
    before = copy.deepcopy(engine.state_dict())
    for call, error, match in (
        (("item", torch.tensor([1]), rows[:1]), KeyError, r"feature is 'item'.*'clicked', 'user'"),
        (("user", torch.tensor([1]), rows), ValueError, r"'user': input_emb has shape \(2, 4\)"),
        (("user", torch.tensor([1, 1]), rows), ValueError, "1 repeated ids, expected every"),
        (("user", torch.tensor([1.0]), rows), TypeError, "'user': ids"),
    ):
        with pytest.raises(error, match=match):
            engine.insert(*call)
    after = engine.state_dict()
    assert all(torch.equal(after[name], of) for name, of in before.items())
    several = embedding(children=["a", "b"], coalesced=True)
    several.insert(torch.tensor([5]), rows[:1], child="b")
    assert rows_of(several.hashtable, [5], "b").tolist() == rows[:1].tolist()
    with pytest.raises(ValueError, match="child is None, expected one of"):
        several.insert(torch.tensor([5]), rows[:1])


# -- Adagrad -------------------------------------------------------------------------------------


def test_adagrad_is_torch_s() -> None:
    module = embedding()
    ids = torch.tensor([[1, 2], [3, 1]])
    module(ids)
    static = torch.nn.Parameter(module.hashtable.embeddings())
    options = {
        "lr": 0.1,
        "lr_decay": 0.5,
        "initial_accumulator_value": 0.5,
        "weight_decay": 0.25,
    }
    reference = torch.optim.Adagrad([static], **options)
    optimizer = SparseAdagrad(filter_out_sparse_param(module), **options)
    for _ in range(3):
        module(ids).square().sum().backward()
        optimizer.step()
        static[ids - 1].sum(1).square().sum().backward()
        reference.step()
        reference.zero_grad()
    torch.testing.assert_close(module.hashtable.embeddings(), static.detach())
    slot = module.hashtable.slot_group().slot_by_name("sparse_adagrad_state_sum").value()
    sums = reference.state[static]["sum"]
    torch.testing.assert_close(slot[module.hashtable.ids_map().rows], sums)


def test_row_wise_adagrad() -> None:
    module = embedding()
    ids = torch.tensor([[1], [2]])
    rows = module(ids).detach().double()
    optimizer = SparseRowWiseAdagrad(
        filter_out_sparse_param(module), lr=0.1, lr_decay=0.5, weight_decay=0.25, maximize=True
    )
    sums = torch.zeros(2, 1, dtype=torch.float64)
    for step in range(3):
        module(ids).square().sum().backward()
        optimizer.step()
        gradient = -2 * rows + 0.25 * rows
        sums += gradient.square().mean(1, keepdim=True)
        rows = rows - 0.1 / (1 + 0.5 * step) * gradient / (sums.sqrt() + 1e-10)
    torch.testing.assert_close(module.hashtable.embeddings().double(), rows, rtol=1e-5, atol=1e-6)


def test_updates_of_adagrad_are_not_saved() -> None:
    with pytest.raises(ValueError, match="save_update_info_interval is 5, expected 0: read emb"):
        SparseAdagrad(filter_out_sparse_param(embedding()), save_update_info_interval=5)


# -- names of tables -----------------------------------------------------------------------------


def test_tables_of_engines_have_the_names_of_users() -> None:
    """Two engines with equal options, too: their tables differ in the names given."""
    fixed = option("fixed", trainable=False)
    engines = torch.nn.ModuleList(
        [
            EmbeddingEngine({"clicked": option("item"), "user": option("user"), "still": fixed}),
            EmbeddingEngine({"query": option("query")}),
        ]
    )
    tables = filter_out_sparse_param(engines)
    assert list(tables) == ["item, user, fixed", "query"]
    one = EmbeddingEngine({"still": fixed})
    assert list(filter_out_trainable_sparse_param(one)) == []
    for engine in (engines, one):
        assert "dim4_float32" not in repr(engine).replace("(dim4_float32", "")  # the module's path
    table = tables["item, user, fixed"]
    for wrong in (
        lambda: table.optimizer,
        lambda: table.ids("nothing"),
        lambda: one.tables[next(iter(one.tables))].accept_grad(
            torch.tensor([1]), torch.zeros(1, 4), "fixed"
        ),
        lambda: td.freeze(one)({"nothing": 1}),
    ):
        with pytest.raises((RuntimeError, ValueError, KeyError)) as raised:
            wrong()
        assert "dim4_float32" not in str(raised.value)
    engines[0](
        {"clicked": torch.tensor([[1]]), "user": torch.tensor([[2]]), "still": torch.tensor([[3]])}
    )
    assert set(table.group.usage.tables()) == {"item", "user", "fixed"}
