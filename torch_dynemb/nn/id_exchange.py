"""Rows of ids that lie on several ranks: distinct ids go to their owners, and rows come back.

Inserted rows go to the owners, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.distributed.exchange import all_to_all, arrived, move_rows, one_to_each
from torch_dynemb.distributed.failures import FAILED, raise_together, sendable
from torch_dynemb.distributed.purposes import HEADER, Purpose, check_alike, identity_of
from torch_dynemb.distributed.ranks import RankGroup, process_group_of
from torch_dynemb.distributed.together import ranks_of
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.rows.row_update import RowUpdate
from torch_dynemb.rows.whole_update import apply_all
from torch_dynemb.table.given_scores import scores_of_distinct
from torch_dynemb.table.group import TableGroup
from torch_dynemb.table.row_batch import RowBatch


class Arrived(NamedTuple):
    """Ids that came to their rank.

    Attributes:
        batch: asks for a row for each of n ids, child after child.
        counts: int64 [n], how often each id occurs; None: once.
        scores: int64 or float64 [n], custom scores of all occurrences of each id; None: the lookup
            brings none.
    """

    batch: LookupBatch
    counts: Tensor | None
    scores: Tensor | None


class SharedTable(Protocol):
    """A table that ranks share, each with some of its ids."""

    @property
    def grad_reduce_by(self) -> str:
        """``"worker"``: the gradient of an id is the sum of what ranks send, divided by the number
        of ranks; ``"id"``: by the number of ranks that sent it.
        """

    @property
    def group(self) -> TableGroup:
        """The rows that this rank has."""

    @property
    def id_slots(self) -> int:
        """To how many slots ids are dealt, of which each rank has some."""

    @property
    def counts_occurrences(self) -> bool:
        """Whether lookups need to know how often an id occurs."""

    def learns(self) -> bool:
        """Return whether a lookup now is one of training."""

    def prefetch_lookup(self, batch: LookupBatch) -> None:
        """Begin to bring the rows of a lookup into memory."""


class _ScaledGradient(torch.autograd.Function):
    """Rows as they are; their gradients are multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (factor,) = ctx.saved_tensors
        return grad * factor, None


def _sizes(lengths: Tensor, total: int | None = None) -> list[int]:
    """Count ids by rank, from lengths [ranks, groups]: numbers that the host must know.

    Args:
        total: what they add up to, where that is known.
    """
    sizes = lengths.sum(1).tolist()
    if torch.compiler.is_compiling():
        for size in sizes:
            torch._check(size >= 0)
        if total is not None:
            torch._check(sum(sizes) == total)
    result: list[int] = sizes
    return result


def fail_exchange(device: torch.device, ranks: RankGroup, failure: Exception) -> NoReturn:
    """Raise the error of a rank that cannot start its exchange, on all ranks that start theirs.

    Args:
        device: of the tables.
        ranks: that share them.
        failure: the error of this rank.

    Raises:
        Exception: of the class of ``failure``.
    """
    with torch.no_grad():
        header = torch.full((ranks.size, HEADER), FAILED, dtype=torch.int64, device=device)
        one_to_each(header, ranks)
    process_group = process_group_of(ranks)
    assert process_group is not None
    raise_together(failure, process_group)
    raise failure


