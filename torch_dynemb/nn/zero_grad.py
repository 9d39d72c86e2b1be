"""``model.zero_grad()`` forgets the gradients of rows in split mode, too.

torch's method sets the ``grad`` of parameters, which rows are not: after a batch that is left out,
or an overflow, their gradients would go into the next step.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn

from torch_dynemb.nn.backward_updates import registered_in
from torch_dynemb.nn.table_optimizers import row_optimizers
from torch_dynemb.nn.torch_changes import replace


def zero_rows_too() -> None:
    """Have ``zero_grad()`` of models in this process forget the gradients of rows."""
    replace("Module", nn.Module, "zero_grad", _with_rows)


def _with_rows(original: Any) -> Any:
    @functools.wraps(original)
    def zero_grad(self: nn.Module, *arguments: Any, **keywords: Any) -> None:
        original(self, *arguments, **keywords)
        tables = registered_in(self)
        for module in tables:
            module._forget_gradients()
        for module in set(self.modules()).difference(tables):  # such as TorchRec's collections
            for optimizer in row_optimizers(module).optimizers:
                optimizer.zero_grad()

    return zero_grad


__all__ = ["zero_rows_too"]
