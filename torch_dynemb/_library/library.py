"""The compiled library, which registers ``torch.ops.dynemb``, and what Python adds to its ops."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from torch_dynemb._library.arguments import check_arguments, refuse_size, refuse_sparse
from torch_dynemb._library.error_names import name_tables_of, named
from torch_dynemb._library.op_names import op_names, takes_tensors
from torch_dynemb._library.typed_errors import is_marked, typed_error

LIBRARY = Path(__file__).parents[1] / "_C.abi3.so"

Function = TypeVar("Function", bound=Callable[..., Any])


def load_library() -> None:
    """Loads ``torch_dynemb/_C.abi3.so`` into the process; does nothing if it is loaded.

    Raises:
        ImportError: the library has not been built.
    """
    if not LIBRARY.exists():
        raise ImportError(
            f"torch_dynemb: {LIBRARY.name} is missing from {LIBRARY.parent.name}/: build it with "
            "`make build` or `pip install --no-build-isolation -e .`"
        )
    torch.ops.load_library(str(LIBRARY))
    _refuse_sparse_tensors()


_implementations = torch.library.Library("dynemb", "IMPL")
_SPARSE_KEYS = ("SparseCPU", "SparseCUDA", "SparseCsrCPU", "SparseCsrCUDA")


@functools.cache
def _refuse_sparse_tensors() -> None:
    """Ops say which argument is sparse; torch would list the kernels that they have."""
    for op in filter(takes_tensors, op_names()):
        for key in _SPARSE_KEYS:
            _implementations.impl(op, refuse_sparse(op), key)


def raises_typed_errors(function: Function) -> Function:
    """Give a function that calls ops the exceptions of :mod:`torch_dynemb.errors`.

    Errors call tables by the names that :func:`know_names` has noted. Code that ``torch.compile``
    has compiled calls ops without these functions: it gets a ``RuntimeError`` with the same words,
    a mark of the class at their end, and numbers of tables.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except RuntimeError as error:
            if is_marked(error):
                # not by a variable: its frame and the traceback would be a reference cycle
                raise named(typed_error(error), arguments) from None
            name_tables_of(error, arguments)
            raise

    return cast(Function, wrapped)


def register_fake(op: str) -> Callable[[Function], Function]:
    """``torch.library.register_fake`` for ``dynemb::op``; arguments are checked before the call."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def checked(*arguments: Any) -> Any:
            check_arguments(op, arguments)
            try:
                return function(*arguments)
            except (RuntimeError, TypeError) as error:
                # not of a subclass, such as those of sizes that torch.compile does not know
                if type(error) in (RuntimeError, TypeError):
                    refuse_size(op, arguments)
                raise

        torch.library.register_fake(f"dynemb::{op}", checked)
        return function

    return register
