"""Rows of ids: reading, writing, exporting them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import float_rows, integer
from torch_dynemb.ops.columns import BUCKET_WIDTH, GENERATION_BITS, Hyper, Meta
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.table.group_parts import exported
from torch_dynemb.table.scores import Scores


class ExportedRows(NamedTuple):
    """A batch of a table's content.

    Attributes:
        ids: int64 [n].
        rows: float32 [n, dim].
        scores: int64 [n], by which the table evicts; zeros if it keeps none.
    """

    ids: Tensor
    rows: Tensor
    scores: Tensor


class RowAccess(Scores):
    """The part of a table group that reads and writes rows."""

    def read(self, table: int, ids: Tensor) -> Tensor:
        """Rows of ids, float32 [n, dim]; an id that is not in the table gives its default."""
        flat, offsets, features = self._one_table(table, ids, "read")
        return ops.embedding_inference(
            self.rows,
            flat,
            self.find(flat, offsets, features).handles,
            offsets,
            feature_tables=features,
            dim=self.tables_config[table].embedding_dim,
        )

    def insert_or_assign(self, table: int, ids: Tensor, rows: Tensor) -> None:
        """Sets rows of ids, inserting those that are new; optimizer state of a new row is fresh.

        Admission does not apply, and exact counts of these ids are forgotten (a sketch cannot
        forget one id); other ids are evicted where there is no room.

        Args:
            ids: int64 [n], distinct.
            rows: float [n, dim], rounded to the table's dtype.

        Raises:
            ValueError: shapes do not match, an id is given twice, or one is the padding id.
            RuntimeError: the table is full, or memory is short; no row has been written, and none
                of the new ids is there, nor is a count forgotten. Ids that were evicted to make
                room stay away.
        """
        config = self._config(table, "insert_or_assign")
        ids, offsets, features = self._one_table(table, ids, "insert_or_assign")
        rows = float_rows("insert_or_assign: rows", rows, self.device)
        if tuple(rows.shape) != (ids.numel(), config.embedding_dim):
            raise ValueError(
                f"insert_or_assign: rows has shape {tuple(rows.shape)}, expected "
                f"({ids.numel()}, {config.embedding_dim})"
            )
        if torch.unique(ids).numel() != ids.numel():
            raise ValueError("insert_or_assign: ids has repeated ids, expected every id once")
        if config.padding_idx is not None and bool((ids == config.padding_idx).any()):
            raise ValueError(
                f"insert_or_assign: ids has the padding id {config.padding_idx}, which has no row"
            )
        there = self.contains(table, ids)
        rule = self.layout.assign_rows[table : table + 1]
        values = rows.detach().to(self.weights[int(self.meta[table, Meta.SLAB])].dtype)
        with held_back():
            handles = self.find_or_insert(ids, offsets, features, rule)
            try:
                if bool((handles < 0).any()):
                    self.end_step()  # if a GPU has refused the ids, it says why here
                    raise RuntimeError(
                        f"insert_or_assign: table {config.name!r} has no room for all ids; none "
                        "has been inserted or written"
                    )
                self._write_rows(table, handles, values)
                self._forget_counts(table, ids)
            except BaseException:
                self.erase(table, ids[~there])
                raise

    def _write_rows(self, table: int, handles: Tensor, values: Tensor) -> None:
        slab = int(self.meta[table, Meta.SLAB])
        written = handle_rows(handles)
        generations = (handles & ((1 << GENERATION_BITS) - 1)).to(torch.int32)
        fresh = written[self.generations[slab][written] != generations]
        for state in self.state[slab :: len(self.slab_configs)]:
            state[fresh] = 0
        if self.state:
            initial = self.hyper[table, Hyper.INITIAL_STATE]
            self.state[slab][fresh] = initial.to(self.state[slab].dtype)
        self.weights[slab][written] = values
        self.generations[slab][written] = generations

    def _forget_counts(self, table: int, ids: Tensor) -> None:
        """Ids that have a row wait for admission no longer."""
        counters = self.layout.counters[table]
        if counters is not None:
            flat, offsets, _ = self._one_table(table, ids)
            ops.erase_(
                self.buckets,
                self.scores,
                self.tables,
                self.slabs,
                self.free_rows,
                self.meta,
                flat,
                offsets,
                [counters],
            )

    def materialize(self) -> int:
        """Writes the rows that no backward has written yet; returns how many."""
        return int(
            ops.materialize_(
                self.weights,
                self.generations,
                self.state,
                self.buckets,
                self.tables[: len(self.tables_config)],
                self.hyper,
                self.row_meta,
                self.init_data,
            )
        )

    def export(
        self,
        table: int,
        *,
        batch_size: int = 1 << 20,
        since: int | None = None,
        score: str | None = None,
    ) -> Iterator[ExportedRows]:
        """Ids of a table with their rows and scores, at most ``batch_size`` at a time.

        The table must not change while it is iterated.

        Args:
            since: only ids whose score is at least this: what has changed since a step or a time.
            score: which one ``since`` is about; default: the one that decides who is evicted.

        Raises:
            ValueError: ``score`` is not kept.
        """
        batch_size = integer("export: batch_size", batch_size, least=BUCKET_WIDTH)
        dim = self._config(table, "export").embedding_dim
        since = None if since is None else integer("export: since", since, what="int or None")
        word = 0 if since is None else self._word(table, score, "export")
        for batch in exported(self, table, batch_size):
            if since is not None:
                chosen = batch.scores[:, word] >= since
                batch = batch.chosen(chosen)
                if batch.ids.numel() == 0:
                    continue
            rows = ops.embedding_inference(
                self.rows,
                batch.ids,
                batch.handles,
                torch.tensor([0, batch.ids.numel()], device=self.device),
                feature_tables=[table],
                dim=dim,
            )
            yield ExportedRows(batch.ids, rows, self._eviction_scores(table, batch))


def handle_rows(handles: Tensor) -> Tensor:
    """Row numbers of handles, int64; handles must not be negative."""
    return handles >> GENERATION_BITS


__all__ = ["ExportedRows", "RowAccess", "handle_rows"]
