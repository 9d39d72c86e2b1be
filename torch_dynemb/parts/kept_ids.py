"""Ids of tables that a rule keeps, over all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.distributed.together import Ranks
from torch_dynemb.parts.table_parts import TablePart
from torch_dynemb.policy.half_life import counts_of
from torch_dynemb.policy.keep import AtLeast, Keep, Rule, Top
from torch_dynemb.table.expiry import Expiry
from torch_dynemb.table.scores import decay_time, stored_score_word
from torch_dynemb.table.tables import exported

_IDS_AT_ONCE = 1 << 20
_LEAST, _MOST = -(1 << 63), (1 << 63) - 1


class ScoredPart(NamedTuple):
    """Unexpired ids of a part of a table with the scores that a rule asks for.

    Attributes:
        rule: the rule; None: all ids are kept.
        ids: int64 [n], ascending.
        scores: int64 [n], as the table stores them.
        now: half-lives since time 0, for decayed counts.
        counts_ids: whether the part counts among those of all ranks; False: another part of the
            table has the same ids.
    """

    rule: Rule | None
    ids: Tensor
    scores: Tensor
    now: float
    counts_ids: bool

    def at_least(self, least: float) -> Tensor:
        """Return the ids with a score of at least a value, int64 [m].

        Args:
            least: the value; of decayed counts a count of the present time.
        """
        decayed = self.rule is not None and self.rule.by == "decayed"
        scores = counts_of(self.scores, self.now) if decayed else self.scores
        return self.ids[scores >= least]


def rules_of(owner: str, keep: Keep, parts: Sequence[TablePart]) -> list[Rule | None]:
    """Return the rule of each part.

    Args:
        owner: prefix of errors.
        keep: rules that were checked.
        parts: parts of a model on this rank.

    Raises:
        ValueError: a table does not keep the score of its rule.
    """
    rules = [keep.get(part.name) if isinstance(keep, Mapping) else keep for part in parts]
    for part, rule in zip(parts, rules, strict=True):
        if rule is not None:
            stored_score_word(owner, part.group.tables, part.table, rule.by)
    return rules


def check_names(owner: str, argument: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError if an argument names tables that a model lacks.

    Args:
        owner, argument: prefix of the error.
        names: names in the argument.
        known: names of the tables on all ranks.
    """
    unknown = sorted(set(names) - set(known))
    if unknown:
        raise ValueError(
            f"{owner}: {argument} names tables {unknown}, but the model has {sorted(set(known))}"
        )


def scored_part(owner: str, part: TablePart, rule: Rule | None) -> ScoredPart:
    """Copy the unexpired ids of a part, with the scores for a rule. Scans the index.

    Args:
        owner: prefix of errors.
        part: part of a model, on this rank.
        rule: its rule.
    """
    tables, table = part.group.tables, part.table
    word = None if rule is None else stored_score_word(owner, tables, table, rule.by)
    expiry = Expiry(tables, table)
    ids = [torch.empty(0, dtype=torch.int64, device=tables.device)]
    scores = [ids[0]]
    for batch in exported(tables, table, _IDS_AT_ONCE):
        there = expiry.unexpired(batch)
        ids.append(there.ids.clone())
        scores.append(there.ids if word is None else there.scores[:, word].clone())
    all_ids, order = torch.cat(ids).sort()
    now = decay_time(tables, table) if rule is not None and rule.by == "decayed" else 0.0
    return ScoredPart(rule, all_ids, torch.cat(scores)[order], now, part.first_column == 0)


def kept_ids(parts: Sequence[ScoredPart], names: Sequence[str], ranks: Ranks) -> list[Tensor]:
    """Return the ids that rules keep. All ranks call it.

    Args:
        parts: parts of a model on this rank.
        names: names of their tables.
        ranks: ranks that share the tables.

    Returns:
        int64 [m] of each part, ascending.
    """
    best = _best_of_all(parts, names, ranks)
    result = []
    for part, name in zip(parts, names, strict=True):
        if part.rule is None:
            result.append(part.ids)
        elif isinstance(part.rule, AtLeast):
            result.append(part.at_least(part.rule.score))
        else:
            score, last_id = best[name]
            tied = (part.scores == score) & (part.ids <= last_id)
            result.append(part.ids[(part.scores > score) | tied])
    return result


def _best_of_all(
    parts: Sequence[ScoredPart], names: Sequence[str], ranks: Ranks
) -> dict[str, tuple[int, int]]:
    """Return the score and id of the last of the best ids, by table.

    Two bisections, of the score and then of the ids with this score. Each of their steps exchanges
    a number for each table, whatever the sizes of the tables are.
    """
    own: dict[str, list[ScoredPart]] = {}
    counts: dict[str, int] = {}
    for part, name in zip(parts, names, strict=True):
        if isinstance(part.rule, Top):
            counts[name] = part.rule.count
            own.setdefault(name, []).extend([part] if part.counts_ids else [])
    for of_rank in ranks.gather(counts):
        counts |= of_rank
    if not counts:
        return {}
    sorted_scores = {
        name: torch.cat([part.scores for part in of]).sort().values
        for name, of in own.items()
        if of
    }

    def with_at_least(scores: Mapping[str, int]) -> dict[str, int]:
        here = {
            name: of.numel() - int(torch.searchsorted(of, scores[name]))
            for name, of in sorted_scores.items()
        }
        return _summed(ranks.gather(here), counts)

    least = _bisected(with_at_least, counts)  # the highest score that enough ids reach
    above = with_at_least({name: min(least[name] + 1, _MOST) for name in counts})
    tied = {
        name: torch.cat([part.ids[part.scores == least[name]] for part in of]).sort().values
        for name, of in own.items()
        if of
    }
    needed = {name: counts[name] - (0 if least[name] == _MOST else above[name]) for name in counts}

    def with_at_most(negated: Mapping[str, int]) -> dict[str, int]:
        here = {
            name: int(torch.searchsorted(of, -negated[name] - 1, right=True))
            for name, of in tied.items()
        }
        return _summed(ranks.gather(here), counts)

    # negated, so that both searches ask for the highest value that enough ids reach
    negated = _bisected(with_at_most, needed)
    return {name: (least[name], -negated[name] - 1) for name in counts}


def _summed(of_ranks: Sequence[Mapping[str, int]], names: Mapping[str, int]) -> dict[str, int]:
    return {name: sum(of_rank.get(name, 0) for of_rank in of_ranks) for name in names}


def _bisected(
    reaching: Callable[[Mapping[str, int]], Mapping[str, int]], counts: Mapping[str, int]
) -> dict[str, int]:
    """Return by table the highest int64 that so many ids reach; the least one if too few do."""
    low, high = dict.fromkeys(counts, _LEAST), dict.fromkeys(counts, _MOST)
    while any(low[name] < high[name] for name in counts):
        middle = {name: low[name] + (high[name] - low[name] + 1) // 2 for name in counts}
        found = reaching(middle)
        for name, count in counts.items():
            if found[name] >= count:
                low[name] = middle[name]
            else:
                high[name] = middle[name] - 1
    return low


__all__ = ["ScoredPart", "check_names", "kept_ids", "rules_of", "scored_part"]
