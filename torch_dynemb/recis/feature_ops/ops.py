"""Ops of a feature engine, with the names and arguments of RecIS's."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from torch_dynemb import ops
from torch_dynemb.argument_checks import integers
from torch_dynemb.recis.feature_ops.primes import prime_up_to
from torch_dynemb.recis.ragged.tensor import RaggedTensor

Value = Tensor | RaggedTensor

_MULTIPLIERS = (1, 3, 5, 7)
_PRIME_FACTORS = (29, 47, 67, 83)
_INTEGERS = (torch.int64, torch.int32)


class FeatureOp(nn.Module):
    """An op of features. One of your own has :meth:`run`, and what else it needs of these.

    Ops neither change their inputs nor keep anything of a call.

    Example:
        >>> class Shift(FeatureOp):
        ...     def __init__(self, by):
        ...         super().__init__()
        ...         self.by = by
        ...
        ...     def config(self):
        ...         return self.by
        ...
        ...     @classmethod
        ...     def run(cls, ops, inputs):
        ...         return [value + op.by for op, value in zip(ops, inputs)]
        >>> Shift(2)(torch.tensor([1, 5]))
        tensor([3, 7])
    """

    def config(self) -> Hashable:
        """Ops of one class with equal configs, on one input, are computed once.

        Default: the op itself, so that it is shared with no other.
        """
        return self

    def check(self, owner: str, value: Any) -> None:
        """Raises an error that begins with ``owner`` for a value that the op cannot take."""

    @classmethod
    def run(cls, ops_: Sequence[Any], inputs: Sequence[Any]) -> Sequence[Any]:
        """The results of several ops of this class, each for its input: where calls are fused."""
        raise NotImplementedError(f"{cls.__name__} has no run()")

    def forward(self, value: Any) -> Any:
        """The result for one input."""
        self.check(type(self).__name__, value)
        return self.run([self], [value])[0]


def _check_value(owner: str, value: Any) -> None:
    if not isinstance(value, (Tensor, RaggedTensor)):
        raise TypeError(f"{owner} got a {type(value).__name__}, expected a Tensor or RaggedTensor")


def _check_dtype(owner: str, value: Any, dtypes: Sequence[torch.dtype]) -> None:
    _check_value(owner, value)
    if value.dtype not in dtypes:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{owner} got values of {value.dtype}, expected one of {names}")


def _values(value: Value) -> Tensor:
    values = value.values() if isinstance(value, RaggedTensor) else value
    return values.contiguous()


def _with_values(value: Value, values: Tensor) -> Value:
    """Other values in the same rows, with the same weights."""
    if isinstance(value, Tensor):
        return values
    return value.with_values(values)


def _words(offsets: Tensor) -> Tensor:
    return offsets.to(torch.int64).contiguous()


class SelectField(FeatureOp):
    """A field of the input.

    Args:
        name: of the field.
        dtype: what its values have to be; default: any.
        dim: size of its last dimension, or, of a RaggedTensor, that of its dense form: the
            innermost rows may be shorter, and are checked, which waits for a GPU.
        from_dict: False: the input is no dict but the field itself.
    """

    def __init__(
        self,
        name: str,
        dtype: torch.dtype | None = None,
        dim: int | None = None,
        from_dict: bool = True,
    ) -> None:
        super().__init__()
        self.name, self.dtype, self.dim, self.from_dict = name, dtype, dim, from_dict

    def config(self) -> Hashable:
        return self.name, self.dtype, self.dim, self.from_dict

    def check(self, owner: str, value: Any) -> None:
        if self.from_dict:
            if not isinstance(value, Mapping):
                raise TypeError(f"{owner}: the input is a {type(value).__name__}, expected a dict")
            if self.name not in value:
                raise KeyError(f"{owner}: the input has no field {self.name!r}, but {list(value)}")
        field = self._field(value)
        _check_value(f"{owner}: field {self.name!r}", field)
        if self.dtype is not None:
            _check_dtype(f"{owner}: field {self.name!r}", field, (self.dtype,))
        if self.dim is not None:
            ragged = isinstance(field, RaggedTensor)
            size = field.max_length if ragged else (field.shape[-1] if field.dim() > 0 else 0)
            if size > self.dim or (not ragged and size != self.dim):
                raise ValueError(
                    f"{owner}: field {self.name!r} has a row of {size}, expected "
                    f"{'at most ' if ragged else ''}dim, {self.dim}"
                )

    def _field(self, value: Any) -> Any:
        return value[self.name] if self.from_dict else value

    def _select(self, value: Any) -> Any:
        field = self._field(value)
        if self.dim is None or isinstance(field, Tensor):
            return field
        shape = (*([-1] * len(field.offsets())), self.dim)
        return RaggedTensor._of_parts(field.values(), field.offsets(), field.weight(), shape)

    @classmethod
    def run(cls, ops: Sequence[SelectField], inputs: Sequence[Any]) -> list[Value]:
        return [op._select(value) for op, value in zip(ops, inputs, strict=True)]


class SelectFields(FeatureOp):
    """Several fields of the input as a list, for :class:`FeatureCross`.

    Args:
        input_list: which.
    """

    def __init__(self, input_list: Sequence[SelectField]) -> None:
        super().__init__()
        self.input_list = list(input_list)

    def config(self) -> Hashable:
        return tuple(op.config() for op in self.input_list)

    def check(self, owner: str, value: Any) -> None:
        for op in self.input_list:
            op.check(owner, value)

    @classmethod
    def run(cls, ops: Sequence[SelectFields], inputs: Sequence[Any]) -> list[list[Value]]:
        return [
            [field._select(value) for field in op.input_list]
            for op, value in zip(ops, inputs, strict=True)
        ]


class Mod(FeatureOp):
    """Ids modulo a number, as unsigned 64-bit numbers; int64.

    Args:
        mod_value: at least 1.

    Raises:
        ValueError: it is less.
    """

    def __init__(self, mod_value: int) -> None:
        super().__init__()
        if mod_value < 1:
            raise ValueError(f"Mod: mod_value is {mod_value}, expected at least 1")
        self.mod_value = int(mod_value)

    def config(self) -> Hashable:
        return self.mod_value

    def check(self, owner: str, value: Any) -> None:
        _check_dtype(f"{owner}: Mod", value, _INTEGERS)

    @classmethod
    def run(cls, ops_: Sequence[Mod], inputs: Sequence[Value]) -> list[Value]:
        ids = [_values(value).to(torch.int64) for value in inputs]
        results = ops.mod(ids, [op.mod_value for op in ops_])
        return [_with_values(v, result) for v, result in zip(inputs, results, strict=True)]


class Bucketize(FeatureOp):
    """How many boundaries are at most a value; int64. NaN is above all.

    Args:
        boundary: numbers, ascending. For float32 values they are rounded to float32.

    Raises:
        ValueError: they do not ascend.
    """

    _DTYPES = (torch.float32, torch.float64, *_INTEGERS)

    def __init__(self, boundary: Sequence[float] | Tensor) -> None:
        super().__init__()
        numbers = boundary.tolist() if isinstance(boundary, Tensor) else list(boundary)
        if any(not a <= b for a, b in pairwise(numbers)):
            raise ValueError(f"Bucketize: boundary is {numbers}, expected ascending numbers")
        self._numbers = tuple(numbers)
        for dtype in self._DTYPES:
            self.register_buffer(self._buffer(dtype), self._bounds(dtype), persistent=False)

    @staticmethod
    def _buffer(dtype: torch.dtype) -> str:
        return f"boundary_{str(dtype).removeprefix('torch.')}"

    def _bounds(self, dtype: torch.dtype) -> Tensor:
        if dtype.is_floating_point:
            return torch.tensor(self._numbers, dtype=dtype)
        # an integer is at least b where it is at least the next integer; some are beyond the dtype
        least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        bounds = [least if b < least else math.ceil(b) for b in self._numbers if b <= most]
        return torch.tensor([b for b in bounds if b <= most], dtype=dtype)

    def config(self) -> Hashable:
        return self._numbers

    def check(self, owner: str, value: Any) -> None:
        _check_dtype(f"{owner}: Bucketize", value, self._DTYPES)

    @classmethod
    def run(cls, ops_: Sequence[Bucketize], inputs: Sequence[Value]) -> list[Value]:
        values = [_values(value) for value in inputs]
        bounds = [
            getattr(op, cls._buffer(value.dtype)).to(value.device)
            for op, value in zip(ops_, values, strict=True)
        ]
        results = ops.bucketize(values, bounds)
        return [_with_values(v, result) for v, result in zip(inputs, results, strict=True)]


class FeatureCross(FeatureOp):
    """Ids of all pairs of the distinct ids of two features, row by row.

    Its input is the list of two that :class:`SelectFields` gives: RaggedTensors, or dense tensors
    [rows, L], of ids. Ids of pairs are RecIS's. Weights are products; of an id that occurs several
    times in a row the first weight counts (:func:`torch_dynemb.ops.feature_cross_ragged`).
    """

    def config(self) -> Hashable:
        return ()

    def check(self, owner: str, value: Any) -> None:
        owner = f"{owner}: FeatureCross"
        if not isinstance(value, list) or len(value) != 2:
            what = f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__
            raise TypeError(f"{owner} got {what}, expected a list of two: give it SelectFields")
        for field in value:
            _check_dtype(owner, field, _INTEGERS)
            if isinstance(field, Tensor) and field.dim() != 2:
                raise ValueError(
                    f"{owner} got a tensor of shape {tuple(field.shape)}, expected 2 dimensions"
                )
        rows = [self._rows(field)[1].shape[0] - 1 for field in value]
        if rows[0] != rows[1]:
            raise ValueError(f"{owner} got {rows[0]} and {rows[1]} rows, expected as many")

    @staticmethod
    def _rows(field: Value) -> tuple[Tensor, Tensor, Tensor | None, list[Tensor]]:
        """Ids, innermost offsets, weights, the other offsets."""
        if isinstance(field, RaggedTensor):
            *outer, inner = field.offsets()
            return _values(field).to(torch.int64), _words(inner), field.weight(), outer
        offsets = torch.arange(field.shape[0] + 1, device=field.device) * field.shape[1]
        return field.to(torch.int64).flatten(), offsets, None, []

    @classmethod
    def run(cls, ops_: Sequence[FeatureCross], inputs: Sequence[list[Value]]) -> list[RaggedTensor]:
        x = [cls._rows(pair[0]) for pair in inputs]
        y = [cls._rows(pair[1]) for pair in inputs]
        crossed = ops.feature_cross_ragged(
            [part[0] for part in x],
            [part[1] for part in x],
            [part[0] for part in y],
            [part[1] for part in y],
            x_weights=[part[2] for part in x],
            y_weights=[part[2] for part in y],
        )
        return [
            RaggedTensor._of_parts(values, [*part[3], offsets], weights)
            for part, values, offsets, weights in zip(x, *crossed, strict=True)
        ]


class SequenceLengthError(ValueError, AssertionError):
    """A row is longer than it may be; RecIS asserts that it is not."""


class SequenceTruncate(FeatureOp):
    """At most ``seq_len`` elements in every row: ids, or (``n_dims=3``) lists of ids.

    Weights are cut with the values. With ``n_dims=3`` every row of a RaggedTensor has exactly
    ``seq_len`` lists afterwards: shorter ones get empty lists at the right. A dense tensor is cut
    in its second dimension.

    Args:
        seq_len: how many.
        check_length: a longer row is a :class:`SequenceLengthError`; it waits for a GPU.
        truncate: False: only check.
        truncate_side: where longer rows lose elements, "left" or "right".
        n_dims: 2 or 3.
        dtype: what the values have to be; default: any.

    Raises:
        ValueError: an argument is none of these.
    """

    def __init__(
        self,
        seq_len: int = 64,
        check_length: bool = True,
        truncate: bool = True,
        truncate_side: str = "left",
        n_dims: int = 2,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if seq_len < 1:
            raise ValueError(f"SequenceTruncate: seq_len is {seq_len}, expected at least 1")
        if truncate_side not in ("left", "right"):
            raise ValueError(
                f"SequenceTruncate: truncate_side is {truncate_side!r}, expected 'left' or 'right'"
            )
        if n_dims not in (2, 3):
            raise ValueError(f"SequenceTruncate: n_dims is {n_dims}, expected 2 or 3")
        self.seq_len, self.check_length, self.truncate = seq_len, check_length, truncate
        self.truncate_side, self.n_dims, self.dtype = truncate_side, n_dims, dtype

    def config(self) -> Hashable:
        sides = (self.truncate, self.truncate_side)
        return self.seq_len, self.check_length, *sides, self.n_dims, self.dtype

    def check(self, owner: str, value: Any) -> None:
        owner = f"{owner}: SequenceTruncate"
        _check_value(owner, value)
        if self.dtype is not None:
            _check_dtype(owner, value, (self.dtype,))
        ragged = isinstance(value, RaggedTensor)
        dims = len(value.offsets()) + 1 if ragged else value.dim()
        if self.check_length and dims > 1:
            longest = value.get_shape(1) if ragged else value.shape[1]
            if longest > self.seq_len:
                raise SequenceLengthError(
                    f"{owner} got a row of {longest} elements, expected at most seq_len, "
                    f"{self.seq_len}: check_length=False cuts it without a word"
                )
        if (ragged and dims != self.n_dims) or dims < self.n_dims:
            raise ValueError(f"{owner} got {dims} dimensions, expected n_dims, {self.n_dims}")

    def _cut_dense(self, value: Tensor) -> Tensor:
        if self.truncate_side == "left":
            return value[:, -self.seq_len :]
        return value[:, : self.seq_len]

    @classmethod
    def run(cls, ops_: Sequence[SequenceTruncate], inputs: Sequence[Value]) -> list[Value]:
        results = list(inputs)
        ragged: dict[int, list[int]] = {}
        for i, (op, value) in enumerate(zip(ops_, inputs, strict=True)):
            if not op.truncate:
                continue
            if isinstance(value, Tensor):
                results[i] = op._cut_dense(value)
            else:
                ragged.setdefault(op.n_dims, []).append(i)
        for n_dims, numbers in ragged.items():
            cut = cls._cut_2d if n_dims == 2 else cls._cut_3d
            given = [results[i] for i in numbers]
            for i, result in zip(numbers, cut([ops_[i] for i in numbers], given), strict=True):
                results[i] = result
        return results

    @staticmethod
    def _cut_2d(ops_: Sequence[SequenceTruncate], given: Sequence[Any]) -> list[RaggedTensor]:
        cut = ops.ragged_cutoff_2d(
            [_values(value) for value in given],
            [_words(value.offsets()[0]) for value in given],
            [op.seq_len for op in ops_],
            weights=[value.weight() for value in given],
            drop_left=[op.truncate_side == "left" for op in ops_],
        )
        return [
            RaggedTensor._of_parts(values, [offsets], weights)
            for values, offsets, weights in zip(*cut, strict=True)
        ]

    @staticmethod
    def _cut_3d(ops_: Sequence[SequenceTruncate], given: Sequence[Any]) -> list[RaggedTensor]:
        cut = ops.ragged_cutoff_3d(
            [_values(value) for value in given],
            [_words(value.offsets()[0]) for value in given],
            [_words(value.offsets()[1]) for value in given],
            [op.seq_len for op in ops_],
            weights=[value.weight() for value in given],
            drop_left=[op.truncate_side == "left" for op in ops_],
        )
        return [
            RaggedTensor._of_parts(values, [outer, inner], weights)
            for values, outer, inner, weights in zip(*cut, strict=True)
        ]


class IDMultiHash(FeatureOp):
    """Up to four hashes of ids: a dict of ``f"{prefix}_{i}"``, whose values have the ids' shape.

    Hash i is ``(id * (1, 3, 5, 7)[i] % prime[i]) % num_buckets[i]``, unsigned. ``prime[i]`` is the
    largest prime up to ``(29, 47, 67, 83)[i] * num_buckets[i]``: RecIS's parameters.

    Args:
        num_buckets: of each hash.
        prefix: of the names.

    Raises:
        ValueError: there are no hashes or more than four, or a number of buckets is less than 1 or
            so large that the prime might leave int64.
    """

    def __init__(self, num_buckets: Sequence[int], prefix: str = "multi_hash") -> None:
        super().__init__()
        self.num_buckets, self.prefix = integers("IDMultiHash: num_buckets", num_buckets), prefix
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
        _check_dtype(f"{owner}: IDMultiHash", value, _INTEGERS)

    @classmethod
    def run(cls, ops_: Sequence[IDMultiHash], inputs: Sequence[Value]) -> list[dict[str, Value]]:
        hashes = ops.multi_hash(
            [_values(value).to(torch.int64) for value in inputs],
            [op.multipliers for op in ops_],
            [op.primes for op in ops_],
            [op.num_buckets for op in ops_],
        )
        return [
            {f"{op.prefix}_{i}": _with_values(value, result) for i, result in enumerate(results)}
            for op, value, results in zip(ops_, inputs, hashes, strict=True)
        ]


class Hash(FeatureOp):
    """Hashes of byte strings: the innermost rows of a RaggedTensor of uint8 or int8.

    The result lacks that dimension: a RaggedTensor of int64, or a Tensor [n] where there was no
    other. Weights, if there are any, have to be those of strings.

    Args:
        hash_type: "farm" (FarmHash Fingerprint64) or "murmur" (MurmurHash64A with
            seed 0).

    Raises:
        ValueError: another ``hash_type``.
    """

    def __init__(self, hash_type: str) -> None:
        super().__init__()
        if hash_type not in ("farm", "murmur"):
            raise ValueError(f"Hash: hash_type is {hash_type!r}, expected 'farm' or 'murmur'")
        self.hash_type = hash_type

    def config(self) -> Hashable:
        return self.hash_type

    def check(self, owner: str, value: Any) -> None:
        owner = f"{owner}: Hash"
        if not isinstance(value, RaggedTensor):
            raise TypeError(f"{owner} got a {type(value).__name__}, expected a RaggedTensor")
        _check_dtype(owner, value, (torch.uint8, torch.int8))
        weight, strings = value.weight(), value.offsets()[-1].shape[0] - 1
        if weight is None:
            return
        if len(value.offsets()) == 1 or weight.shape[0] != strings:
            raise ValueError(
                f"{owner} got {weight.shape[0]} weights, expected one for each of {strings} "
                "strings that lie in rows, or none"
            )

    @classmethod
    def run(cls, ops_: Sequence[Hash], inputs: Sequence[RaggedTensor]) -> list[Value]:
        results: list[Value] = [value.values() for value in inputs]
        for hash_type, hashed in (("farm", ops.farmhash), ("murmur", ops.murmurhash64a)):
            numbers = [i for i, op in enumerate(ops_) if op.hash_type == hash_type]
            hashes = hashed(
                [_values(inputs[i]) for i in numbers],
                [_words(inputs[i].offsets()[-1]) for i in numbers],
            )
            for i, values in zip(numbers, hashes, strict=True):
                outer = inputs[i].offsets()[:-1]
                weight = inputs[i].weight()
                results[i] = RaggedTensor._of_parts(values, outer, weight) if outer else values
        return results


__all__ = [
    "Bucketize",
    "FeatureCross",
    "FeatureOp",
    "Hash",
    "IDMultiHash",
    "Mod",
    "SelectField",
    "SelectFields",
    "SequenceLengthError",
    "SequenceTruncate",
]
