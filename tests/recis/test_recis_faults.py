"""Faults of RecIS's published code that must not come back, by their number in its notes.

1 weights of ragged ids dropped; 2 tile raises; 3 a given group ignored; 4 dense ids of 1 or 3
dimensions; 5 use_weight and fp16 ignored on one of two ways; 6 gradients of two lookups mixed up;
7 ReadOnly trains row -1; 8 states overwrite each other; 9 the optimizer must come first; 10 clear
breaks lookups; 11 repeated ids leak rows; 12 ids -1 and -2 reserved, owners of negative ids differ;
13 printing re-seeds; 14 hook caches are global, tables leak; 15 shared inputs changed, weights
uncut; 16 to(dtype) casts offsets, clone aliases; 17 a group is mandatory; 18 int8 without a scale.

Number 15 is in test_feature_engine.py and test_ragged_ops.py; 3 is also in test_recis_ranks.py, 12
in test_routing.py.
"""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from lookups import embedding, hash_table, option, rows_of

from torch_dynemb import ops
from torch_dynemb.recis import (
    AdmitHook,
    DynamicEmbedding,
    EmbeddingEngine,
    FilterHook,
    RaggedTensor,
    SparseAdam,
    filter_out_sparse_param,
)

pytestmark = pytest.mark.any_device

RAGGED = RaggedTensor(
    torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3]), torch.tensor([0.5, 2.0, 3.0])
)


def test_1_weights_of_ragged_ids_count() -> None:
    module = embedding()
    rows = rows_of(module.hashtable, [1, 2, 3]) if module(RAGGED) is not None else None
    assert rows is not None
    expected = torch.stack([0.5 * rows[0] + 2 * rows[1], 3 * rows[2]])
    torch.testing.assert_close(module(RAGGED).detach(), expected)


@pytest.mark.parametrize("kind", ["dense", "ragged"])
def test_2_tile_works(kind: str) -> None:
    module = embedding(combiner="tile", combiner_kwargs={"tile_len": 3})
    ids = torch.tensor([[1, 2], [3, 4]]) if kind == "dense" else RAGGED.with_weight(None)
    output = module(ids)
    output.sum().backward()
    assert output.shape == (2, 12)
    assert not output[:, 8:].any()
    assert torch.equal(output[0, :8].detach(), rows_of(module.hashtable, [1, 2]).flatten())
    assert module.hashtable.grad().gradients.unique().tolist() == [1.0]


def test_3_the_group_that_is_given_counts() -> None:
    assert not dist.is_initialized()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group = dist.new_group([0])
        for module in (DynamicEmbedding(option(), pg=group), DynamicEmbedding(option(pg=group))):
            assert module._group is not None
            assert (module._group.name, module._group.size) == (group.group_name, 1)
            assert module(torch.tensor([[1]])).shape == (1, 4)
        engine = EmbeddingEngine({"a": option()}, pg=group)
        assert engine({"a": torch.tensor([[1]])})["a"].shape == (1, 4)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("shape", [(5,), (2, 5), (2, 3, 5), (2, 3, 1, 5), (0, 5), (2, 0)])
def test_4_dense_ids_of_any_rank(shape: tuple[int, ...]) -> None:
    module = embedding()
    ids = torch.arange(torch.Size(shape).numel()).reshape(shape)
    output = module(ids).detach()
    assert output.shape == (*shape[:-1], 4)
    rows = rows_of(module.hashtable, ids).reshape(*shape, 4)
    torch.testing.assert_close(output, rows.sum(-2))


@pytest.mark.parametrize("kind", ["dense", "ragged", "engine"])
def test_5_use_weight_counts_on_all_ways(kind: str) -> None:
    outputs = {}
    for use_weight in (True, False):
        torch.manual_seed(0)
        chosen = option(use_weight=use_weight)
        if kind == "engine":
            outputs[use_weight] = EmbeddingEngine({"a": chosen})({"a": RAGGED})["a"]
        elif kind == "ragged":
            outputs[use_weight] = DynamicEmbedding(chosen)(RAGGED)
        else:
            ids, weights = torch.tensor([[1, 2], [3, 3]]), torch.tensor([[0.5, 2.0], [1.5, 1.5]])
            outputs[use_weight] = DynamicEmbedding(chosen)(ids, weights)
    assert not torch.allclose(outputs[True], outputs[False])
    torch.manual_seed(0)
    plain = DynamicEmbedding(option())
    expected = plain(torch.tensor([[1, 2], [3, 3]]))
    if kind != "dense":
        expected = plain(RAGGED.with_weight(None))
    assert torch.equal(outputs[False], expected)


@pytest.mark.parametrize("kind", ["dense", "ragged", "engine"])
def test_5_fp16_counts_on_all_ways(kind: str) -> None:
    chosen = option(dtype=torch.int8, fp16_enabled=True)
    if kind == "engine":
        output = EmbeddingEngine({"a": chosen})({"a": RAGGED})["a"]
    else:
        ids = RAGGED if kind == "ragged" else torch.tensor([[1, 2]])
        output = DynamicEmbedding(chosen)(ids)
    assert output.dtype == torch.float16


