"""The compiled library for this machine's GPU: the one that was brought along, or a new build."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu.part import FAILED, NOT_RUN, PASSED, ROOT, Outcome, Part

LIBRARY = ROOT / "torch_dynemb" / "_C.abi3.so"
BUILT = ROOT / "build" / "gpu-check" / "built.json"
BUILD = ("setup.py", "build_ext", "--inplace", "--force")
BUILD_SECONDS = 420.0
TRY_SECONDS = 40.0
# Trains a row on the GPU, so that a library for other architectures fails.
TRY = """
import torch
import torch_dynemb as td
from torch_dynemb import ops
assert ops.has_cuda_kernels(), "the library was built without CUDA kernels"
module = td.DynamicEmbeddingBag(8, optimizer=td.SGD(lr=1.0), mode="sum", device="cuda")
ids = torch.arange(100, device="cuda").reshape(50, 2)
before = module(ids).detach()
module(ids).sum().backward()
module.optimizer.step()
torch.cuda.synchronize()
ops.raise_device_errors(torch.cuda.current_device())
torch.testing.assert_close(module(ids).detach(), before - 2.0)
print("a training step on", torch.cuda.get_device_name())
"""


def digest(*paths: Path) -> str:
    """Return SHA-256 of files, names included."""
    whole = hashlib.sha256()
    for path in sorted(paths):
        whole.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()


def source_digest() -> str:
    """Return the hash of the library's sources."""
    sources = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".cpp", ".cu")]
    headers = [path for path in (ROOT / "csrc").rglob("*") if path.suffix in (".h", ".cuh")]
    return digest(ROOT / "setup.py", *sources, *headers)


def is_stale(library: Path, note: Path) -> bool:
    """Return whether an earlier gpu-check built this library here from other sources.

    Of a library that came from elsewhere nothing is known.
    """
    if not note.is_file():
        return False
    built = json.loads(note.read_text())
    return built["library"] == digest(library) and built["sources"] != source_digest()


def provide(part: Part, machine: dict[str, Any], cuda_root: Path | None, *, rebuild: bool) -> bool:
    """Take the library that is there if it works on this GPU, else build one.

    Args:
        part: that the steps are recorded in.
        machine: ``capability`` of the GPU.
        cuda_root: the toolkit, if there is one.
        rebuild: build in any case.

    Returns:
        Whether there is a library that works now.
    """
    attempt = [sys.executable, "-c", TRY]
    if rebuild:
        why = "--rebuild was given"
    elif not LIBRARY.is_file():
        why = f"{LIBRARY.relative_to(ROOT)} is missing"
    elif is_stale(LIBRARY, BUILT):
        why = "sources have changed since the library was built here"
    else:
        found = part.run("library found", attempt, seconds=TRY_SECONDS)
        if found.result == PASSED:
            part.record("library", Outcome(PASSED, "the one that was there is taken: it works"))
            return True
        why = f"the library that is there does not work: {found.reason}"
        # it is replaced, so the part has not failed
        part.record("library found", Outcome(NOT_RUN, found.reason))
    if cuda_root is None:
        reason = "no nvcc in CUDA_HOME, on PATH or in /usr/local/cuda: install the CUDA toolkit"
        part.record("library", Outcome(FAILED, f"{why}; {reason}"))
        return False
    built = part.run(
        "build",
        [sys.executable, *BUILD],
        seconds=BUILD_SECONDS,
        extra={
            "DYNEMB_CUDA": "1",
            "TORCH_CUDA_ARCH_LIST": machine["capability"],
            "MAX_JOBS": str(len(os.sched_getaffinity(0))),
            "CUDA_HOME": str(cuda_root),
        },
    )
    if built.result == PASSED:
        built = part.run("library built", attempt, seconds=TRY_SECONDS)
    if built.result != PASSED:
        part.record("library", Outcome(FAILED, f"built because {why}; {built.reason}"))
        return False
    BUILT.write_text(json.dumps({"library": digest(LIBRARY), "sources": source_digest()}))
    part.record("library", Outcome(PASSED, f"built for {machine['capability']} because {why}"))
    return True
