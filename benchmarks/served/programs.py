"""C++ programs that run packages: compiled once, called with a file of inputs."""

from __future__ import annotations

import io
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import torch_dynemb as td

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))
from tutorials.serving.compile_command import compile_flags, link_flags  # noqa: E402

OPS = Path(td.__file__).with_name("_C.abi3.so")


class Programs:
    """The programs of this folder.

    Args:
        folder: for what is compiled, and for inputs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def printed(
        self, name: str, packages: Sequence[Path], inputs: Sequence[list[Tensor]], *words: object
    ) -> list[str]:
        """The lines that a program prints.

        Args:
            name: of its source, without suffix; compiled when it is called first.
            packages: its first arguments.
            inputs: of each model, saved in a file whose name follows those of packages and ops.
            words: the other arguments.

        Raises:
            CalledProcessError: it does not compile, or has failed.
        """
        program = self._folder / name
        if not program.is_file():
            compiler = ["c++", "-O2", *compile_flags(), str(HERE / f"{name}.cpp")]
            subprocess.run([*compiler, *link_flags(), "-o", str(program)], check=True)
        saved = io.BytesIO()
        torch.save(tuple(inputs), saved)
        file = self._folder / "inputs.pt"
        file.write_bytes(saved.getvalue())
        command = [program, *packages, OPS, file, *map(str, words)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return printed.splitlines()
