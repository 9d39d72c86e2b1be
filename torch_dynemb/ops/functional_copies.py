"""Refusal of compilers that would copy the reserved memory of a table.

Functionalization turns an op that changes tensors into one that returns changed copies. Inductor
changes them in place again. Other backends of ``torch.compile``, such as ``aot_eager``, do not, and
a copy of a table's reservation takes all memory of the machine.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Sequence
from types import FrameType

from torch import Tensor

# Most bytes of reserved memory that a call may copy.
MOST_COPIED = 1 << 30
_INDUCTOR = "torch._inductor."
_FUNCTIONALIZES = "torch._functorch.aot_autograd"
_rows_copied = False  # whether compiled code changes copies of rows


def refuse_copies(op: str, *changed: Tensor | Iterable[Tensor]) -> None:
    """Raise where a compiler would copy reserved memory; called by the fake of an op.

    Args:
        changed: tensors that the op changes.

    Raises:
        RuntimeError: the compiler would copy them; names the backend to choose.
    """
    tensors = itertools.chain(*([t] if isinstance(t, Tensor) else t for t in changed))
    # reserved memory has a fixed size; what depends on the batch is of the call itself
    sizes = [(t.numel(), t.element_size()) for t in tensors]
    wanted = sum(number * size for number, size in sizes if isinstance(number, int))
    if wanted <= MOST_COPIED or not _copies():
        return
    raise RuntimeError(
        f"{op}: the backend of torch.compile would copy the {wanted} bytes that the tables have "
        "reserved in every call: compile with backend='inductor', the default, which changes "
        f"tables in place, or give them so small a max_rows or capacity that it is {MOST_COPIED} "
        "bytes at most"
    )


def refuse_copies_of_rows(
    op: str, copy_on_write: Sequence[Tensor], *changed: Iterable[Tensor]
) -> None:
    """Apply :func:`refuse_copies` to an op that writes rows.

    Args:
        copy_on_write: of the rows; a thread that reads through it would not see the copies.
        changed: other tensors that the op changes.

    Raises:
        RuntimeError: the compiler would make such a copy; names the backend to choose.
    """
    global _rows_copied

    refuse_copies(op, copy_on_write, *changed)
    if not _copies():
        return
    if copy_on_write:
        raise RuntimeError(
            f"{op}: the backend of torch.compile changes copies of tables that a save with "
            "asynchronous=True has read in a thread: compile with backend='inductor', the default, "
            "which changes tables in place, or compile before the first such save, which then "
            "copies the rows"
        )
    _rows_copied = True


def copies_rows() -> bool:
    """Return whether ops of compiled code change copies of tables, which then replace the tables.

    A thread that reads rows meanwhile may find later values.
    """
    return _rows_copied


def _copies() -> bool:
    functionalizes = False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith(_INDUCTOR):
            return False
        functionalizes = functionalizes or name == _FUNCTIONALIZES
        frame = frame.f_back
    return functionalizes


__all__ = ["copies_rows", "refuse_copies", "refuse_copies_of_rows"]
