"""Replacement of tables in use: with one more table, another optimizer, or another device."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from torch_dynemb.ops.columns import BUCKET_WIDTH, CLOCK_HEAD, Hyper
from torch_dynemb.optim.base import OptimizerConfig, check_config
from torch_dynemb.storage.device import memory_of
from torch_dynemb.storage.memory import TableMemory
from torch_dynemb.table import state as table_state
from torch_dynemb.table.allocation import allocate
from torch_dynemb.table.clock import share_time_as
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.evictions import record_as
from torch_dynemb.table.tables import Tables

# the remedy in messages, for tables that cannot be replaced
AS_NEW = (
    "save the model with torch_dynemb.checkpoint.save, construct it with the change, and load that "
    "checkpoint into it"
)
NEVER = (1 << 63) - 1  # expiry of ids from tables without a ttl


def extend(tables: Tables, table: TableConfig) -> Tables:
    """Return tables with the content of others, and one more, empty table.

    All tensors are new: compiled code is compiled again, and graphs must be captured again.
    Meanwhile the content is in memory twice. If the new table stores scores that the others did
    not, theirs start from zero.

    Raises:
        ValueError: the tables do not fit together.
        RuntimeError: rows are in a store.
    """
    tables.check_in_memory("add_table", AS_NEW)
    config = dataclasses.replace(tables.config, tables=(*tables.config.tables, table))
    extended = allocate(config, tables.memory)
    table_state.fill(extended, _merged(tables, extended))
    extended.rows.hyper[: len(tables.config.tables)] = tables.rows.hyper
    return take_over(extended, tables)


def reoptimize(tables: Tables, optimizer: OptimizerConfig) -> Tables:
    """Return tables with the content of others, another optimizer and fresh optimizer state.

    All tensors are new: compiled code is compiled again, and graphs must be captured again.
    Meanwhile the content is in memory twice. Steps are counted from 0 again.

    Raises:
        TypeError: ``optimizer`` is not an optimizer config.
        RuntimeError: rows are in a store.
    """
    tables.check_in_memory("set_optimizer", AS_NEW)
    check_config("set_optimizer: config", optimizer)
    config = dataclasses.replace(tables.config, optimizer=optimizer)
    changed = allocate(config, tables.memory)
    old, state = table_state.save(tables), table_state.save(changed)
    fresh = {"format"}
    for slab in tables.config.slabs:
        rows = old[f"{slab.name}.weights"].shape[0]
        for k, tensor in enumerate(optimizer.state):
            name = f"{slab.name}.{tensor.name}"
            fresh.add(name)
            state[name] = state[name].new_zeros(rows, *state[name].shape[1:])
            if k == 0:
                initial = changed.rows.hyper[0, Hyper.INITIAL_STATE]
                state[name] += initial.to(state[name].dtype)
    state |= {name: tensor for name, tensor in old.items() if name in state and name not in fresh}
    state["row_clock"][: len(tables.config.tables)] = 0
    table_state.fill(changed, state)
    return take_over(changed, tables)


def move(tables: Tables, memory: TableMemory) -> Tables:
    """Return tables with the content of others, on another device.

    Raises:
        RuntimeError: rows are in a store.
    """
    tables.check_in_memory("to")
    moved = allocate(tables.config, memory)
    table_state.fill(moved, table_state.save(tables))
    moved.rows.hyper.copy_(tables.rows.hyper)
    return take_over(moved, tables)


def on_device(tables: Tables, device: torch.device) -> Tables:
    """Return the tables if they are on the device, else new tables there with their content.

    Raises:
        TypeError: ``device`` is neither a device nor the name of one.
        RuntimeError: tables cannot be on the device, or rows are in a store, or too little memory.
    """
    memory = memory_of("TableGroup.to", device)
    return tables if memory.device == tables.device else move(tables, memory)


def take_over(tables: Tables, before: Tables) -> Tables:
    """Copy what a state leaves out from earlier tables to tables that begin with them."""
    tables.host.batch_scored = set(before.host.batch_scored)
    tables.host.background = before.host.background
    share_time_as(tables, before)
    return record_as(tables, before)


def _merged(tables: Tables, extended: Tables) -> dict[str, Tensor]:
    """Return the state of an extended group with the content of the old one."""
    old, state = table_state.save(tables), table_state.save(extended)
    count = len(tables.config.tables)
    # counter tables come after all tables, in the order of the tables that they count ids of
    counters = [extended.config.layout.counters[t] for t in tables.config.layout.counter_tables]
    rows = [*range(count), *(number for number in counters if number is not None)]
    for name in ("tables", "seeds"):
        state[name][rows] = old[name]
    state["clock"][:CLOCK_HEAD] = old["clock"][:CLOCK_HEAD]
    state["clock"][[CLOCK_HEAD + t for t in rows]] = old["clock"][CLOCK_HEAD:]
    state["row_clock"][:count] = old["row_clock"][:count]
    state["row_clock"][count + 1 :] = old["row_clock"][count:]
    state["sketch"][: old["sketch"].shape[0]] = old["sketch"]
    for s, slab in enumerate(tables.config.slabs):
        state["slabs"][extended.config.slabs.index(slab)] = old["slabs"][s]
        state |= {name: old[name] for name in old if name.startswith(f"{slab.name}.")}
    for name in tables.config.names:
        state[f"{name}.buckets"] = old[f"{name}.buckets"]
        if f"{name}.counts" in old:
            state[f"{name}.counts"] = old[f"{name}.counts"]
        if extended.config.layout.score_words:
            state[f"{name}.scores"] = _widened(tables, extended, old, name)
    return state


def _widened(tables: Tables, extended: Tables, old: dict[str, Tensor], name: str) -> Tensor:
    """Return the scores of a table with the words of the extended group."""
    buckets = old[f"{name}.buckets"].shape[0]
    words = []
    for word in extended.config.layout.score_words:
        if word in tables.config.layout.score_words:
            first = BUCKET_WIDTH * tables.config.layout.score_words.index(word)
            words.append(old[f"{name}.scores"][:, first : first + BUCKET_WIDTH])
        else:
            value = NEVER if word == "expiry" else 0
            words.append(torch.full((buckets, BUCKET_WIDTH), value, device=tables.device))
    return torch.cat(words, 1)


__all__ = ["extend", "move", "on_device", "reoptimize", "take_over"]
