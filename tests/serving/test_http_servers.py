"""The servers of tutorials/serving, in Python and in C++, with a client on this machine."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from altered_packages import copied, with_manifest
from http_lifecycle import (
    assert_it_ends_when_all_is_answered,
    assert_it_ends_without_a_late_request,
    listening_port,
    status_of,
    wait_for,
)
from http_server import PYTHON_SERVER, Running, environment, need_libraries, running, started
from packaged import HEADROOM, VERSION, features
from protocol_checks import (
    Asking,
    assert_metrics,
    assert_protocol,
    assert_wrong_requests_are_refused,
    metrics_of,
    missing_ids,
    tensors_of,
)
from publishing import answer, new_trainer, publish, train
from torch import Tensor, nn

import torch_dynemb
from torch_dynemb import serving
from torch_dynemb.serving.packages.manifest import DENSE, MANIFEST, TABLES, read_package_manifest
from tutorials.serving.client import Client, RefusedError, latencies, updating
from tutorials.serving.compile_command import compile_command
from tutorials.serving.compile_command import main as print_command

if TYPE_CHECKING:
    from conftest import Package

pytestmark = pytest.mark.cpu_only("the package is compiled for the CPU")

OPS = Path(torch_dynemb.__file__).with_name("_C.abi3.so")
NAMES = ["features_u_0", "features_u_1", "features_v", "shift"]


@pytest.fixture(scope="session")
def cpp_server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program that the printed command makes, without optimisation, which takes long."""
    need_libraries()
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


def test_the_command_compiles_programs_of_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "main.cpp"
    own.write_text("int main() {}")
    monkeypatch.setattr(sys, "argv", ["compile_command", "main", "--source", str(own)])
    print_command()
    printed = capsys.readouterr().out
    assert shlex.split(printed) == compile_command("main", own)
    assert str(own) in shlex.split(printed)
    assert "-lsimdjson" not in printed  # which the server alone needs
    monkeypatch.setattr(sys, "argv", ["compile_command", str(own)])
    with pytest.raises(SystemExit, match="2"):
        print_command()
    assert f"give the file as --source {own}" in " ".join(capsys.readouterr().err.split())


@pytest.fixture(params=["python", "c++"])
def command(request: pytest.FixtureRequest, live_package: Package) -> list[str | Path]:
    """Starts a server of the live package, at a port that the system chooses."""
    if request.param == "python":
        return [*PYTHON_SERVER, live_package.path, "--port", "0"]
    return [request.getfixturevalue("cpp_server"), live_package.path, OPS, "0"]


@pytest.fixture
def port(command: list[str | Path]) -> Iterator[int]:
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


def assert_answer(client: Client, model: nn.Module, batch: int = 64, ids: int = 500) -> None:
    """The server answers with the bits of the model."""
    request, inputs = request_of(batch, ids)
    score, others = model(*inputs)
    answer = client.run(request)
    assert answer["version"] == VERSION
    for found, expected in zip(answer["outputs"], [score, *others.values()], strict=True):
        assert torch.equal(torch.tensor(found).reshape(expected.shape), expected)


def described(ids: int, dim: int, updates: int) -> dict[str, int]:
    """A table of the live package with so many ids more than at the export."""
    free = HEADROOM + (100 if dim == 8 else 110) - ids
    return {"embedding_dim": dim, "ids": ids, "free_rows": free, "updates": updates}


def test_servers_answer_with_the_bits_of_the_model(live_package: Package, port: int) -> None:
    with Client(port) as client:
        assert client.describe() == {
            "version": VERSION,
            "sequence": None,
            "dense_behind": 0,
            "stopped": None,
            "inputs": NAMES,
            "tables": {"bags.u": described(100, 8, 0), "bags.v": described(110, 4, 0)},
        }
        for batch, ids in [(4, 20), (1, 0), (64, 500), (0, 0)]:
            assert_answer(client, live_package.frozen, batch, ids)
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


