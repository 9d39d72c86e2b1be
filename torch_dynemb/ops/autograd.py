"""Autograd formulas at the Autograd key.

``torch.library.register_autograd`` flattens and rebuilds lists of tensors on every call, which
takes longer than a small op.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_dynemb._library.arguments import check_arguments

Tensors = tuple[Tensor, ...]
# (inputs, outputs without a gradient, gradients of all outputs, inputs that need one) -> gradients
Backward = Callable[
    [Tensors, Tensors, Sequence[Tensor | None], Sequence[bool]], Sequence[Tensor | None]
]

_library = torch.library.Library("dynemb", "IMPL")


def register_autograd_kernel(op: str, kernel: Callable[..., Any]) -> None:
    """Register ``kernel(keyset, *arguments)`` for ``dynemb::op`` at the Autograd key."""

    def explained(keyset: Any, *arguments: Any) -> Any:
        try:
            return kernel(keyset, *arguments)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            check_arguments(op, arguments)  # Python's own errors name neither op nor argument
            raise

    _library.impl(op, explained, "Autograd", with_keyset=True)


def below_autograd(op: Any, keyset: Any, arguments: Sequence[Any]) -> Any:
    """Call the op's kernel for the device."""
    with torch._C._AutoDispatchBelowAutograd():
        return op.redispatch(keyset & torch._C._after_autograd_keyset, *arguments)


def needs_grad(*tensors: Tensor | None) -> bool:
    """Return whether autograd has to see a call with these arguments."""
    return torch.is_grad_enabled() and any(
        t is not None and (t.requires_grad or _mapped_requires_grad(t)) for t in tensors
    )


def _mapped_requires_grad(tensor: Tensor) -> bool:
    """Return whether the tensor that ``torch.vmap`` maps over requires grad; its samples do not."""
    if torch.compiler.is_compiling() or not torch._C._functorch.is_batchedtensor(tensor):
        return False
    mapped = torch._C._functorch.get_unwrapped(tensor)
    return mapped.requires_grad or _mapped_requires_grad(mapped)


def accumulates(node: Any) -> bool:
    """Return whether the backward that runs adds to the ``grad`` of a leaf.

    ``loss.backward()`` does. ``torch.autograd.grad`` returns gradients, and ``backward(inputs=)``
    adds to those of its inputs alone.

    Args:
        node: of the autograd graph, which gets the gradient of the leaf or of a view of it; None:
            nothing gets it.
    """
    while node is not None and node.next_functions:
        node = node.next_functions[0][0]
    if node is None:
        return False
    try:
        executes: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # raised for a leaf with a gradient that torch.autograd.grad returns
        return False
    return executes


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: Callable[[], Tensors], formula: Backward, *inputs: Tensor) -> Any:
        outputs = call()
        fixed = [tensor for tensor in outputs if not tensor.dtype.is_floating_point]
        ctx.save_for_backward(*inputs, *fixed)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*fixed)
        ctx.inputs, ctx.formula = len(inputs), formula
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        inputs, fixed = saved[: ctx.inputs], saved[ctx.inputs :]
        return None, None, *ctx.formula(inputs, fixed, grads, ctx.needs_input_grad[2:])


def differentiable(
    call: Callable[[], Tensors], backward: Backward, inputs: Sequence[Tensor]
) -> Tensors:
    """Return the outputs of ``call``; ``backward`` turns their gradients into those of ``inputs``.

    Args:
        call: calls the op below autograd; outputs of an integer dtype get no gradient.
        backward: see :data:`Backward`.
        inputs: saved for the backward.
    """
    outputs: Tensors = _Differentiable.apply(call, backward, *inputs)  # type: ignore[no-untyped-call]
    return outputs
