"""The state of a table group as named tensors: saving, checking and loading it.

Entries::

    format                                   JSON in uint8: version, tables, optimizer, policies
    <table>.buckets, .scores                 active part of the index of a table
    <table>.counts                           active part of its counter table, if it has one
    <slab>.weights, .generations, .<state>   rows up to the last used one
    <slab>.free_rows                         handles of free rows
    seeds, tables, slabs, clock, sketch, row_clock   complete
    places                                   checksums of the buckets of tables, as float64

A mean of two states is right only where both have the ids in the same places. It has the integers
of one of them. ``places`` is a float, so a mean changes it wherever the buckets differ.

Invariants:

* A load writes everything, or nothing if the state does not fit.
* A failure during the write (too little memory, a device error) leaves empty tables.
* Training continues bit for bit after a load.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from torch_dynemb.ops.checksum import crc32c
from torch_dynemb.ops.columns import BUCKET_WIDTH, MAX_COUNT, MIN_BUCKETS, Clock, Meta, Slab, Table
from torch_dynemb.ops.row_copies import copied_rows, put_rows_
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.clock import propose
from torch_dynemb.table.config import SlabConfig
from torch_dynemb.table.row_access import materialize, state_names
from torch_dynemb.table.state_check import check_content, clamp_committed
from torch_dynemb.table.state_entries import check_format, check_kind, plain_entries, read_format
from torch_dynemb.table.tables import Tables

FORMAT_VERSION = 3
# Entries with a shape that follows from the group; these contain the lengths of the others.
_FIXED = ("seeds", "tables", "slabs", "clock", "sketch", "row_clock")


def describe(tables: Tables) -> dict[str, Any]:
    """Return what a group must have in common with a state that it loads."""
    config = tables.config.optimizer
    policies = {table.name: table.policy for table in tables.config.tables}
    scores = {name: of.half_life_ticks for name, of in policies.items() if of.half_life_ticks}
    admission = {name: of.admission_ticks for name, of in policies.items() if of.admission_ticks}
    return {
        "half_lives": scores or None,  # None: as if the entry were missing
        "admission_half_lives": admission or None,
        "tables": [table.description() for table in tables.config.tables],
        "optimizer": None if config is None else config.description(),
        "scores": list(tables.config.layout.score_words),
        "counts": [tables.config.names[t] for t in tables.config.layout.counter_tables],
        "sketch": tables.config.layout.sketch_cells,
        "bucket_width": BUCKET_WIDTH,
    }


def used_tensors(tables: Tables, *, rows: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield names and used parts (views) of all saved tensors, without ``format``.

    Args:
        tables: of the group.
        rows: True: with weights, generations and optimizer state of rows outside of stores.
    """
    for t, table in enumerate(tables.config.tables):
        active = tables.index.active_buckets(t)
        yield f"{table.name}.buckets", tables.index.buckets[active]
        if tables.config.layout.score_words:
            yield f"{table.name}.scores", tables.index.scores[active]
        counters = tables.config.layout.counters[t]
        if counters is not None:
            yield (
                f"{table.name}.counts",
                tables.index.buckets[tables.index.active_buckets(counters)],
            )
    slabs = len(tables.config.slabs)
    for s, slab in enumerate(tables.config.slabs):
        used = tables.index.used_rows(s)
        yield (
            f"{slab.name}.free_rows",
            tables.index.free_rows[s, : int(tables.index.slabs[s, Slab.FREE_COUNT])],
        )
        if not rows or tables.stored(s) is not None:
            continue
        yield f"{slab.name}.weights", tables.rows.weights[s][:used]
        yield f"{slab.name}.generations", tables.rows.generations[s][:used]
        for k, name in enumerate(state_names(tables)):
            yield f"{slab.name}.{name}", tables.rows.state[k * slabs + s][:used]
    yield "seeds", tables.index.meta[:, Meta.SEED]
    yield "tables", tables.index.tables
    yield "slabs", tables.index.slabs
    yield "clock", tables.index.clock
    yield "sketch", tables.index.sketch
    yield "row_clock", tables.rows.row_clock


def _places(tables: Tables, state: Mapping[str, Tensor]) -> Tensor:
    """Return the entry ``places`` for the buckets of a state, float64 [tables], on the CPU."""
    buckets = [state[f"{name}.buckets"].detach().cpu() for name in tables.config.names]
    crcs = [crc32c(of.resolve_neg().contiguous()) for of in buckets]
    return torch.tensor(crcs, dtype=torch.float64, device="cpu")


def check_places(tables: Tables, state: Mapping[str, Tensor]) -> None:
    """Raise ValueError if the rows of a checked state were not those of its ids.

    A state of an older version may lack the entry.
    """
    if "places" not in state:
        return
    check_kind("places", state["places"])
    given, expected = state["places"].detach().cpu().double(), _places(tables, state)
    # as far as sums of floats, also of float32, round
    if given.shape != expected.shape or not bool(((given - expected).abs() < 4096).all()):
        raise ValueError(
            f"state entry 'places' is {given.tolist()}, but its ids have {expected.tolist()}: the "
            "state is a mean of states with rows of different ids in one place, or its ids have "
            "been changed: average models by torch.optim.swa_utils.AveragedModel, which averages "
            "rows by id, or change rows by id with group.read() and group.insert_or_assign()"
        )


