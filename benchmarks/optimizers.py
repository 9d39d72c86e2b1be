"""Training step by optimizer, dtype of rows and state, and mode; bytes of an id.

One table of 1 M rows, batch 4096, 20 ids a bag, sum pooling, 2 threads: forward, backward and
update. Every optimizer in float32 is set against a static peer where one has it, and against our
row-wise Adagrad; low precision and split mode against the same optimizer in float32, fused.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import optimizers_plot
import torch
import train_step
from command import is_selected, parser, positive
from id_streams import UniformNumbers, ZipfNumbers, distinct_ids, spread
from peers.static_tables import LEARNING_RATE, MissingPackageError
from report import Report, Row, compare, quantity
from timing import interleave
from torch import Tensor
from train_step import BATCHES, FBGEMM, TORCH, Sizes

import torch_dynemb as td

BENCH = "optimizers"
DRAWS = ("uniform", "Zipf")
OPTIMIZERS = (
    *("SGD", "MomentumSGD", "LARSSGD", "Adagrad", "RowWiseAdagrad", "Ftrl", "GroupFtrl"),
    *("Adam", "AdamW", "AdamWTF", "AMSGrad", "SmartDecayAdam", "PartialRowWiseAdam"),
    *("LAMB", "PartialRowWiseLAMB"),
)
BASE = "RowWiseAdagrad"
IN_DETAIL = ("RowWiseAdagrad", "Adam")  # all dtypes and modes of these
OPTIONS: dict[str, dict[str, float]] = {"GroupFtrl": {"l1": 1e-6, "group_l1": 1e-6}}
FLOAT32, BFLOAT16, FLOAT16, UINT8 = torch.float32, torch.bfloat16, torch.float16, torch.uint8
SHORT = {FLOAT32: "fp32", BFLOAT16: "bf16", FLOAT16: "fp16", UINT8: "8-bit"}
ADAM_TARGET = {"uniform": 1.5, "Zipf": 1.3}  # against our row-wise Adagrad
BFLOAT16_TARGET = 0.75  # of float32's time: row-wise Adagrad, D=128, uniform
MEMORY_DIM = 128
MEMORY_TARGET = 0.52  # of float32's bytes: row-wise Adagrad, D=128, without the index
GENERATION_BYTES, SCALE_BYTES, SCALE_COLUMNS = 4, 4, 128
KEPT_TABLES = 3  # at most: a variant, its peer, and one of the comparison before


@dataclass(frozen=True)
class Variant:
    """One of our optimizers, how it keeps its numbers, and when it applies gradients."""

    optimizer: str
    rows: torch.dtype = FLOAT32
    state: torch.dtype = FLOAT32
    stochastic: bool = True
    micro_batches: int = 0  # of a step in split mode; 0: the update is fused into the backward

    @property
    def name(self) -> str:
        """Of the optimizer, and what is not as usual."""
        parts = [self.optimizer]
        if self.rows != FLOAT32:
            parts.append(f"{SHORT[self.rows]} rows" + ("" if self.stochastic else " to nearest"))
        if self.state != FLOAT32:
            parts.append(f"{SHORT[self.state]} state")
        if self.micro_batches:
            parts.append("split")
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        return ", ".join(parts)

    def config(self) -> td.optim.OptimizerConfig:
        """The optimizer's config."""
        options: dict[str, Any] = dict(OPTIONS.get(self.optimizer, {}))
        if self.state != FLOAT32:
            options["state_dtype"] = self.state
        kind = getattr(td, self.optimizer)
        config: td.optim.OptimizerConfig = kind(
            lr=LEARNING_RATE, stochastic_rounding=self.stochastic, **options
        )
        return config

    def table(self, dim: int) -> td.DynamicEmbeddingBag:
        """An empty table of ``dim`` columns."""
        return td.DynamicEmbeddingBag(
            dim,
            mode="sum",
            name="bench",
            initializer=td.Uniform(-0.01, 0.01),  # as the peers
            optimizer=self.config(),
            dtype=self.rows,
            split=self.micro_batches > 0,
        )


