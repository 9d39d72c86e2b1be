"""CPU training step of a dynamic table against static ones.

One table of 1 M rows, batch 4096, 20 ids a bag, sum pooling, 2 threads: forward, backward and
update. Ours also hashes: its ids are 64-bit numbers, the peers' ids are row numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from command import is_selected, parser, positive
from id_streams import UniformNumbers, ZipfNumbers, spread
from peers.static_tables import (
    LEARNING_RATE,
    MissingPackageError,
    Step,
    fbgemm_step,
    hand_step,
    torch_step,
)
from report import Report, Row, compare
from timing import Timing, interleave
from torch import Tensor

import torch_dynemb as td

BENCH = "train_step"
BATCHES = 8  # different batches, used in turn
FBGEMM, TORCH, HAND = "FBGEMM CPU TBE", "nn.EmbeddingBag(sparse)", "hand kernel"
OURS_ROWWISE = "our RowWiseAdagrad"
OPTIMIZERS: dict[str, Callable[[], td.optim.OptimizerConfig]] = {
    "RowWiseAdagrad": lambda: td.RowWiseAdagrad(lr=LEARNING_RATE),
    "Adagrad": lambda: td.Adagrad(lr=LEARNING_RATE),
    "SGD": lambda: td.SGD(lr=LEARNING_RATE),
    "Adam": lambda: td.Adam(lr=LEARNING_RATE),
}


@dataclass(frozen=True)
class Comparison:
    """Our optimizer against a peer: largest ratio, and the peer's noted ms for (dim, draw)."""

    ours: str
    peer: str
    peer_optimizer: str
    target: dict[str, float] | None
    noted_ms: dict[tuple[int, str], float]
    build: Callable[[str, int, int, Tensor], Step] | None


def _noted(uniform: float, zipf: float, dim: int = 64) -> dict[tuple[int, str], float]:
    return {(dim, "uniform"): uniform, (dim, "Zipf"): zipf}


def _both(ratio: float) -> dict[str, float]:
    return {"uniform": ratio, "Zipf": ratio}


COMPARISONS = [
    Comparison(
        "RowWiseAdagrad",
        FBGEMM,
        "RowWiseAdagrad",
        _both(0.9),
        _noted(4.7, 3.4) | _noted(13.3, 5.7, dim=128),
        fbgemm_step,
    ),
    Comparison("Adagrad", FBGEMM, "Adagrad", _both(0.25), _noted(35, 22), fbgemm_step),
    Comparison("SGD", FBGEMM, "SGD", _both(0.5), _noted(9.9, 6.0), fbgemm_step),
    Comparison("Adam", TORCH, "SparseAdam", _both(0.2), _noted(84, 46), torch_step),
    Comparison("Adagrad", TORCH, "Adagrad", _both(0.2), _noted(48, 37), torch_step),
    Comparison("SGD", TORCH, "SGD", _both(0.5), _noted(14, 7.8), torch_step),
    Comparison("RowWiseAdagrad", HAND, "RowWiseAdagrad", None, {(64, "uniform"): 2.25}, hand_step),
    Comparison("SGD", HAND, "SGD", None, {(64, "uniform"): 3.0}, hand_step),
    Comparison("Adam", OURS_ROWWISE, "", {"uniform": 1.5, "Zipf": 1.3}, {}, None),
]


def dynamic_step(optimizer: str, rows: int, dim: int, grad: Tensor, chunk: int) -> Step:
    """A step of our table, which has seen and updated all its ids before.

    Args:
        optimizer: a key of :data:`OPTIMIZERS`.
        rows: number of ids.
        dim: columns.
        grad: float32 [batch, dim], the gradient of the output.
        chunk: ids of one call while the table is filled.

    Returns:
        The step, a function of ids.
    """
    bag = td.DynamicEmbeddingBag(
        dim, mode="sum", name=f"bench_{optimizer}", optimizer=OPTIMIZERS[optimizer]()
    )
    for numbers in torch.arange(rows).split(chunk):
        bag(spread(numbers).view(-1, 1)).backward(torch.zeros(len(numbers), dim))
        bag.optimizer.step()

    def step(ids: Tensor) -> None:
        bag(ids).backward(grad)
        bag.optimizer.step()

    return step


