"""FeatureEngine: results against plain Python, sharing and fusing of ops, errors."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dynemb import ops
from torch_dynemb.recis import RaggedTensor
from torch_dynemb.recis.feature_ops import (
    Bucketize,
    Feature,
    FeatureCross,
    FeatureEngine,
    FeatureOp,
    Hash,
    IDMultiHash,
    Mod,
    SelectField,
    SelectFields,
    SequenceTruncate,
    primes,
)

pytestmark = pytest.mark.cpu_only("modules over ops that test_cuda_kernels compares")


def ragged(rows: list[list[Any]], weights: bool = False, dtype: Any = torch.int64) -> RaggedTensor:
    flat = [value for row in rows for value in row]
    offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
    weight = torch.arange(1.0, 1 + len(flat)) if weights else None
    return RaggedTensor(torch.tensor(flat, dtype=dtype), offsets, weight)


def rows_of(value: RaggedTensor) -> list[list[Any]]:
    (offsets,) = value.offsets()
    return [row.tolist() for row in value.values().tensor_split(offsets[1:-1])]


def feature(name: str, *chain: FeatureOp) -> Feature:
    result = Feature(name)
    for op in chain:
        result.add_op(op)
    return result


def one(value: Any, *chain: FeatureOp) -> Any:
    """The result of a chain for a field."""
    return FeatureEngine([feature("out", SelectField("in"), *chain)])({"in": value})["out"]


class CountCalls(TorchDispatchMode):
    """Counts calls of our ops by name."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "dynemb":
            name = func._schema.name.removeprefix("dynemb::")
            self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


words = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 30)
id_rows = st.lists(st.lists(words, max_size=6), min_size=1, max_size=5)


@given(id_rows, st.integers(1, 50), st.integers(1, 7), st.sampled_from(["left", "right"]))
def test_a_chain_is_its_ops(rows: list[list[int]], divisor: int, length: int, side: str) -> None:
    chain = (SequenceTruncate(length, check_length=False, truncate_side=side), Mod(divisor))
    result = one(ragged(rows, weights=True), *chain)
    kept = [row[-length:] if side == "left" else row[:length] for row in rows]
    assert rows_of(result) == [[value % 2**64 % divisor for value in row] for row in kept]
    weights = iter(range(1, 1 + sum(map(len, rows))))
    numbered = [[float(next(weights)) for _ in row] for row in rows]
    cut = [row[-length:] if side == "left" else row[:length] for row in numbered]
    assert result.weight().tolist() == [weight for row in cut for weight in row]
    assert result._dense_shape is None


def is_prime(number: int) -> bool:
    return all(number % factor for factor in range(2, number))


