"""Log of one rank: its sink, its last batch, and its base."""

from __future__ import annotations

from collections.abc import Iterator

from torch_dynemb.changes.batch import Batch, Head, encoded
from torch_dynemb.delta_log.reader import batch_of, chain_after
from torch_dynemb.delta_log.recorded import Changed
from torch_dynemb.delta_log.sink import DeltaSink, LockingSink
from torch_dynemb.errors import InUseError, NewBaseNeededError
from torch_dynemb.files.tensor_file import raw


class OwnLog:
    """Batches of this rank.

    Args:
        sink: sink that keeps them.
        rank, ranks: rank of this process, and number of ranks that write.

    Attributes:
        sink: sink that keeps them.
        base: uuid of the checkpoint with which followers begin.
        base_sequence: number of the last commit that it includes.
        sequence: number of the last batch.
        chain: chain after it.
        published: number of the last commit, which a thread may still be writing.
        rank: rank of this process.
    """

    def __init__(self, sink: DeltaSink, rank: int, ranks: int) -> None:
        self.sink, self.rank, self._ranks = sink, rank, ranks
        self.base, self.base_sequence, self.sequence = "", 0, 0
        self.chain, self.published = 0, 0
        # chains after the batches that appends have sent with one number, and the chain before it
        self._sent, self._sent_number, self._chain_before = list[int](), 0, 0

    def begin_writing(self) -> None:
        """Lock the log for writing, if the sink supports that, and find its end.

        Raises:
            InUseError: it has another writer.
            DamagedFileError: a batch is damaged.
            ValueError: the last batch is of another rank.
            OSError: the sink fails.
        """
        if isinstance(self.sink, LockingSink):
            self.sink.lock()
        self._find_end()

    def stop_writing(self) -> None:
        """Stop being the writer."""
        if isinstance(self.sink, LockingSink):
            self.sink.close()

    def batches(self, from_sequence: int) -> Iterator[Batch]:
        """Iterate over the batches; see :meth:`DeltaSink.read`.

        Args:
            from_sequence: number of the first one.
        """
        return (batch_of(data) for data in self.sink.read(from_sequence))

    def bases(self) -> set[str]:
        """Return the uuids of the bases that batches name."""
        return {batch.head.base for batch in self.batches(0)}

    def sequence_of(self, uuid: str) -> int:
        """Return the number of the last commit that a checkpoint includes; 0 in an empty log.

        Args:
            uuid: uuid of the checkpoint.

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
            f"DeltaLog: the log has changes since the checkpoints {sorted(seen)}, but not since "
            f"{uuid}, the given one: give the base of the log, or publish to a new directory"
        )

    def append(self, changed: Changed, step: int) -> None:
        """Add a batch.

        Args:
            changed: changes in the batch.
            step: training step.

        Raises:
            Exception: error of the sink, which may have the batch: see :meth:`sent_batch`.
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
        if sequence != self._sent_number:
            self._sent, self._sent_number, self._chain_before = [], sequence, self.chain
        self._sent.append(chain)
        self.sink.append(raw(data), sequence)
        self.sequence, self.chain = sequence, chain

    def sent_batch(self) -> int | None:
        """Find which of the batches that were sent with the last number is in the log.

        An append that has raised may have taken effect all the same, even after the next one.

        Returns:
            Its place among them; None: none of them, or a part of one.

        Raises:
            InUseError: the log has a batch of another writer.
            OSError: the sink fails.
        """
        chain = chain_after(self.sink, self._sent_number)
        if chain is None:
            return None
        if chain not in self._sent:
            raise InUseError(
                "DeltaLog: the log has another writer, which has written commit "
                f"{self._sent_number}: close this log, and attach it again once the other writer "
                "has ended"
            )
        return max(place for place, sent in enumerate(self._sent) if sent == chain)

    def was_sent_last(self, sent: int) -> bool:
        """Return whether a batch of :meth:`sent_batch` is the last one that was sent."""
        return sent == len(self._sent) - 1

    def settle(self, sent: int | None) -> None:
        """Keep a batch of :meth:`sent_batch` as the last one, or remove what is left of any.

        Args:
            sent: the batch; None: none of them stays.

        Raises:
            OSError: the sink fails.
        """
        if sent is None:
            self.sequence, self.chain = self._sent_number - 1, self._chain_before
            self.sink.drop_after(self.sequence)
        else:
            self.sequence, self.chain = self._sent_number, self._sent[sent]

    def drop_after(self, sequence: int) -> None:
        """Remove batches at the end.

        Args:
            sequence: number of the last batch that stays.

        Raises:
            DamagedFileError: a batch that stays is damaged.
            OSError: the sink fails.
        """
        self.sink.drop_after(sequence)
        self._find_end()

    def _find_end(self) -> None:
        self.sequence, self.chain, self._sent_number = 0, 0, 0
        for batch in self.batches(0):
            if (batch.head.rank, batch.head.ranks) != (self.rank, self._ranks):
                raise ValueError(
                    f"DeltaLog: the log was written by rank {batch.head.rank} of "
                    f"{batch.head.ranks}, but this is rank {self.rank} of {self._ranks}: publish "
                    "to a new log when the number of ranks changes"
                )
            self.sequence, self.chain = batch.head.sequence, batch.chain


__all__ = ["OwnLog"]
