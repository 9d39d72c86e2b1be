"""The end of a training step for the index."""

from __future__ import annotations

import warnings

import torch

from torch_dynemb import ops
from torch_dynemb.errors import BackgroundError, NoRoomError
from torch_dynemb.ops.columns import MAX_COUNT, Table
from torch_dynemb.table.clock import check_now, now_of_step
from torch_dynemb.table.evictions import take_evicted
from torch_dynemb.table.expiry import refresh_each_second
from torch_dynemb.table.sampling import refresh_counted
from torch_dynemb.table.tables import Tables


def step(tables: Tables, now: int | None = None) -> None:
    """End a training step as :meth:`torch_dynemb.TableGroup.step` does."""
    check_step(tables, now)
    now = now_of_step(tables, now)
    ops.end_step_(tables.index, tables.rows, now=now)
    tables.host.steps = min(tables.host.steps + 1, MAX_COUNT)
    if tables.host.expiry_floors is not None:
        refresh_each_second(tables, tables.host.last_reading if now is None else now)
    if tables.tiers is not None:
        tables.tiers.end_step(tables.index)
    for begin, cells, halve_every in tables.config.layout.sketches:
        if halve_every > 0 and tables.host.steps % halve_every == 0:
            tables.index.sketch[begin : begin + cells].bitwise_right_shift_(1)
    refresh_counted(tables)
    callback = tables.evictions.callback
    if callback is not None:
        for name, batch in take_evicted(tables).items():
            callback(name, batch)
    if any(table.policy.check != "ignore" for table in tables.config.tables):
        _check_rejected(tables)


def _check_rejected(tables: Tables) -> None:
    counts, _ = ops.reported_counts(tables.index, tables.rows)
    rejected = counts[:, Table.REJECTED].tolist()
    errors: list[str] = []
    full: list[str] = []
    for t, table in enumerate(tables.config.tables):
        more = rejected[t] - tables.host.rejected[t]
        tables.host.rejected[t] = rejected[t]
        if more <= 0 or table.policy.check == "ignore":
            continue
        message = (
            f"table {table.name!r} had no room for {more} new ids since the last step, which "
            "were looked up without a row: give it a larger capacity or memory_budget, fewer "
            "protected_steps, or smaller batches"
        )
        if table.policy.check == "error":
            errors.append(message)
            full.append(table.name)
        else:
            warnings.warn(message, RuntimeWarning, stacklevel=5)
    if errors:
        raise NoRoomError("; ".join(errors), tables=full)


def check_step(tables: Tables, now: int | None) -> None:
    """Raise the errors of :func:`step` that come before any change."""
    tables.check_own()
    if not torch.compiler.is_compiling() and tables.memory.is_capturing():
        raise RuntimeError(
            f"optimizer.step: tables {tables.config.names}: the end of a step cannot be captured, "
            "because the host makes room for new ids in it: call optimizer.step() outside of the "
            "CUDA graph, after every replay"
        )
    if now is not None:
        check_now(tables, now)
    if tables.tiers is not None:
        tables.tiers.check()
    work = tables.host.background
    error = None if work is None else work.unreported_error()
    if work is not None and error is not None:
        raise BackgroundError(
            f"{work.what} has failed in the background; no step was made: call step() again to go "
            f"on without it: {error}",
            tables=tables.config.names,
        ) from error


__all__ = ["check_step", "step"]
