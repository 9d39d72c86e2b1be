"""Print what nvcc says of kernels: registers, spilled bytes, resident warps of a multiprocessor.

    python tests/tools/kernel_registers.py csrc/cuda/rows/lookup.cu [--kernels gather] [--sm 90]

Warps are those of blocks of 256 threads, as registers allow.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import setup  # noqa: E402

BLOCK_WARPS, MOST_WARPS, REGISTERS = 8, 64, 1 << 16  # of sm_80 to sm_100


@dataclass(frozen=True)
class Kernel:
    """A kernel as it is compiled.

    Attributes:
        name: demangled, without namespaces and arguments.
        registers: of a thread.
        spilled: bytes of stores and loads of registers that a thread spills.
    """

    name: str
    registers: int
    spilled: int

    @property
    def warps(self) -> int:
        """Resident warps of a multiprocessor."""
        of_block = 32 * BLOCK_WARPS * -(-self.registers // 8) * 8
        return min(REGISTERS // of_block * BLOCK_WARPS, MOST_WARPS)


def kernels_of(source: Path, sm: int = 90) -> list[Kernel]:
    """Compile a source for an architecture, and return its kernels.

    Raises:
        RuntimeError: nvcc is missing, or it fails.
    """
    root = setup.find_cuda_root({**os.environ, "DYNEMB_CUDA": "1"})
    if root is None:
        raise RuntimeError("no nvcc was found")
    includes = [f"-I{setup.SOURCES}"]
    includes += [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    flags = [f"-DTORCH_TARGET_VERSION={setup.STABLE_ABI_TORCH}", *setup.NVCC_FLAGS, *includes]
    with tempfile.TemporaryDirectory() as folder:
        command = [str(root / "bin" / "nvcc"), "-cubin", str(source), "-o", f"{folder}/kernels"]
        command += [*flags, f"-arch=sm_{sm}", "-Xptxas", "-v"]
        reply = subprocess.run(command, capture_output=True, text=True, check=False)
    if reply.returncode != 0:
        raise RuntimeError(f"nvcc: {reply.stderr[-2000:]}")
    names = re.findall(r"Compiling entry function '(\w+)'", reply.stderr)
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", reply.stderr)
    registers = re.findall(r"Used (\d+) registers", reply.stderr)
    demangled = subprocess.run(
        ["c++filt", *names], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    return [
        Kernel(short_name(name), int(used), int(stores) + int(loads))
        for name, used, (stores, loads) in zip(
            demangled, registers, spills[-len(names) :], strict=True
        )
    ]


def short_name(name: str) -> str:
    """Return a demangled name without result, namespaces and arguments."""
    name = re.sub(r"\(anonymous namespace\)::|dynemb::|cuda::", "", name).removeprefix("void ")
    return name.partition("(")[0].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sources", nargs="+", type=Path)
    parser.add_argument("--kernels", default="", help="regular expression; default: all")
    parser.add_argument("--sm", type=int, default=90, help="architecture (default 90)")
    options = parser.parse_args()
    print("registers  spilled  warps  kernel")
    for source in options.sources:
        for kernel in kernels_of(source, options.sm):
            if re.search(options.kernels, kernel.name):
                print(f"{kernel.registers:9} {kernel.spilled:8} {kernel.warps:6}  {kernel.name}")


if __name__ == "__main__":
    main()
