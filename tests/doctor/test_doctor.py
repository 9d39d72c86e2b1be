"""``python -m torch_dynemb doctor``: what facts mean, and what is printed of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import torch_dynemb as td
from torch_dynemb.__main__ import main
from torch_dynemb.doctor import command
from torch_dynemb.doctor.facts import Facts, Gpu, cgroup_limit, chosen, gather
from torch_dynemb.doctor.findings import findings
from torch_dynemb.ops import CompiledWith, compiled_with
from torch_dynemb.storage.address_space import AddressLimit

pytestmark = pytest.mark.cpu_only("facts of the host")

GIB = 1 << 30
GOOD = Facts(
    version="0.1.0",
    python="3.12.1",
    torch="2.13.0+cu128",
    torch_cuda="12.8",
    torchrec="1.8.0",
    fbgemm="1.8.0",
    glibc="2.36",
    system="Linux 6.1",
    machine="x86_64",
    built=CompiledWith("GCC 12.2.0", liburing=True, cuda=True, cuda_architectures=(80, 90)),
    ccache=True,
    simd_level=2,
    gpus=(Gpu("H200", 90, 139 * GIB),),
    huge_pages="madvise",
    overcommit=0,
    address_limits=(),
    mappings=400,
    most_mappings=65530,
    memory=64 * GIB,
    available_memory=50 * GIB,
    cgroup_limit=None,
    io_uring=True,
    io_uring_error="",
    io_uring_disabled=0,
    threads=8,
    cpus=8,
    failure="",
)
NO_CUDA = CompiledWith("GCC 12.2.0", liburing=True, cuda=False, cuda_architectures=())
NO_URING = CompiledWith("Clang 17.0.1", liburing=False, cuda=True, cuda_architectures=())


def test_a_good_machine_has_nothing_to_mend() -> None:
    found = findings(GOOD)
    assert {finding.level for finding in found} == {"ok"}
    assert not any(finding.remedy for finding in found)


@pytest.mark.parametrize(
    ("changes", "level", "what", "remedy"),
    [
        ({"torch": "2.9.1"}, "problem", "torch", "Install torch 2.11 or newer."),
        ({"torch": "2.10.0a0+git1"}, "problem", "torch", "Install torch 2.11"),
        ({"torchrec": "1.5.0"}, "note", "torchrec", "tested with 1.6.1 to 1.9.2"),
        ({"torchrec": "2.0"}, "note", "torchrec", "tested with 1.6.1 to 1.9.2"),
        ({"fbgemm": None}, "note", "fbgemm", "fbgemm-gpu-cpu where torch has no CUDA"),
        ({"built": NO_CUDA}, "problem", "GPU 0", "DYNEMB_CUDA=1"),
        ({"gpus": (Gpu("V100", 70, GIB),)}, "problem", "GPU 0", "sm_80 or later"),
        (
            {
                "gpus": (Gpu("A100", 80, GIB),),
                "built": CompiledWith("GCC 12.2.0", True, True, (90, 100)),
            },
            "problem",
            "GPU 0",
            "TORCH_CUDA_ARCH_LIST=8.0",
        ),
        ({"available_memory": 1000}, "note", "memory", "Free some memory"),
        ({"cgroup_limit": 8 * GIB}, "note", "control group", "capacity or a memory_budget"),
        ({"huge_pages": "never"}, "note", "huge pages", "transparent_hugepage/enabled"),
        ({"huge_pages": ""}, "note", "huge pages", "transparent_hugepage/enabled"),
        ({"overcommit": 2}, "note", "overcommit", "vm.overcommit_memory to 0 or 1"),
        (
            {"address_limits": (AddressLimit("ulimit -v", GIB, "raise it"),)},
            "note",
            "address space",
            "raise it, or give them a max_rows",
        ),
        ({"mappings": 60000}, "note", "memory mappings", "vm.max_map_count"),
        ({"most_mappings": 1000}, "note", "memory mappings", "vm.max_map_count"),
        ({"simd_level": 0}, "note", "instruction set", "no AVX2"),
        ({"threads": 16}, "note", "threads", "to 8 at most"),
        ({"threads": 1}, "note", "threads", "unset OMP_NUM_THREADS"),
        ({"io_uring": False, "built": NO_URING}, "note", "io_uring", "Install liburing-dev"),
        (
            {"io_uring": False, "io_uring_disabled": 2},
            "note",
            "io_uring",
            "kernel.io_uring_disabled to 0",
        ),
        ({"io_uring": False}, "note", "io_uring", "seccomp profile"),
        ({"io_uring_error": "RuntimeError: EMFILE"}, "problem", "io_uring", "Mend what"),
        ({"failure": "RuntimeError: no room"}, "problem", "a small table", "Mend what"),
    ],
)
def test_what_a_fact_means(changes: Mapping[str, Any], level: str, what: str, remedy: str) -> None:
    found = findings(dataclasses.replace(GOOD, **changes))
    (finding,) = [finding for finding in found if finding.level != "ok"]
    assert (finding.level, finding.what) == (level, what)
    assert remedy in finding.remedy
    assert finding.remedy.endswith(".")
    assert finding.value


@pytest.mark.parametrize(
    "changes",
    [
        {"torch": "2.11.0", "torch_cuda": None, "gpus": ()},
        {"gpus": (), "built": NO_CUDA},
        {"gpus": (Gpu("B200", 100, GIB),), "built": CompiledWith("GCC 12", True, True, (80, 90))},
        {"torchrec": None, "fbgemm": None},
        {"machine": "aarch64", "simd_level": 0},
        {"cgroup_limit": 60 * GIB},
        {"cgroup_limit": 64 * GIB},
        {"overcommit": None, "most_mappings": None},
        {"glibc": ""},
        {"ccache": False},
        {"threads": 4},
    ],
)
def test_what_is_well_enough(changes: Mapping[str, Any]) -> None:
    found = findings(dataclasses.replace(GOOD, **changes))
    assert [finding for finding in found if finding.level != "ok"] == []


def test_the_lines() -> None:
    found = findings(dataclasses.replace(GOOD, torch="2.9.1", simd_level=0))
    lines = command.as_text(found).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("problem  torch"))
    assert lines[at].endswith("2.9.1, for CUDA 12.8")
    assert lines[at + 1].strip() == "-> Install torch 2.11 or newer."
    assert lines[-1] == "1 problem, 1 note"
    assert command.as_text(findings(GOOD)).endswith("\n0 problems, 0 notes")


@pytest.mark.parametrize(("facts", "status"), [({}, 0), ({"failure": "RuntimeError: no"}, 1)])
def test_the_exit_status(
    facts: Mapping[str, Any],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(command, "gather", lambda: dataclasses.replace(GOOD, **facts))
    assert main(["doctor", "--json"]) == status
    said = json.loads(capsys.readouterr().out)
    assert said["facts"]["gpus"] == [{"name": "H200", "capability": 90, "bytes": 139 * GIB}]
    assert said["facts"]["built"]["cuda_architectures"] == [80, 90]
    assert said["findings"][-1]["level"] == ("problem" if status else "ok")


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor"])
    said = capsys.readouterr()
    assert said.err == ""
    assert status == int("\nproblem" in f"\n{said.out}")
    facts = gather()
    assert facts.failure == ""
    assert facts.torch == torch.__version__
    assert facts.simd_level == td.ops.simd_level()
    assert 0 < facts.available_memory <= facts.memory
    assert facts.mappings > 10
    assert json.loads(command.as_json(facts, findings(facts)))["facts"]["cpus"] == facts.cpus


def test_a_broken_table_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def raises(*_: object, **__: object) -> None:
        raise RuntimeError("no room for a table")

    monkeypatch.setattr("torch_dynemb.doctor.facts.DynamicEmbedding", raises)
    assert gather().failure == "RuntimeError: no room for a table"
    monkeypatch.setattr("torch_dynemb.doctor.facts.store_io_paths", raises)
    assert gather().io_uring_error == "RuntimeError: no room for a table"
    assert not gather().io_uring


def test_what_the_library_was_compiled_with() -> None:
    built = compiled_with()
    assert built.compiler.split()[0] in ("GCC", "Clang")
    assert built.cuda == td.ops.has_cuda_kernels()
    assert list(built.cuda_architectures) == sorted(built.cuda_architectures)
    if td.ops.IoPath.URING in td.ops.store_io_paths():
        assert built.liburing


def test_files_of_the_kernel() -> None:
    assert chosen("always [madvise] never\n") == "madvise"
    assert chosen("") == ""
    texts = {
        "/sys/fs/cgroup/a/b/memory.max": "max\n",
        "/sys/fs/cgroup/a/memory.max": f"{8 * GIB}\n",
        "/sys/fs/cgroup/memory.max": f"{32 * GIB}\n",
        "/sys/fs/cgroup/memory/c/memory.limit_in_bytes": f"{4 * GIB}\n",
        "/sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "/sys/fs/cgroup/cpu/c/memory.limit_in_bytes": "1\n",
    }

    def read(path: str) -> str:
        return texts.get(path, "")

    assert cgroup_limit("0::/a/b\n", read) == 8 * GIB
    assert cgroup_limit("0::/\n", read) == 32 * GIB
    assert cgroup_limit("4:memory:/c\n1:cpu:/c\n", read) == 4 * GIB
    assert cgroup_limit("4:cpu,memory:/d\n", read) is None
    assert cgroup_limit("", read) is None
