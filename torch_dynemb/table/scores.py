"""Scores of ids: what is kept of them."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import flat_int64, integer, text
from torch_dynemb.ops.columns import (
    CLOCK_HEAD,
    MAX_COUNT,
    OnFull,
    PolicyColumn,
)
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.tables import Tables, one_table


def deciding_score(tables: Tables, table: int) -> str:
    """See :meth:`Scores.deciding`."""
    name = tables.config.table(table).policy.scores[0]
    rows = tables.config.layout.rows
    evicts = bool(rows) and rows[table][PolicyColumn.ON_FULL] == OnFull.EVICT
    return "step" if name == "none" and evicts else name


def score_word(tables: Tables, table: int, score: str | None, call: str = "TableGroup") -> int:
    tables.config.table(table, call)
    name = deciding_score(tables, table) if score is None else text(f"{call}: score", score)
    if name not in tables.config.layout.score_words or (score is None and name == "none"):
        raise ValueError(
            f"{call}: table {tables.config.tables[table].name!r} does not keep score {name!r}: "
            f"create it with policy=Policy(score={'step' if name == 'none' else name!r})"
        )
    return tables.config.layout.score_words.index(name)


def eviction_scores(tables: Tables, table: int, batch: ops.ExportedBatch) -> Tensor:
    """int64 [n]; zeros if the table keeps none."""
    if deciding_score(tables, table) == "none":
        return torch.zeros_like(batch.ids)
    return batch.scores[:, score_word(tables, table, None)].contiguous()


class Scores:
    """Scores of the ids of a group: ``group.scores``.

    Args:
        tables: of the group.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def deciding(self, table: int) -> str:
        """The score that decides who is evicted from a table; ``"none"``: it keeps none.

        Args:
            table: its number.
        """
        return deciding_score(self._tables, table)

    def get(self, table: int, ids: Tensor, *, score: str | None = None) -> ops.ScoredIds:
        """Scores of ids of one table; changes nothing.

        Args:
            table: its number.
            ids: int64 of any shape, n of them.
            score: which of those that are kept; default: the one that decides who is evicted.

        Returns:
            ``scores``, int64 [n], 0 for an id that is not there, and ``found``, bool [n].

        Raises:
            TypeError: ids are no int64, or ``score`` is no str.
            ValueError: the score is not kept, or ids are on another device.
        """
        word = score_word(self._tables, table, score, "scores.get")
        flat, offsets, features = one_table(self._tables, table, ids, "scores.get")
        return ops.get_scores(self._tables.index, flat, offsets, features, word=word)

    def set(self, table: int, ids: Tensor, scores: Tensor, *, score: str | None = None) -> int:
        """Sets scores of the ids that are in a table; returns how many of ``ids`` are.

        Args:
            table: its number.
            ids: int64 [n].
            scores: int64 [n]; of several for one id the largest counts. Steps from 0 on,
                frequencies from 0 to 2^62, others any.
            score: as in :meth:`get`.

        Raises:
            TypeError: ids or scores are no int64, or ``score`` is no str.
            ValueError: number, device or values of scores, or a score that is not kept. In both
                cases no score has been changed.
        """
        tables, call = self._tables, "scores.set"
        word = score_word(tables, table, score, call)
        flat, offsets, features = one_table(tables, table, ids, call)
        scores = flat_int64(f"{call}: scores", scores, tables.device)
        if scores.shape != flat.shape:
            raise ValueError(
                f"{call}: scores has {scores.shape[0]} elements, expected one for each of the "
                f"{flat.shape[0]} ids"
            )
        _check_given_scores(tables.config.layout.score_words[word], scores)
        tables.check_own()
        found = ops.set_scores_(tables.index, flat, offsets, features, scores, word=word)
        return int(found.sum())

    def set_batch(self, table: int, score: int) -> None:
        """The custom score that lookups give the ids of a table from now on.

        Args:
            table: its number.
            score: an int64; scores that come with a lookup go before it.

        Raises:
            TypeError: ``score`` is no int.
            ValueError: the table keeps no custom scores, or the score leaves int64.
        """
        tables = self._tables
        config = tables.config.table(table, "scores.set_batch")
        if "custom" not in config.policy.scores:
            raise ValueError(
                f"scores.set_batch: table {config.name!r} keeps no custom scores: create it with "
                "policy=Policy(score='custom')"
            )
        score = integer("scores.set_batch: score", score)
        tables.check_own()
        with defer_signals():
            tables.index.clock[CLOCK_HEAD + table] = score
            tables.host.batch_scored.add(table)


def _check_given_scores(name: str, scores: Tensor) -> None:
    """Raises ValueError for scores that training would not leave, nor a state have."""
    if name not in ("step", "frequency") or scores.numel() == 0:
        return
    least, largest = int(scores.min()), int(scores.max())
    if name == "step" and least < 0:
        raise ValueError(f"scores.set: scores has {least}, expected steps from 0 on")
    if name == "frequency" and (least < 0 or largest > MAX_COUNT):
        raise ValueError(
            f"scores.set: scores has {least if least < 0 else largest}, expected frequencies "
            "from 0 to 2^62"
        )


__all__ = ["Scores", "deciding_score", "eviction_scores", "score_word"]