@dataclass(frozen=True)
class Sizes:
    rows: int
    batch: int
    bag: int
    dims: tuple[int, ...]
    rounds: int
    calls: int


def case_name(draw: str, dim: int, optimizer: str) -> str:
    return f"{optimizer} D={dim} {draw}"


def measure(sizes: Sizes, only: list[str]) -> Iterator[Row | str]:
    """Yields the name of each comparison as it starts, then its row."""
    for dim in sizes.dims:
        grad = torch.randn(sizes.batch, dim, generator=torch.Generator().manual_seed(0))
        for optimizer in OPTIMIZERS:
            wanted = [
                (draw, comparison)
                for comparison in COMPARISONS
                if comparison.ours == optimizer
                for draw in ("uniform", "Zipf")
                if is_selected(only, case_name(draw, dim, optimizer), comparison.peer)
            ]
            if not wanted:
                continue
            ours = dynamic_step(optimizer, sizes.rows, dim, grad, sizes.batch * sizes.bag)
            for draw, comparison in wanted:
                case = case_name(draw, dim, optimizer)
                yield f"{case}: {comparison.peer}"
                timings = run(sizes, dim, draw, grad, ours, comparison)
                full_size = sizes.rows == 1_000_000 and sizes.batch == 4096 and sizes.bag == 20
                yield compare(
                    BENCH,
                    case,
                    timings["ours"],
                    f"{comparison.peer} {comparison.peer_optimizer}".strip(),
                    timings["peer"],
                    target=comparison.target[draw] if comparison.target else None,
                    noted_ms=comparison.noted_ms.get((dim, draw)) if full_size else None,
                    threads=torch.get_num_threads(),
                    rows=sizes.rows,
                    batch=sizes.batch,
                    bag=sizes.bag,
                )


def run(
    sizes: Sizes, dim: int, draw: str, grad: Tensor, ours: Step, comparison: Comparison
) -> dict[str, Timing]:
    """Times our step against one peer's on the same draws."""
    numbers_of = (UniformNumbers if draw == "uniform" else ZipfNumbers)(sizes.rows, seed=1)
    shape = (sizes.batch, sizes.bag)
    numbers = [numbers_of.draw(sizes.batch * sizes.bag).view(shape) for _ in range(BATCHES)]
    ids = [spread(batch) for batch in numbers]
    if comparison.build is None:
        chunk = sizes.batch * sizes.bag
        peer, peer_batches = dynamic_step("RowWiseAdagrad", sizes.rows, dim, grad, chunk), ids
    else:
        peer = comparison.build(comparison.peer_optimizer, sizes.rows, dim, grad)
        peer_batches = numbers
    return interleave(
        {
            "ours": lambda call: ours(ids[call % BATCHES]),
            "peer": lambda call: peer(peer_batches[call % BATCHES]),
        },
        rounds=sizes.rounds,
        calls=sizes.calls,
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=positive, help="ids in the table (default 1,000,000)")
    arguments.add_argument("--batch", type=positive, default=4096, help="bags (default 4096)")
    arguments.add_argument("--bag", type=positive, default=20, help="ids a bag (default 20)")
    arguments.add_argument("--dims", type=positive, nargs="+", help="columns (default 64 128)")
    arguments.add_argument("--threads", type=positive, default=2, help="threads (default 2)")
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    sizes = Sizes(
        rows=options.rows or (100_000 if options.quick else 1_000_000),
        batch=options.batch,
        bag=options.bag,
        dims=tuple(options.dims or ([64] if options.quick else [64, 128])),
        rounds=options.rounds,
        calls=2 if options.quick else 8,
    )
    report = Report(as_json=options.json, cases=2 * len(sizes.dims) * len(COMPARISONS))
    for item in measure(sizes, options.only):
        report.start(item) if isinstance(item, str) else report.add(item)
    report.close()


if __name__ == "__main__":
    try:
        main()
    except MissingPackageError as error:
        raise SystemExit(str(error)) from error
