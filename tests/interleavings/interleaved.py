"""Compiles the programs in ``programs/``, and explores the interleavings of their threads.

python tests/interleavings/interleaved.py live_table rehashes --random 100000 --seed 7
"""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from emulator.build import ROOT, SOURCES, compile_source, one_build_at_a_time, run_compiler
from emulator.build import torch_flags as flags_of_torch
from interleaving_mutants import MUTANTS

HERE = ROOT / "tests" / "interleavings"
OUTPUT = ROOT / "build" / "interleavings"
# Each with the sources that it is linked with, below csrc/cpu. The scenes of a program follow.
PROGRAMS: dict[str, tuple[str, ...]] = {
    "cache_slots": ("storage/find_slots.cpp",),
    "changed_table": ("serving/changed_table.cpp", "serving/live_writer.cpp"),
    "copy_on_write": ("rows/copy_on_write.cpp",),
    "eviction": (),
    "index_lookup": ("index/moving_entries.cpp",),
    "live_table": ("serving/live_writer.cpp",),
    "one_writer": (),
    "scores": (),
    "versions": (),
}
SCENES = (
    *("cache_slots", "copy_on_write", "eviction", "index_lookup"),
    *("changed_table known", "changed_table removed", "changed_table fresh"),
    *("live_table updates", "live_table takes-over", "live_table rehashes"),
    *("one_writer ops", "one_writer moves", "scores few", "scores full", "versions"),
)
CHECKER = [HERE / f"{name}.cpp" for name in ("threads", "memory", "hooks")]
# -fno-builtin: memcpy stays a call, also where the checker itself calls memmove
FLAGS = ["-std=c++20", "-g1", "-fno-builtin", "-Wall", "-Wextra", f"-I{HERE}"]
CHECKED = ["-O1", "-fsanitize=thread", "-Wno-tsan", "-Wno-psabi", "-U_FORTIFY_SOURCE"]
WRAPPED = (
    *("memcpy", "nanosleep", "pthread_mutex_lock", "pthread_mutex_unlock", "pthread_self"),
    *("sched_yield", "syscall"),
)


class Explored(NamedTuple):
    """What a run of a program was.

    Attributes:
        executions: how many.
        switches: in all of them, how often another thread might have run.
        failure: what a failed execution did, line by line, and why it is wrong; "" if all passed.
    """

    executions: int
    switches: int
    failure: str


def build(program: str, *, mutants: bool = False) -> Path:
    """Builds a program; only what has changed is compiled again.

    Args:
        program: a key of PROGRAMS.
        mutants: with the faults of ``interleaving_mutants.py``, one of which ``--mutant`` chooses.

    Returns:
        Its path.

    Raises:
        RuntimeError: what the compiler printed about the files that it refused.
    """
    output = OUTPUT / ("mutants" if mutants else "plain") / program
    replaced = _mutated_sources(output / "csrc", program) if mutants else SOURCES
    # not linked: what ops of an included source call; instead: headers in place of larger ones
    flags = [*FLAGS, *CHECKED, "-ffunction-sections", f"-I{HERE / 'instead'}", f"-I{replaced}"]
    flags += flags_of_torch()[0]
    sources = [HERE / "programs" / f"{program}.cpp"]
    for name in PROGRAMS[program]:
        mutated = replaced / "cpu" / name
        sources.append(mutated if mutated.is_file() else SOURCES / "cpu" / name)
    with one_build_at_a_time(OUTPUT):
        objects = [compile_source(file, ["-O2", *FLAGS], output=OUTPUT) for file in CHECKER]
    with one_build_at_a_time(output):
        objects += [compile_source(file, flags, output=output) for file in sources]
        result = output / program
        newest = max(file.stat().st_mtime for file in objects)
        if not result.is_file() or result.stat().st_mtime < newest:
            wraps = [f"-Wl,--wrap={name}" for name in WRAPPED]
            link = ["-no-pie", "-pthread", "-Wl,--gc-sections", *wraps]
            run_compiler([*link, "-o", str(result), *map(str, objects)])
    return result


def _mutated_sources(folder: Path, program: str) -> Path:
    """Copies the sources that have mutants of a program; returns the folder for csrc."""
    texts: dict[str, str] = {}
    for number, mutant in enumerate(MUTANTS, 1):
        if mutant.program.split()[0] != program:
            continue
        text = texts.get(mutant.file) or (
            "namespace interleavings {\nextern int mutant;\n}\n"
            + (SOURCES / mutant.file).read_text()
        )
        if text.count(mutant.old) != 1:
            raise ValueError(
                f"{mutant.file} has {text.count(mutant.old)} times the text of mutant {number}: "
                f"{mutant.old!r}. Adapt tests/interleavings/interleaving_mutants.py."
            )
        new = mutant.new.replace("MUTANT", f"(interleavings::mutant == {number})")
        texts[mutant.file] = text.replace(mutant.old, new)
    for name, text in texts.items():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.is_file() or copy.read_text() != text:
            copy.write_text(text)
    return folder


def run(scene: str, *arguments: str, mutants: bool = False) -> Explored:
    """Builds and runs a program.

    Args:
        scene: an item of SCENES.
        arguments: see ``checker.h``.
        mutants: as for :func:`build`.

    Raises:
        RuntimeError: it ended otherwise than by a check.
    """
    program = build(scene.split()[0], mutants=mutants)
    command = [str(program), *scene.split()[1:], *arguments]
    reply = subprocess.run(command, capture_output=True, text=True, check=False)
    if reply.returncode == 0:
        return Explored(**json.loads(reply.stdout), failure="")
    if reply.returncode != 1:
        raise RuntimeError(f"{' '.join(command)} ended with {reply.returncode}: {reply.stderr}")
    return Explored(0, 0, reply.stderr)


def build_all(*, mutants: bool) -> None:
    """Builds all programs, as many at once as there are cores."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda program: build(program, mutants=mutants), PROGRAMS))


if __name__ == "__main__":
    names = [scene for scene in SCENES if scene.split() == sys.argv[1 : 1 + len(scene.split())]]
    if not names:
        sys.exit(f"{sys.argv[0]} SCENE [arguments], of which SCENE is one of {', '.join(SCENES)}")
    explored = run(names[0], *sys.argv[1 + len(names[0].split()) :])
    print(explored.failure or explored)
    sys.exit(bool(explored.failure))
