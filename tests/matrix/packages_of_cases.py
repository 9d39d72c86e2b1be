"""Packages of served models, run in this process or by a program in C++."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from emulator.build import ROOT, compile_source, one_build_at_a_time, run_compiler
from quick_packages import QUICK
from torch import Tensor, nn
from torch._inductor import config
from torch.export import Dim
from torch.utils import _pytree as pytree

from torch_dynemb import serving

OUTPUT = ROOT / "build" / "package_check"
DRIVER = ROOT / "tests" / "matrix" / "package_check.cpp"


class Package:
    """A model's package, called as the model is.

    Args:
        model: frozen, or with ``headroom``, see :func:`torch_dynemb.serving.export`.
        folder: an empty one.
        given: inputs of the model; sizes of others may differ.
        in_cpp: run by a program.
        options: of the export.
    """

    def __init__(
        self, model: nn.Module, folder: Path, given: tuple[Any, ...], in_cpp: bool, **options: Any
    ) -> None:
        self.folder, self.in_cpp = folder, in_cpp
        with config.patch(QUICK):
            serving.export(
                model,
                folder / "package",
                given,
                dynamic_shapes=(tuple(map(_sizes, given)),),  # of forward(*given)
                missing=True,
                **options,
            )
        self.served = serving.load(folder / "package")
        self.missing: list[int] = []  # of the last run

    def __call__(self, *given: Any) -> Any:
        before = self.served.missing
        output = self.served.run(*given)
        self.missing = [now - before[name] for name, now in self.served.missing.items()]
        if not self.in_cpp:
            return output
        leaves, structure = pytree.tree_flatten(output)
        torch.save([of for of in pytree.tree_leaves(given) if of is not None], self._file("in"))
        command = [_program(), self.folder / "package", serving.cpp_flags().library]
        subprocess.run([*command, self._file("in"), self._file("out")], check=True)
        found = torch.load(self._file("out"), weights_only=False)
        assert len(found) == len(leaves)
        return pytree.tree_unflatten(found, structure)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.pt"


def _sizes(given: Any) -> Any:
    """Return dynamic_shapes of an input, with all sizes of its tensors dynamic."""
    if isinstance(given, Tensor):
        return dict.fromkeys(range(given.dim()), Dim.AUTO)
    if isinstance(given, Mapping):
        return {name: _sizes(of) for name, of in given.items()}
    if given is None:
        return None
    if isinstance(given, tuple | list):
        return type(given)(map(_sizes, given))
    return [_sizes(leaf) for leaf in pytree.tree_leaves(given)]


def _program() -> Path:
    program = OUTPUT / "package_check"
    flags = [*serving.cpp_flags().compile, "-O0", "-Wall", "-Wextra"]
    with one_build_at_a_time(OUTPUT):
        object_file = compile_source(DRIVER, flags, output=OUTPUT)
        if not program.is_file() or program.stat().st_mtime < object_file.stat().st_mtime:
            run_compiler([str(object_file), *serving.cpp_flags().link, "-o", str(program)])
    return program
