"""Builds ``torch_dynemb._C``, the library of C++ and CUDA kernels behind ``torch.ops.dynemb``.

The library uses LibTorch's stable ABI and no Python symbol, so one build serves every CPython from
3.10 and every torch from 2.11, with or without CUDA. Compiling the CUDA sources takes minutes and
is of no use where torch has no CUDA, so they are left out there; neither a GPU nor a CUDA build of
torch is needed to compile them.

Environment read here:
    ``DYNEMB_CUDA``: 1 compiles the CUDA sources on any machine, for all ARCHITECTURES; 0 leaves
        them out; unset, they are compiled where torch is a CUDA build and nvcc is found, for the
        GPUs of this machine if there are any.
    ``DYNEMB_URING``: 1 makes it an error where no static liburing is found, with which files are
        read by io_uring; 0 leaves it out, so that threads read them; unset, it is linked where it
        is found.
    ``CUDA_HOME``: where nvcc is; otherwise it is looked for on ``PATH`` and in the usual place.
    ``TORCH_CUDA_ARCH_LIST``: GPU architectures, instead of those.
    ``MAX_JOBS``: compilations at a time; default, one a core.
    ``DYNEMB_VERSION_LABEL``: what follows a "+" in the version of a wheel, such as ``cpu``.

Compilers run through ccache where it is installed; a clone in another directory finds what the
first one has compiled.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from setuptools import Extension, setup
from setuptools.command.build_py import build_py
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parent
SOURCES = ROOT / "csrc"
STABLE_ABI_TORCH = "0x020b000000000000"  # 2.11.0: the oldest torch that the library loads into
ARCHITECTURES = ["80", "90", "100"]  # A100, H100 and H200, B200
SYSTEM_CUDA = Path("/usr/local/cuda")

CXX_FLAGS = [
    "-std=c++17",
    "-O3",
    "-g0",  # Python's own flags ask for debug information
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=off",  # a fused multiply-add would change bits between SIMD levels and devices
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",  # vector types stay inside one translation unit
]
NVCC_FLAGS = [
    "-std=c++17",
    "-O3",
    "--fmad=false",  # the same reason as -ffp-contract=off
    "--expt-relaxed-constexpr",
    "-Xcompiler=-fvisibility=hidden",
    "-DUSE_CUDA",
    # torch defines these for every CUDA file; the kernels want the operators that they remove
    "-U__CUDA_NO_HALF_CONVERSIONS__",
    "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    "-U__CUDA_NO_HALF_OPERATORS__",
]


def cuda_root_of(nvcc: str) -> Path:
    """Return the toolkit directory that an nvcc belongs to.

    nvcc itself is asked, because the one on PATH may be a link or a script that runs another.

    Args:
        nvcc: path of an executable.

    Returns:
        The directory that holds ``bin/nvcc``.

    Raises:
        RuntimeError: nvcc does not run, or names a directory without ``bin/nvcc``.
    """
    command = [nvcc, "--dryrun", "-x", "cu", "-E", os.devnull]
    reply = subprocess.run(command, capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", reply.stdout + reply.stderr, re.MULTILINE)
    if top is None:
        raise RuntimeError(
            f"{' '.join(command)} should print the toolkit directory as TOP=..., but printed: "
            f"{(reply.stdout + reply.stderr).strip()!r} (exit status {reply.returncode}). "
            "Set CUDA_HOME to the directory that holds bin/nvcc, or take nvcc off PATH."
        )
    root = Path(top.group(1).strip()).resolve()
    if not (root / "bin" / "nvcc").is_file():
        raise RuntimeError(
            f"{nvcc} says that its toolkit is {root}, but {root / 'bin' / 'nvcc'} does not exist. "
            "Set CUDA_HOME to the directory that holds bin/nvcc, or take nvcc off PATH."
        )
    return root


def find_cuda_root(environ: Mapping[str, str], *, system_cuda: Path = SYSTEM_CUDA) -> Path | None:
    """Look for a CUDA toolkit in ``CUDA_HOME``, on ``PATH`` and in the system's usual place.

    Args:
        environ: environment variables.
        system_cuda: the usual place.

    Returns:
        The directory that holds ``bin/nvcc``, or None where nvcc is missing.

    Raises:
        RuntimeError: ``CUDA_HOME`` is set to a directory without ``bin/nvcc``, or the nvcc on
            ``PATH`` does not work.
    """
    if given := environ.get("CUDA_HOME"):
        root = Path(given)
        if not (root / "bin" / "nvcc").is_file():
            raise RuntimeError(
                f"CUDA_HOME={given!r} should be the directory that holds bin/nvcc, but "
                f"{root / 'bin' / 'nvcc'} does not exist. Correct CUDA_HOME, or unset it."
            )
        return root
    if nvcc := shutil.which("nvcc", path=environ.get("PATH", os.defpath)):
        return cuda_root_of(nvcc)
    if (system_cuda / "bin" / "nvcc").is_file():
        return system_cuda.resolve()
    return None


def wanted_cuda_root(environ: Mapping[str, str], torch_cuda: str | None) -> Path | None:
    """Return the toolkit to compile the CUDA sources with.

    Args:
        environ: environment variables; ``DYNEMB_CUDA`` and those of :func:`find_cuda_root`.
        torch_cuda: ``torch.version.cuda``.

    Returns:
        The directory that holds ``bin/nvcc``, or None where CUDA is not wanted, or not asked for
        and without nvcc.

    Raises:
        RuntimeError: ``DYNEMB_CUDA`` is neither 0 nor 1, or is 1 where nvcc is missing.
    """
    asked = environ.get("DYNEMB_CUDA", "")
    if asked not in ("", "0", "1"):
        raise RuntimeError(
            f"DYNEMB_CUDA={asked!r} should be 1 to compile the CUDA kernels, 0 to leave them out, "
            "or unset"
        )
    if asked == "0" or (asked == "" and torch_cuda is None):
        return None
    root = find_cuda_root(environ)
    if asked == "1" and root is None:
        raise RuntimeError(
            f"DYNEMB_CUDA=1, but nvcc is missing in CUDA_HOME, on PATH and in {SYSTEM_CUDA}. "
            "Install the CUDA toolkit, or unset DYNEMB_CUDA."
        )
    return root


def cudart_directory(cuda_root: Path) -> Path:
    """Return the directory of ``libcudart_static.a`` in a toolkit.

    Raises:
        RuntimeError: the toolkit has none.
    """
    candidates = [cuda_root / "lib64", cuda_root / "lib"]
    candidates += sorted((cuda_root / "targets").glob(f"{os.uname().machine}*/lib"))
    for directory in candidates:
        if (directory / "libcudart_static.a").is_file():
            return directory
    looked = ", ".join(str(directory) for directory in candidates)
    raise RuntimeError(
        f"{cuda_root} has nvcc but no libcudart_static.a (looked in {looked}). "
        "Install the toolkit's cudart development files, or point CUDA_HOME at a whole toolkit."
    )


def present_architectures() -> list[str]:
    """Return architectures of this machine's GPUs, such as "90"."""
    if not torch.cuda.is_available():
        return []
    found = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    return [f"{major}{minor}" for major, minor in sorted(found)]


