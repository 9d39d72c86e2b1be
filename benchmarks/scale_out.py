"""The model of ``plan --ranks --link`` against ranks that train (gloo, one thread each).

* bytes: those that ranks send in a step, predicted from a sample and counted, on 2, 4 and 8 ranks.
* costs: of a rank's own work, fitted to steps on 2 ranks; ``--costs FILE`` writes them.
* times: steps of other sizes on 2 and 4 ranks, predicted from these costs and measured. Times are
  those of the fastest round, because the machine is shared.
* routing: ids of the fullest of 1,024 ranks, predicted and simulated by the owner of each id.
"""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
from common.command import is_selected, parser
from common.machine import cpu_name
from common.report import Report, Row, quantity
from sharded.routing import routed

from torch_dynemb.plan.ranks.demand import ColumnDemand
from torch_dynemb.plan.ranks.layouts import DEDUPED, SHARDINGS, Cluster, Sharding
from torch_dynemb.plan.ranks.links import Links
from torch_dynemb.plan.ranks.op_costs import MEASURED, OpCosts, Work
from torch_dynemb.plan.ranks.options import RankWishes
from torch_dynemb.plan.ranks.outcome import case_of, modelled_step
from torch_dynemb.plan.sizes import PlannedRow

BENCH = "scale_out"
PARTS = ("bytes", "costs", "times", "routing")
BYTES_TARGET, TIME_TARGET, ROUTING_TARGET = 0.02, 0.25, 0.03  # relative errors
CORES = 2
_NO_LINKS = Links(float("inf"), float("inf"), 0.0)


class Setting(NamedTuple):
    """Sizes of a step.

    Attributes:
        tables, rows, bag: of a stream.
        dim: columns.
        batch: lines of a rank.
    """

    tables: int
    rows: int
    bag: int
    dim: int
    batch: int

    @property
    def name(self) -> str:
        return f"{self.tables} tables, D={self.dim}, L={self.bag}, B={self.batch}"


BYTES = Setting(6, 50_000, 4, 32, 2048)
FITTED = [
    Setting(8, 100_000, bag, dim, batch)
    for bag, dim, batch in (
        *((1, 16, 1024), (1, 64, 1024), (8, 16, 1024), (8, 64, 1024)),
        *((1, 64, 4096), (4, 32, 4096), (2, 128, 2048), (1, 16, 256)),
    )
]
TESTED = [Setting(12, 60_000, 3, 32, 2048), Setting(6, 100_000, 2, 96, 3072)]
QUICK = Setting(4, 1000, 2, 8, 64)
CLUSTERS = {2: Cluster(2, 2), 4: Cluster(4, 2), 8: Cluster(8, 4)}
VARIANTS: list[tuple[Sharding, bool]] = [
    (sharding, dedup)
    for sharding in SHARDINGS
    for dedup in ((False, True) if sharding in DEDUPED else (False,))
]


class Ranks:
    """Ranks that stay, for several cases.

    Args:
        cluster: the ranks.
        directory: for the store of their group.
    """

    def __init__(self, cluster: Cluster, directory: str) -> None:
        from sharded import scaling

        context = multiprocessing.get_context("spawn")
        self.cluster = cluster
        self._pipes, self._processes = [], []
        store = str(Path(directory) / f"store{cluster.ranks}")
        for rank in range(cluster.ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=scaling.work, args=(theirs, rank, store, cluster), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Any, *arguments: Any) -> list[Any]:
        """Return the results of all ranks.

        Raises:
            RuntimeError: with the traceback of a rank that failed.
        """
        for pipe in self._pipes:
            pipe.send((function, arguments))
        answers = [pipe.recv() for pipe in self._pipes]
        failed = [answer for answer in answers if isinstance(answer, str)]
        if failed:
            raise RuntimeError(f"a rank failed:\n{failed[0]}")
        return answers

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(timeout=5)
            process.kill()


@contextmanager
def started(cluster: Cluster) -> Iterator[Ranks]:
    """Start ranks, and stop them."""
    with tempfile.TemporaryDirectory() as directory:
        ranks = Ranks(cluster, directory)
        try:
            yield ranks
        finally:
            ranks.stop()


