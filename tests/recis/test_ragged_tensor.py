"""RaggedTensor: what it refuses, what it converts to, what it is for compile and export."""

from __future__ import annotations

import copy
import itertools
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dynemb.recis import RaggedTensor

pytestmark = pytest.mark.cpu_only("modules over ops that test_cuda_kernels compares")


def ragged_of(rows: list[Any], dtype: torch.dtype = torch.int64) -> RaggedTensor:
    """From nested lists of any depth."""
    offsets = []
    while rows and all(isinstance(row, list) for row in rows):
        lengths = [len(row) for row in rows]
        offsets.append(torch.tensor([0, *lengths]).cumsum(0))
        rows = [item for row in rows for item in row]
        if not rows:
            break
    return RaggedTensor(torch.tensor(rows, dtype=dtype), offsets)


def lists_of(ragged: RaggedTensor) -> list[Any]:
    """The nested lists that a tensor stands for."""
    items: list[Any] = ragged.values().tolist()
    for offsets in reversed(ragged.offsets()):
        bounds = offsets.tolist()
        items = [items[a:b] for a, b in itertools.pairwise(bounds)]
    return items


def same(one: RaggedTensor, other: RaggedTensor) -> bool:
    weights = one.weight(), other.weight()
    return lists_of(one) == lists_of(other) and (
        weights == (None, None) or torch.equal(*(w for w in weights if w is not None))
    )


FLAT = st.lists(st.lists(st.integers(-9, 9), max_size=4), min_size=1, max_size=5)
DEEP = st.lists(
    st.lists(st.lists(st.integers(-9, 9), min_size=1, max_size=3), min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)
THREE = [[[1, 2], [3]], [[4]], [[5, 6, 7], [8], [9]]]


# -- construction ----------------------------------------------------------------------------------


def test_sizes() -> None:
    ragged = ragged_of(THREE)
    assert (ragged.dim, ragged.shape, ragged.size(), len(ragged)) == (3, (3, 3, 3), (3, 3, 3), 3)
    assert ragged.real_shape(1) == (3, 3)
    assert ragged.real_shape(0, -1) == (3, 3)
    assert (ragged.max_length, ragged.get_shape(-1), ragged.get_shape(0)) == (3, 3, 3)
    assert ragged.lengths(0).tolist() == [2, 1, 3]
    wide = RaggedTensor(torch.zeros(3, 5), torch.tensor([0, 3]), dense_shape=(1, 7))
    assert (wide.dim, wide.shape) == (3, (1, 7, 5))
    empty = RaggedTensor(torch.zeros(0), torch.tensor([0]))
    assert (empty.shape, empty.to_dense().shape) == ((0, 0), (0, 0))


def test_to_changes_the_dtype_of_values_alone() -> None:
    ragged = RaggedTensor(torch.arange(3), torch.tensor([0, 3], dtype=torch.int32), torch.ones(3))
    for converted in (
        ragged.to(torch.float16),
        ragged.to("cpu", torch.float16),
        ragged.to(torch.zeros(1, dtype=torch.float16)),
    ):
        weight = converted.weight()
        assert weight is not None
        assert (converted.dtype, converted.offsets()[0].dtype) == (torch.float16, torch.int32)
        assert weight.dtype == torch.float32
    assert ragged.to("meta").offsets()[0].device.type == "meta"
    assert ragged.cpu().device.type == "cpu"


def test_a_clone_shares_nothing() -> None:
    ragged = RaggedTensor(torch.arange(3), torch.tensor([0, 3]), torch.ones(3))
    for twin in (ragged.clone(), copy.deepcopy(ragged), pickle.loads(pickle.dumps(ragged))):
        assert same(twin, ragged)
        weight, own = twin.weight(), ragged.weight()
        assert weight is not None
        assert own is not None
        for part in (twin.values(), twin.offsets()[0], weight):
            part += 1
        assert ragged.values().tolist() == [0, 1, 2]
        assert ragged.offsets()[0].tolist() == [0, 3]
        assert own.tolist() == [1, 1, 1]


def test_parts_can_be_replaced_but_not_changed() -> None:
    ragged = ragged_of([[1, 2], [3]])
    ragged.offsets().clear()
    assert len(ragged.offsets()) == 1
    assert lists_of(ragged.with_values(torch.tensor([4, 5, 6]))) == [[4, 5], [6]]
    weighted = ragged.with_weight(torch.tensor([1.0, 2.0, 3.0]))
    assert weighted.weight() is not None
    assert ragged.weight() is None
    assert weighted.with_weight(None).weight() is None
    with pytest.raises(ValueError, match="with_values"):
        ragged.with_values(torch.zeros(2))
    with pytest.raises(ValueError, match="weight has shape"):
        ragged.with_weight(torch.zeros(2))


# -- conversions -----------------------------------------------------------------------------------


def padded(rows: list[Any], value: int) -> Any:
    """Nested lists of equal lengths."""
    if not rows or not isinstance(rows[0], list):
        return rows
    if all(isinstance(row, list) and (not row or not isinstance(row[0], list)) for row in rows):
        longest = max(len(row) for row in rows)
        return [row + [value] * (longest - len(row)) for row in rows]
    longest = max(len(row) for row in rows)
    inner = max(len(item) for row in rows for item in row)
    filled = [[item + [value] * (inner - len(item)) for item in row] for row in rows]
    return [row + [[value] * inner] * (longest - len(row)) for row in filled]


@settings(max_examples=40)
@given(st.one_of(FLAT, DEEP))
def test_dense_form(rows: list[Any]) -> None:
    ragged = ragged_of(rows)
    assert ragged.to_dense(-99).tolist() == padded(rows, -99)


@settings(max_examples=40)
@given(st.one_of(FLAT, DEEP))
def test_padding_and_back(rows: list[Any]) -> None:
    ragged = ragged_of(rows)
    ragged = ragged.with_weight(torch.rand(ragged.values().shape[0]))
    for side in ("right", "left"):
        result = ragged.pad(value=-99, side=side)  # type: ignore[arg-type]
        assert result.shape == ragged.shape
        assert (result.values() == -99).sum() == result.values().numel() - ragged.values().numel()
        assert same(result.unpad(), ragged)
        doubled = result.with_values(result.values() * 2).unpad()
        assert torch.equal(doubled.values(), 2 * ragged.values())
    right = ragged.pad(value=-99)
    assert torch.equal(right.values(), ragged.to_dense(-99).flatten())


def test_padding_on_the_left_and_to_a_length() -> None:
    ragged = ragged_of([[1, 2], [], [3]])
    assert lists_of(ragged.pad(3, side="left")) == [[0, 1, 2], [0, 0, 0], [0, 0, 3]]
    weighted = ragged.with_weight(torch.ones(3)).pad(3).weight()
    assert weighted is not None
    assert weighted.tolist() == [1, 1, 0, 0, 0, 0, 1, 0, 0]
    with pytest.raises(ValueError, match=r"lengths is 1, expected at least \[2\]"):
        ragged.pad(1)
    with pytest.raises(ValueError, match="side is 'top'"):
        ragged.pad(3, side="top")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="has no padding"):
        ragged.unpad()


