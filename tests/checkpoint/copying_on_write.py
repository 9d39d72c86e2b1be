"""Saves and training side by side, in an order that a test decides."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from held_disk import SECONDS
from saved_models import Net, train
from torch import Tensor

from torch_dynemb.checkpoint import SaveHandle
from torch_dynemb.files.disk import Disk


class AskingDisk(Disk):
    """Waits before every write until the test lets it go on."""

    def __init__(self) -> None:
        self._asked: queue.Queue[threading.Event] = queue.Queue()
        self._free = threading.Event()

    def write_at(self, file: int, data: memoryview, begin: int) -> int:
        if not self._free.is_set():
            answer = threading.Event()
            self._asked.put(answer)
            assert answer.wait(SECONDS)
        return super().write_at(file, data, begin)

    def next_write(self) -> threading.Event:
        """Waits for a write, which goes on when the event is set."""
        return self._asked.get(timeout=SECONDS)

    def ask_no_more(self) -> None:
        self._free.set()
        while True:
            try:
                self._asked.get_nowait().set()
            except queue.Empty:
                return


def train_while(handle: SaveHandle, disk: AskingDisk, model: Net, steps: range) -> range:
    """Makes a step before every third write, as long as there are steps; returns those made."""
    for number in steps:
        for _ in range(2):
            disk.next_write().set()
        write = disk.next_write()
        assert not handle.done()
        train(model, range(number, number + 1))
        write.set()
    disk.ask_no_more()
    return steps


class InThread:
    """A call in a thread."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._error: BaseException | None = None

        def run() -> None:
            try:
                call()
            except BaseException as error:
                self._error = error

        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def result(self) -> None:
        """Waits for its end, and raises what it has raised."""
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        if self._error is not None:
            raise self._error


def in_thread(call: Callable[[], object]) -> InThread:
    return InThread(call)


def until(condition: Callable[[], bool]) -> None:
    """Waits for something that another thread does."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def words_of(model: Any) -> list[Tensor]:
    """Return the copy-on-write tensors of all tables of a model."""
    return [
        words for module in model.modules_with_tables for words in module.group.rows.copy_on_write
    ]
