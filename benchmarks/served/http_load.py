"""Load on an HTTP server: as much as it takes, or requests at fixed times.

One thread, with a request under way on each of several connections. Latencies begin when a request
is due, so a server that falls behind has the wait of those that could not be sent, too.
"""

from __future__ import annotations

import random
import re
import select
import socket
import time
from collections import deque
from collections.abc import Sequence

_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
MOST_S = 60  # without an answer


class Load:
    """Connections to a server.

    Args:
        port: of the server.
        requests: whole requests of HTTP, which are sent in turn.
        connections: number of them.
    """

    def __init__(self, port: int, requests: Sequence[bytes], connections: int) -> None:
        self._requests, self._sent = requests, 0
        self._free = [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
        for connection in self._free:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._text: dict[socket.socket, bytes] = {}  # of answers under way
        self._due: dict[socket.socket, float] = {}

    def close(self) -> None:
        """Close the connections."""
        for connection in self._free:
            connection.close()

    def capacity(self, seconds: float) -> float:
        """Return answers a second, while each connection asks again once it is answered."""
        begin, answers = time.perf_counter(), 0
        while (now := time.perf_counter() - begin) < seconds:
            while self._free:
                self._send(now)
            answers += len(self._answered(MOST_S))
        taken = time.perf_counter() - begin
        while self._due:
            self._answered(MOST_S)
        return answers / taken

    def latencies(self, rate: float, seconds: float, seed: int) -> list[float]:
        """Return milliseconds from the time that a request was due to its answer.

        Args:
            rate: requests a second, on average; their times are those of a Poisson process.
            seconds: during which requests are due.
            seed: of the times.
        """
        generator, due, last = random.Random(seed), deque[float](), 0.0
        while (last := last + generator.expovariate(rate)) < seconds:
            due.append(last)
        begin, found = time.perf_counter(), list[float]()
        while due or self._due:
            now = time.perf_counter() - begin
            while self._free and due and due[0] <= now:
                self._send(due.popleft())
            wait = max(0.0, due[0] - now) if self._free and due else MOST_S
            answered = self._answered(wait)
            now = time.perf_counter() - begin
            found += [1e3 * (now - began) for began in answered]
        return found

    def _send(self, due: float) -> None:
        connection = self._free.pop()
        connection.sendall(self._requests[self._sent % len(self._requests)])
        self._sent += 1
        self._due[connection], self._text[connection] = due, b""

    def _answered(self, wait_s: float) -> list[float]:
        """Wait for parts of answers; return when the requests were due that have got all."""
        found = []
        for connection in select.select(list(self._due), [], [], wait_s)[0]:
            text = self._text[connection] = self._text[connection] + connection.recv(1 << 16)
            head = text.find(b"\r\n\r\n")
            length = _LENGTH.search(text, 0, max(head, 0))
            if not text.startswith(b"HTTP/1.1 200 "[: len(text)]) or not text:
                raise RuntimeError(f"the server answers {text[:200]!r}")
            if length is not None and len(text) == head + 4 + int(length.group(1)):
                found.append(self._due.pop(connection))
                self._free.append(connection)
        return found
