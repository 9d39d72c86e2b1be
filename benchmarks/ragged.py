"""Ragged features of a recommendation model: 40 features in one engine against one by one.

Every feature has a table of its own with 100,000 ids, D=16, and bags of 1 to 200 ids (batch 2048)
or of 1 to 3 (batch 64). An EmbeddingEngine makes one launch of them all. Its peers are a
DynamicEmbedding for each feature, and an nn.EmbeddingBag(mode="sum", sparse=True) for each with as
many rows, over the ids modulo their number. The forward is also set against a reference kernel that
finds rows by ids and does nothing else (peers/ragged/forward.cpp). A training step is forward,
backward and optimizer step: SparseAdam against torch.optim.SparseAdam. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from common.command import is_selected, parser, positive
from common.report import Report, Row, compare
from common.timing import interleave
from peers.ragged_tables import ReferenceTable
from torch import Tensor, nn

import torch_dynemb as td
from torch_dynemb.recis import (
    DynamicEmbedding,
    EmbeddingEngine,
    EmbeddingOption,
    RaggedTensor,
    SparseAdam,
    filter_out_sparse_param,
)

BENCH = "ragged"
ENGINE = "EmbeddingEngine"
ONE_BY_ONE = "DynamicEmbedding by feature"
STATIC = "nn.EmbeddingBag by feature"
REFERENCE = "reference kernel by feature"
FORWARD = "training forward"
MODES = (FORWARD, "training step")
BATCHES = 4  # that calls go through in turn
Features = dict[str, RaggedTensor]
# a module, its optimizer unless it is only called forward, and its batches
Candidate = tuple[nn.Module, torch.optim.Optimizer | None, list[Features]]


class Case(NamedTuple):
    """Lengths of bags.

    Attributes:
        longest: ids of a bag, at most; at least 1.
        batch: bags of a feature.
        target: largest time of the engine, as a share of that of one by one.
        calls: of a round.
    """

    longest: int
    batch: int
    target: float
    calls: int

    @property
    def name(self) -> str:
        return f"lengths 1-{self.longest}, batch {self.batch}"


LONG = Case(longest=200, batch=2048, target=1.0, calls=1)
SHORT = Case(longest=3, batch=64, target=0.25, calls=20)


class Sizes(NamedTuple):
    """Sizes of all cases."""

    features: int
    rows: int
    dim: int
    rounds: int
    quick: bool


class OneByOne(nn.Module):
    """A DynamicEmbedding a feature."""

    def __init__(self, options: dict[str, EmbeddingOption]) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict({n: DynamicEmbedding(o) for n, o in options.items()})

    def forward(self, features: Features) -> dict[str, Tensor]:
        return {name: embedding(features[name]) for name, embedding in self.embeddings.items()}


class StaticTables(nn.Module):
    """An nn.EmbeddingBag a feature, for ids that are row numbers already."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.bags = nn.ModuleDict(
            {
                name: nn.EmbeddingBag(
                    sizes.rows, sizes.dim, mode="sum", sparse=True, include_last_offset=True
                )
                for name in names(sizes)
            }
        )

    def forward(self, features: Features) -> dict[str, Tensor]:
        return {
            name: bag(features[name].values(), features[name].offsets()[0])
            for name, bag in self.bags.items()
        }


class ReferenceTables(nn.Module):
    """Reference table for each feature, without gradients."""

    def __init__(self, sizes: Sizes, ids: Tensor) -> None:
        super().__init__()
        rows = {name: torch.rand(sizes.rows, sizes.dim) - 0.5 for name in names(sizes)}
        self.tables = {name: ReferenceTable(rows[name], ids) for name in names(sizes)}

    def forward(self, features: Features) -> dict[str, Tensor]:
        return {
            name: table(features[name].values(), features[name].offsets()[0])
            for name, table in self.tables.items()
        }


def names(sizes: Sizes) -> list[str]:
    return [f"feature{number}" for number in range(sizes.features)]


