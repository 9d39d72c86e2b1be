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
from torch_dynemb.process.interrupts import held_back
from torch_dynemb.table.tables import Tables, one_table


def deciding_score(tables: Tables, table: int) -> str:
    """See :meth:`torch_dynemb.TableGroup.deciding_score`."""
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


def get_score(
    tables: Tables, table: int, ids: Tensor, *, score: str | None = None
) -> ops.ScoredIds:
    """See :meth:`torch_dynemb.TableGroup.get_score`."""
    word = score_word(tables, table, score, "get_score")
    flat, offsets, features = one_table(tables, table, ids, "get_score")
    return ops.get_scores(tables.index, flat, offsets, features, word=word)


def set_score(
    tables: Tables, table: int, ids: Tensor, scores: Tensor, *, score: str | None = None
) -> int:
    """See :meth:`torch_dynemb.TableGroup.set_score`."""
    word = score_word(tables, table, score, "set_score")
    flat, offsets, features = one_table(tables, table, ids, "set_score")
    scores = flat_int64("set_score: scores", scores, tables.device)
    if scores.shape != flat.shape:
        raise ValueError(
            f"set_score: scores has {scores.shape[0]} elements, expected one for each of the "
            f"{flat.shape[0]} ids"
        )
    _check_given_scores(tables.config.layout.score_words[word], scores)
    tables.check_own()
    found = ops.set_scores_(
        tables.index,
        flat,
        offsets,
        features,
        scores,
        word=word,
    )
    return int(found.sum())


def _check_given_scores(name: str, scores: Tensor) -> None:
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


def set_batch_score(tables: Tables, table: int, score: int) -> None:
    """See :meth:`torch_dynemb.TableGroup.set_batch_score`."""
    config = tables.config.table(table, "set_batch_score")
    if "custom" not in config.policy.scores:
        raise ValueError(
            f"set_batch_score: table {config.name!r} keeps no custom scores: create it with "
            "policy=Policy(score='custom')"
        )
    score = integer("set_batch_score: score", score)
    tables.check_own()
    with held_back():
        tables.index.clock[CLOCK_HEAD + table] = score
        tables.host.batch_scored.add(table)


__all__ = [
    "deciding_score",
    "eviction_scores",
    "get_score",
    "score_word",
    "set_batch_score",
    "set_score",
]
