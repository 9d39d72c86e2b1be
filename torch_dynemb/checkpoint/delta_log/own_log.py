"""The log of one rank: where its batches go and end, and with which checkpoint it begins."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from torch_dynemb.checkpoint.delta_log.batch import Batch, Head, encoded
from torch_dynemb.checkpoint.delta_log.directory import DirectorySink
from torch_dynemb.checkpoint.delta_log.reader import batch_of
from torch_dynemb.checkpoint.delta_log.recorded import Changed
from torch_dynemb.checkpoint.delta_log.sink import DeltaSink
from torch_dynemb.checkpoint.files.tensor_file import raw
from torch_dynemb.checkpoint.plain_torch import plain_torch
from torch_dynemb.errors import NewBaseNeededError


class OwnLog:
    """The batches of this rank.

    Args:
        sink: that keeps them.
        rank, ranks: of this process, and how many write.

    Attributes:
        sink: that keeps them.
        base: uuid of the checkpoint that followers begin with.
        base_sequence: of the commit whose content it has.
        sequence: of the last batch.
        chain: after it.
        rank: of this process.
    """

    def __init__(self, sink: DeltaSink, rank: int, ranks: int) -> None:
        self.sink, self.rank, self._ranks = sink, rank, ranks
        self.base, self.base_sequence, self.sequence = "", 0, 0
        self.chain = 0

    def begin_writing(self) -> None:
        """Becomes the only writer, where the sink can tell, and finds the end.

        Raises:
            InUseError: there is another writer.
            DamagedFileError: a batch is damaged.
            ValueError: the last batch is of another rank.
            OSError: the sink fails.
        """
        if isinstance(self.sink, DirectorySink):
            self.sink.lock()
        self._find_end()

    def stop_writing(self) -> None:
        """Lets others write."""
        if isinstance(self.sink, DirectorySink):
            self.sink.close()

    def batches(self, from_sequence: int) -> Iterator[Batch]:
        """The batches that are there; see :meth:`DeltaSink.read`.

        Args:
            from_sequence: number of the first one that is wanted.
        """
        return (batch_of(data) for data in self.sink.read(from_sequence))

    def bases(self) -> set[str]:
        """The uuids of the checkpoints that batches say they follow."""
        return {batch.head.base for batch in self.batches(0)}

    def sequence_of(self, uuid: str) -> int:
        """Number of the commit whose content a checkpoint has; 0 in an empty log.

        Args:
            uuid: of the checkpoint.

        Raises:
            NewBaseNeededError: the log begins with another one; it is a ValueError.
        """
        seen = set()
        for batch in self.batches(0):
            if batch.head.base == uuid:
                return batch.head.base_sequence
            seen.add(batch.head.base)
        if not seen:
            return 0
        raise NewBaseNeededError(
            f"DeltaLog: the log has changes since the checkpoints {sorted(seen)}, and not since "
            f"{uuid}, the given one: give the base of the log, or publish to a new directory"
        )

    def append(self, changed: Changed, step: int) -> None:
        """Adds a batch.

        Args:
            changed: what it has.
            step: of training.

        Raises:
            Exception: what the sink raises; :meth:`drop_after` takes away what it may have kept.
        """
        sequence = self.sequence + 1
        head = Head(
            self.rank,
            self._ranks,
            0,
            self.base,
            self.base_sequence,
            sequence,
            step,
            0,
            self.chain,
        )
        data, chain = encoded(head, changed.records())
        self.sink.append(raw(data), sequence)
        self.sequence, self.chain = sequence, chain

    def drop_after(self, sequence: int) -> None:
        """Takes batches at the end away.

        Args:
            sequence: batches up to this number stay.

        Raises:
            DamagedFileError: a batch that stays is damaged.
            OSError: the sink fails.
        """
        self.sink.drop_after(sequence)
        self._find_end()

    def _find_end(self) -> None:
        self.sequence, self.chain = 0, 0
        for batch in self.batches(0):
            if (batch.head.rank, batch.head.ranks) != (self.rank, self._ranks):
                raise ValueError(
                    f"DeltaLog: the log was written by rank {batch.head.rank} of "
                    f"{batch.head.ranks}, and this is rank {self.rank} of {self._ranks}: publish "
                    "to a new log when the number of ranks changes"
                )
            self.sequence, self.chain = batch.head.sequence, batch.chain


class Writing:
    """A thread that writes one batch.

    Args:
        log: that gets the batch.
        changed: what the batch has.
        step: of training.
    """

    def __init__(self, log: OwnLog, changed: Changed, step: int) -> None:
        self._error: BaseException | None = None
        # not Thread.join(): in Python 3.11 a Ctrl-C in it makes the thread look like one that has
        # ended
        self._ended = threading.Event()

        @plain_torch()
        def write() -> None:
            try:
                log.append(changed, step)
            except BaseException as error:
                # without the frames, which have the copies
                self._error = error.with_traceback(None)
            finally:
                self._ended.set()

        # no daemon: a program that ends waits for what it has published
        threading.Thread(target=write, name="delta log", daemon=False).start()

    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self._ended.is_set() and self._error is not None

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            Exception: what has made it fail.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error


__all__ = ["OwnLog", "Writing"]
