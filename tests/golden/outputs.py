"""Golden outputs: the bits that the library gives, as hashes, for restructured code to keep.

``golden_outputs.txt`` has a line for each output: the start of its sha256, and its name. The hash
covers the tensors of the output in a stated order, each with its name, dtype, shape and bytes (as
little-endian machines have them). ``test_golden_outputs.py`` computes the outputs of all cases and
compares the hashes without tolerance. A case computes its outputs from constants alone, so
cases run in any order.

* ``python tests/golden/outputs.py`` names the outputs that differ.
* ``python tests/golden/outputs.py --write`` writes the file anew. ``--ranks`` adds the cases that
  start processes, and is what ``make test-long`` compares. Outputs of cases that did not run keep
  their lines.

Restructured code keeps all lines. Write the file anew in three situations only, and say in the
commit message which lines have changed and why:

* a case has been added or removed: other lines stay. Code from before the restructuring writes the
  new ones;
* a fault has been repaired that made results wrong;
* a number is meant to change, such as the constants of a hash or the order of a sum, and
  CHANGELOG.md says so.

Files of checkpoints, state dicts and snapshots are not hashed, because formats may change: a case
has what a reader or a loaded model sees of them.

Outputs are equal on every CPU, with any number of threads and any instruction set. What is not is
left out:

* Powers of beta come from the C library's ``pow``, and its last bit varies. The cases use
  betas of 0, 1/2 and 3/4, with powers that are exact in float64.
* Dense layers, losses and norms of torch sum in an order of the machine's, and ``randn``, ``exp``
  and ``sin`` differ in last bits. Gradients are made by whole numbers instead
  (``made_tensors.py``) and go into ``backward`` directly.
* Truncated normal initial values use ``math.erf`` of the C library for the bounds of the
  distribution.
* Compiled and exported programs: Inductor's and the compiler's code may fuse or reorder. Tests in
  ``nn`` and ``serving`` compare such programs with eager ones.
* Bytes of memory are a matter of layout, and so are the evictions of a ``memory_budget``. Times
  are given by the cases, not by the clock.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from contents import Outputs

TESTS = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # pytest and its processes have these folders on their path
    sys.path[:0] = [str(TESTS), str(TESTS.parent)]

CASE_MODULES = (
    "trained_cases",
    "lookup_cases",
    "policy_cases",
    "saved_cases",
    "followed_cases",
    "served_cases",
    "package_cases",
)
GOLDEN = TESTS / "golden" / "golden_outputs.txt"
HOW_TO_WRITE = (
    "Restructured code keeps these bits. If they are meant to change, see the docstring of "
    "tests/golden/outputs.py and run: python tests/golden/outputs.py --write"
)
_DIGITS = 24  # of the hashes: 96 bits

Case = Callable[[Path], "Outputs"]


def cases() -> dict[str, Case]:
    """Collect the cases of one process by name; a case gets an empty folder."""
    found: dict[str, Case] = {}
    for module in CASE_MODULES:
        of_module: dict[str, Case] = importlib.import_module(module).CASES
        assert found.keys().isdisjoint(of_module)
        found.update(of_module)
    return found


def rank_cases() -> dict[str, Case]:
    """Collect the cases that start processes."""
    found: dict[str, Case] = importlib.import_module("rank_cases").CASES
    return found


def digest(output: Tensor | Mapping[str, Tensor]) -> str:
    """Hash the tensors of an output: names, dtypes, shapes and bits."""
    found = hashlib.sha256()
    named = {"": output} if isinstance(output, Tensor) else output
    for name, tensor in named.items():
        flat = tensor.detach().contiguous().reshape(-1)
        found.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        found.update(flat.view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:_DIGITS]


def run(case: Case) -> Outputs:
    """Compute the outputs of a case, whatever torch's generator has drawn before."""
    with torch.random.fork_rng(devices=[]), tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(11)
        return case(Path(folder))


def digests(name: str, outputs: Outputs) -> dict[str, str]:
    """Hash the outputs of a case, by the names that the file has."""
    return {f"{name}: {output}": digest(value) for output, value in outputs.items()}


def read_golden(path: Path = GOLDEN) -> dict[str, str]:
    """Read the file: hashes by name."""
    lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
    return {name: found for found, name in lines}


def differences(found: Mapping[str, str], golden: Mapping[str, str]) -> list[str]:
    """Compare all outputs of some cases with those in the file.

    Args:
        found: hashes of the outputs of the cases.
        golden: hashes in the file, of these cases and any others.

    Returns:
        A line for each output that differs.
    """
    ran = {case_of(name) for name in found}
    wanted = {name: of for name, of in golden.items() if case_of(name) in ran}
    lines = []
    for name in dict.fromkeys([*wanted, *found]):
        if name not in found:
            lines.append(f"{name}: is in the file and not computed")
        elif name not in wanted:
            lines.append(f"{name}: is not in the file")
        elif found[name] != wanted[name]:
            lines.append(f"{name}: has other bits")
    return lines


def case_of(name: str) -> str:
    """Take the name of the case, which has no colon, from that of an output."""
    return name.partition(": ")[0]


def write(found: Mapping[str, str], known: Iterable[str], path: Path = GOLDEN) -> None:
    """Write the file.

    Args:
        found: hashes of the outputs of cases that ran.
        known: names of all cases; lines of those that did not run stay.
        path: of the file.
    """
    ran, all_cases = {case_of(name) for name in found}, set(known)
    before = read_golden(path) if path.exists() else {}
    kept = {
        name: of
        for name, of in before.items()
        if case_of(name) in all_cases and case_of(name) not in ran
    }
    lines = sorted((name, of) for name, of in {**kept, **found}.items())
    path.write_text("".join(f"{of} {name}\n" for name, of in lines))


def main(arguments: list[str] | None = None) -> int:
    """Compare or write, as the command line says; returns the exit status."""
    parser = argparse.ArgumentParser(description="Golden outputs: compare them, or write them.")
    parser.add_argument("--write", action="store_true", help="write the file anew")
    parser.add_argument("--ranks", action="store_true", help="also cases of several processes")
    options = parser.parse_args(arguments)
    chosen = {**cases(), **(rank_cases() if options.ranks else {})}
    found: dict[str, str] = {}
    for name, case in chosen.items():
        found.update(digests(name, run(case)))
    lines = differences(found, read_golden() if GOLDEN.exists() else {})
    print("\n".join(lines) or "no output differs")
    if options.write:
        write(found, {**cases(), **rank_cases()})
        return 0
    if lines:
        print(HOW_TO_WRITE)
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
