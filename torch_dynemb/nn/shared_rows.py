"""Rows of modules that several ranks share: each rank has those of some ids.

A lookup sends distinct ids to the ranks that have them and brings rows back. Its backward sends
gradients the same way; they are averaged over the ranks, as those of DDP are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.agreement import Described, Option, check_agreement, options_of
from torch_dynemb.distributed.owners import policy_of_share, slots_of
from torch_dynemb.distributed.ranks import RankGroup, process_group_of, rank_group
from torch_dynemb.nn.id_exchange import IdExchange
from torch_dynemb.nn.pooled_rows import RowsOfIds, pooled_rows
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.optim import OptimizerConfig
from torch_dynemb.storage.tiers.sharing import part_of_storage
from torch_dynemb.table.config import TableConfig
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.shards import IdSlots

ID_SLOTS = 65536  # to which ids are dealt; each rank has some of them


def ranks_of_option(owner: str, process_group: dist.ProcessGroup | None) -> RankGroup | None:
    """Check ``process_group`` and return its ranks; None: the rows are of this process alone.

    Args:
        owner: what errors begin with.
        process_group: of the option.
    """
    if process_group is None:
        return None
    given: object = process_group  # new_group() gives a number on other ranks
    outside = given is dist.GroupMember.NON_GROUP_MEMBER
    if not (outside or isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(
            f"{owner}: process_group is {described(process_group)}, expected a ProcessGroup such "
            "as torch.distributed.group.WORLD, or None"
        )
    if outside or dist.get_rank(process_group) < 0:
        raise ValueError(
            f"{owner}: process_group lacks this process (rank {dist.get_rank()}): construct the "
            "module on members only"
        )
    return rank_group(process_group)


def own_configs(
    owner: str,
    tables: Sequence[TableConfig],
    ranks: RankGroup,
    optimizer: OptimizerConfig | None,
    **settings: object,
) -> list[TableConfig]:
    """Return the configs of the tables of one rank, with its part of their storage.

    Args:
        owner: what errors begin with.
        tables: of the whole tables; a capacity is divided by the ranks.
        ranks: that share them.
        optimizer: of the rows.
        **settings: of the module, which ranks must have alike.

    Raises:
        ValueError: ranks differ, or a table has what lookups do not send.
    """
    alike: Described = {Option("", "optimizer"): repr(optimizer)}
    alike.update({Option("", name): repr(value) for name, value in settings.items()})
    configs = []
    for table in tables:
        if table.policy.custom is not None:
            raise ValueError(
                f"{owner}: table {table.name!r} keeps custom scores, which lookups do not send to "
                "other ranks: leave that score or process_group out"
            )
        if table.feature_policies:
            raise ValueError(
                f"{owner}: table {table.name!r} has feature_policies, which lookups do not send to "
                "other ranks: leave them or process_group out"
            )
        # paths may differ: each rank has its own disk
        alike.update(options_of(table.name, "table", replace(table, storage=None)))
        storage = table.storage
        if storage is not None and ranks.size > 1:
            names = [other.name for other in tables if other.storage == storage]
            storage = part_of_storage(storage, "", names, rank=ranks.rank, ranks=ranks.size)
        policy = policy_of_share(table.policy, ranks.size)
        configs.append(replace(table, policy=policy, storage=storage))
    check_agreement(owner, alike, process_group_of(ranks))
    return configs


def own_slots(ranks: RankGroup | None) -> IdSlots:
    """Return which ids this rank has."""
    if ranks is None or ranks.size == 1:
        return IdSlots()
    slots = slots_of(ranks.rank, ranks.size, ID_SLOTS)
    return IdSlots(slots.start, slots.stop, ID_SLOTS)


def are_own(ids: Tensor, ranks: RankGroup) -> Tensor:
    """Return bool [n]: whether this rank has each id.

    Args:
        ids: int64 [n].
        ranks: that share the table.
    """
    return ops.id_owners(ids, parts=ranks.size, slots=ID_SLOTS) == ranks.rank


class RowsHere(NamedTuple):
    """The part of shared tables on this rank, as an exchange of ids uses it.

    Attributes:
        group: the tables.
        learns: returns whether a lookup now is one of training.
        look_up: looks up ids that this rank has: a batch; by name ``counts`` and ``trains``.
    """

    group: TableGroup
    learns: Callable[[], bool]
    look_up: Callable[..., Tensor]

    @property
    def grad_reduce_by(self) -> str:
        """Gradients are divided by the number of ranks."""
        return "worker"

    @property
    def id_slots(self) -> int:
        """Number of slots to which ids are dealt."""
        return ID_SLOTS

    @property
    def counts_occurrences(self) -> bool:
        """Whether lookups need to know how often an id occurs: policies do."""
        return bool(self.group.config.layout.rows)

    def prefetch_lookup(self, batch: LookupBatch) -> None:
        """Begin to bring the rows of a lookup into memory."""
        self.group.prefetch(*batch.index_arguments)


def lookup_of_ranks(
    rows_here: RowsHere, batch: LookupBatch, ranks: RankGroup, *, trains: bool
) -> Tensor:
    """Look up a batch in tables that ranks share; all ranks call it, also with no ids.

    Args:
        here: the part on this rank.
        batch: what is asked for; rows of several dims come one dim after the other.
        ranks: that share the tables.
        trains: False: as in evaluation.

    Returns:
        float32 [B, sum of feature_dims], or [N, dim] without pooling.
    """
    if batch.pooling != Pooling.NONE:
        batch = _without_padding(rows_here.group, batch)

    def look_up(part: LookupBatch, begins: Tensor) -> RowsOfIds:
        exchange = IdExchange(
            rows_here, part.ids, begins, part.feature_tables, ranks, trains=trains
        )
        rows = exchange.rows(
            lambda received: rows_here.look_up(
                received.batch, counts=received.counts, trains=trains
            )
        )
        return RowsOfIds(rows, exchange.inverse)

    return pooled_rows(batch, look_up)


def _without_padding(group: TableGroup, batch: LookupBatch) -> LookupBatch:
    """Leave out padding ids, which count neither in sums nor in means."""
    paddings = [group.config.tables[table].padding_idx for table in batch.feature_tables]
    if all(padding is None for padding in paddings):
        return batch
    bags = (batch.offsets.shape[0] - 1) // len(paddings)
    lengths = batch.offsets.diff()
    feature = torch.arange(len(paddings), device=batch.ids.device).repeat_interleave(bags)
    of_id = feature.repeat_interleave(lengths, output_size=batch.ids.shape[0])
    has = torch.tensor([padding is not None for padding in paddings], device=batch.ids.device)
    values = torch.tensor([padding or 0 for padding in paddings], device=batch.ids.device)
    keep = ~(has[of_id] & (batch.ids == values[of_id]))
    before = torch.cat([batch.offsets.new_zeros(1), keep.cumsum(0)])
    weights = batch.per_sample_weights
    return batch._replace(
        ids=batch.ids[keep],
        offsets=before[batch.offsets],
        per_sample_weights=None if weights is None else weights[keep],
    )


def check_bags(batch: LookupBatch) -> None:
    """Check the offsets of a batch before its ids are sent; on a GPU, only its kernels do.

    Raises:
        RuntimeError: offsets do not ascend from 0 to the number of ids.
    """
    offsets, count = batch.offsets, batch.ids.shape[0]
    if offsets.shape[0] == 0 or offsets.device.type != "cpu":
        return
    lengths = offsets.diff()
    if bool((lengths < 0).any()):
        wrong = int((lengths < 0).nonzero()[0])
        raise RuntimeError(
            f"offsets[{wrong + 1}] is {int(offsets[wrong + 1])}, less than offsets[{wrong}] = "
            f"{int(offsets[wrong])}: offsets must not decrease"
        )
    if int(offsets[0]) != 0 or int(offsets[-1]) != count:
        raise RuntimeError(
            f"offsets are from {int(offsets[0])} to {int(offsets[-1])}, expected 0 to {count}, the "
            "number of ids: offsets have one element per bag and that number at the end"
        )


__all__ = [
    "ID_SLOTS",
    "RowsHere",
    "are_own",
    "check_bags",
    "lookup_of_ranks",
    "own_configs",
    "own_slots",
    "ranks_of_option",
]
