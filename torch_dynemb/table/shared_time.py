"""The time of tables that lie on several ranks: the ranks agree on it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from torch_dynemb.ops.columns import Clock
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.scores import Scores


class SharedTime(Scores):
    """The part of a table group that says what the time is.

    On its own, a group reads the machine's clock when a step ends. Clocks of several machines
    differ, so shards of one table would give one id different times and evict different ids. There,
    a rank only proposes what it has read; proposals travel with the ids, and a lookup takes the
    latest one of all ranks.

    Attributes:
        proposed_now: int64 [1], seconds that this rank proposes; None: the group is on its own.
    """

    proposed_now: Tensor | None = None
    _last_reading = 0

    def share_time(self, now: int) -> None:
        """Takes the time from :meth:`agree_on_now`, and no longer from the machine's clock.

        Args:
            now: seconds to begin with, equal on all ranks.
        """
        self._propose(now)
        self.set_now(now)

    def set_now(self, seconds: int) -> None:
        """Sets the time that lookups give their ids, until the next ``optimizer.step()``.

        Where the group lies on several ranks, all of them call it.

        Raises:
            TypeError, ValueError: not a whole number from 0 on.
            RuntimeError: no table keeps times.
        """
        super().set_now(seconds)
        if self.proposed_now is not None:
            self.proposed_now.fill_(seconds)

    def agree_on_now(self, proposals: Tensor) -> None:
        """Sets the time to the latest that ranks propose, unless it is later already.

        Waits for no device, so that it can be compiled and captured.

        Args:
            proposals: int64 [ranks], what each has in ``proposed_now``.
        """
        now = self.clock[Clock.NOW]
        now.copy_(torch.maximum(now, proposals.max()))

    def _propose(self, now: int) -> None:
        if self.proposed_now is None:
            self.proposed_now = torch.zeros(1, dtype=torch.int64, device=self.device)
            mark_static([self.proposed_now])
        self.proposed_now.fill_(now)

    def _share_time_as(self, other: SharedTime) -> None:
        """Goes on where another group is."""
        if other.proposed_now is not None:
            self._propose(int(other.proposed_now))
            self._last_reading = other._last_reading

    def _now_of_step(self, now: int | None) -> int | None:
        """The time from the end of a step on; None: it stays until a lookup sets it."""
        if now is not None:
            self._check_now(now)
        elif self.keeps_time:
            now = int(time.time())
            if self.proposed_now is not None:
                # the machine's clock may have been set back meanwhile
                self._last_reading = max(self._last_reading, now)
                self._propose(self._last_reading)
                return None
        if now is not None and self.proposed_now is not None:
            self._propose(now)
        return now


__all__ = ["SharedTime"]
