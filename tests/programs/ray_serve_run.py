"""The tutorial of Ray Serve, of which a replica is killed: ``ray_serve_run.py FOLDER``.

Prints, as JSON, the number of answers by replica before and after the kill.
"""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import torch
from ray import serve
from torch import Tensor, nn
from torch.export import Dim

import torch_dynemb as td
from tutorials.serving.ray_serve import Package

BATCH, PATIENCE_S = 4, 600


def package(folder: str) -> td.serving.ServedModel:
    """Write a package of a table without a layer behind it; return it loaded."""
    bag = td.DynamicEmbeddingBag(8, mode="sum", name="ads", optimizer=td.SGD(lr=0.1))
    bag(torch.arange(100).reshape(100, 1)).sum().backward()  # these ids have a row now
    bag.optimizer.step()
    model = nn.Sequential(bag, nn.Tanh())
    ids = torch.arange(8).reshape(4, 2)
    shapes = ({0: Dim("batch")},)
    td.serving.export(model, folder, (ids,), dynamic_shapes=shapes, version="monday")
    return td.serving.load(folder)


def asked(port: int, ids: Tensor, name: str) -> tuple[int, dict[str, Any], str | None]:
    """Status, content and replica of an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        connection.request("POST", "/run", json.dumps({"inputs": {name: ids.tolist()}}))
        answer = connection.getresponse()
        content = answer.read()
        replica = answer.getheader("X-Replica")
        return answer.status, json.loads(content) if replica else {}, replica
    finally:
        connection.close()


def replicas_that_answer(port: int, model: td.serving.ServedModel) -> Counter[str]:
    """Ask many at once until two replicas have answered; each answer has the bits of the model."""
    (given,) = model.inputs
    found: Counter[str] = Counter()
    random, last = torch.Generator().manual_seed(0), time.monotonic() + PATIENCE_S

    def ask(ids: Tensor) -> None:
        status, content, replica = asked(port, ids, given.name)
        if replica is None:  # Ray's own answer, where the replica has died meanwhile
            assert status >= 500, (status, content)
            return
        assert (status, content.get("version")) == (200, "monday"), content
        assert torch.equal(torch.tensor(content["outputs"][0]), model.run_flat([ids])[0])
        found[replica] += 1

    with ThreadPoolExecutor(8) as clients:
        while len(found) < 2:
            assert time.monotonic() < last, found
            rows = [torch.randint(0, 200, (1 + n % 3, 2), generator=random) for n in range(50)]
            list(clients.map(ask, rows))
    return found


def main(folder: str) -> None:
    model = package(folder)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    ray.init(num_cpus=4, include_dashboard=False, _node_ip_address="127.0.0.1")
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(Package.options(num_replicas=2).bind(folder, BATCH, 5))
    before = replicas_that_answer(port, model)
    status, content, _ = asked(port, torch.zeros(2, 3, dtype=torch.int64), model.inputs[0].name)
    assert (status, "has shape" in content["error"]) == (400, True), content

    actors = [
        of for of in ray.util.list_named_actors(all_namespaces=True) if "Package" in of["name"]
    ]
    killed = next(iter(before))
    (actor,) = [of for of in actors if of["name"].endswith(killed)]
    ray.kill(ray.get_actor(**actor), no_restart=True)
    after = replicas_that_answer(port, model)
    while killed in after:  # answers that were under way
        after = replicas_that_answer(port, model)
    serve.shutdown()
    ray.shutdown()
    print(json.dumps({"killed": killed, "before": before, "after": after}))


if __name__ == "__main__":
    main(sys.argv[1])