def wishes_of(
    setting: Setting, cluster: Cluster, links: Links = _NO_LINKS, costs: OpCosts = MEASURED
) -> RankWishes:
    """Return what the plan is asked for; ranks of this machine share two cores."""
    cores = max(1, CORES // cluster.nodes)  # of a node
    return RankWishes(
        [cluster.ranks],
        setting.batch * cluster.ranks,
        cluster.node_size,
        links,
        cores,
        max(1, setting.dim // 4),
        costs,
        per_second=False,
    )


def case_for(setting: Setting, cluster: Cluster, sharding: Sharding, *, dedup: bool) -> Any:
    """Return the case that ranks run: the same tables in the same places as those of the plan."""
    from sharded.scaling import Case
    from sharded.stream import Stream

    stream = Stream(setting.tables, setting.rows, setting.bag)
    columns = _sample(setting)
    pieces, _ = modelled_step(
        columns, _row(setting), wishes_of(setting, cluster), cluster.ranks, sharding, dedup=dedup
    )
    return Case(sharding, dedup, pieces, stream, setting.dim, setting.batch)


def planned_case(
    setting: Setting,
    cluster: Cluster,
    sharding: Sharding,
    *,
    dedup: bool,
    links: Links = _NO_LINKS,
    costs: OpCosts = MEASURED,
) -> dict[str, Any]:
    """Return what the plan predicts."""
    wishes = wishes_of(setting, cluster, links, costs)
    return case_of(_sample(setting), _row(setting), wishes, cluster.ranks, sharding, dedup=dedup)


_samples: dict[Setting, list[ColumnDemand]] = {}


def _sample(setting: Setting) -> list[ColumnDemand]:
    from sharded.stream import Stream

    key = setting._replace(dim=0, batch=0)
    if key not in _samples:
        lines = 100_000 if setting.rows > 10_000 else 5_000
        _samples[key] = Stream(setting.tables, setting.rows, setting.bag).sample(lines)
    return _samples[key]


def _row(setting: Setting) -> PlannedRow:
    return PlannedRow(setting.dim, "rowwise-adagrad", "float32", "float32")


def _name(sharding: str, dedup: bool, ranks: int, setting: Setting) -> str:
    return f"{sharding}{', dedup' * dedup}, {ranks} ranks, {setting.name}"


def bytes_rows(
    setting: Setting, numbers: Sequence[int], only: Sequence[str]
) -> Iterator[Row | str]:
    """Compare the predicted bytes of all ranks with the counted ones, and those of each rank."""
    from sharded.scaling import run_case

    for number in numbers:
        cluster = CLUSTERS[number]
        wanted = [v for v in VARIANTS if is_selected(only, _name(*v, number, setting), "bytes")]
        if not wanted:
            continue
        with started(cluster) as ranks:
            for sharding, dedup in wanted:
                case = f"bytes: {_name(sharding, dedup, number, setting)}"
                yield case
                answers = ranks.run(
                    run_case, case_for(setting, cluster, sharding, dedup=dedup), cluster, 0
                )
                counted = [sum(sent.values()) for sent, _ in answers]
                predicted = planned_case(setting, cluster, sharding, dedup=dedup)["sent"]
                by_kind = {
                    kind: sum(sent.get(kind, 0) for sent, _ in answers) / number
                    for kind in ("splits", "lengths", "ids", "rows", "gradients")
                }
                mean = sum(counted) / number
                yield quantity(
                    BENCH,
                    case,
                    abs(predicted["total"] / mean - 1),
                    "relative error",
                    target=BYTES_TARGET,
                    counted_bytes=round(mean),
                    predicted_bytes=predicted["total"],
                    **{f"counted_{kind}": round(count) for kind, count in by_kind.items()},
                    **{f"predicted_{kind}": predicted[kind] for kind in by_kind},
                    counted_busiest=max(counted),
                    predicted_busiest=predicted["busiest_rank"],
                )


def measured_links(ranks: Ranks, rounds: int, clock: str) -> Links:
    """Return the latency of a message and the rate of a rank, while all ranks send."""
    from sharded.scaling import links

    others = ranks.cluster.ranks - 1
    small, large = 256, 4 << 20
    times = [seconds_of(ranks.run(links, size, 3 + rounds), clock) for size in (small, large)]
    rate = others * (large - small) / (times[1] - times[0])
    return Links(rate, rate, max(0.0, times[0] / others))


def seconds_of(answers: Sequence[tuple[Any, list[Any]]], clock: str) -> float:
    """Return the time of the fastest round.

    Args:
        answers: of all ranks: something, and its rounds.
        clock: ``"wall"``, or ``"processor"``: that of the slowest rank, or of all on two cores.
    """
    rounds = list(zip(*(timed for _, timed in answers), strict=True))
    if clock == "wall":
        return float(min(ranks[0].wall for ranks in rounds))
    spent = [[rank.processor for rank in ranks] for ranks in rounds]
    return float(min(max(*ranks, sum(ranks) / CORES) for ranks in spent))


class Measured(NamedTuple):
    """A step on two ranks.

    Attributes:
        case: its name.
        seconds: that it took.
        links: seconds of its exchanges, as predicted.
        work: 1, and the work of the rank with the most.
    """

    case: str
    seconds: float
    links: float
    work: list[float]


def measured_steps(
    settings: Sequence[Setting], rounds: int, clock: str, report: Report
) -> list[Measured]:
    """Time steps on two ranks."""
    from sharded.scaling import run_case

    cluster, found = CLUSTERS[2], []
    with started(cluster) as ranks:
        links = measured_links(ranks, rounds, clock)
        for setting in settings:
            for sharding, dedup in VARIANTS:
                if sharding not in DEDUPED:
                    continue
                case = f"fit: {_name(sharding, dedup, 2, setting)}"
                report.start(case)
                asked = case_for(setting, cluster, sharding, dedup=dedup)
                answers = ranks.run(run_case, asked, cluster, rounds)
                _, step = modelled_step(
                    *(_sample(setting), _row(setting), wishes_of(setting, cluster), 2, sharding),
                    dedup=dedup,
                )
                waited = sum(exchange.seconds(links) for exchange in step.exchanges)
                work = [1.0, *(float(amount.max()) for amount in step.work)]
                found.append(Measured(case, seconds_of(answers, clock), waited, work))
    return found


def fitted_costs(measured: Sequence[Measured]) -> OpCosts:
    """Fit the costs of a rank's own work to steps: least squares of relative errors.

    No cost is negative: the most negative one is left out until there is none.
    """
    names = ["step", *Work._fields]
    amounts = torch.tensor(
        [[amount / step.seconds for amount in step.work] for step in measured], dtype=torch.float64
    )
    shares = torch.tensor([[1 - step.links / step.seconds] for step in measured]).double()
    left = list(range(len(names)))
    while True:
        scale = amounts[:, left].norm(dim=0).clamp(min=1e-300)
        found = torch.linalg.lstsq(amounts[:, left] / scale, shares).solution[:, 0] / scale
        if float(found.min()) >= 0:
            break
        del left[int((found * scale).argmin())]
    costs = dict.fromkeys(names, 0.0)
    costs |= {names[number]: float(cost) for number, cost in zip(left, found, strict=True)}
    return OpCosts(
        step_us=float(f"{1e6 * costs.pop('step'):.4g}"),
        **{f"{name}_ns": float(f"{1e9 * cost:.4g}") for name, cost in costs.items()},
        source=f"{cpu_name()}, a thread a rank, TorchRec over gloo",
    )


def cost_rows(measured: Sequence[Measured], costs: OpCosts) -> Iterator[Row]:
    """Return the costs, and the errors of the fit."""
    for name, cost in asdict(costs).items():
        if name != "source":
            yield quantity(BENCH, f"cost: {name}", cost, name.rpartition("_")[2])
    for step in measured:
        amounts = (torch.tensor([amount], dtype=torch.float64) for amount in step.work[1:])
        predicted = step.links + float(costs.seconds(Work(*amounts)))
        yield quantity(
            BENCH,
            step.case,
            abs(predicted / step.seconds - 1),
            "relative error",
            measured_ms=1e3 * step.seconds,
            predicted_ms=1e3 * predicted,
            predicted_links_ms=1e3 * step.links,
            **dict(zip(Work._fields, step.work[1:], strict=True)),
        )


def times_rows(
    settings: Sequence[Setting], costs: OpCosts, rounds: int, clock: str, only: Sequence[str]
) -> Iterator[Row | str]:
    """Compare the predicted time of steps with the measured one."""
    from sharded.scaling import run_case

    for number in (2, 4):
        cluster = CLUSTERS[number]
        wanted = [
            (setting, *variant)
            for setting in settings
            for variant in VARIANTS
            if is_selected(only, _name(*variant, number, setting), "times")
        ]
        if not wanted:
            continue
        with started(cluster) as ranks:
            links = measured_links(ranks, rounds, clock)
            for setting, sharding, dedup in wanted:
                case = f"time: {_name(sharding, dedup, number, setting)}"
                yield case
                answers = ranks.run(
                    run_case,
                    case_for(setting, cluster, sharding, dedup=dedup),
                    cluster,
                    rounds,
                )
                seconds = seconds_of(answers, clock)
                predicted = planned_case(
                    setting, cluster, sharding, dedup=dedup, links=links, costs=costs
                )["seconds"]
                yield quantity(
                    BENCH,
                    case,
                    abs(predicted["step"] / seconds - 1),
                    "relative error",
                    target=TIME_TARGET,
                    measured_ms=1e3 * seconds,
                    predicted_ms=1e3 * predicted["step"],
                    predicted_links_ms=1e3 * predicted["links"],
                    link_mb_a_second=links.between / 1e6,
                    latency_us=1e6 * links.latency,
                )


def routing_rows(setting: Setting, ranks: int, steps: int) -> Iterator[Row | str]:
    """Compare the predicted load of the fullest rank with that of simulated steps."""
    cluster = Cluster(ranks, 8)
    for sharding, dedup in VARIANTS:
        case = f"fullest of {ranks:,} ranks: {sharding}{', dedup' * dedup}, {setting.name}"
        yield case
        wishes = wishes_of(setting, cluster)
        pieces, _ = modelled_step(
            _sample(setting), _row(setting), wishes, ranks, sharding, dedup=dedup
        )
        predicted = planned_case(setting, cluster, sharding, dedup=dedup)["fullest"]["lookups"]
        simulated = routed(setting, pieces, cluster, dedup=dedup, steps=steps)
        yield quantity(
            BENCH,
            case,
            abs(predicted / simulated - 1),
            "relative error",
            target=ROUTING_TARGET,
            predicted=predicted,
            simulated=simulated,
        )


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--part", choices=PARTS, action="append", help="(default all)")
    arguments.add_argument("--costs", type=Path, metavar="FILE", help="write the costs to FILE")
    arguments.add_argument(
        "--clock",
        choices=("wall", "processor"),
        default="wall",
        help="processor: time of the ranks' processors, divided by the cores, without waiting; for "
        "a machine that other programs use (default wall)",
    )
    options = arguments.parse_args()
    if importlib.util.find_spec("torchrec") is None:
        raise SystemExit("torchrec is not installed: `make bench` installs the peers")
    parts = options.part or PARTS
    report = Report(as_json=options.json, cases=len(VARIANTS) * len(parts))
    if "bytes" in parts:
        setting = QUICK if options.quick else BYTES
        report.take(bytes_rows(setting, (2,) if options.quick else (2, 4, 8), options.only))
    costs = MEASURED
    if "costs" in parts:
        fitted = [QUICK, QUICK._replace(dim=16)] if options.quick else FITTED
        measured = measured_steps(fitted, options.rounds, options.clock, report)
        costs = fitted_costs(measured)
        report.take(cost_rows(measured, costs))
        if options.costs is not None:
            options.costs.write_text(json.dumps(asdict(costs), indent=1) + "\n")
    if "times" in parts:
        tested = [QUICK._replace(batch=128)] if options.quick else TESTED
        report.take(times_rows(tested, costs, options.rounds, options.clock, options.only))
    if "routing" in parts:
        setting = QUICK if options.quick else BYTES._replace(batch=64)
        report.take(routing_rows(setting, 64 if options.quick else 1024, 5))
    report.close()


if __name__ == "__main__":
    main()
