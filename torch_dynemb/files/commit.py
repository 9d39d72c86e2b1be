"""Folders that are replaced as a whole: the commit protocol of a disk and of a URL.

A manifest names the files of a folder, which lie below a folder named by a uuid::

    PATH/manifest.json
    PATH/<uuid>/...

1. New files are written under a fresh uuid (:func:`new_files`).
2. :func:`commit` puts their manifest in place at once: by a rename, or by one PUT.
3. It removes the files that the manifest before named.

If step 2 raises, the manifest is read back: only the answer may be lost.

A disk has locks, and folders can be renamed. So the files of a save are in ``PATH.tmp-UUID`` at
first, which it claims (``claim.py``), and ``PATH`` appears as a whole. A second save to a path
raises. A save removes what dead ones left: drafts with a claim that has ended, and folders in
``PATH`` with the name of a uuid that the manifest does not name. Files of the user stay.

A URL has neither. Two saves to one URL both end, and the later manifest stays. What no manifest
names is removed once it is a day old.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path

from torch_dynemb.errors import InUseError
from torch_dynemb.files.bounded_json import check_values, json_of
from torch_dynemb.files.checksummed_files import space_errors, write_file
from torch_dynemb.files.claim import Claim, Writer, remove_begun, writer_of
from torch_dynemb.files.disk import MANIFEST, UNFINISHED, Disk
from torch_dynemb.files.locations import Location, Url, local
from torch_dynemb.files.presence import is_file, is_folder, is_there, names_in
from torch_dynemb.process.interrupts import defer_signals

_ATTEMPTS = 100  # of a claim, if other calls remove the folder meanwhile
_FORMER = "former.json"  # the manifest before, while it is put back
_UUID = re.compile(r"[0-9a-f]{32}")  # names of the folders of saves
# these, and manifests that a store without whole PUTs has not renamed yet
_AT_URL = re.compile(rf"({re.escape(MANIFEST)}\.tmp-)?[0-9a-f]{{32}}")
_DEAD_AFTER = timedelta(days=1)  # since the last file of a save


def draft_of(path: Location, uuid: str) -> Location:
    """Return the folder that gets the manifest: at a URL, the final one."""
    return path if isinstance(path, Url) else path.with_name(f"{path.name}.tmp-{uuid}")


def new_files(path: Location, uuid: str) -> Location:
    """Return the folder for the files that a manifest will name."""
    return draft_of(path, uuid) / uuid


def uuid_at(path: Location) -> str | None:
    """Return the uuid in the manifest of a folder; None if it has no whole manifest.

    Raises:
        OSError: it cannot be read.
    """
    if not is_file(path / MANIFEST):
        return None
    try:
        content = json_of(path / MANIFEST)
    except (FileNotFoundError, ValueError):
        return None
    uuid = content.get("uuid") if isinstance(content, dict) else None
    return uuid if isinstance(uuid, str) and is_uuid(uuid) else None


def is_uuid(text: str) -> bool:
    """Return whether a text names the folder of a save."""
    return _UUID.fullmatch(text) is not None


def is_taken(path: Location) -> bool:
    """Return whether a path exists. Files of dead saves at a URL do not count."""
    if isinstance(path, Url):
        return any(not _AT_URL.fullmatch(name) for name in names_in(path))
    return is_there(path)


# -- claims of a disk ------------------------------------------------------------------------------


def check_unclaimed(call: str, path: Location) -> None:
    """Raise InUseError while another call writes the folder. A URL has no claims.

    Args:
        call: prefix of the error.
        path: the folder.
    """
    if isinstance(path, Path):
        for folder in [path, *_drafts(path)]:
            _check_unclaimed(call, path, folder)


def _check_unclaimed(call: str, path: Path, folder: Path) -> None:
    writer, owner = writer_of(folder)
    if writer == Writer.ALIVE:
        raise InUseError(
            f"{call}: {owner} is saving to {path} now: wait until it has ended, or give "
            "each call a path of its own; this call has replaced nothing",
            path=path,
        )


def _drafts(path: Path) -> list[Path]:
    return drafts_in(path.parent, re.escape(path.name))


def drafts_in(parent: Path, names: str) -> list[Path]:
    """List the folders with names of drafts.

    Args:
        parent: folder of the folders that are replaced.
        names: regular expression of their names.

    Raises:
        OSError: the parent folder cannot be read.
    """
    if not is_folder(parent):
        return []
    name = re.compile(rf"({names})\.tmp-[0-9a-f]{{32}}")
    return [parent / of for of in sorted(os.listdir(parent)) if name.fullmatch(of)]


@contextmanager
def claimed(call: str, disk: Disk, path: Location, uuid: str) -> Iterator[Location]:
    """Create the folder that gets the manifest, and claim it within the context.

    What dead saves left is removed; after an error on a disk, the new files too.

    Args:
        call: prefix of errors.
        disk: the file system.
        path: the folder that is replaced.
        uuid: uuid of the new files.

    Raises:
        InUseError: another call writes it.
        OSError: the disk is full, or fails.
    """
    draft = draft_of(path, uuid)
    if isinstance(path, Url):
        yield draft
        return
    draft = local(draft)
    _make_parents(disk, path)
    claim = _claim_of_new(call, disk, draft)
    try:
        try:
            for other in [path, *_drafts(path)]:
                if other != draft:
                    _check_unclaimed(call, path, other)
            _settle(disk, path, draft)
            yield draft
        finally:
            with defer_signals():
                disk.remove(draft)  # nothing but the claim is left in it after a commit
    except BaseException:
        claim.release()
        raise
    claim.release(path)


def _make_parents(disk: Disk, path: Path) -> None:
    """Create the folders above a path, and wait until they are on the disk."""
    missing = []
    parent = path.parent
    while not is_folder(parent):
        missing.append(parent)
        parent = parent.parent
    for folder in reversed(missing):
        disk.make_folder(folder)
        disk.sync_folder(folder.parent)


def _claim_of_new(call: str, disk: Disk, folder: Path) -> Claim:
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
        f"{call}: {folder} was removed by other processes each time it was made", path=folder
    )


def _settle(disk: Disk, path: Path, own: Path) -> None:
    """Remove what dead saves left."""
    known = remove_dead_drafts(disk, [of for of in _drafts(path) if of != own])
    named = uuid_at(path)
    if named is None or not known:
        return
    with suppress(OSError):
        (path / UNFINISHED).unlink()
    for name in names_in(path):
        # a folder with a manifest is a checkpoint of its own
        if _UUID.fullmatch(name) and name != named and not is_file(path / name / MANIFEST):
            disk.remove(path / name)


def remove_dead_drafts(disk: Disk, drafts: Collection[Path]) -> bool:
    """Remove drafts with claims that have ended.

    Returns:
        Whether it is known of all of them if another save still writes them.
    """
    known = True
    for folder in drafts:
        if folder.is_symlink() or not is_folder(folder):
            continue
        writer, _ = writer_of(folder)
        known = known and writer != Writer.UNKNOWN
        if writer == Writer.DEAD:
            disk.remove(folder)
        elif writer == Writer.NONE:
            remove_begun(folder)
    return known


# -- the commit ------------------------------------------------------------------------------------


def abandon(disk: Disk, path: Location, uuid: str) -> None:
    """Remove new files that no manifest names yet."""
    disk.remove(new_files(path, uuid) if isinstance(path, Url) else draft_of(path, uuid))


def commit(
    disk: Disk,
    path: Location,
    uuid: str,
    manifest: bytes,
    check: Callable[[Location], None],
    folders: Collection[Location] = (),
) -> None:
    """Put new files in place, and remove those of the manifest before.

    After an error of a store, the new files stay, because the store may have the manifest or get it
    late. A later save removes them.

    Args:
        disk: the file system.
        path: the folder that is replaced.
        uuid: uuid of the new files.
        manifest: JSON with this uuid.
        check: raises if something else has the name of the folder by now.
        folders: those of new files, in the folder of the draft.

    Raises:
        OSError: the disk or store fails. The manifest is the one from before then, unless the disk
            or store has the new one and cannot be read.
    """
    check_values(manifest)
    try:
        for folder in folders:
            with space_errors(folder):
                disk.sync_folder(folder)
        if isinstance(path, Path):
            draft = local(draft_of(path, uuid))
            write_file(disk, draft / MANIFEST, manifest)
            with space_errors(draft):
                disk.sync_folder(draft)
        check(path)
        before = uuid_at(path)
    except BaseException:
        abandon(disk, path, uuid)
        raise
    with defer_signals():  # a request that is interrupted goes on
        if isinstance(path, Path):
            with space_errors(draft):
                if is_there(path):
                    _replace(disk, draft, path, uuid)
                else:
                    put_new(disk, draft, path)
        else:
            _put_at_url(path, uuid, manifest)
    if before is not None:
        disk.remove(path / before)
    if isinstance(path, Url):
        with suppress(OSError):  # the next save tries again
            _remove_dead(disk, path, uuid)


def remove_committed(disk: Disk, path: Location, uuid: str) -> None:
    """Remove what a save wrote, its manifest first; also what an interrupted call left of it.

    Files of others stay. Nothing is done if the folder has the manifest of another save by now.

    Args:
        disk: the file system.
        path: the folder.
        uuid: uuid of the save.

    Raises:
        InUseError: another call writes the folder.
        OSError: the disk or store fails.
    """
    check_unclaimed("checkpoint.save", path)
    if uuid_at(path) not in (None, uuid):
        return
    if is_file(path / MANIFEST):
        if isinstance(path, Url):
            path.store.remove_files([str(path / MANIFEST)])
        else:
            disk.rename(path / MANIFEST, path / uuid / UNFINISHED)
    if is_there(path / uuid):
        disk.remove(path / uuid)
        if is_there(path / uuid):
            raise OSError(f"checkpoint.save: {path / uuid} cannot be removed")
    if isinstance(path, Path):
        with suppress(OSError):  # it has other files, or is gone
            path.rmdir()


def put_new(disk: Disk, draft: Path, path: Path) -> None:
    """Give a draft its final name, and wait until that is on the disk.

    Raises:
        OSError: the disk fails. The draft has its name again then.
    """
    try:
        rename(disk, draft, path)
        disk.sync_folder(path.parent)
    except BaseException:
        with suppress(OSError):
            if not is_there(draft):
                disk.rename(path, draft)
        raise


def _replace(disk: Disk, draft: Path, path: Path, uuid: str) -> None:
    """Move the files of a draft, then its manifest, into a folder."""
    former = (path / MANIFEST).read_bytes()
    try:
        for name in (uuid, MANIFEST):
            rename(disk, draft / name, path / name)
            disk.sync_folder(path)
    except BaseException:
        with suppress(OSError):  # else the new manifest and its files stay
            if uuid_at(path) == uuid:
                write_file(disk, draft / _FORMER, former)
                disk.rename(draft / _FORMER, path / MANIFEST)
            disk.remove(path / uuid)
        raise


def rename(disk: Disk, source: Path, target: Path) -> None:
    """Rename a file or a folder, whether or not the answer of the disk is lost.

    Raises:
        OSError: the disk fails; the source still has its name.
    """
    try:
        disk.rename(source, target)
    except OSError:
        if is_there(source):  # else only the answer was lost
            raise


def _put_at_url(url: Url, uuid: str, manifest: bytes) -> None:
    try:
        url.store.put(str(url / MANIFEST), manifest)
    except OSError:
        with suppress(OSError):
            if uuid_at(url) == uuid:  # only the answer was lost
                return
        raise


def _remove_dead(disk: Disk, url: Url, own: str) -> None:
    """Remove the files of saves that have written nothing for a day."""
    for name in names_in(url) - {own, MANIFEST}:
        if _AT_URL.fullmatch(name) is None:
            continue
        last = url.store.last_change(str(url / name))
        # a save may have replaced the own manifest meanwhile
        dead = last is not None and datetime.now(timezone.utc) - last > _DEAD_AFTER
        if not dead or name == uuid_at(url):
            continue
        if _UUID.fullmatch(name) and is_file(url / name / MANIFEST):
            continue  # a checkpoint of its own
        if _UUID.fullmatch(name):
            disk.remove(url / name)
        else:
            url.store.remove_files([str(url / name)])


__all__ = [
    "abandon",
    "check_unclaimed",
    "claimed",
    "commit",
    "draft_of",
    "drafts_in",
    "is_taken",
    "is_uuid",
    "new_files",
    "put_new",
    "remove_committed",
    "remove_dead_drafts",
    "rename",
    "uuid_at",
]