def test_6_two_lookups_before_a_step() -> None:
    """Against torch.optim.SparseAdam, which sums the gradients of a row."""
    module = embedding()
    first, second = torch.tensor([[7, 3], [3, 9]]), torch.tensor([[9, 1], [7, 7]])
    module(first), module(second)
    before = module.hashtable.embeddings()
    known = module.hashtable.ids()
    optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.1)
    static = torch.nn.Embedding.from_pretrained(before.clone(), freeze=False, sparse=True)
    reference = torch.optim.SparseAdam(static.parameters(), lr=0.1)
    place = {i: p for p, i in enumerate(known.tolist())}
    for _ in range(3):
        (module(first).square().sum() + (2 * module(second)).sum()).backward()
        loss = torch.zeros(())
        for ids, power in ((first, 2), (second, 1)):
            rows = static(torch.tensor([[place[i] for i in row] for row in ids.tolist()])).sum(1)
            loss = loss + (rows.square().sum() if power == 2 else (2 * rows).sum())
        loss.backward()
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        reference.zero_grad()
    torch.testing.assert_close(module.hashtable.embeddings(), static.weight.detach())


def test_6_micro_batches_are_one_batch() -> None:
    torch.manual_seed(0)
    whole, parts = embedding(), embedding()
    one = SparseAdam(filter_out_sparse_param(whole), lr=0.1)
    many = SparseAdam(filter_out_sparse_param(parts), lr=0.1)
    many.set_grad_accum_steps(4)
    for _ in range(2):
        ids = torch.randint(0, 20, (16, 3))
        whole(ids).square().mean().backward()
        one.step()
        one.zero_grad()
        for part in ids.chunk(4):
            (parts(part).square().mean() / 4).backward()
            many.step()
            many.zero_grad()
    torch.testing.assert_close(whole.hashtable.embeddings(), parts.hashtable.embeddings())


def test_7_read_only_in_training_trains_what_is_there() -> None:
    module = embedding(admit_hook=AdmitHook("ReadOnly"))
    module.hashtable.insert(torch.tensor([1]), torch.ones(1, 4))
    optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.5)
    output = module(torch.tensor([[1], [2]]))
    assert output.tolist() == [[1.0] * 4, [0.0] * 4]
    output.sum().backward()
    assert module.hashtable.grad().ids.tolist() == [1]
    optimizer.step()
    assert module.hashtable.ids().tolist() == [1]
    torch.testing.assert_close(module.hashtable.embeddings(), torch.full((1, 4), 0.5))


def test_8_states_have_their_tables_names() -> None:
    def make() -> tuple[torch.nn.ModuleDict, SparseAdam]:
        model = torch.nn.ModuleDict({"a": embedding("users"), "b": embedding("items")})
        return model, SparseAdam(filter_out_sparse_param(model), lr=0.1)

    model, optimizer = make()
    for name, first in (("a", 0), ("b", 100)):
        model[name](torch.arange(first, first + 3)[None]).sum().backward()
    optimizer.step()
    for group in optimizer.param_groups:
        group["lr"] = 0.2
    state = model.state_dict()
    assert {"a.hashtable.users.buckets", "b.hashtable.items.buckets"} <= set(state)
    assert sorted(optimizer.state_dict()["tables"]) == ["items", "users"]
    other, loaded = make()
    other.load_state_dict(state)
    loaded.load_state_dict(optimizer.state_dict())
    assert [group["lr"] for group in loaded.param_groups] == [0.2, 0.2]
    for name in ("a", "b"):
        for slot, values in model[name].hashtable.slot_group().items():
            assert torch.equal(values, other[name].hashtable.slot_group()[slot]), slot
            assert values.any()
        for m, o in ((model, optimizer), (other, loaded)):
            m[name](torch.tensor([[1, 100]])).sum().backward()
            o.step()
        assert torch.equal(model[name].hashtable.embeddings(), other[name].hashtable.embeddings())


def test_8_tables_with_one_name_are_refused() -> None:
    model = torch.nn.ModuleList([embedding("items"), embedding("items")])
    with pytest.raises(ValueError, match="two tables are named 'items'"):
        filter_out_sparse_param(model)
    tables = {"a": hash_table([4], name="items"), "b": hash_table([4], name="items")}
    with pytest.raises(ValueError, match="'a' and 'b' both have a child 'items'"):
        SparseAdam(tables)


