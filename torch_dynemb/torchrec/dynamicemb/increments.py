"""DynamicEmb's incremental dump: ids and rows with a score of at least a threshold."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.checkpoint.parts import TablePart, end_steps, parts_of
from torch_dynemb.checkpoint.together import ranks_of
from torch_dynemb.ops.columns import Clock

Thresholds = Mapping[str, Mapping[str, int]]
Rows = dict[str, dict[str, tuple[Tensor, Tensor]]]


def incremental_dump(
    model: nn.Module,
    score_threshold: int | Thresholds,
    pg: dist.ProcessGroup | None = None,
) -> tuple[Rows, dict[str, dict[str, int]]] | None:
    """Return ids with a score of at least a threshold, and their rows; all ranks call it together.

    Arguments and result are those of DynamicEmb's function. It has two limits:

    * removed ids are not reported;
    * step and time scores are of the last lookup of an id, not of the last change of its row.

    :class:`torch_dynemb.checkpoint.DeltaLog` publishes exactly the changed rows and removed ids.
    ``torch_dynemb.checkpoint.save(path, model, since=parent)`` writes them to a checkpoint.

    Args:
        model: with dynamic tables that keep a score, sharded or not.
        score_threshold: one for all tables; or by path of the collection in the model and by table,
            then other tables are left out. It applies to the score that decides which ids are
            evicted.
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
        >>> from torch_dynemb.compat.dynamicemb import incremental_dump
        >>> policy = td.Policy(score="step")
        >>> bag = td.DynamicEmbeddingBag(4, mode="sum", optimizer=td.SGD(lr=0.1), policy=policy)
        >>> for ids in ([[1, 2]], [[2, 3]]):
        ...     bag(torch.tensor(ids)).sum().backward()
        ...     bag.optimizer.step()
        >>> rows, scores = incremental_dump(bag, 1)
        >>> rows[""]["embedding"][0], scores
        (tensor([2, 3]), {'': {'embedding': 2}})
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"incremental_dump: model is {described(model)}, expected a torch.nn.Module"
        )
    ranks = ranks_of(pg)
    parts = parts_of(model)
    names = {name for of_rank in ranks.gather([part.name for part in parts]) for name in of_rank}
    if not names:
        warnings.warn(
            "incremental_dump: the model has no dynamic tables", UserWarning, stacklevel=2
        )
        return None

    def dumped() -> list[_Dumped]:
        thresholds = _thresholds(score_threshold, names)
        end_steps(parts)
        return [_dump(part, thresholds[part.name]) for part in parts if part.name in thresholds]

    rows: Rows = {}
    scores: dict[str, dict[str, int]] = {}
    told = [of for of_rank in ranks.gather(ranks.run(dumped)) for of in of_rank]
    for name in sorted({name for name, *_ in told}):
        path, _, table = name.rpartition(".")
        of_table = [of for of in told if of[0] == name]
        rows.setdefault(path, {})[table] = _together(name, of_table)
        scores.setdefault(path, {})[table] = max(score for *_, score in of_table)
    return rows, scores


# table name, first column, ids, rows, next score
_Dumped = tuple[str, int, Tensor, Tensor, int]


def _thresholds(given: int | Thresholds, names: set[str]) -> dict[str, int]:
    """Return thresholds by table name."""
    if not isinstance(given, Mapping):
        most = integer("incremental_dump: score_threshold", given, least=0)
        return dict.fromkeys(names, most)
    result = {}
    for path, tables in given.items():
        for table, threshold in tables.items():
            name = f"{path}.{table}" if path else table
            if name not in names:
                raise ValueError(
                    f"incremental_dump: score_threshold names table {name!r}, but the model has "
                    f"{sorted(names)}"
                )
            what = f"incremental_dump: score_threshold of {name!r}"
            result[name] = integer(what, threshold, least=0)
    return result


def _dump(part: TablePart, threshold: int) -> _Dumped:
    words = part.config.policy.scores
    if not words or words[0] == "none":
        raise ValueError(
            f"incremental_dump: table {part.name!r} keeps no scores: give it a policy with a "
            "score, or publish changed rows with torch_dynemb.checkpoint.DeltaLog, which needs none"
        )
    ids = [torch.empty(0, dtype=torch.int64)]
    rows = [torch.empty(0, part.config.embedding_dim, dtype=part.config.dtype)]
    for batch in part.group.export(part.table, since=threshold):
        ids.append(batch.ids.cpu())
        rows.append(batch.rows.cpu())
    return (
        part.name,
        part.first_column,
        torch.cat(ids),
        torch.cat(rows),
        _next_score(part, threshold),
    )


def _next_score(part: TablePart, threshold: int) -> int:
    clock, proposed = part.group.index.clock, part.group.clock.proposed
    score = part.config.policy.scores[0]
    if score == "step":
        return int(clock[Clock.STEP])
    if score == "timestamp":
        return max(int(clock[Clock.NOW]), 0 if proposed is None else int(proposed))
    return threshold


def _together(name: str, told: list[_Dumped]) -> tuple[Tensor, Tensor]:
    """Merge the ids and columns of a table from all ranks."""
    found: list[tuple[Tensor, Tensor]] = []
    for first in sorted({first for _, first, *_ in told}):
        own = [of for of in told if of[1] == first]
        ids = torch.cat([of[2] for of in own])
        order = ids.argsort()
        found.append((ids[order], torch.cat([of[3] for of in own])[order]))
    ids = found[0][0]
    if not all(torch.equal(ids, others) for others, _ in found):
        raise ValueError(
            f"incremental_dump: the column shards of table {name!r} have different scores, so "
            "their ids differ: shard it by rows"
        )
    return ids, torch.cat([rows for _, rows in found], 1)


__all__ = ["incremental_dump"]
