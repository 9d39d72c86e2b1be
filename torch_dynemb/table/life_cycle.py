"""How ids come and go in a table group that lives for months."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.ops.columns import MAX_COUNT, Clock, Table
from torch_dynemb.policy.admission import AdmitBy, NewIds, admission_hook
from torch_dynemb.process.forked import check_own
from torch_dynemb.table.compaction import Compaction
from torch_dynemb.table.evictions import EvictionCallback, Evictions
from torch_dynemb.table.removal import Removal
from torch_dynemb.table.shared_time import SharedTime
from torch_dynemb.table.stats import Statistics


class LifeCycle(Compaction, Evictions, Removal, SharedTime, Statistics):
    """The part of a table group that lets ids come and go."""

    def _start_life_cycle(self) -> None:
        self._steps = 0
        self._rejected = [0] * len(self.tables_config)
        self._batch_scored: set[int] = set()
        self._eviction_callback: EvictionCallback | None = None
        self._evicted_rows: list[list[Tensor]] | None = None
        self._hooked = [isinstance(table.policy.admission, AdmitBy) for table in self.tables_config]
        if self.keeps_time:
            self.set_now(int(time.time()))

    def state_was_loaded(self) -> None:
        """What is known of the tensors on the host follows them."""
        self._steps = int(self.clock[Clock.STEP])
        self._rejected = self.tables[: len(self.names), Table.REJECTED].tolist()

    def take_over(self, other: LifeCycle) -> None:
        """Goes on where another group with the same first tables is: what is no tensor."""
        self._batch_scored = set(other._batch_scored)
        self._share_time_as(other)
        self._eviction_callback = other._eviction_callback
        if other.evicted.shape[0] > 1:
            kept = other._evicted_rows
            self.record_evicted(other.evicted.shape[0] - 1, rows=kept is not None)
            self.evicted.copy_(other.evicted)
            if kept is not None:
                self._evicted_rows = [*kept, *([] for _ in self.names[len(kept) :])]

    @property
    def steps(self) -> int:
        """Training steps that have ended."""
        return self._steps

    def step(self, now: int | None = None) -> None:
        """Ends a training step: what ``optimizer.step()`` does for the index.

        Args:
            now: seconds, such as those of Unix time; default: the machine's clock. Where the
                group lies on several ranks, all of them give it, or none.

        Raises:
            TypeError, ValueError: ``now`` is no int, or is negative; nothing has been done.
            RuntimeError: ``now`` is given, but no table keeps times; nothing has been done. Or ids
                found no place, and a policy says ``check="error"``; everything else has been done.
        """
        self.check_step(now)
        now = self._now_of_step(now)
        ops.advance_step_(self.buckets, self.tables, self.row_clock, self.clock, now=now)
        self._steps = min(self._steps + 1, MAX_COUNT)
        for begin, cells, halve_every in self.layout.sketches:
            if halve_every > 0 and self._steps % halve_every == 0:
                self.sketch[begin : begin + cells].bitwise_right_shift_(1)
        if self._eviction_callback is not None:
            for name, batch in self.take_evicted().items():
                self._eviction_callback(name, batch)
        if any(table.policy.check != "ignore" for table in self.tables_config):
            self._check_rejected()

    def _check_rejected(self) -> None:
        counts, _ = ops.reported_counts(self.buckets, self.tables, self.row_clock)
        rejected = counts[:, Table.REJECTED].tolist()
        errors = []
        for t, table in enumerate(self.tables_config):
            more = rejected[t] - self._rejected[t]
            self._rejected[t] = rejected[t]
            if more <= 0 or table.policy.check == "ignore":
                continue
            message = (
                f"table {table.name!r} had no room for {more} new ids since the last step, which "
                "were looked up without a row: give it a larger capacity or memory_budget, fewer "
                "protected_steps, or smaller batches"
            )
            if table.policy.check == "error":
                errors.append(message)
            else:
                warnings.warn(message, RuntimeWarning, stacklevel=4)
        if errors:
            raise RuntimeError("; ".join(errors))

    def check_step(self, now: int | None) -> None:
        """Raises what :meth:`step` would raise before it changes anything."""
        check_own(self)
        if now is not None:
            self._check_now(now)

    def _admitted_by_hooks(
        self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int]
    ) -> Tensor | None:
        """bool [N], or None where no hook is asked."""
        hooked = sorted({t for t in feature_tables if self._hooked[t]})
        if not hooked:
            return None
        known = self.find(ids, offsets, feature_tables).handles >= 0
        admitted = torch.ones_like(known)
        batch = (offsets.shape[0] - 1) // len(feature_tables)
        for t in hooked:
            rule = self.tables_config[t].policy.admission
            assert isinstance(rule, AdmitBy)
            with torch.no_grad():
                new = NewIds(ids, known, self.clock[:1], self.names[t])
                mask = admission_hook(rule.name)(new)
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != ids.shape:
                what = (
                    f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)
                )
                raise TypeError(
                    f"admission hook {rule.name!r} returned {what}, expected a bool tensor of "
                    f"shape {tuple(ids.shape)}"
                )
            if any(other != t for other in feature_tables):
                ends = offsets[batch::batch].contiguous()
                places = torch.arange(ids.shape[0], device=ids.device)
                feature = torch.searchsorted(ends, places, right=True)
                of_table = torch.tensor(feature_tables, device=ids.device)[feature] == t
                mask = mask | ~of_table
            admitted = admitted & mask
        return admitted


__all__ = ["LifeCycle"]