def test_9_the_optimizer_may_come_after_lookups() -> None:
    torch.manual_seed(0)
    early, late = embedding(), embedding()
    first = SparseAdam(filter_out_sparse_param(early), lr=0.1)
    for module in (early, late):
        module(torch.tensor([[1, 2]])).square().sum().backward()
    second = SparseAdam(filter_out_sparse_param(late), lr=0.1)
    first.step()
    second.step()
    assert torch.equal(early.hashtable.embeddings(), late.hashtable.embeddings())
    for module, optimizer in ((early, first), (late, second)):
        module(torch.tensor([[2, 3]])).square().sum().backward()
        optimizer.step()
    assert torch.equal(early.hashtable.embeddings(), late.hashtable.embeddings())
    with pytest.raises(RuntimeError, match="has no optimizer yet: give it to one"):
        _ = embedding().hashtable.optimizer


@pytest.mark.parametrize("child", [None, "item"])
def test_10_clear_leaves_a_table_that_works(child: str | None) -> None:
    module = embedding()
    optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.1)
    first = module(torch.tensor([[1, 2]])).detach()
    module(torch.tensor([[1, 2]])).sum().backward()
    optimizer.step()
    module.hashtable.clear(child)
    assert module.hashtable.ids().numel() == 0
    again = module(torch.tensor([[1, 2]]))
    assert torch.equal(again.detach(), first)
    again.sum().backward()
    optimizer.step()
    assert module.hashtable.ids().tolist() == [1, 2]


def test_11_repeated_ids_take_one_row() -> None:
    module = embedding()
    for _ in range(3):
        module(torch.tensor([[4, 4, 4], [4, 5, 5]]))
    assert module.hashtable.ids().tolist() == [4, 5]
    assert sorted(module.hashtable.ids_map().rows.tolist()) == [0, 1]
    assert module.hashtable.group.index.used_rows(0) == 2
    with pytest.raises(ValueError, match="repeated ids"):
        module.hashtable.insert(torch.tensor([6, 6]), torch.zeros(2, 4))


def test_12_no_id_is_reserved() -> None:
    ids = torch.tensor([[-1, -2, 0, -(2**63), 2**63 - 1]])
    module = embedding()
    optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.1)
    module(ids).sum().backward()
    before = rows_of(module.hashtable, ids)
    optimizer.step()
    after = rows_of(module.hashtable, ids)
    assert (before != after).all()
    owners = ops.id_owners(ids[0], parts=3)
    slots = [(x % 2**64) % 65536 for x in ops.mix_ids(ids[0]).tolist()]
    sizes = [21846, 21845, 21845]
    assert owners.tolist() == [0 if s < sizes[0] else 1 + (s - sizes[0]) // 21845 for s in slots]


def test_13_printing_changes_nothing() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    chosen = option()
    first = repr(chosen), repr(chosen.initializer), chosen.coalesced_info()
    assert first == (repr(chosen), repr(chosen.initializer), chosen.coalesced_info())
    module = DynamicEmbedding(chosen)
    repr(module)
    assert torch.equal(torch.get_rng_state(), before)
    other = DynamicEmbedding(chosen)
    repr(other)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(module(ids), other(ids))


def test_14_hooks_are_their_tables_own() -> None:
    def make(filter_step: int) -> tuple[DynamicEmbedding, SparseAdam]:
        params = {"filter_step": filter_step, "filter_interval": 1}
        module = embedding(filter_hook=FilterHook("GlobalStepFilter", params))
        return module, SparseAdam(filter_out_sparse_param(module), lr=0.1)

    short, long = make(1), make(5)
    for ids in ([1], [2], [2]):
        for module, optimizer in (short, long):
            module(torch.tensor([ids])).sum().backward()
            optimizer.step()
    assert short[0].hashtable.ids().tolist() == [2]
    assert long[0].hashtable.ids().tolist() == [1, 2]


def test_14_tables_are_given_back() -> None:
    module = embedding()
    watched = weakref.ref(module.hashtable)
    del module
    gc.collect()
    assert watched() is None


def test_16_dtypes_and_clones_of_ragged_tensors() -> None:
    converted = RAGGED.to(torch.float16)
    assert converted.offsets()[0].dtype == torch.int64
    twin = RAGGED.clone()
    twin.values().add_(1)
    assert RAGGED.values().tolist() == [1, 2, 3]


def test_17_one_process_needs_no_group() -> None:
    assert not dist.is_initialized()
    assert embedding()(torch.tensor([[1]])).shape == (1, 4)
    assert EmbeddingEngine({"a": option()})({"a": RAGGED})["a"].shape == (2, 4)


def test_18_int8_rows_have_a_scale() -> None:
    table = hash_table([6], dtype=torch.int8)
    rows = torch.randn(3, 6) * torch.tensor([[1e-4], [1.0], [1e4]])
    table.insert(torch.tensor([1, 2, 3]), rows)
    error = (table.embeddings() - rows).abs() / rows.abs().amax(1, keepdim=True)
    assert error.max() <= 0.5 / 127 + 1e-6
    torch.testing.assert_close(table(torch.tensor([1, 2, 3])), table.embeddings())
