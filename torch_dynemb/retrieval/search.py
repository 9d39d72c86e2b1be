"""Exact search for the ids with the largest scores."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_dynemb import ops
from torch_dynemb.argument_checks import described, integer, tensor
from torch_dynemb.distributed.exchange import move_rows
from torch_dynemb.distributed.ranks import RankGroup, from_all_ranks, process_group_of
from torch_dynemb.nn.table_module import TableModule
from torch_dynemb.ops.columns import BUCKET_WIDTH, PADDING_HANDLE
from torch_dynemb.ops.tensors import LookupBatch
from torch_dynemb.retrieval.items import check_unpacked, checked_query, number_of
from torch_dynemb.serving.frozen_modules import FrozenModule
from torch_dynemb.serving.frozen_tables import FrozenTables
from torch_dynemb.serving.live_group import LiveTables
from torch_dynemb.table.row_access import readable
from torch_dynemb.table.tables import exported

Metric = Literal["dot", "cosine"]
Filter = Callable[[Tensor], Tensor]
_ROWS_AT_ONCE = 1 << 16  # read at once
_SCORES_AT_ONCE = 1 << 20  # products of queries and rows
_LEAST_NORM = 1e-12


class TopK(NamedTuple):
    """Result of :func:`torch_dynemb.top_k`.

    Attributes:
        ids: int64 [n, k]; -1 in places without a result.
        scores: float32 [n, k], descending; -infinity in places without a result.
    """

    ids: Tensor
    scores: Tensor

    @property
    def counts(self) -> Tensor:
        """Number of results of each query, int64 [n]."""
        return (self.scores > -torch.inf).sum(1)


class _Candidates(NamedTuple):
    """Some ids of a table with their rows.

    Attributes:
        ids: int64 [c].
        rows: float32 [c, dim].
        live: bool [c], which are ids of the table; None: all.
    """

    ids: Tensor
    rows: Tensor
    live: Tensor | None


def top_k(
    query: Tensor,
    items: nn.Module,
    k: int,
    *,
    table: int | str | None = None,
    metric: Metric = "dot",
    exclude: Tensor | tuple[Tensor, Tensor] | None = None,
    filter: Filter | None = None,  # noqa: A002 - the word of vector databases
) -> TopK:
    """Return for each query the ids of a table with the largest scores.

    The result is that of a full sort by score, then id. Rows are scored in chunks, so memory does
    not grow with the number of queries times ids. Nothing changes, and no gradient is computed.
    Models that call it on a frozen or served module can be exported with ``torch.export``. Where a
    thread updates the table meanwhile, each row is that of before or after an update.

    Args:
        query: float [n, dim]; scored in float32.
        items: module with a table: one that trains, a frozen copy (:func:`torch_dynemb.freeze`), or
            a copy that is updated while it serves (:func:`torch_dynemb.serving.live`), also with
            quantized rows. Rows in a store are read in batches. Ranks that share a table call it
            together, each with queries of its own; frozen copies have the rows of all of them.
        k: results of a query, at least 1.
        table: name or number of the table, if ``items`` has several.
        metric: ``"dot"``: the product; ``"cosine"``: that of the vectors divided by their norms.
        exclude: ids to leave out by query, such as those it has seen: int64 [n, m], or a
            tuple of values int64 [v] and offsets int64 [n + 1].
        filter: takes ids, int64 [c]; returns which may be results, bool [c].

    Returns:
        ids, int64 [n, k], and scores, float32 [n, k]. ``counts`` has the number of results of each
        query, which is less than k in a small table. Rows with NaN are left out.

    Raises:
        TypeError: an argument has a wrong type, or ``items`` has no dynamic table.
        ValueError: shape, device or range of an argument, or NaN in ``query`` (not looked for in
            compiled code and on a GPU).

    Example:
        >>> import torch, torch_dynemb as td
        >>> items = td.DynamicEmbedding(2, name="items", optimizer=td.SGD(lr=0.1))
        >>> rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])
        >>> items.group.insert_or_assign(0, torch.tensor([7, 8, 9]), rows)
        >>> td.top_k(torch.tensor([[2.0, 1.0]]), items, k=2)
        TopK(ids=tensor([[9, 7]]), scores=tensor([[3., 2.]]))
    """
    owner = "top_k"
    k = integer(f"{owner}: k", k, least=1)
    if metric not in ("dot", "cosine"):
        raise ValueError(f"{owner}: metric is {described(metric)}, expected 'dot' or 'cosine'")
    source = _searched_of(owner, items, table)
    query = checked_query(owner, query, source.dim, source.device)
    excluded = _excluded_ids(owner, exclude, query)
    most = k if excluded is None else k + excluded.ids.shape[1]
    with torch.no_grad():
        if source.ranks is None:
            best = _best_of(query.float(), source, most, metric, filter)
        else:
            best = _best_of_ranks(query.float(), source, source.ranks, most, metric, filter)
        if excluded is not None:
            best = _without(best, excluded, k)
    return TopK(best.ids, best.scores)


class _Searched(NamedTuple):
    """A table that is searched.

    Attributes:
        dim: columns of a row.
        device: of the rows.
        candidates: yields all ids with their rows, of this rank.
        ranks: that have other ids; None: there are none.
        name: of the table; ranks compare it.
    """

    dim: int
    device: torch.device
    candidates: Callable[[], Iterator[_Candidates]]
    ranks: RankGroup | None = None
    name: str = ""


def _searched_of(owner: str, items: object, table: int | str | None) -> _Searched:
    if isinstance(items, TableModule):
        return _live_source(owner, items, table)
    if isinstance(items, FrozenModule):
        served = items.frozen_tables
        number = number_of(owner, served.names, table)
        if isinstance(served, FrozenTables):
            source = _frozen_source(served, number)
        elif isinstance(served, LiveTables):
            source = _updated_source(served, number)
        else:
            raise TypeError(
                f"{owner}: items has its rows in a file or in Redis, of which a search would read "
                "all: search a copy that torch_dynemb.freeze makes without storage="
            )
        check_unpacked(owner, items, source.dim)
        return source
    raise TypeError(
        f"{owner}: items is {described(items)}, expected a module with a dynamic table, such as "
        "DynamicEmbedding, or torch_dynemb.freeze of one"
    )


def _live_source(owner: str, items: TableModule, table: int | str | None) -> _Searched:
    tables = items.group.tables
    number = number_of(owner, tables.config.names, table)
    dim = tables.config.tables[number].embedding_dim
    check_unpacked(owner, items, dim)

    def candidates() -> Iterator[_Candidates]:
        for batch in exported(tables, number, _ROWS_AT_ONCE):
            rows, handles = readable(tables, number, batch.ids, batch.handles)
            wanted = LookupBatch.of_rows(batch.ids, tables.one_bag, [number], dim)
            yield _Candidates(batch.ids, ops.embedding_inference(rows, wanted, handles), None)

    shared = items._shared_rows is not None
    ranks = items._sharing_ranks if shared else None
    return _Searched(dim, tables.device, candidates, ranks, tables.config.names[number])


def _frozen_source(frozen: FrozenTables, table: int) -> _Searched:
    served, place = frozen.tensors(), frozen.place_of(table)
    lines = served.buckets[place.begin : place.end]

    def candidates() -> Iterator[_Candidates]:
        for part in lines.split(_ROWS_AT_ONCE // BUCKET_WIDTH):
            ids = part[:, :BUCKET_WIDTH].reshape(-1)
            stored = part[:, BUCKET_WIDTH:].reshape(-1)
            live = stored > 0
            if torch.compiler.is_compiling():  # sizes are those of the program
                handles = torch.where(live, stored - 1, PADDING_HANDLE)
                yield _Candidates(ids, frozen.read_handles(table, ids, handles), live)
            else:
                ids, handles = ids[live], stored[live] - 1
                yield _Candidates(ids, frozen.read_handles(table, ids, handles), None)

    return _Searched(place.dim, served.buckets.device, candidates)


def _updated_source(live: LiveTables, table: int) -> _Searched:
    """Search tables that a thread may update meanwhile."""

    def candidates() -> Iterator[_Candidates]:
        ids, found_ids = live.list_ids(table)
        wanted: Tensor | None = found_ids
        if not torch.compiler.is_compiling():
            ids, wanted = ids[found_ids], None
        for begin in range(0, ids.shape[0], _ROWS_AT_ONCE):
            part = slice(begin, begin + _ROWS_AT_ONCE)
            rows, found = live.read_ids(table, ids[part], None if wanted is None else wanted[part])
            yield _Candidates(ids[part], rows, found)

    return _Searched(live.dims[table], live.get_buffer("meta").device, candidates)


def _best_of(
    query: Tensor, source: _Searched, k: int, metric: Metric, keeps: Filter | None
) -> ops.BestScores:
    """Return the best k of all ids."""
    if metric == "cosine":
        query = F.normalize(query, eps=_LEAST_NORM)
    n = query.shape[0]
    best = ops.BestScores(
        query.new_full((n, k), -torch.inf),
        torch.full((n, k), -1, dtype=torch.int64, device=query.device),
    )
    # of a program that is exported the number of queries is unknown
    step = _ROWS_AT_ONCE if torch.compiler.is_compiling() else max(1, _SCORES_AT_ONCE // n)
    for ids, rows, live in source.candidates():
        if metric == "cosine":
            rows = F.normalize(rows, eps=_LEAST_NORM)
        allowed = _allowed(ids, live, keeps)
        for begin in range(0, ids.shape[0], step):
            part = slice(begin, begin + step)
            scores = query @ rows[part].t()
            if allowed is not None:
                scores = scores.masked_fill(~allowed[part], -torch.inf)
            best = ops.merge_top_k(scores, ids[part].contiguous(), best)
    return best


def _best_of_ranks(
    query: Tensor, source: _Searched, ranks: RankGroup, k: int, metric: Metric, keeps: Filter | None
) -> ops.BestScores:
    """Return the best k of the ids of all ranks, which call this together."""
    own = (source.name, metric)
    of_ranks = from_all_ranks((query.shape[0], k, own), process_group_of(ranks))
    for rank, (_, _, searched) in enumerate(of_ranks):
        if searched != of_ranks[0][2]:
            raise ValueError(
                f"top_k: rank 0 of the group searches (table, metric) {of_ranks[0][2]}, but rank "
                f"{rank} {searched}: call it with the same ones in the same order on all ranks"
            )
    most = max(count for count, _, _ in of_ranks)
    widest = max(results for _, results, _ in of_ranks)  # lists to exclude differ in length
    padded = F.pad(query, (0, 0, 0, most - query.shape[0]))
    each = [most] * ranks.size
    everyone = move_rows(padded.repeat(ranks.size, 1), each, each, ranks)
    best = _best_of(everyone, source, widest, metric, keeps)
    # what each rank has found for the queries of this one, side by side
    parts = [
        move_rows(part, each, each, ranks).view(ranks.size, most, widest).movedim(0, 1).flatten(1)
        for part in best
    ]
    scores, ids = (part[: query.shape[0]] for part in parts)
    order = ids.argsort(dim=1, stable=True)
    scores, ids = scores.gather(1, order), ids.gather(1, order)
    order = scores.argsort(dim=1, descending=True, stable=True)[:, :k]
    return ops.BestScores(scores.gather(1, order), ids.gather(1, order))


def _allowed(ids: Tensor, live: Tensor | None, keeps: Filter | None) -> Tensor | None:
    """Return which ids may be results, bool [c]; None: all."""
    if keeps is None:
        return live
    chosen: object = keeps(ids)
    if (
        not isinstance(chosen, Tensor)
        or chosen.dtype != torch.bool
        or chosen.shape != ids.shape
        or chosen.device != ids.device
    ):
        raise TypeError(
            f"top_k: filter returned {described(chosen)}, expected a bool tensor of shape "
            f"{tuple(ids.shape)} on {ids.device}"
        )
    return chosen if live is None else live & chosen


class _Excluded(NamedTuple):
    """Ids to leave out.

    Attributes:
        ids: int64 [n, m], those of a shorter list repeated; any where a list is empty.
        some: bool [n, 1], which lists are not empty; None: no list is.
    """

    ids: Tensor
    some: Tensor | None


def _excluded_ids(
    owner: str, exclude: Tensor | tuple[Tensor, Tensor] | None, query: Tensor
) -> _Excluded | None:
    """Check the ids to leave out; None: there are none."""
    if exclude is None:
        return None
    if isinstance(exclude, tuple):
        if len(exclude) != 2:
            raise ValueError(
                f"{owner}: exclude is a tuple of {len(exclude)}, expected (values, offsets)"
            )
        values, offsets = (
            _words(f"{owner}: exclude[{i}]", part, 1, query) for i, part in enumerate(exclude)
        )
        return _padded(owner, values, offsets, query.shape[0])
    ids = _words(f"{owner}: exclude", exclude, 2, query)
    if ids.shape[0] != query.shape[0]:
        raise ValueError(
            f"{owner}: exclude has shape {tuple(ids.shape)}, expected ({query.shape[0]}, m), ids "
            "by query"
        )
    return _Excluded(ids, None)


def _words(owner: str, value: object, dims: int, query: Tensor) -> Tensor:
    given = tensor(owner, value, "an int64 Tensor")
    if given.dtype != torch.int64:
        raise TypeError(f"{owner} has dtype {given.dtype}, expected int64")
    if given.dim() != dims or given.device != query.device:
        raise ValueError(
            f"{owner} has shape {tuple(given.shape)} on {given.device}, expected {dims} "
            f"dimension{'s' if dims > 1 else ''} on {query.device}"
        )
    return given


def _padded(owner: str, values: Tensor, offsets: Tensor, n: int) -> _Excluded | None:
    """Return ragged ids with lists of one length; waits for a GPU."""
    lengths = offsets.diff()
    fits = offsets.shape[0] == n + 1 and not bool((lengths < 0).any())
    if not fits or int(offsets[0]) != 0 or int(offsets[-1]) != values.shape[0]:
        raise ValueError(
            f"{owner}: exclude has offsets of {offsets.shape[0]} elements, expected {n + 1}, "
            f"ascending from 0 to {values.shape[0]}"
        )
    most = int(lengths.max())
    if most == 0:
        return None
    columns = torch.arange(most, device=values.device)
    columns = torch.minimum(columns, (lengths - 1).clamp(min=0)[:, None])
    padded = values[(offsets[:-1, None] + columns).clamp(max=values.shape[0] - 1)]
    return _Excluded(padded, lengths[:, None] > 0)


def _without(best: ops.BestScores, excluded: _Excluded, k: int) -> ops.BestScores:
    """Return the best k that are not excluded; ``best`` has as many more as may be excluded."""
    ordered = excluded.ids.sort(1).values
    place = torch.searchsorted(ordered, best.ids).clamp(max=ordered.shape[1] - 1)
    gone = ordered.gather(1, place) == best.ids
    if excluded.some is not None:
        gone &= excluded.some
    scores = best.scores.masked_fill(gone, -torch.inf)
    ids = best.ids.masked_fill(gone, -1)
    # those that stay keep their order
    order = gone.to(torch.int8).sort(dim=1, stable=True).indices[:, :k]
    return ops.BestScores(scores.gather(1, order), ids.gather(1, order))


__all__ = ["Filter", "Metric", "TopK", "top_k"]
