"""Packages that are damaged, or say that they are for something else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_dynemb.serving.packages.manifest import (
    CODE,
    DENSE,
    MANIFEST,
    TABLES,
    PackageManifest,
    manifest_text,
    read_package_manifest,
)

if TYPE_CHECKING:
    from conftest import Package

FILES = (CODE, TABLES, DENSE, MANIFEST)


def copied(package: Package, folder: Path, whole: tuple[str, ...] = ()) -> Path:
    """A package of the same files, of which those of ``whole`` may be changed."""
    folder.mkdir()
    for name in FILES:
        if name in whole:
            (folder / name).write_bytes((package.path / name).read_bytes())
        else:
            os.link(package.path / name, folder / name)
    return folder


def with_manifest(package: Package, folder: Path, **changes: Any) -> Path:
    """A package with an altered manifest, with the right checksum."""
    copied(package, folder, (MANIFEST,))
    manifest: PackageManifest = read_package_manifest(folder)._replace(**changes)
    (folder / MANIFEST).write_bytes(manifest_text(manifest))
    return folder
