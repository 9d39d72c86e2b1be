"""Loads a package and runs it."""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dynemb.argument_checks import integer
from torch_dynemb.checkpoint.files.summed_files import DamagedFileError, SummedReader
from torch_dynemb.checkpoint.files.tensor_file import StoredTensor
from torch_dynemb.checkpoint.manifest.places import checked_path
from torch_dynemb.serving.packages.code_file import check_code
from torch_dynemb.serving.packages.inputs import Input, leaves_of, shape_text, tensors_of
from torch_dynemb.serving.packages.manifest import (
    CODE,
    DENSE,
    TABLES,
    PackageManifest,
    ServedTable,
    read_manifest,
)
from torch_dynemb.serving.packages.memory import ConstantMemory
from torch_dynemb.serving.packages.platform import (
    instruction_sets,
    machine,
    torch_series,
    wrong_op,
)

Loader: TypeAlias = torch._C._aoti.AOTIModelPackageLoader

# Code that nobody runs, by package and number of runners. Torch never unloads compiled code, so
# each package's is loaded as often as it is open at the same time, and taken up again.
_idle: defaultdict[tuple[str, int], list[Loader]] = defaultdict(list)


class _Loaded:
    """What runs; goes when the last run that uses it has ended.

    Args:
        loader: of torch, with the compiled code.
        memory: of its constants; None where the code has copies of them on a GPU.
        idle: where the loader goes then.
    """

    def __init__(self, loader: Loader, memory: ConstantMemory | None, idle: list[Loader]) -> None:
        self.loader, self.memory = loader, memory
        weakref.finalize(self, idle.append, loader).atexit = False


