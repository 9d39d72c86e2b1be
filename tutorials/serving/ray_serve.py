"""A package behind Ray Serve: replicas on the machines of a cluster, which Ray routes to.

    python -m tutorials.serving.ray_serve clicks --replicas 2 --port 8000   # pip install ray[serve]

    POST /run   {"inputs": {"user": [[1], [2]], "item": [[3], [4]]}}  ->  {"version", "outputs"}
    GET /       {"version", "inputs": [names]}

Every replica loads the package from a path that all machines have. Ray starts another one in place
of one that died, and replaces them one after another if a new version is deployed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

import torch
from fastapi.responses import JSONResponse
from starlette.requests import Request
from torch import Tensor

import torch_dynemb as td
from tutorials.serving.batching import Batches, Outcome
from tutorials.serving.json_requests import check_finite, inputs_of, parsed

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # listen on loopback only
import ray
from ray import serve


@serve.deployment
class Package:
    """Deployment of a package.

    Args:
        folder: of :func:`torch_dynemb.serving.export`.
        max_batch: most requests that run together; 1: each alone.
        max_delay_ms: how long a batch waits for further requests.

    Raises:
        ValueError: the package has no batch, but ``max_batch`` is above 1.
    """

    def __init__(self, folder: str, max_batch: int = 1, max_delay_ms: float = 0) -> None:
        torch.set_num_threads(1)
        self._model = td.serving.load(folder)
        self._batches = None
        if max_batch > 1:
            self._batches = Batches(self._model, max_batch=max_batch)
            self._run_together.set_max_batch_size(max_batch)
            self._run_together.set_batch_wait_timeout_s(max_delay_ms / 1e3)

    async def __call__(self, request: Request) -> JSONResponse:
        """Answer a request; the header X-Replica names the replica."""
        replica = {"X-Replica": serve.get_replica_context().replica_id.unique_id}
        call = f"{request.method} {request.url.path}"
        if call == "GET /":
            names = [given.name for given in self._model.inputs]
            return JSONResponse({"version": str(self._model.version), "inputs": names})
        if call != "POST /run":
            return JSONResponse({"error": "unknown path"}, 404, replica)
        try:
            answer = await self._answer(await request.body())
        except (RecursionError, RuntimeError, TypeError, ValueError) as error:
            return JSONResponse({"error": str(error).partition("\n")[0]}, 400, replica)
        return JSONResponse(answer, 200, replica)

    async def _answer(self, body: bytes) -> dict[str, Any]:
        tensors = inputs_of(parsed(body), self._model)
        if self._batches is None:
            outputs = await asyncio.to_thread(self._model.run_flat, tensors)
        else:
            outcome = await self._run_together(self._batches.checked(tensors))
            if isinstance(outcome, Exception):
                raise outcome
            outputs = outcome
        for number, output in enumerate(outputs):
            check_finite(output, f"outputs[{number}]")
        return {"version": str(self._model.version), "outputs": [of.tolist() for of in outputs]}

    @serve.batch
    async def _run_together(self, requests: list[list[Tensor]]) -> list[Outcome]:
        assert self._batches is not None
        return await asyncio.to_thread(self._batches.run_together, requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("package", help="a folder that all machines have")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--max-batch", type=int, default=1, help="requests that run together")
    parser.add_argument("--max-delay-ms", type=float, default=0)
    options = parser.parse_args()
    ray.init(ignore_reinit_error=True)
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    bound = Package.options(num_replicas=options.replicas).bind(
        os.path.abspath(options.package), options.max_batch, options.max_delay_ms
    )
    serve.run(bound, blocking=True)


if __name__ == "__main__":
    main()
