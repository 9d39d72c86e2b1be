"""Folders of a checkpoint, and their names while one replaces another.

A save writes into ``NAME.tmp-UUID``, which it claims (``claim.py``). If ``NAME`` is a checkpoint
already, the two exchange names atomically. A file system without exchange keeps the old one at
``NAME.old-UUID`` between two renames, and loaders find it there.

A save removes only what a save wrote. A folder counts as left behind only if

* its name ends as a save's does, in 32 hexadecimal digits, and
* it has the manifest of a checkpoint, or the file of a claim that has ended.

Other files in a checkpoint move into the one that replaces it.

A URL has no names to exchange: see ``url_places.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch_dynemb.checkpoint.file_names import MANIFEST, is_own
from torch_dynemb.checkpoint.manifest.claim import Claim, Writer, remove_begun, writer_of
from torch_dynemb.checkpoint.manifest.file import read_content, read_manifest
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.checkpoint.manifest.url_places import UUID, has_foreign_files
from torch_dynemb.errors import DamagedFileError, InUseError, UnsupportedFormatError
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location, Url, local
from torch_dynemb.files.presence import is_file, is_folder, is_there
from torch_dynemb.process.interrupts import defer_signals

_ATTEMPTS = 100  # of a loader, if saves replace the checkpoint meanwhile


def unfinished(path: Location, uuid: str) -> Location:
    """Return the folder of a checkpoint while it is written."""
    if isinstance(path, Url):
        return path / uuid
    return path.with_name(f"{path.name}.tmp-{uuid}")


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


def is_taken(path: Location) -> bool:
    """Return whether a path exists. Files of dead saves at a URL do not count."""
    return has_foreign_files(path) if isinstance(path, Url) else is_there(path)


def check_unclaimed(path: Location) -> None:
    """Raise InUseError while another call writes a checkpoint there. A URL has no claims."""
    if isinstance(path, Path):
        for folder in [path, *left_behind(path)]:
            _check_unclaimed(path, folder)


def _check_unclaimed(path: Path, folder: Path) -> None:
    writer, owner = writer_of(folder)
    if writer == Writer.ALIVE:
        raise InUseError(
            f"checkpoint.save: {owner} is saving to {path} now: wait until it has ended, or give "
            "each call a path of its own; this call has replaced nothing",
            path=path,
        )


def located(path: Location) -> tuple[Location, Manifest]:
    """Return the folder of the last whole checkpoint, and its manifest.

    Raises:
        FileNotFoundError: there is none.
        DamagedFileError: its manifest is damaged.
        UnsupportedFormatError: it has another format version.
        OSError: it cannot be read.
    """
    if isinstance(path, Url):
        return path, read_manifest(path)
    for _ in range(_ATTEMPTS):
        # in this order: a save may replace it meanwhile
        with suppress(FileNotFoundError):
            return path, read_manifest(path)
        left = left_behind(path)
        for folder in left:
            with suppress(FileNotFoundError, DamagedFileError, UnsupportedFormatError):
                return folder, read_manifest(folder)
        if not left and not is_file(path / MANIFEST):
            break
    raise FileNotFoundError(
        f"{path} is not a checkpoint: "
        + (f"it has no {MANIFEST}" if is_there(path) else "it does not exist")
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


def left_behind(path: Path) -> list[Path]:
    """List the folders with names of unfinished checkpoints, newest first.

    Raises:
        OSError: the parent folder cannot be read.
    """
    if not is_folder(path.parent):
        return []
    name = re.compile(re.escape(path.name) + r"\.(tmp|old)-[0-9a-f]{32}")
    found = [path.parent / entry for entry in os.listdir(path.parent) if name.fullmatch(entry)]
    old = f"{path.name}.old-"
    return sorted(found, key=lambda entry: (entry.name.startswith(old), entry.name))


def _is_whole(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except (FileNotFoundError, DamagedFileError, UnsupportedFormatError):
        return False
    return True


def _is_left(folder: Path) -> bool:
    """Return whether a save that has ended created the folder."""
    if folder.is_symlink() or not is_folder(folder):
        return False
    writer, _ = writer_of(folder)
    if writer != Writer.NONE:
        return writer == Writer.DEAD
    try:
        read_content(folder)
    except (FileNotFoundError, DamagedFileError):
        return False
    return True


def make_parents(disk: Disk, path: Path) -> None:
    """Create the folders above a checkpoint, and wait until they are on the disk."""
    missing = []
    parent = path.parent
    while not is_folder(parent):
        missing.append(parent)
        parent = parent.parent
    for folder in reversed(missing):
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)


@contextmanager
def claimed(disk: Disk, path: Location, uuid: str) -> Iterator[Location]:
    """Create the folder in which a checkpoint is written, and claim it within the context.

    What dead saves left is put in its place or removed.

    Args:
        disk: the file system.
        path: path of the checkpoint.
        uuid: uuid of the checkpoint.

    Raises:
        InUseError: another call writes it.
        OSError: the disk is full, or fails.
    """
    if isinstance(path, Url):
        yield path / uuid
        return
    folder = local(unfinished(path, uuid))
    make_parents(disk, path)
    claim = _claim_of_new(disk, folder)
    try:
        try:
            for other in [path, *left_behind(path)]:
                if other != folder:
                    _check_unclaimed(path, other)
            _settle(disk, path, folder)
        except BaseException:
            disk.remove(folder)
            raise
        yield folder
    except BaseException:
        claim.release()
        raise
    claim.release(path, folder)


def _claim_of_new(disk: Disk, folder: Path) -> Claim:
    """Create a folder and claim it; again if another call takes it for a dead save's."""
    for _ in range(_ATTEMPTS):
        disk.make_folder(folder)
        try:
            return Claim(folder)
        except FileNotFoundError:
            continue
        except BaseException:
            disk.remove(folder)
            raise
    raise InUseError(
        f"checkpoint.save: {folder} was removed by other processes each time it was made",
        path=folder,
    )


