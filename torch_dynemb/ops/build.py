"""Facts about the build of the compiled library."""

from __future__ import annotations

from typing import NamedTuple

import torch

from torch_dynemb.ops.memory import has_cuda_kernels

_COMPILERS = ("GCC", "Clang")


class CompiledWith(NamedTuple):
    """Compiler and optional parts of the library.

    Attributes:
        compiler: of the C++ sources, with its version.
        liburing: whether files can be read by io_uring, where the kernel allows it.
        cuda: whether there are CUDA kernels.
        cuda_architectures: GPUs with machine code, such as 90 for sm_90; empty without CUDA
            kernels, and where ``TORCH_CUDA_ARCH_LIST`` chose.
    """

    compiler: str
    liburing: bool
    cuda: bool
    cuda_architectures: tuple[int, ...]


def compiled_with() -> CompiledWith:
    """Return the compiler and the optional parts of the library.

    Example:
        >>> compiled_with().compiler.split()[0] in ("GCC", "Clang")
        True
    """
    compiler, major, minor, patch, liburing = torch.ops.dynemb.compiled_with()
    cuda = has_cuda_kernels()
    architectures = torch.ops.dynemb.cuda_architectures() if cuda else ()
    return CompiledWith(
        f"{_COMPILERS[compiler]} {major}.{minor}.{patch}",
        bool(liburing),
        cuda,
        tuple(architectures),
    )


__all__ = ["CompiledWith", "compiled_with"]
