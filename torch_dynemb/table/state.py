"""The state of a table group as named tensors: saving, checking and loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_dynemb.ops.columns import BUCKET_WIDTH, MAX_COUNT, MIN_BUCKETS, Meta, Slab, Table
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.table.state_check import check_content
from torch_dynemb.table.state_entries import check_format, plain_entries, read_format

if TYPE_CHECKING:
    from torch_dynemb.table.group import TableGroup

FORMAT_VERSION = 3
# Entries whose shape depends on the group alone; the lengths of the others are written in them.
_FIXED = ("seeds", "tables", "slabs", "clock", "sketch", "row_clock")


def describe(group: TableGroup) -> dict[str, Any]:
    """What a group must have in common with a state that it loads."""
    config = group.optimizer_config
    return {
        "tables": [table.description() for table in group.tables_config],
        "optimizer": None if config is None else config.description(),
        "scores": list(group.layout.score_words),
        "counts": [group.names[t] for t in group.layout.counter_tables],
        "sketch": group.layout.sketch_cells,
        "bucket_width": BUCKET_WIDTH,
    }


def _optimizer_state_names(group: TableGroup) -> list[str]:
    config = group.optimizer_config
    return [] if config is None else [tensor.name for tensor in config.state]


def used_tensors(group: TableGroup) -> Iterator[tuple[str, Tensor]]:
    """Names and used parts (views) of everything that is saved, without ``format``."""
    for t, table in enumerate(group.tables_config):
        active = group.active_buckets(t)
        yield f"{table.name}.buckets", group.buckets[active]
        if group.layout.score_words:
            yield f"{table.name}.scores", group.scores[active]
        counters = group.layout.counters[t]
        if counters is not None:
            yield f"{table.name}.counts", group.buckets[group.active_buckets(counters)]
    slabs = len(group.slab_configs)
    for s, slab in enumerate(group.slab_configs):
        used = group.used_rows(s)
        yield f"{slab.name}.free_rows", group.free_rows[s, : int(group.slabs[s, Slab.FREE_COUNT])]
        yield f"{slab.name}.weights", group.weights[s][:used]
        yield f"{slab.name}.generations", group.generations[s][:used]
        for k, name in enumerate(_optimizer_state_names(group)):
            yield f"{slab.name}.{name}", group.state[k * slabs + s][:used]
    yield "seeds", group.meta[:, Meta.SEED]
    yield "tables", group.tables
    yield "slabs", group.slabs
    yield "clock", group.clock
    yield "sketch", group.sketch
    yield "row_clock", group.row_clock


def _as_text(description: dict[str, Any]) -> Tensor:
    """JSON as uint8."""
    return torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)


def save(group: TableGroup) -> dict[str, Tensor]:
    """Copies of the used part of everything; the group's rows must have been materialised."""
    policies = {table.name: table.policy.description() for table in group.tables_config}
    description = {"version": FORMAT_VERSION, **describe(group), "policies": policies}
    result = {"format": _as_text(description)}
    result.update((name, tensor.clone()) for name, tensor in used_tensors(group))
    for name in ("tables", "row_clock"):  # which go on counting, but load no further
        result[name].clamp_(max=MAX_COUNT)
    return result


def load(group: TableGroup, tensors: Mapping[str, Tensor]) -> None:
    """Replaces everything by a saved state, in place, or nothing.

    Signals wait while tensors are copied: a state that is half there would train on.

    Raises:
        ValueError: the state does not fit; nothing has been changed.
    """
    check(group, tensors)
    with held_back():
        try:
            write(group, tensors)
        except BaseException:
            _empty(group)  # no memory, or a device that failed: better no ids than some
            group.bind_memory()
            raise


def write(group: TableGroup, tensors: Mapping[str, Tensor]) -> None:
    """Replaces everything by a checked state; whatever stops it leaves the group half written."""
    row_bytes = group.slabs[:, Slab.ROW_BYTES].clone()
    generation = group.slabs[:, Slab.GENERATION].clone()
    group.bind_memory(
        tensors["tables"][:, Table.BUCKET_COUNT].tolist(),
        tensors["slabs"][:, Slab.NEXT_ROW].tolist(),
    )
    _empty(group)
    for name, target in (("tables", group.tables), ("slabs", group.slabs)):
        target.copy_(tensors[name])
    group.slabs[:, Slab.ROW_BYTES] = row_bytes
    # rows that were given back here remember how new their next handle must be
    group.slabs[:, Slab.GENERATION].clamp_(min=generation)
    group.slabs[:, Slab.COMMITTED_ROWS].clamp_(max=group.free_rows.shape[1])
    for name, target in used_tensors(group):  # of the lengths that `tables` and `slabs` give now
        if name not in ("tables", "slabs"):
            # a state may be of parameters, which the tables must not become
            target.copy_(tensors[name].detach())
    group.bind_memory()
    group.state_was_loaded()


def _empty(group: TableGroup) -> None:
    """Takes all ids away, those that wait for admission, and all rows."""
    for name, tensor in used_tensors(group):
        if name not in _FIXED:
            tensor.zero_()
    group.tables.zero_()
    group.tables[:, Table.BUCKET_COUNT] = MIN_BUCKETS
    group.slabs[:, [Slab.NEXT_ROW, Slab.FREE_COUNT]] = 0
    for counts in group.pending[-1:]:  # gradients of rows that are no more
        counts.zero_()


def check(group: TableGroup, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless ``tensors`` is the complete, sound state of a group like this."""
    check_format(tensors, FORMAT_VERSION, describe(group))
    expected = dict(used_tensors(group))
    check_content(group, plain_entries(expected, tensors, _FIXED))


def in_own_order(group: TableGroup, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """A state with the score words in the order of this group: they are found by their names.

    What is wrong with the state is left to :func:`check`.
    """
    own = list(group.layout.score_words)
    try:
        saved = read_format(tensors)
    except ValueError:
        return tensors
    words = saved.get("scores") if isinstance(saved, dict) else None
    if not isinstance(words, list) or words == own or len(words) != len(own):
        return tensors
    if any(name not in words for name in own):
        return tensors
    columns = [
        words.index(name) * BUCKET_WIDTH + slot for name in own for slot in range(BUCKET_WIDTH)
    ]
    result = {**tensors, "format": _as_text({**saved, "scores": own})}
    for name in (f"{table}.scores" for table in group.names):
        scores = tensors.get(name)
        if isinstance(scores, Tensor) and scores.dim() == 2 and scores.shape[1] == len(columns):
            result[name] = scores[:, columns]
    return result