def raw_answer(port: int, path: str, content: str | bytes, **headers: str) -> tuple[int, str]:
    """Status and error of a POST of any text."""
    body = content.encode() if isinstance(content, str) else content
    connection = http.client.HTTPConnection("127.0.0.1", port)
    try:
        connection.putrequest("POST", path)
        sizes = {} if "Transfer-Encoding" in headers else {"Content-Length": str(len(body))}
        for name, value in (sizes | headers).items():
            connection.putheader(name, value)
        connection.endheaders(body)
        response = connection.getresponse()
        return response.status, json.loads(response.read()).get("error", "")
    finally:
        connection.close()


# how a request writes the id 3, and what both servers say of it; None: it is taken. simdjson
# refuses a text with a number that neither 64 bits nor a float hold, before it has fields.
TOO_LARGE = "JSON: Problem while parsing a number; integers have at most 64 bits"
IDS: list[tuple[str, str | None]] = [
    ("3", None),
    ("-0", None),
    ("9223372036854775807", None),
    ("-9223372036854775808", None),
    ("3.5", "whole number of 64 bits"),
    ("3.0", "whole number of 64 bits"),
    ("1e3", "whole number of 64 bits"),
    ("-0.0", "whole number of 64 bits"),
    ("9223372036854775808", "whole number of 64 bits"),
    ("-9223372036854775809", "whole number of 64 bits"),
    ("true", "whole number of 64 bits"),
    ("false", "whole number of 64 bits"),
    ("null", "whole number of 64 bits"),
    ('"3"', "whole number of 64 bits"),
    ("{}", "whole number of 64 bits"),
    ("[3]", "differ in depth"),
]
NO_JSON = ["NaN", "Infinity", "-Infinity", "+3", "03", ".5", "3.", "3e", "nul", "[", ""]


def assert_ids_are_taken_as_they_are_written(port: int) -> None:
    others = '"features_u_0": [1, 2], "features_u_1": [0, 1, 2], "shift": [[0.5], [0.5]]'
    for text, says in IDS:
        row = f"[1, {text}, 2]"
        run = f'{{"inputs": {{{others}, "features_v": [{row}, [4, 5, 6]]}}}}'
        update = f'{{"table": "bags.u", "ids": [1], "rows": [[{"0.5, " * 7}1]], "erased": {row}}}'
        for path, field, body in [("/run", "inputs.features_v", run), ("/rows", "erased", update)]:
            status, error = raw_answer(port, path, body)
            assert status == (200 if says is None else 400), (path, text, error)
            if says is not None:
                names = error.startswith(f"{field}: ") and says in error
                assert names or error.startswith(TOO_LARGE), (text, error)
    for text in NO_JSON:
        status, _ = raw_answer(port, "/rows", f'{{"table": "bags.u", "erased": [{text}}}')
        assert status == 400, text


def assert_wrong_fields_are_refused_by_name(port: int) -> None:
    request, _ = request_of(2, 4)
    with Client(port) as client:
        before = client.run(request)
        for change, says in [
            ({"weights": [1.0]}, "inputs has 'weights', expected one of"),
            ({"shift": [[0.5], [True]]}, "inputs.shift: expected a number"),
            ({"shift": [[0.5], ["0.5"]]}, "inputs.shift: expected a number"),
            ({"shift": [[0.5], [1e39]]}, "inputs.shift: a number is too large for its dtype"),
            ({"shift": [[0.5], 0.5]}, "inputs.shift: lists of a tensor differ in depth"),
            ({"shift": [0.5, [0.5]]}, "inputs.shift: lists of a tensor differ in depth"),
            ({"shift": 0.5}, "'shift' has shape"),
            ({"shift": []}, "'shift' has shape"),
            ({"features_v": [1, 2, 3]}, "'features_v' has shape"),
            ({"features_v": [[[1, 2, 3]]] * 2}, "'features_v' has shape"),
            ({"features_v": None}, "inputs.features_v: "),
        ]:
            with pytest.raises(RefusedError, match=re.escape(says)):
                client.run(request | change)
        for body, says in [
            ({"inputs": [1]}, "inputs: expected an object"),
            ({}, "inputs: expected an object"),
            ([], "the request: expected an object"),
            ({"inputs": request, "input": {}}, "the request has 'input', expected one of"),
            ({"inputs": {}}, "inputs lacks 'features_u_0'"),
        ]:
            with pytest.raises(RefusedError, match=re.escape(says)):
                client._post("/run", body)  # type: ignore[arg-type]
        for body, says in [
            ({"table": "bags.u", "erase": [1]}, "the request has 'erase', expected one of"),
            ({"ids": [1]}, "table: expected a string"),
            ({"table": 3}, "table: expected a string"),
            ({"table": "bags.u", "ids": [[1]], "rows": [[0.5] * 8]}, "ids"),
            ({"table": "bags.u", "ids": 1, "rows": [[0.5] * 8]}, "ids"),
            ({"table": "bags.u", "ids": [1], "rows": [[True] * 8]}, "rows: expected a number"),
            ({"table": "bags.u", "ids": [1], "rows": [[1e39] * 8]}, "rows: a number is too large"),
        ]:
            with pytest.raises(RefusedError, match=re.escape(says)):
                client._post("/rows", body)
        assert client.run(request) == before


