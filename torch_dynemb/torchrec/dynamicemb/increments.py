"""DynamicEmb's scores of tables, its incremental dump of ids by a score, and its evicted ids."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.checkpoint import TablePart
from torch_dynemb.distributed.together import Ranks, ranks_of
from torch_dynemb.ops.columns import CLOCK_HEAD, Clock
from torch_dynemb.parts.table_parts import end_steps, parts_of
from torch_dynemb.torchrec.sharding.evicted_ids import RecordedIds

Thresholds = Mapping[str, Mapping[str, int]]
Rows = dict[str, dict[str, tuple[Tensor, Tensor]]]
ScoresByTable = dict[str, dict[str, int]]  # by path of the collection, then by table

_ROOT = "model"  # DynamicEmb's name of the model itself
_LEAST_COUNT = 1  # of an id with a row


def get_score(model: nn.Module) -> ScoresByTable | None:
    """Return the scores that lookups give from now on, as thresholds of a later increment.

    Each rank may call it alone. It ends a training step that is still open.

    Args:
        model: with dynamic tables that keep a score, sharded or not.

    Returns:
        Scores by path of the collection, such as ``"model.sparse"``, then by table. It is the time
        or the step of the next lookup if the table keeps one. Otherwise it is the custom score that
        :func:`set_score` has set, or 0, and 1 for frequencies and decayed counts. Tables without
        rows on this rank are left out. None, with a warning, if the model has no dynamic tables.

    Raises:
        TypeError: ``model`` is not a module.
        ValueError: a table keeps no scores.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb.compat.dynamicemb.incremental_dump import get_score
        >>> policy = td.Policy(score="step")
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), policy=policy)
        >>> bag(torch.tensor([[1, 2]])).sum().backward()
        >>> bag.optimizer.step()
        >>> get_score(bag)
        {'model': {'embedding': 1}}
    """
    parts = _parts_of("get_score", model)
    if not parts:
        warnings.warn("get_score: the model has no dynamic tables", UserWarning, stacklevel=2)
        return None
    for part in parts:
        _check_scored("get_score", part)
    end_steps(parts)
    scores: ScoresByTable = {}
    for part in parts:
        path, table = _place(part.name)
        score = _next_score(part, _LEAST_COUNT)
        if _compared(part) == "custom":
            score = int(part.group.index.clock[CLOCK_HEAD + part.table])
        scores.setdefault(path, {})[table] = score
    return scores


def set_score(model: nn.Module, table_score: int | Thresholds) -> None:
    """Set the custom score that lookups give ids from now on; all ranks call it.

    Args:
        model: with dynamic tables of ``DynamicEmbScoreStrategy.CUSTOMIZED``, sharded or not.
        table_score: one for all tables, at least 0; or by collection and by table, then other
            tables keep theirs. A collection is named by its path, or by the last part of it.

    Raises:
        TypeError: ``model`` is not a module, or a score is not an int.
        ValueError: a table keeps no custom score, ``table_score`` names unknown tables, or a score
            is negative. No score has been changed then.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb.compat.dynamicemb.incremental_dump import get_score, set_score
        >>> policy = td.Policy(score="custom")
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), policy=policy)
        >>> set_score(bag, 7)
        >>> get_score(bag)
        {'model': {'embedding': 7}}
    """
    parts = _parts_of("set_score", model)
    if not parts:
        warnings.warn("set_score: the model has no dynamic tables", UserWarning, stacklevel=2)
        return
    wanted = _thresholds("set_score: table_score", table_score, {part.name for part in parts})
    chosen = [part for part in parts if part.name in wanted]
    for part in chosen:
        if "custom" not in part.config.policy.scores:
            raise ValueError(
                f"set_score: table {part.name!r} keeps no custom score: give it "
                "score_strategy=DynamicEmbScoreStrategy.CUSTOMIZED, or leave it out of table_score"
            )
    for part in chosen:
        part.group.scores.set_batch(part.table, wanted[part.name])


def incremental_dump(
    model: nn.Module,
    score_threshold: int | Thresholds,
    pg: dist.ProcessGroup | None = None,
) -> tuple[Rows, ScoresByTable] | None:
    """Return ids with a score of at least a threshold, and their rows; all ranks call it together.

    Arguments and result are those of DynamicEmb's function. It has two limits:

    * removed ids are not reported;
    * step and time scores are of the last lookup of an id, not of the last change of its row.

    :class:`torch_dynemb.delta_log.DeltaLog` publishes exactly the changed rows and removed ids.
    ``torch_dynemb.checkpoint.save(path, model, since=parent)`` writes them to a checkpoint.

    Args:
        model: with dynamic tables that keep a score, sharded or not.
        score_threshold: one for all tables; or by path of the collection, such as
            ``"model.sparse"``, and by table, then other tables are left out. It applies to the
            time or the step if a table keeps one, else to the score that decides which ids are
            evicted, and to decayed counts as of now.
        pg: of the ranks that share the model; default: all.

    Returns:
        Two dicts by path of the collection, then by table. The first has ids, int64 [n], ascending,
        and rows [n, dim] of all ranks, on the CPU. The second has the threshold for the next dump:
        the score that the next lookup gives, or the given threshold for frequency and custom
        scores. None, with a warning, if the model has no dynamic tables.

    Raises:
        TypeError: ``model`` is not a module, or a threshold is not an int.
        ValueError: a table keeps no scores, or ``score_threshold`` names unknown tables. All ranks
            raise.

    Example:
        >>> import torch, torch_dynemb as td
        >>> from torch_dynemb.compat.dynamicemb.incremental_dump import incremental_dump
        >>> policy = td.Policy(score="step")
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), policy=policy)
        >>> for ids in ([[1, 2]], [[2, 3]]):
        ...     bag(torch.tensor(ids)).sum().backward()
        ...     bag.optimizer.step()
        >>> rows, scores = incremental_dump(bag, 1)
        >>> rows["model"]["embedding"][0], scores
        (tensor([2, 3]), {'model': {'embedding': 2}})
    """
    parts = _parts_of("incremental_dump", model)
    ranks = ranks_of(pg)
    names = {name for of_rank in ranks.gather([part.name for part in parts]) for name in of_rank}
    if not names:
        warnings.warn(
            "incremental_dump: the model has no dynamic tables", UserWarning, stacklevel=2
        )
        return None

    def dumped() -> list[_Dumped]:
        thresholds = _thresholds("incremental_dump: score_threshold", score_threshold, names)
        end_steps(parts)
        return [_dump(part, thresholds[part.name]) for part in parts if part.name in thresholds]

    rows: Rows = {}
    scores: ScoresByTable = {}
    parts_of_ranks = [part for parts in ranks.gather(ranks.run(dumped)) for part in parts]
    for name in sorted({part.name for part in parts_of_ranks}):
        path, table = _place(name)
        of_table = [part for part in parts_of_ranks if part.name == name]
        rows.setdefault(path, {})[table] = _together(name, of_table)
        scores.setdefault(path, {})[table] = max(part.next_score for part in of_table)
    return rows, scores


def pop_evicted_keys(
    model: nn.Module,
    table_names: Mapping[str, Sequence[str]] | None = None,
    pg: dist.ProcessGroup | None = None,
) -> dict[str, dict[str, Tensor]]:
    """Take the ids that tables have evicted since the last call.

    It ends a training step that is still open. An id is among them also if it has come back.
    Removed and expired ids are not.

    Args:
        model: with sharded tables of ``EvictedItemMode.RETAIN_KEY``.
        table_names: tables by path of the collection, such as ``"model.sparse"``; others keep their
            ids. None: all.
        pg: ranks that put their ids together; all of them call it. None: the ids of this rank.

    Returns:
        Distinct ids by path of the collection, then by table: int64 [n], ascending, on the CPU.
        Tables without RETAIN_KEY are left out.

    Raises:
        TypeError: ``model`` is not a module, or ``table_names`` is not a dict of lists.
        ValueError: ``table_names`` has a table that records no ids, or that these ranks lack. No id
            has been taken then; with ``pg`` all ranks raise.
    """
    parts = _parts_of("pop_evicted_keys", model)
    found: dict[tuple[str, str], list[tuple[RecordedIds, str]]] = {}
    for part in parts:
        recorded = part.group.tables.evictions.callback
        if isinstance(recorded, RecordedIds) and part.config.name in recorded:
            found.setdefault(_place(part.name), []).append((recorded, part.config.name))
    ranks = Ranks(None, 0, 1) if pg is None else ranks_of(pg)
    known = {place for of_rank in ranks.gather(set(found)) for place in of_rank}

    def taken() -> dict[tuple[str, str], list[Tensor]]:
        chosen = _chosen_places(table_names, known)
        end_steps(parts)
        return {
            place: [recorded.take(name) for recorded, name in found[place]]
            for place in found
            if place in chosen
        }

    together: dict[tuple[str, str], list[Tensor]] = {}
    for of_rank in ranks.gather(ranks.run(taken)):
        for place, ids in of_rank.items():
            together.setdefault(place, []).extend(ids)
    result: dict[str, dict[str, Tensor]] = {}
    for (path, table), ids in sorted(together.items()):
        result.setdefault(path, {})[table] = torch.cat(ids).unique()
    return result


def _chosen_places(given: object, recorded: set[tuple[str, str]]) -> set[tuple[str, str]]:
    """Return the collections and tables that ``table_names`` of ``pop_evicted_keys`` names.

    Args:
        given: the argument.
        recorded: collections and tables that record evicted ids.
    """
    if given is None:
        return recorded
    if not isinstance(given, Mapping):
        raise TypeError(
            f"pop_evicted_keys: table_names is {described(given)}, expected a dict with a list of "
            "table names by path of the collection"
        )
    chosen: set[tuple[str, str]] = set()
    for path, tables in given.items():
        if isinstance(tables, str) or not isinstance(tables, Sequence):
            raise TypeError(
                f"pop_evicted_keys: table_names[{path!r}] is {described(tables)}, expected a list "
                "of table names"
            )
        chosen |= {(path, table) for table in tables}
    for path, table in sorted(chosen - recorded):
        raise ValueError(
            f"pop_evicted_keys: table_names names table {table!r} of {path!r}, but tables that "
            f"record evicted ids are {sorted(recorded)}: give others "
            "evicted_item_mode=EvictedItemMode.RETAIN_KEY"
        )
    return chosen


class _Dumped(NamedTuple):
    """Ids and rows of a part of a table, with the threshold of the next dump."""

    name: str
    first_column: int
    ids: Tensor
    rows: Tensor
    next_score: int


def _parts_of(call: str, model: object) -> list[TablePart]:
    if not isinstance(model, nn.Module):
        raise TypeError(f"{call}: model is {described(model)}, expected a torch.nn.Module")
    return parts_of(model)


def _place(name: str) -> tuple[str, str]:
    """Return DynamicEmb's path of a table's collection, and the table's name there."""
    path, _, table = name.rpartition(".")
    return (f"{_ROOT}.{path}" if path else _ROOT), table


