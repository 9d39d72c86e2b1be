"""The torch optimizer of dynamic tables, with updates inside backward."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from torch_dynemb.argument_checks import described, integer
from torch_dynemb.ops.columns import MAX_COUNT, Hyper, RowClock
from torch_dynemb.ops.tensors import RowTensors
from torch_dynemb.optim.base import LATER_ENTRIES, OptimizerConfig, hyper_values, plain_value
from torch_dynemb.process.interrupts import defer_signals


class ParamGroup(dict[str, Any]):
    """A param group that writes hyper-parameters through to the tensor that kernels read.

    Its values are plain numbers, as those of torch's optimizers: a program may keep one and put it
    back. A tensor that is assigned gives its value then; later changes of it have no effect.
    """

    def __init__(self, entries: dict[str, Any], row: Tensor, columns: dict[str, tuple[Hyper, ...]]):
        super().__init__(entries)
        self._row = row
        self._columns = columns

    def _rebind(self, row: Tensor) -> None:
        """Write to another tensor from now on."""
        self._row = row

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self._columns:
            super().__setitem__(key, value)
            return
        columns = self._columns[key]
        values = hyper_values(key, value)
        if len(values) != len(columns):
            raise ValueError(f"param group: {key} is {value!r}, expected {len(columns)} numbers")
        for column, x in zip(columns, values, strict=True):
            self._row[column] = x
        super().__setitem__(key, plain_value(value))

    def update(self, *args: Any, **kwargs: Any) -> None:
        for key, value in dict(*args, **kwargs).items():
            self[key] = value

    def __ior__(self, other: Any) -> ParamGroup:  # type: ignore[override,misc]
        self.update(other)
        return self

    def plain(self) -> dict[str, Any]:
        """Return the entries without tensors, for a state dict."""
        return {
            key: float(value) if isinstance(value, Tensor) else value
            for key, value in self.items()
            if key != "params"
        }


class _Retired(NamedTuple):
    why: str
    instead: str


class FusedOptimizer(torch.optim.Optimizer):
    """Optimizer of a group of tables: one param group per table, updates inside backward.

    The rows are updated when the backward of a lookup returns. :meth:`step` ends a training step
    and advances the index clock: call it once a step, outside compiled code. ``state_dict``
    contains hyper-parameters only; the module's state dict has the state of rows.

    Args:
        names: one per table, in the order of the rows of ``rows.hyper``.
        config: initial settings of the tables.
        rows: the tensors of the rows, see :class:`torch_dynemb.ops.RowTensors`.
        end_step: called by :meth:`step` with ``now``; ends the step of the tables.
        check_step: called by :meth:`step` with ``now`` before it changes anything; raises if the
            step is not allowed.
        keeps_time: returns whether a table keeps times, so that :meth:`step` takes ``now``.

    Attributes:
        lookups_since_step: at most so many backwards of eager training on the CPU there were.
    """

    lookups_since_step = 0
    # ends the steps of these tables, see torch_dynemb.step_with
    _stepped_by: weakref.ref[torch.optim.Optimizer] | None = None
    _is_stepping = False
    # Lookups of compiled code are not counted: so many more of its steps ask the kernels for the
    # number of backwards; -1: no step asks.
    _watched_steps = 32
    _step_supports_amp_scaling = True  # so that GradScaler.step reaches `found_inf` below

    def __init__(
        self,
        names: Sequence[str],
        config: OptimizerConfig,
        *,
        rows: RowTensors,
        end_step: Callable[[int | None], None],
        check_step: Callable[[int | None], None] | None = None,
        keeps_time: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rows = rows
        self._end_step = end_step
        self._check_step = check_step
        self._keeps_time = keeps_time
        self._tables = len(names)
        self._config = config
        self._complete = False
        self._retired: _Retired | None = None
        # .data: autograd ignores writes to `hyper` between forward and backward
        hyper = rows.hyper.data
        groups = [
            {
                "params": [torch.nn.Parameter(torch.empty(0, device="cpu"))],
                "name": name,
                **config.hyper(),
            }
            for name in names
        ]
        # torch compares the parameters of each group with those of all before it
        super().__init__(groups[:1], config.hyper())
        self.param_groups: list[dict[str, Any]] = [
            ParamGroup(group, hyper[table], config.hyper_columns)
            for table, group in enumerate([*self.param_groups, *groups[1:]])
        ]
        self._complete = True

    def _rebind(self, *, rows: RowTensors, end_step: Callable[[int | None], None]) -> None:
        """Follow the tables to another device; param groups stay the same objects.

        Args:
            rows: as in :class:`FusedOptimizer`, with the new hyper-parameters.
            end_step: as in :class:`FusedOptimizer`.
        """
        self._rows, self._end_step = rows, end_step
        for table, group in enumerate(self.param_groups):
            if isinstance(group, ParamGroup):
                group._rebind(rows.hyper.data[table])

    def add_table(self, name: str) -> None:
        """Add the param group of a table that was added to the group; call :meth:`_rebind` first.

        Existing schedulers do not know the table: torch's keep one learning rate per param group.

        Args:
            name: of the table; the param group gets it as ``"name"``.
        """
        row = self._rows.hyper.data[self._tables]
        self._tables += 1
        self._complete = False
        super().add_param_group(
            {
                "params": [torch.nn.Parameter(torch.empty(0, device="cpu"))],
                "name": name,
                **self._config.hyper(),
            }
        )
        self.param_groups[-1] = ParamGroup(self.param_groups[-1], row, self._config.hyper_columns)
        self._complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise RuntimeError: the groups are the tables; nothing would update other parameters."""
        if self._complete:
            raise RuntimeError(
                "add_param_group: module.optimizer has one param group per table and updates "
                "nothing else: give other parameters to an optimizer of their own"
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "module.optimizer belongs to the table's memory and cannot be copied or pickled alone: "
            "copy or pickle the module, or save module.optimizer.state_dict()"
        )

    @property
    def found_inf(self) -> Tensor | None:
        """Set by GradScaler.step, which this optimizer refuses."""
        return None

    @found_inf.setter
    def found_inf(self, value: Tensor | None) -> None:
        raise RuntimeError(
            "torch_dynemb: GradScaler.step(module.optimizer): the rows were updated inside "
            "backward, with gradients that were still multiplied by the loss scale. Gradient "
            "scaling needs split mode: construct the module with split=True; or train with "
            "autocast(dtype=torch.bfloat16), which needs no scaler"
        )

    def step(  # type: ignore[override]
        self, closure: Callable[[], float] | None = None, *, now: int | None = None
    ) -> float | None:
        """End a training step.

        A CUDA graph cannot capture it. Call it after every replay of a captured step, which gives
        the next replays room for new ids.

        Args:
            closure: re-evaluates the model and returns the loss; its backward updates the rows.
            now: seconds from 0 to 2^62, for tables that keep timestamps or a ttl; default: the
                machine's clock. Tables that keep no times ignore it.

        Returns:
            The result of ``closure``; None without one.

        Raises:
            TypeError, ValueError: ``now`` is not an int, or out of its range, or ``closure`` is not
                a function. Nothing has been done.
            RuntimeError: nothing has been done, because this process is a fork of the process that
                made the tables. Or
                ``set_optimizer()`` gave the tables another optimizer. Or an asynchronous checkpoint
                of the tables has failed, which is reported once. Or the current stream of the GPU
                is being captured.
            RuntimeError: the step has ended, but ids found no room in a table with
                ``check="error"``; on a GPU, also for errors that kernels found.
        """
        if not self._is_observed():
            return self._end_step_with(closure, now)
        arguments = () if closure is None else (closure,)
        keywords: dict[str, Any] = {} if now is None else {"now": now}
        return _observed_step(self, *arguments, **keywords)

    # Keeps torch's wrapper for hooks and profiler away from step(): even without hooks it takes
    # twice as long as step() itself.
    step.hooked = True  # type: ignore[attr-defined]

    def _is_observed(self) -> bool:
        """Return whether a hook of steps is registered, or a profiler is running."""
        return bool(
            self._optimizer_step_pre_hooks
            or self._optimizer_step_post_hooks
            or _global_optimizer_pre_hooks
            or _global_optimizer_post_hooks
            or (not torch.compiler.is_compiling() and torch._C._autograd._profiler_enabled())
        )

    def _end_step_with(self, closure: Callable[[], float] | None, now: int | None) -> float | None:
        if closure is not None and not callable(closure):
            raise TypeError(
                f"optimizer.step: closure is {described(closure)}, expected a function or None"
            )
        if not self._is_stepping:
            self._check_own_step("module.optimizer.step")
        self.check_step(now)
        now = None if now is None else int(now)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if (
            self.lookups_since_step != 1
            and self._watched_steps >= 0
            and not torch.compiler.is_compiling()
        ):
            self._report_accumulation()
        self._apply_gradients()
        self._end_step(now)
        self.lookups_since_step = 0
        return loss

    def check_step(self, now: int | None) -> None:
        """Raise the errors of :meth:`step` that come before any change.

        Args:
            now: as :meth:`step` takes it.

        Raises:
            TypeError, ValueError, RuntimeError: as :meth:`step`, before anything is done.
        """
        if self._retired is not None:
            raise RuntimeError(f"optimizer.step: {self._retired.why}: use {self._retired.instead}")
        if now is not None:
            what = "int, as int(time.time()) is"
            if integer("optimizer.step: now: seconds", now, least=0, what=what) > MAX_COUNT:
                raise ValueError(f"optimizer.step: now: seconds is {now}, expected at most 2^62")
        if self._check_step is not None:
            self._check_step(now)

    def _check_own_step(self, call: str) -> None:
        """Check that no other optimizer ends the steps, which would count twice.

        Args:
            call: that concerns this optimizer alone, for the error.

        Raises:
            RuntimeError: :func:`torch_dynemb.step_with` has another optimizer end them.
        """
        by = None if self._stepped_by is None else self._stepped_by()
        if by is not None:
            names = [group["name"] for group in self.param_groups]
            raise RuntimeError(
                f"{call}() of tables {names}: step_with has {type(by).__name__} end their steps: "
                "leave this call out, or remove() the handle of step_with"
            )

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        """Allow :meth:`step` although another optimizer ends the steps: it makes this call."""
        self._is_stepping = True
        try:
            yield
        finally:
            self._is_stepping = False

    def _accumulation_is_known(self) -> None:
        """Turn off the warning of :meth:`step` about several backwards."""
        self._watched_steps = -1

    def _report_accumulation(self) -> None:
        """Warn, once, if several backwards have updated the rows since the last step."""
        if self.lookups_since_step == 0:
            if self._watched_steps == 0:
                return
            self._watched_steps -= 1
        if not self._rows.row_clock.is_cpu:  # reading it would wait for the GPU
            return
        backwards = self.updates_since_step()
        if backwards < 2:
            return
        self._accumulation_is_known()
        names = ", ".join(str(group["name"]) for group in self.param_groups[:3])
        names += ", ..." if len(self.param_groups) > 3 else ""
        warnings.warn(
            f"module.optimizer.step() of tables ({names}): {backwards} backwards came before it, "
            "and each has updated the rows on its own: gradients that are accumulated, and losses "
            "of one step, become one update with split=True, or if the losses are added before "
            "one backward",
            RuntimeWarning,
            stacklevel=4,
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: backward has applied the gradients of rows and kept none.

        Args:
            set_to_none: as in torch.
        """

    def _apply_gradients(self) -> None:
        """Do nothing: backward has applied the gradients."""

    @property
    def _is_retired(self) -> bool:
        """Whether the tables have got another optimizer."""
        return self._retired is not None

    def _retire(self, why: str, instead: str) -> None:
        """Make :meth:`step` raise RuntimeError, after the tables got another optimizer.

        Args:
            why: the reason, as the message has it.
            instead: what to use.
        """
        self._retired = _Retired(why, instead)

    def updates_since_step(self) -> int:
        """Return how many backwards have updated the rows since the last :meth:`step`."""
        return int(self._rows.row_clock[self._tables + RowClock.SINCE_STEP])

    def non_finite_gradients(self) -> int:
        """Return the number of rows skipped because their gradient has NaN or infinity."""
        return int(self._rows.row_clock[self._tables + RowClock.NON_FINITE])

    def state_dict(self) -> dict[str, Any]:
        """Return hyper-parameters by param group."""
        groups = [
            {**group.plain(), "params": [i]}
            for i, group in enumerate(self.param_groups)
            if isinstance(group, ParamGroup)
        ]
        return {"state": {}, "param_groups": groups, "optimizer": self._config.name}

    @staticmethod
    def _check_hyper(table: str, name: str, value: Any, numbers: int) -> None:
        try:
            valid = len(hyper_values(name, value)) == numbers
        except (TypeError, ValueError):
            valid = False
        if not valid:
            raise ValueError(
                f"load_state_dict: {name} of table {table!r} is {value!r}, expected {numbers} "
                f"number{'s' if numbers > 1 else ''}"
            )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Write hyper-parameters into the tensor that kernels read.

        Raises:
            ValueError: ``state_dict`` has other tables than this optimizer, or other
                hyper-parameters; nothing has been changed.
        """
        optimizer, saved = state_dict.get("optimizer"), state_dict.get("param_groups")
        if optimizer != self._config.name:
            raise ValueError(
                f"load_state_dict: state_dict is of optimizer {optimizer!r}, expected "
                f"{self._config.name!r}"
            )
        if not isinstance(saved, list) or not all(isinstance(group, dict) for group in saved):
            raise ValueError(
                f"load_state_dict: param_groups is a {type(saved).__name__}, expected a list of "
                "dicts, one per table"
            )
        names = [group["name"] for group in self.param_groups]
        if [group.get("name") for group in saved] != names:
            raise ValueError(
                f"load_state_dict: param groups are for tables {[g.get('name') for g in saved]}, "
                f"expected {names}"
            )
        columns = self._config.hyper_columns
        later = {name: value for name, value in LATER_ENTRIES.items() if name in columns}
        saved = [{**later, **entries} for entries in saved]
        for group, entries in zip(self.param_groups, saved, strict=True):
            missing = set(columns) - set(entries)
            if missing:
                raise ValueError(
                    f"load_state_dict: the param group of table {group['name']!r} lacks "
                    f"{sorted(missing)}, expected all that state_dict() gives"
                )
            for name, numbers in columns.items():
                self._check_hyper(group["name"], name, entries[name], len(numbers))
        before = self.state_dict()["param_groups"]
        with defer_signals():
            try:
                self._write(saved)
            except BaseException:
                self._write(before)
                raise

    def _write(self, param_groups: list[dict[str, Any]]) -> None:
        for group, entries in zip(self.param_groups, param_groups, strict=True):
            group.update({k: v for k, v in entries.items() if k != "params"})


def _named_step(
    optimizer: FusedOptimizer, closure: Callable[[], float] | None = None, *, now: int | None = None
) -> float | None:
    return optimizer._end_step_with(closure, now)


_observed_step = torch.optim.Optimizer.profile_hook_step(_named_step)
