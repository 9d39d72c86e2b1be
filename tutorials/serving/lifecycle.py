"""From the start of a server to its end: when it is ready, and how it ends after SIGTERM."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import uvicorn
from fastapi.responses import JSONResponse, Response

# in which connections are closed that have no request under way
CLOSING_S = 1


class State:
    """State of a server.

    Attributes:
        caught_up: the model has the commits that the log had when the server started.
        draining: it has got SIGTERM, and takes no further request.
        under_way: requests that are being read or answered.
    """

    def __init__(self) -> None:
        self.caught_up = self.draining = False
        self.under_way = 0

    @property
    def is_ready(self) -> bool:
        """Return whether clients should send requests here."""
        return self.caught_up and not self.draining


def refusal(error: Exception, status: int = 400) -> JSONResponse:
    """Say what is wrong with a request."""
    # behind the first line is the place in C++
    content = {"error": str(error).partition("\n")[0]}
    return JSONResponse(content, status, {"Retry-After": "1"} if status == 503 else None)


def busy(why: str) -> JSONResponse:
    """Say why a request is not answered now."""
    return refusal(ValueError(why), 503)


class Server(uvicorn.Server):
    """A server that loads its model while it answers that it is not ready yet.

    Args:
        config: of uvicorn; its app is set here.
        state: shared with the app.
        load: called on a thread with a function that takes the app, once the model is loaded. Its
            error ends the server.
        drain_s: seconds after SIGTERM in which requests under way should be answered; else the
            process ends with status 1.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        state: State,
        load: Callable[[Callable[[Any], None]], None],
        drain_s: float,
    ) -> None:
        config.app, config.timeout_graceful_shutdown = self._pass_on, CLOSING_S
        super().__init__(config)
        self._state, self._load, self._drain_s = state, load, drain_s
        self._app: Any = None
        self._error: BaseException | None = None

    async def _pass_on(self, scope: Any, receive: Any, send: Any) -> None:
        """Pass requests to the app (https://asgi.readthedocs.io), once there is one."""
        if self._app is not None:
            await self._app(scope, receive, send)
            return
        is_live = scope["path"] == "/v2/health/live"
        answer = Response() if is_live else busy("the model is being loaded: ask again later")
        await answer(scope, receive, send)

    def serve_until_ended(self, listener: socket.socket) -> None:
        """Serve until SIGTERM or SIGINT, then answer what is under way.

        Raises:
            Exception: as ``load``.
        """
        loading = threading.Thread(target=self._load_app, daemon=True)
        loading.start()
        self.run([listener])
        if loading.is_alive():
            os._exit(0)  # nothing ends that thread
        if self._error is not None:
            raise self._error

    def _load_app(self) -> None:
        try:
            self._load(self._take_app)
        except BaseException as error:
            self._error, self.should_exit = error, True

    def _take_app(self, app: Any) -> None:
        self._app = app

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to end; a second SIGINT ends at once."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = self._state.draining = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Wait for the requests under way, while the port stays open for questions of readiness."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._drain_s
        while self._state.under_way > 0 and loop.time() < end and not self.force_exit:
            await asyncio.sleep(0.01)
        if self._state.under_way > 0:
            os._exit(1)  # nothing ends a thread that runs the model
        await super().shutdown(sockets)