def test_dense_tensors_become_ragged() -> None:
    dense = torch.tensor([[1, 0, 2, 0], [0, 0, 0, 0], [3, 4, 5, 6]])
    assert lists_of(RaggedTensor.from_dense(dense)) == dense.tolist()
    trimmed = RaggedTensor.from_dense(dense, check_invalid=True)
    assert lists_of(trimmed) == [[1, 0, 2], [], [3, 4, 5, 6]]
    assert trimmed.shape == (3, 4)
    assert torch.equal(trimmed.to_dense(0), dense)
    deep = torch.arange(24).reshape(2, 3, 4)
    assert lists_of(RaggedTensor.from_dense(deep)) == deep.tolist()
    with pytest.raises(ValueError, match="at least 2 dimensions"):
        RaggedTensor.from_dense(torch.arange(3))


@settings(max_examples=40)
@given(st.one_of(FLAT, DEEP))
def test_sparse_form_and_back(rows: list[Any]) -> None:
    ragged = ragged_of(rows)
    sparse = ragged.to_sparse()
    assert torch.equal(sparse.to_dense(), ragged.to_dense(0))
    assert torch.equal(sparse.values(), ragged.values())
    back = RaggedTensor.from_sparse(sparse)
    assert torch.equal(back.to_dense(0), ragged.to_dense(0))
    with pytest.raises(ValueError, match="expected sparse_coo"):
        RaggedTensor.from_sparse(ragged.to_dense())


