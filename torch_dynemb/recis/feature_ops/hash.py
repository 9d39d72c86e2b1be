"""Ops that hash ids and strings."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from torch_dynemb import ops
from torch_dynemb.argument_checks import text
from torch_dynemb.recis.arguments import numbers
from torch_dynemb.recis.feature_ops.feature_op import FeatureOp
from torch_dynemb.recis.feature_ops.primes import prime_up_to
from torch_dynemb.recis.feature_ops.values import (
    INTEGERS,
    Value,
    check_dtype,
    flat_values,
    with_values,
)
from torch_dynemb.recis.functional.string_ops import (
    djb2hash,
    ev_farmhash,
    fused_int64_to_string_int8,
    sdbmhash,
)
from torch_dynemb.recis.ragged.offsets import as_int64
from torch_dynemb.recis.ragged.tensor import RaggedTensor

_MULTIPLIERS = (1, 3, 5, 7)
_PRIME_FACTORS = (29, 47, 67, 83)
_TEXT_HASHES = (ops.farmhash, ops.murmurhash64a, sdbmhash, djb2hash)


class IDMultiHash(FeatureOp):
    """Up to four hashes of ids: a dict of ``f"{prefix}_{i}"``, with values of the ids' shape.

    Hash i is ``(id * (1, 3, 5, 7)[i] % prime[i]) % num_buckets[i]``, unsigned. ``prime[i]`` is the
    largest prime up to ``(29, 47, 67, 83)[i] * num_buckets[i]``: RecIS's parameters.

    Args:
        num_buckets: of each hash.
        prefix: of the names.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``num_buckets`` has not one to four entries, or an entry is less than 1 or so
            large that the prime might exceed int64.
    """

    def __init__(self, num_buckets: Sequence[int], prefix: str = "multi_hash") -> None:
        super().__init__()
        self.num_buckets = numbers("IDMultiHash: num_buckets", num_buckets)
        self.prefix = text("IDMultiHash: prefix", prefix)
        if not 1 <= len(self.num_buckets) <= len(_MULTIPLIERS) or min(self.num_buckets) < 1:
            raise ValueError(
                f"IDMultiHash: num_buckets is {self.num_buckets}, expected 1 to "
                f"{len(_MULTIPLIERS)} numbers of at least 1"
            )
        for factor, buckets in zip(_PRIME_FACTORS, self.num_buckets, strict=False):
            if factor * buckets >= 1 << 63:
                raise ValueError(
                    f"IDMultiHash: num_buckets has {buckets}, expected at most "
                    f"{((1 << 63) - 1) // factor} at this place"
                )
        self.multipliers = list(_MULTIPLIERS[: len(self.num_buckets)])
        self.primes = [
            prime_up_to(factor * buckets)
            for factor, buckets in zip(_PRIME_FACTORS, self.num_buckets, strict=False)
        ]

    def config(self) -> Hashable:
        return tuple(self.num_buckets), self.prefix

    def check(self, owner: str, value: Any) -> None:
        check_dtype(f"{owner}: IDMultiHash", value, INTEGERS)

    @classmethod
    def run(cls, ops_: Sequence[IDMultiHash], inputs: Sequence[Value]) -> list[dict[str, Value]]:
        hashes = ops.multi_hash(
            [flat_values(value).to(torch.int64) for value in inputs],
            [op.multipliers for op in ops_],
            [op.primes for op in ops_],
            [op.num_buckets for op in ops_],
        )
        return [
            {f"{op.prefix}_{i}": with_values(value, result) for i, result in enumerate(results)}
            for op, value, results in zip(ops_, inputs, hashes, strict=True)
        ]


class Hash(FeatureOp):
    """Hashes of byte strings: the innermost rows of a RaggedTensor of uint8 or int8.

    The result lacks this dimension: it is a RaggedTensor of int64, or a Tensor [n] if no other
    dimension is ragged. There must be one weight per string, or none.

    Args:
        hash_type: "farm" (FarmHash Fingerprint64), "ev_farm" (the same without its sign bit) or
            "murmur" (MurmurHash64A with seed 0).

    Raises:
        ValueError: another ``hash_type``.
    """

    def __init__(self, hash_type: str) -> None:
        super().__init__()
        if hash_type not in ("farm", "ev_farm", "murmur"):
            raise ValueError(
                f"Hash: hash_type is {hash_type!r}, expected 'farm', 'ev_farm' or 'murmur'"
            )
        self.hash_type = hash_type

    def config(self) -> Hashable:
        return self.hash_type

    def check(self, owner: str, value: Any) -> None:
        owner = f"{owner}: Hash"
        if not isinstance(value, RaggedTensor):
            raise TypeError(f"{owner} got a {type(value).__name__}, expected a RaggedTensor")
        check_dtype(owner, value, (torch.uint8, torch.int8))
        weight, strings = value.weight(), value.offsets()[-1].shape[0] - 1
        if weight is None:
            return
        if len(value.offsets()) == 1 or weight.shape[0] != strings:
            raise ValueError(
                f"{owner} got {weight.shape[0]} weights, expected one for each of {strings} "
                "strings, or none"
            )

    @classmethod
    def run(cls, ops_: Sequence[Hash], inputs: Sequence[RaggedTensor]) -> list[Value]:
        results: list[Value] = [value.values() for value in inputs]
        kinds = {"farm": ops.farmhash, "ev_farm": ev_farmhash, "murmur": ops.murmurhash64a}
        for hash_type, hashed in kinds.items():
            numbers = [i for i, op in enumerate(ops_) if op.hash_type == hash_type]
            hashes = hashed(
                [flat_values(inputs[i]) for i in numbers],
                [as_int64(inputs[i].offsets()[-1]) for i in numbers],
            )
            for i, values in zip(numbers, hashes, strict=True):
                outer = inputs[i].offsets()[:-1]
                weight = inputs[i].weight()
                results[i] = RaggedTensor._of_parts(values, outer, weight) if outer else values
        return results


class StringMultiHash(FeatureOp):
    """Up to four hashes of the decimal text of ids: a dict of ``f"{prefix}_{i}"``.

    Hash i is the i-th of FarmHash, MurmurHash64A, sdbm and djb2, modulo ``num_buckets[i]``,
    unsigned: RecIS's. Values have the shape of the ids.

    Args:
        num_buckets: of each hash.
        prefix: of the names.

    Raises:
        TypeError: an argument has a wrong type.
        ValueError: ``num_buckets`` has not one to four entries, or an entry is less than 1.
    """

    def __init__(self, num_buckets: Sequence[int], prefix: str = "str_multi_hash") -> None:
        super().__init__()
        self.num_buckets = numbers("StringMultiHash: num_buckets", num_buckets)
        self.prefix = text("StringMultiHash: prefix", prefix)
        if not 1 <= len(self.num_buckets) <= len(_TEXT_HASHES) or min(self.num_buckets) < 1:
            raise ValueError(
                f"StringMultiHash: num_buckets is {self.num_buckets}, expected 1 to "
                f"{len(_TEXT_HASHES)} numbers of at least 1"
            )

    def config(self) -> Hashable:
        return tuple(self.num_buckets), self.prefix

    def check(self, owner: str, value: Any) -> None:
        check_dtype(f"{owner}: StringMultiHash", value, INTEGERS)

    @classmethod
    def run(
        cls, ops_: Sequence[StringMultiHash], inputs: Sequence[Value]
    ) -> list[dict[str, Value]]:
        ids = [flat_values(value).to(torch.int64) for value in inputs]
        characters, begins = fused_int64_to_string_int8([of_op.flatten() for of_op in ids])
        results: list[dict[str, Value]] = [{} for _ in ops_]
        for i, hashed in enumerate(_TEXT_HASHES):
            chosen = [n for n, op in enumerate(ops_) if len(op.num_buckets) > i]
            hashes = hashed([characters[n] for n in chosen], [begins[n] for n in chosen])
            buckets = ops.mod(hashes, [ops_[n].num_buckets[i] for n in chosen])
            for n, of_op in zip(chosen, buckets, strict=True):
                result = with_values(inputs[n], of_op.reshape(ids[n].shape))
                results[n][f"{ops_[n].prefix}_{i}"] = result
        return results


__all__ = ["Hash", "IDMultiHash", "StringMultiHash"]
