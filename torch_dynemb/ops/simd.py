"""The instruction set that the CPU kernels use."""

from __future__ import annotations

import torch


def simd_level() -> int:
    """Return 0 for baseline, 1 for x86-64-v3 (AVX2), 2 for x86-64-v4 (AVX-512)."""
    level: int = torch.ops.dynemb.simd_level()
    return level


def set_simd_level(level: int) -> None:
    """Choose the instruction set for the whole process. All levels give the same bits.

    Args:
        level: as returned by :func:`simd_level`; at most that of the processor.

    Raises:
        RuntimeError: the processor does not have that level.
    """
    torch.ops.dynemb.set_simd_level(level)
