"""Wheels: their labels, the tag of the systems that they run on, and whether they work elsewhere.

  wheels.py label cuda                          # cu130: what follows the version of such a wheel
  wheels.py repair build/wheel-cpu/*.whl dist   # as manylinux, with the lowest tag that fits
  wheels.py check dist/*.whl --torch 2.11.0 --cache DIRECTORY

``check`` makes an environment with that torch and nothing else for each wheel, installs it there,
runs the README's first example in a directory without the sources, and has a compiler read the C++
headers of a CPU wheel.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

from oldest_torch import installed_torch

ROOT = Path(__file__).resolve().parent.parent.parent
VARIANTS = ("cpu", "cuda")
# The process has loaded them with torch, which the wheel finds there.
OF_TORCH = ("libtorch*", "libc10*")
PROGRAM = """
import torch_dynemb
from torch_dynemb import ops
print(torch_dynemb.__file__)
print("CUDA kernels" if ops.has_cuda_kernels() else "no CUDA kernels")
"""

FLAGS = """
import json
from torch_dynemb import serving
print(json.dumps(serving.cpp_flags().compile))
"""
CPP_PROGRAM = """
#include "serving/model.h"
#include "serving/versioned_model.h"
"""


def cuda_release(nvcc: Path) -> str:
    """Such as ``cu130``."""
    reply = subprocess.run([str(nvcc), "--version"], capture_output=True, text=True, check=True)
    release = re.search(r"release (\d+)\.(\d+)", reply.stdout)
    if release is None:
        raise SystemExit(f"{nvcc} --version names no release: {reply.stdout}")
    return f"cu{release[1]}{release[2]}"


def label(variant: str) -> str:
    """What follows the version of a wheel.

    Raises:
        SystemExit: the CUDA toolkit for the kernels is missing.
    """
    if variant == "cpu":
        return "cpu"
    sys.path.insert(0, str(ROOT))
    import setup

    root = setup.wanted_cuda_root({**os.environ, "DYNEMB_CUDA": "1"}, None)
    return cuda_release(Path(root) / "bin" / "nvcc")


def repair(wheel: Path, directory: Path) -> None:
    """Writes the wheel with the tag of the oldest systems on which its symbols exist."""
    command = [sys.executable, "-m", "auditwheel", "repair", "--wheel-dir", str(directory)]
    for name in OF_TORCH:
        command += ["--exclude", name]
    reply = subprocess.run([*command, str(wheel)], capture_output=True, text=True, check=False)
    if reply.returncode != 0:
        raise SystemExit(f"auditwheel repair {wheel}: {reply.stdout}{reply.stderr}")


def environment(directory: Path, torch: Path) -> Path:
    """The Python of a fresh environment that has this torch and nothing else."""
    venv.create(directory, with_pip=True)
    python = directory / "bin" / "python"
    reply = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    Path(reply.stdout.strip(), "torch.pth").write_text(f"{torch}\n")
    return python


def said(python: Path, directory: Path, *arguments: str) -> str:
    """What a Python prints that sees no sources.

    Raises:
        SystemExit: it fails.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    reply = subprocess.run(
        [str(python), *arguments],
        cwd=directory,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if reply.returncode != 0:
        raise SystemExit(f"{' '.join(arguments)}: {reply.stdout}{reply.stderr}")
    return reply.stdout


def first_example() -> str:
    """The README's."""
    text = (ROOT / "README.md").read_text()
    return text.split("```python\n", 1)[1].split("```\n", 1)[0]


def check_headers(flags: list[str], directory: Path) -> None:
    """Has a compiler read what C++ programs include.

    Raises:
        SystemExit: it lacks something.
    """
    command = ["c++", "-fsyntax-only", *flags, "-x", "c++", "-"]
    reply = subprocess.run(command, input=CPP_PROGRAM, capture_output=True, text=True, check=False)
    if not any(str(directory) in flag for flag in flags) or reply.returncode != 0:
        raise SystemExit(f"headers of the wheel, {flags}: {reply.stderr}")


def check(wheel: Path, torch: Path) -> None:
    """Installs the wheel beside a torch, and runs it.

    Raises:
        SystemExit: something is wrong with it.
    """
    if "manylinux" not in wheel.name:
        raise SystemExit(f"{wheel.name} has no manylinux tag: make wheel")
    with tempfile.TemporaryDirectory() as text:
        directory = Path(text)
        python = environment(directory / "venv", torch)
        said(python, directory, "-m", "pip", "--disable-pip-version-check", "install", str(wheel))
        file, kernels = said(python, directory, "-c", PROGRAM).splitlines()
        if not Path(file).is_relative_to(directory):
            raise SystemExit(f"{wheel.name}: {file} was imported, which is not of the wheel")
        wanted = "no CUDA kernels" if "+cpu" in wheel.name else "CUDA kernels"
        if kernels != wanted:
            raise SystemExit(f"{wheel.name} has {kernels}, expected {wanted}")
        if "+cpu" in wheel.name:
            check_headers(json.loads(said(python, directory, "-c", FLAGS)), directory)
        example = said(python, directory, "-c", first_example()).strip()
        print(f"{wheel.name}: {kernels}; the example: {example}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    command = commands.add_parser("label")
    command.add_argument("variant", choices=VARIANTS)
    command = commands.add_parser("repair")
    command.add_argument("wheel", type=Path)
    command.add_argument("directory", type=Path)
    command = commands.add_parser("check")
    command.add_argument("wheels", type=Path, nargs="+")
    command.add_argument("--torch", required=True, help="version, such as 2.11.0")
    command.add_argument("--cache", type=Path, required=True, help="directory for that torch")
    options = parser.parse_args()
    if options.command == "label":
        print(label(options.variant))
    elif options.command == "repair":
        repair(options.wheel, options.directory)
    else:
        torch, importable = installed_torch(options.torch, options.cache)
        if not importable:
            print(
                f"WARNING: THE WHEELS WERE NOT INSTALLED: pip could not install what torch "
                f"{options.torch} depends on."
            )
            return
        for wheel in options.wheels:
            check(wheel.resolve(), torch)


if __name__ == "__main__":
    main()
