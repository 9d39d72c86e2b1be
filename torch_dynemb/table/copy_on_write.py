"""Copy-on-write of rows in memory: a thread reads them as of one time while training goes on.

Steps:

1. :meth:`CopyOnWriteRows.pin` pins all rows and copies nothing.
2. An update that writes a pinned row copies it to a buffer first
   (``csrc/cpu/rows/copy_on_write.h``).
3. The thread reads each row once, from its copy or in place; the row is no longer pinned then.
4. :meth:`CopyOnWriteRows.release` ends it.

The buffer is bounded. While it is full, an update waits until the thread has read the row
(backpressure).

Layout of the words of a slab, each part in whole pages::

    header | marks: int32 per reserved row | free places: int32 each | buffer: rows with state
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
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
from torch_dynemb.table.row_access import as_kept, state_tensors, write_initial_values
from torch_dynemb.table.row_batch import RowBatch
from torch_dynemb.table.tables import Tables

# Places in a slab's buffer: for a quarter of the rows, or for as many as the least bytes allow, but
# at most for as many as the most bytes allow.
_SHARE = 4
_LEAST_BYTES = 32 << 20
_MOST_BYTES = 1 << 30
_PAGE_WORDS = 4096 // 8


def can_copy_on_write(tables: Tables) -> bool:
    """Return whether rows can be read while training goes on: they are in the CPU's memory.

    False if a backend of ``torch.compile`` changes copies of the tables, which the reading thread
    would miss.

    Args:
        tables: of the group.
    """
    in_memory = isinstance(tables.memory, HostMemory) and tables.tiers is None
    return in_memory and not copies_rows()


def places(rows: int, row_bytes: int) -> int:
    """Return the number of a slab's rows that the buffer has places for.

    Args:
        rows: of the slab.
        row_bytes: of a row with its optimizer state.
    """
    some = min(max(-(-rows // _SHARE), _LEAST_BYTES // row_bytes), _MOST_BYTES // row_bytes)
    return max(1, min(rows, some))


class CopyOnWriteRows:
    """The rows of a group as of the call of :meth:`pin`.

    Args:
        tables: of the group; :func:`can_copy_on_write` is True for them.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._buffers: dict[tuple[int, int], Tensor] = {}
        self._ended = threading.Event()

    @property
    def forked(self) -> bool:
        """Whether this process got the rows by a fork, without the reading thread."""
        return self._tables.host.forked

    @forked.setter
    def forked(self, forked: bool) -> None:
        """End copy-on-write in the child: without a reader, an update would wait for ever."""
        self._end()

    def bytes_of(self, slab: int) -> int:
        """Return the memory that copy-on-write takes at most.

        Args:
            slab: of the rows.
        """
        used, row_bytes = self._tables.index.used_rows(slab), _row_bytes(self._tables, slab)
        return 4 * used + (4 + row_bytes) * places(used, row_bytes)

    def pin(self) -> None:
        """Pin the rows: from now on :meth:`read` returns their current values.

        Call it between two training steps. The first call adds a tensor to the arguments of
        updates: compiled code is compiled again.

        Raises:
            RuntimeError: too few addresses.
        """
        tables = self._tables
        words = tables.rows.copy_on_write
        if not words:
            new = [_new_words(tables, slab) for slab in range(len(tables.config.slabs))]
            mark_static(new)
            words.extend(new)  # in place: modules and optimizers share this list
        for slab, of_slab in enumerate(words):
            _begin(tables, slab, of_slab)
        rows = tables.rows
        # inputs for the initial values of unwritten rows
        small = rows._replace(
            hyper=rows.hyper.clone(), meta=rows.meta.clone(), init_data=rows.init_data.clone()
        )
        tables.host.rows_read = self._ended
        watch(self)
        for of_slab in words:
            of_slab[CopyOnWrite.ACTIVE] = 1
        self._tables = replace(tables, rows=small)

    def read(
        self,
        table: int,
        ids: Tensor,
        handles: Tensor,
        written: Tensor,
        out: Sequence[Tensor | None],
    ) -> RowBatch:
        """Read rows as of :meth:`pin`, each once; the result is valid until the next call.

        Args:
            table: of the ids.
            ids: int64 [n].
            handles: int64 [n], of the ids at that time.
            written: bool [n], whether the rows had been written by then; the others get their
                initial values.
            out: memory for the weights and each state tensor, like the result; None: a buffer.
        """
        tables, count = self._tables, ids.shape[0]
        slab = tables.config.slab_of(table)
        names = list(state_tensors(tables, slab))
        weights, *state = (
            here if here is not None else self._buffer(slab, k, count) for k, here in enumerate(out)
        )
        batch = RowBatch(ids, weights, dict(zip(names, state, strict=True)))
        # .data: compiled code saves these tensors for its backward, and autograd would count this
        # call as a change of them
        ops.take_unchanged_rows_(
            tables.rows.weights[slab].data,
            [of.data for of in tables.rows.state[slab :: len(tables.config.slabs)]],
            tables.rows.copy_on_write[slab].data,
            handles >> GENERATION_BITS,
            batch.rows,
            as_kept(tables.config.optimizer, batch.state),
        )
        write_initial_values(tables, table, batch, written)
        return batch

    def _buffer(self, slab: int, number: int, count: int) -> Tensor:
        """Return memory for rows of a tensor. It is reused: new memory costs more than the copy.

        Args:
            slab: of the rows.
            number: of the tensor: weights, or a state tensor.
            count: of rows.
        """
        known = self._buffers.get((slab, number))
        if known is None or known.shape[0] < count:
            tables = self._tables
            of = [tables.rows.weights[slab], *state_tensors(tables, slab).values()][number]
            known = self._buffers[slab, number] = torch.empty_like(of[:count])
        return known[:count]

    def release(self) -> None:
        """End copy-on-write, if it has begun: no update waits from now on, and memory is released.

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
    """Return the bytes of a place: those of a row with its state, in whole words."""
    tensors = [tables.rows.weights[slab], *state_tensors(tables, slab).values()]
    return -(-sum(of.shape[1:].numel() * of.element_size() for of in tensors) // 8) * 8


def _pages(words: int) -> int:
    return -(-words // _PAGE_WORDS) * _PAGE_WORDS


def _new_words(tables: Tables, slab: int) -> Tensor:
    """Reserve words for all rows that the slab can ever have.

    Memory is taken at the first write.
    """
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
            f"checkpoint.save: asynchronous=True: no addresses for {8 * size} bytes, the buffer of "
            f"copy-on-write: {what_ran_out(8 * size)}",
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
    """Reset the words of a slab: no row is read yet, all places are free; not active yet."""
    # also clears marks that a writer left when the previous save ended
    ops.release_(words, COPY_ON_WRITE_COLUMNS, words.shape[0])
    used = tables.index.used_rows(slab)
    count = places(used, int(words[CopyOnWrite.ROW_BYTES]))
    words[CopyOnWrite.ROWS], words[CopyOnWrite.PLACES] = used, count
    words[CopyOnWrite.TAKEN], words[CopyOnWrite.GIVEN], words[CopyOnWrite.WAITS] = 0, count, 0
    halves = words.view(torch.int32)
    free = 2 * int(words[CopyOnWrite.FREE])
    halves[free : free + count] = torch.arange(count, dtype=torch.int32, device=tables.device)
    # rows without an id are never read
    unused = tables.index.free_rows[slab, : int(tables.index.slabs[slab, Slab.FREE_COUNT])]
    marks = halves[2 * int(words[CopyOnWrite.MARKS]) :][:used]
    marks[unused >> GENERATION_BITS] = int(CopyMark.READ)


__all__ = ["CopyOnWriteRows", "can_copy_on_write", "places"]
