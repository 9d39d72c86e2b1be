"""RecIS's names of initializers.

They have no ``generator``: a row's initial value follows from seed, table, id and
the column, whenever and on whichever rank an id comes.
"""

from __future__ import annotations

# ruff: noqa: N802 - names of RecIS
from torch_dynemb.initializers import Constant, Normal, TruncatedNormal, Uniform


def ConstantInitializer(init_val: float = 0.0) -> Constant:
    """Every value is ``init_val``."""
    return Constant(init_val)


def UniformInitializer(a: float = 0.0, b: float = 1.0) -> Uniform:
    """Uniform in [a, b)."""
    return Uniform(a, b)


def NormalInitializer(mean: float = 0.0, std: float = 1.0) -> Normal:
    """Normal with ``mean`` and standard deviation ``std``."""
    return Normal(mean, std)


def TruncNormalInitializer(
    mean: float = 0.0, std: float = 1.0, a: float = -2.0, b: float = 2.0
) -> TruncatedNormal:
    """Normal within ``a`` to ``b`` standard deviations from the mean.

    Example:
        >>> TruncNormalInitializer(std=0.5, b=4.0)
        TruncatedNormal(mean=0.0, std=0.5, low=-1.0, high=2.0)
    """
    return TruncatedNormal(mean, std, mean + a * std, mean + b * std)


__all__ = [
    "ConstantInitializer",
    "NormalInitializer",
    "TruncNormalInitializer",
    "UniformInitializer",
]
