"""Arguments of lookups as ops take them: ids, offsets, weights, scores."""

from __future__ import annotations

from typing import TypeGuard

import torch
from torch import Tensor
from torch.compiler import is_exporting

from torch_dynemb.ops.columns import Pooling
from torch_dynemb.storage.device import check_device
from torch_dynemb.table.config import ROW_DTYPES

# A small lookup takes little longer than finding names: these are found at once.
_INT64, _STRIDED = torch.int64, torch.strided


def _check_dense(owner: str, given: Tensor) -> None:
    if given.layout != torch.strided:
        raise TypeError(
            f"{owner} is a tensor of layout {given.layout}, expected a dense one: give the ids of "
            "sparse or nested inputs as values with offsets"
        )


def are_ready(numbers: Tensor | None) -> TypeGuard[Tensor]:
    """Return whether ids or offsets are what ops of the CPU take; None is not."""
    return (
        isinstance(numbers, Tensor)
        and numbers.dtype is _INT64
        and numbers.layout is _STRIDED
        and numbers.dim() == 1
        and numbers.is_cpu
        and numbers.is_contiguous()
        and not is_exporting()
    )


def integer_ids(owner: str, ids: Tensor) -> Tensor:
    """Return ids, contiguous, of any shape; raise TypeError unless they are int64 or int32."""
    if are_ready(ids):
        return ids
    if not isinstance(ids, Tensor):
        raise TypeError(f"{owner}: input is a {type(ids).__name__}, expected a Tensor of ids")
    _check_dense(f"{owner}: input", ids)
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{owner}: input has dtype {ids.dtype}, expected int64 or int32 ids")
    check_device(owner, ids.device)
    if torch.compiler.is_exporting():
        ids = ids.reshape(-1)  # contiguous() may leave no trace, and the program's ids may need it
    return ids.contiguous()


def flat_ids(owner: str, ids: Tensor) -> Tensor:
    """Return ids as int64 [n]; raise TypeError unless they are int64 or int32."""
    if are_ready(ids):
        return ids
    ids = integer_ids(owner, ids).to(torch.int64)
    return ids if ids.dim() == 1 else ids.reshape(-1)


def integer_offsets(owner: str, offsets: Tensor) -> Tensor:
    """Return offsets, contiguous; raise unless they are a 1-D integer tensor."""
    if are_ready(offsets):
        return offsets
    if not isinstance(offsets, Tensor):
        raise TypeError(f"{owner}: offsets is a {type(offsets).__name__}, expected a Tensor")
    _check_dense(f"{owner}: offsets", offsets)
    if offsets.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{owner}: offsets has dtype {offsets.dtype}, expected int64 or int32")
    if offsets.dim() != 1:
        raise ValueError(f"{owner}: offsets has shape {tuple(offsets.shape)}, expected 1 dimension")
    check_device(owner, offsets.device)
    return offsets.contiguous()


def as_ops_take_them(ids: Tensor, offsets: Tensor) -> bool:
    """Return whether ids and offsets need no conversion."""
    return ids.dim() == 1 and ids.dtype == offsets.dtype == torch.int64


def flat_weights(owner: str, weights: Tensor, shape: torch.Size) -> Tensor:
    """Return weights of ids as float32 [n]; raise unless they have ``shape``.

    Under autocast a layer may have made them of less than float32.
    """
    if not isinstance(weights, Tensor):
        raise TypeError(f"{owner} is a {type(weights).__name__}, expected a Tensor")
    _check_dense(owner, weights)
    if weights.shape != shape:
        raise ValueError(
            f"{owner} has shape {tuple(weights.shape)}, expected that of the ids, {tuple(shape)}"
        )
    if weights.dtype not in ROW_DTYPES:
        raise TypeError(f"{owner} has dtype {weights.dtype}, expected float32, bfloat16 or float16")
    check_device(owner, weights.device)
    weights = weights.to(torch.float32).contiguous()
    return weights if weights.dim() == 1 else weights.reshape(-1)


def flat_scores(owner: str, scores: Tensor, input: Tensor, combine: str | None) -> Tensor:
    """Return custom scores as a vector; raise unless they fit the ids."""
    if not isinstance(scores, Tensor):
        raise TypeError(f"{owner}: scores is a {type(scores).__name__}, expected a Tensor")
    _check_dense(f"{owner}: scores", scores)
    decays = combine == "decayed_sum"
    if scores.dtype != torch.int64 and not (decays and scores.is_floating_point()):
        raise TypeError(f"{owner}: scores has dtype {scores.dtype}, expected int64")
    if scores.shape != input.shape:
        raise ValueError(
            f"{owner}: scores has shape {tuple(scores.shape)}, expected that of the ids, "
            f"{tuple(input.shape)}"
        )
    if scores.device != input.device:
        raise ValueError(
            f"{owner}: scores is on {scores.device}, but the ids are on {input.device}"
        )
    return scores.reshape(-1).contiguous()


def pooling_of(mode: str) -> Pooling:
    """Return the pooling of a mode name.

    Raises:
        ValueError: another name than ``"sum"`` or ``"mean"``.
    """
    if mode not in ("sum", "mean"):
        raise ValueError(
            f"mode is {mode!r}, expected 'sum' or 'mean' (nn.EmbeddingBag's 'max' is not supported)"
        )
    return Pooling.SUM if mode == "sum" else Pooling.MEAN


__all__ = [
    "are_ready",
    "as_ops_take_them",
    "flat_ids",
    "flat_scores",
    "flat_weights",
    "integer_ids",
    "integer_offsets",
    "pooling_of",
]
