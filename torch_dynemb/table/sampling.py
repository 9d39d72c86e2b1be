"""Ids drawn from a table: uniformly, or in proportion to a power of their counts."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, integer, number
from torch_dynemb.ops.columns import Table
from torch_dynemb.policy.half_life import counts_of
from torch_dynemb.table.host_state import ListedCounts
from torch_dynemb.table.lookup import find
from torch_dynemb.table.scores import decay_time
from torch_dynemb.table.tables import Tables, exported, one_table

SampledBy = Literal["uniform", "frequency"]
COUNTS = frozenset(("frequency", "decayed"))  # scores that count occurrences
REFRESH_STEPS = 100  # until counted ids are listed again
_LISTED_AT_ONCE = 1 << 20  # ids
_MOST_DRAWS = 16  # before ids are listed again: most of those in the list have been removed


class SampledIds(NamedTuple):
    """Result of :meth:`torch_dynemb.TableGroup.sample_ids`.

    Attributes:
        ids: int64 [n], ids of the table.
        log_probabilities: float32 [n], logarithm of the probability of each in one draw.
    """

    ids: Tensor
    log_probabilities: Tensor


def sample(
    tables: Tables,
    table: int,
    n: int,
    *,
    by: SampledBy = "uniform",
    power: float = 1.0,
    generator: torch.Generator | None = None,
) -> SampledIds:
    """Draw ids as :meth:`torch_dynemb.TableGroup.sample_ids` does."""
    n = integer("sample_ids: n", n, least=0)
    if by not in ("uniform", "frequency"):
        raise ValueError(f"sample_ids: by is {by!r}, expected 'uniform' or 'frequency'")
    if by == "uniform":
        return draw_uniform(tables, table, n, generator)
    power = checked_power("sample_ids: power", power)
    drawn = draw_by_count(tables, table, n, power, generator)
    for _ in range(_MOST_DRAWS):
        gone = (find(tables, *one_table(tables, table, drawn.ids)).handles < 0).nonzero()[:, 0]
        if gone.numel() == 0:
            return drawn
        again = draw_by_count(tables, table, gone.numel(), power, generator)
        drawn.ids[gone] = again.ids
        drawn.log_probabilities[gone] = again.log_probabilities
    list_counted(tables, table, power)
    return draw_by_count(tables, table, n, power, generator)


def draw_uniform(
    tables: Tables, table: int, n: int, generator: torch.Generator | None = None
) -> SampledIds:
    """Draw ``n`` ids, each with the same probability; waits for no device.

    Raises:
        RuntimeError: the table is empty; on a GPU, a later call raises it.
    """
    seed = torch.randint(0, 1 << 62, (1,), device=tables.device, generator=generator)
    ids = ops.sample_ids(tables.index, seed, table=table, samples=n)
    size = tables.index.tables[table, Table.SIZE]
    return SampledIds(ids, -size.to(torch.float32).log().expand(n))


def draw_by_count(
    tables: Tables, table: int, n: int, power: float, generator: torch.Generator | None = None
) -> SampledIds:
    """Draw ``n`` of the listed ids in proportion to ``count ** power``.

    Some may have been removed since they were listed.

    Raises:
        RuntimeError: no id with a count is listed.
        ValueError: the table keeps no counts.
    """
    counted = tables.host.counted.get((table, power))
    if counted is None:
        counted = list_counted(tables, table, power)
    if counted.ids.shape[0] == 0:
        counted = list_counted(tables, table, power)
        if counted.ids.shape[0] == 0:
            raise RuntimeError(
                f"sample_ids: table {tables.config.names[table]!r} has no id with a count, but "
                "samples need one: train it first"
            )
    unit = torch.rand(n, dtype=torch.float64, device=tables.device, generator=generator)
    place = torch.searchsorted(counted.sums, unit * counted.sums[-1:], right=True)
    place = place.clamp(max=counted.ids.shape[0] - 1)
    before = torch.where(place > 0, counted.sums[place - 1], 0.0)
    share = (counted.sums[place] - before) / counted.sums[-1:]
    return SampledIds(counted.ids[place], share.log().to(torch.float32))


def count_score(tables: Tables, table: int, call: str) -> str:
    """Return the score that counts occurrences: ``"frequency"``, or else ``"decayed"``.

    Raises:
        ValueError: the table keeps neither.
    """
    config = tables.config.tables[table]
    for score in ("frequency", "decayed"):
        if score in config.policy.scores:
            return score
    raise ValueError(
        f"{call}: table {config.name!r} keeps no counts: create it with "
        "policy=Policy(score='frequency')"
    )


def counts_of_ids(tables: Tables, table: int, ids: Tensor, call: str) -> Tensor:
    """Return how often ids of a table have occurred, float64 [n]; 0 for other ids."""
    score = count_score(tables, table, call)
    word = tables.config.layout.word(score)
    flat, offsets, features = one_table(tables, table, ids, call)
    stored = ops.get_scores(tables.index, flat, offsets, features, word=word)
    if score == "frequency":
        return stored.scores.double()
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{call}: the table counts by score 'decayed', but compiled code reads frequencies "
            "only: create it with policy=Policy(score=('frequency', 'decayed'), ...)"
        )
    return torch.where(stored.found, counts_of(stored.scores, decay_time(tables, table)), 0.0)


def list_counted(tables: Tables, table: int, power: float) -> ListedCounts:
    """List the ids of a table with the sums of their ``count ** power``, and keep the list.

    ``step()`` of the group lists them again. A power of 0 sums the counts and lists no ids, for
    :func:`total_count`.

    Raises:
        ValueError: the table keeps no counts.
        RuntimeError: called in compiled code.
    """
    score = count_score(tables, table, "sample_ids")
    if torch.compiler.is_compiling():
        raise RuntimeError(
            "sample_ids: ids have not been counted yet, which compiled code cannot do: run one "
            "training step without torch.compile first"
        )
    word = tables.config.layout.word(score)
    now = decay_time(tables, table) if score == "decayed" else 0.0
    lists, weights = [], []
    total = torch.zeros(1, dtype=torch.float64, device=tables.device)
    for batch in exported(tables, table, _LISTED_AT_ONCE):
        stored = batch.scores[:, word]
        counts = stored.double() if score == "frequency" else counts_of(stored, now)
        if power == 0:
            total += counts.sum()
            continue
        known = counts > 0
        lists.append(batch.ids[known])
        weights.append(counts[known] ** power)
    if power != 0:
        ids = torch.cat(lists) if lists else tables.index.tables.new_empty(0)
        total = torch.cat(weights).cumsum(0) if weights else total[:0]
    else:
        ids = tables.index.tables.new_empty(0)
        kept = tables.host.counted.get((table, power))
        if kept is not None:  # compiled code keeps the tensor
            total = kept.sums.copy_(total)
    counted = ListedCounts(ids, total, tables.host.steps)
    tables.host.counted[table, power] = counted
    return counted


def total_count(tables: Tables, table: int) -> Tensor:
    """Return the sum of the counts of a table when they were last listed, float64 [1]."""
    counted = tables.host.counted.get((table, 0.0))
    return (list_counted(tables, table, 0.0) if counted is None else counted).sums


def refresh_counted(tables: Tables) -> None:
    """List counted ids again, at the end of a step, if their lists are old.

    Lists of the first steps are renewed whenever the number of steps has doubled.
    """
    for (table, power), counted in list(tables.host.counted.items()):
        age = tables.host.steps - counted.step
        if not 0 <= age < min(REFRESH_STEPS, max(1, counted.step)):
            list_counted(tables, table, power)


def list_again(tables: Tables) -> None:
    """List counted ids now, so that training goes on as one that resumes from the state of now."""
    for table, power in list(tables.host.counted):
        list_counted(tables, table, power)


def checked_power(owner: str, power: object) -> float:
    """Return ``power``, a positive number.

    Raises:
        TypeError: it is not a number.
        ValueError: it is not positive and finite.
    """
    given = number(owner, power)
    if not 0 < given < math.inf:
        raise ValueError(f"{owner} is {described(power)}, expected more than 0")
    return given


__all__ = [
    "COUNTS",
    "SampledBy",
    "SampledIds",
    "checked_power",
    "count_score",
    "counts_of_ids",
    "draw_by_count",
    "draw_uniform",
    "list_again",
    "list_counted",
    "refresh_counted",
    "sample",
    "total_count",
]
