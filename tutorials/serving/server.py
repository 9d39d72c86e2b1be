"""An HTTP server of one model: FastAPI and uvicorn (pip install fastapi uvicorn).

python -m tutorials.serving.server PACKAGE [--port 8000] [--follow LOG [--dense keep]]

    POST /run   {"inputs": {"user": [[1], [2]], "item": [[3], [4]]}}  ->  {"version", "outputs"}
    POST /rows  {"table": "bags.user", "ids": [1], "rows": [[0.1, ...]], "erased": [2]}
                ->  {"inserted": 1, "updated": 0, "erased": 1}
    GET /       {"version", "sequence", "dense_behind", "stopped", "inputs": [names],
                 "tables": {name: {"ids", "free_rows", ...}}}
"""

from __future__ import annotations

import argparse
import json
import os
import socket
from collections.abc import Callable
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

import torch_dynemb as td
from tutorials.serving.json_requests import MOST_BYTES, inputs_of, update_of


def application(
    model: td.serving.ServedModel, follower: td.checkpoint.Follower | None = None
) -> FastAPI:
    """Return the server of a model; requests run on the threads of FastAPI.

    Args:
        model: what :func:`torch_dynemb.serving.load` gives.
        follower: that of the model, where it follows a delta log.
    """
    app = FastAPI(title="torch_dynemb")

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

    def answer(body: bytes, found: Callable[[Any], dict[str, Any]]) -> JSONResponse:
        try:
            return JSONResponse(found(json.loads(body, parse_constant=_no_number)))
        except (RecursionError, RuntimeError, TypeError, ValueError) as error:
            return refusal(error)

    def run(content: Any) -> dict[str, Any]:
        outputs = model.run_flat(inputs_of(content, model))
        return {"version": str(model.version), "outputs": [out.tolist() for out in outputs]}

    def update(content: Any) -> dict[str, Any]:
        table, ids, rows, erased = update_of(content, model)
        return model.apply(table, ids, rows, erased=erased)._asdict()

    async def answered(request: Request, found: Callable[[Any], dict[str, Any]]) -> JSONResponse:
        if "transfer-encoding" in request.headers:
            return refusal(ValueError("the request has no Content-Length"), 411)
        if int(request.headers.get("content-length", 0)) > MOST_BYTES:
            return refusal(ValueError(f"the request has more than {MOST_BYTES} bytes"), 413)
        return await run_in_threadpool(answer, await request.body(), found)

    # bodies are read as bytes: a model of them would take true and "7" for numbers
    @app.post("/run")
    async def post_run(request: Request) -> JSONResponse:
        return await answered(request, run)

    @app.post("/rows")
    async def post_rows(request: Request) -> JSONResponse:
        return await answered(request, update)

    return app


def _no_number(word: str) -> None:
    raise ValueError(f"JSON: expected a value, not {word}")


def refusal(error: Exception, status: int = 400) -> JSONResponse:
    """Say what is wrong with a request."""
    # behind the first line is the place in C++
    return JSONResponse({"error": str(error).partition("\n")[0]}, status_code=status)


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="a folder of torch_dynemb.serving.export")
    parser.add_argument("--port", type=int, default=8000, help="0: one that the system chooses")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: all interfaces")
    parser.add_argument("--follow", help="directory of the delta log to follow")
    parser.add_argument(
        "--dense",
        choices=("follow", "keep"),
        default="follow",
        help="keep: the dense part stays that of the package, in half of the memory",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)  # requests run side by side instead
    model = td.serving.load(
        options.package,
        runners=os.cpu_count() or 1,
        follow=options.follow,
        dense=options.dense,
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
        app = application(model, follower)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


if __name__ == "__main__":
    main()
