"""A client of both servers, which keeps its connection: sends requests and says how long they took.

Then it sends them again while another connection updates rows.

python -m tutorials.serving.client --port 8000 --requests 1000
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple


class RefusedError(Exception):
    """The server has not taken a request; the message is its own."""


class Client:
    """A connection to a server.

    Args:
        port: of the server.
        host: where it is.
    """

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        self._connection = http.client.HTTPConnection(host, port, timeout=60)

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._connection.close()

    def describe(self) -> dict[str, Any]:
        """Return version of the model, names of its inputs, and its tables."""
        self._connection.request("GET", "/")
        return self._answer()

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return version and outputs of the model.

        Args:
            inputs: lists by name of the input.

        Raises:
            RefusedError: the server has not taken them.
        """
        return self._post("/run", {"inputs": inputs})

    def update(
        self,
        table: str,
        ids: Sequence[int],
        rows: Sequence[Sequence[float]],
        erased: Sequence[int] = (),
    ) -> dict[str, int]:
        """Give ids of a table their rows, and take others out, while the server runs the model.

        Args:
            table: its name, one of ``describe()["tables"]``.
            ids: those that are not there are inserted.
            rows: as many, each of ``embedding_dim`` numbers.
            erased: ids to take out.

        Raises:
            RefusedError: the server has not taken it, for instance because headroom is
                used up; nothing has changed.
        """
        body = {"table": table, "ids": list(ids), "rows": list(rows), "erased": list(erased)}
        return self._post("/rows", body)

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self._connection.request(
            "POST", path, json.dumps(body), {"Content-Type": "application/json"}
        )
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        response = self._connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        if response.status != http.HTTPStatus.OK:
            raise RefusedError(answer.get("error", answer))
        return answer


class Latencies(NamedTuple):
    """Latencies of requests in milliseconds: median and 99th percentile."""

    p50: float
    p99: float


def latencies(client: Client, requests: Sequence[dict[str, Any]]) -> Latencies:
    """Send requests one after another.

    Args:
        client: an open one.
        requests: inputs of each, two or more.
    """
    taken = []
    for inputs in requests:
        begin = time.perf_counter()
        client.run(inputs)
        taken.append(1000 * (time.perf_counter() - begin))
    cuts = statistics.quantiles(taken, n=100, method="inclusive")
    return Latencies(cuts[49], cuts[98])


def random_requests(names: Sequence[str], count: int, batch: int) -> list[dict[str, Any]]:
    """Request to the model of :mod:`tutorials.serving.export_model`."""
    draw = random.Random(0)
    return [
        {name: [[draw.randrange(2000)] for _ in range(batch)] for name in names}
        for _ in range(count)
    ]


@contextmanager
def updating(
    port: int, host: str = "127.0.0.1", *, rows: int = 100, ids: int = 2000
) -> Iterator[list[int]]:
    """Update rows of all tables, one update after another, until the context ends.

    Args:
        port, host: of the server.
        rows: of an update.
        ids: those of the updates are below it.

    Yields:
        How many rows it has sent, the only element.

    Raises:
        RefusedError: the server has refused one; at the end.
    """
    sent, stop = [0], threading.Event()

    def update() -> None:
        draw = random.Random(1)
        with Client(port, host) as client:
            tables = client.describe()["tables"]
            while not stop.is_set():
                for name, table in tables.items():
                    drawn = [draw.randrange(ids) for _ in range(rows)]
                    values = [[draw.gauss(0, 0.1)] * table["embedding_dim"] for _ in drawn]
                    client.update(name, drawn, values)
                    sent[0] += rows

    with ThreadPoolExecutor(1) as thread:
        updates = thread.submit(update)
        try:
            yield sent
        finally:
            stop.set()
        updates.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=1, help="samples of a request (default 1)")
    options = parser.parse_args()
    with Client(options.port) as client:
        served = client.describe()
        requests = random_requests(served["inputs"], options.requests, options.batch)
        took = latencies(client, requests)
        print(
            f"version {served['version']}: {options.requests} requests, p50 {took.p50:.2f} ms, "
            f"p99 {took.p99:.2f} ms"
        )
        begin = time.perf_counter()
        with updating(options.port) as sent:
            took = latencies(client, requests)
        seconds = time.perf_counter() - begin
    print(
        f"while {sent[0] / seconds:.0f} rows a second were updated: p50 {took.p50:.2f} ms, "
        f"p99 {took.p99:.2f} ms"
    )


if __name__ == "__main__":
    main()
