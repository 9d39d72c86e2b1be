"""moto's S3 server on a port of this machine, with faults that a test injects."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
import pytest
import s3fs
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

Environ = dict[str, Any]
Fault = Callable[[Environ], str | None]


class _Quiet(WSGIRequestHandler):
    def log(self, type: str, message: str, *args: Any) -> None:  # noqa: A002
        pass


class S3Server:
    """A server with one bucket.

    Attributes:
        fault: called with each request; its result is "error", "cut", "answer cut" or None.
        requests: method and path of each request that was not given up.
    """

    def __init__(self) -> None:
        self.fault: Fault = lambda environ: None
        self.requests: list[str] = []
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet
        )
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self._server.server_port}"

    def _answer(self, environ: Environ, start: Any) -> Iterable[bytes]:
        query = environ["QUERY_STRING"]
        environ["request"] = f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}?{query}"
        fault = self.fault(environ)
        if fault in ("error", "cut"):
            # what was sent is read: a client that still sends would see another error
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        if fault == "error":
            text = b"<Error><Code>SlowDown</Code><Message>busy</Message></Error>"
            start("503 Slow Down", [("Content-Length", str(len(text)))])
            return [text]
        if fault == "cut":
            self._cut(environ)
        self.requests.append(environ["request"])
        answer: Iterable[bytes] = self._app(environ, start)
        if fault == "answer cut":
            for _ in answer:
                pass
            self._cut(environ)
        return answer

    def _cut(self, environ: Environ) -> None:
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionResetError

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def options_of(address: str) -> dict[str, Any]:
    """Options of s3fs for a server."""
    return {
        "key": "id",
        "secret": "secret",
        "client_kwargs": {"endpoint_url": address, "region_name": "eu-west-1"},
        # s3fs repeats requests, not botocore below it
        "config_kwargs": {"retries": {"max_attempts": 0}},
    }


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start a server, to which ``s3://`` leads, with the bucket ``bucket``."""
    server = S3Server()
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(fsspec.config.conf, "s3", options_of(server.address))
            patch.setattr(s3fs.S3FileSystem, "retries", 3)
            # the answer of HEAD has no text, by which s3fs knows it
            patch.setattr(s3fs.core, "CUSTOM_ERROR_HANDLER", lambda error: "503" in str(error))
            s3fs.S3FileSystem.clear_instance_cache()
            fsspec.filesystem("s3").mkdir("bucket")
            yield server
    finally:
        s3fs.S3FileSystem.clear_instance_cache()
        server.stop()
