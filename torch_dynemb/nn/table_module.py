"""Base of the modules over a table group: lookup, optimizer, state, copies, guards."""

from __future__ import annotations

import copy
import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from torch_dynemb import ops
from torch_dynemb._library.error_names import name_tables
from torch_dynemb.argument_checks import flag
from torch_dynemb.distributed.ranks import RankGroup, default_group, process_group_of
from torch_dynemb.distributed.seed import common_start
from torch_dynemb.keyword_options import part_of, takes_options
from torch_dynemb.nn import backward_updates, conversions, gradient_clipping, loss_scaling
from torch_dynemb.nn.distributed_checkpoint import StateNames, support_default_planner
from torch_dynemb.nn.id_exchange import fail_exchange
from torch_dynemb.nn.module_entries import EntryErrors, load_entries
from torch_dynemb.nn.module_kinds import RowOptimizers, SharedRows, register_module
from torch_dynemb.nn.options import ModuleOptions
from torch_dynemb.nn.rank_states import check_caller, rank_entry
from torch_dynemb.nn.recomputation import repeats_a_forward
from torch_dynemb.nn.replication import (
    WORLD,
    has_other_ranks,
    is_replicated,
    refuse_other_ranks,
    refuse_replicated,
)
from torch_dynemb.nn.shared_rows import (
    RowsHere,
    check_bags,
    lookup_of_ranks,
    own_configs,
    own_slots,
    ranks_of_option,
)
from torch_dynemb.nn.static_arguments import ATTRIBUTES, missing_attribute
from torch_dynemb.nn.zero_grad import zero_rows_too
from torch_dynemb.ops.autograd import needs_grad
from torch_dynemb.ops.columns import NO_HANDLE, REFUSED_HANDLE
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.ops.update import NO_OPTIMIZER
from torch_dynemb.optim import FusedOptimizer, OptimizerConfig, SplitOptimizer
from torch_dynemb.optim.base import check_config
from torch_dynemb.process.interrupts import defer_signals
from torch_dynemb.storage.device import check_device, device_of
from torch_dynemb.storage.tiers.tiers import Tiers
from torch_dynemb.table import extension as table_extension
from torch_dynemb.table import lookup as table_lookup
from torch_dynemb.table.config import ROW_DTYPES, TableConfig
from torch_dynemb.table.dense_state import leaves_tables_out
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.options import GroupOptions
from torch_dynemb.table.pending_gradients import sort_pending
from torch_dynemb.table.shards import IdSlots
from torch_dynemb.table.steps import check_step
from torch_dynemb.table.tables import Tables

# Updates without optimizer.step() from which on a module reports that the call is missing.
FORGOTTEN_STEPS = 16
# The same in split mode, where many micro-batches may be one step.
FORGOTTEN_SPLIT_STEPS = 256
# Lookups until which that is not reported again.
NEVER = -(1 << 62)
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


def _check_same_step(owner: str, tiers: Tiers, epoch: int, gradient: Tensor) -> None:
    """Raise RuntimeError if rows of a gradient may have left memory."""
    if tiers.epoch != epoch:
        raise RuntimeError(
            f"{owner}: backward of a lookup {tiers.epoch - epoch} steps ago, since when its rows "
            "may have left memory: call backward before optimizer.step(), or leave storage out"
        )


def _watch(module: TableModule) -> None:
    """Have calls of torch checked that would come too late for the module's rows."""
    backward_updates.register(module)
    loss_scaling.watch_scalers()
    gradient_clipping.watch_clipping()
    conversions.check_conversions()
    zero_rows_too()


