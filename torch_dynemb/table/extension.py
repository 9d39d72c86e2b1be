"""Adds a table to a group that is in use, or gives it another optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_dynemb.ops.columns import BUCKET_WIDTH, CLOCK_HEAD, Hyper
from torch_dynemb.optim.config import OptimizerConfig

if TYPE_CHECKING:
    from torch_dynemb.table.config import TableConfig
    from torch_dynemb.table.group import TableGroup

NEVER = (1 << 63) - 1  # expiry of ids that come from a time without one


def extend(group: TableGroup, table: TableConfig) -> TableGroup:
    """A group with the content of another one and one more, empty table.

    All tensors are new: compiled code is compiled again, graphs must be captured again. While it is
    made, the content is in memory twice. Where the new table keeps scores that the others did not
    keep, theirs start from zero.

    Raises:
        ValueError: the tables do not go together.
    """
    arguments = {**group.constructor_arguments(), "tables": (*group.tables_config, table)}
    extended = type(group)(**arguments)
    extended.fill_state(_merged(group, extended))
    extended.hyper[: len(group.tables_config)] = group.hyper
    extended.take_over(group)
    return extended


def reoptimize(group: TableGroup, config: OptimizerConfig) -> TableGroup:
    """A group with the content of another one, another optimizer and fresh state for it.

    All tensors are new: compiled code is compiled again, graphs must be captured again. While it is
    made, the content is in memory twice. Steps are counted from 0 again.

    Raises:
        TypeError: ``config`` is no optimizer config.
    """
    if not isinstance(config, OptimizerConfig):
        raise TypeError(
            f"set_optimizer: config is {config!r}, expected one such as torch_dynemb.Adam(lr=1e-3)"
        )
    changed = type(group)(**{**group.constructor_arguments(), "optimizer": config})
    old, state = group.state_tensors(), changed.state_tensors()
    fresh = {"format"}
    for slab in group.slab_configs:
        rows = old[f"{slab.name}.weights"].shape[0]
        for k, tensor in enumerate(config.state):
            name = f"{slab.name}.{tensor.name}"
            fresh.add(name)
            state[name] = state[name].new_zeros(rows, *state[name].shape[1:])
            if k == 0:
                initial = changed.hyper[0, Hyper.INITIAL_STATE]
                state[name] += initial.to(state[name].dtype)
    state |= {name: tensor for name, tensor in old.items() if name in state and name not in fresh}
    state["row_clock"][: len(group.tables_config)] = 0
    changed.fill_state(state)
    changed.take_over(group)
    return changed


def _merged(group: TableGroup, extended: TableGroup) -> dict[str, Tensor]:
    """The state of an extended group with the content of the old one."""
    old, state = group.state_tensors(), extended.state_tensors()
    count = len(group.tables_config)
    # counter tables come after all tables, in the order of the tables whose ids they count
    counters = [extended.layout.counters[t] for t in group.layout.counter_tables]
    rows = [*range(count), *(number for number in counters if number is not None)]
    for name in ("tables", "seeds"):
        state[name][rows] = old[name]
    state["clock"][:CLOCK_HEAD] = old["clock"][:CLOCK_HEAD]
    state["clock"][[CLOCK_HEAD + t for t in rows]] = old["clock"][CLOCK_HEAD:]
    state["row_clock"][:count] = old["row_clock"][:count]
    state["row_clock"][count + 1 :] = old["row_clock"][count:]
    state["sketch"][: old["sketch"].shape[0]] = old["sketch"]
    for s, slab in enumerate(group.slab_configs):
        state["slabs"][extended.slab_configs.index(slab)] = old["slabs"][s]
        state |= {name: old[name] for name in old if name.startswith(f"{slab.name}.")}
    for name in group.names:
        state[f"{name}.buckets"] = old[f"{name}.buckets"]
        if f"{name}.counts" in old:
            state[f"{name}.counts"] = old[f"{name}.counts"]
        if extended.layout.score_words:
            state[f"{name}.scores"] = _widened(group, extended, old, name)
    return state


def _widened(group: TableGroup, extended: TableGroup, old: dict[str, Tensor], name: str) -> Tensor:
    """Scores of a table with the words of the extended group."""
    buckets = old[f"{name}.buckets"].shape[0]
    words = []
    for word in extended.layout.score_words:
        if word in group.layout.score_words:
            first = BUCKET_WIDTH * group.layout.score_words.index(word)
            words.append(old[f"{name}.scores"][:, first : first + BUCKET_WIDTH])
        else:
            value = NEVER if word == "expiry" else 0
            words.append(torch.full((buckets, BUCKET_WIDTH), value, device=group.device))
    return torch.cat(words, 1)


__all__ = ["extend", "reoptimize"]
