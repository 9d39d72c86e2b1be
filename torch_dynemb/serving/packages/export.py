"""Makes a package of a model: compiled code without tables, and the tables beside it."""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._inductor
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_dynemb._version import __version__
from torch_dynemb.argument_checks import described, flag
from torch_dynemb.checkpoint.files.disk import Disk
from torch_dynemb.checkpoint.files.summed_files import FileSums, SummedWriter
from torch_dynemb.checkpoint.files.tensor_file import TensorShape, header_of
from torch_dynemb.checkpoint.manifest.places import checked_path, make_parents, unfinished
from torch_dynemb.checkpoint.parts import table_name
from torch_dynemb.nn.features import exports_for_compiled_code
from torch_dynemb.ops.columns import Meta
from torch_dynemb.serving.freeze import freeze
from torch_dynemb.serving.frozen_tables import FrozenTables
from torch_dynemb.serving.missing import CountsMissing
from torch_dynemb.serving.packages.code_file import sums_of_file
from torch_dynemb.serving.packages.inputs import inputs_of
from torch_dynemb.serving.packages.manifest import (
    CODE,
    DENSE,
    MANIFEST,
    TABLES,
    PackageManifest,
    ServedTable,
    manifest_text,
)
from torch_dynemb.serving.packages.platform import instruction_sets, machine, op_schemas
from torch_dynemb.serving.row_formats import RowKind

_COMPILER = {
    # no values in the code, not even those of tensors of one element
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
}


def export(
    model: nn.Module,
    path: str | os.PathLike[str],
    example_inputs: tuple[Any, ...],
    *,
    dynamic_shapes: Any = None,
    rows: RowKind | None = None,
    version: str | int | None = None,
    missing: bool = False,
) -> Path:
    """Writes a package that serves a model without Python classes of it, and without a compiler.

    The model is frozen, exported by ``torch.export`` and compiled by AOTInductor for the processor
    of this machine. The tables are no part of the compiled code: they lie beside it in safetensors
    files, from which :func:`torch_dynemb.serving.load` and the C++ reader of csrc/serving take
    them. The package is written beside ``path`` and renamed when it is whole.

    Args:
        model: any module that :func:`torch_dynemb.freeze` takes, or a frozen one, which is not
            copied. Where several ranks share its tables, freeze it on all of them with
            ``ranks="first"``, and export on rank 0 what that gives there.
        path: of a folder that does not exist yet.
        example_inputs: positional arguments of the model's forward. Sizes that
            ``dynamic_shapes`` names should be at least 2 in them.
        dynamic_shapes: as in ``torch.export.export``: which sizes change from run to run; None: no
            size does. Sizes 0 and 1 are then served, too.
        rows: how rows of dynamic tables are stored, as in :func:`torch_dynemb.freeze`: None, or
            ``"int8"``, ``"int4"``, ``"fp8"``, ``"fp16"``, ``"bf16"``.
        version: what this version of the model is called; None: a new random name.
        missing: True: runs count the ids that they do not find, see
            :attr:`torch_dynemb.serving.ServedModel.missing`. A
            :class:`torch_dynemb.serving.CountsMissing` does so in any case.

    Returns:
        The folder.

    Raises:
        TypeError: an argument has another type.
        ValueError: tensors of the model are on several devices, or an input is neither a tensor
            nor a constant; ``rows`` is none of its values, or is given with a frozen model; or
            ``missing`` is True, and there are no dynamic tables.
        FileExistsError: there is something at ``path``.
        OSError: the disk is full, or fails; there is nothing at ``path``.
        RuntimeError: ``torch.export`` or the compiler does not take the model.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> bag = td.DynamicEmbeddingBag(4, optimizer=td.SGD(lr=0.1))
        >>> model = torch.nn.Sequential(bag, torch.nn.Linear(4, 1))
        >>> ids = torch.tensor([[1, 2], [3, 1]])
        >>> _ = model(ids)
        >>> folder = tempfile.mkdtemp() + "/ads"
        >>> path = td.serving.export(model, folder, (ids,), version="monday")  # doctest: +SKIP
        >>> served = td.serving.load(path)  # doctest: +SKIP
        >>> served.run(ids), served.version  # doctest: +SKIP
    """
    target = checked_path("serving.export", path)
    _check_arguments(model, example_inputs, version)
    if os.path.lexists(target):
        raise FileExistsError(
            f"serving.export: {target} is there: choose another path, for instance one by version, "
            "or remove it"
        )
    flag("serving.export: missing", missing)
    if rows is not None and _is_frozen(model):
        raise ValueError(
            f"serving.export: rows is {rows!r}, but the model is frozen already: give rows to "
            "torch_dynemb.freeze, or export the model itself"
        )
    frozen = model if _is_frozen(model) else freeze(model, rows=rows)
    if missing and not isinstance(frozen, CountsMissing):
        frozen = CountsMissing(frozen)
    device = _device_of(frozen)
    # copies, because torch.export takes a tensor that is given twice for one input
    inputs = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.clone(memory_format=torch.contiguous_format), example_inputs
    )
    with exports_for_compiled_code(), _arguments_of_the_model(frozen):
        program = torch.export.export(frozen.eval(), inputs, dynamic_shapes=dynamic_shapes)
    taken = inputs_of(program)
    disk = Disk()
    make_parents(disk, target)
    name = uuid.uuid4().hex
    folder = unfinished(target, name)
    try:
        disk.make_folder(folder)
        torch._inductor.aoti_compile_and_package(
            program, package_path=str(folder / CODE), inductor_configs=dict(_COMPILER)
        )
        tables = _tables_of(frozen)
        constants = _constants_of(program, folder / CODE)
        of_tables = {
            name for name in constants if any(name.startswith(f"{module}.") for module, _ in tables)
        }
        files = {CODE: sums_of_file(folder / CODE)}
        for file, names in ((TABLES, of_tables), (DENSE, constants.keys() - of_tables)):
            files[file] = _write_tensors(disk, folder / file, constants, sorted(names))
        manifest = PackageManifest(
            uuid=name,
            version=name if version is None else version,
            library=__version__,
            torch=torch.__version__,
            device=device.type,
            machine=machine(),
            instructions=instruction_sets(),
            ops=op_schemas(program),
            tables=_served_tables(frozen.model if isinstance(frozen, CountsMissing) else frozen),
            missing=frozen.table_names if isinstance(frozen, CountsMissing) else None,
            constants={name: TABLES if name in of_tables else DENSE for name in constants},
            inputs=taken,
            files=files,
        )
        _write(disk, folder / MANIFEST, manifest_text(manifest))
        disk.sync_folder(folder)
        disk.rename(folder, target)
        disk.sync_folder(target.parent)
    except BaseException:
        disk.remove(folder)
        raise
    return target