class IdExchange:
    """Ids on their way: from construction until :meth:`rows`, other work can be done.

    Args:
        table: of the rows, on all ranks.
        ids: int64 [N], child after child.
        offsets: int64 [children + 1], where children begin in ``ids``.
        children: their numbers.
        ranks: that share the table.
        call: what the exchange is for, such as ``"prefetch"``; default: a lookup.
        trains: False: as in evaluation.
        scores: custom scores of the ids, int64 or float64 [N], on all ranks or on none.

    Raises:
        Exception: another rank has called :func:`fail_exchange`; of the class of its error.
        RuntimeError: another rank begins an exchange of other tables, or for something else.
    """

    def __init__(
        self,
        table: SharedTable,
        ids: Tensor,
        offsets: Tensor,
        children: list[int],
        ranks: RankGroup,
        *,
        call: str = "lookup",
        trains: bool,
        scores: Tensor | None = None,
    ) -> None:
        self._table = table
        self._children = children
        self._ranks = ranks
        self._learns = trains and table.learns()
        config = table.group.config
        names = tuple([config.tables[child].name for child in children])
        call = f"{'training ' * self._learns}{call}{' with scores' * (scores is not None)}"
        purpose = Purpose(call, names, config.seed)
        distinct = ops.ids_partition(ids, offsets, parts=ranks.size, slots=table.id_slots)
        self.inverse = distinct.inverse
        proposed = table.group.clock.proposed
        with torch.no_grad():
            lengths = distinct.lengths
            if proposed is not None:
                lengths = torch.cat([proposed.expand(ranks.size, 1), lengths], 1)
            padding = HEADER - 1 - lengths.shape[1]  # negative: leaves out the last ones
            header = torch.constant_pad_nd(lengths, (1, padding), identity_of(purpose))
            received = one_to_each(header, ranks)
            self._check_alike(purpose, received[:, 0].tolist())
            received = received[:, 1 : 1 + lengths.shape[1]]
            if padding < 0:
                received = torch.cat([received, one_to_each(lengths[:, padding:], ranks)], 1)
            self._proposals = None if proposed is None else received[:, 0]
            self._received_lengths = received[:, -len(children) :]
            self._sent = _sizes(distinct.lengths, distinct.ids.shape[0])
            self._received = _sizes(self._received_lengths)
            self._ids = all_to_all(distinct.ids, self._received, self._sent, ranks)
            self._counts = None
            if table.counts_occurrences:
                self._counts = all_to_all(distinct.counts, self._received, self._sent, ranks)
            self._scores = None
            if scores is not None:
                combine = table.group.config.tables[children[0]].policy.combine
                of_ids = scores_of_distinct(scores, distinct.inverse, distinct.ids, combine)
                self._scores = all_to_all(of_ids, self._received, self._sent, ranks)

    def _check_alike(self, purpose: Purpose, identities: list[int]) -> None:
        if torch.compiler.is_compiling():
            expected = identity_of(purpose)
            for identity in identities:
                torch._check(identity == expected)
            return
        process_group = process_group_of(self._ranks)
        assert process_group is not None
        check_alike(purpose, identities, process_group)

    def _arrived(self) -> LookupBatch:
        """Ask for the rows of the ids that came here, those of each child of each rank together."""
        lengths = self._received_lengths.reshape(-1)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        children = self._children * self._ranks.size
        columns = self._table.group.config.tables[self._children[0]].embedding_dim
        return LookupBatch.of_rows(arrived(self._ids), offsets, children, columns)

    def prefetch(self) -> None:
        """Wait for the ids that come here, and begin to bring their rows into memory."""
        self._table.prefetch_lookup(self._arrived())

    def rows(self, look_up: Callable[[Arrived], Tensor]) -> Tensor:
        """Look up the ids that came here, and send the rows back.

        Args:
            look_up: returns rows [n, columns] of ids that this rank has.

        Returns:
            [n, columns], rows of the distinct ids; ``inverse`` says which one each id has.
        """
        table, ranks = self._table, self._ranks
        batch = self._arrived()
        if self._proposals is not None and self._learns:
            table.group.clock.agree_on(self._proposals)
        counts = None if self._counts is None else arrived(self._counts)
        scores = None if self._scores is None else arrived(self._scores)
        rows = look_up(Arrived(batch, counts, scores))
        if rows.requires_grad:
            factor = self._gradient_factor(batch.ids, self._received_lengths.reshape(-1))
            rows = _ScaledGradient.apply(rows, factor)  # type: ignore[no-untyped-call]
        return arrived(all_to_all(rows, self._sent, self._received, ranks))

    def _gradient_factor(self, ids: Tensor, lengths: Tensor) -> Tensor:
        """Return the factor of the gradients that ranks send for an id: [n, 1], or one number."""
        if self._table.grad_reduce_by == "worker":
            return torch.full((1,), 1.0 / self._ranks.size, device=ids.device)
        # ids of a child come from several ranks: brought together, then counted
        children, ranks = len(self._children), self._ranks.size
        child = torch.arange(children, device=ids.device).repeat(ranks)
        order = torch.argsort(
            child.repeat_interleave(lengths, output_size=ids.shape[0]), stable=True
        )
        of_child = lengths.view(ranks, children).sum(0)
        offsets = torch.cat([of_child.new_zeros(1), of_child.cumsum(0)])
        same = ops.unique_ids(ids[order], offsets)
        senders = torch.empty_like(ids)
        senders[order] = same.counts[same.inverse]
        return senders.to(torch.float32).reciprocal()[:, None]


def insert_at_owners(
    owner: str,
    table: SharedTable,
    ranks: RankGroup,
    checked: Callable[[], tuple[int, RowBatch]],
) -> None:
    """Set rows of ids that any rank has, on the ranks that own the ids; all ranks call it.

    Args:
        owner: function, with which errors begin.
        table: of the rows, on all ranks.
        ranks: that share it.
        checked: returns the number of a child, and rows of distinct ids as the table stores them.

    Raises:
        Exception: of one rank, on all of them; then no rank has changed.
    """
    together = ranks_of(process_group_of(ranks))
    child, batch = together.run(checked)
    together.agree(owner, table=table.group.names[child])
    bounds = torch.arange(2, device=batch.ids.device) * batch.ids.shape[0]
    parts = ops.ids_partition(batch.ids, bounds, parts=ranks.size, slots=table.id_slots)
    by_owner = batch.picked(parts.inverse.argsort())
    one_each, sent = [1] * ranks.size, parts.lengths.sum(1)
    received = move_rows(sent, one_each, one_each, ranks).tolist()
    own = by_owner.each(lambda tensor: move_rows(tensor, received, sent.tolist(), ranks))

    def prepared() -> RowUpdate:
        whole = torch.arange(2, device=own.ids.device) * own.ids.shape[0]
        repeated = own.ids.shape[0] - ops.unique_ids(own.ids, whole).ids.shape[0]
        if repeated > 0:
            raise ValueError(
                f"{owner}: ids of all ranks have {repeated} repeated ids, expected every id once"
            )
        update = RowUpdate(owner, table.group.tables, child, own)
        update.prepare()
        return update

    update = together.run(prepared)
    apply_all([update], update.finish, agreed=together.run)


def fail_insertion(ranks: RankGroup | None, failure: Exception) -> NoReturn:
    """Raise the error of a rank on all ranks that call :func:`insert_at_owners`.

    Args:
        ranks: that share a table, or None.
        failure: the error of this rank.

    Raises:
        Exception: ``failure``; on the other ranks a copy of it.
    """
    process_group = process_group_of(ranks)
    if process_group is not None:
        ranks_of(process_group).gather(sendable(failure))
    raise failure


__all__ = [
    "Arrived",
    "IdExchange",
    "SharedTable",
    "fail_exchange",
    "fail_insertion",
    "insert_at_owners",
]
