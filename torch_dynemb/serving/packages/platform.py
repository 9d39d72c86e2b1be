"""Requirements of compiled code on the process and the machine."""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable
from pathlib import Path

import torch

# names in /proc/cpuinfo that a compiler may use; the others are about bugs, clocks, virtualisation
_INSTRUCTIONS = re.compile(
    r"(abm|adx|aes|amx_\w+|avx\w*|bmi[12]|f16c|fma|fma4|gfni|lzcnt|movbe|pclmulqdq|pni|popcnt|"
    r"sha_ni|sse\w*|ssse3|vaes|vpclmulqdq|xop|"
    r"asimd\w*|atomics|bf16|crc32|i8mm|lrcpc|pmull|sha[1235]\w*|sve\w*)$"
)
_OPS = "dynemb"


def machine() -> str:
    """Return the kind of processor, such as x86_64."""
    return platform.machine()


def instruction_sets() -> list[str]:
    """Return the processor's instruction sets that compilers use, sorted; empty if unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        name, _, values = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return sorted(flag for flag in values.split() if _INSTRUCTIONS.match(flag))
    return []


def torch_series(version: str) -> str:
    """Return the part of a torch version that identifies compatible releases, such as 2.13."""
    return ".".join(version.split(".")[:2])


def op_schemas(program: torch.export.ExportedProgram) -> dict[str, str]:
    """Return schemas of this library's ops that a program calls, by name."""
    called = (node.target for node in program.graph.nodes if node.op == "call_function")
    return {
        target._schema.name: str(target._schema)
        for target in called
        if isinstance(target, torch._ops.OpOverload) and target.namespace == _OPS
    }


def wrong_op(schemas: Iterable[tuple[str, str]]) -> str | None:
    """Return the first op that differs from the one a package was compiled for; None if none does.

    Args:
        schemas: pairs of name and schema.
    """
    for name, schema in schemas:
        namespace, _, op = name.partition("::")
        found = getattr(getattr(torch.ops, namespace), op, None)
        if found is None:
            return f"{name}, which this torch_dynemb does not have"
        if str(found.default._schema) != schema:
            return f"{schema}, which this torch_dynemb has as {found.default._schema}"
    return None


__all__ = ["instruction_sets", "machine", "op_schemas", "torch_series", "wrong_op"]
