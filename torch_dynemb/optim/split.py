"""Updates apart from backward: gradients are pending until ``step()`` applies them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from torch_dynemb._library.error_names import name_tables_of, named
from torch_dynemb._library.typed_errors import is_marked, typed_error
from torch_dynemb.ops.columns import Hyper, RowClock
from torch_dynemb.ops.pending import PendingGradients, merge_grad_
from torch_dynemb.ops.tensors import RowTensors
from torch_dynemb.optim.base import OptimizerConfig
from torch_dynemb.optim.fused import FusedOptimizer
from torch_dynemb.process.interrupts import defer_signals


class RowGradients(torch.nn.Parameter):
    """Parameter that shows the gradients of the rows of one dim to torch.

    ``GradScaler`` and gradient clipping use it. ``grad`` is float32 [n, dim], one row per row
    touched since the last step, or None. Reading it sums the gradients of all lookups; on a GPU it
    waits for their number. In-place changes such as clipping and unscaling take effect. The
    parameter has no values.

    Attributes:
        is_scaled: whether a ``GradScaler`` has scaled ``grad`` and not unscaled it yet.
    """

    is_scaled = False

    _slab: int
    _rows: RowTensors  # not the optimizer: a reference cycle would keep the tables' memory
    _sort: Callable[[int], None] | None

    def __new__(
        cls, rows: RowTensors, slab: int, sort: Callable[[int], None] | None
    ) -> RowGradients:
        parameter: RowGradients = super().__new__(cls, torch.empty(0, device="cpu"))
        parameter._slab = slab
        parameter._rows = rows
        parameter._sort = sort
        return parameter

    @property
    @torch.no_grad()
    def grad(self) -> Tensor | None:
        pending = PendingGradients.of(self._rows.pending)
        merge_grad_(pending, self._rows)
        if self._sort is not None:
            self._sort(self._slab)
        count = int(pending.counts[self._slab, 0])
        return pending.gradients[self._slab][:count] if count > 0 else None

    @grad.setter
    @torch.no_grad()
    def grad(self, value: Tensor | None) -> None:
        if value is not None:
            raise TypeError(
                "grad: the gradients of rows cannot be replaced: change them in place, as "
                "grad.mul_(0.5) does, or set them to None"
            )
        PendingGradients.of(self._rows.pending).counts[self._slab].zero_()
        self.is_scaled = False


class SplitOptimizer(FusedOptimizer):
    """Optimizer of a group of tables that updates the rows in :meth:`step`.

    Every backward adds to the pending gradients, so several micro-batches, and several lookups of a
    table in one forward, count as one batch. :meth:`step` applies the sum once and clears it; it is
    one step of every table.

    Works with ``torch.amp.GradScaler``, which skips the update after an overflow, and with
    :func:`torch_dynemb.clip_grad_norm_`.

    Args:
        names, config, rows, end_step, check_step, keeps_time: as for :class:`FusedOptimizer`.
        sort: called with the number of a slab before its pending gradients are read; sorts them by
            row if they have another order.
    """

    grad_scale: Tensor  # set by GradScaler.step, and deleted after it
    _found_inf: Tensor | None = None
    _watched_steps = -1  # no warning: several backwards before a step are the purpose
    _stand_ins: Sequence[RowGradients] = ()
    _plain = False  # whether the hyper-parameters have neither a scale nor a skip condition

    def __init__(
        self,
        names: Sequence[str],
        config: OptimizerConfig,
        *,
        rows: RowTensors,
        end_step: Callable[[int | None], None],
        check_step: Callable[[int | None], None] | None = None,
        keeps_time: Callable[[], bool] = lambda: False,
        sort: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(
            names,
            config,
            rows=rows,
            end_step=end_step,
            check_step=check_step,
            keeps_time=keeps_time,
        )
        self._sort = sort
        self._show_gradients()

    def _rebind(self, *, rows: RowTensors, end_step: Callable[[int | None], None]) -> None:
        """Follow the tables to another device, or to other dims.

        Args:
            rows, end_step: as in :meth:`FusedOptimizer._rebind`.
        """
        super()._rebind(rows=rows, end_step=end_step)
        self._plain = False
        self._show_gradients()

    def _show_gradients(self) -> None:
        rows, sort = self._rows, self._sort
        scaled = self.has_scaled_gradients()
        self._stand_ins = [RowGradients(rows, slab, sort) for slab in range(len(rows.weights))]
        self.param_groups[0]["params"] = list(self._stand_ins)
        if scaled:
            self.gradients_are_scaled()

    @property
    def _pending(self) -> PendingGradients:
        return PendingGradients.of(self._rows.pending)

    @property
    def found_inf(self) -> Tensor | None:
        """Set by ``GradScaler.step``: not 0 where a gradient has NaN or infinity."""
        return self._found_inf

    @found_inf.setter
    def found_inf(self, value: Tensor | int | None) -> None:
        # GradScaler sets 0 instead of a tensor if no gradient is pending
        self._found_inf = value if isinstance(value, Tensor) else None

    @found_inf.deleter
    def found_inf(self) -> None:
        self._found_inf = None

    def stand_ins(self) -> list[RowGradients]:
        """Return the parameters that show pending gradients to torch: one per dim and dtype."""
        return list(self._stand_ins)

    def gradients(self, slab: int) -> Tensor | None:
        """Return the pending gradients of the rows of one dim and dtype.

        Args:
            slab: number of the dim and dtype, as in :meth:`stand_ins`.

        Returns:
            float32 [n, dim], or None if no gradient is pending.
        """
        return self._stand_ins[slab].grad

    @torch.no_grad()
    def discard(self, slab: int | None = None) -> None:
        """Discard the pending gradients, of one dim and dtype or of all.

        Args:
            slab: number of the dim and dtype, as in :meth:`stand_ins`; None: all.
        """
        if slab is None:
            self._pending.counts.zero_()
            self.gradients_are_unscaled()
        else:
            self._stand_ins[slab].grad = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Discard the pending gradients. :meth:`step` does so, too."""
        self.discard()

    def gradients_are_scaled(self) -> None:
        """Record that ``GradScaler`` has scaled the pending gradients."""
        for stand_in in self._stand_ins:
            stand_in.is_scaled = True

    def has_scaled_gradients(self) -> bool:
        """Return whether ``GradScaler`` has scaled pending gradients, also of no ids."""
        return any(stand_in.is_scaled for stand_in in self._stand_ins)

    def gradients_are_unscaled(self) -> None:
        """Record that no pending gradient is scaled any more; compiled code does not."""
        if torch.compiler.is_compiling():
            return
        for stand_in in self._stand_ins:
            stand_in.is_scaled = False

    def check_unscaled(self, call: str, remedy: str) -> None:
        """Check that the pending gradients are not multiplied by a loss scale any more.

        Args:
            call: that needs them unscaled, for the error.
            remedy: what to call.

        Raises:
            RuntimeError: ``GradScaler`` has scaled them.
        """
        if self.has_scaled_gradients():
            names = [group["name"] for group in self.param_groups]
            raise RuntimeError(
                f"{call}: the gradients of tables {names} are multiplied by the scale of "
                f"GradScaler: {remedy}"
            )

    @torch.no_grad()
    def _apply_gradients(self) -> None:
        rows, pending = self._rows, self._pending
        if not torch.compiler.is_compiling() and not hasattr(self, "grad_scale"):
            self.check_unscaled("module.optimizer.step", "call scaler.step(module.optimizer)")
        merge_grad_(pending, rows)
        self._take_scale()
        # the op compares this with the clock before it changes it
        updates = rows.row_clock.narrow(0, self._tables + RowClock.UPDATES, 1)
        # an interrupt between update and clearing would apply the gradients twice
        with nullcontext() if torch.compiler.is_compiling() else defer_signals():
            try:
                torch.ops.dynemb.apply_grad_(
                    *rows.updated,
                    pending.handles,
                    pending.ids,
                    pending.tables,
                    pending.gradients,
                    pending.counts[:, 0].contiguous(),
                    updates,
                    list(range(self._tables)),
                    self._config.kernel_number,
                )
            except RuntimeError as error:
                if is_marked(error):
                    raise named(typed_error(error), [rows]) from None
                name_tables_of(error, [rows])
                raise
            pending.counts.zero_()
        self.gradients_are_unscaled()

    def _take_scale(self) -> None:
        """Write GradScaler's scale and skip condition, or that there are none, for the kernels."""
        scale: Tensor | None = getattr(self, "grad_scale", None)
        plain = scale is None and self._found_inf is None
        if plain and self._plain:
            return
        hyper = self._rows.hyper.data
        hyper[:, Hyper.SKIP_IF] = 0 if self._found_inf is None else self._found_inf.double()
        hyper[:, Hyper.DOWN_SCALE_BY] = 1 if scale is None else scale.double()
        self._plain = plain
