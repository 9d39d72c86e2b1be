"""Lookups of rows by handle: pooled and per id, for training and for inference.

The training ops are functional and differentiable. Their backward updates the rows in place with
the optimizer named in the call; the rows themselves have no gradient. ``grad_anchor`` is a float32
[1] tensor that requires grad, so that autograd runs the backward at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_dynemb._library.library import op_error, raises_typed_errors, register_fake
from torch_dynemb.ops.autograd import needs_grad
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.index import check_ids
from torch_dynemb.ops.lookup_autograd import (
    Lookup,
    checked_lookup,
    differentiable,
    insert_and_read,
    lookup_forward,
    only_autograd_sees,
)
from torch_dynemb.ops.tensors import IndexTensors, LookupBatch, RowTensors

_FIND_AND_READ = torch.ops.dynemb.find_and_read.default


_NONE: list[int] = []


class RowLookup(NamedTuple):
    """A lookup of rows of a single table, but for the ids.

    Attributes:
        settings: for the backward.
        bound: number of the tensors.
        no_offsets: int64 [0].
    """

    settings: Lookup
    bound: int
    no_offsets: Tensor

    @property
    def rows(self) -> RowTensors:
        """Return the tensors of the rows."""
        return self.settings.rows


def check_weights(op: str, batch: LookupBatch) -> None:
    """Raise unless weights of ids are float32, one for each id, and on the device of the ids."""
    per_sample_weights, ids = batch.per_sample_weights, batch.ids
    if per_sample_weights is None:
        return
    if per_sample_weights.dtype != torch.float32:
        raise TypeError(
            f"{op}: per_sample_weights has dtype {per_sample_weights.dtype}, expected float32"
        )
    if per_sample_weights.shape != ids.shape:
        raise ValueError(
            f"{op}: per_sample_weights has shape {tuple(per_sample_weights.shape)}, expected that "
            f"of ids, {tuple(ids.shape)}"
        )
    if per_sample_weights.device != ids.device:
        raise ValueError(
            f"{op}: per_sample_weights is on {per_sample_weights.device}, but ids on {ids.device}"
        )


@raises_typed_errors
def embedding(
    rows: RowTensors,
    batch: LookupBatch,
    handles: Tensor,
    grad_anchor: Tensor,
    *,
    optimizer: int,
) -> Tensor:
    """Look rows or bags up; the backward updates the rows.

    Args:
        rows: of the tables. The backward changes weights, generations, state and row_clock; with
            pending tensors it changes these and row_clock.
        batch: ids and settings of the lookup; its weights get a gradient.
        handles: int64 [N], of the ids (:func:`torch_dynemb.ops.find_or_insert_`).
        grad_anchor: float32 [1]; see the module's description.
        optimizer: position in ``OPTIMIZER_NAMES``; -1: the backward leaves the rows alone. Plus
            ``APPLIES_DELAYED`` if the rows may be updated between forward and backward.

    Returns:
        float32 [B, sum of feature_dims], 0 for an empty bag; or without pooling [N, dim], 0 for
        padding ids.

    Raises:
        TypeError, ValueError: dtype, shape or device of per_sample_weights; or an unknown
            optimizer.
        RuntimeError: another argument does not fit the rows. On a GPU, wrong values of tensors are
            reported by a later op. Raised by the backward: create_graph=True, or rows that were
            updated since the forward, where the optimizer does not allow for it.
    """
    ids, offsets, weights, tables, dims, pooling = batch
    if pooling == Pooling.NONE:
        weights = None
    else:
        check_weights("embedding", batch)
    if only_autograd_sees(ids, offsets, handles):
        lookup = checked_lookup("embedding", rows, optimizer, [*tables], [*dims], pooling)
        if needs_grad(weights, grad_anchor):
            return differentiable(lookup, None, ids, handles, offsets, weights, grad_anchor)[0]
        return lookup_forward(lookup, ids, handles, offsets, weights)[0]
    output, _ = torch.ops.dynemb.embedding(
        *rows, ids, handles, offsets, weights, grad_anchor, tables, dims, pooling, optimizer
    )
    result: Tensor = output
    return result


def is_eager(ids: Tensor, offsets: Tensor) -> bool:
    """Return whether :func:`insert_and_embed` may look ids up: eager code on the CPU.

    Args:
        ids, offsets: of any shape and dtype.
    """
    return (
        only_autograd_sees(ids, offsets)
        and ids.is_cpu
        and offsets.is_cpu
        and ids.dtype is offsets.dtype is torch.int64
    )


@raises_typed_errors
def bind_lookup(index: IndexTensors, rows: RowTensors) -> int:
    """Store the tensors of tables for :func:`insert_and_embed`, until :func:`release_lookup`.

    Args:
        index, rows: of the tables.

    Returns:
        A number for them.

    Raises:
        InUseError: another thread is changing the tables now.
        RuntimeError: the tables are not on the CPU.
    """
    number: int = torch.ops.dynemb.bind_lookup(
        *index, rows.weights, rows.generations, rows.row_clock, rows.init_data
    )
    return number


def release_lookup(lookup: int) -> None:
    """Let go of tensors of :func:`bind_lookup`.

    Args:
        lookup: their number.
    """
    torch.ops.dynemb.release_lookup(lookup)


@raises_typed_errors
def insert_and_embed(
    rows: RowTensors,
    lookup: int,
    batch: LookupBatch,
    grad_anchor: Tensor,
    *,
    optimizer: int,
    feature_policies: list[int],
) -> Tensor:
    """Find or insert ids and look them up, in one call: :func:`embedding` with autograd.

    Args:
        rows: of the tables; change as in :func:`embedding`.
        lookup: number of the tables (:func:`bind_lookup`), none of which may be a table of counts.
            Their index changes as in :func:`torch_dynemb.ops.find_or_insert_`.
        batch: of which ids and offsets :func:`is_eager` is true; its weights get a gradient.
        grad_anchor: float32 [1], which requires grad.
        optimizer: see :func:`embedding`.
        feature_policies: see :func:`torch_dynemb.ops.find_or_insert_`.

    Returns:
        As :func:`embedding`.

    Raises:
        TypeError, ValueError: dtype, shape or device of per_sample_weights; unknown optimizer.
        RuntimeError: as :func:`torch_dynemb.ops.find_or_insert_`; no id has been inserted then. Or
            ``lookup`` has been released. The backward raises as that of :func:`embedding`.
    """
    ids, offsets, weights, tables, dims, pooling = batch
    if weights is not None:
        check_weights("insert_and_embed", batch)
    of_call = checked_lookup("insert_and_embed", rows, optimizer, [*tables], [*dims], pooling)
    output: Tensor = insert_and_read(
        of_call, lookup, ids, offsets, feature_policies, weights, grad_anchor
    )
    return output


def row_lookup(rows: RowTensors, bound: int, no_offsets: Tensor, *, optimizer: int) -> RowLookup:
    """Prepare :func:`insert_and_embed_rows`.

    Args:
        rows: of a single table without policies and counted ids, on the CPU.
        bound: number of its tensors (:func:`bind_lookup`).
        no_offsets: int64 [0].
        optimizer: see :func:`embedding`.

    Returns:
        The lookup.

    Raises:
        ValueError: unknown optimizer.
    """
    dims = [rows.weights[0].shape[1]]
    lookup = checked_lookup("insert_and_embed", rows, optimizer, [0], dims, int(Pooling.NONE))
    return RowLookup(lookup, bound, no_offsets)


@raises_typed_errors
def insert_and_embed_rows(lookup: RowLookup, ids: Tensor, grad_anchor: Tensor) -> Tensor:
    """Look up rows of a single table for training, with as little overhead as possible.

    Args:
        lookup: of the table.
        ids: int64 [N], contiguous, on the CPU; :func:`is_eager` is true of them.
        grad_anchor: float32 [1], which requires grad.

    Returns:
        float32 [N, dim].

    Raises:
        RuntimeError: as :func:`insert_and_embed`.
    """
    output: Tensor = insert_and_read(
        lookup.settings, lookup.bound, ids, lookup.no_offsets, _NONE, None, grad_anchor
    )
    return output


@raises_typed_errors
def embedding_inference(
    rows: RowTensors, batch: LookupBatch, handles: Tensor, *, formats: Sequence[int] = ()
) -> Tensor:
    """Look rows or bags up without autograd: several times cheaper per call than :func:`embedding`.

    Lookups of quantized rows have the bits of lookups of their :func:`dequantize_rows`. Ids without
    a row read their initial values in float32, as where rows are float32.

    Args:
        rows: of the tables; nothing changes. ``weights`` of quantized slabs are uint8
            [rows, bytes].
        batch: ids and settings of the lookup.
        handles: int64 [N], of the ids.
        formats: a ``columns.RowFormat`` for each slab; empty: all rows are floats.

    Returns:
        float32 [B, sum of feature_dims], 0 for an empty bag; or without pooling [N, dim], 0 for
        padding ids.

    Raises:
        TypeError, ValueError: dtype, shape or device of per_sample_weights.
        RuntimeError: another argument does not fit the rows.
    """
    check_weights("embedding_inference", batch)
    ids, *asked = batch
    output: Tensor = torch.ops.dynemb.embedding_inference(*rows.read, ids, handles, *asked, formats)
    return output


@raises_typed_errors
def find_and_read(index: IndexTensors, rows: RowTensors, batch: LookupBatch) -> Tensor:
    """Look up for inference by ids, in one call: :func:`find`, then the rows; on the CPU only.

    Args:
        index, rows: of the tables, none of which may be a table of counts; nothing changes.
        batch: ids and settings of the lookup.

    Returns:
        float32 [B, sum of feature_dims], or [N, dim] without pooling.

    Raises:
        TypeError, ValueError: dtype, shape or device of ids, offsets or per_sample_weights.
        InUseError: another thread moves rows of the tables now.
        RuntimeError: another argument does not fit the tables, or they are not on the CPU.
    """
    check_ids("find_and_read", index, batch.ids, batch.offsets)
    check_weights("find_and_read", batch)
    output: Tensor = _FIND_AND_READ(
        index.buckets,
        index.tables,
        index.meta,
        rows.weights,
        rows.generations,
        rows.init_data,
        *batch,
    )
    return output


def find_and_read_bags(
    index: IndexTensors,
    rows: RowTensors,
    ids: Tensor,
    offsets: Tensor,
    pooling: int,
    *,
    include_last_offset: bool,
) -> Tensor:
    """Look up bags of a single table for inference, with as little overhead as possible.

    This serves calls of few ids with arguments that the caller has checked.

    Args:
        index, rows: of the table, which has no counted ids; nothing changes.
        ids: int64 [N], contiguous, on the CPU.
        offsets: int64 [B], or [B + 1] with include_last_offset, contiguous, on the CPU.
        pooling: 0 or 1, see :class:`torch_dynemb.ops.LookupBatch`.
        include_last_offset: whether offsets have the number of ids at their end.

    Returns:
        float32 [B, dim].

    Raises:
        InUseError: another thread moves rows of the table now.
        RuntimeError: an argument does not fit the table, there are several tables, or they are not
            on the CPU.
    """
    try:
        output: Tensor = _FIND_AND_READ(
            index.buckets,
            index.tables,
            index.meta,
            rows.weights,
            rows.generations,
            rows.init_data,
            ids,
            offsets,
            None,
            [],
            [],
            pooling,
            include_last_offset,
        )
    except RuntimeError as error:  # a wrapper of the function would take longer
        raise op_error(error, (index,)) from None
    return output


def find_and_read_rows(
    index: IndexTensors, rows: RowTensors, ids: Tensor, no_offsets: Tensor
) -> Tensor:
    """Look up rows of a single table for inference, with as little overhead as possible.

    This serves calls of few ids with arguments that the caller has checked.

    Args:
        index, rows: of the table, which has no counted ids; nothing changes.
        ids: int64 [N], contiguous, on the CPU.
        no_offsets: int64 [0].

    Returns:
        float32 [N, dim].

    Raises:
        InUseError: another thread moves rows of the table now.
        RuntimeError: an argument does not fit the table, there are several tables, or they are not
            on the CPU.
    """
    try:
        output: Tensor = _FIND_AND_READ(
            index.buckets,
            index.tables,
            index.meta,
            rows.weights,
            rows.generations,
            rows.init_data,
            ids,
            no_offsets,
        )
    except RuntimeError as error:  # a wrapper of the function would take longer
        raise op_error(error, (index,)) from None
    return output


def lookup_output(
    op: str,
    ids: Tensor,
    offsets: Tensor,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
) -> Tensor:
    """Return the output of a lookup without values, for fake implementations."""
    rows, columns = ids.shape[0], feature_dims[0]
    if pooling != Pooling.NONE:
        if isinstance(offsets.shape[0], int) and offsets.shape[0] == 0:
            raise RuntimeError(
                f"dynemb::{op}: offsets is empty, expected where each bag begins, and the last one "
                "ends"
            )
        rows, columns = (offsets.shape[0] - 1) // len(feature_tables), sum(feature_dims)
    return ids.new_empty((rows, columns), dtype=torch.float32)


@register_fake("embedding")
def _embedding_fake(*arguments: Any) -> tuple[Tensor, Tensor]:
    *rows, ids, _, offsets, _, _, tables, dims, pooling, _ = arguments
    output = lookup_output("embedding", ids, offsets, tables, dims, pooling)
    return output, RowTensors(*rows).row_clock.new_empty((1,))


@register_fake("embedding_forward")
def _embedding_forward_fake(
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    row_clock: Tensor,
    meta: Tensor,
    init_data: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
) -> tuple[Tensor, Tensor]:
    output = lookup_output("embedding_forward", ids, offsets, feature_tables, feature_dims, pooling)
    return output, row_clock.new_empty((1,))


@register_fake("find_and_read")
def _find_and_read_fake(
    buckets: Tensor,
    tables: Tensor,
    meta: Tensor,
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    init_data: Tensor,
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None = None,
    feature_tables: Sequence[int] = (),
    feature_dims: Sequence[int] = (),
    pooling: int = Pooling.NONE,
    include_last_offset: bool = True,
) -> Tensor:
    op = "find_and_read"
    if not feature_tables and not feature_dims:
        feature_tables, feature_dims = _one_feature(op, tables, weights)
    if include_last_offset or pooling == Pooling.NONE:
        return lookup_output(op, ids, offsets, feature_tables, feature_dims, pooling)
    rows = offsets.shape[0] // len(feature_tables)
    return ids.new_empty((rows, sum(feature_dims)), dtype=torch.float32)


def _one_feature(
    op: str, tables: Tensor, weights: Sequence[Tensor]
) -> tuple[Sequence[int], Sequence[int]]:
    """Return table and dim of the one feature of ops that got none."""
    if tables.shape[0] != 1 or len(weights) != 1:
        raise RuntimeError(
            f"dynemb::{op}: feature_tables is empty, expected the table of each feature: it may be "
            "left out where there is one table"
        )
    return [0], [weights[0].shape[1]]


@register_fake("bind_lookup")
def _bind_lookup_fake(*tensors: Tensor | Sequence[Tensor]) -> int:
    return 0


@register_fake("insert_and_read")
def _insert_and_read_fake(
    lookup: int,
    ids: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
    feature_policies: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor]:
    output = lookup_output("insert_and_read", ids, offsets, feature_tables, feature_dims, pooling)
    return output, torch.empty_like(ids), ids.new_empty((1,))


@register_fake("embedding_inference")
def _embedding_inference_fake(
    weights: Sequence[Tensor],
    generations: Sequence[Tensor],
    meta: Tensor,
    init_data: Tensor,
    ids: Tensor,
    handles: Tensor,
    offsets: Tensor,
    per_sample_weights: Tensor | None,
    feature_tables: Sequence[int],
    feature_dims: Sequence[int],
    pooling: int,
    formats: Sequence[int] = (),
) -> Tensor:
    return lookup_output("embedding_inference", ids, offsets, feature_tables, feature_dims, pooling)
