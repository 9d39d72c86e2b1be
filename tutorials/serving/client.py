"""A client of both servers, which keeps its connection: sends requests and says how long they took.

python -m tutorials.serving.client --port 8000 --requests 1000
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import statistics
import time
from collections.abc import Sequence
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
        """Version and names of inputs of the model."""
        self._connection.request("GET", "/")
        return self._answer()

    def run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Version and outputs of the model.

        Args:
            inputs: lists by name of the input.

        Raises:
            RefusedError: the server has not taken them.
        """
        body = json.dumps({"inputs": inputs})
        self._connection.request("POST", "/run", body, {"Content-Type": "application/json"})
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        response = self._connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        if response.status != http.HTTPStatus.OK:
            raise RefusedError(answer.get("error", answer))
        return answer


class Latencies(NamedTuple):
    """How long requests took, in milliseconds: half of them, and 99 of 100."""

    p50: float
    p99: float


def latencies(client: Client, requests: Sequence[dict[str, Any]]) -> Latencies:
    """Sends requests one after another.

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
    """Requests to the model of :mod:`tutorials.serving.export_model`."""
    draw = random.Random(0)
    return [
        {name: [[draw.randrange(2000)] for _ in range(batch)] for name in names}
        for _ in range(count)
    ]


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


if __name__ == "__main__":
    main()
