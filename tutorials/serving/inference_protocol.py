"""The Open Inference Protocol, version 2: requests and answers in JSON, with tensors in binary.

``inference_protocol.h`` does the same for the C++ server, in the same words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torch_dynemb as td
from tutorials.serving.json_requests import check_finite, fields_of, parsed, tensor_of

DATATYPES = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.bfloat16: "BF16",
    torch.float32: "FP32",
    torch.float64: "FP64",
}
# length of the JSON text; binary tensors follow it
LENGTH_HEADER = "Inference-Header-Content-Length"


class Answer(NamedTuple):
    """The body of an answer.

    Attributes:
        content: JSON, and binary tensors after it.
        json_bytes: length of the JSON text; None: the whole body.
    """

    content: bytes
    json_bytes: int | None


def server_metadata() -> dict[str, Any]:
    """Describe the server."""
    return {
        "name": "torch_dynemb",
        "version": td.__version__,
        "extensions": ["binary_tensor_data"],
    }


def model_metadata(name: str, model: td.serving.ServedModel) -> dict[str, Any]:
    """Describe a model; -1 is a size that changes from run to run."""

    def described(tensors: Sequence[td.serving.Input]) -> list[dict[str, Any]]:
        return [
            {
                "name": of.name,
                "datatype": DATATYPES[of.dtype],
                "shape": [
                    -1 if size is None or size.symbol is not None else size.plus
                    for size in of.sizes
                ],
            }
            for of in tensors
            if of.dtype is not None
        ]

    return {
        "name": name,
        "versions": [str(model.version)],
        "platform": "torch_dynemb",
        "inputs": described(model.inputs),
        "outputs": described(model.outputs),
    }


def infer(
    name: str,
    model: td.serving.ServedModel,
    run_flat: Callable[[list[Tensor]], list[Tensor]],
    body: bytes,
    json_bytes: str | None,
) -> Answer:
    """Run a model on a request.

    Args:
        name: name of the model.
        model: describes its inputs and outputs.
        run_flat: that of the model, or of batches of requests.
        body: the request.
        json_bytes: value of its header LENGTH_HEADER; None: it has none.

    Raises:
        ValueError: the request is wrong; the message names the field.
        TypeError, RuntimeError: the model does not take the inputs.
    """
    length = _json_length(json_bytes, len(body))
    content = parsed(body[:length])
    request = fields_of(content, ["id", "parameters", "inputs", "outputs"], "the request")
    answer: dict[str, Any] = {"model_name": name, "model_version": str(model.version)}
    if "id" in request:
        answer["id"] = _text_of(request, "id", "the request")
    inputs = _inputs_of(request, model, memoryview(body)[length:])
    wanted = _wanted_outputs(request, [of.name for of in model.outputs])
    found = dict(zip((of.name for of in model.outputs), run_flat(inputs), strict=True))
    entries, tails = [], []
    for output, is_binary in wanted.items():
        tensor = found[output].detach().cpu().contiguous()
        entry = {
            "name": output,
            "datatype": DATATYPES[tensor.dtype],
            "shape": list(tensor.shape),
        }
        if is_binary:
            tails.append(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
            entry["parameters"] = {"binary_data_size": len(tails[-1])}
        else:
            check_finite(tensor, f"outputs.{output}")
            entry["data"] = tensor.reshape(-1).tolist()
        entries.append(entry)
    answer |= {"outputs": entries}
    text = json.dumps(answer, separators=(",", ":")).encode()
    return Answer(b"".join([text, *tails]), len(text) if tails else None)


def _json_length(header: str | None, body_bytes: int) -> int:
    if header is None:
        return body_bytes
    if not header.isdecimal() or int(header) > body_bytes:
        raise ValueError(f"{LENGTH_HEADER}: expected at most the {body_bytes} bytes of the body")
    return int(header)


def _inputs_of(
    request: Mapping[str, Any], model: td.serving.ServedModel, binary: memoryview
) -> list[Tensor]:
    """Return the tensors of a request, in the order of the model."""
    known = {given.name: given for given in model.inputs}
    found: dict[str, Tensor] = {}
    for number, entry in enumerate(_list_of(request, "inputs")):
        owner = f"inputs[{number}]"
        fields = fields_of(entry, ["name", "shape", "datatype", "parameters", "data"], owner)
        name = _text_of(fields, "name", owner)
        if name not in known or name in found:
            raise ValueError(f"{owner}: expected one each of {list(known)}, not '{name}'")
        dtype, owner = known[name].dtype, f"inputs.{name}"
        assert dtype is not None
        if fields.get("datatype") != DATATYPES[dtype]:
            raise ValueError(f"{owner}: expected datatype {DATATYPES[dtype]}")
        shape = _shape_of(fields, owner)
        size = _parameters_of(fields, owner).get("binary_data_size")
        if size is None:
            values = tensor_of(fields.get("data"), dtype, [0], owner)
            if values.numel() != math.prod(shape):
                raise ValueError(f"{owner}: expected {math.prod(shape)} numbers for its shape")
        else:
            if "data" in fields or type(size) is not int or not 0 <= size <= len(binary):
                raise ValueError(f"{owner}: expected binary_data_size bytes after the JSON text")
            values, binary = (
                _tensor_in(binary[:size], dtype, math.prod(shape), owner),
                binary[size:],
            )
        found[name] = values.reshape(shape)
    missing = [name for name in known if name not in found]
    if missing:
        raise ValueError(f"inputs lacks '{missing[0]}'")
    if len(binary) > 0:
        raise ValueError(f"the request: {len(binary)} bytes follow its binary tensors")
    return [found[name] for name in known]


def _tensor_in(data: memoryview, dtype: torch.dtype, count: int, owner: str) -> Tensor:
    if len(data) != count * dtype.itemsize:
        raise ValueError(
            f"{owner}: expected {count} elements of {dtype.itemsize} bytes for its shape, not "
            f"{len(data)} bytes"
        )
    if count == 0:
        return torch.empty(0, dtype=dtype)
    values = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if dtype == torch.bool and int(values.max()) > 1:
        raise ValueError(f"{owner}: expected bytes 0 and 1")
    return values.view(dtype)


def _wanted_outputs(request: Mapping[str, Any], known: Sequence[str]) -> dict[str, bool]:
    """Return the outputs to send, and whether each is sent in binary."""
    parameters = _parameters_of(request, "the request")
    all_binary = _flag_of(parameters, "binary_data_output", "the request")
    if "outputs" not in request:
        return dict.fromkeys(known, all_binary)
    wanted: dict[str, bool] = {}
    for number, entry in enumerate(_list_of(request, "outputs")):
        owner = f"outputs[{number}]"
        fields = fields_of(entry, ["name", "parameters"], owner)
        name = _text_of(fields, "name", owner)
        if name not in known or name in wanted:
            raise ValueError(f"{owner}: expected some of {list(known)}, not '{name}'")
        own = _parameters_of(fields, owner)
        if "classification" in own:
            raise ValueError(f"{owner}: classification is not built: ask for the tensor")
        has_own = "binary_data" in own
        wanted[name] = _flag_of(own, "binary_data", owner) if has_own else all_binary
    return wanted


def _list_of(fields: Mapping[str, Any], key: str) -> list[Any]:
    found = fields.get(key)
    if not isinstance(found, list):
        raise ValueError(f"{key}: expected a list")
    return found


def _text_of(fields: Mapping[str, Any], key: str, owner: str) -> str:
    found = fields.get(key)
    if not isinstance(found, str):
        raise ValueError(f"{owner}.{key}: expected a string")
    return found


def _shape_of(fields: Mapping[str, Any], owner: str) -> list[int]:
    shape = fields.get("shape")
    if not isinstance(shape, list) or any(type(of) is not int or of < 0 for of in shape):
        raise ValueError(f"{owner}.shape: expected a list of sizes")
    return shape


def _parameters_of(fields: Mapping[str, Any], owner: str) -> Mapping[str, Any]:
    """Return the parameters of a request; a client may send others than those that are read."""
    found = fields.get("parameters", {})
    if not isinstance(found, dict):
        raise ValueError(f"{owner}.parameters: expected an object")
    return found


def _flag_of(parameters: Mapping[str, Any], key: str, owner: str) -> bool:
    found = parameters.get(key, False)
    if not isinstance(found, bool):
        raise ValueError(f"{owner}.parameters.{key}: expected true or false")
    return found
