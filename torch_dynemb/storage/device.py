"""Selection of the device of tables, and checks that tables can be there."""

from __future__ import annotations

import torch

from torch_dynemb import ops
from torch_dynemb.argument_checks import described
from torch_dynemb.storage.cuda import CudaMemory
from torch_dynemb.storage.host import HostMemory
from torch_dynemb.storage.memory import TableMemory


def check_device(owner: str, device: torch.device) -> None:
    """Raise RuntimeError for a device that tables cannot be on."""
    if device.type == "cpu":
        return
    if device.type != "cuda":
        raise RuntimeError(f"{owner}: device is {device}, expected the CPU or a CUDA device")
    if not ops.has_cuda_kernels():
        raise RuntimeError(
            f"{owner}: device is {device}, but this torch_dynemb was built without CUDA kernels: "
            "build it with DYNEMB_CUDA=1, where nvcc is on PATH or in CUDA_HOME, or keep the table "
            "on the CPU"
        )
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"{owner}: device is {device}, but torch finds no CUDA device: keep the table on the "
            "CPU"
        )


def device_of(owner: str, device: object) -> torch.device:
    """Return the device of that name.

    Raises:
        TypeError: it is neither a device nor a name.
        RuntimeError: this kind of device is unknown.
    """
    if isinstance(device, bool) or not isinstance(device, torch.device | str | int):
        raise TypeError(f"{owner}: device is {described(device)}, expected a torch.device or str")
    try:
        return torch.device(device)
    except RuntimeError as error:
        raise RuntimeError(f"{owner}: device is {device!r}: {error}") from None


def memory_of(owner: str, device: torch.device | str | None) -> TableMemory:
    """Return the memory of a device; None: torch's default device.

    Raises:
        RuntimeError: tables cannot be on the device.
    """
    chosen = torch.get_default_device() if device is None else device_of(owner, device)
    check_device(owner, chosen)
    return HostMemory() if chosen.type == "cpu" else CudaMemory(chosen)


__all__ = ["check_device", "device_of", "memory_of"]
