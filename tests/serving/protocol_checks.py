"""The Open Inference Protocol and metrics of a server, by the clients of Triton and Prometheus."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from packaged import HEADROOM, VERSION, features
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor, nn
from tritonclient import http as triton
from tritonclient.utils import InferenceServerException

import torch_dynemb

INPUTS = {
    "features_u_0": ("INT64", [-1]),
    "features_u_1": ("INT64", [-1]),
    "features_v": ("INT64", [-1, 3]),
    "shift": ("FP32", [-1, 1]),
}
OUTPUTS = {
    "output_0": ("FP32", [-1, 1]),
    "output_1_pooled": ("FP32", [-1, 12]),
    "output_1_scale": ("FP32", [1]),
}


def tensors_of(batch: int, ids: int, seed: int = 0) -> list[Tensor]:
    given, shift = features(batch, ids, seed)
    return [*given["u"], given["v"], shift]


def inputs_of(tensors: Sequence[Tensor], *, binary: bool) -> list[triton.InferInput]:
    inputs = []
    for (name, (datatype, _)), tensor in zip(INPUTS.items(), tensors, strict=True):
        inputs.append(triton.InferInput(name, list(tensor.shape), datatype))
        inputs[-1].set_data_from_numpy(tensor.numpy(), binary_data=binary)
    return inputs


def infer(client: triton.InferenceServerClient, name: str, tensors: Sequence[Tensor]) -> list[Any]:
    """Outputs of a model, all in binary."""
    result = client.infer(name, inputs_of(tensors, binary=True))
    return [result.as_numpy(output) for output in OUTPUTS]


def assert_protocol(port: int, name: str, model: nn.Module) -> int:
    """A server answers Triton's client with the bits of the model. Returns the number of runs."""
    client = triton.InferenceServerClient(f"127.0.0.1:{port}")
    assert client.is_server_live()
    assert client.is_server_ready()
    for asked, version, there in [
        (name, "", True),
        (name, VERSION, True),
        (name, "tuesday", False),
        ("other", "", False),
    ]:
        assert client.is_model_ready(asked, version) == there
    described = client.get_server_metadata()
    assert described["version"] == torch_dynemb.__version__
    assert described["extensions"] == ["binary_tensor_data"]
    metadata = client.get_model_metadata(name)
    assert (metadata["name"], metadata["versions"]) == (name, [VERSION])
    for key, expected in (("inputs", INPUTS), ("outputs", OUTPUTS)):
        found = {of["name"]: (of["datatype"], of["shape"]) for of in metadata[key]}
        assert list(found.items()) == list(expected.items())
    runs = 0
    for batch, ids in [(4, 20), (64, 500), (1, 0), (0, 0)]:
        tensors = tensors_of(batch, ids)
        score, others = model(*features(batch, ids))
        values = dict(zip(OUTPUTS, [score, *others.values()], strict=True))
        for binary in (True, False):
            some = [
                triton.InferRequestedOutput("output_1_pooled", binary_data=binary),
                triton.InferRequestedOutput("output_0", binary_data=not binary),
            ]
            for outputs in (None, some):
                result = client.infer(
                    name, inputs_of(tensors, binary=binary), outputs=outputs, request_id="7"
                )
                runs += 1
                answer = result.get_response()
                assert (answer["id"], answer["model_version"]) == ("7", VERSION)
                names = [of["name"] for of in answer["outputs"]]
                assert names == ([of.name() for of in outputs] if outputs else list(OUTPUTS))
                for output in names:
                    found = torch.from_numpy(np.array(result.as_numpy(output)))
                    assert torch.equal(found, values[output]), (output, binary)
    client.close()
    return runs