def known_architectures(cuda_root: Path) -> list[str]:
    """Return those of :data:`ARCHITECTURES` that nvcc knows.

    Raises:
        RuntimeError: nvcc knows none of them.
    """
    command = [str(cuda_root / "bin" / "nvcc"), "--list-gpu-arch"]
    known = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    chosen = [name for name in ARCHITECTURES if f"compute_{name}" in known]
    if not chosen:
        raise RuntimeError(
            f"{command[0]} compiles for {', '.join(known)}, but the kernels need one of "
            f"{', '.join(ARCHITECTURES)}. Install CUDA 12.5 or later."
        )
    return chosen


def architecture_flags(names: Sequence[str], *, portable: bool) -> list[str]:
    """Return nvcc's flags for machine code of some architectures.

    All of it is made from one intermediate code, that of the least architecture: the kernels use
    nothing that later ones add, and compiling takes half of the time.

    Args:
        names: ascending, such as ["80", "90"].
        portable: the intermediate code goes into the library too, for architectures to come.
    """
    least = f"compute_{names[0]}"
    codes = [f"sm_{name}" for name in names] + ([least] if portable else [])
    return [
        f"-gencode=arch={least},code=[{','.join(codes)}]",
        f"-DDYNEMB_CUDA_ARCHITECTURES={'_'.join(names)}",
    ]


class Uring(NamedTuple):
    """liburing, to be linked statically.

    Attributes:
        archive: ``liburing.a``.
        headers: the directory of ``liburing.h``; None where the compiler looks there anyway.
    """

    archive: Path
    headers: Path | None


