"""Ops on ragged values of 40 features: one call for all against one a feature and plain PyTorch.

Large: 256 rows of 1 to 200 values a feature. Small: 64 rows of 1 to 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from common.command import is_selected, parser, positive
from common.report import Report, Row, compare
from common.timing import interleave
from torch import Tensor
from torch.nn import functional as F

from torch_dynemb import ops
from torch_dynemb.ops.columns import Pooling

BENCH = "feature_ops"
DIM = 16
KEEP = 50  # values that a cut row has
TOP = 10
BUCKETS = 10_007
OURS, ONE_BY_ONE, PLAIN = "ours", "one call a feature", "PyTorch"
Call = Callable[[], object]


def mask_of_first(offsets: Tensor, keep: int, count: int) -> Tensor:
    """Return whether a value is among the first ``keep`` of its row."""
    row = torch.arange(offsets.shape[0] - 1).repeat_interleave(offsets.diff(), output_size=count)
    return torch.arange(count) - offsets[row] < keep


def torch_cutoff(values: Tensor, offsets: Tensor, keep: int) -> tuple[Tensor, Tensor]:
    kept = values[mask_of_first(offsets, keep, values.shape[0])]
    return kept, F.pad(offsets.diff().clamp(max=keep).cumsum(0), (1, 0))


def torch_dense(values: Tensor, offsets: Tensor, length: int) -> Tensor:
    rows = offsets.shape[0] - 1
    row = torch.arange(rows).repeat_interleave(offsets.diff(), output_size=values.shape[0])
    dense = values.new_zeros((rows, length))
    dense[row, torch.arange(values.shape[0]) - offsets[row]] = values
    return dense


def torch_sparse(values: Tensor, offsets: Tensor, length: int) -> Tensor:
    rows = offsets.shape[0] - 1
    row = torch.arange(rows).repeat_interleave(offsets.diff(), output_size=values.shape[0])
    indices = torch.stack([row, torch.arange(values.shape[0]) - offsets[row]])
    return torch.sparse_coo_tensor(
        indices, values, (rows, length), is_coalesced=True, check_invariants=False
    )


def torch_ragged(dense: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows without the zeros at their end."""
    last = torch.arange(1, dense.shape[1] + 1) * (dense != 0)
    lengths = last.amax(1)
    mask = torch.arange(dense.shape[1]) < lengths[:, None]
    return dense[mask], F.pad(lengths.cumsum(0), (1, 0))