def _thresholds(argument: str, given: int | Thresholds, names: set[str]) -> dict[str, int]:
    """Return numbers by table name.

    Args:
        argument: of a call, with which an error begins.
        given: one for all tables; or by collection and by table.
        names: of all tables.
    """
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, integer(argument, given, least=0))
    places = {_place(name): name for name in names}
    short: dict[tuple[str, str], list[str]] = {}
    for (path, table), name in places.items():
        short.setdefault((path.rpartition(".")[2], table), []).append(name)
    result = {}
    for collection, tables in given.items():
        if not isinstance(tables, Mapping):
            raise TypeError(
                f"{argument} of {collection!r} is {described(tables)}, expected a dict with a "
                "number by table"
            )
        for table, number in tables.items():
            place = collection, table
            found = [places[place]] if place in places else short.get(place, [])
            if len(found) != 1:
                raise ValueError(
                    f"{argument} names table {table!r} of {collection!r}, but the model has "
                    f"{sorted(places)}"
                )
            result[found[0]] = integer(f"{argument} of {found[0]!r}", number, least=0)
    return result


def _check_scored(call: str, part: TablePart) -> None:
    words = part.config.policy.scores
    if not words or words[0] == "none":
        raise ValueError(
            f"{call}: table {part.name!r} keeps no scores: give it a policy with a "
            "score, or publish changed rows with torch_dynemb.delta_log.DeltaLog, which needs none"
        )


