"""The state of a table group as named tensors: saving, checking and loading it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.interrupts import held_back
from torch_dynemb.ops.columns import (
    BUCKET_WIDTH,
    CLOCK_HEAD,
    GENERATION_BITS,
    MIN_BUCKETS,
    Clock,
    Meta,
    Slab,
    Table,
)

if TYPE_CHECKING:
    from torch_dynemb.table import TableGroup

FORMAT_VERSION = 3
_MOST_COUNTED = 1 << 62  # what is counted on from here does not overflow
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


def save(group: TableGroup) -> dict[str, Tensor]:
    """Copies of the used part of everything; the group's rows must have been materialised."""
    policies = {table.name: table.policy.description() for table in group.tables_config}
    description = json.dumps({"version": FORMAT_VERSION, **describe(group), "policies": policies})
    result = {"format": torch.frombuffer(bytearray(description.encode()), dtype=torch.uint8)}
    result.update((name, tensor.clone()) for name, tensor in used_tensors(group))
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
            target.copy_(tensors[name])
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
    _check_format(group, tensors)
    expected = dict(used_tensors(group))
    missing = sorted(set(expected) - set(tensors))
    if missing:
        raise ValueError(f"state lacks {missing}")
    for name, own in expected.items():
        fixed = name in _FIXED
        given = tensors[name]
        if isinstance(given, Tensor) and given.is_meta:
            raise ValueError(
                f"state entry {name!r} is on the meta device, expected values: load the checkpoint "
                "onto the CPU or a GPU"
            )
        if (
            not isinstance(given, Tensor)
            or given.dtype != own.dtype
            or given.dim() != own.dim()
            or (given.shape if fixed else given.shape[1:])
            != (own.shape if fixed else own.shape[1:])
        ):
            what = f"{given.dtype} {tuple(given.shape)}" if isinstance(given, Tensor) else given
            shape = tuple(own.shape) if fixed else ("n", *own.shape[1:])
            raise ValueError(f"state entry {name!r} is {what}, expected {own.dtype} {shape}")
    for name in ("clock", "row_clock", "sketch"):
        counts = tensors[name][:CLOCK_HEAD] if name == "clock" else tensors[name]
        if bool((counts < 0).any()):
            raise ValueError(f"state entry {name!r} is corrupted: a count is negative")
        if counts.dtype == torch.int64 and bool((counts > _MOST_COUNTED).any()):
            raise ValueError(f"state entry {name!r} is corrupted: a count is above 2^62")
    rows: list[list[Tensor]] = [[] for _ in group.slab_configs]
    for t, table in enumerate(group.tables_config):
        handles = _check_index(group, tensors, t, f"{table.name}.buckets")
        rows[int(group.meta[t, Meta.SLAB])].append(handles)
        counters = group.layout.counters[t]
        if counters is not None:
            _check_index(group, tensors, counters, f"{table.name}.counts")
    for s in range(len(group.slab_configs)):
        _check_rows(group, tensors, s, rows[s])


def _check_format(group: TableGroup, tensors: Mapping[str, Tensor]) -> None:
    if "format" not in tensors:
        raise ValueError("state has no entry 'format': it is not one of torch_dynemb's")
    text = tensors["format"]
    if not isinstance(text, Tensor) or text.dtype != torch.uint8 or text.dim() != 1:
        raise ValueError("state entry 'format' is corrupted: expected uint8 of 1 dimension")
    try:
        saved = json.loads(bytes(text.tolist()).decode())
    except ValueError as error:
        raise ValueError(f"state entry 'format' is corrupted: {error}") from error
    version = saved.get("version") if isinstance(saved, dict) else None
    if version != FORMAT_VERSION:
        raise ValueError(
            f"state has format version {version}, but this torch_dynemb reads {FORMAT_VERSION}: "
            "load it with the version that wrote it"
        )
    for key, expected in describe(group).items():
        if saved.get(key) != expected:
            raise ValueError(
                f"state was saved with {key} = {saved.get(key)!r}, but this module has "
                f"{expected!r}: construct it as it was when it was saved"
            )


