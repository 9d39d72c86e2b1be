"""RecIS's initializers by its names.

In a table, the initial value of a row depends only on seed, table, id and column, not on when or on
which rank the id arrives. A table takes the initial seed of a ``generator`` and draws nothing from
it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.initializers import (
    Constant,
    Initializer,
    InitRecord,
    Normal,
    TruncatedNormal,
    Uniform,
    XavierNormal,
    XavierUniform,
)
from torch_dynemb.ops.columns import InitKind

_FANS = ("fan_in", "fan_out")


class RecisInitializer(Initializer):
    """Base of RecIS's initializers, which fill tables and tensors.

    Args:
        identity: initializer of torch_dynemb, or arguments; equal ones compare equal.
        generator: source of :meth:`generate`; default: torch's own. A table takes its seed.

    Example:
        >>> initializer = NormalInitializer(std=0.01, generator=torch.Generator())
        >>> initializer.set_shape([100, 8])
        >>> initializer.build()
        >>> initializer.generate().shape
        torch.Size([100, 8])
    """

    def __init__(
        self, identity: Initializer | tuple[float | str, ...], generator: torch.Generator | None
    ) -> None:
        self._identity = identity
        self._generator = generator
        self.seed = None if generator is None else generator.initial_seed()
        self._shape: list[int] | None = None
        self._dtype = torch.float32
        self._record: InitRecord | None = None

    def of_table(self, rows: int) -> Initializer:
        """Return the initializer for a matrix of ``rows`` rows; RecIS's tables take ``block_size``.

        Args:
            rows: at least 1.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not define of_table(): a subclass returns the "
            "initializer of a table's rows there"
        )

    def record(self, dim: int) -> InitRecord:
        return self.of_table(dim).record(dim)

    def set_shape(self, shape: Sequence[int]) -> None:
        """Set the shape of the tensors of :meth:`generate`.

        Args:
            shape: [rows, dim].
        """
        self._shape = list(shape)

    def set_dtype(self, dtype: torch.dtype = torch.float32) -> None:
        """Set the dtype of the tensors of :meth:`generate`; it is float32 by default.

        Args:
            dtype: a floating-point dtype.
        """
        self._dtype = dtype

    def build(self) -> None:
        """Finish the settings; call it once.

        Raises:
            RuntimeError: it was called before.
            ValueError: the shape is missing or has not two dimensions.
        """
        if self._record is not None:
            raise RuntimeError(
                f"{type(self).__name__}.build() has been called before: make another initializer"
            )
        if self._shape is None or len(self._shape) != 2:
            raise ValueError(
                f"{type(self).__name__}.build: shape is {self._shape}, expected [rows, dim] of "
                "set_shape()"
            )
        rows, dim = self._shape
        self._record = self.of_table(rows).record(dim)

    def generate(self) -> Tensor:
        """Return a new tensor with initial values.

        Raises:
            RuntimeError: :meth:`build` was not called.
        """
        if self._record is None or self._shape is None:
            raise RuntimeError(
                f"{type(self).__name__}.generate: build() has not been called: call set_shape() "
                "and build() first"
            )
        device = None if self._generator is None else self._generator.device
        tensor = torch.empty(self._shape, dtype=self._dtype, device=device)
        kind, given = self._record.kind, self._record.parameters
        if kind == InitKind.CONSTANT:
            return tensor.fill_(given[0])
        if kind == InitKind.UNIFORM:
            return tensor.uniform_(given[0], given[0] + given[1], generator=self._generator)
        if kind == InitKind.NORMAL:
            return tensor.normal_(given[0], given[1], generator=self._generator)
        mean, std, _, _, low, high = given
        return torch.nn.init.trunc_normal_(tensor, mean, std, low, high, generator=self._generator)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, RecisInitializer):
            same_kind = isinstance(self._identity, Initializer) or type(self) is type(other)
            return same_kind and (self._identity, self.seed) == (other._identity, other.seed)
        if isinstance(other, Initializer):
            return self.seed is None and self._identity == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        # names of tables depend on this text
        given = self._identity
        if isinstance(given, Initializer):
            text = repr(given)
        else:
            text = f"{type(self).__name__}({', '.join(map(repr, given))})"
        return text if self.seed is None else f"{text} of seed {self.seed}"


class _Fixed(RecisInitializer):
    """Initializer that does not depend on the number of rows; equals torch_dynemb's."""

    def __init__(self, value: Initializer, generator: torch.Generator | None) -> None:
        super().__init__(value, generator)
        self._value = value

    def of_table(self, rows: int) -> Initializer:
        return self._value


