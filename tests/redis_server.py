"""A real Redis server, or Valkey, that tests start on a Unix socket, kill and start again."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import redis
from redis.connection import AbstractConnection

KEPT = ("--appendonly", "yes", "--appendfsync", "always")
PROGRAM = next(filter(None, map(shutil.which, ("redis-server", "valkey-server"))), None)


def need_server() -> None:
    """Skip a test, or fail it in CI, where there is no server."""
    if PROGRAM is None:
        missing = "no redis-server or valkey-server: apt-get install redis-server"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)


class RedisServer:
    """A server; its data survive a kill with ``KEPT`` as options.

    Args:
        folder: of its socket and files; a short path.
        options: further ones of its command line.
    """

    def __init__(self, folder: Path, *options: str) -> None:
        self.socket = folder / "socket"
        assert PROGRAM is not None
        self._command = [
            *(PROGRAM, "--port", "0", "--unixsocket", str(self.socket), "--dir", str(folder)),
            *("--save", "", *options),
        ]
        self._process: subprocess.Popen[bytes] | None = None
        self.url = f"unix://{self.socket}"

    def start(self) -> None:
        """Return once it answers."""
        self.socket.unlink(missing_ok=True)
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL)
        client, last = self.client(), time.monotonic() + 60
        while True:
            assert self._process.poll() is None
            try:
                client.ping()
                break
            except redis.AuthenticationError:
                break
            except redis.ConnectionError:  # also while it loads its files
                assert time.monotonic() < last
                time.sleep(0.005)
        client.close()

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """The server gets messages, but answers none."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def client(self, **options: Any) -> Any:
        """A client that does not try again."""
        return redis.Redis(unix_socket_path=str(self.socket), retry=None, **options)


@contextmanager
def running_server(*options: str) -> Iterator[RedisServer]:
    need_server()
    # not tmp_path: paths of sockets have at most 107 bytes
    with TemporaryDirectory(prefix="redis-") as folder:
        server = RedisServer(Path(folder), *options)
        server.start()
        try:
            yield server
        finally:
            server.kill()


class Killed(BaseException):
    """In place of SIGKILL, after which nothing of a program runs."""


@contextmanager
def failing_after(
    monkeypatch: pytest.MonkeyPatch, sends: int, error: BaseException, *, is_sent: bool = False
) -> Iterator[list[int]]:
    """The connection ends at the n-th message to the server, before or after it is sent.

    Args:
        sends: n, from 1.
        error: what the program sees.
        is_sent: the server gets the message, but its answer is lost.

    Yields:
        The number of messages so far.
    """
    count, send = [0], AbstractConnection.send_packed_command

    def counted(connection: Any, *args: Any, **options: Any) -> None:
        count[0] += 1
        fails = count[0] == sends
        if is_sent or not fails:
            send(connection, *args, **options)
        if fails:
            if is_sent:
                connection.can_read(timeout=60)  # the server has carried it out
            connection.disconnect()
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(AbstractConnection, "send_packed_command", counted)
        yield count


@contextmanager
def calling_before(
    monkeypatch: pytest.MonkeyPatch, sends: int, act: Callable[[], None]
) -> Iterator[list[int]]:
    """Something happens before the n-th message to the server.

    Yields:
        The number of messages so far, without those of ``act``.
    """
    count, send = [0], AbstractConnection.send_packed_command

    def counted(connection: Any, *args: Any, **options: Any) -> None:
        count[0] += 1
        if count[0] == sends:
            with monkeypatch.context() as plain:
                plain.setattr(AbstractConnection, "send_packed_command", send)
                act()
        send(connection, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(AbstractConnection, "send_packed_command", counted)
        yield count