MALFORMED = {
    "half of a letter": b'{"inputs": {}, "\\ud800": 1}',
    "its other half": b'{"inputs": {}, "\\udc00\\ud800": 1}',
    "no UTF-8": b'{"inputs": {"\xff": 1}}',
    "a surrogate in UTF-8": b'{"inputs": {"\xed\xa0\x80": 1}}',
    "UTF-16": '{"inputs": {}}'.encode("utf-16"),
    "a control character": b'{"inputs": {"\x01": 1}}',
    "a number that no float holds": b'{"inputs": {"shift": [1e400]}}',
    "a key twice": b'{"inputs": {}, "inputs": {}}',
    "deep": b"[" * 100_000,
}


def assert_malformed_text_is_refused(port: int, name: str) -> None:
    for path in ("/run", "/rows", f"/v2/models/{name}/infer"):
        for kind, body in MALFORMED.items():
            status, error = raw_answer(port, path, body)  # which is UTF-8
            assert (status, error != "") == (400, True), (path, kind, error)
    assert raw_answer(port, "/v2/models/%ff/infer", b"{}")[0] in (400, 404)


LAST = b"GET / HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"


def statuses(port: int, request: bytes) -> list[int]:
    """Those of all answers until the server closes the connection, in whatever way."""
    text = b""
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as connection,
        contextlib.suppress(ConnectionResetError, BrokenPipeError),
    ):
        connection.sendall(request)
        while part := connection.recv(1 << 16):
            text += part
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d+)", text)]


def assert_ambiguous_lengths_are_refused(port: int) -> None:
    """No part of a body is taken for a request (RFC 9112, section 6.3)."""
    body = json.dumps({"table": "bags.u", "erased": [1]}).encode()
    inner = b"POST /rows HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    for head in (
        b"Content-Length: %d\r\nContent-Length: 0" % len(inner),
        b"Content-Length : %d" % len(inner),
        b"Content-Length: 0x%x" % len(inner),
        b"Content-Length: 0abc",
        b"Content-Length: +0",
        b"Content-Length: -1",
        b"Content-Length: 0\r\nTransfer-Encoding: chunked",
    ):
        found = statuses(port, b"GET / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n\r\n" + inner)
        assert found in ([400], [411]), (head, found)
    length = b"Content-Length: %d\r\n\r\n" % len(inner)
    assert statuses(port, LAST + length + inner) == [200]


def assert_long_heads_are_refused(port: int, *, may_reset: bool) -> None:
    """By 431; uvicorn knows 400 alone, and may reset a connection before it has read all."""
    found = statuses(port, LAST + b"a: b\r\n" * 30_000 + b"\r\n")
    assert found in (([400], []) if may_reset else ([431],)), found


