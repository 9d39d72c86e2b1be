"""Streams for pipelines of TorchRec that ask a device without streams for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch


@contextmanager
def streams_of_cpu() -> Iterator[None]:
    """Let the CPU have streams, which tensors are tied to."""
    with (
        mock.patch.object(torch.Tensor, "record_stream"),
        mock.patch("torch.get_device_module", return_value=torch.cpu),
        mock.patch.object(torch.cpu.Stream, "device", torch.device("cpu"), create=True),
    ):
        yield