# what csrc/cpu/storage calls; a shared library, because libraries of some systems are not made of
# code that may lie at any address
URING_PROGRAM = """
#include <liburing.h>
extern "C" int try_uring() {
  io_uring ring;
  if (io_uring_queue_init(1, &ring, 0) < 0) return 1;
  io_uring_probe* probe = io_uring_get_probe_ring(&ring);
  const int has_read = probe != nullptr && io_uring_opcode_supported(probe, IORING_OP_READ);
  io_uring_free_probe(probe);
  io_uring_prep_read(io_uring_get_sqe(&ring), 0, nullptr, 0, 0);
  io_uring_submit_and_wait(&ring, 1);
  io_uring_queue_exit(&ring);
  return has_read;
}
"""


def find_uring(environ: Mapping[str, str]) -> Uring | None:
    """Look for a static liburing by pkg-config, then where the compiler looks for libraries.

    Args:
        environ: environment variables; ``CXX`` names the compiler.

    Returns:
        One with which a shared library has been linked, or None where there is none.
    """
    compiler = shlex.split(environ.get("CXX", "c++"))

    def answer(*command: str) -> str:
        if shutil.which(command[0], path=environ.get("PATH")) is None:
            return ""
        reply = subprocess.run(
            command, capture_output=True, text=True, check=False, env={**environ, "LC_ALL": "C"}
        )
        return reply.stdout.strip() if reply.returncode == 0 else ""

    found: list[Uring] = []
    if library := answer("pkg-config", "--variable=libdir", "liburing"):
        # nothing for the system's own directory, which -isystem would put in the wrong order
        headers = answer("pkg-config", "--cflags-only-I", "liburing").removeprefix("-I")
        found.append(Uring(Path(library, "liburing.a"), Path(headers) if headers else None))
    # the name itself where the compiler finds no such file
    found.append(Uring(Path(answer(*compiler, "-print-file-name=liburing.a")), None))
    for uring in found:
        if uring.archive.is_absolute() and uring.archive.is_file():
            with tempfile.TemporaryDirectory() as folder:
                source, linked = Path(folder, "try.cpp"), Path(folder, "try.so")
                source.write_text(URING_PROGRAM)
                include = [] if uring.headers is None else ["-isystem", str(uring.headers)]
                flags = ["-shared", "-fPIC", *include, "-o", str(linked)]
                answer(*compiler, *flags, str(source), str(uring.archive))
                if linked.is_file():
                    return uring
    return None


def wanted_uring(environ: Mapping[str, str]) -> Uring | None:
    """Return the liburing to link.

    Args:
        environ: environment variables; ``DYNEMB_URING`` and those of :func:`find_uring`.

    Returns:
        It, or None where it is not wanted, or not asked for and not found.

    Raises:
        RuntimeError: ``DYNEMB_URING`` is neither 0 nor 1, or is 1 where liburing is missing.
    """
    asked = environ.get("DYNEMB_URING", "")
    if asked not in ("", "0", "1"):
        raise RuntimeError(
            f"DYNEMB_URING={asked!r} should be 1 to link liburing, 0 to leave it out, or unset"
        )
    if asked == "0":
        return None
    uring = find_uring(environ)
    if asked == "1" and uring is None:
        raise RuntimeError(
            "DYNEMB_URING=1, but pkg-config and the compiler find no liburing.h with a liburing.a "
            "that can be linked into a shared library. Install it (Debian, Ubuntu: apt-get install "
            "liburing-dev), or unset DYNEMB_URING."
        )
    return uring


def relative_paths(files: Iterable[Path]) -> list[str]:
    """Return the paths from the repository's root, as setuptools wants them, in a fixed order."""
    return sorted(str(file.relative_to(ROOT)) for file in files)


def header_files() -> list[str]:
    """Return what the sources may include."""
    return relative_paths([*SOURCES.rglob("*.h"), *SOURCES.rglob("*.cuh")])


def cuda_files() -> list[str]:
    """Return the sources that nvcc compiles."""
    return relative_paths(SOURCES.rglob("*.cu"))