def assert_limits_are_kept(port: int, most: int, connections: int) -> None:
    """Limits of a body, of all bodies at once, and of connections."""
    huge = raw_answer(port, "/run", "", **{"Content-Length": str(1 << 40)})
    assert huge == (413, f"the request has more than {most} bytes")
    chunked = raw_answer(port, "/run", "0\r\n\r\n", **{"Transfer-Encoding": "chunked"})
    assert chunked == (411, "the request has no Content-Length")
    upload = f"POST /run HTTP/1.1\r\nHost: x\r\nContent-Length: {most - 9}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=60) as aborted:
        aborted.sendall(f"{upload}Expect: 100-continue\r\n\r\n".encode())
        assert aborted.recv(1 << 16).startswith(b"HTTP/1.1 100 ")  # its bytes count from now on
        status, error = raw_answer(port, "/run", b" " * 10)
        assert (status, "ask again later" in error) == (503, True)
        assert raw_answer(port, "/run", b" " * 9)[0] == 400
        aborted.sendall(b"{")
    last = time.monotonic() + 60
    while raw_answer(port, "/run", b" " * 10)[0] == 503:  # until the server knows that it has ended
        assert time.monotonic() < last

    def connected() -> socket.socket:
        held.append(socket.create_connection(("127.0.0.1", port), timeout=60))
        held[-1].sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: x\r\n\r\n")
        return held[-1]

    held: list[socket.socket] = []
    answers = [connected().recv(1 << 16)[:12] for _ in range(connections + 1)]
    for connection in held:
        connection.close()
    assert answers[-1] == b"HTTP/1.1 503"
    while statuses(port, LAST + b"\r\n") != [200]:
        assert time.monotonic() < last


