"""Joint lookups: many features of one physical table in one call."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from torch_dynemb import ops
from torch_dynemb.argument_checks import described
from torch_dynemb.distributed.ranks import RankGroup
from torch_dynemb.nn.id_exchange import Arrived, IdExchange, fail_exchange
from torch_dynemb.ops import LookupBatch
from torch_dynemb.ops.columns import Pooling
from torch_dynemb.recis.embedding.bags import Bags
from torch_dynemb.recis.embedding.options import EmbeddingOption
from torch_dynemb.recis.embedding.unreduced import NoReduceEmbedding, of_distinct
from torch_dynemb.recis.functional.combiners import OWN_COMBINERS, get_combiner
from torch_dynemb.recis.tables.frozen_table import FrozenHashTable
from torch_dynemb.recis.tables.hash_table import HashTable
from torch_dynemb.recis.tables.packed_rows import unpack_int8

_IDS_OF_CALL = 1 << 18
_POOLING = {"sum": Pooling.SUM, "mean": Pooling.MEAN}


class Runtime(NamedTuple):
    """Settings that all features of a joint lookup share.

    Attributes:
        pooling: NONE stands for tile, for a registered combiner, and for rows that stay apart.
        reads_only: new ids get no row.
        trains: rows get gradients, and new ids a row.
        output_dtype: of the result.
        combiner: name of a registered combiner; None: one of the others.
        use_weight: whether weights of ids count.
        no_reduce: the result is a NoReduceEmbedding.
    """

    pooling: Pooling
    reads_only: bool
    trains: bool
    output_dtype: torch.dtype
    combiner: str | None
    use_weight: bool
    no_reduce: bool

    @classmethod
    def of(cls, option: EmbeddingOption) -> Runtime:
        """Return the runtime of an option."""
        output_dtype = torch.float16 if option.fp16_enabled else torch.float32
        own = option.no_reduce or option.combiner in OWN_COMBINERS
        return cls(
            Pooling.NONE if option.no_reduce else _POOLING.get(option.combiner, Pooling.NONE),
            option.reads_only,
            option.trainable,
            output_dtype,
            None if own else option.combiner,
            option.use_weight,
            option.no_reduce,
        )


class Request(NamedTuple):
    """Lookup of one feature.

    Attributes:
        child: number of its logical table.
        bags: its ids.
        combiner_kwargs: of the combiner, or None.
        scores: custom scores of its ids, [n], given by all requests of a lookup or by none.
    """

    child: int
    bags: Bags
    combiner_kwargs: Mapping[str, Any] | None
    scores: Tensor | None = None


class JointLookup:
    """Joint lookup in progress; between construction and :meth:`rows` ids travel to other ranks.

    Args:
        table: of the rows.
        runtime: of all requests.
        requests: at least one; all ranks have requests for the same children.
        ranks: the ranks that share the table; None: this process has all of it.
    """

    def __init__(
        self,
        table: HashTable | FrozenHashTable,
        runtime: Runtime,
        requests: Sequence[Request],
        ranks: RankGroup | None,
    ) -> None:
        self._table = table
        self._runtime = runtime
        # ids of a child are adjacent
        self._order = sorted(range(len(requests)), key=lambda r: requests[r].child)
        self._requests = [requests[r] for r in self._order]
        self._exchange: IdExchange | None = None
        if ranks is not None and ranks.size > 1:
            assert isinstance(table, HashTable)  # a frozen table has all rows
            children = sorted({request.child for request in self._requests})
            sizes = [
                sum(r.bags.ids.shape[0] for r in self._requests if r.child == child)
                for child in children
            ]
            ids = _joined([request.bags.ids for request in self._requests])
            bounds = _bounds(sizes, ids.device)
            scores = _joined_scores(self._requests)
            self._exchange = IdExchange(
                table, ids, bounds, children, ranks, trains=runtime.trains, scores=scores
            )

    def prefetch(self) -> None:
        """Start to load rows into memory, on the ranks that have them."""
        if self._exchange is not None:
            self._exchange.prefetch()
            return
        assert isinstance(self._table, HashTable)  # a frozen table has no prefetch
        ids = _joined([request.bags.ids for request in self._requests])
        sizes = [request.bags.ids.shape[0] for request in self._requests]
        children = [request.child for request in self._requests]
        bounds = _bounds(sizes, ids.device)
        self._table.prefetch_lookup(LookupBatch.of_rows(ids, bounds, children, self._table.columns))

    def rows(self) -> list[Tensor] | list[NoReduceEmbedding]:
        """Return the result of every request: shape of its bags + (columns,)."""
        table, runtime = self._table, self._runtime
        if runtime.no_reduce:
            return [self._unreduced()]
        by_bags = self._by_bags()
        results: dict[int, Tensor] = {}
        direct = runtime.pooling != Pooling.NONE and not table.packed
        if self._exchange is None and direct:
            for part in by_bags:
                for piece in self._pieces(part):
                    results |= zip(piece, self._pooled(piece), strict=True)
        else:
            rows, positions = self._distinct_rows()
            if runtime.combiner is not None:
                for r, request in enumerate(self._requests):
                    results[r] = _by_function(runtime, request, rows, positions[r])
                by_bags = []
            for part in by_bags:
                of_part = _joined([positions[r] for r in part]) if len(by_bags) > 1 else None
                chosen = _joined(positions) if of_part is None else of_part
                results |= zip(part, self._combined(part, rows, chosen), strict=True)
        placed: dict[int, Tensor] = {}
        for r, (place, request) in enumerate(zip(self._order, self._requests, strict=True)):
            result = request.bags.placed(results[r])
            if result.dtype != runtime.output_dtype:
                result = result.to(runtime.output_dtype)
            placed[place] = result
        return [placed[place] for place in range(len(placed))]

    def _unreduced(self) -> NoReduceEmbedding:
        """Return the rows of the only request, which has a lookup of its own."""
        (request,) = self._requests
        ids, offsets = request.bags.ids, request.bags.offsets
        rows, (positions,) = self._distinct_rows()
        if self._exchange is None:
            rows, positions = of_distinct(ids, _bounds([ids.shape[0]], ids.device), rows)
        return NoReduceEmbedding(rows.to(self._runtime.output_dtype), positions, offsets)

    def _by_bags(self) -> list[list[int]]:
        """Group requests by number of bags.

        Symbolic numbers are grouped only if they are always equal. Otherwise an exported program
        would reject batches in which they differ.
        """
        parts: list[list[int]] = []
        for r, request in enumerate(self._requests):
            bags = request.bags.offsets.shape[0]
            for part in parts:
                if statically_known_true(self._requests[part[0]].bags.offsets.shape[0] == bags):
                    part.append(r)
                    break
            else:
                parts.append([r])
        return parts

    def _pieces(self, part: list[int]) -> list[list[int]]:
        """Split requests into calls: one on a GPU, and on the CPU pieces that reuse memory.

        malloc returns larger blocks to the system, and new pages cost more than a call. Requests of
        one child stay together, so their gradients need no merging.
        """
        first = self._requests[part[0]].bags.ids
        if first.device.type != "cpu" or torch.compiler.is_compiling():
            return [part]
        pieces: list[list[int]] = []
        ids = 0
        for _, same_child in itertools.groupby(part, key=lambda r: self._requests[r].child):
            chosen = list(same_child)
            size = sum(self._requests[r].bags.ids.shape[0] for r in chosen)
            if not pieces or ids + size > _IDS_OF_CALL:
                pieces.append([])
                ids = 0
            pieces[-1] += chosen
            ids += size
        return pieces

    def _pooled(self, part: list[int]) -> Sequence[Tensor]:
        """Return the results of requests with the same number of bags, by one call of the table."""
        requests = [self._requests[r] for r in part]
        output = self._read(
            LookupBatch(
                _joined([request.bags.ids for request in requests]),
                _joined_offsets([request.bags.offsets for request in requests]),
                _joined_weights([request.bags for request in requests]),
                [request.child for request in requests],
                [self._table.columns] * len(requests),
                self._runtime.pooling,
            ),
            _joined_scores(requests),
        )
        results: Sequence[Tensor] = output.unsafe_split(self._table.embedding_dim, 1)
        return results

    def _read(self, batch: LookupBatch, scores: Tensor | None) -> Tensor:
        """Look a batch up in a table with all rows on this process."""
        table, runtime = self._table, self._runtime
        if isinstance(table, FrozenHashTable):
            return table.lookup(batch)
        return table.lookup(
            batch, reads_only=runtime.reads_only, trains=runtime.trains, scores=scores
        )

    def _distinct_rows(self) -> tuple[Tensor, Sequence[Tensor]]:
        """Return rows, and for each request the positions of its ids in them."""
        table, runtime = self._table, self._runtime
        sizes = [request.bags.ids.shape[0] for request in self._requests]
        if self._exchange is not None:
            assert isinstance(table, HashTable)
            look_up = functools.partial(_look_up_own, table, runtime)
            rows = self._exchange.rows(look_up)
            positions = self._exchange.inverse
        else:
            ids = _joined([request.bags.ids for request in self._requests])
            children = [request.child for request in self._requests]
            bounds = _bounds(sizes, ids.device)
            rows = self._read(
                LookupBatch.of_rows(ids, bounds, children, table.columns),
                _joined_scores(self._requests),
            )
            positions = torch.arange(ids.shape[0], device=ids.device)
        if table.packed:
            rows = unpack_int8(rows, table.embedding_dim, torch.float32)
        return rows, positions.split(sizes)

    def _combined(self, part: list[int], rows: Tensor, positions: Tensor) -> Sequence[Tensor]:
        """Combine rows into the results of requests with the same number of bags."""
        requests = [self._requests[r] for r in part]
        offsets = _joined_offsets([request.bags.offsets for request in requests])
        weights = _joined_weights([request.bags for request in requests])
        if self._runtime.pooling == Pooling.NONE:
            lengths = [(request.combiner_kwargs or {})["tile_len"] for request in requests]
            return ops.ragged_tile(
                rows,
                positions,
                offsets,
                features=len(requests),
                tile_lens=lengths,
                weights=weights,
            )
        output = ops.pool_rows(
            rows,
            positions,
            offsets,
            features=len(requests),
            weights=weights,
            pooling=self._runtime.pooling,
        )
        results: Sequence[Tensor] = output.unsafe_split(rows.shape[1], 1)
        return results


def fail_lookup(
    table: HashTable | FrozenHashTable, ranks: RankGroup | None, failure: Exception
) -> None:
    """Raise an error on all ranks that make a joint lookup meanwhile.

    Does nothing if the table is of this process alone, and in compiled code.

    Args:
        table: of the rows.
        ranks: that share the table, or None.
        failure: the error of this rank.

    Raises:
        Exception: of the class of ``failure``.
    """
    if ranks is None or ranks.size == 1 or torch.compiler.is_compiling():
        return
    assert isinstance(table, HashTable)  # a frozen table has all rows
    fail_exchange(table.group.device, ranks, failure)


def _by_function(runtime: Runtime, request: Request, rows: Tensor, positions: Tensor) -> Tensor:
    """Combine the rows of a request by a registered combiner."""
    assert runtime.combiner is not None
    bags = request.bags
    weights = bags.weights
    if weights is None and runtime.use_weight:
        weights = torch.ones(bags.ids.shape[0], device=bags.ids.device)
    output = get_combiner(runtime.combiner)(
        emb=rows,
        weight=weights,
        reverse_index=positions,
        offsets=bags.offsets,
        combiner_kwargs=dict(request.combiner_kwargs or {}),
    )
    samples = bags.offsets.shape[0] - 1
    if not isinstance(output, Tensor) or output.dim() != 2 or output.shape[0] != samples:
        raise ValueError(
            f"combiner {runtime.combiner!r} returned {described(output)}, expected a tensor "
            f"[{samples}, columns], a row for each sample"
        )
    return output


def _look_up_own(table: HashTable, runtime: Runtime, ids: Arrived) -> Tensor:
    """Look up ids that came from any rank."""
    return table.lookup(
        ids.batch,
        reads_only=runtime.reads_only,
        trains=runtime.trains,
        counts=ids.counts,
        scores=ids.scores,
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _joined_scores(requests: list[Request]) -> Tensor | None:
    """Return the custom scores of all ids; None if the lookup brings none."""
    scores = [request.scores for request in requests if request.scores is not None]
    return _joined(scores) if scores else None


def _bounds(sizes: list[int], device: torch.device) -> Tensor:
    """Return where parts of these sizes begin and end, int64 [parts + 1]."""
    if device.type == "cpu" and not torch.compiler.is_compiling():
        return torch.tensor([0, *itertools.accumulate(sizes)], device=device)
    # avoids a copy of a list to a GPU, which synchronizes
    filled = [torch.full((1,), size, dtype=torch.int64, device=device) for size in (0, *sizes)]
    return torch.cat(filled).cumsum(0)


def _joined_offsets(offsets: list[Tensor]) -> Tensor:
    """Join F tensors [B + 1] of offsets to offsets of bags [F * B + 1]."""
    if len(offsets) == 1:
        return offsets[0]
    by_feature = torch.stack(offsets)
    ends = by_feature[:, -1].cumsum(0)
    begins = ends - by_feature[:, -1]
    return torch.cat([(by_feature[:, :-1] + begins[:, None]).flatten(), ends[-1:]])


def _joined_weights(bags: list[Bags]) -> Tensor | None:
    """Return the weights of all ids, 1 for features without; None if no feature has any."""
    if all(b.weights is None for b in bags):
        return None
    weights = [
        torch.ones(b.ids.shape[0], device=b.ids.device) if b.weights is None else b.weights
        for b in bags
    ]
    return _joined(weights)


__all__ = ["JointLookup", "Request", "Runtime", "fail_lookup"]