class ConstantInitializer(_Fixed):
    """All values are ``init_val``.

    Args:
        init_val: the value.
        dtype: see :meth:`set_dtype`.
    """

    def __init__(self, init_val: float = 0.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(Constant(init_val), None)
        self.set_dtype(dtype)


class UniformInitializer(_Fixed):
    """Uniform in [a, b).

    Args:
        a: the lower bound.
        b: the upper bound, not below ``a``.
        generator: see :class:`RecisInitializer`.

    Raises:
        ValueError: the bounds are in the wrong order, or not finite.
    """

    def __init__(
        self, a: float = 0.0, b: float = 1.0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(Uniform(a, b), generator)


class NormalInitializer(_Fixed):
    """Normal with ``mean`` and standard deviation ``std``.

    Args:
        mean: of the values.
        std: at least 0.
        generator: see :class:`RecisInitializer`.

    Raises:
        ValueError: ``std`` is negative, or a number is not finite.
    """

    def __init__(
        self, mean: float = 0.0, std: float = 1.0, generator: torch.Generator | None = None
    ) -> None:
        super().__init__(Normal(mean, std), generator)


class TruncNormalInitializer(_Fixed):
    """Normal within ``a`` to ``b`` standard deviations from the mean.

    Args:
        mean: of the distribution before it is cut.
        std: at least 0, of the distribution before it is cut.
        a: the lower bound, in standard deviations from the mean.
        b: the upper bound, in standard deviations from the mean.
        generator: see :class:`RecisInitializer`.

    Raises:
        ValueError: ``std`` is negative, or the bounds are in the wrong order.

    Example:
        >>> TruncNormalInitializer(std=0.5, b=4.0)
        TruncatedNormal(mean=0.0, std=0.5, low=-1.0, high=2.0)
    """

    def __init__(
        self,
        mean: float = 0.0,
        std: float = 1.0,
        a: float = -2.0,
        b: float = 2.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(TruncatedNormal(mean, std, mean + a * std, mean + b * std), generator)


class XavierUniformInitializer(RecisInitializer):
    """Uniform in +-gain * sqrt(6 / (dim + rows)); for a table, rows is its ``block_size``.

    Args:
        gain: a factor.
        generator: see :class:`RecisInitializer`.

    Raises:
        ValueError: ``gain`` is not a valid factor.
    """

    def __init__(self, gain: float = 1.0, generator: torch.Generator | None = None) -> None:
        XavierUniform(gain)  # checks gain
        super().__init__((gain,), generator)
        self._gain = gain

    def of_table(self, rows: int) -> Initializer:
        return XavierUniform(self._gain, fan_out=rows)


class XavierNormalInitializer(RecisInitializer):
    """Normal with std = gain * sqrt(2 / (dim + rows)); for a table, rows is its ``block_size``.

    Args:
        gain: a factor.
        generator: see :class:`RecisInitializer`.

    Raises:
        ValueError: ``gain`` is not a valid factor.
    """

    def __init__(self, gain: float = 1.0, generator: torch.Generator | None = None) -> None:
        XavierNormal(gain)  # checks gain
        super().__init__((gain,), generator)
        self._gain = gain

    def of_table(self, rows: int) -> Initializer:
        return XavierNormal(self._gain, fan_out=rows)


class _Kaiming(RecisInitializer):
    """Standard deviation gain / sqrt(fan), where fan is dim or the number of rows."""

    def __init__(
        self, a: float, mode: str, nonlinearity: str, generator: torch.Generator | None
    ) -> None:
        owner = type(self).__name__
        if mode.lower() not in _FANS:
            raise ValueError(f"{owner}: mode is {mode!r}, expected one of {_FANS}")
        kind: Any = nonlinearity.lower()
        self._gain = torch.nn.init.calculate_gain(kind, a)
        self._fan_in = mode.lower() == "fan_in"
        super().__init__((a, mode.lower(), kind), generator)


class KaimingUniformInitializer(_Kaiming):
    """Uniform with standard deviation gain / sqrt(fan) (He et al. 2015).

    Args:
        a: negative slope of a leaky ReLU.
        mode: "fan_in": fan is dim; "fan_out": the number of rows, or the ``block_size`` of a table.
        nonlinearity: as for torch.nn.init.calculate_gain.
        generator: see :class:`RecisInitializer`.

    Raises:
        ValueError: another mode or nonlinearity.
    """

    def __init__(
        self,
        a: float = 0.0,
        mode: str = "fan_in",
        nonlinearity: str = "leaky_relu",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(a, mode, nonlinearity, generator)

    def of_table(self, rows: int) -> Initializer:
        if self._fan_in:
            return XavierUniform(self._gain)  # both dimensions are dim
        bound = self._gain * math.sqrt(3.0 / rows)
        return Uniform(-bound, bound)


class KaimingNormalInitializer(_Kaiming):
    """Normal with standard deviation gain / sqrt(fan) (He et al. 2015).

    Args:
        shape, dtype: see :meth:`set_shape` and :meth:`set_dtype`.
        a, mode, nonlinearity, generator: see :class:`KaimingUniformInitializer`.

    Raises:
        ValueError: another mode or nonlinearity.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        a: float = 0.0,
        mode: str = "fan_in",
        nonlinearity: str = "leaky_relu",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__(a, mode, nonlinearity, generator)
        if shape is not None:
            self.set_shape(shape)
        self.set_dtype(dtype)

    def of_table(self, rows: int) -> Initializer:
        if self._fan_in:
            return XavierNormal(self._gain)  # both dimensions are dim
        return Normal(0.0, self._gain / math.sqrt(rows))


def initializer_of(given: Initializer, block_size: int) -> Initializer:
    """Return the initializer of a table's rows, without a generator."""
    return given.of_table(block_size) if isinstance(given, RecisInitializer) else given


def seed_of(given: Initializer | None) -> int | None:
    """Return the seed of an initializer, or None."""
    return given.seed if isinstance(given, RecisInitializer) else None


__all__ = [
    "ConstantInitializer",
    "KaimingNormalInitializer",
    "KaimingUniformInitializer",
    "NormalInitializer",
    "RecisInitializer",
    "TruncNormalInitializer",
    "UniformInitializer",
    "XavierNormalInitializer",
    "XavierUniformInitializer",
    "initializer_of",
    "seed_of",
]
