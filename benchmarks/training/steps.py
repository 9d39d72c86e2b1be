"""Training steps of one table of ours, timed against another variant or a static table."""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from common.command import is_selected, positive
from common.id_streams import UniformNumbers, ZipfNumbers, spread
from common.report import Row, compare
from common.timing import interleave
from peers.static_tables import Step
from torch import Tensor
from training.variants import SHORT, Variant, train_all

DRAWS = ("uniform", "Zipf")
BATCHES = 8  # different batches, used in turn
KEPT_TABLES = 3  # at most: a variant, its peer, and one of the comparison before
FULL_ROWS, FULL_BATCH, FULL_BAG = 1_000_000, 4096, 20


@dataclass(frozen=True)
class Sizes:
    """Of tables and batches; rounds and calls of each in a round."""

    rows: int
    batch: int
    bag: int
    dims: tuple[int, ...]
    rounds: int
    calls: int

    @property
    def are_full(self) -> bool:
        """Whether they are those for which times of peers were noted."""
        return (self.rows, self.batch, self.bag) == (FULL_ROWS, FULL_BATCH, FULL_BAG)


def add_size_arguments(arguments: argparse.ArgumentParser) -> None:
    """Add the options that :func:`sizes_of` takes."""
    arguments.add_argument("--rows", type=positive, help="ids in the table (default 1,000,000)")
    arguments.add_argument("--batch", type=positive, default=FULL_BATCH, help="bags (default 4096)")
    arguments.add_argument("--bag", type=positive, default=FULL_BAG, help="ids a bag (default 20)")
    arguments.add_argument("--dims", type=positive, nargs="+", help="columns (default 64 128)")
    arguments.add_argument("--threads", type=positive, default=2, help="threads (default 2)")


def sizes_of(options: argparse.Namespace, *, calls: int) -> Sizes:
    """Return sizes by the command line.

    Args:
        options: of a parser with the options of :func:`add_size_arguments`.
        calls: steps in a round, unless ``--quick`` was given.
    """
    return Sizes(
        rows=options.rows or (100_000 if options.quick else FULL_ROWS),
        batch=options.batch,
        bag=options.bag,
        dims=tuple(options.dims or ([64] if options.quick else [64, 128])),
        rounds=options.rounds,
        calls=2 if options.quick else calls,
    )


@dataclass(frozen=True)
class StaticPeer:
    """A static table that does a training step.

    Attributes:
        name: of the library of the table.
        optimizer: its name there.
        noted_ms: (dim, draw) -> ms of a step where targets were set.
        build: makes a step, see peers/static_tables.py.
        takes_ids: whether the step takes ids, as ours do, and not row numbers.
    """

    name: str
    optimizer: str
    noted_ms: Mapping[tuple[int, str], float]
    build: Callable[[str, int, int, Tensor], Step]
    takes_ids: bool = False


@dataclass(frozen=True)
class Comparison:
    """A variant against another one, or against a static table.

    Attributes:
        target: draw -> largest ratio that meets the target.
        target_dim: the only dim for which there is a target; None: all of them.
        everywhere: all dims and draws; else only the largest dim, with uniform ids.
    """

    ours: Variant
    peer: Variant | StaticPeer
    target: Mapping[str, float] = field(default_factory=dict)
    target_dim: int | None = None
    everywhere: bool = True

    @property
    def peer_name(self) -> str:
        """The peer, in rows."""
        if isinstance(self.peer, Variant):
            return f"our {self.peer.name}"
        return f"{self.peer.name} {self.peer.optimizer}"

    def target_of(self, dim: int, draw: str) -> float | None:
        """Return the largest ratio for a case; None: any."""
        return self.target.get(draw) if self.target_dim in (None, dim) else None


