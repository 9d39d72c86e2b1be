"""Exchange of the sizes of a batch, by which ranks also agree that all batches are good.

TorchRec exchanges sizes for each sharding of a collection, and then sends ids. Here one exchange
serves all shardings of a collection. A rank that refuses its batch sends :data:`FAILED` in place of
sizes, and all ranks raise its error before any ids are sent. The form of the batch travels beside
the sizes, so ranks also find batches that do not fit together, such as weights on one rank only.
The identity of the tables precedes both, so ranks find that they look up other collections.

Ids that arrive as quotients are restored here, so all that follows gets the ids of the batch:
feature processors, trackers of ids, lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.dist_data import KJTAllToAllTensorsAwaitable
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable, KJTSplitsAllToAllMeta
from torchrec.distributed.train_pipeline.runtime_forwards import KJTAllToAllForward
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torch_dynemb import ops
from torch_dynemb.distributed.failures import FAILED
from torch_dynemb.distributed.purposes import HEADER, Purpose, check_alike, identity_of
from torch_dynemb.table.shards import IdSlots
from torch_dynemb.torchrec.sharding.batches import with_ids

# what TorchRec may send for a sharding: a size of each for every rank
_LABELS = ("lengths", "values", "strides", "weights")
_NUMBERS = 1 + len(_LABELS)  # the form, then the sizes; "strides" is the batch size if there is one
_DTYPES = (
    None,
    torch.int64,
    torch.int32,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
)
_BASE = len(_DTYPES)


def leave_sizes(input_dist: nn.Module) -> None:
    """Make an input dist return its sizes and tensors, without an exchange.

    TorchRec's pipelines do the same, to exchange the sizes of several modules at once.
    """
    exchange: Any = getattr(input_dist, "_dist", None)
    if exchange is not None:  # data_parallel sends nothing
        exchange.forward = KJTAllToAllForward(
            pg=exchange._pg, splits=exchange._splits, stagger=exchange._stagger
        )


def _form(request: KJTSplitsAllToAllMeta) -> int:
    """Return the dtypes of the tensors that are sent, as a number."""
    dtypes = {
        label: of.dtype for label, of in zip(request.labels, request.input_tensors, strict=True)
    }
    form = 0
    for label in _LABELS:
        form = form * _BASE + _DTYPES.index(dtypes.get(label))
    return form


def _described(form: int) -> str:
    """Return what a form means: ``"values int64, weights float32"``."""
    parts = []
    for label in reversed(_LABELS):
        form, dtype = divmod(form, _BASE)
        if dtype:
            name = {"values": "ids", "strides": "a batch size per feature"}.get(label, label)
            kind = "" if label == "strides" else f" {str(_DTYPES[dtype]).removeprefix('torch.')}"
            parts.append(name + kind)
    return ", ".join(reversed(parts))


class SizesUnderWay:
    """Sizes of all shardings of a collection, on their way to the other ranks.

    Args:
        owner: class of the collection.
        tables: its tables.
        requests: of the shardings, in order: those of :func:`leave_sizes`, or awaitables that send
            nothing; or the error of a batch that this rank refuses.
        owned: the ids that this rank owns, by sharding.
        process_group: of the ranks.
        device: of the tables.
    """

    def __init__(
        self,
        owner: str,
        tables: tuple[str, ...],
        requests: Sequence[Any] | Exception,
        owned: Sequence[IdSlots],
        process_group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._owner = owner
        self._process_group = process_group
        self._owned = owned
        shardings = len(owned)
        self._requests: Sequence[Any] = []
        self._refused: Exception | None = None
        ranks = process_group.size()
        self._purpose = Purpose(f"lookup by {owner}", tables)
        self._width = max(HEADER, 1 + shardings * _NUMBERS)
        numbers = [FAILED] * (ranks * self._width)
        try:
            if isinstance(requests, Exception):
                raise requests
            self._requests = requests
            numbers = [number for rank in range(ranks) for number in self._message(requests, rank)]
        except Exception as error:
            self._refused = error
        sent = torch.tensor(numbers, dtype=torch.int64, device=device)
        self._received = torch.empty_like(sent)
        self._work = dist.all_to_all_single(
            self._received, sent, group=process_group, async_op=True
        )
        self._started: list[Awaitable[KeyedJaggedTensor]] | None = None

    def ids(self, sharding: int) -> Awaitable[KeyedJaggedTensor]:
        """Return the ids of a sharding, on their way. The first call waits and sends all ids.

        If a rank has refused its batch, the result raises the error, as the lookup begins.
        """
        if self._started is None:
            try:
                self._started = self._send_ids()
            except Exception as error:
                self._started = [_Raises(error)] * len(self._owned)
        return self._started[sharding]

    def _send_ids(self) -> list[Awaitable[KeyedJaggedTensor]]:
        self._work.wait()
        received = self._received.view(-1, self._width)
        check_alike(self._purpose, received[:, 0].tolist(), self._process_group, self._refused)
        sizes_of_ranks = received[:, 1 : 1 + len(self._owned) * _NUMBERS]
        by_rank = sizes_of_ranks.reshape(-1, len(self._owned), _NUMBERS).tolist()
        by_sharding = list(zip(*by_rank, strict=True))
        for request, sizes in zip(self._requests, by_sharding, strict=True):
            self._check_forms(request, [of_rank[0] for of_rank in sizes])
        return [
            _started(request, [of_rank[1:] for of_rank in sizes], owned)
            for request, sizes, owned in zip(self._requests, by_sharding, self._owned, strict=True)
        ]

    def _message(self, requests: Sequence[Any], rank: int) -> list[int]:
        sizes = [number for request in requests for number in _numbers(request, rank)]
        message = [identity_of(self._purpose), *sizes]
        return message + [0] * (self._width - len(message))

    def _check_forms(self, request: Any, forms: list[int]) -> None:
        """Raise ValueError, on all ranks, unless their batches have one form."""
        if len(set(forms)) == 1:
            return
        ranks = dist.get_process_group_ranks(self._process_group)
        other = next(r for r, form in enumerate(forms) if form != forms[0])
        keys = list(dict.fromkeys(request._input.keys()))
        raise ValueError(
            f"rank {ranks[other]}: {self._owner}: features {keys} are sent as "
            f"{_described(forms[other])}, but those of rank {ranks[0]} as {_described(forms[0])}: "
            "give all ranks the same dtypes, and weights or a batch size per feature on all or none"
        )


def _numbers(request: Any, rank: int) -> list[int]:
    """Return the form and the sizes that a sharding sends to a rank."""
    if not isinstance(request, KJTSplitsAllToAllMeta):
        return [0] * _NUMBERS
    sizes = {
        label: of[rank] for label, of in zip(request.labels, request.input_splits, strict=True)
    }
    if not request._input.variable_stride_per_key():
        sizes["strides"] = request._input.stride()
    return [_form(request), *(sizes.get(label, 0) for label in _LABELS)]


def _started(request: Any, sizes: list[list[int]], owned: IdSlots) -> Awaitable[KeyedJaggedTensor]:
    """Send the ids of a sharding, if it sends any.

    Args:
        sizes: that arrive from each rank, by label.
        owned: the ids that this rank owns.
    """
    if not isinstance(request, KJTSplitsAllToAllMeta):
        ids: Awaitable[KeyedJaggedTensor] = request.wait()
        ids.callbacks.append(partial(_arrived, owned=owned))
        return ids
    by_label = dict(zip(_LABELS, map(list, zip(*sizes, strict=True)), strict=True))
    variable = request._input.variable_stride_per_key()
    ids = KJTAllToAllTensorsAwaitable(
        pg=request.pg,
        input=request._input,
        splits=request.splits,
        input_splits=request.input_splits,
        output_splits=[by_label[label] for label in request.labels],
        input_tensors=request.input_tensors,
        labels=request.labels,
        keys=request.keys,
        device=request.device,
        stagger=request.stagger,
        stride_per_rank=None if variable else by_label["strides"],
    )
    ids.callbacks.append(partial(_arrived, owned=owned))
    return ids


def _arrived(features: KeyedJaggedTensor, owned: IdSlots) -> KeyedJaggedTensor:
    """Return features with the ids of quotients that were sent to this rank."""
    if not owned.whole:
        quotients = features.values().to(torch.int64).contiguous()
        features = with_ids(features, ops.unmix_ids(quotients, parts=owned.slots, part=owned.begin))
    features.as_sent = True
    return features


def as_sent(features: KeyedJaggedTensor) -> bool:
    """Return whether features arrived so from the ranks, not out of a feature processor."""
    return getattr(features, "as_sent", False)


class _OfSharding(Awaitable[Awaitable[KeyedJaggedTensor]]):  # type: ignore[misc]
    """Sizes of one sharding, as TorchRec waits for them."""

    def __init__(self, under_way: SizesUnderWay, sharding: int) -> None:
        super().__init__()
        self._under_way = under_way
        self._sharding = sharding

    def _wait_impl(self) -> Awaitable[KeyedJaggedTensor]:
        return self._under_way.ids(self._sharding)


class _Raises(Awaitable[KeyedJaggedTensor]):  # type: ignore[misc]
    """Ids of a batch that a rank has refused."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def _wait_impl(self) -> KeyedJaggedTensor:
        raise self._error


def as_torchrec_waits(
    under_way: SizesUnderWay, sent: KJTListSplitsAwaitable
) -> KJTListSplitsAwaitable:
    """Have TorchRec's modules and pipelines wait for sizes.

    Args:
        under_way: the sizes.
        sent: what TorchRec's ``input_dist`` has returned: a part for each sharding.
    """
    sent.awaitables = [_OfSharding(under_way, sharding) for sharding in range(len(sent.awaitables))]
    return sent


__all__ = ["SizesUnderWay", "as_sent", "as_torchrec_waits", "leave_sizes"]