@dataclass(frozen=True)
class Comparison:
    """A variant against another one, or against a static table as in train_step.py.

    Attributes:
        target: draw -> largest ratio that meets the target.
        target_dim: the only dim for which there is a target; None: all of them.
        everywhere: all dims and draws; else only the largest dim, with uniform ids.
    """

    ours: Variant
    peer: Variant | train_step.Comparison
    target: Mapping[str, float] = field(default_factory=dict)
    target_dim: int | None = None
    everywhere: bool = True

    @property
    def peer_name(self) -> str:
        """The peer, in rows."""
        if isinstance(self.peer, Variant):
            return f"our {self.peer.name}"
        return f"{self.peer.peer} {self.peer.peer_optimizer}"

    def target_of(self, dim: int, draw: str) -> float | None:
        """Largest ratio for a case; None: no target."""
        return self.target.get(draw) if self.target_dim in (None, dim) else None


def state_dtypes(optimizer: str) -> tuple[torch.dtype, ...]:
    """What an optimizer may keep its values by weight in; float32 first."""
    kind = getattr(td, optimizer)
    if "state_dtype" not in {entry.name for entry in fields(kind)}:
        return (FLOAT32,)
    return (FLOAT32, BFLOAT16, UINT8) if issubclass(kind, td.Adam) else (FLOAT32, BFLOAT16)


def comparisons_of(optimizer: str) -> Iterator[Comparison]:
    """All comparisons of an optimizer, those with its float32 table first."""
    plain = Variant(optimizer)
    for static in train_step.COMPARISONS:
        if static.ours == optimizer and static.peer in (FBGEMM, TORCH):
            yield Comparison(plain, static, static.target or {})
    if optimizer != BASE:
        yield Comparison(plain, Variant(BASE), ADAM_TARGET if optimizer == "Adam" else {})
    yield Comparison(
        Variant(optimizer, rows=BFLOAT16),
        plain,
        {"uniform": BFLOAT16_TARGET} if optimizer == BASE else {},
        target_dim=128,
        everywhere=optimizer in IN_DETAIL,
    )
    if optimizer not in IN_DETAIL:
        return
    yield Comparison(Variant(optimizer, rows=BFLOAT16, stochastic=False), plain)
    yield Comparison(Variant(optimizer, rows=FLOAT16), plain)
    for state in state_dtypes(optimizer)[1:]:
        yield Comparison(Variant(optimizer, state=state), plain)
    for micro_batches in (1, 2):
        yield Comparison(Variant(optimizer, micro_batches=micro_batches), plain)


COMPARISONS = [comparison for name in OPTIMIZERS for comparison in comparisons_of(name)]


def dynamic_step(variant: Variant, sizes: Sizes, dim: int, grad: Tensor) -> train_step.Step:
    """A step of our table, which has seen and updated all its ids before.

    Args:
        variant: of the table.
        sizes: of the table and its batches.
        dim: columns.
        grad: float32 [batch, dim], the gradient of the output.

    Returns:
        The step, a function of ids.
    """
    bag = variant.table(dim)
    for numbers in torch.arange(sizes.rows).split(sizes.batch * sizes.bag):
        bag(spread(numbers).view(-1, 1)).backward(torch.zeros(len(numbers), dim))
        bag.optimizer.step()
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

    def of(self, name: str, table: Variant | train_step.Comparison) -> Callable[[str, int], object]:
        """A step, as a function of the draw and the call's number."""
        if name not in self._kept:
            while len(self._kept) >= KEPT_TABLES:
                self._kept.popitem(last=False)
            self._kept[name] = self._make(table)
        self._kept.move_to_end(name)
        return self._kept[name]

    def _make(self, table: Variant | train_step.Comparison) -> Callable[[str, int], object]:
        sizes, dim, grad = self._sizes, self._dim, self._grad
        if isinstance(table, Variant):
            step, batches = dynamic_step(table, sizes, dim, grad), self._ids
        else:
            assert table.build is not None
            step = table.build(table.peer_optimizer, sizes.rows, dim, grad)
            batches = self._numbers
        return lambda draw, call: step(batches[draw][call % BATCHES])


def step_rows(sizes: Sizes, only: list[str]) -> Iterator[Row | str]:
    """Yields the name of each comparison of steps as it starts, then its row."""
    for dim in sizes.dims:
        steps = Steps(sizes, dim)
        for comparison in COMPARISONS:
            peer = comparison.peer_name
            for draw in DRAWS:
                case = f"{comparison.ours.name} D={dim} {draw}"
                here = comparison.everywhere or (dim == max(sizes.dims) and draw == "uniform")
                if here and is_selected(only, case, peer):
                    yield f"{case}: {peer}"
                    yield step_row(sizes, steps, dim, draw, case, comparison)


