"""Initial values of rows.

A row's initial value is a pure function of (seed, table, id, column). It is the same whenever the
id arrives, on every rank, device and instruction set.

Xavier and Kaiming scales are those of ``torch.nn.init`` for a matrix [num_embeddings, dim], so
fan_in is dim. A table without a vocabulary has no num_embeddings, so fan_out is an argument
(default: dim).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer, number
from torch_dynemb.ops.columns import INIT_RECORD_COLUMNS, InitKind


@dataclass(frozen=True)
class InitRecord:
    """An initializer as kernels read it.

    Attributes:
        kind: number of the distribution.
        parameters: up to six, by kind.
    """

    kind: InitKind
    parameters: tuple[float, ...]


@dataclass(frozen=True)
class Initializer:
    """Base of the initializers. Instances are values without random state."""

    def record(self, dim: int) -> InitRecord:
        """Return the form that kernels read.

        Args:
            dim: columns of a row, at least 1.

        Raises:
            NotImplementedError: the class defines none. :class:`ByColumn` has a record for each
                part.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define record(): a subclass says there what rows "
            "begin with"
        )


_LARGEST = torch.finfo(torch.float32).max


def _finite(initializer: Initializer, **values: float) -> None:
    for name, value in values.items():
        if not abs(number(f"{type(initializer).__name__}: {name}", value)) <= _LARGEST:
            raise ValueError(
                f"{type(initializer).__name__}: {name} is {value}, expected a finite number of "
                "single precision"
            )


def _positive(initializer: Initializer, name: str, value: float) -> None:
    _finite(initializer, **{name: value})
    if value <= 0:
        raise ValueError(f"{type(initializer).__name__}: {name} is {value}, expected more than 0")


def _check_fan(initializer: Initializer, gain: float, fan_out: int | None) -> None:
    _positive(initializer, "gain", gain)
    if fan_out is not None:
        _positive(initializer, "fan_out", fan_out)


@dataclass(frozen=True)
class Constant(Initializer):
    """Every value is ``value``.

    Args:
        value: finite in single precision.

    Raises:
        TypeError: ``value`` is not a number.
        ValueError: it is not finite.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        _finite(self, value=self.value)

    def record(self, dim: int) -> InitRecord:
        return InitRecord(InitKind.CONSTANT, (self.value,))


@dataclass(frozen=True)
class Uniform(Initializer):
    """Uniform in [low, high); rounding may give high itself.

    Args:
        low, high: the bounds; they and their difference are finite in single precision.

    Raises:
        TypeError: a bound is not a number.
        ValueError: a bound, or the difference, is not finite, or low is more than high.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        _finite(self, low=self.low, high=self.high)
        if self.low > self.high:
            raise ValueError(f"Uniform: low is {self.low}, expected at most high = {self.high}")
        _finite(self, **{"high - low": self.high - self.low})

    def record(self, dim: int) -> InitRecord:
        return InitRecord(InitKind.UNIFORM, (self.low, self.high - self.low))


def default_initializer(embedding_dim: int) -> Uniform:
    """Return the initializer of tables that are given none: uniform within 1 / sqrt(embedding_dim).

    ``python -m tutorials.initial_rows`` compares initial values by the recall of a two-tower model.
    This one is best, or close to the best, with every optimizer and dim there.

    Args:
        embedding_dim: columns of a row.
    """
    bound = 1.0 / math.sqrt(embedding_dim)
    return Uniform(-bound, bound)


@dataclass(frozen=True)
class Normal(Initializer):
    """Normal with ``mean`` and standard deviation ``std``.

    Args:
        mean: finite in single precision.
        std: at least 0, and finite in single precision.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is not finite, or std is less than 0.
    """

    mean: float = 0.0
    std: float = 1.0

    def __post_init__(self) -> None:
        _finite(self, mean=self.mean, std=self.std)
        if self.std < 0:
            raise ValueError(f"Normal: std is {self.std}, expected at least 0")

    def record(self, dim: int) -> InitRecord:
        return InitRecord(InitKind.NORMAL, (self.mean, self.std))


