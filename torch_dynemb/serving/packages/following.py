"""Loaded packages that follow a delta log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch_dynemb.changes.commits import Commit
from torch_dynemb.delta_log.follower import Dense, Follower, Log
from torch_dynemb.delta_log.reader import LogReader, sinks_of
from torch_dynemb.delta_log.targets import (
    WholeTarget,
    check_known_tables,
    checked_delta,
    nothing,
)
from torch_dynemb.serving.live_commits import TableChange
from torch_dynemb.serving.packages.base import PackageBase
from torch_dynemb.serving.packages.live_package import LivePackage
from torch_dynemb.serving.packages.loaded import Loaded
from torch_dynemb.serving.packages.manifest import PackageManifest
from torch_dynemb.serving.packages.versions import Versions
from torch_dynemb.serving.whole_commits import DenseChange, dense_changes


class _FollowingPackage(WholeTarget):
    """Follower that applies commits to a loaded package.

    Args:
        base: of the package.
        manifest: of the package.
        versions: copies of the package that commits change.
    """

    def __init__(
        self, base: PackageBase, manifest: PackageManifest, versions: Callable[[], Versions]
    ) -> None:
        self._names, self._tables, self._versions = base.tables, manifest.tables, versions
        self._unused = set(manifest.unused)

    def check(self, commit: Commit) -> None:
        check_known_tables(commit, set(self._names.values()))
        with self._versions().reading() as loaded:
            loaded.live.check(self._changes(commit, loaded.live), self._dense(commit, loaded))

    def apply(self, commit: Commit, taken: Callable[[], object] = nothing) -> None:
        def take(loaded: Loaded) -> None:
            loaded.live.take(self._changes(commit, loaded.live), self._dense(commit, loaded))

        self._versions().change(take, taken)

    def _dense(self, commit: Commit, loaded: Loaded) -> list[DenseChange]:
        return dense_changes("the package", commit.dense, loaded.dense, self._unused)

    def _changes(self, commit: Commit, live: LivePackage) -> list[TableChange]:
        changes = []
        for name, log_name in self._names.items():
            delta = checked_delta(log_name, commit.tables, self._tables[name].embedding_dim)
            if delta is not None:
                changes.append(TableChange(live.state_of("follow", name), name, delta))
        return changes


def follower_of(
    reader: LogReader,
    base: PackageBase,
    manifest: PackageManifest,
    dense: Dense,
    versions: Callable[[], Versions],
) -> Follower:
    """Return the follower that applies the commits of a log to a loaded package.

    Args:
        reader: of the log.
        base: of the package.
        manifest: of the package.
        dense: treatment of the dense state, as in :func:`torch_dynemb.delta_log.follow`.
        versions: returns the copies that the commits change.
    """
    return Follower(reader, _FollowingPackage(base, manifest, versions), dense=dense)


def package_reader(log: Log, base: PackageBase) -> LogReader:
    """Return a reader of a log from the position of a package on.

    Args:
        log: as in :func:`torch_dynemb.delta_log.follow`.
        base: of the package.

    Raises:
        TypeError: ``log`` is not a log.
    """
    chains = {} if base.sequence is None else {base.rank: base.chain}
    uuid = base.uuid if base.sequence is None else None
    return LogReader(sinks_of(log), base=uuid, sequence=base.sequence, chains=chains)


def base_for(folder: Path, manifest: PackageManifest) -> PackageBase:
    """Return the base of a package.

    Raises:
        ValueError: the package was not made for following.
    """
    if not manifest.live:
        raise ValueError(
            f"serving.load: follow is given, but the tables of {folder} are only read: export the "
            "model with headroom=, the number of further ids for each table, and base="
        )
    if manifest.base is None:
        raise ValueError(
            f"serving.load: follow is given, but {folder} does not say which commit its rows have: "
            "export the model with base=, the checkpoint that it was loaded from, or "
            "DeltaLog.position()"
        )
    return manifest.base


__all__ = ["base_for", "follower_of", "package_reader"]
