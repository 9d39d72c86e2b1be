"""The CUDA kernels in the built library, without a GPU: registered, and machine code in it."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections import Counter
from pathlib import Path

import pytest
import torch

import setup
import torch_dynemb
from torch_dynemb import ops
from torch_dynemb._library.op_names import op_names, tagged_ops, takes_tensors

pytestmark = pytest.mark.own_device

ROOT = Path(__file__).resolve().parents[2]
CUDA = ROOT / "csrc" / "cuda"
CORE = ROOT / "csrc" / "core"
LIBRARY = Path(torch_dynemb.__file__).parent / "_C.abi3.so"

needs_kernels = pytest.mark.skipif(
    not ops.has_cuda_kernels(),
    reason="the library was built without CUDA kernels: DYNEMB_CUDA=1 compiles them",
)


def kernel_names() -> set[str]:
    """All ``__global__`` functions."""
    text = "\n".join(file.read_text() for file in sorted(CUDA.rglob("*.cu*")))
    return set(re.findall(r"__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(", text))


@needs_kernels
@pytest.mark.parametrize("name", sorted(set(op_names()) - tagged_ops("host", "store")))
def test_every_op_has_a_cuda_kernel(name: str) -> None:
    key = "CUDA" if takes_tensors(name) else "CompositeExplicitAutograd"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(f"dynemb::{name}", key)


def test_memory_ops_are_of_a_gpu_only() -> None:
    for name in filter(takes_tensors, tagged_ops("gpu")):
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"dynemb::{name}", "CPU")


@needs_kernels
def test_the_library_lists_every_kernel() -> None:
    """The host code of a kernel, which names it, is a symbol of the library."""
    listing = subprocess.run(["nm", str(LIBRARY)], capture_output=True, text=True, check=True)
    stubs = "\n".join(line for line in listing.stdout.splitlines() if "__device_stub__" in line)
    # mangled names hold the length of a name before it
    assert {name for name in kernel_names() if f"{len(name)}{name}" not in stubs} == set()


@needs_kernels
def test_the_library_finds_the_cuda_part_of_torch() -> None:
    """libtorch.so depends on libtorch_cuda.so where torch has CUDA."""
    command = ["readelf", "--dynamic", str(LIBRARY)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert re.search(r"NEEDED.*\[libtorch\.so\]", listing)
    assert "libcudart" not in listing  # linked statically, so that any torch's will do


def machine_code() -> Counter[int]:
    """How many files' worth of machine code the library holds for each architecture.

    A fat binary is a header (magic number, version, its own size, size of what follows) and
    entries of (kind, version, own size, size, ..., architecture at byte 28); kind 2 is machine
    code, as nvcc 11 to 13 write them.
    """
    data = LIBRARY.read_bytes()
    magic = struct.pack("<I", 0xBA55ED50)
    found: Counter[int] = Counter()
    position = data.find(magic)
    while position >= 0:
        _, _, header, size = struct.unpack_from("<IHHQ", data, position)
        entry, end = position + header, position + header + size
        while entry < end:
            kind, _, header, size = struct.unpack_from("<HHIQ", data, entry)
            if kind == 2:
                found[struct.unpack_from("<I", data, entry + 28)[0]] += 1
            entry += header + size
        position = data.find(magic, end)
    return found


@needs_kernels
def test_the_library_holds_machine_code_for_every_architecture() -> None:
    here = [] if os.environ.get("DYNEMB_CUDA") == "1" else setup.present_architectures()
    architectures = os.environ.get("TORCH_CUDA_ARCH_LIST") or ";".join(here or setup.ARCHITECTURES)
    wanted = {int(re.sub(r"\D", "", part)) for part in re.split(r"[;\s]+", architectures) if part}
    found = machine_code()
    sources = len(list(CUDA.rglob("*.cu")))
    assert {architecture: found[architecture] for architecture in wanted} == dict.fromkeys(
        wanted, sources
    )


def core_functions() -> set[str]:
    """Functions that host and device share."""
    text = "\n".join(file.read_text() for file in sorted(CORE.rglob("*.h")))
    return set(re.findall(r"DYNEMB_HD\s+[\w:<>]+\s+(\w+)\(", text))


@pytest.mark.long
def test_what_kernels_share_with_the_cpu_runs_in_cpu_tests() -> None:
    """What is of the GPU alone is run by the emulator's tests.

    That is placement by claims, error words, and homes of rows beneath a cache in HBM.
    """
    of_cpu = [*(ROOT / "csrc" / "cpu").rglob("*.*"), *(ROOT / "csrc" / "arguments").rglob("*.*")]
    cpu = "\n".join(file.read_text() for file in sorted(of_cpu))
    core = "\n".join(file.read_text() for file in sorted(CORE.rglob("*.h")))

    def calls(text: str, name: str) -> int:
        return len(re.findall(rf"\b{name}(?:<[\w, ]+>)?\(", text))

    of_gpu_alone = {
        name for name in core_functions() if calls(cpu, name) == 0 and calls(core, name) == 1
    }
    assert of_gpu_alone == {
        "make_claim",
        "claim_stage",
        "claim_order",
        "next_claim_probe",
        "move_order",
        "encode_error",
        "error_code",
        "error_op",
        "error_value",
        "initial_value",
        "committed_after",
        "begin_home_plan",
        "begin_portion",
        "end_home_plan",
        "home_handle",
        "in_place",
        "left_generation",
        "owner_claim",
        "place_claim",
        "returned_generation",
    }