def kernel_library(
    cuda_root: Path | None, architectures: Sequence[str] = (), *, uring: Uring | None = None
) -> Extension:
    """Describe ``torch_dynemb._C``: C++ sources always, CUDA sources where there is a toolkit.

    Args:
        architectures: nvcc's flags for them; none: torch's, for TORCH_CUDA_ARCH_LIST.
        uring: what reads of files go through; None: threads alone.
    """
    sources = relative_paths(SOURCES.rglob("*.cpp"))
    libraries = ["c10", "torch", "torch_cpu"]
    library_dirs = cpp_extension.library_paths()
    if cuda_root is not None and (cuda_sources := cuda_files()):
        sources += cuda_sources
        libraries += ["cudart_static", "dl", "rt", "pthread"]
        library_dirs.append(str(cudart_directory(cuda_root)))
    uring_flags, uring_link = [], []
    if uring is not None:
        uring_flags = ["-DDYNEMB_HAS_URING"]
        if uring.headers is not None:
            uring_flags += ["-isystem", str(uring.headers)]
        # its functions stay inside: the process may have another version of it
        uring_link = [str(uring.archive), f"-Wl,--exclude-libs,{uring.archive.name}"]
    abi = f"-DTORCH_TARGET_VERSION={STABLE_ABI_TORCH}"
    # torch's headers are system headers to the C++ compiler: -Wall and -Wextra are about our own
    system_headers = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    return Extension(
        "torch_dynemb._C",
        sources,
        depends=header_files(),
        include_dirs=[str(SOURCES)],
        libraries=libraries,
        library_dirs=library_dirs,
        # libtorch brings in libtorch_cuda where torch has it. The linker would leave it out: in
        # torch's CPU build, which we link with, it defines nothing that we use.
        extra_link_args=["-Wl,--no-as-needed", "-ltorch", *uring_link],
        extra_compile_args={
            "cxx": [abi, *CXX_FLAGS, *uring_flags, *system_headers],
            "nvcc": [abi, *NVCC_FLAGS, *architectures, *system_headers],
        },
        language="c++",
        py_limited_api=True,
    )


def headers_of_programs(first: Sequence[str] = ("model.h", "versioned_model.h")) -> list[Path]:
    """Return the headers of C++ programs that run packages: ``first`` and what it includes."""
    found: list[Path] = []
    wanted = [SOURCES / "serving" / name for name in first]
    while wanted:
        header = wanted.pop()
        if header in found:
            continue
        found.append(header)
        names = re.findall(r'^#include "([^"]+)"', header.read_text(), re.MULTILINE)
        wanted += [SOURCES / name for name in names]
    return sorted(found)


