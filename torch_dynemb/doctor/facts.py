"""Facts of this machine that concern the library."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import PurePosixPath
from typing import NamedTuple, TypeVar

import torch

from torch_dynemb import ops
from torch_dynemb._version import __version__
from torch_dynemb.nn.embedding import DynamicEmbedding
from torch_dynemb.ops.block_reads import IoPath, store_io_paths
from torch_dynemb.ops.build import CompiledWith, compiled_with
from torch_dynemb.optim import SGD
from torch_dynemb.storage.address_space import AddressLimit, address_limits, read_text

_CGROUPS = "/sys/fs/cgroup"
Result = TypeVar("Result")


class Gpu(NamedTuple):
    """A GPU that torch sees.

    Attributes:
        name: of the device.
        capability: compute capability, such as 90 for sm_90.
        bytes: of its memory.
    """

    name: str
    capability: int
    bytes: int


@dataclass(frozen=True)
class Facts:
    """Facts of this machine.

    Attributes:
        version: of this library.
        python: version.
        torch: version.
        torch_cuda: the CUDA version of torch's build; None: a build without CUDA.
        torchrec: version; None: it is not installed.
        fbgemm: version; None: it is not installed.
        glibc: version; empty: another C library.
        system: kernel and its version.
        machine: architecture of the processor.
        built: options of the library's build.
        ccache: whether it is installed.
        simd_level: instruction set of the kernels, see :func:`torch_dynemb.ops.simd_level`.
        gpus: GPUs that torch sees.
        huge_pages: the kernel's mode of transparent huge pages; empty: not supported.
        overcommit: ``vm.overcommit_memory``; None: it cannot be read.
        address_limits: of the process.
        mappings: number of the process's memory mappings.
        most_mappings: ``vm.max_map_count``; None: it cannot be read.
        memory: bytes of the machine.
        available_memory: bytes that are available.
        cgroup_limit: memory limit of the process's control group, in bytes; None: no limit.
        io_uring: whether the library has it and the kernel allows it.
        io_uring_error: the kernel's error instead of an answer; empty: no error.
        io_uring_disabled: ``kernel.io_uring_disabled``; None: it cannot be read.
        threads: of torch.
        cpus: that the process may run on.
        failure: error of training a small table; empty: success.
    """

    version: str
    python: str
    torch: str
    torch_cuda: str | None
    torchrec: str | None
    fbgemm: str | None
    glibc: str
    system: str
    machine: str
    built: CompiledWith
    ccache: bool
    simd_level: int
    gpus: tuple[Gpu, ...]
    huge_pages: str
    overcommit: int | None
    address_limits: tuple[AddressLimit, ...]
    mappings: int
    most_mappings: int | None
    memory: int
    available_memory: int
    cgroup_limit: int | None
    io_uring: bool
    io_uring_error: str
    io_uring_disabled: int | None
    threads: int
    cpus: int
    failure: str


def gather() -> Facts:
    """Gather the facts of this machine. Its only test trains a table of a few rows on the CPU."""
    paths, io_uring_error = _tried(store_io_paths, [IoPath.THREADS])
    _, failure = _tried(_train, None)
    return Facts(
        version=__version__,
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        torchrec=_version("torchrec"),
        fbgemm=_version("fbgemm-gpu") or _version("fbgemm-gpu-cpu"),
        glibc=" ".join(platform.libc_ver()[1:]) if platform.libc_ver()[0] == "glibc" else "",
        system=f"{platform.system()} {platform.release()}",
        machine=platform.machine(),
        built=compiled_with(),
        ccache=shutil.which("ccache") is not None,
        simd_level=ops.simd_level(),
        gpus=_gpus(),
        huge_pages=chosen(read_text("/sys/kernel/mm/transparent_hugepage/enabled")),
        overcommit=_number("/proc/sys/vm/overcommit_memory"),
        address_limits=tuple(address_limits()),
        mappings=read_text("/proc/self/maps").count("\n"),
        most_mappings=_number("/proc/sys/vm/max_map_count"),
        memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        available_memory=ops.available_memory(),
        cgroup_limit=cgroup_limit(read_text("/proc/self/cgroup"), read_text),
        io_uring=IoPath.URING in paths,
        io_uring_error=io_uring_error,
        io_uring_disabled=_number("/proc/sys/kernel/io_uring_disabled"),
        threads=torch.get_num_threads(),
        cpus=len(os.sched_getaffinity(0)),
        failure=failure,
    )


def chosen(choices: str) -> str:
    """Return the word in brackets in a kernel file of choices; empty: no such word.

    Args:
        choices: such as ``"always [madvise] never"``.
    """
    found = re.search(r"\[(\w+)\]", choices)
    return found[1] if found else ""


def cgroup_limit(groups: str, read: Callable[[str], str]) -> int | None:
    """Return the memory limit of a process's control groups and their parents, in bytes.

    Args:
        groups: content of ``/proc/self/cgroup``.
        read: returns the text of a file, empty for a missing file.

    Returns:
        The smallest limit; None: no limit.
    """
    limits = []
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, name = _CGROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            root, name = f"{_CGROUPS}/memory", "memory.limit_in_bytes"
        else:
            continue
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            text = read(f"{root}{folder}/{name}".replace("//", "/")).strip()
            if (
                text.isdigit() and int(text) < 1 << 62
            ):  # version 1 writes a huge number without a limit
                limits.append(int(text))
    return min(limits, default=None)


def _tried(function: Callable[[], Result], otherwise: Result) -> tuple[Result, str]:
    """Call a function; return its result and an empty text, or ``otherwise`` and the error."""
    try:
        return function(), ""
    except Exception as error:  # any error is a finding
        return otherwise, f"{type(error).__name__}: {error}"


def _train() -> None:
    table = DynamicEmbedding(4, optimizer=SGD(lr=0.5), device="cpu")
    ids = torch.tensor([3, -7, 3], device="cpu")
    before = table(ids)
    before.sum().backward()
    table.optimizer.step()
    moved = before.detach() - table(ids).detach()
    expected = torch.tensor([1.0, 0.5, 1.0], device="cpu").unsqueeze(1).expand(3, 4)
    if not torch.allclose(moved, expected, atol=1e-5):
        raise RuntimeError(
            f"a step of SGD moved the rows by {moved[:, 0].tolist()}, expected "
            f"{expected[:, 0].tolist()}: build the library anew"
        )


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _number(path: str) -> int | None:
    text = read_text(path).strip()
    return int(text) if text.isdigit() else None


def _gpus() -> tuple[Gpu, ...]:
    if not torch.cuda.is_available():
        return ()
    found = []
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        found.append(Gpu(about.name, 10 * about.major + about.minor, about.total_memory))
    return tuple(found)


__all__ = ["Facts", "Gpu", "cgroup_limit", "chosen", "gather"]
