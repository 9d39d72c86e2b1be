"""Reader of the manifest of a checkpoint."""

from __future__ import annotations

from typing import Any

from torch_dynemb.checkpoint.file_names import FORMAT, FULL, MANIFEST, VERSION
from torch_dynemb.checkpoint.manifest.check import check_manifest
from torch_dynemb.checkpoint.manifest.records import (
    InSeries,
    Manifest,
    SavedDense,
    SavedEntry,
    SavedGroup,
    canonical,
)
from torch_dynemb.errors import DamagedFileError, UnsupportedFormatError
from torch_dynemb.files.bounded_json import json_of
from torch_dynemb.files.checksummed_files import checksum_of_bytes
from torch_dynemb.files.commit import is_taken
from torch_dynemb.files.locations import Location
from torch_dynemb.files.presence import is_file, is_there
from torch_dynemb.parts.saved_tables import SavedFile, table_of


def read_manifest(folder: Location) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        FileNotFoundError: it is missing.
        DamagedFileError: it is damaged.
        UnsupportedFormatError: it has another format version.
    """
    path = folder / MANIFEST
    content = read_content(folder)
    if content.get("version") != VERSION:
        raise UnsupportedFormatError(
            f"{path}: the checkpoint has format version {repr(content.get('version'))[:100]}, but "
            f"this torch_dynemb reads {VERSION}: load it with the version that wrote it",
            path=path,
        )
    expected = content.pop("crc32c", None)
    try:
        found = checksum_of_bytes(canonical(content))
    except (ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: the file is not JSON: {error}", path=path) from error
    if found != expected:
        raise DamagedFileError(
            f"{path}: the checksum is wrong: the file was damaged or edited", path=path
        )
    del content["format"], content["version"]
    try:
        manifest = _manifest_of(content)
        check_manifest(manifest)
    except (TypeError, KeyError, AttributeError) as error:
        raise DamagedFileError(
            f"{path}: an entry is missing or wrong: {error!r}", path=path
        ) from error
    except ValueError as error:
        raise DamagedFileError(f"{path}: {error}", path=path) from error
    return manifest


def read_content(folder: Location) -> dict[str, Any]:
    """Read the JSON of a manifest, complete or not, of any version.

    Raises:
        FileNotFoundError: it is missing.
        DamagedFileError: it is not the manifest of a checkpoint.
        OSError: it cannot be read.
    """
    path = folder / MANIFEST
    if not is_file(path):
        raise FileNotFoundError(
            f"{folder} is not a checkpoint: "
            + (f"it has no {MANIFEST}" if is_there(folder) else "it does not exist")
        )
    try:
        content = json_of(path)
    except ValueError as error:
        raise DamagedFileError(f"{path}: the file is not JSON: {error}", path=path) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DamagedFileError(f"{path}: the file is not the manifest of a {FORMAT}", path=path)
    return content


def check_replaceable(path: Location) -> None:
    """Raise FileExistsError if the path exists but is not a checkpoint."""
    if not is_taken(path):
        return
    why = f"it has no {MANIFEST}"
    if is_file(path / MANIFEST):
        try:
            read_content(path)
            return
        except DamagedFileError as error:
            why = str(error)
    raise FileExistsError(
        f"checkpoint.save: {path} exists but is not a checkpoint, so a save does not "
        f"replace it: choose another path, or remove it ({why})"
    )


def is_replaced(folder: Location, uuid: str) -> bool:
    """Return whether the checkpoint that is read was replaced or removed.

    Args:
        folder: its folder.
        uuid: its uuid.
    """
    try:
        return read_manifest(folder).uuid != uuid
    except FileNotFoundError:
        return True
    except (OSError, DamagedFileError, UnsupportedFormatError):
        return False


def check_full(call: str, folder: Location, manifest: Manifest) -> None:
    """Raise ValueError for an increment.

    Args:
        call: prefix of the error.
        folder: folder of the checkpoint.
        manifest: its manifest.
    """
    if manifest.kind != FULL:
        raise ValueError(
            f"{call}: {folder} is an increment of the checkpoint with uuid {manifest.parent}: "
            "torch_dynemb.checkpoint.merge([base, increment, ...], out), or python -m "
            "torch_dynemb checkpoint merge, writes a whole checkpoint of both"
        )


def _manifest_of(content: dict[str, Any]) -> Manifest:
    tables = {name: table_of(table) for name, table in content.pop("tables").items()}
    groups = [
        SavedGroup(**{**group, "file": SavedFile(**group["file"])})
        for group in content.pop("groups")
    ]
    dense, state = _dense_of(content.pop("dense")), _dense_of(content.pop("state"))
    changes = [SavedFile(**file) for file in content.pop("changes")]
    series = [InSeries(**of) for of in content.pop("series")]
    return Manifest(
        **content,
        tables=tables,
        groups=groups,
        dense=dense,
        state=state,
        changes=changes,
        series=series,
    )


def _dense_of(dense: dict[str, Any]) -> SavedDense:
    return SavedDense(
        [SavedFile(**file) for file in dense["files"]],
        {name: [SavedEntry(**e) for e in entries] for name, entries in dense["entries"].items()},
        dense["values"],
    )


__all__ = ["check_full", "check_replaceable", "is_replaced", "read_manifest"]
