"""Both HTTP servers of tutorials/serving under load: capacity, and latencies below it.

The model of serving.py; a request is JSON. Capacity is what 32 connections get that ask again at
once. Then requests come at fixed times, at shares of the server's own capacity. The peer is the
same server with a package of the model with nn.EmbeddingBag. Client and server share the cores.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from common.command import is_selected, parser, positive
from common.report import Report, Row, compare
from common.timing import Timing
from served.http_load import Load
from served.models import Served, StaticBags, any_batch, batch, dynamic_model, export, id_of

import torch_dynemb as td

ROOT = Path(__file__).resolve().parents[1]
BENCH = "serving_load"
PEER = "nn.EmbeddingBag, the same server"
BATCHES = ("--max-batch", "64")
SERVERS = {"Python": (), "Python, batches": BATCHES, "C++": ()}
SHARES = (50, 80, 95)
CONNECTIONS, REQUESTS = 32, 200


class Sizes(NamedTuple):
    """Sizes of the model, requests and the measurement.

    Attributes:
        ids: of each table.
        batch, length: samples of a request, and ids of each feature in one.
        rounds: of each figure.
        seconds: of each measurement.
    """

    ids: int
    batch: int
    length: int
    rounds: int
    seconds: float


def write_packages(folder: Path, sizes: Sizes) -> tuple[Path, Path]:
    """Write our package, and that of the peer."""
    ours, peer = folder / "ours", folder / "static"
    example = batch(sizes.ids, 4, sizes.length, 0)
    export(dynamic_model(sizes.ids), ours, example)
    static = Served(StaticBags(sizes.ids)).eval()
    td.serving.export(static, peer, (example,), dynamic_shapes=any_batch(example))
    return ours, peer


def requests(sizes: Sizes, *, are_ids: bool) -> list[bytes]:
    """Return requests with uniform ids, or row numbers, as HTTP."""
    found = []
    for seed in range(REQUESTS):
        rows = batch(sizes.ids, sizes.batch, sizes.length, seed)
        tensors = {name: (id_of(of) if are_ids else of).tolist() for name, of in rows.items()}
        inputs = {f"features_{name}": values for name, values in tensors.items()}
        body = json.dumps({"inputs": inputs}).encode()
        head = f"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        found.append(head.encode() + body)
    return found


def command_of(name: str, package: Path, folder: Path) -> list[str]:
    """Return the command of a server; that in C++ is compiled first."""
    if name != "C++":
        python = [sys.executable, "-m", "tutorials.serving.server", str(package)]
        return [*python, "--port", "0", *SERVERS[name]]
    program = folder / "server"
    if not program.is_file():
        maker = [sys.executable, "-m", "tutorials.serving.compile_command", str(program)]
        printed = subprocess.run(maker, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
        subprocess.run(printed.stdout, shell=True, check=True, cwd=ROOT)
    return [str(program), str(package), str(td.serving.cpp_flags().library), "0"]


def started(command: Sequence[str], stack: ExitStack) -> int:
    """Start a server that the stack ends; return its port."""
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    stack.callback(server.wait)
    stack.callback(server.terminate)
    assert server.stdout is not None
    said = server.stdout.readline()
    found = re.search(r"port (\d+)$", said)
    if found is None:
        raise RuntimeError(f"the server says {said!r}")
    return int(found.group(1))


def measured(name: str, loads: tuple[Load, Load], sizes: Sizes) -> Iterator[Row]:
    """Yield the rows of a server: ours and the peer's in turns."""
    rates: list[list[float]] = [[], []]
    for _ in range(sizes.rounds):
        for load, found in zip(loads, rates, strict=True):
            found.append(load.capacity(sizes.seconds))
    ours, peer = [Timing(tuple(1e3 / rate for rate in of)) for of in rates]
    most = [statistics.median(of) for of in rates]
    case = f"{name}, capacity, time a request"
    yield compare(BENCH, case, ours, PEER, peer, rate=most[0], peer_rate=most[1])
    for share in SHARES:
        p50: list[list[float]] = [[], []]
        p99: list[list[float]] = [[], []]
        for number in range(sizes.rounds):
            for of, load in enumerate(loads):
                taken = load.latencies(share / 100 * most[of], sizes.seconds, number)
                p50[of].append(statistics.median(taken))
                p99[of].append(statistics.quantiles(taken, n=100, method="inclusive")[98])
        for quantile, found in (("p50", p50), ("p99", p99)):
            timings = [Timing(tuple(of)) for of in found]
            rates_of = {"rate": share / 100 * most[0], "peer_rate": share / 100 * most[1]}
            case = f"{name}, {share} % of the capacity, {quantile}"
            yield compare(BENCH, case, timings[0], PEER, timings[1], **rates_of)


def all_rows(folder: Path, sizes: Sizes, only: list[str]) -> Iterator[Row]:
    names = [name for name in SERVERS if is_selected(only, name, PEER)]
    packages = write_packages(folder, sizes)
    for name in names:
        with ExitStack() as stack:
            loads = []
            for package, are_ids in zip(packages, (True, False), strict=True):
                port = started(command_of(name, package, folder), stack)
                load = Load(port, requests(sizes, are_ids=are_ids), CONNECTIONS)
                stack.callback(load.close)
                load.capacity(sizes.seconds / 4)  # warm-up
                loads.append(load)
            yield from measured(name, (loads[0], loads[1]), sizes)


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="of each table (default 100,000)")
    arguments.add_argument("--batch", type=positive, default=1, help="samples (default 1)")
    arguments.add_argument("--length", type=positive, default=1, help="ids a feature (default 1)")
    arguments.add_argument("--seconds", type=float, help="of a measurement (default 2.5)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    sizes = Sizes(
        options.ids or (1000 if options.quick else 100_000),
        options.batch,
        options.length,
        options.rounds,
        options.seconds or (0.2 if options.quick else 2.5),
    )
    rows = len(SERVERS) * (1 + 2 * len(SHARES))
    report = Report(as_json=options.json, cases=rows)
    with tempfile.TemporaryDirectory() as folder:
        report.take(all_rows(Path(folder), sizes, options.only))
    report.close()


if __name__ == "__main__":
    main()
