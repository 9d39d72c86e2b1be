"""The manifest of a package: ``manifest.json``, written last and checked first.

The text ends with the crc32c of everything before it, so a reader needs no canonical form.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from torch_dynemb.errors import DamagedFileError, UnsupportedFormatError
from torch_dynemb.files.bounded_json import parsed
from torch_dynemb.files.checksummed_files import FileChecksums, checksum_of_bytes
from torch_dynemb.serving.packages.base import PackageBase
from torch_dynemb.serving.packages.inputs import Input, Size

FORMAT = "torch_dynemb serving package"
FORMAT_VERSION = 1

MANIFEST = "manifest.json"
CODE = "model.pt2"
TABLES = "tables.safetensors"
DENSE = "dense.safetensors"

_END = ',"crc32c":"{:08x}"}}\n'
_END_BYTES = len(_END.format(0))
_MOST_BYTES = 1 << 24  # enough for the checksums of tables of 12 TB


class ServedTable(NamedTuple):
    """A table of a package.

    Attributes:
        ids: number of ids.
        embedding_dim: columns of a row.
    """

    ids: int
    embedding_dim: int


class RowFilePlace(NamedTuple):
    """A file with the rows of read-only tables.

    Attributes:
        file: its name in the package.
        rows: number of rows.
        bytes: of the rows, without checksums.
    """

    file: str
    rows: int
    bytes: int


class LivePart(NamedTuple):
    """Tables of one module of a package, with rows that are updated while it serves.

    Attributes:
        tables: their names, as in ``tables`` of the manifest.
        formats: of the rows of each slab, as in ``torch_dynemb.ops.LIVE_FORMATS``.
        rows: number of rows of each slab. The file has those that have had an owner.
        headroom: of tables with rows in a file, how many changed ids of each are kept in memory,
            and how many removed ones; None: rows are in memory.
    """

    tables: list[str]
    formats: list[int]
    rows: list[int]
    headroom: list[int] | None = None


class PackageManifest(NamedTuple):
    """Content of the manifest.

    Attributes:
        uuid: of the export.
        version: name of this version of the model.
        library, torch: versions of torch_dynemb and torch at the export.
        device: ``cpu`` or ``cuda``.
        machine, instructions: processor that the code was compiled for.
        ops: schemas of this library's ops that the code calls, by name.
        tables: by name.
        missing: tables with counts of missing ids in the last output; None: nothing is counted.
        constants: file of each tensor by name, including those that only updates need.
        live: tables with rows that are updated, by the path of their module; empty: nothing
            changes.
        row_files: files of tables with rows outside of memory, by the tensor that names each;
            empty: all rows are in memory.
        inputs: inputs of the model, leaf by leaf.
        outputs: tensors of its output, without the counts of missing ids.
        files: sizes and checksums by name.
        base: position of its rows in a delta log; None: it cannot follow one.
        unused: dense tensors of the model that the code does not use; empty without a base.
        mutated: buffers that the model's forward writes; empty without a base.
    """

    uuid: str
    version: str | int
    library: str
    torch: str
    device: str
    machine: str
    instructions: list[str]
    ops: dict[str, str]
    tables: dict[str, ServedTable]
    missing: list[str] | None
    constants: dict[str, str]
    live: dict[str, LivePart]
    row_files: dict[str, RowFilePlace]
    inputs: list[Input]
    outputs: list[Input]
    files: dict[str, FileChecksums]
    base: PackageBase | None = None
    unused: Sequence[str] = ()
    mutated: Sequence[str] = ()


def manifest_text(manifest: PackageManifest) -> bytes:
    """Return the content of the file."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        **manifest._asdict(),
        "tables": {name: table._asdict() for name, table in manifest.tables.items()},
        "live": {path: part._asdict() for path, part in manifest.live.items()},
        "row_files": {name: place._asdict() for name, place in manifest.row_files.items()},
        "inputs": [_input_entry(given) for given in manifest.inputs],
        "outputs": [_input_entry(output) for output in manifest.outputs],
        "files": {name: sums._asdict() for name, sums in manifest.files.items()},
    }
    for name in ("live", "row_files", "mutated"):
        if not content[name]:
            del content[name]
    if manifest.base is None:
        del content["base"], content["unused"]
    else:
        content["base"] = manifest.base._asdict()
    text = json.dumps(content, separators=(",", ":")).encode()[:-1]
    return text + _END.format(checksum_of_bytes(text)).encode()


def _input_entry(given: Input) -> dict[str, Any]:
    return {
        "name": given.name,
        "dtype": None if given.dtype is None else str(given.dtype).removeprefix("torch."),
        "sizes": [None if size is None else size._asdict() for size in given.sizes],
        "value": given.value,
    }


