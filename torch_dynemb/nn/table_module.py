"""Base of the modules over a table group: its options and its lookups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Unpack

from torch_dynemb import ops
from torch_dynemb._library.error_names import name_tables
from torch_dynemb.argument_checks import flag
from torch_dynemb.distributed.ranks import process_group_of
from torch_dynemb.distributed.seed import common_start
from torch_dynemb.keyword_options import options_for, takes_options
from torch_dynemb.nn import loss_scaling
from torch_dynemb.nn.forgotten_steps import count_lookup
from torch_dynemb.nn.guards import check_call, check_other_ranks, check_same_step, watch_tables
from torch_dynemb.nn.id_exchange import fail_exchange
from torch_dynemb.nn.module_kinds import RowOptimizers, SharedRows, register_module
from torch_dynemb.nn.module_state import StatefulModule
from torch_dynemb.nn.options import ModuleOptions
from torch_dynemb.nn.recomputation import repeats_a_forward
from torch_dynemb.nn.replication import (
    WORLD,
)
from torch_dynemb.nn.shared_rows import (
    RowsHere,
    check_bags,
    lookup_of_ranks,
    own_configs,
    ranks_of_option,
)
from torch_dynemb.nn.static_arguments import ATTRIBUTES, missing_attribute
from torch_dynemb.ops.autograd import needs_grad
from torch_dynemb.ops.columns import NO_HANDLE, REFUSED_HANDLE
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.ops.update import NO_OPTIMIZER
from torch_dynemb.optim.base import check_config
from torch_dynemb.storage.device import check_device, device_of
from torch_dynemb.table import lookup as table_lookup
from torch_dynemb.table.config import ROW_DTYPES, TableConfig
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.options import GroupOptions
from torch_dynemb.table.tables import Tables


class TableModule(StatefulModule):
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
    _can_be_wrapped = True  # by DistributedDataParallel and the like
    # what to use in place of attributes of other libraries, by name
    _instead: ClassVar[Mapping[str, str]] = ATTRIBUTES

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
        of_group = options_for(GroupOptions, options)
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
        self._optimizer = self._optimizer_of(self._group.tables)
        watch_tables(self)

    def __getattr__(self, name: str) -> Any:
        try:  # a subclass may have a parameter or a module of such a name
            return super().__getattr__(name)
        except AttributeError:
            if name in self._instead:
                raise missing_attribute(type(self).__name__, name, self._instead) from None
            raise

    # -- lookup --------------------------------------------------------------------------------

    def learns(self) -> bool:
        """Return whether a lookup now trains: new ids get rows, and backward changes them."""
        return self._learns_by(self.grad_anchor)

    def _learns_by(self, anchor: nn.Parameter) -> bool:
        return self.training and self.trainable and anchor.requires_grad and torch.is_grad_enabled()

    def _tables_to_read(self) -> Tables | None:
        """Return the tables if a lookup now is one op that changes nothing; None: it is more.

        Weights of ids, which may get a gradient, are ignored.
        """
        anchor = self._anchor()
        if self._learns_by(anchor) or process_group_of(self._ranks) is not None:
            return None
        check_call(self, anchor)
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
            assert self._ranks is not None
            check_call(self, self._anchor())
            rows_here = RowsHere(self._group, self.learns, self._lookup_here)
            return self._as_output(lookup_of_ranks(rows_here, batch, self._ranks, trains=trains))
        rows = self._lookup_here(
            batch,
            feature_policies=feature_policies,
            scores=scores,
            counts=counts,
            inserts=inserts,
            trains=trains,
        )
        return self._as_output(rows)

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

    def _lookup_here(
        self,
        batch: LookupBatch,
        *,
        feature_policies: list[int] | None = None,
        scores: Tensor | None = None,
        counts: Tensor | None = None,
        inserts: bool = True,
        trains: bool = True,
    ) -> Tensor:
        """Look up float32 rows of this process; see :meth:`_lookup`."""
        anchor, learning = self._begin_lookup(batch.ids, trains)
        tables = self._group.tables
        if learning and tables.trained_by_one_op and scores is None and counts is None and inserts:
            rows = self._trained_by_one_op(tables, batch, anchor, feature_policies)
            if rows is not None:
                return rows
        weights = batch.per_sample_weights
        if not learning and (weights is None or not needs_grad(weights)):
            return table_lookup.find_and_read(tables, batch)
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
            output.register_hook(functools.partial(check_same_step, name, tiers, tiers.epoch))
        return output

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
        check_call(self, anchor)
        if self._ranks is not None and anchor is not self._own_anchor[0]:
            anchor = self._unwrapped_anchor[0]  # type: ignore[assignment]
        if learning and torch.compiler.is_compiling():
            check_other_ranks(self)
        elif learning:
            if WORLD.default_pg is not None:
                check_other_ranks(self)
            if loss_scaling.scaled_task >= 0:
                loss_scaling.check_not_scaled(type(self).__name__)
            # not on a GPU, where the count would have to be waited for; train(False) and state_dict
            # report
            if not ids.is_cuda:
                count_lookup(self)
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

    def _handles_of(self, batch: LookupBatch) -> tuple[Tensor, nn.Parameter | None]:
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

    # -- ranks ---------------------------------------------------------------------------------

    def _is_shared(self) -> bool:
        """Return whether the rows are those of a table that lies on all ranks."""
        return self._ranks is not None and self._ranks.size == dist.get_world_size()

    @property
    def _shared_rows(self) -> SharedRows | None:
        """The ranks that have one norm of gradients; see :func:`torch_dynemb.clip_grad_norm_`."""
        process_group = process_group_of(self._sharing_ranks)
        return None if process_group is None else SharedRows(process_group, self._group.device)

    @property
    def _shares_infinities(self) -> bool:
        """Whether all ranks that share the rows learn of an infinity that GradScaler finds."""
        return True

    # -- state, copies, devices ----------------------------------------------------------------

    def extra_repr(self) -> str:
        config, sizes = self._group.config, self._group.sizes()
        tables = [f"{table.summary()}, {sizes[table.name]} ids" for table in config.tables]
        lines = [*tables, f"optimizer={config.optimizer!r}, trainable={self.trainable}"]
        return ", ".join(lines) if len(tables) == 1 else "\n".join(lines)


def _optimizers_in(module: TableModule) -> RowOptimizers:
    optimizers = [] if module._optimizer is None else [module._optimizer]
    return RowOptimizers(optimizers, module._shared_rows, module._anchor())


register_module(TableModule, optimizers=_optimizers_in)

__all__ = ["TableModule"]
