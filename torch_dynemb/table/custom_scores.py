"""Custom scores of training lookups: those that are given, or the score of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import tensor
from torch_dynemb.ops.columns import CLOCK_HEAD, Combine, PolicyColumn
from torch_dynemb.policy.custom import COMBINES
from torch_dynemb.table.tables import Tables


def check_custom_scores(
    tables: Tables, feature_tables: Sequence[int], ids: Tensor, scores: Tensor | None
) -> None:
    """Raise before a lookup changes anything.

    Args:
        tables: of a group.
        feature_tables: of the lookup.
        ids: int64 [N].
        scores: as given; None: the score of the batch.

    Raises:
        TypeError: scores have a dtype that a table does not keep.
        ValueError: they are missing, not kept, of another shape or device, or, on the CPU, not
            finite or below 0 for a decayed sum.
    """
    policies = [tables.config.tables[t].policy for t in feature_tables]
    if scores is None:
        for t, policy in zip(feature_tables, policies, strict=True):
            if policy.custom is not None and t not in tables.host.batch_scored:
                raise ValueError(
                    f"table {tables.config.names[t]!r} keeps custom scores, but none have been "
                    "given: call group.scores.set_batch, or give scores with the lookup"
                )
        return
    if all(policy.custom is None for policy in policies):
        raise ValueError(
            "scores are given, but no table keeps custom scores: create one with "
            "policy=Policy(score='custom')"
        )
    floats = tensor("find_or_insert: scores", scores).is_floating_point()
    undecayed = any(policy.combine not in (None, "decayed_sum") for policy in policies)
    if scores.dtype != torch.int64 and (not floats or undecayed):
        raise TypeError(
            f"find_or_insert: scores has dtype {scores.dtype}, expected int64"
            + ("" if undecayed else ", or floats for decayed sums")
        )
    if scores.shape != ids.shape:
        raise ValueError(
            f"find_or_insert: scores has shape {tuple(scores.shape)}, expected that of the "
            f"ids, {tuple(ids.shape)}"
        )
    if scores.device != ids.device:
        raise ValueError(
            f"find_or_insert: scores is on {scores.device}, but the ids are on {ids.device}"
        )
    if undecayed or scores.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = ~((scores >= 0) & (scores.isfinite()))
    if bool(wrong.any()):
        raise ValueError(
            f"find_or_insert: scores has {scores[wrong][0].item()}, expected numbers from 0 on: "
            "they are added to a decayed sum"
        )


def add_custom_scores(
    tables: Tables,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    feature_policies: Sequence[int],
    scores: Tensor | None,
) -> None:
    """Combine custom scores of the ids of a lookup with those that they have.

    Args:
        tables: of a group.
        ids, offsets, feature_tables: of the lookup.
        feature_policies: rows of ``policy``.
        scores: as :func:`check_custom_scores` has checked them.
    """
    layout = tables.config.layout
    policies = [tables.config.tables[t].policy for t in feature_tables]
    if all(policy.combine in (None, "last") for policy in policies):
        if scores is not None:  # the score of the batch is set by the insertion itself
            word = layout.word("custom")
            ops.set_scores_(tables.index, ids, offsets, feature_tables, scores, word=word)
        return
    combines = [
        Combine.NONE if policy.custom is None else COMBINES[policy.custom.combine]
        for policy in policies
    ]
    if scores is None:
        brings = [layout.rows[p][PolicyColumn.UPDATES_SCORES] != 0 for p in feature_policies]
        combines = [
            combine if brought and combine != Combine.LAST else Combine.NONE
            for combine, brought in zip(combines, brings, strict=True)
        ]
        batch = [CLOCK_HEAD + t for t in feature_tables]
        scores = tables.index.clock[by_feature(batch, ids, offsets)]
    for name in ("custom", "decayed"):
        decays = name == "decayed"
        chosen = [
            combine if (combine == Combine.DECAYED_SUM) == decays else Combine.NONE
            for combine in combines
        ]
        if all(combine == Combine.NONE for combine in chosen):
            continue
        ops.combine_scores_(
            tables.index,
            ids,
            offsets,
            feature_tables,
            scores.double().view(torch.int64) if decays else scores,
            combines=chosen,
            half_lives=[
                policy.half_life_ticks if combine == Combine.DECAYED_SUM else 0
                for policy, combine in zip(policies, chosen, strict=True)
            ],
            word=layout.word(name),
        )


def scores_of_occurrences(
    tables: Tables,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    scores: Tensor,
    firsts: Tensor,
) -> Tensor:
    """Have only the first occurrence of an id bring a score that is added.

    Args:
        tables: of a group.
        ids, offsets, feature_tables: of the lookup, with ids as often as they occur.
        scores: [N], of each occurrence: the score of all occurrences of its id together.
        firsts: int64 [n], places of first occurrences.
    """
    combines = [tables.config.tables[t].policy.combine for t in feature_tables]
    adds = [int(combine in ("sum", "decayed_sum")) for combine in combines]
    if not any(adds):
        return scores
    brings = by_feature(adds, ids, offsets) == 0
    brings[firsts] = True
    return torch.where(brings, scores, 0)


def by_feature(numbers: Sequence[int], ids: Tensor, offsets: Tensor) -> Tensor:
    """Return for each id the number of its feature, int64 [N].

    Args:
        numbers: of the features.
        ids, offsets: of a lookup.
    """
    if len(set(numbers)) == 1:
        return torch.full_like(ids, numbers[0])
    batch = (offsets.shape[0] - 1) // len(numbers)
    ends = offsets[batch::batch].contiguous()
    places = torch.arange(ids.shape[0], device=ids.device)
    feature = torch.searchsorted(ends, places, right=True)
    return torch.tensor(numbers, device=ids.device)[feature]


__all__ = [
    "add_custom_scores",
    "by_feature",
    "check_custom_scores",
    "scores_of_occurrences",
]
