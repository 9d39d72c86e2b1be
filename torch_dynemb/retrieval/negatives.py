"""Sources of negatives: the ids that a query is scored against beside its positive."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.ops.columns import Table
from torch_dynemb.retrieval.items import Items
from torch_dynemb.table.sampling import (
    COUNTS,
    checked_power,
    counts_of_ids,
    draw_by_count,
    draw_uniform,
    list_counted,
    total_count,
)


@dataclass(frozen=True)
class InBatchNegatives:
    """Negatives that are the positives of the other queries of a batch.

    They cost no lookup, and popular ids are among them most often.
    """


@dataclass(frozen=True)
class UniformNegatives:
    """Negatives drawn from the ids of the table, each with the same probability.

    Args:
        n: how many, shared by all queries of a batch.

    Raises:
        TypeError: ``n`` is not an int.
        ValueError: ``n`` is less than 1.
    """

    n: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", integer("UniformNegatives: n", self.n, least=1))


@dataclass(frozen=True)
class FrequencyNegatives:
    """Negatives drawn in proportion to a power of their counts.

    The table keeps counts with ``policy=td.Policy(score="frequency")`` or ``"decayed"``. Its ids
    are listed for it, 16 bytes an id; see :meth:`torch_dynemb.TableGroup.sample_ids`.

    Args:
        n: how many, shared by all queries of a batch.
        power: of the counts, more than 0; 0.75 is that of word2vec (Mikolov et al., 2013).

    Raises:
        TypeError: ``n`` is not an int, or ``power`` not a number.
        ValueError: one is out of range.
    """

    n: int
    power: float = 0.75

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", integer("FrequencyNegatives: n", self.n, least=1))
        power = checked_power("FrequencyNegatives: power", self.power)
        object.__setattr__(self, "power", power)


Negatives = InBatchNegatives | UniformNegatives | FrequencyNegatives
_LEAST_COUNT = 1e-9  # of an id without one: decayed to nothing, or not in the table
_KINDS = (InBatchNegatives, UniformNegatives, FrequencyNegatives)


def sources_of(owner: str, negatives: object) -> tuple[Negatives, ...]:
    """Return the sources of negatives, each kind at most once.

    Raises:
        TypeError: ``negatives`` is neither a source nor a tuple of them.
        ValueError: it is empty, or has a kind twice.
    """
    given = negatives if isinstance(negatives, tuple) else (negatives,)
    for source in given:
        if not isinstance(source, _KINDS):
            raise TypeError(
                f"{owner}: negatives is {described(source)}, expected one of "
                f"{[kind.__name__ for kind in _KINDS]}, or a tuple of them"
            )
    if len({type(source) for source in given}) != len(given) or not given:
        raise ValueError(
            f"{owner}: negatives has {len(given)} sources, expected one or more of different kinds"
        )
    return given


class Drawn(NamedTuple):
    """Ids drawn from one source.

    Attributes:
        source: of the ids.
        ids: int64 [m].
        log_probabilities: float32 [m], in one draw.
    """

    source: UniformNegatives | FrequencyNegatives
    ids: Tensor
    log_probabilities: Tensor


def list_counts(items: Items, sources: tuple[Negatives, ...], *, corrects: bool) -> None:
    """List counts that no step has listed, of a loaded table, before the batch adds to them."""
    if torch.compiler.is_compiling():
        return
    powers = [source.power for source in sources if isinstance(source, FrequencyNegatives)]
    if corrects and any(isinstance(source, InBatchNegatives) for source in sources):
        powers.append(0.0)  # their sum
    tables, table = items.tables, items.table
    missing = [power for power in powers if (table, power) not in tables.host.counted]
    if missing and int(tables.index.tables[table, Table.SIZE]) > 0:
        for power in missing:
            list_counted(tables, table, power)


def drawn_from(items: Items, sources: tuple[Negatives, ...]) -> list[Drawn]:
    """Draw from all sources of a table that are not the batch itself."""
    drawn = []
    for source in sources:
        if isinstance(source, UniformNegatives):
            sampled = draw_uniform(items.tables, items.table, source.n)
            drawn.append(Drawn(source, *sampled))
        elif isinstance(source, FrequencyNegatives):
            sampled = draw_by_count(items.tables, items.table, source.n, source.power)
            drawn.append(Drawn(source, *sampled))
    return drawn


def check_counted(
    owner: str, items: Items, sources: tuple[Negatives, ...], *, corrects: bool
) -> None:
    """Raise ValueError if a source needs counts that the table does not keep."""
    draws = any(isinstance(source, FrequencyNegatives) for source in sources)
    in_batch = any(isinstance(source, InBatchNegatives) for source in sources)
    config = items.tables.config.tables[items.table]
    if COUNTS.isdisjoint(config.policy.scores) and (draws or (corrects and in_batch)):
        remedy = "take UniformNegatives" if draws else "give correction=None"
        raise ValueError(
            f"{owner}: negatives is {sources}, but table {config.name!r} keeps no counts: "
            f"create it with policy=Policy(score='frequency'), or {remedy}"
        )


def log_expected(
    items: Items,
    sources: tuple[Negatives, ...],
    drawn: list[Drawn],
    ids: Tensor,
    positives: Tensor,
) -> Tensor:
    """Return how often each id is expected among the negatives of a query, as a logarithm.

    Args:
        items: the table.
        sources: of the negatives.
        drawn: from all sources but the batch.
        ids: int64 [n + m], of the positives, then those drawn.
        positives: float32 [], how many queries have a positive that counts.

    Returns:
        float32 [n + m], or [1] if all are equal.
    """
    size = items.tables.index.tables[items.table, Table.SIZE].double()
    if all(isinstance(source, UniformNegatives) for source in sources):
        (source,) = (part.source for part in drawn)
        return (source.n / size).log().reshape(1).to(torch.float32)
    counts = counts_of_ids(items.tables, items.table, ids, "SampledSoftmaxLoss")
    counts = counts.clamp(min=_LEAST_COUNT)
    expected = torch.zeros_like(counts)
    if any(isinstance(source, InBatchNegatives) for source in sources):
        total = torch.maximum(total_count(items.tables, items.table), counts.max())
        expected = expected + (positives - 1) * (counts / total)
    begin = ids.shape[0] - sum(part.ids.shape[0] for part in drawn)
    for part in drawn:
        if isinstance(part.source, UniformNegatives):
            expected = expected + part.source.n / size
        else:
            shares = _shares(items, part, counts, begin)
            expected = expected + part.source.n * shares
        begin += part.ids.shape[0]
    return expected.log().to(torch.float32)


def _shares(items: Items, part: Drawn, counts: Tensor, begin: int) -> Tensor:
    """Return the probability of each id in one draw by frequency, float64 [n + m].

    It is exact for the ids of the draw, which begin at ``begin``, and as of now for others.
    """
    assert isinstance(part.source, FrequencyNegatives)
    sums = items.tables.host.counted[items.table, part.source.power].sums
    weights = counts**part.source.power
    shares = weights / torch.maximum(sums[-1:], weights.max())
    end = begin + part.ids.shape[0]
    return torch.cat([shares[:begin], part.log_probabilities.double().exp(), shares[end:]])


__all__ = [
    "Drawn",
    "FrequencyNegatives",
    "InBatchNegatives",
    "Negatives",
    "UniformNegatives",
    "check_counted",
    "drawn_from",
    "list_counts",
    "log_expected",
    "sources_of",
]
