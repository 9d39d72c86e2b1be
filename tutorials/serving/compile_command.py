"""Prints the command that compiles a C++ program against the torch that is installed here.

The server needs Boost and simdjson, too (apt-get install libboost-dev libsimdjson-dev).

python -m tutorials.serving.compile_command server | sh
python -m tutorials.serving.compile_command main --source main.cpp | sh
"""

from __future__ import annotations

import argparse
import os
import shlex
from pathlib import Path

from torch_dynemb import serving

SOURCE = Path(__file__).with_name("server.cpp")


def compile_command(
    output: str | os.PathLike[str], source: str | os.PathLike[str] = SOURCE
) -> list[str]:
    """Return the command, word by word.

    Args:
        output: the program that it makes.
        source: a C++ file that includes ``serving/model.h``.
    """
    libraries = ["-lsimdjson"] if Path(source) == SOURCE else []
    compiler, flags = os.environ.get("CXX", "c++"), serving.cpp_flags()
    return [
        *(compiler, "-O2", *flags.compile, os.fspath(source)),
        *(*flags.link, *libraries, "-o", os.fspath(output)),
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
