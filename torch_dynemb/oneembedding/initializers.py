"""OneEmbedding's names for the initializers of torch_dynemb."""

from __future__ import annotations

from torch_dynemb.initializers import Constant, Initializer, Normal, TruncatedNormal, Uniform

DEFAULT_INITIALIZER = Normal(0.0, 0.05)


def make_uniform_initializer(low: float = 0.0, high: float = 1.0) -> Initializer:
    """Initialize rows from the uniform distribution on [low, high).

    Args:
        low, high: the bounds.

    Returns:
        A :class:`torch_dynemb.Uniform`.

    Raises:
        TypeError, ValueError: a bound is not a finite number, or low is more than high.
    """
    return Uniform(low, high)


def make_normal_initializer(mean: float = 0.0, std: float = 1.0) -> Initializer:
    """Initialize rows from a normal distribution.

    Args:
        mean: of the distribution.
        std: its standard deviation, at least 0.

    Returns:
        A :class:`torch_dynemb.Normal`.

    Raises:
        TypeError, ValueError: a value is not a finite number, or std is less than 0.
    """
    return Normal(mean, std)


def make_constant_initializer(value: float) -> Initializer:
    """Initialize rows with one value.

    Args:
        value: a finite number.

    Returns:
        A :class:`torch_dynemb.Constant`.

    Raises:
        TypeError, ValueError: ``value`` is not a finite number.
    """
    return Constant(value)


def make_trunc_normal_initializer(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> Initializer:
    """Initialize rows from a normal distribution truncated to [a, b].

    Args:
        mean: of the distribution before truncation.
        std: its standard deviation, more than 0.
        a, b: the least and the largest value; a is less than b.

    Returns:
        A :class:`torch_dynemb.TruncatedNormal`.

    Raises:
        TypeError, ValueError: a value is not a finite number, or out of its range.
    """
    return TruncatedNormal(mean, std, a, b)


__all__ = [
    "DEFAULT_INITIALIZER",
    "make_constant_initializer",
    "make_normal_initializer",
    "make_trunc_normal_initializer",
    "make_uniform_initializer",
]
