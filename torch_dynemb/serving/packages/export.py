"""Packages of models: compiled code without tables, and the tables beside it."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_dynemb._version import __version__
from torch_dynemb.argument_checks import described, flag
from torch_dynemb.checkpoint.saving.dense_state import dense_state
from torch_dynemb.delta_log.reader import LogPosition
from torch_dynemb.files.checksummed_files import ChecksummedWriter, FileChecksums, space_errors
from torch_dynemb.files.commit import claimed, commit
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location, checked_path, local
from torch_dynemb.files.presence import is_there
from torch_dynemb.files.tensor_file import TensorShape, header_of
from torch_dynemb.nn.features import exports_for_compiled_code
from torch_dynemb.ops.columns import LiveSlab, Meta
from torch_dynemb.parts.table_parts import table_name
from torch_dynemb.policy.keep import Keep
from torch_dynemb.serving.file_names import check_named, path_of
from torch_dynemb.serving.file_tables import FileTables
from torch_dynemb.serving.freeze import freeze
from torch_dynemb.serving.live_files import LiveFileTables
from torch_dynemb.serving.live_group import LiveTables
from torch_dynemb.serving.live_models import live, live_tables
from torch_dynemb.serving.missing import CountedTables, CountsMissing
from torch_dynemb.serving.packages.base import ExportedTable, base_at, position_of
from torch_dynemb.serving.packages.code_file import sums_of_file
from torch_dynemb.serving.packages.dim_names import dim_names
from torch_dynemb.serving.packages.inputs import inputs_of, outputs_of
from torch_dynemb.serving.packages.manifest import (
    CODE,
    DENSE,
    TABLES,
    LivePart,
    PackageManifest,
    RowFilePlace,
    ServedTable,
    manifest_text,
)
from torch_dynemb.serving.packages.platform import instruction_sets, machine, op_schemas
from torch_dynemb.serving.row_formats import RowKind
from torch_dynemb.serving.updated_tables import UpdatedTables

_COMPILER = {
    # the code has no values, not even those of tensors of one element
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
    headroom: int | Mapping[str, int] | None = None,
    version: str | int | None = None,
    missing: bool = False,
    keep: Keep | None = None,
    base: str | os.PathLike[str] | LogPosition | None = None,
) -> Path:
    """Write a package that serves a model without its Python classes and without a compiler.

    The model is frozen, exported by ``torch.export`` and compiled by AOTInductor for the processor
    of this machine. The compiled code does not contain the tables. They lie beside it in
    safetensors files, from which :func:`torch_dynemb.serving.load` and the C++ reader of
    csrc/serving take them. The package is written beside ``path`` and renamed when it is complete.

    Args:
        model: any module that :func:`torch_dynemb.freeze` takes, or a frozen or live one, which is
            not copied. The files of one that was frozen with ``storage=`` become files of the
            package, by hard links where the file system has them. If several ranks share its
            tables, freeze it on all of them with ``ranks="first"``, and export the result of rank 0
            there.
        path: of a folder that does not exist yet.
        example_inputs: positional arguments of the model's forward. Sizes that ``dynamic_shapes``
            names should be at least 2 in them.
        dynamic_shapes: as in ``torch.export.export``: sizes that change from run to run; None: no
            size does. Sizes 0 and 1 are then served, too.
        rows: format of rows of dynamic tables, as in :func:`torch_dynemb.freeze`: None, or
            ``"int8"``, ``"int4"``, ``"fp8"``, ``"fp16"``, ``"bf16"``. With ``headroom``, as in
            :func:`torch_dynemb.serving.live`, and also for frozen models.
        headroom: how many more ids each table may have, a number for all or by name, as in
            :func:`torch_dynemb.serving.live`. Rows can then be updated while the package serves, by
            :meth:`torch_dynemb.serving.ServedModel.apply`. None: the package never changes, unless
            the model is live already; do not update it during the export. Unused rows take no space
            in the files; the index takes 47 bytes for each id of the headroom. With rows in files,
            how many changed ids of a table are kept in memory.
        version: name of this version of the model; None: a new random name. Updates of rows do not
            change it.
        missing: True: runs count missing ids, see :attr:`torch_dynemb.serving.ServedModel.missing`.
            A :class:`torch_dynemb.serving.CountsMissing` does so in any case.
        keep: ids that the package has, as in :func:`torch_dynemb.freeze`; for models that are
            neither frozen nor live. Give a package that follows a log the ``keep`` of the log.
        base: for packages that follow a delta log (``follow=`` of
            :func:`torch_dynemb.serving.load`). Give the path of the checkpoint that the model and
            the log begin with. Or give the :meth:`DeltaLog.position` of the log that the model is
            published to, taken before ``model`` was frozen. The package stores the checkpoint and
            the number of the commit. Needs tables with rows that are updated.

    Returns:
        The folder.

    Raises:
        TypeError: an argument has another type.
        ValueError: tensors of the model are on several devices, or an input is neither a tensor nor
            a constant. ``rows`` or ``headroom`` is unknown. ``rows`` is given with a frozen model
            and no headroom, or either is given with a live model. ``missing`` is True, and the
            model has no dynamic tables. ``base`` is given without ``headroom``, or lacks a table of
            the model, or has one with other columns.
        FileNotFoundError: ``base`` is not a checkpoint.
        FileExistsError: ``path`` exists.
        OSError: the disk is full, or fails; ``path`` does not exist then.
        RuntimeError: ``torch.export`` or the compiler rejects the model. Or ``headroom`` is given,
            and tables are not on the CPU, or do not fit in memory.

    Example:
        >>> import tempfile, torch, torch_dynemb as td
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1))
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
    _check_absent(target)
    flag("serving.export: missing", missing)
    position = None if base is None else position_of(base)
    frozen = _served_form(model, rows, headroom, keep)
    package_base = None if position is None else base_at(position, _live_exports(frozen))
    if missing and not isinstance(frozen, CountsMissing):
        frozen = CountsMissing(frozen)
    device = _device_of(frozen)
    # copies, because torch.export takes a tensor that occurs twice for one input
    inputs = pytree.tree_map_only(
        Tensor, lambda tensor: tensor.clone(memory_format=torch.contiguous_format), example_inputs
    )
    with exports_for_compiled_code(), _arguments_of_the_model(frozen):
        program = torch.export.export(frozen.eval(), inputs, dynamic_shapes=dynamic_shapes)
        named = dim_names(program, frozen.forward, inputs, dynamic_shapes)
    taken = inputs_of(program, named)
    given = outputs_of(program, named, counted=isinstance(frozen, CountsMissing))
    disk = Disk()
    name = uuid.uuid4().hex
    with claimed("serving.export", disk, target, name) as draft:
        folder = local(draft)
        _compiler().aoti_compile_and_package(
            program, package_path=str(folder / CODE), inductor_configs=dict(_COMPILER)
        )
        constants = _constants_of(program, folder / CODE)
        live = _live_paths(frozen, constants)
        constants |= _live_tensors(live)
        paths = [f"{path}." for path, of in _named(frozen) if isinstance(of, CountedTables)]
        of_tables = {name for name in constants if name.startswith(tuple(paths))}
        files = {CODE: sums_of_file(folder / CODE)}
        for file, names in ((TABLES, of_tables), (DENSE, constants.keys() - of_tables)):
            files[file] = _write_tensors(disk, folder / file, constants, sorted(names))
        row_files = _add_row_files(folder, frozen, constants)
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
            live=_live_parts(frozen, live),
            row_files=row_files,
            inputs=taken,
            outputs=given,
            files=files,
            base=package_base,
            unused=sorted(dense_state(frozen).keys() - constants.keys()),
            mutated=[] if package_base is None else _mutated(program),
        )
        commit(disk, target, name, manifest_text(manifest), _check_absent)
    return target


