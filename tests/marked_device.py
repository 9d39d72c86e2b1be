"""A device that every machine has: CPU tensors that are marked.

A test that mixes tensors of a GPU with those of the CPU fails on a GPU only. Within
:func:`marked_device` torch's default device is ``DEVICE``. Its tensors are CPU tensors in memory
that is marked. They raise :class:`MixedDevicesError` where tensors of a GPU would raise: when they
meet an unmarked tensor, and when they are made NumPy arrays. What torch allows is allowed: numbers
(tensors without dims) of the CPU, ``copy_``, indices of the CPU, ``.cpu()``, ``.tolist()``. Ops of
``torch_dynemb`` take tensors of one device only.

torch.set_default_device("cuda") does the same to every program that calls it, so torch_dynemb says
of each tensor that it makes where it is.

What this does not show: branches that only a GPU takes (``device.type`` is ``"cpu"``), its kernels
(see tests/emulator), and what is compiled or exported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dynemb.storage.device import memory_of
from torch_dynemb.storage.host import HostMemory
from torch_dynemb.storage.memory import TableMemory
from torch_dynemb.table import extension
from torch_dynemb.table import group as table

HOST = torch.device("cpu")
DEVICE = torch.device("cpu", 0)  # to torch the CPU, and yet it does not equal HOST

aten = torch.ops.aten
COPIES = {aten.copy_.default, aten._foreach_copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
# beside pointwise ops these take a number of the CPU
TAKES_NUMBERS = {
    aten.fill_.Tensor,
    aten.masked_fill.Tensor,
    aten.masked_fill_.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._foreach_add_.Tensor,
    aten._foreach_mul_.Tensor,
    aten._foreach_div_.Tensor,
}
HOST_RESULTS = {torch.ops.dynemb.reported_counts.default}  # copies of the CPU, on a GPU too


class MixedDevicesError(AssertionError):
    """What fails on a GPU. No RuntimeError, for many tests expect one."""


def address(tensor: Tensor) -> int:
    """Of its storage; of a sparse tensor, that of its values."""
    if not torch._C._has_storage(tensor):
        tensor = tensor._values()
    return torch._C._storage_address(tensor)


class Marks:
    """Which memory belongs to DEVICE."""

    def __init__(self) -> None:
        # while there is a weak reference, no other storage has this address
        self._storages: dict[int, StorageWeakRef] = {}
        self._limit = 1024

    def __contains__(self, tensor: Tensor) -> bool:
        return address(tensor) in self._storages

    def add(self, tensor: Tensor) -> None:
        if tensor.is_sparse:
            self.add(tensor._indices())
            self.add(tensor._values())
        elif tensor not in self:
            self.add_storage(tensor.untyped_storage())

    def remove(self, tensor: Tensor) -> None:
        self._storages.pop(address(tensor), None)

    def has_storage(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._storages

    def add_storage(self, storage: torch.UntypedStorage) -> None:
        if len(self._storages) >= self._limit:
            self._storages = {a: s for a, s in self._storages.items() if not s.expired()}
            self._limit = 2 * len(self._storages) + 1024
        self._storages[storage._cdata] = StorageWeakRef(storage)


MARKS = Marks()


def device_of(tensor: Tensor) -> torch.device:
    with torch._C.DisableTorchFunction():
        return DEVICE if tensor in MARKS else tensor.device


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """Tensors in the arguments or results of an op."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += tensors_in(value)
    return found


def moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy."""
    copy = tensor.clone()
    if device == DEVICE:
        MARKS.add(copy)
    else:
        MARKS.remove(copy)
    return copy


class Move(torch.autograd.Function):
    """As :func:`moved`; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.device = device_of(tensor)
        return moved(tensor, device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return moved(gradient, ctx.device), None


class Ops(TorchDispatchMode):
    """Checks the tensors that an op is given, and marks those that it makes.

    Attributes:
        called: what the function of torch that calls the op was given: its device, or else its
            arguments.
    """

    def __init__(self) -> None:
        super().__init__()
        self.called: torch.device | tuple[Any, ...] = HOST

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and hiding from the compiler takes microseconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = {} if kwargs is None else kwargs
        with torch._C.DisableTorchFunction():
            given = tensors_in(itertools.chain(args, kwargs.values()))
            host = [tensor for tensor in given if tensor not in MARKS]
            any_marked = len(host) < len(given)
            if any_marked and host:
                check(func, args, host)
            result = func(*args, **kwargs)
            if self._makes_marked(given, any_marked, kwargs) and func not in HOST_RESULTS:
                made = tensors_in([result])
                kept = {address(tensor) for tensor in host}  # what was unmarked stays so
                for tensor in made:
                    if tensor.device == HOST and address(tensor) not in kept:
                        MARKS.add(tensor)
        return result

    def _makes_marked(
        self, given: list[Tensor], any_marked: bool, kwargs: Mapping[str, Any]
    ) -> bool:
        device = kwargs.get("device")
        if device is not None and device != HOST:
            return bool(device == DEVICE)
        if isinstance(self.called, torch.device):
            return self.called == DEVICE if device is not None or not given else any_marked
        # what implementations make for themselves is made where their arguments are
        return any_marked or (not given and any(t in MARKS for t in tensors_in(self.called)))


def check(func: Any, args: Sequence[Any], host: list[Tensor]) -> None:
    """Raises MixedDevicesError if unmarked tensors may not be arguments beside marked ones."""
    host = [tensor for tensor in host if tensor.device == HOST]
    if func in COPIES:
        return
    if func in INDEXING and args[0] in MARKS:
        indices = {id(index) for index in tensors_in([args[1]])}
        host = [tensor for tensor in host if id(tensor) not in indices]
    if torch.Tag.pointwise in func.tags or func in TAKES_NUMBERS:
        host = [tensor for tensor in host if tensor.dim() > 0]
    if host:
        shapes = ", ".join(f"{list(tensor.shape)} {tensor.dtype}" for tensor in host)
        raise MixedDevicesError(
            f"{func}: tensors of the device under test meet tensors of the CPU: {shapes}"
        )


class Generator(torch.Generator):
    """One that can belong to DEVICE."""

    on_device = False

    def __new__(cls, device: torch.device | str = HOST) -> Generator:
        made = super().__new__(cls, HOST)
        made.on_device = torch.device(device) == DEVICE
        return made

    @property
    def device(self) -> torch.device:
        return DEVICE if self.on_device else HOST


class Functions(DeviceContext):
    """What an op does not see: devices as arguments and as results, generators, NumPy.

    torch.get_default_device() takes it for what ``with torch.device(...)`` makes.
    """

    def __init__(self, ops: Ops) -> None:
        super().__init__(DEVICE)
        self._ops = ops
        self._factories = _device_constructors()
        self._special: dict[Any, Callable[..., Any]] = {
            Tensor.device.__get__: lambda func, tensor, *_: device_of(tensor),
            Tensor.is_shared: lambda func, tensor: tensor in MARKS or func(tensor),
            Tensor.backward: backward,
            Tensor.numpy: to_numpy,
            Tensor.__array__: to_numpy,
            Tensor.to: self._to,
            Tensor.cpu: lambda func, tensor, **kwargs: self._to(Tensor.to, tensor, HOST, **kwargs),
        }

    # those of DeviceContext keep a stack of their own
    __enter__ = TorchFunctionMode.__enter__
    __exit__ = TorchFunctionMode.__exit__

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        special = self._special.get(func)
        kwargs = {} if kwargs is None else kwargs
        before = self._ops.called
        device = kwargs.get("device")
        self._ops.called = (*args, *kwargs.values()) if device is None else torch.device(device)
        try:
            if special is not None:
                return special(func, *args, **kwargs)
            if func in self._factories:
                return self._make(func, args, kwargs)
            if kwargs.get("generator") is not None:
                on_device = any(tensor in MARKS for tensor in tensors_in(args))
                check_generator(func, kwargs, DEVICE if on_device else HOST)
            return func(*args, **kwargs)
        finally:
            self._ops.called = before

    def _to(self, func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target = None
        for value in (*args, kwargs.get("device"), kwargs.get("other")):
            if isinstance(value, (torch.device, str)):
                target = torch.device(value)
            elif isinstance(value, Tensor):
                target = device_of(value)
        if target not in (HOST, DEVICE):
            return func(tensor, *args, **kwargs)
        if "device" in kwargs:
            kwargs["device"] = HOST
        self._ops.called = (tensor,)
        # all but the device
        args = tuple(HOST if isinstance(value, (torch.device, str)) else value for value in args)
        cast = func(tensor, *args, **kwargs)
        return cast if device_of(cast) == target else Move.apply(cast, target)

    def _make(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
        given = kwargs.get("device")
        device = self._ops.called = DEVICE if given is None else torch.device(given)
        check_generator(func, kwargs, device)
        if func in (torch.as_tensor, torch.asarray) and device in (HOST, DEVICE):
            made = func(*args, **{**kwargs, "device": HOST})  # may be what it was given
            return made if device_of(made) == device else moved(made, device)
        made = func(*args, **{**kwargs, "device": device})
        if device == DEVICE:
            MARKS.add(made)
        return made


def backward(
    func: Any, tensor: Tensor, gradient: Tensor | None = None, *args: Any, **kwargs: Any
) -> None:
    if gradient is not None and (gradient in MARKS) != (tensor in MARKS):
        raise MixedDevicesError("backward: the gradient is on another device than the tensor")
    func(tensor, gradient, *args, **kwargs)


def to_numpy(func: Any, tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if tensor in MARKS:
        raise MixedDevicesError(
            f"{func.__name__}: a tensor of the device under test is not a NumPy array: use .cpu()"
        )
    return func(tensor, *args, **kwargs)


def check_generator(func: Any, kwargs: Mapping[str, Any], device: torch.device) -> None:
    generator = kwargs.get("generator")
    if generator is not None and generator.device != device:
        raise MixedDevicesError(f"{func.__name__}: generator and tensor are on different devices")


class MarkedMemory(HostMemory):
    """Of groups on DEVICE."""

    device = DEVICE

    def reserve(self, size: Sequence[int], dtype: torch.dtype, *, huge_pages: bool) -> Tensor:
        reserved = super().reserve(size, dtype, huge_pages=huge_pages)
        MARKS.add(reserved)
        return reserved


def marked_memory_of(owner: str, device: torch.device | str | None) -> TableMemory:
    chosen = torch.get_default_device() if device is None else torch.device(device)
    return MarkedMemory() if chosen == DEVICE else memory_of(owner, chosen)


def location_of(storage: torch.UntypedStorage) -> str | None:
    return str(DEVICE) if MARKS.has_storage(storage) else None


def restored(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
    if location != str(DEVICE):
        return None
    MARKS.add_storage(storage)
    return storage


# what was saved from DEVICE is loaded there, unless map_location says otherwise, as for CUDA
torch.serialization.register_package(0, location_of, restored)


@contextmanager
def marked_device() -> Iterator[None]:
    """Tensors are made on DEVICE, and raise where they meet those of the CPU."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch, "Generator", Generator))
        for module in (table, extension):
            stack.enter_context(patch.object(module, "memory_of", marked_memory_of))
        ops = stack.enter_context(Ops())
        stack.enter_context(Functions(ops))
        yield
