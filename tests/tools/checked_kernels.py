"""Run all CUDA kernels at small shapes on a sanitized emulator, and list what the sanitizer finds.

    python tests/tools/checked_kernels.py races                  # ThreadSanitizer
    python tests/tools/checked_kernels.py bounds --fill 0xff     # AddressSanitizer
    python tests/tools/checked_kernels.py races find_or_insert_  # some ops only

Each call runs in a child process, because a sanitizer has to be loaded first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from emulator.checked import Finding, command_of, environment_of, findings_of
from emulator.mutants import build_mutants

FILLS = (0xA5, 0x00)
MUTANT_SECONDS = 30  # of CPU time: some never end


class Checked(NamedTuple):
    """What a process has found.

    Attributes:
        findings: with the cases that led to them.
        digests: of results, by case.
    """

    findings: dict[Finding, list[str]]
    digests: dict[str, str]


def apart(leaf: Any) -> Any:
    """A tensor in memory of its own that ends where the tensor ends; anything else as it is."""
    import torch

    if not isinstance(leaf, torch.Tensor):
        return leaf
    sizes = zip(leaf.shape, leaf.stride(), strict=True)
    words = 1 + sum((size - 1) * stride for size, stride in sizes) if leaf.numel() > 0 else 0
    memory = torch.empty(words, dtype=leaf.dtype)
    copy = memory.as_strided(leaf.shape, leaf.stride())
    copy.copy_(leaf.detach())
    return copy.requires_grad_(leaf.requires_grad)


def digest(tree: Any) -> str:
    """A checksum of all tensors of a tree."""
    import torch
    from torch.utils import _pytree as pytree

    checksum = hashlib.sha256()
    for leaf in pytree.tree_leaves(tree):
        if isinstance(leaf, torch.Tensor):
            bits = leaf.detach().contiguous().flatten().view(torch.uint8)
            checksum.update(bits.numpy().tobytes())
    return checksum.hexdigest()[:16]


@contextmanager
def many_ids() -> Iterator[None]:
    """Cases of the index and of rows have calls of some hundred ids, few of them distinct."""
    import torch
    from group_calls import Call
    from op_cases import index, rows

    import torch_dynemb as td

    def crowd(group: td.TableGroup, tables: Sequence[int], batch: int) -> Call:
        generator = torch.Generator().manual_seed(1)
        size = 300 if batch > 0 else 0
        bags = batch * len(tables)
        ids = torch.randint(28, (bags, size), generator=generator)
        ids[torch.rand(bags, size, generator=generator) < 0.5] = 5
        dims = [group.config.tables[table].embedding_dim for table in tables]
        return Call(ids.flatten(), torch.arange(bags + 1) * size, list(tables), dims)

    def pooled_call(group: td.TableGroup, batch: int = 2) -> Call:
        return crowd(group, [0, 1, 2], batch)

    def flat_call(group: td.TableGroup) -> Call:
        return crowd(group, [0, 2], 2)

    replaced = {"pooled_call": pooled_call, "flat_call": flat_call}
    before = [(home, name, vars(home).get(name)) for home in (index, rows) for name in replaced]
    for home, name, given in before:
        if given is not None:
            setattr(home, name, replaced[name])
    try:
        yield
    finally:
        for home, name, given in before:
            if given is not None:
                setattr(home, name, given)


def cached_rows(storage: Callable[[], Any]) -> Any:
    """Training of a table that does not fit into its cache in GPU memory; returns its rows."""
    import torch
    from emulated_groups import emulated_cuda

    import torch_dynemb as td

    torch.manual_seed(1)
    with emulated_cuda():
        table = td.DynamicEmbedding(
            4, name="t", optimizer=td.Adam(lr=0.1), storage=storage(), max_rows=1000
        )
        for step in range(6):
            ids = torch.arange(60 * step, 60 * step + 100) % 250
            table(torch.cat([ids, ids[:40]])).sin().sum().backward()
            table.optimizer.step()
        return table.group.read(0, torch.arange(250))


def stores() -> dict[str, Callable[[], Any]]:
    """Storages of groups, by name; their kernels have no cases."""
    from record_dict import RecordDict

    import torch_dynemb as td

    def external() -> td.Storage:
        return td.ExternalStore(RecordDict(), cache="96 rows", device_cache="64 rows")

    return {"external": external, "host": lambda: td.HostStore(cache="70 rows")}


def run_cases(ops: Sequence[str], prefix: str = "", cases: str = "") -> None:
    """Run the cases of ops, all if none is named, and print a digest of each one's results.

    Args:
        ops: names.
        prefix: of the names of results.
        cases: part of the names of the cases to run.
    """
    import torch
    from emulator import mode
    from op_cases import CASES, FAMILIES
    from torch.utils import _pytree as pytree

    from torch_dynemb._library.op_names import tagged_ops

    def announce(name: str, kind: str) -> None:
        if not prefix:
            print(f"case: {name} {kind}", file=sys.stderr, flush=True)

    def run(name: str, kind: str, case: Callable[[], Any]) -> None:
        announce(name, kind)
        arguments = pytree.tree_map(apart, case())
        with mode.EmulatedCuda():
            results = getattr(torch.ops.dynemb, name)(*arguments)
        print(json.dumps([f"{prefix}{name} {kind}", digest((results, arguments))]))

    for family, (of_family, _) in FAMILIES.items():
        for name, of_op in of_family.items():
            if name not in CASES or name in tagged_ops("host") or (ops and name not in ops):
                continue
            for kind, case in of_op.items():
                if cases not in kind:
                    continue
                run(name, kind, case)
                if family in ("index", "rows"):
                    with many_ids():
                        run(name, f"{kind} of many ids".strip(), case)
    if not ops or "stage_" in ops:
        for kind, storage in stores().items():
            announce("stage_", kind)
            print(json.dumps([f"{prefix}stage_ {kind}", digest(cached_rows(storage))]))


def run_mutants(check: str, ops: Sequence[str]) -> None:
    """Run the ops of mutants, each mutant in a copy of this process.

    Args:
        check: "bounds" or "races".
        ops: names; mutants of other ones are left out. None: all mutants.
    """
    from emulator import mode
    from emulator.mutants import MUTANTS

    emulator = mode.library()
    for number, mutant in enumerate(MUTANTS, 1):
        if (mutant.check == "races") != (check == "races") or (ops and mutant.op not in ops):
            continue
        print(f"case: mutant {number}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        copy = os.fork()
        if copy > 0:
            os.waitpid(copy, 0)
            continue
        signal.setitimer(signal.ITIMER_VIRTUAL, MUTANT_SECONDS)
        emulator.emulator_set_mutant(number)
        try:
            run_cases([mutant.op], f"mutant {number} ", mutant.cases)
        except RuntimeError as error:
            print(json.dumps([f"mutant {number} error", str(error)[:80]]))
        sys.stdout.flush()
        os._exit(0)


def checked(check: str, arguments: Sequence[str], *, fill: int) -> Checked:
    """Run this program in a process with a sanitizer.

    Args:
        check: "bounds" or "races".
        arguments: of the program.
        fill: a byte of which fresh memory is full.
    """
    command = [*command_of(check), sys.executable, __file__, check, *arguments, "--child"]
    reply = subprocess.run(
        [*command, "--fill", str(fill)],
        env=environment_of(check, fill=fill),
        capture_output=True,
        text=True,
        check=False,
    )
    if reply.returncode != 0:
        raise RuntimeError(f"{command}: exit status {reply.returncode}\n{reply.stderr[-4000:]}")
    digests = dict(json.loads(line) for line in reply.stdout.splitlines() if line[:1] == "[")
    return Checked(findings_of(reply.stderr), digests)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("check", choices=["bounds", "races"])
    parser.add_argument("ops", nargs="*")
    parser.add_argument("--seed", type=int, default=0, help="order of threads; 0: ascending")
    parser.add_argument("--fill", type=lambda text: int(text, 0), default=FILLS[0])
    parser.add_argument("--mutants", action="store_true", help="those of tests/emulator/mutants.py")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_intermixed_args()
    if given.child:
        from emulator import mode

        mode.build = partial(build_mutants, given.check) if given.mutants else mode.build
        mode.set_seed(given.seed)
        mode.library().emulator_set_fill(given.fill)
        if given.mutants:
            run_mutants(given.check, given.ops)
        else:
            run_cases(given.ops)
        sys.exit()
    result = checked(given.check, sys.argv[2:], fill=given.fill)
    for finding, cases in result.findings.items():
        print(f"{finding} ({', '.join(cases)})")
    print(f"{len(result.findings)} findings in {len(result.digests)} cases")
    sys.exit(bool(result.findings))