def _check_absent(path: Location) -> None:
    if is_there(path):
        raise FileExistsError(
            f"serving.export: {path} exists: choose another path, for instance one by version, "
            "or remove it"
        )


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


def _served_form(
    model: nn.Module,
    rows: RowKind | None,
    headroom: int | Mapping[str, int] | None,
    keep: Keep | None,
) -> nn.Module:
    """Return the model with read-only tables, or with live ones."""
    if live_tables(model):
        if rows is not None or headroom is not None:
            raise ValueError(
                f"serving.export: rows is {rows!r} and headroom is {headroom!r}, but the model is "
                "live already: give both to torch_dynemb.serving.live, or export the model itself"
            )
        if keep is not None:
            raise ValueError(
                f"serving.export: keep is {keep!r}, but the model is live already: give keep to "
                "torch_dynemb.serving.live, or export the model itself"
            )
        for module in live_tables(model).values():
            if isinstance(module, LiveFileTables) and any(module.state().updates().values()):
                raise RuntimeError(
                    f"serving.export: tables {module.names} have their rows in a file, which lacks "
                    "their updates: export the frozen model with headroom=, and let the package "
                    "follow the log"
                )
        return model
    if headroom is not None:
        return live(model, headroom=headroom, rows=rows, keep=keep)
    if keep is not None or not any(isinstance(module, CountedTables) for module in model.modules()):
        return freeze(model, rows=rows, keep=keep)
    if rows is not None:
        raise ValueError(
            f"serving.export: rows is {rows!r}, but the model is frozen already: give rows to "
            "torch_dynemb.freeze, or export the model itself"
        )
    return model


