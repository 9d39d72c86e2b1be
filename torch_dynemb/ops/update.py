"""Ops that write rows: materialise initial values, apply optimizers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_dynemb._library.library import raises_typed_errors, register_fake
from torch_dynemb.ops.functional_copies import refuse_copies_of_rows
from torch_dynemb.ops.tensors import IndexTensors, RowTensors

# The optimizers of the library. The position is the number that ops take; files do not contain it.
OPTIMIZER_NAMES = tuple(torch.ops.dynemb.optimizer_names())
NO_OPTIMIZER = -1
# Added to the code where gradients may be applied after other updates of the rows.
APPLIES_DELAYED = 1 << 8


@raises_typed_errors
def materialize_(index: IndexTensors, rows: RowTensors) -> Tensor:
    """Write the initial value and state of every row that has not been trained yet.

    Must precede every raw read of rows.

    Args:
        index: of the tables; nothing changes.
        rows: of the same tables; all but row_clock and constants change.

    Returns:
        int64 [1], the number of rows written.

    Raises:
        RuntimeError: tensors do not fit each other; nothing has been written.
    """
    written: Tensor = torch.ops.dynemb.materialize_(
        rows.weights,
        rows.generations,
        rows.state,
        rows.dirty_bits,
        rows.copy_on_write,
        index.buckets,
        index.tables[: rows.meta.shape[0]],
        rows.hyper,
        rows.meta,
        rows.init_data,
    )
    return written


@register_fake("materialize_")
def _materialize_fake(*arguments: Any) -> Tensor:
    tables: Tensor = arguments[6]
    return tables.new_empty((1,))


def _register_update_fake(op: str) -> None:
    @register_fake(op)
    def _update_fake(
        weights: Sequence[Tensor],
        generations: Sequence[Tensor],
        state: Sequence[Tensor],
        dirty_bits: Sequence[Tensor],
        copy_on_write: Sequence[Tensor],
        *constants_and_gradients: Any,
    ) -> None:
        refuse_copies_of_rows(op, copy_on_write, weights, generations, state, dirty_bits)


_register_update_fake("embedding_backward_")
_register_update_fake("apply_grad_")
