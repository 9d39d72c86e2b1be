"""Delta log at a URL: one object for each batch, named by its number."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import uuid
from collections.abc import Iterator

from torch_dynemb.changes.batch import COMMIT_BYTES, segment_file
from torch_dynemb.errors import InUseError, NewBaseNeededError
from torch_dynemb.files.locations import Url

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
        self._token = ""

    # -- writing -------------------------------------------------------------------------------

    def lock(self) -> None:
        """Take the log as its writer. A former one is refused from now on.

        Raises:
            OSError: the store fails.
        """
        if self._writes:
            return
        self.url.store.make_folder(str(self.url))
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
            NewBaseNeededError: the store has lost the log.
            OSError: the store fails, or has another batch of this number.
        """
        self.lock()
        self._check_owned()
        content, place = bytearray(data), self._batch(sequence)  # of the client, which may keep it
        if not self._conditional:
            self.url.store.put(place, content)
            return
        try:
            self.url.store.create(place, content)
        except FileExistsError as error:
            # the client repeats a request if its answer was lost
            if self._end_of(place) != bytes(content[-COMMIT_BYTES:]):
                raise FileExistsError(
                    errno.EEXIST,
                    "DeltaLog: this number was written before, by this log or another: call again",
                    place,
                ) from error

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
        self._remove([number for number in self._numbers() if number > sequence][::-1])

    def _remove(self, numbers: list[int]) -> None:
        self.url.store.remove_files([self._batch(number) for number in numbers])

    def _obeys_conditions(self) -> bool:
        store, probe = self.url.store, self._at(_PROBE)
        if not store.offers_create:
            return False
        created = 0
        for _ in range(3):  # one request may fail, before or after it took effect
            try:
                store.create(probe, b"")
            except FileExistsError:
                return True
            except OSError as error:
                if error.errno in (errno.EACCES, errno.EPERM):
                    raise
            else:
                created += 1
            if created == 2:
                break
        return False

    def _check_owned(self) -> None:
        """Raise InUseError if another writer has taken the log."""
        try:
            owner = json.loads(self.url.store.read(self._at(_EPOCH)))
        except (FileNotFoundError, ValueError) as error:
            raise NewBaseNeededError(
                f"DeltaLog: {self.url} has lost the log: close it, and attach it again",
                path=str(self.url),
            ) from error
        if owner["writer"] != self._token:
            raise InUseError(
                f"DeltaLog: {self.url} has another writer: process {owner['process']} on "
                f"{owner['host']} has attached to it later: close this log, or publish to another "
                "URL",
                path=str(self.url),
            )

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