def _as_text(description: dict[str, Any]) -> Tensor:
    """Encode as JSON in uint8."""
    return torch.frombuffer(bytearray(json.dumps(description).encode()), dtype=torch.uint8)


def format_entry(tables: Tables) -> Tensor:
    """Return the entry ``format`` of a state, which :func:`check` compares: JSON in uint8."""
    policies = {table.name: table.policy.description() for table in tables.config.tables}
    return _as_text({"version": FORMAT_VERSION, **describe(tables), "policies": policies})


def entry_owners(entry: object) -> set[str] | None:
    """Return the prefixes, up to the last dot, of names of entries of a group.

    Args:
        entry: of a state dict, named ``format``.

    Returns:
        Names of tables and slabs, and ``""`` for common entries; None: the entry is not of a table
        group.
    """
    if type(entry) is not Tensor or entry.is_meta:
        return None
    try:
        tables = read_format({"format": entry})["tables"]
        slabs = [SlabConfig(t["embedding_dim"], getattr(torch, t["dtype"])) for t in tables]
        return {"", *(table["name"] for table in tables), *(slab.name for slab in slabs)}
    except (ValueError, TypeError, LookupError, AttributeError):
        return None


def clamp_counts(state: Mapping[str, Tensor]) -> None:
    """Clamp copies of running counts to the range that a load accepts."""
    for name in ("tables", "row_clock"):
        state[name].clamp_(max=MAX_COUNT)


def save(tables: Tables) -> dict[str, Tensor]:
    """Copy the used part of everything, after writing unwritten rows.

    Raises:
        RuntimeError: rows are in a store.
    """
    tables.check_in_memory("state_dict")
    materialize(tables)
    result = {"format": format_entry(tables)}
    result.update((name, copied_rows(tensor)) for name, tensor in used_tensors(tables))
    clamp_counts(result)
    return result


def load(tables: Tables, tensors: Mapping[str, Tensor]) -> None:
    """Replace everything by a saved state, in place, or nothing.

    Signals are deferred during the copy: training would go on with half a state.

    Raises:
        ValueError: the state does not fit; nothing has been changed.
        RuntimeError: rows are in a store; nothing has been changed.
    """
    tables.check_in_memory("load_state_dict", "load a checkpoint with torch_dynemb.checkpoint.load")
    tensors = in_own_order(tables, tensors)
    check(tables, tensors)
    check_places(tables, tensors)
    tables.wait_until_read()
    with defer_signals(), tables.changing(moves_rows=True):
        try:
            write(tables, tensors)
        except BaseException:
            give_up(tables)
            raise


def give_up(tables: Tables) -> None:
    """Clear the tables after a failure during a write: empty rather than half written."""
    empty(tables)
    tables.bind_memory()


def fill(tables: Tables, tensors: Mapping[str, Tensor]) -> None:
    """Load as :func:`load` does, into new tables, which a failure may leave half written."""
    tensors = in_own_order(tables, tensors)
    check(tables, tensors)
    write(tables, tensors)


def write(tables: Tables, tensors: Mapping[str, Tensor], *, rows: bool = True) -> None:
    """Replace everything by a checked state; a failure leaves the group half written.

    Args:
        tables: of the group.
        tensors: the state.
        rows: see :func:`used_tensors`; False: unused rows stay unchanged.
    """
    row_bytes = tables.index.slabs[:, Slab.ROW_BYTES].clone()
    generation = tables.index.slabs[:, Slab.GENERATION].clone()
    tables.memory.bind(
        tables.index,
        tables.rows,
        tensors["tables"][:, Table.BUCKET_COUNT].tolist(),
        tensors["slabs"][:, Slab.NEXT_ROW].tolist(),
    )
    empty(tables)
    for name, target in (("tables", tables.index.tables), ("slabs", tables.index.slabs)):
        target.copy_(tensors[name])
    tables.index.slabs[:, Slab.ROW_BYTES] = row_bytes
    # rows freed in this group need later generations for their next handles
    tables.index.slabs[:, Slab.GENERATION].clamp_(min=generation)
    clamp_committed(tables)
    # with the lengths that `tables` and `slabs` have now
    for name, target in used_tensors(tables, rows=rows):
        # an entry without values may be missing
        if name not in ("tables", "slabs") and target.numel() > 0:
            # .detach(): entries may be parameters, and the tables must not become such
            put_rows_(target, tensors[name].detach())
    tables.bind_memory()
    recount(tables)


def recount(tables: Tables) -> None:
    """Update the host state to the content of the tensors."""
    for reader in tables.host.readers.values():
        reader.forget()
    tables.host.steps = int(tables.index.clock[Clock.STEP])
    tables.host.rejected = tables.index.tables[: len(tables.config.tables), Table.REJECTED].tolist()


