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
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from torch import Tensor

import torch_dynemb as td


class Request(BaseModel):
    """The tensors of a request as nested lists, by name of the input."""

    inputs: dict[str, Any]


class Update(BaseModel):
    """Rows of a table: ids with their rows, and ids to take out."""

    table: str
    ids: list[int] = []
    rows: list[list[float]] = []
    erased: list[int] = []


def tensor_of(values: Any, given: td.serving.Input) -> Tensor:
    """A tensor of nested lists.

    Raises:
        TypeError, ValueError: they are no numbers, or differ in length.
    """
    tensor = torch.tensor(values, dtype=given.dtype)
    if tensor.numel() == 0:  # an empty list does not tell the dimensions in it
        sizes = [0 if size is None else size.plus for size in given.sizes[tensor.dim() :]]
        tensor = tensor.reshape(*tensor.shape, *sizes)
    return tensor


def application(
    model: td.serving.ServedModel, follower: td.checkpoint.Follower | None = None
) -> FastAPI:
    """The server of a model, whose requests run on the threads of FastAPI.

    Args:
        model: what :func:`torch_dynemb.serving.load` gives.
        follower: that of the model, where it follows a delta log.
    """
    app = FastAPI(title="torch_dynemb")

    def stopped() -> str | None:
        """Why commits of the log are no longer taken; the rows from before are served."""
        try:
            if follower is not None:
                follower.check()
        except Exception as error:
            return str(error)
        return None

    @app.get("/")
    def describe() -> dict[str, Any]:
        names = [given.name for given in model.inputs]
        return {
            "version": str(model.version),
            "sequence": model.sequence,
            "dense_behind": model.dense_behind,
            "stopped": stopped(),
            "inputs": names,
            "tables": tables_of(model),
        }

    @app.post("/run")
    def run(request: Request) -> JSONResponse:
        try:
            outputs = model.run_flat(tensors_of(request.inputs, model))
        except (RuntimeError, TypeError, ValueError) as error:
            return refusal(error)
        answer = {"version": str(model.version), "outputs": [out.tolist() for out in outputs]}
        return JSONResponse(answer)

    @app.post("/rows")
    def update(request: Update) -> JSONResponse:
        try:
            done = model.apply(
                request.table,
                *rows_of(request, model),
                erased=torch.tensor(request.erased, dtype=torch.int64),
            )
        except (RuntimeError, TypeError, ValueError) as error:
            return refusal(error)
        return JSONResponse(done._asdict())

    return app


def refusal(error: Exception) -> JSONResponse:
    """Says what is wrong with a request."""
    # behind the first line, an op tells where in C++ it was called
    return JSONResponse({"error": str(error).partition("\n")[0]}, status_code=400)


def tables_of(model: td.serving.ServedModel) -> dict[str, dict[str, int]]:
    """What the tables have; those that are only read have what they had at the export."""
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


def tensors_of(inputs: Mapping[str, Any], model: td.serving.ServedModel) -> list[Tensor]:
    """The tensors of a request.

    Raises:
        TypeError, ValueError: one is missing, or is not as the model takes it.
    """
    missing = [given.name for given in model.inputs if given.name not in inputs]
    if missing:
        raise ValueError(f"inputs lacks {missing}")
    return [tensor_of(inputs[given.name], given) for given in model.inputs]


def rows_of(request: Update, model: td.serving.ServedModel) -> tuple[Tensor, Tensor]:
    """The ids and rows of an update.

    Raises:
        ValueError: the rows differ in length.
    """
    table = model.tables.get(request.table)
    empty = torch.empty(0, 0 if table is None else table.embedding_dim)
    rows = torch.tensor(request.rows) if request.rows else empty
    return torch.tensor(request.ids, dtype=torch.int64), rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="a folder of torch_dynemb.serving.export")
    parser.add_argument("--port", type=int, default=8000, help="0: one that the system chooses")
    parser.add_argument("--host", default="127.0.0.1", help="0.0.0.0: all interfaces")
    parser.add_argument("--follow", help="directory of the delta log whose commits it takes")
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