def draw(sizes: Sizes, case: Case) -> list[tuple[Features, Features]]:
    """Return batches, with ids and with row numbers."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(BATCHES):
        ids: Features = {}
        rows: Features = {}
        for name in names(sizes):
            lengths = torch.randint(1, case.longest + 1, (case.batch,), generator=generator)
            offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
            numbers = torch.randint(sizes.rows, (int(offsets[-1]),), generator=generator)
            ids[name] = RaggedTensor(mixed(numbers, sizes.rows), offsets)
            rows[name] = RaggedTensor(numbers, offsets)
        batches.append((ids, rows))
    return batches


def mixed(numbers: Tensor, rows: int) -> Tensor:
    """Return 64-bit ids that are ``numbers`` modulo ``rows``."""
    return numbers + rows * (numbers * 0x9E3779B97F4A7C15 % (2**62 // rows))


def call_of(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    batches: list[Features],
    mode: str,
) -> Callable[[int], object]:
    """Return the call that is timed."""

    def forward(call: int) -> list[Tensor]:
        return list(module(batches[call % BATCHES]).values())

    if optimizer is None or mode == FORWARD:
        return forward

    def step(call: int) -> None:
        optimizer.zero_grad()
        torch.cat(forward(call), 1).sum().backward()
        optimizer.step()

    return step


def measure(sizes: Sizes, case: Case, only: list[str]) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its rows."""
    contests = {ENGINE: (ONE_BY_ONE, STATIC, REFERENCE), ONE_BY_ONE: (STATIC,)}
    if sizes.quick:
        case = case._replace(batch=min(case.batch, 64), calls=1)
    wanted = {
        mode: [
            (ours, peer)
            for ours, peers in contests.items()
            for peer in peers
            if is_selected(only, f"{case.name}, {mode}, {ours}", peer)
            and (mode == FORWARD or peer != REFERENCE)
        ]
        for mode in MODES
    }
    if not any(wanted.values()):
        return
    batches = draw(sizes, case)
    candidates = _candidates(sizes, batches)
    for mode, pairs in wanted.items():
        if not pairs:
            continue
        yield f"{case.name}, {mode}"
        used = {name for pair in pairs for name in pair}
        timings = interleave(
            {name: call_of(*candidates[name], mode) for name in candidates if name in used},
            rounds=sizes.rounds,
            calls=case.calls,
        )
        for ours, peer in pairs:
            yield compare(
                BENCH,
                f"{case.name}, {mode}, {ours}",
                timings[ours],
                peer,
                timings[peer],
                target=case.target if peer == ONE_BY_ONE else None,
                features=sizes.features,
                rows_of_a_table=sizes.rows,
                dim=sizes.dim,
                batch=case.batch,
                ids=sum(ragged.values().shape[0] for ragged in batches[0][0].values()),
            )


def _candidates(sizes: Sizes, batches: list[tuple[Features, Features]]) -> dict[str, Candidate]:
    """Return modules with their optimizers and inputs; dynamic tables have all ids already."""
    options = {
        name: EmbeddingOption(
            embedding_dim=sizes.dim,
            shared_name=name,
            block_size=sizes.rows,
            initializer=td.Uniform(-0.1, 0.1),
        )
        for name in names(sizes)
    }
    ids, rows = ([batch[which] for batch in batches] for which in range(2))
    result: dict[str, Candidate] = {}
    known = mixed(torch.arange(sizes.rows), sizes.rows)
    everything = {name: RaggedTensor(known, torch.tensor([0, sizes.rows])) for name in options}
    for name, module in ((ENGINE, EmbeddingEngine(options)), (ONE_BY_ONE, OneByOne(options))):
        optimizer = SparseAdam(filter_out_sparse_param(module), lr=0.001)
        torch.cat(list(module(everything).values()), 1).sum().backward()
        optimizer.step()
        result[name] = (module, optimizer, ids)
    static = StaticTables(sizes)
    result[STATIC] = (static, torch.optim.SparseAdam(list(static.parameters()), lr=0.001), rows)
    result[REFERENCE] = (ReferenceTables(sizes, known), None, ids)
    return result


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--features", type=positive, default=40, help="features (default 40)")
    arguments.add_argument("--rows", type=positive, help="ids of a table (default 100,000)")
    arguments.add_argument("--dim", type=positive, default=16, help="columns (default 16)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    sizes = Sizes(
        features=options.features,
        rows=options.rows or (1000 if options.quick else 100_000),
        dim=options.dim,
        rounds=options.rounds,
        quick=options.quick,
    )
    report = Report(as_json=options.json, cases=14)
    for case in (LONG, SHORT):
        report.take(measure(sizes, case, options.only))
    report.close()


if __name__ == "__main__":
    main()