def _dump(part: TablePart, threshold: int) -> _Dumped:
    _check_scored("incremental_dump", part)
    ids = [torch.empty(0, dtype=torch.int64, device="cpu")]
    rows = [torch.empty(0, part.config.embedding_dim, dtype=part.config.dtype, device="cpu")]
    for batch in part.group.export(part.table, since=threshold, score=_compared(part)):
        ids.append(batch.ids.cpu())
        rows.append(batch.rows.cpu())
    return _Dumped(
        part.name,
        part.first_column,
        torch.cat(ids),
        torch.cat(rows),
        _next_score(part, threshold),
    )


def _compared(part: TablePart) -> str:
    """Return the score of a table that thresholds are compared with."""
    scores = part.config.policy.scores
    return next((score for score in ("timestamp", "step") if score in scores), scores[0])


def _next_score(part: TablePart, threshold: int) -> int:
    clock, proposed = part.group.index.clock, part.group.clock.proposed
    score = _compared(part)
    if score == "step":
        return int(clock[Clock.STEP])
    if score == "timestamp":
        return max(int(clock[Clock.NOW]), 0 if proposed is None else int(proposed))
    return threshold


def _together(name: str, parts: list[_Dumped]) -> tuple[Tensor, Tensor]:
    """Merge the ids and columns of a table from all ranks."""
    found: list[tuple[Tensor, Tensor]] = []
    for first in sorted({part.first_column for part in parts}):
        chosen = [part for part in parts if part.first_column == first]
        ids = torch.cat([part.ids for part in chosen])
        order = ids.argsort()
        found.append((ids[order], torch.cat([part.rows for part in chosen])[order]))
    ids = found[0][0]
    if not all(torch.equal(ids, others) for others, _ in found):
        raise ValueError(
            f"incremental_dump: the column shards of table {name!r} have different scores, so "
            "their ids differ: shard it by rows"
        )
    return ids, torch.cat([rows for _, rows in found], 1)


__all__ = ["get_score", "incremental_dump", "pop_evicted_keys", "set_score"]