def _settle(disk: Disk, path: Path, own: Path) -> None:
    """Put a whole checkpoint that a dead save left in its place, and remove other leftovers."""
    others = [entry for entry in left_behind(path) if entry != own]
    left = [entry for entry in others if _is_left(entry)]
    if left and not is_there(path):
        whole = next((entry for entry in left if _is_whole(entry)), None)
        if whole is not None:
            disk.rename(whole, path)
            disk.sync_folder(path.parent)
            left.remove(whole)
    for entry in left:
        _remove(disk, entry, path)
    for entry in others:
        if entry not in left and is_folder(entry) and not entry.is_symlink():
            remove_begun(entry)


def put_in_place(disk: Disk, whole: Path, path: Path, uuid: str) -> None:
    """Give a checkpoint on the disk its final name, in place of the one before.

    Raises:
        FileExistsError: something else has the name by now.
        OSError: the disk fails. The one before keeps its name.
    """
    check_replaceable(path)
    if not is_there(path):
        _renamed(disk, [(whole, path)])
        return
    with defer_signals():
        exchanged = disk.exchange(whole, path)
        if exchanged:
            try:
                disk.sync_folder(path.parent)
            except OSError:
                disk.exchange(whole, path)
                raise
    old = whole if exchanged else path.with_name(f"{path.name}.old-{uuid}")
    if not exchanged:
        _renamed(disk, [(path, old), (whole, path)])
    _remove(disk, old, path)


def _renamed(disk: Disk, moves: list[tuple[Path, Path]]) -> None:
    done: list[tuple[Path, Path]] = []
    with defer_signals():
        try:
            for source, target in moves:
                disk.rename(source, target)
                done.append((source, target))
            disk.sync_folder(moves[-1][1].parent)
        except OSError:
            for source, target in reversed(done):
                disk.rename(target, source)
            raise


# -- files of the user ----------------------------------------------------------------------------


def _remove(disk: Disk, old: Path, new: Path) -> None:
    """Remove a checkpoint that was replaced. Files of the user move into the new one.

    The old one stays if the new one has other files of these names, or they cannot be moved.
    """
    for within in _files_of_others(old):
        target = new / within
        try:
            if is_there(target):
                return
            target.parent.mkdir(exist_ok=True)
            (old / within).rename(target)
        except OSError:
            return
    disk.remove(old)


def _files_of_others(folder: Path) -> list[Path]:
    """List files in a checkpoint that no save wrote, relative to it.

    Raises:
        OSError: a folder cannot be read.
    """
    found = []
    for name in sorted(os.listdir(folder)):
        path = folder / name
        if path.is_symlink() or not is_folder(path):
            if not is_own("", name):
                found.append(Path(name))
            continue
        if UUID.fullmatch(name):  # copied from a URL
            inner = [Path(of, within) for of in os.listdir(path) for within in _inner(path / of)]
        else:
            inner = [Path(of) for of in _inner(path)]
        found += [
            Path(name, of)
            for of in sorted(inner)
            if not is_own((path / of).parent.name, of.name)
            or not is_file(path / of)
            or (path / of).is_symlink()
        ]
    return found


def _inner(path: Path) -> list[str]:
    """List the names in a folder; the folder itself, as ``.``, if it is a file."""
    return os.listdir(path) if is_folder(path) and not path.is_symlink() else ["."]


__all__ = [
    "check_replaceable",
    "check_unclaimed",
    "claimed",
    "is_replaced",
    "is_taken",
    "left_behind",
    "located",
    "make_parents",
    "put_in_place",
    "unfinished",
]
