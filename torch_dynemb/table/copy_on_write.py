"""Rows in memory as they are at one time, for a thread that reads them while training goes on.

Nothing is copied at that time. Updates that write a row which has not been read yet copy it first
(``csrc/cpu/rows/copy_on_write.h``), to bounded memory: where that is full, a writer waits until the
thread has read the row (backpressure).
"""

from __future__ import annotations

import threading
from dataclasses import replace

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.errors import HostMemoryError
from torch_dynemb.ops.columns import (
    COPY_ON_WRITE_COLUMNS,
    GENERATION_BITS,
    CopyMark,
    CopyOnWrite,
    Slab,
)
from torch_dynemb.ops.functional_copies import copies_rows
from torch_dynemb.process.forked import watch
from torch_dynemb.storage.address_space import what_ran_out
from torch_dynemb.storage.host import HostMemory
from torch_dynemb.storage.static_tensors import mark_static
from torch_dynemb.table.row_access import (
    RowValues,
    state_tensors,
    with_initial_values,
)
from torch_dynemb.table.tables import Tables

# Rows of a slab that are preserved at once: a quarter of them, but all where they take little, and
# no more than this allows.
_SHARE = 4
_LEAST_BYTES = 32 << 20
_MOST_BYTES = 1 << 30
_PAGE_WORDS = 4096 // 8


def can_copy_on_write(tables: Tables) -> bool:
    """Whether rows can be read while training goes on: those in the memory of the CPU can.

    Not where a backend of ``torch.compile`` changes copies of the tables, of which the thread that
    reads knows nothing.

    Args:
        tables: of the group.
    """
    in_memory = isinstance(tables.memory, HostMemory) and tables.tiers is None
    return in_memory and not copies_rows()