def _check_index(group: TableGroup, tensors: Mapping[str, Tensor], t: int, entry: str) -> Tensor:
    """Handles (or counts) of a table's ids, if every id is found where the state says."""
    name, kind = entry.rsplit(".", 1)
    damaged = ValueError(f"state of table {name!r} is corrupted: its index is damaged")
    buckets = tensors[entry].cpu().contiguous()
    row = tensors["tables"][t].tolist()
    count = row[Table.BUCKET_COUNT]
    if count < 1 or buckets.shape[0] != count or min(row) < 0:
        raise damaged
    scored = kind == "buckets" and bool(group.layout.score_words)
    if scored and tensors[f"{name}.scores"].shape[0] != count:
        raise damaged
    if count > int(group.meta[t, Meta.REGION_BUCKETS]):
        raise ValueError(
            f"table {name!r} of the state has {count} buckets, more than this module reserves: "
            "construct it with a larger capacity or max_rows"
        )
    keys, stored = buckets[:, :BUCKET_WIDTH], buckets[:, BUCKET_WIDTH:]
    occupied = stored > 0
    tombstones = (stored == 0) & (keys != 0)
    if (
        bool((stored < 0).any())
        or int(occupied.sum()) != row[Table.SIZE]
        or int(tombstones.sum()) != row[Table.TOMBSTONES]
    ):
        raise damaged
    if scored:  # the first word is the step in which an id was last seen
        steps = tensors[f"{name}.scores"].cpu()[:, :BUCKET_WIDTH][occupied]
        if bool(((steps < 0) | (steps > tensors["clock"][Clock.STEP].cpu())).any()):
            raise damaged
    ids, handles = keys[occupied], stored[occupied] - 1
    meta = group.meta[t : t + 1].cpu().clone()
    meta[0, Meta.SEED] = tensors["seeds"][t]
    meta[0, Meta.REGION_BEGIN] = 0
    meta[0, Meta.REGION_BUCKETS] = count
    if bool(meta[0, Meta.HAS_PADDING]) and bool((ids == meta[0, Meta.PADDING_ID]).any()):
        raise ValueError(
            f"table {name!r} of the state has a row for id {int(meta[0, Meta.PADDING_ID])}, which "
            "is the padding id of this module: construct it with the padding_idx it was saved with"
        )
    table = tensors["tables"][t : t + 1].cpu().contiguous()
    offsets = torch.tensor([0, ids.numel()], device=ids.device)
    found = ops.find(buckets, table, meta, ids, offsets, [0])
    if not torch.equal(found.handles, handles):
        raise damaged
    return handles


def _check_rows(
    group: TableGroup, tensors: Mapping[str, Tensor], s: int, handles: list[Tensor]
) -> None:
    """Every row up to the first unused one belongs to one id or to the free list."""
    prefix = group.slab_configs[s].name
    damaged = ValueError(f"state of the rows {prefix!r} is corrupted: their owners do not match")
    slab = tensors["slabs"][s].tolist()
    used = slab[Slab.NEXT_ROW]
    free = tensors[f"{prefix}.free_rows"].cpu()
    names = ["weights", "generations", *_optimizer_state_names(group)]
    if (
        min(slab) < 0
        or any(tensors[f"{prefix}.{name}"].shape[0] != used for name in names)
        or free.shape[0] != slab[Slab.FREE_COUNT]
    ):
        raise damaged
    if used > group.weights[s].shape[0]:
        raise ValueError(
            f"the state has {used} rows {prefix!r}, more than the {group.weights[s].shape[0]} "
            "that this module reserves: construct it with a larger max_rows"
        )
    owned = torch.cat(handles)
    rows = torch.cat([owned, free]) >> GENERATION_BITS
    if rows.numel() != used or (used > 0 and (int(rows.min()) < 0 or int(rows.max()) >= used)):
        raise damaged
    owned_once = torch.zeros(used, dtype=torch.bool, device=rows.device)
    if not bool(owned_once.index_fill_(0, rows, True).all()):
        raise damaged
    generations = tensors[f"{prefix}.generations"].cpu()[rows].to(torch.int64)
    mask = (1 << GENERATION_BITS) - 1
    ahead = ((torch.cat([owned, free]) & mask) - generations) & mask
    # a free row's next owner is newer than what was last written there, counted with wrap-around
    unwritten = (generations == 0) | ((ahead > 0) & (ahead <= mask >> 1))
    live = ahead == 0
    if (
        bool((generations < 0).any())
        or not bool(live[: owned.numel()].all())
        or not bool(unwritten[owned.numel() :].all())
    ):
        raise damaged