class ServedModel:
    """A model of a package, ready to run. Any number of threads may run it.

    Made by :func:`load`. As a context it is closed at its end.

    Args:
        manifest: what its package says of itself.
        loaded: the compiled code, with its constants.

    Attributes:
        version: what the exporting program calls this version of the model.
        tables: number of ids and columns by name of the table.
        device: that the inputs have to be on.
        inputs: name, dtype and sizes of the tensors that the model takes, in the order of
            :meth:`run_flat`.
    """

    def __init__(self, manifest: PackageManifest, loaded: _Loaded) -> None:
        self.version: str | int = manifest.version
        self.tables: dict[str, ServedTable] = dict(manifest.tables)
        self.device = torch.device(manifest.device)
        self.inputs: list[Input] = [i for i in manifest.inputs if i.dtype is not None]
        self._leaves = manifest.inputs
        self._counted = manifest.missing
        self._missing = torch.zeros(len(manifest.missing or ()), dtype=torch.int64)
        self._counting = threading.Lock()
        self._loaded: _Loaded | None = loaded
        in_spec, out_spec = loaded.loader.get_call_spec()
        self._in_spec = pytree.treespec_loads(in_spec)
        self._out_spec = pytree.treespec_loads(out_spec)

    def run(self, *inputs: Any) -> Any:
        """What the model returns for some inputs.

        Args:
            *inputs: put together as ``example_inputs`` of the export, with tensors of their dtypes
                and shapes; sizes that ``dynamic_shapes`` named may be others.

        Returns:
            What the model's forward returned in Python.

        Raises:
            TypeError: the inputs are put together in another way, or have other dtypes.
            ValueError: a tensor has another shape, or is on another device.
            RuntimeError: the model is closed; or an op refuses its input.
        """
        leaves = leaves_of(self._in_spec, inputs)
        outputs = self._run(tensors_of(self._leaves, leaves, self.device))
        result = pytree.tree_unflatten(outputs, self._out_spec)
        if self._counted is None:
            return result
        output, counts = result
        self._count(counts)
        return output

    def run_flat(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As :meth:`run`, for a program that knows nothing of how inputs are put together.

        Args:
            tensors: one for each of :attr:`inputs`.

        Returns:
            The tensors of the output, from left to right.

        Raises:
            TypeError: their number, or a dtype, is another.
            ValueError: a tensor has another shape, or is on another device.
            RuntimeError: the model is closed; or an op refuses its input.
        """
        if len(tensors) != len(self.inputs):
            names = [given.name for given in self.inputs]
            raise TypeError(f"run_flat: got {len(tensors)} tensors, expected one each of {names}")
        outputs = self._run(tensors_of(self.inputs, tensors, self.device))
        if self._counted is not None:
            self._count(outputs.pop())
        return outputs

    @property
    def missing(self) -> dict[str, int]:
        """How many ids runs have not found since the load, by name of the table.

        Occurrences of ids that are not in a table; its padding id is none.

        Raises:
            RuntimeError: the package does not count them.
        """
        if self._counted is None:
            raise RuntimeError(
                "missing: the package does not count ids that are not found: export the model with "
                "missing=True"
            )
        with self._counting:
            return dict(zip(self._counted, self._missing.tolist(), strict=True))

    def _count(self, counts: Tensor) -> None:
        """Adds what a run has not found."""
        with self._counting:
            self._missing += counts.to(self._missing.device)

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        loaded = self._loaded
        if loaded is None:
            raise RuntimeError(
                "run: this model is closed, and its tables are gone: load the package again"
            )
        outputs = loaded.loader.boxed_run(tensors)
        if loaded.memory is None:
            return outputs
        # an output that is a constant, or a part of one, has to outlive the tables
        return [o.clone() if loaded.memory.has(o) else o for o in outputs]

    __call__ = run

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` has been called."""
        return self._loaded is None

    def close(self) -> None:
        """Gives the memory of the tables back, when runs of other threads have ended."""
        self._loaded = None

    def __enter__(self) -> ServedModel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        takes = ", ".join(
            f"{given.name}: {str(given.dtype).removeprefix('torch.')} {shape_text(given.sizes)}"
            for given in self.inputs
        )
        state = " closed," if self.closed else ""
        return f"ServedModel({state}version={self.version!r}, inputs=[{takes}])"


def load(path: str | os.PathLike[str], *, runners: int = 1) -> ServedModel:
    """Loads a package that :func:`torch_dynemb.serving.export` has written.

    Every file is compared with its checksum. Tables are read into memory of their own, aligned to
    64 bytes and of huge pages where the system has them, which :meth:`ServedModel.close` gives
    back; the code itself stays in the process, and is used again when the same package is loaded
    again. A package has machine code, which runs in this process: load no package of a stranger.

    Args:
        path: of the folder.
        runners: how many threads may run the model at the same time; further ones wait.

    Returns:
        The model, ready to run.

    Raises:
        FileNotFoundError: there is no package.
        DamagedFileError: a file is missing, or is not what was written.
        RuntimeError: the package was made for another version of torch or of this library, for
            another processor, or for a device that is not here.
        MemoryError: the tables do not fit in memory.

    Example:
        >>> import torch_dynemb as td
        >>> td.serving.load("no-such-folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        FileNotFoundError: serving.load: ... is no serving package: ...
    """
    folder = checked_path("serving.load", path)
    integer("serving.load: runners", runners, least=1)
    manifest = read_manifest(folder)
    _check_platform(folder, manifest)
    check_code(folder / CODE, manifest.files[CODE])
    memory = _read_constants(folder, manifest)
    idle = _idle[manifest.uuid, runners]
    try:
        loader = idle.pop()
    except IndexError:
        loader = Loader(str(folder / CODE), "model", False, runners, -1)
    asked = set(loader.get_constant_fqns())
    if asked != manifest.constants.keys():
        raise DamagedFileError(
            f"{folder / CODE}: the code asks for the tensors {sorted(asked)}, but the package has "
            f"{sorted(manifest.constants)}: files of different packages were mixed"
        )
    if manifest.device == "cpu":
        # the code keeps the addresses, and references to the tensors that it never gives back;
        # those own no memory
        loader.load_constants(memory.tensors, False, True, True)
        return ServedModel(manifest, _Loaded(loader, memory, idle))
    device = torch.device(manifest.device)
    copies = {name: tensor.to(device) for name, tensor in memory.tensors.items()}
    loader.load_constants(copies, False, True, False)  # into memory that the code owns
    return ServedModel(manifest, _Loaded(loader, None, idle))


def _check_platform(folder: Path, manifest: PackageManifest) -> None:
    """Raises RuntimeError where the code of a package cannot run."""

    def refuse(what: str, remedy: str) -> None:
        raise RuntimeError(
            f"serving.load: {folder} was exported {what}: {remedy}, or export the model again here"
        )

    if torch_series(manifest.torch) != torch_series(torch.__version__):
        refuse(
            f"with torch {manifest.torch}, but this is torch {torch.__version__}",
            f"load it with torch {torch_series(manifest.torch)}",
        )
    if manifest.machine != machine():
        refuse(
            f"for {manifest.machine}, but this machine is {machine()}", "load it on such a machine"
        )
    absent = sorted(set(manifest.instructions) - set(instruction_sets()))
    if absent:
        refuse(
            f"for a processor that has {', '.join(absent)}, which this one lacks",
            "load it on such a machine",
        )
    if manifest.device == "cuda" and not torch.cuda.is_available():
        refuse("for CUDA, but this process has no GPU", "load it where there is one")
    wrong = wrong_op(manifest.ops.items())
    if wrong is not None:
        refuse(
            f"with torch_dynemb {manifest.library} and calls {wrong}",
            f"load it with torch_dynemb {manifest.library}",
        )


def _read_constants(folder: Path, manifest: PackageManifest) -> ConstantMemory:
    """Reads the tensors of a package into memory, and compares all checksums.

    Raises:
        DamagedFileError: a file is not what was written.
    """
    readers: dict[str, SummedReader] = {}
    try:
        for file in (TABLES, DENSE):
            readers[file] = SummedReader(folder / file, manifest.files[file])
        memory = ConstantMemory(_stored(readers, manifest.constants, folder))
        for file, reader in readers.items():
            # in the order of the file, so that each block is read once
            for name in sorted(reader.tensors, key=lambda name: reader.tensors[name].begin):
                if manifest.constants.get(name) == file:
                    tensor = memory.tensors[name]
                    reader.read(name, 0, tensor if tensor.dim() else tensor.reshape(1))
            reader.finish()
        return memory
    finally:
        for reader in readers.values():
            reader.close()


def _stored(
    readers: Mapping[str, SummedReader], constants: Mapping[str, str], folder: Path
) -> dict[str, StoredTensor]:
    """Dtype and shape of each constant."""
    stored = {}
    for name, file in constants.items():
        if name not in readers[file].tensors:
            raise DamagedFileError(f"{folder / file}: the file lacks the tensor {name!r}")
        stored[name] = readers[file].tensors[name]
    return stored


__all__ = ["ServedModel", "load"]
