"""Writes of large files past the page cache, for saves beside training.

A write through the page cache takes the CPU for as long as a copy into new pages takes: for most of
a save. A write past it takes the CPU for a tenth of that, and lets the thread sleep. But it needs
an aligned address, offset and size. So bytes are collected in aligned windows of
:data:`WINDOW_BYTES`, one for each place of the file that grows. :meth:`DirectDisk.room_at` lets a
caller make them there. Where two places meet inside a page, their bytes go through the page cache
when the file ends.
"""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_dynemb import ops
from torch_dynemb.files.disk import Disk
from torch_dynemb.files.locations import Location
from torch_dynemb.files.tensor_file import raw

_ALIGNMENT = 4096
WINDOW_BYTES = (4 << 20) + _ALIGNMENT  # for rows read at once, and the page that they begin in


@dataclass
class _Window:
    """Consecutive bytes that grow.

    Attributes:
        window: aligned memory, uint8 [WINDOW_BYTES].
        base: offset of the window in the file, aligned.
        begin: offset of the first byte in the window.
        end: offset after the last byte.
    """

    window: Tensor
    base: int
    begin: int
    end: int


class _DirectFile:
    """An open file.

    Attributes:
        runs: by their end.
        edges: bytes of partial pages, by offset; written when the file ends.
        direct: whether writes go past the page cache.
        refused: whether the file system has refused such writes.
    """

    def __init__(self) -> None:
        self.runs: dict[int, _Window] = {}
        self.edges: dict[int, bytes] = {}
        self.direct = self.refused = False


class DirectDisk(Disk):
    """A local file system, with writes past the page cache where it can do them.

    Files smaller than a window go through the page cache.

    Args:
        disk: the file system. Each change goes through one of its methods.
    """

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self._files: dict[int, _DirectFile] = {}
        self._spare: list[Tensor] = []

    def make_folder(self, path: Location) -> None:
        self._disk.make_folder(path)

    def create(self, path: Location) -> int:
        file = self._disk.create(path)
        self._files[file] = _DirectFile()
        return file

    def write_at(self, file: int, data: memoryview, begin: int) -> int:
        """Write some bytes, each once. Some stay in a window until the file ends."""
        if len(data) == 0:
            return 0
        of = self._files[file]
        run = of.runs.pop(begin, None) or self._new_run(begin)
        values = torch.frombuffer(data, dtype=torch.uint8)  # it copies without Python's lock
        done = 0
        while done < len(data):
            at = run.end - run.base
            part = values[done : done + WINDOW_BYTES - at]
            window = run.window[at : at + part.numel()]
            if part.data_ptr() != window.data_ptr():
                window.copy_(part)
            run.end += part.numel()
            done += part.numel()
            if run.end == run.base + WINDOW_BYTES:
                self._write_pages(file, of, run, past_cache=True)
        of.runs[run.end] = run
        return len(data)

    def room_at(self, file: int, begin: int, size: int) -> Tensor | None:
        """Return the part of a window that the bytes would be copied to.

        It is None for bytes that do not fit into a window.
        """
        of = self._files[file]
        run = of.runs.get(begin)
        if size > WINDOW_BYTES - begin % _ALIGNMENT:
            return None
        if run is None:
            run = of.runs[begin] = self._new_run(begin)
        elif run.end - run.base + size > WINDOW_BYTES:
            self._write_pages(file, of, run, past_cache=True)
        at = run.end - run.base
        return run.window[at : at + size]

    def begin_sync(self, file: int, begin: int, size: int) -> None:
        """Do nothing: a window starts its way to the disk when it is full."""

    def end(self, file: int) -> None:
        """Write what is left in windows.

        Raises:
            OSError: the disk is full, or fails.
        """
        of = self._files[file]
        left = sum(run.end - run.begin for run in of.runs.values())
        past_cache = of.direct or left >= WINDOW_BYTES
        while of.runs:
            run = of.runs.pop(next(iter(of.runs)))
            self._write_pages(file, of, run, past_cache=past_cache)
            if run.begin < run.end:
                of.edges[run.begin] = bytes(raw(run.window[: run.end - run.base]))
            self._spare.append(run.window)
        self._set_direct(file, of, False)
        for begin, edge in of.edges.items():
            self._write_whole(file, of, memoryview(edge), begin)
        of.edges.clear()
        self._disk.end(file)

    def sync(self, file: int) -> None:
        self._disk.sync(file)

    def close(self, file: int) -> None:
        del self._files[file]
        self._disk.close(file)

    def sync_folder(self, path: Location) -> None:
        self._disk.sync_folder(path)

    def rename(self, source: Location, target: Location) -> None:
        self._disk.rename(source, target)

    def remove(self, path: Location) -> None:
        self._disk.remove(path)

    def _new_run(self, begin: int) -> _Window:
        window = self._spare.pop() if self._spare else ops.reserve([WINDOW_BYTES], torch.uint8)
        return _Window(window, begin // _ALIGNMENT * _ALIGNMENT, begin, begin)

    def _write_pages(self, file: int, of: _DirectFile, run: _Window, *, past_cache: bool) -> None:
        """Write the whole pages of a window. What follows them goes to its beginning."""
        first = min(-(-run.begin // _ALIGNMENT) * _ALIGNMENT, run.end)
        last = max(run.end // _ALIGNMENT * _ALIGNMENT, first)
        if run.begin < first:
            of.edges[run.begin] = bytes(raw(run.window[run.begin - run.base : first - run.base]))
        if first < last:
            self._set_direct(file, of, past_cache)
            pages = run.window[first - run.base : last - run.base]
            self._write_whole(file, of, raw(pages), first)
        if last > run.base:
            rest = run.window[last - run.base : run.end - run.base]
            run.window[: rest.numel()].copy_(rest)
        run.base = run.begin = last

    def _write_whole(self, file: int, of: _DirectFile, data: memoryview, begin: int) -> None:
        done = 0
        while done < len(data):
            try:
                count = self._disk.write_at(file, data[done:], begin + done)
            except OSError as error:
                if error.errno != errno.EINVAL or not of.direct:
                    raise
                count, of.refused = 0, True  # it asks for a larger alignment
            done += count
            if of.direct and count % _ALIGNMENT != 0:
                of.refused = True  # the rest is not aligned
            self._set_direct(file, of, of.direct)
        if not of.direct:
            self._disk.begin_sync(file, begin, len(data))

    def _set_direct(self, file: int, of: _DirectFile, direct: bool) -> None:
        """Have writes go past the page cache, unless the file system refuses that."""
        direct = direct and not of.refused
        if direct == of.direct:
            return
        flags = fcntl.fcntl(file, fcntl.F_GETFL)
        flags = flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT
        try:
            fcntl.fcntl(file, fcntl.F_SETFL, flags)
            of.direct = direct
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            of.refused = True


__all__ = ["WINDOW_BYTES", "DirectDisk"]
