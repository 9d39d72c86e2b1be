"""Compiles the C++ peers into one shared library, once for each state of sources and flags.

``python benchmarks/peers/build.py`` builds it and prints its path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

from torch.utils import cpp_extension

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SOURCES = sorted(HERE.glob("*.cpp"))
ABSL = "absl_flat_hash_map"  # pkg-config's name for absl::flat_hash_map


class MissingPackageError(SystemExit):
    """A package that a peer needs is not installed; a program that lacks it ends and says so."""


def _setup_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dynemb_setup", ROOT / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _absl_flags() -> tuple[list[str], list[str]]:
    if shutil.which("pkg-config") is None:
        raise MissingPackageError(
            "pkg-config is not on PATH, and finds absl::flat_hash_map, a peer of the index. "
            "Install it: apt-get install pkg-config libabsl-dev"
        )
    found = subprocess.run(["pkg-config", "--exists", ABSL], check=False)
    if found.returncode != 0:
        raise MissingPackageError(
            f"pkg-config does not know {ABSL}: absl::flat_hash_map, a peer of the index, is not "
            "installed. Install it: apt-get install libabsl-dev"
        )
    parts = (["pkg-config", part, ABSL] for part in ("--cflags", "--libs"))
    replies = (subprocess.run(p, check=True, capture_output=True, text=True) for p in parts)
    cflags, libs = (shlex.split(reply.stdout) for reply in replies)
    return cflags, libs


def compile_command(target: Path) -> list[str]:
    """The compiler's command line: the library's own flags, and this machine's instructions.

    The library picks its kernels by what the processor has, at run time; ``-march=native`` gives
    the peers the same.

    Raises:
        MissingPackageError: a system package is missing.
    """
    absl_cflags, absl_libs = _absl_flags()
    includes = [f for path in cpp_extension.include_paths() for f in ("-isystem", path)]
    flags = [*_setup_module().CXX_FLAGS, "-march=native", "-fPIC", "-shared", "-pthread"]
    compiler = os.environ.get("CXX", "c++")
    sources = [str(source) for source in SOURCES]
    return [compiler, *flags, *includes, *absl_cflags, *sources, "-o", str(target), *absl_libs]


def build() -> Path:
    """Compiles the peers unless that was done before.

    Returns:
        Path of the shared library.

    Raises:
        MissingPackageError: a system package is missing.
        RuntimeError: the compiler failed.
    """
    directory = ROOT / "build" / "peers"
    command = compile_command(directory / "peers.so")
    key = hashlib.sha256(repr(command).encode())
    for source in SOURCES:
        key.update(source.read_bytes())
    key.update(Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].split(b"cpu MHz")[0])
    library = directory / f"peers-{key.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    result = subprocess.run(
        compile_command(unfinished), check=False, capture_output=True, text=True
    )
    if result.returncode != 0:
        raise RuntimeError(f"the C++ peers do not compile:\n{result.stderr}")
    for old in directory.glob("peers-*.so"):
        old.unlink()
    unfinished.replace(library)
    return library


if __name__ == "__main__":
    print(build())
