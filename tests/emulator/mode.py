"""Sends calls of ``torch.ops.dynemb`` to the emulated CUDA kernels."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

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
    loaded.emulator_take_graph.argtypes = []
    loaded.emulator_take_graph.restype = ctypes.c_void_p
    loaded.emulator_replay.argtypes = [ctypes.c_void_p]
    loaded.emulator_end_graph.argtypes = [ctypes.c_void_p]
    loaded.emulator_set_capturing_elsewhere.argtypes = [ctypes.c_int]
    loaded.emulator_set_calls_behind.argtypes = [ctypes.c_longlong]
    loaded.emulator_refuse_unmapping.argtypes = [ctypes.c_longlong]
    loaded.emulator_set_host_limit.argtypes = [ctypes.c_longlong]
    loaded.emulator_refuse_location.argtypes = [ctypes.c_int, ctypes.c_int]
    loaded.emulator_fault.argtypes = [ctypes.c_longlong]
    loaded.emulator_is_copyable.argtypes = [ctypes.c_void_p, ctypes.c_longlong]
    loaded.emulator_ignore_wait.argtypes = [ctypes.c_int, ctypes.c_longlong]
    loaded.emulator_set_lazy.argtypes = [ctypes.c_int]
    loaded.emulator_set_current_stream.argtypes = [ctypes.c_void_p]
    loaded.emulator_wait_stream.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
    loaded.emulator_copy.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_longlong]
    loaded.emulator_current_stream.restype = ctypes.c_void_p
    loaded.emulator_new_stream.restype = ctypes.c_void_p
    loaded.emulator_waits.argtypes = [ctypes.c_int]
    loaded.emulator_waits.restype = ctypes.c_longlong
    for function in (
        loaded.emulator_set_calls_behind,
        loaded.emulator_set_seed,
        loaded.emulator_set_memory_limit,
        loaded.emulator_set_capturing,
        loaded.emulator_set_capturing_elsewhere,
        loaded.emulator_replay,
        loaded.emulator_end_graph,
        loaded.emulator_refuse_unmapping,
        loaded.emulator_set_host_limit,
        loaded.emulator_refuse_location,
        loaded.emulator_ignore_wait,
        loaded.emulator_fault,
        loaded.emulator_set_lazy,
        loaded.emulator_set_current_stream,
        loaded.emulator_wait_stream,
        loaded.emulator_copy,
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


def capturing() -> bool:
    """Whether the current stream of this thread is being captured."""
    return bool(library().emulator_is_capturing())


class Graph:
    """Captured work of emulated kernels, as ``torch.cuda.CUDAGraph``. Ops of torch are not in it.

    What the capture makes lives as long as the graph, as memory from a graph's pool does. A tensor
    that ops of the capture were given from outside may end before a replay, which then fails: the
    kernels would use the address of freed memory.
    """

    _capturing: Graph | None = None

    def __init__(self) -> None:
        self._address: int | None = None
        self._made: dict[StorageWeakRef, torch.Tensor] = {}
        self._given: list[tuple[str, StorageWeakRef]] = []

    @contextmanager
    def capture(self) -> Iterator[None]:
        """Capture the default stream; the work of the capture is done at once, too."""
        set_capturing(True)
        Graph._capturing = self
        try:
            yield
        finally:
            Graph._capturing = None
            set_capturing(False)
            self._address = library().emulator_take_graph()

    def note(self, func: Any, arguments: object, results: object) -> None:
        """Note the tensors of an op in the capture."""
        given = set(_storages(arguments)) - self._made.keys()
        made = _storages(results)
        self._made |= {storage: made[storage] for storage in made.keys() - given}
        if func.namespace == "dynemb":
            self._given += [(str(func), storage) for storage in given]

    def replay(self) -> None:
        """Do the captured work again, on the current stream.

        Raises:
            AssertionError: a tensor that the capture was given has been freed.
        """
        freed = sorted({op for op, given in self._given if given.expired()})
        assert not freed, f"a replay uses freed arguments of {freed}"
        library().emulator_replay(self._address)

    def __del__(self) -> None:
        if self._address is not None:
            library().emulator_end_graph(self._address)


def _storages(tree: object) -> dict[StorageWeakRef, torch.Tensor]:
    tensors = filter(torch.is_tensor, tree_leaves(tree))
    return {StorageWeakRef(tensor.untyped_storage()): tensor for tensor in tensors}


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
    "cudaStreamWaitEvent",
)


def waits() -> Counter[str]:
    """How often the host or a stream has waited so far, or the host has asked, by call."""
    return Counter({name: int(library().emulator_waits(k)) for k, name in enumerate(WAITS)})


def ignore_wait(name: str, number: int) -> None:
    """A wait does nothing: the one of this number from now on. 0: all do."""
    library().emulator_ignore_wait(WAITS.index(name), number)


def set_lazy(order: str | None) -> None:
    """Whether work of all streams but the default one is done only when something waits for it.

    Args:
        order: of streams in a wait for the device, "oldest" or "newest" first; None: all work is
            done at once, from now on also what has not been done yet.
    """
    library().emulator_set_lazy((None, "oldest", "newest").index(order))


class Stream:
    """A stream of the emulated device; the default one has no address."""

    def __init__(self, address: int | None = None) -> None:
        self.address = address

    @classmethod
    def new(cls) -> Stream:
        return cls(library().emulator_new_stream())

    @classmethod
    def current(cls) -> Stream:
        return cls(library().emulator_current_stream())

    def wait_stream(self, other: Stream) -> None:
        library().emulator_wait_stream(self.address, other.address)

    def copy_(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy contiguous tensors of one shape and dtype."""
        size = source.numel() * source.element_size()
        library().emulator_copy(self.address, to.data_ptr(), source.data_ptr(), size)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """Ops of this thread run on it."""
        before = self.current()
        library().emulator_set_current_stream(self.address)
        try:
            yield
        finally:
            library().emulator_set_current_stream(before.address)


