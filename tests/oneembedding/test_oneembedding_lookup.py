"""Lookups: tables side by side or by number, key types, columns, padding."""

from __future__ import annotations

import pytest
import torch
from small_embeddings import UNIFORM, content, embedding, store
from torch import Tensor

import torch_dynemb as td
from torch_dynemb import oneembedding

pytestmark = pytest.mark.any_device

IDS = torch.tensor([[7, 7, 9], [8, 7, 5], [7, 2, 9], [3, 7, 9]])


def test_tables_side_by_side_have_ids_of_their_own() -> None:
    module = embedding()
    rows = module(IDS)
    assert rows.shape == (4, 3, 4)
    assert list(module.sizes().values()) == [3, 2, 2]
    found = content(module)
    for sample, of_sample in enumerate(IDS.tolist()):
        for table, id in enumerate(of_sample):
            assert torch.equal(rows[sample, table].detach().cpu(), found[table, id])
    assert len({tuple(found[table, id].tolist()) for table, id in found}) == len(found)


def test_table_ids_say_which_table_in_any_shape() -> None:
    module = embedding()
    expected = module(IDS).detach()
    numbers = torch.arange(3).expand(4, 3)
    assert torch.equal(module(IDS, numbers), expected)
    generator = torch.Generator("cpu").manual_seed(3)
    order = torch.randperm(12, generator=generator, device="cpu").to(IDS.device)
    ids, of_ids = IDS.reshape(-1)[order], numbers.reshape(-1)[order]
    shuffled = module(ids.view(2, 3, 2), of_ids.view(2, 3, 2).to(torch.int32))
    assert shuffled.shape == (2, 3, 2, 4)
    assert torch.equal(shuffled.reshape(12, 4), expected.reshape(12, 4)[order])
    assert torch.equal(module(ids[:0], of_ids[:0]), expected.new_zeros(0, 4))


def test_gradients_go_to_the_rows_of_their_table() -> None:
    module = embedding()
    optimizer = oneembedding.Optimizer(torch.optim.SGD(module.parameters(), lr=1.0), [module])
    module(IDS)
    before = content(module)
    numbers = torch.arange(3).expand(4, 3)
    weights = torch.arange(48.0).view(4, 3, 4)
    (module(IDS) * weights).sum().backward()
    (module(IDS, numbers) * weights).sum().backward()
    optimizer.step()
    expected = {key: row.clone() for key, row in before.items()}
    for sample in range(4):
        for table in range(3):
            expected[table, int(IDS[sample, table])] -= 2 * weights[sample, table].cpu()
    after = content(module)
    assert after.keys() == expected.keys()
    for key, row in expected.items():
        torch.testing.assert_close(after[key], row)


def test_one_table_takes_ids_of_any_shape() -> None:
    module = embedding(1)
    assert module(torch.tensor(5)).shape == (4,)
    assert module(torch.arange(6).view(1, 2, 3)).shape == (1, 2, 3, 4)
    assert module.sizes() == {"small.0": 6}


@pytest.mark.parametrize(
    ("key_type", "key", "id"),
    [
        (torch.int64, -(2**63), -(2**63)),
        (torch.int32, -(2**31), -(2**31)),
        (torch.uint32, 2**32 - 1, 2**32 - 1),
        (torch.uint64, 2**64 - 1, -1),
        (torch.uint64, 2**63, -(2**63)),
    ],
)
def test_every_key_is_an_id(key_type: torch.dtype, key: int, id: int) -> None:
    module = embedding(1, key_type=key_type)
    module(torch.tensor([key, 3], dtype=key_type))
    assert sorted(content(module)) == sorted([(0, id), (0, 3)])
    padded = embedding(1, key_type=key_type, padding_idx=key)
    assert torch.equal(padded(torch.tensor([key], dtype=key_type)), torch.zeros(1, 4))
    assert content(padded) == {}
    with pytest.raises(TypeError, match=r"ids is .*, expected a dense tensor of torch\.u?int"):
        module(torch.tensor([1.0]))


