"""Changes of the hashes of rows by one writer, which notices later writers and lost changes."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch_dynemb.delta_log.redis.nodes import Command, Nodes
from torch_dynemb.delta_log.redis.row_keys import key_of_staged
from torch_dynemb.delta_log.redis.row_scripts import LOCK, TAKE
from torch_dynemb.errors import InUseError, NewBaseNeededError

_KEYS = 1024  # of one message


@dataclass
class _Changes:
    """Number of changes of a hash: as answered, and as sent."""

    least: int = 0
    most: int = 0


class RowWriter:
    """The writer of some hashes; see :mod:`torch_dynemb.delta_log.redis.row_scripts`.

    Args:
        nodes: servers that have them.
        name: key of the first hash, which names the writer: this one, from here on.
        owner: name of the rows in errors.
    """

    def __init__(self, nodes: Nodes, name: str, owner: str) -> None:
        self._nodes, self._name, self._owner = nodes, name, owner
        self._uuid = uuid.uuid4().hex
        self._writer = self._lock(0, "")
        self._changes: dict[str, _Changes] = {name: _Changes()}

    @property
    def _epoch(self) -> int:
        return int(self._writer.split()[0])

    def _lock(self, epoch: int, writer: str) -> str:
        (found,) = self._nodes.answers(
            "RedisRows", [Command((self._name,), (epoch, self._uuid, writer), LOCK)]
        )
        if isinstance(found, Exception):
            raise found
        if not found:
            raise self._taken()
        return bytes(found).decode()

    def take(self, keys: Iterable[str], how: Literal["keep", "clear", "drop"]) -> dict[str, bytes]:
        """Take hashes from an earlier writer.

        Args:
            keys: of the hashes.
            how: ``"keep"``: rows stay. ``"clear"``: hashes become empty. ``"drop"``: hashes are
                removed.

        Returns:
            The position of each hash; empty: it has none.
        """
        wanted, positions = list(keys), dict[str, bytes]()
        while True:
            later = 0
            for begin in range(0, len(wanted), _KEYS):
                some = wanted[begin : begin + _KEYS]
                args = (self._writer, self._epoch, how)
                calls = [Command((key, key_of_staged(key)), args, TAKE) for key in some]
                for key, found in zip(some, self._answers(calls), strict=True):
                    later = max(later, int((found[0] or b"0").split()[0]))
                    positions[key] = found[1]
                    self._changes[key] = _Changes()
            if later == 0:
                return positions
            # another program has come later, or the first hash was lost with its epoch
            self._writer = self._lock(later + 1, self._writer)
            self._changes[self._name] = _Changes()

    def change(self, script: str, values: Mapping[str, Sequence[Any]]) -> None:
        """Change hashes, each by one script.

        Args:
            script: of :mod:`torch_dynemb.delta_log.redis.row_scripts`, with a count of changes.
            values: further arguments of the script by key.

        Raises:
            InUseError: another program has called follow or load later.
            NewBaseNeededError: a node has lost changes.
            OSError, RuntimeError: a node fails; its hashes may or may not be changed.
        """
        calls = []
        for key, more in values.items():
            changes = self._changes[key]
            args = (self._writer, changes.least, changes.most, *more)
            calls.append(Command((key, key_of_staged(key)), args, script))
        for key in values:
            self._changes[key].most += 1
        answers = self._nodes.answers("RedisRows", calls)
        for key, answer in zip(values, answers, strict=True):
            if answer is None:
                self._changes[key].least = self._changes[key].most
        for answer in self._checked(answers):
            if answer is not None:
                raise self._refused(bytes(answer))

    def _answers(self, calls: Sequence[Command]) -> list[Any]:
        return self._checked(self._nodes.answers("RedisRows", calls))

    def _checked(self, answers: list[Any]) -> list[Any]:
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers

    def _refused(self, found: bytes) -> Exception:
        """Return the error of a script that has found another writer, or too few changes."""
        epoch, *_ = found.split() or [b"0"]
        if epoch.isdigit() and int(epoch) > self._epoch:
            return self._taken()
        return NewBaseNeededError(
            f"{self._owner} has lost its last writes, such as by a restart without its last "
            "data: call follow(log) again, which goes on from the commit that all nodes have"
        )

    def _taken(self) -> InUseError:
        return InUseError(
            f"{self._owner} has another writer, which has called follow or load later: stop one "
            "of both programs"
        )


__all__ = ["RowWriter"]
