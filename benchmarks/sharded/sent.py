"""Bytes that ranks send to each other in a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from sharded.collections import WORLD_SIZE
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward


class Sent(NamedTuple):
    """Ids and bytes that leave the ranks in one step, all of them together.

    Attributes:
        ids: ids handed to the all-to-all, those that stay on their rank included.
        id_bytes: bytes of integers that leave a rank: ids and lengths of bags.
        row_bytes: bytes of floating-point numbers that leave a rank: outputs and their gradients.
    """

    ids: int
    id_bytes: int
    row_bytes: int


def sent_by(step: Callable[[], None]) -> Sent:
    """Run a step and count the bytes that the ranks send."""
    ids = 0
    number_bytes = {True: 0, False: 0}  # of floating-point numbers, of integers

    def count(sent: Tensor | list[Tensor], copies: float) -> None:
        for tensor in sent if isinstance(sent, list) else [sent]:
            number_bytes[tensor.is_floating_point()] += int(tensor.nbytes * copies)

    def counting(name: str, place: int, argument: str, copies: float) -> Callable[..., Any]:
        function = getattr(dist, name)

        def call(*arguments: Any, **more: Any) -> Any:
            count(arguments[place] if len(arguments) > place else more[argument], copies)
            return function(*arguments, **more)

        return call

    others = WORLD_SIZE - 1
    sending = {  # place and name of what is sent, and how often it leaves the rank
        "all_to_all_single": (1, "input", others / WORLD_SIZE),
        "reduce_scatter": (1, "input_list", others / WORLD_SIZE),
        "reduce_scatter_tensor": (1, "input", others / WORLD_SIZE),
        "all_gather": (1, "tensor", others),
        "all_gather_into_tensor": (1, "input_tensor", others),
        "isend": (0, "tensor", 1),
    }
    forward = KJTAllToAllForward.__call__

    def count_ids(self: KJTAllToAllForward, input: KeyedJaggedTensor) -> Any:
        nonlocal ids
        ids += input.values().numel()
        return forward(self, input)

    patched = {name: counting(name, *more) for name, more in sending.items()}
    with (
        mock.patch.multiple(dist, **patched),
        mock.patch.object(KJTAllToAllForward, "__call__", count_ids),
    ):
        step()
    total = torch.tensor([ids, number_bytes[False], number_bytes[True]])
    dist.all_reduce(total)
    return Sent(*total.tolist())