def step_row(
    sizes: Sizes, steps: Steps, dim: int, draw: str, case: str, comparison: Comparison
) -> Row:
    """Times a variant's step against its peer's on the same draws."""
    ours, peer = comparison.ours, comparison.peer
    run_ours = steps.of(f"our {ours.name}", ours)
    run_peer = steps.of(comparison.peer_name, peer)
    timings = interleave(
        {"ours": lambda call: run_ours(draw, call), "peer": lambda call: run_peer(draw, call)},
        rounds=sizes.rounds,
        calls=sizes.calls,
    )
    full_size = sizes.rows == 1_000_000 and sizes.batch == 4096 and sizes.bag == 20
    noted = {} if isinstance(peer, Variant) or not full_size else peer.noted_ms
    return compare(
        BENCH,
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


@dataclass(frozen=True)
class IdBytes:
    """Bytes of an id: ``rows`` with generations, ``state`` of the optimizer, ``index``."""

    rows: float
    state: float
    index: float

    @property
    def total(self) -> float:
        return self.rows + self.state + self.index


def measured_bytes(variant: Variant, dim: int, ids: int) -> IdBytes:
    """What ``module.memory()`` says of a table with so many ids."""
    module = variant.table(dim)
    module.group.insert(0, distinct_ids(0, ids))
    memory = module.memory()
    return IdBytes(memory["rows"] / ids, memory["state"] / ids, memory["index"] / ids)


def formula_bytes(variant: Variant, dim: int) -> int:
    """Bytes of a row and its state by what the documentation says of them."""
    kind = type(variant.config())
    of_weights = dim * variant.state.itemsize
    if variant.state == UINT8:  # columns in words of 4
        of_weights = -(-dim // 4) * 4 + -(-dim // SCALE_COLUMNS) * SCALE_BYTES
    counters = 1 if issubclass(kind, td.SmartDecayAdam) else 0
    state = len(kind.element_state) * of_weights + 4 * (len(kind.row_state) + counters)
    return dim * variant.rows.itemsize + GENERATION_BYTES + state


def memory_rows(ids: int, only: list[str]) -> Iterator[Row | str]:
    """Bytes of an id for every combination, beside what the formula gives."""
    for optimizer in OPTIMIZERS:
        for rows in (FLOAT32, BFLOAT16, FLOAT16):
            for state in state_dtypes(optimizer):
                variant = Variant(optimizer, rows, state)
                case = f"rows and state of an id, {variant.name} D={MEMORY_DIM}"
                if not is_selected(only, case, "target"):
                    continue
                yield case
                measured = measured_bytes(variant, MEMORY_DIM, ids)
                yield quantity(
                    BENCH,
                    case,
                    measured.rows + measured.state,
                    "bytes",
                    target=formula_bytes(variant, MEMORY_DIM),
                    rows_bytes=measured.rows,
                    state_bytes=measured.state,
                    index_bytes=measured.index,
                    total_bytes=measured.total,
                    ids=ids,
                )
    case = f"rows and state, bf16 against fp32 rows, {BASE} D={MEMORY_DIM}"
    if is_selected(only, case, "target"):
        low, full = (
            measured_bytes(Variant(BASE, rows), MEMORY_DIM, ids) for rows in (BFLOAT16, FLOAT32)
        )
        ratio = (low.rows + low.state) / (full.rows + full.state)
        yield quantity(BENCH, case, ratio, "x", target=MEMORY_TARGET, ids=ids)


USEFUL = (
    Variant("SGD"),
    Variant("SGD", BFLOAT16),
    Variant("RowWiseAdagrad"),
    Variant("RowWiseAdagrad", BFLOAT16),
    Variant("Adagrad"),
    Variant("Adagrad", BFLOAT16, BFLOAT16),
    Variant("PartialRowWiseAdam"),
    Variant("PartialRowWiseAdam", BFLOAT16, UINT8),
    Variant("Adam"),
    Variant("Adam", state=BFLOAT16),
    Variant("Adam", state=UINT8),
    Variant("Adam", BFLOAT16, BFLOAT16),
    Variant("Adam", BFLOAT16, UINT8),
    Variant("AMSGrad"),
)


def memory_table(ids: int) -> str:
    """Bytes of an id for :data:`USEFUL` combinations, in Markdown."""
    lines = ["| optimizer | rows | state | bytes of rows | of state | of the index | all |"]
    lines += ["|" + "---|" * 7]
    for variant in USEFUL:
        measured = measured_bytes(variant, MEMORY_DIM, ids)
        kind = type(variant.config())
        state = SHORT[variant.state] if kind.element_state else "-"
        if kind.row_state:
            state = f"{state}, one by row" if kind.element_state else "one by row"
        cells = [kind.__name__, SHORT[variant.rows], state]
        cells += [f"{n:.0f}" for n in (measured.rows, measured.state, measured.index)]
        lines.append(f"| {' | '.join(cells)} | {measured.total:.0f} |")
    return "\n".join(lines)


def plot(rows: list[Row], path: Path) -> None:
    """Draws the steps of all optimizers in float32 and bfloat16, as far as rows have them."""
    steps = [
        row
        for row in rows
        if row["ours_ms"] is not None
        and (row["row_dtype"], row["state_dtype"]) == ("bf16", "fp32")
        and (row["stochastic"], row["micro_batches"], row["draw"]) == (True, 0, "uniform")
    ]
    if not steps:
        raise SystemExit("no rows of bf16 steps with uniform ids to plot: leave --only out")
    dim = max(row["dim"] for row in steps)
    # minima: optimizers did not take turns with each other, only the dtypes of one did
    times = {r["optimizer"]: (r["peer_min_ms"], r["ours_min_ms"]) for r in steps if r["dim"] == dim}
    some = steps[0]
    optimizers_plot.draw(
        times,
        f"One training step: {some['rows']:,} rows, D={dim}, {some['batch']} bags of "
        f"{some['bag']} uniform ids, {some['threads']} threads",
        path,
    )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--rows", type=positive, help="ids in the table (default 1,000,000)")
    arguments.add_argument("--batch", type=positive, default=4096, help="bags (default 4096)")
    arguments.add_argument("--bag", type=positive, default=20, help="ids a bag (default 20)")
    arguments.add_argument("--dims", type=positive, nargs="+", help="columns (default 64 128)")
    arguments.add_argument("--threads", type=positive, default=2, help="threads (default 2)")
    arguments.add_argument(
        "--memory-ids", type=positive, help="ids whose bytes are counted (default 100,000)"
    )
    arguments.add_argument(
        "--memory-table", action="store_true", help="only print bytes of an id, in Markdown"
    )
    arguments.add_argument("--plot", type=Path, metavar="FILE", help="PNG of all optimizers")
    arguments.add_argument(
        "--results", type=Path, metavar="FILE", help="plot what run.py --save has kept: no run"
    )
    options = arguments.parse_args()
    if options.results and not options.plot:
        arguments.error("--results says what to plot: give --plot, too")
    torch.set_num_threads(options.threads)
    memory_ids = options.memory_ids or (10_000 if options.quick else 100_000)
    if options.memory_table:
        print(memory_table(memory_ids))
        return
    if options.results:
        saved = json.loads(options.results.read_text())["rows"]
        plot([row for row in saved if row["bench"] == BENCH], options.plot)
        return
    sizes = Sizes(
        rows=options.rows or (100_000 if options.quick else 1_000_000),
        batch=options.batch,
        bag=options.bag,
        dims=tuple(options.dims or ([64] if options.quick else [64, 128])),
        rounds=options.rounds,
        calls=2 if options.quick else 4,
    )
    full = sum(comparison.everywhere for comparison in COMPARISONS)
    steps = full * len(DRAWS) * len(sizes.dims) + len(COMPARISONS) - full
    combinations = 3 * sum(len(state_dtypes(name)) for name in OPTIMIZERS)
    report = Report(as_json=options.json, cases=steps + combinations + 1)
    rows: list[Row] = []
    for items in (step_rows(sizes, options.only), memory_rows(memory_ids, options.only)):
        for item in items:
            if isinstance(item, str):
                report.start(item)
                continue
            rows.append(item)
            report.add(item)
    report.close()
    if options.plot:
        plot(rows, options.plot)


if __name__ == "__main__":
    try:
        main()
    except MissingPackageError as error:
        raise SystemExit(str(error)) from error
