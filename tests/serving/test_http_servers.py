"""The servers of tutorials/serving, in Python and in C++, with a client on this machine."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from altered_packages import copied, with_manifest
from http_server import PYTHON_SERVER, environment, running
from served import VERSION, features
from torch import Tensor

import torch_dynemb
from torch_dynemb.serving.packages.manifest import DENSE, MANIFEST, TABLES
from tutorials.serving.client import Client, RefusedError, latencies
from tutorials.serving.compile_command import compile_command

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("the package is compiled for the CPU")

OPS = Path(torch_dynemb.__file__).with_name("_C.abi3.so")
NAMES = ["features_u_0", "features_u_1", "features_v", "shift"]


@pytest.fixture(scope="session")
def cpp_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that the printed command makes, without optimisation, which takes long."""
    program = tmp_path_factory.mktemp("cpp") / "server"
    printed = subprocess.run(
        [sys.executable, "-m", "tutorials.serving.compile_command", program],
        env=environment(),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shlex.split(printed) == compile_command(program)
    subprocess.run([*shlex.split(printed), "-O0"], check=True)
    return program


@pytest.fixture(params=["python", "c++"])
def port(request: pytest.FixtureRequest, package: Package) -> Iterator[int]:
    if request.param == "python":
        command: list[str | Path] = [*PYTHON_SERVER, package.path, "--port", "0"]
    else:
        command = [request.getfixturevalue("cpp_server"), package.path, OPS, "0"]
    with running(command) as port:
        yield port


def request_of(batch: int, ids: int, seed: int = 0) -> tuple[dict[str, Any], tuple[Any, Tensor]]:
    """A request, and the inputs of the model that it has."""
    given, shift = features(batch, ids, seed)
    tensors = [*given["u"], given["v"], shift]
    return {name: tensor.tolist() for name, tensor in zip(NAMES, tensors, strict=True)}, (
        given,
        shift,
    )


def test_servers_answer_with_the_bits_of_the_model(package: Package, port: int) -> None:
    with Client(port) as client:
        assert client.describe() == {"version": VERSION, "inputs": NAMES}
        for batch, ids in [(4, 20), (1, 0), (64, 500), (0, 0)]:
            request, inputs = request_of(batch, ids)
            score, others = package.frozen(*inputs)
            answer = client.run(request)
            assert answer["version"] == VERSION
            for found, expected in zip(answer["outputs"], [score, *others.values()], strict=True):
                assert torch.equal(torch.tensor(found).reshape(expected.shape), expected)
        took = latencies(client, [request_of(4, 20, seed)[0] for seed in range(50)])
        print(f"p50 {took.p50:.2f} ms, p99 {took.p99:.2f} ms")
        assert 0 < took.p50 <= took.p99

        before = client.run(request_of(4, 20)[0])
        request, _ = request_of(4, 20)
        for wrong, says in [
            (request | {"shift": [[1.0]]}, "'shift' has shape"),
            ({"shift": [[1.0]]}, "features_u_0"),
            (request | {"features_v": [[1, 2, 3], [4]] * 2}, "length"),
            (request | {"features_u_1": [0, 1, 2, 3, 9]}, "offsets"),
        ]:
            with pytest.raises(RefusedError, match=says):
                client.run(wrong)
        assert client.run(request) == before

    answers: list[Any] = []

    def ask() -> None:
        with Client(port) as other:
            answers.extend(other.run(request) for _ in range(10))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [before] * 40


def refused(cpp_server: Path, folder: Path, ops: Path = OPS) -> str:
    """What the C++ server says of a package that it does not serve."""
    run = subprocess.run(
        [cpp_server, folder, ops, "0"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1, run.stdout
    return run.stderr


def test_the_cpp_reader_refuses_what_it_cannot_serve(
    package: Package, cpp_server: Path, tmp_path: Path
) -> None:
    assert "is no serving package: it has no manifest.json" in refused(cpp_server, tmp_path)
    for name in (TABLES, DENSE, MANIFEST):
        folder = copied(package, tmp_path / f"bit of {name}", (name,))
        content = bytearray((folder / name).read_bytes())
        content[len(content) // 2] ^= 1
        (folder / name).write_bytes(content)
        says = refused(cpp_server, folder)
        assert str(folder / name) in says
        assert any(word in says for word in ("checksum", "header", "JSON"))
    folder = copied(package, tmp_path / "short", (TABLES,))
    os.truncate(folder / TABLES, 5000)
    assert "the file has 5000 bytes, expected" in refused(cpp_server, folder)
    (folder / TABLES).unlink()
    assert "the file is missing" in refused(cpp_server, folder)
    foreign = {
        "torch": ("2.1.0", "with torch 2.1.0, but this program has torch"),
        "machine": ("pdp11", "for pdp11, but this machine is"),
        "instructions": (["avx9999"], "that has avx9999, which this one lacks"),
        "device": ("cuda", "for cuda, but this reader serves on the CPU"),
        "ops": ({"dynemb::find": "find()"}, "and calls find(), which the loaded library has as"),
    }
    for name, (value, says) in foreign.items():
        folder = with_manifest(package, tmp_path / name, **{name: value})
        assert says in refused(cpp_server, folder)
    assert "cannot be loaded" in refused(cpp_server, package.path, tmp_path / "no library")
    libc = Path("libm.so.6")  # a library without our ops
    assert "call load_ops with torch_dynemb/_C.abi3.so" in refused(cpp_server, package.path, libc)
