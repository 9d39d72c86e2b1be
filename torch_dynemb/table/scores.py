"""Scores of ids: the values that eviction and removal go by."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, flat_int64, integer, table_number, text
from torch_dynemb.ops.columns import (
    CLOCK_HEAD,
    MAX_COUNT,
    OnFull,
    PolicyColumn,
)
from torch_dynemb.policy.half_life import counts_of, logarithms_of, time_of
from torch_dynemb.policy.policy import SCORES
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.table.tables import Tables, one_table


def deciding_score(tables: Tables, table: int) -> str:
    """Return the score that eviction goes by, as :meth:`Scores.deciding` does."""
    name = tables.config.tables[table].policy.scores[0]
    rows = tables.config.layout.rows
    evicts = bool(rows) and rows[table][PolicyColumn.ON_FULL] == OnFull.EVICT
    return "step" if name == "none" and evicts else name


def score_word(tables: Tables, table: int, score: str | None, call: str = "TableGroup") -> int:
    name = deciding_score(tables, table) if score is None else text(f"{call}: score", score)
    undecayed = name == "decayed" and tables.config.tables[table].policy.half_life_ticks == 0
    kept = name in tables.config.layout.score_words and not undecayed
    if not kept or (score is None and name == "none"):
        lacks = "keeps no score" if name == "none" else f"does not keep score {name!r}"
        raise ValueError(
            f"{call}: table {tables.config.tables[table].name!r} {lacks}: create it with "
            f"policy=Policy(score={'step' if name == 'none' else name!r})"
        )
    return tables.config.layout.score_words.index(name)


def stored_score_word(call: str, tables: Tables, table: int, score: str) -> int:
    """Return the place of a score among those that a table stores of an id.

    Raises:
        ValueError: it does not keep the score; the message names those that it keeps.
    """
    config = tables.config.tables[table]
    words = tables.config.layout.score_words
    # with any score, the step is stored, too
    kept = [name for name in SCORES if name in words and name in ("step", *config.policy.scores)]
    if score not in kept:
        raise ValueError(
            f"{call}: table {config.name!r} does not keep score {score!r}, but {kept}: choose one "
            f"of them, or create it with policy=Policy(score={score!r})"
        )
    return words.index(score)


def eviction_scores(tables: Tables, table: int, batch: ops.ExportedBatch) -> Tensor:
    """Return the scores that eviction goes by, int64 [n]; zeros if the table stores none."""
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

    def deciding(self, table: int | str) -> str:
        """Return the score that eviction from a table goes by; ``"none"``: it stores none.

        Args:
            table: its name or number.
        """
        return deciding_score(self._tables, self._number("deciding", table))

    def _number(self, call: str, table: int | str) -> int:
        return table_number(f"scores.{call}", self._tables.config.names, table)

    def get(self, table: int | str, ids: Tensor, *, score: str | None = None) -> ops.ScoredIds:
        """Return scores of ids of one table, without changing any.

        A decayed count is that of the present time, or step, of the group.

        Args:
            table: its name or number.
            ids: int64 of any shape, n of them.
            score: one that the table stores; default: the one that eviction goes by.

        Returns:
            ``scores``, int64 [n], of decayed counts float64 [n], 0 for an unknown id, and
            ``found``, bool [n].

        Raises:
            TypeError: ids are not int64, or ``score`` is not a str.
            ValueError: the score is not stored, or ids are on another device.
        """
        number = self._number("get", table)
        stored = stored_scores(self._tables, number, ids, score, "scores.get")
        name = deciding_score(self._tables, number) if score is None else score
        if name != "decayed":
            return stored
        counts = counts_of(stored.scores, decay_time(self._tables, number))
        return ops.ScoredIds(torch.where(stored.found, counts, 0.0), stored.found)

    def set(
        self, table: int | str, ids: Tensor, scores: Tensor, *, score: str | None = None
    ) -> int:
        """Set scores of the ids in a table; return how many of ``ids`` it has.

        Args:
            table: its name or number.
            ids: int64 [n].
            scores: int64 [n], of decayed counts float64 [n]; if an id occurs several times, the
                largest counts. Steps from 0 on, frequencies from 0 to 2^62, decayed counts from 0
                on, other scores without limit.
            score: as in :meth:`get`.

        Raises:
            TypeError: ids or scores have another dtype, or ``score`` is not a str.
            ValueError: wrong number, device or values of scores, or a score that is not stored.
                After an error, all scores are unchanged.
        """
        tables, call, number = self._tables, "scores.set", self._number("set", table)
        word = score_word(tables, number, score, call)
        flat, offsets, features = one_table(tables, number, ids, call)
        name = tables.config.layout.score_words[word]
        if name == "decayed":
            scores = _decayed_scores(tables, number, scores)
        else:
            scores = flat_int64(f"{call}: scores", scores, tables.device)
        if scores.shape != flat.shape:
            raise ValueError(
                f"{call}: scores has {scores.shape[0]} elements, expected one for each of the "
                f"{flat.shape[0]} ids"
            )
        _check_given_scores(name, scores)
        tables.check_own()
        found = ops.set_scores_(tables.index, flat, offsets, features, scores, word=word)
        return int(found.sum())

    def set_batch(self, table: int | str, score: int) -> None:
        """Set the custom score that lookups give the ids of a table from now on.

        Args:
            table: its name or number.
            score: an int64; scores given with a lookup take precedence.

        Raises:
            TypeError: ``score`` is not an int.
            ValueError: the table stores no custom scores, or the score exceeds int64.
        """
        tables, number = self._tables, self._number("set_batch", table)
        config = tables.config.tables[number]
        if config.policy.custom is None:
            raise ValueError(
                f"scores.set_batch: table {config.name!r} keeps no custom scores: create it with "
                "policy=Policy(score='custom')"
            )
        score = integer("scores.set_batch: score", score)
        tables.check_own()
        with defer_signals():
            tables.index.clock[CLOCK_HEAD + number] = score
            tables.host.batch_scored.add(number)


def stored_scores(
    tables: Tables, table: int, ids: Tensor, score: str | None, call: str = "TableGroup"
) -> ops.ScoredIds:
    """Return scores as :meth:`Scores.get` does, but decayed counts as they are stored, int64."""
    word = score_word(tables, table, score, call)
    flat, offsets, features = one_table(tables, table, ids, call)
    return ops.get_scores(tables.index, flat, offsets, features, word=word)


def decay_time(tables: Tables, table: int) -> float:
    """Return the half-lives of a table from time 0 to now; waits for a GPU."""
    step, now = tables.index.clock[:CLOCK_HEAD].tolist()
    return time_of(tables.config.tables[table].policy.half_life_ticks, step=step, now=now)


def _decayed_scores(tables: Tables, table: int, counts: Tensor) -> Tensor:
    """Return counts as they are stored, int64 [n]."""
    if not isinstance(counts, Tensor) or counts.dtype != torch.float64:
        what = counts.dtype if isinstance(counts, Tensor) else described(counts)
        raise TypeError(f"scores.set: scores is {what}, expected decayed counts as float64")
    if counts.device != tables.device:
        raise ValueError(
            f"scores.set: scores is on {counts.device}, but the table is on {tables.device}"
        )
    if counts.numel() > 0 and not bool((counts.isfinite() & (counts >= 0)).all()):
        wrong = counts[~(counts.isfinite() & (counts >= 0))][0]
        raise ValueError(f"scores.set: scores has {float(wrong)}, expected counts from 0 on")
    return logarithms_of(counts.reshape(-1), decay_time(tables, table))


def _check_given_scores(name: str, scores: Tensor) -> None:
    """Raise ValueError for scores that training cannot produce."""
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


__all__ = [
    "Scores",
    "decay_time",
    "deciding_score",
    "eviction_scores",
    "score_word",
    "stored_score_word",
    "stored_scores",
]
