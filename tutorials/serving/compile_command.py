"""Prints the command that compiles a C++ program against the torch that is installed here.

python -m tutorials.serving.compile_command server | sh
python -m tutorials.serving.compile_command main --source main.cpp | sh
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


def compile_command(
    output: str | os.PathLike[str], source: str | os.PathLike[str] = SOURCE
) -> list[str]:
    """The command, word by word.

    Args:
        output: the program that it makes.
        source: a C++ file that includes ``serving/model.h``.
    """
    compiler = os.environ.get("CXX", "c++")
    return [
        *(compiler, "-O2", *compile_flags(), os.fspath(source)),
        *(*link_flags(), "-o", os.fspath(output)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("output", nargs="?", default="server", help="the program (default: server)")
    parser.add_argument(
        "--source",
        default=str(SOURCE),
        metavar="FILE",
        help="a C++ file of yours (default: server.cpp of this folder)",
    )
    options = parser.parse_args()
    if Path(options.output).suffix in (".cpp", ".cc", ".cxx", ".h"):
        parser.error(
            f"the output is {options.output}, which the compiler would write over: name the "
            f"program, and give the file as --source {options.output}"
        )
    print(shlex.join(compile_command(options.output, options.source)))


if __name__ == "__main__":
    main()