def empty(tables: Tables) -> None:
    """Remove all ids, their counts of admission, and all rows."""
    for name, tensor in used_tensors(tables):
        if name not in _FIXED:
            tensor.zero_()
    tables.index.tables.zero_()
    tables.index.tables[:, Table.BUCKET_COUNT] = MIN_BUCKETS
    tables.index.slabs[:, [Slab.NEXT_ROW, Slab.FREE_COUNT]] = 0
    for counts in tables.rows.pending[-1:]:  # gradients of removed rows
        counts.zero_()


def check(tables: Tables, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless ``tensors`` is the complete, valid state of a group like this."""
    check_format(tensors, FORMAT_VERSION, describe(tables))
    check_content(tables, entries_of(tables, tensors))


def entries_of(
    tables: Tables, tensors: Mapping[str, Tensor], *, rows: bool = True
) -> dict[str, Tensor]:
    """Return the entries of a state with this group's dtypes and columns, integers on the CPU.

    Args:
        tables: of the group.
        tensors: the state.
        rows: see :func:`used_tensors`.

    Raises:
        ValueError: an entry is missing, or of another kind.
    """
    expected = dict(used_tensors(tables, rows=rows))
    empty = _empty_entries(tables, expected, tensors.get("slabs"))
    return plain_entries(expected, tensors, _FIXED, empty=empty)


def _empty_entries(
    tables: Tables, expected: Mapping[str, Tensor], slabs: Tensor | None
) -> list[str]:
    """Return names of entries that have no values by the config, or by the state's ``slabs``.

    Args:
        expected: the entries of the tables now.
        slabs: the entry of the state; :func:`check` reports its errors.
    """
    empty = [name for name in _FIXED if expected[name].numel() == 0]
    own = tables.index.slabs
    if (
        not isinstance(slabs, Tensor)
        or slabs.is_meta
        or (slabs.layout, slabs.dtype, slabs.shape) != (own.layout, own.dtype, own.shape)
    ):
        return empty
    counts = slabs[:, [Slab.NEXT_ROW, Slab.FREE_COUNT]].tolist()
    for slab, (used, free) in zip(tables.config.slabs, counts, strict=True):
        of_rows = ("weights", "generations", *state_names(tables)) if used == 0 else ()
        of_free = ("free_rows",) if free == 0 else ()
        empty += [f"{slab.name}.{name}" for name in (*of_rows, *of_free)]
    return empty


def in_own_order(tables: Tables, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return a state with the score words in the order of this group, matched by name.

    :func:`check` reports errors of the state.
    """
    own = list(tables.config.layout.score_words)
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
    for name in (f"{table}.scores" for table in tables.config.names):
        scores = tensors.get(name)
        if isinstance(scores, Tensor) and scores.dim() == 2 and scores.shape[1] == len(columns):
            result[name] = scores[:, columns]
    return result


def pickled(tables: Tables) -> dict[str, Any]:
    """Return the content for a copy of the group, in another process or in this one."""
    tables.check_in_memory("pickle, copy.deepcopy")
    host = tables.host
    return {
        "arguments": {**tables.config.arguments(), "device": tables.device},
        "state": save(tables),
        "hyper": tables.rows.hyper.clone(),
        "batch_scored": sorted(host.batch_scored),
        "proposed_now": None if host.proposed_now is None else int(host.proposed_now),
        "time_is_given": host.time_is_given,
    }


def fill_pickled(tables: Tables, saved: dict[str, Any]) -> None:
    """Fill new tables with the content of :func:`pickled`."""
    fill(tables, saved["state"])
    tables.rows.hyper.copy_(saved["hyper"])
    tables.host.batch_scored = set(saved["batch_scored"])
    if saved["proposed_now"] is not None:
        propose(tables, saved["proposed_now"])
    tables.host.time_is_given = saved.get("time_is_given", False)


class GroupState:
    """The state of a group as named tensors: ``group.state``.

    Args:
        tables: of the group.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def names(self) -> set[str]:
        """Return the names of the entries of :meth:`tensors`."""
        return {"format", "places", *(name for name, _ in used_tensors(self._tables))}

    def tensors(self) -> dict[str, Tensor]:
        """Copy the used part of everything, after writing unwritten rows.

        Training continues bit for bit after :meth:`load`. ``format`` is a JSON text as uint8.

        Raises:
            RuntimeError: rows are in a store and need not fit in memory.
        """
        state = save(self._tables)
        return {**state, "places": _places(self._tables, state).to(state["clock"].device)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Replace everything by a saved state, in place: compiled code keeps the addresses.

        Ctrl-C takes effect after it. A failure during the write, such as too little memory, leaves
        empty tables.

        Args:
            tensors: by name, with the dtypes and shapes of those of :meth:`tensors`; on any device.

        Raises:
            ValueError: ``tensors`` is not the state of a group like this one, or is damaged;
                nothing has been changed.
            RuntimeError: rows are in a store, or memory is short.
        """
        self._tables.check_own()
        self._tables.memory.wait_beside()
        load(self._tables, tensors)
