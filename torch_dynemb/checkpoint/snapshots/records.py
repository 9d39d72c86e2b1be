"""Records in the files of a snapshot: one that names it, and one for each store.

They are JSON texts that contain their own checksum.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch_dynemb.checkpoint.manifest.records import canonical
from torch_dynemb.errors import DamagedStoreError, UnsupportedFormatError
from torch_dynemb.files.checksummed_files import checksum_of_bytes, space_errors, write_file
from torch_dynemb.files.commit import rename
from torch_dynemb.files.disk import Disk
from torch_dynemb.parts.saved_tables import SavedFile

VERSION = 1
_SNAPSHOT = "torch_dynemb snapshot"
_STORE = "torch_dynemb snapshot of a store"
_MOST_BYTES = 1 << 30


@dataclass(frozen=True)
class Snapshot:
    """A snapshot of a model.

    Attributes:
        name: name of the snapshot.
        uuid: unique id.
        number: increases from snapshot to snapshot.
        ranks: number of ranks that saved it.
        stores: number of stores on all ranks.
        history: uuids of the earlier snapshots that it continues, and that existed.
    """

    name: str
    uuid: str
    number: int
    ranks: int
    stores: int
    history: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class SavedSegments:
    """Files with the rows of a slab.

    Attributes:
        slab: name of the slab.
        bytes: size of each file.
        places: places of the segments, as records name them.
        files: their numbers.
        headers: crc32c of the first page of each.
    """

    slab: str
    bytes: int
    places: list[int]
    files: list[int]
    headers: list[int]


@dataclass(frozen=True)
class SavedStore:
    """Files of a snapshot in one store.

    Attributes:
        uuid: uuid of the snapshot.
        first: path of the first store, relative to this one.
        state: file with the state without the rows.
        segments: files of all slabs; a slab in memory has none.
        batch_scored: numbers of the tables with a custom score per lookup.
        proposed_now: seconds that the rank proposed; None for a group on a single rank.
    """

    uuid: str
    first: str
    state: SavedFile
    segments: list[SavedSegments]
    batch_scored: list[int]
    proposed_now: int | None


REMEDY = (
    "copy it back from a backup; or load another snapshot, and delete this one's file in snapshots/"
)


def damaged(path: Path, what: object) -> DamagedStoreError:
    """Return the error for a damaged file of a snapshot.

    Args:
        path: the file.
        what: what is wrong with it.
    """
    return DamagedStoreError(f"{path}: {what}: {REMEDY}", path=path)


def write_record(disk: Disk, path: Path, record: Snapshot | SavedStore) -> None:
    """Write a file, which appears as a whole. Its name may not be on the disk yet.

    Raises:
        OSError: the disk is full, or fails.
    """
    kind = _SNAPSHOT if isinstance(record, Snapshot) else _STORE
    content = {"format": kind, "version": VERSION, **dataclasses.asdict(record)}
    text = canonical({**content, "crc32c": checksum_of_bytes(canonical(content))})
    with space_errors(path):
        draft = path.with_name(f".{path.name}.tmp-{record.uuid}")
        write_file(disk, draft, text)
        rename(disk, draft, path)


def read_snapshot(path: Path) -> Snapshot:
    """Read the snapshot that a file names.

    Raises:
        DamagedStoreError: it is damaged.
        UnsupportedFormatError: it has another version.
    """
    content = _read(path, _SNAPSHOT)
    try:
        snapshot = Snapshot(**content)
        _check(path, snapshot.name == path.name, f"it belongs to snapshot {snapshot.name!r}")
        numbers = (snapshot.number, snapshot.ranks, snapshot.stores)
        _check(path, _counts(*numbers), "its numbers are wrong")
        _check(path, all(isinstance(of, str) for of in snapshot.history), "its history is wrong")
    except (TypeError, AttributeError) as error:
        raise damaged(path, f"an entry is missing or wrong: {error}") from error
    return snapshot


def read_store(path: Path) -> SavedStore:
    """Read the record of a store.

    Raises:
        DamagedStoreError: the file is missing or damaged.
        UnsupportedFormatError: it has another version.
    """
    content = _read(path, _STORE)
    try:
        state = SavedFile(**content.pop("state"))
        segments = [SavedSegments(**of) for of in content.pop("segments")]
        record = SavedStore(**content, state=state, segments=segments)
        for of in segments:
            same = len(of.places) == len(of.files) == len(of.headers)
            _check(path, same and _counts(of.bytes, *of.places, *of.files), "segments are wrong")
    except (TypeError, KeyError, AttributeError) as error:
        raise damaged(path, f"an entry is missing or wrong: {error}") from error
    return record


def _counts(*values: object) -> bool:
    return all(type(value) is int and value >= 0 for value in values)


def _check(path: Path, sound: bool, what: str) -> None:
    if not sound:
        raise damaged(path, what)


def _read(path: Path, kind: str) -> dict[str, Any]:
    """Read the content of a file, without its format and checksum."""
    try:
        _check(path, path.stat().st_size <= _MOST_BYTES, "the file is larger than any of its kind")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise damaged(path, "the file is missing") from None
    except DamagedStoreError:
        raise
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"the file is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise damaged(path, "the file is not a JSON object")
    _check(path, content.get("format") == kind, f"the file is not a {kind}")
    version = content.get("version")
    if version != VERSION:
        raise UnsupportedFormatError(
            f"{path}: it has version {str(version)[:100]} of the format, but this torch_dynemb "
            f"reads {VERSION}: {REMEDY}",
            path=path,
        )
    expected = content.pop("crc32c", None)
    try:
        found = checksum_of_bytes(canonical(content))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"the file is not JSON: {error}") from error
    _check(path, found == expected, "the checksum is wrong: the file was damaged or edited")
    del content["format"], content["version"]
    return content


__all__ = [
    "REMEDY",
    "SavedSegments",
    "SavedStore",
    "Snapshot",
    "damaged",
    "read_snapshot",
    "read_store",
    "write_record",
]