def places(rows: int, row_bytes: int) -> int:
    """How many of the rows of a slab can be preserved at once.

    Args:
        rows: of the slab.
        row_bytes: of a row with its optimizer state.
    """
    some = min(max(-(-rows // _SHARE), _LEAST_BYTES // row_bytes), _MOST_BYTES // row_bytes)
    return max(1, min(rows, some))


class CopyOnWriteRows:
    """The rows of a group as they are when :meth:`hold` is called.

    Args:
        tables: of the group, for which :func:`can_copy_on_write` is true.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._buffers: dict[int, RowValues] = {}
        self._ended = threading.Event()

    @property
    def forked(self) -> bool:
        """Whether this process got it by a fork, without the thread that reads."""
        return self._tables.host.forked

    @forked.setter
    def forked(self, forked: bool) -> None:
        """In the child nobody reads, and nothing may wait for that."""
        self._end()

    def bytes_of(self, slab: int) -> int:
        """What preserving takes of memory, at most.

        Args:
            slab: whose rows are preserved.
        """
        used, row_bytes = self._tables.index.used_rows(slab), _row_bytes(self._tables, slab)
        return 4 * used + (4 + row_bytes) * places(used, row_bytes)

    def hold(self) -> None:
        """From now on :meth:`read` gives the rows as they are now; between two training steps.

        The first time it adds a tensor to what updates are given: compiled code is compiled again.

        Raises:
            RuntimeError: there are no addresses.
        """
        tables = self._tables
        words = tables.rows.copy_on_write
        if not words:
            new = [_new_words(tables, slab) for slab in range(len(tables.config.slabs))]
            mark_static(new)
            words.extend(new)  # the list itself is what modules and optimizers hold
        for slab, of_slab in enumerate(words):
            _begin(tables, slab, of_slab)
        rows = tables.rows
        # what rows that nobody has written begin with
        small = rows._replace(
            hyper=rows.hyper.clone(), meta=rows.meta.clone(), init_data=rows.init_data.clone()
        )
        tables.host.rows_read = self._ended
        watch(self)
        for of_slab in words:
            of_slab[CopyOnWrite.ACTIVE] = 1
        self._tables = replace(tables, rows=small)

    def read(self, table: int, ids: Tensor, handles: Tensor, written: Tensor) -> RowValues:
        """Rows as they were, each once; they are valid until the next call.

        Args:
            table: that the ids are of.
            ids: int64 [n].
            handles: int64 [n], that the ids had.
            written: bool [n], whether the rows had been written by then; the others get the values
                that they start with.
        """
        tables, count = self._tables, ids.shape[0]
        slab = tables.config.slab_of(table)
        buffer = self._buffer(slab, count)
        values = RowValues(
            buffer.weights[:count],
            {name: tensor[:count] for name, tensor in buffer.state.items()},
            written,
        )
        # .data: compiled code keeps these tensors for its backward, and autograd counts who changes
        # them meanwhile
        ops.take_unchanged_rows_(
            tables.rows.weights[slab].data,
            [of.data for of in state_tensors(tables, slab).values()],
            tables.rows.copy_on_write[slab].data,
            handles >> GENERATION_BITS,
            values.weights,
            list(values.state.values()),
        )
        return with_initial_values(tables, table, ids, values)

    def _buffer(self, slab: int, count: int) -> RowValues:
        """Used again and again: new memory costs more than the copy."""
        known = self._buffers.get(slab)
        if known is None or known.weights.shape[0] < count:
            tables = self._tables
            known = self._buffers[slab] = RowValues(
                torch.empty_like(tables.rows.weights[slab][:count]),
                {
                    name: torch.empty_like(tensor[:count])
                    for name, tensor in state_tensors(tables, slab).items()
                },
                torch.empty(0, dtype=torch.bool),
            )
        return known

    def release(self) -> None:
        """Ends :meth:`hold`, if it has begun: nothing waits from now on, and memory is given back.

        Any thread may call it.
        """
        self._end()
        self._ended.set()
        for of_slab in self._tables.rows.copy_on_write:
            ops.release_(of_slab.data, COPY_ON_WRITE_COLUMNS, of_slab.shape[0])
        self._buffers.clear()

    def _end(self) -> None:
        for of_slab in self._tables.rows.copy_on_write:
            of_slab.data[CopyOnWrite.ACTIVE] = 0


def _row_bytes(tables: Tables, slab: int) -> int:
    """Bytes of a place: those of a row with its state, whole words."""
    tensors = [tables.rows.weights[slab], *state_tensors(tables, slab).values()]
    return -(-sum(of.shape[1:].numel() * of.element_size() for of in tensors) // 8) * 8


def _pages(words: int) -> int:
    return -(-words // _PAGE_WORDS) * _PAGE_WORDS


def _new_words(tables: Tables, slab: int) -> Tensor:
    """Words for as many rows as the slab can ever have; pages are taken when they are touched."""
    reserved, row_bytes = tables.rows.weights[slab].shape[0], _row_bytes(tables, slab)
    most = places(reserved, row_bytes)
    marks = _pages(COPY_ON_WRITE_COLUMNS)
    free = marks + _pages(-(-reserved // 2))
    buffer = free + _pages(-(-most // 2))
    size = buffer + most * row_bytes // 8
    try:
        words = tables.memory.reserve((size,), torch.int64, huge_pages=True)
    except RuntimeError:
        raise HostMemoryError(
            f"checkpoint.save: asynchronous=True: no addresses for {8 * size} bytes, in which rows "
            f"are preserved: {what_ran_out(8 * size)}",
            tables=tables.config.names,
        ) from None
    words[CopyOnWrite.MARKS], words[CopyOnWrite.FREE], words[CopyOnWrite.BUFFER] = (
        marks,
        free,
        buffer,
    )
    words[CopyOnWrite.ROW_BYTES] = row_bytes
    return words


def _begin(tables: Tables, slab: int, words: Tensor) -> None:
    """No row is read yet, all places are free; not active yet."""
    # also what a writer may have left behind when the save before this one ended
    ops.release_(words, COPY_ON_WRITE_COLUMNS, words.shape[0])
    used = tables.index.used_rows(slab)
    count = places(used, int(words[CopyOnWrite.ROW_BYTES]))
    words[CopyOnWrite.ROWS], words[CopyOnWrite.PLACES] = used, count
    words[CopyOnWrite.TAKEN], words[CopyOnWrite.GIVEN], words[CopyOnWrite.WAITS] = 0, count, 0
    halves = words.view(torch.int32)
    free = 2 * int(words[CopyOnWrite.FREE])
    halves[free : free + count] = torch.arange(count, dtype=torch.int32, device=tables.device)
    # rows that no id has are never read
    unused = tables.index.free_rows[slab, : int(tables.index.slabs[slab, Slab.FREE_COUNT])]
    marks = halves[2 * int(words[CopyOnWrite.MARKS]) :][:used]
    marks[unused >> GENERATION_BITS] = int(CopyMark.READ)


__all__ = ["CopyOnWriteRows", "can_copy_on_write", "places"]