def dynamic_step(variant: Variant, sizes: Sizes, dim: int, grad: Tensor) -> Step:
    """Return a step of our table, which has seen and updated all its ids before.

    Args:
        variant: of the table.
        sizes: of the table and its batches.
        dim: columns.
        grad: float32 [batch, dim], the gradient of the output.

    Returns:
        The step, a function of ids.
    """
    bag = variant.table(dim)
    train_all(bag, sizes.rows, sizes.batch * sizes.bag)
    part = -(-sizes.batch // max(1, variant.micro_batches))
    grads = grad.split(part)

    def step(ids: Tensor) -> None:
        for ids_of_part, grad_of_part in zip(ids.split(part), grads, strict=True):
            bag(ids_of_part).backward(grad_of_part)
        bag.optimizer.step()

    return step


class Steps:
    """Training steps of one dim; tables of the last few are kept.

    Args:
        sizes: of tables and batches.
        dim: columns.
    """

    def __init__(self, sizes: Sizes, dim: int) -> None:
        self._sizes, self._dim = sizes, dim
        self._grad = torch.randn(sizes.batch, dim, generator=torch.Generator().manual_seed(0))
        self._kept: OrderedDict[str, Callable[[str, int], object]] = OrderedDict()
        shape = (sizes.batch, sizes.bag)
        self._numbers = {
            draw: [stream.draw(sizes.batch * sizes.bag).view(shape) for _ in range(BATCHES)]
            for draw, stream in (
                ("uniform", UniformNumbers(sizes.rows, seed=1)),
                ("Zipf", ZipfNumbers(sizes.rows, seed=1)),
            )
        }
        self._ids = {draw: [spread(n) for n in batches] for draw, batches in self._numbers.items()}

    def of(self, name: str, table: Variant | StaticPeer) -> Callable[[str, int], object]:
        """Return a step, as a function of the draw and the call's number."""
        if name not in self._kept:
            while len(self._kept) >= KEPT_TABLES:
                self._kept.popitem(last=False)
            self._kept[name] = self._make(table)
        self._kept.move_to_end(name)
        return self._kept[name]

    def _make(self, table: Variant | StaticPeer) -> Callable[[str, int], object]:
        sizes, dim, grad = self._sizes, self._dim, self._grad
        if isinstance(table, Variant):
            step, batches = dynamic_step(table, sizes, dim, grad), self._ids
        else:
            step = table.build(table.optimizer, sizes.rows, dim, grad)
            batches = self._ids if table.takes_ids else self._numbers
        return lambda draw, call: step(batches[draw][call % BATCHES])


def step_rows(
    bench: str, sizes: Sizes, comparisons: Sequence[Comparison], only: list[str]
) -> Iterator[Row | str]:
    """Yield the name of each comparison of steps as it starts, then its row."""
    for dim in sizes.dims:
        steps = Steps(sizes, dim)
        for comparison in comparisons:
            peer = comparison.peer_name
            for draw in DRAWS:
                case = f"{comparison.ours.name} D={dim} {draw}"
                here = comparison.everywhere or (dim == max(sizes.dims) and draw == "uniform")
                if here and is_selected(only, case, peer):
                    yield f"{case}: {peer}"
                    yield step_row(bench, sizes, steps, dim, draw, case, comparison)


def step_row(
    bench: str,
    sizes: Sizes,
    steps: Steps,
    dim: int,
    draw: str,
    case: str,
    comparison: Comparison,
) -> Row:
    """Time a variant's step against its peer's on the same draws."""
    ours, peer = comparison.ours, comparison.peer
    run_ours = steps.of(f"our {ours.name}", ours)
    run_peer = steps.of(comparison.peer_name, peer)
    timings = interleave(
        {"ours": lambda call: run_ours(draw, call), "peer": lambda call: run_peer(draw, call)},
        rounds=sizes.rounds,
        calls=sizes.calls,
    )
    noted = peer.noted_ms if isinstance(peer, StaticPeer) and sizes.are_full else {}
    return compare(
        bench,
        case,
        timings["ours"],
        comparison.peer_name,
        timings["peer"],
        target=comparison.target_of(dim, draw),
        noted_ms=noted.get((dim, draw)),
        optimizer=ours.optimizer,
        row_dtype=SHORT[ours.rows],
        state_dtype=SHORT[ours.state],
        stochastic=ours.stochastic,
        micro_batches=ours.micro_batches,
        dim=dim,
        draw=draw,
        threads=torch.get_num_threads(),
        rows=sizes.rows,
        batch=sizes.batch,
        bag=sizes.bag,
    )
