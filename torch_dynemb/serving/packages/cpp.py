"""Compiler flags for C++ programs that run packages."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from torch_dynemb._library.library import LIBRARY


class CppFlags(NamedTuple):
    """Flags of a C++ compiler such as g++.

    Attributes:
        compile: flags of sources that include ``serving/model.h`` or ``serving/versioned_model.h``.
        link: flags to link such programs.
        library: the library of ops, which the program passes to ``load_ops``.
    """

    compile: list[str]
    link: list[str]
    library: Path


def _headers() -> Path:
    """Return the folder of the headers: in a wheel inside the package, in a checkout beside it."""
    package = LIBRARY.resolve().parent
    for directory in (package / "include", package.parent / "csrc"):
        if (directory / "serving" / "model.h").is_file():
            return directory
    raise RuntimeError(
        f"cpp_flags: {package / 'include'} has no C++ headers: install torch_dynemb again, from "
        "a wheel or by pip install . in its sources"
    )


def cpp_flags() -> CppFlags:
    """Return the flags to compile a C++ program that serves packages without Python.

    They are those of g++ and clang for the installed torch and torch_dynemb.

    Returns:
        Flags to compile and to link, and the path of the library of ops.

    Raises:
        RuntimeError: the installation has no headers.

    Example:
        >>> import torch_dynemb as td
        >>> td.serving.cpp_flags().compile[0]
        '-std=c++20'
    """
    from torch.utils import cpp_extension  # here, since it imports setuptools

    compiles = ["-std=c++20", f"-I{_headers()}"]
    for folder in cpp_extension.include_paths():
        compiles += ["-isystem", folder]
    compiles.append(f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}")
    links = []
    for folder in cpp_extension.library_paths():
        links += [f"-L{folder}", f"-Wl,-rpath,{folder}"]
    # the op library needs libtorch, which these programs themselves hardly call
    links += ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl", "-pthread"]
    return CppFlags(compiles, links, LIBRARY)


__all__ = ["CppFlags", "cpp_flags"]
