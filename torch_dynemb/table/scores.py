"""Scores of ids: what is kept of them, and what the time is."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import flat_int64, integer, tensor, text
from torch_dynemb.ops.columns import (
    CLOCK_HEAD,
    MAX_COUNT,
    NO_HANDLE,
    Clock,
    OnFull,
    PolicyColumn,
)
from torch_dynemb.process.forked import check_own
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.table.group_parts import GroupParts


class Scores(GroupParts):
    """The part of a table group that deals with scores."""

    _batch_scored: set[int]

    @property
    def keeps_time(self) -> bool:
        """Whether a table keeps timestamps, or when ids expire."""
        return "timestamp" in self.layout.score_words or "expiry" in self.layout.score_words

    def set_now(self, seconds: int) -> None:
        """Sets the time that lookups give their ids, until the next ``optimizer.step()``.

        Raises:
            TypeError, ValueError: not a whole number from 0 to 2^62.
            RuntimeError: no table keeps times.
        """
        self._check_now(seconds)
        check_own(self)
        self.clock[Clock.NOW] = seconds

    def _check_now(self, seconds: int) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int):
            raise TypeError(f"set_now: seconds is {seconds!r}, expected int")
        if seconds < 0:
            raise ValueError(f"set_now: seconds is {seconds}, expected at least 0")
        if seconds > MAX_COUNT:
            raise ValueError(f"set_now: seconds is {seconds}, expected at most 2^62")
        if not self.keeps_time:
            raise RuntimeError(
                "set_now: no table keeps times: create one with policy=Policy(score='timestamp') "
                "or a ttl"
            )

    def deciding_score(self, table: int) -> str:
        """The score that decides who is evicted from a table; ``"none"``: it keeps none."""
        name = self._config(table).policy.scores[0]
        rows = self.layout.rows
        evicts = bool(rows) and rows[table][PolicyColumn.ON_FULL] == OnFull.EVICT
        return "step" if name == "none" and evicts else name

    def _word(self, table: int, score: str | None, call: str = "TableGroup") -> int:
        self._config(table, call)
        name = self.deciding_score(table) if score is None else text(f"{call}: score", score)
        if name not in self.layout.score_words or (score is None and name == "none"):
            raise ValueError(
                f"{call}: table {self.names[table]!r} does not keep score {name!r}: create it with "
                f"policy=Policy(score={'step' if name == 'none' else name!r})"
            )
        return self.layout.score_words.index(name)

    def _eviction_scores(self, table: int, batch: ops.ExportedBatch) -> Tensor:
        """int64 [n]; zeros if the table keeps none."""
        if self.deciding_score(table) == "none":
            return torch.zeros_like(batch.ids)
        return batch.scores[:, self._word(table, None)].contiguous()

    def get_score(self, table: int, ids: Tensor, *, score: str | None = None) -> ops.ScoredIds:
        """Scores of ids of one table; see :func:`torch_dynemb.ops.get_scores`.

        Args:
            score: which of those that are kept; default: the one that decides who is evicted.

        Raises:
            ValueError: it is not kept.
        """
        word = self._word(table, score, "get_score")
        flat, offsets, features = self._one_table(table, ids, "get_score")
        return ops.get_scores(
            self.buckets, self.scores, self.tables, self.meta, flat, offsets, features, word=word
        )

    def set_score(
        self, table: int, ids: Tensor, scores: Tensor, *, score: str | None = None
    ) -> int:
        """Sets scores of the ids that are in a table; returns how many of ``ids`` are.

        Args:
            ids: int64 [n].
            scores: int64 [n]; of several for one id the largest counts. Steps from 0
                on, frequencies from 0 to 2^62, others any.
            score: as in :meth:`get_score`.

        Raises:
            ValueError, TypeError: shape, dtype or values of scores, or a score that is not kept.
        """
        word = self._word(table, score, "set_score")
        flat, offsets, features = self._one_table(table, ids, "set_score")
        scores = flat_int64("set_score: scores", scores, self.device)
        if scores.shape != flat.shape:
            raise ValueError(
                f"set_score: scores has {scores.shape[0]} elements, expected one for each of the "
                f"{flat.shape[0]} ids"
            )
        self._check_given_scores(self.layout.score_words[word], scores)
        check_own(self)
        found = ops.set_scores_(
            self.buckets,
            self.scores,
            self.tables,
            self.meta,
            flat,
            offsets,
            features,
            scores,
            word=word,
        )
        return int(found.sum())

    def _check_given_scores(self, name: str, scores: Tensor) -> None:
        """Raises ValueError for scores that training would not leave, nor a state have."""
        if name not in ("step", "frequency") or scores.numel() == 0:
            return
        least, largest = int(scores.min()), int(scores.max())
        if name == "step" and least < 0:
            raise ValueError(f"set_score: scores has {least}, expected steps from 0 on")
        if name == "frequency" and (least < 0 or largest > MAX_COUNT):
            raise ValueError(
                f"set_score: scores has {least if least < 0 else largest}, expected frequencies "
                "from 0 to 2^62"
            )

    def set_batch_score(self, table: int, score: int) -> None:
        """The custom score that lookups give the ids of a table from now on.

        Raises:
            ValueError: the table keeps no custom scores, or the score leaves int64.
        """
        if "custom" not in self._config(table, "set_batch_score").policy.scores:
            raise ValueError(
                f"set_batch_score: table {self.names[table]!r} keeps no custom scores: create it "
                "with policy=Policy(score='custom')"
            )
        score = integer("set_batch_score: score", score)
        check_own(self)
        with held_back():
            self.clock[CLOCK_HEAD + table] = score
            self._batch_scored.add(table)

    def _check_custom_scores(
        self, feature_tables: Sequence[int], ids: Tensor, scores: Tensor | None
    ) -> None:
        if scores is None:
            for t in feature_tables:
                policy = self.tables_config[t].policy
                if "custom" in policy.scores and t not in self._batch_scored:
                    raise ValueError(
                        f"table {self.names[t]!r} keeps custom scores, but none have been given: "
                        "call group.set_batch_score, or give scores with the lookup"
                    )
            return
        if "custom" not in self.layout.score_words:
            raise ValueError(
                "scores are given, but no table keeps custom scores: create one with "
                "policy=Policy(score='custom')"
            )
        if tensor("find_or_insert: scores", scores).dtype != torch.int64:
            raise TypeError(f"find_or_insert: scores has dtype {scores.dtype}, expected int64")
        if scores.shape != ids.shape:
            raise ValueError(
                f"find_or_insert: scores has shape {tuple(scores.shape)}, expected that of the "
                f"ids, {tuple(ids.shape)}"
            )
        if scores.device != ids.device:
            raise ValueError(
                f"find_or_insert: scores is on {scores.device}, but the ids are on {ids.device}"
            )

    def without_expired(
        self, ids: Tensor, offsets: Tensor, feature_tables: Sequence[int], handles: Tensor
    ) -> Tensor:
        """Handles in which ids whose ttl has passed are missing."""
        if "expiry" not in self.layout.score_words:
            return handles
        expires, found = ops.get_scores(
            self.buckets,
            self.scores,
            self.tables,
            self.meta,
            ids,
            offsets,
            feature_tables,
            word=self.layout.word("expiry"),
        )
        return torch.where(found & (expires <= self.clock[Clock.NOW]), NO_HANDLE, handles)


__all__ = ["Scores"]
