"""Compiles the CUDA sources with the C++ compiler, for the emulator in this directory.

``build()`` makes the library behind ``torch.ops.dynemb_emulated``. Only what has changed is
compiled again. ``CXX`` names another compiler, ``MAX_JOBS`` another number of jobs than one a core.
The compiler runs through ccache where it is installed, as in setup.py.
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

EMULATOR = Path(__file__).resolve().parent
ROOT = EMULATOR.parent.parent
SOURCES = ROOT / "csrc"
OUTPUT = ROOT / "build" / "emulated"
RUNTIME = [
    EMULATOR / f"{name}.cpp" for name in ("emulator", "fibers", "order", "runtime", "streams")
]

FLAGS = [
    "-DDYNEMB_EMULATED",
    "-std=c++17",
    "-O1",
    "-g1",
    "-fPIC",
    "-ffp-contract=off",  # as in setup.py: the same bits as the CPU kernels
    "-fvisibility=hidden",
    "-U_FORTIFY_SOURCE",  # it forbids longjmp from one stack to another
    # a GPU stops at a vector load that is not aligned, a CPU need not
    "-fsanitize=alignment,bounds,shift,null",
    "-fno-sanitize-recover=all",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
]
# Sanitizers of the sources; the emulator itself is not sanitized, and takes the last flag only.
CHECKS = {
    "bounds": [
        "-fsanitize=address",
        "-fsanitize-recover=address",
        "-fsanitize-sections=emulated_shared_*",
        "-fno-omit-frame-pointer",
        "-DEMULATOR_BOUNDS",
    ],
    "races": [
        "-fsanitize=thread",
        "--param=tsan-distinguish-volatile=1",
        "-Wno-tsan",
        "-DEMULATOR_RACES",
    ],
}
INCLUDES = [f"-I{EMULATOR / 'include'}", f"-I{SOURCES}"]


def torch_flags() -> tuple[list[str], list[str]]:
    """Flags with which sources that include torch's headers are compiled, and linked."""
    from torch.utils import cpp_extension

    headers = [flag for path in cpp_extension.include_paths() for flag in ("-isystem", path)]
    link = [f"-L{path}" for path in cpp_extension.library_paths()]
    link += [f"-Wl,-rpath,{path}" for path in cpp_extension.library_paths()]
    compile_flags = [
        "-DDYNEMB_LIBRARY=dynemb_emulated",
        "-DTORCH_TARGET_VERSION=0x020b000000000000",  # STABLE_ABI_TORCH in setup.py
        *headers,
    ]
    return compile_flags, [*link, "-lc10", "-ltorch", "-ltorch_cpu"]


def run_compiler(arguments: Sequence[str]) -> None:
    """Runs the compiler; prints its warnings.

    Raises:
        RuntimeError: with what the compiler printed.
    """
    command = [*shlex.split(os.environ.get("CXX", "c++")), *arguments]
    if shutil.which("ccache") is not None and "ccache" not in command[0]:
        command.insert(0, "ccache")
    # paths from the root on, so that another clone finds in the cache what this one has compiled
    environ = {"CCACHE_BASEDIR": str(ROOT), "CCACHE_NOHASHDIR": "1", **os.environ}
    reply = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ
    )
    if reply.returncode != 0:
        raise RuntimeError(f"{shlex.join(command)}\n{reply.stdout}{reply.stderr}")
    if reply.stderr:
        print(reply.stderr, file=sys.stderr)


def is_current(object_file: Path) -> bool:
    """Whether nothing that the object file was made from is newer, or gone."""
    dependencies = object_file.with_suffix(".d")
    if not object_file.is_file() or not dependencies.is_file():
        return False
    made = object_file.stat().st_mtime
    # "object: file file \ file"; the compiler writes \\\n at line ends and "\ " for spaces
    text = dependencies.read_text().replace("\\\n", " ").split(":", 1)[1]
    files = [ROOT / name for name in shlex.split(text)]
    return all(file.is_file() and file.stat().st_mtime <= made for file in [*files, Path(__file__)])


