"""An HTTP server of one model (pip install fastapi uvicorn prometheus-client).

python -m tutorials.serving.server PACKAGE [--port 8000] [--follow LOG [--dense keep]]
    [--shared-memory DIR]
    [--request-bytes N] [--pending-bytes N] [--connections N] [--timeout SECONDS]

    POST /run   {"inputs": {"user": [[1], [2]], "item": [[3], [4]]}}  ->  {"version", "outputs"}
    POST /rows  {"table": "bags.user", "ids": [1], "rows": [[0.1, ...]], "erased": [2]}
                ->  {"inserted": 1, "updated": 0, "erased": 1}
    GET /       {"version", "sequence", "dense_behind", "stopped", "inputs": [names],
                 "tables": {name: {"ids", "free_rows", ...}}}
    GET /metrics    in the text format of Prometheus

and the Open Inference Protocol, as clients of Triton and KServe speak it:

    GET /v2    /v2/health/live    /v2/health/ready    /v2/models/NAME    /v2/models/NAME/ready
    POST /v2/models/NAME/infer    {"inputs": [{"name", "shape", "datatype", "data"}]}
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse, Response
from starlette.requests import ClientDisconnect

import torch_dynemb as td
from tutorials.serving.inference_protocol import (
    LENGTH_HEADER,
    infer,
    model_metadata,
    server_metadata,
)
from tutorials.serving.json_requests import check_finite, inputs_of, parsed, update_of
from tutorials.serving.metrics import Metrics


class Limits(NamedTuple):
    """The most that clients may take of a server.

    Attributes:
        request_bytes: most bytes of a body; status 413.
        pending_bytes: most bytes of all bodies that are read or answered at once; status 503.
        connections: most connections at once; while there are more, requests get status 503.
        timeout: seconds within which a body should arrive, status 408, and the next request of a
            connection.
    """

    request_bytes: int = 16 << 20
    pending_bytes: int = 64 << 20
    connections: int = 1000
    timeout: int = 60


def application(
    model: td.serving.ServedModel,
    follower: td.delta_log.Follower | None = None,
    *,
    name: str,
    limits: Limits,
) -> FastAPI:
    """Return the server of a model; requests run on the threads of FastAPI.

    Args:
        model: what :func:`torch_dynemb.serving.load` gives.
        follower: that of the model, where it follows a delta log.
        name: of the model, in paths of the Open Inference Protocol.
        limits: those of bodies; uvicorn keeps those of connections.
    """

    @asynccontextmanager
    async def closed_at_the_end(_: FastAPI) -> AsyncIterator[None]:
        yield
        model.close()  # afterwards uvicorn ends by the signal that stopped it

    app = FastAPI(title="torch_dynemb", lifespan=closed_at_the_end)
    metrics = Metrics(model, follower)
    pending = 0  # bytes

    def stopped() -> str | None:
        """Return why commits of the log are no longer taken; the rows from before are served."""
        try:
            if follower is not None:
                follower.check()
        except Exception as error:
            return str(error)
        return None

    @app.get("/")
    def describe() -> dict[str, Any]:
        names = [given.name for given in model.inputs if given.dtype is not None]
        return {
            "version": str(model.version),
            "sequence": model.sequence,
            "dense_behind": model.dense_behind,
            "stopped": stopped(),
            "inputs": names,
            "tables": tables_of(model),
        }

    def answer(body: bytes, found: Callable[[bytes], Response]) -> Response:
        try:
            return found(body)
        except (RecursionError, RuntimeError, TypeError, ValueError) as error:
            return refusal(error)

    def as_json(found: Callable[[Any], dict[str, Any]]) -> Callable[[bytes], Response]:
        return lambda body: JSONResponse(found(parsed(body)))

    def run(content: Any) -> dict[str, Any]:
        outputs = model.run_flat(inputs_of(content, model))
        for number, output in enumerate(outputs):
            check_finite(output, f"outputs[{number}]")
        return {"version": str(model.version), "outputs": [out.tolist() for out in outputs]}

    def update(content: Any) -> dict[str, Any]:
        table, ids, rows, erased = update_of(content, model)
        return model.apply(table, ids, rows, erased=erased)._asdict()

    async def answered(call: str, request: Request, found: Callable[[bytes], Response]) -> Response:
        began = time.perf_counter()
        try:
            response = await checked(request, found)
        except ClientDisconnect:
            return Response()  # of an upload that the client has ended; not sent, and not counted
        metrics.answered(call, response.status_code, time.perf_counter() - began)
        return response

    async def checked(request: Request, found: Callable[[bytes], Response]) -> Response:
        nonlocal pending
        if "transfer-encoding" in request.headers:
            return refusal(ValueError("the request has no Content-Length"), 411)
        if "content-encoding" in request.headers:
            return refusal(ValueError("Content-Encoding: a compressed request is not built"), 415)
        length = int(request.headers.get("content-length", 0))
        if length > limits.request_bytes:
            error = ValueError(f"the request has more than {limits.request_bytes} bytes")
            return refusal(error, 413)
        if pending + length > limits.pending_bytes:
            busy = "the server has too many bytes of requests to answer: ask again later"
            return refusal(ValueError(busy), 503)
        pending += length
        try:
            try:
                body = await asyncio.wait_for(request.body(), limits.timeout)
            except asyncio.TimeoutError:
                late = f"the request has not arrived within {limits.timeout} seconds"
                return refusal(ValueError(late), 408)
            return await run_in_threadpool(answer, body, found)
        finally:
            pending -= length

    # bodies are read as bytes: a model of them would take true and "7" for numbers
    @app.post("/run")
    async def post_run(request: Request) -> Response:
        return await answered("run", request, as_json(run))

    @app.post("/rows")
    async def post_rows(request: Request) -> Response:
        return await answered("rows", request, as_json(update))

    @app.get("/metrics")
    def get_metrics() -> Response:
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    # the Open Inference Protocol

    @app.get("/v2")
    def describe_server() -> dict[str, Any]:
        return server_metadata()

    @app.get("/v2/health/live")
    @app.get("/v2/health/ready")
    def healthy() -> Response:
        return Response()  # after an error in a commit the rows from before are served

    def served(asked: str, version: str | None) -> bool:
        return asked == name and version in (None, str(model.version))

    def unknown(asked: str, version: str | None) -> JSONResponse:
        wanted = asked if version is None else f"{asked}, version {version}"
        return refusal(ValueError(f"this server has no model {wanted}: it serves {name}"), 404)

    @app.get("/v2/models/{asked}")
    @app.get("/v2/models/{asked}/versions/{version}")
    def describe_model(asked: str, version: str | None = None) -> Response:
        if not served(asked, version):
            return unknown(asked, version)
        return JSONResponse(model_metadata(name, model))

    @app.get("/v2/models/{asked}/ready")
    @app.get("/v2/models/{asked}/versions/{version}/ready")
    def model_ready(asked: str, version: str | None = None) -> Response:
        return Response() if served(asked, version) else unknown(asked, version)

    @app.post("/v2/models/{asked}/infer")
    @app.post("/v2/models/{asked}/versions/{version}/infer")
    async def post_infer(request: Request, asked: str, version: str | None = None) -> Response:
        def found(body: bytes) -> Response:
            if not served(asked, version):
                return unknown(asked, version)
            text = infer(name, model, body, request.headers.get(LENGTH_HEADER))
            if text.json_bytes is None:
                return Response(text.content, media_type="application/json")
            headers = {LENGTH_HEADER: str(text.json_bytes)}
            return Response(text.content, headers=headers, media_type="application/octet-stream")

        return await answered("infer", request, found)

    return app


def refusal(error: Exception, status: int = 400) -> JSONResponse:
    """Say what is wrong with a request."""
    # behind the first line is the place in C++
    content = {"error": str(error).partition("\n")[0]}
    return JSONResponse(content, status, {"Retry-After": "1"} if status == 503 else None)


def tables_of(model: td.serving.ServedModel) -> dict[str, dict[str, int]]:
    """Return what the tables have; those that are only read have what they had at the export."""
    live = model.stats()
    return {
        name: {
            "embedding_dim": table.embedding_dim,
            **_counts(live.get(name, td.serving.LiveStats(table.ids, 0, 0))),
        }
        for name, table in model.tables.items()
    }


def _counts(stats: td.serving.LiveStats) -> dict[str, int]:
    return {"ids": stats.ids, "free_rows": stats.free_rows, "updates": stats.updates}


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, not {text!r}")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="a folder of torch_dynemb.serving.export")
    parser.add_argument("--port", type=int, default=8000, help="0: one that the system chooses")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: all interfaces")
    parser.add_argument("--name", help="of the model in /v2/models/NAME (default: the folder's)")
    parser.add_argument("--follow", help="directory of the delta log to follow")
    parser.add_argument(
        "--dense",
        choices=("follow", "keep"),
        default="follow",
        help="keep: the dense part stays that of the package, in half of the memory",
    )
    parser.add_argument("--shared-memory", help="directory to share tables in, such as /dev/shm")
    for limit, otherwise in Limits()._asdict().items():
        flag = f"--{limit.replace('_', '-')}"
        parser.add_argument(flag, type=_positive, default=otherwise, help="(default: %(default)s)")
    options = parser.parse_args()
    limits = Limits(*(getattr(options, limit) for limit in Limits._fields))
    if limits.pending_bytes < limits.request_bytes:
        parser.error(
            f"--pending-bytes is {limits.pending_bytes}, expected at least the "
            f"{limits.request_bytes} of --request-bytes"
        )
    torch.set_num_threads(1)  # requests run side by side instead
    model = td.serving.load(
        options.package,
        runners=os.cpu_count() or 1,
        follow=options.follow,
        dense=options.dense,
        shared_memory=options.shared_memory,
    )
    follower = None if options.follow is None else model.follower
    if follower is not None:
        follower.start()
    # opened here, so that the port is known before the first request
    with socket.create_server((options.host, options.port)) as listener:
        # connections inherit it; without, small answers wait 40 ms for the client
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        port = listener.getsockname()[1]
        print(f"serving version {model.version} on port {port}", flush=True)
        name = options.name or Path(options.package).resolve().name
        app = application(model, follower, name=name, limits=limits)
        config = uvicorn.Config(
            app,
            log_level="warning",
            limit_concurrency=limits.connections + 1,  # the first number that is refused
            timeout_keep_alive=limits.timeout,
        )
        uvicorn.Server(config).run([listener])


if __name__ == "__main__":
    main()