def torch_top(values: Tensor, offsets: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    valid = (indices >= 0) & (indices < offsets.diff()[:, None])
    return values[(offsets[:-1, None] + indices)[valid]], F.pad(valid.sum(1).cumsum(0), (1, 0))


def torch_tile(rows: Tensor, positions: Tensor, offsets: Tensor, tile_len: int) -> Tensor:
    place = offsets[:-1, None] + torch.arange(tile_len)
    valid = place < offsets[1:, None]
    found = rows[positions[place.clamp(max=positions.shape[0] - 1)]]
    return torch.where(valid[..., None], found, 0.0).flatten(1)


@dataclass(frozen=True)
class Features:
    """Ids of many features."""

    rows: int
    longest: int
    features: int

    @cached_property
    def offsets(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        lengths = torch.randint(
            1, self.longest + 1, (self.features, self.rows), generator=generator
        )
        return [F.pad(row.cumsum(0), (1, 0)) for row in lengths]

    @cached_property
    def values(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return [
            torch.randint(1, 1_000_000, (int(offsets[-1]),), generator=generator)
            for offsets in self.offsets
        ]

    @cached_property
    def weights(self) -> list[Tensor]:
        return [torch.rand(values.shape[0]) for values in self.values]

    @cached_property
    def dense(self) -> list[Tensor]:
        lengths = [[self.longest]] * self.features
        return ops.ragged_to_dense(self.values, [[o] for o in self.offsets], lengths=lengths)

    @cached_property
    def indices(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(2)
        size = (self.rows, TOP)
        return [
            torch.randint(self.longest, size, generator=generator) for _ in range(self.features)
        ]

    @cached_property
    def positions(self) -> Tensor:
        return torch.cat(self.values) % 10_000

    @cached_property
    def bag_offsets(self) -> Tensor:
        lengths = torch.cat([offsets.diff() for offsets in self.offsets])
        return F.pad(lengths.cumsum(0), (1, 0))

    def bags(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield positions and offsets of each feature."""
        for values, offsets in zip(self.values, self.offsets, strict=True):
            yield values % 10_000, offsets


def contests(given: Features) -> Iterator[tuple[str, Callable[[], dict[str, Call]]]]:
    """Name of each op, and its candidates."""
    features, longest = given.features, given.longest

    def candidates(
        together: Call, alone: Callable[[int], object], plain: Callable[[int], object]
    ) -> dict[str, Call]:
        return {
            OURS: together,
            ONE_BY_ONE: lambda: [alone(f) for f in range(features)],
            PLAIN: lambda: [plain(f) for f in range(features)],
        }

    def mod() -> dict[str, Call]:
        v = given.values
        return candidates(
            lambda: ops.mod(v, [BUCKETS] * features),
            lambda f: ops.mod([v[f]], [BUCKETS]),
            lambda f: v[f] % BUCKETS,
        )

    def bucketize() -> dict[str, Call]:
        w, bounds = given.weights, torch.linspace(0, 1, 101)
        return candidates(
            lambda: ops.bucketize(w, [bounds] * features),
            lambda f: ops.bucketize([w[f]], [bounds]),
            lambda f: torch.bucketize(w[f], bounds, right=True),
        )

    def multi_hash() -> dict[str, Call]:
        v, multipliers, prime = given.values, [3, 5, 7, 11], 2**31 - 1
        hashes = len(multipliers)
        per = ([multipliers], [[prime] * hashes], [[BUCKETS] * hashes])
        every = tuple(lists * features for lists in per)
        return candidates(
            lambda: ops.multi_hash(v, *every),
            lambda f: ops.multi_hash([v[f]], *per),
            lambda f: [v[f] * m % prime % BUCKETS for m in multipliers],
        )

    def unique_ids() -> dict[str, Call]:
        v, ids = given.values, torch.cat(given.values)
        sizes = torch.tensor([0, *(t.shape[0] for t in v)]).cumsum(0)
        return candidates(
            lambda: ops.unique_ids(ids, sizes),
            lambda f: ops.unique_ids(v[f], torch.tensor([0, v[f].shape[0]])),
            lambda f: torch.unique(v[f], return_inverse=True),
        )

    def ids_partition() -> dict[str, Call]:
        v, ids = given.values, torch.cat(given.values)
        sizes = torch.tensor([0, *(t.shape[0] for t in v)]).cumsum(0)

        def plain(f: int) -> object:
            unique, inverse = torch.unique(v[f], return_inverse=True)
            owners = unique % 8
            order = torch.argsort(owners, stable=True)
            rank = torch.empty_like(order)
            rank[order] = torch.arange(order.shape[0])
            return unique[order], torch.bincount(owners, minlength=8), rank[inverse]

        return candidates(
            lambda: ops.ids_partition(ids, sizes, parts=8),
            lambda f: ops.ids_partition(v[f], torch.tensor([0, v[f].shape[0]]), parts=8),
            plain,
        )

    def pool() -> dict[str, Call]:
        rows, weights = torch.rand(10_000, DIM), torch.cat(given.weights)
        bags = list(given.bags())
        return candidates(
            lambda: ops.pool_rows(
                rows,
                given.positions,
                given.bag_offsets,
                features=features,
                weights=weights,
                pooling=Pooling.MEAN,
            ),
            lambda f: ops.pool_rows(
                rows, *bags[f], features=1, weights=given.weights[f], pooling=Pooling.MEAN
            ),
            lambda f: (
                F.embedding_bag(
                    bags[f][0],
                    rows,
                    bags[f][1],
                    mode="sum",
                    per_sample_weights=given.weights[f],
                    include_last_offset=True,
                )
                / torch.segment_reduce(given.weights[f], "sum", offsets=bags[f][1])[:, None]
            ),
        )

    def tile() -> dict[str, Call]:
        rows, bags = torch.rand(10_000, DIM), list(given.bags())
        return candidates(
            lambda: ops.ragged_tile(
                rows,
                given.positions,
                given.bag_offsets,
                features=features,
                tile_lens=[TOP] * features,
            ),
            lambda f: ops.ragged_tile(rows, *bags[f], features=1, tile_lens=[TOP]),
            lambda f: torch_tile(rows, *bags[f], TOP),
        )

    def cutoff() -> dict[str, Call]:
        v, o = given.values, given.offsets
        return candidates(
            lambda: ops.ragged_cutoff_2d(v, o, [KEEP] * features),
            lambda f: ops.ragged_cutoff_2d([v[f]], [o[f]], [KEEP]),
            lambda f: torch_cutoff(v[f], o[f], KEEP),
        )

    def top() -> dict[str, Call]:
        v, o, i = given.values, given.offsets, given.indices
        return candidates(
            lambda: ops.ragged_topk_index_cutoff(v, o, i),
            lambda f: ops.ragged_topk_index_cutoff([v[f]], [o[f]], [i[f]]),
            lambda f: torch_top(v[f], o[f], i[f]),
        )

    def to_dense() -> dict[str, Call]:
        v, o = given.values, given.offsets
        nested, lengths = [[offsets] for offsets in o], [[longest]] * features
        return candidates(
            lambda: ops.ragged_to_dense(v, nested, lengths=lengths),
            lambda f: ops.ragged_to_dense([v[f]], nested[f : f + 1], lengths=[[longest]]),
            lambda f: torch_dense(v[f], o[f], longest),
        )

    def to_sparse() -> dict[str, Call]:
        v, o = given.values, given.offsets
        nested, lengths = [[offsets] for offsets in o], [[longest]] * features
        return candidates(
            lambda: ops.ragged_to_sparse(v, nested, lengths=lengths),
            lambda f: ops.ragged_to_sparse([v[f]], nested[f : f + 1], lengths=[[longest]]),
            lambda f: torch_sparse(v[f], o[f], longest),
        )

    def from_dense() -> dict[str, Call]:
        dense = given.dense
        return candidates(
            lambda: ops.dense_to_ragged(dense, invalid_value=0),
            lambda f: ops.dense_to_ragged([dense[f]], invalid_value=0),
            lambda f: torch_ragged(dense[f]),
        )

    yield "mod", mod
    yield "bucketize", bucketize
    yield "multi_hash", multi_hash
    yield "unique_ids", unique_ids
    yield "ids_partition", ids_partition
    yield "pool_rows, weighted mean", pool
    yield "ragged_tile", tile
    yield "ragged_cutoff_2d", cutoff
    yield "ragged_topk_index_cutoff", top
    yield "ragged_to_dense", to_dense
    yield "ragged_to_sparse", to_sparse
    yield "dense_to_ragged", from_dense


def measure(
    *, features: int, rows: int, rounds: int, calls: int, threads: int, only: list[str]
) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its rows."""
    for size, given, count in (
        ("large", Features(rows, 200, features), 1),
        ("small", Features(64, 3, features), calls),
    ):
        for op, build in contests(given):
            case = f"{op}, {size}"
            peers = [p for p in (ONE_BY_ONE, PLAIN) if is_selected(only, case, p)]
            if not peers:
                continue
            yield case
            # a thread more costs more than small calls
            torch.set_num_threads(threads if size == "large" else 1)
            chosen = {name: call for name, call in build().items() if name in (OURS, *peers)}
            timings = interleave(
                {name: lambda _, call=call: call() for name, call in chosen.items()},
                rounds=rounds,
                calls=count,
            )
            for peer in peers:
                yield compare(BENCH, case, timings[OURS], peer, timings[peer], target=1.0)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--features", type=positive, default=40, help="(default 40)")
    arguments.add_argument("--rows", type=positive, help="rows of the large case (default 256)")
    arguments.add_argument("--calls", type=positive, help="small calls a round (default 30)")
    arguments.add_argument("--threads", type=positive, help="of the large case (default torch's)")
    options = arguments.parse_args()
    report = Report(as_json=options.json, cases=48)
    with torch.no_grad():
        report.take(
            measure(
                features=options.features,
                rows=options.rows or (64 if options.quick else 256),
                rounds=options.rounds,
                calls=options.calls or (5 if options.quick else 30),
                threads=options.threads or torch.get_num_threads(),
                only=options.only,
            )
        )
    report.close()


if __name__ == "__main__":
    main()