class BuildPackage(build_py):
    """setuptools' build command for Python files; wheels get headers besides."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return  # they are read where they lie
        for header in headers_of_programs():
            copy = Path(self.build_lib, "torch_dynemb", "include", header.relative_to(SOURCES))
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(header, copy)


class BuildKernels(cpp_extension.BuildExtension):
    """torch's build command; it minds the headers of CUDA files.

    torch gives ninja which headers a ``.cu`` file includes only where torch has CUDA itself, so an
    object file older than any header is removed here first.
    """

    def finalize_options(self) -> None:
        super().finalize_options()
        # One place for object files. An editable install would have a new directory each time, and
        # compile everything again, whatever the options of setup() say.
        self.build_temp = "build/objects"

    def build_extensions(self) -> None:
        newest = max((Path(header).stat().st_mtime for header in header_files()), default=0.0)
        compiled = {source for extension in self.extensions for source in extension.sources}
        for source in compiled.intersection(cuda_files()):
            built = Path(self.build_temp, source).with_suffix(".o")
            if built.is_file() and built.stat().st_mtime < newest:
                built.unlink()
        for extension in self.extensions:
            extension.extra_compile_args["cxx"] += self.precompiled_header(extension)
        super().build_extensions()

    def precompiled_header(self, extension: Extension) -> list[str]:
        """Return flags that include csrc/precompiled.h, which takes half a second of each source.

        It is compiled where a header of the same compiler, flags and torch is missing. With ccache,
        which does not like such headers, and with other compilers than GCC, the list is empty.
        """
        compiler = shlex.split(os.environ.get("CXX", "c++"))
        question = [*compiler, "--version"]
        answer = subprocess.run(question, capture_output=True, text=True, check=False).stdout
        if shutil.which("ccache") or "Free Software Foundation" not in answer:
            return []
        header = SOURCES / "precompiled.h"
        flags = [*self.compiler.compiler_so[1:], *extension.extra_compile_args["cxx"]]
        command = [*compiler, "-x", "c++-header", *flags]
        made_of = repr((command, answer, torch.__version__, header.read_bytes()))
        folder = Path(self.build_temp, hashlib.sha256(made_of.encode()).hexdigest()[:16]).resolve()
        copy, compiled, draft = (folder / f"{header.name}{end}" for end in ("", ".gch", ".draft"))
        if not compiled.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(header, copy)
            subprocess.run([*command, str(copy), "-o", str(draft)], check=True)
            draft.rename(compiled)
        return ["-include", str(copy)]


def use_ccache(environ: MutableMapping[str, str], cuda_root: Path | None) -> None:
    """Have the compilers run through ccache where it is installed, with paths from the root on."""
    if shutil.which("ccache", path=environ.get("PATH")) is None:
        return
    environ.setdefault("CCACHE_BASEDIR", str(ROOT))
    environ.setdefault("CCACHE_NOHASHDIR", "1")
    if hasattr(cpp_extension, "_wrap_compiler"):  # torch 2.13 and later do the rest
        return
    if "ccache" not in environ.get("CXX", ""):
        environ["CXX"] = "ccache " + environ.get("CXX", "c++")
    if cuda_root is not None:
        environ.setdefault("PYTORCH_NVCC", f"ccache {cuda_root / 'bin' / 'nvcc'}")


def said_of_cuda(environ: Mapping[str, str], cuda_root: Path | None) -> str:
    """Return the line that says what becomes of the CUDA sources, and how to get something else."""
    if cuda_root is not None:
        return f"CUDA kernels are compiled with {cuda_root}"
    if environ.get("DYNEMB_CUDA") == "0":
        return "CUDA kernels are left out: DYNEMB_CUDA=0"
    if torch.version.cuda is None:
        return (
            f"CUDA kernels are left out, because torch {torch.__version__} has no CUDA: set "
            "DYNEMB_CUDA=1 to compile them nevertheless"
        )
    return (
        f"CUDA kernels are left out, because nvcc is missing in CUDA_HOME, on PATH and in "
        f"{SYSTEM_CUDA}: install the CUDA toolkit, or torch_dynemb will run on the CPU only"
    )


def said_of_uring(environ: Mapping[str, str], uring: Uring | None) -> str:
    """Return the line that says how files will be read, and how to get something else."""
    if uring is not None:
        return f"io_uring is used where the kernel allows it, by {uring.archive}"
    if environ.get("DYNEMB_URING") == "0":
        return "io_uring is left out, so threads read files: DYNEMB_URING=0"
    return (
        "io_uring is left out, so threads read files, with more time of the processor: missing: "
        "static liburing; install it (Debian, Ubuntu: apt-get install liburing-dev) for tables on "
        "SSDs"
    )


def version(environ: Mapping[str, str]) -> str:
    """Return the version in ``torch_dynemb/_version.py``, with the label of a wheel."""
    text = (ROOT / "torch_dynemb" / "_version.py").read_text()
    number = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    assert number is not None, text
    label = environ.get("DYNEMB_VERSION_LABEL", "")
    if label and not re.fullmatch(r"[a-z0-9]+(\.[a-z0-9]+)*", label):
        raise SystemExit(
            f"DYNEMB_VERSION_LABEL={label}: expected small letters and digits, such as cpu or cu130"
        )
    return f"{number[1]}+{label}" if label else number[1]


def main() -> None:
    os.chdir(ROOT)
    cuda_root = wanted_cuda_root(os.environ, torch.version.cuda)
    uring = wanted_uring(os.environ)
    architectures: list[str] = []
    if cuda_root is not None:
        cpp_extension.CUDA_HOME = str(cuda_root)  # torch's CPU wheel sets it to None
        if not os.environ.get("TORCH_CUDA_ARCH_LIST"):
            here = [] if os.environ.get("DYNEMB_CUDA") == "1" else present_architectures()
            architectures = architecture_flags(
                here or known_architectures(cuda_root), portable=not here
            )
    if "build_ext" in sys.argv:  # make and gpu-check; pip shows nothing of what is printed here
        print(said_of_cuda(os.environ, cuda_root), file=sys.stderr)
        print(said_of_uring(os.environ, uring), file=sys.stderr)
    use_ccache(os.environ, cuda_root)
    # ninja is started from PATH, which lacks the scripts of an environment that is not activated
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    setup(
        version=version(os.environ),
        ext_modules=[kernel_library(cuda_root, architectures, uring=uring)],
        cmdclass={"build_ext": BuildKernels, "build_py": BuildPackage},
        options={
            "bdist_wheel": {"py_limited_api": "cp310"},
        },
    )


if __name__ == "__main__":
    main()
