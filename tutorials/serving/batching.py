"""Requests of several clients in one run of a model."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

import torch_dynemb as td
from torch_dynemb.serving.packages.inputs import input_tensors, shape_text

Outcome = list[Tensor] | Exception


class Batches:
    """Batches of requests: one run of a model with the samples of all of them.

    A batch waits for a runner, and meanwhile takes further requests. A table gives a sample the
    same row in any batch; dense layers may round in another order, as they do in a batch of
    another size. A model that lets samples of a batch influence each other must not be batched: a
    package does not say so.

    Args:
        model: what :func:`torch_dynemb.serving.load` gives. The batch is the size that each of its
            inputs and outputs has in one dimension.
        max_batch: most samples of a run. A larger request runs alone.
        max_delay_ms: how long a batch waits for further requests although a runner is free.
        runners: runs at the same time.

    Attributes:
        runs: number of runs since the start.

    Raises:
        ValueError: no size, or more than one, is in all inputs and outputs.
    """

    def __init__(
        self,
        model: td.serving.ServedModel,
        *,
        max_batch: int,
        max_delay_ms: float = 0,
        runners: int = 1,
    ) -> None:
        size = _batch_size(model)
        self._model = model
        self._most = max_batch if size.most is None else min(max_batch, size.most)
        self._seconds = max_delay_ms / 1e3
        self._inputs = [_dim_of(of, size.symbol) for of in model.inputs]
        self._outputs = [_dim_of(of, size.symbol) for of in model.outputs]
        self._runners = threading.Semaphore(runners)
        self._changing = threading.Lock()
        self._open: dict[object, _Batch] = {}  # by the other sizes of requests
        self.runs = 0

    def checked(self, request: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a request.

        Args:
            request: as for ``ServedModel.run_flat``.

        Raises:
            TypeError, ValueError: as ``ServedModel.run_flat``.
        """
        return input_tensors(self._model.inputs, request, self._model.device)

    def run_flat(self, request: Sequence[Tensor]) -> list[Tensor]:
        """Run a request in a batch; the arguments, the result and errors of ``run_flat``."""
        tensors = self.checked(request)
        samples = tensors[0].shape[self._inputs[0]]
        if samples >= self._most:
            return _result(self._alone(tensors))
        others = tuple(
            (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
            for tensor, dim in zip(tensors, self._inputs, strict=True)
        )
        with self._changing:
            batch = self._open.get(others)
            if batch is not None and batch.samples + samples > self._most:
                batch.full.set()
                batch = None
            leads = batch is None
            if batch is None:
                batch = self._open[others] = _Batch()
            number = len(batch.requests)
            batch.requests.append(tensors)
            batch.samples += samples
            if batch.samples == self._most:
                batch.full.set()
                del self._open[others]
        if leads:  # the first request of a batch runs it
            batch.full.wait(self._seconds)
            with self._runners:
                with self._changing:
                    if self._open.get(others) is batch:
                        del self._open[others]
                try:
                    batch.outcomes = self.run_together(batch.requests)
                finally:
                    batch.done.set()
        batch.done.wait()
        return _result(batch.outcomes[number])

    def run_together(self, requests: Sequence[list[Tensor]]) -> list[Outcome]:
        """Run requests as one batch, or each alone if the model refuses the batch.

        Args:
            requests: what :meth:`checked` has returned.

        Returns:
            Outputs of each request, or its error.
        """
        if len(requests) > 1:
            try:
                return list(self._split(requests))
            except (RuntimeError, TypeError, ValueError):
                pass  # of one request, which has it again below
        return [self._alone(request) for request in requests]

    def _split(self, requests: Sequence[list[Tensor]]) -> Iterator[list[Tensor]]:
        joined = [
            torch.cat(parts, dim)
            for parts, dim in zip(zip(*requests, strict=True), self._inputs, strict=True)
        ]
        sizes = [request[0].shape[self._inputs[0]] for request in requests]
        outputs = self._run(joined)
        parts = [of.split(sizes, dim) for of, dim in zip(outputs, self._outputs, strict=True)]
        return map(list, zip(*parts, strict=True))

    def _alone(self, request: list[Tensor]) -> Outcome:
        try:
            return self._run(request)
        except Exception as error:
            return error

    def _run(self, tensors: list[Tensor]) -> list[Tensor]:
        with self._changing:
            self.runs += 1
        return self._model.run_flat(tensors)


class _Batch:
    """Requests that run together, and what came of them."""

    def __init__(self) -> None:
        self.requests: list[list[Tensor]] = []
        self.samples = 0
        self.outcomes: list[Outcome] = []
        self.full, self.done = threading.Event(), threading.Event()


def _result(outcome: Outcome) -> list[Tensor]:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


def _batch_size(model: td.serving.ServedModel) -> td.serving.Size:
    """Return the size that each input and output has in one dimension."""
    found: list[td.serving.Size] | None = None
    for kind, tensors in (("input", model.inputs), ("output", model.outputs)):
        for of in tensors:
            own = [size for size in of.sizes if size is not None and _is_batch_of(of, size)]
            symbols = {size.symbol for size in own}
            found = own if found is None else [size for size in found if size.symbol in symbols]
            if not found:
                raise ValueError(
                    f"max_batch: the {kind} '{of.name}' has shape {shape_text(of.sizes)}, but "
                    "requests are batched along a size that each input and output has in one "
                    "dimension: serve this package without max_batch"
                )
    if not found or len(found) > 1:
        names = [size.symbol for size in found or []]
        raise ValueError(
            f"max_batch: the inputs and outputs have the dynamic sizes {names} in common, expected "
            "one, the batch: serve this package without max_batch"
        )
    return found[0]


def _is_batch_of(of: td.serving.Input, size: td.serving.Size) -> bool:
    """Return whether a size grows with the samples, in a single dimension of a tensor."""
    same = [other for other in of.sizes if other is None or other.symbol == size.symbol]
    return size.symbol is not None and (size.times, size.plus) == (1, 0) and len(same) == 1


def _dim_of(of: td.serving.Input, symbol: str | None) -> int:
    return next(n for n, size in enumerate(of.sizes) if size is not None and size.symbol == symbol)
