"""Loading of packages."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch

from torch_dynemb.argument_checks import integer
from torch_dynemb.delta_log.follower import Dense, Log, check_dense
from torch_dynemb.delta_log.reader import sinks_of
from torch_dynemb.errors import DamagedFileError, UnsupportedFormatError
from torch_dynemb.files.checksummed_files import ChecksummedReader
from torch_dynemb.files.locations import checked_path
from torch_dynemb.files.tensor_file import StoredTensor
from torch_dynemb.ops.columns import SERVED_UNLOCKS
from torch_dynemb.serving.file_names import moved_file, new_instance
from torch_dynemb.serving.file_tables import OpenedFile
from torch_dynemb.serving.packages.code_file import check_code
from torch_dynemb.serving.packages.following import base_for, follower_of, package_reader
from torch_dynemb.serving.packages.live_package import LivePackage, with_headroom
from torch_dynemb.serving.packages.loaded import Loaded, Loader
from torch_dynemb.serving.packages.manifest import (
    CODE,
    DENSE,
    TABLES,
    PackageManifest,
    read_package_manifest,
)
from torch_dynemb.serving.packages.memory import ConstantMemory
from torch_dynemb.serving.packages.platform import (
    instruction_sets,
    machine,
    torch_series,
    wrong_op,
)
from torch_dynemb.serving.packages.served_model import ServedModel
from torch_dynemb.serving.packages.shared_versions import SharedVersions
from torch_dynemb.serving.packages.versions import Versions
from torch_dynemb.storage.tiers.cache_size import CacheSize, parse_cache

# Idle compiled code, by package and number of runners. Torch never unloads compiled code, so each
# package is loaded as often as it is open at the same time, and its code is reused.
_idle: defaultdict[tuple[str, int], list[Loader]] = defaultdict(list)


def load(
    path: str | os.PathLike[str],
    *,
    runners: int = 1,
    follow: Log | None = None,
    dense: Dense = "follow",
    cache: int | float | str | None = None,
    shared_memory: str | os.PathLike[str] | None = None,
) -> ServedModel:
    """Load a package written by :func:`torch_dynemb.serving.export`.

    Every file is compared with its checksum. Tables are read into memory of their own, aligned to
    64 bytes and in huge pages if the system has them. :meth:`ServedModel.close` frees it. The code
    stays in the process and is reused when the same package is loaded again. A package has machine
    code, which runs in this process: load packages from trusted sources only.

    Args:
        path: of the folder.
        runners: how many threads may run the model at the same time; further ones wait. Torch's
            loader keeps the lock of the Python interpreter during a run (torch 2.13). With several
            runners, lookups of at least 1024 ids release it, and threads of one Python process take
            turns for the rest of the model only. Threads of a C++ program never take turns.
        follow: a delta log to follow, as :func:`torch_dynemb.delta_log.follow` takes it; the
            package was exported with ``headroom=`` and ``base=``. Loading applies no commits, but
            for new tables in place of those of a killed process in ``shared_memory``:
            :attr:`ServedModel.follower` does, by ``update()`` or in a thread.
        dense: ``"follow"``: commits change the dense state, too, and a run reads one version of
            rows and dense state. The tables are then in memory twice. ``"keep"``: the dense state
            stays that of the export, with one copy in memory; :attr:`ServedModel.dense_behind`
            counts the commits that it lacks. Only with ``follow``.
        cache: for packages with rows in files: rows in memory, as in
            :class:`torch_dynemb.SSDStore`; None: as much as in the model that was exported. A
            process opens a file once: models that share it share the cache of the first.
        shared_memory: directory in which processes of this machine share the tables, such as
            ``"/dev/shm"``; None: they are this process's own. The first process reads the package
            into a file there, and the others map it. Give ``follow`` to one of them: the others
            read its updates, in the way that its ``dense`` chooses. The file, with the whole
            headroom, takes its space at once. The last process that ends removes it; after kills,
            the next one that starts here uses or removes it.

    Returns:
        The model, ready to run.

    Raises:
        FileNotFoundError: the package or the directory for ``shared_memory`` is missing.
        DamagedFileError: a file is missing or damaged.
        TypeError: ``follow`` is not a log.
        ValueError: ``dense`` is unknown. ``cache`` is wrong, or is given for a package with all
            rows in memory. ``follow`` is given, and the package was exported without
            ``headroom=`` or without ``base=``. ``shared_memory`` is given for a package of a GPU,
            or without ``dense="keep"`` for one with buffers that runs write.
        InUseError: with ``shared_memory``, another process follows a log already.
        NewBaseNeededError: a process that followed was killed within a change, and the log does
            not lead from the package to the rows that others have read.
        UnsupportedFormatError: the package was made for another version of torch or of this
            library, for another processor, or for a missing device.
        HostMemoryError: the tables do not fit in memory.
        DiskFullError: the tables do not fit in ``shared_memory``.

    Example:
        >>> import torch_dynemb as td
        >>> td.serving.load("no-such-folder")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        FileNotFoundError: serving.load: ... is not a serving package: ...
    """
    folder = checked_path("serving.load", path)
    integer("serving.load: runners", runners, least=1)
    manifest = read_package_manifest(folder)
    _check_platform(folder, manifest)
    check_dense("serving.load", dense)
    base = None if follow is None else base_for(folder, manifest)
    if follow is not None:
        sinks_of(follow)
    size = None if cache is None else parse_cache("serving.load: cache", cache)
    if size is not None and not manifest.row_files:
        raise ValueError(
            f"serving.load: cache is {cache!r}, but {folder} has its rows in memory: leave it out, "
            "or export a model of torch_dynemb.freeze(model, storage=...)"
        )
    check_code(folder / CODE, manifest.files[CODE])
    copies = 2 if follow is not None and dense == "follow" else 1
    ready = partial(_loaded, folder, manifest, runners, size)
    versions: Versions
    if shared_memory is None:
        versions = Versions([ready(_read_constants(folder, manifest)) for _ in range(copies)])
    else:
        versions = SharedVersions(
            _shared_place(shared_memory, manifest, copies),
            manifest,
            partial(_fill_shared, folder, manifest),
            partial(ready, shared=True),
            None if follow is None else copies,
        )
        start = versions.start
        if base is not None and start.sequence is not None:
            base = base._replace(sequence=start.sequence, rank=start.rank, chain=start.chain)
    if base is None or follow is None:
        return ServedModel(manifest, versions)
    reader = package_reader(follow, base)
    model = ServedModel(manifest, versions, partial(follower_of, reader, base, manifest, dense))
    if isinstance(versions, SharedVersions):
        versions.follow(reader, model.follower)
    return model


def _shared_place(given: str | os.PathLike[str], manifest: PackageManifest, copies: int) -> Path:
    place = checked_path("serving.load: shared_memory", given)
    if manifest.device != "cpu":
        raise ValueError(
            f"serving.load: shared_memory is {given!r}, but the package is for {manifest.device}, "
            "where each process has tables of its own: leave it out"
        )
    if any(part.headroom is not None for part in manifest.live.values()):
        raise ValueError(
            f"serving.load: shared_memory is {given!r}, but rows of the package lie in files, with "
            "changes in the memory of each process: leave it out, and let each process follow the "
            "log"
        )
    if copies > 1 and manifest.mutated:
        raise ValueError(
            f"serving.load: shared_memory is {given!r}, but runs of the model write its buffers "
            f"{list(manifest.mutated)}, which commits change, too: give dense='keep'"
        )
    if not place.is_dir():
        raise FileNotFoundError(
            f"serving.load: shared_memory is {given!r}, which is not a directory: give one in "
            "memory, such as /dev/shm"
        )
    return place


def _fill_shared(
    folder: Path,
    manifest: PackageManifest,
    make: Callable[[dict[str, StoredTensor]], ConstantMemory],
) -> None:
    """Read a package into memory of several processes, any of which may have several runners."""
    _unlock_lookups(_read_constants(folder, manifest, make), manifest)


def _loaded(
    folder: Path,
    manifest: PackageManifest,
    runners: int,
    cache: CacheSize | None,
    memory: ConstantMemory,
    *,
    shared: bool = False,
) -> Loaded:
    """Give one copy of the constants to the compiled code, ready to run.

    Raises:
        DamagedFileError: a file is damaged.
    """
    opened = _open_row_files(folder, manifest, memory, cache)
    live = LivePackage(manifest.live, memory, opened)
    idle = _idle[manifest.uuid, runners]
    try:
        loader = idle.pop()
    except IndexError:
        if shared:  # this may be long after the load
            check_code(folder / CODE, manifest.files[CODE])
        loader = Loader(str(folder / CODE), "model", False, runners, -1)
    asked = set(loader.get_constant_fqns())
    # updates need some tensors that runs do not
    others = {
        name for name in memory.tensors if name.startswith(tuple(f"{p}." for p in manifest.live))
    }
    if not asked <= memory.tensors.keys() <= asked | others:
        raise DamagedFileError(
            f"{folder / CODE}: the code asks for the tensors {sorted(asked)}, but the package has "
            f"{sorted(memory.tensors)}: files of different packages were mixed",
            path=folder / CODE,
        )
    constants = {name: memory.tensors[name] for name in asked}
    constants |= {name: of.file for name, of in opened.items()}
    dense = {name: memory.tensors[name] for name in asked if manifest.constants[name] == DENSE}
    if manifest.device == "cpu":
        # the code keeps addresses of the tensors, and references that it never releases; these
        # tensors do not own memory
        loader.load_constants(constants, False, True, True)
        if runners > 1 and not shared:
            _unlock_lookups(memory, manifest)
        unlocks = shared or runners > 1
        return Loaded(loader, memory, live, dense, idle, runners, unlocks, opened.values())
    device = torch.device(manifest.device)
    copies = {name: tensor.to(device) for name, tensor in constants.items()}
    loader.load_constants(copies, False, True, False)  # into memory that the code owns
    return Loaded(loader, None, live, {}, idle, runners, False)


def _open_row_files(
    folder: Path, manifest: PackageManifest, memory: ConstantMemory, cache: CacheSize | None
) -> dict[str, OpenedFile]:
    """Open the files of rows, by the tensors that name them, which each process has for itself.

    Raises:
        DamagedFileError: a file is missing, or damaged.
        HostMemoryError: the cache does not fit in memory.
    """
    result = {}
    places = {place.file: place for place in manifest.row_files.values()}.values()
    rows, total = sum(of.rows for of in places), sum(max(1, of.bytes) for of in places)
    for name, place in manifest.row_files.items():
        path = folder / place.file
        if not path.is_file():
            raise DamagedFileError(
                f"{path}: the file is missing: copy the package again", path=path
            )
        size = None if cache is None else cache.part(max(1, place.bytes), rows, total)
        owner = name.rpartition(".")[0]
        part = manifest.live.get(owner)
        if part is None or part.headroom is None:
            result[name] = OpenedFile(moved_file(memory.tensors[name], path, size))
            continue
        file = moved_file(memory.tensors[name], path, size, new_instance())
        result[name] = OpenedFile(file, (memory.tensors[f"{owner}.meta"], part.headroom))
    return result


def _unlock_lookups(memory: ConstantMemory, manifest: PackageManifest) -> None:
    """Let lookups of many ids release Python's lock, which torch's loader keeps during a run."""
    for name, tensor in memory.tensors.items():
        if manifest.constants[name] == TABLES and name.rpartition(".")[2] == "tables":
            tensor[0, SERVED_UNLOCKS] = 1


def _check_platform(folder: Path, manifest: PackageManifest) -> None:
    """Raise UnsupportedFormatError if the code of a package cannot run here."""

    def refuse(what: str, remedy: str) -> None:
        raise UnsupportedFormatError(
            f"serving.load: {folder} was exported {what}: {remedy}, or export the model again here",
            path=folder,
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


def _read_constants(
    folder: Path,
    manifest: PackageManifest,
    make: Callable[[dict[str, StoredTensor]], ConstantMemory] = ConstantMemory,
) -> ConstantMemory:
    """Read the tensors of a package into memory, and compare all checksums.

    Args:
        folder: of the package.
        manifest: of the package.
        make: makes memory for tensors of given dtypes and shapes.

    Raises:
        DamagedFileError: a file is damaged.
    """
    readers: dict[str, ChecksummedReader] = {}
    try:
        for file in (TABLES, DENSE):
            readers[file] = ChecksummedReader(folder / file, manifest.files[file])
        stored = _stored(readers, manifest.constants, folder)
        memory = make(with_headroom(manifest.live, stored))
        for file, reader in readers.items():
            # in the order of the file, so that each block is read once
            for name, section in sorted(reader.tensors.items(), key=lambda item: item[1].begin):
                if manifest.constants.get(name) == file:
                    tensor = memory.tensors[name]
                    reader.read(
                        name, 0, tensor[: section.shape[0]] if section.shape else tensor.reshape(1)
                    )
            reader.finish()
        return memory
    finally:
        for reader in readers.values():
            reader.close()


def _stored(
    readers: Mapping[str, ChecksummedReader], constants: Mapping[str, str], folder: Path
) -> dict[str, StoredTensor]:
    """Return dtype and shape of each constant."""
    stored = {}
    for name, file in constants.items():
        if name not in readers[file].tensors:
            raise DamagedFileError(
                f"{folder / file}: the file lacks the tensor {name!r}", path=folder / file
            )
        stored[name] = readers[file].tensors[name]
    return stored


__all__ = ["load"]
