"""The code of a package with its constants, ready to run."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import TypeAlias

import torch
from torch import Tensor

from torch_dynemb.serving.file_tables import OpenedFile
from torch_dynemb.serving.packages.live_package import LivePackage
from torch_dynemb.serving.packages.memory import ConstantMemory

Loader: TypeAlias = torch._C._aoti.AOTIModelPackageLoader


class Loaded:
    """Code and constants of a package; freed when the last run that uses it has ended.

    Args:
        loader: of torch, with the compiled code.
        memory: of its constants; None if the code has copies of them on a GPU.
        live: updates of its tables that take updates.
        dense: tensors of the dense state, by name.
        idle: list that the loader returns to when it is freed.
        runners: how many threads the loader runs at the same time.
        unlocks: whether lookups release Python's lock.
        opened: uses of the files of its rows.

    Attributes:
        running: entered by each run. If lookups release Python's lock, a further thread must wait
            here: in the loader it would keep the lock, which the others need.
    """

    def __init__(
        self,
        loader: Loader,
        memory: ConstantMemory | None,
        live: LivePackage,
        dense: dict[str, Tensor],
        idle: list[Loader],
        runners: int,
        unlocks: bool,
        opened: Collection[OpenedFile] = (),
    ) -> None:
        self.opened = opened
        self.loader, self.memory, self.live, self.dense = loader, memory, live, dense
        self.running: AbstractContextManager[object] = (
            threading.Semaphore(runners) if unlocks else nullcontext()
        )
        weakref.finalize(self, idle.append, loader).atexit = False


__all__ = ["Loaded", "Loader"]
