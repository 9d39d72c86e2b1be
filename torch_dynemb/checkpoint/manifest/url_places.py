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

from torch_dynemb.checkpoint.entries import MANIFEST
from torch_dynemb.checkpoint.file_systems.locations import Url
from torch_dynemb.checkpoint.files.bounded_json import check_values
from torch_dynemb.checkpoint.files.disk import Disk
from torch_dynemb.checkpoint.manifest.file import read_content
from torch_dynemb.checkpoint.manifest.records import Manifest
from torch_dynemb.errors import DamagedFileError

UUID = re.compile(r"[0-9a-f]{32}")  # names of the folders of saves
_DEAD_AFTER = timedelta(days=1)  # since the last file of a save


def has_foreign_files(url: Url) -> bool:
    """Return whether a folder has other entries than the folders of saves."""
    return any(not UUID.fullmatch(name) for name in url.store.names(str(url)))


def finish_at_url(disk: Disk, url: Url, uuid: str, manifest: Manifest) -> None:
    """Check that all files are there, and write the manifest.

    Args:
        disk: the file system.
        url: URL of the checkpoint.
        uuid: its uuid.
        manifest: its manifest.

    Raises:
        OSError: a file is missing, or the store fails. The checkpoint is the one from before then.
    """
    sizes = url.store.sizes(str(url / uuid))
    for file in manifest.files():
        size = sizes.get(file.path.partition("/")[2], 0)
        if size != file.bytes:
            raise OSError(
                f"checkpoint.save: {url / file.path} has {size} bytes, expected {file.bytes}: all "
                "ranks must see the same store, and it must not remove files"
            )
    text = manifest.text()
    check_values(text)
    before = _uuid_at(url)
    url.store.put(str(url / MANIFEST), text)
    if before is not None:
        disk.remove(url / before)
    with suppress(OSError):  # the next save tries again
        _remove_dead(disk, url, uuid)


def _uuid_at(url: Url) -> str | None:
    """Return the uuid of the checkpoint at a URL; None if there is none."""
    try:
        uuid = read_content(url).get("uuid")
    except (FileNotFoundError, DamagedFileError):
        return None
    return uuid if isinstance(uuid, str) and UUID.fullmatch(uuid) else None


def _remove_dead(disk: Disk, url: Url, own: str) -> None:
    """Remove the files of saves that have written nothing for a day."""
    others = url.store.names(str(url)) - {own, MANIFEST}
    for name in others:
        if UUID.fullmatch(name) is None:
            continue
        last = url.store.last_change(str(url / name))
        # a save may have replaced the own checkpoint meanwhile
        dead = last is not None and datetime.now(timezone.utc) - last > _DEAD_AFTER
        if dead and name != _uuid_at(url):
            disk.remove(url / name)


__all__ = ["UUID", "finish_at_url", "has_foreign_files"]