class TableModule(nn.Module):
    """Base of the modules. Its tables are not parameters: the optimizer updates them in backward.

    Args:
        tables: of the group.
        seed: see :class:`torch_dynemb.TableGroup`.
        **options: those of :class:`torch_dynemb.ModuleOptions`.

    Under activation checkpointing policies count ids once. With ``use_reentrant=True`` the forward
    runs without grad first, which only reads: a new id gives its ``eval_default`` there, and gets
    its row in the backward. A second such checkpoint of the table in a backward reads rows that
    the first has updated. ``use_reentrant=False`` gives it the row in the forward. Compile what
    calls ``checkpoint``, not what it calls: compiled code does not know that it runs again.
    """

    _private_to_rank = False  # see private_to_rank()
    _ranks: RankGroup | None = None  # that share the rows
    # Of a copy: the version of its anchor, to which writing to all parameters() adds.
    _copied_anchor: int | None = None
    # Of state dicts that are alive, or were when it was last looked at.
    _given_entries: Sequence[_GivenEntry] = ()

    @takes_options
    def __init__(
        self,
        tables: Sequence[TableConfig],
        *,
        seed: int | None = None,
        **options: Unpack[ModuleOptions],
    ) -> None:
        super().__init__()
        owner = type(self).__name__
        optimizer, trainable = options["optimizer"], options["trainable"]
        output_dtype, device = options["output_dtype"], options["device"]
        if trainable and optimizer is None:
            raise ValueError(
                f"{owner}: optimizer is None, but the rows of a trainable table are updated in "
                "backward: give a config such as optimizer=Adam(lr=1e-3), or trainable=False and "
                "an optimizer later with set_optimizer()"
            )
        if optimizer is not None:
            check_config(f"{owner}: optimizer", optimizer)
        if output_dtype not in ROW_DTYPES:
            raise TypeError(
                f"{owner}: output_dtype is {output_dtype}, expected one of {list(ROW_DTYPES)}"
            )
        flag(f"{owner}: trainable", trainable)
        if device is not None:
            check_device(owner, device_of(owner, device))
        self.trainable = trainable
        self._ranks = ranks_of_option(owner, options["process_group"])
        if self._ranks is not None:
            tables = own_configs(
                owner,
                tables,
                self._ranks,
                optimizer,
                trainable=trainable,
                output_dtype=output_dtype,
                split=options["split"],
            )
            shared_by = process_group_of(self._ranks)
            seed = common_start(shared_by, own_seed=seed, device=None).seed
        of_group = part_of(GroupOptions, options)
        self._group = TableGroup(tables, optimizer=optimizer, seed=seed, **of_group)
        self._group.owner = owner
        self.output_dtype = output_dtype
        # Not a weight: autograd runs the backward of a lookup because of it. Shape (1,): FSDP2
        # takes neither scalars nor empty parameters.
        anchor = torch.zeros(1, device=self._group.device)
        self.grad_anchor = nn.Parameter(anchor, requires_grad=trainable)
        self._own_anchor = (self.grad_anchor,)
        # in a tuple: no parameter of the module, which wrappers would replace
        self._unwrapped_anchor = (anchor.clone().requires_grad_(trainable),)
        self._optimizer = self._make_optimizer()
        _watch(self)

    def __getattr__(self, name: str) -> Any:
        try:  # a subclass may have a parameter or a module of such a name
            return super().__getattr__(name)
        except AttributeError:
            if name in ATTRIBUTES:
                raise missing_attribute(type(self).__name__, name) from None
            raise

    # -- properties ----------------------------------------------------------------------------

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

    def forget_gradients(self) -> None:
        """Forget the gradients of rows in split mode, for ``zero_grad()`` of a model."""
        if self._optimizer is not None:
            self._optimizer.zero_grad()

    def sizes(self) -> dict[str, int]:
        """Number of ids by table name."""
        return self._group.sizes()

    def memory(self) -> dict[str, int]:
        """Bytes in use: ``rows``, ``state``, ``index``, ``total``."""
        return self._group.usage.memory()

    def _make_optimizer(self) -> FusedOptimizer | None:
        return self._optimizer_of(self._group.tables)

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
            self._optimizer.rebind(rows=self._group.rows, end_step=self._step_end())

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
            TypeError: ``config`` is no optimizer config.
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
        self._group.become(changed)
        if self._optimizer is not None:
            self._optimizer.retire(
                "the tables got another optimizer by set_optimizer()", "module.optimizer"
            )
        self._optimizer = optimizer
        self.trainable = True
        self.grad_anchor.requires_grad_(True)

    def _with_optimizer(self, config: OptimizerConfig) -> Tables:
        """Make tables with another optimizer."""
        return table_extension.reoptimize(self._group.tables, config)

    # -- lookup --------------------------------------------------------------------------------

    def learns(self) -> bool:
        """Return whether a lookup now trains: new ids get rows, and backward changes them."""
        return self._learns_by(self.grad_anchor)

    def _learns_by(self, anchor: nn.Parameter) -> bool:
        return self.training and self.trainable and anchor.requires_grad and torch.is_grad_enabled()

    def _anchor(self) -> nn.Parameter:
        anchor = self._parameters.get("grad_anchor")  # nn.Module takes longer to find it
        return self.grad_anchor if anchor is None else anchor  # None: FSDP has replaced it

    def _tables_to_read(self) -> Tables | None:
        """Return the tables if a lookup now is one op that changes nothing; None: it is more.

        Weights of ids, which may get a gradient, are ignored.
        """
        anchor = self._anchor()
        if self._learns_by(anchor) or process_group_of(self._ranks) is not None:
            return None
        self._check_call(anchor)
        tables = self._group.tables
        return tables if tables.read_by_one_op else None

    def _train_rows(self, ids: Tensor) -> Tensor | None:
        """Look rows of the one table up for training, if that is one op; see :meth:`_lookup`.

        Args:
            ids: int64 [n], as ops take them.
        """
        tables = self._group.tables
        if self._ranks is not None or not ops.is_eager(ids, tables.one_bag):
            return None
        lookup = tables.row_lookup()
        if lookup is None or tables.host.forked:
            return None
        anchor, learning = self._begin_lookup(ids, True)
        if not learning:
            return None
        return self._as_output(ops.insert_and_embed_rows(lookup, ids, anchor))

    def _lookup(
        self,
        batch: LookupBatch,
        *,
        feature_policies: list[int] | None = None,
        scores: Tensor | None = None,
        counts: Tensor | None = None,
        inserts: bool = True,
        trains: bool = True,
    ) -> Tensor:
        """Call the index once and the rows once for all features; see ``ops.index``.

        Args:
            batch: what is asked for, in the tables of the group.
            feature_policies, scores, counts: see :meth:`torch_dynemb.TableGroup.find_or_insert`.
            inserts: False: training gives no rows to new ids, which read what refused ones read.
            trains: False: as in evaluation, but per_sample_weights may get a gradient.
        """
        if process_group_of(self._ranks) is not None:
            return self._lookup_of_ranks(batch, trains=trains)
        return self._lookup_here(
            batch,
            feature_policies=feature_policies,
            scores=scores,
            counts=counts,
            inserts=inserts,
            trains=trains,
        )

    def _lookup_of_ranks(self, batch: LookupBatch, *, trains: bool) -> Tensor:
        """Look up ids of which other ranks have the rows; see :meth:`_lookup`."""
        assert self._ranks is not None
        self._check_call(self._anchor())
        here = RowsHere(self._group, self.learns, self._look_up_own)
        return self._as_output(lookup_of_ranks(here, batch, self._ranks, trains=trains))

    def _requested(self, make: Callable[..., LookupBatch], *input: Any) -> LookupBatch:
        """Make the batch of a forward; if one rank cannot, all ranks raise its error.

        Compiled code raises on that rank alone.

        Args:
            make: checks the input.
            *input: of the forward.
        """
        if process_group_of(self._ranks) is None or torch.compiler.is_compiling():
            return make(*input)
        try:
            batch = make(*input)
            self._check_bags(batch)
        except Exception as error:
            self._fail_lookup(error)
        return batch

    def _check_bags(self, batch: LookupBatch) -> None:
        try:
            check_bags(batch)
        except RuntimeError as error:
            name_tables(error, self._group.config.names)
            raise

    def _fail_lookup(self, failure: Exception) -> NoReturn:
        """Raise an error on all ranks that share the rows, in place of a lookup of them."""
        if process_group_of(self._ranks) is None or torch.compiler.is_compiling():
            raise failure
        assert self._ranks is not None
        fail_exchange(self._group.device, self._ranks, failure)

    def _look_up_own(self, batch: LookupBatch, counts: Tensor | None, trains: bool) -> Tensor:
        """Look up ids that this rank has, for any rank; float32 rows."""
        return self._lookup_here(batch, counts=counts, trains=trains, converts=False)

    def _lookup_here(
        self,
        batch: LookupBatch,
        *,
        feature_policies: list[int] | None = None,
        scores: Tensor | None = None,
        counts: Tensor | None = None,
        inserts: bool = True,
        trains: bool = True,
        converts: bool = True,
    ) -> Tensor:
        """Look up rows of this process; see :meth:`_lookup`.

        Args:
            batch, feature_policies, scores, counts, inserts, trains: as :meth:`_lookup`.
            converts: False: rows stay float32.
        """
        anchor, learning = self._begin_lookup(batch.ids, trains)
        tables = self._group.tables
        if learning and tables.trained_by_one_op and scores is None and counts is None and inserts:
            rows = self._trained_by_one_op(tables, batch, anchor, feature_policies)
            if rows is not None:
                return self._as_output(rows) if converts else rows
        weights = batch.per_sample_weights
        if not learning and (weights is None or not needs_grad(weights)):
            rows = table_lookup.find_and_read(tables, batch)
            return self._as_output(rows) if converts else rows
        if learning:
            handles = self._training_handles(
                batch, feature_policies, scores=scores, counts=counts, inserts=inserts
            )
        else:
            handles = table_lookup.find(tables, *batch.index_arguments).handles
            handles = table_lookup.without_expired(tables, *batch.index_arguments, handles)
        # rows that a gradient of weights needs stay in memory, too, until the step ends
        handles = table_lookup.stage(tables, batch, handles)
        output = ops.embedding(
            tables.rows,
            batch,
            handles,
            anchor,
            optimizer=tables.config.optimizer_code if learning else NO_OPTIMIZER,
        )
        tiers = tables.tiers
        if tiers is not None and output.requires_grad and not torch.compiler.is_compiling():
            name = type(self).__name__
            output.register_hook(functools.partial(_check_same_step, name, tiers, tiers.epoch))
        return self._as_output(output) if converts else output

    def _trained_by_one_op(
        self,
        tables: Tables,
        batch: LookupBatch,
        anchor: nn.Parameter,
        feature_policies: list[int] | None,
    ) -> Tensor | None:
        """Look rows up for training in one call of an op, if nothing observes the calls of ops."""
        if not ops.is_eager(batch.ids, batch.offsets):
            return None
        if tables.host.forked:
            tables.check_own()
        config = tables.config
        if config.layout.rows:
            if repeats_a_forward(type(self).__name__):
                return None
            if feature_policies is None:
                feature_policies = batch.feature_tables
        return ops.insert_and_embed(
            tables.rows,
            tables.bound(),
            batch,
            anchor,
            optimizer=config.optimizer_code,
            feature_policies=feature_policies or [],
        )

    def _begin_lookup(self, ids: Tensor, trains: bool) -> tuple[nn.Parameter, bool]:
        """Check that the rows of this process can be looked up now.

        Returns:
            The anchor of the lookup, and whether it trains.
        """
        anchor = self._anchor()
        learning = trains and self._learns_by(anchor)
        self._check_call(anchor)
        if self._ranks is not None and anchor is not self._own_anchor[0]:
            anchor = self._unwrapped_anchor[0]  # type: ignore[assignment]
        if learning and torch.compiler.is_compiling():
            if has_other_ranks():
                self._check_other_ranks()
        elif learning:
            if WORLD.default_pg is not None and has_other_ranks():
                self._check_other_ranks()
            if loss_scaling.scaled_task >= 0:
                loss_scaling.check_not_scaled(type(self).__name__)
            # not on a GPU, where the count would have to be waited for; train(False) and state_dict
            # report
            if not ids.is_cuda:
                self._count_lookup()
        return anchor, learning

    def _training_handles(
        self,
        batch: LookupBatch,
        feature_policies: list[int] | None = None,
        *,
        scores: Tensor | None = None,
        counts: Tensor | None = None,
        inserts: bool = True,
    ) -> Tensor:
        """Find or insert the ids of a training lookup; see :meth:`_lookup`."""
        tables = self._group.tables
        if tables.host.forked:
            tables.check_own()
        # Activation checkpointing runs a forward again. Policies have seen its ids then: an id
        # without a row at this point was not admitted. Without policies, inserting again changes
        # nothing.
        if not inserts or (tables.config.layout.rows and repeats_a_forward(type(self).__name__)):
            found = table_lookup.find(tables, *batch.index_arguments).handles
            return torch.where(found == NO_HANDLE, REFUSED_HANDLE, found)
        table_lookup.reserve_space(tables, batch)
        return table_lookup.find_or_insert(
            tables, *batch.index_arguments, feature_policies, scores=scores, counts=counts
        )

    def handles_of(self, batch: LookupBatch) -> tuple[Tensor, nn.Parameter | None]:
        """Find ids as :meth:`forward` does: in training new ones get a row.

        Args:
            batch: asks for a row for each id of one table in memory, of this process alone.

        Returns:
            Handles, int64 [N], and the anchor of their lookup in training, else None.
        """
        anchor, learning = self._begin_lookup(batch.ids, True)
        if learning:
            return self._training_handles(batch), anchor
        tables = self._group.tables
        handles = table_lookup.find(tables, *batch.index_arguments).handles
        return table_lookup.without_expired(tables, *batch.index_arguments, handles), None

    def _as_output(self, rows: Tensor) -> Tensor:
        return rows if self.output_dtype == torch.float32 else rows.to(self.output_dtype)

    def _prefetch(self, batch: LookupBatch, ahead: int) -> None:
        """Begin to bring the rows of ids into memory; see ``TableGroup.prefetch``."""
        if torch.compiler.is_compiling():
            raise RuntimeError(
                f"{type(self).__name__}.prefetch: called in compiled code, which runs in its own "
                "order: call it between the forward and the next one, outside of torch.compile"
            )
        self._group.prefetch(*batch.index_arguments, ahead=ahead)

    # -- guards --------------------------------------------------------------------------------

    def _check_call(self, anchor: nn.Parameter) -> None:
        """Raise RuntimeError where a live table cannot be looked up.

        Args:
            anchor: the module's now.
        """
        if not torch.compiler.is_compiling():
            if torch._C._is_tracing():
                raise RuntimeError(
                    f"{type(self).__name__}: a live table cannot be traced by torch.jit (the trace "
                    "would hold its whole reservation): trace torch_dynemb.freeze(model)"
                )
            if self._copied_anchor is not None or self._given_entries:
                self._check_not_averaged()
        elif torch.compiler.is_exporting():
            raise RuntimeError(
                f"{type(self).__name__}: a live table cannot be exported (its whole reservation "
                "would be saved): export torch_dynemb.freeze(model)"
            )
        self._check_not_replicated(anchor)

    def _check_not_replicated(self, anchor: nn.Parameter) -> None:
        if self._ranks is not None:
            return
        if is_replicated(anchor, self._own_anchor[0]):
            refuse_replicated(self)

    def _check_other_ranks(self) -> None:
        """Raise RuntimeError unless all ranks share the rows, or are meant not to."""
        if not (self._private_to_rank or self._is_shared()):
            refuse_other_ranks(self, self._group.names)

    def _is_shared(self) -> bool:
        """Return whether the rows are those of a table that lies on all ranks."""
        return self._ranks is not None and self._ranks.size == dist.get_world_size()

    @property
    def sharing_ranks(self) -> RankGroup | None:
        """The ranks that share the rows; None: they are of this process alone."""
        return self._ranks

    @property
    def owned_slots(self) -> IdSlots:
        """Which ids this rank has."""
        return own_slots(self._ranks)

    @property
    def shared_rows(self) -> SharedRows | None:
        """The ranks that have one norm of gradients; see :func:`torch_dynemb.clip_grad_norm_`."""
        process_group = process_group_of(self.sharing_ranks)
        return None if process_group is None else SharedRows(process_group, self._group.device)

    @property
    def shares_infinities(self) -> bool:
        """Whether all ranks that share the rows learn of an infinity that GradScaler finds."""
        return True

    def _most_backwards(self) -> int:
        return FORGOTTEN_SPLIT_STEPS if self._group.config.split else FORGOTTEN_STEPS

    def _count_lookup(self) -> None:
        if self._optimizer is None:
            return
        # There are no more backwards than lookups, and to read their number is two calls of torch.
        if self._optimizer.lookups_since_step >= self._most_backwards():
            backwards = self._report_forgotten_step()
            reported = backwards >= self._most_backwards()  # once, until the next step()
            self._optimizer.lookups_since_step = NEVER if reported else backwards
        self._optimizer.lookups_since_step += 1

    def _report_forgotten_step(self) -> int:
        """Warn if ``optimizer.step()`` is missing; return how many backwards there were."""
        if self._optimizer is None:
            return 0
        backwards = self._optimizer.updates_since_step()
        split = self._group.config.split
        if backwards >= self._most_backwards():
            done = "have gathered gradients" if split else "have updated the rows"
            names = ", ".join(self._group.config.names[:3])
            names += ", ..." if len(self._group.config.names) > 3 else ""
            self._optimizer.accumulation_is_known()
            warnings.warn(
                f"{type(self).__name__} ({names}): {backwards} backwards {done} "
                f"{self._missing_step()}",
                RuntimeWarning,
                stacklevel=3,
            )
        return backwards

    def train(self, mode: bool = True) -> TableModule:
        """Set training mode; leaving it reports a forgotten ``optimizer.step()``."""
        if not mode and self.training:
            self._report_forgotten_step()
        super().train(mode)
        return self

    def _missing_step(self) -> str:
        split = self._group.config.split
        accumulation = "" if split else "; gradients are accumulated with split=True only"
        return (
            "since the last optimizer.step() of the module: call it once per training step; "
            f"torch_dynemb.table_optimizers(model) has the optimizers of all tables{accumulation}"
        )

    # -- state, copies, devices ----------------------------------------------------------------

    def _save_to_state_dict(
        self, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        self._report_forgotten_step()
        self._check_not_averaged()
        if leaves_tables_out():
            return
        check_caller(type(self).__name__, self._group.names, self.sharing_ranks)
        support_default_planner()
        entries = self._group.state.tensors()
        for name, tensor in entries.items():
            destination[prefix + self._rank_entry + name] = tensor
        rows = [_GivenEntry(of) for of in entries.values() if of.is_floating_point()]
        self._given_entries = [*self._given_entries, *rows]

    @property
    def _rank_entry(self) -> str:
        """Beginning of names of entries; empty: this process has all rows."""
        return rank_entry(self.sharing_ranks)

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

    def check_conversion(self, fn: Callable[[Tensor], Tensor]) -> Tensor:
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

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TableModule:
        probe = self.check_conversion(fn)
        if probe.device != self._group.device:
            anchor = nn.Parameter(
                self.grad_anchor.detach().to(probe.device),
                requires_grad=self.grad_anchor.requires_grad,
            )
            with self._group.tables.changing(moves_rows=True):
                moved = table_extension.on_device(self._group.tables, probe.device)
                with defer_signals():
                    self._group.become(moved)
                    self.grad_anchor = anchor
                    self._own_anchor = (anchor,)
                    self._unwrapped_anchor = (anchor.detach().clone().requires_grad_(),)
                    if self._copied_anchor is not None:
                        self.follows_parameters()
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
        self._optimizer = self._make_optimizer()
        if self._optimizer is not None:
            self._optimizer.load_state_dict(saved)
        _watch(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableModule:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        twin.follows_parameters()
        return twin

    def follows_parameters(self) -> None:
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
        own = self._own_anchor[0]
        if self._copied_anchor in (None, own._version) or self._anchor() is not own:
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

    def extra_repr(self) -> str:
        config, sizes = self._group.config, self._group.sizes()
        tables = [f"{table.summary()}, {sizes[table.name]} ids" for table in config.tables]
        lines = [*tables, f"optimizer={config.optimizer!r}, trainable={self.trainable}"]
        return ", ".join(lines) if len(tables) == 1 else "\n".join(lines)


def _optimizers_in(module: TableModule) -> RowOptimizers:
    own = [] if module._optimizer is None else [module._optimizer]
    return RowOptimizers(own, module.shared_rows, module._anchor())


register_module(TableModule, optimizers=_optimizers_in)

__all__ = ["FORGOTTEN_SPLIT_STEPS", "FORGOTTEN_STEPS", "TableModule"]
