"""Checkpoints at a URL, where folders have no locks and cannot be renamed.

A save writes its files into a folder of their own, named by its uuid, and the manifest last, by one
PUT. So the manifest always names whole files::

    URL/manifest.json
    URL/<uuid>/<table>/r000-of-001...

A save removes the files of the checkpoint that it has replaced, and those of dead saves. Two saves
to one URL both end, and the later manifest stays.
"""

from __future__ import annotations

import re
from contextlib import suppress
from datetime import datetime, timedelta, timezone

from torch_dynemb.checkpoint.file_names import MANIFEST
from torch_dynemb.checkpoint.manifest.file import read_content
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.errors import DamagedFileError
from torch_dynemb.files.bounded_json import check_values
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location, Url
from torch_dynemb.process.interrupts import defer_signals

UUID = re.compile(r"[0-9a-f]{32}")  # names of the folders of saves
# these, and manifests that a store without whole PUTs has not renamed yet
_OWN = re.compile(rf"({re.escape(MANIFEST)}\.tmp-)?[0-9a-f]{{32}}")
_DEAD_AFTER = timedelta(days=1)  # since the last file of a save


def has_foreign_files(url: Url) -> bool:
    """Return whether a folder has other entries than those of saves that have not ended."""
    return any(not _OWN.fullmatch(name) for name in url.store.names(str(url)))


def finish_at_url(disk: Disk, url: Url, manifest: Manifest) -> None:
    """Write the manifest, and remove the files of the checkpoint that it replaces.

    Args:
        disk: the file system.
        url: URL of the checkpoint.
        manifest: its manifest.

    Raises:
        OSError: the store fails. The checkpoint is the one from before then, unless the store has
            the manifest although it cannot be read.
    """
    text = manifest.text()
    check_values(text)
    before = uuid_at(url)
    with defer_signals():  # a request that is interrupted goes on
        try:
            url.store.put(str(url / MANIFEST), text)
        except OSError:
            if not _is_at(url, manifest.uuid):  # else only the answer was lost
                raise
    if before is not None:
        disk.remove(url / before)
    with suppress(OSError):  # the next save tries again
        _remove_dead(disk, url, manifest.uuid)


def uuid_at(place: Location) -> str | None:
    """Return the uuid of the checkpoint at a place; None if there is none.

    Raises:
        OSError: it cannot be read.
    """
    try:
        uuid = read_content(place).get("uuid")
    except (FileNotFoundError, DamagedFileError):
        return None
    return uuid if isinstance(uuid, str) and UUID.fullmatch(uuid) else None


def _is_at(url: Url, uuid: str) -> bool:
    with suppress(OSError):
        return uuid_at(url) == uuid
    return False


def _remove_dead(disk: Disk, url: Url, own: str) -> None:
    """Remove the files of saves that have written nothing for a day."""
    others = url.store.names(str(url)) - {own, MANIFEST}
    for name in others:
        if _OWN.fullmatch(name) is None:
            continue
        last = url.store.last_change(str(url / name))
        # a save may have replaced the own checkpoint meanwhile
        dead = last is not None and datetime.now(timezone.utc) - last > _DEAD_AFTER
        if not dead or name == uuid_at(url):
            continue
        if UUID.fullmatch(name):
            disk.remove(url / name)
        else:
            url.store.remove_files([str(url / name)])


__all__ = ["UUID", "finish_at_url", "has_foreign_files", "uuid_at"]
