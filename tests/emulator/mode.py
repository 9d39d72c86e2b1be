"""Sends calls of ``torch.ops.dynemb`` to the emulated CUDA kernels."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from emulator.build import build

# By function of the emulator. Tests also set them on a GPU, and must not build an emulator there.
_settings: dict[str, int] = {}


@functools.cache
def library() -> ctypes.CDLL:
    """The emulated kernels, built and loaded at the first call."""
    path = str(build())
    torch.ops.load_library(path)
    loaded = declare(ctypes.CDLL(path))
    for function, value in _settings.items():
        getattr(loaded, function)(value)
    return loaded


def _set(function: str, value: int) -> None:
    """Sets it now, or when the emulator is loaded."""
    _settings[function] = value
    if library.cache_info().currsize > 0:
        getattr(library(), function)(value)


def declare(loaded: ctypes.CDLL) -> ctypes.CDLL:
    """Sets the signatures of the emulator's own functions in a library."""
    loaded.emulator_set_seed.argtypes = [ctypes.c_ulonglong]
    loaded.emulator_set_memory_limit.argtypes = [ctypes.c_longlong]
    loaded.emulator_set_capturing.argtypes = [ctypes.c_int]
    loaded.emulator_set_capturing_elsewhere.argtypes = [ctypes.c_int]
    loaded.emulator_set_calls_behind.argtypes = [ctypes.c_longlong]
    loaded.emulator_refuse_unmapping.argtypes = [ctypes.c_longlong]
    loaded.emulator_set_host_limit.argtypes = [ctypes.c_longlong]
    loaded.emulator_refuse_location.argtypes = [ctypes.c_int, ctypes.c_int]
    loaded.emulator_waits.argtypes = [ctypes.c_int]
    loaded.emulator_waits.restype = ctypes.c_longlong
    for function in (
        loaded.emulator_set_calls_behind,
        loaded.emulator_set_seed,
        loaded.emulator_set_memory_limit,
        loaded.emulator_set_capturing,
        loaded.emulator_set_capturing_elsewhere,
        loaded.emulator_refuse_unmapping,
        loaded.emulator_set_host_limit,
        loaded.emulator_refuse_location,
    ):
        function.restype = None
    loaded.emulator_created_bytes.restype = ctypes.c_longlong
    loaded.emulator_host_bytes.restype = ctypes.c_longlong
    loaded.emulator_forbidden_calls.restype = ctypes.c_longlong
    loaded.emulator_calls_behind.restype = ctypes.c_longlong
    loaded.emulator_launches.restype = ctypes.c_longlong
    return loaded


def set_seed(seed: int) -> None:
    """Shuffles the order of threads and blocks; 0: ascending."""
    _set("emulator_set_seed", seed)


def set_memory_limit(size: int | None) -> None:
    """Bytes of device memory that may exist at a time; None: no limit."""
    _set("emulator_set_memory_limit", -1 if size is None else size)


def created_bytes() -> int:
    """Bytes of device memory that exist."""
    return int(library().emulator_created_bytes())


def set_host_limit(size: int | None) -> None:
    """Bytes of host memory that the driver may map for the device at a time; None: no limit."""
    _set("emulator_set_host_limit", -1 if size is None else size)


def host_bytes() -> int:
    """Bytes of host memory that are mapped for the device."""
    return int(library().emulator_host_bytes())


HOST_LOCATIONS = {"HOST": 2, "HOST_NUMA": 3}


def refuse_locations(*names: str) -> None:
    """The driver refuses these kinds of host memory, and accepts the others."""
    for name, kind in HOST_LOCATIONS.items():
        library().emulator_refuse_location(kind, int(name in names))


def set_capturing(on: bool) -> None:
    """Whether the default stream says that it is being captured."""
    _set("emulator_set_capturing", int(on))


def set_capturing_elsewhere(on: bool) -> None:
    """Whether another thread seems to capture another stream, in the global mode."""
    _set("emulator_set_capturing_elsewhere", int(on))


def forbidden_calls() -> int:
    """Number of calls so far that would have invalidated a capture."""
    return int(library().emulator_forbidden_calls())


def set_calls_behind(calls: int) -> None:
    """How many insertions the device seems to be behind; each look at the stream does one."""
    library().emulator_set_calls_behind(calls)


def calls_behind() -> int:
    """How many insertions the device still seems to have to do."""
    return int(library().emulator_calls_behind())


def refuse_unmapping(calls: int) -> None:
    """The driver refuses so many calls that unmap memory."""
    library().emulator_refuse_unmapping(calls)


WAITS = (
    "cudaDeviceSynchronize",
    "cudaStreamSynchronize",
    "cudaEventSynchronize",
    "cudaStreamQuery",
    "cudaEventQuery",
)


def waits() -> Counter[str]:
    """How often the host has waited for the device so far, or asked whether it is done, by call."""
    return Counter({name: int(library().emulator_waits(k)) for k, name in enumerate(WAITS)})


def launches() -> int:
    """Number of kernels that have run."""
    return int(library().emulator_launches())


# Kernels of this key serve every device; they, too, are part of the CUDA sources.
KEYS = ("CPU", "CompositeExplicitAutograd")


class EmulatedCuda(TorchDispatchMode):
    """Within it, ops of ``dynemb`` on CPU tensors run as emulated CUDA kernels, where there is one.

    Attributes:
        redirected: names of the ops that have run emulated.
    """

    def __init__(self) -> None:
        super().__init__()
        library()
        self.redirected: set[str] = set()

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "dynemb":
            name = func._schema.name.split("::")[1]
            emulated = f"dynemb_emulated::{name}"
            if any(torch._C._dispatch_has_kernel_for_dispatch_key(emulated, key) for key in KEYS):
                self.redirected.add(name)
                packet = getattr(torch.ops.dynemb_emulated, name)
                return getattr(packet, func._overloadname)(*args, **kwargs)
        return func(*args, **kwargs)
