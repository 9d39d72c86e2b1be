"""Compiles the C++ peers, once for each state of sources, headers and flags.

``python benchmarks/peers/build.py`` compiles the sources beside it and prints the library's path.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
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
    """Return the compiler's command line: the library's own flags, and this machine's instructions.

    The library picks its kernels by what the processor has, at run time; ``-march=native`` gives
    the peers the same.

    Raises:
        MissingPackageError: a system package is missing.
    """
    absl_cflags, absl_libs = _absl_flags()
    return _command(SOURCES, target, absl_cflags, absl_libs)


def _command(
    sources: Sequence[Path], target: Path, cflags: Sequence[str], libs: Sequence[str]
) -> list[str]:
    includes = [f for path in cpp_extension.include_paths() for f in ("-isystem", path)]
    flags = [*_setup_module().CXX_FLAGS, "-march=native", "-fPIC", "-shared", "-pthread"]
    compiler = os.environ.get("CXX", "c++")
    files = [str(source) for source in sources]
    return [compiler, *flags, *includes, *cflags, *files, "-o", str(target), *libs]


def build() -> Path:
    """Compile the peers unless that was done before.

    Returns:
        Path of the shared library.

    Raises:
        MissingPackageError: a system package is missing.
        RuntimeError: the compiler failed.
    """
    return _build("peers", SOURCES, compile_command)


def build_rocksdb() -> Path:
    """Compile the peer that keeps rows in RocksDB unless that was done before.

    Returns:
        Path of the shared library.

    Raises:
        MissingPackageError: RocksDB is not installed.
        RuntimeError: the compiler failed.
    """
    if not has_rocksdb():
        raise MissingPackageError(
            "librocksdb.so or its headers, a peer of tables in files, are not installed. Install "
            "them: apt-get install librocksdb-dev"
        )
    return _build_folder("rocksdb", [], ["-lrocksdb"])


def build_alone(name: str) -> Path:
    """Compile a folder beside this file, which needs no package, unless that was done before.

    Args:
        name: of the folder: ``"evicting"``, ``"index"``, ``"initial"`` or ``"ragged"``.

    Returns:
        Path of the shared library.

    Raises:
        RuntimeError: the compiler failed.
    """
    return _build_folder(name, [f"-I{ROOT / 'csrc'}"], [])


def build_calls() -> Path:
    """Compile kernels that do nothing, which needs no package, unless that was done before.

    Returns:
        Path of the shared library.

    Raises:
        RuntimeError: the compiler failed.
    """
    abi = f"-DTORCH_TARGET_VERSION={_setup_module().STABLE_ABI_TORCH}"
    torch = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-ltorch_cpu"]
    return _build_folder("calls", [abi], torch)


def has_rocksdb() -> bool:
    """Return whether RocksDB is installed with its headers."""
    header = "#include <rocksdb/db.h>\n"
    compiler = os.environ.get("CXX", "c++")
    command = [compiler, "-x", "c++", "-std=c++17", "-fsyntax-only", "-"]
    tried = subprocess.run(command, input=header, check=False, capture_output=True, text=True)
    return tried.returncode == 0


def _build_folder(name: str, cflags: Sequence[str], libs: Sequence[str]) -> Path:
    sources = sorted((HERE / name).glob("*.cpp"))
    return _build(name, sources, lambda target: _command(sources, target, cflags, libs))


def _build(name: str, sources: Sequence[Path], command_of: Callable[[Path], list[str]]) -> Path:
    directory = ROOT / "build" / "peers"
    key = hashlib.sha256(repr(command_of(directory / f"{name}.so")).encode())
    headers = sorted({header for source in sources for header in source.parent.glob("*.h")})
    headers += sorted((ROOT / "csrc" / "core").rglob("*.h"))  # of those, initial/ has its formulas
    for file in (*sources, *headers):
        key.update(file.read_bytes())
    key.update(Path("/proc/cpuinfo").read_bytes().split(b"\n\n")[0].split(b"cpu MHz")[0])
    library = directory / f"{name}-{key.hexdigest()[:16]}.so"
    if library.is_file():
        return library
    directory.mkdir(parents=True, exist_ok=True)
    unfinished = library.with_suffix(f".{os.getpid()}")
    result = subprocess.run(command_of(unfinished), check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise RuntimeError(f"the C++ peers do not compile:\n{result.stderr}")
    for old in directory.glob(f"{name}-*.so"):
        old.unlink()
    unfinished.replace(library)
    return library


if __name__ == "__main__":
    print(build())
