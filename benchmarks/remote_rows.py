"""Frozen models with rows in Redis, on one server and on a cluster of three nodes on loopback.

p50 and p99 of a call that looks up unique ids of one table of D=16, one thread, against the same
model with its rows in memory. Servers and this program share the machine.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from common.command import is_selected, parser, positive
from common.id_streams import distinct_ids
from common.report import Report, Row, compare
from common.timing import interleave_rounds
from served.calls import Calls, medians, percentiles_99

import torch_dynemb as td
from torch_dynemb.delta_log import RedisRows

BENCH = "remote_rows"
PEER = "rows in memory"
PLACES = ("one server", "three nodes")
SIZES = (256, 4096)
DIM = 16
SERVER = shutil.which("redis-server") or shutil.which("valkey-server")


@contextmanager
def servers(count: int, folder: Path) -> Iterator[str]:
    """Run a server, or the nodes of a cluster. Yield its URL."""
    import redis

    assert SERVER is not None
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(2 * count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        ports = [one.getsockname()[1] for one in sockets]
        for one in sockets:
            one.close()
        clients = []
        for port, bus in zip(ports[:count], ports[count:], strict=True):
            own = folder / f"{port}"
            own.mkdir()
            options = ["--port", f"{port}", "--save", "", "--dir", f"{own}"]
            if count > 1:
                options += ["--cluster-enabled", "yes", "--cluster-port", f"{bus}"]
            process = subprocess.Popen([SERVER, *options], stdout=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            clients.append(redis.Redis(port=port))
        _wait(lambda: all(client.ping() for client in clients))
        if count == 1:
            yield f"redis://127.0.0.1:{ports[0]}"
            return
        for number, client in enumerate(clients):
            begin, end = number * 16384 // count, (number + 1) * 16384 // count - 1
            client.execute_command("CLUSTER ADDSLOTSRANGE", begin, end)
            client.execute_command("CLUSTER SET-CONFIG-EPOCH", number + 1)
            clients[0].execute_command(
                "CLUSTER MEET", "127.0.0.1", ports[number], ports[count + number]
            )
        _wait(lambda: all(client.cluster("INFO")["cluster_state"] == "ok" for client in clients))
        _wait(lambda: all(len(client.cluster("NODES")) == count for client in clients))
        yield f"redis+cluster://127.0.0.1:{ports[0]}"


def _wait(is_ready: Callable[[], bool]) -> None:
    import redis

    while True:
        try:
            if is_ready():
                return
        except redis.RedisError:
            pass
        time.sleep(0.05)


def measured(
    ids: int, shards: int, rounds: int, calls: int, only: list[str]
) -> Iterator[Row | str]:
    """Yield the name of each place as it starts, then its rows."""
    torch.manual_seed(0)
    table = td.DynamicEmbedding(DIM, name="items", optimizer=td.SGD(lr=0.1))
    known = distinct_ids(0, ids)
    table.group.insert_or_assign(0, known, torch.randn(ids, DIM))
    memory = td.freeze(table)
    with tempfile.TemporaryDirectory() as folder:
        td.checkpoint.save(f"{folder}/base", table)
        for place in PLACES:
            cases = {size: f"{place}, {size} ids" for size in SIZES}
            cases = {size: case for size, case in cases.items() if is_selected(only, case, PEER)}
            if not cases:
                continue
            yield place
            nodes = 1 if place == PLACES[0] else 3
            with servers(nodes, Path(folder)) as url:
                rows = RedisRows(url, "items", shards=shards)
                rows.load(f"{folder}/base")
                remote = td.freeze(table, storage=rows)
                for size, case in cases.items():
                    asked = [known[torch.randperm(ids)[:size]] for _ in range(16)]
                    yield from _compared(case, remote, memory, asked, rounds, calls)


def _compared(
    name: str,
    remote: torch.nn.Module,
    memory: torch.nn.Module,
    asked: list[torch.Tensor],
    rounds: int,
    calls: int,
) -> Iterator[Row]:
    assert torch.equal(remote(asked[0]), memory(asked[0]))
    number = iter(range(1 << 60))
    timed = {
        of: Calls(lambda model=model: model(asked[next(number) % len(asked)]), calls)
        for of, model in (("ours", remote), ("peer", memory))
    }
    interleave_rounds(timed, rounds=rounds, warmup=1)
    ours, peer = (timed[of].rounds[1:] for of in ("ours", "peer"))
    yield compare(BENCH, f"{name}, p50", medians(ours), PEER, medians(peer))
    yield compare(BENCH, f"{name}, p99", percentiles_99(ours), PEER, percentiles_99(peer))


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--ids", type=positive, help="of the table (default 200,000)")
    arguments.add_argument("--calls", type=positive, help="of a round (default 100)")
    arguments.add_argument("--shards", type=positive, help="hashes of the table (default 64)")
    options = arguments.parse_args()
    places = PLACES if SERVER is not None else ()
    if not places:
        print(
            "no redis-server: its cases are left out; apt-get install redis-server", file=sys.stderr
        )
    torch.set_num_threads(1)
    report = Report(as_json=options.json, cases=2 * len(places) * len(SIZES))
    ids = options.ids or (20_000 if options.quick else 200_000)
    calls = options.calls or (10 if options.quick else 100)
    if places:
        report.take(measured(ids, options.shards or 64, options.rounds, calls, options.only))
    report.close()


if __name__ == "__main__":
    main()
