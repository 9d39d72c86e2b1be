"""C++ programs that run packages: compiled once, called with a file of inputs."""

from __future__ import annotations

import io
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from torch_dynemb import serving

HERE = Path(__file__).resolve().parent


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
        """Return the lines that a program prints.

        Args:
            name: of its source, without suffix; compiled when it is called first.
            packages: its first arguments.
            inputs: of each model, saved in a file; its name follows those of packages and ops.
            words: the other arguments.

        Raises:
            CalledProcessError: it does not compile, or has failed.
        """
        program, flags = self._folder / name, serving.cpp_flags()
        if not program.is_file():
            compiler = ["c++", "-O2", *flags.compile, str(HERE / f"{name}.cpp")]
            subprocess.run([*compiler, *flags.link, "-o", str(program)], check=True)
        saved = io.BytesIO()
        torch.save(tuple(inputs), saved)
        file = self._folder / "inputs.pt"
        file.write_bytes(saved.getvalue())
        command = [program, *packages, flags.library, file, *map(str, words)]
        printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        return printed.splitlines()
