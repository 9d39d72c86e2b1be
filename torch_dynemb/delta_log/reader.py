"""Reader of the commits of a delta log: complete on all ranks, in order, without gaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike
from typing import NamedTuple

from torch_dynemb.changes.batch import (
    Batch,
    BrokenBatchError,
    as_tensor,
    chain_of,
    decoded,
)
from torch_dynemb.delta_log.log_folder import rank_sinks
from torch_dynemb.delta_log.sink import DeltaSink, EndingSink
from torch_dynemb.errors import DamagedFileError, NewBaseNeededError
from torch_dynemb.files.locations import location_of


class LogPosition(NamedTuple):
    """Position of a model in the log that it is published to; from :meth:`DeltaLog.position`.

    Attributes:
        base: uuid of the checkpoint that the log begins with.
        sequence: number of the last commit; None if there is none since the base.
        chain: chain after that commit, which is unique to the log.
        rank: rank that wrote its batch.
        tables: columns of the tables of the model, by their names in the log.
    """

    base: str
    sequence: int | None
    chain: int
    rank: int
    tables: dict[str, int]


def batch_of(data: bytes | bytearray | memoryview) -> Batch:
    """Decode and check a batch from a sink.

    Args:
        data: result of :meth:`DeltaSink.read`.

    Raises:
        DamagedFileError: it is damaged.
        UnsupportedFormatError: it has another format version.
    """
    try:
        return decoded(as_tensor(data))
    except BrokenBatchError as error:
        raise DamagedFileError(f"delta log: {error}") from error


class LogReader:
    """Reader with a position in a delta log.

    Args:
        sinks: returns the sinks of all ranks; empty if the log does not exist yet.
        base: uuid of the checkpoint to start from; None: ``sequence`` is given.
        sequence: number of the commit to start from.
        chains: chains after that commit, by rank, as far as they are known.

    Attributes:
        sequence: number of the last commit that was read; None if the base was not found yet,
            because nothing is written.
        chains: chains after that commit, by rank, as far as they are known.
    """

    def __init__(
        self,
        sinks: Callable[[], Sequence[DeltaSink]],
        *,
        base: str | None,
        sequence: int | None,
        chains: Mapping[int, int] | None = None,
    ) -> None:
        self._find_sinks, self._sinks = sinks, list[DeltaSink]()
        self._base, self.sequence = base, sequence
        self.chains = dict(chains or {})

    def read(self, until: int | None = None) -> Iterator[list[Batch]]:
        """Iterate over commits: the batches of all ranks, as far as all have written them.

        Call :meth:`taken` before the next iteration.

        Args:
            until: number of the last commit; None: all available ones.

        Raises:
            NewBaseNeededError: the log does not continue from here.
            DamagedFileError: a batch is damaged.
            OSError: the sink fails.
        """
        if not self._sinks:
            self._sinks = list(self._find_sinks())
        if not self._sinks:
            return
        if self.sequence is None:
            self.sequence = self._start()
        if self.sequence is None:
            return
        streams = [sink.read(self.sequence + 1) for sink in self._sinks]
        while until is None or self.sequence < until:
            batches = []
            for rank, stream in enumerate(streams):
                data = next(stream, None)
                if data is None:
                    self._check_end()
                    return
                batches.append(self._following(rank, batch_of(data)))
            yield batches

    def taken(self, batches: Sequence[Batch]) -> None:
        """Advance past a commit.

        Args:
            batches: batches of the commit, from :meth:`read`.
        """
        self.chains = {rank: batch.chain for rank, batch in enumerate(batches)}
        self.sequence = batches[0].head.sequence

    def _following(self, rank: int, batch: Batch) -> Batch:
        """Check that a batch is the next one of a rank. Return it."""
        assert self.sequence is not None
        head = batch.head
        if (head.rank, head.ranks) != (rank, len(self._sinks)):
            raise NewBaseNeededError(
                f"delta log: rank {rank} of {len(self._sinks)} has a batch of rank {head.rank} "
                f"of {head.ranks}: give the logs of all ranks, in their order"
            )
        if head.sequence != self.sequence + 1:
            raise NewBaseNeededError(
                f"delta log: commit {self.sequence} was read last, but the next one available "
                f"is {head.sequence}: those between were dropped or lost. Load the newest "
                "base, or one that DeltaLog.save writes now, and follow from there"
            )
        if head.previous != self.chains.get(rank, head.previous):
            raise NewBaseNeededError(
                f"delta log: commit {head.sequence} does not follow commit {self.sequence} as it "
                "was read: the log was rolled back and continued, or it is another log. "
                "Load the base, and follow from there"
            )
        return batch

    def _check_end(self) -> None:
        """Raise NewBaseNeededError if the last commit that was read has disappeared."""
        if not self.sequence:  # nothing was read
            return
        for rank, sink in enumerate(self._sinks):
            chain = chain_after(sink, self.sequence)
            if chain is None or chain != self.chains.get(rank, chain):
                raise NewBaseNeededError(
                    f"delta log: commit {self.sequence} was read last, but it was removed "
                    "or replaced: the log was rolled back. Load the base, and follow from "
                    "there"
                )

    def _start(self) -> int | None:
        """Return the number of the last commit that the base includes; None if the log is empty."""
        seen: set[str] = set()
        for data in self._sinks[0].read(0):
            head = batch_of(data).head
            if head.base == self._base:
                return head.base_sequence
            seen.add(head.base)
        if not seen:
            return None
        raise NewBaseNeededError(
            f"delta log: it has changes since the checkpoints {sorted(seen)}, but not since "
            f"{self._base}: load one of these, and follow from there"
        )


def chain_after(sink: DeltaSink, sequence: int) -> int | None:
    """Return the chain after a batch; None if it does not exist, or is not whole.

    Args:
        sink: sink that keeps it.
        sequence: number of the batch.
    """
    if isinstance(sink, EndingSink):
        end = sink.ending(sequence)
    else:
        end = next(iter(sink.read(sequence)), None)
    return None if end is None else chain_of(end, sequence)


def sinks_of(log: object) -> Callable[[], Sequence[DeltaSink]]:
    """Return a function that finds the sinks of all ranks of a log.

    Args:
        log: directory or URL of a log, or a sink, or the sinks of all ranks.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(log, str | PathLike):
        place = location_of("delta log", log)
        return lambda: rank_sinks(place)
    given: list[DeltaSink] = []
    for sink in log if isinstance(log, list | tuple) else [log]:
        if not isinstance(sink, DeltaSink):
            raise TypeError(
                f"delta log: log is {log!r}, expected the directory of a delta log, a sink with "
                "append, read, truncate and drop_after, or a list of the sinks of all ranks"
            )
        given.append(sink)
    return lambda: given


__all__ = ["LogPosition", "LogReader", "batch_of", "chain_after", "sinks_of"]