def test_columns_start_by_their_own_initializers() -> None:
    columns = [
        oneembedding.make_column_options(oneembedding.make_constant_initializer(2.0)),
        oneembedding.make_column_options(oneembedding.make_trunc_normal_initializer(0, 1, -1, 1)),
    ]
    options = [oneembedding.make_table_options(columns), oneembedding.make_table(UNIFORM)]
    module = embedding(2, [3, 5], tables=options)
    rows = module(torch.arange(200).view(100, 2)).detach()
    assert rows.shape == (100, 2, 8)
    assert torch.equal(rows[:, 0, :3], torch.full((100, 3), 2.0))
    normal, uniform = rows[:, 0, 3:], rows[:, 1]
    assert -1 <= normal.min() < -0.9 < 0.9 < normal.max() <= 1
    assert -0.5 <= uniform.min() < -0.4 < 0.4 < uniform.max() <= 0.5
    with pytest.raises(ValueError, match=r"tables\[0\] has 2 column options, expected 1"):
        embedding(1, 8, tables=options[:1])


def test_without_tables_there_is_one_that_starts_normal() -> None:
    plain = embedding(dims=[64], tables=None)
    assert plain.num_tables == 1
    assert 0.045 < plain(torch.arange(100)).std() < 0.055
    given = embedding(tables=None, default_initializer=oneembedding.make_constant_initializer(1))
    assert torch.equal(given(torch.arange(2)), torch.ones(2, 4))


def test_seed_and_name_decide_how_rows_start() -> None:
    first, again = embedding()(IDS), embedding()(IDS)
    assert torch.equal(first, again)
    assert not torch.equal(first, embedding(seed=1)(IDS))
    assert not torch.equal(first, embedding(name="other")(IDS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_of_low_precision(dtype: torch.dtype) -> None:
    module = embedding(dtype=dtype)
    optimizer = oneembedding.Optimizer(torch.optim.SGD(module.parameters(), lr=1.0), [module])
    rows = module(IDS)
    assert (rows.dtype, module.group.rows.weights[0].dtype) == (dtype, dtype)
    rows.float().sum().backward()
    optimizer.step()
    assert torch.equal(module(IDS)[0, 0] < rows[0, 0], torch.ones(4, dtype=torch.bool))


def test_evaluation_gives_new_ids_no_row() -> None:
    module = embedding()
    trained = embedding()(IDS)
    assert torch.equal(module.eval()(IDS), trained)
    assert content(module) == {}


def test_a_full_table_evicts_whom_it_has_not_seen_for_longest() -> None:
    options = [
        oneembedding.make_table_options(UNIFORM, capacity=2),
        oneembedding.make_table_options(UNIFORM),
    ]
    module = embedding(2, tables=options, store_options=store(capacity=3))
    module.set_optimizer(td.SGD(lr=0.1))
    for id in range(5):
        module(torch.tensor([[id, id]])).sum().backward()
        module.optimizer.step()
    assert sorted(content(module)) == [(0, 3), (0, 4), (1, 2), (1, 3), (1, 4)]


@pytest.mark.parametrize(
    ("ids", "table_ids", "error"),
    [
        (
            torch.zeros(4, 2, dtype=torch.int64),
            None,
            r"ids has shape \(4, 2\), expected \(batch, 3",
        ),
        (IDS, torch.zeros(4, dtype=torch.int64), r"table_ids has shape \(4,\)"),
    ],
)
def test_shapes_that_do_not_match(ids: Tensor, table_ids: Tensor | None, error: str) -> None:
    module = embedding()
    with pytest.raises(ValueError, match=error):
        module(ids, table_ids)
    assert content(module) == {}


@pytest.mark.parametrize("number", [3, -1])
def test_numbers_of_tables_that_are_not_there(number: int) -> None:
    if torch.get_default_device().type == "cuda":
        pytest.skip("an assertion on the GPU, which ends the process, as nn.Embedding's")
    module = embedding()
    with pytest.raises(ValueError, match=f"table_ids has {number}, expected 0 to 2"):
        module(IDS, torch.full((4, 3), number))
    assert content(module) == {}


@pytest.mark.traced
def test_compiles_as_a_whole() -> None:
    module, twin = embedding(), embedding()
    numbers = torch.arange(3).expand(4, 3)
    compiled = torch.compile(
        lambda ids: (twin(ids), twin(ids, numbers)), fullgraph=True, backend="eager"
    )
    for given, expected in zip(compiled(IDS), (module(IDS), module(IDS, numbers)), strict=True):
        assert torch.equal(given, expected)
