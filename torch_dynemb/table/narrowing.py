"""Conversion of rows to a narrower dtype: a finite value must not become infinite."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.table.config import ROW_DTYPES
from torch_dynemb.table.row_batch import RowBatch


def check_narrowed(
    where: str, ids: Tensor, values: Tensor, dtype: torch.dtype, *, state: str | None = None
) -> None:
    """Raise ValueError if a finite value becomes infinite in another dtype.

    It costs nothing unless the dtype has a smaller range, and then one pass over the values.

    Args:
        where: beginning of the error, with the table.
        ids: int64 [n], of the rows.
        values: [n, columns], rows or optimizer state.
        dtype: of the table.
        state: name of the state; None: rows.
    """
    if values.dtype == dtype or values.numel() == 0:
        return
    if not dtype.is_floating_point:
        return
    largest = torch.finfo(dtype).max
    given = torch.finfo if values.dtype.is_floating_point else torch.iinfo
    if given(values.dtype).max <= largest:
        return
    least, most = values.aminmax()
    if bool((least >= -largest) & (most <= largest)):  # False if there is a NaN
        return
    lost = values.isfinite() & values.to(dtype).isinf()
    if not bool(lost.any()):
        return
    row, column = lost.nonzero()[0].tolist()
    value = float(values[row, column])
    wider = [of for of in ROW_DTYPES if abs(value) <= torch.finfo(of).max]
    what = "the row" if state is None else f"state {state!r}"
    argument = "table dtype=" if state is None else "optimizer state_dtype="
    names = " or ".join(map(str, wider if state is None else wider[:1]))
    remedy = f"give the {argument}{names}" if wider else "repair it"
    raise ValueError(
        f"{where}: {what} of id {int(ids[row])} has {value}, but the largest number of {dtype} is "
        f"{largest}: {remedy}"
    )


def check_batch_narrowed(
    where: str, batch: RowBatch, dtype: torch.dtype, optimizer: OptimizerConfig | None
) -> None:
    """Raise ValueError if a finite value of a batch becomes infinite in a table.

    Args:
        where: beginning of the error, with the table.
        batch: of the table.
        dtype: of the table's rows.
        optimizer: of the table; None: state is not checked.
    """
    check_narrowed(where, batch.ids, batch.rows, dtype)
    for of in () if optimizer is None else optimizer.state:
        if of.name in batch.state:
            check_narrowed(where, batch.ids, batch.state[of.name], of.dtype, state=of.name)


__all__ = ["check_batch_narrowed", "check_narrowed"]