@contextmanager
def _arguments_of_the_model(frozen: nn.Module) -> Iterator[None]:
    """Give a wrapper that counts missing ids the signature of its model.

    ``dynamic_shapes`` and the names of inputs follow the signature; the wrapper takes any
    arguments.
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
    """Return the device of a model's tensors; the CPU if it has none."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    devices = {tensor.device: name for name, tensor in tensors.items()}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(
            f"serving.export: tensors of the model are on several devices ({places}): move the "
            "model to one"
        )
    return next(iter(devices), torch.device("cpu"))


def _tables_of(model: nn.Module) -> list[tuple[str, CountedTables]]:
    """Return frozen and live tables by the path of their module."""
    return [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, CountedTables)
    ]


def _names_of(path: str, module: CountedTables) -> list[str]:
    """Return the names of a module's tables in the package."""
    return [table_name(module.owner(path), name) for name in module.names]


def _served_tables(model: nn.Module) -> dict[str, ServedTable]:
    result = {}
    for path, module in _tables_of(model):
        dims = module.get_buffer("meta")[:, Meta.DIM].tolist()
        sizes = module.sizes().values()
        for name, ids, dim in zip(_names_of(path, module), sizes, dims, strict=True):
            result[name] = ServedTable(ids, dim)
    return result


def _live_exports(frozen: nn.Module) -> list[ExportedTable]:
    """Return the live tables of a model, to be found in the base of a package."""
    model = frozen.model if isinstance(frozen, CountsMissing) else frozen
    if not live_tables(model):
        raise ValueError(
            "serving.export: base is given, but the rows of the package would never change: give "
            "headroom=, the number of further ids for each table, or no base"
        )
    return [
        ExportedTable(package_name, module.owner(path), name, len(module.names) == 1, dim)
        for path, module in live_tables(model).items()
        for package_name, name, dim in zip(
            _names_of(path, module),
            module.names,
            module.get_buffer("meta")[:, Meta.DIM].tolist(),
            strict=True,
        )
    ]