@given(id_rows, st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_id_multi_hash_has_the_parameters_of_recis(rows: list[list[int]], sizes: list[int]) -> None:
    given_ids = ragged(rows, weights=True)
    engine = FeatureEngine([feature("f", SelectField("x"), IDMultiHash(sizes, prefix="h"))])
    results = engine({"x": given_ids}, remain_no_use_data=False)
    assert list(results) == [f"f_h_{i}" for i in range(len(sizes))]
    for i, size in enumerate(sizes):
        limit = (29, 47, 67, 83)[i] * size
        prime = next(number for number in range(limit, 1, -1) if is_prime(number))
        expected = [[x * (1, 3, 5, 7)[i] % 2**64 % prime % size for x in row] for row in rows]
        assert rows_of(results[f"f_h_{i}"]) == expected
        assert torch.equal(results[f"f_h_{i}"].weight(), given_ids.weight())


def test_primes() -> None:
    assert [n for n in range(2, 2000) if primes.is_prime(n)] == [
        n for n in range(2, 2000) if is_prime(n)
    ]
    large = [2**31 - 1, 2**61 - 1, 2**63 - 25, 2**64 - 59, 2**30 - 35, 2**30 - 41]
    assert all(map(primes.is_prime, large))
    # products of two primes, squares, and strong pseudoprimes to the bases 2, 3, 5, 7 and to 37
    composite = [large[-1] * large[-2], large[-1] ** 2, 3215031751, 3825123056546413051]
    assert not any(map(primes.is_prime, composite))
    for below in (large[0], large[2], large[3]):
        assert primes.prime_up_to(below) == below
    assert primes.prime_up_to(composite[0]) == 1152921423002469683  # by factor(1)


def test_id_multi_hash_of_many_buckets() -> None:
    buckets = [(2**63 - 1) // factor for factor in (29, 47, 67, 83)]
    results = IDMultiHash(buckets)(torch.tensor([2**62, -1]))
    for i, size in enumerate(buckets):
        prime = primes.prime_up_to((29, 47, 67, 83)[i] * size)
        products = [x * (1, 3, 5, 7)[i] % 2**64 for x in (2**62, -1)]
        assert results[f"multi_hash_{i}"].tolist() == [x % prime % size for x in products]
    for place in range(4):
        wrong = [size + (i == place) for i, size in enumerate(buckets)]
        with pytest.raises(ValueError, match=rf"num_buckets has {wrong[place]}, expected at most"):
            IDMultiHash(wrong)
    for wrong_buckets in ([1.5], ["3"], None, 7):
        with pytest.raises(TypeError, match=r"IDMultiHash: num_buckets.* expected"):
            IDMultiHash(wrong_buckets)  # type: ignore[arg-type]


@given(
    st.lists(st.floats(-1e6, 1e6, width=32), max_size=10),
    st.lists(st.floats(-1e3, 1e3, width=32) | st.sampled_from([-(2.0**70), 2.0**63]), max_size=6),
)
def test_bucketize_for_every_dtype(values: list[float], bounds: list[float]) -> None:
    bounds = sorted(bounds)
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int64):
        given_values = torch.tensor(values).to(dtype)
        expected = [sum(bound <= value for bound in bounds) for value in given_values.tolist()]
        assert one(given_values, Bucketize(bounds)).tolist() == expected


def test_bucketize_of_large_integers_is_exact() -> None:
    values = torch.tensor([2**53, 2**53 + 1, 2**63 - 1])
    bounds = torch.tensor([2**53 + 1, 2**63 - 1])
    assert one(values, Bucketize(bounds)).tolist() == [0, 1, 2]


def strings(rows: list[list[str]], dtype: torch.dtype) -> RaggedTensor:
    data = [text.encode() for row in rows for text in row]
    values = torch.tensor(list(b"".join(data)), dtype=torch.uint8).view(dtype)
    outer = torch.tensor([0, *map(len, rows)]).cumsum(0)
    return RaggedTensor(values, [outer, torch.tensor([0, *map(len, data)]).cumsum(0)])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_hash_of_strings(dtype: torch.dtype) -> None:
    given_strings = strings([["3true", ""], [], ["test"]], dtype)
    features = [
        feature("farm", SelectField("s"), Hash("farm")),
        feature("murmur", SelectField("s"), Hash("murmur")),
        feature("cut", SelectField("s"), SequenceTruncate(1, False, n_dims=3), Hash("farm")),
    ]
    results = FeatureEngine(features)({"s": given_strings})
    farm = [-4880158226897771312, -7286425919675154353, 8581389452482819506]
    assert rows_of(results["farm"]) == [farm[:2], [], farm[2:]]
    values, offsets = given_strings.values(), given_strings.offsets()[1]
    assert torch.equal(results["murmur"].values(), ops.murmurhash64a([values], [offsets])[0])
    # an empty list is added to the row without any: the empty string
    assert rows_of(results["cut"]) == [[farm[1]], [farm[1]], [farm[2]]]
    flat = one(RaggedTensor(values, offsets), Hash("farm"))
    assert isinstance(flat, Tensor)
    assert flat.tolist() == farm


def test_murmur_and_cross_are_those_of_recis() -> None:
    """Values of RecIS's own tests."""
    text = ragged([[0, 1, 2], [1, 2, 3]], dtype=torch.int8)
    assert one(text, Hash("murmur")).tolist() == [-4003751876240412087, -1042754718167355375]
    data = {"x": ragged([[1001], [1002], [1003]]), "y": ragged([[1], [2], [3]])}
    select = SelectFields([SelectField("x"), SelectField("y")])
    crossed = FeatureEngine([feature("c", select, FeatureCross())])(data)["c"]
    assert crossed.values().tolist() == [
        -7808879811642834040,
        -4967483181219983279,
        1752425377096056168,
    ]


def test_the_first_weight_of_a_repeated_id_counts_in_a_cross() -> None:
    x = RaggedTensor(torch.tensor([7, 8, 7]), torch.tensor([0, 3]), torch.tensor([2.0, 3.0, 5.0]))
    y = RaggedTensor(torch.tensor([1, 1]), torch.tensor([0, 2]), torch.tensor([0.5, 9.0]))
    assert FeatureCross()([x, y]).weight().tolist() == [1.0, 1.5]


def test_truncation_of_lists_and_of_dense_tensors() -> None:
    outer, inner = torch.tensor([0, 3, 4]), torch.tensor([0, 2, 3, 5, 6])
    lists = RaggedTensor(torch.arange(6), [outer, inner], torch.arange(6.0))
    cut = one(lists, SequenceTruncate(2, check_length=False, n_dims=3))
    assert cut.values().tolist() == [2, 3, 4, 5]
    assert [offsets.tolist() for offsets in cut.offsets()] == [[0, 2, 4], [0, 1, 3, 4, 4]]
    assert cut.weight().tolist() == [2, 3, 4, 5]
    dense = torch.arange(12).reshape(2, 6)
    left, right = (
        one(dense, SequenceTruncate(4, False, truncate_side=side)) for side in ("left", "right")
    )
    assert left.tolist() == dense[:, 2:].tolist()
    assert right.tolist() == dense[:, :4].tolist()
    assert one(dense, SequenceTruncate(9)) is not None
    assert one(ragged([[1, 2, 3]]), SequenceTruncate(3, truncate=False)).values().tolist() == [
        1,
        2,
        3,
    ]


@pytest.mark.parametrize("dense", [False, True])
def test_cross_of_two_fields(dense: bool) -> None:
    x, y = ragged([[1, 1], [2, 3]], weights=not dense), ragged([[5, 6], [5, 5]])
    data = {"x": x.to_dense() if dense else x, "y": y.to_dense() if dense else y}
    select = SelectFields([SelectField("x"), SelectField("y")])
    result = FeatureEngine([feature("c", select, FeatureCross(), Mod(1000))])(data)["c"]
    expected = ops.feature_cross_ragged(
        [x.values()], x.offsets(), [y.values()], y.offsets(), x_weights=[x.weight()]
    )
    assert torch.equal(result.values(), ops.mod(expected.values, [1000])[0])
    assert torch.equal(result.offsets()[0], expected.offsets[0])
    assert torch.equal(result.weight(), expected.weights[0])


def many_features() -> list[Feature]:
    chain = (SelectField("id"), Mod(100))
    return [
        feature("a", *chain),
        feature("b", SelectField("id"), Mod(100), IDMultiHash([10, 20])),
        feature("same as b", SelectField("id"), Mod(100), IDMultiHash([10, 20])),
        feature("c", SelectField("id"), Mod(7)),
        feature("d", SelectField("other"), Mod(7)),
        feature("e", SelectField("price"), Bucketize([1.0, 2.0])),
        feature("f", SelectField("clicks"), SequenceTruncate(2, False), Mod(9)),
        feature("g", SelectField("clicks"), SequenceTruncate(1, False, truncate_side="right")),
        feature("h", SelectField("price"), Bucketize([5.0])),
    ]


def many_fields() -> dict[str, Any]:
    return {
        "id": torch.randint(-(2**62), 2**62, (6,)),
        "other": torch.arange(8).reshape(2, 4),
        "price": torch.rand(5) * 3,
        "clicks": ragged([[1, 2, 3], [], [40]], weights=True),
        "label": torch.ones(3),
    }


def test_equal_beginnings_are_computed_once_and_kinds_in_one_call() -> None:
    features = many_features()
    engine, data = FeatureEngine(features), many_fields()
    with CountCalls() as counter:
        results = engine(data)
    # ids of a to d are one call, those of f follow a truncation
    assert counter.calls == {"mod": 2, "multi_hash": 1, "bucketize": 1, "ragged_cutoff_2d": 1}
    assert results["b_multi_hash_0"] is results["same as b_multi_hash_0"]
    for single in features:
        alone = FeatureEngine([single])(data, remain_no_use_data=False)
        for key, value in alone.items():
            for a, b in zip(parts(value), parts(results[key]), strict=True):
                assert torch.equal(a, b)


def parts(value: Any) -> Sequence[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    weights = [] if value.weight() is None else [value.weight()]
    return [value.values(), *value.offsets(), *weights]


def test_inputs_stay_and_unused_fields_pass() -> None:
    data = many_fields()
    before = {name: [part.clone() for part in parts(value)] for name, value in data.items()}
    engine = FeatureEngine(many_features())
    results = engine(data)
    assert list(data) == list(before)
    for name, value in data.items():
        assert all(torch.equal(a, b) for a, b in zip(parts(value), before[name], strict=True))
    assert results["label"] is data["label"]
    assert "label" not in engine(data, remain_no_use_data=False)
    overwritten = FeatureEngine([feature("id", SelectField("id"), Mod(5))])(data)
    assert overwritten["id"].tolist() == ops.mod([data["id"]], [5])[0].tolist()
    again = copy.deepcopy(engine)(data)
    assert all(
        torch.equal(a, b)
        for key in again
        for a, b in zip(parts(again[key]), parts(results[key]), strict=True)
    )


def test_the_input_may_be_the_field() -> None:
    engine = FeatureEngine([feature("a", SelectField("a", from_dict=False), Mod(5))])
    assert engine(torch.tensor([7]))["a"].tolist() == [2]


class Scale(FeatureOp):
    """An op of a user's own, with a parameter, fused by concatenation."""

    calls = 0

    def __init__(self, start: float) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor(start))

    @classmethod
    def run(cls, ops: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        Scale.calls += 1
        factors = torch.stack([op.factor for op in ops])
        sizes = [len(value) for value in inputs]
        scaled = torch.cat(list(inputs)) * factors.repeat_interleave(torch.tensor(sizes))
        return list(scaled.split(sizes))


def test_ops_of_your_own() -> None:
    engine = FeatureEngine(
        [
            feature("a", SelectField("x"), Scale(2.0)),
            feature("b", SelectField("x"), Scale(2.0)),
            feature("c", SelectField("y"), Scale(3.0), Bucketize([4.0])),
        ]
    )
    assert len(list(engine.parameters())) == 3  # without a config, nothing is shared
    Scale.calls = 0
    results = engine({"x": torch.tensor([1.0]), "y": torch.tensor([1.0, 2.0])})
    assert Scale.calls == 1
    assert results["a"].tolist() == [2.0]
    assert results["c"].tolist() == [0, 1]
    results["b"].sum().backward()
    assert [p.grad is not None for p in engine.parameters()].count(True) == 3


def test_compiles_whole() -> None:
    engine = FeatureEngine(
        [
            feature("a", SelectField("id"), Mod(100), IDMultiHash([10, 20])),
            feature("b", SelectField("clicks"), Mod(7)),
            feature("c", SelectField("price"), Bucketize([1.0, 2.0])),
        ]
    )
    data = many_fields()
    expected = engine(data)
    compiled = torch.compile(engine, fullgraph=True, backend="aot_eager")(data)
    assert list(compiled) == list(expected)
    for key, value in expected.items():
        assert all(
            torch.equal(a, b) for a, b in zip(parts(value), parts(compiled[key]), strict=True)
        )


def test_a_field_says_how_wide_it_is() -> None:
    select = SelectField("clicks", dim=4)
    clicks = ragged([[1, 2], [], [3]])
    result = FeatureEngine([Feature("a").add_op(select).add_op(Mod(2))])({"clicks": clicks})["a"]
    assert result.shape == (3, 4)
    assert result.to_dense(-1).tolist() == [[1, 0, -1, -1], [-1] * 4, [1, -1, -1, -1]]
    assert torch.equal(select({"clicks": torch.zeros(2, 4)}), torch.zeros(2, 4))
    wrong: list[tuple[Any, str]] = [
        (ragged([[1, 2, 3, 4, 5]]), "has a row of 5, expected at most dim, 4"),
        (torch.zeros(2, 3), "has a row of 3, expected dim, 4"),
    ]
    for value, message in wrong:
        with pytest.raises(ValueError, match=message):
            select({"clicks": value})


def test_a_sequence_says_what_it_holds() -> None:
    truncate = SequenceTruncate(2, check_length=False, dtype=torch.int64)
    assert truncate(ragged([[1, 2, 3]])).values().tolist() == [2, 3]
    with pytest.raises(TypeError, match=r"got values of torch.float32, expected one of int64"):
        truncate(ragged([[1.0]], dtype=torch.float32))  # type: ignore[list-item]
