"""The code that Inductor generates for steps that look tables up, and what it does with them."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

ROWS = 1_000_003  # of tables; nothing else has as many
# Declares what an input looks like; moves no data.
DECLARATION = re.compile(r"assert_size_stride(_grouped)?\(|rand_strided\(|^\s*#")
WHOLE_COPY = re.compile(r"aten\.(copy_?|clone|new_empty|empty|add|index_put)\b")


def table_sized_lines(code: str) -> list[str]:
    """Lines that name a number of at least ROWS, or call an ATen op that copies a whole tensor."""
    found = []
    for line in code.splitlines():
        if DECLARATION.search(line):
            continue
        numbers = [int(number) for number in re.findall(r"\b(\d+)L?\b", line)]
        if WHOLE_COPY.search(line) or any(ROWS <= number < 2**53 for number in numbers):
            found.append(line.strip())
    return found


def generated_code(step: Callable[[Tensor], Tensor], *, dynamic: bool | None = None) -> str:
    """Forward and backward of a compiled step, generated code of both."""
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)

    def run() -> None:
        compiled(torch.arange(60).reshape(20, 3)).sum().backward()

    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(run)
    assert len(codes) >= 2, "expected the code of a forward and of a backward"
    return "\n".join(codes)


def called_ops(code: str) -> list[str]:
    """Names of the ops of the library in the order in which the code calls them."""
    return re.findall(r"torch\.ops\.dynemb\.(\w+)\.default\(", code)
