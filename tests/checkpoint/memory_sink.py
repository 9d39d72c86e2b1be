"""A sink of a delta log that keeps batches in a dict, and fails on request."""

from __future__ import annotations

from collections.abc import Iterator

from torch_dynemb.delta_log import DeltaSink


class MemorySink(DeltaSink):
    """Batches by number.

    Attributes:
        batches: that are kept.
        error: that the next append raises; None: it does not.
        kept: an append that raises keeps its batch all the same.
    """

    def __init__(self) -> None:
        self.batches: dict[int, bytes] = {}
        self.error: Exception | None = None
        self.kept = False

    def append(self, data: memoryview, sequence: int) -> None:
        assert sequence == max(self.batches, default=sequence - 1) + 1
        if self.error is not None:
            error, self.error = self.error, None
            if self.kept:
                self.batches[sequence] = bytes(data)
            raise error
        self.batches[sequence] = bytes(data)

    def read(self, from_sequence: int) -> Iterator[bytes]:
        for number in sorted(self.batches):
            if number >= from_sequence:
                yield self.batches[number]

    def truncate(self, before: int) -> None:
        self.batches = {number: data for number, data in self.batches.items() if number >= before}

    def drop_after(self, sequence: int) -> None:
        self.batches = {n: data for n, data in self.batches.items() if n <= sequence}
