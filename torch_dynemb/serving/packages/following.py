"""Loaded packages that follow a delta log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch_dynemb.checkpoint.delta_log.commits import Commit
from torch_dynemb.checkpoint.delta_log.follower import Follower, Log
from torch_dynemb.checkpoint.delta_log.reader import LogReader, sinks_of
from torch_dynemb.checkpoint.delta_log.targets import check_names, checked_delta
from torch_dynemb.serving.live_commits import TableChange
from torch_dynemb.serving.packages.base import PackageBase
from torch_dynemb.serving.packages.live_package import LivePackage
from torch_dynemb.serving.packages.manifest import PackageManifest, ServedTable


class _FollowingPackage:
    """Takes commits for a loaded package; its dense part stays.

    Args:
        base: of the package.
        tables: of the package.
        live: gives what updates them.
    """

    def __init__(
        self,
        base: PackageBase,
        tables: dict[str, ServedTable],
        live: Callable[[], LivePackage],
    ) -> None:
        self._names, self._tables, self._live = base.tables, tables, live

    def check(self, commit: Commit) -> None:
        check_names(commit, set(self._names.values()))
        live = self._live()
        live.check(self._changes(commit, live))

    def apply(self, commit: Commit) -> None:
        live = self._live()
        live.take(self._changes(commit, live))

    def _changes(self, commit: Commit, live: LivePackage) -> list[TableChange]:
        changes = []
        for name, log_name in self._names.items():
            delta = checked_delta(log_name, commit.tables, self._tables[name].embedding_dim)
            if delta is not None:
                changes.append(TableChange(live.state_of("follow", name), name, delta))
        return changes


def follower_of(
    folder: Path, manifest: PackageManifest, log: Log, live: Callable[[], LivePackage]
) -> Follower:
    """What applies the commits of a log to a loaded package.

    Args:
        folder: of the package.
        manifest: its own.
        log: as of :func:`torch_dynemb.checkpoint.follow`.
        live: gives what updates its tables.

    Raises:
        TypeError: ``log`` is none.
    """
    base = base_for(folder, manifest)
    chains = {} if base.sequence is None else {base.rank: base.chain}
    uuid = base.uuid if base.sequence is None else None
    reader = LogReader(sinks_of(log), base=uuid, sequence=base.sequence, chains=chains)
    return Follower(reader, _FollowingPackage(base, manifest.tables, live))


def base_for(folder: Path, manifest: PackageManifest) -> PackageBase:
    """The base of a package.

    Raises:
        ValueError: the package was not made for following.
    """
    if not manifest.live:
        raise ValueError(
            f"serving.load: follow is given, but the tables of {folder} are only read: export the "
            "model with headroom=, the number of ids that each table may have more, and base="
        )
    if manifest.base is None:
        raise ValueError(
            f"serving.load: follow is given, but {folder} does not say which commit its rows have: "
            "export the model with base=, the checkpoint that it was loaded from, or "
            "DeltaLog.position()"
        )
    return manifest.base


__all__ = ["base_for", "follower_of"]