@dataclass(frozen=True)
class TruncatedNormal(Initializer):
    """Normal with ``mean`` and ``std`` within [low, high], as ``torch.nn.init.trunc_normal_``.

    Args:
        mean: of the normal distribution before truncation.
        std: its standard deviation, more than 0.
        low, high: the bounds, values and not multiples of std; low is less than high.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is not finite in single precision, or out of its range. Or the bounds
            contain less than 1e-6 of the normal distribution.
    """

    mean: float = 0.0
    std: float = 1.0
    low: float = -2.0
    high: float = 2.0

    def __post_init__(self) -> None:
        _finite(self, mean=self.mean, std=self.std, low=self.low, high=self.high)
        _positive(self, "std", self.std)
        if self.low >= self.high:
            raise ValueError(
                f"TruncatedNormal: low is {self.low}, expected less than high = {self.high}"
            )
        if self._cdf(self.high) - self._cdf(self.low) < 1e-6:
            raise ValueError(
                f"TruncatedNormal: [{self.low}, {self.high}] holds less than 1e-6 of "
                f"normal({self.mean}, {self.std}): widen the bounds"
            )

    def _cdf(self, value: float) -> float:
        return 0.5 * (1 + math.erf((value - self.mean) / (self.std * math.sqrt(2))))

    def record(self, dim: int) -> InitRecord:
        low = self._cdf(self.low)
        return InitRecord(
            InitKind.TRUNCATED_NORMAL,
            (self.mean, self.std, low, self._cdf(self.high) - low, self.low, self.high),
        )


@dataclass(frozen=True)
class XavierUniform(Initializer):
    """Uniform in +-gain * sqrt(6 / (fan_in + fan_out)) (Glorot, Bengio 2010).

    Args:
        gain: more than 0.
        fan_out: number of rows to assume, more than 0; None: the dim.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is not finite in single precision, or not more than 0.
    """

    gain: float = 1.0
    fan_out: int | None = None

    def __post_init__(self) -> None:
        _check_fan(self, self.gain, self.fan_out)

    def record(self, dim: int) -> InitRecord:
        bound = self.gain * math.sqrt(6.0 / (dim + (self.fan_out or dim)))
        return InitRecord(InitKind.UNIFORM, (-bound, 2 * bound))


@dataclass(frozen=True)
class XavierNormal(Initializer):
    """Normal with std = gain * sqrt(2 / (fan_in + fan_out)) (Glorot, Bengio 2010).

    Args:
        gain, fan_out: as in :class:`XavierUniform`.

    Raises:
        TypeError: a value is not a number.
        ValueError: a value is not finite in single precision, or not more than 0.
    """

    gain: float = 1.0
    fan_out: int | None = None

    def __post_init__(self) -> None:
        _check_fan(self, self.gain, self.fan_out)

    def record(self, dim: int) -> InitRecord:
        std = self.gain * math.sqrt(2.0 / (dim + (self.fan_out or dim)))
        return InitRecord(InitKind.NORMAL, (0.0, std))


def _leaky_gain(slope: float) -> float:
    return math.sqrt(2.0 / (1.0 + slope * slope))


@dataclass(frozen=True)
class KaimingUniform(Initializer):
    """Uniform in +-sqrt(6 / ((1 + slope^2) * fan_in)) (He et al. 2015).

    Args:
        slope: of a leaky ReLU for negative inputs; 0: of a ReLU.

    Raises:
        TypeError: ``slope`` is not a number.
        ValueError: it is not finite in single precision.
    """

    slope: float = 0.0

    def __post_init__(self) -> None:
        _finite(self, slope=self.slope)

    def record(self, dim: int) -> InitRecord:
        bound = _leaky_gain(self.slope) * math.sqrt(3.0 / dim)
        return InitRecord(InitKind.UNIFORM, (-bound, 2 * bound))


@dataclass(frozen=True)
class KaimingNormal(Initializer):
    """Normal with std = sqrt(2 / ((1 + slope^2) * fan_in)) (He et al. 2015).

    Args:
        slope: of a leaky ReLU for negative inputs; 0: of a ReLU.

    Raises:
        TypeError: ``slope`` is not a number.
        ValueError: it is not finite in single precision.
    """

    slope: float = 0.0

    def __post_init__(self) -> None:
        _finite(self, slope=self.slope)

    def record(self, dim: int) -> InitRecord:
        return InitRecord(InitKind.NORMAL, (0.0, _leaky_gain(self.slope) / math.sqrt(dim)))


