"""Bytes and work of a training step on each rank, for tables in given places.

Tables are those of an EmbeddingBagCollection of TorchRec, one a column, with FP32 outputs. Lengths
are int32; those of distinct ids are int64. Weights, scores and times of lookups are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from torch_dynemb.plan.ranks.demand import ColumnDemand
from torch_dynemb.plan.ranks.layouts import Cluster, PlacedColumns
from torch_dynemb.plan.ranks.links import Exchange, to_owners
from torch_dynemb.plan.ranks.op_costs import Work

_ID_BYTES, _LENGTH_BYTES, _DISTINCT_LENGTH_BYTES, _OUTPUT_BYTES = 8, 4, 8, 4
_SPLITS_BYTES = 5 * 8  # to each rank: dtypes, numbers of lengths, ids, lines and weights


class ModelledStep(NamedTuple):
    """A training step.

    Attributes:
        exchanges: collectives, in their order.
        ids: float64 [ranks], ids that each rank is expected to receive, its own included.
        variances: float64 [ranks], of these.
        rows: float64 [ranks], ids that each rank has.
        rows_variance: float64 [ranks], of these.
        work: of each rank.
    """

    exchanges: list[Exchange]
    ids: Tensor
    variances: Tensor
    rows: Tensor
    rows_variance: Tensor
    work: Work


def traffic_of(
    pieces: Sequence[PlacedColumns],
    columns: Sequence[ColumnDemand],
    cluster: Cluster,
    *,
    batch: int,
    row_bytes: int,
    dedup: bool,
) -> ModelledStep:
    """Return the bytes and the work of a step.

    Args:
        pieces: of the tables, one table for each column.
        columns: their ids.
        cluster: the ranks.
        batch: lines of all ranks.
        row_bytes: of the optimizer state and of the weights of a whole row.
        dedup: whether every rank sends each of its ids once.
    """
    ranks, own_batch = cluster.ranks, batch / cluster.ranks
    zeros = torch.zeros(6, ranks, dtype=torch.float64, device="cpu")
    ids, variances, rows, rows_variance, lengths, id_columns = zeros
    outputs, shared, updated = torch.zeros(3, ranks, dtype=torch.float64, device="cpu")
    dim = [0] * len(columns)
    sent_ids = 0.0
    for piece in pieces:
        column, on_ranks = columns[piece.table], slice(piece.ranks.start, piece.ranks.stop)
        parts = len(piece.ranks)
        means, chance = column.loads(parts, batch, ranks if dedup else None)
        ids[on_ranks] += means
        variances[on_ranks] += chance
        id_columns[on_ranks] += piece.width * means
        rows[on_ranks] += column.total / parts
        rows_variance[on_ranks] += column.total / parts * (1 - 1 / parts)
        lengths[on_ranks] += 1
        (outputs if parts == 1 else shared)[on_ranks] += piece.width
        dim[piece.table] += piece.width
        updated[on_ranks] += column.distinct(batch) / parts * piece.width
        sent_ids += own_batch * column.ids_per_line
    length_bytes = _DISTINCT_LENGTH_BYTES if dedup else _LENGTH_BYTES * own_batch
    local = cluster.local
    one = torch.ones(ranks, dtype=torch.float64, device="cpu")
    exchanges = [
        to_owners("splits", _SPLITS_BYTES * one, local),
        to_owners("lengths", length_bytes * lengths, local),
        to_owners("ids", _ID_BYTES / ranks * ids, local),
    ]
    there = []
    if dedup:
        there.append(to_owners("rows", _OUTPUT_BYTES / ranks * id_columns, local).reverse("rows"))
    elif float(shared.sum()) == 0:
        there.append(to_owners("rows", _OUTPUT_BYTES * own_batch * outputs, local).reverse("rows"))
    else:
        group = max(len(piece.ranks) for piece in pieces)
        there += _sums(_OUTPUT_BYTES * own_batch * shared, group, cluster)
    exchanges += there
    exchanges += [exchange.reverse("gradients") for exchange in reversed(there)]
    whole = sum(dim) * own_batch
    if len(pieces) > len(columns):
        whole *= 2  # TorchRec brings the columns of a table together
    return ModelledStep(
        exchanges if ranks > 1 else [],
        ids,
        variances,
        rows,
        rows_variance,
        Work(
            ids_sent=sent_ids * one,
            ids_deduped=(sent_ids if dedup else 0.0) * one,
            lengths=(own_batch if not dedup else 1.0) * (lengths.sum() + ranks * lengths),
            ids_received=ids,
            row_bytes=_OUTPUT_BYTES
            * (id_columns + (_pooled(columns, dim, own_batch) if dedup else 0.0)),
            output_bytes=_OUTPUT_BYTES
            * (whole + (id_columns if dedup else batch * (outputs + 2 * shared))),
            updated_bytes=updated * row_bytes / max(dim),
        ),
    )


def _sums(bytes_a_rank: Tensor, group: int, cluster: Cluster) -> list[Exchange]:
    """Return the exchanges of sums: inside each group of ranks, then to the other groups.

    Args:
        bytes_a_rank: float64 [ranks], bytes of the sums of a rank's lines over the tables that this
            rank shares with its group.
        group: ranks that share the ids of a table: all, or those of a node.
        cluster: the ranks.
    """
    ranks, local = cluster.ranks, cluster.local
    groups = ranks // group
    part = bytes_a_rank * groups  # lines of the ranks of all groups with the same place
    sums = torch.stack([part * (local - 1), part * (group - local)], 1)
    inside = Exchange("rows", sums, sums, group - 1)
    if groups == 1:
        return [inside]
    others = bytes_a_rank.view(groups, group).sum(0).repeat(groups) - bytes_a_rank
    zero = torch.zeros_like(others)
    sent = torch.stack([zero, bytes_a_rank * (groups - 1)], 1)
    return [inside, Exchange("rows", sent, torch.stack([zero, others], 1), groups - 1)]


def _pooled(columns: Sequence[ColumnDemand], dim: Sequence[int], lines: float) -> float:
    """Return the columns of all rows that are pooled for so many lines."""
    return sum(
        lines * column.ids_per_line * width for column, width in zip(columns, dim, strict=True)
    )


__all__ = ["ModelledStep", "traffic_of"]
