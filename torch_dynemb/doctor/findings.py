"""Findings: consequences of a machine's facts for the library, with remedies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

from torch_dynemb.console.lines import in_bytes
from torch_dynemb.doctor.facts import Facts

Level = Literal["ok", "note", "problem"]

_OLDEST_TORCH = (2, 11)
_TORCHREC = ((1, 6, 1), (1, 9, 2))  # the oldest and newest that are tested
_OLDEST_GPU = 80
_LITTLE_MEMORY = 1 << 30
_FEW_MAPPINGS = 65530  # Linux's default
_INSTRUCTIONS = ("baseline", "x86-64-v3 (AVX2)", "x86-64-v4 (AVX-512)")


class Finding(NamedTuple):
    """Consequence of a fact.

    Attributes:
        level: ``"ok"``; ``"note"``: works, but could be better; ``"problem"``: keeps the library
            from working.
        what: subject.
        value: the fact.
        remedy: a sentence with the remedy; empty: no action is needed.
    """

    level: Level
    what: str
    value: str
    remedy: str = ""


def findings(facts: Facts) -> list[Finding]:
    """Return the findings for these facts, in the order of the report.

    Args:
        facts: of a machine.
    """
    return [
        *_versions(facts),
        *_devices(facts),
        *_memory(facts),
        *_processor(facts),
        _files(facts),
        _training(facts),
    ]


def _versions(facts: Facts) -> Iterator[Finding]:
    cuda = ", CUDA kernels for " + _names(facts.built.cuda_architectures)
    kernels = cuda if facts.built.cuda else ", without CUDA kernels"
    yield Finding("ok", "torch_dynemb", f"{facts.version}, by {facts.built.compiler}{kernels}")
    builds = "installed: building the library again takes seconds"
    if not facts.ccache:
        builds = "not installed: each build of the library takes three minutes on two cores"
    yield Finding("ok", "ccache", builds)
    yield Finding("ok", "python", facts.python)
    built_for = "without CUDA" if facts.torch_cuda is None else f"for CUDA {facts.torch_cuda}"
    is_old = _numbers(facts.torch) < _OLDEST_TORCH
    oldest = ".".join(map(str, _OLDEST_TORCH))
    yield Finding(
        "problem" if is_old else "ok",
        "torch",
        f"{facts.torch}, {built_for}",
        f"Install torch {oldest} or newer." if is_old else "",
    )
    yield _torchrec(facts)
    needs_fbgemm = facts.torchrec is not None and facts.fbgemm is None
    yield Finding(
        "note" if needs_fbgemm else "ok",
        "fbgemm",
        facts.fbgemm or "not installed",
        "TorchRec needs fbgemm-gpu, or fbgemm-gpu-cpu where torch has no CUDA: install the one "
        "that was made for this torch."
        if needs_fbgemm
        else "",
    )
    yield Finding("ok", "system", f"{facts.system}, {facts.machine}")
    yield Finding("ok", "glibc", facts.glibc or "another C library")


def _torchrec(facts: Facts) -> Finding:
    if facts.torchrec is None:
        return Finding("ok", "torchrec", "not installed; torch_dynemb.torchrec needs it")
    oldest, newest = _TORCHREC
    if oldest <= _numbers(facts.torchrec) <= newest:
        return Finding("ok", "torchrec", facts.torchrec)
    versions = " to ".join(".".join(map(str, version)) for version in _TORCHREC)
    remedy = f"It is tested with {versions}: install one of these if something fails."
    return Finding("note", "torchrec", facts.torchrec, remedy)


def _devices(facts: Facts) -> Iterator[Finding]:
    if not facts.gpus:
        yield Finding("ok", "GPU", "none that torch sees: tables are on the CPU")
    for number, gpu in enumerate(facts.gpus):
        value = f"{gpu.name}, sm_{gpu.capability}, {in_bytes(gpu.bytes)}"
        architectures = facts.built.cuda_architectures
        remedy = ""
        if not facts.built.cuda:
            remedy = (
                "Build the library with DYNEMB_CUDA=1 where nvcc is on PATH: it has no CUDA "
                "kernels, so tables on this GPU are refused."
            )
        elif gpu.capability < _OLDEST_GPU:
            remedy = f"Use a GPU of sm_{_OLDEST_GPU} or later: the kernels are not for this one."
        elif architectures and gpu.capability < min(architectures):
            remedy = (
                f"Build the library with TORCH_CUDA_ARCH_LIST={gpu.capability / 10}: its kernels "
                f"are for {_names(architectures)}."
            )
        yield Finding("problem" if remedy else "ok", f"GPU {number}", value, remedy)


def _memory(facts: Facts) -> Iterator[Finding]:
    is_little = facts.available_memory < _LITTLE_MEMORY
    yield Finding(
        "note" if is_little else "ok",
        "memory",
        f"{in_bytes(facts.available_memory)} free of {in_bytes(facts.memory)}",
        "Free some memory: a table that needs more than is left raises." if is_little else "",
    )
    limit = facts.cgroup_limit
    if limit is None or limit >= facts.memory:
        yield Finding("ok", "control group", "no limit on memory")
    elif limit < facts.available_memory:
        remedy = (
            "Give tables a capacity or a memory_budget below it: it is a limit of a group that the "
            "library does not look at, and the process is killed where it takes more."
        )
        yield Finding("note", "control group", f"{in_bytes(limit)} of memory", remedy)
    else:
        yield Finding("ok", "control group", f"{in_bytes(limit)} of memory")
    if facts.huge_pages in ("always", "madvise"):
        yield Finding("ok", "huge pages", facts.huge_pages)
    else:
        yield Finding(
            "note",
            "huge pages",
            facts.huge_pages or "not in this kernel",
            "Allow them for faster lookups in large tables: echo madvise > "
            "/sys/kernel/mm/transparent_hugepage/enabled.",
        )
    strict = facts.overcommit == 2
    yield Finding(
        "note" if strict else "ok",
        "overcommit",
        "unknown" if facts.overcommit is None else str(facts.overcommit),
        "Set vm.overcommit_memory to 0 or 1: tables reserve more addresses than they use, and 2 "
        "counts these as memory."
        if strict
        else "",
    )
    for about in facts.address_limits:
        yield Finding(
            "note",
            "address space",
            f"{about.name} leaves {in_bytes(about.left)}",
            f"Tables reserve addresses for as many rows as memory holds: {about.remedy}, or give "
            "them a max_rows.",
        )
    if not facts.address_limits:
        yield Finding("ok", "address space", "no limit")
    yield _mappings(facts)


def _mappings(facts: Facts) -> Finding:
    most = facts.most_mappings
    value = f"{facts.mappings} in use" if most is None else f"{facts.mappings} in use of {most}"
    if most is None or (most >= _FEW_MAPPINGS and facts.mappings < most // 2):
        return Finding("ok", "memory mappings", value)
    remedy = "Raise vm.max_map_count (sysctl vm.max_map_count=262144): every table needs several."
    return Finding("note", "memory mappings", value, remedy)


def _processor(facts: Facts) -> Iterator[Finding]:
    x86 = facts.machine in ("x86_64", "AMD64")
    slow = x86 and facts.simd_level == 0
    yield Finding(
        "note" if slow else "ok",
        "instruction set",
        _INSTRUCTIONS[facts.simd_level],
        "Expect slower kernels: this processor has no AVX2, or a virtual machine hides it."
        if slow
        else "",
    )
    value = f"{facts.threads} of torch on {facts.cpus} processors"
    if facts.threads > facts.cpus:
        remedy = (
            f"Set OMP_NUM_THREADS or torch.set_num_threads to {facts.cpus} at most: more threads "
            "wait for each other."
        )
        yield Finding("note", "threads", value, remedy)
    elif facts.threads < facts.cpus // 2:
        remedy = (
            "Call torch.set_num_threads, or unset OMP_NUM_THREADS, to use more processors in a "
            "process that has them for itself."
        )
        yield Finding("note", "threads", value, remedy)
    else:
        yield Finding("ok", "threads", value)


def _files(facts: Facts) -> Finding:
    what = "io_uring"
    if facts.io_uring_error:
        return Finding("problem", what, facts.io_uring_error, "Mend what the kernel complains of.")
    if facts.io_uring:
        return Finding("ok", what, "compiled in, and the kernel allows it")
    if not facts.built.liburing:
        remedy = (
            "Install liburing-dev and build the library again if tables are to lie on an SSD: "
            "threads read their files until then, with more time of the processor."
        )
        return Finding("note", what, "not compiled in", remedy)
    if facts.io_uring_disabled:
        remedy = "Set kernel.io_uring_disabled to 0 if tables are to lie on an SSD."
        value = f"refused: kernel.io_uring_disabled is {facts.io_uring_disabled}"
        return Finding("note", what, value, remedy)
    remedy = (
        "Allow io_uring in the seccomp profile of the container if tables are to lie on an SSD, "
        "and use Linux 5.6 or newer."
    )
    return Finding("note", what, "compiled in, but the kernel refuses it", remedy)


def _training(facts: Facts) -> Finding:
    if not facts.failure:
        return Finding("ok", "a small table", "trains")
    remedy = "Mend what the message says: no table can be trained here."
    return Finding("problem", "a small table", facts.failure, remedy)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    found = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()


def _names(architectures: tuple[int, ...]) -> str:
    names = ", ".join(f"sm_{number}" for number in architectures)
    return names or "what TORCH_CUDA_ARCH_LIST named"


__all__ = ["Finding", "Level", "findings"]