@dataclass(frozen=True)
class ByColumn(Initializer):
    """Different initializers for ranges of columns.

    Args:
        parts: (number of columns, initializer) from the first column on. The numbers must add up
            to the table's dim; construction of the table checks that.

    Raises:
        TypeError: ``parts`` has other elements than such pairs, or contains a ByColumn.
        ValueError: a part has less than one column.

    Example:
        >>> ByColumn(((1, Constant(0.0)), (15, Normal(0.0, 0.01)))).parts[0]
        (1, Constant(value=0.0))
    """

    parts: tuple[tuple[int, Initializer], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.parts, Iterable) or not all(
            isinstance(part, tuple | list) and len(part) == 2 for part in self.parts
        ):
            raise TypeError(
                f"ByColumn: parts is {described(self.parts)}, expected pairs (number of columns, "
                "initializer)"
            )
        parts = [
            (integer(f"ByColumn: parts[{i}][0]", columns), part)
            for i, (columns, part) in enumerate(self.parts)
        ]
        object.__setattr__(self, "parts", tuple(parts))
        for i, (columns, part) in enumerate(parts):
            if not isinstance(part, Initializer):
                raise TypeError(
                    f"ByColumn: parts[{i}][1] is {described(part)}, expected an initializer"
                )
            if columns <= 0:
                raise ValueError(f"ByColumn: a part has {columns} columns, expected at least 1")
            if isinstance(part, ByColumn):
                raise TypeError("ByColumn: a part is a ByColumn itself: write its parts out")


class InitData:
    """Collection of the records of a group's tables in one float64 tensor."""

    def __init__(self) -> None:
        self._records: list[list[float]] = []
        self._vectors: list[tuple[int, Tensor]] = []

    def add(
        self, initializer: Initializer, dim: int, columns: range | None = None
    ) -> tuple[int, int]:
        """Add an initializer; return (first element of its records, number of records).

        Args:
            dim: columns of a row.
            columns: those to describe, as the first ones of a narrower row; default: all.

        Raises:
            ValueError: the parts of a :class:`ByColumn` do not add up to ``dim``.
        """
        first = len(self._records) * INIT_RECORD_COLUMNS
        parts = initializer.parts if isinstance(initializer, ByColumn) else ((dim, initializer),)
        total = sum(columns for columns, _ in parts)
        if total != dim:
            raise ValueError(
                f"initializer: the parts of ByColumn have {total} columns, but embedding_dim is "
                f"{dim}"
            )
        chosen = range(dim) if columns is None else columns
        begin = count = 0
        for width, part in parts:
            record = part.record(dim)
            start, stop = max(begin, chosen.start), min(begin + width, chosen.stop)
            if start < stop:
                self._add_record(
                    start - chosen.start, stop - chosen.start, record.kind, record.parameters
                )
                count += 1
            begin += width
        return first, count

    def add_vector(self, values: Tensor) -> tuple[int, int]:
        """Add a fixed vector, float [dim]."""
        first = len(self._records) * INIT_RECORD_COLUMNS
        self._vectors.append((len(self._records), values.detach().double().cpu()))
        self._add_record(0, values.numel(), InitKind.VECTOR, (0.0,))
        return first, 1

    def _add_record(self, begin: int, end: int, kind: int, parameters: Sequence[float]) -> None:
        record = [float(begin), float(end), float(kind), *parameters]
        self._records.append(record + [0.0] * (INIT_RECORD_COLUMNS - len(record)))

    def tensor(self) -> Tensor:
        """Return float64 [n]: all records, then the vectors they point to."""
        records = torch.tensor(self._records, dtype=torch.float64, device="cpu")
        offset = records.numel()
        for record, values in self._vectors:
            records[record, 3] = offset
            offset += values.numel()
        return torch.cat([records.flatten(), *(values for _, values in self._vectors)])


__all__ = [
    "ByColumn",
    "Constant",
    "Initializer",
    "KaimingNormal",
    "KaimingUniform",
    "Normal",
    "TruncatedNormal",
    "Uniform",
    "XavierNormal",
    "XavierUniform",
]
