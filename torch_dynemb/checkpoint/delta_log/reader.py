"""Reads the commits of a delta log: what all ranks have written, in order, with none left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from os import PathLike, fspath
from pathlib import Path

from torch_dynemb.checkpoint.delta_log.batch import (
    Batch,
    BrokenBatchError,
    as_tensor,
    chain_of,
    decoded,
)
from torch_dynemb.checkpoint.delta_log.directory import DirectorySink, rank_folders
from torch_dynemb.checkpoint.delta_log.sink import DeltaSink, EndingSink
from torch_dynemb.errors import DamagedFileError, NewBaseNeededError


def batch_of(data: bytes | bytearray | memoryview) -> Batch:
    """A batch as a sink keeps it, checked.

    Args:
        data: what :meth:`DeltaSink.read` gives.

    Raises:
        DamagedFileError: it is damaged.
        UnsupportedFormatError: it is of another format version.
    """
    try:
        return decoded(as_tensor(data))
    except BrokenBatchError as error:
        raise DamagedFileError(f"delta log: {error}") from error


class LogReader:
    """Where somebody is in a delta log.

    Args:
        sinks: gives those of all ranks; none: the log is not there yet.
        base: uuid of the checkpoint to go on from; None: ``sequence`` says it.
        sequence: number of the commit to go on from.
        chains: of the batches of that commit, by rank, as far as they are known.

    Attributes:
        sequence: number of the last commit that was read; None: the base has not been found yet,
            because nothing has been written.
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
        self._chains = dict(chains or {})

    def read(self, until: int | None = None) -> Iterator[list[Batch]]:
        """The batches of all ranks, commit after commit, as far as all have written them.

        :meth:`taken` is called before the next one is asked for.

        Args:
            until: number of the last commit that is wanted; None: all that are there.

        Raises:
            NewBaseNeededError: the log does not go on from here.
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
        """Goes on after a commit.

        Args:
            batches: of the commit, as :meth:`read` gave them.
        """
        self._chains = {rank: batch.chain for rank, batch in enumerate(batches)}
        self.sequence = batches[0].head.sequence

    def _following(self, rank: int, batch: Batch) -> Batch:
        """A batch that must be the next one of a rank."""
        assert self.sequence is not None
        head = batch.head
        if (head.rank, head.ranks) != (rank, len(self._sinks)):
            raise NewBaseNeededError(
                f"delta log: rank {rank} of {len(self._sinks)} has a batch that rank {head.rank} "
                f"of {head.ranks} has written: give the logs of all ranks, in their order"
            )
        if head.sequence != self.sequence + 1:
            raise NewBaseNeededError(
                f"delta log: commit {self.sequence} was read last, but the next one that is there "
                f"is {head.sequence}: those between were dropped or are lost. Load the newest "
                "base, and follow from there"
            )
        if head.previous != self._chains.get(rank, head.previous):
            raise NewBaseNeededError(
                f"delta log: commit {head.sequence} does not follow commit {self.sequence} as it "
                "was read: the log was rolled back and went on otherwise, or it is another log. "
                "Load the base, and follow from there"
            )
        return batch

    def _check_end(self) -> None:
        """Raises NewBaseNeededError where what was read last is there no longer."""
        if not self.sequence:  # nothing was read
            return
        for rank, sink in enumerate(self._sinks):
            chain = _chain_after(sink, self.sequence)
            if chain is None or chain != self._chains.get(rank, chain):
                raise NewBaseNeededError(
                    f"delta log: commit {self.sequence} was read last, and it is there no longer, "
                    "or is another one: the log was rolled back. Load the base, and follow from "
                    "there"
                )

    def _start(self) -> int | None:
        """Number of the commit that the base has the content of; None: the log is empty."""
        seen: set[str] = set()
        for data in self._sinks[0].read(0):
            head = batch_of(data).head
            if head.base == self._base:
                return head.base_sequence
            seen.add(head.base)
        if not seen:
            return None
        raise NewBaseNeededError(
            f"delta log: it has changes since the checkpoints {sorted(seen)}, and not since "
            f"{self._base}: load one of these, and follow from there"
        )


def _chain_after(sink: DeltaSink, sequence: int) -> int | None:
    """The chain after a batch; None: it is not there."""
    if isinstance(sink, EndingSink):
        end = sink.ending(sequence)
    else:
        end = next(iter(sink.read(sequence)), None)
    return None if end is None else chain_of(end, sequence)


def sinks_of(log: object) -> Callable[[], Sequence[DeltaSink]]:
    """How to find the sinks of all ranks of a log.

    Args:
        log: the directory of one, or a sink, or the sinks of all ranks.

    Raises:
        TypeError: it is none of these.
    """
    if isinstance(log, str | PathLike):
        path = Path(fspath(log))

        def find() -> list[DeltaSink]:
            folders = rank_folders(path)
            there = all(folder.is_dir() for folder in folders)
            return [DirectorySink(folder) for folder in folders] if there else []

        return find
    given: list[DeltaSink] = []
    for sink in log if isinstance(log, list | tuple) else [log]:
        if not isinstance(sink, DeltaSink):
            raise TypeError(
                f"delta log: log is {log!r}, expected the directory of a delta log, a sink with "
                "append, read, truncate and drop_after, or a list of the sinks of all ranks"
            )
        given.append(sink)
    return lambda: given


__all__ = ["LogReader", "batch_of", "sinks_of"]