def compile_source(source: Path, flags: Sequence[str], *, output: Path = OUTPUT) -> Path:
    """Compiles one file, unless its object file is current; returns the object file."""
    name = "_".join(source.relative_to(ROOT).parts)
    object_file = output / f"{name}.o"
    if not is_current(object_file):
        unfinished = output / f"{name}.unfinished.o"
        depend = ["-MMD", "-MF", str(object_file.with_suffix(".d"))]
        files = ["-x", "c++", "-c", str(source), "-o", str(unfinished)]
        run_compiler([*flags, *INCLUDES, *depend, *files])
        unfinished.replace(object_file)
    return object_file


@contextmanager
def one_build_at_a_time(output: Path = OUTPUT) -> Iterator[None]:
    """Keeps other processes from building meanwhile."""
    output.mkdir(parents=True, exist_ok=True)
    with open(output / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_library(
    name: str,
    sources: Sequence[Path],
    *,
    compile_flags: Sequence[str],
    link_flags: Sequence[str],
    check: str | None = None,
    replaced: Sequence[Path] = (),
    include: Path = SOURCES,
) -> Path:
    """Compiles sources and the emulator into a shared library.

    Args:
        name: of the library's file, without ``lib`` and ``.so``.
        sources: files below the repository's root.
        compile_flags: besides FLAGS.
        link_flags: libraries.
        check: a key of CHECKS.
        replaced: more sources, with their headers below ``include``.

    Returns:
        The library's path.

    Raises:
        RuntimeError: what the compiler printed about the files that it refused.
    """
    output = OUTPUT if check is None else OUTPUT.with_name(f"{OUTPUT.name}_{check}")
    sanitizer = [] if check is None else CHECKS[check]
    library = output / f"lib{name}.so"
    with one_build_at_a_time(output):
        jobs = int(os.environ.get("MAX_JOBS", len(os.sched_getaffinity(0))))
        flags = [*FLAGS, *compile_flags, *sanitizer]
        own_flags = [*FLAGS, *sanitizer[-1:]]
        with ThreadPoolExecutor(jobs) as pool:
            compiled = partial(pool.submit, compile_source, output=output)
            tasks = [compiled(source, flags) for source in sources]
            tasks += [compiled(source, [f"-I{include}", *flags]) for source in replaced]
            tasks += [compiled(source, own_flags) for source in RUNTIME]
        errors = [str(error) for task in tasks if (error := task.exception()) is not None]
        if errors:
            raise RuntimeError("\n".join(errors))
        objects = [task.result() for task in tasks]
        # the list too: a source that is gone must not stay in the library
        listing = output / f"{name}.objects"
        text = "\n".join(str(file) for file in objects)
        if (
            library.is_file()
            and listing.is_file()
            and listing.read_text() == text
            and all(file.stat().st_mtime <= library.stat().st_mtime for file in objects)
        ):
            return library
        unfinished = output / f"{name}.unfinished.so"
        # sanitizers of threads and addresses are there only in a process that has loaded them first
        defined = [] if sanitizer else ["-Wl,--no-undefined"]
        defined.append(f"-Wl,-T,{EMULATOR / 'shared_memory.ld'}")
        link = ["-shared", *defined, "-fsanitize=undefined", *sanitizer[:1], "-pthread"]
        run_compiler([*link, "-o", str(unfinished), *map(str, objects), *link_flags])
        unfinished.replace(library)
        listing.write_text(text)
    return library


def build(
    check: str | None = None,
    *,
    name: str = "dynemb_emulated",
    replaced: Sequence[Path] = (),
    include: Path = SOURCES,
) -> Path:
    """Builds the CUDA kernels for CPU tensors.

    Args:
        check: a key of CHECKS; None: that of the environment variable EMULATOR_CHECK, if it is set.
        name: of the library.
        replaced: sources below ``include`` that take the places of those below ``csrc``.
        include: where their headers are looked for first.

    Returns:
        A library to load with ``torch.ops.load_library``.
    """
    check = check or os.environ.get("EMULATOR_CHECK")
    sources = sorted(
        [*SOURCES.glob("*.cpp"), *SOURCES.glob("arguments/*.cpp"), *SOURCES.glob("cuda/**/*.cu")]
    )
    names = {SOURCES / source.relative_to(include) for source in replaced}
    compile_flags, link_flags = torch_flags()
    return build_library(
        name,
        [source for source in sources if source not in names],
        compile_flags=compile_flags,
        link_flags=link_flags,
        check=check,
        replaced=replaced,
        include=include,
    )


if __name__ == "__main__":
    print(build())
