"""Prints the command that compiles server.cpp against the torch that is installed here.

python -m tutorials.serving.compile_command [OUTPUT] | sh
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

import torch
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_name("server.cpp")
HEADERS = Path(__file__).resolve().parents[2] / "csrc"


def compile_flags() -> list[str]:
    """Flags with which programs are compiled that include ``serving/model.h``."""
    flags = ["-std=c++20", f"-I{HEADERS}"]
    for folder in cpp_extension.include_paths():
        flags += ["-isystem", folder]
    return [*flags, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]


def link_flags() -> list[str]:
    """Flags with which they are linked."""
    flags = []
    for folder in cpp_extension.library_paths():
        flags += [f"-L{folder}", f"-Wl,-rpath,{folder}"]
    # the op library needs libtorch, of which these programs themselves call little
    return [*flags, "-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl", "-pthread"]


def compile_command(output: str | os.PathLike[str]) -> list[str]:
    """The command, word by word.

    Args:
        output: the program that it makes.
    """
    compiler = os.environ.get("CXX", "c++")
    return [
        *(compiler, "-O2", *compile_flags(), str(SOURCE)),
        *(*link_flags(), "-o", os.fspath(output)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", nargs="?", default="server", help="the program (default: server)")
    print(shlex.join(compile_command(parser.parse_args().output)))


if __name__ == "__main__":
    main()
