"""The compiled library, which registers ``torch.ops.dynemb``, and Python's additions to its ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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
    """Load ``torch_dynemb/_C.abi3.so`` into the process; do nothing if it is loaded.

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
    """Register kernels for sparse tensors that name the argument; torch would list its kernels."""
    for op in filter(takes_tensors, op_names()):
        for key in _SPARSE_KEYS:
            _implementations.impl(op, refuse_sparse(op), key)


def raises_typed_errors(function: Function) -> Function:
    """Give a function that calls ops the exceptions of :mod:`torch_dynemb.errors`.

    Errors call tables by the names that :func:`know_names` stored. Code from ``torch.compile``
    calls ops without these functions. There, the error is a ``RuntimeError`` with the same message,
    a mark of the class at its end, and numbers of tables.
    """

    @functools.wraps(function)
    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        try:
            return function(*arguments, **keywords)
        except RuntimeError as error:
            if is_marked(error):
                # a variable would make a reference cycle of its frame and the traceback
                raise op_error(error, arguments) from None
            name_tables_of(error, arguments)
            raise

    return cast(Function, wrapped)


def op_error(error: RuntimeError, arguments: Sequence[object]) -> RuntimeError:
    """Return an op's error as an exception of the marked class, if any, with names of its tables.

    Args:
        error: the op's error.
        arguments: of the op, as :func:`raises_typed_errors` sees them.
    """
    return named(typed_error(error) if is_marked(error) else error, arguments)


def register_fake(op: str) -> Callable[[Function], Function]:
    """Register a fake implementation of ``dynemb::op`` that checks arguments before the call."""

    def register(function: Function) -> Function:
        @functools.wraps(function)
        def checked(*arguments: Any) -> Any:
            check_arguments(op, arguments)
            try:
                return function(*arguments)
            except (RuntimeError, TypeError) as error:
                # subclasses pass: torch.compile raises them for sizes that it does not know
                if type(error) in (RuntimeError, TypeError):
                    refuse_size(op, arguments)
                raise

        torch.library.register_fake(f"dynemb::{op}", checked)
        return function

    return register
