"""Bytes that ranks send to each other in a step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec import KeyedJaggedTensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward

INTEGERS, FLOATS = ("splits", "lengths", "ids"), ("rows", "gradients")


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


class _Counts:
    """Bytes that this rank sends by kind, counted at the calls of torch.distributed."""

    def __init__(self) -> None:
        self.bytes: Counter[str] = Counter()
        self.ids = 0
        self._integers = 0  # exchanges of integers with known sizes: lengths, ids, lengths ...

    def kind(self, tensor: Tensor, *, sized: bool) -> str:
        if tensor.is_floating_point():
            return FLOATS[torch._C._current_graph_task_id() != -1]  # in a backward or not
        if not sized:
            return "splits"
        self._integers += 1
        return ("lengths", "ids")[self._integers % 2 == 0]

    def all_to_all(self, input: Tensor, sizes: list[int] | None, group: Any) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        kind = self.kind(input, sized=sizes is not None)
        sizes = [len(input) // ranks] * ranks if sizes is None else sizes
        numbers = math.prod(input.shape[1:]) * (sum(sizes) - sizes[rank])
        self.bytes[kind] += numbers * input.element_size()

    def copies(self, sent: Tensor | list[Tensor], copies: float) -> None:
        for tensor in sent if isinstance(sent, list) else [sent]:
            self.bytes[self.kind(tensor, sized=True)] += int(tensor.nbytes * copies)


def counted(step: Callable[[], None]) -> tuple[Counter[str], int]:
    """Run a step; return the bytes that this rank sends by kind, and its ids.

    Kinds are splits (sizes of what follows), lengths of bags, ids, rows (outputs of tables) and
    gradients. Ids are those handed to the all-to-all.
    """
    counts = _Counts()
    ranks = dist.get_world_size()
    functions = {name: getattr(dist, name) for name in (*_COPIES, "all_to_all_single", "isend")}

    def all_to_all_single(
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int] | None = None,
        input_split_sizes: list[int] | None = None,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        counts.all_to_all(input, input_split_sizes, group)
        return functions["all_to_all_single"](
            output, input, output_split_sizes, input_split_sizes, group, async_op
        )

    def isend(tensor: Tensor, *arguments: Any, **more: Any) -> Any:
        counts.copies(tensor, 1)
        return functions["isend"](tensor, *arguments, **more)

    def counting(name: str, argument: str, copies: float) -> Callable[..., Any]:
        def call(*arguments: Any, **more: Any) -> Any:
            counts.copies(arguments[1] if len(arguments) > 1 else more[argument], copies)
            return functions[name](*arguments, **more)

        return call

    def counting_ids(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, input: KeyedJaggedTensor) -> Any:
            counts.ids += input.values().numel()
            return forward(self, input)

        return call

    patched: dict[str, Any] = {
        name: counting(name, argument, (ranks - 1) / (1 if gathers else ranks))
        for name, (argument, gathers) in _COPIES.items()
    }
    patched |= {"all_to_all_single": all_to_all_single, "isend": isend}
    of_static, of_dynamic = (
        mock.patch.object(kind, name, counting_ids(getattr(kind, name)))
        for kind, name in ((KJTAllToAll, "forward"), (KJTAllToAllForward, "__call__"))
    )
    with mock.patch.multiple(dist, **patched), of_static, of_dynamic:
        step()
    return counts.bytes, counts.ids


_COPIES = {  # name of the argument that is sent, and whether all others get a copy of it
    "reduce_scatter": ("input_list", False),
    "reduce_scatter_tensor": ("input", False),
    "all_gather": ("tensor", True),
    "all_gather_into_tensor": ("input_tensor", True),
}


def sent_by(step: Callable[[], None]) -> Sent:
    """Run a step and count the bytes that the ranks send."""
    by_kind, ids = counted(step)
    of_kinds = [sum(by_kind[kind] for kind in kinds) for kinds in (INTEGERS, FLOATS)]
    total = torch.tensor([ids, *of_kinds])
    dist.all_reduce(total)
    return Sent(*total.tolist())
