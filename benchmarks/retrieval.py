"""The output side: sampled ids, the step of a loss with sampled negatives, and exact search."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from common.command import is_selected, parser, positive
from common.id_streams import distinct_ids
from common.report import Report, Row, compare, quantity
from common.timing import interleave
from torch import Tensor, nn

import torch_dynemb as td

BENCH = "retrieval"
DIM = 64
NEGATIVES, QUERIES = 1024, 2048  # of a training step
SEARCHES, RESULTS = 256, 100
CHUNK = 16384  # rows that torch scores at once
TEMPERATURE = 0.05
STATIC = "nn.Embedding, given negatives"
MATMUL = "torch.matmul and topk, chunks"
FAISS = "faiss IndexFlatIP"
SAMPLED, STEP, SEARCH = "sample_ids, an id", "step of a sampled softmax", "top_k"


def filled(ids: int, *, rows: bool = False) -> td.DynamicEmbedding:
    """Return a table of ids, with random rows or initial ones."""
    items = td.DynamicEmbedding(DIM, name="items", optimizer=td.SGD(lr=0.01))
    known = distinct_ids(0, ids)
    items.group.reserve(0, ids)
    for part in known.split(1 << 20):
        if rows:
            items.group.insert_or_assign(0, part, torch.randn(len(part), DIM))
        else:
            items.group.insert(0, part)
    return items


def sampling_row(ids: int, samples: int, rounds: int) -> Row:
    """Time uniform samples of a large table."""
    group = td.TableGroup([td.TableConfig("items", 1)], optimizer=td.SGD(lr=0.1))
    group.reserve(0, ids)
    for part in distinct_ids(0, ids).split(1 << 20):
        group.insert(0, part)
    timing = interleave({"ours": lambda _: group.sample_ids(0, samples)}, rounds=rounds, calls=1)[
        "ours"
    ]
    ns = timing.median_ms * 1e6 / samples
    return quantity(BENCH, SAMPLED, ns, "ns", target=40, ids=ids, samples=samples)


def static_step(ids: int) -> Callable[[int], None]:
    """Return a step of the same loss over ``nn.Embedding``, with numbered rows."""
    table = nn.Embedding(ids, DIM, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.01)
    query = torch.randn(QUERIES, DIM, requires_grad=True)
    generator = torch.Generator().manual_seed(1)
    positives = [torch.randint(0, ids, (QUERIES,), generator=generator) for _ in range(64)]
    drawn = [torch.randint(0, ids, (NEGATIVES,), generator=generator) for _ in range(64)]
    correction = torch.log(torch.tensor(NEGATIVES / ids))

    def step(call: int) -> None:
        positive, negative = positives[call % 64], drawn[call % 64]
        rows = table(torch.cat([positive, negative]))
        scaled = query / TEMPERATURE
        scores = scaled @ rows[QUERIES:].t() - correction
        hits = positive[:, None] == negative[None, :]
        scores = scores.masked_fill(hits, torch.finfo(torch.float32).min / 2)
        right = (scaled * rows[:QUERIES]).sum(1)
        F.softplus(scores.logsumexp(1) - right).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        query.grad = None

    return step


def dynamic_step(ids: int) -> Callable[[int], None]:
    """Return a step of a dynamic table, which draws its negatives."""
    items = filled(ids)
    loss = td.SampledSoftmaxLoss(
        items, negatives=td.UniformNegatives(NEGATIVES), temperature=TEMPERATURE
    )
    query = torch.randn(QUERIES, DIM, requires_grad=True)
    known = distinct_ids(0, ids)
    generator = torch.Generator().manual_seed(1)
    positives = [known[torch.randint(0, ids, (QUERIES,), generator=generator)] for _ in range(64)]

    def step(call: int) -> None:
        loss(query, positives[call % 64]).backward()
        items.optimizer.step()
        query.grad = None

    return step


def step_row(ids: int, rounds: int) -> Row:
    """Compare a training step with that of a static table."""
    steps = {"ours": dynamic_step(ids), "peer": static_step(ids)}
    timings = interleave(steps, rounds=rounds, calls=10, warmup=2)
    return compare(BENCH, STEP, timings["ours"], STATIC, timings["peer"], target=1.15, ids=ids)


def matmul_search(rows: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a search by torch alone."""

    def search(query: Tensor) -> Tensor:
        best = torch.full((len(query), RESULTS), -torch.inf)
        numbers = torch.zeros(len(query), RESULTS, dtype=torch.int64)
        for begin in range(0, len(rows), CHUNK):
            scores = query @ rows[begin : begin + CHUNK].t()
            found = scores.topk(min(RESULTS, scores.shape[1]))
            both = torch.cat([best, found.values], 1).topk(RESULTS)
            best = both.values
            numbers = torch.cat([numbers, found.indices + begin], 1).gather(1, both.indices)
        return numbers

    return search


def search_rows(ids: int, rounds: int, wanted: Callable[[str], bool]) -> Iterator[Row | str]:
    """Yield comparisons of searches in live, frozen and quantized tables."""
    items = filled(ids, rows=True)
    query = torch.randn(SEARCHES, DIM)
    plain = items.group.read(0, items.ids())
    searches: dict[str, Callable[[int], object]] = {
        "live": lambda _: td.top_k(query, items, RESULTS)
    }
    frozen = td.freeze(items)
    searches["frozen"] = lambda _: td.top_k(query, frozen, RESULTS)
    quantized = td.freeze(items, rows="int8")
    searches["int8"] = lambda _: td.top_k(query, quantized, RESULTS)
    by_torch = matmul_search(plain)
    peers: dict[str, Callable[[int], object]] = {MATMUL: lambda _: by_torch(query)}
    try:
        import faiss

        index = faiss.IndexFlatIP(DIM)
        index.add(plain.numpy())
        peers[FAISS] = lambda _: index.search(query.numpy(), RESULTS)
    except ImportError:
        print(f"faiss-cpu is missing: no comparison with {FAISS}", file=sys.stderr)
    cases = {name: f"{SEARCH}, {name}" for name in searches if wanted(f"{SEARCH}, {name}")}
    if not cases:
        return
    yield SEARCH
    timings = interleave(
        {**{name: searches[name] for name in cases}, **peers}, rounds=rounds, calls=1
    )
    for name, case in cases.items():
        for peer in peers:
            target = None if name == "int8" else 1.3 if peer == MATMUL else 1.0
            yield compare(BENCH, case, timings[name], peer, timings[peer], target=target, ids=ids)


def rows(ids: int, rounds: int, only: list[str]) -> Iterator[Row | str]:
    """Yield the name of each case as it starts, then its rows."""
    if is_selected(only, SAMPLED, ""):
        yield SAMPLED
        yield sampling_row(10 * ids, ids, rounds)
    if is_selected(only, STEP, STATIC):
        yield STEP
        yield step_row(ids, rounds)
    yield from search_rows(ids, rounds, lambda case: is_selected(only, case, MATMUL))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="ids of a table (default 1,000,000)")
    options = arguments.parse_args()
    ids = options.ids or (20_000 if options.quick else 1_000_000)
    report = Report(as_json=options.json, cases=8)
    report.take(rows(ids, options.rounds, options.only))
    report.close()


if __name__ == "__main__":
    main()
