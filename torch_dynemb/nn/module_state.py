"""State, copies and devices of a module with tables."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Self

from torch_dynemb.distributed.ranks import RankGroup, default_group
from torch_dynemb.nn.distributed_checkpoint import StateNames, support_default_planner
from torch_dynemb.nn.forgotten_steps import (
    FORGOTTEN_SPLIT_STEPS,
    FORGOTTEN_STEPS,
    report_forgotten_step,
)
from torch_dynemb.nn.guards import watch_tables
from torch_dynemb.nn.module_entries import EntryErrors, load_entries
from torch_dynemb.nn.rank_states import check_caller, rank_entry
from torch_dynemb.optim import FusedOptimizer, OptimizerConfig, SplitOptimizer
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.storage.device import check_device
from torch_dynemb.table import extension as table_extension
from torch_dynemb.table.dense_state import leaves_tables_out
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.pending_gradients import sort_pending
from torch_dynemb.table.steps import check_step
from torch_dynemb.table.tables import Tables

# Attributes that a copy makes anew.
_NOT_COPIED = ("_optimizer", "_own_anchor", "_copied_anchor", "_given_entries")


class _GivenEntry:
    """An entry of a state dict, a copy of rows, and whether a program has written into it.

    Args:
        entry: has not been written into.
    """

    def __init__(self, entry: Tensor) -> None:
        self._entry = weakref.ref(entry)
        # shares the count of writes with the entry, but not its memory
        self._counted = entry.detach()
        self._counted.data = entry.new_empty(0)
        self._writes = self._counted._version

    def is_alive(self) -> bool:
        """Return whether a program may still write into it."""
        return self._entry() is not None

    def is_written(self) -> bool:
        """Return whether a program has written into it."""
        return self._counted._version != self._writes


class StatefulModule(nn.Module):
    """Base of :class:`TableModule`: tables with an optimizer; torch saves, copies and moves them.

    A subclass sets the attributes below in its constructor.
    """

    trainable: bool
    grad_anchor: nn.Parameter
    _group: TableGroup
    _optimizer: FusedOptimizer | None
    _own_anchor: tuple[nn.Parameter]  # the grad_anchor that no wrapper has replaced
    _unwrapped_anchor: tuple[Tensor]
    _ranks: RankGroup | None = None  # that share the rows
    # Of a copy: the version of its anchor, to which writing to all parameters() adds.
    _copied_anchor: int | None = None
    # Of state dicts that are alive, or were when it was last looked at.
    _given_entries: Sequence[_GivenEntry] = ()

    @property
    def group(self) -> TableGroup:
        """The tables: erase, export, read, write, sizes."""
        return self._group

    @property
    def optimizer(self) -> FusedOptimizer:
        """The optimizer of the rows; call its ``step()`` once per training step.

        Raises:
            RuntimeError: the module is not trainable.
        """
        if self._optimizer is None:
            raise RuntimeError(
                f"{type(self).__name__}: optimizer: the module has trainable=False and no "
                "optimizer: give it one by set_optimizer()"
            )
        return self._optimizer

    def _forget_gradients(self) -> None:
        """Forget the gradients of rows in split mode, for ``zero_grad()`` of a model."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def sizes(self) -> dict[str, int]:
        """Number of ids by table name."""
        return self._group.sizes()

    def memory(self) -> dict[str, int]:
        """Bytes in use: ``rows``, ``state``, ``index``, ``total``."""
        return self._group.usage.memory()

    def _optimizer_of(self, tables: Tables) -> FusedOptimizer | None:
        """Make the optimizer of the rows of tables that are the group's, or will be."""
        config, group = tables.config, self._group
        if config.optimizer is None:
            return None
        kind: Callable[..., FusedOptimizer] = FusedOptimizer
        if config.split:
            kind = functools.partial(
                SplitOptimizer, sort=lambda slab: sort_pending(group.tables, slab)
            )
        return kind(
            config.names,
            config.optimizer,
            rows=tables.rows,
            end_step=self._step_end(),
            check_step=lambda now: check_step(group.tables, now),
            keeps_time=lambda: group.config.keeps_time,
        )

    def _step_end(self) -> Callable[[int | None], None]:
        """Return what ``optimizer.step()`` calls after the update.

        It must not lead to the module, which has the optimizer: in a cycle, a deleted module would
        keep its memory until the garbage collector comes along.
        """
        return self._group.step

    def _rebind_optimizer(self) -> None:
        """Give the optimizer the group's tensors after they have been replaced."""
        if self._optimizer is not None:
            self._optimizer._rebind(rows=self._group.rows, end_step=self._step_end())

    def set_optimizer(self, config: OptimizerConfig) -> FusedOptimizer:
        """Give the tables an optimizer, or another one; the module is trainable then.

        State starts fresh, as with a new optimizer of torch; rows stay. All tensors of the group
        are replaced: compiled code is compiled again, graphs must be captured again. While it is
        done, the tables are in memory twice. Where it fails or is interrupted, nothing has changed.

        Args:
            config: such as ``Adam(lr=1e-3)``; for all tables.

        Returns:
            The new ``module.optimizer``; using the old one raises.

        Raises:
            TypeError: ``config`` is something other than an optimizer config.
            RuntimeError: too little memory, or addresses, or this process is a fork of the one that
                made the tables.
        """
        with self._group.tables.changing(moves_rows=True):
            changed = self._with_optimizer(config)
            optimizer = self._optimizer_of(changed)
            with defer_signals():
                self._take_optimizer(changed, optimizer)
        return self.optimizer

    def _take_optimizer(self, changed: Tables, optimizer: FusedOptimizer | None) -> None:
        self._group._become(changed)
        if self._optimizer is not None:
            self._optimizer._retire(
                "the tables got another optimizer by set_optimizer()", "module.optimizer"
            )
        self._optimizer = optimizer
        self.trainable = True
        self.grad_anchor.requires_grad_(True)

    def _with_optimizer(self, config: OptimizerConfig) -> Tables:
        """Make tables with another optimizer."""
        return table_extension.reoptimize(self._group.tables, config)

    def _anchor(self) -> nn.Parameter:
        anchor = self._parameters.get("grad_anchor")  # nn.Module takes longer to find it
        return self.grad_anchor if anchor is None else anchor  # None: FSDP has replaced it

    @property
    def _sharing_ranks(self) -> RankGroup | None:
        """The ranks that share the rows; None: they are of this process alone."""
        return self._ranks

    def _most_backwards(self) -> int:
        return FORGOTTEN_SPLIT_STEPS if self._group.config.split else FORGOTTEN_STEPS

    def _missing_step(self) -> str:
        split = self._group.config.split
        accumulation = "" if split else "; gradients are accumulated with split=True only"
        return (
            "since the last optimizer.step() of the module: call it once per training step; "
            f"torch_dynemb.table_optimizers(model) has the optimizers of all tables{accumulation}"
        )

    def train(self, mode: bool = True) -> Self:
        """Set training mode; leaving it reports a forgotten ``optimizer.step()``."""
        if not mode and self.training:
            report_forgotten_step(self)
        super().train(mode)
        return self

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        report_forgotten_step(self)
        self._check_not_averaged()
        if leaves_tables_out():
            return
        check_caller(type(self).__name__, self._group.names, self._sharing_ranks)
        support_default_planner()
        entries = self._group.state.tensors()
        for name, tensor in entries.items():
            destination[prefix + self._rank_entry + name] = tensor
        rows = [_GivenEntry(tensor) for tensor in entries.values() if tensor.is_floating_point()]
        self._given_entries = [*self._given_entries, *rows]

    @property
    def _rank_entry(self) -> str:
        """Beginning of names of entries; empty: this process has all rows."""
        return rank_entry(self._sharing_ranks)

    def _fqn_modifiers(self) -> dict[str, str]:
        """Return where ``torch.distributed.checkpoint.state_dict`` finds the beginnings of names.

        A table may be named as an attribute is, which is not looked at then.
        """
        names = (self._rank_entry + name for name in self._group.state.names())
        return {name.partition(".")[0]: "_state_entries" for name in names}

    @property
    def _state_entries(self) -> StateNames:
        """Stands for the entries of the state dict, which are not attributes."""
        return StateNames()

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        if leaves_tables_out():
            return
        report = EntryErrors(missing_keys, unexpected_keys if strict else None, error_msgs)
        kind, state = type(self).__name__, self._group.state
        load_entries(kind, state, self._rank_entry, state_dict, prefix, report)
        self._given_entries = ()  # what was written into them has been loaded

    def _check_conversion(self, fn: Callable[[Tensor], Tensor]) -> Tensor:
        """Raise the errors of ``to()`` and its kin that come before any change.

        Args:
            fn: the function that ``_apply`` gets for every tensor of a module.

        Returns:
            A tensor of the converted kind.

        Raises:
            TypeError: ``fn`` changes the dtype.
            RuntimeError: tables cannot be on the device, or in shared memory.
        """
        before = torch.zeros(1, device=self._group.device)
        shared_before = before.is_shared()  # a tensor of a GPU always says so
        probe = fn(before)
        owner = f"{type(self).__name__}.to()"
        check_device(owner, probe.device)
        if probe.dtype != torch.float32:
            raise TypeError(
                f"{owner}: dtype {probe.dtype}: rows keep the dtype they were constructed with: "
                "give dtype= or output_dtype= there, use autocast around the dense part of the "
                "model, or convert it alone"
            )
        if probe.is_shared() and not shared_before and probe.device == self._group.device:
            raise RuntimeError(
                f"{type(self).__name__}.share_memory(): the table's memory belongs to this "
                "process: share a torch_dynemb.freeze() copy, or use threads"
            )
        return probe

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        probe = self._check_conversion(fn)
        if probe.device != self._group.device:
            anchor = nn.Parameter(
                self.grad_anchor.detach().to(probe.device),
                requires_grad=self.grad_anchor.requires_grad,
            )
            with self._group.tables.changing(moves_rows=True):
                moved = table_extension.on_device(self._group.tables, probe.device)
                with defer_signals():
                    self._group._become(moved)
                    self.grad_anchor = anchor
                    self._own_anchor = (anchor,)
                    self._unwrapped_anchor = (anchor.detach().clone().requires_grad_(),)
                    if self._copied_anchor is not None:
                        self._follows_parameters()
                    self._rebind_optimizer()
        return self

    def __getstate__(self) -> dict[str, Any]:
        self._check_not_averaged()
        state = {k: v for k, v in self.__dict__.items() if k not in _NOT_COPIED}
        state["_optimizer_state"] = (
            None if self._optimizer is None else self._optimizer.state_dict()
        )
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("_optimizer_state")
        nn.Module.__setstate__(self, state)
        self._group.owner = type(self).__name__
        self._own_anchor = (self.grad_anchor,)
        self._optimizer = self._optimizer_of(self._group.tables)
        if self._optimizer is not None:
            self._optimizer.load_state_dict(saved)
        watch_tables(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin._follows_parameters()
        return twin

    def _follows_parameters(self) -> None:
        """Declare that the rows are right as they are, after ``parameters()`` have been written to.

        A copy of a module refuses to be used after values have been written to its parameters, as
        for an average of a model: rows are not among them. So does any module after values have
        been written to the tensors of its ``state_dict()``, which are copies of the rows, and not
        been loaded. Call this where that was meant.
        """
        self._copied_anchor = self._own_anchor[0]._version
        self._given_entries = ()

    def _check_not_averaged(self) -> None:
        """Raise RuntimeError if values have been written to what stands for the rows.

        That is an entry of a state dict, or the parameters of a copy. Ranks write to parameters
        when they begin, to make them equal.
        """
        if any(entry.is_written() for entry in self._given_entries):
            raise RuntimeError(
                f"{type(self).__name__} ({', '.join(self._group.config.names[:3])}): values have "
                "been written to tensors of its state_dict(), as for an average or a target "
                "network, but these are copies, and its rows have not changed: use "
                "torch.optim.swa_utils.AveragedModel, which averages rows, too (give it an avg_fn "
                "that returns its second argument to copy them), give the state dict to "
                "load_state_dict(), or call follows_parameters() of the module if its rows are "
                "right"
            )
        self._given_entries = [entry for entry in self._given_entries if entry.is_alive()]
        anchor = self._own_anchor[0]
        if self._copied_anchor in (None, anchor._version) or self._anchor() is not anchor:
            return
        everyone = default_group()
        if everyone is not None and everyone.size() > 1:
            return
        raise RuntimeError(
            f"{type(self).__name__} ({', '.join(self._group.config.names[:3])}): the module is a "
            "copy, and values have been written to its parameters(), as for an average or a target "
            "network, but its rows are not among them and are still those of when it was copied: "
            "use torch.optim.swa_utils.AveragedModel, which averages rows, too (give it an avg_fn "
            "that returns its second argument to copy them), or call follows_parameters() of the "
            "module if its rows are right"
        )

    def __prepare_scriptable__(self) -> None:
        raise RuntimeError(
            f"{type(self).__name__}: torch.jit.script does not take dynamic tables: trace "
            "torch_dynemb.freeze(model) with torch.jit.trace, or export it with torch.export"
        )


__all__ = ["StatefulModule"]