def _check_arguments(model: object, example_inputs: object, version: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"serving.export: model is {described(model)}, expected a torch.nn.Module")
    if not isinstance(example_inputs, tuple):
        raise TypeError(
            f"serving.export: example_inputs is {described(example_inputs)}, expected a tuple of "
            "the positional arguments of forward"
        )
    if isinstance(version, bool) or not isinstance(version, str | int | None):
        raise TypeError(
            f"serving.export: version is {described(version)}, expected a str, an int or None"
        )


def _is_frozen(model: nn.Module) -> bool:
    return any(isinstance(module, FrozenTables) for module in model.modules())


@contextmanager
def _arguments_of_the_model(frozen: nn.Module) -> Iterator[None]:
    """Gives what counts missing ids the arguments of the model in it.

    ``dynamic_shapes`` and the names of inputs go by them, and it takes any.
    """
    if not isinstance(frozen, CountsMissing):
        yield
        return
    forward = frozen.forward
    frozen.forward = functools.wraps(frozen.model.forward)(  # type: ignore[method-assign]
        lambda *args, **kwargs: forward(*args, **kwargs)
    )
    try:
        yield
    finally:
        del frozen.forward


def _device_of(model: nn.Module) -> torch.device:
    """The device of a model's tensors; that of the CPU if it has none."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    devices = {tensor.device: name for name, tensor in tensors.items()}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(
            f"serving.export: tensors of the model are on several devices ({places}): move the "
            "model to one"
        )
    return next(iter(devices), torch.device("cpu"))


def _tables_of(model: nn.Module) -> list[tuple[str, FrozenTables]]:
    """Frozen tables by the path of their module."""
    return [
        (path, module) for path, module in model.named_modules() if isinstance(module, FrozenTables)
    ]


def _served_tables(model: nn.Module) -> dict[str, ServedTable]:
    result = {}
    for path, module in _tables_of(model):
        dims = module.get_buffer("meta")[:, Meta.DIM].tolist()
        for (name, ids), dim in zip(module.sizes().items(), dims, strict=True):
            result[table_name(path.rpartition(".")[0], name)] = ServedTable(ids, dim)
    return result


def _constants_of(program: torch.export.ExportedProgram, code: Path) -> dict[str, Tensor]:
    """The tensors that the compiled code asks for, by name."""
    names = torch._inductor.aoti_load_package(str(code)).get_constant_fqns()
    known = {**program.state_dict, **program.constants}
    unknown = sorted(name for name in names if not isinstance(known.get(name), Tensor))
    if unknown:
        raise RuntimeError(
            f"serving.export: the compiled code asks for {unknown}, which are no tensors of the "
            "exported program: register tensors that forward makes once as buffers"
        )
    return {name: known[name] for name in sorted(names)}


def _write_tensors(
    disk: Disk, path: Path, tensors: dict[str, Tensor], names: list[str]
) -> FileSums:
    """Writes a file of some of the tensors."""
    shapes = [TensorShape(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names]
    header = header_of(shapes)
    writer = SummedWriter(disk, path)
    try:
        writer.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for name in names:
            writer.write(tensors[name].detach().cpu().contiguous())
        return writer.finish()
    finally:
        writer.close()


def _write(disk: Disk, path: Path, text: bytes) -> None:
    writer = SummedWriter(disk, path)
    try:
        writer.write(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        writer.finish()
    finally:
        writer.close()


__all__ = ["export"]