def _named(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """List modules by all of their names, of which the code may use any."""
    return list(model.named_modules(remove_duplicate=False))


def _live_paths(frozen: nn.Module, constants: Mapping[str, Tensor]) -> dict[str, UpdatedTables]:
    """Return live tables by the path by which the code asks for their tensors.

    A module may have several paths, of which :func:`live_tables` has the first one.
    """
    asked = {name.rpartition(".")[0] for name in constants}
    result = {}
    for first, module in live_tables(frozen).items():
        paths = [path for path, of in _named(frozen) if of is module and path in asked]
        result[paths[0] if paths else first] = module
    return result


def _live_parts(frozen: nn.Module, live: Mapping[str, UpdatedTables]) -> dict[str, LivePart]:
    """Return live tables, by the prefix of their tensors' names."""
    model = frozen.model if isinstance(frozen, CountsMissing) else frozen
    parts = [_live_part(_names_of(path, of), of) for path, of in live_tables(model).items()]
    return dict(zip(live, parts, strict=True))


def _live_part(names: list[str], module: UpdatedTables) -> LivePart:
    if isinstance(module, LiveFileTables):
        return LivePart(names, [], [], module.headroom)
    assert isinstance(module, LiveTables)
    return LivePart(names, module.formats, [len(rows) for rows in module.tensors().weights])


def _live_tensors(live: Mapping[str, UpdatedTables]) -> dict[str, Tensor]:
    """Return the tensors of live tables by name; of their rows, those that have had an owner."""
    result: dict[str, Tensor] = {}
    for path, module in live.items():
        buffers = dict(module.named_buffers())
        if "free" in buffers:
            used = buffers["free"][:, LiveSlab.NEXT_ROW].tolist()
            buffers |= {f"rows{slab}": buffers[f"rows{slab}"][:n] for slab, n in enumerate(used)}
        result |= {f"{path}.{name}": tensor for name, tensor in buffers.items()}
    return result


def _add_row_files(
    folder: Path, frozen: nn.Module, constants: Mapping[str, Tensor]
) -> dict[str, RowFilePlace]:
    """Put the files of tables that the code uses into the package, by the tensors that name them.

    Raises:
        DamagedStoreError: a file was replaced.
        FileNotFoundError: it is missing.
    """
    result: dict[str, RowFilePlace] = {}
    added: dict[FileTables, RowFilePlace] = {}
    for path, module in _named(frozen):
        name = f"{path}.file"
        if not isinstance(module, FileTables) or name not in constants:
            continue
        if module not in added:
            place = RowFilePlace(f"tables{len(added)}.rows", module.rows, module.row_bytes)
            _link(module.get_buffer("file"), folder / place.file)
            added[module] = place
        result[name] = added[module]
    return result


def _link(file: Tensor, target: Path) -> None:
    source = path_of(file)
    if not os.path.isfile(source):
        raise FileNotFoundError(
            f"serving.export: {source}, with the rows of the model, is missing: put it back, or "
            "freeze the model again"
        )
    try:
        os.link(source, target)  # the same bytes, on the disk once
    except OSError:  # another file system, or one without links
        with space_errors(target):
            shutil.copyfile(source, target)
            _sync(target)
    check_named(file, target)


def _sync(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _compiler() -> Any:
    """Import the compiler: it takes half a second, and few programs export packages."""
    return importlib.import_module("torch._inductor")


def _constants_of(program: torch.export.ExportedProgram, code: Path) -> dict[str, Tensor]:
    """Return the tensors that the compiled code uses, by name."""
    names = _compiler().aoti_load_package(str(code)).get_constant_fqns()
    known = {**program.state_dict, **program.constants}
    unknown = sorted(name for name in names if not isinstance(known.get(name), Tensor))
    if unknown:
        raise RuntimeError(
            f"serving.export: the compiled code asks for {unknown}, which are not tensors of the "
            "exported program: register tensors that forward makes once as buffers"
        )
    return {name: known[name] for name in sorted(names)}


def _mutated(program: torch.export.ExportedProgram) -> list[str]:
    """Return the buffers that runs write; only programs without operations in place list them."""
    return sorted(program.run_decompositions({}).graph_signature.buffers_to_mutate.values())


def _write_tensors(
    disk: Disk, path: Path, tensors: dict[str, Tensor], names: list[str]
) -> FileChecksums:
    """Write a file with some of the tensors."""
    shapes = [TensorShape(name, tensors[name].dtype, tuple(tensors[name].shape)) for name in names]
    header = header_of(shapes)
    writer = ChecksummedWriter(disk, path)
    try:
        writer.write(torch.frombuffer(bytearray(header), dtype=torch.uint8))
        for name in names:
            writer.write(tensors[name].detach().cpu().contiguous())
        return writer.finish()
    finally:
        writer.close()


__all__ = ["export"]
