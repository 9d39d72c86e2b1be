"""A group of tables as an object: operations on its ids and rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from torch_dynemb import ops
from torch_dynemb.argument_checks import integer
from torch_dynemb.keyword_options import takes_options
from torch_dynemb.ops.columns import Table
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.process.sending import sent_as_bytes
from torch_dynemb.storage.device import memory_of
from torch_dynemb.table import compaction, lookup, removal, row_access, sampling
from torch_dynemb.table import rows as table_rows
from torch_dynemb.table import steps as table_steps
from torch_dynemb.table.allocation import allocate
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.group_config import checked_config
from torch_dynemb.table.group_tables import GroupTables
from torch_dynemb.table.options import GroupOptions
from torch_dynemb.table.rows import ExportedRows
from torch_dynemb.table.tables import one_table


@sent_as_bytes
class TableGroup(GroupTables):
    """Tables that are looked up together: one index, one slab of rows per distinct dim.

    Address space is reserved for as many rows as fit the machine, and memory is taken as ids
    arrive: rows never move, and no tensor changes shape. One thread may insert or train at a time.

    Beside it any number of threads may look ids up and read rows and scores, on the CPU. An id that
    stays in the table is always found. A row may be read between two columns of its update, and
    that of an id which leaves meanwhile between two owners; ``serving.live`` gives whole rows.
    Rows in a store have no such readers. Lookups raise InUseError while ids get other rows:
    :meth:`compact`, loads, :meth:`add_table`, :meth:`set_optimizer`, :meth:`to`.

    Methods take tables by name or number. They raise ValueError for an unknown name and for ids on
    another device, IndexError for an unknown number, and TypeError for tables and ids of another
    type. Methods that change something raise InUseError if another thread changes something (on
    the CPU), and ForkedProcessError in a forked process. Unless a method says otherwise, an error
    leaves the group unchanged.

    Args:
        tables: at least one; names must differ.
        optimizer: of the rows; None for a group that is only read.
        seed: default ``torch.initial_seed()``; with a process group, that of rank 0.
        **options: those of :class:`torch_dynemb.table.GroupOptions`.

    Raises:
        TypeError, ValueError: a wrong value, or tables that do not go together.
        RuntimeError: tables cannot lie on the device, or too little memory, or addresses.
    """

    @takes_options
    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        optimizer: OptimizerConfig | None,
        seed: int | None = None,
        **options: Unpack[GroupOptions],
    ) -> None:
        config = checked_config(tables, optimizer, seed, options)
        self._tables = allocate(config, memory_of("TableGroup", options["device"]))

    # -- lookup --------------------------------------------------------------------------------

    def find(
        self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int | str]
    ) -> ops.FoundIds:
        """Find handles of ids, without changing anything.

        Args:
            ids: int64 [N], feature after feature.
            offsets: int64 [F * B + 1], ascending from 0 to N: begins of the bags, B of each
                feature; may be empty for one feature.
            feature_tables: F tables, by name or number.

        Returns:
            Handles of the ids, and the number of missing ids; see
            :class:`torch_dynemb.ops.FoundIds`.

        Raises:
            TypeError, ValueError: dtype, shape or device of ids or offsets.
            RuntimeError: offsets are not ascending from 0 to N (on a GPU, a later call raises it),
                or a table number is out of range.
        """
        numbers = self._numbers("find", feature_tables)
        return lookup.find(self._tables, ids, offsets, numbers)

    def find_or_insert(
        self,
        ids: Tensor,
        offsets: Tensor,
        feature_tables: Sequence[int | str],
        feature_policies: Sequence[int] | None = None,
        *,
        scores: Tensor | None = None,
        counts: Tensor | None = None,
    ) -> Tensor:
        """Find handles of ids; new ids get a row if their policy admits them.

        See :func:`torch_dynemb.ops.find_or_insert_`. For ids of one table, see :meth:`insert`; to
        set rows, :meth:`insert_or_assign` and :meth:`fill`; to write initial ones,
        :meth:`materialize`.

        Args:
            ids, offsets, feature_tables: as in :meth:`find`.
            feature_policies: F rows of ``policy``; default: those of the tables.
            scores: int64 [N], custom scores of the ids; with ``counts`` those of all occurrences of
                an id together.
            counts: int64 [N], occurrences of each id, at least 1; default: 1 each.

        Returns:
            int64 [N]; -2 for padding ids, -3 for ids that got no row.

        Raises:
            TypeError: dtype of an argument, or an admission hook has returned another value than a
                mask.
            ValueError: shape or device of an argument; a table stores custom scores, and none were
                given; or none stores any, and some were given.
            IndexError: a table number is too large.
            RuntimeError: values of offsets or feature_policies.
            NoRoomError: a table is full, or memory is short.
                On a GPU, a later call raises errors that depend on values of tensors.
        """
        numbers = self._numbers("find_or_insert", feature_tables)
        call = (ids, offsets, numbers, feature_policies)
        return lookup.find_or_insert(self._tables, *call, scores=scores, counts=counts)

    def prefetch(
        self,
        ids: Tensor,
        offsets: Tensor,
        feature_tables: Sequence[int | str],
        *,
        ahead: int = 1,
    ) -> None:
        """Start to load the rows of a later lookup into memory, and return at once.

        Does nothing if all rows are in memory. Nothing is inserted.

        Args:
            ids, offsets, feature_tables: as in :meth:`find`.
            ahead: number of training steps until the lookup, at least 1; the rows stay until then.

        Raises:
            TypeError, ValueError: as :meth:`find`, or ``ahead`` is not an int, or less than 1.
            RuntimeError: the storage has failed, or memory or the disk is full.
        """
        numbers = self._numbers("prefetch", feature_tables)
        lookup.prefetch(self._tables, ids, offsets, numbers, ahead=ahead)

    def insert(self, table: int | str, ids: Tensor, *, scores: Tensor | None = None) -> Tensor:
        """Insert ids into one table, as training does; its policy may refuse some a row.

        For ids of several tables, see :meth:`find_or_insert`; to set rows, :meth:`insert_or_assign`
        and :meth:`fill`; to write initial ones, :meth:`materialize`.

        Args:
            table: its name or number.
            ids: int64 of any shape, n of them.
            scores: int64 [n], custom scores of the ids; if an id occurs several times, the largest
                counts.

        Returns:
            Handles, int64 [n]; -2 for padding ids, -3 for ids that got no row.

        Raises:
            TypeError: scores are not int64.
            ValueError: scores are on another device, or have another shape; the table stores custom
                scores, and none were given; or it stores none, and some were given.
            NoRoomError: the table is full, or memory is short.
        """
        call = one_table(self._tables, self._number("insert", table), ids, "insert")
        return lookup.find_or_insert(self._tables, *call, scores=scores)

    def contains(self, table: int | str, ids: Tensor) -> Tensor:
        """Return which ids are in a table.

        Args:
            table: its name or number.
            ids: int64 of any shape.

        Returns:
            bool of the shape of ``ids``; False for the padding id, True for an expired id.
        """
        return removal.contains(self._tables, self._number("contains", table), ids)

    def sample_ids(
        self,
        table: int | str,
        n: int,
        *,
        by: sampling.SampledBy = "uniform",
        power: float = 1.0,
        generator: torch.Generator | None = None,
    ) -> sampling.SampledIds:
        """Draw ids of a table, with replacement; nothing changes.

        Uniform draws wait for no device and are part of compiled code. For draws by frequency the
        ids are listed with the sums of ``count ** power``, 16 bytes an id. ``step()`` lists them
        again every 100 steps, and in the beginning more often. Ids removed since are drawn again.

        Args:
            table: its name or number.
            n: how many, at least 0.
            by: ``"uniform"``: each id with the same probability; ``"frequency"``: in proportion to
                ``count ** power``, by the score ``"frequency"``, or else ``"decayed"``.
            power: of the counts; 0.75 is that of word2vec (Mikolov et al., 2013).
            generator: of torch, on the device of the table; default: the global one.

        Returns:
            Ids, int64 [n], and the logarithms of their probabilities in one draw, float32 [n].

        Raises:
            TypeError: ``n`` or ``power`` is not a number.
            ValueError: ``n``, ``by`` or ``power`` is out of range, or the table keeps no counts.
            RuntimeError: the table is empty; on a GPU, a later call raises it for uniform draws.
                Or compiled code draws by frequency before any other code has.

        Example:
            >>> import torch, torch_dynemb as td
            >>> items = td.DynamicEmbedding(4, name="items", optimizer=td.SGD(lr=0.1))
            >>> _ = items(torch.tensor([3, 5, 8, 5]))
            >>> ids, log_probabilities = items.group.sample_ids(0, 100)
            >>> sorted(set(ids.tolist())), log_probabilities.exp()[0]
            ([3, 5, 8], tensor(0.3333))
        """
        return sampling.sample(
            self._tables,
            self._number("sample_ids", table),
            n,
            by=by,
            power=power,
            generator=generator,
        )

    def reserve(self, table: int | str, ids: int) -> None:
        """Grow a table's index once, for ``ids`` ids without another growth.

        Args:
            table: its name or number.
            ids: number of ids, those in the table included; at least 0. Rows are not reserved. A
                table that evicts or refuses ids beyond its capacity reserves no more than that: an
                eviction looks at few places of a large index.

        Raises:
            TypeError: ``ids`` is not an int.
            ValueError: ``ids`` is less than 0.
            NoRoomError: the table cannot have so many (see ``max_rows``), or memory is short.
        """
        number = self._number("reserve", table)
        ids = integer("reserve: ids", ids, least=0)
        ids = min(ids, self.config.capacity_bound(number) or ids)
        self._tables.check_own()
        ops.grow_(self.index, number, ids)

    # -- rows ----------------------------------------------------------------------------------

    def read(self, table: int | str, ids: Tensor) -> Tensor:
        """Return rows of ids, without changing anything.

        Args:
            table: its name or number.
            ids: int64 of any shape, n of them.

        Returns:
            float32 [n, dim]. An unknown id gives the table's ``eval_default``, the padding id
            zeros, an expired id its row.
        """
        return table_rows.read(self._tables, self._number("read", table), ids)

    def insert_or_assign(
        self, table: int | str, ids: Tensor, rows: Tensor, *, scores: Tensor | None = None
    ) -> None:
        """Set rows of ids, and insert new ids; optimizer state of a new row is fresh.

        Admission does not apply, and exact counts of these ids are cleared (a sketch cannot forget
        one id). Other ids are evicted if the table is full. Before many batches of new ids,
        :meth:`reserve` grows the index for all of them at once. To insert ids without rows, see
        :meth:`insert` and :meth:`find_or_insert`; to set all rows, :meth:`fill`; to write initial
        ones, :meth:`materialize`.

        Args:
            table: its name or number.
            ids: int64 [n], distinct.
            rows: float [n, dim], rounded to the table's dtype.
            scores: int64 [n], custom scores of the ids, combined with those that known ids have, as
                in a lookup. Default: those of ``scores.set_batch``; without it new ids get 0, and
                known ones keep theirs.

        Raises:
            TypeError: rows are not real numbers, or scores are not int64.
            ValueError: shapes or devices do not match, an id is given twice, or one is padding; or
                scores are given, and the table keeps no custom scores. Or a finite value is
                infinite in the table's dtype. Nothing has changed.
            NoRoomError: the table is full, or memory is short. No row has been written, no new id
                inserted and no count cleared. Ids that were evicted for the new ones stay away.
        """
        table_rows.insert_or_assign(
            self._tables, self._number("insert_or_assign", table), ids, rows, scores=scores
        )

    def materialize(self) -> int:
        """Write the rows that no backward has written yet; return how many.

        Rows in a store are skipped: a read returns their initial values. Inserts no id: see
        :meth:`insert`, :meth:`find_or_insert` and :meth:`insert_or_assign`; sets no value: see
        :meth:`fill`.
        """
        return row_access.materialize(self._tables)

    def fill(self, table: int | str, value: float) -> None:
        """Set the rows of all ids of a table to a value; optimizer state stays.

        To set rows of some ids, see :meth:`insert_or_assign`; to insert ids, :meth:`insert` and
        :meth:`find_or_insert`; to write initial rows, :meth:`materialize`.

        Args:
            table: its name or number.
            value: rounded to the table's dtype.

        Raises:
            TypeError: ``value`` is not a number.
        """
        removal.fill(self._tables, self._number("fill", table), value)

    def export(
        self,
        table: int | str,
        *,
        batch_size: int = 1 << 20,
        since: int | None = None,
        score: str | None = None,
    ) -> Iterator[ExportedRows]:
        """Yield ids of a table with their rows and scores, at most ``batch_size`` at a time.

        The table must not change during the iteration. The first batch raises errors of the
        arguments.

        Args:
            table: its name or number.
            batch_size: ids of a batch, at least 4.
            since: only ids with at least this score, such as ids that changed since a step or a
                time; of decayed counts, the count as of now.
            score: the score that ``since`` refers to; default: the one that evictions go by.

        Raises:
            TypeError: ``batch_size`` or ``since`` is not an int, or ``score`` is not a str.
            ValueError: the score of ``since`` is not stored, or ``batch_size`` is less than 4.
        """
        return table_rows.export(
            self._tables,
            self._number("export", table),
            batch_size=batch_size,
            since=since,
            score=score,
        )

    # -- steps ---------------------------------------------------------------------------------

    def end_step(self) -> None:
        """End a training step of the device alone; see :func:`torch_dynemb.ops.end_step_`."""
        self._tables.memory.end_step(self.index, self.rows)

    @property
    def steps(self) -> int:
        """Number of training steps that have ended."""
        return self._tables.host.steps

    def step(self, now: int | None = None) -> None:
        """End a training step: the part of ``optimizer.step()`` for the index.

        Args:
            now: seconds, such as Unix time; default: the machine's clock. If ranks share the group,
                either all of them give it, or none.

        Raises:
            TypeError, ValueError: ``now`` is not an int, is negative or exceeds 2^62.
            BackgroundError: an asynchronous checkpoint of the tables has failed, which is reported
                once.
            NoRoomError: ids found no room in a table with ``check="error"``; everything else has
                been done.
            RuntimeError: the current stream of the GPU is being captured. Or more ids were evicted
                than ``evicted.call`` can record; the step has ended.
        """
        table_steps.step(self._tables, now)

    # -- removal -------------------------------------------------------------------------------

    def erase(self, table: int | str, ids: Tensor) -> int:
        """Remove ids from a table; return how many were there. Later ids reuse their rows.

        In split mode, their pending gradients are dropped and counted
        (``usage.stale_gradients()``).

        Args:
            table: its name or number.
            ids: int64 of any shape.
        """
        return removal.erase(self._tables, self._number("erase", table), ids)

    @takes_options
    def remove(
        self,
        table: int | str,
        *,
        batch_size: int = 1 << 20,
        **condition: Unpack[removal.Conditions],
    ) -> int:
        """Remove the ids of a table that meet a condition; later ids reuse their rows.

        Between training steps only: handles of a forward before its backward become stale, and
        their gradients are dropped and counted.

        Args:
            table: its name or number.
            batch_size: ids to check at a time, at least 4.
            **condition: one of those that :class:`~torch_dynemb.table.removal.Conditions` has.

        Returns:
            Number of removed ids.

        Raises:
            ValueError, TypeError: no condition or several, or one that does not fit the table, or
                ``predicate`` has returned another value than such a mask.
        """
        return removal.remove(
            self._tables, self._number("remove", table), batch_size=batch_size, **condition
        )

    @takes_options
    def remove_in_slices(
        self,
        table: int | str,
        *,
        batch_size: int = 1 << 16,
        **condition: Unpack[removal.Conditions],
    ) -> Iterator[int]:
        """Remove ids as :meth:`remove` does, some at each ``next()``, between training steps.

        All slices go by the time and step of this call. An id that is there from now to the last
        slice goes if it meets the condition all the time, and stays if it never does. Others, such
        as new ids, are judged as they are when their slice comes. After a rehash of the index, as
        by a growth or :meth:`compact`, the removal starts over with slices twice as large, because
        ids have moved. So it ends.

        Each rank looks at its own ids, in a number of slices of its own. With ``keep_at_least``,
        this call scans the times of all ids for ``expired=True``.

        Args:
            table: its name or number.
            batch_size: ids of a slice, at least 4; a slice of an emptier index has fewer.
            **condition: as in :meth:`remove`.

        Returns:
            Iterator over the number of removed ids of each slice.

        Raises:
            ValueError, TypeError: as :meth:`remove`.
            RuntimeError: a slice after :meth:`add_table`, :meth:`set_optimizer` or :meth:`to`.
        """
        call = (lambda: self._tables), self._number("remove_in_slices", table)
        return removal.RemovalInSlices(*call, batch_size=batch_size, **condition)

    def clear(self, table: int | str) -> int:
        """Remove all ids of a table; return how many. Its index keeps its size.

        Args:
            table: its name or number.
        """
        return removal.clear(self._tables, self._number("clear", table))

    def reset_counts(self, table: int | str) -> None:
        """Clear the counts of ids that were not admitted.

        Args:
            table: its name or number.

        Raises:
            ValueError: the table's admission counts nothing.
        """
        removal.reset_counts(self._tables, self._number("reset_counts", table))

    def compact(self) -> int:
        """Move rows together, shrink the indexes, and give back the free memory.

        Rows in a store keep their places there; later ids take the free ones.

        Between training steps only: handles of a forward before its backward become stale, and
        their gradients are dropped and counted. Tensors keep shape and address.

        An interrupt leaves some tables compact and others not; all ids keep their rows.

        Returns:
            Bytes by which ``usage.memory()`` has shrunk.
        """
        return compaction.compact(self._tables)

    # -- sizes ---------------------------------------------------------------------------------

    def size(self, table: int | str) -> int:
        """Return the number of ids in a table.

        Args:
            table: its name or number.
        """
        return int(self.index.tables[self._number("size", table), Table.SIZE])

    def sizes(self) -> dict[str, int]:
        """Return the number of ids by table name."""
        return {name: self.size(table) for table, name in enumerate(self.names)}


__all__ = ["TableGroup"]
