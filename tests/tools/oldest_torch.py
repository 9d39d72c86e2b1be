"""Checks the library against the oldest torch that it supports, which is not the one of ``.venv``.

The wheel of that torch is installed once, into a cache outside of the repository. Then

* every C++ source, and the host side of every CUDA source, is checked against its headers, which
  lack what later ones have (the emulator's headers declare the CUDA runtime: no nvcc is needed);
* the compiled library is loaded into it, and some of the tests run there. Where pip finds the wheel
  but not what it depends on, this is left out, and the last line says so.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ROOT / "csrc"
EMULATOR_HEADERS = ROOT / "tests" / "emulator" / "include"
CUDA_DECLARATIONS = Path(__file__).with_name("host_of_cuda.h")
TENSOR_HEADER = "torch/csrc/stable/tensor.h"  # half of the time of checking a source
# of each kind a little: ops, modules, torch.compile, torch.export
TESTS = ["tests/ops/test_lookup.py", "tests/nn/test_modules.py", "tests/serving/test_freeze.py"]


def pip_install(target: Path, *arguments: str) -> bool:
    """Installs packages into a directory, which is there afterwards only if all went well."""
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    command += ["--target", str(unfinished), *arguments]
    print(f"installing {' '.join(arguments)} into {target}", flush=True)
    if subprocess.run(command, check=False).returncode != 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        return False
    unfinished.rename(target)
    return True


def installed_torch(version: str, cache: Path) -> tuple[Path, bool]:
    """The directory of a torch that has at least its headers, and whether it can be imported.

    Raises:
        SystemExit: pip cannot install it.
    """
    cache.mkdir(parents=True, exist_ok=True)
    name = f"torch-{version}-python{sys.version_info[0]}.{sys.version_info[1]}"
    whole, headers = cache / name, cache / f"{name}-headers"
    if whole.is_dir() or pip_install(whole, f"torch=={version}", "numpy"):
        return whole, True
    if headers.is_dir() or pip_install(headers, "--no-deps", f"torch=={version}"):
        return headers, False
    raise SystemExit(f"pip cannot install torch {version}: the headers cannot be checked")


@cache
def headers_of(file: Path) -> frozenset[str]:
    """Names in angle brackets that a file of ours includes, also through other files of ours."""
    text = file.read_text()
    found = set(re.findall(r"^#include <([^>]+)>", text, re.MULTILINE))
    for name in re.findall(r'^#include "([^"]+)"', text, re.MULTILINE):
        if (SOURCES / name).is_file():
            found |= headers_of(SOURCES / name)
    return frozenset(found)


def check_syntax(source: Path, flags: list[str], *more: str) -> str:
    """Returns what the compiler says of a source; "" if it is right."""
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-w", "-std=c++17", *flags, *more]
    reply = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
    return reply.stderr if reply.returncode != 0 else ""


def syntax_error(source: Path, flags: list[str], compiled: Path) -> str:
    """Checks one source.

    Args:
        flags: of the compiler, for this kind of source.
        compiled: has TENSOR_HEADER, compiled.

    Returns:
        What the compiler says; "" if the source is right.
    """
    # only where it is included anyway: other sources must not see what it declares
    first = ["-include", str(compiled)] if TENSOR_HEADER in headers_of(source) else []
    return check_syntax(source, [*first, *flags], "-fsyntax-only", "-x", "c++")


def wrong_sources(torch_directory: Path) -> list[str]:
    """The compiler's errors, by source, with the headers of a torch."""
    from setup import STABLE_ABI_TORCH

    include = torch_directory / "torch" / "include"
    flags = [f"-DTORCH_TARGET_VERSION={STABLE_ABI_TORCH}", f"-I{SOURCES}"]
    flags += ["-isystem", str(include), "-isystem", str(include / "torch/csrc/api/include")]
    cuda = ["-DUSE_CUDA", f"-I{EMULATOR_HEADERS}", "-include", str(CUDA_DECLARATIONS)]
    flags_of = {".cpp": flags, ".cu": [*cuda, *flags]}
    sources = sorted([*SOURCES.rglob("*.cpp"), *SOURCES.rglob("*.cu")])
    with (
        tempfile.TemporaryDirectory() as folder,
        ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool,
    ):
        compiled = {}
        for kind, of_kind in flags_of.items():
            header = Path(folder, f"{kind[1:]}.h")
            header.write_text(f"#include <{TENSOR_HEADER}>\n")
            more = ["-x", "c++-header", "-o", f"{header}.gch"]
            if error := check_syntax(header, of_kind, *more):
                return [error]
            compiled[kind] = header
        said = pool.map(lambda s: syntax_error(s, flags_of[s.suffix], compiled[s.suffix]), sources)
        found = [error for error in said if error]
    print(f"{len(sources)} sources, {len(found)} with errors", flush=True)
    return found


def run_tests(version: str, torch_directory: Path) -> int:
    """Runs some of the tests in the other torch."""
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(torch_directory), str(ROOT)])}
    python = [sys.executable, "-c", "import torch; print(torch.__version__.split('+')[0])"]
    found = subprocess.run(python, env=environ, capture_output=True, text=True, check=False)
    if found.stdout.strip() != version:
        raise SystemExit(f"torch {version} does not import: {found.stdout}{found.stderr}")
    command = [sys.executable, "-m", "pytest", *TESTS, "-q", "-p", "no:cacheprovider"]
    return subprocess.run(command, env=environ, cwd=ROOT, check=False).returncode


def main() -> None:
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("version", help="of torch, such as 2.11.0")
    arguments.add_argument(
        "--cache", type=Path, required=True, help="directory for the torch, of about 5 GB"
    )
    options = arguments.parse_args()
    sys.path.insert(0, str(ROOT))
    directory, importable = installed_torch(options.version, options.cache)
    errors = wrong_sources(directory)
    if errors:
        raise SystemExit("\n".join(errors))
    if not importable:
        print(
            f"WARNING: THE LIBRARY WAS NOT LOADED INTO TORCH {options.version}: pip could not "
            "install what it depends on. Its headers were checked."
        )
        return
    if run_tests(options.version, directory) != 0:
        raise SystemExit(f"tests fail in torch {options.version}")


if __name__ == "__main__":
    main()
