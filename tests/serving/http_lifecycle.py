"""The start and the end of a server, by what it answers meanwhile."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from http_server import Running


def status_of(port: int, path: str) -> int | None:
    """Status of a GET; None: the port is closed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionError:
        return None
    finally:
        connection.close()


def wait_for(wanted: Callable[[], bool]) -> None:
    """Return once something is so."""
    last = time.monotonic() + 60
    while not wanted():
        assert time.monotonic() < last
        time.sleep(0.005)


def listening_port(pid: int) -> int:
    """Return the port that a process listens on, once it does (proc(5), /proc/pid/net/tcp)."""
    ports: list[int] = []

    def listens() -> bool:
        links = [os.readlink(of) for of in Path(f"/proc/{pid}/fd").iterdir()]
        for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in links:
                ports.append(int(fields[1].partition(":")[2], 16))
        return bool(ports)

    wait_for(listens)
    return ports[0]


class Upload:
    """A request under way: the server reads its body, which lacks the last byte.

    Args:
        port: of the server.
        body: the request.
    """

    def __init__(self, port: int, body: bytes) -> None:
        self._last = body[-1:]
        self._connection = socket.create_connection(("127.0.0.1", port), timeout=60)
        head = f"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        self._connection.sendall(f"{head}Expect: 100-continue\r\n\r\n".encode())
        assert self._connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        self._connection.sendall(body[:-1])

    def answer(self) -> bytes:
        """Send the last byte; return the answer."""
        self._connection.sendall(self._last)
        return self.received()

    def received(self) -> bytes:
        """Return what comes until the server closes the connection."""
        text = b""
        with self._connection, contextlib.suppress(ConnectionResetError):
            while part := self._connection.recv(1 << 16):
                text += part
        return text


def assert_it_ends_when_all_is_answered(server: Running, request: dict[str, object]) -> None:
    """SIGTERM: not ready, no further request, an answer to the one under way, then the end."""
    name_ready = "/v2/health/ready"
    assert status_of(server.port, name_ready) == 200
    body = json.dumps({"inputs": request}).encode()
    upload = Upload(server.port, body)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: status_of(server.port, name_ready) == 503)
    assert status_of(server.port, "/v2/health/live") == 200
    connection = http.client.HTTPConnection("127.0.0.1", server.port)
    connection.request("POST", "/run", body)
    response = connection.getresponse()
    assert (response.status, b"is being stopped" in response.read()) == (503, True)
    connection.close()
    assert upload.answer().startswith(b"HTTP/1.1 200 ")
    assert server.process.wait(60) == 0
    assert status_of(server.port, name_ready) is None


def assert_it_ends_without_a_late_request(server: Running) -> None:
    """With --drain-s 0 a request that has not arrived is cut off."""
    upload = Upload(server.port, b'{"inputs": {}}')
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 1
    assert b"200" not in upload.received()