def fault(launch: int) -> None:
    """The launch of this number from now on faults, and every later call fails.

    Args:
        launch: 1: the next one. 0: the device works again, as in a new process.
    """
    library().emulator_fault(launch)


def launches() -> int:
    """Number of kernels that have run."""
    return int(library().emulator_launches())


# Kernels of this key serve every device; they, too, are part of the CUDA sources.
KEYS = ("CPU", "CompositeExplicitAutograd")


_COPIES = ("aten::copy_", "aten::clone", "aten::_to_copy")


def check_copy(*tensors: torch.Tensor) -> None:
    """Raise as CUDA does if torch would copy whole ranges, one of them in memory of two places.

    Torch copies tensors of other dtypes and with gaps by kernels, which may read any memory.
    """
    if host_bytes() == 0 or len({tensor.dtype for tensor in tensors}) > 1:
        return
    if not all(tensor.is_contiguous() for tensor in tensors):
        return
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size > 0 and not library().emulator_is_copyable(tensor.data_ptr(), size):
            raise RuntimeError("cudaMemcpy: invalid argument: HBM and host memory in one copy")


class _HostCopies(TorchFunctionMode):
    """Checks copies of emulated device tensors to the CPU, which dispatch does not see."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        to_cpu = func is torch.Tensor.to and "cpu" in (str(arg) for arg in args[1:])
        if func is torch.Tensor.cpu or to_cpu:
            check_copy(args[0])
        return func(*args, **(kwargs or {}))


class EmulatedCuda(TorchDispatchMode):
    """Within it, ops of ``dynemb`` on CPU tensors run as emulated CUDA kernels, where there is one.

    Attributes:
        redirected: names of the ops that have run emulated.
    """

    def __init__(self) -> None:
        super().__init__()
        library()
        self.redirected: set[str] = set()
        self._copies = _HostCopies()

    def __enter__(self) -> EmulatedCuda:
        self._copies.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._copies.__exit__(*error)

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        result = self._call(func, args, kwargs)
        if Graph._capturing is not None:
            Graph._capturing.note(func, (args, kwargs), result)
        return result

    def _call(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func.namespace == "dynemb":
            name = func._schema.name.split("::")[1]
            emulated = f"dynemb_emulated::{name}"
            if any(torch._C._dispatch_has_kernel_for_dispatch_key(emulated, key) for key in KEYS):
                self.redirected.add(name)
                packet = getattr(torch.ops.dynemb_emulated, name)
                return getattr(packet, func._overloadname)(*args, **kwargs)
        if func._schema.name in _COPIES:
            check_copy(*(leaf for leaf in (*args, *kwargs.values()) if torch.is_tensor(leaf)))
        return func(*args, **kwargs)
