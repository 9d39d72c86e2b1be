"""Delta log at a URL: one object for each batch, named by its number."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import uuid
from collections.abc import Iterator
from typing import Any

from torch_dynemb.checkpoint.delta_log.batch import COMMIT_BYTES
from torch_dynemb.checkpoint.entries import segment_file
from torch_dynemb.checkpoint.file_systems.locations import Url
from torch_dynemb.errors import InUseError

_NAME = re.compile(r"(\d{20})\.delta")
_PROBE = "conditional"  # object that shows whether the store obeys a conditional PUT
_EPOCH = "epoch"  # object that names the writer


class ObjectSink:
    """Batches of one rank as objects of a store; see :class:`DeltaSink`.

    An object appears as a whole. A store has no locks: the writer that has attached last is named
    in an object, which every append reads first. Between this and the batch, another writer may
    attach and append: a conditional PUT then fails, because its number is written. A store without
    conditions does not notice that.

    Args:
        url: URL of the rank's folder.
    """

    def __init__(self, url: Url) -> None:
        self.url = url
        self._writes = False
        self._conditional = False
        self._lost: InUseError | None = None  # another writer has written a number
        self._token = ""
        # number -> ends of batches that an append may have left, although it has failed
        self._tried: dict[int, set[bytes]] = {}

    # -- writing -------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the log as its writer. A former one is refused from now on.

        Raises:
            OSError: the store fails.
        """
        if self._writes:
            return
        self.url.store.make_folder(str(self.url))
        self._lost = None
        self._tried.clear()
        self._conditional = self._obeys_conditions()
        self._token = uuid.uuid4().hex
        owner = {"writer": self._token, "process": os.getpid(), "host": socket.gethostname()}
        self.url.store.put(self._at(_EPOCH), json.dumps(owner).encode())
        self._writes = True

    def close(self) -> None:
        """Stop being the writer."""
        self._writes = False

    def append(self, data: memoryview, sequence: int) -> None:
        """Append a batch; see :meth:`DeltaSink.append`.

        Args:
            data: the batch, uint8.
            sequence: number of the batch.

        Raises:
            InUseError: another writer has taken the log.
            OSError: the store fails.
        """
        self.lock()
        self._check_owned()
        content, place = bytearray(data), self._batch(sequence)
        end = bytes(content[-COMMIT_BYTES:])
        tried = self._tried.setdefault(sequence, set())
        tried.add(end)
        if not self._conditional:
            self.url.store.put(place, content)
        else:
            try:
                self.url.store.create(place, content)
            except FileExistsError:
                self._settle(place, content, end, tried)
        self._tried.clear()

    def _settle(self, place: str, content: bytearray, end: bytes, tried: set[bytes]) -> None:
        """Find the writer of a number: this append, one before it, or another log."""
        found = self._end_of(place)
        if found == end:  # the client has repeated a request
            return
        if found in tried:  # an append before, which seemed to have failed
            self.url.store.remove_files([place])
            self.url.store.create(place, content)
            return
        raise self._taken(f"another writer has written {place}")

    def truncate(self, before: int) -> None:
        """Drop batches; see :meth:`DeltaSink.truncate`.

        Args:
            before: number of the first batch that must stay.

        Raises:
            OSError: the store fails.
        """
        numbers = self._numbers()
        self._remove([number for number in numbers[:-1] if number < before])

    def drop_after(self, sequence: int) -> None:
        """Remove batches at the end; see :meth:`DeltaSink.drop_after`.

        Args:
            sequence: number of the last batch that stays.

        Raises:
            InUseError: another writer has taken the log.
            OSError: the store fails.
        """
        self.lock()
        self._check_owned()
        later = [number for number in self._numbers() if number > sequence]
        for number in later:
            tried = self._tried.get(number)
            if tried is not None and self._end_of(self._batch(number)) not in tried:
                raise self._taken(f"another writer has written {self._batch(number)}")
        self._remove(later[::-1])

    def _remove(self, numbers: list[int]) -> None:
        self.url.store.remove_files([self._batch(number) for number in numbers])

    def _obeys_conditions(self) -> bool:
        store, probe = self.url.store, self._at(_PROBE)
        if not store.offers_create:
            return False
        try:
            for _ in range(2):
                store.create(probe, b"")
        except FileExistsError:
            return True
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise
            return False
        return False

    def _check_owned(self) -> None:
        """Raise InUseError if another writer has taken the log."""
        if self._lost is not None:
            raise self._lost
        owner = self._owner()
        if owner.get("writer") != self._token:
            other = f"process {owner.get('process')} on {owner.get('host')}"
            raise self._taken(f"{other} has attached to it later")

    def _owner(self) -> dict[str, Any]:
        try:
            owner = json.loads(self.url.store.read(self._at(_EPOCH)))
        except (FileNotFoundError, ValueError):
            return {}
        return owner if isinstance(owner, dict) else {}

    def _taken(self, reason: str) -> InUseError:
        self._lost = InUseError(
            f"DeltaLog: {self.url} has another writer: {reason}: close this log, or publish to "
            "another URL",
            path=str(self.url),
        )
        return self._lost

    # -- reading -------------------------------------------------------------------------------

    def read(self, from_sequence: int) -> Iterator[bytes]:
        """Iterate over the batches; see :meth:`DeltaSink.read`.

        Args:
            from_sequence: number of the first batch.

        Raises:
            OSError: the store fails.
        """
        number = from_sequence
        # no listing where the batch before is there: the one wanted does not exist yet
        if number < 2 or not self._exists(number):
            if number > 1 and self._exists(number - 1):
                return
            number = next((of for of in self._numbers() if of >= from_sequence), 0)
        while number > 0:
            try:
                data = self.url.store.read(self._batch(number))
            except FileNotFoundError:
                return
            yield data
            number += 1

    def ending(self, sequence: int) -> bytes | None:
        """Return the end of a batch; see :meth:`EndingSink.ending`.

        Args:
            sequence: number of the batch.

        Raises:
            OSError: the store fails.
        """
        return self._end_of(self._batch(sequence))

    def _end_of(self, place: str) -> bytes | None:
        try:
            return self.url.store.read(place, -COMMIT_BYTES)
        except FileNotFoundError:
            return None

    def _exists(self, number: int) -> bool:
        return self.url.store.is_file(self._batch(number))

    def _numbers(self) -> list[int]:
        """List the numbers of all batches, ascending."""
        found = (_NAME.fullmatch(name) for name in self.url.store.names(str(self.url)))
        return sorted(int(match[1]) for match in found if match)

    def _batch(self, number: int) -> str:
        return self._at(segment_file(number))

    def _at(self, name: str) -> str:
        return str(self.url / name)


__all__ = ["ObjectSink"]