def raw(port: int, name: str, body: bytes, **headers: str) -> tuple[int, str]:
    """Status and error of a request of any bytes."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.request("POST", f"/v2/models/{name}/infer", body, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read()).get("error", "")
    finally:
        connection.close()


def assert_wrong_requests_are_refused(port: int, name: str) -> int:
    """A server names what is wrong with a request. Returns the number of refusals."""
    entries = [
        {"name": of, "shape": list(tensor.shape), "datatype": type_of, "data": tensor.tolist()}
        for (of, (type_of, _)), tensor in zip(INPUTS.items(), tensors_of(2, 4), strict=True)
    ]
    first, others = entries[0], entries[1:]

    def changed(**changes: Any) -> dict[str, Any]:
        return {"inputs": [{**first, **changes}, *others]}

    def binary(size: Any) -> dict[str, Any]:
        entry = {key: first[key] for key in ("name", "shape", "datatype")}
        return {"inputs": [{**entry, "parameters": {"binary_data_size": size}}, *others]}

    length = "Inference-Header-Content-Length"
    cases: list[tuple[Any, bytes, dict[str, str], str]] = [
        ([], b"", {}, "the request: expected an object"),
        ({}, b"", {}, "inputs: expected a list"),
        ({"inputs": entries, "input": []}, b"", {}, "the request has 'input', expected one of"),
        ({"inputs": entries, "id": 7}, b"", {}, "the request.id: expected a string"),
        ({"inputs": others}, b"", {}, "inputs lacks 'features_u_0'"),
        ({"inputs": [*entries, first]}, b"", {}, "inputs[4]: expected one each of"),
        (changed(name="other"), b"", {}, "inputs[0]: expected one each of ['features_u_0'"),
        (changed(name=3), b"", {}, "inputs[0].name: expected a string"),
        (changed(datatype="INT32"), b"", {}, "inputs.features_u_0: expected datatype INT64"),
        (changed(shape=[5]), b"", {}, "inputs.features_u_0: expected 5 numbers for its shape"),
        (changed(shape=[2**62, 4]), b"", {}, "inputs.features_u_0: expected "),
        (changed(shape=[-4]), b"", {}, "inputs.features_u_0.shape: expected a list of sizes"),
        (changed(shape="4"), b"", {}, "inputs.features_u_0.shape: expected a list of sizes"),
        (changed(shape=[2, 2]), b"", {}, "'features_u_0' has shape"),
        (changed(data=[1, 2, 3, 4.5]), b"", {}, "expected a whole number of 64 bits"),
        (changed(data=None), b"", {}, "inputs.features_u_0: "),
        (changed(parameters=3), b"", {}, "inputs.features_u_0.parameters: expected an object"),
        (binary(32), bytes(24), {}, "expected binary_data_size bytes after the JSON text"),
        (binary("32"), bytes(32), {}, "expected binary_data_size bytes after the JSON text"),
        (binary(24), bytes(24), {}, "expected 4 elements of 8 bytes for its shape, not 24 bytes"),
        (binary(32), bytes(40), {}, "the request: 8 bytes follow its binary tensors"),
        ({"inputs": entries, "outputs": [{"name": "x"}]}, b"", {}, "outputs[0]: expected some of"),
        (
            {"inputs": entries, "outputs": [{"name": "output_0"}] * 2},
            *(b"", {}, "outputs[1]: expected some of"),
        ),
        (
            {
                "inputs": entries,
                "outputs": [{"name": "output_0", "parameters": {"classification": 3}}],
            },
            *(b"", {}, "outputs[0]: classification is not built"),
        ),
        (
            {"inputs": entries, "parameters": {"binary_data_output": "yes"}},
            *(b"", {}, "binary_data_output: expected true or false"),
        ),
        ({"inputs": entries}, b"", {length: "9999999"}, f"{length}: expected at most the"),
        ({"inputs": entries}, b"", {length: "-1"}, f"{length}: expected at most the"),
    ]
    for content, tail, headers, says in cases:
        text = json.dumps(content).encode()
        headers = {length: str(len(text)), **headers} if tail else headers
        status, error = raw(port, name, text + tail, **headers)
        assert status == 400, (content, error)
        assert says in error, (says, error)
    text = json.dumps({"inputs": entries}).encode()
    assert raw(port, name, text, **{"Content-Encoding": "gzip"})[0] == 415
    for asked in ("other", f"{name}/versions/tuesday"):
        status, error = raw(port, asked, text)
        assert (status, f"it serves {name}" in error) == (404, True)
    wrong = inputs_of([torch.ones(1, 1).long(), *tensors_of(2, 4)[1:]], binary=True)
    with (
        triton.InferenceServerClient(f"127.0.0.1:{port}") as client,
        pytest.raises(InferenceServerException, match="'features_u_0' has shape"),
    ):
        client.infer(name, wrong)
    return len(cases) + 1


def metrics_of(port: int) -> dict[tuple[str, ...], float]:
    """Samples of a server by name and values of their labels."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.request("GET", "/metrics")
    response = connection.getresponse()
    assert response.getheader("Content-Type", "").startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(response.read().decode()))
    connection.close()
    assert {family.type for family in families} <= {"counter", "gauge", "histogram"}
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in families
        for sample in family.samples
    }