def read_package_manifest(folder: Path) -> PackageManifest:
    """Read the manifest of a package.

    Raises:
        FileNotFoundError: the folder is not a package.
        DamagedFileError: the manifest is damaged.
        UnsupportedFormatError: the package has another version of the format.
    """
    path = folder / MANIFEST
    if not path.is_file():
        what = f"it has no {MANIFEST}" if folder.is_dir() else "it is not a folder"
        raise FileNotFoundError(
            f"serving.load: {folder} is not a serving package: "
            f"{what if folder.exists() else 'it does not exist'}; "
            "torch_dynemb.serving.export makes one"
        )
    if path.stat().st_size > _MOST_BYTES:
        raise DamagedFileError(f"{path}: the file is larger than any manifest", path=path)
    text = path.read_bytes()
    try:
        content = parsed(text)
    except ValueError as error:
        raise DamagedFileError(f"{path}: the file is not JSON: {error}", path=path) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedFileError(f"{path}: the file is not the manifest of a {FORMAT}", path=path)
    if content.get("format_version") != FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"serving.load: {folder} has format version {content.get('format_version')!r}, but "
            f"this torch_dynemb reads {FORMAT_VERSION}: export the model again, or load the "
            "package with the version that wrote it",
            path=folder,
        )
    body = text[:-_END_BYTES]
    if text[-_END_BYTES:] != _END.format(checksum_of_bytes(body)).encode():
        raise DamagedFileError(
            f"{path}: the checksum is wrong: the file was damaged or edited", path=path
        )
    try:
        return _manifest_of(content)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DamagedFileError(
            f"{path}: the fields are not those that torch_dynemb.serving.export writes "
            f"({type(error).__name__}: {error}): another program wrote it",
            path=path,
        ) from error


def _manifest_of(content: dict[str, Any]) -> PackageManifest:
    """Convert a JSON object to a manifest; missing or wrong fields raise built-in errors."""
    del content["format"], content["format_version"], content["crc32c"]
    content["tables"] = {name: ServedTable(**t) for name, t in content["tables"].items()}
    content["live"] = {path: LivePart(**p) for path, p in content.get("live", {}).items()}
    places = content.get("row_files", {})
    content["row_files"] = {name: RowFilePlace(**place) for name, place in places.items()}
    base = content.get("base")
    content["base"] = None if base is None else PackageBase(**base)
    content["inputs"] = [_input_of(entry) for entry in content["inputs"]]
    content["outputs"] = [_input_of(entry) for entry in content["outputs"]]
    content["files"] = {
        name: FileChecksums(sums["bytes"], sums["block_bytes"], tuple(sums["sums"]))
        for name, sums in content["files"].items()
    }
    manifest = PackageManifest(**content)
    _check_types(manifest)
    return manifest


def _check_types(manifest: PackageManifest) -> None:
    texts = ("uuid", "library", "torch", "machine", "device")
    wrong = [name for name in texts if not isinstance(getattr(manifest, name), str)]
    for name in ("ops", "constants"):
        if not all(isinstance(text, str) for text in getattr(manifest, name).values()):
            wrong.append(name)
    lists: list[tuple[str, Any, type]] = [
        ("instructions", manifest.instructions, str),
        ("missing", [] if manifest.missing is None else manifest.missing, str),
    ]
    for part in manifest.live.values():
        lists += [("live", part.tables, str), ("live", part.formats, int), ("live", part.rows, int)]
        lists.append(("live", [] if part.headroom is None else part.headroom, int))
    for place in manifest.row_files.values():
        lists += [("row_files", [place.file], str), ("row_files", [place.rows, place.bytes], int)]
        if "/" in str(place.file):
            wrong.append("row_files")
    for name, values, kind in lists:
        if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
            wrong.append(name)
    if not set(manifest.constants.values()) <= {TABLES, DENSE}:
        wrong.append("constants")
    if set(manifest.files) != {CODE, TABLES, DENSE}:
        wrong.append("files")
    if wrong:
        raise ValueError(f"{wrong[0]} is {getattr(manifest, wrong[0])!r}")


def _input_of(entry: dict[str, Any]) -> Input:
    dtype = None if entry["dtype"] is None else getattr(torch, entry["dtype"])
    sizes = [None if size is None else Size(**size) for size in entry["sizes"]]
    return Input(entry["name"], dtype, sizes, entry["value"])


__all__ = [
    "CODE",
    "DENSE",
    "FORMAT",
    "FORMAT_VERSION",
    "MANIFEST",
    "TABLES",
    "LivePart",
    "PackageManifest",
    "RowFilePlace",
    "ServedTable",
    "manifest_text",
    "read_package_manifest",
]