@pytest.mark.long_cases("python")
def test_requests_are_taken_as_they_are_written_or_refused_by_name(
    live_package: Package,
    command: list[str | Path],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    most, connections = 1 << 17, 200
    in_python = request.node.callspec.id == "python"
    limits = ["--request-bytes", str(most), "--pending-bytes", str(most)]
    limits += ["--connections", str(connections)]
    with (
        open(tmp_path / "stderr", "w") as stderr,
        started([*command, *limits], stderr) as server,
    ):
        port = server.port
        assert_ids_are_taken_as_they_are_written(port)
        assert_wrong_fields_are_refused_by_name(port)
        assert_malformed_text_is_refused(port, live_package.path.name)
        assert_ambiguous_lengths_are_refused(port)
        assert_limits_are_kept(port, most, connections)
        assert_long_heads_are_refused(port, may_reset=in_python)
        if in_python:  # simdjson refuses the text before a field is known
            inputs = {"features_u_0": [1, 2], "features_u_1": [0, 1, 2], "features_v": [1, 2]}
            inputs |= {"shift": [[0.5], [10**400]]}
            status, error = raw_answer(port, "/run", json.dumps({"inputs": inputs}))
            assert (status, error) == (400, "inputs.shift: a number is too large for its dtype")
    assert "Traceback" not in (tmp_path / "stderr").read_text()


def test_clients_of_triton_and_prometheus(live_package: Package, port: int) -> None:
    name = live_package.path.name
    runs = assert_protocol(port, name, live_package.frozen)
    refused = assert_wrong_requests_are_refused(port, name)
    missing = missing_ids([(4, 20), (64, 500), (1, 0), (0, 0)] * (runs // 4))
    assert_metrics(port, runs=runs, refused=refused, missing=missing)


def test_servers_take_updates_while_they_serve(live_package: Package, port: int) -> None:
    model = serving.live(live_package.frozen, headroom=HEADROOM)
    (tables,) = serving.live_tables(model).values()
    with Client(port) as client:
        rows = torch.randn(2, 8)
        tables.update("u", torch.tensor([5, 2**60]), rows, erased=torch.tensor([6]))
        done = client.update("bags.u", [5, 2**60], rows.tolist(), [6])
        assert done == {"inserted": 1, "updated": 1, "erased": 1}
        tables.erase("v", torch.arange(10))
        assert client.update("bags.v", [], [], range(10))["erased"] == 10
        assert_answer(client, model)
        for table, ids, wrong, says in [
            ("u", [1], [[0.0] * 8], "table is 'u', expected one of"),
            ("bags.u", [1], [[0.0] * 4], "rows"),
            ("bags.u", [1, 2], [[0.0] * 8], "rows"),
            ("bags.u", [1, 2], [[0.0] * 8, [0.0]], "length"),
            ("bags.u", range(500), [[0.0] * 8] * 500, f"has {HEADROOM} rows free.*need 40"),
        ]:
            with pytest.raises(RefusedError, match=says):
                client.update(table, ids, wrong)
        assert_answer(client, model)
        found = client.describe()["tables"]
        assert found == {"bags.u": described(100, 8, 1), "bags.v": described(100, 4, 1)}

        with updating(port, ids=100, rows=20) as sent:
            took = latencies(client, [request_of(4, 20, seed)[0] for seed in range(50)])
        print(f"while rows were updated: p50 {took.p50:.2f} ms, p99 {took.p99:.2f} ms")
        assert 0 < took.p50 <= took.p99
        assert sent[0] > 0
        updates = sum(table["updates"] for table in client.describe()["tables"].values())
        assert updates == 2 + sent[0] / 20
        counted = metrics_of(port)
        assert sum(counted["dynemb_updates_total", f"bags.{of}"] for of in "uv") == updates
        client.update("bags.u", [5], [[3e38] * 8])
        twice = {"features_u_0": [5, 5], "features_u_1": [0, 2], "features_v": [[1, 2, 3]]}
        with pytest.raises(RefusedError, match=r"outputs\[0\]: it has a number that JSON lacks"):
            client.run({**twice, "shift": [[0.0]]})


def test_the_cpp_server_serves_packages_that_are_only_read(
    package: Package, cpp_server: Path
) -> None:
    few_files = ["sh", "-c", 'ulimit -n 64; exec "$@"', "sh"]
    with started([*few_files, cpp_server, package.path, OPS, "0"]) as server:
        connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
        for connection in connections:
            connection.close()
        assert_memory_is_in_proportion(server)
        assert_the_cpp_server_reads_a_package(package, server.port)


def assert_memory_is_in_proportion(server: Running) -> None:
    """A large text of small lists takes memory in proportion to its bytes."""

    def most() -> int:
        text = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) << 10

    body = b'{"inputs": {"shift": [' + b"[]," * 1_400_000 + b"[1]]}}"
    before = most()
    assert raw_answer(server.port, "/run", body)[0] == 400
    assert most() - before < 20 * len(body)


def assert_the_cpp_server_reads_a_package(package: Package, port: int) -> None:
    with Client(port) as client:
        assert_answer(client, package.frozen)
        assert client.describe()["tables"]["bags.u"]["ids"] == 100
        with pytest.raises(RefusedError, match="only read: export the model with headroom="):
            client.update("bags.u", [1], [[0.0] * 8])
        with pytest.raises(RefusedError, match="unknown path"):
            client._post("/nothing", {})


def refused(cpp_server: Path, folder: Path, ops: Path = OPS) -> str:
    """What the C++ server says of a package that it does not serve."""
    run = subprocess.run(
        [cpp_server, folder, ops, "0"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1, run.stdout
    return run.stderr


@pytest.mark.long
def test_the_cpp_reader_refuses_what_it_cannot_serve(
    package: Package, live_package: Package, cpp_server: Path, tmp_path: Path
) -> None:
    assert "is not a serving package: it has no manifest.json" in refused(cpp_server, tmp_path)
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
    ((path, part),) = read_package_manifest(live_package.path).live.items()
    for slabs, says in [
        ([1, 1], f"{path}.rows0 has more rows than the manifest says"),
        ([*part.rows, 5], f"the tensor {path}.rows2 is missing: files of different packages"),
    ]:
        live = {path: part._replace(rows=slabs, formats=[0] * len(slabs))}
        folder = with_manifest(live_package, tmp_path / str(len(slabs)), live=live)
        assert says in refused(cpp_server, folder)
    assert "cannot be loaded" in refused(cpp_server, package.path, tmp_path / "no library")
    libc = Path("libm.so.6")  # a library without our ops
    assert "call load_ops with torch_dynemb/_C.abi3.so" in refused(cpp_server, package.path, libc)


@pytest.mark.long_cases("python")
def test_servers_answer_what_is_under_way_before_they_end(command: list[str | Path]) -> None:
    with started(command) as server:
        assert_it_ends_when_all_is_answered(server, request_of(4, 20)[0])
    with started([*command, "--drain-s", "0"]) as server:
        assert_it_ends_without_a_late_request(server)


def test_the_cpp_server_is_not_ready_while_it_loads(cpp_server: Path, tmp_path: Path) -> None:
    manifest = tmp_path / "manifest.json"
    os.mkfifo(manifest)  # its reader waits for a writer
    server = subprocess.Popen([cpp_server, tmp_path, OPS, "0"], stderr=subprocess.DEVNULL)
    port = listening_port(server.pid)
    paths = ("/v2/health/live", "/v2/health/ready", "/")
    assert [status_of(port, path) for path in paths] == [200, 503, 503]
    manifest.open("w").close()
    assert server.wait(60) == 1


@pytest.mark.long_cases("python")
def test_servers_follow_a_delta_log(
    live_package: Package, command: list[str | Path], tmp_path: Path
) -> None:
    log = tmp_path / "log"
    model, publisher = new_trainer(live_package, log)
    request, inputs = request_of(32, 400, seed=5)
    with publisher, running([*command, "--follow", log]) as port, Client(port) as client:

        def until(wanted: Callable[[Any], bool]) -> None:
            """Returns once what the server says of itself is as it should be."""
            wait_for(lambda: wanted(client.describe()))

        first = client.describe()
        assert (first["sequence"], first["stopped"]) == (None, None)
        state = metrics_of(port)
        assert state["dynemb_following",] == 1
        assert ("dynemb_commit_age_seconds",) not in state
        wait_for(lambda: status_of(port, "/v2/health/ready") == 200)
        train(model, 1, dense=True)
        publish(publisher)
        until(lambda said: said["sequence"] == 1)
        assert client.describe()["dense_behind"] == 0
        state = metrics_of(port)
        assert (state["dynemb_following",], state["dynemb_commit_sequence",]) == (1, 1)
        assert state["dynemb_commit_age_seconds",] >= 0
        for found, expected in zip(
            client.run(request)["outputs"], answer(model, inputs), strict=True
        ):
            assert torch.equal(torch.tensor(found).reshape(expected.shape), expected)
        many = torch.arange(5000, 5001 + HEADROOM)
        model.bags.group.insert_or_assign(1, many, torch.ones(len(many), 4))
        publish(publisher)
        until(lambda said: "table 'bags.v' has" in (said["stopped"] or ""))
        assert client.describe()["sequence"] == 1
        state = metrics_of(port)
        assert (state["dynemb_following",], state["dynemb_commit_sequence",]) == (0, 1)
        assert client.run(request)["version"] == VERSION
        assert status_of(port, "/v2/health/ready") == 200
    # a server that cannot catch up with the log is never ready
    with running([*command, "--follow", log]) as port, Client(port) as client:
        wait_for(lambda: client.describe()["stopped"] is not None)
        for path in ("/v2/health/ready", f"/v2/models/{live_package.path.name}/ready"):
            assert status_of(port, path) == 503
        assert client.run(request)["version"] == VERSION


@pytest.mark.long
def test_many_clients_read_whole_commits(
    live_package: Package, command: list[str | Path], tmp_path: Path
) -> None:
    """Every answer under load is that of one commit, and no client goes back."""
    log, commits = tmp_path / "log", 30
    model, publisher = new_trainer(live_package, log)
    inputs, tensors = features(64, 500, seed=5), tensors_of(64, 500, seed=5)
    expected: dict[bytes, int] = {}

    def expect(number: int) -> None:
        outputs = answer(model, inputs)
        expected[b"".join(of.detach().numpy().tobytes() for of in outputs)] = number

    expect(0)
    with publisher, running([*command, "--follow", log]) as port:
        asking = Asking(port, live_package.path.name, tensors, clients=4)
        for number in range(1, commits + 1):
            train(model, number, dense=True)
            expect(number)
            publish(publisher)
        while metrics_of(port).get(("dynemb_commit_sequence",)) != commits:
            time.sleep(0.005)
        answers = asking.answers()
        found = metrics_of(port)
    assert len(expected) == commits + 1
    for of_client in answers:
        seen = [expected[of] for of in of_client]
        assert seen == sorted(seen)
        assert seen[-1] == commits
    count = sum(map(len, answers))
    assert found["dynemb_requests_total", "infer", "200"] == count
    assert found["dynemb_request_seconds_count", "infer"] == count