def assert_metrics(port: int, *, runs: int, refused: int, missing: dict[str, int]) -> None:
    """A server counts requests, latencies, rows and missing ids."""
    found = metrics_of(port)
    assert found["dynemb_requests_total", "infer", "200"] == runs
    assert found["dynemb_requests_total", "infer", "400"] == refused
    assert found["dynemb_requests_total", "infer", "404"] == 2
    assert found["dynemb_requests_total", "infer", "415"] == 1
    count = runs + refused + 3
    assert found["dynemb_request_seconds_count", "infer"] == count
    buckets = [
        value
        for key, value in found.items()
        if key[:2] == ("dynemb_request_seconds_bucket", "infer")
    ]
    assert buckets == sorted(buckets)
    assert (len(buckets), buckets[-1]) == (14, count)
    assert found["dynemb_request_seconds_sum", "infer"] > 0
    assert (found["dynemb_rows", "bags.u"], found["dynemb_rows", "bags.v"]) == (100, 110)
    assert found["dynemb_free_rows", "bags.u"] == HEADROOM
    assert {table: found["dynemb_missing_ids_total", table] for table in missing} == missing
    assert ("dynemb_following",) not in found


def missing_ids(batches: Sequence[tuple[int, int]]) -> dict[str, int]:
    """Ids of requests that the live package lacks: it has those below 100."""
    counts = {"bags.u": 0, "bags.v": 0}
    for batch, ids in batches:
        u, _, v, _ = tensors_of(batch, ids)
        counts["bags.u"] += int((u >= 100).sum())
        counts["bags.v"] += int((v >= 100).sum())
    return counts


class Asking:
    """Clients that ask for the same again and again, each in a thread with a connection.

    Args:
        port, name: of the server and its model.
        tensors: inputs.
        clients: number of threads.
    """

    def __init__(self, port: int, name: str, tensors: Sequence[Tensor], *, clients: int) -> None:
        self._port, self._name, self._tensors = port, name, tensors
        self._stopping = threading.Event()
        self._threads = ThreadPoolExecutor(clients)
        self._asking = [self._threads.submit(self._ask) for _ in range(clients)]

    def _ask(self) -> tuple[list[bytes], list[float]]:
        answers, seconds, is_last = [], [], False
        with triton.InferenceServerClient(f"127.0.0.1:{self._port}") as client:
            while not is_last:
                is_last = self._stopping.is_set()  # and asks once more
                began = time.perf_counter()
                outputs = infer(client, self._name, self._tensors)
                seconds.append(time.perf_counter() - began)
                answers.append(b"".join(output.tobytes() for output in outputs))
        return answers, seconds

    def answers(self) -> list[list[bytes]]:
        """Those of each client, in order; prints how long they took."""
        self._stopping.set()
        found = [asking.result() for asking in self._asking]
        self._threads.shutdown()
        cuts = np.quantile([of for _, seconds in found for of in seconds], [0.5, 0.99])
        print(f"p50 {1000 * cuts[0]:.2f} ms, p99 {1000 * cuts[1]:.2f} ms")
        return [answers for answers, _ in found]
