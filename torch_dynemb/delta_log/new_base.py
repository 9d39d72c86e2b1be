"""A base that takes the place of a former one, and the commits that stay before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch.distributed as dist

from torch_dynemb.argument_checks import duration, integer
from torch_dynemb.checkpoint.saving.handle import SaveHandle
from torch_dynemb.checkpoint.saving.save import save
from torch_dynemb.delta_log.attaching import uuid_of
from torch_dynemb.delta_log.log_folder import base_folder, remove_bases
from torch_dynemb.delta_log.own_log import OwnLog
from torch_dynemb.delta_log.publishing import Publishing
from torch_dynemb.distributed.together import Ranks
from torch_dynemb.files.locations import Location, location_of


@dataclass
class NewBase:
    """A base that is saved, perhaps while training goes on.

    Attributes:
        handle: the save.
        path: path of the base.
        sequence: number of the last commit that it includes.
        first: number of the first commit that names it; None as long as it is not whole.
    """

    handle: SaveHandle
    path: Location
    sequence: int
    first: int | None = None


class Retention:
    """Choice of the commits before a base that stay.

    Args:
        retain: number of commits, or a text such as ``"1h"``; None: those since the former base.

    Raises:
        TypeError, ValueError: it is something else.
    """

    def __init__(self, retain: int | str | None) -> None:
        self._seconds: int | None = None
        self._commits: int | None = None
        self._published: list[tuple[float, int]] = []
        if isinstance(retain, str):
            self._seconds = duration("DeltaLog: retain", retain)
        elif retain is not None:
            what = "a number of commits, a text such as '1h', or None"
            self._commits = integer("DeltaLog: retain", retain, least=0, what=what)

    def published(self, sequence: int) -> None:
        """Note the time of a commit. The machine's clock may be set back meanwhile.

        Args:
            sequence: number of the commit.
        """
        if self._seconds is not None:
            now = time.monotonic()
            self._published.append((now, sequence))
            while self._published[0][0] < now - self._seconds:
                self._published.pop(0)

    def first(self, *, last: int, base: int, former: int) -> int:
        """Return the number of the first commit that stays.

        Args:
            last: number of the last commit.
            base: number of the last commit that the newest base includes.
            former: likewise of the base before.
        """
        if self._commits is not None:
            kept = last - self._commits + 1
        elif self._seconds is not None:
            oldest = time.monotonic() - self._seconds
            recent = [sequence for at, sequence in self._published if at >= oldest]
            kept = min(recent, default=last + 1)
        else:
            kept = former + 1
        return max(0, min(kept, base + 1))


class BaseSaves:
    """Writer of new bases of a log, which drops old commits and bases.

    Args:
        own: log of this rank.
        ranks, process_group: ranks that share the model.
        log: directory of the log; None if it is elsewhere.
        retention: commits that stay before a base.

    Attributes:
        new: base that is saved, or that commits do not name yet; None: none.
    """

    def __init__(
        self,
        own: OwnLog,
        ranks: Ranks,
        process_group: dist.ProcessGroup | None,
        log: Location | None,
        retention: Retention,
    ) -> None:
        self._own, self._ranks, self._process_group = own, ranks, process_group
        self._log, self.retention = log, retention
        self._former = 0  # last commit in the base before the newest one
        self.new: NewBase | None = None

    def save(
        self,
        publishing: Publishing,
        path: str | PathLike[str] | None,
        state: Mapping[str, Any] | None,
        asynchronous: bool,
        publish: Callable[[], int],
    ) -> int:
        """Publish, and save a base; see :meth:`DeltaLog.save`.

        Args:
            publishing: the attached model.
            path, state, asynchronous: see :meth:`DeltaLog.save`.
            publish: publishes, and waits until the commit is in the log.

        Returns:
            Number of the last commit that the base includes.
        """
        log = self._log
        if path is None and log is None:
            raise ValueError(
                "DeltaLog.save: path is None, but the log is not in a directory: give a path"
            )
        if self.new is not None and self.new.first is None:
            self._ranks.run(self.new.handle.wait)
        sequence = publish()
        target: Location
        if path is not None:
            target = location_of("DeltaLog.save", path)
        else:
            assert log is not None
            target = base_folder(log, sequence)
        handle = save(
            str(target),
            publishing.model,
            state=state,
            asynchronous=asynchronous,
            process_group=self._process_group,
        )
        try:
            self._ranks.run(publishing.recorded.check_unchanged)
        except BaseException:  # the checkpoint matches no commit
            handle.wait()
            if path is None and log is not None:
                self._ranks.on_first(lambda: remove_bases(log, after=sequence - 1))
            raise
        if publishing.published is not None:
            publishing.published.begin()
        self.new = NewBase(handle, target, sequence)
        return sequence

    def take(self, truncate: Callable[[int], None]) -> None:
        """Make a new base the base of the log once it is whole, and then drop old commits.

        Args:
            truncate: drops commits; see :meth:`DeltaLog.truncate`.
        """
        new, own, log = self.new, self._own, self._log
        if new is None:
            return
        if new.first is None:
            if not all(self._ranks.gather(new.handle.done())):
                return
            try:
                self._ranks.run(new.handle.wait)
                uuid = self._ranks.run(lambda: uuid_of(str(new.path)))
            except BaseException:
                self.new = None
                raise
            self._former = own.base_sequence
            own.base, own.base_sequence, new.first = uuid, new.sequence, own.sequence + 1
        elif own.sequence >= new.first:  # followers find the base
            kept = self.retention.first(last=own.sequence, base=new.sequence, former=self._former)
            kept = self._ranks.gather(kept)[0]
            truncate(kept)
            if log is not None:
                self._ranks.on_first(lambda: remove_bases(log, before=kept - 1))
            self.new = None


__all__ = ["BaseSaves", "NewBase", "Retention"]