def test_to_dense_gives_gradients() -> None:
    values = torch.arange(3.0, requires_grad=True)
    ragged = RaggedTensor(values, torch.tensor([0, 2, 3]))
    (ragged.to_dense() * torch.tensor([[1.0, 2.0], [3.0, 4.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1, 2, 3]
    wide = torch.ones(3, 2, requires_grad=True)
    dense = RaggedTensor(wide, torch.tensor([0, 2, 3])).to_dense(-1)
    assert dense.tolist() == [[[1, 1], [1, 1]], [[1, 1], [-1, -1]]]
    dense.sum().backward()
    assert wide.grad is not None
    assert wide.grad.sum() == 6


def test_nested_form_and_back() -> None:
    ragged = ragged_of([[1, 2], [], [3]])
    nested = ragged.to_nested()
    assert nested.layout == torch.jagged
    assert [row.tolist() for row in nested.unbind()] == [[1, 2], [], [3]]
    assert same(RaggedTensor.from_nested(nested), ragged)
    gaps = torch.nested.nested_tensor_from_jagged(
        torch.arange(6), torch.tensor([0, 3, 6]), lengths=torch.tensor([1, 2])
    )
    assert lists_of(RaggedTensor.from_nested(gaps)) == [[0], [3, 4]]
    with pytest.raises(ValueError, match="has 2 ragged dimensions"):
        ragged_of(THREE).to_nested()
    with pytest.raises(ValueError, match="not a jagged NestedTensor"):
        RaggedTensor.from_nested(torch.zeros(2, 2))


def test_torchrec_forms_and_back() -> None:
    pytest.importorskip("torchrec")
    clicks = ragged_of([[1, 2], [], [3]]).with_weight(torch.rand(3))
    carts = ragged_of([[4], [5, 6], []]).with_weight(torch.rand(3))
    assert same(RaggedTensor.from_jagged(clicks.to_jagged()), clicks)
    keyed = RaggedTensor.to_keyed_jagged({"clicks": clicks, "carts": carts})
    assert keyed.keys() == ["clicks", "carts"]
    back = RaggedTensor.from_keyed_jagged(keyed)
    assert same(back["clicks"], clicks)
    assert same(back["carts"], carts)
    with pytest.raises(ValueError, match="some features have weights"):
        RaggedTensor.to_keyed_jagged({"clicks": clicks, "carts": carts.with_weight(None)})
    with pytest.raises(ValueError, match="expected equal numbers"):
        RaggedTensor.to_keyed_jagged({"clicks": clicks, "carts": ragged_of([[1]])})


# -- pytree, compile, export -----------------------------------------------------------------------


def test_it_is_a_pytree() -> None:
    for ragged in (ragged_of(THREE), ragged_of([[1, 2], []]).pad(4, value=7)):
        leaves, spec = pytree.tree_flatten(ragged)
        assert same(pytree.tree_unflatten(leaves, spec), ragged)
        text = pytree.treespec_dumps(spec)
        assert same(pytree.tree_unflatten(leaves, pytree.treespec_loads(text)), ragged)
    assert same(pytree.tree_unflatten(leaves, spec).unpad(), ragged_of([[1, 2], []]))
    doubled = pytree.tree_map_only(Tensor, lambda t: t.clone(), ragged_of([[1, 2], []]))
    assert lists_of(doubled) == [[1, 2], []]


class Doubled(torch.nn.Module):
    def forward(self, ragged: RaggedTensor) -> RaggedTensor:
        return ragged.with_values(ragged.values() * 2)


def test_compile_takes_and_gives_it() -> None:
    compiled = torch.compile(Doubled(), fullgraph=True, backend="aot_eager")
    assert lists_of(compiled(ragged_of([[1, 2], [3]]))) == [[2, 4], [6]]
    assert lists_of(compiled(ragged_of([[1], [3, 4, 5], []]))) == [[2], [6, 8, 10], []]


def test_export_takes_and_gives_it(tmp_path: Any) -> None:
    program = torch.export.export(Doubled(), (ragged_of([[1, 2], [3]]),))
    torch.export.save(program, tmp_path / "doubled.pt2")
    loaded = torch.export.load(tmp_path / "doubled.pt2").module()
    assert lists_of(loaded(ragged_of([[4, 5], [6]]))) == [[8, 10], [12]]
